"""Law: real queries, several a KV head, may change which rows stay and nothing else."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.common import (
    SPEC,
    Subject,
    assert_same,
    begin,
    call,
    feed,
    held_positions,
    keys_and_values,
    live,
    over,
    run_of,
    shapes,
    tokens,
)
from vq_adapters import QuantizerConfigError, TransformKVCache

TOTAL, GROUP = 90, 4
PIECES = [50, 1, 1, 8, *[1] * 30]


@over(without=["share", "anchors"])
@given(group=st.sampled_from([1, 3, 4]), pieces=st.sampled_from([[90], [50, 40], PIECES]))
def test_the_state_has_the_heads_of_keys(subject: Subject, group: int, pieces: list[int]) -> None:
    """Nothing is repeated for query heads: shapes are those of a run without queries."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    queries = tokens(TOTAL, 7, heads=group * SPEC.kv_heads)
    asked = feed(transform, begin(transform), keys, values, pieces, queries)
    assert shapes(asked.state) == shapes(begin(transform).state)


@over()
def test_returned_rows_do_not_depend_on_queries(subject: Subject) -> None:
    """The call's own eviction comes after what it returns."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 60)
    run = feed(transform, begin(transform), keys[:, :, :40], values[:, :, :40])
    new = keys[:, :, 40:], values[:, :, 40:]
    _, *silent = call(transform, run, *new)
    _, *asked = call(transform, run, *new, tokens(20, 7, heads=GROUP * SPEC.kv_heads))
    assert_same(tuple(asked), tuple(silent), "what a call returns")


@over(without=["uses_queries"])
def test_who_has_no_rule_for_queries_ignores_them(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    queries = tokens(TOTAL, 7, heads=GROUP * SPEC.kv_heads)
    silent = feed(transform, begin(transform), keys, values, PIECES)
    asked = feed(transform, begin(transform), keys, values, PIECES, queries)
    assert_same(asked.state, silent.state, "a state that was asked")


@over("evicts", "uses_queries", without=["share", "one_choice"])
def test_who_has_a_rule_for_queries_follows_them(subject: Subject) -> None:
    """Of the rows that all queries of a head look at more stay in that head than where nobody looks."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    wanted = [list(range(10, 18)), list(range(30, 38))]
    beacon = 3 * tokens(1, 11)
    heads = []
    for head, rows in enumerate(wanted):
        here = (mx.arange(TOTAL)[:, None] >= rows[0]) & (mx.arange(TOTAL)[:, None] <= rows[-1])
        heads.append(mx.where(here, beacon[:, head : head + 1], keys[:, head : head + 1]))
    keys = mx.concatenate(heads, axis=1)
    queries = mx.broadcast_to(mx.repeat(beacon, GROUP, axis=1), (2, GROUP * SPEC.kv_heads, TOTAL, 64))
    run = feed(transform, begin(transform), keys, values, [TOTAL], queries)
    position = held_positions(transform, run)
    for b in range(SPEC.batch):
        for head in range(SPEC.kv_heads):
            held = set(position[b, head].tolist())
            assert len(held.intersection(wanted[head])) > len(held.intersection(wanted[1 - head]))


@over("uses_queries", without=["sums_heads"])
def test_one_query_head_a_kv_head_counts_like_the_same_one_four_times(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    queries = tokens(TOTAL, 7)
    single = feed(transform, begin(transform), keys, values, PIECES, queries)
    repeated = feed(transform, begin(transform), keys, values, PIECES, mx.repeat(queries, 4, axis=1))
    assert np.array_equal(held_positions(transform, single), held_positions(transform, repeated))


@over()
@pytest.mark.parametrize("heads", [3, 5])
def test_query_heads_that_do_not_fit_are_refused(subject: Subject, heads: int) -> None:
    keys, values = keys_and_values(SPEC, 5)
    with pytest.raises(QuantizerConfigError, match="queries"):
        subject.transform.update(begin(subject.transform).state, keys, values, tokens(5, 7, heads=heads))


@over()
@pytest.mark.parametrize("n", [1, 5])
def test_arrays_of_other_sizes_are_refused(subject: Subject, n: int) -> None:
    """Queries of another batch, length, head size or kind of number than the keys, and keys of another batch."""
    transform, state = subject.transform, begin(subject.transform).state
    keys, values = keys_and_values(SPEC, n)
    asking = tokens(n, 7, heads=4)
    wrong = [asking[:1], mx.concatenate([asking] * 2, axis=2), asking[..., :32], asking.astype(mx.int32), asking[0]]
    for queries in wrong:
        with pytest.raises(QuantizerConfigError, match="`queries` must be"):
            transform.update(state, keys, values, queries)
    for batch in (1, 3):
        other = tokens(n, batch=batch)
        with pytest.raises(QuantizerConfigError, match="`keys` must have 2 batch rows"):
            transform.update(state, other, other)


@over()
@pytest.mark.parametrize(
    "padding",
    [mx.array([1, 2, 3]), mx.array([0]), mx.array(1), mx.array([0, -1]), mx.array([0.0, 1.0]), [0, 1]],
    ids=["three", "one", "none", "negative", "fraction", "list"],
)
def test_padding_of_other_batches_is_refused(subject: Subject, padding: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="`left_padding` must be an array of 2 integers >= 0"):
        subject.transform.init_state(SPEC, padding)


@over(without=["anchors"])
def test_queries_reach_the_rule_through_the_adapter(subject: Subject) -> None:
    """`attend` of the adapter settles as `update` with queries does."""
    transform, cache = subject.transform, TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 60)
    queries = tokens(60, 7, heads=GROUP * SPEC.kv_heads)
    start = 0
    for n in (40, 1, 1, 12, 1, 1, 1, 1, 1, 1):
        new = slice(start, start + n)
        held = cache.update_and_fetch(keys[:, :, new], values[:, :, new])
        cache.attend(queries[:, :, new], *held, 0.125, None if n == 1 else "causal")
        start += n
    run = feed(transform, begin(transform), keys, values, [40, 1, 1, 12, 1, 1, 1, 1, 1, 1], queries)
    assert_same(live(transform, run_of(cache)), live(transform, run), "settled by real queries")
