"""KVTC against numpy: widths, bit fields, axes, ranges, codes, sinks, trims, export, bytes, options."""

import itertools
import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtc_oracle import (
    DEFAULTS,
    SIDES,
    assert_same,
    brute_force,
    check_codes,
    check_tables,
    cost,
    fields,
    layout,
    least_cost,
    live,
    reach,
    tables,
)
from svdq_oracle import DIM, HEADS, UNIT, begin, feed, fitted, numbers, rows_in_order, sample

import vq_functional as vq
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.lowrank.allocation import REACH, allocate
from vq_functional.lowrank.kvtc import KVTCBasis
from vq_functional.lowrank.variable_codes import pack_fields, unpack_fields
from vq_functional.quantize.state_stream import encode_state

SMALL: dict[str, Any] = {"bit_budget": 64, "n_sink": 2, "window": 8, "chunk": 8, "n_fit": 40}
CARD: dict[str, Any] = {"shrinkage": 0, "ranges": "observed"}
CHOICES = (0, 1, 2, 3, 4, 6, 8)
dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])
few = settings(max_examples=12, deadline=None)
many = settings(max_examples=25, deadline=None)
some_choices = st.lists(st.integers(1, 8), max_size=5, unique=True).map(lambda bits: (*bits, 0))
some_variances = st.lists(st.floats(-6, 0), min_size=1, max_size=6).map(
    lambda x: sorted((10**e for e in x), reverse=True)
)


def check_state(transform: Any, state: Any, came: tuple[mx.array, mx.array], options: dict[str, Any]) -> None:
    """Tables, codes and what is read of the first sequence, which is all tokens in `came`."""
    o, n, dtype = DEFAULTS | options, came[0].shape[2], came[0].dtype
    first, coded = layout(n, o)
    assert state.coded.item() == coded > 0 and state.offset.item() == n
    read, sinks = rows_in_order(transform, state), o["n_sink"]
    for side, x, rows in zip(SIDES, came, read, strict=True):
        want = numbers(x)[0]
        assert np.array_equal(rows[:, coded:], want[:, coded:]) and np.array_equal(rows[:, :sinks], want[:, :sinks])
        budget = o["bit_budget"] if o.get(f"bit_budget_{side[0]}") is None else o[f"bit_budget_{side[0]}"]
        words, found = np.array(getattr(state, side).rows[0])[0, :, :, sinks:coded], tables(state, side)
        for head in range(want.shape[0]):
            own = [table[head] for table in found]
            check_tables(own, want[head, sinks:first], budget, o, dtype)
            check_codes(own, want[head, sinks:coded], words[head], rows[head, sinks:coded], UNIT[dtype])


# Who gets how many bits


def bits_of(variance: Any, budget: int, choices: tuple[int, ...] = CHOICES, beta: float = 3.5) -> np.ndarray:
    return np.array(allocate(mx.array(np.array(variance, np.float32)), budget, choices, beta))


@many
@given(variance=some_variances, budget=st.integers(0, 50), choices=some_choices, beta=st.sampled_from([1.5, 3.5, 4.0]))
def test_no_other_widths_lose_less(variance: list[float], budget: int, choices: tuple[int, ...], beta: float) -> None:
    width = bits_of(variance, budget, choices, beta).tolist()
    assert sum(width) <= budget and set(width) <= set(choices) and width == sorted(width, reverse=True)
    best = brute_force(variance, budget, choices, beta)
    assert best == pytest.approx(least_cost(variance, budget, choices, beta))
    assert cost(variance, width, beta) <= best * (1 + 1e-5)


@few
@given(
    decay=st.floats(0.5, 1.0),
    rank=st.integers(1, 24),
    budget=st.integers(0, 160),
    choices=some_choices,
    scale=st.sampled_from([2.0**-60, 1e-20, 1e-4, 3.0, 1e20]),
)
def test_widths_of_many_components(
    decay: float, rank: int, budget: int, choices: tuple[int, ...], scale: float
) -> None:
    variance = np.float32(decay ** np.arange(rank))
    width = bits_of(variance, budget, choices)
    found = cost(variance, width, 3.5)
    assert found <= least_cost(variance, budget, choices, 3.5) * (1 + 1e-5)
    for bits in choices:
        assert bits * rank > budget or found <= cost(variance, [bits] * rank, 3.5) * (1 + 1e-6)
    more = cost(variance, bits_of(variance, budget + 3, choices), 3.5)
    assert more <= found * (1 + 1e-6)
    scaled = bits_of(variance * np.float32(scale), budget, choices)
    if math.log2(scale).is_integer():
        assert scaled.tolist() == width.tolist()
    assert cost(variance, scaled, 3.5) <= found * (1 + 1e-5)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 31, 32, 64, 127, 200, 255, 511, 512, 600])
def test_bits_are_neither_lost_nor_of_other_widths(budget: int) -> None:
    for decay in (1.0, 0.9, 0.97):
        width = bits_of(decay ** np.arange(64.0), budget, (0, 2, 4, 8))
        assert set(width.tolist()) <= {0, 2, 4, 8} and width.tolist() == sorted(width.tolist(), reverse=True)
        assert min(budget, 512) - 4 < width.sum() <= budget


def test_components_that_do_not_vary_get_nothing() -> None:
    assert bits_of([0.0] * 4, 30).tolist() == [0] * 4
    assert bits_of([3.0, 1.0, 0.0, 0.0], 30).tolist() == [8, 8, 0, 0]
    assert bits_of([1.0] * 4, 8).tolist() == [2] * 4
    assert bits_of([1.0] * 4, 5).tolist() == [2, 1, 1, 1]
    assert bits_of([[1.0, 1.0], [5.0, 0.0]], 4, (4, 0, 2)).tolist() == [[2, 2], [4, 0]]


@pytest.mark.parametrize("small", [1e-8, 1e-13, 1e-20])
def test_small_components_share_what_a_large_one_leaves(small: float) -> None:
    rest = [small, small / 3, small / 8, small / 20]
    for budget in (3, 8, 13):
        assert bits_of([1.0, *rest], 8 + budget).tolist() == [8, *bits_of(rest, budget).tolist()]


