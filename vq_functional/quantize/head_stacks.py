"""Head stacks: channel groups of keys whose width goes by the importance of the head.

How many heads get which width follows from the mean width alone, so every
shape is known; only the order of the heads depends on data.
"""

import functools
import math
from collections.abc import Iterator
from fractions import Fraction

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.packing import alignment
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.head_importance import norm_variance, ranked, row_entropy


@functools.lru_cache(maxsize=512)
def head_widths(heads: int, mean: float, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Bits of a layer's heads, the least important first; their mean is `mean` as nearly as `widths` allow."""
    target = Fraction(str(mean))
    reach = 2 * min(widths[-1] - target, target - widths[0])
    wanted = [target + reach * Fraction(2 * rank - heads + 1, 2 * max(heads - 1, 1)) for rank in range(heads)]
    bits = [min(widths, key=lambda width: abs(width - want)) for want in wanted]
    while (move := _move(bits, wanted, widths, heads * target)) is not None:
        bits[move[0]] = move[1]
    return tuple(bits)


def _move(bits: list[int], wanted: list[Fraction], widths: tuple[int, ...], total: Fraction) -> tuple[int, int] | None:
    """A head and its next width, such that the sum gets closer to `total` and the head strays least."""
    missing = total - sum(bits)
    way = 1 if missing > 0 else -1
    moves = []
    for rank, now in enumerate(bits):
        at = widths.index(now) + way
        if 0 <= at < len(widths) and abs(missing - widths[at] + now) < abs(missing):
            moves.append((abs(wanted[rank] - widths[at]), -way * rank, rank, widths[at]))
    return min(moves)[2:] if moves else None


@attrs.frozen
class HeadStacksCodec(Codec):
    """Channel groups at `mean` bits over the heads: D * (mean / 8 + 4 / group_size) bytes a row and head.

    Heads are ranked for every `interval` blocks of rows, which costs a byte a
    head, or once for all where it is 0. `importance` and `obs_window` as in
    AdaKVOptions.
    """

    mean: float
    widths: tuple[int, ...]
    group_size: int
    interval: int
    importance: str
    obs_window: int
    name = "head_stacks"
    indivisible = "bits are divided among all heads of a layer"

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Groups that fill whole words at every width, as many as share a ranking."""
        block = math.lcm(self.group_size, *(alignment(width) for width in self.widths))
        return block * max(self.interval, 1)

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return HeadStacks(dim, dtype, self)


@attrs.frozen
class HeadStacks(Coder):
    """One stack of heads a width, the least important heads first.

    Arrays [B, H, U, ...] over units of rows: scales and zeros [D, groups],
    codes uint32 [B, heads of the stack, U, D, words] for each stack, and which
    head is in which place: uint8 (uint16 where H > 256) [B, H, U], or as a
    table int32 [B, H].
    """

    dim: int
    dtype: mx.Dtype
    codec: HeadStacksCodec

    def tables(self, x: mx.array) -> Rows:
        return self.tables_by(x, None)

    def encode(self, x: mx.array) -> Rows:
        return self.encode_by(x, ())

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        return self.pack(x, tables, None)

    def tables_by(self, x: mx.array, entropy: mx.array | None) -> Rows:
        """`tables`, by the rows' `entropy` as in `pack`."""
        if self.codec.interval:
            return ()
        first = slice(self.codec.unit)
        entropy = None if entropy is None else entropy[..., first]
        return (self._places(self._units(x[:, :, first]), entropy)[..., 0].astype(mx.int32),)

    def pack(self, x: mx.array, tables: Rows, entropy: mx.array | None) -> Rows:
        """`encode_by`; `entropy` [B, H, S] of the rows' attention is 0 where keys stand in for queries."""
        units, heads = self._units(x), x.shape[1]
        place = tables[0][..., None] if tables else self._places(units, entropy)
        stacked = _heads(units.swapaxes(-1, -2), place)
        stacks = [
            quantize(stacked[:, first:last], bits, self.codec.group_size, self.dtype)
            for bits, first, last in self._stacks(heads)
        ]
        scales, zeros = (mx.concatenate([stack[at] for stack in stacks], axis=1) for at in (1, 2))
        own = () if tables else (place.astype(mx.uint8 if heads <= 256 else mx.uint16),)
        return scales, zeros, *(stack.codes for stack in stacks), *own

    def decode(self, rows: Rows) -> mx.array:
        numbers = [dequantize(groups, bits, self.codec.group_size) for bits, _, groups in self._opened(rows)]
        units = _heads(mx.concatenate(numbers, axis=1), _rank(rows))
        return to_dtype(units, self.dtype).swapaxes(-1, -2).flatten(2, 3)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        if queries.shape[2] > self.codec.unit:  # queries are gathered unit by unit: for many, vectors are cheaper
            return super().dot(queries, rows)
        asked = _heads(queries[:, :, None], _place(rows))
        scores = [
            matmul(asked[:, stack], groups, bits, self.codec.group_size, transpose=False)
            for bits, stack, groups in self._opened(rows)
        ]
        return _heads(mx.concatenate(scores, axis=1), _rank(rows)).swapaxes(2, 3).flatten(3)

    def bits(self, rows: Rows) -> mx.array:
        """Bits int32 [B, H, U] of each head in each unit; U is 1 where heads are ranked once."""
        rank = _rank(rows)
        return mx.array(head_widths(rank.shape[1], self.codec.mean, self.codec.widths), mx.int32)[rank]

    def _units(self, x: mx.array) -> mx.array:
        batch, heads, count, dim = x.shape
        return x.reshape(batch, heads, count // self.codec.unit, self.codec.unit, dim)

    def _places(self, units: mx.array, entropy: mx.array | None) -> mx.array:
        """Heads int [B, H, U] in the order of their importance to `units` [B, H, U, R, D]."""
        if self.codec.importance == "norm_variance":
            return ranked(norm_variance(units))
        window = min(self.codec.obs_window, units.shape[3])
        own = row_entropy(units[..., -window:, :], units)
        if entropy is not None:
            entropy = entropy.reshape(units.shape[:4])[..., -window:]
            own = mx.where(entropy > 0, entropy, own)
        finite = mx.isfinite(units[..., -window:, :]).all(axis=-1)
        return ranked(mx.where(finite, own, 0).sum(axis=-1) / mx.maximum(finite.sum(axis=-1), 1))

    def _stacks(self, heads: int) -> Iterator[tuple[int, int, int]]:
        """Width, first place and end of each stack."""
        bits = head_widths(heads, self.codec.mean, self.codec.widths)
        for width in sorted(set(bits)):
            yield width, bits.index(width), heads - bits[::-1].index(width)

    def _opened(self, rows: Rows) -> Iterator[tuple[int, slice, Groups]]:
        """Width, places and numbers of each stack."""
        scales, zeros, *codes = rows
        for (bits, first, last), packed in zip(self._stacks(scales.shape[1]), codes, strict=False):
            stack = slice(first, last)
            yield bits, stack, Groups(packed, scales[:, stack], zeros[:, stack])


def _place(rows: Rows) -> mx.array:
    """The head in each place, int32 [B, H, U], or [B, H, 1] where heads are ranked once."""
    place = rows[-1].astype(mx.int32)
    return place if place.ndim == 3 else place[..., None]


def _rank(rows: Rows) -> mx.array:
    """The place of each head."""
    return mx.argsort(_place(rows), axis=1)


def _heads(x: mx.array, order: mx.array) -> mx.array:
    """`x` [B, H, U, ...] with its heads in the `order` int [B, H, U]; U may be 1 in one of them."""
    batch, heads, count, *rest = x.shape
    first = mx.arange(batch)[:, None, None] * heads
    index = (first + order) * count + mx.arange(count)
    flat = x.reshape(batch * heads * count, math.prod(rest))  # whole rows: faster than numbers along an axis
    return mx.take(flat, index, axis=0).reshape(*index.shape, *rest)
