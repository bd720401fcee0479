"""The evicting methods with plain loops in float64, one head of one sequence at a time, and what compares with them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from vq_functional import KVSpec, Transform
from vq_functional.core.tree import flatten

NEAR_TIE = 1e-5  # relative: closer priorities may change places in float32


class Head:
    """One KV head: the keys of all tokens, the positions held, and their scores."""

    latest = True  # of equal priorities the later position stays
    stride: int | None = None  # without queries, keys settle so many at a time

    def __init__(self, budget: int, n_sink: int = 0, recent: int = 0, protect: Sequence[tuple[int, int]] = ()) -> None:
        self.budget, self.n_sink, self.recent, self.protect = budget, n_sink, recent, protect
        self.keys: list[np.ndarray] = []
        self.held: list[int] = []
        self.scores: dict[int, float] = {}
        self.margin = math.inf  # smallest relative gap between a kept and a dropped row so far

    @property
    def offset(self) -> int:
        return len(self.keys)

    def call(self, keys: np.ndarray, queries: np.ndarray | None = None) -> list[int]:
        """Take in `keys` [S, D] and settle by `queries` [G, S, D]; returns the positions shown to this call."""
        shown = self.held + list(range(self.offset, self.offset + len(keys)))
        size = self.stride if self.stride and queries is None else max(len(keys), 1)
        for start in range(0, len(keys), size):
            self._settle_some(keys[start : start + size], queries)
        return shown

    def _settle_some(self, keys: np.ndarray, queries: np.ndarray | None) -> None:
        new = list(range(self.offset, self.offset + len(keys)))
        self.keys += [key.astype(np.float64) for key in keys]
        self.scores |= dict.fromkeys(new, 0.0)
        self.settle(self.held + new, new, queries)

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        """Score the rows `shown` and call `keep`."""
        raise TypeError(f"{type(self).__name__} does not settle")

    def protected(self, position: int) -> bool:
        spans = any(start <= position < end for start, end in self.protect)
        return spans or position < self.n_sink or position >= self.offset - self.recent

    def attention(self, query: np.ndarray, seen: list[int]) -> dict[int, float]:
        """Softmax over the rows `seen`, by position."""
        logits = [float(query.astype(np.float64) @ self.keys[i]) / math.sqrt(len(query)) for i in seen]
        weights = [math.exp(x - max(logits)) for x in logits]
        total = sum(weights)
        return {i: weight / total for i, weight in zip(seen, weights)}

    def keep(self, shown: list[int], priority: dict[int, float]) -> None:
        """Hold the protected rows, and of the others those of highest priority, up to the budget."""
        safe = [i for i in shown if self.protected(i)]
        rest = [i for i in shown if not self.protected(i)]
        rest.sort(key=lambda i: (priority[i], i if self.latest else -i), reverse=True)
        room = self.budget - len(safe)
        if 0 < room < len(rest):
            low, high = priority[rest[room]], priority[rest[room - 1]]
            self.margin = min(self.margin, (high - low) / max(abs(high), abs(low), 1e-30))
        self.held = sorted(safe + rest[:room])
        self.scores = {i: self.scores[i] for i in self.held}


class StreamingLLMHead(Head):
    """The first `n_sink` positions and the `window` newest ones; protected positions come on top."""

    def __init__(self, n_sink: int, window: int, protect: Sequence[tuple[int, int]] = ()) -> None:
        extra = {i for start, end in protect for i in range(max(start, n_sink), end)}
        super().__init__(n_sink + window + len(extra), n_sink, 0, protect)

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        self.keep(shown, {i: float(i) for i in shown})


class H2OHead(Head):
    """Attention mass: old mass times `decay`, then what the new token gives."""

    stride = 56

    def __init__(
        self, budget: int, n_sink: int, grace: int, decay: float, protect: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().__init__(budget, n_sink, grace, protect)
        self.decay = decay

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        for step, token in enumerate(new):
            for i in shown:
                self.scores[i] *= self.decay
            if queries is None and token == 0:
                self.scores[0] += 1.0
            voters = [self.keys[token]] if queries is None else list(queries[:, step])
            seen = [i for i in shown if i < token or (i == token and queries is not None)]
            for voter in voters if seen else []:
                for i, weight in self.attention(voter, seen).items():
                    self.scores[i] += weight / len(voters)
        self.keep(shown, self.scores)


class SnapKVHead(Head):
    """Votes of the observation window when a prompt comes; single tokens are appended."""

    latest = False

    def __init__(
        self,
        budget: int,
        obs_window: int,
        n_sink: int = 0,
        pool_kernel: int | None = None,
        force_window: bool | None = None,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, 0, protect)
        self.obs_window, self.pool_kernel, self.force_window = obs_window, pool_kernel, force_window

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        if len(new) == 1:
            self.held = shown
            return
        proxy = queries is None
        self.scores = self._votes_of_keys(shown) if proxy else self._votes_of_queries(shown, new, queries)
        forced = not proxy if self.force_window is None else self.force_window
        self.recent = self.obs_window if forced else 0
        kernel = (1 if proxy else 5) if self.pool_kernel is None else self.pool_kernel
        outside = [0.0 if i >= self.offset - self.recent else self.scores[i] for i in shown]
        pooled = {}
        for place, i in enumerate(shown):
            near = range(place - kernel // 2, place + kernel // 2 + 1)
            pooled[i] = sum(outside[j] for j in near if 0 <= j < len(shown)) / kernel
        self.keep(shown, pooled)

    def _votes_of_keys(self, shown: list[int]) -> dict[int, float]:
        observers = shown[-self.obs_window :]
        votes = dict.fromkeys(shown, 0.0)
        for observer in observers:
            for i, weight in self.attention(self.keys[observer], shown).items():
                votes[i] += weight / len(observers)
        return votes

    def _votes_of_queries(self, shown: list[int], new: list[int], queries: np.ndarray) -> dict[int, float]:
        voters = list(enumerate(new))[-self.obs_window :]
        votes = dict.fromkeys(shown, 0.0)
        for step, token in voters:
            for query in queries[:, step]:
                for i, weight in self.attention(query, [i for i in shown if i <= token]).items():
                    votes[i] += weight / len(queries) / len(voters)
        share = len(voters) / self.obs_window if self.offset > len(new) else 1.0
        return {i: share * votes[i] + (1 - share) * self.scores[i] for i in shown}


@dataclass(frozen=True)
class Stream:
    """Tokens of a whole test: `keys` [B, H, T, D], `values` [B, H, T, Dv], `queries` [B, H*G, T, D] or None."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray | None
    dtype: mx.Dtype

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    def queries_of(self, row: int, head: int) -> np.ndarray | None:
        """Queries [G, T, D] of one KV head."""
        if self.queries is None:
            return None
        group = self.queries.shape[1] // self.heads
        return self.queries[row, head * group : (head + 1) * group]

    def spec(self, capacity: int = 1) -> KVSpec:
        return KVSpec(
            batch=self.batch,
            kv_heads=self.heads,
            key_dim=self.keys.shape[3],
            value_dim=self.values.shape[3],
            dtype=self.dtype,
            capacity=capacity,
        )

    def rows(self, index: Sequence[int]) -> "Stream":
        """The batch rows `index`."""
        picked = [None if x is None else x[list(index)] for x in (self.keys, self.values, self.queries)]
        return Stream(*picked, self.dtype)


