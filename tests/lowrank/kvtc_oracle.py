"""kvtc head by head and component by component in numpy: layout, allocation, ranges, bit fields, codes."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from svdq_oracle import UNIT, fitted, numbers

DEFAULTS: dict[str, Any] = {
    "bit_budget": 512,
    "bit_choices": (0, 1, 2, 3, 4, 6, 8),
    "beta": 3.5,
    "n_sink": 4,
    "window": 128,
    "chunk": 16,
    "n_fit": 128,
    "rank": None,
    "shrinkage": None,
    "ranges": "spread",
    "margin": 0.1,
}
SIDES = ("keys", "values")


def layout(n: int, o: dict[str, Any]) -> tuple[int, int]:
    """Rows that the axes are fitted to, and rows in codes after `n` tokens."""
    first = o["window"] + o["chunk"]
    while first < o["n_fit"]:
        first += o["chunk"]
    return first, (n - o["window"]) // o["chunk"] * o["chunk"] if n >= first else 0


def tables(state: Any, side: str = "keys", row: int = 0) -> list[np.ndarray]:
    """Axes [H, D, r], mean [H, D], width, scale and shift [H, r]."""
    basis, mean, width, scale, shift = getattr(state, side).tables
    assert width.dtype == mx.uint8 and scale.dtype == shift.dtype == mx.float32
    return [numbers(x)[row] for x in (basis, mean)] + [np.array(x)[row].astype(float) for x in (width, scale, shift)]


def live(state: Any, row: int = 0) -> list[mx.array]:
    """Words of the rows in codes, and tables, of one sequence."""
    coded = state.coded[row].item()
    words = [getattr(state, side).rows[0][row][..., :coded] for side in SIDES]
    return [*words, *(x[row] for side in SIDES for x in getattr(state, side).tables)]


def assert_same(one: Sequence[mx.array], two: Sequence[mx.array]) -> None:
    for got, want in zip(one, two, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and mx.array_equal(got, want)


# Bits


def fields(words: np.ndarray, width: Sequence[int]) -> np.ndarray:
    """Codes [r, S] of words [W, S]: each token a number of 32 W bits, with the first field in its lowest bits."""
    assert words.dtype == np.uint32 and words.shape[0] * 32 >= sum(width)
    out = np.zeros((len(width), words.shape[1]), int)
    for token in range(words.shape[1]):
        left = sum(int(word) << 32 * i for i, word in enumerate(words[:, token]))
        for i, bits in enumerate(width):
            out[i, token], left = left & ((1 << int(bits)) - 1), left >> int(bits)
        assert left == 0
    return out


def cost(variance: Sequence[float], width: Sequence[int], beta: float) -> float:
    return sum(v * beta ** -float(b) for v, b in zip(variance, width, strict=True))


def brute_force(variance: Sequence[float], budget: int, choices: Sequence[int], beta: float) -> float:
    """Least cost of all ways to give each component one of the choices."""
    ways = itertools.product(choices, repeat=len(variance))
    return min(cost(variance, way, beta) for way in ways if sum(way) <= budget)


def least_cost(variance: Sequence[float], budget: int, choices: Sequence[int], beta: float) -> float:
    """The same, one component after the other."""
    best = [0.0] * (budget + 1)
    for v in sorted(variance):
        best = [min(best[c - b] + v * beta**-b for b in choices if b <= c) for c in range(budget + 1)]
    return best[budget]


@functools.cache
def reach(bits: int) -> float:
    """End of 2**bits evenly spaced levels around zero that lose least of a normal variable."""

    def loss(end: float) -> float:
        levels = np.linspace(-end, end, 2**bits)
        edges = [-math.inf, *(levels[1:] + levels[:-1]) / 2, math.inf]
        total = 0.0
        for level, a, b in zip(levels, edges, edges[1:]):
            density = [0.0 if math.isinf(e) else math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in (a, b)]
            tail = [0.0 if math.isinf(e) else e * d for e, d in zip((a, b), density)]
            inside = (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2
            total += (1 + level * level) * inside - (tail[1] - tail[0]) + 2 * level * (density[1] - density[0])
        return total

    low, high = 0.3, 6.0
    for _ in range(60):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return (low + high) / 2


# Tables and codes


def excess(rows: np.ndarray, variance: np.ndarray) -> float:
    """What the smaller half of the components varies more where the axes were not fitted."""
    half, rank = len(rows) // 2, len(variance)
    tried = np.zeros(rank)
    for fit, other in ((rows[:half], rows[-half:]), (rows[-half:], rows[:half])):
        mean, axes, _ = fitted(fit)
        tried += np.square((other - mean) @ axes[:, :rank]).mean(axis=0) / 2
    return max(float((tried - variance)[rank // 2 :].mean()), 0.0)


def raised(rows: np.ndarray, variance: np.ndarray, o: dict[str, Any]) -> np.ndarray:
    if o["shrinkage"] is None:
        return variance + excess(rows, variance)
    return variance + o["shrinkage"] * variance.sum() / rows.shape[1]


def ends(y: np.ndarray, variance: np.ndarray, width: np.ndarray, o: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Range [r] of the levels of components `y` [S, r]."""
    low, high = np.zeros(len(width)), np.zeros(len(width))
    for i, bits in enumerate(width.astype(int)):
        if bits == 0:
            continue
        center, half = (y[:, i].max() + y[:, i].min()) / 2, (1 + o["margin"]) * np.ptp(y[:, i]) / 2
        low[i], high[i] = center - half, center + half
        if o["ranges"] == "spread":
            end = 1.15 * reach(bits) * math.sqrt(variance[i])
            low[i], high[i] = (min(low[i], -end), max(high[i], end)) if bits >= 4 else (-end, end)
    return low, high


