"""MorphKV: old rows stay by the attention of the newest tokens, which stay themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
    NEAR_TIE,
    Call,
    Head,
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
    resume,
    right_padded,
    seeds,
    spans,
)

from vq_functional import QuantizerConfigError, int8_codec, rows
from vq_functional.evict.chain import chain
from vq_functional.evict.morphkv import morphkv, morphkv_policy
from vq_functional.evict.tova import tova, tova_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
FUSES = pytest.mark.parametrize("fuse", ["max", "sum"])
CUTS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [30, 1, 1, 28]], ids=["once", "decode", "chunks"])


class MorphKVHead(Head):
    """Votes of the last `window` queries for the rows before them, or of the last keys for all rows."""

    def __init__(
        self,
        budget: int,
        window: int,
        n_sink: int = 0,
        fuse: str = "max",
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, window, protect)
        self.window, self.fuse = window, {"max": max, "sum": sum}[fuse]
        self.asked: list[np.ndarray] = []  # by token: the sum over the group

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        priority = dict.fromkeys(shown, 0.0)
        if queries is None:
            voters, fuse = [self.keys[i] for i in shown if i >= self.offset - self.window], sum
            seen = shown
        else:
            self.asked += list(queries.astype(np.float64).sum(axis=0))
            voters, fuse = self.asked[-self.window :], self.fuse
            seen = [i for i in shown if i < self.offset - self.window]
        votes = [self.attention(voter, seen) for voter in voters] if seen else []
        for i in seen:
            priority[i] = fuse(vote[i] for vote in votes)
        self.keep(shown, priority)


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(lambda: MorphKVHead(**chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(morphkv(**chosen), told, stream, calls)
    return margin > NEAR_TIE


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    window, n_sink = draw(st.integers(1, 7)), draw(st.integers(0, 3))
    budget = window + n_sink + draw(st.integers(1, 10))
    return {"budget": budget, "window": window, "n_sink": n_sink, "fuse": draw(st.sampled_from(["max", "sum"]))}


@given(seeds(), options(), cuts(), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
@FUSES
def test_votes_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None, fuse: str) -> None:
    stream, chosen = make_stream(0, 60, dim=64, group=group, dtype=dtype), {"budget": 12, "window": 5, "n_sink": 2}
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), **chosen, fuse=fuse)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["window"] - 1
    protect = data.draw(spans(free, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern), group=group), morphkv(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


# The rule


def one_shot(keys: np.ndarray, queries: np.ndarray, budget: int, window: int, fuse: str) -> list[int]:
    """The paper's rule for one head and a whole prompt: `keys` [T, D], `queries` [G, T, D]."""
    before = len(keys) - window
    logits = sum(group[before:] @ keys[:before].T for group in queries) / np.sqrt(keys.shape[1])
    weights = np.exp(logits)
    weights /= weights.sum(axis=1, keepdims=True)
    fused = weights.max(axis=0) if fuse == "max" else weights.sum(axis=0)
    return sorted([*np.argsort(-fused)[: budget - window].tolist(), *range(before, len(keys))])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("budget", "window"), [(24, 8), (40, 32), (9, 1)])
@FUSES
def test_one_call_is_the_papers_rule(group: int, budget: int, window: int, fuse: str) -> None:
    stream = make_stream(1, 90, dim=32, group=group)
    transform = morphkv(budget=budget, window=window, n_sink=0, fuse=fuse)
    held = held_positions(transform, feed(transform, stream, [90]))
    for head in range(2):
        queries = stream.queries_of(0, head).astype(np.float64)
        assert held[0][head] == one_shot(stream.keys[0, head].astype(np.float64), queries, budget, window, fuse)


def wishes(tokens: int, of: dict[int, dict[int, float]]) -> Stream:
    """Row i alone has channel i, and the query of token t the logits `of[t]` for rows, 0 for the others."""
    keys = np.eye(tokens, dtype=np.float32)[None, None]
    queries = np.zeros_like(keys)
    for token, logits in of.items():
        for row, logit in logits.items():
            queries[..., token, row] = logit * np.sqrt(tokens)
    return Stream(keys, keys, queries, mx.float32)


