"""The one eviction engine: any policy over any store whose rows stand alone.

Slots are unordered. A decode step writes its row into the free slot, attends
over all slots, and then names the victim as the next free slot: no row moves.
A call of several tokens selects once and gathers, kept rows first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.core.jit import jit
from vq_functional.core.policy import Picked, Policy, Scene
from vq_functional.core.spec import KVSpec
from vq_functional.core.stage import ALONE, Stage
from vq_functional.core.store import HeldRows, RowStore, start_offset
from vq_functional.core.transform import Fill, Transform, check_group
from vq_functional.core.tree import map_leaves
from vq_functional.evict.folding import Every, fold
from vq_functional.evict.slots import (
    SlotState,
    columns,
    free_slot,
    joined,
    live_rows,
    moved,
    only,
    picked,
    resized,
    wiped,
)
from vq_functional.ops.attention import Parts
from vq_functional.ops.masks import query_positions
from vq_functional.ops.rows import (
    chosen,
    drop_left_padding,
    extend_rows,
    gap_fillers,
    pick,
    put,
    token_order,
    top_rows,
    victim_row,
)
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.tables import counting, filled


@attrs.frozen
class Evicting(Transform):
    """A policy over a row store."""

    name: str
    policy: Policy
    store: RowStore
    # False only for the end of a single token after which every row stays.
    sheds: bool = attrs.field(default=True, kw_only=True)
    # False only for the end of a call that changes nothing of what the policy carries.
    learns: bool = attrs.field(default=True, kw_only=True)
    # The layers here that agree with those of other processes.
    stage: Stage = attrs.field(default=ALONE, kw_only=True)
    trimmable = False
    evicts = True

    @property
    def coded(self) -> bool:
        return self.store.coded

    @property
    def leads(self) -> bool:
        return self.policy.leads

    @property
    def leader(self) -> int | None:
        return self.policy.leader

    @property
    def agrees(self) -> bool:
        return self.policy.agrees

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> SlotState:
        limit = self.policy.limit(0)
        slots = max(limit, spec.capacity) if self.policy.prompt_only else limit + 1
        counts = mx.zeros((spec.batch,), mx.int32)
        return SlotState(
            rows=self.store.empty(spec.layout, spec.batch, slots),
            position=mx.full((spec.batch, spec.kv_heads, slots), -1, mx.int32),
            memory=self.policy.init(spec.batch, spec.kv_heads, slots),
            carry=self.policy.init_carry(spec),
            offset=start_offset(spec.batch, left_padding),
            prompt=counts,
            limit=counts + limit,
            layout=spec.layout,
            new=0,
        )

    def write(self, state: SlotState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> SlotState:
        n = keys.shape[2]
        count = filled(n, *state.offset.shape) if lengths is None else lengths
        offset = state.offset + count
        new = self.store.encode(state.layout, keys, values)
        memory = self.policy.arrive(keys, values)
        incoming = query_positions(state.offset, n)
        if n > 1:
            return self._write_several(state, new, memory, incoming, count, offset)
        incoming = incoming if lengths is None else mx.where(count[:, None] > 0, incoming, -1)
        free = free_slot(state.position)
        rows = map_leaves(lambda slots, row: put(slots, free, row), state.rows, new)
        if memory is not None:
            state = attrs.evolve(state, memory=map_leaves(lambda x, row: put(x, free, row), state.memory, memory))
        return attrs.evolve(state, rows=rows, position=self._positions_after(state.position, incoming), offset=offset)

    def settle(
        self, held: SlotState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> SlotState:
        return self.settle_in(held, None, queries, lengths, proxy)[0]

    def settle_in(
        self, held: SlotState, group: Any, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> tuple[SlotState, Any]:
        """The group is the leader's priorities: a tuple of float32 [B, H, T], one a selection."""
        if proxy and self.policy.stride and held.new > self.policy.stride:
            return self._settle_in_strides(held, group, queries, lengths, self.policy.stride)
        if self.policy.leader is not None:
            check_group(self.name, group)
            scene = self._scene(held, queries, lengths, proxy)
            scored, priority = attrs.evolve(held, position=scene.position), group[0]
        else:
            scored, scene, priority = self._scored(held, queries, lengths, proxy)
        if self.policy.prompt_only and held.new == 0:
            return scored, group
        if held.new > 0:
            scored = self._select(scored, scene, priority)
        elif self.sheds:
            scored = self._drop(scored, scene, priority)
        return scored, (priority,) if self.policy.leads else group

    def observe(
        self, held: SlotState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> SlotState:
        """`settle` without giving rows up: what the call tells is remembered, for `compact`."""
        return self.retain(self._scored(held, queries, lengths, proxy)[0])

    def retain(self, held: SlotState) -> SlotState:
        """Every row of the call stays, and nothing is remembered of it."""
        return resized(attrs.evolve(held, new=0), held.slots + 1)

    def compact(self, state: SlotState, limit: mx.array, most: int) -> SlotState:
        """The rows that memory ranks highest, `limit` int32 [B] of them and at most `most`."""
        state = attrs.evolve(self.ordered(state) if self.policy.folds else state, limit=limit)
        nobody = mx.zeros((*state.position.shape[:2], 0, state.layout.key_dim), state.layout.dtype)
        scene = self._scene(state, nobody, None, False)
        priority = self._guarded(self.policy.rank(state.memory, scene), scene)
        return self._gather(state, scene, priority, limit, most + 1)

    def parts(self, held: SlotState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        return self.store.as_parts(held.layout, held.rows if fill is None else live_rows(held, fill.rows))

    def positions(self, held: SlotState) -> mx.array:
        return held.position

    def positions_after(self, state: SlotState, n: int, fill: Fill | None = None) -> mx.array:
        after = self._positions_after(state.position, query_positions(state.offset, n))
        if fill is None:
            return after
        stored = after[..., : fill.rows + (1 if n == 1 else 0)]
        return stored if n == 1 else mx.concatenate([stored, after[..., -n:]], axis=-1)

    def grow(self, state: SlotState, capacity: int) -> SlotState:
        return self.widen(state, max(capacity, state.slots)) if self.policy.prompt_only else state

    def widen(self, state: SlotState, capacity: int) -> SlotState:
        return resized(columns(state, 0, min(state.slots, capacity)), capacity)

    def opened(self, state: SlotState, n: int) -> SlotState:
        return self.widen(state, 1) if n > 1 else state

    def written(self, fill: Fill, n: int) -> Fill:
        counts = n > 1 and isinstance(self.policy.budget, float)
        prompt = fill.prompt + n if counts else fill.prompt
        return attrs.evolve(fill, tokens=fill.tokens + n, rows=fill.rows + n, prompt=prompt)

    def settled(self, fill: Fill, n: int) -> Fill:
        if self.policy.prompt_only and n <= 1:
            return fill
        limit = fill.limit or self.policy.limit(fill.prompt)
        return attrs.evolve(fill, rows=self.policy.kept(fill.tokens, fill.rows, limit))

    def settles(self, fill: Fill, n: int) -> bool:
        return not (self.policy.prompt_only and n == 1)

    def after(self, fills: Sequence[Fill]) -> "Evicting":
        # Where rows go one at a time, one goes at nearly every step.
        sheds = self.policy.most_dropped == 1 or any(self.settled(fill, 1).rows < fill.rows for fill in fills)
        learns = not self.policy.learns_early or any(fill.rows == fill.tokens for fill in fills)
        return self if sheds and learns else _sparing(self, sheds, learns)

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        count = n if count is None else count
        # A single column of padding takes a free slot too.
        return fill.rows + (1 if n == 1 else count) if self.policy.prompt_only and count <= 1 else 0

    def narrowed(self, state: SlotState, fills: Sequence[Fill]) -> SlotState:
        most = max(max(fill.rows, fill.limit or self.policy.limit(fill.prompt)) for fill in fills)
        slots = most if self.policy.prompt_only else most + 1
        if slots >= state.slots:
            return state
        return map_leaves(mx.contiguous, self.widen(state, slots))  # a view would keep all slots alive

    def ordered(self, state: SlotState) -> SlotState:
        return picked(state, token_order(state.position))

    def capacity(self, state: SlotState) -> int:
        return state.slots

    def overflows(self, state: SlotState, n: int) -> mx.array | None:
        if not self.policy.prompt_only or n > 1:
            return None
        return (state.position[:, 0] >= 0).all(axis=-1)

    def _write_several(
        self, state: SlotState, new: HeldRows, memory: Any, incoming: mx.array, count: mx.array, offset: mx.array
    ) -> SlotState:
        n = incoming.shape[1]
        if memory is None:
            memory = map_leaves(lambda x: mx.zeros((*x.shape[:2], n, *x.shape[3:]), x.dtype), state.memory)
        position = mx.broadcast_to(incoming[:, None], (*state.position.shape[:2], n))
        held = attrs.evolve(state, rows=new, memory=memory, position=position, offset=offset, new=n)
        order = self._stored_columns(state.position)
        if order.shape[2]:
            held = joined(wiped(picked(attrs.evolve(state, offset=offset), order)), held)
        if isinstance(self.policy.budget, int):
            return held
        tokens = mx.minimum(count, offset)
        prompt = state.prompt + mx.where(tokens > 1, tokens, 0)
        return attrs.evolve(held, prompt=prompt, limit=self.policy.limits(prompt))

    def _positions_after(self, position: mx.array, incoming: mx.array) -> mx.array:
        """Column positions that `write` leaves, for tokens at `incoming` int [B, n]."""
        incoming = mx.broadcast_to(incoming[:, None], (*position.shape[:2], incoming.shape[1]))
        if incoming.shape[2] == 1:
            return put(position, free_slot(position), mx.maximum(incoming, -1))
        return mx.concatenate([pick(position, self._stored_columns(position)), incoming], axis=2)

    def _stored_columns(self, position: mx.array) -> mx.array:
        """Index int [B, H, columns] of the slots in token order, without the free one."""
        slots = position.shape[2] if self.policy.prompt_only else position.shape[2] - 1
        return token_order(position)[..., :slots]

    def _scored(
        self, held: SlotState, queries: mx.array, lengths: mx.array | None, proxy: bool
    ) -> tuple[SlotState, Scene, mx.array]:
        """The state with memory and carry of after this call, what the policy saw, and its priorities."""
        scene = self._scene(held, queries, lengths, proxy)
        if self.policy.prompt_only and held.new == 0:
            return attrs.evolve(held, position=scene.position), scene, scene.position
        if self.learns:
            scene = attrs.evolve(scene, carry=self.policy.carry_on(scene))
        result = self.policy.score(held.memory, scene)
        pair = isinstance(result, tuple) and len(result) == 2
        check(pair, self.policy.name, "score", "must return the next memory and a priority", type(result))
        memory, priority = result
        scored = attrs.evolve(held, position=scene.position, memory=memory, carry=scene.carry)
        return scored, scene, self._guarded(priority, scene)

    def _guarded(self, priority: mx.array, scene: Scene) -> mx.array:
        """Priorities with protected rows above all and empty columns below all others."""
        shape, form = scene.position.shape, (priority.shape, priority.dtype)
        check(form == (shape, mx.float32), self.policy.name, "priority", f"must be float32 of shape {shape}", form)
        priority = mx.where(mx.isnan(priority), LOWEST, mx.minimum(priority, -LOWEST))
        return mx.where(scene.position < 0, -mx.inf, mx.where(self.policy.protected(scene), mx.inf, priority))

    def _scene(self, held: SlotState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Scene:
        n, end = queries.shape[2], held.offset[:, None]
        counts = filled(n, *held.offset.shape) if lengths is None else lengths
        query_position = query_positions(held.offset - counts, n)
        query_position = mx.where(query_position < end, query_position, -1)
        position = mx.where(held.position < end[..., None], held.position, -1)
        parts = self.store.as_parts(held.layout, held.rows)
        return Scene(*parts, position, queries, query_position, held.offset, counts, proxy, held.limit, held.carry)

    def _settle_in_strides(
        self, held: SlotState, group: Any, keys: mx.array, lengths: mx.array | None, stride: int
    ) -> tuple[SlotState, Any]:
        """Settle `stride` standing-in keys after the other: each sees only rows that the earlier ones left."""
        counts = filled(held.new, *held.offset.shape) if lengths is None else lengths
        tokens, stored = mx.clip(held.offset, 0, counts), held.slots - held.new
        new, keys = self._without_left_padding(held, keys, counts - tokens)
        most, width = self.policy.most(stored, held.new), -(-held.new // stride) * stride
        new, keys = resized(new, width), extend_rows(keys, width)
        state = attrs.evolve(resized(columns(held, 0, stored), most), offset=held.offset - tokens)
        told: list[mx.array] = []
        for step, start in enumerate(range(0, width, stride)):
            block, asking = columns(new, start, start + stride), keys[:, :, start : start + stride]
            one = group and group[step : step + 1]
            state, one = _stride(self)(state, block, one, asking, mx.clip(tokens - start, 0, stride))
            told += one or ()
        return resized(state, most + 1), tuple(told) if self.policy.leads else group

    def _settle_stride(
        self, state: SlotState, block: SlotState, group: Any, keys: mx.array, count: mx.array
    ) -> tuple[SlotState, Any]:
        """Take in a `block` of rows, of which `count` int [B] are tokens, and settle by their `keys`."""
        most = state.slots
        state = attrs.evolve(joined(state, block), offset=state.offset + count)
        state, group = self.settle_in(state, group, keys, count, proxy=True)
        return columns(state, 0, most), group

    def _without_left_padding(self, held: SlotState, keys: mx.array, padding: mx.array) -> tuple[SlotState, mx.array]:
        """The columns of the last call and its `keys`, with `padding` int [B] moved from the left to the right."""
        new = columns(held, held.slots - held.new, held.slots)
        rows, memory, position, keys = map_leaves(
            lambda x: drop_left_padding(x, padding), (new.rows, new.memory, new.position, keys)
        )
        within = counting(held.new) < held.new - padding[:, None, None]
        return attrs.evolve(new, rows=rows, memory=memory, position=mx.where(within, position, -1)), keys

    def _drop(self, held: SlotState, scene: Scene, priority: mx.array) -> SlotState:
        """After a single token: rows over the limit leave their slots, and no other row moves."""
        if self.policy.most_dropped > 1:
            stays = priority > -mx.inf
            full = counting(held.slots) < stays.sum(axis=-1, keepdims=True)
            return wiped(only(full, moved(held, *gap_fillers(stays, self.policy.most_dropped))))
        live = held.position >= 0
        over = live.sum(axis=-1, keepdims=True) > held.limit[:, None, None]
        victim = victim_row(priority, held.position, self.policy.latest)
        stays = live & ~(over & (counting(held.slots) == victim))
        if self.policy.folds:
            every = Every(mx.broadcast_to(counting(held.slots), live.shape), stays)
            held = fold(self.policy, self.store, held, held, scene, every, Picked(victim, over))
        return only(stays, held)

    def _select(self, held: SlotState, scene: Scene, priority: mx.array) -> SlotState:
        """After a call of several tokens: one selection and one gather."""
        stored = held.slots - held.new
        most = self.policy.most(stored, held.new)
        if not self.policy.prompt_only:
            return self._gather(held, scene, priority, held.limit, most + 1)
        return self._gather(held, scene, priority, mx.where(scene.tokens > 1, held.limit, most), most)

    def _gather(self, held: SlotState, scene: Scene, priority: mx.array, limit: mx.array, slots: int) -> SlotState:
        """The `limit` int32 [B] rows of highest priority, in `slots` slots."""
        width, live = min(slots, held.slots), priority > -mx.inf
        index = top_rows(priority, limit, width, self.policy.latest)
        stays = counting(width) < mx.minimum(live.sum(axis=-1, keepdims=True), limit[:, None, None])
        narrow = picked(held, index)
        if self.policy.folds and held.slots > 1:
            kept = mx.put_along_axis(mx.zeros(live.shape, mx.bool_), index, stays, axis=-1)
            # Rows were within the limit before the call, so that it drives out no more than it brought.
            lost = Picked(*chosen(live & ~kept, min(held.new or held.slots, held.slots - 1)))
            narrow = fold(self.policy, self.store, narrow, held, scene, Picked(index, stays), lost)
        return resized(wiped(only(stays, narrow)), slots)


@functools.lru_cache(maxsize=1024)
def _sparing(transform: Evicting, sheds: bool, learns: bool) -> Evicting:
    return attrs.evolve(transform, sheds=sheds, learns=learns)


@functools.lru_cache(maxsize=1024)
def _stride(transform: Evicting) -> Callable[..., Any]:
    """A step of a long call, compiled: one trace for all steps of a call, and where slots are fixed for all calls."""
    return jit(transform._settle_stride)
