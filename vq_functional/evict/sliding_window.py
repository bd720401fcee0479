"""Sliding window: the newest tokens in a ring of slots, over any store whose rows stand alone.

Position p is held in slot p mod `window_size`. Attention is exactly that of a
window, also inside a call of several tokens. No sinks; why these help is the
subject of StreamingLLM (arXiv 2309.17453).
"""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec
from vq_functional.core.errors import check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import HeldRows, RowStore, first_rows, rows, start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.ops.attention import Parts
from vq_functional.ops.masks import causal, query_positions
from vq_functional.ops.rows import pick, put, token_order
from vq_functional.ops.tables import counting


@attrs.frozen
class RingState:
    rows: HeldRows  # arrays [B, H, window_size + new, width]
    offset: mx.array  # int32 [B]: tokens seen
    before: mx.array | None  # int32 [B]: tokens seen before a call of several tokens that has not settled
    layout: Layout = static_field()
    new: int = static_field()  # columns at the end that a call of several tokens put there; 0 once settled


@attrs.frozen
class Ring(Transform):
    """The newest `size` rows of a row store."""

    name: str
    store: RowStore
    size: int
    trimmable = False
    evicts = True

    @property
    def coded(self) -> bool:
        return self.store.coded

    @property
    def window(self) -> int:
        return self.size

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> RingState:
        offset = start_offset(spec.batch, left_padding)
        held = self.store.empty(spec.layout, spec.batch, self.size)
        return RingState(held, offset, None, spec.layout, 0)

    def write(self, state: RingState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> RingState:
        n = keys.shape[2]
        new = self.store.encode(state.layout, keys, values)
        offset = state.offset + (n if lengths is None else lengths)
        if n > 1:
            held = map_leaves(lambda old, x: mx.concatenate([old, x], axis=2), state.rows, new)
            return RingState(held, offset, state.offset, state.layout, n)
        slot = mx.broadcast_to((state.offset % self.size)[:, None, None], (*keys.shape[:2], 1))
        if lengths is not None:
            comes = (lengths > 0)[:, None, None]
            new = map_leaves(
                lambda x, old: mx.where(comes.reshape(comes.shape + (1,) * (x.ndim - 3)), x, pick(old, slot)),
                new,
                state.rows,
            )
        held = map_leaves(lambda old, x: put(old, slot, x), state.rows, new)
        return RingState(held, offset, None, state.layout, 0)

    def settle(
        self, held: RingState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> RingState:
        if held.before is None:
            return held
        slots, before = counting(self.size), held.before[:, None]
        position = self._in_slots(held.offset)
        index = mx.where(position >= mx.maximum(before, 0), position - before + self.size, slots)
        kept = map_leaves(lambda x: pick(x, index[:, None]), held.rows)
        return RingState(kept, held.offset, None, held.layout, 0)

    def parts(self, held: RingState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        if fill is None:
            return self.store.as_parts(held.layout, held.rows)
        stored = first_rows(held.rows, fill.rows - held.new)
        if held.new:
            stored = map_leaves(lambda old, x: mx.concatenate([old, x[:, :, -held.new :]], axis=2), stored, held.rows)
        return self.store.as_parts(held.layout, stored)

    def positions(self, held: RingState) -> mx.array:
        if held.before is None:
            return self._in_slots(held.offset)[:, None]
        incoming = query_positions(held.before, held.new)
        incoming = mx.where(incoming < held.offset[:, None], incoming, -1)
        return mx.concatenate([self._in_slots(held.before), incoming], axis=-1)[:, None]

    def positions_after(self, state: RingState, n: int, fill: Fill | None = None) -> mx.array:
        if n == 1:
            columns = self._in_slots(state.offset + 1)[:, None]
            return columns if fill is None else columns[..., : self.written(fill, 1).rows]
        stored = self._in_slots(state.offset)[:, None]
        stored = stored if fill is None else stored[..., : fill.rows]
        return mx.concatenate([stored, query_positions(state.offset, n)[:, None]], axis=-1)

    def visible(self, held: RingState, n: int, lengths: mx.array | None = None) -> mx.array:
        start = held.offset - (n if lengths is None else lengths)
        return causal(self.positions(held), query_positions(start, n), self.size)

    def make_mask(self, state: RingState, n: int, fill: Fill | None = None, window: int | None = None) -> mx.array:
        window = self.size if window is None else min(window, self.size)
        return causal(self.positions_after(state, n, fill), query_positions(state.offset, n), window)

    def ordered(self, state: RingState) -> RingState:
        order = token_order(self._in_slots(state.offset))
        return attrs.evolve(state, rows=map_leaves(lambda x: pick(x, order[:, None]), state.rows))

    def written(self, fill: Fill, n: int) -> Fill:
        held = min(fill.rows + 1, self.size) if n == 1 else fill.rows + n
        return attrs.evolve(fill, tokens=fill.tokens + n, rows=held)

    def settled(self, fill: Fill, n: int) -> Fill:
        return attrs.evolve(fill, rows=min(fill.rows, self.size))

    def settles(self, fill: Fill, n: int) -> bool:
        return n > 1

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        return 0

    def capacity(self, state: RingState) -> int:
        return self.size

    def _in_slots(self, offset: mx.array) -> mx.array:
        """Position int [B, size] of the row in each slot once `offset` int [B] tokens have come; -1 in an empty one."""
        newest = offset[:, None] - 1
        position = newest - (newest - counting(self.size)) % self.size
        return mx.maximum(position, -1)


def sliding_window(*, window_size: int, key: Codec | None = None, value: Codec | None = None) -> Transform:
    """Hold the newest `window_size` tokens, keys and values by any codecs (default: as they come).

    Raises QuantizerConfigError for a window that is no integer >= 1.
    """
    check_int("sliding_window", "window_size", window_size, 1)
    return windowed(rows(key=key, value=value), window_size)


def windowed(store: RowStore, size: int) -> Ring:
    """A row store that holds the newest `size` tokens."""
    return Ring(f"sliding_window over {store.name}", store, size)
