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
Structure: TypeAlias = Any  # hashable: `_LEAF`, None, (`_FIXED`, value) or (class, child structures)

_STATIC = {"static": True}
_LEAF = mx.array
_FIXED = "fixed"


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
        return _LEAF
    if node is None:
        return None
    kind: Any = type(node)
    children: list[Structure] = []
    # Most children are arrays: a call less for each of them counts, as every step comes through here.
    if isinstance(node, tuple):
        for child in node:
            if type(child) is mx.array:
                leaves.append(child)
                children.append(_LEAF)
            else:
                children.append(_collect(child, leaves))
        return (kind, tuple(children))
    for name, static in _fields(kind):
        value = getattr(node, name)
        if static:
            children.append((_FIXED, value))
        elif type(value) is mx.array:
            leaves.append(value)
            children.append(_LEAF)
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
        return _made(kind, [function(child) if type(child) is mx.array else _mapped(function, child) for child in node])
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
    if structure is _LEAF:
        return next(leaves)
    if structure is None:
        return None
    kind, children = structure
    if kind is _FIXED:
        return children
    return _made(kind, [next(leaves) if child is _LEAF else _restore(child, leaves) for child in children])
