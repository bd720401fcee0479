"""Law: compiled and eager calls give the same bits."""

import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import (
    METHODS,
    PAIRS,
    SPEC,
    Run,
    Subject,
    assert_same,
    begin,
    call,
    feed,
    keys_and_values,
    over,
    tokens,
)
from vq_functional.core.tree import flatten

STEPS = 20


def assert_compiled_is_eager(subject: Subject, n: int, steps: int, with_queries: bool = False) -> None:
    """Calls of `n` tokens after a prompt; the state is carried on in both ways."""
    transform = subject.transform
    compiled = vq.compile(transform)
    keys, values = keys_and_values(SPEC, 30 + n * steps)
    queries = tokens(30 + n * steps, 7, heads=2 * SPEC.kv_heads) if with_queries else None
    eager = fast = feed(
        transform,
        begin(transform),
        keys[:, :, :30],
        values[:, :, :30],
        None,
        queries[:, :, :30] if with_queries else None,
    )
    for start in range(30, 30 + n * steps, n):
        new = slice(start, start + n)
        asking = None if queries is None else queries[:, :, new]
        assert_same(compiled.make_mask(fast.state, n), transform.make_mask(eager.state, n), f"mask at {start}")
        one = call(transform, eager, keys[:, :, new], values[:, :, new], asking)
        two = call(transform, fast, keys[:, :, new], values[:, :, new], asking, compiled.update)
        mx.eval(flatten(one[0].state)[0], flatten(two[0].state)[0])
        assert_same((two[0].state, *two[1:]), (one[0].state, *one[1:]), f"call at {start}")
        eager, fast = one[0], two[0]


@over(among=PAIRS)
def test_one_token_steps(subject: Subject) -> None:
    assert_compiled_is_eager(subject, 1, STEPS)


@over("uses_queries")
def test_one_token_steps_by_queries(subject: Subject) -> None:
    assert_compiled_is_eager(subject, 1, STEPS, with_queries=True)


@over(among=METHODS)
def test_calls_of_several_tokens(subject: Subject) -> None:
    assert_compiled_is_eager(subject, 9, 3)


@over("evicts")
@pytest.mark.parametrize("n", [1, 9])
def test_equal_keys(subject: Subject, n: int) -> None:
    """Ties fall the same way."""
    transform = subject.transform
    one, values = tokens(1, 3), tokens(45, 4)
    keys = mx.broadcast_to(one, values.shape)

    def positions(update: object) -> mx.array:
        run: Run = feed(transform, begin(transform), keys, values, [27] + [n] * (18 // n), update=update)
        return transform.ordered(run.state).position

    assert_same(positions(vq.compile(transform).update), positions(None), "kept positions")
