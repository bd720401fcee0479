"""The compiled steps of a transform, shared by all layers that use it."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.jit import jit
from vq_functional.core.transform import Transform
from vq_functional.crosslayer.stack import Stack
from vq_functional.ops.attention import attend as attend_parts
from vq_functional.ops.attention import rescaled


@attrs.frozen(eq=False)
class Steps:
    """One-token steps; calls of several tokens run eagerly, since prompts have any length.

    `settle` and `settle_by_keys` take (held, group, queries), with None for the
    group of a layer that stands alone. So does `finish` of a scale, for states
    whose columns all hold rows: it attends and settles at once, since both read
    the same rows, and vectors or scores that they have in common are made once.
    It returns (output, state) and the group.
    """

    write: Callable[..., Any]
    read: Callable[..., Any]
    settle: Callable[..., Any]
    settle_by_keys: Callable[..., Any]
    observe: Callable[..., Any]
    observe_by_keys: Callable[..., Any]
    attend: Callable[[float], Callable[..., Any]]
    finish: Callable[[float], Callable[..., Any]]


@functools.lru_cache(maxsize=1024)
def steps(transform: Transform) -> Steps:
    """The compiled steps of a transform."""

    def settle_by_keys(held: Any, group: Any, keys: mx.array) -> Any:
        return transform.settle_in(held, group, keys, proxy=True)

    def observe_by_keys(held: Any, keys: mx.array) -> Any:
        return transform.observe(held, keys, proxy=True)

    @functools.lru_cache(maxsize=16)
    def attend(scale: float) -> Callable[..., Any]:
        return jit(lambda held, queries, mask: transform.attend(held, queries, scale, mask))

    @functools.lru_cache(maxsize=16)
    def finish(scale: float) -> Callable[..., Any]:
        def step(held: Any, group: Any, queries: mx.array) -> Any:
            if transform.coded:
                out = transform.attend(held, queries, scale)
            else:  # no mask: every column holds a row
                out = attend_parts(*transform.parts(held), queries, scale)
            state, group = transform.settle_in(held, group, rescaled(queries, scale))
            return (out, state), group

        return jit(step)

    return Steps(
        jit(transform.write),
        jit(transform.read),
        jit(transform.settle_in),
        jit(settle_by_keys),
        jit(transform.observe),
        jit(observe_by_keys),
        attend,
        finish,
    )


@functools.lru_cache(maxsize=1024)
def settle_together(stack: Stack) -> Callable[..., Any]:
    """Compiled end of a one-token call of all layers of a stack: of their states and the last layer's keys."""
    return jit(stack.settle_together)
