"""Inputs, and how they are fed, for the tests of codes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq
from vq_functional.core.codec import Coder
from vq_functional.core.tree import flatten


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def directions(count: int, dim: int, seed: int = 0) -> mx.array:
    x = draw(1, 1, count, dim, seed=seed)
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def distortion(coder: Coder, x: mx.array) -> float:
    return mx.square(coder.decode(coder.encode(x)) - x).sum(axis=-1).mean().item()


def feed(transform: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = (), capacity: int = 64) -> Any:
    spec = vq.KVSpec(
        batch=keys.shape[0],
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        capacity=capacity,
    )
    return feed_more(transform, transform.init_state(spec), keys, values, cuts)


def feed_more(transform: Any, state: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = ()) -> Any:
    start = 0
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        piece = slice(start, start + count)
        state, *_ = transform.update(state, keys[:, :, piece], values[:, :, piece])
        start += count
    return state


def assert_same(one: Any, two: Any, count: int | None = None) -> None:
    """Equal bits in the first `count` rows."""
    rows = zip(flatten(one.rows)[0], flatten(two.rows)[0], strict=True)
    assert all(mx.array_equal(a[:, :, :count], b[:, :, :count]) for a, b in rows)
    assert mx.array_equal(one.offset, two.offset)
