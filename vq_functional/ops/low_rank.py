"""Low-rank parts of small matrices by power iteration; no linear algebra that leaves the compiled step."""

import functools
import math

import mlx.core as mx
import numpy as np

from vq_functional.ops.vectors import TINY

ROUNDS = 3
NEGLIGIBLE = 1e-5  # of a column that is left of it once the others' share is taken out


def low_rank(x: mx.array, start: mx.array) -> tuple[mx.array, mx.array]:
    """Factors [..., N, r] and [..., D, r] of the leading part of float32 `x` [..., N, D].

    The first is orthonormal, its product with the second a projection of `x`.
    `start` [D, r] is what the iteration begins with.
    """
    size = mx.maximum(mx.abs(x).max(axis=(-1, -2), keepdims=True), TINY)
    x = x / size  # so that squares can't overflow
    right = start
    for _ in range(ROUNDS):
        left = orthonormal(x @ right)
        right = x.swapaxes(-1, -2) @ left
    return left, right * size


def orthonormal(x: mx.array) -> mx.array:
    """The columns of `x` [..., N, r] made orthonormal in turn; zero where one depends on those before it."""
    columns: list[mx.array] = []
    for i in range(x.shape[-1]):
        column = x[..., i : i + 1]
        whole = _length(column)
        if columns:
            before = mx.concatenate(columns, axis=-1)
            for _ in range(2):  # once leaves what rounding brought in
                column = column - before @ (before.swapaxes(-1, -2) @ column)
        length = _length(column)
        columns.append(mx.where(length > NEGLIGIBLE * whole, column / mx.maximum(length, TINY), 0))
    return mx.concatenate(columns, axis=-1)


@functools.lru_cache(maxsize=64)
def noise_spectrum(rows: int, columns: int) -> tuple[float, ...]:
    """Singular values of white noise [rows, columns], falling."""
    noise = np.random.default_rng(0).standard_normal((rows, columns))
    return tuple(np.linalg.svd(noise, compute_uv=False).tolist())


@functools.lru_cache(maxsize=64)
def start_basis(dim: int, rank: int) -> mx.array:
    """Random float32 [dim, rank], the same for every matrix."""
    basis = mx.random.normal((dim, rank), key=mx.random.key(0))
    mx.eval(basis)
    return basis


def _length(column: mx.array) -> mx.array:
    return mx.sqrt(mx.square(column).sum(axis=-2, keepdims=True))


def shrink(features: int, dtype: mx.Dtype) -> float:
    """What latents of rows of so many numbers of `dtype` are multiplied with, so that they are such numbers too."""
    # A difference of two numbers can be twice as large, and a row sqrt(features) times as long.
    return 0.5 ** (1 + math.ceil(math.log2(features) / 2)) if dtype == mx.float16 else 1.0
