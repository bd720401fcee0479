"""H2O: accumulated attention mass decides, by keys standing in and by real queries."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
    NEAR_TIE,
    Call,
    H2OHead,
    Stream,
    compare,
    cuts,
    equal,
    expect,
    feed,
    held_positions,
    held_rows,
    left_padded_calls,
    make_stream,
    plain_calls,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, h2o, h2o_policy, rows

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in


@st.composite
def options(draw: st.DrawFn, decays: tuple[float, ...] = (1.0, 0.98, 0.7)) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    grace = draw(st.integers(0, min(6, budget - 1 - n_sink)))
    return {"budget": budget, "n_sink": n_sink, "grace": grace, "decay": draw(st.sampled_from(decays))}


@given(seeds(), options(), cuts(), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_mass(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    calls = plain_calls(pattern, batch)
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(**chosen), told, stream, calls)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    chosen = {"budget": 12, "n_sink": 2, "grace": 3, "decay": 0.98}
    stream = make_stream(0, 60, dim=64, group=group, dtype=dtype)
    calls = plain_calls([20, 1, 1, 9] + [1] * 29, 1)
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(h2o(**chosen), told, stream, calls)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["grace"] - 1
    protect = data.draw(spans(free, first=chosen["n_sink"]))
    stream, calls = make_stream(seed, sum(pattern), group=group), plain_calls(pattern, 1)
    told, margin = expect(lambda: H2OHead(**chosen, protect=protect), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(**chosen, protect=protect), told, stream, calls)
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(head.held) for head in told[-1].values())


def greedy(keys: np.ndarray, queries: np.ndarray | None, budget: int) -> list[int]:
    """Algorithm 1 of the paper for one head: a step adds its attention, then drops the lowest sum.

    `keys` [T, D], `queries` [T, D]; without queries the new key attends to the
    rows before it, and the first one to itself.
    """
    held: list[int] = []
    total: dict[int, float] = {}
    for token in range(len(keys)):
        seen = [*held, token] if queries is not None or token == 0 else list(held)
        query = keys[token] if queries is None else queries[token]
        weights = [math.exp(float(query @ keys[i]) / math.sqrt(len(query))) for i in seen]
        total[token] = 0.0
        for i, weight in zip(seen, weights):
            total[i] += weight / sum(weights)
        held.append(token)
        if len(held) > budget:
            held.remove(min(held, key=lambda i: total[i]))
    return held


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_token_by_token_is_the_papers_greedy_rule(seed: int, budget: int, group: int | None) -> None:
    stream = make_stream(seed, 100, dim=32, group=group)
    transform = h2o(budget=budget, n_sink=0, grace=0, decay=1.0)
    held = held_positions(transform, feed(transform, stream, [1] * 100))
    for head in range(2):
        queries = None if group is None else stream.queries[0, head].astype(np.float64)
        assert held[0][head] == greedy(stream.keys[0, head].astype(np.float64), queries, budget)


def test_without_grace_and_decay_standing_in_keys_never_let_a_new_row_in() -> None:
    transform = h2o(budget=16, n_sink=0, grace=0, decay=1.0)
    state = feed(transform, make_stream(1, 100), [1] * 100)
    assert held_positions(transform, state) == [[list(range(16))] * 2]


@pytest.mark.parametrize("seed", range(4))
def test_grace_and_decay_let_new_rows_in(seed: int) -> None:
    transform = h2o(budget=16, n_sink=4, grace=4, decay=0.98)
    state = feed(transform, make_stream(seed, 100, dim=64), [1] * 100)
    for held in held_positions(transform, state)[0]:
        assert sum(i >= 16 for i in held) >= 4


@pytest.mark.parametrize("decay", [0.98, 0.3])
@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
def test_one_free_place(group: int | None, decay: float) -> None:
    stream, calls = make_stream(3, 80, dim=64, group=group), plain_calls([40] + [1] * 40, 1)
    told, margin = expect(lambda: H2OHead(16, 4, 11, decay), stream, calls)
    assert margin > NEAR_TIE
    for head in range(2):
        tenants = set()
        for want in told[1:]:
            offset, held = want[0, head].offset, want[0, head].held
            safe = {0, 1, 2, 3, *range(offset - 11, offset)}
            assert safe < set(held) and len(held) == 16
            tenants |= set(held) - safe
        assert len(tenants) > 3 or decay == 0.98
    compare(h2o(budget=16, n_sink=4, grace=11, decay=decay), told, stream, calls)


@given(seeds(), options(decays=(1.0,)), cuts(), st.sampled_from([None, 2]))
def test_each_token_gives_mass_one(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform = h2o(**chosen | {"budget": max(chosen["budget"], total)})
    state = feed(transform, make_stream(seed, total, batch=2, group=group), pattern)
    np.testing.assert_allclose(to_numpy(state.memory.sum(axis=-1)), total, rtol=1e-5)


@given(seeds(), options(), cuts(9), GROUPS)
def test_cuts_before_any_eviction_change_nothing(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    transform = h2o(**chosen | {"budget": max(chosen["budget"], total)})
    stream = make_stream(seed, total, group=group)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    held = [held_rows(transform, state) for state in states]
    assert held[0][0].tolist() == [[list(range(total))] * 2]
    assert equal(held[0], held[1]) and equal(held[0], held[2])
    plain = rows()
    assert equal(held[0][1:], plain.read(feed(plain, stream, pattern, capacity=total)))
    mass = [to_numpy(transform.ordered(state).memory) for state in states]
    np.testing.assert_allclose(mass[0], mass[1], atol=1e-5)
    np.testing.assert_allclose(mass[0], mass[2], atol=1e-5)


@given(seeds(), options(), GROUPS)
def test_one_call_past_the_budget_by_one_row_equals_single_tokens(
    seed: int, chosen: dict[str, Any], group: int | None
) -> None:
    total = chosen["budget"] + 1
    stream, transform = make_stream(seed, total, group=group), h2o(**chosen)
    _, margin = expect(lambda: H2OHead(**chosen), stream, plain_calls([total], 1))
    assume(margin > NEAR_TIE)
    states = [feed(transform, stream, how) for how in ([total], [1] * total)]
    assert equal(*(held_rows(transform, state) for state in states))
    np.testing.assert_allclose(*(to_numpy(transform.ordered(state).memory) for state in states), atol=1e-5)


@given(options(), cuts(20), GROUPS)
def test_sinks_grace_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = h2o(**chosen), sum(pattern)
    state = feed(transform, make_stream(4, total, batch=2, group=group), pattern)
    safe = {*range(min(chosen["n_sink"], total)), *range(max(total - chosen["grace"], 0), total)}
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"])
        assert safe <= set(held)


@pytest.mark.parametrize("pattern", [[128], [1] * 128, [50, 1, 77]], ids=["once", "decode", "chunks"])
@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
def test_defaults_hold_sinks_and_the_newest_rows(pattern: list[int], group: int | None) -> None:
    transform = h2o(budget=32)
    state = feed(transform, make_stream(5, 128, group=group), pattern)
    for held in held_positions(transform, state)[0]:
        assert held[:4] == [0, 1, 2, 3] and held[-16:] == list(range(112, 128)) and len(held) == 32


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_gives_no_mass(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    stream = make_stream(seed, 60, batch=2, group=group)
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(**chosen), told, stream, calls)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_gives_no_mass(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(**chosen), told, stream, calls)


def test_padding_takes_no_sink_and_no_budget() -> None:
    stream = make_stream(6, 25, batch=2)
    calls = left_padded_calls([13] + [1] * 12, (0, 5))
    told, margin = expect(lambda: H2OHead(8, 2, 3, 0.98), stream, calls)
    assert margin > NEAR_TIE
    compare(h2o(budget=8, n_sink=2, grace=3), told, stream, calls)


@pytest.mark.parametrize("pattern", [[30], [1] * 30, [13, 1, 16]], ids=["once", "decode", "chunks"])
def test_equal_keys(pattern: list[int]) -> None:
    chosen = {"budget": 7, "n_sink": 0, "grace": 2, "decay": 0.9}
    stream = make_stream(7, 30)
    stream = Stream(np.ones_like(stream.keys), stream.values, None, mx.float32)
    calls = plain_calls(pattern, 1)
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(h2o(**chosen), told, stream, calls)


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@pytest.mark.parametrize(
    "pattern",
    [[12], [1] * 12, [5, 7], [8, 1, 1, 2], [1] * 8 + [2], [1] * 9 + [3]],
    ids=str,
)
def test_of_equal_masses_the_later_rows_stay(pattern: list[int], group: int | None) -> None:
    """Every query gives all its mass to row 0, so that all others have exactly none."""
    total = sum(pattern)
    keys = np.zeros((1, 1, total, 64), np.float32)
    keys[..., 0] = 10.0
    keys[:, :, 0, 0] = 1000.0
    stream = Stream(keys, make_stream(8, total, heads=1, dim=64).values, keys if group else None, mx.float32)
    calls = plain_calls(pattern, 1)
    told, _ = expect(lambda: H2OHead(4, 0, 0, 1.0), stream, calls)
    assert told[-1][0, 0].held == [0, total - 3, total - 2, total - 1]
    compare(h2o(budget=4, n_sink=0, grace=0, decay=1.0), told, stream, calls)


def test_kept_keys_are_never_rotated_again() -> None:
    raw = mx.eye(64)[mx.arange(40) % 64][None, None]
    keys = mx.fast.rope(raw, 64, traditional=False, base=500000.0, scale=1.0, offset=0).astype(mx.float16)
    transform = h2o(budget=24, grace=4)
    stream = Stream(to_numpy(keys), to_numpy(raw), None, mx.float16)
    state = feed(transform, stream, [1] * 40)
    position, held, _ = held_rows(transform, state)
    assert state.offset.tolist() == [40] and position.shape[2] == 24
    assert mx.array_equal(held[0, 0], keys[0, 0][position[0, 0]])


def test_rope_base_has_no_effect() -> None:
    stream, pattern = make_stream(9, 40), [20, 1, 19]
    one, other = h2o(budget=9, n_sink=1, grace=2), h2o(budget=9, n_sink=1, grace=2, rope_base=1.0)
    assert same(feed(one, stream, pattern), feed(other, stream, pattern))


def test_query_heads_of_a_group_are_averaged() -> None:
    """A group of equal query heads is as one of them."""
    one = make_stream(10, 40, group=1)
    three = Stream(one.keys, one.values, np.repeat(one.queries, 3, axis=1), mx.float32)
    calls = plain_calls([15, 1, 1, 23], 1)
    told, margin = expect(lambda: H2OHead(9, 1, 2, 0.98), one, calls)
    assert margin > NEAR_TIE
    transform = h2o(budget=9, n_sink=1, grace=2)
    compare(transform, told, three, calls)
    assert feed(transform, three, [40]).rows.keys[0].shape[1] == 2


@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
def test_prompt_longer_than_a_block_of_queries(group: int | None) -> None:
    chosen = {"budget": 20, "n_sink": 2, "grace": 4, "decay": 0.98}
    stream = make_stream(11, 270, heads=1, dim=8, group=group)
    calls = [Call(270, (270,))]
    told, margin = expect(lambda: H2OHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(h2o(**chosen), told, stream, calls)


@pytest.mark.parametrize("build", [h2o, h2o_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": True, "n_sink": 0, "grace": 0}, "budget"),
        ({"budget": 20}, "budget"),
        ({"budget": 20, "grace": 20}, "budget"),
        ({"budget": 21, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"grace": -1}, "grace"),
        ({"grace": None}, "grace"),
        ({"decay": 0.0}, "decay"),
        ({"decay": -0.5}, "decay"),
        ({"decay": 1.01}, "decay"),
        ({"decay": math.nan}, "decay"),
        ({"decay": "fast"}, "decay"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": -1.0}, "rope_base"),
        ({"rope_base": math.nan}, "rope_base"),
        ({"rope_base": None}, "rope_base"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": [(1, 2, 3)]}, "protect"),
        ({"protect": [("a", "b")]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^h2o: .*`{field}`.*; got "):
        build(**chosen)


def test_smallest_budget_that_leaves_a_row_free() -> None:
    transform = h2o(budget=21)
    state = feed(transform, make_stream(12, 60), [40] + [1] * 20)
    assert held_positions(transform, state)[0][0][:4] == [0, 1, 2, 3]
    assert held_positions(transform, state)[0][0][-16:] == list(range(44, 60))
