"""How much components will vary, which of them gets how many bits, and over which range these are spread."""

import functools
import math
from collections.abc import Callable

import mlx.core as mx

from vq_functional.lowrank.head_groups import HeadGroups, principal_basis
from vq_functional.ops.ranges import from_mean
from vq_functional.ops.vectors import TINY

# End of evenly spaced levels, 2**bits of them, that lose least of a normal variable (Max 1960), in deviations.
REACH = (0.0, 0.798, 1.494, 2.051, 2.514, 2.916, 3.280, 3.610, 3.930)
SLACK = 1.15  # what the deviations of later rows exceed those of the first ones by
SPANNING = 4  # bits from which on it pays to reach as far as the first rows do


def allocate(variance: mx.array, budget: int, choices: tuple[int, ...], beta: float) -> mx.array:
    """Bits int32 [..., r], out of `choices`, with at most `budget` in all, that lose least of components.

    Their `variance` float32 [..., r] is falling; of v is lost v at no bits and v * beta**-b at b. Exact, by dynamic
    programming; what makes no difference is not spent, and equal components are served in order.
    """
    return _programme(variance.shape[-1], budget, tuple(sorted(set(choices))), float(beta))(variance)


@functools.lru_cache(maxsize=64)
def _programme(count: int, budget: int, choices: tuple[int, ...], beta: float) -> Callable[[mx.array], mx.array]:
    """`allocate` of `count` components, compiled, with steps of the common divisor of the choices."""
    step = math.gcd(*choices) or 1
    places, most = budget // step + 1, choices[-1] // step
    bits, shrinking = mx.array(choices), mx.array([beta**-b for b in choices])
    mx.eval(bits, shrinking)

    def programme(variance: mx.array) -> mx.array:
        share = variance / mx.maximum(variance.max(axis=-1, keepdims=True), TINY)
        lost = share[..., None] * shrinking
        best, picks = mx.zeros((*share.shape[:-1], places)), []
        none = mx.full((*share.shape[:-1], most), mx.inf)
        # From the smallest on, so that sums don't swallow what small ones add.
        for i in reversed(range(count)):
            known = mx.concatenate([none, best], axis=-1)
            starts = [most - b // step for b in choices]
            total = mx.stack([known[..., start : start + places] for start in starts], axis=-2) + lost[..., i, :, None]
            picks.append(mx.argmin(total, axis=-2))
            best = total.min(axis=-2)
        return _followed(picks[::-1], bits, step)

    return mx.compile(programme)


def _followed(picks: list[mx.array], bits: mx.array, step: int) -> mx.array:
    """Bits int32 [..., r] by the `picks` [..., places] of each component, the whole budget at the first."""
    left, found = mx.full((*picks[0].shape[:-1], 1), picks[0].shape[-1] - 1), []
    for pick in picks:
        found.append(bits[mx.take_along_axis(pick, left, axis=-1)])
        left = left - found[-1] // step
    # Of equal components any may have come first.
    return -mx.sort(-mx.concatenate(found, axis=-1), axis=-1)


def excess_variance(x: mx.array, variance: mx.array) -> mx.array:
    """What components of rows of `x` [B, H, S, D] vary more than their `variance` [B, H, r] where they weren't fitted.

    Float32 [B, H, 1]: axes are fitted to one half of the rows and tried on the other; the mean of the smaller half of
    the components, within which the axes of few rows are arbitrary.
    """
    half, rank = x.shape[2] // 2, variance.shape[-1]
    if half == 0:
        return mx.zeros((*variance.shape[:2], 1))
    early, late = x[:, :, :half], x[:, :, -half:]
    basis, mean = principal_basis(mx.concatenate([early, late]), HeadGroups.of(x.shape[1], x.shape[1]), rank)
    tried = mean_squares(from_mean(mx.concatenate([late, early]), mean[:, :, None]) @ basis)
    more = tried.reshape(2, *variance.shape).sum(axis=0) * 0.5 - variance
    small = more[..., rank // 2 :]
    return mx.maximum(small.sum(axis=-1, keepdims=True) / small.shape[-1], 0)


def mean_squares(y: mx.array) -> mx.array:
    """Mean squares [..., r] of components `y` [..., S, r]."""
    return mx.square(y).sum(axis=-2) / y.shape[-2]


def observed_ranges(y: mx.array, margin: float) -> tuple[mx.array, mx.array]:
    """Ends float32 [..., r] of the range of rows `y` [..., S, r], which is widened by the share `margin`."""
    low, high = y.min(axis=-2), y.max(axis=-2)
    center, half = low * 0.5 + high * 0.5, (high * 0.5 - low * 0.5) * (1 + margin)
    return center - half, center + half


def spread_ranges(low: mx.array, high: mx.array, deviation: mx.array, width: mx.array) -> tuple[mx.array, mx.array]:
    """Ends [..., r] that lose least at `width` bits: by the `deviation`, and with many bits as far as `low` and `high`.

    With few bits the whole range would make steps too coarse; with many a row that is cut off costs more.
    """
    reach = mx.array(REACH)[width] * SLACK * deviation
    spans = width >= SPANNING
    return mx.where(spans, mx.minimum(low, -reach), -reach), mx.where(spans, mx.maximum(high, reach), reach)


def steps_between(low: mx.array, high: mx.array, width: mx.array) -> tuple[mx.array, mx.array]:
    """Scale and shift [..., r] of 2**width evenly spaced levels from `low` to `high`; zeros without bits."""
    top = mx.maximum(mx.left_shift(mx.array(1), width) - 1, 1)
    scale = mx.where(width > 0, high / top - low / top, 0)
    return scale, mx.where(width > 0, low, 0)
