"""Law: how a stream is cut into calls changes nothing of what is held, wherever a method says so."""

from itertools import pairwise

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from laws.common import (
    SPEC,
    Subject,
    assert_same,
    begin,
    feed,
    held_positions,
    keys_and_values,
    live,
    over,
    read_in_order,
)
from vq_functional.core.codec import PlainCoder
from vq_functional.core.tree import map_leaves
from vq_functional.methods import METHODS

TOTAL = 130


def cut(places: list[int], total: int) -> list[int]:
    """Lengths of the pieces between the cuts."""
    edges = [0, *sorted(set(places)), total]
    return [end - start for start, end in pairwise(edges)]


@over("chunk_invariant")
@given(
    places=st.lists(st.integers(1, TOTAL - 1), max_size=8),
    dtype=st.sampled_from([mx.float16, mx.bfloat16, mx.float32]),
    batch=st.sampled_from([1, 2]),
)
def test_any_cut_equals_one_call(subject: Subject, places: list[int], dtype: mx.Dtype, batch: int) -> None:
    transform = subject.transform
    spec = vq.KVSpec(batch=batch, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, capacity=192)
    keys, values = keys_and_values(spec, TOTAL)
    whole = feed(transform, begin(transform, spec), keys, values)
    pieces = feed(transform, begin(transform, spec), keys, values, cut(places, TOTAL))
    assert pieces.fill == whole.fill
    assert_same(live(transform, pieces), live(transform, whole), f"cut at {sorted(set(places))}")


@over("chunk_invariant")
def test_token_by_token_equals_one_call(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    whole = feed(transform, begin(transform), keys, values)
    singly = feed(transform, begin(transform), keys, values, [1] * TOTAL, update=vq.compile(transform).update)
    assert_same(live(transform, singly), live(transform, whole), "one token a call")


@over("evicts", without=["share"])
@given(places=st.lists(st.integers(1, 23), max_size=5))
def test_cuts_before_the_budget_is_full_change_nothing(subject: Subject, places: list[int]) -> None:
    """Nothing is evicted yet, so that every rule gives the same rows."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 24)
    whole = feed(transform, begin(transform), keys, values)
    pieces = feed(transform, begin(transform), keys, values, cut(places, 24))
    assert_same(read_in_order(transform, pieces), read_in_order(transform, whole), f"cut at {sorted(set(places))}")
    assert (held_positions(transform, pieces) == range(24)).all()


@over("packs", without=["evicts", "anchors"])
@pytest.mark.parametrize("pieces", [[8] + [1] * 150, [158], [64, 64, 30]], ids=["one-by-one", "one-shot", "chunks"])
def test_decoded_tokens_become_codes_too(subject: Subject, pieces: list[int]) -> None:
    """Exact key rows: at most 32 that are asked for and a group that isn't full."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, sum(pieces))
    run = feed(transform, begin(transform), keys, values, pieces)
    key_parts, _ = transform.parts(run.state, run.fill)
    exact = sum(part.count for part in key_parts if isinstance(part.coder, PlainCoder))
    assert sum(part.count for part in key_parts) == sum(pieces)
    assert exact <= 63


@over(
    without=["chunk_means"],
    where=lambda subject: hasattr(getattr(METHODS.get(subject.name), "options", None), "residual_length"),
)
def test_the_newest_rows_are_exact_at_every_step(subject: Subject) -> None:
    transform, residual = subject.transform, 32
    keys, values = keys_and_values(SPEC, 140)
    update = vq.compile(transform).update
    run = feed(transform, begin(transform), keys[:, :, :100], values[:, :, :100])
    for n in range(100, 141):
        newest = map_leaves(lambda x: x[:, :, -residual:], transform.read(run.state, run.fill))
        wanted = keys[:, :, n - residual : n], values[:, :, n - residual : n]
        assert_same(newest, wanted, f"newest rows after {n} tokens")
        if n < 140:
            new = slice(n, n + 1)
            run = feed(transform, run, keys[:, :, new], values[:, :, new], update=update)
