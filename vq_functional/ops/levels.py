"""Levels of a symmetric codebook at packed codes, by arithmetic where that beats a table.

A codebook of 2**bits levels is an odd polynomial of the centred code; up to
four bits its 2**(bits-1) coefficients give the levels to float32 accuracy,
and MLX fuses unpacking and polynomial into one pass.
"""

import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from vq_functional.ops.packing import WORD, cut, split_words, unpack_slices

POLYNOMIAL_BITS = 4


def polynomial(levels: mx.array) -> mx.array:
    """Coefficients float32 [L/2] of c[i] = u (a_0 + a_1 u^2 + ...), u = (2i - L + 1) / (L - 1)."""
    table = np.array(levels, np.float64)
    count = len(table)
    u = (2 * np.arange(count // 2, count) - count + 1) / (count - 1)
    powers = u[:, None] ** (2 * np.arange(count // 2) + 1)
    coefficients = mx.array(np.linalg.solve(powers, table[count // 2 :]).astype(np.float32))
    mx.eval(coefficients)
    return coefficients


def levels_at(codes: mx.array, levels: mx.array, coefficients: mx.array | None, bits: int, dim: int) -> mx.array:
    """Float32 [..., dim]: `levels` [2**bits] at codes [..., words] of `pack_slices`."""
    if coefficients is None:
        return levels[unpack_slices(codes, bits, dim)]
    if WORD % bits == 0:
        return _levels_of_words(bits, dim)(codes, coefficients)
    return levels_of_numbers(bits)(unpack_slices(codes, bits, dim), coefficients)


@functools.lru_cache(maxsize=64)
def _levels_of_words(bits: int, dim: int) -> Callable[[mx.array, mx.array], mx.array]:
    def levels(codes: mx.array, coefficients: mx.array) -> mx.array:
        return cut(_evaluate(split_words(codes, bits).astype(mx.float32), coefficients, bits), dim)

    return mx.compile(levels)


@functools.lru_cache(maxsize=8)
def levels_of_numbers(bits: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Levels float32 at codes of any shape, one a number, by the coefficients of `polynomial`."""
    return mx.compile(lambda codes, coefficients: _evaluate(codes.astype(mx.float32), coefficients, bits))


def _evaluate(numbers: mx.array, coefficients: mx.array, bits: int) -> mx.array:
    top = 2**bits - 1
    u = (2 * numbers - top) * (1 / top)
    square, total = u * u, coefficients[-1]
    for power in range(2 ** (bits - 1) - 2, -1, -1):
        total = total * square + coefficients[power]
    return total * u