def test_levels_are_those_that_lose_least_of_a_normal_variable() -> None:
    assert [reach(bits) for bits in range(1, 9)] == pytest.approx(REACH[1:], rel=3e-3)


# Fields


@many
@given(
    batch=st.integers(1, 2),
    rank=st.integers(1, 40),
    rows=st.integers(1, 5),
    spare=st.integers(0, 2),
    seed=st.integers(0, 999),
    extreme=st.booleans(),
)
def test_fields_of_any_widths_come_back(batch: int, rank: int, rows: int, spare: int, seed: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    width = rng.integers(0, 9, (batch, HEADS, rank))
    codes = rng.integers(0, 1 << width[..., None], (batch, HEADS, rank, rows))
    codes = ((1 << width[..., None]) - 1) * np.ones_like(codes) if extreme else codes
    count = -(-int(width.sum(axis=-1).max()) // 32) + spare
    for kind in (mx.int32, mx.uint8):
        held = mx.array(width).astype(kind)
        words = pack_fields(mx.array(codes.astype(np.uint32)), held, count)
        assert words.shape == (batch, HEADS, count, rows) and words.dtype == mx.uint32
        assert np.array_equal(np.array(unpack_fields(words, held)), codes)
        for row, head in itertools.product(range(batch), range(HEADS)):
            assert np.array_equal(fields(np.array(words)[row, head], width[row, head].tolist()), codes[row, head])


@pytest.mark.parametrize("bits", range(9))
def test_every_code_of_a_width_comes_back(bits: int) -> None:
    codes = mx.broadcast_to(mx.arange(1 << bits), (1, 1, 5, 1 << bits)).astype(mx.uint32)
    width = mx.full((1, 1, 5), bits)
    again = unpack_fields(pack_fields(codes, width, -(-5 * bits // 32)), width)
    assert mx.array_equal(again, codes.astype(mx.float32))


# What is held


@pytest.mark.parametrize(
    "options",
    [
        {},
        CARD,
        {"ranges": "observed"},
        {"shrinkage": 0},
        {"shrinkage": 0.5, "margin": 0.0},
        {"bit_choices": (4, 0, 2), "margin": 1.0},
        {"bit_choices": (0, 5), "bit_budget": 33},
        {"beta": 1.3, "bit_budget": 40},
        {"rank": 5, **CARD},
        {"bit_budget_k": 20, "bit_budget_v": 90},
        {"bit_budget": 999},
        {"n_sink": 0, "window": 0, "chunk": 1, "n_fit": 60},
        {"n_sink": 30, "window": 20, "chunk": 48},
        {"window": 70, "chunk": 5, "n_fit": 20},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_the_state_follows_from_the_oracle(options: dict[str, Any]) -> None:
    transform = vq.kvtc(**SMALL | options)
    keys, values = sample(111), sample(111, 12, seed=5, decay=0.9)
    check_state(transform, feed(transform, keys, values), (keys, values), SMALL | options)


@dtypes
@pytest.mark.parametrize("dim", [16, 40])
def test_the_state_follows_from_the_oracle_in_each_dtype(dtype: mx.Dtype, dim: int) -> None:
    for options in ({"n_fit": 96}, {"n_fit": 96, **CARD}):
        transform = vq.kvtc(**SMALL | options)
        keys, values = sample(130, dim, decay=0.85, dtype=dtype), sample(130, 20, seed=5, decay=0.9, dtype=dtype)
        state = feed(transform, keys, values)
        assert {x.dtype for side in SIDES for x in getattr(state, side).tables[:2]} == {dtype}
        check_state(transform, state, (keys, values), SMALL | options)


@pytest.mark.parametrize("chunk", [48, 512, 600])
def test_long_prompts_are_packed_as_short_ones(chunk: int) -> None:
    options = SMALL | {"chunk": chunk, "n_fit": 60, "bit_budget": 24}
    transform, keys = vq.kvtc(**options), sample(1300, 4)
    state = feed(transform, keys)
    check_state(transform, state, (keys, keys), options)
    assert_same(live(state), live(feed(transform, keys, cuts=(70, 700))))


@pytest.mark.parametrize("n_sink, n_fit, window, chunk", [(0, 40, 8, 8), (5, 41, 10, 16), (39, 40, 0, 4), (2, 3, 9, 3)])
def test_axes_are_those_of_the_first_rows_without_the_sinks(n_sink: int, n_fit: int, window: int, chunk: int) -> None:
    options = {"n_sink": n_sink, "n_fit": n_fit, "window": window, "chunk": chunk, "bit_budget": 64}
    first, _ = layout(90, options)
    place, keys, transform = mx.arange(90)[:, None], sample(90, seed=n_sink), vq.kvtc(**options)
    loud = mx.where((place < n_sink) | (place >= first), 50 * keys[:, :, ::-1], keys)
    one, two = (feed(transform, x) for x in (keys, loud))
    assert n_fit <= first <= max(n_fit + chunk - 1, window + chunk)
    assert_same(one.keys.tables, two.keys.tables)
    behind = slice(n_sink, min(first, one.coded.item()))
    assert mx.array_equal(one.keys.rows[0][..., behind], two.keys.rows[0][..., behind])
    moved = feed(transform, mx.where(place == first - 1, 50 * keys, keys))
    assert not mx.array_equal(moved.keys.tables[1], one.keys.tables[1])
    assert np.array_equal(rows_in_order(transform, two)[0][:, :n_sink], numbers(loud)[0, :, :n_sink])


@few
@given(
    cuts=st.lists(st.sampled_from([1, 1, 2, 7, 9, 33, 40]), min_size=1, max_size=6),
    n_fit=st.sampled_from([10, 40, 70]),
    window=st.sampled_from([0, 5, 32]),
    chunk=st.sampled_from([1, 8, 24]),
    dtype=st.sampled_from(list(UNIT)),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_same_codes(
    cuts: list[int], n_fit: int, window: int, chunk: int, dtype: mx.Dtype, seed: int
) -> None:
    options = SMALL | {"n_fit": n_fit, "window": window, "chunk": chunk}
    keys, transform = sample(sum(cuts), seed=seed, dtype=dtype), vq.kvtc(**options)
    pieces, whole = (feed(transform, keys, cuts=c) for c in (cuts[:-1], ()))
    assert pieces.coded.item() == whole.coded.item() == layout(sum(cuts), options)[1]
    if whole.coded.item():
        assert_same(live(pieces), live(whole))
    for got, want in zip(rows_in_order(transform, pieces), rows_in_order(transform, whole)):
        assert np.array_equal(got, want)


def test_single_tokens_pack_nothing_too_early_and_move_no_code() -> None:
    keys, values, transform = sample(80), sample(80, 12, seed=1), vq.kvtc(**SMALL)
    state, before = begin(transform, keys, values), []
    for i in range(80):
        state, *_ = transform.update(state, keys[:, :, i : i + 1], values[:, :, i : i + 1])
        coded = state.coded.item()
        assert coded == layout(i + 1, SMALL)[1] and (i < 39 or 8 <= i + 1 - coded <= 15)
        for rows, x in zip(rows_in_order(transform, state), (keys, values)):
            want = numbers(x)[0, :, : i + 1]
            assert np.array_equal(rows[:, coded:], want[:, coded:]) and np.array_equal(rows[:, :2], want[:, :2])
        after = live(state)
        for old, new in zip(before, after):
            assert mx.array_equal(old, new[..., : old.shape[-1]])
        before = after if coded else []
    assert_same(live(state), live(feed(transform, keys, values)))


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    keys, values = sample(140), sample(140, 12, seed=1)
    transform, end = vq.kvtc(**SMALL), 0
    state = begin(transform, keys, values)
    for count in (20, 1, 40, 1, 30, 48):
        span, coded = slice(end, end + count), state.coded.item()
        before = rows_in_order(transform, state)
        mask = np.array(transform.make_mask(state, count))[0, 0, -1]
        state, *out = transform.update(state, keys[:, :, span], values[:, :, span])
        end += count
        for got, old, x in zip(out, before, (keys, values)):
            got = numbers(got)[0][:, mask]
            assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:end])
            assert np.array_equal(got[:, :coded], old[:, :coded])


# What the bits are for


@dtypes
def test_without_bits_rows_read_as_their_mean(dtype: mx.Dtype) -> None:
    keys, transform = sample(72, dtype=dtype), vq.kvtc(**SMALL | {"bit_budget": 0})
    for options in ({"bit_budget": 0}, {"bit_choices": (0,)}):
        transform = vq.kvtc(**SMALL | options)
        state = feed(transform, keys)
        _, mean, width, scale, shift = tables(state)
        assert not (width.any() or scale.any() or shift.any())
        want = np.repeat(mean[:, None], 62, axis=1)
        assert np.array_equal(rows_in_order(transform, state)[0][:, 2:64], want)
        assert np.abs(mean - numbers(keys)[0, :, 2:40].mean(axis=1)).max() <= UNIT[dtype] * np.abs(mean).max() + 1e-6
    assert state.keys.rows[0].shape[2] == 0


def test_eight_bits_lose_half_a_step_at_most() -> None:
    keys, transform = sample(40), vq.kvtc(**SMALL | {"bit_budget": 8 * DIM, "bit_choices": (0, 8)} | CARD)
    state = feed(transform, keys)
    basis, _, width, scale, _ = tables(state)
    error = rows_in_order(transform, state)[0] - numbers(keys)[0]
    assert (width == 8).all() and np.abs(error).max() > 0
    for head in range(HEADS):
        assert (np.abs(error[head, 2:32] @ basis[head]) <= scale[head] / 2 + 2e-6).all()
        assert (np.linalg.norm(error[head, 2:32], axis=-1) <= np.linalg.norm(scale[head]) / 2 + 1e-5).all()


def test_components_left_out_cost_their_own_variance() -> None:
    keys, options = sample(40), SMALL | {"bit_budget": 64, "bit_choices": (0, 8), "rank": 6} | CARD
    transform = vq.kvtc(**options)
    state, x = feed(transform, keys), numbers(keys)[0]
    basis, mean, width, scale, _ = tables(state)
    assert basis.shape[-1] == 6 and (width == 8).all()
    error = rows_in_order(transform, state)[0] - x
    for head in range(HEADS):
        y = x[head, 2:32] - mean[head]
        dropped = np.linalg.norm(y - y @ basis[head] @ basis[head].T, axis=-1)
        got = np.linalg.norm(error[head, 2:32], axis=-1)
        assert (np.abs(got - dropped) <= np.linalg.norm(scale[head]) / 2 + 1e-5).all()


def test_more_bits_lose_less() -> None:
    keys = sample(200, 32, decay=0.9)
    losses = []
    for budget in (0, 32, 64, 96, 128, 192, 256):
        transform = vq.kvtc(**SMALL | {"bit_budget": budget, "n_fit": 120})
        error = rows_in_order(transform, feed(transform, keys))[0] - numbers(keys)[0]
        losses.append(np.square(error).mean())
    assert (np.diff(losses) < 0).all() and losses[-1] < 1e-3 * losses[0]


def test_later_numbers_beyond_a_range_take_its_end() -> None:
    keys = mx.where(mx.arange(64)[:, None] < 40, sample(64), 1000 * sample(64))
    transform = vq.kvtc(**SMALL | {"bit_budget": 96})
    state = feed(transform, keys)
    _, _, width, scale, shift = tables(state)
    words = np.array(state.keys.rows[0])[0, :, :, 40:56]
    for head in range(HEADS):
        codes, top = fields(words[head], width[head].astype(int).tolist()), 2 ** width[head] - 1
        kept = width[head] > 0
        assert np.isin(codes[kept], [0, *top]).mean() > 0.9 and (codes <= top[:, None]).all()
    assert np.isfinite(scale).all() and np.isfinite(shift).all()


@pytest.mark.parametrize("value", [3.3, -5.0, 0.0, 1e-30])
@dtypes
@pytest.mark.parametrize("options", [{}, CARD, {"shrinkage": 2.0}], ids=["default", "card", "raised"])
def test_equal_rows_are_exact(value: float, dtype: mx.Dtype, options: dict[str, Any]) -> None:
    row = mx.where(mx.arange(DIM) % 3 == 0, value, -2 * value)
    keys = mx.broadcast_to(row, (1, HEADS, 72, DIM)).astype(dtype)
    transform = vq.kvtc(**SMALL | options)
    read, want = rows_in_order(transform, feed(transform, keys))[0], numbers(keys)[0]
    assert (np.abs(read - want) <= UNIT[dtype] * np.abs(want)).all()


@pytest.mark.parametrize("options", [{}, CARD], ids=["default", "card"])
@pytest.mark.parametrize("scale", [2.0**-13, 2.0**10, 1e-4, 1e3, 1e-15, 1e15])
def test_rows_may_have_any_size(scale: float, options: dict[str, Any]) -> None:
    keys, transform = sample(72), vq.kvtc(**SMALL | options)
    states = [feed(transform, x) for x in (keys, keys * scale)]
    assert mx.array_equal(states[0].keys.tables[2], states[1].keys.tables[2])
    one, two = (rows_in_order(transform, state)[0] for state in states)
    limit = 0.0 if math.log2(scale).is_integer() else 1e-2
    assert np.linalg.norm(two / scale - one) <= max(limit, 1e-5) * np.linalg.norm(one)


def test_a_bias_that_dwarfs_the_rest_costs_nothing() -> None:
    keys, bias = sample(136, 32, decay=0.9), mx.where(mx.arange(32) % 8 == 3, 600.0, 0.0)
    transform = vq.kvtc(**SMALL | {"bit_budget": 128, "n_fit": 80})
    plain, moved = (rows_in_order(transform, feed(transform, x))[0] for x in (keys, keys + bias))
    errors = [np.square(got - numbers(x)[0]).mean() for got, x in ((plain, keys), (moved, keys + bias))]
    assert errors[1] <= 1.05 * errors[0]


def test_one_row_to_fit_to_is_enough_to_go_on() -> None:
    keys, transform = sample(30), vq.kvtc(n_sink=4, n_fit=5, window=0, chunk=5, bit_budget=64)
    state = feed(transform, keys)
    read = rows_in_order(transform, state)[0]
    assert np.isfinite(read).all() and np.abs(read - read[:, 4:5])[:, 4:].max() < 1e-6
    assert np.array_equal(read[:, :4], numbers(keys)[0, :, :4])


@pytest.mark.parametrize("n", [1, 2, 15, 39, 40, 41, 47, 48, 49])
def test_short_prompts_are_exact_or_packed(n: int) -> None:
    keys, transform = sample(n), vq.kvtc(**SMALL)
    state = feed(transform, keys)
    assert state.coded.item() == layout(n, SMALL)[1]
    assert n >= 40 or np.array_equal(rows_in_order(transform, state)[0], numbers(keys)[0])


# Heads, sequences, odd numbers


def test_heads_and_sequences_stand_alone() -> None:
    keys, values = sample(72, batch=3), sample(72, 12, seed=5, batch=3)
    keys[1] *= 1000
    transform = vq.kvtc(**SMALL)
    state, swapped = feed(transform, keys, values), feed(transform, keys[:, ::-1], values[:, ::-1])
    for row in range(3):
        span = slice(row, row + 1)
        assert_same(live(state, row), live(feed(transform, keys[span], values[span])))
        assert_same(live(state, row), [x[::-1] for x in live(swapped, row)])
    bases = [tables(state, row=row)[0][head] for row in range(2) for head in range(HEADS)]
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.combinations(bases, 2))


def test_left_padding_leaves_no_trace() -> None:
    keys, transform = sample(80, batch=2), vq.kvtc(**SMALL)
    keys[1, :, :7] = 900
    state = feed(transform, keys, padding=mx.array([0, 7]))
    for row, padding in enumerate((0, 7)):
        alone = feed(transform, keys[row : row + 1, :, padding:])
        assert state.coded[row].item() == alone.coded.item() == layout(80 - padding, SMALL)[1]
        assert_same(live(state, row), live(alone))
        for got, want in zip(rows_in_order(transform, state, row), rows_in_order(transform, alone)):
            assert np.array_equal(got, want)


def test_a_state_copied_by_rows_reads_as_its_source() -> None:
    keys, transform = sample(72, batch=3), vq.kvtc(**SMALL)
    state = feed(transform, keys)
    picked = map_leaves(lambda x: x[mx.array([2, 0])], state)
    for row, source in enumerate((2, 0)):
        assert_same(live(picked, row), live(state, source))
        for got, want in zip(rows_in_order(transform, picked, row), rows_in_order(transform, state, source)):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, 20, 39, 50])
@dtypes
def test_a_number_that_is_not_finite_is_coded_as_the_mean(at: int, bad: float, dtype: mx.Dtype) -> None:
    keys, transform = sample(72, dtype=dtype), vq.kvtc(**SMALL | {"bit_budget": 96})
    spot = (mx.arange(72)[:, None] == at) & (mx.arange(DIM) == 5)
    following = at + 1 if at < 39 else 2
    mended = mx.where(spot, keys[:, :, following : following + 1], keys) if at < 40 else keys
    spoilt, clean = (feed(transform, x) for x in (mx.where(spot, bad, keys), mended))
    assert_same(spoilt.keys.tables, clean.keys.tables)
    others = np.flatnonzero(np.arange(64) != at)
    words, want = (np.array(state.keys.rows[0]) for state in (spoilt, clean))
    assert np.array_equal(words[..., others], want[..., others])
    read, found = rows_in_order(transform, spoilt)[0], tables(spoilt)
    assert np.isfinite(read).all()
    for head in range(HEADS):
        row = numbers(keys)[0, head, at : at + 1].copy()
        row[0, 5] = found[1][head, 5]
        own = [table[head] for table in found]
        check_codes(own, row, words[0, head, :, at : at + 1], read[head, at : at + 1], UNIT[dtype])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_finite_number_are_read_as_finite_ones(bad: float) -> None:
    for keys in (mx.full((1, HEADS, 72, DIM), bad), mx.where(mx.arange(72)[:, None] < 60, bad, sample(72))):
        transform = vq.kvtc(**SMALL)
        state = feed(transform, keys.astype(mx.float16))
        read = np.array(transform.read(state)[0].astype(mx.float32))[0, :, 2:64]
        assert np.isfinite(read).all() and all(mx.isfinite(x).all() for x in state.keys.tables)


@dtypes
@pytest.mark.parametrize("options", [{}, CARD, {"margin": 3.0, "ranges": "observed"}], ids=["default", "card", "wide"])
def test_the_largest_numbers_stay_finite(dtype: mx.Dtype, options: dict[str, Any]) -> None:
    largest = 60000.0 if dtype == mx.float16 else 1e37
    keys = (mx.sign(sample(72, decay=1.0)) * largest).astype(dtype)
    transform = vq.kvtc(**SMALL | {"bit_budget": 128} | options)
    state = feed(transform, keys)
    read, came = rows_in_order(transform, state)[0], numbers(keys)[0]
    assert all(mx.isfinite(x).all() for x in state.keys.tables) and np.isfinite(read).all()
    assert np.square((read - came)[:, 2:64] / largest).mean() < 0.1


def test_a_row_far_from_all_others_takes_no_other_with_it() -> None:
    keys = mx.where(mx.arange(72)[:, None] == 20, 60000.0, sample(72)).astype(mx.float16)
    for options in ({}, CARD):
        transform = vq.kvtc(**SMALL | {"bit_budget": 128} | options)
        read = rows_in_order(transform, feed(transform, keys))[0]
        assert np.isfinite(read).all()


# Attention and trims


def samples(n: int = 300, dim: int = DIM, seed: int = 3, decay: float = 0.7) -> mx.array:
    return sample(n, dim, seed, decay)[0].swapaxes(0, 1)


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-4), (mx.float16, 3e-3)], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "options",
    [{}, CARD, {"bit_budget": 0}, {"rank": 7}, {"n_sink": 0, "bit_budget_k": 200}, {"basis": True}],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_on_codes_is_dense_attention(
    options: dict[str, Any], dtype: mx.Dtype, limit: float, tokens: int
) -> None:
    keys, values = sample(90, 32, decay=0.9, dtype=dtype), sample(90, 20, seed=1, dtype=dtype)
    if "basis" in options:
        found = vq.kvtc_calibrate(samples(dim=32, decay=0.9), samples(dim=20), bit_budget=64)
        options = options | {"basis": found}
    queries = mx.random.normal((1, 2 * HEADS, tokens, 32), key=mx.random.key(0)).astype(dtype)
    transform = vq.kvtc(**SMALL | options)
    state = feed(transform, keys, values)
    assert state.coded.item() == 80
    got, (held_keys, held_values) = numbers(transform.attend(state, queries, 0.2)), rows_in_order(transform, state)
    for h, t in itertools.product(range(2 * HEADS), range(tokens)):
        seen = 90 - tokens + t + 1
        score = held_keys[h // 2, :seen] @ numbers(queries)[0, h, t] * 0.2
        weights = np.exp(score - score.max())
        want = weights / weights.sum() @ held_values[h // 2, :seen]
        np.testing.assert_allclose(got[0, h, t], want, atol=limit * np.abs(held_values).max())


@pytest.mark.parametrize("drop", [1, 5, 6, 7, 8, 30, 62, 63, 71, 101])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int) -> None:
    keys, transform = sample(110), vq.kvtc(**SMALL)
    state, kept, least = feed(transform, keys), 110 - drop, 32
    short = transform.trim(state, drop)
    assert state.coded.item() == 96 and short.offset.item() == kept
    assert short.coded.item() == min(96, kept // 8 * 8 if kept >= least else 0)
    for got, want in zip(rows_in_order(transform, short), rows_in_order(transform, state)):
        np.testing.assert_array_equal(got, want[:, :kept])
    again, *_ = transform.update(short, keys[:, :, kept:], keys[:, :, kept:])
    assert again.coded.item() == 96
    if drop <= 14:
        assert_same(live(again), live(state))
    if kept >= least:
        assert_same(again.keys.tables, state.keys.tables)
        stay = short.coded.item()
        assert mx.array_equal(again.keys.rows[0][..., :stay], state.keys.rows[0][..., :stay])
    else:  # the first packing comes again, of what was kept as it read and of what came
        rows = np.concatenate([rows_in_order(transform, short)[0], numbers(keys)[0, :, kept:]], axis=1)
        for head in range(HEADS):
            own = [table[head] for table in tables(again)]
            check_tables(own, rows[head, 2:40], 64, DEFAULTS | SMALL, mx.float32)


def test_after_a_trim_to_nothing_new_rows_have_their_own_axes() -> None:
    keys, other, transform = sample(80), sample(80, seed=8), vq.kvtc(**SMALL)
    empty = transform.trim(feed(transform, keys), 80)
    again, *_ = transform.update(empty, other, other)
    assert_same(live(again), live(feed(transform, other)))


# Samples


@pytest.mark.parametrize(
    "kind, options", [("float32", {}), ("bfloat16", CARD), ("numpy", {"rank": 6}), ("numpy", {"bit_budget_k": 20})]
)
def test_calibration_follows_from_the_oracle(kind: str, options: dict[str, Any]) -> None:
    keys, values = samples(200), samples(200, 12, seed=7, decay=0.6)
    keys[:, 1] *= 3
    if kind == "bfloat16":
        keys, values = keys.astype(mx.bfloat16), values.astype(mx.bfloat16)
    spoilt = keys * 1
    spoilt[7, 1, 3], spoilt[9, 0, 2] = math.nan, -math.inf
    came = np.array(spoilt) if kind == "numpy" else spoilt
    o = SMALL | {"bit_budget": 40} | options
    found = vq.kvtc_calibrate(came, values, **o)
    arrays = found.arrays()
    for side, rows in (("key", np.delete(numbers(keys), [7, 9], axis=0)), ("value", numbers(values))):
        own = [numbers(arrays[f"{side}_{name}"]) for name in ("basis", "mean", "width", "scale", "shift")]
        assert own[0].shape[2] == (own[2] > 0).sum(axis=-1).max() < (o.get("rank") or rows.shape[2]) + 1
        budget = o.get("bit_budget_k", 40) if side == "key" else 40
        for head in range(HEADS):
            check_calibrated([table[head] for table in own], rows[:, head], budget, DEFAULTS | o)
    again = KVTCBasis.from_arrays(arrays)
    assert again == found and hash(vq.kvtc(basis=again)) == hash(vq.kvtc(basis=found))


def check_calibrated(found: list[np.ndarray], rows: np.ndarray, budget: int, o: dict[str, Any]) -> None:
    """As `check_tables`, with the components that have no bits put back."""
    basis, mean, *others = found
    _, axes, _ = fitted(rows)
    missing = (o["rank"] or rows.shape[1]) - basis.shape[1]
    basis = np.concatenate([basis, axes[:, basis.shape[1] : basis.shape[1] + missing]], axis=1)
    others = [np.pad(table, (0, missing)) for table in others]
    check_tables([basis, mean, *others], rows, budget, o, mx.float32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_a_given_basis_is_used_as_it_is(dtype: mx.Dtype) -> None:
    keys, values = sample(72, seed=3, dtype=dtype), sample(72, 12, seed=7, decay=0.6, dtype=dtype)
    found = vq.kvtc_calibrate(samples(), samples(dim=12, seed=7, decay=0.6), bit_budget=40, bit_budget_v=70)
    unused = {"beta": 2.0, "rank": 3, "shrinkage": 9.0, "ranges": "observed", "margin": 2.0, "n_fit": 70}
    options = {"basis": found, "window": 8, "chunk": 8, "n_sink": 2}
    states = [feed(vq.kvtc(**options | more), keys, values, cuts=cuts) for more, cuts in (({}, ()), (unused, (1, 30)))]
    assert_same(live(states[0]), live(states[1]))
    transform, state = vq.kvtc(**options), states[0]
    assert state.keys.tables == state.values.tables == () and state.coded.item() == 64
    assert state.recent.keys.shape[2] == 16
    for side, x, read in zip(("key", "value"), (keys, values), rows_in_order(transform, state)):
        own = [numbers(getattr(found, f"{side}_{name}").array) for name in ("basis", "mean", "width", "scale", "shift")]
        words = np.array(getattr(state, f"{side}s").rows[0])[0]
        assert words.shape[1] == math.ceil(own[2].sum(axis=-1).max() / 32)
        for head in range(HEADS):
            spans = numbers(x)[0, head, 2:64], words[head, :, 2:64], read[head, 2:64]
            check_codes([table[head] for table in own], *spans, UNIT[dtype])


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_calibrated_widths_do_not_depend_on_size(scale: float) -> None:
    rows = np.array(samples(100))
    one, two = (vq.kvtc_calibrate(x, x, bit_budget=40) for x in (rows, rows * np.float32(scale)))
    assert mx.array_equal(one.key_width.array, two.key_width.array)
    np.testing.assert_allclose(numbers(two.key_scale.array), numbers(one.key_scale.array) * scale, rtol=1e-3)


def test_equal_samples_need_no_bits() -> None:
    found = vq.kvtc_calibrate(mx.full((40, HEADS, DIM), 2.5), mx.zeros((40, HEADS, 8)))
    assert found.key_basis.shape == (HEADS, DIM, 1) and found.value_basis.shape == (HEADS, 8, 1)
    keys, values = mx.full((1, HEADS, 72, DIM), 2.5), mx.zeros((1, HEADS, 72, 8))
    transform = vq.kvtc(basis=found, window=8)
    for got, want in zip(rows_in_order(transform, feed(transform, keys, values)), (keys, values)):
        assert np.array_equal(got, numbers(want)[0])


# Export


def assert_equal_states(one: Any, two: Any) -> None:
    assert attrs.asdict(one.layout) == attrs.asdict(two.layout)
    for got, want in zip(flatten(one)[0], flatten(two)[0], strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert np.array_equal(np.array(got.reshape(-1).view(mx.uint8)), np.array(want.reshape(-1).view(mx.uint8)))


@dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bit_budget": 0},
        {"n_sink": 0, "chunk": 5, "bit_budget_v": 13},
        {"rank": 6, "window": 0},
        {"n_fit": 78, "chunk": 3},
        {"basis": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_what_is_sent_comes_back_bit_for_bit(options: dict[str, Any], dtype: mx.Dtype) -> None:
    if "basis" in options:
        options = {"basis": vq.kvtc_calibrate(samples(), samples(dim=12), bit_budget=40), "chunk": 16}
    keys, values = sample(90, batch=2, dtype=dtype), sample(90, 12, seed=1, batch=2, dtype=dtype)
    transform = vq.kvtc(**SMALL | options)
    state = feed(transform, keys[:, :, :80], values[:, :, :80], padding=mx.array([0, 27]))
    for held in (state, transform.trim(state, 21), transform.grow(state, 301), begin(transform, keys, values)):
        again = vq.kvtc_decode(transform, vq.kvtc_encode(transform, held))
        assert_equal_states(again, held)
    rest = keys[:, :, 80:], values[:, :, 80:]
    grown = transform.grow(state, 128)
    again = vq.kvtc_decode(transform, vq.kvtc_encode(transform, grown))
    assert_equal_states(transform.update(again, *rest)[0], transform.update(grown, *rest)[0])


@few
@given(
    capacity=st.integers(1, 150),
    share=st.floats(0, 1),
    window=st.integers(0, 20),
    chunk=st.integers(1, 20),
    n_fit=st.integers(3, 60),
    dropped=st.integers(0, 60),
)
def test_states_of_any_layout_come_back(
    capacity: int, share: float, window: int, chunk: int, n_fit: int, dropped: int
) -> None:
    transform, n = vq.kvtc(n_sink=2, window=window, chunk=chunk, n_fit=n_fit, bit_budget=37), round(capacity * share)
    keys = sample(max(n, 1))[:, :, :n]
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype=mx.float32, capacity=capacity)
    state = transform.init_state(spec)
    if n:
        state, *_ = transform.update(state, keys, keys)
    state = transform.trim(state, dropped) if dropped < n else state
    assert_equal_states(vq.kvtc_decode(transform, vq.kvtc_encode(transform, state)), state)


def test_what_repeats_and_what_is_skewed_is_sent_in_less() -> None:
    transform = vq.kvtc(**SMALL | {"bit_budget": 96})
    skewed = mx.where(mx.arange(300)[:, None] % 20 == 5, 12 * sample(300), sample(300))
    for keys in (skewed, mx.tile(sample(60), (1, 1, 5, 1))):
        state = feed(transform, keys)
        sent = vq.kvtc_encode(transform, state)
        assert len(sent) <= len(encode_state(transform, state)) + 16 and len(sent) < vq.nbytes(state)
        assert_equal_states(vq.kvtc_decode(transform, sent), state)


def test_damaged_bytes_are_refused() -> None:
    transform = vq.kvtc(**SMALL)
    sent = vq.kvtc_encode(transform, feed(transform, sample(72)))
    cut = [sent[:end] for end in (0, 3, 8, 9, 12, len(sent) // 2, len(sent) - 1)]
    turned = [bytes([*sent[:at], sent[at] ^ 64, *sent[at + 1 :]]) for at in range(0, len(sent), len(sent) // 40)]
    for data in (*cut, *turned, sent + b"\0", b"\0" * 40, encode_state(transform, feed(transform, sample(72)))):
        with pytest.raises(vq.QuantizerConfigError):
            vq.kvtc_decode(transform, data)


@pytest.mark.parametrize(
    "change", [{"bit_budget": 63}, {"chunk": 4}, {"n_sink": 3}, {"window": 16}, {"beta": 2.0}, {"rank": 12}], ids=str
)
def test_bytes_of_other_options_are_refused(change: dict[str, Any]) -> None:
    transform, other = vq.kvtc(**SMALL), vq.kvtc(**SMALL | change)
    sent = vq.kvtc_encode(transform, feed(transform, sample(72)))
    with pytest.raises(vq.QuantizerConfigError, match="; got "):
        vq.kvtc_decode(other, sent)


def test_what_is_sent_has_no_part_of_a_basis_and_what_is_refused_none_in_its_words() -> None:
    given = basis()
    (heads, key_dim, _), (_, value_dim, _) = given.key_basis.shape, given.value_basis.shape
    transform, other = (vq.kvtc(**SMALL | {"basis": given, "window": window}) for window in (24, 25))
    state = transform.init_state(vq.KVSpec(kv_heads=heads, key_dim=key_dim, value_dim=value_dim, capacity=8))
    sent = vq.kvtc_encode(transform, state)
    assert len(sent) < sum(x.nbytes for x in given.arrays().values()) / 4
    with pytest.raises(vq.QuantizerConfigError, match=r"^decode_state: `transform` must be .*; got "):
        vq.kvtc_decode(other, sent)
    assert len(repr(given)) < 1000


@pytest.mark.parametrize(
    "call",
    [
        lambda ours, theirs: vq.kvtc_encode(theirs[0], theirs[1]),
        lambda ours, theirs: vq.kvtc_encode(ours[0], theirs[1]),
        lambda ours, theirs: vq.kvtc_encode(ours[0], None),
        lambda ours, theirs: vq.kvtc_decode(theirs[0], vq.kvtc_encode(*ours)),
        lambda ours, theirs: vq.kvtc_encode(vq.kvtc(**SMALL | {"bit_budget": 100}), ours[1]),
        lambda ours, theirs: vq.kvtc_encode(vq.kvtc(**SMALL | {"rank": 9}), ours[1]),
        lambda ours, theirs: vq.kvtc_encode(vq.kvtc(**SMALL | {"basis": basis()}), ours[1]),
    ],
    ids=["both", "state", "none", "decode", "budget", "rank", "basis"],
)
def test_only_states_of_the_transform_are_sent(call: Any) -> None:
    pairs = [(transform, feed(transform, sample(72, 32))) for transform in (vq.kvtc(**SMALL), vq.kivi())]
    with pytest.raises(vq.QuantizerConfigError, match=r"^(kvtc|kvtc_encode|kvtc_decode|encode_state): `.*; got "):
        call(*pairs)


# Bytes and options


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (20, 48)], ids=str)
@pytest.mark.parametrize("heads, batch, capacity", [(1, 1, 1024), (3, 2, 300)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bit_budget": 200},
        {"bit_budget": 33, "n_sink": 0, "window": 16},
        {"bit_budget_k": 65, "bit_budget_v": 0, "rank": 16, "chunk": 10, "window": 30},
        {"rank": 8, "bit_budget": 999},
        {"rank": 8, "bit_choices": (0, 3), "n_fit": 200},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_bytes(dims: tuple[int, int], heads: int, batch: int, capacity: int, options: dict[str, Any]) -> None:
    o = DEFAULTS | options
    first, _ = layout(0, o)
    columns = -(-capacity // o["chunk"]) * o["chunk"]
    shared = o["n_sink"] * 8 + 4 * (o["n_sink"] > 0) + 8
    want = batch * shared
    for side, dim in zip("kv", dims):
        rank = o["rank"] or dim
        budget = o["bit_budget"] if o.get(f"bit_budget_{side}") is None else o[f"bit_budget_{side}"]
        words = math.ceil(min(budget, rank * max(o["bit_choices"])) / 32)
        table = 2 * (dim * rank + dim) + 9 * rank
        want += batch * heads * (4 * words * columns + table + (first + o["n_sink"]) * 2 * dim)
    spec = vq.KVSpec(batch=batch, kv_heads=heads, key_dim=dims[0], value_dim=dims[1], capacity=capacity)
    assert vq.nbytes(vq.kvtc(**options).init_state(spec)) == want


@pytest.mark.parametrize("bits", [5, 40, 128])
def test_bytes_with_a_basis(bits: int) -> None:
    found = vq.kvtc_calibrate(samples(), samples(dim=32, decay=0.9), bit_budget=bits)
    most = [int(table.array.sum(axis=-1).max().item()) for table in (found.key_width, found.value_width)]
    words = sum(math.ceil(width / 32) for width in most)
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=DIM, value_dim=32, capacity=200)
    want = HEADS * (4 * words * 208 + (48 + 16 + 4) * 2 * (DIM + 32)) + 4 * 8 + 4 + 8
    assert vq.nbytes(vq.kvtc(basis=found, window=48).init_state(spec)) == want


def test_every_option_has_an_effect() -> None:
    keys, values = sample(140, 32, decay=0.9), sample(140, 32, seed=1, decay=0.9)

    def read(**options: Any) -> list[np.ndarray]:
        transform = vq.kvtc(**SMALL | options)
        return rows_in_order(transform, feed(transform, keys, values))

    plain = read()
    changes: dict[str, Any] = {
        "bit_budget": 90,
        "bit_choices": (0, 2, 5),
        "beta": 1.5,
        "n_sink": 9,
        "window": 30,
        "chunk": 20,
        "n_fit": 80,
        "rank": 4,
        "shrinkage": 0,
        "ranges": "observed",
        "margin": 0.9,
        "basis": vq.kvtc_calibrate(*(x[0].swapaxes(0, 1) for x in (keys, values)), bit_budget=60),
    }
    for field, value in changes.items():
        assert all(not np.array_equal(a, b) for a, b in zip(read(**{field: value}), plain)), field
    for side in range(2):
        rows = read(**{f"bit_budget_{'kv'[side]}": 30})
        assert np.array_equal(rows[1 - side], plain[1 - side]) and not np.array_equal(rows[side], plain[side])
    same = {"bit_budget_k": 64, "bit_budget_v": 64, "bit_choices": [8, 6, 4, 3, 3, 2, 1, 0], "rank": 32}
    assert all(np.array_equal(a, b) for a, b in zip(read(**same), plain))


BAD: dict[str, list[Any]] = {
    "bit_budget": [-1, 2.0, True, None],
    "bit_choices": [(), (1, 2), (0, 9), (0, -1), (0, 2.0), (0, True), "04", 8, None],
    "beta": [1, 1.0, 0.5, -3, math.nan, "3", True, None],
    "bit_budget_k": [-1, 1.5, False],
    "bit_budget_v": [-1, 1.5, False],
    "n_sink": [-1, 0.5, None, True],
    "window": [-1, 1.0, None, False],
    "chunk": [0, -16, 2.0, None, True],
    "n_fit": [0, 4, 2.5, None, True],
    "rank": [0, -1, 2.0, True],
    "shrinkage": [-0.1, math.nan, math.inf, "0", False],
    "ranges": ["minmax", None, 1],
    "margin": [-0.1, math.nan, math.inf, "0.1", None, True],
    "basis": [np.eye(4), "given", {}],
}


@pytest.mark.parametrize("field, value", [(field, x) for field, values in BAD.items() for x in values])
def test_options_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^kvtc: `{field}` .*; got "):
        vq.kvtc(**{field: value})


def start(dim: int, heads: int = HEADS, **options: Any) -> Any:
    return feed(vq.kvtc(**SMALL | options), mx.zeros((1, heads, 72, dim)))


def basis(bits: int = 30) -> KVTCBasis:
    return vq.kvtc_calibrate(samples(), samples(dim=12), bit_budget=bits)


def changed(**tables_: mx.array) -> KVTCBasis:
    return KVTCBasis.from_arrays(basis().arrays() | tables_)


@pytest.mark.parametrize(
    "field, call",
    [
        ("kvtc: `rank`", lambda: start(16, rank=17)),
        ("kvtc: `basis`", lambda: start(20, basis=basis())),
        ("kvtc: `basis`", lambda: start(16, basis=basis())),
        ("kvtc: `basis`", lambda: vq.kvtc(basis=basis(), bit_budget=20)),
        ("kvtc: `basis`", lambda: vq.kvtc(basis=basis(), bit_budget_v=20)),
        ("kvtc: `key_basis`", lambda: changed(key_basis=mx.ones(basis().key_basis.shape))),
        ("kvtc: `key_basis`", lambda: changed(key_basis=mx.eye(16))),
        ("kvtc: `value_basis`", lambda: changed(value_basis=mx.full(basis().value_basis.shape, math.nan))),
        ("kvtc: `key_mean`", lambda: changed(key_mean=mx.zeros((HEADS, 15)))),
        ("kvtc: `key_scale`", lambda: changed(key_scale=mx.zeros((HEADS, 99)))),
        ("kvtc: `value_shift`", lambda: changed(value_shift=mx.full(basis().value_shift.shape, math.inf))),
        ("kvtc: `key_width`", lambda: changed(key_width=mx.full(basis().key_width.shape, 9))),
        ("kvtc: `value_width`", lambda: changed(value_width=mx.full(basis().value_width.shape, 1.5))),
        ("kvtc_calibrate: `keys`", lambda: vq.kvtc_calibrate(mx.zeros((4, 16)), samples())),
        ("kvtc_calibrate: `keys`", lambda: vq.kvtc_calibrate(mx.zeros((0, 2, 16)), samples())),
        ("kvtc_calibrate: `values`", lambda: vq.kvtc_calibrate(samples(), mx.zeros((4, 2, 0)))),
        ("kvtc_calibrate: `keys`", lambda: vq.kvtc_calibrate(mx.full((4, 2, 16), math.nan), samples())),
        ("kvtc_calibrate: `basis`", lambda: vq.kvtc_calibrate(samples(), samples(), basis=basis())),
        ("kvtc: `rank`", lambda: vq.kvtc_calibrate(samples(), samples(), rank=17)),
        ("kvtc: `value_basis`", lambda: vq.kvtc_calibrate(samples(), samples()[:, :1])),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, call: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{field} .*; got "):
        call()


def test_a_basis_of_other_heads_is_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match=r"^kvtc: `basis` must be of 3 heads; got 2$"):
        feed(vq.kvtc(**SMALL | {"basis": basis()}), mx.zeros((1, 3, 72, 16)), mx.zeros((1, 3, 72, 12)))


def test_no_policy_moves_rows_that_share_axes() -> None:
    with pytest.raises(vq.QuantizerConfigError):
        vq.chain(vq.h2o_policy(), vq.kvtc())
