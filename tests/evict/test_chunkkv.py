"""ChunkKV: whole chunks stay or go by their mean score, and a layer may take over what another one chose."""

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
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, h2o, knorm, rows
from vq_functional.core.jit import jit
from vq_functional.evict.chunkkv import chunkkv, chunkkv_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
SCORES = pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
PATTERNS = pytest.mark.parametrize("pattern", [[80], [1] * 80, [50, 1, 1, 28]], ids=["once", "decode", "chunks"])


class ChunkKVHead(H2OHead):
    """Chunks of `chunk_size` positions behind the sinks; the best `places` complete ones stay, and the unfinished one.

    Chunks that a span touches and the `pin_chunks` newest complete ones come first.
    """

    def __init__(
        self,
        budget: int,
        chunk_size: int,
        n_sink: int = 4,
        score: str = "attn_mass",
        pin_chunks: int | None = None,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, 0, 1.0, protect)
        self.chunk_size, self.by_norm, self.pin_chunks = chunk_size, score == "key_norm", pin_chunks

    def chunk(self, position: int) -> int:
        """Number of the chunk of a position behind the sinks."""
        return (position - self.n_sink) // self.chunk_size

    @property
    def places(self) -> int:
        return (self.budget - self.n_sink - (self.chunk_size - 1)) // self.chunk_size

    @property
    def pinned(self) -> int:
        if self.pin_chunks is not None:
            return self.pin_chunks
        return min(-(-32 // self.chunk_size), self.places - 1)

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        if self.by_norm:
            self.scores |= {i: float(np.linalg.norm(self.keys[i])) for i in new}
            self.keep(shown, self.scores)
        else:
            super().settle(shown, new, queries)

    def keep(self, shown: list[int], priority: dict[int, float]) -> None:
        closed = max(self.offset - self.n_sink, 0) // self.chunk_size
        chunks = sorted({self.chunk(i) for i in shown if i >= self.n_sink} - {closed})
        if self.offset > self.budget and len(chunks) > self.places:
            chunks = self.best(chunks, priority)
        kept = {*chunks, closed}
        self.held = [i for i in shown if i < self.n_sink or self.chunk(i) in kept]
        self.scores = {i: self.scores[i] for i in self.held}

    def best(self, chunks: list[int], priority: dict[int, float]) -> list[int]:
        """Of the complete chunks those that stay."""
        mean = {x: sum(priority[i] for i in self.positions(x)) / self.chunk_size for x in chunks}
        newest = chunks[len(chunks) - self.pinned :] if self.pinned else []
        spared = [x for x in chunks if any(start < end for start, end in self.overlaps(x))]
        first = spared + [x for x in newest if x not in spared][::-1]
        rest = sorted((x for x in chunks if x not in first), key=lambda x: (mean[x], x), reverse=True)
        room = self.places - len(first)
        if 0 < room < len(rest):
            low, high = mean[rest[room]], mean[rest[room - 1]]
            self.margin = min(self.margin, (high - low) / max(abs(high), abs(low), 1e-30))
        return (first + rest)[: self.places]

    def positions(self, chunk: int) -> range:
        start = self.n_sink + chunk * self.chunk_size
        return range(start, start + self.chunk_size)

    def overlaps(self, chunk: int) -> list[tuple[int, int]]:
        """What each span has in common with a chunk; empty where start >= end."""
        own = self.positions(chunk)
        return [(max(start, own.start), min(end, own.stop)) for start, end in self.protect]


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(lambda: ChunkKVHead(**chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(chunkkv(**chosen), told, stream, calls)
    return margin > NEAR_TIE


def rows_after(tokens: int, budget: int, chunk_size: int, n_sink: int, **_: Any) -> int:
    """Rows held after so many tokens."""
    if tokens <= budget:
        return tokens
    places = (budget - n_sink - (chunk_size - 1)) // chunk_size
    closed, unfinished = divmod(max(tokens - n_sink, 0), chunk_size)
    return min(tokens, n_sink) + chunk_size * min(places, closed) + unfinished


@st.composite
def options(draw: st.DrawFn, scores: Sequence[str] = ("attn_mass", "key_norm"), spare: int = 12) -> dict[str, Any]:
    """Any options that fit; pins may be more than there are places."""
    chunk_size, n_sink = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    budget = n_sink + 2 * chunk_size - 1 + draw(st.integers(0, spare))
    places = (budget - n_sink - (chunk_size - 1)) // chunk_size
    return {
        "budget": budget,
        "chunk_size": chunk_size,
        "n_sink": n_sink,
        "score": draw(st.sampled_from(scores)),
        "pin_chunks": draw(st.sampled_from([None, 0, *range(1, places + 2)])),
    }


# Against the oracle


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_scores(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
@SCORES
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None, score: str) -> None:
    stream = make_stream(0, 90, dim=64, group=group, dtype=dtype)
    chosen = {"budget": 30, "chunk_size": 4, "n_sink": 2, "score": score, "pin_chunks": 2}
    assert agrees(stream, plain_calls([40, 1, 1, 9] + [1] * 39, 1), **chosen)


@given(seeds(), options(), right_padded(2, longest=14), GROUPS)
def test_right_padding_is_no_row_and_gives_no_mass(
    seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None
) -> None:
    assume(agrees(make_stream(seed, 90, batch=2, group=group), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_is_no_row_and_gives_no_mass(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2, group=group), calls, **chosen))


@KINDS
def test_padding_shifts_no_chunk(group: int | None) -> None:
    """Rows of one batch whose chunks close at different steps."""
    stream = make_stream(1, 80, batch=2, group=group)
    chosen = {"budget": 22, "chunk_size": 5, "n_sink": 2, "pin_chunks": 1}
    for calls in (left_padded_calls([53] + [1] * 27, (0, 3)), [Call(40, (40, 31)), Call(9, (0, 9)), Call(1, (1, 1))]):
        assert agrees(stream, calls, **chosen)


def test_slots_of_a_chunk_that_went_hold_no_broken_row() -> None:
    """They wait for single tokens, one after the other, and are seen through the mask until then."""
    transform, stream = chunkkv(budget=24, n_sink=0, chunk_size=4, score="key_norm", pin_chunks=0), make_stream(9, 60)
    stream.keys[:, :, 41] = stream.values[:, :, 41] = np.nan
    state = transform.init_state(stream.spec())
    for token in range(60):
        state = resume(transform, state, stream, [1], token)
        empty = (state.position < 0)[..., None]
        assert all(mx.isfinite(mx.where(empty, x, 0)).all().item() for x in transform.read(state))


# Spans


@given(seeds(), options(spare=4), st.data(), cuts(30), GROUPS)
def test_a_span_keeps_every_chunk_that_it_touches(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    size, sinks, total = chosen["chunk_size"], chosen["n_sink"], sum(pattern)
    protect = data.draw(spans(5, first=0, last=30))
    touched = {(i - sinks) // size for start, end in protect for i in range(start, end) if i >= sinks}
    chosen = chosen | {"budget": chosen["budget"] + len(touched) * size, "protect": protect}
    stream, transform = make_stream(seed, total, group=group), chunkkv(**chosen)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen))
    whole = {sinks + chunk * size + i for chunk in touched for i in range(size)}
    for held in held_positions(transform, feed(transform, stream, pattern))[0]:
        assert {i for i in whole if i < total} <= set(held)
        assert len(held) == rows_after(total, **chosen)


def test_spans_leave_the_least_budget_one_free_chunk() -> None:
    """Two touched chunks of four: 2 + 2 * 4 + 4 + 3 rows."""
    transform = chunkkv(budget=17, chunk_size=4, n_sink=2, pin_chunks=0, protect=[(9, 11)])
    held = held_positions(transform, feed(transform, make_stream(2, 60), [30] + [1] * 30))
    for head in held[0]:
        assert {0, 1, *range(6, 14), 58, 59} <= set(head) and len(head) == 2 + 8 + 4 + 2
    with pytest.raises(QuantizerConfigError, match="budget"):
        chunkkv(budget=16, chunk_size=4, n_sink=2, pin_chunks=0, protect=[(9, 11)])


def test_long_spans_are_counted_and_not_walked_through() -> None:
    """With a share of the prompt a span may be as long as it likes."""
    policy = chunkkv_policy(budget=0.5, n_sink=4, chunk_size=8, protect=[(0, 10**9), (10**9 + 1, 10**9 + 4)])
    assert policy.shielded == 4 + (2 + 10**9 // 8) * 8 - 2


@KINDS
def test_spans_and_pins_never_take_more_than_the_places(group: int | None) -> None:
    transform = chunkkv(budget=30, chunk_size=4, n_sink=2, protect=[(3, 11)])
    stream, spared = make_stream(3, 90, group=group), {*range(2, 14)}
    state = transform.init_state(stream.spec())
    for token in range(90):
        state = resume(transform, state, stream, [1], token)
        for held in held_positions(transform, state)[0]:
            assert len(held) == rows_after(token + 1, 30, 4, 2)
            assert {i for i in spared if i <= token} <= set(held)


# The paper's rule


def softmax(voter: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Attention of `voter` [D] to `keys` [N, D]."""
    weights = np.exp(keys @ voter / np.sqrt(len(voter)))
    return weights / weights.sum()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("budget", "size", "n_sink"), [(32, 8, 4), (27, 10, 0), (60, 8, 4)])
def test_one_call_keeps_the_chunks_with_the_most_attention(budget: int, size: int, n_sink: int, group: int) -> None:
    total = n_sink + 12 * size + 3
    stream = make_stream(4, total, dim=32, group=group)
    transform = chunkkv(budget=budget, chunk_size=size, n_sink=n_sink, pin_chunks=0)
    held = held_positions(transform, feed(transform, stream, [total]))
    for head in range(2):
        keys, mass = stream.keys[0, head].astype(np.float64), np.zeros(total)
        for query in stream.queries_of(0, head).astype(np.float64):
            for token in range(total):
                mass[: token + 1] += softmax(query[token], keys[: token + 1])
        means = mass[n_sink : n_sink + 12 * size].reshape(12, size).mean(axis=1)
        best = np.argsort(-means)[: (budget - n_sink - (size - 1)) // size]
        chosen = [n_sink + chunk * size + i for chunk in best.tolist() for i in range(size)]
        assert held[0][head] == sorted([*range(n_sink), *chosen, *range(total - 3, total)])


# Whole chunks and counts


@given(seeds(), options(), cuts(20), GROUPS)
def test_chunks_stay_or_go_whole(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total, size, sinks = chunkkv(**chosen), sum(pattern), chosen["chunk_size"], chosen["n_sink"]
    stream, start = make_stream(seed, total, batch=2, heads=3, group=group), 0
    state = transform.init_state(stream.spec())
    for n in pattern:
        state, start = resume(transform, state, stream, [n], start), start + n
        closed = max(start - sinks, 0) // size
        for held in (head for row in held_positions(transform, state) for head in row):
            assert len(held) == rows_after(start, **chosen) <= max(chosen["budget"], 0)
            assert {*range(min(sinks, start)), *range(min(sinks + closed * size, start), start)} <= set(held)
            chunks = [(i - sinks) // size for i in held if sinks <= i < sinks + closed * size]
            assert all(chunks.count(chunk) == size for chunk in chunks)


@pytest.mark.parametrize(("budget", "places"), [(19, 1), (26, 1), (27, 2), (34, 2), (35, 3)])
def test_rows_saw_between_whole_numbers_of_chunks(budget: int, places: int) -> None:
    """Chunks of eight behind four sinks: a chunk goes at each step that closes one."""
    transform, stream = chunkkv(budget=budget), make_stream(5, 100, heads=1)
    state = transform.init_state(stream.spec())
    for token in range(100):
        state = resume(transform, state, stream, [1], token)
        count = token + 1 if token < budget else 4 + 8 * places + (token + 1 - 4) % 8
        assert len(held_positions(transform, state)[0][0]) == count


@given(seeds(), options(), cuts(9), GROUPS)
def test_up_to_the_budget_it_is_a_plain_cache(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    transform, plain = chunkkv(**chosen | {"budget": max(chosen["budget"], total)}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@SCORES
def test_a_single_place_rotates(score: str) -> None:
    """One chunk beside sinks and the unfinished one, and no pins: the better of two stays each time."""
    chosen = {"budget": 11, "chunk_size": 4, "n_sink": 4, "score": score, "pin_chunks": 0}
    assert agrees(make_stream(6, 60, dim=64), plain_calls([20] + [1] * 40, 1), **chosen)
    transform = chunkkv(**chosen | {"pin_chunks": 0})
    for held in held_positions(transform, feed(transform, make_stream(6, 60, dim=64), [20] + [1] * 40))[0]:
        assert held[:4] == [0, 1, 2, 3] and len(held) == 8


@SCORES
@PATTERNS
def test_newest_complete_chunks_are_pinned(score: str, pattern: list[int]) -> None:
    transform = chunkkv(budget=39, chunk_size=4, n_sink=2, score=score, pin_chunks=3)
    for held in held_positions(transform, feed(transform, make_stream(7, 80), pattern))[0]:
        assert set(range(66, 80)) <= set(held)


@PATTERNS
@pytest.mark.parametrize(
    ("budget", "size", "newest"),
    [(512, 8, 32), (80, 10, 40), (59, 8, 32), (43, 8, 24), (35, 8, 16), (19, 8, 0), (70, 1, 32), (9, 1, 4)],
)
def test_pins_by_default(budget: int, size: int, newest: int, pattern: list[int]) -> None:
    """Chunks of the newest 32 tokens, rounded up, as long as another chunk can stay."""
    transform = chunkkv(budget=budget, chunk_size=size)
    closed = 4 + (80 - 4) // size * size
    for held in held_positions(transform, feed(transform, make_stream(8, 80), pattern))[0]:
        assert set(range(closed - newest, 80)) <= set(held)
        assert {0, 1, 2, 3} <= set(held)


def test_without_pins_standing_in_keys_keep_the_chunks_of_the_beginning() -> None:
    """A chunk that is judged as soon as it is complete has had no time to gather mass."""
    stream, chosen = make_stream(9, 100), {"budget": 27, "chunk_size": 4, "n_sink": 4}
    free, pinned = chunkkv(**chosen, pin_chunks=0), chunkkv(**chosen)
    for held in held_positions(free, feed(free, stream, [1] * 100))[0]:
        assert sum(i >= 27 for i in held) < 12
    for held in held_positions(pinned, feed(pinned, stream, [1] * 100))[0]:
        assert sum(i >= 84 for i in held) == 16


# Cuts and ties


@given(seeds(), options(scores=("key_norm",)), cuts(20), st.sampled_from([mx.float32, mx.float16]))
def test_any_cut_gives_the_same_rows_by_norm(
    seed: int, chosen: dict[str, Any], pattern: list[int], dtype: mx.Dtype
) -> None:
    total = sum(pattern)
    stream, transform = make_stream(seed, total, dtype=dtype), chunkkv(**chosen)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    assert equal(held_rows(transform, states[0]), held_rows(transform, states[1]))
    assert equal(held_rows(transform, states[0]), held_rows(transform, states[2]))
    memories = [transform.ordered(state).memory[..., : chosen["budget"]] for state in states]
    assert mx.array_equal(memories[0], memories[1]) and mx.array_equal(memories[0], memories[2])


@given(seeds(), options(scores=("attn_mass",)), cuts(9), st.sampled_from([None, 2]))
def test_cuts_before_any_eviction_change_no_mass(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    transform = chunkkv(**chosen | {"budget": max(chosen["budget"], total)})
    stream = make_stream(seed, total, group=group)
    mass = [to_numpy(transform.ordered(feed(transform, stream, how)).memory) for how in (pattern, [total])]
    np.testing.assert_allclose(mass[0], mass[1], atol=1e-5)
    np.testing.assert_allclose(mass[0].sum(axis=-1), total, rtol=1e-5)


@PATTERNS
def test_of_equal_chunks_the_later_ones_stay(pattern: list[int]) -> None:
    stream = make_stream(10, 80)
    stream = Stream(np.ones_like(stream.keys), stream.values, None, mx.float32)
    transform = chunkkv(budget=17, chunk_size=4, n_sink=2, score="key_norm", pin_chunks=0)
    want = [0, 1, *range(66, 80)]
    assert held_positions(transform, feed(transform, stream, pattern)) == [[want] * 2]


@KINDS
def test_a_chunk_counts_as_the_mean_of_its_rows(group: int | None) -> None:
    """One large key among small ones does not carry its chunk past one of medium keys."""
    stream = make_stream(11, 24, dim=8, group=group)
    size = np.array([1.0] * 8 + [9.0, 1.0, 1.0, 1.0] + [4.0] * 4 + [1.0] * 8, np.float32)
    stream.keys[...] = 0
    stream.keys[..., 0] = size
    transform = chunkkv(budget=7, chunk_size=4, n_sink=0, score="key_norm", pin_chunks=0)
    assert held_positions(transform, feed(transform, stream, [23])) == [[[12, 13, 14, 15, 20, 21, 22]] * 2]


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e3])
def test_norms_of_zero_tiny_and_large_keys(size: float) -> None:
    stream = make_stream(12, 60, dtype=mx.float16)
    stream.keys[:, :, 20:40] *= size
    stream.keys[...] = stream.keys.astype(np.float16)
    chosen = {"budget": 30, "chunk_size": 4, "n_sink": 2, "score": "key_norm", "pin_chunks": 1}
    told, _ = expect(lambda: ChunkKVHead(**chosen), stream, plain_calls([40] + [1] * 20, 1))
    compare(chunkkv(**chosen), told, stream, plain_calls([40] + [1] * 20, 1))


# Reductions


@given(seeds(), st.integers(1, 16), st.integers(0, 3), cuts(30), GROUPS)
def test_chunks_of_one_token_are_h2o(seed: int, free: int, n_sink: int, pattern: list[int], group: int | None) -> None:
    stream = make_stream(seed, sum(pattern), batch=2, group=group)
    one = chunkkv(budget=n_sink + free, chunk_size=1, n_sink=n_sink, pin_chunks=0)
    other = h2o(budget=n_sink + free, n_sink=n_sink, grace=0, decay=1.0)
    states = [transform.ordered(feed(transform, stream, pattern)) for transform in (one, other)]
    assert equal(held_rows(one, states[0]), held_rows(other, states[1]))
    assert mx.array_equal(states[0].memory, states[1].memory)


@given(seeds(), st.integers(1, 16), st.integers(0, 3), cuts(30), st.sampled_from([mx.float32, mx.bfloat16]))
def test_norms_of_chunks_of_one_token_are_knorm(
    seed: int, free: int, n_sink: int, pattern: list[int], dtype: mx.Dtype
) -> None:
    stream = make_stream(seed, sum(pattern), batch=2, dtype=dtype)
    one = chunkkv(budget=n_sink + free, chunk_size=1, n_sink=n_sink, score="key_norm", pin_chunks=0)
    other = knorm(budget=n_sink + free, n_sink=n_sink, recent=0, keep="high")
    states = [transform.ordered(feed(transform, stream, pattern)) for transform in (one, other)]
    assert equal(held_rows(one, states[0]), held_rows(other, states[1]))
    np.testing.assert_allclose(to_numpy(states[0].memory), to_numpy(states[1].memory), rtol=1e-6)


# Layers that take over the choice of another


def block(layers: int, reuse_layers: int, **chosen: Any) -> list[Any]:
    """Transforms of so many layers."""
    return [chunkkv(**chosen, reuse_layers=reuse_layers, layer=layer) for layer in range(layers)]


def feed_block(
    transforms: Sequence[Any], streams: Sequence[Stream], pattern: Sequence[int], check: Callable[..., None]
) -> list[Any]:
    """States of layers that run one after the other in each call."""
    states, start = [x.init_state(stream.spec()) for x, stream in zip(transforms, streams)], 0
    for n in pattern:
        group = None
        for layer, (transform, stream) in enumerate(zip(transforms, streams)):
            states[layer], group, *_ = transform.update_in(states[layer], group, *parts_of(stream, start, n))
        check(states, start + n)
        start += n
    return states


@given(seeds(), options(), cuts(30), st.sampled_from([None, 2]))
def test_followers_hold_their_own_rows_at_the_positions_of_the_leader(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    streams = [make_stream(seed + layer, sum(pattern), batch=2, group=group) for layer in range(3)]
    transforms = block(3, 3, **chosen)

    def check(states: list[Any], _: int) -> None:
        held = [held_rows(transform, state) for transform, state in zip(transforms, states)]
        for (position, keys, values), stream in zip(held, streams):
            assert mx.array_equal(position, held[0][0])
            index = to_numpy(position).astype(int)[..., None]
            assert np.array_equal(to_numpy(keys), np.take_along_axis(stream.keys, index, axis=2))
            assert np.array_equal(to_numpy(values), np.take_along_axis(stream.values, index, axis=2))

    states = feed_block(transforms, streams, pattern, check)
    alone = chunkkv(**chosen)
    assert equal(held_rows(alone, feed(alone, streams[0], pattern)), held_rows(transforms[0], states[0]))


@KINDS
def test_blocks_follow_their_own_leaders(group: int | None) -> None:
    streams = [make_stream(20 + layer, 70, group=group) for layer in range(5)]
    transforms = block(5, 2, budget=21, chunk_size=3, n_sink=1, score="key_norm", pin_chunks=1)
    assert [x.leads for x in transforms] == [True, False, True, False, True]
    assert [x.leader for x in transforms] == [None, 0, None, 2, None]

    def check(states: list[Any], tokens: int) -> None:
        held = [held_positions(transform, state) for transform, state in zip(transforms, states)]
        assert held[1] == held[0] and held[3] == held[2]
        assert tokens < 60 or (held[0] != held[2] and held[2] != held[4])

    feed_block(transforms, streams, [30, 1, 1, 1, 27, *[1] * 10], check)


@given(seeds(), options(), cuts(20), st.sampled_from([None, 2]))
def test_blocks_of_one_layer_are_independent(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    streams = [make_stream(seed + layer, sum(pattern), group=group) for layer in range(2)]
    transforms, alone = block(2, 1, **chosen), chunkkv(**chosen)
    assert not any(x.leads or x.in_group for x in transforms)
    states = feed_block(transforms, streams, pattern, lambda *_: None)
    for stream, state in zip(streams, states):
        assert same(state, feed(alone, stream, pattern))


def test_a_follower_needs_what_its_leader_chose() -> None:
    leader, follower = block(2, 2, budget=21, chunk_size=3, n_sink=1)
    stream = make_stream(13, 40)
    state = follower.init_state(stream.spec())
    for n in (1, 30):
        with pytest.raises(RuntimeError, match=r"^chunkkv: "):
            follower.update_in(state, None, *parts_of(stream, 0, n))
        with pytest.raises(RuntimeError, match=r"^chunkkv: "):
            follower.update(state, *parts_of(stream, 0, n))
    feed(leader, stream, [30, 1])


def test_compiled_steps_of_a_block() -> None:
    transforms = block(2, 2, budget=21, chunk_size=3, n_sink=1, pin_chunks=1)
    streams = [make_stream(30 + layer, 60, batch=2, group=2) for layer in range(2)]
    states = feed_block(transforms, streams, [25], lambda *_: None)
    again = [*states]
    steps = [jit(transform.update_in) for transform in transforms]
    for token in range(25, 60):
        group = other = None
        for layer, (transform, stream) in enumerate(zip(transforms, streams)):
            inputs = parts_of(stream, token, 1)
            states[layer], group, *_ = transform.update_in(states[layer], group, *inputs)
            again[layer], other, *_ = steps[layer](again[layer], other, *inputs)
    for transform, one, two in zip(transforms, states, again):
        assert equal(held_rows(transform, one), held_rows(transform, two))


# Numbers that are none


@SCORES
@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_key_that_is_no_number_breaks_no_chunk(score: str, group: int | None, bad: float) -> None:
    chosen = {"budget": 30, "chunk_size": 4, "n_sink": 2, "score": score, "pin_chunks": 1}
    stream, transform = make_stream(14, 80, batch=2, group=group), chunkkv(**chosen)
    clean = held_rows(transform, feed(transform, stream.rows([1]), [50] + [1] * 30))
    stream.keys[0, 0, 20, 5] = bad
    state = feed(transform, stream, [50] + [1] * 30)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == rows_after(80, 30, 4, 2)
        chunks = [(i - 2) // 4 for i in held if 2 <= i < 78]
        assert {0, 1, 78, 79} <= set(held) and all(chunks.count(chunk) == 4 for chunk in chunks)
    assert equal([x[1:] for x in held_rows(transform, state)], clean)


# Options


@pytest.mark.parametrize("build", [chunkkv, chunkkv_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 18}, "budget"),
        ({"budget": 8, "chunk_size": 16, "n_sink": 0}, "budget"),
        ({"budget": 20, "chunk_size": 16}, "budget"),
        ({"budget": 4, "chunk_size": 1}, "budget"),
        ({"budget": 26, "protect": [(30, 31)]}, "budget"),
        ({"budget": 34, "protect": [(30, 38)]}, "budget"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": -1}, "chunk_size"),
        ({"chunk_size": 8.0}, "chunk_size"),
        ({"chunk_size": True}, "chunk_size"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"score": "mass"}, "score"),
        ({"score": None}, "score"),
        ({"reuse_layers": 0}, "reuse_layers"),
        ({"reuse_layers": 1.5}, "reuse_layers"),
        ({"layer": -1}, "layer"),
        ({"layer": None}, "layer"),
        ({"pin_chunks": -1}, "pin_chunks"),
        ({"pin_chunks": 0.5}, "pin_chunks"),
        ({"pin_chunks": True}, "pin_chunks"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^chunkkv: .*`{field}`.*; got "):
        build(**chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        {"budget": 19},
        {"budget": 27, "protect": [(30, 31)]},
        {"budget": 35, "protect": [(30, 38)]},
        {"budget": 19, "protect": [(0, 4)]},
        {"budget": 5, "chunk_size": 1},
        {"budget": 1, "chunk_size": 1, "n_sink": 0},
        {"budget": 31, "chunk_size": 16, "n_sink": 0},
    ],
    ids=str,
)
def test_smallest_budgets(chosen: dict[str, Any]) -> None:
    transform = chunkkv(**chosen)
    state = feed(transform, make_stream(15, 60), [40] + [1] * 20)
    full = {"chunk_size": 8, "n_sink": 4} | chosen
    for held in held_positions(transform, state)[0]:
        assert len(held) == rows_after(60, **full)
