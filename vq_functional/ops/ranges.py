"""Ranges of numbers among which some may not be finite."""

import math

import mlx.core as mx


def finite_range(x: mx.array, axis: int) -> tuple[mx.array, mx.array]:
    """Lowest and highest finite number along `axis`, which is kept with one place; zeros where there is none."""
    finite = mx.isfinite(x)
    low = mx.where(finite, x, mx.inf).min(axis=axis, keepdims=True)
    high = mx.where(finite, x, -mx.inf).max(axis=axis, keepdims=True)
    none = low > high
    return mx.where(none, 0, low), mx.where(none, 0, high)


def drawn_in(x: mx.array, low: mx.array, high: mx.array) -> mx.array:
    """`x` with infinities at the nearest end of the range and NaN in its middle."""
    inside = mx.where(mx.isnan(x), (low + high) * 0.5, mx.clip(x, low, high))
    return mx.where(mx.isfinite(x), x, inside)


def mended(x: mx.array) -> mx.array:
    """`x` [B, H, S, D] with the number of the next row where one is not finite: it adds nothing to any range."""
    following = mx.concatenate([x[:, :, 1:], x[:, :, :1]], axis=2)
    return drawn_in(mx.where(mx.isfinite(x), x, following), *finite_range(x, axis=2))


def from_mean(x: mx.array, mean: mx.array) -> mx.array:
    """Float32 `x` [B, H, S, D] less the `mean` [B, H, 1, D]; zero where it is not finite.

    Drawn in so far that products of all heads' rows with axes can't overflow.
    """
    largest = mx.finfo(mx.float32).max / (2 * math.sqrt(x.shape[1] * x.shape[3]))
    return mx.where(mx.isfinite(x), mx.clip(x.astype(mx.float32) - mean.astype(mx.float32), -largest, largest), 0)
