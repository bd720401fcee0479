"""TOVA: the attention of the newest token decides, one set for all heads of a layer or one for each."""

from collections.abc import Callable, Sequence
from typing import Any

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
    same,
    seeds,
    spans,
)

from vq_functional import QuantizerConfigError, int8_codec, rows
from vq_functional.core.tree import flatten
from vq_functional.evict.chain import chain
from vq_functional.evict.tova import tova, tova_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
SHARES = pytest.mark.parametrize("share", [False, True], ids=["each head", "one set"])


def softmax(voter: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Attention of `voter` [D] to `keys` [N, D]."""
    logits = keys.astype(np.float64) @ voter.astype(np.float64) / np.sqrt(len(voter))
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class TOVAHead(Head):
    """The newest token's attention, averaged over the voters of one KV head or of the whole layer."""

    def __init__(
        self,
        stream: Stream,
        place: tuple[int, ...],
        budget: int,
        n_sink: int = 0,
        share_heads: bool | None = None,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, 0, protect)
        self.stream, (self.row, self.head), self.share_heads = stream, place, share_heads

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        shared = queries is not None if self.share_heads is None else self.share_heads
        priority = np.zeros(len(shown))
        for head in range(self.stream.heads) if shared else [self.head]:
            keys, asked = self.stream.keys[self.row, head], self.stream.queries_of(self.row, head)
            voters = [keys[new[-1]]] if asked is None else list(asked[:, new[-1]])
            for voter in voters:
                priority += softmax(voter, keys[shown]) / len(voters)
        self.keep(shown, dict(zip(shown, priority.tolist())))


def heads_of(stream: Stream, **chosen: Any) -> Callable[[], Head]:
    """The heads of all batch rows, in the order in which `expect` asks for them."""
    places = iter(np.ndindex(stream.batch, stream.heads))
    return lambda: TOVAHead(stream, next(places), **chosen)


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(heads_of(stream, **chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(tova(**chosen), told, stream, calls)
    return margin > NEAR_TIE


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    return {
        "budget": budget,
        "n_sink": draw(st.integers(0, min(3, budget - 1))),
        "share_heads": draw(st.sampled_from([None, False, True])),
    }


@given(seeds(), options(), cuts(), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
@SHARES
def test_weights_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None, share: bool) -> None:
    stream = make_stream(0, 60, dim=64, group=group, dtype=dtype)
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), budget=12, n_sink=2, share_heads=share)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(chosen["budget"] - chosen["n_sink"] - 1, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern), group=group), tova(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


# The paper's rule


def greedy(keys: np.ndarray, queries: np.ndarray, budget: int, pattern: Sequence[int]) -> list[int]:
    """The paper's rule for a layer: `keys` [H, T, D], `queries` [Hq, T, D]; without sinks."""
    held: list[int] = []
    group, end = len(queries) // len(keys), 0
    for n in pattern:
        held, end = held + list(range(end, end + n)), end + n
        weights = [softmax(query[end - 1], keys[index // group, held]) for index, query in enumerate(queries)]
        best = np.argsort(-np.mean(weights, axis=0))[:budget]
        held = sorted(held[place] for place in best)
    return held


@pytest.mark.parametrize("pattern", [[70], [1] * 70, [30, 1, 1, 20, 18]], ids=["once", "decode", "chunks"])
@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("group", [1, 3])
def test_one_set_by_the_mean_over_all_query_heads(pattern: list[int], budget: int, group: int) -> None:
    stream = make_stream(1, 70, batch=2, heads=3, dim=32, group=group)
    transform = tova(budget=budget, n_sink=0)
    held = held_positions(transform, feed(transform, stream, pattern))
    for row in range(2):
        assert held[row] == [greedy(stream.keys[row], stream.queries[row], budget, pattern)] * 3
    assert held[0] != held[1] or budget == 1


def test_heads_share_by_default_with_queries_and_stand_alone_with_keys() -> None:
    chosen, pattern = {"budget": 9, "n_sink": 2}, [30, 1, 1, 8]
    default, apart, one = tova(**chosen), tova(**chosen, share_heads=False), tova(**chosen, share_heads=True)
    asked, stood = make_stream(2, 40, heads=3, group=2), make_stream(2, 40, heads=3)
    assert same(feed(default, asked, pattern), feed(one, asked, pattern))
    assert same(feed(default, stood, pattern), feed(apart, stood, pattern))
    for stream in (asked, stood):
        several, single = (held_positions(x, feed(x, stream, pattern))[0] for x in (apart, one))
        assert single == [single[0]] * 3 and several[0] != several[1]


@given(seeds(), options(), cuts(20), GROUPS)
def test_one_set_a_layer(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform = tova(**chosen | {"share_heads": True})
    state = feed(transform, make_stream(seed, sum(pattern), batch=2, heads=3, group=group), pattern)
    for row in held_positions(transform, state):
        assert row == [row[0]] * 3


@SHARES
def test_newest_row_competes_too(share: bool) -> None:
    """The last key is the opposite of what the last query asks for."""
    stream = make_stream(3, 31, heads=1, group=1)
    stream.keys[:, :, -1] = -20 * stream.queries[:, :, -1]
    for pattern in ([31], [30, 1]):
        transform = tova(budget=30, n_sink=2, share_heads=share)
        assert held_positions(transform, feed(transform, stream, pattern)) == [[list(range(30))]]


def test_newest_key_scores_itself_highest() -> None:
    """Without queries long random keys match themselves best, so that the newest row stays."""
    transform, stream = tova(budget=1, n_sink=0), make_stream(4, 40, dim=64)
    assert held_positions(transform, feed(transform, stream, [1] * 40)) == [[[39]] * 2]


def test_query_heads_of_a_group_are_averaged() -> None:
    """A group of equal query heads is as one of them; softmax comes before the mean."""
    one = make_stream(5, 40, group=1)
    three = Stream(one.keys, one.values, np.repeat(one.queries, 3, axis=1), mx.float32)
    calls = plain_calls([15, 1, 1, 23], 1)
    for share in (False, True):
        told, margin = expect(heads_of(one, budget=9, n_sink=1, share_heads=share), one, calls)
        assert margin > NEAR_TIE
        compare(tova(budget=9, n_sink=1, share_heads=share), told, three, calls)


def test_a_sure_query_head_outvotes_an_unsure_one() -> None:
    """The mean is over weights: one query head is sure of row 3, the other has larger logits for five rows."""
    keys = np.zeros((1, 1, 12, 64), np.float32)
    keys[..., 3, 0], keys[..., 7, 1], keys[..., 8:, 2] = 1.0, 1.0, 1.0
    queries = np.zeros((1, 2, 12, 64), np.float32)
    queries[:, 0, -1, 0] = 80.0
    queries[:, 1, -1, 1:3] = 400.0
    stream, transform = Stream(keys, keys, queries, mx.float32), tova(budget=1, n_sink=0)
    assert held_positions(transform, feed(transform, stream, [12])) == [[[3]]]


# Ranking


@pytest.mark.parametrize("group", [None, 1, 2])
@SHARES
@pytest.mark.parametrize("pattern", [[40], [39, 1], [1] * 40], ids=["once", "last", "decode"])
def test_weights_below_the_range_of_float32_still_rank(group: int | None, share: bool, pattern: list[int]) -> None:
    """Logits that spread over hundreds, in no order."""
    stream = make_stream(6, 40, dim=16, group=group)
    stream.keys[..., 0] = np.random.default_rng(6).permutation(np.linspace(-30, 30, 40))
    if stream.queries is not None:
        stream.queries[..., 0] = 25.0
    chosen, calls = {"budget": 20, "n_sink": 1, "share_heads": share}, plain_calls(pattern, 1)
    compare(tova(**chosen), expect(heads_of(stream, **chosen), stream, calls)[0], stream, calls)


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@pytest.mark.parametrize("factor", [0.25, 8.0, 64.0])
def test_factor_on_all_keys_of_a_head_changes_nothing_at_single_tokens(group: int | None, factor: float) -> None:
    stream = make_stream(7, 50, group=group)
    keys = stream.keys * np.array([1.0, factor], np.float32)[:, None, None]
    scaled = Stream(keys, stream.values, stream.queries, mx.float32)
    transform = tova(budget=12, n_sink=2, share_heads=False)
    held = [held_positions(transform, feed(transform, x, [1] * 50)) for x in (stream, scaled)]
    assert held[0] == held[1]


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
@SHARES
@pytest.mark.parametrize("pattern", [[12], [1] * 12, [5, 7], [8, 1, 1, 2], [1] * 9 + [3]], ids=str)
def test_of_equal_weights_the_later_rows_stay(group: int | None, share: bool, pattern: list[int]) -> None:
    stream = make_stream(8, 12, group=group)
    stream = Stream(np.ones_like(stream.keys), stream.values, stream.queries, mx.float32)
    transform = tova(budget=5, n_sink=2, share_heads=share)
    assert held_positions(transform, feed(transform, stream, pattern)) == [[[0, 1, 9, 10, 11]] * 2]


# Cuts and memory


@given(seeds(), options(), st.integers(0, 16), st.integers(1, 30), GROUPS)
def test_only_the_last_token_matters_until_something_is_evicted(
    seed: int, chosen: dict[str, Any], first: int, second: int, group: int | None
) -> None:
    first = min(first, chosen["budget"])
    transform, stream = tova(**chosen), make_stream(seed, first + second, group=group)
    calls = plain_calls([first + second], 1)
    assume(expect(heads_of(stream, **chosen), stream, calls)[1] > NEAR_TIE)
    held = [held_rows(transform, feed(transform, stream, how)) for how in ([first, second], [first + second])]
    assert equal(*held)


@given(seeds(), options(), GROUPS)
def test_one_call_past_the_budget_by_one_row_equals_single_tokens(
    seed: int, chosen: dict[str, Any], group: int | None
) -> None:
    total = chosen["budget"] + 1
    transform, stream = tova(**chosen), make_stream(seed, total, group=group)
    assume(expect(heads_of(stream, **chosen), stream, plain_calls([total], 1))[1] > NEAR_TIE)
    assert equal(*(held_rows(transform, feed(transform, stream, how)) for how in ([total], [1] * total)))


@given(seeds(), options(), cuts(9), GROUPS)
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform, plain = tova(**chosen | {"budget": max(chosen["budget"], total)}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@pytest.mark.parametrize("group", [None, 1], ids=["keys", "queries"])
def test_nothing_is_remembered_of_rows_that_went(group: int | None) -> None:
    """Two pasts that leave the same rows: the future is the same."""
    transform, one = tova(budget=10, n_sink=2), make_stream(9, 60, heads=1, group=group)
    state = feed(transform, one, [30])
    lost = sorted({*range(30)} - set(held_positions(transform, state)[0][0]))
    voter = one.keys[0, 0, 29] if group is None else one.queries[0, 0, 29]
    other = Stream(one.keys.copy(), one.values.copy(), one.queries, mx.float32)
    other.keys[0, 0, lost], other.values[0, 0, lost] = -3 * voter, 7.0
    twin = feed(transform, other, [30])
    assert equal(held_rows(transform, state), held_rows(transform, twin))
    futures = [resume(transform, x, one, [1, 1, 9, *[1] * 19], 30) for x in (state, twin)]
    assert equal(*(held_rows(transform, x) for x in futures))
    assert not flatten(state.memory)[0] and not flatten(state.carry)[0]


@given(options(), cuts(20), GROUPS)
def test_sinks_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = tova(**chosen), sum(pattern)
    state = feed(transform, make_stream(10, total, batch=2, group=group), pattern)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"])
        assert set(range(min(chosen["n_sink"], total))) <= set(held)


@KINDS
def test_budget_as_a_share_of_the_prompt(group: int | None) -> None:
    stream, pattern = make_stream(11, 60, group=group), [40, *[1] * 20]
    held = [held_rows(x, feed(x, stream, pattern)) for x in (tova(budget=0.25), tova(budget=10))]
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
@SHARES
def test_padding_takes_no_sink_and_no_budget(group: int | None, share: bool) -> None:
    stream = make_stream(12, 65, batch=2, group=group)
    for calls in (left_padded_calls([53] + [1] * 12, (0, 5)), [Call(40, (40, 31)), Call(9, (0, 9)), Call(1, (1, 1))]):
        assert agrees(stream, calls, budget=8, n_sink=2, share_heads=share)


# Numbers that are none


@SHARES
@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_key_that_is_no_number_goes_first(share: bool, group: int | None, bad: float) -> None:
    """As a key that no voter wants, and the other rows as if it were one."""
    stream = make_stream(13, 50, dim=64, group=group)
    voters = stream.keys if group is None else stream.queries.reshape(1, 2, 2, 50, 64).sum(axis=2)
    clean, broken = stream.keys.copy(), stream.keys.copy()
    clean[:, :, 20] = -20 * (voters[:, :, 39].sum(axis=1, keepdims=True) if share else voters[:, :, 39])
    broken[:, :, 20, 5] = bad
    transform = tova(budget=12, n_sink=2, share_heads=share)
    held = []
    for keys in (clean, broken):
        other = Stream(keys, stream.values, stream.queries, mx.float32)
        held.append(held_rows(transform, feed(transform, other, [40, *[1] * 10])))
    assert not (held[0][0] == 20).any().item() and equal(*held)


@KINDS
@SHARES
def test_voter_that_is_no_number_leaves_whole_rows(group: int | None, share: bool) -> None:
    stream = make_stream(14, 50, batch=2, dim=64, group=group)
    clean = Stream(stream.keys.copy(), stream.values, stream.queries, mx.float32)
    voters = stream.keys if group is None else stream.queries
    voters[0, :, 39:42] = np.nan
    transform = tova(budget=12, n_sink=2, share_heads=share)
    state = feed(transform, stream, [40, *[1] * 10])
    for held in held_positions(transform, state)[0]:
        assert len(held) == 12 and held[:2] == [0, 1]
    assert held_positions(transform, state)[1] == held_positions(transform, feed(transform, clean, [40] + [1] * 10))[1]


@pytest.mark.parametrize("pattern", [[1] * 20, [20], [9, 1, 10]], ids=["decode", "once", "chunks"])
def test_heads_that_have_parted_keep_whole_sets_when_queries_come(pattern: list[int]) -> None:
    """Keys stood in for the prompt, each head for itself; then real queries come, which are shared."""
    transform, asked = tova(budget=12, n_sink=2), make_stream(19, 60, group=2)
    state = feed(transform, Stream(asked.keys, asked.values, None, mx.float32), [40])
    before = held_positions(transform, state)[0]
    state = resume(transform, state, asked, pattern, 40)
    assert before[0] != before[1]
    for old, held in zip(before, held_positions(transform, state)[0]):
        assert len(held) == len(set(held)) == 12 and held[:2] == [0, 1]
        assert set(held) <= {*old, *range(40, 60)}


# Stores and options


@KINDS
def test_over_codes(group: int | None) -> None:
    """The rows that stay are those that the decoded keys rank highest."""
    stream = make_stream(15, 40, dim=64, group=group)
    codes = rows(key=int8_codec(), value=int8_codec())
    plain = feed(codes, stream, [40], capacity=40)
    decoded = [np.array(x) for x in codes.read(plain)]
    policy = tova_policy(budget=12, n_sink=2, share_heads=False)
    method = chain(policy, codes)
    held = held_positions(method, feed(method, stream, [40]))
    for head in range(2):
        asked = stream.queries_of(0, head)
        voters = [stream.keys[0, head, -1]] if asked is None else list(asked[:, -1])
        weights = sum(softmax(voter, decoded[0][0, head]) for voter in voters)
        best = [i for i in np.argsort(-weights).tolist() if i > 1][:10]
        assert held[0][head] == sorted([0, 1, *best])


@pytest.mark.parametrize("backend", ["mlx", "metal", "reference"])
def test_backend_changes_nothing(backend: str) -> None:
    stream, pattern = make_stream(16, 40, group=2), [20, 1, 19]
    one, other = tova(budget=9), tova(budget=9, backend=backend)
    assert same(feed(one, stream, pattern), feed(other, stream, pattern))


@pytest.mark.parametrize("build", [tova, tova_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": True, "n_sink": 0}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 3, "n_sink": 4}, "budget"),
        ({"budget": 5, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, "backend"),
        ({"share_heads": "yes"}, "share_heads"),
        ({"share_heads": 1}, "share_heads"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^tova: .*`{field}`.*; got "):
        build(**chosen)


def test_smallest_budgets() -> None:
    stream = make_stream(17, 40, group=2)
    for chosen, kept in (({"budget": 5}, 5), ({"budget": 1, "n_sink": 0}, 1)):
        transform = tova(**chosen)
        assert held_rows(transform, feed(transform, stream, [20] + [1] * 20))[0].shape == (1, 2, kept)
