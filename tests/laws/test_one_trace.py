"""Law: 64 one-token steps are one trace; nothing in a step reads an array back or bakes in a number that changes."""

from typing import Any

import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Subject, begin, feed, keys_and_values, over, tokens
from vq_functional.core.transform import Transform
from vq_functional.core.tree import flatten

STEPS = 64


class Traced:
    """A transform whose Python code counts how often it runs; compiled, it runs once a trace."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self.updates = 0
        self.masks = 0

    def init_state(self, *arguments: Any) -> Any:
        return self.transform.init_state(*arguments)

    def update(self, *arguments: Any) -> Any:
        self.updates += 1
        return self.transform.update(*arguments)

    def make_mask(self, state: Any, n: int) -> mx.array:
        self.masks += 1
        return self.transform.make_mask(state, n)


@over()
@pytest.mark.parametrize("with_queries", [False, True], ids=["by-keys", "by-queries"])
def test_one_token_steps_are_one_trace(subject: Subject, with_queries: bool) -> None:
    traced = Traced(subject.transform)
    compiled = vq.compile(traced)  # type: ignore[arg-type]
    keys, values = keys_and_values(SPEC, STEPS)
    queries = tokens(STEPS, 7, heads=2 * SPEC.kv_heads) if with_queries else None
    state = compiled.init_state(SPEC)
    for i in range(STEPS):
        mask = compiled.make_mask(state, 1)
        step = slice(i, i + 1)
        state, keys_out, values_out = compiled.update(
            state, keys[:, :, step], values[:, :, step], None if queries is None else queries[:, :, step]
        )
        mx.eval(flatten(state)[0], keys_out, values_out, mask)
    assert (traced.updates, traced.masks) == (1, 1)
    assert state.offset.tolist() == [STEPS] * SPEC.batch


@over()
def test_a_decode_after_a_prompt_traces_once_more_and_no_more(subject: Subject) -> None:
    traced = Traced(subject.transform)
    compiled = vq.compile(traced)  # type: ignore[arg-type]
    keys, values = keys_and_values(SPEC, 40 + STEPS)
    run = feed(subject.transform, begin(subject.transform), keys[:, :, :40], values[:, :, :40])
    feed(subject.transform, run, keys[:, :, 40:], values[:, :, 40:], [1] * STEPS, update=compiled.update)
    assert traced.updates == 1
