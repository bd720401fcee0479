"""Small arithmetic on the last axis."""

import mlx.core as mx

TINY = 1e-30


def norm(x: mx.array) -> mx.array:
    """Euclidean norm [..., 1] of float32 `x`, scaled first so that squares can't overflow."""
    largest = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), TINY)
    return largest * mx.linalg.norm(x / largest, axis=-1, keepdims=True)


def to_dtype(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """`x` in `dtype`, clipped to its range."""
    limit = mx.finfo(dtype).max
    return mx.clip(x, -limit, limit).astype(dtype)
