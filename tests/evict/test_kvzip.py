"""KVzip: the most attention that anyone pays to a row: queries, held keys, or a pass that repeats the context."""

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
    chunks,
    compare,
    cuts,
    equal,
    expect,
    feed,
    held_positions,
    held_rows,
    left_padded_calls,
    make_stream,
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, chain, int8_codec, rows, tova
from vq_functional.core.tree import flatten, rebuild
from vq_functional.evict.kvzip import kvzip, kvzip_policy, score_pass

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PROBES = pytest.mark.parametrize("probe", ["context", "latest"])
NOT_ASKED = 2.0  # above all attention; of such rows the later ones stay


class KVzipHead(Head):
    """Scores are the most attention so far from queries of calls of several tokens; 0 for a row not asked about."""

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        if queries is None and not any(self.scores[i] for i in shown):
            self.keep(shown, self.most(shown, [[self.keys[i]] for i in shown]))
            return
        if queries is not None and len(new) > 1:
            most = self.most(shown, list(queries.swapaxes(0, 1)))
            self.scores |= {i: max(self.scores[i], most[i]) for i in shown}
        self.keep(shown, {i: self.scores[i] or NOT_ASKED + i / 1000 for i in shown})

    def most(self, shown: list[int], probes: Sequence[Sequence[np.ndarray]]) -> dict[int, float]:
        """The largest probability that one of `probes`, its heads on average, gives to each row, later ones too."""
        most = dict.fromkeys(shown, 0.0)
        for probe in probes:
            paid = [self.attention(head, shown) for head in probe]
            most = {i: max(most[i], sum(weights[i] for weights in paid) / len(paid)) for i in shown}
        return most


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    return {"budget": budget, "n_sink": draw(st.integers(0, min(3, budget - 1)))}


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(lambda: KVzipHead(**chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(kvzip(**chosen), told, stream, calls)
    return margin > NEAR_TIE


# Against the oracle


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_importance(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_importance_is_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    stream = make_stream(0, 60, dim=32, group=group, dtype=dtype)
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), budget=12, n_sink=2)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(chosen["budget"] - chosen["n_sink"] - 1, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern), group=group), kvzip(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_does_not_ask(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    assume(agrees(make_stream(seed, 60, batch=2, group=group), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_does_not_ask(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2, group=group), calls, **chosen))


@KINDS
def test_prompt_longer_than_a_block_of_queries(group: int | None) -> None:
    stream = make_stream(1, 270, heads=1, dim=8, group=group)
    assert agrees(stream, plain_calls([270], 1), budget=20, n_sink=2)


def one_shot(keys: np.ndarray, probes: np.ndarray, budget: int, n_sink: int) -> list[int]:
    """Sinks, and of the other rows [T, D] those of which one of `probes` [G, N, D] wants the largest share."""
    weights = np.exp(probes @ keys.T / np.sqrt(keys.shape[1]))
    most = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0).max(axis=0)
    best = [i for i in np.argsort(-most).tolist() if i >= n_sink][: budget - n_sink]
    return sorted([*range(n_sink), *best])


@pytest.mark.parametrize("group", [None, 1, 3])
@pytest.mark.parametrize(("budget", "n_sink"), [(16, 4), (24, 0), (5, 4)])
def test_one_call_keeps_the_rows_that_anyone_wants(budget: int, n_sink: int, group: int | None) -> None:
    """Also by later tokens: that the text could not be read backwards matters to no row."""
    stream, transform = make_stream(2, 90, dim=32, group=group), kvzip(budget=budget, n_sink=n_sink)
    held = held_positions(transform, feed(transform, stream, [90]))
    for head in range(2):
        keys, asked = stream.keys[0, head].astype(np.float64), stream.queries_of(0, head)
        probes = keys[None] if asked is None else asked.astype(np.float64)
        assert held[0][head] == one_shot(keys, probes, budget, n_sink)


# Importance


@given(seeds(), options(), cuts(20), st.sampled_from([1, 2]))
def test_importance_is_a_probability_and_never_falls(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int
) -> None:
    transform, stream, start = kvzip(**chosen), make_stream(seed, sum(pattern), batch=2, group=group), 0
    state, before = transform.init_state(stream.spec()), np.zeros((2, 2, sum(pattern)))
    for n in pattern:
        state, start = resume(transform, state, stream, [n], start), start + n
        after = by_position(transform, state, sum(pattern))
        held = np.array(transform.ordered(state).position)
        assert ((after >= 0) & (after <= 1 + 1e-6)).all()
        for row, head in np.ndindex(2, 2):
            kept = [i for i in held[row, head].tolist() if i >= 0]
            assert (after[row, head, kept] >= before[row, head, kept]).all()
            assert n > 1 or np.array_equal(after[row, head, kept], before[row, head, kept])
            assert n <= 1 or (after[row, head, kept] > 0).all()
        before = after


def by_position(transform: Any, state: Any, tokens: int) -> np.ndarray:
    """Importance [B, H, tokens], 0 for rows that went."""
    position, memory = np.array(state.position), to_numpy(state.memory)
    out = np.zeros((*position.shape[:2], tokens))
    for place in np.argwhere((position >= 0) & (position < tokens)):
        row, head, slot = place.tolist()
        out[row, head, position[row, head, slot]] = memory[row, head, slot]
    return out


@pytest.mark.parametrize("group", [1, 2])
def test_shares_of_all_rows_come_to_one_at_least(group: int) -> None:
    """Each query gives 1 in all, and the largest share of a row is no smaller than any one of them."""
    transform = kvzip(budget=64)
    state = feed(transform, make_stream(3, 50, batch=2, group=group), [50])
    assert (to_numpy(state.memory.sum(axis=-1)) >= 1).all()


def test_a_row_is_as_important_as_what_its_own_key_gives_it() -> None:
    """Standing-in keys ask about themselves too: of orthogonal keys the longest ones stay."""
    stream = make_stream(4, 12, dim=16)
    length = np.array([3.0, 9.0, 5.0, 1.0, 8.0, 2.0, 7.0, 4.0, 6.0, 10.0, 0.5, 1.5], np.float32)
    stream.keys[...] = np.eye(12, 16, dtype=np.float32) * length[:, None]
    transform = kvzip(budget=5, n_sink=0)
    assert held_positions(transform, feed(transform, stream, [12])) == [[[1, 4, 6, 8, 9]] * 2]


def test_a_second_voice_for_the_same_wish_changes_nothing() -> None:
    one = make_stream(5, 40, batch=2, group=2)
    twice = Stream(one.keys, one.values, np.repeat(one.queries, 2, axis=1), mx.float32)
    swapped = Stream(one.keys, one.values, one.queries[:, [1, 0, 3, 2]], mx.float32)
    transform, pattern = kvzip(budget=12, n_sink=2), [30, 1, 1, 8]
    want = feed(transform, one, pattern)
    assert equal(held_rows(transform, feed(transform, twice, pattern)), held_rows(transform, want))
    assert equal(held_rows(transform, feed(transform, swapped, pattern)), held_rows(transform, want))


def test_single_tokens_do_not_ask() -> None:
    """Whatever their queries are: rows go by what the prompt wanted, and new rows stay while old ones are left."""
    asked = make_stream(6, 60, group=2)
    other = Stream(asked.keys, asked.values, asked.queries.copy(), mx.float32)
    other.queries[:, :, 40:] *= -5
    transform = kvzip(budget=16, n_sink=2)
    states = [feed(transform, stream, [40] + [1] * 20) for stream in (asked, other)]
    assert same(*states)
    assert held_positions(transform, states[0]) == [[[0, 1, *range(46, 60)]] * 2]
    state = feed(transform, asked, [40] + [1] * 5)
    prompt = feed(transform, asked, [40])
    for held, before, importance in zip(
        held_positions(transform, state)[0], held_positions(transform, prompt)[0], by_position(transform, prompt, 40)[0]
    ):
        ranked = sorted(before[2:], key=lambda i: importance[i])
        assert held == sorted([0, 1, *ranked[5:], *range(40, 45)])


def test_decoding_from_nothing_by_queries_is_a_window() -> None:
    """Nothing is ever asked about, and of equal rows the later ones stay."""
    transform = kvzip(budget=10, n_sink=3)
    state = feed(transform, make_stream(7, 40, group=2), [1] * 40)
    assert held_positions(transform, state) == [[[0, 1, 2, *range(33, 40)]] * 2]
    assert not to_numpy(state.memory).any()


@given(seeds(), options(), cuts(12), cuts(12), st.integers(2, 30))
def test_calls_without_queries_rank_by_what_queries_have_asked(
    seed: int, chosen: dict[str, Any], before: list[int], after: list[int], prompt: int
) -> None:
    """Keys stand in first, then queries come in one prompt, and then none any more."""
    pattern = [*before, prompt, *after]
    asked, stood = (make_stream(seed, sum(pattern), group=2) for _ in range(2))
    stood = Stream(stood.keys, stood.values, None, mx.float32)
    heads = [KVzipHead(**chosen) for _ in range(2)]
    transform, start, told = kvzip(**chosen), 0, []
    state = transform.init_state(asked.spec())
    for number, n in enumerate(pattern):
        stream = asked if number == len(before) else stood
        state = resume(transform, state, stream, [n], start)
        for index, head in enumerate(heads):
            queries = stream.queries_of(0, index)
            part = slice(start, start + n)
            head.call(stream.keys[0, index, part], None if queries is None else queries[:, part])
        told.append((held_positions(transform, state)[0], [head.held for head in heads]))
        start += n
    assume(min(head.margin for head in heads) > NEAR_TIE)
    assert all(got == want for got, want in told)
    want = np.zeros((1, 2, start))
    for index, head in enumerate(heads):
        want[0, index, head.held] = [head.scores[i] for i in head.held]
    np.testing.assert_allclose(by_position(transform, state, start), want, rtol=1e-4, atol=1e-6)


def test_batch_rows_know_of_queries_each_for_itself() -> None:
    """One row has been asked about before it joined, the other has not."""
    transform, asked = kvzip(budget=12, n_sink=2), make_stream(8, 60, batch=2, group=2)
    stood = Stream(asked.keys, asked.values, None, mx.float32)
    first, second = (feed(transform, x.rows([row]), [30]) for row, x in enumerate((asked, stood)))
    leaves, structure = flatten(first)
    joined = rebuild(structure, [mx.concatenate(pair) for pair in zip(leaves, flatten(second)[0])])
    joined = resume(transform, joined, stood, [1, 1, 9, *[1] * 19], 30)
    for row, alone in enumerate((first, second)):
        alone = resume(transform, alone, stood.rows([row]), [1, 1, 9, *[1] * 19], 30)
        assert held_positions(transform, joined)[row] == held_positions(transform, alone)[0]


@pytest.mark.parametrize(
    ("group", "pattern"),
    [*((2, one) for one in ([12], [8, 1, 1, 2], [1] * 9 + [3])), *((None, one) for one in ([12], [5, 7], [1] * 12))],
    ids=str,
)
def test_of_equal_rows_the_later_ones_stay(group: int | None, pattern: list[int]) -> None:
    stream = make_stream(9, 12, group=group)
    stream = Stream(np.ones_like(stream.keys), stream.values, stream.queries, mx.float32)
    transform = kvzip(budget=5, n_sink=2)
    held = held_positions(transform, feed(transform, stream, pattern))
    assert held == [[[0, 1, 9, 10, 11]] * 2]


@pytest.mark.parametrize("pattern", [[40], [39, 1]], ids=str)
def test_a_row_that_no_query_wants_has_been_asked_about(pattern: list[int]) -> None:
    """Its share is below the range of float32, which is less than any other and not more."""
    stream = make_stream(10, 40, dim=16, group=1)
    stream.queries[..., 0] = 100.0
    stream.keys[..., 0] = 8.0
    stream.keys[:, :, [10, 20], 0] = -8.0
    transform = kvzip(budget=38, n_sink=2)
    want = sorted({*range(40)} - {10, 20})
    assert held_positions(transform, feed(transform, stream, pattern)) == [[want] * 2]


# Keys that stand in


def test_nothing_is_remembered_while_keys_stand_in() -> None:
    """Two pasts that leave the same rows: the future is the same."""
    transform, one = kvzip(budget=10, n_sink=2), make_stream(11, 60, heads=1, dim=32)
    state = feed(transform, one, [30])
    lost = sorted({*range(30)} - set(held_positions(transform, state)[0][0]))
    other = Stream(one.keys.copy(), one.values.copy(), None, mx.float32)
    other.keys[0, 0, lost] *= 0.5
    other.values[0, 0, lost] = 7.0
    twin = feed(transform, other, [30])
    assert equal(held_rows(transform, state), held_rows(transform, twin))
    futures = [resume(transform, x, one, [1, 1, 9, *[1] * 19], 30) for x in (state, twin)]
    assert equal(*(held_rows(transform, x) for x in futures))
    assert not to_numpy(futures[0].memory).any()


@given(seeds(), options(), st.integers(0, 16), st.integers(1, 16))
def test_cuts_before_any_eviction_change_nothing_for_keys(
    seed: int, chosen: dict[str, Any], first: int, second: int
) -> None:
    """Up to one row past the budget."""
    first = min(first, chosen["budget"])
    second = min(second, chosen["budget"] + 1 - first)
    transform, total = kvzip(**chosen), first + second
    stream = make_stream(seed, total)
    assume(expect(lambda: KVzipHead(**chosen), stream, plain_calls([total], 1))[1] > NEAR_TIE)
    held = [held_rows(transform, feed(transform, stream, how)) for how in ([first, second], [total], [1] * total)]
    assert equal(held[0], held[1]) and equal(held[0], held[2])


@given(seeds(), options(), cuts(9), GROUPS)
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform, plain = kvzip(**chosen | {"budget": max(chosen["budget"], total)}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@given(options(), cuts(20), GROUPS, st.sampled_from(["context", "latest"]))
def test_sinks_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None, probe: str) -> None:
    transform, total = kvzip(**chosen, probe=probe), sum(pattern)
    state = feed(transform, make_stream(12, total, batch=2, group=group), pattern)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"])
        assert set(range(min(chosen["n_sink"], total))) <= set(held)


# The newest token alone


@given(seeds(), options(), cuts(20), GROUPS, st.booleans())
def test_the_newest_probe_is_tova(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, spared: bool
) -> None:
    if spared and chosen["n_sink"] + 2 < chosen["budget"]:
        chosen = chosen | {"protect": [(chosen["n_sink"] + 1, chosen["n_sink"] + 3)]}
    chosen = {**chosen, "budget": chosen["budget"] + 1}
    stream = make_stream(seed, sum(pattern), batch=2, group=group)
    assert same(*(feed(x, stream, pattern) for x in (kvzip(**chosen, probe="latest"), tova(**chosen))))


@given(seeds(), options(), right_padded(2), GROUPS)
def test_the_newest_probe_is_tova_under_padding(
    seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None
) -> None:
    stream, states = make_stream(seed, 60, batch=2, group=group), []
    for transform in (kvzip(**chosen, probe="latest"), tova(**chosen)):
        state = transform.init_state(stream.spec())
        for call, keys, values, queries in zip(
            calls, *(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries))
        ):
            lengths, proxy = mx.array(call.counts), queries is None
            state = transform.write(state, keys, values, lengths)
            state = transform.settle(state, keys if proxy else queries, lengths, proxy=proxy)
        states.append(state)
    assert same(*states)