def make_stream(
    seed: int,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    group: int | None = None,
    dtype: mx.Dtype = mx.float32,
    exact: bool = False,
) -> Stream:
    """Standard normals, rounded to `dtype`; with `group` also queries, so many a KV head.

    `exact` rounds them to sixteenths: float32 holds sums of their products, in whatever order they are added.
    """
    random = np.random.default_rng(seed)

    def normal(heads: int, dim: int) -> np.ndarray:
        x = random.standard_normal((batch, heads, tokens, dim), np.float32)
        return to_numpy(mx.array(np.round(16 * x) / 16 if exact else x).astype(dtype))

    keys, values = normal(heads, dim), normal(heads, value_dim or dim)
    return Stream(keys, values, normal(heads * group, dim) if group else None, dtype)


@dataclass(frozen=True)
class Call:
    """One call: `width` columns, of which `counts[b]` are tokens of batch row b; the rest is padding on one side."""

    width: int
    counts: tuple[int, ...]
    left: bool = False

    @property
    def padded(self) -> bool:
        return any(count < self.width for count in self.counts)


def plain_calls(cuts: Sequence[int], batch: int) -> list[Call]:
    """Calls of `cuts` tokens each, without padding."""
    return [Call(n, (n,) * batch) for n in cuts]


def left_padded_calls(cuts: Sequence[int], padding: Sequence[int]) -> list[Call]:
    """Calls of `cuts` columns; in row b the first `padding[b]` of all columns are padding."""
    calls, start = [], 0
    for n in cuts:
        calls.append(Call(n, tuple(n - min(max(pad - start, 0), n) for pad in padding), left=True))
        start += n
    return calls


