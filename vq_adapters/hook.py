"""The attention hook: real queries reach the caches, and attention reads codes directly.

Models import mlx_lm's ``scaled_dot_product_attention`` by name, so the name
has to be replaced where they hold it: for one model (a subclass of each
attention module with the same code and other globals), or for whole modules.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vq_adapters.architecture import check_model
from vq_adapters.tagged import owner_of
from vq_functional.core.errors import check_choice

NAME = "scaled_dot_product_attention"
Undo = Callable[[], None]


def install_attention(model: nn.Module, way: str = "instance") -> Undo:
    """Send the model's attention over our caches to these caches; returns a function that undoes it.

    `way` "instance" touches this model only; "module" replaces the name in the
    modules that define the model's layers, for every model they serve.
    Installing twice changes nothing.
    """
    check_model("install_attention", model)
    check_choice("install_attention", "way", way, ("instance", "module"))
    undos = _patch_instances(model) if way == "instance" else _patch_modules(model)

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


@contextlib.contextmanager
def attention_hook(model: nn.Module, way: str = "instance") -> Iterator[nn.Module]:
    """`install_attention` for the length of a block; a generator must be used up inside it."""
    undo = install_attention(model, way)
    try:
        yield model
    finally:
        undo()


def can_hook(model: nn.Module) -> bool:
    """Whether `install_attention` finds anything in this model to send to our caches."""
    return any(_calls_attention(method) for module in model.modules() for _, method in _methods(type(module)))


def hooked(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`original` for plain arrays; the owner's attention for keys and values of our caches."""

    @functools.wraps(original)
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        owner = owner_of(keys, values)
        if owner is not None:
            return owner.attend(queries, keys, values, scale, mask, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention.is_hook = True  # type: ignore[attr-defined]
    return attention


def _patch_instances(model: nn.Module) -> list[Undo]:
    undos: list[Undo] = []
    kinds: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _hooked_class(kind)
        if kinds[kind] is not kind:
            object.__setattr__(module, "__class__", kinds[kind])
            undos.append(functools.partial(object.__setattr__, module, "__class__", kind))
    return undos


def _hooked_class(kind: type) -> type:
    """A subclass whose methods call the hook; `kind` itself where none calls attention."""
    methods = {name: _with_hook(method) for name, method in _methods(kind) if _lacks_hook(method)}
    return type(kind.__name__, (kind,), methods) if methods else kind


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    seen = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, member in vars(base).items():
            if name not in seen and isinstance(member, types.FunctionType):
                yield name, member
            seen.add(name)


def _calls_attention(method: types.FunctionType) -> bool:
    return _mentions(method.__code__) and method.__globals__.get(NAME) is not None


def _lacks_hook(method: types.FunctionType) -> bool:
    return _calls_attention(method) and not hasattr(method.__globals__[NAME], "is_hook")


def _mentions(code: types.CodeType) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return NAME in code.co_names or any(_mentions(const) for const in inner)


def _with_hook(method: types.FunctionType) -> types.FunctionType:
    names = {**method.__globals__, NAME: hooked(method.__globals__[NAME])}
    copy = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return functools.update_wrapper(copy, method)  # type: ignore[return-value]


def _patch_modules(model: nn.Module) -> list[Undo]:
    undos: list[Undo] = []
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for name in sorted(names):
        module = sys.modules.get(name)
        original = getattr(module, NAME, None)
        if original is not None and not hasattr(original, "is_hook"):
            setattr(module, NAME, hooked(original))
            undos.append(functools.partial(setattr, module, NAME, original))
    return undos
