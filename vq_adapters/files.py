"""Lists of caches in files: safetensors, with a description of every layer in the header. No pickle, no code."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from vq_adapters.artifacts import digest, write_whole
from vq_adapters.cache import TransformKVCache
from vq_adapters.classes import CLASSES
from vq_adapters.entries import is_list
from vq_functional.core.errors import QuantizerConfigError, check

FORMAT, VERSION = "vq_adapters.caches", 1

_KINDS: list[type[TransformKVCache]] = [TransformKVCache, *CLASSES.values()]
OWN_CLASSES = {kind.__name__: kind for kind in _KINDS}

# Whose caches may stand beside ours in a list; a file names those of this one in full.
_OTHER = "mlx_vlm.models.cache"
_RULE = f"must be of a class of this package, of mlx_lm.models.cache or of {_OTHER}"

# What reading a file that is not of this format, or damaged, may raise.
_DAMAGE = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


def register() -> None:
    """Make our classes known to mlx_lm, whose `load_prompt_cache` finds classes in its own module by name."""
    for name, kind in OWN_CLASSES.items():
        if not hasattr(mlx_cache, name):
            setattr(mlx_cache, name, kind)


def save(path: str | os.PathLike[str], caches: Sequence[Any], metadata: dict[str, str] | None = None) -> None:
    """Write a list of caches, our own and mlx_lm's, to exactly `path`; an older file stays until the new one is whole.

    Raises QuantizerConfigError for a cache of a class that `load` could not find again.
    """
    arrays: list[mx.array] = []
    layers = [_described(cache, arrays) for cache in caches]
    header = json.dumps({"version": VERSION, "layers": layers, "metadata": metadata or {}})
    named = {str(i): array for i, array in enumerate(arrays)}
    write_whole(Path(path), named, {"format": FORMAT, "header": header, "digest": digest(named, header)})


def load(path: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """The caches that `save` wrote, and with `return_metadata` its metadata beside them.

    Raises QuantizerConfigError for a damaged file and for one that `save` didn't write.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"load: no file {os.fspath(path)!r}")
    try:
        arrays, header = _read(path)
        caches = [_restored(layer, arrays) for layer in header["layers"]]
        metadata = dict(header["metadata"])
    except QuantizerConfigError:
        raise
    except _DAMAGE as error:
        raise QuantizerConfigError(f"load: `path` must be a whole file that `save` wrote; got {error}") from error
    return (caches, metadata) if return_metadata else caches


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, mx.array], dict[str, Any]]:
    loaded: Any = mx.load(os.fspath(path), format="safetensors", return_metadata=True)
    arrays, found = loaded
    check(found.get("format") == FORMAT, "load", "path", f"must be a file of format {FORMAT}", found.get("format"))
    header = json.loads(found["header"])
    check(header["version"] == VERSION, "load", "version", f"must be {VERSION}", header["version"])
    mx.eval(arrays)
    whole = digest(arrays, found["header"]) == found["digest"]
    check(whole, "load", "path", "must be as `save` wrote it", "other contents than its digest tells")
    return arrays, header


def _described(cache: Any, arrays: list[mx.array]) -> dict[str, Any]:
    """Class and state of one cache; its arrays go to the end of `arrays`."""
    name, module = type(cache).__name__, type(cache).__module__
    name = f"{module}.{name}" if module == _OTHER else name
    check(_class(name) is type(cache), "save", "caches", _RULE, type(cache))
    if is_list(cache):  # mlx_vlm's would look for our classes in its own module
        return {"class": name, "members": [_described(one, arrays) for one in cache.caches]}
    try:
        state = cache.state
    except AttributeError:  # before 0.32, mlx_lm's own empty caches have none
        raise QuantizerConfigError(f"save: `caches` must have a state; got an empty {name}") from None
    return {"class": name, "state": _packed(state, arrays), "meta": _packed(_meta_state(cache), arrays)}


def _meta_state(cache: Any) -> Any:
    """What `from_state` of mlx_lm's caches takes beside the state before 0.32; None where it takes nothing."""
    return None if isinstance(cache, TransformKVCache) else getattr(cache, "meta_state", None)


def _packed(node: Any, arrays: list[mx.array]) -> Any:
    """A state as JSON: arrays by number, lists and tuples as lists, numbers and strings as they are."""
    if isinstance(node, mx.array):
        arrays.append(node)
        return {"array": len(arrays) - 1}
    if isinstance(node, (list, tuple)):
        return [_packed(child, arrays) for child in node]
    plain = node is None or isinstance(node, (bool, int, float, str))
    check(plain, "save", "caches", "must have states of arrays, numbers, strings and lists", type(node))
    return node


def _unpacked(node: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(node, dict):
        return arrays[str(node["array"])]
    return [_unpacked(child, arrays) for child in node] if isinstance(node, list) else node


def _class(name: str) -> Any:
    """The class of a cache by its name in files; None where it is none of those that may be saved."""
    module, _, bare = name.rpartition(".")
    if module == _OTHER:
        return getattr(importlib.import_module(_OTHER), bare, None)
    return OWN_CLASSES.get(name) or getattr(mlx_cache, name, None)


def _restored(layer: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    name = layer["class"]
    kind = _class(name)
    check(isinstance(kind, type) and hasattr(kind, "from_state"), "load", "class", _RULE, name)
    if "members" in layer:
        return kind(*(_restored(one, arrays) for one in layer["members"]))
    meta = () if layer["meta"] is None else (_unpacked(layer["meta"], arrays),)
    return kind.from_state(_unpacked(layer["state"], arrays), *meta)
