"""Signposts: the levels in [-1, 1] that numbers of a normalised range are rounded to."""

import functools
import math
from statistics import NormalDist

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vq_functional.ops.codebooks import lloyd_max

KINDS = ("gaussian", "uniform", "fitted")
GRID = 20_001
BINS = 1024  # of the histogram that levels are fitted to


@functools.lru_cache(maxsize=128)
def gaussian_signposts(bits: int, rows: int, outliers: float = 0.0) -> mx.array:
    """Lloyd-Max levels float32 [2**bits] for normal numbers whose range `rows` of them told.

    The range leaves out a share of `outliers`. About one number in `rows` lies
    at each end: it told the range, or is beyond it.
    """
    reach, ends = deviations(rows, outliers), 1 / (rows + 2)
    grid = np.linspace(-1, 1, GRID)
    density = np.exp(-((reach * grid) ** 2) / 2)
    density /= np.sum((density[1:] + density[:-1]) / 2) * (grid[1] - grid[0])
    density *= 1 - 2 * ends
    density[[0, -1]] += 2 * ends / (grid[1] - grid[0])  # a trapezoid takes half of its end
    return _table(lloyd_max(grid, density, 2**bits))


@functools.lru_cache(maxsize=8)
def uniform_signposts(bits: int) -> mx.array:
    """Levels float32 [2**bits] at equal steps from -1 to 1."""
    return _table(np.linspace(-1, 1, 2**bits))


def deviations(rows: int, outliers: float) -> float:
    """Half the range of normal numbers in standard deviations, by `rows` of them and without a share of `outliers`."""
    return NormalDist().inv_cdf(1 - _beyond(rows, outliers))


def range_error(rows: int, outliers: float) -> float:
    """Standard error of half such a range, relative to it."""
    beyond, reach = _beyond(rows, outliers), deviations(rows, outliers)
    at_each_end = math.sqrt(beyond * (1 - beyond) / rows) / NormalDist().pdf(reach)
    return at_each_end / math.sqrt(2) / reach


def _beyond(rows: int, outliers: float) -> float:
    return max(outliers / 2, 1 / (rows + 2))


def _table(levels: NDArray[np.float64]) -> mx.array:
    table = mx.array(levels.astype(np.float32))
    mx.eval(table)
    return table


def fitted_signposts(y: mx.array, counts: mx.array, start: mx.array, sweeps: int) -> mx.array:
    """Levels float32 [B, L] after `sweeps` of Lloyd's algorithm over a histogram, from the levels `start` [L].

    `y` [B, N] in [-1, 1], each counted `counts` [B, N] times. An empty cell keeps its level.
    """
    place = mx.clip(mx.floor((y + 1) * (BINS / 2)), 0, BINS - 1).astype(mx.int32)
    sequence = mx.arange(y.shape[0])[:, None]
    mass = mx.zeros((y.shape[0], BINS)).at[sequence, place].add(counts)
    centers = (mx.arange(BINS) + 0.5) * (2 / BINS) - 1
    below, moment = (_from_left(x) for x in (mass, mass * centers))
    levels = mx.broadcast_to(start, (y.shape[0], start.shape[0]))
    for _ in range(sweeps):
        edges = mx.clip(mx.ceil(((levels[:, 1:] + levels[:, :-1]) * 0.5 + 1) * (BINS / 2) - 0.5), 0, BINS)
        edges = mx.pad(edges.astype(mx.int32), [(0, 0), (1, 0)])
        edges = mx.pad(edges, [(0, 0), (0, 1)], constant_values=mx.array(BINS))
        inside, moments = (_differences(mx.take_along_axis(x, edges, axis=1)) for x in (below, moment))
        levels = mx.where(inside > 0, moments / mx.maximum(inside, 1e-20), levels)
    return levels


def weighted_signposts(y: mx.array, weights: mx.array, start: mx.array, sweeps: int) -> mx.array:
    """Levels float32 [L] after exact `sweeps` on the host, from the levels `start` [L]; `y` and `weights` [N]."""
    numbers, mass = np.array(y, np.float64), np.array(weights, np.float64)
    order = np.argsort(numbers, kind="stable")
    numbers, mass = numbers[order], mass[order]
    below, moment = (np.concatenate([[0.0], np.cumsum(x)]) for x in (mass, mass * numbers))
    levels = np.array(start, np.float64)
    for _ in range(sweeps):
        inner = np.searchsorted(numbers, (levels[1:] + levels[:-1]) / 2, side="right")
        edges = np.concatenate([[0], inner, [len(numbers)]])
        inside, moments = np.diff(below[edges]), np.diff(moment[edges])
        levels = np.where(inside > 0, moments / np.where(inside > 0, inside, 1), levels)
    return _table(levels)


def _from_left(x: mx.array) -> mx.array:
    return mx.pad(mx.cumsum(x, axis=-1), [(0, 0), (1, 0)])


def _differences(x: mx.array) -> mx.array:
    return x[:, 1:] - x[:, :-1]
