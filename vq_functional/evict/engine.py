"""The one eviction engine: any policy over any store whose rows stand alone.

Slots are unordered. A decode step writes its row into the free slot, attends
over all slots, and then names the victim as the next free slot: no row moves.
A call of several tokens selects once and gathers, kept rows first.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.policy import Policy, Scene
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import HeldRows, RowStore, first_rows, start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.ops.attention import LOWEST, Parts
from vq_functional.ops.masks import query_positions
from vq_functional.ops.rows import extend_rows, pick, put, token_order, top_rows, victim_row


@attrs.frozen
class SlotState:
    rows: HeldRows  # arrays [B, H, slots, width]
    position: mx.array  # int32 [B, H, slots]: token position, -1 in an empty slot
    memory: Any  # the policy's own arrays [B, H, slots, ...]
    offset: mx.array  # int32 [B]: tokens seen
    layout: Layout = static_field()
    new: int = static_field()  # columns at the end that a call of several tokens put there; 0 once settled


@attrs.frozen
class Evicting(Transform):
    """A policy over a row store."""

    name: str
    policy: Policy
    store: RowStore
    trimmable = False
    evicts = True

    @property
    def coded(self) -> bool:
        return self.store.coded

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> SlotState:
        slots = max(self.policy.budget, spec.capacity) if self.policy.prompt_only else self.policy.budget + 1
        position = mx.full((spec.batch, spec.kv_heads, slots), -1, mx.int32)
        memory = self.policy.init(spec.batch, spec.kv_heads, slots)
        rows = self.store.empty(spec.layout, spec.batch, slots)
        return SlotState(rows, position, memory, start_offset(spec.batch, left_padding), spec.layout, 0)

    def write(self, state: SlotState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> SlotState:
        n = keys.shape[2]
        new = self.store.encode(state.layout, keys, values)
        incoming = query_positions(state.offset, n)
        offset = state.offset + (n if lengths is None else lengths)
        position = self._positions_after(state.position, incoming)
        if n == 1:
            free = _free_slot(state.position)[..., None]
            rows = map_leaves(lambda slots, row: put(slots, free, row), state.rows, new)
            return SlotState(rows, position, state.memory, offset, state.layout, 0)
        stored = self._stored_columns(state.position)
        rows, memory = map_leaves(lambda x: pick(x, stored), (state.rows, state.memory))
        rows = map_leaves(lambda old, x: mx.concatenate([old, x], axis=2), rows, new)
        memory = map_leaves(lambda x: extend_rows(x, stored.shape[2] + n), memory)
        return SlotState(rows, position, memory, offset, state.layout, n)

    def settle(
        self, held: SlotState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> SlotState:
        scene = self._scene(held, queries, lengths, proxy)
        if self.policy.prompt_only and held.new == 0:
            return SlotState(held.rows, scene.position, held.memory, held.offset, held.layout, 0)
        memory, priority = self.policy.score(held.memory, scene)
        safe = self.policy.protected(scene)
        priority = mx.where(mx.isnan(priority), LOWEST, priority)
        priority = mx.where(scene.position < 0, -mx.inf, mx.where(safe, mx.inf, priority))
        scored = SlotState(held.rows, scene.position, memory, held.offset, held.layout, held.new)
        return self._drop_victim(scored, priority) if held.new == 0 else self._select(scored, scene.tokens, priority)

    def parts(self, held: SlotState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        return self.store.as_parts(held.layout, held.rows if fill is None else _live(held, fill.rows))

    def positions(self, held: SlotState) -> mx.array:
        return held.position

    def positions_after(self, state: SlotState, n: int, fill: Fill | None = None) -> mx.array:
        columns = self._positions_after(state.position, query_positions(state.offset, n))
        if fill is None:
            return columns
        stored = columns[..., : fill.rows + (1 if n == 1 else 0)]
        return stored if n == 1 else mx.concatenate([stored, columns[..., -n:]], axis=-1)

    def grow(self, state: SlotState, capacity: int) -> SlotState:
        more = self.policy.prompt_only and capacity > self.capacity(state)
        return _resized(state, capacity) if more else state

    def settled(self, fill: Fill, n: int) -> Fill:
        if self.policy.prompt_only and n <= 1:
            return fill
        return Fill(fill.tokens, min(fill.rows, self.policy.budget))

    def settles(self, fill: Fill, n: int) -> bool:
        return not (self.policy.prompt_only and n == 1)

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        count = n if count is None else count
        return fill.rows + count if self.policy.prompt_only and count <= 1 else 0

    def ordered(self, state: SlotState) -> SlotState:
        order = token_order(state.position)
        rows, memory, position = map_leaves(lambda x: pick(x, order), (state.rows, state.memory, state.position))
        return SlotState(rows, position, memory, state.offset, state.layout, 0)

    def capacity(self, state: SlotState) -> int:
        return state.position.shape[2]

    def overflows(self, state: SlotState, n: int) -> mx.array | None:
        if not self.policy.prompt_only or n > 1:
            return None
        return (state.position[:, 0] >= 0).all(axis=-1)

    def _positions_after(self, position: mx.array, incoming: mx.array) -> mx.array:
        """Column positions that `write` leaves, for tokens at `incoming` int [B, n]."""
        incoming = mx.broadcast_to(incoming[:, None], (*position.shape[:2], incoming.shape[1]))
        if incoming.shape[2] == 1:
            return put(position, _free_slot(position)[..., None], mx.maximum(incoming, -1))
        return mx.concatenate([pick(position, self._stored_columns(position)), incoming], axis=2)

    def _stored_columns(self, position: mx.array) -> mx.array:
        """Index int [B, H, columns] of the slots in token order, without the free one."""
        slots = position.shape[2] if self.policy.prompt_only else position.shape[2] - 1
        return token_order(position)[..., :slots]

    def _scene(self, held: SlotState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Scene:
        n, end = queries.shape[2], held.offset[:, None]
        counts = mx.full(held.offset.shape, n, mx.int32) if lengths is None else lengths
        query_position = query_positions(held.offset - counts, n)
        query_position = mx.where(query_position < end, query_position, -1)
        position = mx.where(held.position < end[..., None], held.position, -1)
        key_parts, value_parts = self.store.as_parts(held.layout, held.rows)
        return Scene(key_parts, value_parts, position, queries, query_position, held.offset, counts, proxy)

    def _drop_victim(self, held: SlotState, priority: mx.array) -> SlotState:
        victim = victim_row(priority, held.position, self.policy.latest)[..., None]
        full = (held.position >= 0).all(axis=-1, keepdims=True)
        stays = ~(full & (mx.arange(priority.shape[2]) == victim))
        return _only(stays, held)

    def _select(self, held: SlotState, tokens: mx.array, priority: mx.array) -> SlotState:
        slots, budget = self.policy.budget + 1, mx.full(held.offset.shape, self.policy.budget, mx.int32)
        if self.policy.prompt_only:
            slots = priority.shape[2] - held.new
            budget = mx.where(tokens > 1, budget, slots)
        columns = min(slots, priority.shape[2])
        kept = top_rows(priority, budget, columns, self.policy.latest)
        rows, memory, position = map_leaves(lambda x: pick(x, kept), (held.rows, held.memory, held.position))
        count = mx.minimum((priority > -mx.inf).sum(axis=-1), budget[:, None])
        narrow = SlotState(rows, position, memory, held.offset, held.layout, 0)
        return _resized(_only(mx.arange(columns) < count[..., None], narrow), slots)


def _live(held: SlotState, count: int) -> HeldRows:
    """The `count` columns that hold rows: stored ones first, those of a call of several tokens last."""
    stored = first_rows(held.rows, count - held.new)
    if held.new == 0:
        return stored
    return map_leaves(lambda old, x: mx.concatenate([old, x[:, :, -held.new :]], axis=2), stored, held.rows)


def _free_slot(position: mx.array) -> mx.array:
    """Index int [B, H] of the first empty slot."""
    return mx.argmax((position < 0).astype(mx.int32), axis=-1)


def _only(stays: mx.array, state: SlotState) -> SlotState:
    """The state with all slots but `stays` bool [B, H, slots] emptied."""
    position = mx.where(stays, state.position, -1)
    memory = map_leaves(lambda x: mx.where(stays.reshape(stays.shape + (1,) * (x.ndim - 3)), x, 0), state.memory)
    return SlotState(state.rows, position, memory, state.offset, state.layout, state.new)


def _resized(state: SlotState, slots: int) -> SlotState:
    """The state with empty slots added at the end."""
    rows, memory = map_leaves(lambda x: extend_rows(x, slots), (state.rows, state.memory))
    missing = slots - state.position.shape[2]
    position = mx.pad(state.position, [(0, 0), (0, 0), (0, missing)], constant_values=-1)
    return SlotState(rows, position, memory, state.offset, state.layout, state.new)