def check_tables(found: list[np.ndarray], rows: np.ndarray, budget: int, o: dict[str, Any], dtype: mx.Dtype) -> None:
    """Tables of one head follow from `rows` [S, D], those that the axes are fitted to."""
    basis, mean, width, scale, shift = found
    unit, size, rank = UNIT[dtype], np.abs(rows).max(), basis.shape[1]
    want_mean, axes, sigma = fitted(rows)
    np.testing.assert_allclose(mean, want_mean, atol=2 * (unit + 2**-22) * size)
    gap = np.abs(np.subtract.outer(sigma[:rank] ** 2, sigma**2) + np.eye(rank, len(sigma)) * 1e9).min(axis=1)
    for i in np.flatnonzero(gap > 0.02 * sigma[0] ** 2):
        assert abs(basis[:, i] @ axes[:, i]) > 1 - max(1e-4, 4 * unit)
    np.testing.assert_allclose(basis.T @ basis, np.eye(rank), atol=max(1e-4, 4 * unit))

    y = (rows - mean) @ basis
    variance = np.square(y).mean(axis=0)
    assert (np.diff(variance) <= (1e-5 + 4 * unit) * variance[0]).all()
    variance = raised(rows, np.maximum.accumulate(variance[::-1])[::-1], o)
    assert set(width) <= set(o["bit_choices"]) and width.sum() <= budget and (np.diff(width) <= 0).all()
    best = least_cost(variance, min(budget, rank * 8), o["bit_choices"], o["beta"])
    assert cost(variance, width, o["beta"]) <= best * (1 + 1e-4) + 1e-9 * variance[0]
    assert not (scale[width == 0].any() or shift[width == 0].any())
    low, high = ends(y, variance, width, o)
    slack = 2e-6 * size + 3e-3 * (high - low if o["ranges"] == "spread" else 0)
    assert (np.abs(shift - low) <= slack).all()
    assert (np.abs(shift + scale * np.maximum(2**width - 1, 1) * (width > 0) - high) <= slack).all()


def check_codes(found: list[np.ndarray], rows: np.ndarray, words: np.ndarray, read: np.ndarray, unit: float) -> None:
    """Words [W, S] are the nearest levels of `rows` [S, D] of one head, and `read` [S, D] what these stand for."""
    basis, mean, width, scale, shift = found
    codes = fields(words, width.astype(int)).T
    y = (rows - mean) @ basis
    slack = 4e-6 * np.abs(rows - mean).max()
    for i in np.flatnonzero(width):
        steps = np.clip((y[:, i] - shift[i]) / max(scale[i], 1e-300), 0, 2 ** width[i] - 1)
        assert (np.abs(codes[:, i] - steps) <= 0.5 + slack / max(scale[i], 1e-300) + 1e-5).all()
    want = mean + (shift + scale * codes) @ basis.T
    np.testing.assert_allclose(read, want, rtol=unit, atol=2e-6 * max(np.abs(want).max(), np.abs(mean).max()))
