"""SKVQ against numpy: orders, clipped groups, exact rows, eight-bit numbers, trims, batches, bytes and attention."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kivi import HEADS, attended, codes_of, draw, dtypes, feed, feed_more, numbers, rows_in_order

import vq_functional as vq
from vq_functional.core.transform import Fill

SMALL: dict[str, Any] = {"window": 4, "n_sink": 2, "group_size": 8}
CLIPS = (1.0, 0.97, 0.94, 0.90, 0.85)
GRIDS = {1: (1.0, 0.8, 0.65, 0.5, 0.35), 2: (1.0, 0.92, 0.84, 0.76, 0.68)}
N = 71  # 64 rows in codes behind a window of 4
orders = pytest.mark.parametrize("order", ["best", "center", "range", "kmeans"])


def sample(n: int, dim: int, seed: int = 0, dtype: mx.Dtype = mx.float16, batch: int = 1) -> mx.array:
    """Rows whose channels have middles and widths of their own."""
    rng = np.random.default_rng(seed)
    middle, width = rng.normal(0, 3, (HEADS, 1, dim)), rng.uniform(0.3, 3, (HEADS, 1, dim))
    return mx.array((rng.normal(size=(batch, HEADS, n, dim)) * width + middle).astype(np.float32)).astype(dtype)


def order_of(state: Any, side: str = "keys", row: int = 0) -> np.ndarray:
    return np.array(getattr(state, side).tables[0])[row].astype(int)


def live(state: Any, row: int = 0) -> list[mx.array]:
    """What a state holds of one batch row, without unused room."""
    coded, n = state.coded[row].item(), state.offset[row].item()
    sides = (state.keys, state.values)
    held = [x[row, :, : coded * x.shape[2] // side.rows[0].shape[2]] for side in sides for x in side.rows]
    held += [x[row] for side in sides for x in side.tables if coded]
    return held + [x[row, :, : n - coded] for x in (state.recent.keys, state.recent.values)]


def same(one: list[mx.array], two: list[mx.array]) -> bool:
    return all(a.shape == b.shape and mx.array_equal(a, b).item() for a, b in zip(one, two, strict=True))


# The oracle: float16 input


def told_order(x: np.ndarray, kind: str, group: int) -> np.ndarray:
    """Order [D] of one head's channels by rows [S, D]."""
    low, high = x.min(axis=0), x.max(axis=0)
    center, width = np.argsort(low + high, kind="stable"), np.argsort(high - low, kind="stable")
    if kind != "best":
        return center if kind == "center" else width

    def spread(order: np.ndarray) -> float:
        pieces = (x[:, order[i : i + group]] for i in range(0, len(order), group))
        return float(sum((np.ptp(piece, axis=1).astype(float) ** 2).sum() for piece in pieces))

    return min((np.arange(x.shape[1]), center, width), key=spread)


def groups_of(x: np.ndarray, order: np.ndarray, group: int) -> np.ndarray:
    """Rows [H, S, D] in the order [H, D] as [H, S, G, g], the last group filled up with its last channel."""
    x = np.take_along_axis(x, order[:, None], axis=-1)
    x = np.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % group)), mode="edge")
    return x.reshape(*x.shape[:2], -1, group)