def chunks(x: np.ndarray | None, calls: Sequence[Call], dtype: mx.Dtype) -> Iterator[mx.array | None]:
    """What each call hands over of `x` [B, H, T, D]; padding is large, so that a leak shows."""
    starts = [0] * len(calls[0].counts)
    for call in calls:
        if x is None:
            yield None
            continue
        out = np.full((*x.shape[:2], call.width, x.shape[3]), 100.0, np.float32)
        for row, count in enumerate(call.counts):
            place = slice(call.width - count, None) if call.left else slice(0, count)
            out[row, :, place] = x[row, :, starts[row] : starts[row] + count]
            starts[row] += count
        yield mx.array(out).astype(dtype)


@dataclass
class Expected:
    """What one head should show and hold after one call."""

    shown: list[int]
    held: list[int]
    scores: list[float]
    offset: int


Told: TypeAlias = dict[tuple[int, int], Expected]  # by batch row and head


def expect(head: Callable[[], Head], stream: Stream, calls: Sequence[Call]) -> tuple[list[Told], float]:
    """By call, then by (batch row, head): what `head` says; and the smallest margin of all choices."""
    told: list[Told] = [{} for _ in calls]
    margin = math.inf
    for row in range(stream.batch):
        for index in range(stream.heads):
            one, start, queries = head(), 0, stream.queries_of(row, index)
            for number, call in enumerate(calls):
                end = start + call.counts[row]
                asked = None if queries is None else queries[:, start:end]
                shown = one.call(stream.keys[row, index, start:end], asked)
                told[number][row, index] = Expected(shown, one.held, [one.scores[i] for i in one.held], one.offset)
                start = end
            margin = min(margin, one.margin)
    return told, margin


def compare(transform: Transform, told: list[Told], stream: Stream, calls: Sequence[Call], capacity: int = 1) -> None:
    """Feed `calls` and check every call: rows shown, rows held, scores, offset and mask width."""
    left = any(call.left for call in calls)
    padding = [sum(call.width - call.counts[row] for call in calls) * left for row in range(stream.batch)]
    state = transform.init_state(stream.spec(capacity), mx.array(padding) if left else None)
    inputs = zip(*(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries)))
    for call, want, (keys, values, queries) in zip(calls, told, inputs):
        if call.width == 0:
            before = state
            state, _, _ = transform.update(state, keys, values, queries)
            assert same(before, state)
            continue
        columns = to_numpy(transform.positions_after(state, call.width)).astype(int)
        mask = transform.make_mask(state, call.width)
        if call.padded and not call.left:
            lengths, proxy = mx.array(call.counts), queries is None
            held = transform.write(state, keys, values, lengths)
            shown_keys, shown_values = transform.read(held)
            state = transform.settle(held, keys if proxy else queries, lengths, proxy=proxy)
        else:
            state, shown_keys, shown_values = transform.update(state, keys, values, queries)
        assert mask.shape == (stream.batch, 1, call.width, shown_keys.shape[2])
        padding = [pad - (call.width - count) * left for pad, count in zip(padding, call.counts)]
        assert state.offset.tolist() == [want[row, 0].offset - pad for row, pad in enumerate(padding)]
        _check_shown(columns, shown_keys, shown_values, want, stream)
        _check_held(transform, state, want, stream)


def _check_shown(columns: np.ndarray, keys: mx.array, values: mx.array, want: Told, stream: Stream) -> None:
    keys, values = to_numpy(keys), to_numpy(values)
    for (row, head), expected in want.items():
        position = columns[row, head]
        real = (position >= 0) & (position < expected.offset)
        assert sorted(position[real].tolist()) == expected.shown
        assert np.array_equal(keys[row, head][real], stream.keys[row, head][position[real]])
        assert np.array_equal(values[row, head][real], stream.values[row, head][position[real]])


