"""KIVI: keys in groups along tokens, values in groups along channels, the newest rows exact (arXiv 2402.02750).

Differs from the paper: keys and values share one frontier, so the newest
`residual_length` rows are always exact and results don't depend on how a
prompt was cut. A call attends to its own rows, and to all that were exact
when it began, exactly. A number that is not finite is held as its group's
lowest or highest finite one.
"""

import math
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Part, PlainCodec, Rows, bind
from vq_functional.core.errors import check, check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import Store, start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import static_field
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.attention import Parts
from vq_functional.ops.packing import alignment
from vq_functional.ops.rows import drop_left_padding, extend_last, extend_rows, read_rows, write_rows
from vq_functional.ops.vectors import to_dtype


@attrs.frozen(kw_only=True)
class KIVIOptions:
    """`bits` a number; `group_size` numbers share scale and zero; `residual_length` newest rows stay exact."""

    bits: int = 2
    group_size: int = 32
    residual_length: int = 128

    def __attrs_post_init__(self) -> None:
        check_int("kivi", "bits", self.bits, 1, 8)
        check_int("kivi", "group_size", self.group_size, 1)
        check_int("kivi", "residual_length", self.residual_length, 0)


@attrs.frozen
class KIVIState:
    keys: Groups  # groups along tokens: codes uint32 [B, H, D, T*bits/32], scales and zeros [B, H, D, T/group]
    values: Groups  # groups along channels: codes [B, H, T, width], scales and zeros [B, H, T, D/group]
    recent_keys: mx.array  # [B, H, residual + block, D]: rows from `coded` on
    recent_values: mx.array
    coded: mx.array  # int32 [B]: rows in groups
    offset: mx.array  # int32 [B]: tokens seen
    layout: Layout = static_field()


@attrs.frozen
class KeyGroups(Coder):
    """Key columns in groups along tokens."""

    dim: int
    dtype: mx.Dtype
    bits: int
    group: int

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(dequantize(Groups(*rows), self.bits, self.group), self.dtype).swapaxes(-1, -2)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return matmul(queries, Groups(*rows), self.bits, self.group, transpose=False)


@attrs.frozen
class ValueGroups(Coder):
    """Value rows in groups along channels; the last group is filled up with the last channel."""

    dim: int
    dtype: mx.Dtype
    bits: int
    group: int

    def encode(self, x: mx.array) -> Rows:
        missing = -self.dim % self.group
        if missing:
            x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
        return _rows(quantize(x, self.bits, self.group, self.dtype))

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(dequantize(Groups(*rows), self.bits, self.group)[..., : self.dim], self.dtype)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return matmul(weights, Groups(*rows), self.bits, self.group, transpose=False)[..., : self.dim]


