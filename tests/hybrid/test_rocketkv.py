"""RocketKV: SnapKV with a share of the prompt, then attention to the pages with the highest bounds."""

import math
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
    SnapKVHead,
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

from vq_functional import QuantizerConfigError, rows
from vq_functional.core.tree import flatten
from vq_functional.hybrid.rocketkv import rocketkv

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PATTERNS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [25, 1, 34]], ids=["once", "decode", "chunks"])
RATIOS = [1.01, 2.0, 8.0, 64.0, 256.0]


def split(ratio: float) -> tuple[float, float]:
    """Compression of stage 1 and stage 2."""
    share = min(max(0.2 + 0.06 * math.log2(ratio), 0.2), 0.8)
    return ratio**share, ratio ** (1 - share)


class RocketKVHead(SnapKVHead):
    """Stage 1: the largest vote among neighbours and a tenth of a row's own; with real queries the window stays."""

    def __init__(
        self,
        compression_ratio: float = 8.0,
        obs_window: int = 32,
        n_sink: int = 4,
        pool_kernel: int = 63,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(0, obs_window, n_sink, pool_kernel, None, protect)
        self.ratio, self.prompt = split(compression_ratio)[0], 0

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        if len(new) == 1:
            self.held = shown
            return
        self.prompt += len(new)
        shielded = len({*range(self.n_sink), *(i for start, end in self.protect for i in range(start, end))})
        self.budget = max(math.floor(self.prompt / self.ratio + 0.5), shielded + self.obs_window + 1)
        proxy = queries is None
        self.scores = self._votes_of_keys(shown) if proxy else self._votes_of_queries(shown, new, queries)
        self.recent = 0 if proxy else self.obs_window
        reach = self.pool_kernel // 2
        outside = [0.0 if i >= self.offset - self.recent else self.scores[i] for i in shown]
        largest = [max(outside[max(at - reach, 0) : at + reach + 1]) for at in range(len(shown))]
        pooled = {i: best + own / 10 for i, best, own in zip(shown, largest, outside)}
        self.keep(shown, pooled)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "compression_ratio": draw(st.sampled_from(RATIOS)),
        "obs_window": draw(st.integers(1, 8)),
        "n_sink": draw(st.integers(0, 3)),
        "pool_kernel": draw(st.sampled_from([1, 5, 63])),
    }


# Stage 1