# The pass that repeats the context


def repeated(
    keys: np.ndarray, held: list[int], queries: np.ndarray, own: np.ndarray, span: tuple[int, int], n_sink: int
) -> dict[int, float]:
    """For one head: the largest share of a row of the span, by `queries` [G, S, D] of tokens with keys `own` [S, D]."""
    columns = [i for i in held if i < n_sink or span[0] <= i < span[1]]
    most = dict.fromkeys(columns, 0.0)
    for query in queries:
        for token in range(len(own)):
            seen = np.concatenate([keys[columns], own[: token + 1]]).astype(np.float64)
            weights = np.exp(seen @ query[token].astype(np.float64) / np.sqrt(keys.shape[1]))
            shares = weights / weights.sum()
            for place, i in enumerate(columns):
                most[i] = max(most[i], shares[place])
    return {i: share for i, share in most.items() if span[0] <= i < span[1]}


def retained(transform: Any, stream: Stream, pattern: Sequence[int]) -> Any:
    """The state after calls that all kept every row."""
    state, start = transform.init_state(stream.spec()), 0
    for n in pattern:
        keys, values, _ = parts_of(stream, start, n)
        state, start = transform.retain(transform.write(state, keys, values)), start + n
    return state


def questions(stream: Stream, tokens: int, seed: int = 99) -> tuple[mx.array, mx.array]:
    """Queries and keys of `tokens` repeated tokens, fit for `stream`."""
    dim, group = stream.keys.shape[3], stream.queries.shape[1] // stream.heads
    other = make_stream(seed, tokens, batch=stream.batch, heads=stream.heads, dim=dim, group=group)
    return mx.array(other.queries), mx.array(other.keys)


