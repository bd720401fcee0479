"""Width by age against loops over groups in numpy: tiers, codes that divide, errors, trims, bytes, attention."""

import itertools
import math
import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_kivi import HEADS, attended, draw, dtypes, feed, feed_more, numbers, rows_in_order

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.quantize.age_tiered import AgeTieredKVOptions

UNIT_ROUNDING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
SMALL = {"recent_boundary": 32, "mid_boundary": 80, "group_size": 16}
EVERY = [
    {"group_size": 16, "recent_boundary": 32, "mid_boundary": 80},
    {"group_size": 32, "recent_boundary": 50, "mid_boundary": 97},
    {"group_size": 8, "recent_boundary": 16, "mid_boundary": 33},
    {"group_size": 16, "recent_boundary": 1, "mid_boundary": 40},
    {"group_size": 16, "recent_boundary": 40, "mid_boundary": 40},
    {"group_size": 16, "recent_boundary": 1000, "mid_boundary": 1000},
    {"group_size": 32, "recent_boundary": 32, "mid_boundary": 64, "bits_recent": 6, "bits_mid": 3, "bits_old": 1},
    {"group_size": 32, "recent_boundary": 32, "mid_boundary": 64, "bits_recent": 16, "bits_mid": 11, "bits_old": 7},
    {"group_size": 16, "recent_boundary": 32, "mid_boundary": 64, "bits_recent": 4, "bits_mid": 4, "bits_old": 4},
    {"group_size": 12, "recent_boundary": 48, "mid_boundary": 96, "bits_recent": 8, "bits_mid": 4, "bits_old": 4},
]
every = pytest.mark.parametrize("sizes", EVERY, ids=str)


def widths(o: AgeTieredKVOptions) -> tuple[int, int, int]:
    return o.bits_recent, o.bits_mid, o.bits_old


def fill_of(state: Any) -> Fill:
    n, (coded, older, oldest) = state.offset.item(), state.coded[0].tolist()
    return Fill(n, n, coded, older=older, oldest=oldest)


def live(transform: Any, state: Any, row: int = 0) -> tuple[mx.array, ...]:
    """What a state holds of one batch row, tier by tier, without unused room."""
    one = map_leaves(lambda leaf: leaf[row : row + 1], state)
    key_parts, value_parts = transform.parts(one, fill_of(one))
    return (one.coded, one.offset, *(array for part in key_parts + value_parts for array in part.rows))


def assert_same_live(transform: Any, one: Any, two: Any, row: int = 0, other_row: int = 0) -> None:
    pairs = zip(live(transform, one, row), live(transform, two, other_row), strict=True)
    assert all(a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in pairs)


# The oracle


