"""Budgets as a share of the prompt: rows follow from the tokens of calls of several, on host and device alike."""

from collections.abc import Callable, Sequence
from fractions import Fraction
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
    Head,
    chunks,
    compare,
    cuts,
    expect,
    feed,
    held_positions,
    left_padded_calls,
    make_stream,
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
)

from vq_functional import QuantizerConfigError, chunkkv, h2o, knorm, tova
from vq_functional.core.transform import Fill

GROUPS = st.sampled_from([None, 2])  # queries a KV head; None: keys stand in
SHARES = st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 0.99])
METHODS: dict[str, Callable[..., Any]] = {
    "h2o": lambda share: h2o(budget=share, n_sink=2, grace=3),
    "tova": lambda share: tova(budget=share, n_sink=2),
    "chunkkv": lambda share: chunkkv(budget=share, n_sink=2, chunk_size=3),
    "chunkkv, protected": lambda share: chunkkv(budget=share, n_sink=2, chunk_size=3, protect=[(7, 9)]),
}
LEAST = {"h2o": 6, "tova": 3, "chunkkv": 7, "chunkkv, protected": 13}  # of sinks, new rows and one that may go
EACH = pytest.mark.parametrize("name", METHODS)


def limit(share: float, prompt: int, least: int) -> int:
    """Rows that may stay after a prompt of so many tokens: the nearest whole number, halves up."""
    return max(int(Fraction(str(share)) * prompt + Fraction(1, 2)), least)


