"""Law: a mask is as wide as the rows that the call returns, and shows each query exactly what it may see.

Which token a returned row is, is told from its direction, so that codes are covered too.
"""

from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.common import SPEC, Run, Subject, begin, keys_and_values, over, run_of, spans, tokens_of
from vq_adapters import QuantizerConfigError, TransformKVCache
from vq_functional.ops.attention import lower_right

CALLS = st.lists(st.sampled_from([1, 1, 2, 5, 9, 30]), min_size=1, max_size=5)


def shown(rows: np.ndarray, mask: mx.array) -> list[list[list[list[int]]]]:
    """For every batch row, head and query the tokens behind the visible columns, rising."""
    batch, heads, columns = rows.shape
    visible = np.broadcast_to(np.array(mask), (batch, heads, *mask.shape[2:]))
    assert visible.shape[-1] == columns
    return [[[sorted(rows[b, h][see].tolist()) for see in visible[b, h]] for h in range(heads)] for b in range(batch)]


def assert_sees(seen: list[Any], stored: list[Any], start: int, window: int | None = None) -> None:
    """Query i of the call sees all stored tokens and those from `start` to itself, in its window."""
    for b, heads in enumerate(seen):
        for h, queries in enumerate(heads):
            for i, got in enumerate(queries):
                wanted = [*stored[b][h], *range(start, start + i + 1)]
                wanted = [p for p in wanted if window is None or start + i - p < window]
                assert got == wanted, f"batch row {b}, head {h}, query at {start + i}"


def stored_before(seen: list[Any], start: int) -> list[Any]:
    """Per batch row and head, the tokens before the call that its first query sees."""
    return [[[p for p in queries[0] if p < start] for queries in heads] for heads in seen]


@over(without=["folds"])
@given(pieces=CALLS)
def test_masks_of_the_functional_api(subject: Subject, pieces: list[int]) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, sum(pieces))
    run = begin(transform)
    previous: list[Any] = [[[] for _ in range(SPEC.kv_heads)] for _ in range(SPEC.batch)]
    for span in spans(pieces):
        n, start = span.stop - span.start, span.start
        new = keys[:, :, span], values[:, :, span]
        masks = [transform.make_mask(run.state, n), transform.make_mask(run.state, n, run.fill)]
        narrow = [transform.make_mask(run.state, n, None, 8), transform.make_mask(run.state, n, run.fill, 8)]
        held, fill = transform.write(run.state, *new), transform.written(run.fill, n)
        assert transform.update(run.state, *new)[1].shape[2] == masks[0].shape[-1]
        for view, mask, windowed in zip([None, fill], masks, narrow):
            keys_out, values_out = transform.read(held, view)
            rows = tokens_of(keys_out, keys)
            seen = shown(rows, mask)
            stored = stored_before(seen, start)
            assert_sees(seen, stored, start)
            assert_sees(shown(rows, windowed), stored, start, window=8)
            assert shown(tokens_of(values_out, values), mask) == seen, "values belong to other tokens than keys"
            for kept, before in zip(chain.from_iterable(stored), chain.from_iterable(previous)):
                assert len(set(kept)) == len(kept) == run.fill.rows
                assert set(kept) <= set(before)
                assert transform.evicts or kept == list(range(start))
        previous = [[queries[-1] for queries in heads] for heads in seen]
        run = Run(transform.settle(held, new[0], proxy=True), transform.settled(fill, n))


@over()
def test_windows_that_show_nothing_are_refused(subject: Subject) -> None:
    transform, cache = subject.transform, TransformKVCache(subject.transform)
    for window in (0, -1):
        rule = f"`window` must be an integer >= 1; got {window}"
        with pytest.raises(QuantizerConfigError, match=rule):
            transform.make_mask(begin(transform).state, 3, None, window)
        with pytest.raises(QuantizerConfigError, match=rule):
            cache.make_mask(3, window_size=window)


@over(without=["anchors"])
@given(pieces=CALLS)
def test_masks_of_the_adapter(subject: Subject, pieces: list[int]) -> None:
    cache = TransformKVCache(subject.transform, query_heads=SPEC.kv_heads)
    keys, values = keys_and_values(SPEC, sum(pieces))
    for span in spans(pieces):
        n, start = span.stop - span.start, span.start
        plain, array = cache.make_mask(n), cache.make_mask(n, return_array=True)
        narrow = cache.make_mask(n, window_size=8)
        keys_out, _ = cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        rows = tokens_of(keys_out, keys)
        width = rows.shape[-1]
        assert array.shape[-2:] == (n, width)
        assert plain == (None if n == 1 else "causal")
        named = lower_right(n, width)
        seen = shown(rows, named[None, None])
        stored = stored_before(seen, start)
        assert_sees(seen, stored, start)
        assert_sees(shown(rows, array.reshape((1,) * (4 - array.ndim) + array.shape)), stored, start)
        assert_sees(shown(rows, narrow.reshape((1,) * (4 - narrow.ndim) + narrow.shape)), stored, start, window=8)


@over()
@given(pieces=CALLS)
def test_row_counts_follow_from_token_counts(subject: Subject, pieces: list[int]) -> None:
    """The host's `Fill` is what the arrays say, without a look at the data."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, sum(pieces))
    cache = TransformKVCache(transform)
    for span in spans(pieces):
        cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        run = run_of(cache)
        position, offset = transform.positions(run.state), run.state.offset[:, None, None]
        held = ((position >= 0) & (position < offset)).sum(axis=-1)
        assert (np.array(held) == run.fill.rows).all()
        assert cache.size() == run.fill.rows


@over()
@given(padding=st.tuples(st.integers(0, 4), st.integers(1, 6)), pieces=CALLS)
def test_masks_of_ragged_batches(subject: Subject, padding: tuple[int, int], pieces: list[int]) -> None:
    """Padding is seen by no token; a row that is shorter shows its neighbour's width with nothing in it."""
    pieces = [7, *pieces]
    cache = TransformKVCache(subject.transform)
    cache.prepare(left_padding=padding)
    keys, values = keys_and_values(SPEC, sum(pieces))
    before: list[Any] = [[set() for _ in range(SPEC.kv_heads)] for _ in range(SPEC.batch)]
    for span in spans(pieces):
        n, start = span.stop - span.start, span.start
        mask = cache.make_mask(n)
        keys_out, _ = cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        rows = tokens_of(keys_out, keys)
        mask = lower_right(n, rows.shape[-1])[None, None] if mask is None or isinstance(mask, str) else mask
        seen = shown(rows, mx.broadcast_to(mask, (SPEC.batch, 1, *mask.shape[2:])))
        for b, pad in enumerate(padding):
            for h, queries in enumerate(seen[b]):
                for i, got in enumerate(queries):
                    if start + i >= pad:
                        new, old = [p for p in got if p >= start], [p for p in got if p < start]
                        assert new == list(range(max(start, pad), start + i + 1))
                        assert len(old) == len(set(old)) and before[b][h].issuperset(old)
                        assert subject.transform.evicts or old == list(range(pad, start))
                before[b][h] = set(queries[-1])
