"""AMC against its formulas in numpy: saliency, tiers, codes, fills, thresholds, calibration, attention, bytes."""

import itertools
import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from amc_oracle import (
    ALL_LOW,
    ALL_MID,
    DIM,
    HEADS,
    QUERY_HEADS,
    SMALL,
    STEP,
    WHOLE,
    assert_same,
    begin,
    check_calls,
    draw,
    feed,
    inputs,
    numbers,
    order_by,
    ranks,
    read,
    rows_of,
    saliency,
    sizes,
    skewed,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.describe import describe, restore
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.hybrid.amc import tier_counts
from vq_functional.hybrid.amc_options import AMCOptions

every_fill = pytest.mark.parametrize("fill", ["block", "mean", "zero"])
every_normalize = pytest.mark.parametrize("normalize", ["deviation", "size", "none"])


# Every number


@every_fill
@every_normalize
@pytest.mark.parametrize("asks", [None, False, True])
def test_every_number_equals_the_oracle(fill: str, normalize: str, asks: bool | None) -> None:
    queries = {} if asks is None else {"use_query_saliency": True}
    check_calls([(37, bool(asks))], fill=fill, normalize=normalize, **queries)


@pytest.mark.parametrize(
    "options",
    [
        {"k_high": 0.0},
        {"k_mid": 0.0},
        {"k_high": 0.0, "k_mid": 0.0},
        {"k_high": 1.0, "k_mid": 0.0},
        {"k_high": 0.0, "k_mid": 1.0},
        {"k_high": 0.5, "k_mid": 0.5},
        {"rank_mid": 1, "rank_low": 1},
        {"rank_mid": 7, "rank_low": 9, "group_size": 3},
        {"rank_mid": 16, "rank_low": 15, "group_size": 1},
        {"rank_mid": 99, "rank_low": 99, "group_size": 64},
        {"threshold_window": 2, "normalize": "size"},
        {"threshold_window": 300},
        {"residual_length": 5},
        {"n_sink": 5},
        {"n_sink": 20},
        {"adaptive_thresholds": True, "calib_variance": 5.0},
        {"adaptive_thresholds": True, "calib_variance": 1e-6},
        {"dtype": mx.float32},
        {"dtype": mx.bfloat16},
        {"dims": (6, 40)},
        {"use_query_saliency": True, "query_alpha": 0.1},
    ],
    ids=str,
)
@every_fill
def test_every_number_equals_the_oracle_with_other_options(options: dict[str, Any], fill: str) -> None:
    check_calls([(2 * options.get("threshold_window", 16) + 6, True)], seed=1, fill=fill, **options)


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, Any]:
    high = draw(st.sampled_from([0.0, 0.1, 0.25, 0.5]))
    options: dict[str, Any] = {
        "k_high": high,
        "k_mid": draw(st.sampled_from([0.0, 0.2, 0.5])),
        "threshold_window": draw(st.sampled_from([3, 8, 16, 21])),
        "group_size": draw(st.sampled_from([1, 3, 8, 32])),
        "rank_mid": draw(st.sampled_from([None, 1, 5, 40])),
        "rank_low": draw(st.sampled_from([None, 3, 4, 40])),
        "fill": draw(st.sampled_from(["block", "mean", "zero"])),
        "normalize": draw(st.sampled_from(["deviation", "size"])),
        "residual_length": draw(st.sampled_from([0, 0, 7])),
        "use_query_saliency": draw(st.booleans()),
        "dims": (draw(st.sampled_from([2, 8, 18])), draw(st.sampled_from([5, 16]))),
        "dtype": draw(st.sampled_from([mx.float16, mx.bfloat16, mx.float32])),
    }
    if draw(st.booleans()):
        options |= {"adaptive_thresholds": True, "calib_variance": draw(st.sampled_from([1e-3, 0.3, 40.0]))}
        options |= {"gamma": draw(st.sampled_from([0.03, 0.5]))}
    return options