@given(seeds(), options(), cuts(40), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_votes(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    calls = plain_calls(pattern, batch)
    told, margin = expect(lambda: RocketKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(rocketkv(**chosen), told, stream, calls, capacity=total)


@KINDS
@pytest.mark.parametrize("pattern", [[200], [100, 1, 1, 98], [30, 170]], ids=str)
def test_long_prompt(pattern: list[int], group: int | None) -> None:
    """Longer than the window and the 63 neighbours."""
    stream, calls = make_stream(3, 200, batch=2, group=group), plain_calls(pattern, 2)
    told, margin = expect(RocketKVHead, stream, calls)
    assert margin > NEAR_TIE
    compare(rocketkv(), told, stream, calls, capacity=200)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_votes_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    chosen = {"compression_ratio": 64.0, "obs_window": 8, "n_sink": 2}
    stream, calls = make_stream(3, 90, dim=64, group=group, dtype=dtype), plain_calls([60, 1, 1, 3, 25], 1)
    told, margin = expect(lambda: RocketKVHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(rocketkv(**chosen), told, stream, calls, capacity=64)


@given(seeds(), options(), st.data(), cuts(40), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect, total = data.draw(spans(5, first=chosen["n_sink"], last=20)), sum(pattern)
    stream, calls = make_stream(seed, total, group=group), plain_calls(pattern, 1)
    told, margin = expect(lambda: RocketKVHead(**chosen, protect=protect), stream, calls)
    assume(margin > NEAR_TIE)
    compare(rocketkv(**chosen, protect=protect), told, stream, calls, capacity=total)
    seen = {i for start, end in protect for i in range(start, end) if i < total}
    assert all(seen <= set(head.held) for head in told[-1].values())


@given(seeds(), options(), right_padded(2, longest=20), GROUPS)
def test_right_padding_is_neither_voter_nor_row(
    seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None
) -> None:
    """Each sequence keeps a share of its own prompt."""
    stream = make_stream(seed, 120, batch=2, group=group)
    told, margin = expect(lambda: RocketKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(rocketkv(**chosen), told, stream, calls, capacity=120)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(20), GROUPS)
def test_left_padding_is_neither_voter_nor_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    told, margin = expect(lambda: RocketKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(rocketkv(**chosen), told, stream, calls, capacity=120)


@pytest.mark.parametrize(
    ("ratio", "rows_of_1000", "page"), [(2.0, 835, 2), (8.0, 454, 2), (64.0, 97, 3), (256.0, 37, 3)]
)
@pytest.mark.parametrize("pattern", [[1000], [400, 600], [2] * 50 + [900]], ids=["once", "chunks", "pairs"])
def test_share_of_a_prompt(ratio: float, rows_of_1000: int, page: int, pattern: list[int]) -> None:
    """Prompt over the ratio of stage 1: 1.197, 2.204, 10.267 and 43.411; never less than sinks, window and one row."""
    transform = rocketkv(compression_ratio=ratio)
    held = held_positions(transform, feed(transform, make_stream(3, 1000, heads=1, dim=4), pattern))
    assert len(held[0][0]) == rows_of_1000 and transform.page == page


@given(st.floats(1.0001, 4096))
def test_stages_multiply_to_the_whole(ratio: float) -> None:
    transform, (first, second) = rocketkv(compression_ratio=ratio), split(ratio)
    assert math.isclose(first * second, ratio)
    assert math.isclose(transform.policy.budget, 1 / first)
    assert transform.page == math.ceil(math.sqrt(second))
    assert math.isclose(transform.ratio, max(second / transform.page, 1.0))


@given(st.sampled_from(RATIOS), st.lists(st.integers(2, 30), min_size=1, max_size=5), st.integers(0, 4), GROUPS)
def test_count_follows_from_the_prompt(ratio: float, pattern: list[int], n_sink: int, group: int | None) -> None:
    """However it was cut; at least one row beside sinks and window."""
    transform, total = rocketkv(compression_ratio=ratio, n_sink=n_sink, obs_window=6), sum(pattern)
    state = feed(transform, make_stream(4, total, batch=2, group=group), pattern)
    count = min(total, max(math.floor(total / split(ratio)[0] + 0.5), n_sink + 6 + 1))
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == count and set(range(min(n_sink, total))) <= set(held)


@KINDS
def test_single_tokens_are_appended(group: int | None) -> None:
    transform, stream = rocketkv(), make_stream(5, 90, group=group)
    state = feed(transform, stream, [60], capacity=60)
    prompt = held_positions(transform, state)[0]
    state = resume(transform, state, stream, [1] * 30, 60)
    assert held_positions(transform, state) == [[held + list(range(60, 90)) for held in prompt]]


@KINDS
@pytest.mark.parametrize("total", [1, 2, 3, 31, 32, 33, 37])
def test_prompt_that_is_hardly_longer_than_the_window_is_a_plain_cache(total: int, group: int | None) -> None:
    stream, transform, plain = make_stream(6, total, group=group), rocketkv(), rows()
    position, *held = held_rows(transform, feed(transform, stream, [total]))
    assert position.tolist() == [[list(range(total))] * 2]
    assert equal(held, plain.read(feed(plain, stream, [total], capacity=total)))


# Pages


def check_pages(transform: Any, state: Any) -> None:
    """Rows are in token order; each page that has any holds the extremes of their keys, and none else."""
    keys = to_numpy(transform.read(state)[0])
    high, low = to_numpy(state.carry.high), to_numpy(state.carry.low)
    size = transform.page
    assert high.shape[2] == low.shape[2] == math.ceil(state.slots / size)
    for row, head in np.ndindex(*keys.shape[:2]):
        position = np.array(state.position[row, head].tolist())
        count = int((position >= 0).sum())
        assert (np.diff(position[:count]) > 0).all() and (position[count:] < 0).all()
        for page in range(math.ceil(count / size)):
            own = keys[row, head, page * size : min((page + 1) * size, count)]
            assert np.array_equal(high[row, head, page], own.max(axis=0))
            assert np.array_equal(low[row, head, page], own.min(axis=0))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@given(seeds(), options(), st.sampled_from([None, 1, 2, 5]), cuts(20), GROUPS)
def test_pages_bound_their_rows(
    dtype: mx.Dtype, seed: int, chosen: dict[str, Any], page_size: int | None, pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=2, group=group, dtype=dtype)
    transform, start = rocketkv(**chosen, page_size=page_size), 0
    state = transform.init_state(stream.spec(max(total - 3, 1)))
    for n in pattern:
        if transform.overflows(state, n) is not None and transform.overflows(state, n).any().item():
            state = transform.grow(state, total + 4)
        state, start = resume(transform, state, stream, [n], start), start + n
        check_pages(transform, state)
        assert same(transform.ordered(state), state)


@given(seeds(), right_padded(2, longest=9), GROUPS)
def test_pages_of_right_padded_calls(seed: int, calls: list[Call], group: int | None) -> None:
    calls = [*calls, Call(1, (0, 1)), Call(1, (1, 0))]
    stream, transform = make_stream(seed, 60, batch=2, group=group), rocketkv(n_sink=1, obs_window=4, page_size=3)
    state = transform.init_state(stream.spec(60))
    inputs = zip(*(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries)))
    for call, (keys, values, queries) in zip(calls, inputs):
        lengths = mx.array(call.counts)
        held = transform.write(state, keys, values, lengths)
        state = transform.settle(held, keys if queries is None else queries, lengths, proxy=queries is None)
        check_pages(transform, state)


@pytest.mark.parametrize("pattern", [[12, 1, 1, 1], [1] * 12, [3, 1, 1, 9, 1]], ids=str)
def test_pages_of_left_padded_calls(pattern: list[int]) -> None:
    stream, transform = make_stream(7, 15, batch=2), rocketkv(n_sink=1, obs_window=4)
    check_pages(transform, feed(transform, stream, pattern, capacity=20, left_padding=(0, 5)))


# Stage 2


def page_shares(keys: np.ndarray, queries: np.ndarray, page: int, channels: int) -> np.ndarray:
    """Attention [pages] that the bounds promise `queries` [G, D] of a KV head, over rows with `keys` [S, D]."""
    keys, queries = keys.astype(np.float64), queries.astype(np.float64)
    size = np.abs(queries).mean(axis=0)
    used = sorted(range(len(size)), key=lambda channel: (-size[channel], channel))[:channels]
    total = np.zeros(math.ceil(len(keys) / page))
    for query in queries:
        bounds = []
        for start in range(0, len(keys), page):
            own = keys[start : start + page]
            bounds.append(sum(max(query[c] * own[:, c].max(), query[c] * own[:, c].min()) for c in used))
        part = np.abs(query[used]).sum() / np.abs(query).sum()
        logits = np.array(bounds) / math.sqrt(len(query) * part)
        total += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return total / len(queries)


def chosen_rows(shares: np.ndarray, count: int, page: int, k2: int, keep_recent: int) -> tuple[list[int], float]:
    """The rows of the pages of the newest rows and of the best others, `k2` pages in all; and the closest choice."""
    recent = {row // page for row in range(max(count - keep_recent, 0), count)}
    others = sorted(set(range(len(shares))) - recent, key=lambda x: (-shares[x], x))
    free = max(k2 - len(recent), 0)
    gap = math.inf if free in (0, len(others)) else 1 - shares[others[free]] / shares[others[free - 1]]
    pages = recent | set(others[:free])
    return [row for row in range(count) if row // page in pages], gap


def chosen_of(state: Any, index: mx.array, row: int, head: int) -> list[int]:
    """Slots that `select` named for a head, which must rise and be followed by -1 alone."""
    slots = index[row, head].tolist()
    real = [slot for slot in slots if slot >= 0]
    assert slots == sorted(set(real)) + [-1] * (len(slots) - len(real))
    return real


@st.composite
def pages(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "compression_ratio": draw(st.sampled_from([2.0, 8.0, 64.0])),
        "page_size": draw(st.sampled_from([None, 1, 2, 3, 7])),
        "head_topk1": draw(st.sampled_from([None, 1, 5, 16])),
        "n_sink": 1,
        "obs_window": 4,
    }


@given(
    seeds(),
    pages(),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_select_takes_the_best_pages(
    seed: int, chosen: dict[str, Any], group: int, k2: int, keep_recent: int, decoded: int, signs: bool
) -> None:
    """`k2` of them, the newest rows' among them; more where these leave no room for the best one.

    Numbers of a query that differ in nothing but sign leave it to their order which ones are used.
    """
    transform, stream = rocketkv(**chosen), make_stream(seed, 80 + decoded, batch=2, group=group)
    state = feed(transform, stream, [80] + [1] * decoded, capacity=100)
    query = 3 * np.random.default_rng(seed).standard_normal((2, 2 * group, 1, 16)).astype(np.float32)
    query = mx.array(np.sign(query) if signs else query)
    channels = chosen["head_topk1"] or max(1, round(16 / transform.ratio))
    index, keys = transform.select(state, query, k2, keep_recent), to_numpy(transform.read(state)[0])
    for row, head in np.ndindex(2, 2):
        count = len(held_positions(transform, state)[row][head])
        asked = to_numpy(query)[row, head * group : (head + 1) * group, 0]
        shares = page_shares(keys[row, head, :count], asked, transform.page, channels)
        got = chosen_of(state, index, row, head)
        touched = len({slot // transform.page for slot in got})
        assert touched == min(len(shares), max(k2, touched))
        want, gap = chosen_rows(shares, count, transform.page, touched, keep_recent)
        assume(gap > NEAR_TIE)
        assert got == want
        assert set(range(max(count - keep_recent, 0), count)) <= set(got)
        assert np.argmax(shares) in {slot // transform.page for slot in got}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("k2", [1, 4, 10])
def test_pages_of_one_row_and_all_channels_give_exact_attention(group: int, k2: int) -> None:
    transform, stream = rocketkv(page_size=1, head_topk1=16), make_stream(8, 70, group=group)
    state = feed(transform, stream, [60] + [1] * 10, capacity=60)
    keys, query = to_numpy(transform.read(state)[0]).astype(np.float64), stream.queries[:, :, -1:]
    index = transform.select(state, mx.array(query), k2)
    for head in range(2):
        count = len(held_positions(transform, state)[0][head])
        logits = stream.queries_of(0, head)[:, -1].astype(np.float64) @ keys[0, head, :count].T / 4
        weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        assert chosen_of(state, index, 0, head) == sorted(np.argsort(-weights.mean(axis=0))[:k2].tolist())


@pytest.mark.parametrize("k2", [40, 1000])
def test_all_pages_are_all_rows(k2: int) -> None:
    transform, stream = rocketkv(n_sink=1), make_stream(9, 63, batch=2, group=2)
    state = feed(transform, stream, [60, 1, 1, 1], capacity=70)
    index = transform.select(state, mx.array(stream.queries[:, :, -1:]), k2)
    for row, head in np.ndindex(2, 2):
        assert chosen_of(state, index, row, head) == list(range(len(held_positions(transform, state)[row][head])))


def test_select_before_any_token_names_no_slot() -> None:
    transform, stream = rocketkv(), make_stream(10, 1, group=2)
    state = transform.init_state(stream.spec(20))
    for keep_recent in (0, 3):
        assert (transform.select(state, mx.array(stream.queries), 2, keep_recent) == -1).all().item()


@pytest.mark.parametrize(
    ("field", "wrong"), [("k2", 0), ("k2", -1), ("k2", 2.5), ("keep_recent", -1), ("keep_recent", None)]
)
def test_a_wrong_number_of_pages_or_rows_is_refused(field: str, wrong: Any) -> None:
    transform, stream = rocketkv(), make_stream(10, 1, group=2)
    with pytest.raises(QuantizerConfigError, match=rf"^rocketkv: `{field}` must be an integer >= .*; got "):
        transform.select(transform.init_state(stream.spec(20)), mx.array(stream.queries), **{field: wrong})


def dense(keys: np.ndarray, values: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Attention [Dv] of one query over rows."""
    logits = keys.astype(np.float64) @ query / math.sqrt(len(query))
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum()


def check_attention(transform: Any, stream: Stream, decoded: int, padding: tuple[int, int]) -> None:
    """A token after a prompt and `decoded` tokens attends to the pages that the oracle chooses.

    Of n pages to n / ratio, the newest row's and at least one other.
    """
    group, total = stream.queries.shape[1] // 2, stream.keys.shape[2]
    state = feed(transform, stream, [total - 1 - decoded] + [1] * decoded, total, padding)
    keys, values, queries = parts_of(stream, total - 1, 1)
    held = transform.write(state, keys, values)
    got, (keys, values) = to_numpy(transform.attend(held, queries, 0.25)), map(to_numpy, transform.read(held))
    channels = transform.channels or max(1, round(16 / transform.ratio))
    for row, head in np.ndindex(2, 2):
        count = int((held.position[row, head] >= 0).sum().item())
        asked = to_numpy(queries)[row, head * group : (head + 1) * group, 0]
        shares = page_shares(keys[row, head, :count], asked, transform.page, channels)
        k2 = max(round(len(shares) / transform.ratio), 2)
        seen, gap = chosen_rows(shares, count, transform.page, k2, 1)
        assume(gap > NEAR_TIE)
        for index, query in enumerate(asked):
            want = dense(keys[row, head, seen], values[row, head, seen], query.astype(np.float64))
            np.testing.assert_allclose(got[row, head * group + index, 0], want, rtol=1e-4, atol=1e-5)


@given(seeds(), pages(), st.sampled_from([1, 2, 3]), st.integers(0, 6), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_one_query_attends_to_the_best_pages(
    seed: int, chosen: dict[str, Any], group: int, decoded: int, padding: tuple[int, int]
) -> None:
    stream = make_stream(seed, 60 + decoded, batch=2, value_dim=8, group=group)
    check_attention(rocketkv(**chosen), stream, decoded, padding)


@given(seeds(), st.integers(0, 9), st.sampled_from([8.0, 64.0]), st.sampled_from([1, 2]))
def test_number_of_pages_follows_from_the_rows(seed: int, decoded: int, ratio: float, group: int) -> None:
    """The last page counts however few rows it has."""
    stream = make_stream(seed, 61 + decoded, batch=2, group=group)
    check_attention(rocketkv(compression_ratio=ratio), stream, decoded, (0, 0))


def test_of_equal_pages_the_earlier_ones_are_chosen() -> None:
    stream = make_stream(19, 61, group=2)
    stream = Stream(np.ones_like(stream.keys), stream.values, stream.queries, mx.float32)
    transform = rocketkv(n_sink=1)
    state = feed(transform, stream, [60, 1], capacity=61)
    index = transform.select(state, mx.array(stream.queries[:, :, 60:]), 3)
    assert [chosen_of(state, index, 0, head) for head in range(2)] == [list(range(6))] * 2
    index = transform.select(state, mx.array(stream.queries[:, :, 60:]), 3, 1)
    assert [chosen_of(state, index, 0, head) for head in range(2)] == [[0, 1, 2, 3, 34]] * 2


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_without_a_second_stage_attention_is_dense(group: int, mask: str | None) -> None:
    """A ratio of 2 leaves nothing to skip beside its pages of two rows."""
    transform, stream = rocketkv(compression_ratio=2.0), make_stream(11, 60, value_dim=8, group=group)
    keys, values, queries = parts_of(stream, 59, 1)
    held = transform.write(feed(transform, stream, [50] + [1] * 9, 70), keys, values)
    got, (keys, values) = to_numpy(transform.attend(held, queries, 0.25, mask)), map(to_numpy, transform.read(held))
    for index in range(2 * group):
        head = index // group
        seen = (held.position[0, head] >= 0).tolist()
        want = dense(keys[0, head, seen], values[0, head, seen], stream.queries[0, index, 59].astype(np.float64))
        np.testing.assert_allclose(got[0, index, 0], want, rtol=1e-4, atol=1e-5)


def test_calls_of_several_queries_attend_to_all_rows() -> None:
    transform, stream = rocketkv(compression_ratio=64.0), make_stream(12, 60, group=2)
    state = feed(transform, stream, [50, 1], 70)
    keys, values, queries = parts_of(stream, 51, 9)
    held = transform.write(state, keys, values)
    got = transform.attend(held, queries, 0.25)
    want = mx.fast.scaled_dot_product_attention(
        queries, *transform.read(held), scale=0.25, mask=transform.make_mask(state, 9)
    )
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-4, atol=1e-5)


def test_masked_rows_are_not_attended_to() -> None:
    """A row that the mask hides from all queries of its head takes no page's place."""
    transform, stream = rocketkv(compression_ratio=64.0, page_size=1), make_stream(13, 90, group=2)
    state = feed(transform, stream, [80] + [1] * 9, 100)
    keys, values, queries = parts_of(stream, 89, 1)
    held = transform.write(state, keys, values)
    mask = held.position[:, :1, None] >= 87
    got, (keys, values) = to_numpy(transform.attend(held, queries, 0.25, mask)), map(to_numpy, transform.read(held))
    seen = mask[0, 0, 0].tolist()
    assert sum(seen) == 3
    for index in range(4):
        want = dense(keys[0, index // 2, seen], values[0, index // 2, seen], stream.queries[0, index, 89])
        np.testing.assert_allclose(got[0, index, 0], want, rtol=1e-4, atol=1e-5)


def test_update_shows_all_that_is_held() -> None:
    transform, stream = rocketkv(compression_ratio=64.0), make_stream(14, 41)
    state = feed(transform, stream, [40], 30)
    _, keys, values = transform.update(state, *parts_of(stream, 40, 1))
    for head in range(2):
        held = [*held_positions(transform, state)[0][head], 40]
        assert np.array_equal(to_numpy(keys)[0, head, : len(held)], stream.keys[0, head, held])
        assert np.array_equal(to_numpy(values)[0, head, : len(held)], stream.values[0, head, held])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_attention_keeps_the_dtype(dtype: mx.Dtype) -> None:
    transform, stream = rocketkv(), make_stream(15, 41, dim=64, group=2, dtype=dtype)
    keys, values, queries = parts_of(stream, 40, 1)
    held = transform.write(feed(transform, stream, [40], 30), keys, values)
    out = transform.attend(held, queries, 0.125)
    assert out.dtype == dtype and mx.isfinite(out).all().item()
    assert held.carry.high.dtype == held.carry.low.dtype == dtype


# Numbers and options


@KINDS
@PATTERNS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_bad_key_harms_no_other_sequence(bad: float, group: int | None, pattern: list[int]) -> None:
    clean = make_stream(16, 61, batch=2, group=2)
    keys = clean.keys.copy()
    keys[0, :, 9] = bad
    transform = rocketkv(n_sink=2, obs_window=8)
    outs, states = [], []
    for x in (keys, clean.keys):
        stream = Stream(x, clean.values, clean.queries if group else None, mx.float32)
        states.append(feed(transform, stream, pattern, 70))
        held = transform.write(states[-1], *parts_of(stream, 60, 1)[:2])
        outs.append(transform.attend(held, mx.array(clean.queries[:, :, 60:]), 0.25))
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in states))
    assert mx.array_equal(outs[0][1:], outs[1][1:])
    assert mx.isfinite(states[0].memory).all().item()
    for held, good in zip(*(held_positions(transform, state)[0] for state in states)):
        assert held[:2] == [0, 1] and len(held) == len(good)


@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio"),
        ({"compression_ratio": 0.5}, "compression_ratio"),
        ({"compression_ratio": -8}, "compression_ratio"),
        ({"compression_ratio": math.nan}, "compression_ratio"),
        ({"compression_ratio": math.inf}, "compression_ratio"),
        ({"compression_ratio": "8"}, "compression_ratio"),
        ({"compression_ratio": None}, "compression_ratio"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -1}, "page_size"),
        ({"page_size": 2.0}, "page_size"),
        ({"head_topk1": 0}, "head_topk1"),
        ({"head_topk1": 1.5}, "head_topk1"),
        ({"head_topk1": "all"}, "head_topk1"),
        ({"obs_window": 0}, "obs_window"),
        ({"obs_window": 1.5}, "obs_window"),
        ({"obs_window": None}, "obs_window"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": "4"}, "n_sink"),
        ({"pool_kernel": 0}, "pool_kernel"),
        ({"pool_kernel": 4}, "pool_kernel"),
        ({"pool_kernel": 5.0}, "pool_kernel"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^rocketkv: .*`{field}`.*; got "):
        rocketkv(**chosen)


@pytest.mark.parametrize(("head_topk1", "dim", "fits"), [(16, 16, True), (17, 16, False), (64, 48, False)], ids=str)
def test_refuses_more_channels_than_a_head_has(head_topk1: int, dim: int, fits: bool) -> None:
    transform, spec = rocketkv(head_topk1=head_topk1), make_stream(18, 1, dim=dim).spec()
    if fits:
        transform.init_state(spec)
        return
    with pytest.raises(QuantizerConfigError, match=r"^rocketkv: `head_topk1` .*; got "):
        transform.init_state(spec)


def test_takes_whole_numbers_for_a_ratio() -> None:
    build: Callable[..., Any] = rocketkv
    assert build(compression_ratio=8) == build(compression_ratio=8.0)