def _check_held(transform: Transform, state: Any, want: Told, stream: Stream) -> None:
    ordered = transform.ordered(state)
    keys, values = (to_numpy(x) for x in transform.read(ordered))
    for (row, head), expected in want.items():
        count = len(expected.held)
        position = ordered.position[row, head].tolist()
        assert position == expected.held + [-1] * (len(position) - count)
        assert np.array_equal(keys[row, head, :count], stream.keys[row, head][expected.held])
        assert np.array_equal(values[row, head, :count], stream.values[row, head][expected.held])
        if isinstance(ordered.memory, mx.array):
            scores = to_numpy(ordered.memory)[row, head]
            np.testing.assert_allclose(scores[:count], expected.scores, rtol=1e-4, atol=1e-6)
            assert not scores[count:].any()


def parts_of(stream: Stream, start: int, n: int) -> list[mx.array | None]:
    """Keys, values and queries of `n` tokens."""
    arrays = (stream.keys, stream.values, stream.queries)
    return [None if x is None else mx.array(x[:, :, start : start + n]).astype(stream.dtype) for x in arrays]


def feed(
    transform: Transform,
    stream: Stream,
    cuts: Sequence[int],
    capacity: int = 1,
    left_padding: Sequence[int] | None = None,
) -> Any:
    """The state after calls of `cuts` tokens."""
    padding = None if left_padding is None else mx.array(left_padding)
    state = transform.init_state(stream.spec(capacity), padding)
    return resume(transform, state, stream, cuts)


def resume(transform: Transform, state: Any, stream: Stream, cuts: Sequence[int], start: int = 0) -> Any:
    """The state after further calls of `cuts` tokens, from token `start` of the stream on."""
    for n in cuts:
        state, _, _ = transform.update(state, *parts_of(stream, start, n))
        start += n
    return state


def held_positions(transform: Transform, state: Any) -> list[list[list[int]]]:
    """Positions held, rising, by batch row and head."""
    return [[[i for i in head if i >= 0] for head in row] for row in transform.ordered(state).position.tolist()]


def held_rows(transform: Transform, state: Any) -> tuple[mx.array, mx.array, mx.array]:
    """Positions, keys and values held, rising; every head must hold equally many."""
    ordered = transform.ordered(state)
    counts = (ordered.position >= 0).sum(axis=-1)
    assert counts.min().item() == counts.max().item()
    keys, values = transform.read(ordered)
    held = slice(0, counts.max().item())
    return ordered.position[..., held], keys[:, :, held], values[:, :, held]


def equal(first: Sequence[mx.array], second: Sequence[mx.array]) -> bool:
    """Whether arrays are equal bit for bit, pair by pair."""
    return all(mx.array_equal(x, y).item() for x, y in zip(first, second, strict=True))


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal bit for bit."""
    leaves, others = flatten(first), flatten(second)
    return leaves[1] == others[1] and equal(leaves[0], others[0])


def to_numpy(x: mx.array) -> np.ndarray:
    """Float32 copy."""
    return np.array(x.astype(mx.float32))


def cuts(longest: int = 12, calls: int = 12) -> st.SearchStrategy[list[int]]:
    """Call patterns: single tokens, longer calls and empty ones."""
    single, several = st.lists(st.just(1), min_size=1, max_size=8), st.lists(st.integers(0, longest), max_size=2)
    runs = st.lists(st.one_of(single, several), min_size=1, max_size=calls // 2)
    return runs.map(lambda lists: [n for run in lists for n in run]).filter(lambda sizes: sum(sizes) > 0)


def right_padded(batch: int, longest: int = 9, calls: int = 6) -> st.SearchStrategy[list[Call]]:
    """Calls with any number of tokens in each row, padding on the right."""
    counts = st.tuples(*[st.integers(0, longest)] * batch).filter(any)
    return st.lists(counts.map(lambda row: Call(max(row), row)), min_size=1, max_size=calls)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32 - 1)


@st.composite
def spans(draw: st.DrawFn, room: int, first: int = 0, last: int = 40) -> list[tuple[int, int]]:
    """Up to two spans from position `first` on that don't overlap and hold at most `room` positions in all."""
    found = []
    for _ in range(draw(st.integers(0, 2))):
        if room < 1 or first >= last:
            break
        start = draw(st.integers(first, last))
        size = draw(st.integers(1, room))
        found.append((start, start + size))
        room, first = room - size, start + size
    return found
