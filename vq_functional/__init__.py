"""KV-cache compression as pure functions over immutable states."""

from vq_functional.codebook.qjl import qjl, qjl_codec
from vq_functional.codebook.turboquant_mse import turboquant_mse, turboquant_mse_codec
from vq_functional.codebook.turboquant_rvq import turboquant_rvq, turboquant_rvq_codec
from vq_functional.core.codec import Codec, PlainCodec
from vq_functional.core.errors import QuantizerConfigError
from vq_functional.core.jit import compile
from vq_functional.core.policy import Policy
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import Store, rows
from vq_functional.core.transform import Transform
from vq_functional.core.tree import nbytes
from vq_functional.evict.chain import chain
from vq_functional.evict.h2o import h2o, h2o_policy
from vq_functional.evict.snapkv import snapkv, snapkv_policy
from vq_functional.evict.streaming_llm import streaming_llm, streaming_llm_policy
from vq_functional.methods import METHODS
from vq_functional.quantize.int8 import int8_codec
from vq_functional.quantize.kivi import kivi

__all__ = [
    "METHODS",
    "Codec",
    "KVSpec",
    "PlainCodec",
    "Policy",
    "QuantizerConfigError",
    "Store",
    "Transform",
    "chain",
    "compile",
    "h2o",
    "h2o_policy",
    "int8_codec",
    "kivi",
    "nbytes",
    "qjl",
    "qjl_codec",
    "rows",
    "snapkv",
    "snapkv_policy",
    "streaming_llm",
    "streaming_llm_policy",
    "turboquant_mse",
    "turboquant_mse_codec",
    "turboquant_rvq",
    "turboquant_rvq_codec",
]