@attrs.frozen
class KIVI(Store, Transform):
    """Transform over packed groups. Rows share scales along tokens, so no policy can move them."""

    options: KIVIOptions
    name = "kivi"

    @property
    def block(self) -> int:
        """Tokens packed at a time: whole groups that fill whole words."""
        return math.lcm(self.options.group_size, alignment(self.options.bits))

    @property
    def recent_rows(self) -> int:
        """Rows of the exact buffer."""
        return self.options.residual_length + self.block

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> KIVIState:
        o, batch, layout = self.options, spec.batch, spec.layout
        columns = self._columns(spec.capacity + (self.block if o.residual_length < self.block else 0))
        key = quantize(mx.zeros((1, 1, layout.key_dim, self.block)), o.bits, o.group_size, layout.dtype)
        value = self._value_coder(layout).encode(mx.zeros((1, 1, 1, layout.value_dim)))
        times = columns // self.block
        keys = Groups(*(mx.zeros((batch, layout.kv_heads, *x.shape[2:3], x.shape[3] * times), x.dtype) for x in key))
        values = Groups(*(mx.zeros((batch, layout.kv_heads, columns, x.shape[3]), x.dtype) for x in value))
        recent_keys = mx.zeros((batch, layout.kv_heads, self.recent_rows, layout.key_dim), layout.dtype)
        recent_values = mx.zeros((batch, layout.kv_heads, self.recent_rows, layout.value_dim), layout.dtype)
        coded, offset = mx.zeros((batch,), mx.int32), start_offset(batch, left_padding)
        return KIVIState(keys, values, recent_keys, recent_values, coded, offset, layout)

    def write(self, state: KIVIState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> KIVIState:
        n = keys.shape[2]
        padding = mx.maximum(-state.offset, 0)
        start = mx.maximum(state.offset, 0) - state.coded
        room = self.recent_rows + (n if n > 1 else 0)

        def append(recent: mx.array, x: mx.array) -> mx.array:
            return write_rows(extend_rows(recent, room), drop_left_padding(x, padding), start)

        recent = append(state.recent_keys, keys), append(state.recent_values, values)
        offset = state.offset + (n if lengths is None else lengths)
        return KIVIState(state.keys, state.values, *recent, state.coded, offset, state.layout)

    def settle(
        self, held: KIVIState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> KIVIState:
        o, count = self.options, self._packed_at_once(queries.shape[2])
        room = self.capacity(held)
        check(count <= room, self.name, "keys", f"must fit the capacity of {room} packed rows", queries.shape[2])
        coded = mx.maximum(held.coded, self._frontier(held.offset))
        wide_keys, wide_values = (
            extend_rows(x, self.recent_rows + count) for x in (held.recent_keys, held.recent_values)
        )
        new_keys = quantize(wide_keys[:, :, :count].swapaxes(-1, -2), o.bits, o.group_size, held.layout.dtype)
        new_values = self._value_coder(held.layout).encode(wide_values[:, :, :count])
        starts = self._key_starts(held.coded)
        keys = Groups(*(write_rows(x, y, at, axis=3) for x, y, at in zip(held.keys, new_keys, starts, strict=True)))
        values = Groups(*(write_rows(x, y, held.coded) for x, y in zip(held.values, new_values, strict=True)))
        recent_keys, recent_values = (
            read_rows(x, coded - held.coded, self.recent_rows) for x in (wide_keys, wide_values)
        )
        return KIVIState(keys, values, recent_keys, recent_values, coded, held.offset, held.layout)

    def parts(self, held: KIVIState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        o, layout = self.options, held.layout
        keys, values, exact = held.keys, held.values, [held.recent_keys, held.recent_values]
        if fill is not None:
            keys = Groups(*(x[..., :end] for x, end in zip(keys, self._key_sizes(fill.coded), strict=True)))
            values = Groups(*(x[:, :, : fill.coded] for x in values))
            exact = [x[:, :, : fill.rows - fill.coded] for x in exact]
        columns = values.codes.shape[2]
        key_coder = KeyGroups(layout.key_dim, layout.dtype, o.bits, o.group_size)
        plain = [bind(PlainCodec(), dim, layout.dtype) for dim in (layout.key_dim, layout.value_dim)]
        key_part, value_part = (Part(coder, (x,), x.shape[2]) for coder, x in zip(plain, exact, strict=True))
        if columns == 0:
            return (key_part,), (value_part,)
        coded_values = Part(self._value_coder(layout), _rows(values), columns)
        return (Part(key_coder, _rows(keys), columns), key_part), (coded_values, value_part)

    def positions(self, held: KIVIState) -> mx.array:
        return self._positions(held, held.recent_keys.shape[2])

    def positions_after(self, state: KIVIState, n: int, fill: Fill | None = None) -> mx.array:
        if fill is not None:
            return mx.broadcast_to(mx.arange(fill.rows + n), (state.offset.shape[0], 1, fill.rows + n))
        return self._positions(state, self.recent_rows + (n if n > 1 else 0))

    def grow(self, state: KIVIState, capacity: int) -> KIVIState:
        columns = self._columns(capacity)
        if columns <= self.capacity(state):
            return state
        values = Groups(*(extend_rows(x, columns) for x in state.values))
        keys = Groups(*(extend_last(x, size) for x, size in zip(state.keys, self._key_sizes(columns), strict=True)))
        recent = state.recent_keys, state.recent_values
        return KIVIState(keys, values, *recent, state.coded, state.offset, state.layout)

    def trim(self, state: KIVIState, n: int) -> KIVIState:
        """Drop the newest `n` rows. Rows that were in groups and now belong to the exact buffer stay as they read."""
        o, layout = self.options, state.layout
        offset = mx.maximum(state.offset - n, 0)
        behind = offset < state.coded
        coded = mx.where(behind, offset // self.block * self.block, state.coded)
        spans = zip(state.keys, self._key_starts(coded), self._key_sizes(self.block), strict=True)
        key_rows = tuple(read_rows(x, start, size, axis=3) for x, start, size in spans)
        keys = KeyGroups(layout.key_dim, layout.dtype, o.bits, o.group_size).decode(key_rows)
        values = self._value_coder(layout).decode(tuple(read_rows(x, coded, self.block) for x in state.values))

        def reopened(read: mx.array, recent: mx.array) -> mx.array:
            return mx.where(behind[:, None, None, None], extend_rows(read, recent.shape[2]), recent)

        recent = reopened(keys, state.recent_keys), reopened(values, state.recent_values)
        return KIVIState(state.keys, state.values, *recent, coded, offset, layout)

    def settled(self, fill: Fill, n: int) -> Fill:
        past = max(0, fill.tokens - self.options.residual_length)
        return Fill(fill.tokens, fill.rows, max(fill.coded, past // self.block * self.block))

    def trimmed(self, fill: Fill, n: int) -> Fill:
        tokens = max(fill.tokens - n, 0)
        return Fill(tokens, tokens, fill.coded if tokens >= fill.coded else tokens // self.block * self.block)

    def settles(self, fill: Fill, n: int) -> bool:
        return n > 1 or self.settled(fill, n) != fill

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        return fill.coded + self._packed_at_once(n) if self.settles(self.written(fill, n), n) else fill.coded

    def capacity(self, state: KIVIState) -> int:
        return state.values.codes.shape[2]

    def fits(self, state: KIVIState, fill: Fill) -> bool:
        return fill.coded <= self.capacity(state) and fill.rows - fill.coded <= self.recent_rows

    def overflows(self, state: KIVIState, n: int) -> mx.array:
        coded = mx.maximum(state.coded, self._frontier(state.offset + n))
        return (coded > state.coded) & (state.coded + self._packed_at_once(n) > self.capacity(state))

    def _packed_at_once(self, n: int) -> int:
        """Rows that a call of `n` tokens can complete, in blocks; all are packed and the frontier tells which count."""
        return (self.block - 1 + n) // self.block * self.block

    def _frontier(self, offset: mx.array) -> mx.array:
        return mx.maximum(offset - self.options.residual_length, 0) // self.block * self.block

    def _key_starts(self, coded: mx.array) -> tuple[mx.array, ...]:
        """Where row `coded` int [B] begins along the last axis of key codes, scales and zeros."""
        group = coded // self.options.group_size
        return coded // self.block * (self.block * self.options.bits // 32), group, group

    def _key_sizes(self, count: int) -> tuple[int, ...]:
        """Last axis of key codes, scales and zeros of `count` rows."""
        group = count // self.options.group_size
        return count * self.options.bits // 32, group, group

    def _columns(self, capacity: int) -> int:
        return -(-capacity // self.block) * self.block

    def _value_coder(self, layout: Layout) -> ValueGroups:
        return ValueGroups(layout.value_dim, layout.dtype, self.options.bits, self.options.group_size)

    def _positions(self, state: KIVIState, recent: int) -> mx.array:
        """Positions of the coded columns, then of `recent` exact ones."""
        columns = mx.arange(self.capacity(state))
        coded = mx.where(columns < state.coded[:, None], columns, -1)
        exact = state.coded[:, None] + mx.arange(recent)
        return mx.concatenate([coded, exact], axis=-1)[:, None]


def _rows(groups: Groups) -> Rows:
    return groups.codes, groups.scales, groups.zeros


def kivi(**options: Any) -> Transform:
    """Keys and values in affine groups, the newest rows exact; keeps every token."""
    return KIVI(KIVIOptions(**options))
