"""KVQuant against numpy: ranges, levels, outliers, sinks, rotated keys, trims, batches, bytes and attention."""

import itertools
import math
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kivi import HEADS, attended, draw, dtypes, feed, feed_more, numbers, rows_in_order
from test_skvq import live, same, sample

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.ops.rope import Rope
from vq_functional.quantize.signposts import gaussian_signposts

SMALL: dict[str, Any] = {"n_fit": 32, "residual_length": 4, "n_sink": 2}
N = 71  # 64 rows in codes
UNEVEN = np.array([-1, -0.6, -0.5, -0.1, 0, 0.4, 0.7, 0.9], np.float32)


# The oracle


def slots_of(dim: int, outliers: float) -> int:
    return max(1, round(dim * outliers)) if outliers else 0


def channel_range(x: np.ndarray, outliers: float, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Center and reach [D] of the channels of rows [S, D]; far numbers that get the row's slots are in the middle."""
    quarter, three = np.quantile(x.astype(float), (0.25, 0.75), axis=0)
    middle = (quarter + three) / 2
    away = np.abs(x - middle) / np.maximum(three - quarter, 1e-30) * (three > quarter)
    slot = np.argsort(-away, axis=1)[:, : slots_of(x.shape[1], outliers)]
    taken = np.zeros(x.shape, bool)
    np.put_along_axis(taken, slot, True, axis=1)
    x = np.where(taken & (away > 3.5), middle, x)
    low, high = (np.quantile(x, at, axis=0) for at in (outliers / 2, 1 - outliers / 2))
    beyond = max(outliers / 2, 1 / (len(x) + 2))
    z = -NormalDist().inv_cdf(beyond)
    error = math.sqrt(beyond * (1 - beyond) / len(x)) / NormalDist().pdf(z) / math.sqrt(2) / z
    return (low + high) / 2, (high - low) / 2 * (1 + margin * error)


def token_range(x: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Center and reach [..., 1] of the smallest range that holds all but `slots` numbers."""
    ranked = np.sort(x, axis=-1)
    lows, highs = ranked[..., : slots + 1], ranked[..., ranked.shape[-1] - slots - 1 :]
    first = np.argmin(highs - lows, axis=-1)[..., None]
    low, high = (np.take_along_axis(ends, first, axis=-1) for ends in (lows, highs))
    return (low + high) / 2, (high - low) / 2


def lloyd_max(bits: int, rows: int, outliers: float) -> np.ndarray:
    """Levels for a normal number cut at the range that `rows` of them show, one in `rows` at each end."""
    beyond = max(outliers / 2, 1 / (rows + 2))
    y = np.linspace(-1, 1, 8001)
    mass = np.exp(-((NormalDist().inv_cdf(beyond) * y) ** 2) / 2)
    mass *= (1 - 2 / (rows + 2)) / mass.sum()
    mass[[0, -1]] += 1 / (rows + 2)
    levels = np.linspace(-0.9, 0.9, 2**bits)
    for _ in range(300):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, y)
        levels = np.bincount(cell, mass * y, 2**bits) / np.bincount(cell, mass, 2**bits)
    return levels


def assert_read_by_levels(
    got: np.ndarray, x: np.ndarray, slot: np.ndarray, center: np.ndarray, reach: np.ndarray, levels: np.ndarray
) -> None:
    """Float16 rows [H, S, D] as read: exact at the slots [H, S, p], elsewhere at the nearest level."""
    y = (x - center) / np.maximum(reach, 1e-30)
    level = levels[np.abs(y[..., None] - levels).argmin(axis=-1)]
    taken = np.zeros(x.shape, bool)
    np.put_along_axis(taken, slot, True, axis=-1)
    assert (taken.sum(axis=-1) == slot.shape[-1]).all() and np.array_equal(got[taken], x[taken])
    misfit = np.where(np.abs(y) > 1, np.abs(y), np.abs(y - level))
    if slot.shape[-1]:
        assert (np.where(taken, misfit, np.inf).min(-1) >= np.where(taken, -np.inf, misfit).max(-1) - 1e-4).all()
    rounding = np.abs(got) * 2.0**-10 + reach * 1e-4
    assert (np.abs(got - x) <= np.abs(y - level) * reach + rounding)[~taken].all()
    to_levels = np.abs((got - center)[..., None] - reach[..., None] * levels).min(axis=-1)
    assert (to_levels <= rounding)[~taken].all()


def slot_of(side: Any, count: int, outliers: float) -> np.ndarray:
    return np.array(side.rows[1])[0, :, :count].astype(int) if outliers else np.zeros((HEADS, count, 0), int)


@pytest.mark.parametrize("outliers", [0, 0.01, 0.13])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_every_number_is_at_its_nearest_level_or_exact(bits: int, outliers: float) -> None:
    table = np.sort(np.random.default_rng(bits).uniform(-1, 1, 2**bits)).astype(np.float32)
    keys, values = sample(N, 24, bits), sample(N, 20, 9)
    other = bits % 8 + 1
    method = vq.kvquant(
        bits=bits, bits_v=other, margin=0, levels="uniform", k_levels=table, outlier_fraction=outliers, **SMALL
    )
    state = feed(method, keys, values)
    assert state.coded.item() == 64
    (k, v), (read_k, read_v) = (numbers(x)[0, :, 2:64] for x in (keys, values)), rows_in_order(method, state)
    center, reach = (np.array(end)[0, :, None] for end in state.keys.tables)
    for head in range(HEADS):
        told = channel_range(k[head, :30], outliers, 0)
        np.testing.assert_allclose(center[head, 0], told[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(reach[head, 0], told[1], rtol=1e-4)
    assert_read_by_levels(read_k[:, 2:64], k, slot_of(state.keys, 64, outliers)[:, 2:], center, reach, table)
    center, reach = (np.array(end)[0, :, 2:64, None].astype(np.float32) for end in state.values.rows[-2:])
    for got, want in zip((center, reach), token_range(v, slots_of(20, outliers))):
        assert np.array_equal(got, want.astype(np.float16))
    slot, uniform = slot_of(state.values, 64, outliers)[:, 2:], np.linspace(-1, 1, 2**other)
    assert slot.shape[-1] == slots_of(20, outliers)
    assert_read_by_levels(read_v[:, 2:64], v, slot, center, reach, uniform)


@pytest.mark.parametrize("bits, rows, outliers", [(1, 127, 0.01), (2, 63, 0.0), (3, 127, 0.01), (4, 30, 0.1)])
def test_levels_are_those_of_a_normal_number_between_its_ends(bits: int, rows: int, outliers: float) -> None:
    levels = np.array(gaussian_signposts(bits, rows, outliers))
    assert (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1 and np.array_equal(levels, -levels[::-1])
    np.testing.assert_allclose(levels, lloyd_max(bits, rows, outliers), atol=2e-3)


def test_the_default_tables_and_margin() -> None:
    x = sample(130, 24)
    options = {"residual_length": 0, "n_fit": 64}
    default = feed(vq.kvquant(**options), x, x)
    tables = {"k_levels": gaussian_signposts(3, 63, 0.01), "v_levels": gaussian_signposts(3, 23)}
    assert same(live(default), live(feed(vq.kvquant(margin=1, levels="uniform", **tables, **options), x, x)))
    for margin in (None, 0, 2.5):
        state = feed(vq.kvquant(margin=margin, **options), x, x)
        want = [channel_range(head[1:64], 0.01, 1 if margin is None else margin)[1] for head in numbers(x)[0]]
        np.testing.assert_allclose(np.array(state.keys.tables[1])[0], want, rtol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_uniform_levels_without_outliers_are_affine_codes(bits: int) -> None:
    x = sample(39, 24)
    method = vq.kvquant(bits=bits, outlier_fraction=0, levels="uniform", **SMALL)
    read = rows_in_order(method, feed(method, x, x))
    came = numbers(x)[0, :, 2:32]
    for got, axis in zip(read, (1, 2)):
        low, high = came.min(axis=axis, keepdims=True), came.max(axis=axis, keepdims=True)
        step = (high - low) / (2**bits - 1)
        want = low + step * np.round((came - low) / step)
        assert np.mean(np.abs(got[:, 2:32] - want) <= step * 0.02 + np.abs(want) * 2.0**-9) > 0.97
        assert (np.abs(got[:, 2:32] - came) <= step * 0.51 + np.abs(came) * 2.0**-9 + 4e-3).all()


# Levels that are fitted


def test_sweeps_never_make_levels_worse() -> None:
    x = sample(80, 16)[0].swapaxes(0, 1)
    weights = mx.random.uniform(shape=x.shape, key=mx.random.key(1)) ** 3
    distortion = []
    for sweeps in (1, 2, 3, 5, 8, 20):
        tables = vq.kvquant_calibrate(x, x, key_weights=weights, lloyd_iters=sweeps, outlier_fraction=0)
        center, reach = np.array(tables.k_range)
        y, levels = np.clip((numbers(x) - center) / reach, -1, 1), np.array(tables.k_levels)
        assert (np.diff(levels) > 0).all() and levels.shape == (8,)
        distortion.append((np.array(weights) * np.square(y[..., None] - levels).min(axis=-1)).mean())
    assert all(after <= before + 1e-7 for before, after in itertools.pairwise(distortion))
    assert distortion[-1] < 0.98 * distortion[0]


def test_weights_tell_which_errors_matter() -> None:
    x = mx.random.normal((200, 1, 8), key=mx.random.key(0))
    weights, errors = mx.abs(x) ** 3, []
    for extra in ({"key_weights": weights}, {}):
        tables = vq.kvquant_calibrate(x, x, outlier_fraction=0, lloyd_iters=20, **extra)
        center, reach = np.array(tables.k_range)
        y = (numbers(x) - center) / reach
        errors.append((np.array(weights) * np.square(y[..., None] - np.array(tables.k_levels)).min(axis=-1)).mean())
    assert errors[0] < 0.8 * errors[1]


def test_error_of_gaussian_channels() -> None:
    x = mx.random.normal((4096, 1, 16), key=mx.random.key(0))
    errors = []
    for outliers, levels in ((0.01, None), (0.01, np.linspace(-1, 1, 8)), (0, np.linspace(-1, 1, 8))):
        tables = vq.kvquant_calibrate(x, x, outlier_fraction=outliers, margin=0)
        center, reach = np.array(tables.k_range)
        y = (numbers(x) - center) / reach
        levels = np.array(tables.k_levels) if levels is None else levels
        errors.append((np.square(y[..., None] - levels).min(axis=-1) * reach**2)[np.abs(y) <= 1].mean())
    np.testing.assert_allclose(errors, [0.0276, 0.0451, 0.0889], rtol=0.05)


@pytest.mark.parametrize("levels", ["gaussian", "fitted"])
def test_calibrated_tables_are_the_options(levels: str) -> None:
    x = sample(60, 16)
    samples = x[0].swapaxes(0, 1)
    tables = vq.kvquant_calibrate(samples, samples, levels=levels, margin=0)
    want = [channel_range(head, 0.01, 0) for head in numbers(x)[0]]
    np.testing.assert_allclose(np.array(tables.k_range), np.array(want).swapaxes(0, 1), rtol=1e-4, atol=1e-4)
    method = vq.kvquant(**SMALL, **tables.arrays())
    state = feed(method, x, x)
    assert not state.keys.tables and not state.values.tables
    got, center, reach = rows_in_order(method, state)[0], *np.array(tables.k_range)[:, :, None]
    args = slot_of(state.keys, 56, 0.01), center, reach, np.array(tables.k_levels)
    assert state.coded.item() == 32
    assert_read_by_levels(got[:, 2:32], numbers(x)[0, :, 2:32], args[0][:, 2:32], *args[1:])


def test_levels_fitted_to_the_first_rows_suit_them() -> None:
    two = np.where(np.random.default_rng(0).uniform(size=(1, HEADS, N, 24)) < 0.5, -1, 1) * (0.5 + np.arange(24) / 9)
    x = mx.array((two * np.random.default_rng(1).uniform(0.9, 1, two.shape)).astype(np.float16))
    errors = []
    for levels in ("gaussian", "fitted"):
        method = vq.kvquant(bits=2, levels=levels, **SMALL)
        state = feed(method, x, x)
        errors.append([np.square(got - numbers(x)[0]).mean() for got in rows_in_order(method, state)])
    assert (np.array(errors[1]) < 0.8 * np.array(errors[0])).all()
    assert state.keys.tables[-1].shape == state.values.tables[-1].shape == (1, 4)


# Outliers, sinks and odd numbers


@pytest.mark.parametrize("levels", ["gaussian", "uniform", "fitted"])
def test_one_far_number_a_row_costs_the_others_nothing(levels: str) -> None:
    x, slots = draw(N, 32), (0.046, 0.048)  # one, and two
    far = np.random.default_rng(0).integers(0, 32, N)
    planted = mx.where(mx.arange(32) == mx.array(far)[:, None], 50 * mx.sign(x), x).astype(mx.float16)
    others = np.arange(32) != far[:, None]
    errors = []
    for rows, outliers in zip((x, planted), slots):
        method = vq.kvquant(levels=levels, outlier_fraction=outliers, **SMALL)
        read = rows_in_order(method, feed(method, rows, rows))
        errors.append([np.square(got - numbers(rows)[0])[:, others].mean() for got in read])
    assert np.array_equal(read[0][:, ~others], numbers(planted)[0][:, ~others])
    np.testing.assert_array_less(errors[1], 1.05 * np.array(errors[0]))


def test_a_row_that_is_far_out_as_a_whole_does_not_saturate() -> None:
    x = mx.where(mx.arange(N)[:, None] == 9, 40 * mx.sign(draw(N, 32)), draw(N, 32)).astype(mx.float16)
    method = vq.kvquant(bits=6, **SMALL)
    keys, _ = rows_in_order(method, feed(method, x, x))
    assert (np.abs(keys[:, 9] - numbers(x)[0, :, 9]) < 10).all()


def test_sinks_are_exact_and_touch_nothing_else() -> None:
    x = sample(N, 16)
    loud = mx.where(mx.arange(N)[:, None] < 2, 100 * x, x).astype(mx.float16)
    for options in ({}, {"levels": "fitted"}, {"refit_interval": 32}, {"outlier_fraction": 0}):
        method = vq.kvquant(**SMALL | options)
        one, two = (feed(method, rows, rows) for rows in (x, loud))
        for got in rows_in_order(method, two):
            assert np.array_equal(got[:, :2], numbers(loud)[0, :, :2])
        for a, b in zip(rows_in_order(method, one), rows_in_order(method, two)):
            assert np.array_equal(a[:, 2:], b[:, 2:])
        assert same([*one.keys.tables, *one.values.tables], [*two.keys.tables, *two.values.tables])


@pytest.mark.parametrize(
    "options", [{}, {"levels": "fitted"}, {"refit_interval": 16}, {"outlier_fraction": 0}], ids=str
)
@pytest.mark.parametrize("value", [3.25, -5.0, 0.0])
def test_a_channel_or_a_row_of_equal_numbers_is_exact(value: float, options: dict[str, Any]) -> None:
    method = vq.kvquant(**SMALL | options)
    channel = mx.where(mx.arange(16) == 5, value, sample(N, 16)).astype(mx.float16)
    row = mx.where(mx.arange(N)[:, None] == 7, value, sample(N, 16)).astype(mx.float16)
    keys, values = rows_in_order(method, feed(method, channel, row))
    assert (keys[..., 5] == value).all() and (values[:, 7] == value).all()
    assert np.isfinite(keys).all() and np.isfinite(values).all()


@pytest.mark.parametrize(
    "options", [{}, {"levels": "fitted"}, {"refit_interval": 16}, {"outlier_fraction": 0}], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [7, 50])
def test_a_number_that_is_not_finite_stays_alone(at: int, bad: float, options: dict[str, Any]) -> None:
    x = sample(N, 16)
    spoilt = mx.where((mx.arange(N)[:, None] == at) & (mx.arange(16) == 5), bad, x).astype(mx.float16)
    method = vq.kvquant(bits=6, **SMALL | options)
    others = (np.arange(N)[:, None] != at) | (np.arange(16) != 5)
    for got, clean in zip(*(rows_in_order(method, feed(method, rows, rows)) for rows in (spoilt, x))):
        assert np.isfinite(got).all() and np.abs(got).max() < 1.5 * numbers(mx.abs(x)).max()
        errors = [np.square(read - numbers(x)[0])[:, others] for read in (got, clean)]
        assert errors[0].mean() < 1.2 * errors[1].mean() and errors[0].max() < 2 * errors[1].max()


@pytest.mark.parametrize("outliers", [0, 0.1])
def test_infinities_are_at_the_ends_of_the_range_and_nan_in_its_middle(outliers: float) -> None:
    at = np.arange(40, 43)
    bad = mx.array([math.inf, -math.inf, math.nan])
    x = mx.clip(sample(N, 16), -3, 3)
    x[:, :, mx.array(at), 5] = bad.astype(mx.float16)
    method = vq.kvquant(bits=8, levels="uniform", outlier_fraction=outliers, **SMALL)
    state = feed(method, x, x)
    keys, values = rows_in_order(method, state)
    center, reach = (np.array(end)[0, :, 5, None] for end in state.keys.tables)
    np.testing.assert_allclose(keys[:, at, 5], center + reach * [1, -1, 0], atol=0.02)
    others = np.delete(numbers(x)[0][:, at], 5, axis=-1)
    assert (np.abs(values[:, at, 5]) <= np.abs(others).max(axis=-1) + 0.02).all()
    assert (values[:, 40, 5] > others[:, 0].mean(axis=-1)).all()
    assert (values[:, 41, 5] < others[:, 1].mean(axis=-1)).all()


# Rotated keys, and ranges of their own


def test_with_rope_ranges_are_those_from_before_it() -> None:
    rope, plain = Rope(16, base=100.0), sample(N, 24, dtype=mx.float32)
    turned = rope.apply(plain, mx.arange(N))
    method = vq.kvquant(rope=rope, **SMALL, margin=0)
    state = feed(method, turned, plain)
    want = np.array([channel_range(head[2:32], 0.01, 0) for head in numbers(plain)[0]]).swapaxes(0, 1)
    np.testing.assert_allclose(np.array(mx.stack(state.keys.tables[:2]))[:, 0], want, rtol=1e-3, atol=1e-4)
    held, other = rows_in_order(method, state)[0], vq.kvquant(**SMALL, margin=0)
    back = rows_in_order(other, feed(other, plain, plain))[0]
    read = rope.apply(mx.array(back)[None], mx.arange(N))
    assert np.mean(np.abs(held - numbers(read)[0]) < 1e-3) > 0.995
    tables = vq.kvquant_calibrate(turned[0].swapaxes(0, 1), plain[0].swapaxes(0, 1), rope=rope, margin=0)
    want = np.array([channel_range(head, 0.01, 0) for head in numbers(plain)[0]]).swapaxes(0, 1)
    np.testing.assert_allclose(np.array(tables.k_range), want, rtol=1e-3, atol=1e-4)


def test_with_an_interval_every_block_has_its_own_range() -> None:
    drifting = (sample(N, 16) * (2.0 ** (mx.arange(N) // 16))[:, None]).astype(mx.float16)
    method = vq.kvquant(refit_interval=16, **SMALL)
    state = feed(method, drifting, drifting)
    assert state.coded.item() == 64
    for head, block in itertools.product(range(HEADS), range(1, 4)):
        want = channel_range(numbers(drifting)[0, head, 16 * block : 16 * block + 16], 0.01, 0)
        for got, end in zip(state.keys.rows[-2:], want):
            np.testing.assert_allclose(np.array(got)[0, head, block], end, rtol=2e-3, atol=2e-3)


# Frontier, cuts, trims, symmetries


@pytest.mark.parametrize(
    "options, least, block",
    [
        ({}, 32, 32),
        ({"n_fit": 40}, 64, 32),
        ({"n_sink": 25}, 64, 32),
        ({"n_fit": 36}, 32, 32),
        ({"residual_length": 40}, 32, 32),
        ({"refit_interval": 24}, 24, 24),
    ],
)
def test_where_the_frontier_is(options: dict[str, Any], least: int, block: int) -> None:
    method, n = vq.kvquant(**SMALL | options), 105
    x = draw(n, 4)
    state = method.init_state(vq.KVSpec(kv_heads=HEADS, key_dim=4, value_dim=4, capacity=n))
    for i in range(n):
        state, *_ = method.update(state, x[:, :, i : i + 1], x[:, :, i : i + 1])
        past = max(0, i + 1 - options.get("residual_length", 4))
        assert state.coded.item() == (past // block * block if past >= least else 0)
    assert np.array_equal(rows_in_order(method, state)[0][:, -4:], numbers(x)[0, :, -4:])


@settings(max_examples=10, deadline=None)
@given(
    data=st.data(),
    options=st.sampled_from(
        [{}, {"levels": "fitted", "outlier_fraction": 0.1}, {"refit_interval": 16}, {"rope": Rope(8)}]
    ),
)
def test_how_a_prompt_was_cut_leaves_no_trace(data: st.DataObject, options: dict[str, Any]) -> None:
    method, n = vq.kvquant(**SMALL | options), data.draw(st.integers(30, 120))
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))
    cuts = [b - a for a, b in itertools.pairwise([0, *edges, n])]
    keys, values = sample(n, 16), sample(n, 12, 1)
    assert same(live(feed(method, keys, values, cuts)), live(feed(method, keys, values)))


@pytest.mark.parametrize("n", [1, 5, 20, 66, N])
@pytest.mark.parametrize("options", [{}, {"refit_interval": 16}, {"rope": Rope(16)}], ids=str)
def test_what_a_trim_leaves_reads_as_before(options: dict[str, Any], n: int) -> None:
    method, keys, values = vq.kvquant(**SMALL | options), sample(N, 16), sample(N, 12, 1)
    whole = feed(method, keys, values)
    short = method.trim(whole, n)
    for got, want in zip(rows_in_order(method, short), rows_in_order(method, whole)):
        assert np.array_equal(got, want[:, : N - n])
    again = feed_more(method, short, keys[:, :, N - n :], values[:, :, N - n :])
    if n <= 7 or n == N:
        assert same(live(again), live(whole))
    assert n > 32 or same(list(again.keys.tables), list(whole.keys.tables))


def test_channels_heads_and_batch_rows_are_independent() -> None:
    method, padding = vq.kvquant(**SMALL), [0, 6]
    keys, values = sample(N, 16, batch=2), sample(N, 12, 1, batch=2)
    order, scale = np.random.default_rng(0).permutation(16), mx.array(2.0 ** (np.arange(16) % 5 - 2))
    plain = rows_in_order(method, feed(method, keys[:1], values[:1]))
    for changed, want in (
        ((keys[:, :, :, mx.array(order)], values), (plain[0][..., order], plain[1])),
        (((keys * scale).astype(mx.float16), values), (plain[0] * np.array(scale), plain[1])),
        ((keys[:, ::-1], values[:, ::-1]), (plain[0][::-1], plain[1][::-1])),
    ):
        for got, rows in zip(rows_in_order(method, feed(method, changed[0][:1], changed[1][:1])), want):
            np.testing.assert_allclose(got, rows, rtol=1e-3, atol=1e-6)
    keys[1, :, :6] = values[1, :, :6] = math.nan
    state = feed(method, keys, values, left_padding=mx.array(padding))
    for row, pad in enumerate(padding):
        alone = feed(method, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert same(live(state, row), live(alone))


# Bytes and attention


@pytest.mark.parametrize(
    "dim, bits, outliers, window", [(128, 3, 0.01, 50), (80, 3, 0.05, 20), (64, 2, 0, 0), (288, 4, 0.01, 28)]
)
@pytest.mark.parametrize(
    "options", [{}, {"levels": "fitted"}, {"refit_interval": 32}, {"k_range": 1}, {"rope": Rope(32)}], ids=str
)
def test_bytes_follow_the_formula(options: dict[str, Any], dim: int, bits: int, outliers: float, window: int) -> None:
    given = {"k_range": np.ones((2, HEADS, dim))} if "k_range" in options else options
    method = vq.kvquant(bits=bits, outlier_fraction=outliers, n_sink=3, n_fit=60, residual_length=window, **given)
    slots = slots_of(dim, outliers) * (3 if dim <= 256 else 4)
    token = 8 * math.ceil(dim * bits / 32) + 2 * slots + 4
    interval, rope = "refit_interval" in options, "rope" in options
    ranged = not interval and "k_range" not in options
    least = max(32, -(-(60 - window) // 32) * 32) if ranged else 32  # the newest rows are among those that tell ranges
    columns = 128
    head = columns * (token + 4 * dim * interval / 32) + (window + least + 3) * 4 * dim + 8 * dim * ranged
    layer = 12 + 8 * 3 + 8 * 2**bits * ("levels" in options)
    layer += 4 * columns // 32 * rope
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=dim, batch=3, capacity=128)
    assert vq.nbytes(method.init_state(spec)) == 3 * (HEADS * head + layer)


@dtypes
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"levels": "fitted", "bits": 5}, {"refit_interval": 16, "bits": 2}, {"rope": Rope(32)}, {"v_levels": UNEVEN}],
)
def test_attention_on_codes_equals_attention_over_what_is_read(options: Any, n: int, dtype: mx.Dtype) -> None:
    method, total = vq.kvquant(**SMALL | options), N + n
    keys, values = sample(total, 40, dtype=dtype), draw(total, 48, seed=1, dtype=dtype)
    state = feed(method, keys[:, :, :N], values[:, :, :N], capacity=total)
    held = method.write(state, keys[:, :, N:], values[:, :, N:])
    queries = (mx.random.normal((1, 2 * HEADS, n, 40), key=mx.random.key(5)) * 0.3).astype(dtype)
    want = attended(numbers(queries)[0], *rows_in_order(method, held), start=N)
    tolerance = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype]
    for fill in (None, Fill(total, total, state.coded.item())):
        got = method.attend(held, queries, 40**-0.5, None, fill)
        assert got.dtype == dtype
        np.testing.assert_allclose(numbers(got)[0], want, atol=tolerance)


# Options


@pytest.mark.parametrize(
    "field, values",
    [
        *[(field, (0, 9, True, 2.5, "3")) for field in ("bits", "bits_k", "bits_v")],
        ("outlier_fraction", (-0.1, 0.51, 1.5, math.nan, True, "0")),
        *[(field, (0, -1, 1.5, True)) for field in ("group_size", "lloyd_iters", "n_fit")],
        ("refit_interval", (-1, 1, 2.5)),
        *[(field, (-1, 0.5, None)) for field in ("n_sink", "residual_length")],
        ("levels", ("normal", None)),
        ("margin", (-0.5, math.nan, math.inf, "1")),
        ("rope", (64, "rope")),
        *[(field, (UNEVEN[::-1], UNEVEN[:7], UNEVEN * np.nan)) for field in ("k_levels", "v_levels")],
        ("k_range", (np.ones((3, 2, 4)), np.ones((2, 4)), -np.ones((2, 2, 4)), np.full((2, 2, 4), np.inf))),
    ],
)
def test_options_out_of_range_are_refused_by_name(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(vq.QuantizerConfigError, match=f"kvquant: `{field}` .*; got "):
            vq.kvquant(**{field: value})


def test_tables_that_do_not_fit_are_refused_by_name() -> None:
    given, x = np.ones((2, HEADS, 8)), mx.zeros((4, 1, 8))
    with pytest.raises(vq.QuantizerConfigError, match="kvquant: `k_range` can't be given with `refit_interval`"):
        vq.kvquant(k_range=given, refit_interval=32)
    for options, dim, field in (({"k_range": given}, 16, "head_dim"), ({"k_range": given[:, :1]}, 8, "keys")):
        with pytest.raises(vq.QuantizerConfigError, match=f"kvquant: `{field}`"):
            feed(vq.kvquant(**options), draw(40, dim), draw(40, dim))
    with pytest.raises(vq.QuantizerConfigError, match="kvquant: `rope`"):
        feed(vq.kvquant(rope=Rope(16)), draw(4, 8), draw(4, 8))
    for arguments, field in (((x, x[0]), "values"), ((x[:0], x), "keys")):
        with pytest.raises(vq.QuantizerConfigError, match=f"kvquant_calibrate: `{field}`"):
            vq.kvquant_calibrate(*arguments)
    with pytest.raises(vq.QuantizerConfigError, match="kvquant_calibrate: `key_weights`"):
        vq.kvquant_calibrate(x, x, key_weights=x[:2])
    with pytest.raises(vq.QuantizerConfigError, match="kvquant_calibrate: `refit_interval`"):
        vq.kvquant_calibrate(x, x, refit_interval=32)
