"""XQuant: a layer's codes serve the layers above it, each with scales and zeros of its own (arXiv 2510.11236).

Differs from the paper: the other layers' lines are fitted to their rows by
least squares, and what they miss is held in a few bits of its own; the newest
`residual_length` rows of each layer are exact, as in `kivi`.
"""

from typing import Any, ClassVar

import attrs

from vq_functional.core.errors import check_between, check_choice, check_int
from vq_functional.core.warn import warn
from vq_functional.crosslayer.reused_codes import FITS, ReusedCodesCodec
from vq_functional.crosslayer.stack import Stack, stack_sizes
from vq_functional.quantize.sinks import sink_rule


@attrs.frozen(kw_only=True)
class XQuantOptions:
    """`group_size` consecutive layers read the first one's codes of `base_bits`; `residual_bits` for what this misses.

    `group_quant_size` numbers share scale and zero, which the other layers `fit`
    by least squares ("lsq") or by range ("minmax"); `eta` moves the ends of
    ranges inwards. `residual_length` newest rows and `n_sink` first ones stay
    exact; `max_ctx` tokens at most. `bits_k` and `bits_v` override `base_bits`.
    """

    group_size: int = 2
    base_bits: int = 2
    residual_bits: int = 4
    group_quant_size: int = 32
    max_ctx: int = 8192
    fit: str = "lsq"
    eta: float = 0.0
    residual_length: int = 64
    n_sink: int = 4
    bits_k: int | None = None
    bits_v: int | None = None
    method: ClassVar[str] = "xquant"

    def __attrs_post_init__(self) -> None:
        check_int(self.method, "group_size", self.group_size, 2)
        for field in ("base_bits", "bits_k", "bits_v"):
            bits = getattr(self, field)
            if bits is not None or field == "base_bits":
                check_int(self.method, field, bits, 1, 8)
        check_int(self.method, "residual_bits", self.residual_bits, 0, 8)
        check_int(self.method, "group_quant_size", self.group_quant_size, 1)
        check_int(self.method, "max_ctx", self.max_ctx, 1)
        check_choice(self.method, "fit", self.fit, FITS)
        check_between(self.method, "eta", self.eta, 0, below=0.5)
        check_int(self.method, "residual_length", self.residual_length, 0)
        check_int(self.method, "n_sink", self.n_sink, 0)

    def stacks(self, layers: int) -> list[int]:
        """Sizes of the groups of a model's `layers`; the last one may be smaller."""
        return stack_sizes(layers, self.group_size)

    def codec(self, layers: int, bits: int, along: str) -> ReusedCodesCodec:
        """Codec of one side."""
        return ReusedCodesCodec(
            layers, bits, self.residual_bits, self.group_quant_size, self.fit, float(self.eta), along
        )


def xquant(*, layers: int = 1, **options: Any) -> Stack:
    """Codes that `layers` layers share, over their stacked heads, the newest rows exact; keeps every token."""
    o = XQuantOptions(**options)
    check_int(o.method, "layers", layers, 1)
    if layers > 1 and not o.residual_bits:
        text = "xquant: without `residual_bits` a layer whose rows are unlike the first one's is lost"
        warn(text)
    return Stack(
        "xquant",
        key=o.codec(layers, o.bits_k or o.base_bits, "tokens"),
        value=o.codec(layers, o.bits_v or o.base_bits, "channels"),
        residual=o.residual_length,
        sinks=sink_rule(o.n_sink),
        layers=layers,
        max_ctx=o.max_ctx,
    )