@pytest.mark.parametrize(("fuse", "kept"), [("max", [2, 6]), ("sum", [4, 6])])
@pytest.mark.parametrize("pattern", [[16], [6, 10]], ids=str)
def test_fuse(fuse: str, kept: list[int], pattern: list[int]) -> None:
    """One query of the window wants row 2 alone, the three others rows 4 and 6 alike; of these the later one wins."""
    stream = wishes(16, {12: {2: 50.0}} | {token: {4: 50.0, 6: 50.0} for token in (13, 14, 15)})
    transform = morphkv(budget=6, window=4, n_sink=0, fuse=fuse)
    assert held_positions(transform, feed(transform, stream, pattern)) == [[[*kept, 12, 13, 14, 15]]]


@FUSES
@pytest.mark.parametrize("pattern", [[16], [6, 10]], ids=str)
def test_window_rows_take_no_share(fuse: str, pattern: list[int]) -> None:
    """Queries that want rows of the window above all, and then row 3."""
    stream = wishes(16, {token: {13: 500.0, token: 500.0, 3: 1.0} for token in (12, 13, 14, 15)})
    transform = morphkv(budget=5, window=4, n_sink=0, fuse=fuse)
    assert held_positions(transform, feed(transform, stream, pattern)) == [[[3, 12, 13, 14, 15]]]


@FUSES
def test_rows_without_a_logit_go_before_rows_with_one(fuse: str) -> None:
    wanted = [1, 4, 5, 9, 11]
    stream = wishes(24, {token: dict.fromkeys(wanted, 0.5) for token in range(20, 24)})
    transform = morphkv(budget=9, window=4, n_sink=0, fuse=fuse)
    assert held_positions(transform, feed(transform, stream, [24])) == [[[*wanted, 20, 21, 22, 23]]]


@FUSES
def test_logits_of_a_group_are_summed(fuse: str) -> None:
    """Two equal query heads are as one of twice the length; two opposite ones want nothing."""
    one = make_stream(2, 50, group=1, exact=True)
    double = Stream(one.keys, one.values, 2 * one.queries, mx.float32)
    both = Stream(one.keys, one.values, np.repeat(one.queries, 2, axis=1), mx.float32)
    calls, chosen = plain_calls([30] + [1] * 20, 1), {"budget": 12, "window": 3, "n_sink": 1, "fuse": fuse}
    told, margin = expect(lambda: MorphKVHead(**chosen), double, calls)
    assert margin > NEAR_TIE
    compare(morphkv(**chosen), told, both, calls)
    both.queries[:, 1::2] *= -1
    held = held_positions(morphkv(**chosen), feed(morphkv(**chosen), both, [50]))
    assert held == [[[0, *range(39, 50)]] * 2]


@FUSES
def test_only_the_window_votes(fuse: str) -> None:
    stream, transform = make_stream(3, 60, group=2), morphkv(budget=14, window=4, n_sink=2, fuse=fuse)
    other = Stream(stream.keys, stream.values, stream.queries.copy(), mx.float32)
    other.queries[:, :, :56] = 0
    assert equal(*(held_rows(transform, feed(transform, x, [60])) for x in (stream, other)))


@FUSES
@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_windows_queries_does_not_matter(fuse: str, seed: int) -> None:
    stream, chosen = make_stream(seed, 60, group=2), {"budget": 14, "window": 6, "n_sink": 2, "fuse": fuse}
    assert expect(lambda: MorphKVHead(**chosen), stream, plain_calls([60], 1))[1] > NEAR_TIE
    other = Stream(stream.keys, stream.values, stream.queries.copy(), mx.float32)
    other.queries[:, :, 54:] = stream.queries[:, :, 54 + np.random.default_rng(seed).permutation(6)]
    transform = morphkv(**chosen)
    assert equal(*(held_rows(transform, feed(transform, x, [60])) for x in (stream, other)))


