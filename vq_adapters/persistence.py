"""The state of a cache as arrays alone: a description as UTF-8 JSON bytes, then the leaves."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from vq_adapters.batching import blank
from vq_adapters.group import loaded
from vq_functional.core.describe import describe, restore
from vq_functional.core.errors import QuantizerConfigError, check
from vq_functional.core.spec import Layout
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import flatten, leaves_of, rebuild

if TYPE_CHECKING:
    from vq_adapters.cache import TransformKVCache

VERSION = 1
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def pack(cache: TransformKVCache) -> tuple[mx.array, ...]:
    """Description and leaves; never empty, since mlx_lm drops a layer without arrays."""
    counters = json.dumps(_counters(cache)).encode()
    text = b'{"transform": %b, %b' % (_description(cache.transform), counters.removeprefix(b"{"))
    return (mx.array(np.frombuffer(text, np.uint8)), *leaves_of(cache._state))


def _counters(cache: TransformKVCache) -> dict[str, Any]:
    """Everything about a cache that is no array, but for its transform."""
    return {
        "version": VERSION,
        "max_tokens": cache.max_tokens,
        "query_heads": cache.query_heads,
        "batched": cache._batched,
        "remaining": cache._remaining,
        "padding": cache._padding,
        "fills": [list(attrs.astuple(fill)) for fill in cache._fills],
        "layout": None if cache._state is None else _layout_of(cache),
        "capacity": None if cache._state is None else cache.transform.extent(cache._state),
        "group": None if cache._group is None else [cache._group.key, cache._layer, cache._group.uneven],
    }


def unpack(cache: TransformKVCache, arrays: Sequence[mx.array]) -> None:
    """Make `cache` what `pack` saw; raises QuantizerConfigError and leaves it as it was for anything else."""
    data = _parsed(arrays)
    try:
        transform = restore(data["transform"])
        fills = [Fill(*counters) for counters in data["fills"]]
        rest = {name: data[name] for name in ("max_tokens", "query_heads", "batched", "remaining", "padding", "group")}
        state = None if data["layout"] is None else _rebuilt(transform, data, arrays[1:])
        _check_fills(transform, fills, state)
        _check_group(rest["group"])
    except (KeyError, TypeError, AttributeError) as error:
        raise QuantizerConfigError(f"state: `state` must have a whole description; got {error!r}") from error
    check(state is not None or len(arrays) == 1, "state", "state", "must hold no arrays while empty", len(arrays))
    cache._reset(transform, rest["max_tokens"], rest["query_heads"])
    cache._state, cache._fills, cache._batched = state, fills, rest["batched"]
    cache._remaining, cache._padding = rest["remaining"], rest["padding"]
    if rest["group"] is not None:
        key, layer, uneven = rest["group"]
        cache.join(loaded(key, layer, uneven), layer)


def _check_group(group: Any) -> None:
    known = group is None or (isinstance(group, list) and [type(x) for x in group] == [str, int, bool])
    check(known, "state", "group", "must be a key, a layer and whether layers differ", group)


def _check_fills(transform: Transform, fills: list[Fill], state: Any) -> None:
    for fill in fills:
        numbers = attrs.astuple(fill)
        counted = all(isinstance(number, int) and number >= 0 for number in numbers)
        check(counted and fill.coded <= fill.rows <= fill.tokens, "state", "fills", "must be counters", numbers)
        fits = fill == Fill() if state is None else transform.fits(state, fill)
        check(fits, "state", "fills", "must not count past the arrays", numbers)


@functools.lru_cache(maxsize=128)
def _description(transform: Transform) -> bytes:
    """A transform as JSON; tables make it long, and a state is asked for at every chunk of a prompt."""
    return json.dumps(describe(transform)).encode()


def _parsed(arrays: Sequence[mx.array]) -> dict[str, Any]:
    """The description; raises QuantizerConfigError where it is none of ours."""
    try:
        data = json.loads(bytes(arrays[0].tolist()))  # type: ignore[arg-type]
        version = data["version"]
    except (IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise QuantizerConfigError(f"state: `state` must begin with a description; got {error}") from error
    check(version == VERSION, "state", "version", f"must be {VERSION}", version)
    return data


def _layout_of(cache: TransformKVCache) -> dict[str, Any]:
    layout = attrs.asdict(cache._state.layout)
    return {**layout, "dtype": str(layout["dtype"]).removeprefix("mlx.core.")}


def _rebuilt(transform: Transform, data: dict[str, Any], leaves: Sequence[mx.array]) -> Any:
    """A state of the described shape with these leaves; a lazy blank one tells what they must be."""
    layout = Layout(**{**data["layout"], "dtype": DTYPES[data["layout"]["dtype"]]})
    like = blank(transform, layout, len(data["fills"]), data["capacity"])
    wanted, structure = flatten(like)
    check(len(leaves) == len(wanted), "state", "state", f"must hold {len(wanted)} arrays", len(leaves))
    for want, got in zip(wanted, leaves, strict=True):
        same = want.shape == got.shape and want.dtype == got.dtype
        check(same, "state", "state", f"must hold {want.dtype} {want.shape}", (got.dtype, got.shape))
    return rebuild(structure, leaves)
