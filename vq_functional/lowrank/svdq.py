"""SVDq: keys along their singular axes, the first ones in many bits, the last ones left out (arXiv 2502.15304).

Differs from the paper: the axes are those of a sequence's first rows, or given;
keys are held as they come, after the rotation, unless `rope` is given; one-bit
channels have the means of two halves as levels; the first and the newest rows
are exact.
"""

from typing import Any

import attrs

from vq_functional.core.codec import Codec, PlainCodec
from vq_functional.core.errors import check, check_choice, check_int, check_number
from vq_functional.core.transform import Transform
from vq_functional.lowrank.svdq_basis import FEWEST, SVDqBasis
from vq_functional.lowrank.svdq_codes import ONE_BIT, LatentChannelsCodec
from vq_functional.ops.rope import Rope, to_rope
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.groups import TokenGroupsCodec
from vq_functional.quantize.positioned import PositionedBlocks
from vq_functional.quantize.sinks import sink_rule

N_FIT = 128  # rows, where the rank doesn't tell


def _to_schedule(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class SVDqOptions:
    """Keys are held along `rank` axes (None: the head size, or as many as `basis` has).

    These are cut in as many groups as `bit_schedule` has entries, bits of a
    number each; those with 0 are left out. `group_size` tokens share a channel's
    scale and zero. `one_bit` groups have conditional means ("cond_mean") or the
    ends of the range ("minmax") as levels. The axes are fitted to the first rows
    without the sinks, `n_fit` of them at least (None: twice the `rank`, and 128
    without one), or are those of `basis`, from `svdq_calibrate`.
    `residual_length` newest rows stay exact (None: what the room for `n_fit` rows
    allows, and a block with a basis), and `n_sink` first ones. `rope`: the model's rotation, to hold keys
    as they were before it (False: none). `bits_v` a number of the values (None: as they come),
    in groups of `group_size` channels. `energy_threshold` is for `svdq_calibrate`.
    """

    rank: int | None = None
    energy_threshold: float = 0.95
    bit_schedule: tuple[int, ...] = attrs.field(default=(8, 4, 2, 1, 1, 0, 0, 0), converter=_to_schedule)
    group_size: int = 32
    one_bit: str = "cond_mean"
    n_fit: int | None = None
    residual_length: int | None = None
    n_sink: int = 4
    bits_v: int | None = None
    rope: Rope | None = attrs.field(default=None, converter=to_rope)
    basis: SVDqBasis | None = None

    def __attrs_post_init__(self) -> None:
        check_number("svdq", "energy_threshold", self.energy_threshold, 0, 1)
        check_int("svdq", "group_size", self.group_size, 1)
        check_choice("svdq", "one_bit", self.one_bit, ONE_BIT)
        check_int("svdq", "n_sink", self.n_sink, 0)
        least = {"rank": 1, "n_fit": self.n_sink + 2, "residual_length": 0, "bits_v": 1}
        for field, low in least.items():
            if getattr(self, field) is not None:
                check_int("svdq", field, getattr(self, field), low, 8 if field == "bits_v" else None)
        self._check_schedule()
        check(self.rope is None or isinstance(self.rope, Rope), "svdq", "rope", "must be a Rope", self.rope)
        known = self.basis is None or isinstance(self.basis, SVDqBasis)
        check(known, "svdq", "basis", "must come from svdq_calibrate", self.basis)
        if self.basis is not None and self.rank is not None:
            check_int("svdq", "rank", self.rank, 1, self.basis.rank)

    def _check_schedule(self) -> None:
        schedule = self.bit_schedule
        check(isinstance(schedule, tuple), "svdq", "bit_schedule", "must be a tuple of bits", schedule)
        for bits in schedule:
            check_int("svdq", "bit_schedule", bits, 0, 8)
        check(any(schedule), "svdq", "bit_schedule", "must give some group bits", schedule)
        least = FEWEST * len(schedule)
        whole = self.rank is None or self.rank >= least or 0 not in schedule
        check(whole, "svdq", "rank", f"must be at least {least}, {FEWEST} a group, where some get no bits", self.rank)

    @property
    def rows_to_fit(self) -> int:
        """Rows that the axes are fitted to at least, sinks among them."""
        if self.n_fit is not None:
            return self.n_fit
        return max(N_FIT if self.rank is None else 2 * self.rank, self.group_size, 2 * self.n_sink)

    @property
    def key_codec(self) -> LatentChannelsCodec:
        """Codec of the keys."""
        return LatentChannelsCodec(
            self.rank,
            self.bit_schedule,
            self.group_size,
            self.one_bit,
            self.rows_to_fit,
            self.n_sink,
            self.rope,
            self.basis,
        )

    @property
    def residual(self) -> int:
        """Newest rows that stay exact."""
        if self.residual_length is not None:
            return self.residual_length
        key = self.key_codec
        return max(key.warmup - key.unit, 0) if key.warmup else key.unit


def svdq(**options: Any) -> Transform:
    """Keys as latents in bits that fall with their variance, the first and the newest rows exact; keeps every token."""
    o = SVDqOptions(**options)
    value: Codec = PlainCodec() if o.bits_v is None else TokenGroupsCodec(o.bits_v, o.group_size)
    sinks = sink_rule(o.n_sink)
    kind = Blocks if o.rope is None else PositionedBlocks
    return kind("svdq", o.key_codec, value, residual=o.residual, sinks=sinks)
