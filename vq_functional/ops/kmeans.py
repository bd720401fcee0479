"""K-means on the host: a seeded k-means++ start, Lloyd's rounds, empty cells reseeded."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vq_functional.core.errors import check

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

CHUNK = 2**18  # products at a time: few enough for a processor's cache, and for a BLAS not to start threads
STARTERS = 16  # samples a cell that the start is drawn from


def kmeans(samples: Floats, count: int, *, rounds: int = 30, seed: int = 0, whole: bool = False) -> Floats:
    """`count` centroids [count, d] of `samples` [N, d]; fewer than N distinct ones where N is small.

    `whole`: samples are whole numbers and centroids are rounded to such. While
    2 |x|^2 stays below 2**24 all products are then exact in float32, and the
    result is the same on every machine.
    """
    samples = samples[np.isfinite(samples).all(axis=1)]
    check(len(samples) > 0, "kmeans", "samples", "must have a row of finite numbers", samples.shape)
    centre = np.zeros(samples.shape[1], np.float32) if whole else samples.mean(axis=0)
    samples = np.ascontiguousarray(samples - centre, np.float32)
    random = np.random.RandomState(seed)  # its stream never changes
    centroids = _start(samples, count, random)
    cells: Indices | None = None
    for _ in range(rounds):
        before = cells
        cells, error = _assign(samples, centroids)
        if before is not None and np.array_equal(before, cells):
            break
        centroids = _means(samples, cells, error, count)
        centroids = np.round(centroids) if whole else centroids
    return centroids + centre


def _start(samples: Floats, count: int, random: np.random.RandomState) -> Floats:
    """Samples drawn one by one, each with a probability that grows with its squared distance from the nearest one."""
    drawn = random.permutation(len(samples))[: STARTERS * count]
    samples, chosen = samples[drawn], np.zeros(count, np.intp)
    distance = _squares(samples - samples[0])
    for i in range(1, count):
        total = np.cumsum(distance, dtype=np.float64)
        place = np.searchsorted(total, random.random_sample() * total[-1], side="right")
        chosen[i] = min(place, len(samples) - 1)
        distance = np.minimum(distance, _squares(samples - samples[chosen[i]]))
    return samples[chosen]


def _assign(samples: Floats, centroids: Floats) -> tuple[Indices, Floats]:
    """Nearest centroid of each sample, and its squared distance."""
    half, columns = _squares(centroids) / 2, np.ascontiguousarray(centroids.T)
    cells, best = np.empty(len(samples), np.intp), np.empty(len(samples), np.float32)
    step = max(1, CHUNK // centroids.size)
    for start in range(0, len(samples), step):
        span = slice(start, start + step)
        scores = samples[span] @ columns
        scores -= half
        cells[span] = scores.argmax(axis=1)
        best[span] = np.take_along_axis(scores, cells[span, None], axis=1)[:, 0]
    return cells, _squares(samples) - 2 * best


def _means(samples: Floats, cells: Indices, error: Floats, count: int) -> Floats:
    """Mean of each cell; an empty one takes a sample that is far from its centroid."""
    sizes = np.bincount(cells, minlength=count)
    sums = np.stack([np.bincount(cells, weights=column, minlength=count) for column in samples.T], axis=1)
    means = (sums / np.maximum(sizes, 1)[:, None]).astype(np.float32)
    empty = np.flatnonzero(sizes == 0)
    means[empty] = samples[np.resize(np.argsort(-error, kind="stable"), len(empty))]
    return means


def _squares(x: Floats) -> Floats:
    return np.einsum("nd,nd->n", x, x)


def on_host(x: mx.array) -> Floats:
    """Float32 numpy of an array of any dtype."""
    return np.array(x.astype(mx.float32))