def rows_left(name: str, share: float, counts: Sequence[int]) -> list[int]:
    """Rows of a head after each call of so many tokens."""
    held, tokens, prompt, out = 0, 0, 0, []
    for n in counts:
        held, tokens, prompt = held + n, tokens + n, prompt + (n if n > 1 else 0)
        most = limit(share, prompt, LEAST[name])
        if not name.startswith("chunkkv"):
            held = min(held, most)
        elif tokens > most and n > 0:
            sinks, (closed, unfinished) = min(tokens, 2), divmod(max(tokens - 2, 0), 3)
            held = min(held, sinks + 3 * min((most - 2 - 2) // 3, closed) + unfinished)
        out.append(held)
    return out


def counted(transform: Any, state: Any, fills: Sequence[Fill]) -> list[int]:
    """Rows of each batch row, in all heads equally many, as the host has counted them."""
    held = [[len(head) for head in row] for row in held_positions(transform, state)]
    assert held == [[fill.rows] * len(row) for fill, row in zip(fills, held)]
    return [fill.rows for fill in fills]


def run(name: str, share: float, seed: int, calls: Sequence[Call], group: int | None) -> None:
    """Calls with padding on one side; counts as `rows_left` after each, state and host."""
    transform, batch = METHODS[name](share), len(calls[0].counts)
    counts = np.array([call.counts for call in calls])
    stream = make_stream(seed, int(counts.sum(axis=0).max()), batch=batch, group=group)
    left = any(call.left for call in calls)
    padding = [sum(call.width - call.counts[row] for call in calls) for row in range(batch)]
    state = transform.init_state(stream.spec(), mx.array(padding) if left else None)
    fills, want = [Fill()] * batch, [rows_left(name, share, counts[:, row]) for row in range(batch)]
    inputs = zip(*(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries)))
    for number, (call, (keys, values, queries)) in enumerate(zip(calls, inputs)):
        lengths = mx.array(call.counts) if call.padded and not left else None
        held = transform.write(state, keys, values, lengths)
        state = transform.settle(held, keys if queries is None else queries, lengths, proxy=queries is None)
        fills = [transform.settled(transform.written(fill, n), n) for fill, n in zip(fills, call.counts)]
        assert counted(transform, state, fills) == [one[number] for one in want]


@EACH
@given(seeds(), SHARES, cuts(40).map(lambda sizes: [n for n in sizes if n]), GROUPS)
def test_rows_after_prompts_and_single_tokens(
    name: str, seed: int, share: float, pattern: list[int], group: int | None
) -> None:
    run(name, share, seed, plain_calls(pattern, 1), group)


@EACH
@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first", [48, 90])
def test_rows_after_long_prompts(name: str, share: float, group: int | None, first: int) -> None:
    run(name, share, 5, plain_calls([first, 1, 1, 70, *[1] * 10], 1), group)


@EACH
def test_room_that_short_calls_leave_is_given_back(name: str) -> None:
    """From shapes alone each call leaves a slot too many; without these the same rows stay."""
    transform, stream = METHODS[name](0.1), make_stream(7, 240, batch=2)
    state = narrow = transform.init_state(stream.spec())
    fill, start = Fill(), 0
    for n in [2, 1, 5] * 30:
        state, narrow = (resume(transform, one, stream, [n], start) for one in (state, narrow))
        fill, start = transform.settled(transform.written(fill, n), n), start + n
        if n > 1:
            narrow = transform.narrowed(narrow, [fill] * 2)
            assert narrow.slots == transform.policy.limit(fill.prompt) + 1
        assert held_positions(transform, narrow) == held_positions(transform, state)
    assert state.slots > 3 * narrow.slots


def test_empty_slots_beside_longer_sequences_hold_no_broken_row() -> None:
    """A row whose limit is small has many empty slots, and the last one that was emptied goes with a later call."""
    transform, stream = knorm(budget=0.3, n_sink=0), make_stream(8, 84, batch=2)
    stream.keys[:, :, 80] = stream.values[:, :, 80] = np.nan
    state = feed(transform, stream, [80, 1], left_padding=(0, 60))
    keys, values, _ = parts_of(stream, 81, 3)
    held = transform.write(state, keys, values)
    empty = (held.position < 0)[..., None]
    assert empty[1].sum().item() > 2 * 10
    assert all(mx.isfinite(x).all().item() for x in (mx.where(empty, rows, 0) for rows in transform.read(held)))


@EACH
@given(seeds(), SHARES, right_padded(3, longest=30), GROUPS)
def test_rows_under_right_padding(name: str, seed: int, share: float, calls: list[Call], group: int | None) -> None:
    run(name, share, seed, calls, group)


@EACH
@given(seeds(), SHARES, st.tuples(st.integers(0, 20), st.integers(0, 6)), st.lists(st.integers(2, 30), max_size=4))
def test_rows_under_left_padding(
    name: str, seed: int, share: float, padding: tuple[int, int], pattern: list[int]
) -> None:
    calls = left_padded_calls([*pattern, 9, *[1] * 22], padding)
    run(name, share, seed, calls, 2 if seed % 2 else None)


def one_share(kind: type[Head], share: float, least: int, **chosen: Any) -> Head:
    """A head whose budget grows with the prompt."""

    class Growing(kind):  # type: ignore[misc,valid-type]
        prompt = 0

        def call(self, keys: np.ndarray, queries: np.ndarray | None = None) -> list[int]:
            self.prompt += len(keys) if len(keys) > 1 else 0
            self.budget = limit(share, self.prompt, least)
            return super().call(keys, queries)

    return Growing(least, **chosen)


@given(seeds(), SHARES, cuts(80), GROUPS, st.integers(1, 2))
def test_rows_of_h2o(seed: int, share: float, pattern: list[int], group: int | None, batch: int) -> None:
    stream, calls = make_stream(seed, sum(pattern), batch=batch, group=group), plain_calls(pattern, batch)
    chosen = {"n_sink": 2, "grace": 3, "decay": 0.98}
    told, margin = expect(lambda: one_share(H2OHead, share, 6, **chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(budget=share, **chosen), told, stream, calls)


@given(seeds(), SHARES, right_padded(2, longest=20), GROUPS)
def test_rows_of_h2o_under_right_padding(seed: int, share: float, calls: list[Call], group: int | None) -> None:
    stream, chosen = make_stream(seed, 120, batch=2, group=group), {"n_sink": 2, "grace": 3, "decay": 0.98}
    told, margin = expect(lambda: one_share(H2OHead, share, 6, **chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(h2o(budget=share, **chosen), told, stream, calls)


@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
@pytest.mark.parametrize("share", [0.25, 0.5])
@EACH
def test_after_one_prompt_it_is_a_number_of_rows(name: str, share: float, group: int | None) -> None:
    stream, pattern = make_stream(1, 90, batch=2, group=group), [60, *[1] * 30]
    whole, part = METHODS[name](round(60 * share)), METHODS[name](share)
    held = [held_positions(x, feed(x, stream, pattern)) for x in (whole, part)]
    assert held[0] == held[1]


@EACH
def test_single_tokens_alone_are_no_prompt(name: str) -> None:
    """Without any prompt as many rows stay as any prompt is given."""
    transform = METHODS[name](0.9)
    state = feed(transform, make_stream(2, 50, group=2), [1] * 50)
    assert {len(head) for head in held_positions(transform, state)[0]} == {rows_left(name, 0.9, [1] * 50)[-1]}


@EACH
def test_a_batch_row_has_the_share_of_its_own_prompt(name: str) -> None:
    """Rows of 60 and 21 tokens are held as if alone."""
    transform, stream = METHODS[name](0.5), make_stream(3, 60, batch=2, group=2)
    calls = [Call(60, (60, 21))]
    keys, values, queries = (next(chunks(x, calls, mx.float32)) for x in (stream.keys, stream.values, stream.queries))
    state = transform.write(transform.init_state(stream.spec()), keys, values, mx.array([60, 21]))
    state = transform.settle(state, queries, mx.array([60, 21]))
    alone = [feed(transform, stream.rows([row]), [n]) for row, n in enumerate((60, 21))]
    assert held_positions(transform, state) == [held_positions(transform, one)[0] for one in alone]


def test_equal_shares_are_equal_however_they_are_written() -> None:
    stream = make_stream(4, 70, group=2)
    one, other = h2o(budget=0.3, grace=3), h2o(budget=3 / 10, grace=3)
    assert same(feed(one, stream, [33, 1, 36]), feed(other, stream, [33, 1, 36]))
    thirds = h2o(budget=1 / 3, n_sink=0, grace=0)
    for prompt in (3, 30, 33, 66):
        state = feed(thirds, stream, [prompt])
        assert [len(head) for head in held_positions(thirds, state)[0]] == [prompt // 3] * 2


@pytest.mark.parametrize("build", [h2o, tova, chunkkv])
@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 1.5, float("nan"), float("inf")])
def test_refuses_what_is_no_share(build: Callable[..., Any], share: float) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^{build.__name__}: `budget` .*; got "):
        build(budget=share)