def asked(transform: Any, state: Any, queries: mx.array, keys: mx.array, span: tuple[int, int]) -> Any:
    return score_pass(transform, state, queries, keys, keys, span, queries.shape[-1] ** -0.5)[0]


@pytest.mark.parametrize("span", [(0, 40), (0, 16), (10, 30), (38, 40), (2, 3)])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_a_pass_asks_sinks_span_and_the_tokens_before(tokens: int, group: int, span: tuple[int, int]) -> None:
    stream, transform = make_stream(13, 40, batch=2, group=group), kvzip(budget=20, n_sink=3)
    queries, keys = questions(stream, tokens)
    state = retained(transform, stream, [25, 1, 14])
    got = by_position(transform, asked(transform, state, queries, keys, span), 40)
    want = np.zeros((2, 2, 40))
    for row, head in np.ndindex(2, 2):
        voices = to_numpy(queries)[row, head * group : (head + 1) * group]
        own = to_numpy(keys)[row, head]
        for i, share in repeated(stream.keys[row, head], list(range(40)), voices, own, span, 3).items():
            want[row, head, i] = share
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


def test_a_pass_of_many_queries_has_its_own_scale() -> None:
    """More than one block, and a scale that is not that of the head size."""
    stream, transform = make_stream(14, 30, heads=1, dim=8, group=2), kvzip(budget=20, n_sink=2)
    queries, keys = questions(stream, 300)
    state = retained(transform, stream, [30])
    got, _ = score_pass(transform, state, queries, keys, keys, (5, 25), 0.25)
    doubled = to_numpy(queries)[0] * 0.25 * np.sqrt(8)
    want = repeated(stream.keys[0, 0], list(range(30)), doubled, to_numpy(keys)[0, 0], (5, 25), 2)
    np.testing.assert_allclose(by_position(transform, got, 30)[0, 0, 5:25], list(want.values()), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("pattern", [[25, 1, 14], [40]])
@pytest.mark.parametrize("store", [rows(), rows(key=int8_codec(), value=int8_codec())], ids=["exact", "codes"])
def test_a_pass_attends_to_all_rows_and_the_tokens_before(store: Any, pattern: list[int], tokens: int) -> None:
    """Whatever the span is."""
    stream, transform = make_stream(24, 40, batch=2, dim=8, group=2), chain(kvzip_policy(budget=20, n_sink=3), store)
    (queries, keys), (_, values) = questions(stream, tokens), questions(stream, tokens, 100)
    state = retained(transform, stream, pattern)
    _, got = score_pass(transform, state, queries, keys, values, (5, 25), 0.25)
    held = (x[:, :, :40] for x in transform.read(transform.ordered(state)))
    both = (mx.concatenate([old, new], axis=2) for old, new in zip(held, (keys, values), strict=True))
    want = mx.fast.scaled_dot_product_attention(queries, *both, scale=0.25, mask="causal")
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-4, atol=1e-5)
    assert got.dtype == queries.dtype


