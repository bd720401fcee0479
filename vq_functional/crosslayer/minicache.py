"""MiniCache: deep layers, a few at a time, share the directions of their rows; each keeps lengths (arXiv 2405.14366).

Differs from the paper: directions are taken off the mean row of a block; a
block has a fixed number of slots for rows that are too unlike to be merged;
the first layer of a group is merged like the others, and the newest rows are exact.
"""

import math
from typing import Any, ClassVar

import attrs

from vq_functional.core.codec import Codec, PlainCodec
from vq_functional.core.errors import check, check_between, check_choice, check_int
from vq_functional.crosslayer.directions import RETENTIONS
from vq_functional.crosslayer.merged_rows import MergedRowsCodec
from vq_functional.crosslayer.stack import Stack, stack_sizes
from vq_functional.quantize.groups import TokenGroupsCodec
from vq_functional.quantize.sinks import sink_rule

BITS = (None, 4, 8)
GROUP = 32  # numbers of a direction that share scale and zero
MERGES = ("both", "keys", "values")
MOST = 255  # rows of a block whose places, and the mark of an empty slot, fit a byte


@attrs.frozen(kw_only=True)
class MiniCacheOptions:
    """Layers from the share `start_frac` of a model on are merged, `group_size` at a time, at `slerp_t` of the arc.

    Rows are merged in blocks of `block`, of which the share `retained_share` at
    most is retained: the most unlike of those whose cosine is below
    `retention_threshold`, or by `retention` "range" of those at the far end of
    the block's distances. `merge` tells which side is merged, `center` whether
    directions are taken off the block's mean row, `direction_bits` how they are
    held (`bits_k` and `bits_v` override it; None is the input's dtype).
    `residual_length` newest rows and `n_sink` first ones stay exact; `max_ctx`
    tokens at most.
    """

    start_frac: float = 0.5
    group_size: int = 2
    retention_threshold: float = 0.9
    slerp_t: float = 0.5
    max_ctx: int = 8192
    retention: str = "cosine"
    block: int = 64
    retained_share: float = 0.05
    merge: str = "both"
    center: bool = True
    direction_bits: int | None = None
    bits_k: int | None = None
    bits_v: int | None = None
    residual_length: int = 64
    n_sink: int = 4
    method: ClassVar[str] = "minicache"

    def __attrs_post_init__(self) -> None:
        check_between(self.method, "start_frac", self.start_frac, 0, 1)
        check_int(self.method, "group_size", self.group_size, 2)
        check_between(self.method, "retention_threshold", self.retention_threshold, -1, 1)
        check_between(self.method, "slerp_t", self.slerp_t, 0, 1)
        check_int(self.method, "max_ctx", self.max_ctx, 1)
        check_choice(self.method, "retention", self.retention, RETENTIONS)
        check_int(self.method, "block", self.block, 1, MOST)
        check_between(self.method, "retained_share", self.retained_share, 0, below=1)
        check_choice(self.method, "merge", self.merge, MERGES)
        check_choice(self.method, "center", self.center, (True, False))
        for field in ("direction_bits", "bits_k", "bits_v"):
            check_choice(self.method, field, getattr(self, field), BITS)
        for field, side in (("bits_k", "keys"), ("bits_v", "values")):
            idle = getattr(self, field) is not None and self.merge not in ("both", side)
            check(not idle, self.method, field, f"has no effect where {side} are not merged", getattr(self, field))
        check_int(self.method, "residual_length", self.residual_length, 0)
        check_int(self.method, "n_sink", self.n_sink, 0)

    @property
    def slots(self) -> int:
        """Rows of a block that can be retained."""
        return math.ceil(round(self.retained_share * self.block, 9))

    def stacks(self, layers: int) -> list[int]:
        """Sizes of the groups of a model's `layers`: shallow ones, and an incomplete group's, stand alone."""
        return stack_sizes(layers, self.group_size, int(layers * self.start_frac), rest_alone=True)

    def codec(self, layers: int, side: str, bits: int | None) -> Codec:
        """Codec of the "keys" or the "values" of so many layers."""
        if layers == 1 or self.merge not in ("both", side):
            return PlainCodec()
        direction = PlainCodec() if bits is None else TokenGroupsCodec(bits, GROUP)
        rule = self.retention, float(self.retention_threshold)
        return MergedRowsCodec(layers, self.block, self.slots, direction, float(self.slerp_t), *rule, self.center)


def minicache(*, layers: int = 1, **options: Any) -> Stack:
    """Rows merged over `layers` layers, on their stacked heads, the newest rows exact; keeps every token.

    One layer alone is held as it comes.
    """
    o = MiniCacheOptions(**options)
    check_int(o.method, "layers", layers, 1)
    merged = layers > 1
    return Stack(
        "minicache",
        key=o.codec(layers, "keys", o.bits_k or o.direction_bits),
        value=o.codec(layers, "values", o.bits_v or o.direction_bits),
        residual=o.residual_length if merged else 0,
        sinks=sink_rule(o.n_sink if merged else 0),
        layers=layers,
        max_ctx=o.max_ctx,
    )
