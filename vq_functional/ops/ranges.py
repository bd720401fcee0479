"""Ranges of numbers among which some may not be finite."""

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
