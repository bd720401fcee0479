"""Codes of levels that need not be symmetric, and may be each sequence's own."""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.ops.codebooks import count_below
from vq_functional.ops.packing import pack_slices, unpack_slices
from vq_functional.ops.scalar import ScalarCodes, scalar_codes

PLANE_BITS = 4  # up to so many bits levels come from arithmetic, with more from a table


@attrs.frozen(eq=False)
class FreeCodes(ScalarCodes):
    """Packed indices of levels that need not be symmetric and may be each sequence's own."""

    levels: mx.array  # float32 [B or 1, 2**bits], rising
    bits: int
    dim: int

    def encode(self, y: mx.array) -> tuple[mx.array, mx.array]:
        index = self._nearest(y)
        return pack_slices(index, self.bits), _look_up(self.levels, index)

    def decode(self, codes: mx.array) -> mx.array:
        index = unpack_slices(codes, self.bits, self.dim)
        if self.bits > PLANE_BITS:
            return _look_up(self.levels, index)
        weights = (self.levels[:, None] * _characters(self.bits)).sum(axis=-1) * 2.0**-self.bits
        return _sum_of_planes(self.bits)(index, weights.T[..., None, None, None])

    def _nearest(self, y: mx.array) -> mx.array:
        """Index uint32 of the nearest level: the number of midpoints below, by binary search where they are many."""
        edges = (self.levels[:, 1:] + self.levels[:, :-1]) * 0.5
        if self.bits <= PLANE_BITS:
            return _count_below(2**self.bits - 1)(y, edges.T[..., None, None, None])
        index, step = mx.zeros(y.shape, mx.uint32), 2 ** (self.bits - 1)
        while step:
            index = mx.where(y > _look_up(edges, index + (step - 1)), index + step, index)
            step //= 2
        return index


def level_codes(levels: mx.array, bits: int, dim: int) -> ScalarCodes:
    """Codes of any constant `levels` float32 [2**bits], rising."""
    if mx.array_equal(levels, -levels[::-1]).item():
        return scalar_codes(levels, bits, dim)
    return FreeCodes(levels[None], bits, dim)


def _look_up(table: mx.array, index: mx.array) -> mx.array:
    """Numbers of `table` [B or 1, L] at `index` [B, H, S, D]."""
    first = mx.arange(table.shape[0], dtype=mx.uint32) * table.shape[1]
    return table.reshape(-1)[index + first[:, None, None, None]]


@functools.lru_cache(maxsize=8)
def _count_below(count: int) -> Callable[[mx.array, mx.array], mx.array]:
    """How many of the first `count` edges lie below each number, in one fused pass."""

    return mx.compile(lambda y, edges: count_below(y, [edges[i] for i in range(count)]))


@functools.lru_cache(maxsize=8)
def _characters(bits: int) -> mx.array:
    """Products of signs float32 [subset of bits, code], a sign being -1 where the bit is set."""
    codes = np.arange(2**bits)
    shared = codes[:, None] & codes
    set_bits = (shared[..., None] >> np.arange(bits) & 1).sum(axis=-1)
    table = mx.array((1 - 2 * (set_bits & 1)).astype(np.float32))
    mx.eval(table)
    return table


@functools.lru_cache(maxsize=8)
def _sum_of_planes(bits: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Levels as a sum over subsets of the code's bits: for two, a0 + a1 s + a2 t + a3 s t."""

    def levels(index: mx.array, weights: mx.array) -> mx.array:
        terms = [weights[subset] for subset in range(2**bits)]
        for bit in range(bits):
            sign = 1 - 2 * ((index >> bit) & 1).astype(mx.float32)
            terms = [even + odd * sign for even, odd in zip(terms[::2], terms[1::2], strict=True)]
        return terms[0]

    return mx.compile(levels)
