"""Lloyd-Max tables: known values, the two conditions of an optimum, and the distortion by an own quadrature."""

import itertools
import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from vq_functional.ops.codebooks import (
    boundaries,
    laplace_codebook,
    lloyd_max,
    nearest,
    residual_codebook,
    sphere_codebook,
)

Density = Callable[[np.ndarray], np.ndarray]
TABLES = {"sphere": sphere_codebook, "residual": residual_codebook, "laplace": laplace_codebook}
tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
LARGE = 4096  # a head size at which a coordinate is normal to four digits


def coordinate(dim: int) -> Density:
    """Density of one coordinate of a uniform unit vector: Gamma(D/2) / (sqrt(pi) Gamma((D-1)/2)) (1-t^2)^((D-3)/2)."""
    log_factor = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi) / 2

    def density(t: np.ndarray) -> np.ndarray:
        inside = np.abs(t) < 1
        return np.where(inside, np.exp(log_factor + (dim - 3) / 2 * np.log(np.where(inside, 1 - t * t, 1))), 0)

    return density


def cells(levels: np.ndarray, reach: float, count: int = 40_000) -> list[np.ndarray]:
    """Midpoints of fine intervals, cell by cell, that cover [-reach, reach]."""
    edges = [-reach, *(levels[1:] + levels[:-1]) / 2, reach]
    fine = max(50, count // len(levels))
    return [low + (high - low) * (np.arange(fine) + 0.5) / fine for low, high in itertools.pairwise(edges)]


def moments(levels: np.ndarray, density: Density, reach: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Mass and mean of each cell, and the mean squared error of a unit mass."""
    mass, mean, error = [], [], 0.0
    for level, points in zip(levels, cells(levels, reach)):
        weight = density(points) * (points[1] - points[0])
        mass.append(weight.sum())
        mean.append((weight * points).sum() / weight.sum())
        error += (weight * (points - level) ** 2).sum()
    return np.array(mass), np.array(mean), error


def as_numpy(levels: mx.array) -> np.ndarray:
    return np.array(levels).astype(np.float64)


def sphere_levels(dim: int, bits: int) -> np.ndarray:
    return as_numpy(sphere_codebook(dim, bits))


def left_over(dim: int, bits: int) -> Density:
    """Density of what the first table leaves over: sum of f(r + c_i) over the cells that r + c_i lies in."""
    levels, density = sphere_levels(dim, bits), coordinate(dim)
    edges = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]

    def rest(r: np.ndarray) -> np.ndarray:
        total = np.zeros_like(r)
        for level, low, high in zip(levels, edges[:-1], edges[1:]):
            total += np.where((r + level > low) & (r + level <= high), density(r + level), 0)
        return total

    return rest


@pytest.mark.parametrize(
    "bits, want",
    [
        (1, [0.7979]),
        (2, [0.4528, 1.5104]),
        (3, [0.2451, 0.7560, 1.3439, 2.1520]),
    ],
)
def test_normal_levels(bits: int, want: list[float]) -> None:
    levels = sphere_levels(LARGE, bits) * math.sqrt(LARGE)
    np.testing.assert_allclose(levels[len(levels) // 2 :], want, rtol=0.01)


@pytest.mark.parametrize("dim", [3, 4, 16, 64, 128, 256])
def test_one_bit_is_the_mean_absolute_coordinate(dim: int) -> None:
    want = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    np.testing.assert_allclose(sphere_levels(dim, 1), [-want, want], rtol=2e-3)


@pytest.mark.parametrize("bits", range(1, 6))
def test_a_coordinate_in_three_dimensions_is_uniform(bits: int) -> None:
    count = 2**bits
    want = (2 * np.arange(count) + 1) / count - 1
    np.testing.assert_allclose(sphere_levels(3, bits), want, atol=2e-3 / count)


@pytest.mark.parametrize("bits, want", [(1, [0.4826]), (2, [0.15, 0.4513]), (3, [0.0535, 0.1604, 0.2676, 0.8754])])
def test_fitted_residual_levels(bits: int, want: list[float]) -> None:
    levels = as_numpy(residual_codebook(LARGE, bits)) * math.sqrt(LARGE)
    np.testing.assert_allclose(levels[len(levels) // 2 :], want, rtol=0.01)


@pytest.mark.parametrize("bits, dim", [(1, 64), (2, 64), (2, 128), (3, 128)])
def test_laplace_levels_scale_with_the_assumed_residual(bits: int, dim: int) -> None:
    variance = math.sqrt(3 * math.pi) / 2 * 4.0**-bits / dim
    beta = math.sqrt(variance / 2)
    levels = as_numpy(laplace_codebook(dim, bits)) / beta
    if bits == 1:
        # Mean of |x| of a Laplacian cut at 8 scales.
        np.testing.assert_allclose(levels, [-0.9973, 0.9973], rtol=1e-3)
    mass, mean, _ = moments(levels, lambda x: np.exp(-np.abs(x)) / 2, 8.0)
    np.testing.assert_allclose(levels, mean, rtol=1e-3)
    assert mass.sum() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "dim, bits",
    [*itertools.product((2, 3, 5, 16, 80, 128), range(1, 6)), (64, 6), (128, 6), (64, 8), (128, 7), (128, 8)],
)
def test_levels_rise_and_mirror(dim: int, bits: int) -> None:
    for table in TABLES.values():
        levels = table(dim, bits)
        assert levels.dtype == mx.float32 and levels.shape == (2**bits,)
        assert (levels[1:] > levels[:-1]).all()
        assert mx.array_equal(levels, -levels[::-1])
    assert mx.abs(sphere_codebook(dim, bits)).max().item() < 1


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_every_level_is_the_mean_of_its_cell(bits: int, dim: int) -> None:
    reach = min(1.0, 9 / math.sqrt(dim))
    levels = sphere_levels(dim, bits)
    mass, mean, _ = moments(levels, coordinate(dim), reach)
    assert mass.sum() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(levels, mean, atol=2e-3 * np.diff(levels).min())


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_every_fitted_level_is_the_mean_of_its_cell(bits: int) -> None:
    levels = as_numpy(residual_codebook(128, bits))
    _, mean, _ = moments(levels, left_over(128, bits), 0.5)
    np.testing.assert_allclose(levels, mean, atol=5e-3 * np.diff(levels).min())


@pytest.mark.parametrize(
    "dim, want", [(128, (0.36089, 0.11600, 0.03397, 0.00931)), (LARGE, (0.36338, 0.11748, 0.03455, 0.00950))]
)
def test_distortion_table(dim: int, want: tuple[float, ...]) -> None:
    for bits, distortion in enumerate(want, start=1):
        _, _, error = moments(sphere_levels(dim, bits), coordinate(dim), min(1.0, 9 / math.sqrt(dim)))
        assert dim * error == pytest.approx(distortion, rel=0.01)


@pytest.mark.parametrize("dim", [128])
def test_distortion_falls_by_four_and_stays_under_the_bound(dim: int) -> None:
    errors = [
        dim * moments(sphere_levels(dim, bits), coordinate(dim), min(1.0, 9 / math.sqrt(dim)))[2]
        for bits in range(1, 9)
    ]
    for bits, error in enumerate(errors, start=1):
        assert error <= 2.7207 * 4.0**-bits
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    assert (ratios > 3).all() and (ratios < 4).all() and (np.diff(ratios) > 0).all()


@pytest.mark.parametrize("kind", ["fitted", "laplace"])
@pytest.mark.parametrize("bits, fitted, laplace", [(1, 0.1305, 0.1326), (2, 0.0197, 0.0234), (3, 0.0019, 0.0028)])
def test_distortion_of_two_stages(bits: int, fitted: float, laplace: float, kind: str) -> None:
    table, want = (residual_codebook, fitted) if kind == "fitted" else (laplace_codebook, laplace)
    levels = as_numpy(table(LARGE, bits)) * math.sqrt(LARGE)
    density = left_over(LARGE, bits)
    scaled = lambda r: density(r / math.sqrt(LARGE)) / math.sqrt(LARGE)  # noqa: E731
    _, _, error = moments(levels, scaled, 7.0)
    assert error == pytest.approx(want, rel=0.01, abs=6e-5)


@tables
def test_a_table_is_made_once(table: Callable[[int, int], mx.array]) -> None:
    assert table(96, 2) is table(96, 2)
    assert table(96, 2) is not table(96, 3)


@pytest.mark.parametrize("levels", [2, 4, 7, 16])
def test_uniform_density(levels: int) -> None:
    grid = np.linspace(-1, 1, 20_001)
    got = lloyd_max(grid, np.ones_like(grid), levels)
    np.testing.assert_allclose(got, (2 * np.arange(levels) + 1) / levels - 1, atol=1e-3 / levels)


@pytest.mark.parametrize("dim", [64, 100_000])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_nearest_counts_the_boundaries_below(bits: int, dim: int) -> None:
    """Exactly, also of numbers on a boundary and beside one: the boundaries become numbers of compiled code."""
    levels = sphere_codebook(dim, bits)
    edges = boundaries(levels)
    np.testing.assert_allclose(np.array(edges), (np.array(levels)[1:] + np.array(levels)[:-1]) / 2, rtol=1e-6)
    exact = np.array(edges, np.float32)
    beside = [np.nextafter(exact, np.float32(side)) for side in (-9, 9)]
    drawn = np.array(mx.random.normal((500,), key=mx.random.key(bits))) * 0.2
    x = mx.array(np.concatenate([drawn, exact, *beside, np.array(levels), [-9.0, 9.0]]).astype(np.float32))
    got = np.array(nearest(x, edges))
    want = [sum(edge < number for edge in edges) for number in x.tolist()]
    assert got.tolist() == want
    distance = np.abs(np.array(x)[:, None] - np.array(levels)[None])
    assert np.allclose(distance[np.arange(len(got)), got], distance.min(axis=1), atol=1e-7)


def test_nearest_keeps_its_shape_and_takes_infinities() -> None:
    edges = boundaries(sphere_codebook(64, 3))
    x = mx.array([[[-mx.inf, mx.inf, mx.nan]]])
    got = nearest(x, edges)
    assert got.shape == x.shape and got[0, 0, :2].tolist() == [0, 7] and got.max().item() < 8
