"""From arguments to a KVCacheConfig: names of options, and values by the type of the default."""

import argparse
import dataclasses
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from vq_adapters.artifacts import FileArtifactStore
from vq_adapters.budgets import BUDGETS
from vq_adapters.cli.parsing import PLAIN, UsageError, say
from vq_adapters.config import KVCacheConfig
from vq_adapters.documented import DEFAULTS, METHOD_NAMES, options_of
from vq_adapters.names import name_of
from vq_adapters.options import OPTIONS
from vq_adapters.persistence import DTYPES
from vq_functional.core.errors import QuantizerConfigError, alike

WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}

# Fields that no text can fill, and what to write.
ELSEWHERE = {
    "method": "is the argument --method",
    "options": "is made of the fields that are given, each by an --option of its own",
    "observers": "holds Python objects; use the library",
}


def configuration(args: argparse.Namespace) -> KVCacheConfig | None:
    """What the cache arguments ask for; None for mlx_lm's own caches.

    Warnings go to stderr, a line each. Raises UsageError for what no method, or not this one, can take.
    """
    if args.method in PLAIN:
        _refuse_options(args)
        return None
    method = method_name(args.method)
    fields = _fields(args, method)
    own = {field: fields.pop(field) for field in list(fields) if field in _class_fields(method)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            options = OPTIONS[method](**own) if own else None
            config = KVCacheConfig(method=method, options=options, **fields)
        except (QuantizerConfigError, TypeError, AttributeError) as error:
            raise UsageError(str(error)) from error
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"warning: {text}")
    return config


def method_name(name: str) -> str:
    """`name`, if there is such a method; raises UsageError with names like it."""
    if name not in METHOD_NAMES:
        raise UsageError(f"no method {name!r}{alike(name, METHOD_NAMES)}; `vq methods` lists them all")
    return name


def parse(text: str, default: Any = None) -> Any:
    """The value that `text` writes for an option with this default.

    None, booleans, numbers, lists (4,3,2 or JSON), JSON objects, and arrays from
    files (@codebook.npy); other text, and all text where the default is text,
    stays as it is. Raises UsageError for a file that can't be read.
    """
    if isinstance(default, str):
        return text
    if text.startswith("@"):
        return _array(text[1:])
    value = _literal(text)
    return _as_tuples(value) if isinstance(default, tuple) else value


def _refuse_options(args: argparse.Namespace) -> None:
    given = [name for name in ("bits", "budget", "dtype", "store") if getattr(args, name) is not None]
    given += ["option"] * bool(args.option)
    if given:
        raise UsageError(f"--{given[0]} has no effect on --method {args.method}")


def _fields(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """All fields that are given and their values."""
    found: dict[str, Any] = {}
    for name, value in [*_short(args, method), *(_option(text, method) for text in args.option)]:
        if name in found:
            raise UsageError(f"`{name}` is given twice")
        found[name] = value
    return found


def _short(args: argparse.Namespace, method: str) -> Iterable[tuple[str, Any]]:
    """Fields and values of the arguments with names of their own."""
    known = options_of(method)
    for name, options in {"bits": ("bits",), "budget": BUDGETS}.items():
        if getattr(args, name) is not None:
            found = [option for option in options if option in known]
            if not found:
                raise UsageError(f"--{name} has no effect on {method}; `vq methods --method {method}` lists options")
            yield name_of(method, found[0]), parse(getattr(args, name))
    if args.seed is not None:
        yield (name_of(method, "seed") if "seed" in known else "seed"), args.seed
    if args.dtype is not None:
        yield "dtype", _dtype(args.dtype)
    if args.store is not None:
        yield "store", _store(args.store)


def _option(text: str, method: str) -> tuple[str, Any]:
    """Field and value of one NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option must be NAME=VALUE; got {text!r}")
    field = field_named(name.strip(), method)
    if field in ELSEWHERE:
        raise UsageError(f"--option {field}: `{field}` {ELSEWHERE[field]}")
    if field in ("dtype", "store"):
        return field, None if value.lower() in WORDS else {"dtype": _dtype, "store": _store}[field](value)
    return field, parse(value, _known(method)[field])


def field_named(name: str, method: str) -> str:
    """The field that a name means: its own, or the method's option without prefix; UsageError with names like it."""
    known = _known(method)
    short = {option: name_of(method, option) for option in options_of(method)}
    if name in known:
        return name
    if short.get(name) in known:
        return short[name]
    raise UsageError(f"no option {name!r}{alike(name, [*short, *known])}; `vq methods --method {method}` lists them")


def _known(method: str) -> dict[str, Any]:
    """All fields and their defaults."""
    return DEFAULTS | _class_fields(method)


def _class_fields(method: str) -> dict[str, Any]:
    """Fields of the method's options class and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(OPTIONS[method])} if method in OPTIONS else {}


def _literal(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if "," in text and not text.startswith(("[", "{")):
        return [_literal(part.strip()) for part in text.split(",") if part.strip()]
    for kind in (int, float, json.loads):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _array(path: str) -> mx.array:
    """The one array of a file."""
    try:
        loaded: Any = mx.load(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{path!r} must be a file with an array: {error}") from error
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            raise UsageError(f"{path!r} must hold one array; it holds {len(loaded)}")
        (loaded,) = loaded.values()
    return loaded


def _dtype(name: str) -> mx.Dtype:
    if name not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]


def _store(folder: str) -> FileArtifactStore:
    if not Path(folder).is_dir():
        raise UsageError(f"--store must be a folder; got {folder!r}")
    return FileArtifactStore(folder)
