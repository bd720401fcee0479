"""Batches of TransformKVCache: every array of a state has the batch on axis 0, so rows join and part as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves

if TYPE_CHECKING:
    from vq_adapters.cache import TransformKVCache


def merge(caches: Sequence[TransformKVCache]) -> TransformKVCache:
    """One batch cache; entries may be empty or of different lengths."""
    transform = caches[0].transform
    for cache in caches:
        check(cache.transform == transform, "merge", "caches", "must be of one method and options", cache.transform)
    batch = caches[0]._fresh(("merge", *(id(cache._group) for cache in caches)))
    batch._batched = True
    batch._hooked = next((one for one in (True, False) if any(cache._hooked is one for cache in caches)), None)
    batch._state = _joined(transform, [(cache._settled_state(), len(cache._fills)) for cache in caches])
    batch._fills = [fill for cache in caches for fill in cache._fills]
    return batch


def extend(cache: TransformKVCache, other: TransformKVCache) -> None:
    """Add `other`'s rows after those of `cache`, in place."""
    joined = merge([cache, other])
    cache._state, cache._fills, cache._batched = joined._state, joined._fills, True
    cache._remaining = cache._padding = None


def select(cache: TransformKVCache, keep: Iterable[int] | mx.array) -> None:
    """Keep some batch rows, in place."""
    listed: Any = keep.tolist() if isinstance(keep, mx.array) else keep
    rows = [int(row) for row in listed]
    state, index = cache._settled_state(), mx.array(rows, mx.int32)
    if state is not None:
        cache._state = map_leaves(lambda leaf: leaf[index], state)
    cache._fills = [cache._fills[row] for row in rows]
    cache._remaining = cache._remaining and [cache._remaining[row] for row in rows]
    cache._padding = cache._padding and [cache._padding[row] for row in rows]


def extract(cache: TransformKVCache, index: int) -> TransformKVCache:
    """One row as a single cache; the others are untouched."""
    single, state = cache._fresh(("extract", index)), cache._settled_state()
    single._fills = [cache._fills[index]]
    if state is not None and single._fills[0].tokens > 0:
        single._state = map_leaves(lambda leaf: leaf[index : index + 1], state)
    return single


def pad_left(cache: TransformKVCache, padding: Sequence[int]) -> None:
    """Make an empty cache a batch whose rows begin with padding."""
    check(cache.empty(), cache.transform.name, "left_padding", "must be announced before the first token", padding)
    cache._batched = True
    cache._fills = [Fill() for _ in padding]
    cache._padding = [int(pad) for pad in padding] if any(padding) else None


def spread(fills: list[Fill], rows: int) -> list[Fill]:
    """One fill a batch row."""
    return fills * rows if len(fills) == 1 else fills


def _joined(transform: Transform, states: list[tuple[Any, int]]) -> Any:
    """States of one layer, one after the other; a None stands for so many empty rows."""
    held = [state for state, _ in states if state is not None]
    if not held:
        return None
    layout, capacity = held[0].layout, max(transform.capacity(state) for state in held)
    if len(held) < len(states):
        capacity = max(capacity, transform.capacity(_empty(transform, layout, 1)))
    for state in held:
        check(state.layout == layout, "merge", "caches", f"must be of one layout {layout}", state.layout)
    grown = [blank(transform, layout, rows, capacity) if state is None else state for state, rows in states]
    grown = [transform.widen(state, capacity) for state in grown]
    return map_leaves(lambda *leaves: mx.concatenate(list(leaves), axis=0), *grown)


def blank(transform: Transform, layout: Layout, rows: int, capacity: int) -> Any:
    """An empty state of `rows` batch rows with exactly the room that a state of `capacity` has."""
    return transform.widen(_empty(transform, layout, rows), capacity)


def _empty(transform: Transform, layout: Layout, rows: int) -> Any:
    return transform.init_state(KVSpec(batch=rows, capacity=1, **attrs.asdict(layout)))
