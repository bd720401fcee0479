"""Lloyd-Max codebooks, solved once in float64 and kept."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Edges: TypeAlias = tuple[float, ...]

GRID = 40_001
TOLERANCE = 1e-10
ROUNDS = 20_000
MANY_EDGES = 64  # from so many on a search is faster than to compare with all


@functools.lru_cache(maxsize=128)
def sphere_codebook(dim: int, bits: int) -> mx.array:
    """Levels float32 [2**bits] for one coordinate of a uniform unit vector of `dim` (arXiv 2504.19874, section 3)."""
    return _table(_sphere_levels(dim, bits))


@functools.lru_cache(maxsize=128)
def residual_codebook(dim: int, bits: int) -> mx.array:
    """Levels float32 [2**bits] for what `sphere_codebook` of the same bits leaves over."""
    levels = _sphere_levels(dim, bits)
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    cell = float(np.max(np.diff(levels)))
    reach = max(cell, float(_sphere_density(dim)[0][-1] - levels[-1]))
    tail = np.linspace(cell, reach, GRID)[1:] if reach > cell else np.empty(0)
    rest = np.concatenate([-tail[::-1], np.linspace(-cell, cell, GRID), tail])
    density = np.zeros_like(rest)
    for level, low, high in zip(levels, edges[:-1], edges[1:], strict=True):
        value = rest + level
        density += np.where((value > low) & (value < high), _sphere_pdf(value, dim), 0.0)
    return _table(lloyd_max(rest, density, 2**bits))


@functools.lru_cache(maxsize=128)
def laplace_codebook(dim: int, bits: int) -> mx.array:
    """Levels float32 [2**bits] for a Laplacian residual of variance sqrt(3 pi)/2 * 4**-bits / dim."""
    beta = np.sqrt(np.sqrt(3 * np.pi) / 2 * 4.0**-bits / dim / 2)
    grid = np.linspace(-8 * beta, 8 * beta, GRID)
    return _table(lloyd_max(grid, np.exp(-np.abs(grid) / beta), 2**bits))


def lloyd_max(grid: Floats, density: Floats, levels: int) -> Floats:
    """Levels that minimise the mean squared error for a symmetric `density` given on `grid`.

    Starts at the quantiles of density**(1/3), the optimum for many levels of a
    smooth density, and at equal masses, which suits a density with far tails;
    each level moves to the mean of its cell until nothing moves, and the
    better end is kept.
    """
    mass, moment = _cumulative(grid, density), _cumulative(grid, density * grid)
    ends = []
    for start in (_cumulative(grid, np.cbrt(density)), mass):
        centroids = np.interp((np.arange(levels) + 0.5) / levels * start[-1], start, grid)
        ends.append(_settle(grid, mass, moment, centroids))
    return max(ends, key=lambda end: end[0])[1]


def _settle(grid: Floats, mass: Floats, moment: Floats, centroids: Floats) -> tuple[float, Floats]:
    """Explained energy, which is highest at the least error, and the levels."""
    for _ in range(ROUNDS):
        edges = np.concatenate([[grid[0]], (centroids[1:] + centroids[:-1]) / 2, [grid[-1]]])
        cell = np.diff(np.interp(edges, grid, mass))
        mean = np.diff(np.interp(edges, grid, moment)) / np.where(cell > 0, cell, 1)
        moved = np.where(cell > mass[-1] * 1e-12, mean, centroids)
        moved = (moved - moved[::-1]) / 2
        step = np.max(np.abs(moved - centroids))
        centroids = moved
        if step < TOLERANCE * grid[-1]:
            break
    return float(np.sum(cell * centroids**2)), centroids


def boundaries(levels: mx.array) -> Edges:
    """Midpoints between the neighbouring of float32 `levels` [L], L - 1 of them."""
    middle: Any = ((levels[1:] + levels[:-1]) * 0.5).tolist()
    return tuple(middle)


def nearest(x: mx.array, edges: Edges) -> mx.array:
    """Index uint32 of the cell of each number between 2**bits - 1 rising float32 `edges`: how many lie below it."""
    return _cells(edges)(x)


def count_below(x: mx.array, edges: Sequence[mx.array | float]) -> mx.array:
    """How many of the edges lie below each number, uint32; sums in pairs are shallow enough to be fused."""
    counts = [(x > edge).astype(mx.uint32) for edge in edges]
    while len(counts) > 1:
        paired = [one + other for one, other in zip(counts[::2], counts[1::2])]
        counts = paired + counts[2 * len(paired) :]
    return counts[0]


@functools.lru_cache(maxsize=256)
def _cells(edges: Edges) -> Callable[[mx.array], mx.array]:
    """`nearest` in one pass where edges are few; they are numbers of the compiled code then."""
    if len(edges) < MANY_EDGES:
        return mx.compile(lambda x: count_below(x, edges))
    table = mx.array(edges)
    mx.eval(table)
    return mx.compile(lambda x: _search(x, table))


def _search(x: mx.array, edges: mx.array) -> mx.array:
    """Index uint32 of the cell of each number, by binary search over 2**bits - 1 edges."""
    index = mx.zeros(x.shape, mx.uint32)
    step = (edges.shape[0] + 1) // 2
    while step:
        index = mx.where(x > edges[index + (step - 1)], index + step, index)
        step //= 2
    return index


@functools.lru_cache(maxsize=128)
def _sphere_levels(dim: int, bits: int) -> Floats:
    return lloyd_max(*_sphere_density(dim), 2**bits)


def _sphere_density(dim: int) -> tuple[Floats, Floats]:
    reach = min(1.0, 10 / np.sqrt(dim))
    grid = np.linspace(-reach, reach, GRID)
    return grid, _sphere_pdf(grid, dim)


def _sphere_pdf(t: Floats, dim: int) -> Floats:
    """Density of a coordinate up to a factor: (1 - t^2)^((D-3)/2)."""
    return np.maximum(1 - t * t, 1e-12) ** ((dim - 3) / 2) * (np.abs(t) <= 1)


def _cumulative(grid: Floats, density: Floats) -> Floats:
    """Integral from the left end, by trapezoids."""
    steps = (density[1:] + density[:-1]) / 2 * np.diff(grid)
    return np.concatenate([[0.0], np.cumsum(steps)])


def _table(levels: Floats) -> mx.array:
    table = mx.array(levels.astype(np.float32))
    mx.eval(table)
    return table
