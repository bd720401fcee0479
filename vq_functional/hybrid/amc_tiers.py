"""Rows of a block in three tiers: as they came, fewer channels in 8 bits, very few in 4; how AMC holds tokens."""

from typing import NamedTuple

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.core.table import Table
from vq_functional.hybrid.amc_codes import SymmetricCodes, by_channel, by_rank, channels_by_variance
from vq_functional.ops.rows import extend_last, pick
from vq_functional.ops.vectors import to_dtype

FILLS = ("block", "mean", "zero")


@attrs.frozen
class TiersCodec(Codec):
    """Of `window` rows `high` as they come, `mid` in 8 bits and the others in 4, each at a rank.

    [2 D high + mid (r + 2 ceil(r/g)) + low (ceil(r/2) + 2 ceil(r/g))] / window bytes a row,
    2 D / window with the `fill` "block", and for keys the slots: a byte, two where `window` > 256.
    """

    window: int
    high: int
    mid: int
    rank_mid: int | None
    rank_low: int | None
    group_size: int
    fill: str
    slots: bool  # holds the slots, and where rows may be `lowered` how many are
    lowered: bool
    order: Table | None = None  # [H, D]
    mean: Table | None = None  # [H, D], in this order
    name = "amc"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return self.window if self.order is None else 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows of a block in each tier."""
        return self.high, self.mid, self.window - self.high - self.mid

    def ranks(self, dim: int) -> tuple[int, int]:
        """Channels that a row of the middle tier keeps, and one of the low tier; at most all."""
        mid = max(1, round(43 * dim / 128)) if self.rank_mid is None else self.rank_mid
        low = 2 * max(1, round(4 * dim / 128)) if self.rank_low is None else self.rank_low
        return min(mid, dim), min(low, dim)

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        mid, low = (
            SymmetricCodes(rank, bits, self.group_size, dtype)
            for rank, bits in zip(self.ranks(dim), (8, 4), strict=True)
        )
        if self.order is None:
            return Tiers(dim, dtype, self, mid, low, ())
        size = self.order.shape[1]
        check(size == dim, "amc", "head_dim", f"must be that of `basis`, {size}", dim)
        given = tuple(table.array[None] for table in (self.order, self.mean) if table is not None)
        mx.eval(given)
        return Tiers(dim, dtype, self, mid, low, given)


class Held(NamedTuple):
    """The arrays of a coder's rows, by what they are."""

    slots: mx.array  # int32 [B, H, N, C]: the row of each slot
    exact: mx.array | None  # [B, H, N high, D]
    codes: tuple[Rows, ...]  # of the tiers that have rows
    means: mx.array | None  # of each block, or of all: float32 [B, H, N or 1, D], channels by rank
    order: mx.array  # int32 [B, H, D]: channels by rank


