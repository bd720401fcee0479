"""Keys and values that know the cache they came from."""

from typing import Any

import mlx.core as mx


class TaggedArray(mx.array):
    """An ordinary lazy array; anything computed from it is a plain array again.

    The attention hook reads `owner` and `role`, so a model that touches keys
    or values itself falls back to attention over the arrays.
    """

    owner: Any
    role: str
    call: object


def tag(x: mx.array, owner: Any, role: str, call: object) -> TaggedArray:
    """`x` as the keys ("k") or values ("v") that `owner` gave back in `call`."""
    tagged = TaggedArray(x)
    tagged.owner, tagged.role, tagged.call = owner, role, call
    return tagged


def owner_of(keys: Any, values: Any) -> Any:
    """The cache whose keys and values these are, or None."""
    if isinstance(keys, TaggedArray) and isinstance(values, TaggedArray):
        same = keys.owner is values.owner and (keys.role, values.role) == ("k", "v")
        return keys.owner if same else None
    return None
