"""KV-cache compression as pure functions over immutable states."""

from vq_functional.codebook.nsnquant import nsnquant, nsnquant_codec
from vq_functional.codebook.polar import polar, polar_codec
from vq_functional.codebook.qjl import qjl, qjl_codec
from vq_functional.codebook.rotated import rotated
from vq_functional.codebook.spectral import spectral, spectral_codec
from vq_functional.codebook.spectral_basis import SpectralBasis, spectral_calibrate
from vq_functional.codebook.turboquant_mse import turboquant_mse, turboquant_mse_codec
from vq_functional.codebook.turboquant_prod import turboquant_prod, turboquant_prod_codec
from vq_functional.codebook.turboquant_rvq import turboquant_rvq, turboquant_rvq_codec
from vq_functional.codebook.vecinfer import vecinfer, vecinfer_calibrate, vecinfer_codec
from vq_functional.core.codec import Codec, PlainCodec
from vq_functional.core.errors import QuantizerConfigError
from vq_functional.core.jit import compile
from vq_functional.core.policy import Policy
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import Store, rows
from vq_functional.core.transform import Transform
from vq_functional.core.tree import nbytes
from vq_functional.crosslayer.minicache import minicache
from vq_functional.crosslayer.xkv import xkv
from vq_functional.crosslayer.xkv_basis import XKVBasis, xkv_calibrate
from vq_functional.crosslayer.xquant import xquant
from vq_functional.evict.cam import cam, cam_policy
from vq_functional.evict.chain import chain
from vq_functional.evict.chunkkv import chunkkv, chunkkv_policy
from vq_functional.evict.curdkv import curdkv, curdkv_policy
from vq_functional.evict.h2o import h2o, h2o_policy
from vq_functional.evict.keyformer import keyformer, keyformer_policy
from vq_functional.evict.knorm import knorm, knorm_policy
from vq_functional.evict.kvzip import kvzip, kvzip_policy
from vq_functional.evict.morphkv import morphkv, morphkv_policy
from vq_functional.evict.nestedkv import nestedkv, nestedkv_policy
from vq_functional.evict.pyramidkv import pyramidkv, pyramidkv_policy
from vq_functional.evict.qfilters import qfilters, qfilters_policy
from vq_functional.evict.sliding_window import sliding_window
from vq_functional.evict.snapkv import snapkv, snapkv_policy
from vq_functional.evict.squeeze import squeeze, squeeze_policy
from vq_functional.evict.streaming_llm import streaming_llm, streaming_llm_policy
from vq_functional.evict.tova import tova, tova_policy
from vq_functional.hybrid.a2ats import a2ats, a2ats_calibrate
from vq_functional.hybrid.amc import amc, amc_calibrate
from vq_functional.hybrid.amc_options import AMCBasis
from vq_functional.hybrid.anchorkv import anchorkv
from vq_functional.hybrid.rocketkv import rocketkv, rocketkv_policy
from vq_functional.lowrank.kvtc import KVTCBasis, kvtc, kvtc_calibrate
from vq_functional.lowrank.kvtc_stream import kvtc_decode, kvtc_encode
from vq_functional.lowrank.palu import PALUBasis, palu, palu_calibrate
from vq_functional.lowrank.svdq import svdq
from vq_functional.lowrank.svdq_basis import SVDqBasis, svdq_calibrate
from vq_functional.methods import METHODS
from vq_functional.quantize.adakv import adakv
from vq_functional.quantize.affine_rows import affine_codec
from vq_functional.quantize.age_tiered import age_tiered
from vq_functional.quantize.blocks import blocks
from vq_functional.quantize.cachegen import cachegen
from vq_functional.quantize.gear import gear
from vq_functional.quantize.int8 import int8_codec
from vq_functional.quantize.kitty import kitty
from vq_functional.quantize.kivi import kivi
from vq_functional.quantize.kivi_sink import kivi_sink
from vq_functional.quantize.kvquant import kvquant, kvquant_calibrate
from vq_functional.quantize.skvq import skvq, skvq_calibrate
from vq_functional.quantize.state_stream import decode_state, encode_state
from vq_functional.quantize.zipcache import zipcache

__all__ = [
    "METHODS",
    "AMCBasis",
    "Codec",
    "KVSpec",
    "KVTCBasis",
    "PALUBasis",
    "PlainCodec",
    "Policy",
    "QuantizerConfigError",
    "SVDqBasis",
    "SpectralBasis",
    "Store",
    "Transform",
    "XKVBasis",
    "a2ats",
    "a2ats_calibrate",
    "adakv",
    "affine_codec",
    "age_tiered",
    "amc",
    "amc_calibrate",
    "anchorkv",
    "blocks",
    "cachegen",
    "cam",
    "cam_policy",
    "chain",
    "chunkkv",
    "chunkkv_policy",
    "compile",
    "curdkv",
    "curdkv_policy",
    "decode_state",
    "encode_state",
    "gear",
    "h2o",
    "h2o_policy",
    "int8_codec",
    "keyformer",
    "keyformer_policy",
    "kitty",
    "kivi",
    "kivi_sink",
    "knorm",
    "knorm_policy",
    "kvquant",
    "kvquant_calibrate",
    "kvtc",
    "kvtc_calibrate",
    "kvtc_decode",
    "kvtc_encode",
    "kvzip",
    "kvzip_policy",
    "minicache",
    "morphkv",
    "morphkv_policy",
    "nbytes",
    "nestedkv",
    "nestedkv_policy",
    "nsnquant",
    "nsnquant_codec",
    "palu",
    "palu_calibrate",
    "polar",
    "polar_codec",
    "pyramidkv",
    "pyramidkv_policy",
    "qfilters",
    "qfilters_policy",
    "qjl",
    "qjl_codec",
    "rocketkv",
    "rocketkv_policy",
    "rotated",
    "rows",
    "skvq",
    "skvq_calibrate",
    "sliding_window",
    "snapkv",
    "snapkv_policy",
    "spectral",
    "spectral_calibrate",
    "spectral_codec",
    "squeeze",
    "squeeze_policy",
    "streaming_llm",
    "streaming_llm_policy",
    "svdq",
    "svdq_calibrate",
    "tova",
    "tova_policy",
    "turboquant_mse",
    "turboquant_mse_codec",
    "turboquant_prod",
    "turboquant_prod_codec",
    "turboquant_rvq",
    "turboquant_rvq_codec",
    "vecinfer",
    "vecinfer_calibrate",
    "vecinfer_codec",
    "xkv",
    "xkv_calibrate",
    "xquant",
    "zipcache",
]
