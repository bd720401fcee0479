"""Law: huge, equal, zero and missing numbers stay where they are: finite outside, and no neighbour is touched."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from laws.common import (
    SPEC,
    Run,
    Subject,
    assert_same,
    begin,
    call,
    feed,
    held_positions,
    keys_and_values,
    live,
    numbers,
    over,
    read_in_order,
    same_array,
    spans,
    tokens,
)
from vq_functional.core.policy import Scene
from vq_functional.core.tree import flatten

TOTAL = 80
ONE, FOUR, DECODED = [TOTAL], [40, 1, 1, 38], [60, *[1] * 20]
CALLS = pytest.mark.parametrize("pieces", [ONE, FOUR, DECODED], ids=["one", "four", "decoded"])


def assert_finite(transform: Any, run: Run) -> None:
    arrays = [leaf for leaf in flatten(run.state)[0] if mx.issubdtype(leaf.dtype, mx.floating)]
    for x in (*arrays, *transform.read(run.state, run.fill)):
        assert mx.isfinite(x).all()


@over()
@CALLS
def test_numbers_near_the_end_of_float16(subject: Subject, pieces: list[int]) -> None:
    """A group that spans more than float16 can: -60000 beside 60000, in rows and in columns."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    sign = mx.where((mx.arange(TOTAL)[:, None] + mx.arange(64)[None]) % 2 == 0, 1.0, -1.0)
    huge = (60000 * sign).astype(mx.float16)
    here = (mx.arange(TOTAL) % 3 == 0)[:, None] | (mx.arange(64) % 7 == 0)[None]
    keys, values = (mx.where(here, huge, x) for x in (keys, values))
    run = feed(transform, begin(transform), keys, values, pieces)
    assert_finite(transform, run)
    assert held_positions(transform, run).max() == TOTAL - 1 or transform.evicts
    for got, want in zip(read_in_order(transform, run), (keys, values)):
        position = held_positions(transform, run)[..., None]
        wanted = np.take_along_axis(numbers(want), position, axis=2)
        norms = [np.linalg.norm(x, axis=-1) for x in (numbers(got), wanted)]
        assert (norms[0] > 0.3 * norms[1]).all() and (norms[0] < 3 * norms[1]).all()


@over()
@CALLS
def test_zero_rows(subject: Subject, pieces: list[int]) -> None:
    transform = subject.transform
    zeros = mx.zeros((2, 2, TOTAL, 64), mx.float16)
    run = feed(transform, begin(transform), zeros, zeros, pieces)
    assert_finite(transform, run)
    for x in transform.read(run.state, run.fill):
        assert (x == 0).all()


@over()
@pytest.mark.parametrize(
    ("level", "dtype"),
    [(3.3, mx.float16), (-5.0, mx.float16), (1e-4, mx.float16), (1e-30, mx.bfloat16), (1e-30, mx.float32)],
    ids=["3.3", "-5", "1e-4", "1e-30-bf16", "1e-30-fp32"],
)
def test_constant_rows(subject: Subject, level: float, dtype: mx.Dtype) -> None:
    """Groups without a range hold their one value; a channel that is always zero divides nothing."""
    transform = subject.transform
    rows = mx.full((2, 2, TOTAL, 64), level, dtype)
    rows = mx.where(mx.arange(64) == 5, mx.zeros_like(rows), rows)
    run = feed(transform, begin(transform, attrs.evolve(SPEC, dtype=dtype)), rows, rows)
    assert_finite(transform, run)
    for x in read_in_order(transform, run):
        got, want = numbers(x), numbers(rows[:, :, : x.shape[2]])
        assert (np.linalg.norm(got - want, axis=-1) <= 0.8 * np.linalg.norm(want, axis=-1)).all()


@over(without=["folds", "sinks", "classes", "chunk_means"])
@pytest.mark.parametrize(
    ("channels", "bad", "pieces"),
    [
        *((64, np.nan, pieces) for pieces in (ONE, FOUR, DECODED)),
        (64, np.inf, DECODED),
        (64, -np.inf, ONE),
        (1, np.nan, DECODED),
        (1, np.inf, FOUR),
        (1, -np.inf, DECODED),
    ],
)
def test_a_bad_row_stays_alone(subject: Subject, channels: int, bad: float, pieces: list[int]) -> None:
    """Other rows are held as if the bad one were a repetition of its neighbour, which adds nothing to any range."""
    transform, row = subject.transform, 10
    keys, values = keys_and_values(SPEC, TOTAL)
    here = (mx.arange(TOTAL) == row)[:, None] & (mx.arange(64) < channels)
    clean = [mx.where(here, x[:, :, row + 1 : row + 2], x) for x in (keys, values)]
    broken = [mx.where(here, mx.array(bad, mx.float16), x) for x in (keys, values)]
    one, two = (feed(transform, begin(transform), *pair, pieces) for pair in (clean, broken))
    assert one.fill == two.fill
    positions = [held_positions(transform, run) for run in (one, two)]
    reads = [[numbers(x) for x in read_in_order(transform, run)] for run in (one, two)]
    coded = "packs" in subject.traits
    for b in range(2):
        for h in range(2):
            here = [{p: i for i, p in enumerate(position[b, h].tolist()) if p != row} for position in positions]
            both = sorted(here[0].keys() & here[1].keys())
            assert "evicts" in subject.traits or len(both) == TOTAL - 1
            assert len(here[1]) >= two.fill.rows - 1, "a position is held twice"
            for a, c in zip(*reads):
                left, right = a[b, h, [here[0][p] for p in both]], c[b, h, [here[1][p] for p in both]]
                # The product that reads codes may round by the column that a row is in.
                assert np.allclose(left, right, rtol=2e-3, atol=1e-3) if coded else np.array_equal(left, right)
                assert np.isfinite(right).all()
    for memory in flatten(getattr(two.state, "memory", ()))[0]:
        assert mx.isfinite(memory).all(), "scores are poisoned"


