"""RowStore: one codec for keys, one for values, every row kept; a transform of its own and the bed of all policies."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Part, PlainCodec, Rows, bind
from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.ops.attention import Parts
from vq_functional.ops.rows import drop_left_padding, extend_rows, write_rows
from vq_functional.ops.tables import counting


@attrs.frozen
class HeldRows:
    """Keys and values of the same tokens, each as its codec holds them; arrays [B, H, C, width]."""

    keys: Rows
    values: Rows

    @property
    def count(self) -> int:
        return self.keys[0].shape[2]


@attrs.frozen
class RowState:
    rows: HeldRows
    offset: mx.array  # int32 [B]: tokens seen; below zero while left padding is still to come
    layout: Layout = static_field()


class Store:
    """How rows are held. `take` tells whether single rows can be moved, dropped and replaced."""

    name: str
    take: bool = False


@attrs.frozen
class RowStore(Store, Transform):
    """Rows that stand alone: what a policy keeps can be any of them."""

    name: str
    key: Codec
    value: Codec
    take = True

    def __attrs_post_init__(self) -> None:
        check_sides(self.name, self.key, self.value)
        for field, codec in (("key", self.key), ("value", self.value)):
            alone = codec.unit == 1 and codec.warmup == 0
            check(alone, self.name, field, "must be a codec whose rows stand alone", codec.name)

    @property
    def coded(self) -> bool:
        return not (isinstance(self.key, PlainCodec) and isinstance(self.value, PlainCodec))

    def coders(self, layout: Layout) -> tuple[Coder, Coder]:
        """Key and value coder of a layout; raises QuantizerConfigError for head sizes they can't take."""
        return (bind(self.key, layout.key_dim, layout.dtype), bind(self.value, layout.value_dim, layout.dtype))

    def empty(self, layout: Layout, batch: int, count: int) -> HeldRows:
        """Zeroed room for `count` rows."""
        key, value = self.coders(layout)
        return HeldRows(key.empty(batch, layout.kv_heads, count), value.empty(batch, layout.kv_heads, count))

    def encode(self, layout: Layout, keys: mx.array, values: mx.array) -> HeldRows:
        """Rows of new keys and values."""
        key, value = self.coders(layout)
        return HeldRows(key.encode(keys), value.encode(values))

    def as_parts(self, layout: Layout, rows: HeldRows) -> tuple[Parts, Parts]:
        """One key part and one value part."""
        key, value = self.coders(layout)
        return (Part(key, rows.keys, rows.count),), (Part(value, rows.values, rows.count),)

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> RowState:
        rows = self.empty(spec.layout, spec.batch, spec.capacity)
        return RowState(rows, start_offset(spec.batch, left_padding), spec.layout)

    def write(self, state: RowState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> RowState:
        n = keys.shape[2]
        room = state.rows.count
        check(n <= room, self.name, "keys", f"must fit the capacity of {room} rows", keys.shape)
        padding = mx.maximum(-state.offset, 0)
        new = self.encode(state.layout, drop_left_padding(keys, padding), drop_left_padding(values, padding))
        count = n if lengths is None else lengths
        offset = state.offset + count
        start = offset - count  # by way of the new offset: one kernel makes both
        rows = map_leaves(lambda buffer, x: write_rows(buffer, x, start), state.rows, new)
        return RowState(rows, offset, state.layout)

    def parts(self, held: RowState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        rows = held.rows if fill is None else first_rows(held.rows, fill.rows)
        return self.as_parts(held.layout, rows)

    def positions(self, held: RowState) -> mx.array:
        return mx.broadcast_to(counting(held.rows.count), (held.offset.shape[0], 1, held.rows.count))

    def positions_after(self, state: RowState, n: int, fill: Fill | None = None) -> mx.array:
        columns = self.positions(state)
        return columns if fill is None else columns[..., : fill.rows + n]

    def grow(self, state: RowState, capacity: int) -> RowState:
        rows = map_leaves(lambda x: extend_rows(x, capacity), state.rows)
        return RowState(rows, state.offset, state.layout)

    def trim(self, state: RowState, n: int) -> RowState:
        return RowState(state.rows, mx.maximum(state.offset - n, 0), state.layout)

    def capacity(self, state: RowState) -> int:
        return state.rows.count

    def overflows(self, state: RowState, n: int) -> mx.array:
        return state.offset + n > state.rows.count


def check_sides(name: str, key: Codec, value: Codec) -> None:
    """Refuse what is no codec, a codec for keys only on the values' side, and the other way round."""
    for field, codec in (("key", key), ("value", value)):
        check(isinstance(codec, Codec), name, field, "must be a codec, such as int8_codec()", codec)
    check(not value.keys_only, name, "value", "can't be a codec for keys only", value.name)
    check(not key.values_only, name, "key", "can't be a codec for values only", key.name)


def first_rows(rows: HeldRows, count: int) -> HeldRows:
    """The first `count` rows as views."""
    return HeldRows(*[tuple([x[:, :, :count] for x in side]) for side in (rows.keys, rows.values)])


def start_offset(batch: int, left_padding: mx.array | None) -> mx.array:
    """Offset int32 [B] of an empty state: below zero by what is still to come as padding."""
    if left_padding is None:
        return mx.zeros((batch,), mx.int32)
    whole = isinstance(left_padding, mx.array) and mx.issubdtype(left_padding.dtype, mx.integer)
    fits = whole and left_padding.shape == (batch,) and bool((left_padding >= 0).all())
    check(fits, "init_state", "left_padding", f"must be an array of {batch} integers >= 0", left_padding)
    return -left_padding.astype(mx.int32)


def rows(*, key: Codec | None = None, value: Codec | None = None, name: str = "rows") -> RowStore:
    """Rows held by a key codec and a value codec (default: as they come); keeps every token."""
    key, value = (PlainCodec() if codec is None else codec for codec in (key, value))
    return RowStore(name, key, value)
