"""KVSink over KIVI: a few tokens, found by the size of their keys, exact among coded ones (arXiv 2508.04257).

Sinks stay out of the range of their group, and are chosen when rows are
packed, block by block. One that is displaced is read through its code.

Differs from the paper: it reads sinks off the hidden states of one layer, once
for all layers; a cache sees keys and values alone, so each layer chooses for itself.
"""

from typing import Any, ClassVar

import attrs

from vq_functional.core.errors import check_choice, check_int
from vq_functional.core.transform import Transform
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.kivi import KIVIOptions, kivi_codecs
from vq_functional.quantize.sinks import SIGNALS, sink_rule


@attrs.frozen(kw_only=True)
class KIVISinkOptions(KIVIOptions):
    """As KIVIOptions; `n_sink` tokens of each sequence stay exact, by `sink_signal`.

    By the mean norm of their keys over the heads: "unusual_keys" (many times
    larger or smaller than typical), "large_keys" or "small_keys"; or the "first" ones.
    """

    n_sink: int = 5
    sink_signal: str = "unusual_keys"
    method: ClassVar[str] = "kivi_sink"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_int(self.method, "n_sink", self.n_sink, 0)
        check_choice(self.method, "sink_signal", self.sink_signal, SIGNALS)


def kivi_sink(**options: Any) -> Transform:
    """KIVI with sinks exact wherever they are; keeps every token."""
    o = KIVISinkOptions(**options)
    key, value = kivi_codecs(o)
    sinks = sink_rule(o.n_sink, o.sink_signal)
    return Blocks("kivi_sink", key, value, o.residual_length, sinks)
