"""Width by age: 8 bits for recent rows, 4 for those of middle age, 2 for the old ones, unless told otherwise.

No paper: a rule of thumb. Groups of neighbouring tokens keep low end and range
for life; where the highest codes divide, as for 8, 4 and 2 bits, a group that
gets older has the very codes that its numbers would get at the new width.

A group has the width of its oldest token. Keys and values are both in groups
along tokens; the newest, incomplete group is exact.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import attrs
import mlx.core as mx

from vq_functional.core.codec import Part, Rows, plain_part
from vq_functional.core.errors import check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import Store, start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.core.warn import warn
from vq_functional.ops.attention import Parts
from vq_functional.ops.rows import drop_left_padding, extend_rows, read_rows, write_rows
from vq_functional.quantize.ranges import RangeGroups, RangeGroupsCodec
from vq_functional.quantize.units import Units, units


@attrs.frozen(kw_only=True)
class AgeTieredKVOptions:
    """Rows younger than `recent_boundary` tokens have `bits_recent`, younger than `mid_boundary` `bits_mid`.

    All others have `bits_old`. `group_size` tokens share their numbers.
    """

    recent_boundary: int = 128
    mid_boundary: int = 1024
    bits_recent: int = 8
    bits_mid: int = 4
    bits_old: int = 2
    group_size: int = 32

    def __attrs_post_init__(self) -> None:
        check_int("age_tiered", "recent_boundary", self.recent_boundary, 1)
        check_int("age_tiered", "mid_boundary", self.mid_boundary, self.recent_boundary)
        for field in ("bits_recent", "bits_mid", "bits_old"):
            check_int("age_tiered", field, getattr(self, field), 1, 16)
        check_int("age_tiered", "group_size", self.group_size, 1)
        if not self.bits_recent >= self.bits_mid >= self.bits_old:
            warn("age_tiered: rows that get older should not get more bits")


Tier = tuple[Rows, Rows]  # keys and values of one width, the oldest rows first
Sides = tuple[Units, Units]


@attrs.frozen
class TieredState:
    recent: Tier
    mid: Tier
    old: Tier
    exact: tuple[mx.array, mx.array]  # keys and values [B, H, block, D] that are in no tier yet
    coded: mx.array  # int32 [B, 3]: rows in any tier, in mid or old, in old
    offset: mx.array  # int32 [B]: tokens seen
    layout: Layout = static_field()

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier]:
        return self.recent, self.mid, self.old


@attrs.frozen
class AgeTiered(Store, Transform):
    """Keeps every token. Rows of a group share numbers, so no policy can move them."""

    options: AgeTieredKVOptions
    name = "age_tiered"

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bits of recent, mid and old rows."""
        return self.options.bits_recent, self.options.bits_mid, self.options.bits_old

    @functools.cached_property
    def block(self) -> int:
        """Rows that move together: whole groups that fill whole words at every width."""
        return math.lcm(*(RangeGroupsCodec(bits, self.options.group_size).unit for bits in self.widths))

    @functools.cached_property
    def rooms(self) -> tuple[int, int]:
        """Rows that recent and mid hold at most between calls."""
        o, block = self.options, self.block
        middle = -(-(o.mid_boundary - o.recent_boundary) // block) * block
        return max(o.recent_boundary // block * block, block), max(middle, block)

    def sides(self, layout: Layout) -> tuple[Sides, Sides, Sides]:
        """How recent, mid and old keys and values are packed."""
        recent, mid, old = (RangeGroupsCodec(bits, self.options.group_size) for bits in self.widths)
        heads, dims = layout.kv_heads, (layout.key_dim, layout.value_dim)

        def of(codec: RangeGroupsCodec) -> Sides:
            key, value = (units(codec, dim, layout.dtype, heads) for dim in dims)
            return key, value

        return of(recent), of(mid), of(old)

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> TieredState:
        layout, batch = spec.layout, spec.batch
        rooms = (*self.rooms, self._old_room(spec.capacity))
        recent, mid, old = (
            _each(lambda side, room=room: side.empty(batch, layout.kv_heads, room), sides)
            for sides, room in zip(self.sides(layout), rooms, strict=True)
        )
        keys, values = (
            mx.zeros((batch, layout.kv_heads, self.block, dim), layout.dtype)
            for dim in (layout.key_dim, layout.value_dim)
        )
        coded, offset = mx.zeros((batch, 3), mx.int32), start_offset(batch, left_padding)
        return TieredState(recent, mid, old, (keys, values), coded, offset, layout)

    def write(
        self, state: TieredState, keys: mx.array, values: mx.array, lengths: mx.array | None = None
    ) -> TieredState:
        n, padding = keys.shape[2], mx.maximum(-state.offset, 0)
        start, room = mx.maximum(state.offset, 0) - state.coded[:, 0], self.block + (n if n > 1 else 0)
        exact = _each(
            lambda held, x: write_rows(extend_rows(held, room), drop_left_padding(x, padding), start),
            state.exact,
            (keys, values),
        )
        return attrs.evolve(state, exact=exact, offset=state.offset + (n if lengths is None else lengths))

    def settle(
        self, held: TieredState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> TieredState:
        count = self._whole(queries.shape[2])
        before, after = held.coded, mx.maximum(held.coded, self._frontiers(held.offset))
        recent_sides, mid_sides, old_sides = self.sides(held.layout)
        wide = map_leaves(lambda x: extend_rows(x, self.block + count), held.exact)
        came = _each(lambda side, x: side.coder.encode(x[:, :, :count]), recent_sides, wide)
        recent, came = self._pass_on(recent_sides, held.recent, came, before[:, :2], after[:, :2], self.widths[1])
        mid, came = self._pass_on(mid_sides, held.mid, came, before[:, 1:], after[:, 1:], self.widths[2])
        old = _each(lambda side, rows, new: side.write(rows, new, before[:, 2], after[:, 2]), old_sides, held.old, came)
        exact = map_leaves(lambda x: read_rows(x, after[:, 0] - before[:, 0], self.block), wide)
        return TieredState(recent, mid, old, exact, after, held.offset, held.layout)

    def parts(self, held: TieredState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        exact, counts = held.exact, (*self.rooms, self._old_columns(held))
        if fill is not None:
            counts = fill.coded - fill.older, fill.older - fill.oldest, fill.oldest
            exact = map_leaves(lambda x: x[:, :, : fill.rows - fill.coded], exact)
        tiers = [
            _each(lambda side, rows, count=count: Part(side.coder, side.first(rows, count), count), sides, tier)
            for sides, tier, count in zip(self.sides(held.layout), held.tiers, counts, strict=True)
            if count
        ]
        plain = _each(lambda x: plain_part(x, held.layout.dtype), exact)
        keys, values = zip(*tiers[::-1], plain, strict=True)
        return keys, values

    def positions(self, held: TieredState) -> mx.array:
        return self._positions(held, held.exact[0].shape[2])

    def positions_after(self, state: TieredState, n: int, fill: Fill | None = None) -> mx.array:
        if fill is not None:
            return mx.broadcast_to(mx.arange(fill.rows + n), (state.offset.shape[0], 1, fill.rows + n))
        return self._positions(state, self.block + (n if n > 1 else 0))

    def grow(self, state: TieredState, capacity: int) -> TieredState:
        columns = self._old_room(capacity)
        if columns <= self._old_columns(state):
            return state
        sides = self.sides(state.layout)[2]
        return attrs.evolve(state, old=_each(lambda side, rows: side.grown(rows, columns), sides, state.old))

    def trim(self, state: TieredState, n: int) -> TieredState:
        """Drop the newest `n` rows. Those of a group that is cut open become exact rows, as they read."""
        offset = mx.maximum(state.offset - n, 0)
        behind = offset < state.coded[:, 0]
        start = mx.where(behind, offset // self.block * self.block, state.coded[:, 0])
        read, begins = state.exact, [state.coded[:, 1], state.coded[:, 2], mx.zeros_like(start)]
        for sides, tier, first in zip(self.sides(state.layout), state.tiers, begins, strict=True):
            here = (behind & (start >= first) & (start < state.coded[:, 0]))[:, None, None, None]
            place = mx.maximum(start - first, 0)
            opened = _each(lambda side, rows, at=place: side.coder.decode(side.read(rows, at, self.block)), sides, tier)
            wide = map_leaves(lambda new, old: extend_rows(new, old.shape[2]), opened, read)
            read = map_leaves(lambda new, old, here=here: mx.where(here, new, old), wide, read)
            behind = behind & (start < first)
        coded = mx.minimum(state.coded, start[:, None])
        return attrs.evolve(state, exact=read, coded=coded, offset=offset)

    def settled(self, fill: Fill, n: int) -> Fill:
        coded, older, oldest = (max(x) for x in zip(_coded(fill), self._counts(fill.tokens), strict=True))
        return attrs.evolve(fill, coded=coded, older=older, oldest=oldest)

    def trimmed(self, fill: Fill, n: int) -> Fill:
        tokens = max(fill.tokens - n, 0)
        start = fill.coded if tokens >= fill.coded else self._whole(tokens + 1) - self.block
        return Fill(tokens, tokens, start, older=min(fill.older, start), oldest=min(fill.oldest, start))

    def settles(self, fill: Fill, n: int) -> bool:
        return n > 1 or self.settled(fill, n) != fill

    def capacity(self, state: TieredState) -> int:
        return self.options.mid_boundary + self._old_columns(state)

    def fits(self, state: TieredState, fill: Fill) -> bool:
        recent, mid = self.rooms
        tiers = fill.coded - fill.older <= recent and fill.older - fill.oldest <= mid
        return tiers and fill.oldest <= self._old_columns(state) and fill.rows - fill.coded <= self.block

    def overflows(self, state: TieredState, n: int) -> mx.array:
        return self._frontiers(state.offset + n)[:, 2] > self._old_columns(state)

    def _pass_on(
        self, sides: Sides, tier: Tier, came: Tier, before: mx.array, after: mx.array, bits: int
    ) -> tuple[Tier, Tier]:
        """The tier with what `came`, without what is too old, and that in `bits`, first rows first.

        `before` and `after` int [B, 2]: rows in this tier or an older one, and in older ones.
        """
        held, count = before[:, 0] - before[:, 1], sides[0].count(came[0])

        def take_in(side: Units, rows: Rows, new: Rows) -> Rows:
            room = side.count(rows)
            return side.write(side.grown(rows, room + count), new, held, held + count)

        wide = _each(take_in, sides, tier, came)
        left = after[:, 1] - before[:, 1]
        stays = _each(lambda side, rows, x: side.read(x, left, side.count(rows)), sides, tier, wide)
        older = _each(lambda side, x: _coder(side).coarser(side.first(x, count), bits), sides, wide)
        return stays, older

    def _whole(self, count: int) -> int:
        """`count` rows filled up to whole blocks."""
        return -(-count // self.block) * self.block

    def _old_room(self, capacity: int) -> int:
        """Room for the old rows of `capacity` tokens; a block at least, so that there is something to write to."""
        return max(self._counts(capacity)[2], self.block)

    def _old_columns(self, state: TieredState) -> int:
        """Old rows that the state has room for."""
        return self.sides(state.layout)[2][0].count(state.old[0])

    def _boundaries(self) -> tuple[int, int]:
        return self.options.recent_boundary, self.options.mid_boundary

    def _frontiers(self, offset: mx.array) -> mx.array:
        """Rows int32 [B, 3] in any tier, in mid or old, in old, when `offset` int [B] tokens have come."""
        whole = mx.maximum(offset, 0) // self.block * self.block
        older = [
            mx.minimum(whole, mx.maximum((offset - 1 - age) // self.block + 1, 0) * self.block)
            for age in self._boundaries()
        ]
        return mx.stack([whole, *older], axis=-1)

    def _counts(self, tokens: int) -> tuple[int, ...]:
        """`_frontiers` on the host."""
        whole = tokens // self.block * self.block
        older = [max((tokens - 1 - age) // self.block + 1, 0) * self.block for age in self._boundaries()]
        return (whole, *(min(whole, count) for count in older))

    def _positions(self, state: TieredState, exact: int) -> mx.array:
        """Positions of the columns of the tiers, old to recent, then of `exact` rows."""
        edges = [mx.zeros_like(state.offset), *(state.coded[:, i] for i in (2, 1, 0))]
        found = []
        for i, room in enumerate((self._old_columns(state), *self.rooms[::-1])):
            columns = edges[i][:, None] + mx.arange(room)
            found.append(mx.where(columns < edges[i + 1][:, None], columns, -1))
        found.append(edges[3][:, None] + mx.arange(exact))
        return mx.concatenate(found, axis=-1)[:, None]


def _each(change: Callable[..., Any], *pairs: tuple[Any, Any]) -> tuple[Any, Any]:
    """`change` for keys, then for values."""
    keys, values = (change(*side) for side in zip(*pairs, strict=True))
    return keys, values


def _coder(side: Units) -> RangeGroups:
    return cast(RangeGroups, side.coder)


def _coded(fill: Fill) -> tuple[int, int, int]:
    return fill.coded, fill.older, fill.oldest


def age_tiered(**options: Any) -> Transform:
    """Fewer bits for older rows; keeps every token."""
    return AgeTiered(AgeTieredKVOptions(**options))
