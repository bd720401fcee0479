"""``mx.compile`` for functions of states."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.spec import KVSpec
from vq_functional.core.transform import Transform
from vq_functional.core.tree import Structure, flatten, rebuild


@attrs.define(eq=False)
class _Trace:
    """A compiled flat function and the structure of what it returns, known once traced."""

    function: Callable[..., Any]
    arguments: Structure
    result: Structure = None

    def __attrs_post_init__(self) -> None:
        self.step = mx.compile(self._flat)

    step: Callable[..., Any] = attrs.field(init=False)

    def _flat(self, *leaves: mx.array) -> tuple[mx.array, ...]:
        outputs, self.result = flatten(self.function(*rebuild(self.arguments, leaves)))
        return outputs


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a pure function whose arguments and results are trees of arrays.

    One trace per structure, shapes and dtypes of the arguments.
    """
    traces: dict[Any, _Trace] = {}

    def call(*arguments: Any) -> Any:
        leaves, structure = flatten(arguments)
        key = (structure, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        trace = traces.get(key)
        if trace is None:
            trace = traces[key] = _Trace(function, structure)
        outputs = trace.step(*leaves)
        return rebuild(trace.result, outputs)

    return call


@attrs.frozen(eq=False)
class CompiledTransform:
    """The triple of a transform with its update and mask compiled."""

    transform: Transform
    update: Callable[..., Any]
    make_mask: Callable[[Any, int], mx.array]

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> Any:
        """Same as the transform's own."""
        return self.transform.init_state(spec, left_padding)


def compile(transform: Transform) -> CompiledTransform:
    """Compile `update` and `make_mask`: one trace per number of new tokens and capacity."""
    step = jit(transform.update)
    masks: dict[int, Callable[..., Any]] = {}

    def update(state: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None) -> Any:
        return step(state, keys, values, queries)

    def make_mask(state: Any, n: int) -> mx.array:
        if n not in masks:
            masks[n] = jit(lambda traced: transform.make_mask(traced, n))
        return masks[n](state)

    return CompiledTransform(transform, update, make_mask)
