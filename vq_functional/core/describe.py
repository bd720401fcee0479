"""Transforms as plain data and back: what a saved cache says about itself. No pickle, no code from files."""

from typing import Any

import attrs

from vq_functional.core.codec import Codec
from vq_functional.core.errors import check
from vq_functional.core.policy import Policy
from vq_functional.core.transform import Transform


class Described:
    """Base of a part of a transform that is neither a transform nor a policy or codec."""


_BASES = (Transform, Policy, Codec, Described)


def describe(part: Any) -> Any:
    """Numbers, strings, lists and dicts that name a transform, its parts and all options."""
    if attrs.has(type(part)):
        fields = {field.name: describe(getattr(part, field.name)) for field in attrs.fields(type(part))}
        return {"kind": type(part).__name__, **fields}
    if isinstance(part, tuple):
        return [describe(item) for item in part]
    return part


def restore(data: Any) -> Any:
    """Inverse of `describe`; raises QuantizerConfigError for a kind that isn't loaded."""
    if isinstance(data, list):
        return tuple(restore(item) for item in data)
    if not isinstance(data, dict):
        return data
    fields = {name: restore(value) for name, value in data.items() if name != "kind"}
    kinds = _kinds()
    rule = "must name a known part; import the module that defines it before loading"
    check(data.get("kind") in kinds, "restore", "kind", rule, data.get("kind"))
    return kinds[data["kind"]](**fields)


def _kinds() -> dict[str, type]:
    found: dict[str, type] = {}
    todo: list[type] = list(_BASES)
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if "__attrs_attrs__" in vars(kind):  # a class with slots leaves its first draft among the subclasses
            found[kind.__name__] = kind
    return found | _options()


def _options() -> dict[str, type]:
    from vq_functional.methods import TABLE

    return {method.options.__name__: method.options for method in TABLE}
