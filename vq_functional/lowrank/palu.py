"""Palu: keys and values as low-rank latents of groups of heads, in codes of two widths (arXiv 2407.21118).

Differs from the paper: a cache sees keys and values and not the weights that
make them, so a basis is fitted to the first rows, or given; keys are held as
they come, after the rotation.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.describe import Described
from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.core.transform import Transform
from vq_functional.lowrank.head_groups import HeadGroups, sampled_basis
from vq_functional.lowrank.latents import BLOCK, LatentRowsCodec
from vq_functional.ops.affine import FUSED_BITS, FUSED_GROUPS
from vq_functional.ops.spectrum import check_axes, to_numpy, to_samples
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.sinks import sink_rule

CALIBRATE = "palu_calibrate"
TABLES = ("key_basis", "key_mean", "value_basis", "value_mean")


@attrs.frozen
class PALUBasis(Described):
    """What `palu_calibrate` finds for one layer of H heads in `n_head_groups` groups.

    A basis [H, D, R] holds each head's rows of its group's R axes, by falling
    energy; where a group has fewer axes, the last are zeros.
    """

    key_basis: Table = attrs.field(converter=to_table)
    key_mean: Table = attrs.field(converter=to_table)  # [H, D]
    value_basis: Table = attrs.field(converter=to_table)
    value_mean: Table = attrs.field(converter=to_table)
    n_head_groups: int

    def __attrs_post_init__(self) -> None:
        check_int("palu", "n_head_groups", self.n_head_groups, 1)
        for field, basis, mean in (
            ("key_basis", self.key_basis, self.key_mean),
            ("value_basis", self.value_basis, self.value_mean),
        ):
            check_table("palu", field, basis, (None, None, None))
            check_table("palu", field, mean, basis.shape[:2])
            _check_axes(field, basis, HeadGroups.of(basis.shape[0], self.n_head_groups))
        heads, of_values = self.key_basis.shape[0], self.value_basis.shape[0]
        check(heads == of_values, "palu", "value_basis", f"must be of {heads} heads, as the keys' is", of_values)

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        tables = {name: getattr(self, name).array for name in TABLES}
        return {**tables, "n_head_groups": mx.array(self.n_head_groups)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "PALUBasis":
        """Inverse of `arrays`."""
        tables: dict[str, Any] = {name: arrays[name] for name in TABLES}
        return cls(**tables, n_head_groups=int(arrays["n_head_groups"]))


def _check_axes(field: str, basis: Table, groups: HeadGroups) -> None:
    """Check that the axes of each group are orthonormal, or zero."""
    heads = to_numpy(basis.array)
    for span in groups.spans:
        check_axes("palu", field, heads[span].reshape(-1, heads.shape[2]))


@attrs.frozen(kw_only=True)
class PALUOptions:
    """`rank` components a head (None: half the head size) of the rows of `n_head_groups` groups of heads.

    The share `hi_fraction` of a latent, its leading components, has `hi_bit`
    bits a number and the rest `lo_bit`; `bits_k` and `bits_v` are one width for
    a whole side instead. `group_size` components share scale and zero.
    `quantize_values` False: value latents as they are. `mixing` turns the
    components of one width at random, so that they look alike (None: where a
    side has but one). The axes are fitted to the first `n_fit` rows without the
    sinks, or are those of `basis`, from `palu_calibrate`, whose rank and groups
    count then. `residual_length` newest rows stay exact (None: what the room
    for `n_fit` rows allows, and 32 with a basis), and `n_sink` first ones.
    `energy_threshold` is for `palu_calibrate`.
    """

    rank: int | None = None
    energy_threshold: float = 0.9
    n_head_groups: int = 4
    hi_bit: int = 4
    lo_bit: int = 2
    hi_fraction: float = 0.25
    group_size: int = 32
    quantize_values: bool = True
    bits_k: int | None = None
    bits_v: int | None = None
    mixing: bool | None = None
    n_fit: int = 128
    residual_length: int | None = None
    n_sink: int = 4
    basis: PALUBasis | None = None

    def __attrs_post_init__(self) -> None:
        for field in ("hi_bit", "lo_bit", "bits_k", "bits_v"):
            if getattr(self, field) is not None or field in ("hi_bit", "lo_bit"):
                check_choice("palu", field, getattr(self, field), FUSED_BITS)
        check(self.lo_bit <= self.hi_bit, "palu", "lo_bit", f"must be at most `hi_bit` = {self.hi_bit}", self.lo_bit)
        check_choice("palu", "group_size", self.group_size, FUSED_GROUPS)
        check_number("palu", "energy_threshold", self.energy_threshold, 0, 1)
        check_between("palu", "hi_fraction", self.hi_fraction, 0, 1)
        check_choice("palu", "quantize_values", self.quantize_values, (True, False))
        idle = self.bits_v is not None and not self.quantize_values
        check(not idle, "palu", "bits_v", "has no effect without `quantize_values`", self.bits_v)
        check_choice("palu", "mixing", self.mixing, (True, False, None))
        for field, low in (("n_head_groups", 1), ("n_fit", 1)):
            check_int("palu", field, getattr(self, field), low)
        check_int("palu", "n_sink", self.n_sink, 0, self.n_fit - 1)
        for field, low in (("rank", 1), ("residual_length", 0)):
            if getattr(self, field) is not None:
                check_int("palu", field, getattr(self, field), low)
        known = self.basis is None or isinstance(self.basis, PALUBasis)
        check(known, "palu", "basis", "must come from palu_calibrate", self.basis)

    @property
    def residual(self) -> int:
        """Newest rows that stay exact."""
        if self.residual_length is not None:
            return self.residual_length
        return BLOCK if self.basis else max(self.n_fit - BLOCK, 0)

    def codec(self, bits: int | None, exact: bool, given: tuple[Table, Table] | None) -> "LatentRowsCodec":
        """Codec of a side with `bits` for all components, or with two widths, or `exact`."""
        hi, lo = (bits, bits) if bits else (self.hi_bit, self.lo_bit)
        widths = None if exact else (hi, lo, float(self.hi_fraction))
        groups = self.basis.n_head_groups if self.basis else self.n_head_groups
        fit = (self.n_fit, self.n_sink)
        return LatentRowsCodec(self.rank, groups, widths, self.group_size, self.mixing, *fit, given)


def palu_calibrate(
    keys: Any,
    values: Any,
    *,
    rank: int | None = None,
    energy_threshold: float = 0.9,
    n_head_groups: int = 4,
    group_size: int = 32,
) -> PALUBasis:
    """Axes of one layer from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv], of MLX or numpy.

    `rank` axes a head, or for None as few as hold the share `energy_threshold`
    of the sum of squares in every group, keys and values each; then as many as
    fill groups of `group_size`. Rows with NaN or infinities are left out.
    Raises QuantizerConfigError for other shapes and where no row is left.
    """
    check_number(CALIBRATE, "energy_threshold", energy_threshold, 0, 1)
    check_int(CALIBRATE, "n_head_groups", n_head_groups, 1)
    check_choice(CALIBRATE, "group_size", group_size, FUSED_GROUPS)
    found = []
    for field, x in (("keys", keys), ("values", values)):
        rows = to_samples(CALIBRATE, field, x)
        check_int(CALIBRATE, "rank", rank, 1, rows.shape[2], optional=True)
        groups = HeadGroups.of(rows.shape[1], n_head_groups)
        found.append(sampled_basis(rows, groups, rank, energy_threshold, group_size))
    key, value = found
    return PALUBasis(*key, *value, n_head_groups)


def palu(**options: Any) -> Transform:
    """Keys and values as coded latents of groups of heads, the first and the newest rows exact; keeps every token."""
    o = PALUOptions(**options)
    b = o.basis
    return Blocks(
        "palu",
        o.codec(o.bits_k, False, (b.key_basis, b.key_mean) if b else None),
        o.codec(o.bits_v, not o.quantize_values, (b.value_basis, b.value_mean) if b else None),
        residual=o.residual,
        sinks=sink_rule(o.n_sink),
    )