@over("evicts")
def test_an_evicted_bad_row_reaches_no_attention(subject: Subject) -> None:
    """Through a mask it would: nothing times NaN is NaN."""
    transform, run, bad = subject.transform, begin(subject.transform), 20
    keys, values = keys_and_values(SPEC, TOTAL)
    here = (mx.arange(TOTAL) == bad)[:, None]
    keys, values = (mx.where(here, mx.array(np.nan, mx.float16), x) for x in (keys, values))
    for span in spans([20, 1, 40, 1, 1, 1, 1, 3, 1]):
        new = keys[:, :, span], values[:, :, span]
        if span.start > bad:
            held = transform.write(run.state, *new)
            gone = ~(transform.positions(held) == bad).any(axis=-1)
            out = transform.attend(held, new[0], 0.125)
            assert span.start < 61 or gone.any()
            assert (mx.isfinite(out).all(axis=(2, 3)) | ~gone).all()
        run, *_ = call(transform, run, *new)


@over("window")
@CALLS
def test_a_rule_without_scores_keeps_the_same_rows(subject: Subject, pieces: list[int]) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, TOTAL)
    here = (mx.arange(TOTAL) % 5 == 2)[:, None]
    broken = [mx.where(here, mx.array(np.nan, mx.float16), x) for x in (keys, values)]
    one, two = (feed(transform, begin(transform), *pair, pieces) for pair in ((keys, values), broken))
    assert np.array_equal(held_positions(transform, one), held_positions(transform, two))


@over("evicts", "uses_queries", without=["norms", "packs"])
@CALLS
def test_a_row_that_nobody_looks_at_may_as_well_be_nan(subject: Subject, pieces: list[int]) -> None:
    """All queries lean one way and the key of row 10 the other, so that its weight is exactly zero either way."""
    transform, row, lean = subject.transform, 10, 200.0
    keys, values = keys_and_values(SPEC, TOTAL)
    first = mx.arange(64) == 0
    keys = mx.where(first, mx.zeros_like(keys), keys)
    queries = mx.where(first, mx.array(lean, mx.float16), tokens(TOTAL, 7, heads=4))
    here = (mx.arange(TOTAL) == row)[:, None]
    unseen = mx.where(here, mx.where(first, mx.array(-lean, mx.float16), mx.zeros_like(keys)), keys)
    broken = mx.where(here, mx.array(np.nan, mx.float16), keys)
    one, two = (feed(transform, begin(transform), k, values, pieces, queries) for k in (unseen, broken))
    assert np.array_equal(held_positions(transform, one), held_positions(transform, two))


# Ties


def tied(transform: Any) -> Any:
    """The same method with one priority for all rows."""

    def score(self: Any, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        return memory, mx.zeros(scene.position.shape, mx.float32)

    policy = transform.policy
    kind = type("Tied", (type(policy),), {"score": score})
    options = {field.name: getattr(policy, field.name) for field in attrs.fields(type(policy))}
    return attrs.evolve(transform, policy=kind(**options))


@over("evicts", without=["share", "chunks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_of_equal_rows_the_documented_ones_stay(subject: Subject, compiled: bool) -> None:
    """The later ones, or the earlier ones where a policy says so; protected rows aside."""
    transform = tied(subject.transform)
    policy = transform.policy
    keys, values = keys_and_values(SPEC, 50)
    update = vq.compile(transform).update if compiled else None
    total = 50 if not policy.prompt_only else 40
    pieces = [40, *[1] * (total - 40)]
    run = feed(transform, begin(transform), keys[:, :, :total], values[:, :, :total], pieces, update=update)
    safe = {*range(policy.n_sink), *range(total - policy.recent, total)}
    free = [p for p in range(total) if p not in safe]
    count = policy.budget - len(safe)
    wanted = sorted(safe | set(free[-count:] if policy.latest else free[:count]))
    assert held_positions(transform, run).tolist() == [[wanted] * 2] * 2


@over("evicts")
def test_equal_keys_give_whole_rows(subject: Subject) -> None:
    transform = subject.transform
    values = tokens(60, 4)
    keys = mx.broadcast_to(tokens(1, 3), values.shape)
    run = feed(transform, begin(transform), keys, values, [40, *[1] * 20])
    position = held_positions(transform, run)
    assert position.shape[-1] == run.fill.rows
    assert (np.diff(position, axis=-1) > 0).all()
    again = feed(transform, begin(transform), keys, values, [40, *[1] * 20])
    assert_same(live(transform, again), live(transform, run), "the same input again")
    assert same_array(run.state.position, again.state.position)
