"""Law: an update leaves the old state as it was, so that it can be used again."""

import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Run, Subject, assert_same, begin, call, feed, keys_and_values, over, raw
from vq_functional.core.tree import flatten


@over()
@pytest.mark.parametrize("n", [1, 9])
def test_the_old_state_is_untouched(subject: Subject, n: int) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 40 + n)
    old = feed(transform, begin(transform), keys[:, :, :40], values[:, :, :40])
    before = [raw(leaf).copy() for leaf in flatten(old.state)[0]]
    new = keys[:, :, 40:], values[:, :, 40:]
    first = call(transform, old, *new)
    mx.eval(flatten(first[0].state)[0], *first[1:])
    assert all((raw(leaf) == was).all() for leaf, was in zip(flatten(old.state)[0], before, strict=True))
    again = call(transform, old, *new)
    assert_same((again[0].state, *again[1:]), (first[0].state, *first[1:]), "the second update of one state")


@over()
def test_two_futures_of_one_state_do_not_meet(subject: Subject) -> None:
    """An old state is a snapshot: going back to it and on is the same as never having left."""
    transform = subject.transform
    update = vq.compile(transform).update
    keys, values = keys_and_values(SPEC, 50)
    other_keys, other_values = keys_and_values(SPEC, 10, seed=5)
    snapshot = feed(transform, begin(transform), keys[:, :, :40], values[:, :, :40])

    def ahead(run: Run, k: mx.array, v: mx.array) -> Run:
        return feed(transform, run, k, v, [1] * 10, update=update)

    straight = ahead(snapshot, keys[:, :, 40:], values[:, :, 40:])
    ahead(snapshot, other_keys, other_values)
    back = ahead(snapshot, keys[:, :, 40:], values[:, :, 40:])
    assert_same(back.state, straight.state, "after a detour")