def test_a_pass_holds_nothing_and_changes_no_row() -> None:
    stream, transform = make_stream(15, 40, batch=2, group=2), kvzip(budget=20, n_sink=3)
    state = retained(transform, stream, [40])
    after = asked(transform, state, *questions(stream, 12), (0, 40))
    assert equal(held_rows(transform, after), held_rows(transform, state))
    assert after.slots == state.slots and mx.array_equal(after.offset, state.offset)
    assert not to_numpy(state.memory).any()


@given(seeds(), st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20)), min_size=2, max_size=4))
def test_passes_only_raise_importance_and_in_any_order(seed: int, cut: list[tuple[int, int]]) -> None:
    stream, transform = make_stream(seed, 40, group=2), kvzip(budget=20, n_sink=3)
    rounds = [(*questions(stream, tokens, place), (start, 40)) for place, (start, tokens) in enumerate(cut)]
    forth = back = retained(transform, stream, [40])
    for one in rounds:
        before, forth = forth, asked(transform, forth, *one)
        assert (to_numpy(forth.memory) >= to_numpy(before.memory)).all()
    for one in reversed(rounds):
        back = asked(transform, back, *one)
    assert same(forth, back)
    assert same(asked(transform, forth, *rounds[0]), forth)


@pytest.mark.parametrize("tokens", [12, 300])
def test_a_pass_may_be_split(tokens: int) -> None:
    """By query heads, and by more and more of the tokens; each query sees what it saw before."""
    stream, transform = make_stream(16, 40, heads=2, dim=8, group=2), kvzip(budget=20, n_sink=3)
    queries, keys = questions(stream, tokens)
    state = retained(transform, stream, [40])
    whole = asked(transform, state, queries, keys, (4, 40))
    apart = state
    for voice in (1, 0):
        apart = asked(transform, apart, queries[:, voice::2], keys, (4, 40))
    np.testing.assert_allclose(to_numpy(apart.memory), to_numpy(whole.memory), rtol=1e-5, atol=1e-7)
    growing = state
    for end in (1, tokens // 2, tokens):
        growing = asked(transform, growing, queries[:, :, :end], keys[:, :, :end], (4, 40))
    np.testing.assert_allclose(to_numpy(growing.memory), to_numpy(whole.memory), rtol=1e-5, atol=1e-7)
    swapped = asked(transform, state, queries[:, mx.array([1, 0, 3, 2])], keys, (4, 40))
    twice = asked(transform, state, mx.repeat(queries, 2, axis=1), keys, (4, 40))
    for other in (swapped, twice):
        np.testing.assert_allclose(to_numpy(other.memory), to_numpy(whole.memory), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("budget", [5, 20, 40])
def test_compacting_keeps_sinks_and_the_most_important_rows(budget: int) -> None:
    stream, transform = make_stream(17, 40, batch=2, group=2), kvzip(budget=budget, n_sink=3)
    state = asked(transform, retained(transform, stream, [16, 16, 8]), *questions(stream, 40), (0, 40))
    importance = by_position(transform, state, 40)
    after = transform.compact(state, mx.array([budget] * 2), budget)
    for row, head in np.ndindex(2, 2):
        ranked = sorted(range(3, 40), key=lambda i: -importance[row, head, i])[: budget - 3]
        assert held_positions(transform, after)[row][head] == sorted([0, 1, 2, *ranked])
    assert np.array_equal(by_position(transform, after, 40), np.where(held_mask(transform, after, 40), importance, 0))


def held_mask(transform: Any, state: Any, tokens: int) -> np.ndarray:
    """Bool [B, H, tokens]: rows that are held."""
    held = held_positions(transform, state)
    return np.array([[[i in head for i in range(tokens)] for head in row] for row in held])


def test_rows_that_no_pass_has_asked_about_stay_first() -> None:
    stream, transform = make_stream(18, 40, group=2), kvzip(budget=20, n_sink=3)
    state = asked(transform, retained(transform, stream, [40]), *questions(stream, 30), (0, 28))
    for held in held_positions(transform, transform.compact(state, mx.array([20]), 20))[0]:
        assert {0, 1, 2, *range(28, 40)} <= set(held) and len(held) == 20


def test_rows_that_no_repeated_token_wants_go_first() -> None:
    """Their share is below the range of float32; yet they have been asked about."""
    stream, transform = make_stream(23, 40, group=2), kvzip(budget=36, n_sink=3)
    stream.keys[..., 0] = 8.0
    stream.keys[:, :, [10, 20], 0] = -8.0
    queries, keys = questions(stream, 12)
    queries[..., 0] = 100.0
    state = asked(transform, retained(transform, stream, [40]), queries, keys, (0, 40))
    for held in held_positions(transform, transform.compact(state, mx.array([36]), 36))[0]:
        assert not {10, 20} & set(held)


@pytest.mark.parametrize("pattern", [[10], [1] * 10, [4, 1, 5]], ids=str)
def test_a_question_does_not_change_which_rows_of_the_context_stay(pattern: list[int]) -> None:
    """Its rows push out the least important ones, whatever it says."""
    stream, transform = make_stream(19, 60, group=2), kvzip(budget=20, n_sink=3)
    state = asked(transform, retained(transform, stream, [40]), *questions(stream, 40), (0, 40))
    state = transform.compact(state, mx.array([20]), 20)
    importance, context = by_position(transform, state, 40)[0], held_positions(transform, state)[0]
    for seed in range(3):
        other = make_stream(40 + seed, 60)
        after = resume(transform, state, other, pattern, 40)
        for held, before, rank in zip(held_positions(transform, after)[0], context, importance):
            stay = sorted(before[3:], key=lambda i: -rank[i])[:7]
            assert held == sorted([0, 1, 2, *stay, *range(40, 50)])


# Numbers that are none


@PROBES
@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_key_that_is_no_number_leaves_whole_rows(probe: str, group: int | None, bad: float) -> None:
    transform = kvzip(budget=20, n_sink=2, probe=probe)
    stream = make_stream(20, 80, batch=2, group=group)
    clean = held_rows(transform, feed(transform, stream.rows([1]), [50] + [1] * 30))
    stream.keys[0, 0, 20, 5] = bad
    state = feed(transform, stream, [50] + [1] * 30)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(set(held)) == 20 and held[:2] == [0, 1]
    assert equal([x[1:] for x in held_rows(transform, state)], clean)


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_the_other_rows_stay_as_if_a_broken_one_were_not_there(group: int | None, bad: float) -> None:
    stream, transform = make_stream(21, 50, dim=32, group=group), kvzip(budget=12, n_sink=2)
    stream.keys[:, :, 20, 5] = bad
    without = [i for i in range(50) if i != 20]
    other = [x if x is None else x[:, :, without] for x in (stream.keys, stream.values, stream.queries)]
    if group is not None:
        stream.queries[:, :, 20] = stream.queries[:, :, 21]
    want = held_positions(transform, feed(transform, Stream(*other, mx.float32), [49]))
    got = held_positions(transform, feed(transform, stream, [50]))
    assert got == [[[without[i] for i in head] for head in want[0]]]


# Options


@PROBES
@pytest.mark.parametrize("build", [kvzip, kvzip_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": True, "n_sink": 0}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 5, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str, probe: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^kvzip: .*`{field}`.*; got "):
        build(**chosen, probe=probe)


@pytest.mark.parametrize("probe", ["newest", None, True])
def test_refuses_an_unknown_probe(probe: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=r"^kvzip: .*`probe`.*; got "):
        kvzip(probe=probe)


@KINDS
@PROBES
def test_smallest_budgets(group: int | None, probe: str) -> None:
    stream = make_stream(22, 40, group=group)
    for chosen, kept in (({"budget": 5}, 5), ({"budget": 1, "n_sink": 0}, 1)):
        transform = kvzip(**chosen, probe=probe)
        assert held_rows(transform, feed(transform, stream, [20] + [1] * 20))[0].shape == (1, 2, kept)
