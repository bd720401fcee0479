"""Levels of a symmetric codebook at packed codes, by arithmetic where that beats a table.

A codebook of 2**bits levels is an odd polynomial of the centred code; up to
four bits its 2**(bits-1) coefficients give the levels to float32 accuracy,
and MLX fuses unpacking and polynomial into one pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from vq_functional.ops.packing import WORD, cut, split_words, unpack_slices

POLYNOMIAL_BITS = 4

Coefficients: TypeAlias = tuple[float, ...]  # numbers of compiled code


def polynomial(levels: mx.array) -> Coefficients:
    """The L/2 float32 coefficients of c[i] = u (a_0 + a_1 u^2 + ...), u = (2i - L + 1) / (L - 1)."""
    table = np.array(levels, np.float64)
    count = len(table)
    u = (2 * np.arange(count // 2, count) - count + 1) / (count - 1)
    powers = u[:, None] ** (2 * np.arange(count // 2) + 1)
    coefficients: Any = np.linalg.solve(powers, table[count // 2 :]).astype(np.float32).tolist()
    return tuple(coefficients)


def levels_at(codes: mx.array, levels: mx.array, coefficients: Coefficients | None, bits: int, dim: int) -> mx.array:
    """Float32 [..., dim]: `levels` [2**bits] at codes [..., words] of `pack_slices`."""
    if coefficients is None:
        return levels[unpack_slices(codes, bits, dim)]
    if WORD % bits == 0:
        return levels_of_words(coefficients, bits, dim)(codes)
    return levels_of_numbers(coefficients)(unpack_slices(codes, bits, dim))


@functools.lru_cache(maxsize=256)
def levels_of_numbers(coefficients: Coefficients) -> Callable[[mx.array], mx.array]:
    """Levels float32 at codes of any shape, one a number."""
    return mx.compile(lambda codes: evaluated(codes.astype(mx.float32), coefficients))


def evaluated(numbers: mx.array, coefficients: Sequence[float | mx.array]) -> mx.array:
    """Levels at float32 `numbers` 0 to 2 * len(coefficients) - 1."""
    top = 2 * len(coefficients) - 1
    u = (2 * numbers - top) * (1 / top)
    square, total = u * u, coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * square + coefficient
    return total * u


@functools.lru_cache(maxsize=256)
def levels_of_words(coefficients: Coefficients, bits: int, dim: int) -> Callable[[mx.array], mx.array]:
    """Levels float32 [..., dim] at codes [..., words] of `pack_slices`, of bits that divide a word."""

    def levels(codes: mx.array) -> mx.array:
        return cut(evaluated(split_words(codes, bits).astype(mx.float32), coefficients), dim)

    return mx.compile(levels)
