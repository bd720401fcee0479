"""Law: a state that grew goes on exactly as one that had the room from the start."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from laws.common import SPEC, Run, Subject, assert_same, begin, feed, keys_and_values, live, over, shapes
from vq_functional.core.tree import flatten

SMALL_SPEC, LARGE_SPEC = attrs.evolve(SPEC, capacity=64), attrs.evolve(SPEC, capacity=192)


@over(without=["share"])
@given(
    before=st.sampled_from([[], [1], [40], [30, 1, 1], [64]]), after=st.sampled_from([[1], [1] * 20, [50], [5, 1, 60]])
)
def test_growing_moves_nothing(subject: Subject, before: list[int], after: list[int]) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, sum(before) + sum(after))
    start = sum(before)
    small = feed(transform, begin(transform, SMALL_SPEC), keys[:, :, :start], values[:, :, :start], before)
    large = feed(transform, begin(transform, LARGE_SPEC), keys[:, :, :start], values[:, :, :start], before)
    grown = Run(transform.grow(small.state, 192), small.fill)
    assert shapes(grown.state) == shapes(large.state)
    assert flatten(grown.state)[1] == flatten(large.state)[1]
    assert_same(live(transform, grown), live(transform, small), "what is held")
    assert_same(live(transform, grown), live(transform, large), "what is held")
    rest = keys[:, :, start:], values[:, :, start:]
    one, two = (feed(transform, run, *rest, after) for run in (grown, large))
    assert_same(live(transform, one), live(transform, two), f"after {after} more")


@over()
@pytest.mark.parametrize("capacity", [1, 40, 64])
def test_growing_to_less_keeps_all(subject: Subject, capacity: int) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 60)
    run = feed(transform, begin(transform, SMALL_SPEC), keys, values)
    enough = min(capacity, transform.capacity(run.state))
    assert_same(transform.grow(run.state, enough), run.state, "a state that has the room")


@over()
def test_growing_leaves_the_old_state(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 61)
    run = feed(transform, begin(transform, SMALL_SPEC), keys[:, :, :60], values[:, :, :60])
    before = vq.nbytes(run.state)
    transform.grow(run.state, 192)
    assert vq.nbytes(run.state) == before
    again = begin(transform, SMALL_SPEC)
    again = feed(transform, again, keys[:, :, :60], values[:, :, :60])
    assert_same(run.state, again.state, "the state that was grown from")