@attrs.frozen(eq=False)
class Tiers(Coder):
    """Arrays, over N blocks: slots [B, H, S] if the codec holds them, exact rows [B, H, N high, D], codes and scales
    of both tiers as SymmetricCodes has them, with the fill "block" means [B, H, N, D], and where rows may be lowered
    how many of the first two tiers are, uint16 [B, H, 2 N]. What a tier without rows would need is not there.
    Readers get the slots in front, whoever holds them.

    Tables: channels by falling variance, uint16 [B, H, D]; with the fill "mean" their means [B, H, D] in this order.
    """

    dim: int
    dtype: mx.Dtype
    codec: TiersCodec
    mid: SymmetricCodes
    low: SymmetricCodes
    given: Rows  # tables that no sequence has of its own, B = 1

    @property
    def tiers(self) -> tuple[SymmetricCodes, ...]:
        """Codes of the tiers that have rows."""
        return tuple(codes for codes, count in zip((self.mid, self.low), self.codec.counts[1:], strict=True) if count)

    def tables(self, x: mx.array) -> Rows:
        if self.given:
            heads = self.given[0].shape[1]
            check(x.shape[1] == heads, "amc", "kv_heads", f"must be those of `basis`, {heads}", x.shape[1])
            return ()
        order, means = channels_by_variance(x[:, :, : self.codec.window])
        held = (order.astype(mx.uint16),)
        return (*held, to_dtype(means, self.dtype)) if self.codec.fill == "mean" else held

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        shape = *x.shape[:2], x.shape[2] // self.codec.window, self.codec.window
        lowered = mx.zeros(shape, mx.bool_) if self.codec.lowered else None
        return self.pack(x, mx.broadcast_to(mx.arange(self.codec.window), shape), lowered, tables)

    def pack(self, x: mx.array, slots: mx.array, lowered: mx.array | None, tables: Rows) -> Rows:
        """Whole blocks of rows `x` [B, H, S, D]: those that `slots` int [B, H, N, C] name, the high tier first.

        A row that is `lowered`, bool like the slots, is rounded as one of the next tier.
        """
        order, means = self._fitted(tables)
        high, mid, _ = self.codec.counts
        exact, coded = mx.split(self._picked(x, slots), [high], axis=3)
        ranked = by_rank(coded.astype(mx.float32), order)
        if self.codec.fill == "block" and self.tiers:
            own = to_dtype(_finite_mean(ranked), self.dtype)
            means = own.astype(mx.float32)
        if lowered is not None:
            exact, ranked = self._lowered(exact, ranked, lowered, means, order)
        rows = (
            [slots.astype(mx.uint8 if self.codec.window <= 256 else mx.uint16).flatten(2)] if self.codec.slots else []
        )
        rows += [exact.flatten(2, 3)] if high else []
        parts = [part for part in mx.split(ranked, [mid], axis=3) if part.shape[3]]
        for codes, part in zip(self.tiers, parts, strict=True):
            rows += [array.flatten(2, 3) for array in self._codes(codes, part, means)]
        rows += [own] if self.codec.fill == "block" and self.tiers else []
        rows += [self._lowered_rows(lowered)] if self.codec.slots and lowered is not None else []
        return tuple(rows)

    def decode(self, rows: Rows) -> mx.array:
        held = self._split(rows)
        parts = [] if held.exact is None else [self._blocks(held.exact, held)]
        for codes, arrays in zip(self.tiers, held.codes, strict=True):
            ranked = self._by_rank_of(codes, tuple(self._blocks(array, held) for array in arrays), held.means)
            parts.append(to_dtype(by_channel(ranked, held.order), self.dtype))
        numbers = mx.broadcast_to(mx.arange(self.codec.window), held.slots.shape)
        places = mx.put_along_axis(mx.zeros_like(held.slots), held.slots, numbers, axis=-1)
        return self._picked(mx.concatenate(parts, axis=3).flatten(2, 3), places).flatten(2, 3)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        held, parts = self._split(rows), list[mx.array]()
        if held.exact is not None:
            parts.append(self._by_block(queries @ held.exact.astype(mx.float32).swapaxes(-1, -2), held))
        asked = by_rank(queries, held.order)
        for codes, arrays in zip(self.tiers, held.codes, strict=True):
            scores = self._by_block(asked[..., : codes.rank] @ codes.numbers(arrays).swapaxes(-1, -2), held)
            means = self._filled(codes, held.means)
            parts.append(scores if means is None else scores + (asked @ means.swapaxes(-1, -2))[..., None])
        scores = mx.concatenate(parts, axis=-1)
        index = mx.broadcast_to(held.slots[:, :, None], scores.shape)
        return mx.put_along_axis(mx.zeros_like(scores), index, scores, axis=-1).flatten(3)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        held = self._split(rows)
        blocks = self._by_block(weights, held)
        blocks = mx.take_along_axis(blocks, mx.broadcast_to(held.slots[:, :, None], blocks.shape), axis=-1)
        high, mid, _ = self.codec.counts
        own, *parts = mx.split(blocks, [high, high + mid], axis=-1)
        exact = mx.array(0.0) if held.exact is None else own.flatten(3) @ held.exact.astype(mx.float32)
        if not self.tiers:
            return exact
        total, parts = mx.array(0.0), [part for part in parts if part.shape[-1]]
        for codes, arrays, part in zip(self.tiers, held.codes, parts, strict=True):
            total = total + extend_last(part.flatten(3) @ codes.numbers(arrays), self.dim)
            means = self._filled(codes, held.means)
            if means is not None:
                each = part.sum(axis=-1)
                total = total + (each if self.codec.fill == "block" else each.sum(axis=-1, keepdims=True)) @ means
        return exact + by_channel(total, held.order)

    def _split(self, rows: Rows) -> Held:
        """What readers get: the slots, the coder's other arrays, and its tables."""
        slots = rows[0].astype(mx.int32).reshape(*rows[0].shape[:2], -1, self.codec.window)
        rest = list(rows[1:])
        exact = rest.pop(0) if self.codec.high else None
        codes = tuple((rest.pop(0), rest.pop(0)) for _ in self.tiers)
        own = [rest.pop(0).astype(mx.float32)] if self.codec.fill == "block" and self.tiers else []
        if self.codec.lowered and self.codec.slots:
            rest.pop(0)
        order, means = self._fitted(tuple(rest))
        return Held(slots, exact, codes, own[0] if own else means, order)

    def _fitted(self, tables: Rows) -> tuple[mx.array, mx.array | None]:
        """Channels by rank int32 [B, H, D], and their means float32 [B, H, 1, D] where these fill all blocks."""
        order, *means = self.given or tables
        return order.astype(mx.int32), means[0].astype(mx.float32)[:, :, None] if means else None

    def _codes(self, codes: SymmetricCodes, ranked: mx.array, means: mx.array | None) -> Rows:
        """Codes and scales of rows [B, H, N, n, D] with channels by rank."""
        if self.codec.fill == "block" and means is not None:
            ranked = ranked - means[:, :, :, None]
        return codes.encode(ranked[..., : codes.rank])

    def _by_rank_of(self, codes: SymmetricCodes, arrays: Rows, means: mx.array | None) -> mx.array:
        """Rows float32 [B, H, N, n, D] of codes and scales [B, H, N, n, ...], channels by rank."""
        x, filled = extend_last(codes.numbers(arrays), self.dim), self._filled(codes, means)
        return x if filled is None else x + filled[:, :, :, None]

    def _rounded(self, codes: SymmetricCodes, ranked: mx.array, means: mx.array | None) -> mx.array:
        """Rows as a tier reads them."""
        return self._by_rank_of(codes, self._codes(codes, ranked, means), means)

    def _filled(self, codes: SymmetricCodes, means: mx.array | None) -> mx.array | None:
        """What a tier adds to its codes [B, H, N or 1, D], by rank: in all channels, or in those that it drops."""
        if self.codec.fill != "mean" or means is None:
            return means
        return mx.where(mx.arange(self.dim) < codes.rank, 0, means)

    def _blocks(self, x: mx.array, held: Held) -> mx.array:
        return x.reshape(*held.slots.shape[:3], -1, x.shape[-1])

    def _by_block(self, x: mx.array, held: Held) -> mx.array:
        """Columns [B, H, M, N n] as [B, H, M, N, n]."""
        return x.reshape(*x.shape[:3], held.slots.shape[2], -1)

    def _picked(self, x: mx.array, slots: mx.array) -> mx.array:
        """Rows [B, H, N, C, D] of `x` [B, H, S, D] as `slots` [B, H, N, C] of each block name them."""
        batch, heads, blocks, window = slots.shape
        flat = x.reshape(batch, heads * blocks, window, self.dim)
        return pick(flat, slots.reshape(batch, heads * blocks, window)).reshape(*slots.shape, self.dim)

    def _lowered(
        self, exact: mx.array, ranked: mx.array, lowered: mx.array, means: mx.array | None, order: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Rows of the high tier and those of the others by rank, with what the next tier makes of the lowered ones."""
        high, mid, _ = self.codec.counts
        passed = by_channel(self._rounded(self.mid, by_rank(exact.astype(mx.float32), order), means), order)
        exact = mx.where(lowered[..., :high, None], to_dtype(passed, self.dtype), exact)
        down = lowered[..., high:] & (mx.arange(self.codec.window - high) < mid)
        return exact, mx.where(down[..., None], self._rounded(self.low, ranked, means), ranked)

    def _lowered_rows(self, lowered: mx.array) -> mx.array:
        high, mid, _ = self.codec.counts
        parts = mx.split(lowered[..., : high + mid], [high], axis=-1)
        return mx.stack([part.sum(axis=-1) for part in parts], axis=-1).astype(mx.uint16).flatten(2)


def _finite_mean(x: mx.array) -> mx.array:
    """Mean [..., D] of the finite numbers among `x` [..., n, D]; 0 where there is none."""
    finite = mx.isfinite(x)
    count = mx.maximum(finite.sum(axis=-2), 1)
    return (mx.where(finite, x, 0) / count[..., None, :]).sum(axis=-2)
