"""States are trees of attrs objects, tuples and arrays; here they become flat tuples and back.

``mx.compile`` refuses attrs objects and ``mx.eval`` skips them in silence, so
every border to MLX goes through `flatten` and `rebuild`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs
import mlx.core as mx

Leaves: TypeAlias = tuple[mx.array, ...]
Structure: TypeAlias = Any  # hashable: "leaf", None, ("static", value) or (class, child structures)

_STATIC = {"static": True}


def static_field() -> Any:
    """An attrs field that is no array: it belongs to the structure and never changes per step."""
    return attrs.field(metadata=_STATIC)


def flatten(tree: Any) -> tuple[Leaves, Structure]:
    """Split a tree into its array leaves and a hashable structure."""
    leaves: list[mx.array] = []
    structure = _collect(tree, leaves)
    return tuple(leaves), structure


def rebuild(structure: Structure, leaves: Any) -> Any:
    """Inverse of `flatten`."""
    return _restore(structure, iter(leaves))


def leaves_of(tree: Any) -> list[mx.array]:
    """The array leaves of a tree, in the order of `flatten`."""
    leaves: list[mx.array] = []
    _gather(tree, leaves)
    return leaves


def map_leaves(function: Callable[..., mx.array], *trees: Any) -> Any:
    """Apply `function` to the matching leaves of trees of one structure."""
    if len(trees) == 1:
        return _mapped(function, trees[0])
    columns, structures = zip(*(flatten(tree) for tree in trees), strict=True)
    return rebuild(structures[0], [function(*leaves) for leaves in zip(*columns, strict=True)])


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a state: what is resident, never an estimate."""
    return sum(leaf.nbytes for leaf in leaves_of(tree))


def _collect(node: Any, leaves: list[mx.array]) -> Structure:
    if isinstance(node, mx.array):
        leaves.append(node)
        return "leaf"
    if node is None:
        return None
    kind: Any = type(node)
    if isinstance(node, tuple):
        return (kind, tuple([_collect(child, leaves) for child in node]))
    children: list[Structure] = []
    for name, static in _fields(kind):
        value = getattr(node, name)
        if static:
            children.append(("static", value))
        elif type(value) is mx.array:  # most are: a call less
            leaves.append(value)
            children.append("leaf")
        else:
            children.append(_collect(value, leaves))
    return (kind, tuple(children))


def _gather(node: Any, leaves: list[mx.array]) -> None:
    if isinstance(node, mx.array):
        leaves.append(node)
    elif isinstance(node, tuple):
        for child in node:
            _gather(child, leaves)
    elif node is not None:
        kind: Any = type(node)
        for name, static in _fields(kind):
            if not static:
                _gather(getattr(node, name), leaves)


def _mapped(function: Callable[[mx.array], mx.array], node: Any) -> Any:
    if isinstance(node, mx.array):
        return function(node)
    if node is None:
        return None
    kind: Any = type(node)
    if isinstance(node, tuple):
        return _made(kind, [_mapped(function, child) for child in node])
    fields = [(getattr(node, name), static) for name, static in _fields(kind)]
    return kind(*[value if static else _mapped(function, value) for value, static in fields])


def _made(kind: Any, parts: list[Any]) -> Any:
    return tuple(parts) if kind is tuple else kind(*parts)  # a named tuple is made like an attrs object


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, bool], ...]:
    """Names of the fields of an attrs class, and which of them are static."""
    if not attrs.has(kind):
        raise TypeError(f"a state holds arrays, tuples and attrs objects; got {kind.__name__}")
    return tuple((field.name, bool(field.metadata.get("static"))) for field in attrs.fields(kind))


def _restore(structure: Structure, leaves: Iterator[mx.array]) -> Any:
    if structure == "leaf":
        return next(leaves)
    if structure is None:
        return None
    kind, children = structure
    if kind == "static":
        return children
    return _made(kind, [_restore(child, leaves) for child in children])
