"""The one table of methods."""

from collections.abc import Callable

import attrs

from vq_functional.codebook.qjl import QJLOptions, qjl
from vq_functional.codebook.turboquant_mse import TurboQuantMSEOptions, turboquant_mse
from vq_functional.codebook.turboquant_rvq import TurboQuantRVQOptions, turboquant_rvq
from vq_functional.core.errors import QuantizerConfigError
from vq_functional.core.transform import Transform
from vq_functional.evict.h2o import H2OOptions, h2o
from vq_functional.evict.snapkv import SnapKVOptions, snapkv
from vq_functional.evict.streaming_llm import StreamingLLMOptions, streaming_llm
from vq_functional.quantize.kivi import KIVIOptions, kivi


@attrs.frozen
class Method:
    """One row. Traits select the laws that a method must obey:

    evicts          gives up rows; the rest is bit-equal to what came
    uses_queries    has a rule for real queries beside the one for keys alone
    packs           holds codes
    chunk_invariant one-shot prefill equals any chunking, bit for bit
    attends_codes   `attend` reads codes without rebuilding keys or values
    vectors         also serves one head, vector by vector
    """

    name: str
    options: type
    build: Callable[..., Transform]
    paper: str
    traits: frozenset[str]


def _row(name: str, options: type, build: Callable[..., Transform], paper: str, traits: str) -> Method:
    return Method(name, options, build, paper, frozenset(traits.split()))


_CODES = "packs chunk_invariant attends_codes"

TABLE = (
    _row("streaming_llm", StreamingLLMOptions, streaming_llm, "2309.17453", "evicts chunk_invariant"),
    _row("h2o", H2OOptions, h2o, "2306.14048", "evicts uses_queries"),
    _row("snapkv", SnapKVOptions, snapkv, "2404.14469", "evicts uses_queries"),
    _row("kivi", KIVIOptions, kivi, "2402.02750", _CODES),
    _row("turboquant_mse", TurboQuantMSEOptions, turboquant_mse, "2504.19874", f"{_CODES} vectors"),
    _row("turboquant_rvq", TurboQuantRVQOptions, turboquant_rvq, "2504.19874", _CODES),
    _row("qjl", QJLOptions, qjl, "2406.03482", f"{_CODES} vectors"),
)

METHODS = {method.name: method for method in TABLE}


def find(name: str) -> Method:
    """The row of a method; raises QuantizerConfigError for a name that isn't in the table."""
    if name not in METHODS:
        raise QuantizerConfigError(f"methods: `method` must be one of {sorted(METHODS)}; got {name!r}")
    return METHODS[name]