@given(
    settings_of(),
    st.lists(st.tuples(st.sampled_from([1, 1, 5, 16, 25]), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_options_and_calls(options: dict[str, Any], calls: list[tuple[int, bool]], seed: int) -> None:
    check_calls(calls, seed, sure=assume, **options)


@given(st.integers(0, 9), st.sampled_from([(10, 1, 30), (50, 3), (33,)]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_padded_rows_are_like_others(past: int, counts: tuple[int, ...], queries: bool) -> None:
    calls = [(count, queries) for count in counts]
    check_calls(calls, seed=5, batch=2, padding=[past, 0], sure=assume, use_query_saliency=queries)


# Tiers


@pytest.mark.parametrize("window", [2, 5, 64, 100, 257])
@pytest.mark.parametrize("high, mid", [(0.2, 0.3), (0.07, 0.29), (0.55, 0.45), (0, 1), (1e-4, 0), (0.1, 0.7), (1, 0)])
def test_rows_of_each_tier(window: int, high: float, mid: float) -> None:
    o = AMCOptions(threshold_window=window, k_high=high, k_mid=mid)
    assert o.counts == sizes(o)[:2]
    state = feed(transform := vq.amc(threshold_window=window, k_high=high, k_mid=mid), *inputs(window)[:2])
    slots = np.array(state.keys.rows[0])
    assert slots.dtype == (np.uint8 if window <= 256 else np.uint16)
    assert (np.sort(slots[0, :, :window], axis=-1) == np.arange(window)).all()
    assert tier_counts(transform, state) == tuple(HEADS * count for count in sizes(o))


@every_normalize
@pytest.mark.parametrize("size", [0.0, 0.5, 3.3])
def test_of_equal_rows_the_first_are_salient(normalize: str, size: float) -> None:
    keys = mx.full((1, HEADS, 16, DIM), size, mx.float16)
    state = feed(vq.amc(**SMALL, normalize=normalize), keys, keys)
    assert (np.array(state.keys.rows[0]) == np.arange(16)).all()


def test_the_papers_magnitude_makes_large_keys_equal() -> None:
    keys = 4 + mx.abs(draw(16))
    state = feed(vq.amc(**SMALL, normalize="none"), keys, keys)
    assert (np.array(state.keys.rows[0]) == np.arange(16)).all()
    for normalize in ("size", "deviation"):
        state = feed(vq.amc(**SMALL, normalize=normalize), keys, keys)
        assert (np.array(state.keys.rows[0])[..., :4] != np.arange(4)).any()


def test_deviation_does_not_see_what_all_keys_share() -> None:
    keys = mx.round(8 * draw(16, dtype=mx.float32))
    far = keys + 1000
    slots = [feed(vq.amc(**SMALL), x, keys).keys.rows[0] for x in (keys, far)]
    assert mx.array_equal(*slots)
    slots = [feed(vq.amc(**SMALL, normalize="size"), x, keys).keys.rows[0] for x in (keys, far)]
    assert not mx.array_equal(*slots)


@pytest.mark.parametrize("times", [2.0**-60, 2.0**-9, 2.0**40])
def test_scale_changes_no_code(times: float) -> None:
    keys, values, _ = inputs(32, dtype=mx.float32)
    for options in ({}, {"fill": "mean"}, {"fill": "zero", "normalize": "size"}):
        transform = vq.amc(**SMALL, **options)
        one, two = feed(transform, keys, values), feed(transform, keys * times, values * times)
        for a, b in zip(flatten((one.keys, one.values))[0], flatten((two.keys, two.values))[0], strict=True):
            assert mx.array_equal(a * times if a.dtype == mx.float32 else a, b)


def test_keys_rank_the_values_too() -> None:
    keys, values, _ = inputs(16)
    loud = mx.where((mx.arange(16) == 9)[:, None], 30 * keys, keys)
    for k, v, exact in ((loud, values, True), (keys - keys.mean(axis=2, keepdims=True), loud, False)):
        k = k if exact else mx.where((mx.arange(16) == 9)[:, None], 0, k)
        back = read(k, v, **SMALL)[1]
        assert np.array_equal(back[:, 9], numbers(v)[0, :, 9]) == exact


# Queries


def test_magnitude_alone_with_alpha_1() -> None:
    keys, values, queries = inputs(37)
    plain = feed(vq.amc(**SMALL), keys, values)
    weighted = feed(vq.amc(**SMALL, use_query_saliency=True, query_alpha=1), keys, values, queries)
    assert_same((plain.keys, plain.values), (weighted.keys, weighted.values))


def test_what_queries_look_for_is_exact() -> None:
    keys = mx.eye(DIM)[None, None].astype(mx.float16)
    queries = mx.zeros((1, 3, 16, DIM), mx.float16)
    queries[..., [2, 7, 11, 15]] = mx.array([1, 2, 3, 4], mx.float16)
    transform = vq.amc(**SMALL, use_query_saliency=True, query_alpha=0)
    assert feed(transform, keys, keys, queries).keys.rows[0][0, 0, :4].tolist() == [2, 7, 11, 15]
    assert feed(transform, keys, keys, -queries).keys.rows[0][0, 0, 9:].tolist() == [2, 7, 11, 12, 13, 14, 15]
    assert feed(transform, keys, keys).keys.rows[0][0, 0].tolist() == list(range(16))


@pytest.mark.parametrize("times", [2.0**-8, 2.0**8])
def test_queries_count_by_their_direction(times: float) -> None:
    keys, values, queries = inputs(32, dtype=mx.float32)
    transform = vq.amc(**SMALL, use_query_saliency=True)
    one, two = (feed(transform, keys, values, x, calls=[20, 1, 11]) for x in (queries, queries * times))
    assert mx.array_equal(one.keys.rows[0], two.keys.rows[0])
    assert not mx.array_equal(one.keys.rows[0], feed(transform, keys, values).keys.rows[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_query_number_counts_as_zero(bad: float) -> None:
    keys, values, queries = inputs(16)
    broken, mended = mx.array(queries), mx.array(queries)
    broken[:, 1, 3, 2], mended[:, 1, 3, 2] = bad, 0
    transform = vq.amc(**SMALL, use_query_saliency=True)
    assert_same(*(feed(transform, keys, values, x) for x in (broken, mended)))


def test_a_trim_keeps_the_queries_of_exact_rows_and_loses_those_of_packed_ones() -> None:
    keys, values, queries = inputs(40)
    transform = vq.amc(**SMALL, use_query_saliency=True, query_alpha=0.2)
    want = feed(transform, keys, values, queries)

    def again(count: int, cut: int) -> Any:
        state = transform.trim(feed(transform, keys[:, :, :count], values[:, :, :count], queries[:, :, :count]), cut)
        state = transform.grow(state, 48)
        rest = [x[:, :, count - cut :] for x in (keys, values, queries)]
        return transform.update(state, *rest)[0]

    assert mx.array_equal(again(30, 6).keys.rows[0], want.keys.rows[0])
    reopened = transform.trim(want, 12)
    assert reopened.coded.item() == 16 and not reopened.recent.memory.any().item()
    back = numbers(reopened.recent.keys)[0, :, :12]
    assert np.array_equal(back, rows_of(transform, want)[0][:, 16:28])
    rest = [x[:, :, 28:32] for x in (keys, values, queries)]
    packed = transform.update(reopened, *rest)[0]
    o = AMCOptions(**SMALL, use_query_saliency=True, query_alpha=0.2)
    for head in range(HEADS):
        k = np.concatenate([back[head], numbers(keys)[0, head, 28:32]])
        q = numbers(queries)[0, 2 * head : 2 * head + 2, 28:32].mean(axis=0)
        assert packed.keys.rows[0][0, head, 16:32].tolist() == order_by(saliency(k, q, o), o)


# Codes and fills


@given(
    st.integers(0, 99),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([(8, ALL_MID), (4, ALL_LOW)]),
    st.integers(1, 16),
)
@settings(max_examples=20, deadline=None)
def test_a_kept_number_is_off_by_half_a_step(
    seed: int, group: int, tier: tuple[int, dict[str, Any]], rank: int
) -> None:
    bits, options = tier
    keys = draw(16, seed)
    options = SMALL | options | {"rank_mid": rank, "rank_low": rank, "group_size": group, "fill": "zero"}
    x, back = numbers(keys)[0], read(keys, **options)[0]
    for head in range(HEADS):
        order = np.argsort(-x[head].var(axis=0), kind="stable")
        assert not back[head][:, order[rank:]].any()
        for start in range(0, rank, group):
            kept = order[start : min(start + group, rank)]
            own, got = x[head][:, kept], back[head][:, kept]
            largest = np.abs(own).max(axis=1, keepdims=True)
            room = np.where(own >= largest * (1 - 2.0**-bits), 2, 1) * largest / 2**bits
            assert (np.abs(own - got) <= room * 1.001 + largest * 2.0**-10).all()


@every_fill
@pytest.mark.parametrize("tier", [ALL_MID, ALL_LOW])
def test_what_dropped_channels_read(fill: str, tier: dict[str, Any]) -> None:
    keys = draw(48)
    x, back = numbers(keys)[0], read(keys, **SMALL | tier, rank_mid=2, rank_low=2, fill=fill)[0]
    for head, start in itertools.product(range(HEADS), (0, 16, 32)):
        dropped = np.argsort(-x[head, :16].var(axis=0))[2:]
        first = {"block": start, "mean": 0}.get(fill)
        want = np.zeros(DIM - 2) if first is None else x[head, first : first + 16].mean(axis=0)[dropped]
        got = back[head, start : start + 16][:, dropped]
        np.testing.assert_allclose(got, np.tile(want, (16, 1)), rtol=2.0**-10, atol=1e-6)


def test_channels_are_kept_by_their_variance_in_the_first_block() -> None:
    quiet, loud = draw(16, dim=DIM) * 0.01, draw(32, 1, dim=DIM)
    keys = mx.concatenate([quiet, loud], axis=2)
    state = feed(vq.amc(**SMALL), keys, keys)
    variance = numbers(quiet)[0].var(axis=1)
    for head in range(HEADS):
        assert np.array_equal(np.array(state.keys.tables[0])[0, head], np.argsort(-variance[head]))
    longer = feed(vq.amc(**SMALL), keys, keys, calls=[3, 1, 20, 24])
    assert_same(state.keys.tables, longer.keys.tables)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_lossless_where_all_are_salient(dtype: mx.Dtype) -> None:
    keys, values, _ = inputs(37, dtype=dtype)
    transform = vq.amc(**SMALL | {"k_high": 1, "k_mid": 0})
    state = feed(transform, keys, values)
    assert state.coded.item() == 32 and tier_counts(transform, state) == (32 * HEADS, 0, 0)
    for got, want in zip(rows_of(transform, state), (keys, values)):
        assert np.array_equal(got, numbers(want)[0])


@pytest.mark.parametrize("size", [3.3, -5.0, 1e-30, 0.0, -6e4, 1e-7])
@pytest.mark.parametrize("tier", [ALL_MID, ALL_LOW, {}], ids=str)
def test_constant_rows_are_read_as_they_are(size: float, tier: dict[str, Any]) -> None:
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        keys = mx.full((1, HEADS, 16, DIM), size, dtype)
        back = read(keys, **SMALL | tier)[0]
        np.testing.assert_allclose(back, numbers(keys)[0], rtol=2 * STEP[dtype], atol=6e-8)


@every_fill
@pytest.mark.parametrize("tier", [ALL_MID, ALL_LOW])
def test_the_largest_numbers_do_not_overflow(tier: dict[str, Any], fill: str) -> None:
    keys = mx.full((1, HEADS, 16, DIM), -6e4, mx.float16)
    keys[:, :, 3, 5] = 6e4
    bits = 8 if tier is ALL_MID else 4
    back, x = read(keys, **SMALL | tier | WHOLE | {"fill": fill})[0], numbers(keys)[0]
    assert np.isfinite(back).all()
    assert np.abs(back - x).max() <= 2 * 1.2e5 / 2**bits


def test_keys_with_a_large_mean_keep_their_logits() -> None:
    random = np.random.RandomState(0)
    x, q = random.standard_normal((256, 128)), random.standard_normal((128,))
    x[:, [3, 40, 77, 100]] += 600
    q[[3, 40, 77, 100]] *= 0.01
    keys = mx.array(x[None, None].astype(np.float16))
    found = [np.corrcoef(read(keys, **WHOLE, fill=fill)[0][0] @ q, x @ q)[0, 1] for fill in ("block", "zero")]
    assert found[0] > 0.99 > 0.8 > found[1]


def test_few_large_rows_and_channels_are_what_it_is_for() -> None:
    """Against as many bytes of one width: better where both rows and channels are sparse, worse where all are alike."""

    def error(keys: mx.array, transform: Any) -> float:
        back = rows_of(transform, feed(transform, keys, keys))[0]
        return float(np.square(back - numbers(keys)[0]).mean())

    def held(transform: Any, tokens: int) -> int:
        return vq.nbytes(transform.init_state(vq.KVSpec(kv_heads=1, key_dim=64, value_dim=64, capacity=tokens)))

    tiers, uniform = vq.amc(), vq.kivi(bits=4, group_size=32, residual_length=0)
    sizes = [held(transform, 2048) - held(transform, 1024) for transform in (tiers, uniform)]
    assert sizes[0] <= sizes[1]
    random = np.random.RandomState(1)
    alike = mx.array(random.standard_normal((1, 1, 512, 64)).astype(np.float16))
    rows_only = mx.where(mx.array(random.rand(512, 1) < 0.05), 10 * alike, alike)
    assert error(skewed(512, 0.05), tiers) < 0.7 * error(skewed(512, 0.05), uniform)
    assert error(alike, tiers) > 20 * error(alike, uniform)
    assert error(rows_only, tiers) > error(rows_only, uniform)


# Sinks


@pytest.mark.parametrize("n_sink", [1, 4, 20])
def test_sinks_are_exact_and_not_in_the_range_of_others(n_sink: int) -> None:
    keys = draw(64)
    is_sink = (mx.arange(64) < n_sink)[:, None]
    loud, louder = (mx.where(is_sink, mx.sign(keys) * times, keys) for times in (100, 3000))
    options = SMALL | {"n_sink": n_sink} | ALL_LOW
    backs = [read(x, x, **options) for x in (loud, louder)]
    for x, back in zip((loud, louder), backs):
        for side in back:
            assert np.array_equal(side[:, :n_sink], numbers(x)[0, :, :n_sink])
    past = n_sink if n_sink < 16 else 32  # from here on no block has sinks
    for one, two in zip(*backs):
        if n_sink < 16:
            assert np.array_equal(one[:, past:], two[:, past:])
        assert np.abs(one[:, past:] - numbers(keys)[0, :, past:]).max() < 2 * np.abs(numbers(keys)).max()


# What is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_normalize
@every_fill
def test_a_key_that_is_not_finite_comes_last_and_spoils_no_other(bad: float, normalize: str, fill: str) -> None:
    keys, values, queries = inputs(32)
    clean, x = keys, mx.array(keys)
    x[:, 1, 21, 4] = bad
    for options in ({}, {"use_query_saliency": True}, {"adaptive_thresholds": True, "calib_variance": 9.0}):
        options = SMALL | WHOLE | options | {"normalize": normalize, "fill": fill}
        transform = vq.amc(**options)
        state, calm = feed(transform, x, values, queries), feed(transform, clean, values, queries)
        back, at_rest = rows_of(transform, state)[0], rows_of(transform, calm)[0]
        assert 21 - 16 in state.keys.rows[0][0, 1, 25:32].tolist()
        assert np.isfinite(back).all()
        assert np.array_equal(back[0], at_rest[0]) and np.array_equal(back[1, :16], at_rest[1, :16])
        x_near = numbers(clean)[0]
        others = [t for t in range(16, 32) if t != 21]
        assert np.abs(back[1, others] - x_near[1, others]).max() <= np.abs(x_near).max() / 4


def test_a_key_that_is_not_finite_comes_behind_keys_that_queries_shun() -> None:
    keys, values, queries = inputs(16)
    keys = mx.abs(keys)
    keys[:, :, 2, 0] = math.nan
    transform = vq.amc(**SMALL | {"k_high": 0.0, "k_mid": 0.9}, use_query_saliency=True, query_alpha=0)
    state = feed(transform, keys, values, -mx.ones_like(queries))
    assert state.keys.rows[0][0, :, 15:].tolist() == [[2]] * HEADS


@pytest.mark.parametrize("gamma, moved", [(0, 0), (9, 7)])
def test_thresholds_are_those_of_rows_that_are_finite(gamma: float, moved: int) -> None:
    """Two of the eight most salient rows are finite, one of them a hundredth of the other."""
    keys = mx.full((1, 1, 16, DIM), math.nan, mx.float16)
    keys[:, :, 4], keys[:, :, 9] = 100, 1
    options = SMALL | {"k_high": 0.5, "k_mid": 0.0, "normalize": "size"}
    transform = vq.amc(**options, adaptive_thresholds=True, gamma=gamma, calib_variance=1e9)
    state, plain = feed(transform, keys, keys), feed(vq.amc(**options), keys, keys)
    assert state.keys.rows[-1].tolist() == [[[moved, 0]]]
    if gamma == 0:
        assert_same(state.keys.rows[:-1], plain.keys.rows)


@pytest.mark.parametrize("bits, tier", [(8, ALL_MID), (4, ALL_LOW)])
def test_what_reads_in_codes_for_numbers_that_are_not_finite(bits: int, tier: dict[str, Any]) -> None:
    values = draw(32)
    values[0, 0, 20, :4] = mx.array([math.nan, math.inf, -math.inf, 0.25])
    for fill in ("block", "zero"):
        x = numbers(values)[0, 0, 16:]
        back = read(draw(32, 1), values, **SMALL | tier | WHOLE | {"fill": fill, "group_size": 64})[1][0, 16:]
        mean = np.array([c[np.isfinite(c)].mean() for c in x.T]) if fill == "block" else np.zeros(DIM)
        y = np.abs(x[4] - mean)
        largest = y[np.isfinite(y)].max()
        want = mean[:3] + np.array([0, largest * (1 - 2.0 ** (1 - bits)), -largest])
        np.testing.assert_allclose(back[4, :3], want, rtol=2e-3, atol=2e-3)
        assert np.isfinite(back).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_ranks_no_key(bad: float) -> None:
    keys, values, _ = inputs(37)
    state = feed(vq.amc(**SMALL), keys, values)
    values[0, 1, 3, 2] = bad
    assert_same(state.keys, feed(vq.amc(**SMALL), keys, values).keys)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_blocks_of_nothing_finite(bad: float) -> None:
    keys = mx.full((1, HEADS, 20, DIM), bad, mx.float16)
    for fill in ("block", "mean", "zero"):
        transform = vq.amc(**SMALL | ALL_MID | {"fill": fill, "use_query_saliency": True})
        state = feed(transform, keys, keys)
        assert (np.array(state.keys.rows[0])[:, :, :16] == np.arange(16)).all()
        assert np.isfinite(rows_of(transform, state)[0][:, :16]).all()


# Thresholds


def test_thresholds_that_stay_change_nothing() -> None:
    keys, values, _ = inputs(37)
    plain = feed(vq.amc(**SMALL), keys, values)
    for more in ({"gamma": 0, "calib_variance": 1e-9}, {"gamma": 0, "calib_variance": math.inf}):
        transform = vq.amc(**SMALL, adaptive_thresholds=True, **more)
        state = feed(transform, keys, values)
        assert_same((plain.keys.rows, plain.values), (state.keys.rows[:-1], state.values))
        assert not state.keys.rows[-1].any().item()
        assert tier_counts(transform, state) == (2 * HEADS * 4, 2 * HEADS * 5, 2 * HEADS * 7)


@pytest.mark.parametrize("calib, gamma, moves", [(1e-30, 0.1, False), (0.0131, 0.5, False), (1e30, 0.1, True)])
def test_only_less_variance_than_calibrated_lowers_rows(calib: float, gamma: float, moves: bool) -> None:
    keys, values, _ = inputs(32)
    transform = vq.amc(**SMALL, adaptive_thresholds=True, gamma=gamma, calib_variance=calib)
    counts = tier_counts(transform, feed(transform, keys, values))
    assert (counts == (16, 20, 28)) != moves
    assert sum(counts) == 64 and counts[0] <= 16


def test_rows_of_blocks_that_a_trim_took_back_are_not_counted() -> None:
    keys, values, _ = inputs(40)
    transform = vq.amc(**SMALL, adaptive_thresholds=True, calib_variance=1e30)
    first = tier_counts(transform, feed(transform, keys[:, :, :16], values[:, :, :16]))
    state = feed(transform, keys, values)
    assert first != (4 * HEADS, 5 * HEADS, 7 * HEADS) and sum(tier_counts(transform, state)) == 32 * HEADS
    assert tier_counts(transform, transform.trim(state, 12)) == first
    assert tier_counts(transform, transform.trim(state, 39)) == (0, 0, 0)


@pytest.mark.parametrize("calib", [1e300, math.inf])
def test_thresholds_rise_tenfold_at_most(calib: float) -> None:
    """Rows stay that are ten times as large as the last of their tier."""
    sizes = np.array([100.0, 3, 2, 8, 31.5, 0.5, 0.1, 0.004] + [0.001] * 8)
    keys = mx.array((sizes[:, None] * np.ones((1, 1, 1, DIM))).astype(np.float16))
    options = SMALL | {"normalize": "size", "adaptive_thresholds": True, "gamma": 9, "calib_variance": calib}
    transform = vq.amc(**options)
    state = feed(transform, keys, keys)
    assert state.keys.rows[0][0, 0, :9].tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert state.keys.rows[-1][0, 0].tolist() == [2, 2]
    assert tier_counts(transform, state) == (2, 5 + 2 - 2, 7 + 2)
    assert np.isfinite(rows_of(transform, state)[0]).all()


def test_more_variance_lowers_no_row_where_saliency_is_below_zero() -> None:
    keys, values, queries = inputs(32)
    options = SMALL | {"use_query_saliency": True, "query_alpha": 0, "adaptive_thresholds": True, "gamma": 0.2}
    transform = vq.amc(**options, calib_variance=1e-6)
    state = feed(transform, keys + 3, values, -mx.ones_like(queries))
    assert not state.keys.rows[-1].any().item()


# Calls, attention and bytes


def test_single_tokens_are_packed_like_a_prompt() -> None:
    keys, values, queries = inputs(80)
    for options in ({}, {"use_query_saliency": True}, {"residual_length": 3, "n_sink": 2}):
        transform = vq.amc(**SMALL | options)
        one, many = feed(transform, keys, values, queries), feed(transform, keys, values, queries, calls=[1] * 80)
        assert vq.nbytes(one) == vq.nbytes(many)
        assert one.coded.item() == many.coded.item() == (80 - options.get("residual_length", 0)) // 16 * 16
        assert_same((one.keys, one.values), (many.keys, many.values))


@pytest.mark.parametrize("before, n", [(0, 5), (16, 1), (30, 1), (30, 20), (47, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fill": "mean"},
        {"fill": "zero", "n_sink": 3},
        ALL_LOW,
        {"k_high": 1, "k_mid": 0},
        {"k_mid": 0},
        {"adaptive_thresholds": True, "calib_variance": 3.0, "residual_length": 4},
    ],
    ids=str,
)
def test_what_a_call_attends_to(before: int, n: int, options: dict[str, Any]) -> None:
    keys, values, queries = inputs(before + n, dtype=mx.float32)
    values = mx.concatenate([values, values[..., :3]], axis=-1)
    transform = vq.amc(**SMALL | options)
    state = begin(transform, keys, values, capacity=64)
    old = [np.zeros((HEADS, 0, x.shape[3])) for x in (keys, values)]
    if before:
        state, *_ = transform.update(state, keys[:, :, :before], values[:, :, :before])
        old = rows_of(transform, state)
    new = [x[:, :, before:] for x in (keys, values)]
    want = [np.concatenate([x, numbers(y)[0]], axis=1) for x, y in zip(old, new)]
    held = transform.write(state, *new)
    position = np.array(transform.positions(held))[0, 0]
    for got, side in zip(transform.update(state, *new)[1:], want):
        for t in range(before + n):
            assert np.array_equal(numbers(got)[0][:, np.flatnonzero(position == t)[0]], side[:, t])
    got = numbers(transform.attend(held, queries[:, :, before:], 0.7))
    for head, i in itertools.product(range(QUERY_HEADS), range(n)):
        k, v = (x[head // 2, : before + i + 1] for x in want)
        weights = np.exp(0.7 * (logits := k @ numbers(queries)[0, head, before + i]) - 0.7 * logits.max())
        np.testing.assert_allclose(got[0, head, i], weights @ v / weights.sum(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 32), (7, 192)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fill": "mean", "n_sink": 0},
        {"fill": "zero", "group_size": 5, "rank_low": 7},
        {"k_high": 1, "k_mid": 0},
        ALL_LOW,
        ALL_MID,
        {"threshold_window": 300, "residual_length": 10},
        {"use_query_saliency": True},
        {"adaptive_thresholds": True, "calib_variance": 1},
        {"threshold_window": 24, "k_high": 0.1, "k_mid": 0.9, **WHOLE},
    ],
    ids=str,
)
def test_bytes(dims: tuple[int, int], options: dict[str, Any]) -> None:
    o = AMCOptions(**options)
    window, (high, mid, low) = o.threshold_window, sizes(o)
    blocks, heads, batch, each = 3, 2, 2, 0
    for dim in dims:
        r_mid, r_low = ranks(o, dim)
        block = 2 * dim * high + mid * (r_mid + 2 * math.ceil(r_mid / min(o.group_size, r_mid)))
        block += low * (math.ceil(r_low / 2) + 2 * math.ceil(r_low / min(o.group_size, r_low)))
        block += 2 * dim if o.fill == "block" and mid + low else 0
        exact = 2 * dim * (window + o.residual_length + o.n_sink)
        each += blocks * block + exact + (4 if o.fill == "mean" else 2) * dim
    each += blocks * window * (1 if window <= 256 else 2)
    each += 4 * blocks if o.adaptive_thresholds else 0
    each += 2 * dims[0] * (window + o.residual_length) if o.use_query_saliency else 0
    once = 8 + (8 * o.n_sink + 4 if o.n_sink else 0)  # counters; places, signals and the usual size of sinks
    spec = vq.KVSpec(batch=batch, kv_heads=heads, key_dim=dims[0], value_dim=dims[1], capacity=blocks * window)
    assert vq.nbytes(vq.amc(**options).init_state(spec)) == batch * (heads * each + once)


# Calibration


@every_normalize
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("n", [7, 16, 40])
def test_calibration(normalize: str, asks: bool, n: int) -> None:
    keys, values, queries = (numbers(x)[0].swapaxes(0, 1) for x in inputs(n, dtype=mx.float32))
    options: dict[str, Any] = {"threshold_window": 16, "normalize": normalize, "use_query_saliency": asks}
    o = AMCOptions(**options)
    basis = vq.amc_calibrate(*map(mx.array, (keys, values)), queries=mx.array(queries) if asks else None, **options)
    variances = []
    for head, start in itertools.product(range(HEADS), range(0, max(n // 16, 1) * 16, 16)):
        q = queries[start : start + 16, 2 * head : 2 * head + 2].mean(axis=1) if asks else None
        variances.append(saliency(keys[start : start + 16, head], q, o).var())
    assert basis.calib_variance == pytest.approx(np.mean(variances), rel=1e-3)
    for side, x in (("key", keys), ("value", values)):
        order, means = (np.array(getattr(basis, f"{side}_{name}").array) for name in ("order", "mean"))
        for head in range(HEADS):
            assert np.array_equal(order[head], np.argsort(-x[:, head].var(axis=0)))
            np.testing.assert_allclose(means[head], x[:, head].mean(axis=0)[order[head].astype(int)], atol=1e-5)


def a_basis(seed: int = 9, **options: Any) -> Any:
    keys, values, _ = inputs(64, seed)
    return vq.amc_calibrate(*(x[0].swapaxes(0, 1) for x in (keys, values)), **options)


@every_fill
@pytest.mark.parametrize("counts", [(37,), (10, 1, 26)])
def test_a_basis_is_used_from_the_first_block_on(fill: str, counts: tuple[int, ...]) -> None:
    basis = a_basis()
    check_calls([(count, False) for count in counts], basis=basis, fill=fill)
    check_calls([(count, False) for count in counts], basis=basis, fill=fill, adaptive_thresholds=True, gamma=0.4)
    check_calls([(count, False) for count in counts], basis=basis, fill=fill, batch=2)


def test_the_option_wins_over_the_variance_of_the_basis() -> None:
    o: Any = AMCOptions(basis=(basis := a_basis()), adaptive_thresholds=True)
    assert o.saliency.calib_variance == basis.calib_variance
    assert attrs.evolve(o, calib_variance=7).saliency.calib_variance == 7
    assert attrs.evolve(o, adaptive_thresholds=False).saliency.calib_variance is None


def test_a_basis_as_arrays_and_as_plain_data() -> None:
    flat = vq.amc_calibrate(mx.ones((16, 2, 8)), mx.ones((16, 2, 8)))
    for basis in (a_basis(), flat, attrs.evolve(flat, calib_variance=0.1)):
        assert vq.AMCBasis.from_arrays(basis.arrays()) == basis
        transform = vq.amc(basis=basis, adaptive_thresholds=True)
        assert restore(describe(transform)) == transform and hash(transform) == hash(restore(describe(transform)))
    assert flat.calib_variance > 0
    endless = vq.amc(adaptive_thresholds=True, calib_variance=math.inf)
    assert restore(describe(endless)) == endless


@pytest.mark.parametrize(
    "shapes, field",
    [
        (((8, 16), (8, 1, 16), None), "keys"),
        (((8, 1, 16), (1, 8, 1, 16), None), "values"),
        (((0, 1, 16), (8, 1, 16), None), "keys"),
        (((8, 2, 16), (8, 1, 16), None), "values"),
        (((8, 2, 16), (9, 2, 16), None), "values"),
        (((8, 2, 16), (8, 2, 16), (8, 3, 16)), "queries"),
        (((8, 2, 16), (8, 2, 16), (7, 2, 16)), "queries"),
        (((8, 2, 16), (8, 2, 16), (8, 4, 8)), "queries"),
    ],
)
def test_calibration_refuses_other_shapes(shapes: tuple[Any, Any, Any], field: str) -> None:
    keys, values, queries = (None if shape is None else mx.ones(shape) for shape in shapes)
    with pytest.raises(vq.QuantizerConfigError, match=f"^amc_calibrate: `{field}` must be .*; got "):
        vq.amc_calibrate(keys, values, queries=queries)


def test_a_basis_that_is_none() -> None:
    basis = a_basis()
    twice = np.zeros((HEADS, DIM))
    for change, rule in (
        ({"key_order": twice}, "`key_order` must hold every channel of a head once; got"),
        ({"value_order": twice[0]}, "`value_order` must be an array of shape"),
        ({"key_mean": twice[:1]}, "`key_mean` must be an array of shape"),
        ({"value_mean": twice * math.nan}, "`value_mean` must be finite; got"),
        ({"calib_variance": 0}, "`calib_variance` must be a number > 0; got 0"),
        ({"calib_variance": math.nan}, "`calib_variance` must be a number > 0; got nan"),
    ):
        with pytest.raises(vq.QuantizerConfigError, match=f"^amc: {rule}"):
            attrs.evolve(basis, **change)


@pytest.mark.parametrize("heads, dim, field", [(1, DIM, "kv_heads"), (HEADS, 2 * DIM, "head_dim")])
def test_a_basis_of_another_model(heads: int, dim: int, field: str) -> None:
    keys = draw(16, heads=heads, dim=dim)
    with pytest.raises(vq.QuantizerConfigError, match=f"^amc: `{field}` must be th.* of `basis`, "):
        feed(vq.amc(**SMALL, basis=a_basis()), keys, keys)


# Options


@pytest.mark.parametrize(
    "change",
    [
        {"k_high": 0.4},
        {"k_mid": 0.1},
        {"use_query_saliency": True},
        {"use_query_saliency": True, "query_alpha": 0.1},
        {"adaptive_thresholds": True, "calib_variance": 3},
        {"adaptive_thresholds": True, "calib_variance": 3, "gamma": 0.01},
        {"adaptive_thresholds": True, "calib_variance": 0.06},
        {"threshold_window": 8},
        {"group_size": 2},
        {"normalize": "size"},
        {"normalize": "none"},
        {"fill": "mean"},
        {"fill": "zero"},
        {"rank_mid": 9},
        {"rank_low": 7},
        {"residual_length": 5},
        {"n_sink": 3},
        {"basis": a_basis()},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    keys, values, queries = inputs(48)
    last = list(change)[-1]
    backs = []
    for options in (SMALL | change, SMALL | {name: x for name, x in change.items() if name != last}):
        if options.get("adaptive_thresholds") and last == "calib_variance":
            options = {"calib_variance": 1000} | options
        backs.append(rows_of(vq.amc(**options), feed(vq.amc(**options), keys, values, queries)))
    assert not np.array_equal(backs[0][0], backs[1][0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k_high": 1.1}, r"`k_high` must be a finite number in \[0, 1\]; got 1.1"),
        ({"k_high": True}, r"`k_high` must be a finite number in \[0, 1\]; got True"),
        ({"k_mid": -0.1}, r"`k_mid` must be a finite number in \[0, 1\]; got -0.1"),
        ({"k_mid": math.nan}, r"`k_mid` must be a finite number in \[0, 1\]; got nan"),
        ({"k_high": 0.75, "k_mid": 0.5}, r"`k_mid` must be at most 1 with `k_high`; got 1.25"),
        ({"query_alpha": 2}, r"`query_alpha` must be a finite number in \[0, 1\]; got 2"),
        ({"use_query_saliency": 1}, r"`use_query_saliency` must be one of \(True, False\); got 1"),
        ({"adaptive_thresholds": None}, r"`adaptive_thresholds` must be one of \(True, False\); got None"),
        ({"adaptive_thresholds": True}, r"`calib_variance` must be given with `adaptive_thresholds`; got None"),
        ({"threshold_window": 1}, r"`threshold_window` must be an integer in \[2, 65536\]; got 1"),
        ({"threshold_window": 64.0}, r"`threshold_window` must be an integer in \[2, 65536\]; got 64.0"),
        ({"gamma": -1}, "`gamma` must be a finite number >= 0; got -1"),
        ({"gamma": math.inf}, "`gamma` must be a finite number >= 0; got inf"),
        ({"calib_variance": 0}, "`calib_variance` must be a number > 0; got 0"),
        ({"calib_variance": -math.inf}, "`calib_variance` must be a number > 0; got -inf"),
        ({"calib_variance": math.nan}, "`calib_variance` must be a number > 0; got nan"),
        ({"calib_variance": True}, "`calib_variance` must be a number > 0; got True"),
        ({"group_size": 0}, "`group_size` must be an integer >= 1; got 0"),
        ({"normalize": "l2"}, r"`normalize` must be one of \('deviation', 'size', 'none'\); got 'l2'"),
        ({"fill": None}, r"`fill` must be one of \('block', 'mean', 'zero'\); got None"),
        ({"rank_mid": 0}, "`rank_mid` must be an integer >= 1; got 0"),
        ({"rank_low": 1.5}, "`rank_low` must be an integer >= 1; got 1.5"),
        ({"residual_length": -1}, "`residual_length` must be an integer >= 0; got -1"),
        ({"n_sink": -1}, "`n_sink` must be an integer >= 0; got -1"),
        ({"basis": 3}, "`basis` must be what `amc_calibrate` returns; got 3"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^amc: {message}$"):
        vq.amc(**options)


def test_no_policy_moves_its_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match=r"^h2o over amc: `store` must "):
        vq.chain(vq.h2o_policy(), vq.amc())


def test_a_batch_row_is_not_changed_by_a_loud_one() -> None:
    keys, values, queries = inputs(37, batch=2)
    loud = [x * mx.array([1, 1000], mx.float16).reshape(2, 1, 1, 1) for x in (keys, values, queries)]
    transform = vq.amc(**SMALL, use_query_saliency=True)
    alone = feed(transform, keys[:1], values[:1], queries[:1])
    assert_same(map_leaves(lambda x: x[:1], feed(transform, *loud)), alone)
