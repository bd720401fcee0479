"""Codes of spectral: two blocks of coordinates with a codebook and a scale each, and a sketch of what is left over."""

import functools
import math
from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.codebook.qjl import sketch_matrix
from vq_functional.core.codec import Rows
from vq_functional.ops.codebooks import GRID, Edges, boundaries, lloyd_max, nearest, sphere_codebook
from vq_functional.ops.levels import POLYNOMIAL_BITS, Coefficients, evaluated, levels_of_words, polynomial
from vq_functional.ops.packing import WORD, pack_slices, unpack_slices, words
from vq_functional.ops.rows import extend_last
from vq_functional.ops.vectors import norm


@attrs.frozen(eq=False)
class BlockCodes:
    """Indices into the codebooks of two blocks of coordinates, as `pack_slices` packs them; the second may be empty."""

    bits: int
    first: int  # coordinates of the first block
    dim: int
    levels: mx.array  # float32 [blocks * 2**bits]
    edges: tuple[Edges, ...]  # of each block
    polynomials: tuple[Coefficients, ...]  # of each block, where these beat a table

    def encode(self, unit: mx.array) -> tuple[mx.array, mx.array]:
        """Codes uint32 [..., words] of the levels nearest to float32 `unit` [..., D], and these levels."""
        later = (mx.arange(self.dim) >= self.first).astype(mx.uint32)
        blocks = zip(mx.split(unit, [self.first], axis=-1), self.edges)
        index = mx.concatenate([nearest(block, edges) for block, edges in blocks], axis=-1)
        return pack_slices(index, self.bits), self.levels[index + later * 2**self.bits]

    def decode(self, codes: mx.array, scales: mx.array) -> mx.array:
        """Float32 [..., D]: levels times the `scales` [..., 2] of their blocks."""
        scales = scales.astype(mx.float32)
        if self.polynomials:
            return _computed(self.polynomials, self.bits, self.first, self.dim)(codes, scales)
        return _looked_up(self.bits, self.first, self.dim)(codes, scales, self.levels)

    def sums(self, x: mx.array) -> mx.array:
        """Sums [..., 2] of `x` [..., D] over each block."""
        return mx.stack([x[..., : self.first].sum(axis=-1), x[..., self.first :].sum(axis=-1)], axis=-1)

    def spread(self, pair: mx.array) -> mx.array:
        """Numbers [..., 2] of the blocks at each of their coordinates: [..., D]."""
        return mx.where(mx.arange(self.dim) < self.first, pair[..., :1], pair[..., 1:])


def block_codes(bits: int, first: int, dim: int, codebook: str) -> BlockCodes:
    """Codes of a block of `first` coordinates and one of the others; their tables are evaluated."""
    sizes = (first, dim - first) if first < dim else (dim,)
    levels = [block_levels(size, bits, codebook) for size in sizes]
    polynomials = tuple(map(polynomial, levels)) if bits <= POLYNOMIAL_BITS else ()
    every = mx.concatenate(levels)
    mx.eval(every)
    return BlockCodes(bits, first, dim, every, tuple(map(boundaries, levels)), polynomials)


@functools.lru_cache(maxsize=256)
def _looked_up(bits: int, first: int, dim: int) -> Callable[..., mx.array]:
    """Levels of a table times scales."""

    def decode(codes: mx.array, scales: mx.array, table: mx.array) -> mx.array:
        inside = mx.arange(dim) < first
        levels = table[unpack_slices(codes, bits, dim) + mx.where(inside, 0, 2**bits)]
        return levels * mx.where(inside, scales[..., :1], scales[..., 1:])

    return mx.compile(decode)


@functools.lru_cache(maxsize=256)
def _computed(polynomials: tuple[Coefficients, ...], bits: int, first: int, dim: int) -> Callable[..., mx.array]:
    """Levels of a polynomial for each block, times scales, in as few passes as the width of the codes allows."""

    def mixed(codes: mx.array, scales: mx.array) -> mx.array:
        inside = mx.arange(dim) < first
        coefficients = [mx.where(inside, one, other) for one, other in zip(polynomials[0], polynomials[-1])]
        levels = evaluated(unpack_slices(codes, bits, dim).astype(mx.float32), coefficients)
        return levels * mx.where(inside, scales[..., :1], scales[..., 1:])

    def apart(codes: mx.array, scales: mx.array) -> mx.array:
        # One set of coefficients a pass is faster than one a coordinate: the first block's words are read twice.
        head = codes[..., : words(first, bits)]
        inside = levels_of_words(polynomials[0], bits, first)(head) * scales[..., :1]
        if len(polynomials) == 1:
            return inside
        every = levels_of_words(polynomials[1], bits, dim)(codes) * scales[..., 1:]
        return mx.concatenate([inside, every[..., first:]], axis=-1)

    return mx.compile(apart if WORD % bits == 0 else mixed)


@functools.lru_cache(maxsize=256)
def block_levels(size: int, bits: int, codebook: str) -> mx.array:
    """Levels float32 [2**bits] for coordinates of unit mean square of a block of `size`.

    "gaussian": of a normal variable. "sphere": of a point on the sphere of that
    size, which has an arcsine density at 2 and no other values than +-1 at 1.
    """
    if codebook == "sphere" and size > 2:
        levels = sphere_codebook(size, bits) * math.sqrt(size)
    elif codebook == "sphere" and size == 1:
        levels = mx.linspace(-1, 1, 2**bits)
    else:
        reach = 10.0 if codebook == "gaussian" else math.sqrt(2)
        grid = np.linspace(-reach, reach, GRID)
        edges = np.clip(np.concatenate([grid[:1], (grid[1:] + grid[:-1]) / 2, grid[-1:]]), -reach, reach)
        arcsine = np.diff(np.arcsin(edges / reach)) / np.diff(edges)
        density = np.exp(-grid * grid / 2) if codebook == "gaussian" else arcsine
        levels = mx.array(lloyd_max(grid, density, 2**bits).astype(np.float32))
    mx.eval(levels)
    return levels


@attrs.frozen(eq=False)
class RestSketch:
    """Signs of projections of a short vector, and its length: ceil(m / 8) + 2 bytes."""

    matrix: mx.array  # float32 [m, n]
    constant: float  # makes the estimate unbiased over sketches

    @property
    def size(self) -> int:
        return self.matrix.shape[0]

    def encode(self, rest: mx.array, dtype: mx.Dtype) -> Rows:
        """Signs uint8 [..., ceil(m / 8)], and lengths [...] in `dtype`, of float32 `rest` [..., n]."""
        length = norm(rest)[..., 0]
        positive = extend_last((rest @ self.matrix.T >= 0).astype(mx.uint8), -(-self.size // 8) * 8)
        plane = (positive.reshape(*positive.shape[:-1], -1, 8) << mx.arange(8, dtype=mx.uint8)).sum(axis=-1)
        return plane.astype(mx.uint8), mx.where(mx.isfinite(length), length, 0).astype(dtype)

    def weights(self, plane: mx.array, length: mx.array) -> mx.array:
        """Float32 [..., m]: what the projections weigh, so that the estimate is weights @ matrix."""
        signs = ((plane[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1).flatten(-2)[..., : self.size]
        return (signs.astype(mx.float32) * 2 - 1) * (length.astype(mx.float32) * (self.constant / self.size))[..., None]


def rest_sketch(size: int, seed: int, kind: str) -> RestSketch:
    """As many projections as the vector has numbers, by "orthogonal" or "gaussian" rows."""
    return RestSketch(*sketch_matrix(size, size, seed, kind))
