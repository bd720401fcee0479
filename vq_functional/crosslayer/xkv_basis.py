"""Calibration of xkv: the axes that the heads of several layers have in common."""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import Described
from vq_functional.core.errors import check, check_choice, check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.ops.affine import FUSED_GROUPS
from vq_functional.ops.spectrum import Floats, check_axes, least_rank, principal_axes, to_numpy, to_samples

CALIBRATE = "xkv_calibrate"


@attrs.frozen
class XKVBasis(Described):
    """What `xkv_calibrate` finds for the layers of one group, whose M * H heads stand one behind the other.

    A basis [M * H, D, R] holds each head's rows of the R axes, by falling spread;
    where there are fewer axes, the last are zeros.
    """

    key_basis: Table = attrs.field(converter=to_table)
    key_mean: Table = attrs.field(converter=to_table)  # [M * H, D]
    key_spread: Table = attrs.field(converter=to_table)  # [R]: root mean square along each axis
    value_basis: Table = attrs.field(converter=to_table)
    value_mean: Table = attrs.field(converter=to_table)
    value_spread: Table = attrs.field(converter=to_table)

    def __attrs_post_init__(self) -> None:
        for field, (basis, mean, spread) in (("key_basis", self.key), ("value_basis", self.value)):
            side = field.removesuffix("_basis")
            check_table("xkv", field, basis, (None, None, None))
            check_table("xkv", f"{side}_mean", mean, basis.shape[:2])
            check_table("xkv", f"{side}_spread", spread, basis.shape[2:])
            check_axes("xkv", field, to_numpy(basis.array).reshape(-1, basis.shape[2]))
        heads, of_values = self.key_basis.shape[0], self.value_basis.shape[0]
        check(heads == of_values, "xkv", "value_basis", f"must be of {heads} heads, as the keys' is", of_values)

    @property
    def key(self) -> tuple[Table, Table, Table]:
        """Basis, mean and spread of the keys."""
        return self.key_basis, self.key_mean, self.key_spread

    @property
    def value(self) -> tuple[Table, Table, Table]:
        """Basis, mean and spread of the values."""
        return self.value_basis, self.value_mean, self.value_spread

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        return {field.name: getattr(self, field.name).array for field in attrs.fields(XKVBasis)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "XKVBasis":
        """Inverse of `arrays`."""
        return cls(**arrays)


def xkv_calibrate(
    keys: Any,
    values: Any,
    *,
    rank: int | None = None,
    rank_v: int | None = None,
    energy_threshold: float = 0.95,
    group_quant_size: int = 32,
    centred: bool = True,
) -> XKVBasis:
    """Axes of a group of layers from sampled rows `keys` [N, M * H, Dk] and `values` [N, M * H, Dv], of MLX or numpy.

    The heads of the layers stand one behind the other. `rank` axes, and `rank_v`
    for values (None: as many), or for None as few as hold the share
    `energy_threshold` of the sum of squares, keys and values each; then as many
    as fill groups of `group_quant_size`. Rows with NaN or infinities are left
    out. Raises QuantizerConfigError for other shapes and where no row is left.
    """
    check_number(CALIBRATE, "energy_threshold", energy_threshold, 0, 1)
    check_choice(CALIBRATE, "group_quant_size", group_quant_size, FUSED_GROUPS)
    check_choice(CALIBRATE, "centred", centred, (True, False))
    found: list[Floats] = []
    for field, rows, option, count in (
        ("keys", keys, "rank", rank),
        ("values", values, "rank_v", rank if rank_v is None else rank_v),
    ):
        samples = to_samples(CALIBRATE, field, rows, "M * H")
        check_int(CALIBRATE, option, count, 1, optional=True)
        found += _sampled(samples, count, energy_threshold, group_quant_size, centred)
    return XKVBasis(*found)


def _sampled(samples: Floats, rank: int | None, share: float, multiple: int, centred: bool) -> list[Floats]:
    """Basis [H, D, R], mean [H, D] and spread [R] of `samples` [N, H, D]."""
    _, heads, dim = samples.shape
    rows = samples.reshape(-1, heads * dim)
    rows = rows[np.isfinite(rows).all(axis=1)]
    axes, energy = principal_axes(rows, centred)
    wanted = least_rank(energy, share) if rank is None else rank
    width = -(-min(wanted, len(energy)) // multiple) * multiple
    missing = max(width - len(energy), 0)
    basis = np.pad(axes, ((0, 0), (0, missing)))[:, :width].reshape(heads, dim, width)
    mean = rows.mean(axis=0) if centred else np.zeros(heads * dim)
    return [basis, mean.reshape(heads, dim), np.sqrt(np.pad(energy, (0, missing))[:width])]