def block_of(o: AgeTieredKVOptions) -> int:
    """Whole groups that fill whole words at every width."""
    return math.lcm(o.group_size, *(32 // math.gcd(32, bits) for bits in widths(o)))


def tier_of(position: int, n: int, o: AgeTieredKVOptions) -> int | None:
    """0 recent, 1 of middle age, 2 old, by the oldest token of the group; None while the group is not complete."""
    block = block_of(o)
    first = position // block * block
    if first + block > n:
        return None
    age = n - 1 - first
    return 0 if age < o.recent_boundary else 1 if age < o.mid_boundary else 2


def frontiers(n: int, o: AgeTieredKVOptions) -> list[int]:
    """Rows in any tier, in the two older ones, in the last."""
    tiers = [tier_of(p, n, o) for p in range(n)]
    return [sum(tier is not None and tier >= least for tier in tiers) for least in range(3)]


def ends_of(part: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest number [H, T, D] that each coded number could be: what codes of zeros and of ones read as."""
    codes, *numbers_of_group = part.rows
    every_row = mx.broadcast_to(mx.eye(part.count), (1, HEADS, part.count, part.count))
    low, high = (
        part.coder.mix(every_row, (mx.full(codes.shape, code, mx.uint32), *numbers_of_group)) for code in (0, 2**32 - 1)
    )
    return numbers(low)[0].astype(np.float64), numbers(high)[0].astype(np.float64)


def place_of(x: np.ndarray, low: np.ndarray, high: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(x - low) * L / range, and where it is clear of the borders between codes."""
    spread = np.where(high > low, high - low, 1)
    place = (x - low) / spread * (2**bits - 1)
    return place, np.abs(place - np.floor(place) - 0.5) > 1e-3 + 1e-6 * 2**bits


def nearest(place: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(np.round(place), 0, 2**bits - 1).astype(np.int64)


def coarser(codes: np.ndarray, bits: int, fewer: int) -> np.ndarray:
    """round(code * L' / L), a half going up."""
    if bits == fewer:
        return codes
    top, less = 2**bits - 1, 2**fewer - 1
    return (2 * codes * less + top) // (2 * top)


def bits_of(packed: mx.array, bits: int, count: int) -> np.ndarray:
    stream = (np.array(packed)[..., None] >> np.arange(32) & 1).reshape(*packed.shape[:-1], -1)
    return (stream[..., : count * bits].reshape(*packed.shape[:-1], count, bits) << np.arange(bits)).sum(axis=-1)


def assert_equal_to_oracle(transform: Any, state: Any, keys: mx.array, values: mx.array) -> None:
    o, n = transform.options, keys.shape[2]
    coded, older, oldest = frontiers(n, o)
    assert state.coded[0].tolist() == [coded, older, oldest] and state.offset.item() == n
    spans = [slice(0, oldest), slice(oldest, older), slice(older, coded)]
    for parts, x in zip(transform.parts(state, fill_of(state)), (keys, values)):
        exact, filled = numbers(x)[0], iter(parts)
        for tier, span in zip((2, 1, 0), spans):
            if span.stop > span.start:
                assert_tier(o, tier, next(filled), exact[:, span], keys.dtype)
        assert np.array_equal(numbers(next(filled).rows[0])[0], exact[:, coded:])


def assert_tier(o: AgeTieredKVOptions, tier: int, part: Any, x: np.ndarray, dtype: mx.Dtype) -> None:
    """The codes of all that is in a tier, each made at the first width and then coarser tier by tier."""
    low, high = ends_of(part)
    grouped = x.reshape(HEADS, -1, o.group_size, x.shape[2])
    least, span = (np.repeat(f(grouped, axis=2), o.group_size, axis=1) for f in (np.min, np.ptp))
    rounding = 2 * UNIT_ROUNDING[dtype]
    assert np.array_equal(low, least)
    assert (np.abs(high - least - span) <= rounding * (span + np.abs(least)) + 1e-6).all()
    place, clear = place_of(x, low, high, o.bits_recent)
    codes = nearest(place, o.bits_recent)
    for bits, fewer in list(itertools.pairwise(widths(o)))[:tier]:
        codes = coarser(codes, bits, fewer)
    got = bits_of(part.rows[0], widths(o)[tier], x.shape[1])[0].swapaxes(-1, -2)
    assert np.array_equal(got[clear], codes[clear]) and clear.mean() > 0.8


@every
@pytest.mark.parametrize("n", [16, 97, 160])
def test_every_code_equals_the_oracle(n: int, sizes: dict[str, int]) -> None:
    transform = vq.age_tiered(**sizes)
    keys, values = draw(n, 3, seed=n), draw(n, 4, seed=1)
    for cuts in ([], [n // 2, *[1] * 20]):
        assert_equal_to_oracle(transform, feed(transform, keys, values, cuts if sum(cuts) < n else []), keys, values)


@dtypes
def test_every_code_equals_the_oracle_in_other_dtypes(dtype: mx.Dtype) -> None:
    transform = vq.age_tiered(**SMALL)
    keys, values = draw(150, 3, dtype=dtype), draw(150, 4, seed=1, dtype=dtype)
    assert_equal_to_oracle(transform, feed(transform, keys, values, [100, 1]), keys, values)


# Tiers


@every
def test_tiers_token_by_token(sizes: dict[str, int]) -> None:
    """Every token is in one tier or exact, and gets only older."""
    transform, n = vq.age_tiered(**sizes), 130
    keys, values = draw(n, 2), draw(n, 2, seed=1)
    state = feed(transform, keys[:, :, :0], values[:, :, :0], capacity=n)
    for i in range(n):
        before = state.coded[0].tolist()
        state, *_ = transform.update(state, keys[:, :, i : i + 1], values[:, :, i : i + 1])
        after = state.coded[0].tolist()
        assert after == frontiers(i + 1, transform.options)
        assert all(old <= new for old, new in zip(before, after)) and after == sorted(after, reverse=True)
        position = np.array(transform.positions(state))[0, 0]
        assert sorted(position[(position >= 0) & (position <= i)].tolist()) == list(range(i + 1))


@pytest.mark.parametrize("group", [16, 32])
def test_boundaries_are_exact(group: int) -> None:
    """The first group, of age n - 1: one token more and it is older."""
    for boundary in (40, 41, 64, 65):
        transform = vq.age_tiered(recent_boundary=boundary, mid_boundary=2 * boundary, group_size=group)
        for n, tiers in (
            (boundary, [group, 0, 0]),
            (boundary + 1, [group, group, 0]),
            (2 * boundary, [group, group, 0]),
            (2 * boundary + 1, [group, group, group]),
        ):
            state = feed(transform, draw(n, 2), draw(n, 2, seed=1))
            assert [min(count, group) for count in state.coded[0].tolist()] == tiers


# Codes that divide


@pytest.mark.parametrize("bits", [(8, 4, 2), (8, 2, 1), (16, 8, 4), (4, 2, 1), (8, 8, 4), (6, 3, 1)], ids=str)
def test_ageing_gives_the_codes_of_the_numbers_themselves(bits: tuple[int, int, int]) -> None:
    options = dict(zip(("bits_recent", "bits_mid", "bits_old"), bits))
    transform = vq.age_tiered(recent_boundary=32, mid_boundary=64, group_size=32, **options)
    keys = draw(128, 64, dtype=mx.float32)
    parts, _ = transform.parts(state := feed(transform, keys, keys), fill_of(state))
    spans = [slice(0, oldest := state.coded[0, 2].item()), slice(oldest, 96)]
    for part, width, span in zip(parts, bits[:0:-1], spans):
        place, clear = place_of(numbers(keys)[0, :, span], *ends_of(part), width)
        got = bits_of(part.rows[0], width, part.count)[0].swapaxes(-1, -2)
        assert np.array_equal(got[clear], nearest(place, width)[clear]) and clear.mean() > 0.99


@pytest.mark.parametrize("boundaries", [(16, 48), (100, 100), (1, 1)])
def test_equal_widths_are_plain_groups(boundaries: tuple[int, int]) -> None:
    equal = {"bits_recent": 4, "bits_mid": 4, "bits_old": 4, "group_size": 16}
    keys, values = draw(120, 8), draw(120, 8, seed=1)
    here, there = (vq.age_tiered(recent_boundary=a, mid_boundary=b, **equal) for a, b in (boundaries, (1000, 1000)))
    pairs = zip(*(rows_in_order(t, feed(t, keys, values, [50, *[1] * 30])) for t in (here, there)))
    assert all(np.array_equal(one, two) for one, two in pairs)


# Errors


def steps_of(x: np.ndarray, o: AgeTieredKVOptions, n: int) -> np.ndarray:
    """Half a step of each coded number [H, coded, D]."""
    group, coded = o.group_size, frontiers(n, o)[0]
    spread = np.ptp(x[:, :coded].reshape(HEADS, -1, group, x.shape[2]), axis=2)
    tops = np.array([2 ** widths(o)[tier_of(p, n, o) or 0] - 1 for p in range(coded)])
    return np.repeat(spread, group, axis=1) / (2 * tops[:, None])


@dtypes
@pytest.mark.parametrize("sizes", [{}, {"bits_recent": 4, "bits_mid": 2, "bits_old": 1}, {"bits_old": 4}], ids=str)
def test_error_is_half_a_step_of_the_tier(sizes: dict[str, int], dtype: mx.Dtype) -> None:
    transform = vq.age_tiered(**SMALL, **sizes)
    keys, values = draw(150, 16, dtype=dtype), draw(150, 8, seed=1, dtype=dtype)
    for got, x in zip(rows_in_order(transform, feed(transform, keys, values)), (keys, values)):
        exact, rounding = numbers(x)[0], UNIT_ROUNDING[dtype]
        half = steps_of(exact, transform.options, 150)
        coded = half.shape[1]
        bound = half * (1 + 1e-3) + 2 * rounding * np.abs(exact).max() + 1e-6
        assert (np.abs(got[:, :coded] - exact[:, :coded]) <= bound).all()
        assert np.array_equal(got[:, coded:], exact[:, coded:])


def test_error_where_all_are_recent() -> None:
    transform = vq.age_tiered(recent_boundary=512, group_size=32)
    x = draw(320, 32, dtype=mx.float32)
    for got in rows_in_order(transform, feed(transform, x, x)):
        spread = np.repeat(np.ptp(numbers(x)[0].reshape(HEADS, -1, 32, 32), axis=2), 32, axis=1)
        assert (np.abs(got - numbers(x)[0]) <= spread / 510 * 1.0001).all()


def test_older_rows_have_larger_errors() -> None:
    transform, x = vq.age_tiered(recent_boundary=160, mid_boundary=320, group_size=32), draw(480, 64)
    got, _ = rows_in_order(transform, feed(transform, x, x))
    error = np.square(got - numbers(x)[0]).reshape(HEADS, -1, 32, 64).mean(axis=(0, 2))  # [groups, D]
    old, mid, recent = error[:5], error[5:10], error[10:]
    assert (recent < mid).mean() >= 0.99 and (mid < old).mean() >= 0.99
    assert old.mean() > 10 * mid.mean() > 100 * recent.mean()


@dtypes
@pytest.mark.parametrize("value", [3.3, -5.0, 1e-30, 0.0])
def test_equal_rows_come_back_exactly(value: float, dtype: mx.Dtype) -> None:
    transform, x = vq.age_tiered(**SMALL), mx.full((1, HEADS, 150, 8), value).astype(dtype)
    for got in rows_in_order(transform, feed(transform, x, x)):
        assert np.array_equal(got, numbers(x)[0])


@pytest.mark.parametrize("bits", [(8, 4, 2), (16, 8, 1)], ids=str)
@pytest.mark.parametrize("end", [32000, 60000, 65504])
def test_a_range_past_half_precision(end: int, bits: tuple[int, int, int]) -> None:
    """Twice the largest half-precision number is no range that this can hold, but the numbers are."""
    options = dict(zip(("bits_recent", "bits_mid", "bits_old"), bits))
    transform = vq.age_tiered(recent_boundary=32, mid_boundary=64, group_size=32, **options)
    x = np.random.default_rng(0).uniform(-end, end, (1, HEADS, 96, 8)).astype(np.float16)
    x[:, :, ::32], x[:, :, 1::32] = -end, end
    for got in rows_in_order(transform, feed(transform, mx.array(x), mx.array(x))):
        half = steps_of(x[0].astype(np.float32), transform.options, 96)
        assert (np.abs(got - x[0].astype(np.float32)) <= half * (1 + 1e-3) + 32).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_alone(bad: float) -> None:
    transform, clean = vq.age_tiered(**SMALL), draw(150, 8)
    apart = (np.arange(150)[:, None] == 3) & (np.arange(8) == 5)
    x = mx.where(mx.array(apart), bad, clean).astype(mx.float16)
    exact = np.where(apart, numbers(clean)[0, :, 4:5].repeat(150, axis=1), numbers(clean)[0])
    half = steps_of(exact, transform.options, 150)
    for got in rows_in_order(transform, feed(transform, x, x)):
        assert np.isfinite(got).all()
        error = np.abs(got - exact)[:, : half.shape[1]]
        assert (error <= half * (1 + 1e-3) + 4e-3)[:, ~apart[: half.shape[1]]].all()


# How the rows came


@given(data=st.data(), sizes=st.sampled_from(EVERY))
def test_how_a_prompt_was_cut_leaves_no_trace(data: st.DataObject, sizes: dict[str, int]) -> None:
    transform, n = vq.age_tiered(**sizes), data.draw(st.integers(1, 170))
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=5)))
    cuts = [b - a for a, b in itertools.pairwise([0, *(edge for edge in edges if edge < n), n])]
    keys, values = draw(n, 4), draw(n, 6, seed=1)
    one, two = feed(transform, keys, values, cuts), feed(transform, keys, values)
    assert_same_live(transform, one, two)
    pairs = zip(rows_in_order(transform, one), rows_in_order(transform, two))
    assert all(np.array_equal(a, b) for a, b in pairs)


@dtypes
def test_token_by_token_equals_one_shot(dtype: mx.Dtype) -> None:
    transform = vq.age_tiered(**SMALL)
    keys, values = draw(115, 4, dtype=dtype), draw(115, 6, seed=1, dtype=dtype)
    assert_same_live(transform, feed(transform, keys, values, [1] * 115), feed(transform, keys, values))


@pytest.mark.parametrize("cuts", [[], [3, 60], [80, 1, 1], [1] * 12], ids=str)
def test_age_is_counted_from_each_rows_own_end_and_padding_is_none(cuts: list[int]) -> None:
    transform, padding = vq.age_tiered(**SMALL), [0, 5, 40]
    loud = mx.array([1.0, 1000.0, 1.0], mx.float16)[:, None, None, None]
    keys, values = draw(140, 4, batch=3) * loud, draw(140, 6, seed=1, batch=3) * loud
    for row, pad in enumerate(padding):
        keys[row, :, :pad] = values[row, :, :pad] = math.nan
    state = feed(transform, keys, values, cuts, left_padding=mx.array(padding))
    for row, pad in enumerate(padding):
        alone = feed(transform, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert_same_live(transform, state, alone, row)


# Trim and room


@pytest.mark.parametrize("x", [1, 5, 6])
def test_trim_within_the_open_group_leaves_no_trace(x: int) -> None:
    transform, n = vq.age_tiered(**SMALL), 150
    keys, values = draw(n, 4), draw(n, 6, seed=1)
    whole = feed(transform, keys, values)
    again = feed_more(transform, transform.trim(whole, x), keys[:, :, n - x :], values[:, :, n - x :])
    assert_same_live(transform, again, whole)


@pytest.mark.parametrize("x", [7, 20, 31, 60, 80, 130, 149])
def test_trim_into_tiers_reads_as_before_and_makes_nothing_finer(x: int) -> None:
    transform, n = vq.age_tiered(**SMALL), 150
    keys, values = draw(n, 4), draw(n, 6, seed=1)
    whole = feed(transform, keys, values)
    before, start = rows_in_order(transform, whole), (n - x) // 16 * 16
    short = transform.trim(whole, x)
    assert short.offset.item() == n - x
    assert short.coded[0].tolist() == [min(count, start) for count in whole.coded[0].tolist()]
    assert all(np.array_equal(got, want[:, : n - x]) for got, want in zip(rows_in_order(transform, short), before))
    assert vq.nbytes(short) == vq.nbytes(whole)
    again = feed_more(transform, short, keys[:, :, n - x :], values[:, :, n - x :], [1] * min(x, 9))
    assert again.coded[0].tolist() == whole.coded[0].tolist()
    for got, want, was in zip(rows_in_order(transform, again), (keys, values), before):
        half = steps_of(numbers(want)[0], transform.options, n)
        assert np.array_equal(got[:, :start], was[:, :start])
        error = np.abs(got - numbers(want)[0])[:, : half.shape[1]]
        assert (error <= 3.2 * half + 4e-3).all()


def test_trim_of_everything_starts_afresh() -> None:
    transform = vq.age_tiered(**SMALL)
    keys, values = draw(150, 4), draw(150, 6, seed=1)
    whole = feed(transform, keys, values)
    for x in (150, 1000):
        empty = transform.trim(whole, x)
        assert empty.offset.item() == 0 and empty.coded[0].tolist() == [0, 0, 0]
        assert_same_live(transform, feed_more(transform, empty, keys, values), whole)


def test_grow_keeps_what_is_held_and_makes_room() -> None:
    transform = vq.age_tiered(**SMALL)
    keys, values = draw(200, 4), draw(200, 6, seed=1)
    small = feed(transform, keys[:, :, :100], values[:, :, :100], capacity=100)
    large = transform.grow(small, 200)
    assert transform.capacity(large) >= 200 > transform.capacity(small)
    assert_same_live(transform, large, small)
    grown = feed_more(transform, large, keys[:, :, 100:], values[:, :, 100:], [50, 1])
    assert_same_live(transform, grown, feed(transform, keys, values))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_call_past_the_capacity_returns_no_plausible_numbers(batch: int) -> None:
    transform = vq.age_tiered(**SMALL)
    full = feed(transform, draw(100, 4, batch=batch), draw(100, 4, batch=batch), capacity=112)
    for n, fits in ((12, True), (13, False), (60, False)):  # of 112 tokens 32 are old, of 113 48
        _, keys, values = transform.update(full, draw(n, 4, batch=batch), draw(n, 4, batch=batch))
        for x in (keys, values):
            assert (mx.isfinite(x) if fits else mx.isnan(x)).all()


# Attention, bytes and options


@dtypes
@pytest.mark.parametrize("sizes", [{}, {"bits_recent": 6, "bits_mid": 3, "bits_old": 1}], ids=str)
@pytest.mark.parametrize("n", [1, 5])
def test_attention_on_codes_equals_attention_over_what_is_read(n: int, sizes: dict[str, int], dtype: mx.Dtype) -> None:
    transform = vq.age_tiered(recent_boundary=32, mid_boundary=96, **sizes)
    total = 150 + n
    keys, values = draw(total, 64, dtype=dtype), draw(total, 80, seed=1, dtype=dtype)
    state = feed(transform, keys[:, :, :150], values[:, :, :150], capacity=total)
    held = transform.write(state, keys[:, :, 150:], values[:, :, 150:])
    queries = mx.random.normal((1, 3 * HEADS, n, 64), key=mx.random.key(5)).astype(dtype)
    want = attended(numbers(queries)[0], *rows_in_order(transform, held), start=150)
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    for fill in (None, fill_of(held)):
        got = transform.attend(held, queries, 64**-0.5, None, fill)
        assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
        np.testing.assert_allclose(numbers(got)[0], want, atol=tolerance)


@dtypes
@pytest.mark.parametrize("capacity", [64, 512])
@pytest.mark.parametrize("bits", [(8, 4, 2), (16, 8, 4)], ids=str)
def test_bytes_follow_the_formula(bits: tuple[int, int, int], capacity: int, dtype: mx.Dtype) -> None:
    options = dict(zip(("bits_recent", "bits_mid", "bits_old"), bits))
    transform = vq.age_tiered(recent_boundary=96, mid_boundary=320, group_size=32, **options)
    spec = vq.KVSpec(kv_heads=3, key_dim=64, value_dim=80, batch=2, dtype=dtype, capacity=capacity)
    a_row = [(64 + 80) * (width / 8 + 2 * dtype.size / 32) for width in bits]
    coded = a_row[0] * 96 + a_row[1] * (320 - 96) + a_row[2] * max(capacity - 320, 32)
    want = 2 * 3 * (coded + 32 * (64 + 80) * dtype.size) + 2 * 4 * 4
    assert vq.nbytes(transform.init_state(spec)) == want


def test_bytes_do_not_depend_on_the_number_of_tokens() -> None:
    transform = vq.age_tiered(**SMALL)
    sizes = {vq.nbytes(feed(transform, draw(n, 4), draw(n, 6), capacity=256)) for n in (1, 40, 100, 200)}
    assert len(sizes) == 1
    dtypes_held = {leaf.dtype for leaf in flatten(feed(transform, draw(9, 4), draw(9, 6)))[0]}
    assert dtypes_held == {mx.uint32, mx.float16, mx.int32}


@pytest.mark.parametrize(
    "options",
    [
        *({"recent_boundary": 0}, {"recent_boundary": 2.5}, {"mid_boundary": 127}, {"mid_boundary": True}),
        *({"bits_recent": 17}, {"bits_mid": 0}, {"bits_old": 0}, {"bits_old": True}, {"group_size": 0}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"age_tiered: `{next(iter(options))}` must be"):
        vq.age_tiered(**options)


def test_widths_that_grow_with_age_are_allowed_with_a_warning() -> None:
    for bits in ({"bits_mid": 16}, {"bits_old": 5}):
        with pytest.warns(UserWarning, match="age_tiered"):
            transform = vq.age_tiered(**SMALL, **bits)
        keys, values = draw(150, 3), draw(150, 4, seed=1)
        assert_equal_to_oracle(transform, feed(transform, keys, values), keys, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vq.age_tiered(bits_recent=4, bits_mid=4, bits_old=4)


def test_numbers_are_shared_along_tokens_so_no_policy_can_move_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="age_tiered"):
        vq.chain(vq.h2o_policy(budget=40), vq.age_tiered())
