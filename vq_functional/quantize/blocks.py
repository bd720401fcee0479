"""Blocks: codes for the old rows, the newest rows exact, and chosen sinks exact among the coded ones.

Rows are packed a block at a time, when `residual` newer ones have come. Keys
and values share the frontier between codes and exact rows; it follows from the
number of tokens alone, so results do not depend on how a prompt was cut. A call
attends to its own rows, and to all that were exact when it began, exactly.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Part, PlainCodec, Rows, plain_part
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import Store, check_sides, start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.ops.attention import Parts
from vq_functional.ops.rows import drop_left_padding, extend_rows, read_rows, write_rows
from vq_functional.quantize.sinks import SIGNALS, Patched, SinkRule, Sinks, sink_rule, without_sinks
from vq_functional.quantize.units import Units, units


@attrs.frozen
class Recent:
    """Exact rows from the frontier on, and what is remembered of them."""

    keys: mx.array  # [B, H, R, D]
    values: mx.array
    memory: Any = ()  # a tree of arrays [B, H, R, ...]


@attrs.frozen
class Coded:
    """Rows in blocks, as a coder packs them."""

    rows: Rows
    tables: Rows  # what the coder fitted to the first rows


@attrs.frozen
class BlockState:
    keys: Coded
    values: Coded
    sinks: Sinks | None
    recent: Recent
    coded: mx.array  # int32 [B]: rows in blocks
    offset: mx.array  # int32 [B]: tokens seen
    layout: Layout = static_field()


@attrs.frozen
class Blocks(Store, Transform):
    """Keeps every token. Rows of a block may share numbers, so no policy can move them.

    `residual` newest rows are exact at least; `sinks` tells which rows stay exact
    for good. `max_ctx` tokens at most, where that is a number.
    """

    name: str
    key: Codec
    value: Codec
    residual: int = 0
    sinks: SinkRule | None = None
    max_ctx: int | None = None
    steady: bool = False  # only for states that have tables, and room for all that a call may pack

    def __attrs_post_init__(self) -> None:
        check_int(self.name, "residual", self.residual, 0)
        check_sides(self.name, self.key, self.value)

    @functools.cached_property
    def block(self) -> int:
        """Rows packed at a time."""
        return math.lcm(self.key.unit, self.value.unit)

    @functools.cached_property
    def least(self) -> int:
        """Rows of the first packing: whole blocks, and with the exact rows behind them enough to fit tables to."""
        return max(self.block, self._columns(max(self.key.warmup, self.value.warmup) - self.residual))

    @functools.cached_property
    def recent_rows(self) -> int:
        """Room for exact rows between calls."""
        return self.residual + self.least

    # What a method may add

    def begin_memory(self, batch: int, layout: Layout) -> Any:
        """What is remembered of each of `recent_rows` rows before any has come: arrays [B, H, rows, ...]."""
        return ()

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        """Memory of the exact rows after a call whose queries were `queries` [B, Hq, S, D]."""
        return held.recent.memory

    def fit(self, layout: Layout, first: Recent) -> tuple[Rows, Rows]:
        """Tables of the key and the value coder, fitted to the first `recent_rows` rows."""
        key, value = self.sides(layout)
        return key.coder.tables(first.keys), value.coder.tables(first.values)

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows], start: mx.array) -> tuple[Rows, Rows]:
        """Keys and values of whole blocks, packed; `start` int [B] rows came before them."""
        key, value = self.sides(layout)
        return key.coder.encode_by(recent.keys, tables[0]), value.coder.encode_by(recent.values, tables[1])

    # The transform

    def sides(self, layout: Layout) -> tuple[Units, Units]:
        """How keys and values are packed; raises QuantizerConfigError for head sizes they can't take."""
        heads, dtype = layout.kv_heads, layout.dtype
        return units(self.key, layout.key_dim, dtype, heads), units(self.value, layout.value_dim, dtype, heads)

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> BlockState:
        batch, layout = spec.batch, spec.layout
        columns = self._columns(spec.capacity)
        dims = layout.key_dim, layout.value_dim
        recent_keys, recent_values = (
            mx.zeros((batch, layout.kv_heads, self.recent_rows, dim), layout.dtype) for dim in dims
        )
        keys, values = (
            Coded(side.empty(batch, layout.kv_heads, columns), side.empty_tables(batch, layout.kv_heads))
            for side in self.sides(layout)
        )
        return BlockState(
            keys,
            values,
            None if self.sinks is None else self.sinks.empty(spec),
            Recent(recent_keys, recent_values, self.begin_memory(batch, layout)),
            coded=mx.zeros((batch,), mx.int32),
            offset=start_offset(batch, left_padding),
            layout=layout,
        )

    def write(self, state: BlockState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> BlockState:
        n = keys.shape[2]
        padding, count = mx.maximum(-state.offset, 0), n if lengths is None else lengths
        offset = state.offset + count
        start = mx.maximum(offset - count, 0) - state.coded  # by way of the new offset: one kernel makes both
        room = self.recent_rows + (n if n > 1 else 0)

        def append(recent: mx.array, x: mx.array) -> mx.array:
            return write_rows(extend_rows(recent, room), drop_left_padding(x, padding), start)

        memory = map_leaves(lambda x: extend_rows(x, room), state.recent.memory)
        recent = Recent(append(state.recent.keys, keys), append(state.recent.values, values), memory)
        return attrs.evolve(state, recent=recent, offset=offset)

    def observe(
        self, held: BlockState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> BlockState:
        recent = attrs.evolve(held.recent, memory=self.remember(held, queries, lengths, proxy))
        return attrs.evolve(held, recent=recent)

    def settle(
        self, held: BlockState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> BlockState:
        n, room = queries.shape[2], self.capacity(held)
        fits = self.settled(Fill(n, n), n).coded <= room
        check(fits, self.name, "keys", f"must fit the capacity of {room} packed rows", n)
        count = self._packed_at_once(n)
        coded = mx.maximum(held.coded, self._frontier(held.offset))
        held = self.observe(held, queries, lengths, proxy)
        wide = map_leaves(lambda x: extend_rows(x, self.recent_rows + count), held.recent)
        packed = self._packed(held, wide, count, coded)
        recent = map_leaves(lambda x: read_rows(x, coded - held.coded, self.recent_rows), wide)
        return attrs.evolve(packed, recent=recent, coded=coded)

    def parts(self, held: BlockState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        keys, values, columns = held.recent.keys, held.recent.values, self.capacity(held)
        if fill is not None:
            columns, count = fill.coded, fill.rows - fill.coded
            keys, values = keys[:, :, :count], values[:, :, :count]
        key, value = plain_part(keys, held.layout.dtype), plain_part(values, held.layout.dtype)
        if columns == 0:
            return (key,), (value,)
        old_keys, old_values = self._coded_parts(held, None, columns)
        return (old_keys, key), (old_values, value)

    def positions(self, held: BlockState) -> mx.array:
        return self._positions(held, held.recent.keys.shape[2])

    def positions_after(self, state: BlockState, n: int, fill: Fill | None = None) -> mx.array:
        if fill is not None:
            return mx.broadcast_to(mx.arange(fill.rows + n), (state.offset.shape[0], 1, fill.rows + n))
        return self._positions(state, self.recent_rows + (n if n > 1 else 0))

    def grow(self, state: BlockState, capacity: int) -> BlockState:
        return self.widen(state, self._columns(capacity))

    def widen(self, state: BlockState, extent: int) -> BlockState:
        if extent <= self.capacity(state):
            return state
        keys, values = (
            attrs.evolve(coded, rows=side.grown(coded.rows, extent))
            for side, coded in zip(self.sides(state.layout), (state.keys, state.values), strict=True)
        )
        return attrs.evolve(state, keys=keys, values=values)

    def trim(self, state: BlockState, n: int) -> BlockState:
        """Drop the newest `n` rows.

        Rows that were in blocks and now belong to the exact ones stay as they
        read; nothing is remembered of them.
        """
        offset = mx.maximum(state.offset - n, 0)
        packed = self.capacity(state) >= self.least
        trimmed = attrs.evolve(self._opened(state, offset) if packed else state, offset=offset)
        row = mx.arange(state.recent.keys.shape[2])
        stays = (trimmed.coded == state.coded)[:, None] & (row < (offset - trimmed.coded)[:, None])

        def kept(x: mx.array) -> mx.array:
            return mx.where(stays.reshape(stays.shape[0], 1, -1, *(1,) * (x.ndim - 3)), x, 0)

        return attrs.evolve(trimmed, recent=attrs.evolve(trimmed.recent, memory=map_leaves(kept, state.recent.memory)))

    def _opened(self, state: BlockState, offset: mx.array) -> BlockState:
        """The state with those of the first `offset` int [B] rows exact that now belong to the exact ones."""
        behind = offset < state.coded
        coded = mx.where(behind, self._reopened(offset), state.coded)
        start = mx.minimum(coded, self.capacity(state) - self.least)
        keys, values = (part.decode() for part in self._coded_parts(state, start))

        def reopened(read: mx.array, recent: mx.array) -> mx.array:
            room = recent.shape[2]
            read = read_rows(extend_rows(read, self.least + room), coded - start, room)
            return mx.where(behind[:, None, None, None], read, recent)

        recent = attrs.evolve(
            state.recent, keys=reopened(keys, state.recent.keys), values=reopened(values, state.recent.values)
        )
        return attrs.evolve(state, recent=recent, coded=coded)

    def settled(self, fill: Fill, n: int) -> Fill:
        return Fill(fill.tokens, fill.rows, max(fill.coded, self._packable(fill.tokens)))

    def trimmed(self, fill: Fill, n: int) -> Fill:
        tokens = max(fill.tokens - n, 0)
        if tokens >= fill.coded:
            return Fill(tokens, tokens, fill.coded)
        return Fill(tokens, tokens, tokens // self.block * self.block if tokens >= self.least else 0)

    def settles(self, fill: Fill, n: int) -> bool:
        return n > 1 or self._packable(fill.tokens) > fill.coded

    def after(self, fills: Sequence[Fill]) -> "Blocks":
        return _steady(self) if all(fill.coded for fill in fills) else self

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        tokens = fill.tokens + (n if count is None else count)
        if self.max_ctx is not None:
            rule = f"must stay within `max_ctx` = {self.max_ctx}"
            check(tokens <= self.max_ctx, self.name, "keys", rule, tokens)
        if fill.coded == 0:
            return self._packable(tokens)
        # From then on a call may be packed as a whole, and the frontier tells which of its rows count.
        packs = n > 1 or self._packable(fill.tokens + n) > fill.coded
        return min(fill.coded + self._columns(n), self._columns(fill.tokens + n)) if packs else fill.coded

    def capacity(self, state: BlockState) -> int:
        return self.sides(state.layout)[1].count(state.values.rows)

    def fits(self, state: BlockState, fill: Fill) -> bool:
        return fill.coded <= self.capacity(state) and fill.rows - fill.coded <= self.recent_rows

    def overflows(self, state: BlockState, n: int) -> mx.array:
        coded = mx.maximum(state.coded, self._frontier(state.offset + n))
        last = mx.maximum(coded, state.coded + self._columns(n)) if self._roomy(coded) else coded
        full = (coded > state.coded) & (last > self.capacity(state))
        return full if self.max_ctx is None else full | (state.offset + n > self.max_ctx)

    def _packed(self, held: BlockState, exact: Recent, count: int, coded: mx.array) -> BlockState:
        """The state with the first `count` rows of `exact` packed; `coded` int [B] tells how many of them count."""
        key, value = self.sides(held.layout)
        recent, sinks = map_leaves(lambda x: x[:, :, :count], exact), held.sinks
        if self.sinks is not None and sinks is not None:
            sinks = self.sinks.valid(sinks, held.coded)
            sinks, chosen = self.sinks.choose(sinks, recent.keys, recent.values, held.coded, coded, self.block)
            chosen = chosen & self.sinks.apart(sinks, recent.keys)
            drawn = [
                without_sinks(x, chosen, codec) for x, codec in ((recent.keys, self.key), (recent.values, self.value))
            ]
            recent = attrs.evolve(recent, keys=drawn[0], values=drawn[1])
        tables = held.keys.tables, held.values.tables
        if not self.steady:
            first = map_leaves(lambda x, rest: mx.concatenate([x, rest[:, :, count:]], axis=2), recent, exact)
            fresh = self.fit(held.layout, map_leaves(lambda x: x[:, :, : self.recent_rows], first))
            begins = (held.coded == 0) & (coded > 0)
            tables = map_leaves(lambda new, old: mx.where(_along_batch(begins, new), new, old), fresh, tables)
        new_keys, new_values = self.encode(held.layout, recent, tables, held.coded)
        keys, values = (
            Coded(side.write(old.rows, new, held.coded, coded, self._roomy(coded)), table)
            for side, old, new, table in zip((key, value), (held.keys, held.values), (new_keys, new_values), tables)
        )
        return attrs.evolve(held, keys=keys, values=values, sinks=sinks)

    def _roomy(self, coded: mx.array) -> bool:
        """Whether the arrays have room for whole calls behind every row's frontier: rows of a batch may be full."""
        return self.steady and coded.shape[0] == 1

    def _coded_parts(self, held: BlockState, start: mx.array | None, columns: int | None = None) -> list[Part]:
        """Keys and values in blocks: the first `columns`, or the `least` rows from `start` int [B]."""
        sinks, parts = held.sinks, []
        position = None if sinks is None else mx.where(sinks.position < held.coded[:, None], sinks.position, -1)
        if start is not None and position is not None:
            position = position - start[:, None]
        exact = (None, None) if sinks is None else (sinks.keys, sinks.values)
        for side, coded, x in zip(self.sides(held.layout), (held.keys, held.values), exact, strict=True):
            count = self.least if columns is None else columns
            rows = side.first(coded.rows, count) if start is None else side.read(coded.rows, start, count)
            rows = (*rows, *coded.tables)
            if x is None or position is None:
                parts.append(Part(side.coder, rows, count))
            else:
                parts.append(Part(Patched(side.coder), (*rows, x, position), count))
        return parts

    def _packed_at_once(self, n: int) -> int:
        """Rows that a call of `n` tokens can complete, in blocks; all are packed and the frontier tells which count."""
        return self._columns(n) if self.steady else (self.least - 1 + n) // self.block * self.block

    def _frontier(self, offset: mx.array) -> mx.array:
        return self._reopened(mx.maximum(offset - self.residual, 0))

    def _packable(self, tokens: int) -> int:
        """`_frontier` of a plain number."""
        past = tokens - self.residual
        return past // self.block * self.block if past >= self.least else 0

    def _reopened(self, tokens: mx.array) -> mx.array:
        """Rows int [B] in blocks when `tokens` may be."""
        return mx.where(tokens >= self.least, tokens // self.block * self.block, 0)

    def _columns(self, capacity: int) -> int:
        """Rows of the blocks that `capacity` rows take."""
        return -(-capacity // self.block) * self.block

    def _positions(self, state: BlockState, recent: int) -> mx.array:
        """Positions of the coded columns, then of `recent` exact ones."""
        columns = mx.arange(self.capacity(state))
        coded = mx.where(columns < state.coded[:, None], columns, -1)
        exact = state.coded[:, None] + mx.arange(recent)
        return mx.concatenate([coded, exact], axis=-1)[:, None]


@functools.lru_cache(maxsize=512)
def _steady(blocks: Blocks) -> Blocks:
    return attrs.evolve(blocks, steady=True)


def _along_batch(x: mx.array, like: mx.array) -> mx.array:
    """`x` [B] shaped to go with `like` [B, ...]."""
    return x.reshape(-1, *(1,) * (like.ndim - 1))


def blocks(
    *,
    key: Codec | None = None,
    value: Codec | None = None,
    residual: int = 64,
    n_sink: int = 0,
    sink_signal: str = "first",
    name: str = "blocks",
) -> Blocks:
    """Any codecs behind the `residual` newest rows, which are exact, as `n_sink` tokens are; keeps every token.

    None is a side as it comes; `sink_signal` as in SinkRule.
    """
    check_int(name, "n_sink", n_sink, 0)
    check_choice(name, "sink_signal", sink_signal, SIGNALS)
    sinks = sink_rule(n_sink, sink_signal)
    key, value = (PlainCodec() if codec is None else codec for codec in (key, value))
    return Blocks(name, key, value, residual, sinks)