def candidates(x: np.ndarray, bits: int, clips: tuple[float, ...], center: str) -> tuple[np.ndarray, np.ndarray]:
    """Float16 scales and zeros [clips, H, S, G, 1]."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    c = (low + high) / 2 if center == "midpoint" else np.zeros_like(low)
    ends = [(c - np.float32(a) * (c - low), c + np.float32(a) * (high - c)) for a in clips]
    scales = np.stack([(high - low) / np.float32(2**bits - 1) for low, high in ends])
    return scales.astype(np.float16).astype(np.float32), np.stack([low for low, _ in ends]).astype(np.float16)


def rounded(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int) -> np.ndarray:
    zero = zero.astype(np.float32)
    return np.clip(np.round((x - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1).astype(int)


def error_of(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int) -> np.ndarray:
    read = (rounded(x, scale, zero, bits) * scale + zero.astype(np.float32)).astype(np.float16)
    return np.square(read.astype(float) - x).sum(axis=-1, keepdims=True)


def assert_side_equals_oracle(
    side: Any, x: np.ndarray, order: np.ndarray, bits: int, group: int, clips: tuple[float, ...], center: str
) -> None:
    """Packed rows against `x` [H, S, D], all of it coded."""
    x = groups_of(x, order, group)
    count, width = x.shape[1], x.shape[2] * group
    codes, scale, zero = (np.array(array[0, :, :count]) for array in side.rows)
    scale, zero = scale[..., None].astype(np.float32), zero[..., None].astype(np.float32)
    scales, zeros = candidates(x, bits, clips, center)
    near = np.isclose(scale, scales, rtol=2.0**-10, atol=1e-7) & np.isclose(zero, zeros, rtol=2.0**-10, atol=1e-7)
    assert near.any(axis=0).all()
    least = np.stack([error_of(x, *pair, bits) for pair in zip(scales, zeros)]).min(axis=0)
    assert (error_of(x, scale, zero, bits) <= least * 1.001 + 1e-9).all()
    want = rounded(x, scale, zero, bits).reshape(*x.shape[:2], -1)
    got = [[codes_of(stream, bits, width) for stream in head] for head in codes.tolist()]
    assert got == want.tolist()


@pytest.mark.parametrize("group", [8, 32, 5])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_row_equals_the_oracle(bits: int, group: int) -> None:
    kind = ("best", "center", "range")[bits % 3]
    keys, values = sample(39, 24, bits), sample(39, 20, group)
    other = bits % 8 + 1
    method = vq.skvq(bits_key=bits, bits_value=other, **SMALL | {"group_size": group}, order=kind)
    state = feed(method, keys, values)
    assert state.coded.item() == 32
    for side, x, width in ((state.keys, keys, bits), (state.values, values, other)):
        coded = numbers(x)[0, :, :32]
        order = np.stack([told_order(head[2:], kind, group) for head in coded])
        assert np.array_equal(np.array(side.tables[0])[0], order)
        assert_side_equals_oracle(side, coded, order, width, group, GRIDS.get(width, CLIPS), "midpoint")


@pytest.mark.parametrize("center", ["midpoint", "zero"])
@pytest.mark.parametrize(
    "options, clips",
    [
        ({"clip_search": False}, (1.0,)),
        ({"clip_search": False, "clip_alpha": 0.8}, (0.8,)),
        ({"clip_grid": (0.7, 1.0)}, (0.7, 1.0)),
        ({"clip_grid": CLIPS}, CLIPS),
    ],
)
def test_shares_of_the_range_are_the_options(options: dict[str, Any], clips: tuple[float, ...], center: str) -> None:
    x = sample(39, 16)
    state = feed(vq.skvq(reorder=False, clip_center=center, **SMALL, **options), x, x)
    as_they_come = np.tile(np.arange(16), (HEADS, 1))
    assert_side_equals_oracle(state.keys, numbers(x)[0, :, :32], as_they_come, 2, 8, clips, center)


def test_of_equally_good_shares_the_first_stays() -> None:
    x = mx.broadcast_to(mx.array([-1, -0.5, 0.5, 1], mx.float16), (1, HEADS, 36, 4))
    for grid, scale in (((1.0, 0.5), 2), ((0.5, 1.0), 1)):
        state = feed(vq.skvq(bits_key=1, window=4, n_sink=0, group_size=4, clip_grid=grid), x, x)
        assert (state.keys.rows[1][:, :, :32] == scale).all()


# Orders


@orders
def test_an_order_holds_every_channel_once_and_can_be_undone(order: str) -> None:
    keys, values = sample(N, 24), sample(N, 20, 1)
    method = vq.skvq(bits_key=8, bits_value=8, clip_search=False, order=order, **SMALL)
    state = feed(method, keys, values)
    for name, got, x in zip(("keys", "values"), rows_in_order(method, state), (keys, values)):
        told, dim = order_of(state, name), x.shape[3]
        assert (np.sort(told, axis=-1) == np.arange(dim)).all()
        scale = np.array(getattr(state, name).rows[1][0, :, :64]).astype(np.float32).repeat(8, axis=-1)[..., :dim]
        got, want = (np.take_along_axis(rows[:, :64], told[:, None], axis=-1) for rows in (got, numbers(x)[0]))
        assert (np.abs(got - want) <= scale / 2 * (1 + 1e-3) + np.abs(want) * 2.0**-10).all()


@orders
def test_alike_channels_stay_where_they_are(order: str) -> None:
    x = mx.broadcast_to(draw(N, 1), (1, HEADS, N, 16))
    plain, ordered = (feed(vq.skvq(reorder=reorder, order=order, **SMALL), x, x) for reorder in (False, True))
    assert (order_of(ordered) == np.arange(16)).all() and not plain.keys.tables
    assert same([x[:, :, :64] for x in plain.keys.rows], [x[:, :, :64] for x in ordered.keys.rows])


@pytest.mark.parametrize("order, part", [("best", 0.8), ("range", 0.8), ("kmeans", 0.8), ("center", 1)])
def test_wild_channels_cost_less_in_an_order(order: str, part: float) -> None:
    x = (draw(100, 32) * mx.where(mx.arange(32) % 2 == 0, 20, 1)).astype(mx.float16)

    def error(**options: Any) -> float:
        method = vq.skvq(**SMALL | {"group_size": 16} | options)
        keys, _ = rows_in_order(method, feed(method, x, x))
        return float(np.square(keys - numbers(x)[0]).sum())

    assert error(order=order) <= part * error(reorder=False)


def test_kmeans_finds_clusters_of_lowest_and_highest() -> None:
    cluster = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 8))
    low, high = np.array([-9, -1, -6, 5])[cluster], np.array([-6, 1, 9, 9])[cluster]
    x = low + (high - low) * np.random.default_rng(1).uniform(size=(1, HEADS, N, 32))
    x[:, :, 10], x[:, :, 11] = low, high
    state = feed(vq.skvq(order="kmeans", **SMALL), mx.array(x.astype(np.float16)), draw(N, 8))
    for head in cluster[order_of(state)].reshape(HEADS, 4, 8):
        assert all(len(set(group)) == 1 for group in head.tolist())


@pytest.mark.parametrize("n_fit, n_sink, first, last", [(32, 2, 2, 32), (20, 0, 0, 20), (1, 3, 3, 19), (40, 2, 2, 40)])
def test_only_the_first_rows_without_the_sinks_tell_the_order(n_fit: int, n_sink: int, first: int, last: int) -> None:
    method = vq.skvq(window=4, n_sink=n_sink, n_fit=n_fit, order="center", group_size=8)
    x = sample(N, 16)
    want = np.stack([told_order(head[first:last], "center", 8) for head in numbers(x)[0]])
    other = [i for i in range(N) if not first <= i < last]
    x[:, :, mx.array(other)] = draw(len(other), 16, seed=3) * 50
    assert np.array_equal(order_of(feed(method, x, x)), want)
    x[:, :, first], x[:, :, last - 1] = mx.arange(16) * -90, mx.arange(16) * -90
    assert not np.array_equal(order_of(feed(method, x, x)), want)


def test_sinks_touch_no_code_of_another_row() -> None:
    x = sample(N, 16)
    loud = mx.where(mx.arange(N)[:, None] < 2, 100 * x, x).astype(mx.float16)
    one, two = (feed(vq.skvq(**SMALL), rows, rows) for rows in (x, loud))
    assert same([a[:, :, 2:64] for a in one.keys.rows], [a[:, :, 2:64] for a in two.keys.rows])
    assert np.array_equal(order_of(one), order_of(two))


@pytest.mark.parametrize("order", ["best", "center", "range"])
def test_calibrated_orders_are_those_of_the_samples(order: str) -> None:
    rng = np.random.default_rng(0)
    width = rng.uniform(0.3, 3, (40, 16)) ** rng.uniform(0, 3, (40, 1))
    samples = rng.normal(size=(20, 40, 16)) * width + rng.normal(size=(40, 16)) * rng.uniform(0, 4, (40, 1))
    tables = vq.skvq_calibrate(mx.array(samples), mx.array(samples[..., :12]), group_size=4, order=order)
    samples = samples.astype(np.float32)
    for got, dim in ((tables.key_order, 16), (tables.value_order, 12)):
        want = [told_order(samples[:, head, :dim], order, 4) for head in range(40)]
        assert np.array_equal(np.array(got), want)
    given = {name: table[:HEADS] for name, table in tables.arrays().items()}
    state = feed(vq.skvq(**SMALL, **given), sample(N, 16, 5), sample(N, 12, 6))
    for name in ("keys", "values"):
        assert np.array_equal(order_of(state, name), np.array(given[f"{name[:-1]}_order"]))


# Errors


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_search_is_never_worse_than_the_whole_range(bits: int, dtype: mx.Dtype) -> None:
    x = sample(N, 16, dtype=dtype)
    errors = []
    for search in (True, False):
        method = vq.skvq(bits_key=bits, clip_search=search, reorder=False, **SMALL)
        keys, _ = rows_in_order(method, feed(method, x, x))
        errors.append(np.square(keys.astype(float) - numbers(x)[0]).reshape(HEADS, N, 2, 8).sum(axis=-1))
    assert (errors[0] <= errors[1] * (1 + 1e-5) + 1e-12).all()
    assert bits == 8 or errors[0].sum() < 0.97 * errors[1].sum()


@dtypes
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("value", [3.25, -5.0, 1e-30, 0.0])
def test_equal_numbers_come_back(value: float, fp8: bool, dtype: mx.Dtype) -> None:
    x = mx.full((1, HEADS, N, 12), value).astype(dtype)
    method = vq.skvq(fp8=fp8, **SMALL)
    for got in rows_in_order(method, feed(method, x, x)):
        np.testing.assert_allclose(got, numbers(x)[0], rtol=1 / 16 if fp8 else 0)


@pytest.mark.parametrize("factor", [0.25, 16.0, 2.0**70, 2.0**-80])
def test_a_power_of_two_leaves_codes_and_orders_alone(factor: float) -> None:
    x = sample(N, 16, dtype=mx.float32)
    one, two = (feed(vq.skvq(**SMALL), rows, rows) for rows in (x, x * factor))
    assert mx.array_equal(one.keys.rows[0], two.keys.rows[0]) and np.array_equal(order_of(one), order_of(two))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [7, 50])
def test_a_number_that_is_not_finite_stays_alone(at: int, bad: float, fp8: bool) -> None:
    x = sample(N, 16)
    spoilt = mx.where((mx.arange(N)[:, None] == at) & (mx.arange(16) == 5), bad, x).astype(mx.float16)
    method = vq.skvq(bits_key=8, reorder=False, clip_search=False, fp8=fp8, **SMALL)
    (got, _), (clean, _) = (rows_in_order(method, feed(method, rows, rows)) for rows in (spoilt, x))
    assert np.isfinite(got).all()
    others = np.arange(N) != at
    assert fp8 or np.array_equal(got[:, others], clean[:, others])
    np.testing.assert_allclose(got[:, at, 8:], clean[:, at, 8:], atol=0.1 if fp8 else 0)
    low, high = (end(np.delete(numbers(x)[0, :, at, :8], 5, axis=-1), axis=-1) for end in (np.min, np.max))
    want = {math.inf: high, -math.inf: low}.get(bad, (low + high) / 2)
    np.testing.assert_allclose(got[:, at, 5], want, atol=(0.15 if fp8 else 0.02) * (high - low).max())


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_the_whole_range_of_half_precision_stays_finite(bits: int) -> None:
    x = mx.array(np.random.default_rng(0).uniform(-65504, 65504, (1, HEADS, N, 16)).astype(np.float16))
    for options in ({}, {"clip_search": False}, {"fp8": True}, {"order": "kmeans"}):
        method = vq.skvq(bits_key=bits, bits_value=bits, **SMALL, **options)
        for got in rows_in_order(method, feed(method, x, x)):
            assert np.isfinite(got).all()
            assert np.abs(got - numbers(x)[0]).max() <= 65504 * 1.7 / (2**bits - 1) + 64 + 131008 / 8 * (
                "fp8" in options
            )


# Eight-bit scales and zeros


def e4m3(raw: np.ndarray) -> np.ndarray:
    sign, exponent, fraction = 1 - 2.0 * (raw >> 7), (raw >> 3 & 15).astype(int), (raw & 7) / 8
    return sign * np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_eight_bit_numbers_let_nothing_fall_outside(bits: int) -> None:
    x = sample(N, 16)
    method = vq.skvq(bits_key=bits, fp8=True, clip_search=False, reorder=False, **SMALL)
    state = feed(method, x, x)
    _, scale, zero = state.keys.rows
    assert scale.dtype == zero.dtype == mx.uint8
    unit = np.array(state.keys.tables[-1])[0].reshape(HEADS, 1, 1)
    scale, zero = (e4m3(np.array(array[0, :, :64])) * unit for array in (scale, zero))
    grouped = numbers(x)[0, :, :64].reshape(HEADS, 64, 2, 8)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    assert (zero <= low + 1e-5).all() and (low - zero <= np.abs(low) / 8 + unit * 2.0**-9).all()
    exact = (high - zero) / (2**bits - 1)
    assert (scale >= exact * (1 - 1e-5)).all() and (scale <= exact * 1.126 + unit * 2.0**-9).all()
    got = rows_in_order(method, state)[0][:, :64].reshape(grouped.shape)[:, 2:]
    assert (np.abs(got - grouped[:, 2:]) <= scale[:, 2:, :, None] / 2 * (1 + 1e-3) + np.abs(got) * 2.0**-10).all()


# Frontier, exact rows, cuts


@pytest.mark.parametrize("window, n_sink, n_fit, least", [(2, 0, 32, 32), (33, 5, 70, 64), (64, 40, 32, 32)])
def test_the_window_and_the_sinks_are_exact_token_by_token(window: int, n_sink: int, n_fit: int, least: int) -> None:
    method = vq.skvq(window=window, n_sink=n_sink, n_fit=n_fit, bits_key=1, group_size=8)
    n = window + 70
    x = sample(n, 8)
    state = method.init_state(vq.KVSpec(kv_heads=HEADS, key_dim=8, value_dim=8, capacity=n))
    for i in range(n):
        state, *_ = method.update(state, x[:, :, i : i + 1], x[:, :, i : i + 1])
        coded = max(0, i + 1 - window) // 32 * 32
        assert state.coded.item() == (coded if coded >= least else 0) and state.offset.item() == i + 1
        exact = [*range(min(n_sink, i + 1)), *range(state.coded.item(), i + 1)]
        if i % 16 == 0 or i > n - 4:
            for got in rows_in_order(method, state):
                assert np.array_equal(got[:, exact], numbers(x)[0, :, exact].swapaxes(0, 1))
    assert not np.array_equal(got[:, n_sink:64], numbers(x)[0, :, n_sink:64])


@settings(max_examples=10, deadline=None)
@given(data=st.data(), fp8=st.booleans(), order=st.sampled_from(["best", "kmeans"]), n_fit=st.sampled_from([8, 40]))
def test_how_a_prompt_was_cut_leaves_no_trace(data: st.DataObject, fp8: bool, order: str, n_fit: int) -> None:
    method = vq.skvq(fp8=fp8, order=order, n_fit=n_fit, **SMALL)
    n = data.draw(st.integers(30, 120))
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))
    cuts = [b - a for a, b in itertools.pairwise([0, *edges, n])]
    keys, values = sample(n, 16), sample(n, 12, 1)
    assert same(live(feed(method, keys, values, cuts)), live(feed(method, keys, values)))


# Trims, heads, batches


@pytest.mark.parametrize("n", [1, 5, 20, 37, 66, N])
def test_what_a_trim_leaves_reads_as_before(n: int) -> None:
    method = vq.skvq(**SMALL)
    keys, values = sample(N, 16), sample(N, 12, 1)
    whole = feed(method, keys, values)
    short = method.trim(whole, n)
    for got, want in zip(rows_in_order(method, short), rows_in_order(method, whole)):
        assert np.array_equal(got, want[:, : N - n])
    again = feed_more(method, short, keys[:, :, N - n :], values[:, :, N - n :])
    if n <= 7 or n >= N - 2:
        assert same(live(again), live(whole))
    assert n >= 40 or np.array_equal(order_of(again), order_of(whole))


def test_heads_and_batch_rows_are_independent() -> None:
    method, padding = vq.skvq(fp8=True, **SMALL), [0, 6]
    keys, values = sample(N, 16, batch=2), sample(N, 12, 1, batch=2)
    swapped = feed(method, keys[:1, ::-1], values[:1, ::-1])
    keys[1, :, :6] = values[1, :, :6] = math.nan
    state = feed(method, keys, values, left_padding=mx.array(padding))
    for row, pad in enumerate(padding):
        alone = feed(method, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert same(live(state, row), live(alone))
    assert same(live(swapped), [x[::-1] for x in live(state)])


# Bytes and attention


@pytest.mark.parametrize("dim, group", [(128, 32), (80, 32), (64, 128)])
@pytest.mark.parametrize(
    "options, bits", [({}, 4), ({"fp8": True}, 4), ({"bits_k": 3, "bits_value": 1}, 4), ({"bits_v": 5}, 7)]
)
def test_bytes_follow_the_formula(options: dict[str, Any], bits: int, dim: int, group: int) -> None:
    groups = -(-dim // group)
    filled = groups * group
    fp8 = "fp8" in options
    want = 96 * (filled * bits // 8 + (4 if fp8 else 8) * groups) + (50 + 32 + 3) * 4 * dim + 4 * dim + 8 * fp8
    method = vq.skvq(window=50, n_sink=3, group_size=group, **options)
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=dim, batch=3, capacity=96)
    counters = 12 + 8 * 3  # tokens seen and coded, and the sinks' positions
    assert vq.nbytes(method.init_state(spec)) == 3 * (HEADS * want + counters)


@dtypes
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("options", [{}, {"fp8": True, "bits_key": 3}, {"bits_k": 4, "bits_v": 1, "group_size": 32}])
def test_attention_on_codes_equals_attention_over_what_is_read(options: Any, n: int, dtype: mx.Dtype) -> None:
    method, total = vq.skvq(**SMALL | options), N + n
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
        *[(field, (0, 9, True, 2.5, "2")) for field in ("bits_key", "bits_value", "bits_k", "bits_v")],
        ("group_size", (0, -1, 1.5, True)),
        ("window", (1, 0, 8.0)),
        ("n_sink", (-1, 128, True)),
        ("clip_alpha", (0, 1.01, -0.5, math.nan, True, "1")),
        ("clip_grid", ((), (0.0,), (1.0, 1.2), [1.0], 0.9, (math.nan,))),
        ("clip_center", ("mean", None)),
        ("order", ("width", None)),
        ("n_fit", (0, 1.5)),
        ("max_ctx", (0, -3, 1.5)),
        *[(field, (1, "yes", None)) for field in ("reorder", "clip_search", "fp8")],
        *[(field, (np.zeros((1, 4)), np.arange(4), np.full((1, 2), np.nan))) for field in ("key_order", "value_order")],
    ],
)
def test_options_out_of_range_are_refused_by_name(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(vq.QuantizerConfigError, match=f"skvq: `{field}` (must|can't).*; got "):
            vq.skvq(**{field: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip_alpha": 0.3}, "`clip_alpha` can't be set with `clip_search`; got 0.3"),
        ({"clip_grid": (1.0,), "clip_search": False}, r"`clip_grid` can't be set without `clip_search`; got \(1.0,\)"),
    ],
)
def test_a_share_that_would_not_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^skvq: {message}$"):
        vq.skvq(**options)


def test_orders_that_do_not_fit_are_refused_by_name() -> None:
    given = np.stack([np.arange(8)] * HEADS)
    with pytest.raises(vq.QuantizerConfigError, match="skvq: `key_order` can't be given without `reorder`"):
        vq.skvq(key_order=given, reorder=False)
    for field in ("key_order", "value_order"):
        for order, dim, rule in ((given, 16, "head size 16"), (given[:1], 8, f"{HEADS} heads")):
            with pytest.raises(vq.QuantizerConfigError, match=f"^skvq: `{field}` must be of {rule}; got "):
                feed(vq.skvq(**{field: order}), draw(40, dim), draw(40, dim))
    with pytest.raises(vq.QuantizerConfigError, match="skvq_calibrate: `values`"):
        vq.skvq_calibrate(mx.zeros((4, 1, 8)), mx.zeros((4, 8)))


def test_a_call_past_max_ctx_is_not_answered() -> None:
    method = vq.skvq(max_ctx=40, **SMALL)
    state = feed(method, draw(38, 8), draw(38, 8), capacity=80)
    _, keys, _ = method.update(state, draw(2, 8), draw(2, 8))
    assert not mx.isnan(keys).any()
    _, keys, values = method.update(state, draw(3, 8), draw(3, 8))
    assert mx.isnan(keys).all() and mx.isnan(values).all()
    with pytest.raises(vq.QuantizerConfigError, match="skvq: `keys` must stay within `max_ctx`"):
        method.room(Fill(38, 38, 32), 3)
