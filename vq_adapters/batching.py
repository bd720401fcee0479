"""BatchedState: one class is single cache and batch cache, since every array of a state has the batch on axis 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from typing_extensions import Self

from vq_adapters.counted import spread
from vq_adapters.sharing import SharingState
from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import leaves_of, map_leaves


class BatchedState(SharingState):
    """Rows of the batch join and part as they are."""

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """One batch cache of several caches of a layer, empty ones and ones of other lengths included."""
        transform = caches[0].transform
        for cache in caches:
            same = cache.transform == transform
            check(same, "merge", "caches", "must be of one method and options", cache.transform)
        batch = caches[0]._fresh(("merge", *(id(cache._group) for cache in caches)))
        batch._batched = True
        batch._hooked = next((one for one in (True, False) if any(cache._hooked is one for cache in caches)), None)
        batch._state = _joined(transform, [(cache._settled_state(), len(cache._fills)) for cache in caches])
        batch._fills = [fill for cache in caches for fill in cache._fills]
        return batch

    def extend(self, other: Self) -> None:
        """Add the rows of another batch cache of this layer after these, in place."""
        joined = self.merge([self, other])
        self._state, self._fills, self._batched = joined._state, joined._fills, True
        self._remaining = self._padding = None

    def filter(self, keep: Iterable[int] | mx.array) -> None:
        """Keep the batch rows `keep`, one or more, in that order, in place."""
        listed: Any = keep.tolist() if isinstance(keep, mx.array) else keep
        rows, count = [int(row) for row in listed], len(self._fills)
        there = bool(rows) and all(-count <= row < count for row in rows)
        check(there, self.transform.name, "keep", f"must name some of the {count} batch rows", rows)
        state, index = self._settled_state(), mx.array(rows, mx.int32)
        if state is not None:
            self._state = map_leaves(lambda leaf: leaf[index], state)
        self._fills = [self._fills[row] for row in rows]
        self._remaining = self._remaining and [self._remaining[row] for row in rows]
        self._padding = self._padding and [self._padding[row] for row in rows]

    def extract(self, index: int) -> Self:
        """A single cache with one batch row; the others are untouched."""
        single, state = self._fresh(("extract", index)), self._settled_state()
        single._fills = [self._fills[index]]
        if state is not None and single._fills[0].tokens > 0:
            row = mx.array([index], mx.int32)  # a slice would keep the rows of all others alive
            single._state = map_leaves(lambda leaf: leaf[row], state)
            mx.async_eval(leaves_of(single._state))  # and so would a copy that nobody has made yet
        return single

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a padded prompt: `lengths` valid tokens a row, over all its chunks; or padding on the left."""
        if left_padding is not None and max(left_padding, default=0) > 0:
            self._pad_left(left_padding)
        elif lengths is not None:
            self._check_rows("lengths", len(lengths), lengths)
            self._batched = True
            self._fills = spread(self._fills, len(lengths))
            self._remaining = [int(length) for length in lengths]

    def finalize(self) -> None:
        """End of a padded prompt."""
        self._settle()
        self._remaining = None

    def to_batch(self, left_padding: Sequence[int]) -> Self:
        """An empty batch cache for prompts that are padded on the left."""
        batch = self._fresh("batch")
        batch._pad_left(left_padding)
        return batch

    def _pad_left(self, padding: Sequence[int]) -> None:
        """Make an empty cache a batch whose rows begin with padding."""
        check(self.empty(), self.transform.name, "left_padding", "must be announced before the first token", padding)
        self._batched = True
        self._fills = [Fill() for _ in padding]
        self._padding = [int(pad) for pad in padding] if any(padding) else None


def _joined(transform: Transform, states: list[tuple[Any, int]]) -> Any:
    """States of one layer, one after the other; a None stands for so many empty rows."""
    held = [state for state, _ in states if state is not None]
    if not held:
        return None
    layout, extents = held[0].layout, [transform.extent(state) for state in held]
    if len(held) < len(states):
        extents.append(transform.extent(_empty(transform, layout, 1)))
    extent = transform.common(extents)
    for state in held:
        check(state.layout == layout, "merge", "caches", f"must be of one layout {layout}", state.layout)
    grown = [blank(transform, layout, rows, extent) if state is None else state for state, rows in states]
    grown = [transform.widen(state, extent) for state in grown]
    return map_leaves(lambda *leaves: mx.concatenate(list(leaves), axis=0), *grown)


def blank(transform: Transform, layout: Layout, rows: int, extent: Any) -> Any:
    """An empty state of `rows` batch rows with exactly the room that a state of this extent has."""
    return transform.widen(_empty(transform, layout, rows), extent)


def _empty(transform: Transform, layout: Layout, rows: int) -> Any:
    return transform.init_state(KVSpec(batch=rows, capacity=1, **attrs.asdict(layout)))
