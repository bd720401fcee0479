"""Law: a budget is kept, protected rows stay, and the rest of the places goes on being given to new rows."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from laws.common import (
    METHODS,
    SMALL,
    SPEC,
    Subject,
    begin,
    feed,
    held_positions,
    keys_and_values,
    over,
    small_options,
    spans,
    tokens,
)
from vq_adapters import TransformKVCache
from vq_functional.methods import METHODS as ROWS

EVICTING = over("evicts", among=METHODS)
QUERIES = pytest.mark.parametrize("with_queries", [False, True], ids=["by-keys", "by-queries"])


def fed(transform: vq.Transform, pieces: list[int], with_queries: bool = False, capacity: int = 192) -> np.ndarray:
    """Positions [B, H, rows] that are held after these calls."""
    spec = attrs.evolve(SPEC, capacity=capacity)
    keys, values = keys_and_values(spec, sum(pieces))
    queries = tokens(sum(pieces), 7, heads=4) if with_queries else None
    return held_positions(transform, feed(transform, begin(transform, spec), keys, values, pieces, queries))


@over("evicts")
@QUERIES
def test_rows_never_exceed_the_cap(subject: Subject, with_queries: bool) -> None:
    """The cap is on the whole, or on prompts alone and then every single token stays; the policy says which."""
    transform, policy = subject.transform, subject.transform.policy
    run, held = begin(transform), 0
    keys, values = keys_and_values(SPEC, 160)
    queries = tokens(160, 7, heads=4) if with_queries else None
    for span in spans([1, 20, 1, 1, 64, *[1] * 40, 9, *[1] * 24]):
        n = span.stop - span.start
        asking = None if queries is None else queries[:, :, span]
        run = feed(transform, run, keys[:, :, span], values[:, :, span], queries=asking)
        capped = n > 1 or not policy.prompt_only
        limit = policy.limit(run.fill.prompt)
        held = policy.kept(span.stop, held + n, limit) if capped else held + n
        assert held <= limit or not capped
        assert run.fill.rows == held
        position = held_positions(transform, run)
        assert position.shape[-1] == held and position.max() < span.stop


@over("evicts", without=["share"], among=METHODS)
def test_a_prompt_cap_and_a_total_cap(subject: Subject) -> None:
    """64 tokens, then 100 single ones."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 164)
    for span in spans([64, *[1] * 100]):
        cache.update_and_fetch(keys[:, :, span], values[:, :, span])
    policy, budget = subject.transform.policy, SMALL["budget"]
    assert cache.size() == (budget + 100 if policy.prompt_only else policy.kept(164, budget, budget))


@over("evicts", without=["share"], among=METHODS)
@QUERIES
@pytest.mark.parametrize("pieces", [[128], [64, 64], [100, *[1] * 28]], ids=["one", "two", "decoded"])
def test_first_and_newest_rows_stay_by_default(subject: Subject, with_queries: bool, pieces: list[int]) -> None:
    """All options at their defaults but the size."""
    options = attrs.fields_dict(ROWS[subject.name].options)
    size = {"budget": 32} if "budget" in options else {"window_size": 28}
    transform = ROWS[subject.name].build(**size)
    sinks = transform.policy.n_sink
    assert sinks > 0
    held = fed(transform, pieces, with_queries)
    for rows in held.reshape(-1, held.shape[-1]).tolist():
        newest = set() if "new_rows_go" in subject.traits else {127}
        assert set(range(sinks)) | newest <= set(rows)


@over("evicts", without=["new_rows_go"])
@QUERIES
def test_rows_of_the_prompt_do_not_win_for_ever(subject: Subject, with_queries: bool) -> None:
    """Sixteen places, 100 single tokens: at least a quarter of what is held is newer than the rows that came first."""
    policy = attrs.evolve(subject.transform.policy, budget=16)
    held = fed(attrs.evolve(subject.transform, policy=policy), [1] * 100, with_queries)
    assert ((held >= 16).mean(axis=-1) >= 0.25).all()


@over("evicts", without=["chunks"])
@QUERIES
def test_a_single_free_place_rotates(subject: Subject, with_queries: bool) -> None:
    """Four sinks and eleven newest rows are protected of sixteen: there is always one row that may go."""
    policy = attrs.evolve(subject.transform.policy, budget=16, n_sink=4, recent=11)
    transform = attrs.evolve(subject.transform, policy=policy)
    held = fed(transform, [10, 30, 5] if policy.prompt_only else [1] * 45, with_queries)
    assert held.shape[-1] == 16
    for rows in held.reshape(-1, 16).tolist():
        assert rows[:4] == [0, 1, 2, 3]
        assert rows[5:] == list(range(34, 45))
        assert 4 <= rows[4] < 34


@over("evicts", without=["share"], among=METHODS)
@QUERIES
def test_protected_spans_stay(subject: Subject, with_queries: bool) -> None:
    """`protect` is an option of every policy, in prompts and step by step."""
    method = ROWS[subject.name]
    transform = method.build(**small_options(method), protect=[(10, 13), (20, 22)])
    wanted = {10, 11, 12, 20, 21}
    pieces = [[90], [40, 50]] + ([] if transform.policy.prompt_only else [[1] * 90])
    for calls in pieces:
        held = fed(transform, calls, with_queries)
        assert held.shape[-1] == transform.policy.kept(90, 90, transform.policy.budget)
        for rows in held.reshape(-1, held.shape[-1]).tolist():
            assert wanted <= set(rows)


@over("window")
@pytest.mark.parametrize("pieces", [[60], [1] * 60, [30, 30], [7, 1, 52]], ids=["one", "single", "two", "mixed"])
def test_windows_do_not_depend_on_how_they_were_filled(subject: Subject, pieces: list[int]) -> None:
    """Sinks and the newest rows, and so after five more."""
    policy = subject.transform.policy
    for calls in (pieces, [*pieces, 5]):
        total = sum(calls)
        wanted = [*range(policy.n_sink), *range(total - policy.budget + policy.n_sink, total)]
        assert fed(subject.transform, calls).tolist() == [[wanted] * 2] * 2


@over("evicts", without=["noise"])
def test_heads_keep_their_own_rows(subject: Subject) -> None:
    """Swapping the heads of the input swaps the heads of the state."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 70)
    one = feed(transform, begin(transform), keys, values, [40, *[1] * 30])
    two = feed(transform, begin(transform), keys[:, ::-1], values[:, ::-1], [40, *[1] * 30])
    assert mx.array_equal(transform.ordered(one.state).position, transform.ordered(two.state).position[:, ::-1])
