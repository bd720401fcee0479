"""Calibration of spectral: the principal axes of one layer's keys and values."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.codebook.spectral_codes import block_levels
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.ops.spectrum import Floats, effective_size, principal_axes, to_numpy
from vq_functional.ops.vectors import TINY

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of blocks whose losses are computed; those of others lie between


def check_axes(field: str, axes: mx.array, size: int) -> None:
    """Check orthogonal `axes` [H or 1, D, D], and that the first block is one of so many axes."""
    shape = axes.shape
    check(len(shape) == 3 and shape[1] == shape[2], "spectral", field, "must be [H, D, D]", shape)
    check_int("spectral", "d_eff", size, 1, shape[1])
    matrix = to_numpy(axes)
    off = float(np.abs(matrix.swapaxes(-1, -2) @ matrix - np.eye(shape[1])).max())
    check(off <= 1e-3, "spectral", field, "must be orthogonal", f"U^T U off by {off:.1g}")


@attrs.frozen(eq=False)
class SpectralBasis:
    """What `spectral_calibrate` finds for one layer; H is 1 where all heads share their axes."""

    key_axes: mx.array  # float32 [H, D, D]: columns are axes, by falling energy
    key_energy: mx.array  # float32 [H, D]: mean square along each
    key_d_eff: int  # axes of the first block
    val_axes: mx.array
    val_energy: mx.array
    val_d_eff: int

    def __attrs_post_init__(self) -> None:
        for axes, energy, size in (
            ("key_axes", self.key_energy, self.key_d_eff),
            ("val_axes", self.val_energy, self.val_d_eff),
        ):
            check_axes(axes, getattr(self, axes), size)
            shape = getattr(self, axes).shape[:2]
            check(energy.shape == shape, "spectral", axes, f"must have energies {shape}", energy.shape)

    @property
    def key_share(self) -> mx.array:
        """Part float32 [H] of the keys' energy that lies in the first block."""
        return _share(self.key_energy, self.key_d_eff)

    @property
    def val_share(self) -> mx.array:
        """Part float32 [H] of the values' energy that lies in the first block."""
        return _share(self.val_energy, self.val_d_eff)

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        return {name: mx.array(value) for name, value in attrs.asdict(self).items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "SpectralBasis":
        """Inverse of `arrays`."""
        sizes: dict[str, Any] = {name: arrays[name].item() for name in ("key_d_eff", "val_d_eff")}
        return cls(**{**arrays, **sizes})


def _share(energy: mx.array, size: int) -> mx.array:
    # Scaled first so that sums can't overflow.
    energy = energy / mx.maximum(energy.max(axis=-1, keepdims=True), TINY)
    return energy[:, :size].sum(axis=-1) / mx.maximum(energy.sum(axis=-1), TINY)


def spectral_calibrate(
    keys: Any,
    values: Any,
    *,
    key_d_eff: int | None = None,
    val_d_eff: int | None = None,
    rule: str = "least_error",
    pooled: bool = False,
    centred: bool = False,
) -> SpectralBasis:
    """Axes of one layer from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv], of MLX or numpy.

    The size of the first block follows from the spectrum unless it is given: by
    the `rule` "least_error" the one at which codes lose least; by "participation",
    the paper's, the participation ratio rounded up, of all heads the largest.
    `pooled`: one set of axes for all heads. `centred`: axes about the mean. Rows with NaN or
    infinities are left out. Raises QuantizerConfigError for other shapes.
    """
    for field, choice in (("pooled", pooled), ("centred", centred)):
        check_choice("spectral_calibrate", field, choice, (True, False))
    check_choice("spectral_calibrate", "rule", rule, tuple(RULES))
    found: list[Any] = []
    for field, rows, option, size in (
        ("keys", keys, "key_d_eff", key_d_eff),
        ("values", values, "val_d_eff", val_d_eff),
    ):
        fits = len(rows.shape) == 3 and 0 not in rows.shape
        check(fits, "spectral_calibrate", field, "must be [N, H, D]", tuple(rows.shape))
        check_int("spectral_calibrate", option, size, 1, rows.shape[2], optional=True)
        axes, energy = _axes(to_numpy(rows), pooled, centred)
        found += [*_tables(axes, energy), RULES[rule](energy) if size is None else size]
    return SpectralBasis(*found)


def _axes(samples: Floats, pooled: bool, centred: bool) -> tuple[Floats, Floats]:
    """Axes [H, D, D] and energies [H, D] of `samples` [N, H, D]."""
    heads = samples.reshape(1, -1, samples.shape[-1]) if pooled else samples.swapaxes(0, 1)
    axes, energy = zip(*(principal_axes(head, centred) for head in heads))
    return np.stack(axes), np.stack(energy)


def _tables(*arrays: Floats) -> list[mx.array]:
    largest = np.finfo(np.float32).max
    tables = [mx.array(np.minimum(array, largest).astype(np.float32)) for array in arrays]
    mx.eval(tables)
    return tables


def largest_participation(energy: Floats) -> int:
    """The participation ratio of the spectrum [H, D], rounded up, of the head where it is largest."""
    return max(effective_size(row) for row in energy)


def least_error_size(energy: Floats) -> int:
    """The size of the first block at which two blocks lose least of the spectrum [H, D], heads counting alike."""
    whole = energy.sum(axis=-1, keepdims=True)
    share = energy / np.where(whole > 0, whole, 1)
    inside, dim = np.cumsum(share, axis=-1).mean(axis=0), energy.shape[-1]
    lost = np.interp(np.log2(np.arange(1, dim + 1)), np.log2(SIZES), block_losses())
    total = inside * lost
    total[:-1] += (1 - inside[:-1]) * lost[::-1][1:]
    return int(np.argmin(total)) + 1


@functools.cache
def block_losses() -> list[float]:
    """Mean squared error of blocks of SIZES that lie evenly in all directions, relative to their energy; 2 bits."""
    losses = []
    for size in SIZES:
        rows = np.random.default_rng(size).normal(size=(4096, size))
        levels = to_numpy(block_levels(size, 2, "sphere"))
        unit = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True))
        level = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)]
        kept = (unit * level).sum(axis=-1) ** 2 / np.square(level).sum(axis=-1) / size
        losses.append(float(1 - kept.mean()))
    return losses


RULES = {"least_error": least_error_size, "participation": largest_participation}
