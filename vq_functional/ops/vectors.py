"""Small arithmetic on the last axis."""

import functools
from collections.abc import Callable

import mlx.core as mx

TINY = 1e-30


def norm(x: mx.array) -> mx.array:
    """Euclidean norm float32 [..., 1].

    Numbers are scaled first, so that squares can't overflow; those of float16 can't anyhow.
    """
    if x.dtype == mx.float16:
        return mx.linalg.norm(x.astype(mx.float32), axis=-1, keepdims=True)
    x = x.astype(mx.float32)
    largest = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), TINY)
    return largest * mx.linalg.norm(x / largest, axis=-1, keepdims=True)


def unit(x: mx.array) -> mx.array:
    """Float32 `x` [..., D] at length 1, scaled first so that squares can't overflow; zeros stay zeros."""
    x = x / mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), TINY)
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), TINY)


def to_dtype(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Float32 `x` in `dtype`, clipped to its range."""
    return _clipped(dtype)(x)


@functools.lru_cache(maxsize=8)
def _clipped(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    limit = mx.finfo(dtype).max
    return mx.compile(lambda x: mx.clip(x, -limit, limit).astype(dtype))


def scaled(x: mx.array, lengths: mx.array, dtype: mx.Dtype) -> mx.array:
    """Float32 `x` [..., D] times `lengths` [...], clipped to the range of `dtype`."""
    return _scaled(dtype)(x, lengths[..., None])


@functools.lru_cache(maxsize=8)
def _scaled(dtype: mx.Dtype) -> Callable[[mx.array, mx.array], mx.array]:
    limit = mx.finfo(dtype).max
    return mx.compile(lambda x, lengths: mx.clip(x * lengths.astype(mx.float32), -limit, limit).astype(dtype))
