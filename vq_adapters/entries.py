"""Entries of a model's list of caches: one cache each, or the several that a CacheList holds for one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vq_adapters.cache import TransformKVCache

# The modules of a plain KVCache and of CacheList: mlx_vlm has its own.
_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")


def is_plain(cache: Any) -> bool:
    """Whether this is the plain cache of mlx_lm or of mlx_vlm, and of no subclass."""
    return _is_of("KVCache", cache)


def is_list(entry: Any) -> bool:
    """Whether this is a CacheList of mlx_lm or of mlx_vlm."""
    return _is_of("CacheList", entry)


def members(entry: Any) -> tuple[Any, ...]:
    """The caches of an entry; a CacheList counts as one unless it holds keys and values once, beside something else.

    Where some layers hold them twice, one of the two is read by row number,
    and layers that hold them once take part in the same mask.
    """
    if not is_list(entry) or len(entry.caches) < 2:
        return (entry,)
    held = [cache for cache in entry.caches if is_plain(cache) or isinstance(cache, TransformKVCache)]
    return tuple(entry.caches) if len(held) < 2 else (entry,)


def changed(entry: Any, change: Callable[[Any], Any]) -> Any:
    """The entry with each of its caches as `change` makes it."""
    caches = members(entry)
    return change(entry) if caches[0] is entry else type(entry)(*map(change, caches))


def ours(entries: Iterable[Any]) -> list[TransformKVCache]:
    """The caches of this package in a list."""
    return [cache for entry in entries for cache in members(entry) if isinstance(cache, TransformKVCache)]


def _is_of(name: str, cache: Any) -> bool:
    return type(cache).__name__ == name and type(cache).__module__ in _MODULES
