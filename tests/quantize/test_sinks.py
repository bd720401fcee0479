"""Sinks against a loop over blocks in numpy: who is chosen, whose range counts, what is read instead of codes."""

import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.quantize.sinks import SIGNALS, Patched, SinkRule, Sinks, without_sinks

HEADS, DIM, BLOCK = 2, 8, 8
signals = pytest.mark.parametrize("signal", SIGNALS)
counts = pytest.mark.parametrize("count", [1, 3, 10])


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def empty(rule: SinkRule, batch: int = 1, dtype: mx.Dtype = mx.float16) -> Sinks:
    return rule.empty(vq.KVSpec(batch=batch, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype=dtype))


def rows_of(n: int, batch: int = 1, seed: int = 0, levels: int | None = None) -> tuple[mx.array, mx.array]:
    """Keys, of few different sizes where `levels` says how many, and values."""
    keys = draw(batch, HEADS, n, DIM, seed=2 * seed)
    if levels is not None:
        sizes = mx.random.randint(1, levels + 1, (batch, 1, n, 1), key=mx.random.key(seed))
        keys = mx.broadcast_to(sizes.astype(mx.float16), keys.shape)
    return keys, draw(batch, HEADS, n, DIM, seed=2 * seed + 1)


# The oracle


def signals_of(keys: np.ndarray, signal: str) -> np.ndarray:
    """Signals [n] of the keys [H, n, D] of one sequence; -inf where they are not finite."""
    size = np.linalg.norm(keys, axis=-1).mean(axis=0)
    typical = np.sort(size[:BLOCK])[BLOCK // 2]
    by_name = {
        "first": -np.arange(keys.shape[1], dtype=float),
        "large_keys": size,
        "small_keys": -size,
        "unusual_keys": np.abs(np.log(np.maximum(size, 1e-30) / max(typical, 1e-30))),
    }[signal]
    return np.where(np.isfinite(by_name), by_name, -np.inf)


def chosen_by_hand(signal: np.ndarray, n: int, count: int) -> tuple[list[int], list[bool]]:
    """The sinks of `n` rows, the highest signal first, and which rows were sinks when their block was packed."""
    sinks: list[int] = []
    was_sink = [False] * n
    for start in range(0, n, BLOCK):
        rows = range(start, min(start + BLOCK, n))
        candidates = [i for i in (*sinks, *rows) if signal[i] > -np.inf]
        sinks = sorted(candidates, key=lambda i: (-signal[i], i))[:count]
        for i in rows:
            was_sink[i] = i in sinks
    return sinks, was_sink


def assert_chosen(
    sinks: Sinks, row: int, keys: mx.array, values: mx.array, want: list[int], signal: np.ndarray
) -> None:
    position = sinks.position[row].tolist()
    assert position == want + [-1] * (len(position) - len(want))
    assert position[: len(want)] == want and len(set(want)) == len(want)
    np.testing.assert_allclose(np.array(sinks.signal[row])[: len(want)], signal[want], rtol=1e-5, atol=1e-6)
    assert (np.array(sinks.signal[row])[len(want) :] == -np.inf).all()
    for held, x in ((sinks.keys, keys), (sinks.values, values)):
        assert mx.array_equal(held[row, :, : len(want)], x[row][:, mx.array(want, mx.int32)])


# Who is chosen


@signals
@counts
@pytest.mark.parametrize("levels", [None, 4])
def test_the_highest_signals_of_all_rows_the_earlier_of_equal_ones(count: int, signal: str, levels: int | None) -> None:
    rule, (keys, values) = SinkRule(count, signal), rows_of(40, seed=3, levels=levels)
    sinks, was_sink = rule.choose(empty(rule), keys, values, mx.array([0]), mx.array([40]), BLOCK)
    ranks = signals_of(numbers(keys)[0], signal)
    want, was = chosen_by_hand(ranks, 40, count)
    assert_chosen(sinks, 0, keys, values, want, ranks)
    assert was_sink.tolist() == [was]
    assert set(want) == set(np.lexsort((np.arange(40), -ranks))[:count].tolist())


@signals
@given(
    pieces=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    count=st.integers(1, 6),
    seed=st.integers(0, 50),
    levels=st.sampled_from([None, 1, 3]),
)
def test_any_cut_into_blocks_chooses_the_same(
    signal: str, pieces: list[int], count: int, seed: int, levels: int | None
) -> None:
    """`choose` sees rows past `end` as well; these are no candidates yet."""
    rule, n = SinkRule(count, signal), BLOCK * sum(pieces)
    keys, values = rows_of(n + BLOCK, seed=seed, levels=levels)
    sinks, start, was_sink = empty(rule), 0, []
    for piece in pieces:
        end = start + piece * BLOCK
        came = slice(start, end + BLOCK)
        sinks, was = rule.choose(sinks, keys[:, :, came], values[:, :, came], mx.array([start]), mx.array([end]), BLOCK)
        assert not was[:, end - start :].any()
        was_sink += was[0, : end - start].tolist()
        start = end
    if n:
        ranks = signals_of(numbers(keys)[0], signal)
        want, was = chosen_by_hand(ranks, n, count)
        assert_chosen(sinks, 0, keys, values, want, ranks)
        assert was_sink == was
    else:
        assert (sinks.position == -1).all()


@signals
def test_a_long_prompt_chooses_as_its_blocks_do(signal: str) -> None:
    rule, n = SinkRule(5, signal), 2200
    keys, values = rows_of(n, seed=1, levels=50)
    sinks, was_sink = rule.choose(empty(rule), keys, values, mx.array([0]), mx.array([n]), BLOCK)
    ranks = signals_of(numbers(keys)[0], signal)
    want, was = chosen_by_hand(ranks, n, 5)
    assert_chosen(sinks, 0, keys, values, want, ranks)
    assert was_sink.tolist() == [was]


@signals
def test_each_sequence_chooses_its_own_at_its_own_place(signal: str) -> None:
    rule, (keys, values) = SinkRule(3, signal), rows_of(48, batch=3, seed=5)
    starts, ends = [0, 16, 24], [16, 24, 24]
    held = empty(rule, batch=3)
    before = [rule.choose(empty(rule), *(x[i : i + 1] for x in (keys, values)), *place(0, starts[i])) for i in range(3)]
    held = Sinks(*(mx.concatenate([getattr(b[0], f) for b in before]) for f in FIELDS))
    came = [mx.concatenate([x[i : i + 1, :, s : s + 24] for i, s in enumerate(starts)]) for x in (keys, values)]
    sinks, was_sink = rule.choose(held, *came, mx.array(starts), mx.array(ends), BLOCK)
    for i, (start, end) in enumerate(zip(starts, ends)):
        ranks = signals_of(numbers(keys)[i], signal)
        want, was = chosen_by_hand(ranks, end, 3)
        assert_chosen(sinks, i, keys, values, want, ranks)
        assert was_sink[i].tolist() == was[start:] + [False] * (24 - (end - start))


FIELDS = ("keys", "values", "position", "signal", "typical")


def place(start: int, end: int) -> tuple[mx.array, mx.array, int]:
    return mx.array([start]), mx.array([end]), BLOCK


@pytest.mark.parametrize("row", [2, 13])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("signal", [signal for signal in SIGNALS if signal != "first"])
def test_a_row_that_is_not_finite_is_no_sink(signal: str, bad: float, row: int) -> None:
    rule, (keys, values) = SinkRule(2, signal), rows_of(24)
    keys = mx.where((mx.arange(24) == row)[:, None], bad, keys).astype(mx.float16)
    sinks, was_sink = rule.choose(empty(rule), keys, values, *place(0, 24))
    assert row not in sinks.position[0].tolist() and not was_sink[0, row].item()
    assert (sinks.position >= 0).all() and mx.isfinite(sinks.signal).all()


@pytest.mark.parametrize("size, found", [(1e-3, True), (1e3, True), (1.0, False)])
def test_unusual_means_large_or_small_beside_the_first_block(size: float, found: bool) -> None:
    rule, (keys, values) = SinkRule(1, "unusual_keys"), rows_of(64)
    sinks, _ = rule.choose(empty(rule), keys, values, *place(0, 32))
    late = mx.where((mx.arange(32) == 20)[:, None], keys[:, :, 32:] * size, keys[:, :, 32:]).astype(mx.float16)
    for factor in (1.0, 0.5):  # the typical size stays that of the first block
        sinks, _ = rule.choose(sinks, late * factor, values[:, :, 32:], *place(32, 64))
        assert (sinks.position.item() == 52) == found


def test_zero_keys_are_unusual_and_finite() -> None:
    rule, (keys, values) = SinkRule(2, "unusual_keys"), rows_of(16)
    keys[:, :, 11] = 0
    sinks, _ = rule.choose(empty(rule), keys, values, *place(0, 16))
    assert sinks.position[0, 0].item() == 11 and mx.isfinite(sinks.signal).all()
    all_zero, _ = rule.choose(empty(rule), mx.zeros_like(keys), values, *place(0, 16))
    assert all_zero.position.tolist() == [[0, 1]]


@counts
def test_no_sinks_before_the_first_block(count: int) -> None:
    held = empty(SinkRule(count))
    assert held.position.tolist() == [[-1] * count] and (held.signal == -mx.inf).all()
    assert held.keys.shape == (1, HEADS, count, DIM) and held.keys.dtype == mx.float16


def test_sinks_that_a_trim_took_back_are_sinks_no_more() -> None:
    rule, (keys, values) = SinkRule(4, "large_keys"), rows_of(32, seed=2)
    sinks, _ = rule.choose(empty(rule), keys, values, *place(0, 32))
    positions = sorted(sinks.position[0].tolist())
    cut = positions[2]  # the third sink goes, and what comes after it
    left = rule.valid(sinks, mx.array([cut]))
    assert sorted(left.position[0].tolist()) == [-1, -1, *positions[:2]]
    assert (mx.isfinite(left.signal) == (left.position >= 0)).all()
    again, _ = rule.choose(left, keys[:, :, 24:], values[:, :, 24:], mx.array([24]), mx.array([32]), BLOCK)
    want = [*positions[:2], *(p for p in positions[2:] if p >= 24)]
    assert set(want) <= set(again.position[0].tolist())


# Whose range counts


@attrs.frozen
class Sharing(Codec):
    """Neighbours that share numbers."""

    shared: int
    mixes: bool = False


def test_where_rows_are_mixed_another_row_stands_in_for_a_sink() -> None:
    """The first one of the group that is no sink, whole; a group of sinks alone stays."""
    x = draw(2, HEADS, 16, DIM, seed=4)
    sink = np.zeros((2, 16), bool)
    sink[0, [0, 1, 5]] = sink[1, 8:16] = True
    want = numbers(x).copy()
    want[0][:, [0, 1, 5]] = numbers(x)[0][:, 2:3]
    got = without_sinks(x, mx.array(sink), Sharing(8, mixes=True))
    assert np.array_equal(numbers(got), want)


@pytest.mark.parametrize("shared", [1, 4, 8])
def test_sinks_are_drawn_into_the_range_of_the_others(shared: int) -> None:
    x = draw(2, HEADS, 16, DIM, seed=4)
    x[:, :, 3] *= 100
    x[0, :, 8:16] *= 50
    sink = np.zeros((2, 16), bool)
    sink[:, 3] = sink[0, 8:16] = sink[1, 9:11] = True
    got, want = numbers(without_sinks(x, mx.array(sink), Sharing(shared))), numbers(x)
    for b, first in ((b, first) for b in range(2) for first in range(0, 16, shared)):
        group = slice(first, first + shared)
        others = want[b, :, group][:, ~sink[b, group]]
        if others.shape[1]:
            low, high = others.min(axis=1, keepdims=True), others.max(axis=1, keepdims=True)
            drawn = np.clip(want[b, :, group], low, high)
            want[b, :, group] = np.where(sink[b, group, None], drawn, want[b, :, group])
    assert np.array_equal(got, want)
    assert (got != numbers(x)).any() == (shared > 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_draw_no_sink(bad: float) -> None:
    x = draw(1, HEADS, 8, DIM)
    x[:, :, 2], x[:, :, 5] = x[:, :, 2] * 100, bad
    sink = mx.arange(8)[None] == 2
    got = numbers(without_sinks(x, sink, Sharing(8)))
    others = numbers(x)[:, :, [0, 1, 3, 4, 6, 7]]
    assert (got[:, :, 2] >= others.min(axis=2)).all() and (got[:, :, 2] <= others.max(axis=2)).all()
    np.testing.assert_array_equal(np.delete(got, 2, axis=2), np.delete(numbers(x), 2, axis=2))


# What is read


def patched(column: list[list[int]]) -> tuple[Coder, Rows, np.ndarray]:
    """A patched coder, its rows, and the vectors that these should be."""
    coder = bind(vq.int8_codec(), DIM, mx.float32)
    rows, exact = coder.encode(draw(2, HEADS, 12, DIM)), draw(2, HEADS, len(column[0]), DIM, seed=1) * 10
    want = numbers(coder.decode(rows)).copy()
    for b, i in ((b, i) for b in range(2) for i in range(len(column[0]))):
        if 0 <= column[b][i] < 12:
            want[b, :, column[b][i]] = numbers(exact)[b, :, i]
    return Patched(coder), (*rows, exact.astype(mx.float16), mx.array(column)), want


@pytest.mark.parametrize(
    "column", [[[3, 0], [11, 5]], [[-1, 4], [-1, -1]], [[12, 2], [30, -7]], [[-1, -1], [-1, -1]]], ids=str
)
def test_sinks_are_read_in_place_of_their_codes(column: list[list[int]]) -> None:
    """A column below zero or past the last one stands for nothing."""
    coder, rows, want = patched(column)
    np.testing.assert_array_equal(numbers(coder.decode(rows)), want)
    queries, weights = draw(2, HEADS, 3, DIM, seed=2), draw(2, HEADS, 3, 12, seed=3)
    scores, sums = coder.dot(queries.astype(mx.float32), rows), coder.mix(weights.astype(mx.float32), rows)
    assert scores.dtype == sums.dtype == mx.float32
    np.testing.assert_allclose(numbers(scores), numbers(queries) @ want.swapaxes(-1, -2), atol=1e-4)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ want, atol=1e-4)


def test_a_code_that_is_not_read_does_not_matter() -> None:
    """Not even where it is no number."""
    coder = bind(vq.PlainCodec(), DIM, mx.float32)
    held = mx.where((mx.arange(12) == 4)[:, None], mx.nan, draw(1, HEADS, 12, DIM).astype(mx.float32))
    rows = (held, draw(1, HEADS, 1, DIM, seed=1), mx.array([[4]]))
    assert mx.isfinite(Patched(coder).decode(rows)).all()
    assert mx.isfinite(Patched(coder).dot(draw(1, HEADS, 2, DIM, seed=2).astype(mx.float32), rows)).all()


@pytest.mark.parametrize(
    "options, field",
    [
        *(((0,), "count"), ((-1,), "count"), ((True,), "count"), ((2.0,), "count")),
        *(((2, "largest"), "signal"), ((2, 1), "signal")),
    ],
    ids=str,
)
def test_rules_out_of_range_are_refused_by_name(options: tuple[Any, ...], field: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"sinks: `{field}` must be"):
        SinkRule(*options)
