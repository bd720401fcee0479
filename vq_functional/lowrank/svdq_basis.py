"""Principal axes of centred keys, one set a head, of a sequence's first rows or of sampled ones; bits along them."""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import Described
from vq_functional.core.errors import check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.ops.rope import Rope, to_rope
from vq_functional.ops.spectrum import Floats, check_axes, least_rank, principal_axes, to_numpy, to_samples
from vq_functional.ops.vectors import TINY

CALIBRATE = "svdq_calibrate"
FEWEST = 4  # axes of a group of which some may be left out
LIMIT = mx.finfo(mx.float32).max / 64  # numbers up to here have products with axes that can't overflow


@attrs.frozen
class Plan:
    """Which axes have channels, and the channels and bits of each section, neighbouring ones of one width."""

    axes: tuple[int, ...]
    sections: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rank: int, schedule: tuple[int, ...]) -> "Plan":
        """`rank` axes in groups of near-equal size, larger ones first; one axis each where the groups are more.

        Where groups would have fewer than FEWEST axes, those without bits get one.
        """
        if rank < FEWEST * len(schedule):
            schedule = tuple(max(bits, 1) for bits in schedule)
        size, more = divmod(rank, len(schedule))
        widths = [bits for j, bits in enumerate(schedule) for _ in range(size + (j < more))]
        sections: list[tuple[int, int]] = []
        for bits in filter(None, widths):
            if sections and sections[-1][1] == bits:
                sections[-1] = (sections[-1][0] + 1, bits)
            else:
                sections.append((1, bits))
        return cls(tuple(i for i, bits in enumerate(widths) if bits), tuple(sections))


@attrs.frozen
class SVDqBasis(Described):
    """What `svdq_calibrate` finds for one layer: axes [H, D, R], by falling variance, and mean [H, D] of its keys."""

    basis: Table = attrs.field(converter=to_table)
    mean: Table = attrs.field(converter=to_table)

    def __attrs_post_init__(self) -> None:
        check_table("svdq", "basis", self.basis, (None, None, None))
        check_table("svdq", "mean", self.mean, self.basis.shape[:2])
        check_axes("svdq", "basis", to_numpy(self.basis.array))

    @property
    def rank(self) -> int:
        """Axes of a head."""
        return self.basis.shape[2]

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        return {"basis": self.basis.array, "mean": self.mean.array}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "SVDqBasis":
        """Inverse of `arrays`."""
        return cls(arrays["basis"], arrays["mean"])


def svdq_calibrate(
    keys: Any,
    values: Any = None,
    *,
    rank: int | None = None,
    energy_threshold: float = 0.95,
    rope: Rope | None = None,
    positions: mx.array | None = None,
) -> SVDqBasis:
    """Axes of one layer from sampled rows `keys` [N, H, D], of MLX or numpy; values aren't looked at.

    `rank` axes a head, or for None as few as hold the share `energy_threshold`
    of the sum of singular values in every head. With `rope`, for a method that
    has it, the keys stand at `positions` int [N], 0 to N - 1 unless given. Rows
    with NaN or infinities are left out. Raises QuantizerConfigError for other shapes and where no row is left.
    """
    check_number(CALIBRATE, "energy_threshold", energy_threshold, 0, 1)
    rows, rope = to_samples(CALIBRATE, "keys", keys).swapaxes(0, 1), to_rope(rope)
    check_int(CALIBRATE, "rank", rank, 1, rows.shape[2], optional=True)
    if rope is not None:
        position = mx.arange(rows.shape[1]) if positions is None else positions
        rows = to_numpy(rope.undo(mx.array(rows.astype(np.float32))[None], position)[0])
    heads = [_finite(head) for head in rows]
    axes, energy = zip(*(principal_axes(head, centred=True) for head in heads), strict=True)
    size = max(least_rank(np.sqrt(one), energy_threshold) for one in energy) if rank is None else rank
    found = mx.array(np.stack(axes)[..., :size].astype(np.float32))
    return SVDqBasis(turned(found), np.stack([head.mean(axis=0) for head in heads]))


def fitted_basis(x: mx.array) -> tuple[mx.array, mx.array]:
    """Axes float32 [B, H, D, D] (columns), by falling variance, and mean [B, H, D] of float32 rows `x` [B, H, S, D]."""
    # From the first row on, so that the mean of equal rows is exactly that row.
    mean = x[:, :, :1] + ((x - x[:, :, :1]) * (1 / x.shape[2])).sum(axis=2, keepdims=True)
    rows = x - mean
    size = mx.abs(rows).max(axis=(-1, -2), keepdims=True)
    rows = rows / mx.maximum(size, TINY)  # so that squares can't overflow
    axes = mx.linalg.eigh(rows.swapaxes(-1, -2) @ rows, stream=mx.cpu)[1][..., ::-1]
    return turned(axes), mean[:, :, 0]


def turned(axes: mx.array) -> mx.array:
    """`axes` [..., D, R] with the largest entry of each column above zero."""
    place = mx.argmax(mx.abs(axes), axis=-2, keepdims=True)
    return mx.where(mx.take_along_axis(axes, place, axis=-2) < 0, -axes, axes)


def _finite(rows: Floats) -> Floats:
    return rows[np.isfinite(rows).all(axis=-1)]