@given(seeds(), options(), cuts())
def test_fuse_is_for_queries_alone(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    """Keys that stand in are always averaged."""
    stream = make_stream(seed, sum(pattern))
    held = []
    for fuse in ("max", "sum"):
        transform = morphkv(**chosen | {"fuse": fuse})
        held.append(held_rows(transform, feed(transform, stream, pattern)))
    assert equal(*held)


@pytest.mark.parametrize("group", [None, 1, 2])
@pytest.mark.parametrize("pattern", [[40], [39, 1], [1] * 40], ids=["once", "last", "decode"])
def test_weights_below_the_range_of_float32_still_rank(group: int | None, pattern: list[int]) -> None:
    """Logits that spread over hundreds, in no order."""
    stream, chosen = make_stream(4, 40, dim=16, group=group), {"budget": 20, "window": 1, "n_sink": 1}
    stream.keys[..., 0] = np.random.default_rng(6).permutation(np.linspace(-30, 30, 40))
    if stream.queries is not None:
        stream.queries[..., 0] = 25.0 / group
    calls = plain_calls(pattern, 1)
    compare(morphkv(**chosen), expect(lambda: MorphKVHead(**chosen), stream, calls)[0], stream, calls)


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@CUTS
@FUSES
def test_of_equal_votes_the_later_rows_stay(group: int | None, pattern: list[int], fuse: str) -> None:
    stream = make_stream(5, 60, group=group, exact=True)
    stream = Stream(np.ones_like(stream.keys), stream.values, stream.queries, mx.float32)
    transform = morphkv(budget=9, window=3, n_sink=2, fuse=fuse)
    assert held_positions(transform, feed(transform, stream, pattern)) == [[[0, 1, *range(53, 60)]] * 2]


# A window of one


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@CUTS
@FUSES
@pytest.mark.parametrize("seed", range(2))
def test_window_of_one_is_tova_with_the_newest_row_protected(
    group: int | None, pattern: list[int], fuse: str, seed: int
) -> None:
    stream, common = make_stream(seed, 60, batch=2, group=group), {"budget": 12, "n_sink": 2}
    told = expect(lambda: MorphKVHead(**common, window=1), stream, plain_calls(pattern, 2))
    assert told[1] > NEAR_TIE
    policy = attrs.evolve(tova_policy(**common, share_heads=False), recent=1)
    pair = (morphkv(**common, window=1, fuse=fuse), chain(policy, rows()))
    assert equal(*(held_rows(x, feed(x, stream, pattern)) for x in pair))


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@CUTS
def test_window_of_one_is_tova_where_the_newest_row_wins_anyway(group: int | None, pattern: list[int]) -> None:
    """Each token matches itself best."""
    stream, common = make_stream(6, 60, dim=64), {"budget": 12, "n_sink": 2}
    stream = Stream(stream.keys, stream.values, stream.keys if group else None, mx.float32)
    pair = (morphkv(**common, window=1), tova(**common, share_heads=False))
    held = [held_rows(x, feed(x, stream, pattern)) for x in pair]
    assert (held[0][0][..., -1] == 59).all().item() and equal(*held)


# Cuts and memory


@given(seeds(), options(), st.integers(0, 20), st.integers(1, 30), GROUPS)
def test_only_the_window_matters_until_something_is_evicted(
    seed: int, chosen: dict[str, Any], first: int, second: int, group: int | None
) -> None:
    """The window's queries may have come in an earlier call."""
    first = min(first, chosen["budget"])
    transform, stream = morphkv(**chosen), make_stream(seed, first + second, group=group)
    assume(expect(lambda: MorphKVHead(**chosen), stream, plain_calls([first + second], 1))[1] > NEAR_TIE)
    held = [held_rows(transform, feed(transform, stream, how)) for how in ([first, second], [first + second])]
    assert equal(*held)


@given(seeds(), options(), GROUPS)
def test_one_call_past_the_budget_by_one_row_equals_single_tokens(
    seed: int, chosen: dict[str, Any], group: int | None
) -> None:
    total = chosen["budget"] + 1
    transform, stream = morphkv(**chosen), make_stream(seed, total, group=group)
    assume(expect(lambda: MorphKVHead(**chosen), stream, plain_calls([total], 1))[1] > NEAR_TIE)
    assert equal(*(held_rows(transform, feed(transform, stream, how)) for how in ([total], [1] * total)))


@given(seeds(), options(), cuts(9), GROUPS)
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform, plain = morphkv(**chosen | {"budget": chosen["budget"] + total}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@FUSES
def test_nothing_is_remembered_of_rows_that_went(group: int | None, fuse: str) -> None:
    """Two pasts that leave the same rows and the same window: the future is the same."""
    transform = morphkv(budget=14, window=3, n_sink=2, fuse=fuse)
    one = make_stream(7, 60, heads=1, dim=64, group=group)
    state = feed(transform, one, [30])
    lost = sorted({*range(30)} - set(held_positions(transform, state)[0][0]))
    voters = one.keys if group is None else one.queries
    other = Stream(one.keys.copy(), one.values.copy(), None if group is None else one.queries.copy(), mx.float32)
    other.keys[0, 0, lost], other.values[0, 0, lost] = -3 * voters[0, 0, 27:30].sum(axis=0), 7.0
    if group is not None:
        other.queries[:, :, :27] = 0
    twin = feed(transform, other, [30])
    assert equal(held_rows(transform, state), held_rows(transform, twin))
    futures = [resume(transform, x, one, [1, 1, 9, *[1] * 19], 30) for x in (state, twin)]
    assert equal(*(held_rows(transform, x) for x in futures))


@given(options(), cuts(20), GROUPS)
def test_sinks_window_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = morphkv(**chosen), sum(pattern)
    state = feed(transform, make_stream(8, total, batch=2, group=group), pattern)
    safe = {*range(min(chosen["n_sink"], total)), *range(max(total - chosen["window"], 0), total)}
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"]) and safe <= set(held)


@KINDS
def test_budget_as_a_share_of_the_prompt(group: int | None) -> None:
    stream, pattern = make_stream(9, 80, group=group), [60, *[1] * 20]
    held = [held_rows(x, feed(x, stream, pattern)) for x in (morphkv(budget=0.25), morphkv(budget=15))]
    assert equal(*held)


# Padding


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_does_not_vote(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    assume(agrees(make_stream(seed, 60, batch=2, group=group), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_does_not_vote(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2, group=group), calls, **chosen))


@KINDS
@FUSES
def test_padding_takes_no_sink_no_budget_and_no_place_in_the_window(group: int | None, fuse: str) -> None:
    """Among the calls one shorter than the window, and one that a row sits out."""
    stream, chosen = make_stream(10, 65, batch=2, group=group), {"budget": 11, "window": 5, "n_sink": 2, "fuse": fuse}
    right = [Call(40, (40, 31)), Call(9, (0, 9)), Call(3, (3, 1)), Call(1, (1, 1)), Call(2, (0, 2))]
    for calls in (left_padded_calls([53] + [1] * 12, (0, 5)), left_padded_calls([1] * 6 + [50], (0, 5)), right):
        assert agrees(stream, calls, **chosen)


# Numbers that are none


@KINDS
@FUSES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_key_that_is_no_number_goes_first(group: int | None, fuse: str, bad: float) -> None:
    """As a key that no voter wants, and the other rows as if it were one."""
    stream = make_stream(11, 50, dim=64, group=group)
    voters = stream.keys if group is None else stream.queries.reshape(1, 2, 2, 50, 64).sum(axis=2)
    clean, broken = stream.keys.copy(), stream.keys.copy()
    clean[:, :, 20] = -20 * voters[:, :, 37:40].sum(axis=2)
    broken[:, :, 20, 5] = bad
    transform = morphkv(budget=12, window=3, n_sink=2, fuse=fuse)
    held = []
    for keys in (clean, broken):
        other = Stream(keys, stream.values, stream.queries, mx.float32)
        held.append(held_rows(transform, feed(transform, other, [40, *[1] * 10])))
    assert not (held[0][0] == 20).any().item() and equal(*held)


@FUSES
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("pattern", [[40], [12, 28]], ids=str)
def test_query_that_is_no_number_has_no_vote(fuse: str, group: int, pattern: list[int]) -> None:
    """The other three of the window decide, over the rows before all four."""
    stream = make_stream(12, 40, group=group)
    votes = np.zeros((3, 2, 36))
    for head in range(2):
        queries = stream.queries_of(0, head)[:, 37:].astype(np.float64).sum(axis=0)
        weights = np.exp(queries @ stream.keys[0, head, :36].T / 4)
        votes[:, head] = weights / weights.sum(axis=1, keepdims=True)
    stream.queries[:, -1, 36, 3] = np.nan  # one query head is enough
    stream.queries[:, 0, 36, 3] = np.inf
    fused = votes.max(axis=0) if fuse == "max" else votes.sum(axis=0)
    transform = morphkv(budget=12, window=4, n_sink=0, fuse=fuse)
    best = [np.sort(np.argsort(-x)[:8]).tolist() for x in fused]
    assert held_positions(transform, feed(transform, stream, pattern))[0] == [[*x, 36, 37, 38, 39] for x in best]


@KINDS
@FUSES
def test_voter_that_is_no_number_leaves_whole_rows(group: int | None, fuse: str) -> None:
    stream = make_stream(13, 50, batch=2, dim=64, group=group)
    clean = Stream(stream.keys.copy(), stream.values, None if group is None else stream.queries.copy(), mx.float32)
    voters = stream.keys if group is None else stream.queries
    voters[0, :, 39:42] = np.nan
    transform, pattern = morphkv(budget=12, window=3, n_sink=2, fuse=fuse), [40, *[1] * 10]
    state = feed(transform, stream, pattern)
    for held in held_positions(transform, state)[0]:
        assert len(held) == 12 and {0, 1, 47, 48, 49} <= set(held)
    assert held_positions(transform, state)[1] == held_positions(transform, feed(transform, clean, pattern))[1]


# Stores and options


@FUSES
def test_over_codes(fuse: str) -> None:
    """The rows that stay are those that the decoded keys rank highest."""
    stream, codes = make_stream(14, 40, dim=64, group=2), rows(key=int8_codec(), value=int8_codec())
    decoded = np.array(codes.read(feed(codes, stream, [40], capacity=40))[0]).astype(np.float64)
    method = chain(morphkv_policy(budget=12, window=4, n_sink=0, fuse=fuse), codes)
    held = held_positions(method, feed(method, stream, [40]))
    for head in range(2):
        queries = stream.queries_of(0, head).astype(np.float64)
        assert held[0][head] == one_shot(decoded[0, head], queries, 12, 4, fuse)


@pytest.mark.parametrize("build", [morphkv, morphkv_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 12}, "budget"),
        ({"budget": 20, "window": 16}, "budget"),
        ({"budget": 16, "window": 20}, "window"),
        ({"budget": 13, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"window": 0}, "window"),
        ({"window": -1}, "window"),
        ({"window": 2.0}, "window"),
        ({"window": None}, "window"),
        ({"window": True}, "window"),
        ({"fuse": "mean"}, "fuse"),
        ({"fuse": None}, "fuse"),
        ({"fuse": max}, "fuse"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^morphkv: .*`{field}`.*; got "):
        build(**chosen)


@KINDS
def test_smallest_budget_that_leaves_a_row_free(group: int | None) -> None:
    stream, transform = make_stream(15, 60, group=group), morphkv(budget=13)
    held = held_positions(transform, feed(transform, stream, [40] + [1] * 20))[0]
    assert all(len(x) == 13 and {0, 1, 2, 3, *range(52, 60)} < set(x) for x in held)
