"""Principal axes of samples and what their spectrum says; numpy in float64, on the host, outside of any step."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from vq_functional.core.errors import check

Floats = NDArray[np.float64]


def to_numpy(x: Any) -> Floats:
    """An array of MLX, of any dtype, or of numpy in float64."""
    return np.asarray(x.astype(mx.float32) if isinstance(x, mx.array) else x).astype(np.float64)


def to_samples(method: str, field: str, x: Any, heads: str = "H") -> Floats:
    """Sampled rows `x` [N, H, D], of MLX or numpy, in float64.

    Raises QuantizerConfigError for other shapes, and where no row is finite.
    """
    shape = tuple(getattr(x, "shape", ()))
    check(len(shape) == 3 and 0 not in shape, method, field, f"must be [N, {heads}, D]", shape)
    rows = to_numpy(x)
    finite = int(np.isfinite(rows).all(axis=(1, 2)).sum())
    check(finite > 0, method, field, "must have rows of finite numbers", finite)
    return rows


def check_axes(method: str, field: str, axes: Floats) -> None:
    """Check that the columns of `axes` [..., F, R] are orthonormal, or zero."""
    product = axes.swapaxes(-1, -2) @ axes
    whole = np.eye(axes.shape[-1]) * (np.diagonal(product, axis1=-2, axis2=-1) > 0.5)[..., None]
    off = float(np.abs(product - whole).max(initial=0))
    check(off <= 1e-3, method, field, "must hold orthonormal axes", f"V^T V off by {off:.1g}")


def principal_axes(samples: Floats, centred: bool = False) -> tuple[Floats, Floats]:
    """Axes [D, D] (columns) and mean squares [D] along them, falling, of `samples` [N, D].

    Rows that are not finite are left out. `centred` subtracts the mean first.
    """
    rows = samples[np.isfinite(samples).all(axis=-1)]
    size = np.abs(rows).max(initial=0) or 1.0
    rows = rows / size
    if centred and len(rows):
        rows = rows - rows.mean(axis=0)
    energy, axes = np.linalg.eigh(rows.T @ rows / max(len(rows), 1))
    return axes[:, ::-1], np.maximum(energy[::-1], 0) * size**2


def least_rank(falling: ArrayLike, share: float) -> int:
    """How many of the numbers, the largest first, sum to the `share` of all; one at least."""
    total = np.cumsum(falling)
    return min(int((total < share * total[-1] * (1 - 1e-9)).sum()) + 1, len(total))


def participation_ratio(energy: Any) -> float:
    """(sum l)^2 / sum l^2: D for a flat spectrum, 1 for a single axis, whatever the scale; 1 for zeros."""
    share = _shares(energy)
    return float(share.sum() ** 2 / np.square(share).sum()) if share.any() else 1.0


def effective_size(energy: Any) -> int:
    """The participation ratio rounded up, rounding errors aside."""
    return math.ceil(participation_ratio(energy) * (1 - 1e-6))


def spectral_gap(energy: Any, size: int) -> float:
    """Mean square along the last of the first `size` axes over that along the next; infinite where that is zero."""
    share = np.sort(_shares(energy))[::-1]
    inside, outside = share[size - 1], share[size] if size < len(share) else 0.0
    return float(inside / outside) if outside > 0 else math.inf


def water_fill_bits(energy: Any, budget: int, most: int = 8) -> list[int]:
    """Bits of each coordinate, `budget` in all: one after the other goes where the error l / 4**bits is largest.

    A coordinate without energy gets none, so that less is spent only where all
    others have `most` bits; equal ones are served in order.
    """
    error = _shares(energy)
    bits = np.zeros(len(error), int)
    for _ in range(min(budget, most * int((error > 0).sum()))):
        place = int(np.argmax(np.where(bits < most, error, -1.0)))
        bits[place] += 1
        error[place] /= 4
    return [int(b) for b in bits]


def _shares(energy: Any) -> Floats:
    """Energies over the largest one, so that nothing depends on their scale."""
    found = np.maximum(to_numpy(energy).reshape(-1), 0)
    return found / (found.max(initial=0) or 1.0)
