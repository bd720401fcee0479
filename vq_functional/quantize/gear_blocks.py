"""What GEAR holds of a block of rows: affine codes, a low-rank part of their error, and a few numbers exactly."""

from typing import TypeAlias

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.ops.affine import Groups, dequantize
from vq_functional.ops.affine_places import numbers_at
from vq_functional.ops.low_rank import low_rank
from vq_functional.ops.outliers import filled, largest
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.groups import ChannelGroups, TokenGroups

Pair: TypeAlias = tuple[mx.array, mx.array]

BASE = 3  # arrays of the codes


@attrs.frozen(eq=False)
class GearBlocks(Coder):
    """x ~ codes + left @ right.T, or the exact number where there is one; each block of `block` rows by itself.

    Behind the arrays of `inner`, over N blocks: the factors [B, H, T, r] and
    [B, H, N, D, r] in `dtype`, where r is not 0; the places, uint16
    (uint32 where D * block > 65536) channel * block + row, and numbers
    [B, H, N, E], where there are `entries`; for keys the squared errors of the
    codes alone and of all parts in turn, float32 [B, H, 2 N].
    """

    dim: int
    dtype: mx.Dtype
    inner: ChannelGroups | TokenGroups
    block: int
    start: mx.array  # float32 [D, r]: what the factors are sought from
    entries: int
    differences: bool  # entries are held as differences from the other parts

    @property
    def rank(self) -> int:
        """Columns of the factors."""
        return self.start.shape[1]

    @property
    def axes(self) -> tuple[int, ...]:
        parts = 2 * bool(self.rank) + 2 * bool(self.entries) + self._along_tokens
        return (3 if self._along_tokens else 2,) * BASE + (2,) * parts

    def encode(self, x: mx.array) -> Rows:
        x = filled(self._blocks(x.astype(mx.float32)))
        index, outlier = self._outliers(x)
        base = self.inner.encode(mx.where(outlier, self._mean_of_others(x, outlier), x).flatten(2, 3))
        residual = mx.where(outlier, 0, x - self._numbers(base))
        factors = self._factors(residual)
        entries = self._entries(x, Groups(*base), factors, index)
        rows = (*base, *factors, *entries)
        if not self._along_tokens:
            return rows
        plain = x - self._numbers(self.inner.encode(x.flatten(2, 3)))
        errors = mx.stack([_energy(plain), _energy(x - self._approximated(rows))], axis=-1)
        return (*rows, errors.flatten(2))

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self._approximated(rows).flatten(2, 3), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        if queries.shape[2] > self.block:  # corrections are made block by block: for many, vectors are cheaper
            return super().dot(queries, rows)
        base, factors, entries = self._split(rows)
        asked, terms = [], []
        if factors:
            left, right = (part.astype(mx.float32) for part in factors)
            asked.append(queries[:, :, None] @ right)
            terms.append(self._blocks(left).swapaxes(-1, -2))
        if entries:
            channel, row = self._places(entries[0])
            at = mx.broadcast_to(channel.flatten(2)[:, :, None], (*queries.shape[:3], channel[0, 0].size))
            found = mx.take_along_axis(queries, at, axis=3).reshape(*queries.shape[:3], *channel.shape[2:])
            asked.append(found.swapaxes(2, 3) * self._corrections(base, factors, entries)[..., None, :])
            terms.append(_one_hot(row, self.block))
        corrections = mx.concatenate(asked, axis=-1) @ mx.concatenate(terms, axis=-2)
        return self.inner.dot(queries, base) + corrections.swapaxes(2, 3).flatten(3)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        if weights.shape[2] > self.block:
            return super().mix(weights, rows)
        base, factors, entries = self._split(rows)
        out = self.inner.mix(weights, base)
        by_block = weights.reshape(*weights.shape[:3], -1, self.block).swapaxes(2, 3)
        if factors:
            left, right = (part.astype(mx.float32) for part in factors)
            weighed = (by_block @ self._blocks(left)).swapaxes(2, 3).flatten(3)
            out = out + weighed @ right.swapaxes(-1, -2).flatten(2, 3)
        if entries:
            channel, row = self._places(entries[0])
            at = mx.broadcast_to(row[..., None, :], (*by_block.shape[:4], self.entries))
            own = mx.take_along_axis(by_block, at, axis=-1) * self._corrections(base, factors, entries)[..., None, :]
            out = _added(out, channel.flatten(2), own.swapaxes(2, 3).flatten(3))
        return out

    @property
    def _along_tokens(self) -> bool:
        return isinstance(self.inner, ChannelGroups)

    def _blocks(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self.block, x.shape[-1])

    def _flat(self, x: mx.array) -> mx.array:
        """Blocks [B, H, N, block, D] as [B, H, N, D * block], in the order of the entries' places."""
        return x.swapaxes(-1, -2).flatten(-2)

    def _unflat(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], self.dim, self.block).swapaxes(-1, -2)

    def _split(self, rows: Rows) -> tuple[Groups, Rows, Rows]:
        """Codes, the two factors, places and numbers of the entries; of what is not held an empty tuple."""
        first, second = BASE, BASE + 2 * bool(self.rank)
        return Groups(*rows[:BASE]), rows[first:second], rows[second : second + 2 * bool(self.entries)]

    def _numbers(self, base: Rows) -> mx.array:
        """Float32 blocks of codes alone."""
        numbers = dequantize(Groups(*base), self.inner.bits, self.inner.group)
        return self._blocks(numbers.swapaxes(-1, -2) if self._along_tokens else numbers[..., : self.dim])

    def _approximated(self, rows: Rows) -> mx.array:
        """Float32 blocks of all parts."""
        base, factors, entries = self._split(rows)
        x = self._numbers(base)
        if factors:
            left, right = (part.astype(mx.float32) for part in factors)
            x = x + self._blocks(left) @ right.swapaxes(-1, -2)
        if not entries:
            return x
        index, numbers = entries[0].astype(mx.int32), entries[1].astype(mx.float32)
        flat = self._flat(x)
        if self.differences:
            numbers = numbers + mx.take_along_axis(flat, index, axis=-1)
        return self._unflat(mx.put_along_axis(flat, index, numbers, axis=-1))

    def _outliers(self, x: mx.array) -> Pair:
        """Places int32 [B, H, N, E] of the numbers farthest from the mean of their vector, and which these are.

        A vector is a channel of a block for groups along tokens, a token for groups along channels.
        """
        if not self.entries:
            return mx.zeros((*x.shape[:3], 0), mx.int32), mx.zeros(x.shape, mx.bool_)
        axis = -2 if self._along_tokens else -1
        far = self._flat(mx.abs(x - (x * (1 / x.shape[axis])).sum(axis=axis, keepdims=True)))
        index = mx.sort(largest(far, self.entries), axis=-1)
        marks = mx.put_along_axis(mx.zeros(far.shape, mx.bool_), index, mx.ones(index.shape, mx.bool_), axis=-1)
        return index, self._unflat(marks)

    def _mean_of_others(self, x: mx.array, outlier: mx.array) -> mx.array:
        """Mean of a vector's numbers that are no outliers; 0 where there are none."""
        axis = -2 if self._along_tokens else -1
        count = mx.maximum((~outlier).sum(axis=axis, keepdims=True), 1)
        return (mx.where(outlier, 0, x) / count).sum(axis=axis, keepdims=True)

    def _factors(self, residual: mx.array) -> Rows:
        if not self.rank:
            return ()
        left, right = low_rank(residual, self.start)
        return left.flatten(2, 3).astype(self.dtype), to_dtype(right, self.dtype)

    def _entries(self, x: mx.array, base: Groups, factors: Rows, index: mx.array) -> Rows:
        if not self.entries:
            return ()
        numbers = mx.take_along_axis(self._flat(x), index, axis=-1)
        if self.differences:
            numbers = numbers - self._others(base, factors, index)
        places = index.astype(mx.uint16 if self.dim * self.block <= 2**16 else mx.uint32)
        return places, to_dtype(numbers, self.dtype)

    def _places(self, index: mx.array) -> Pair:
        """Channel and row in the block, int32."""
        index = index.astype(mx.int32)
        return index // self.block, index % self.block

    def _corrections(self, base: Groups, factors: Rows, entries: Rows) -> mx.array:
        """What the entries add to the other parts, float32 [B, H, N, E]."""
        numbers = entries[1].astype(mx.float32)
        return numbers if self.differences else numbers - self._others(base, factors, entries[0])

    def _others(self, base: Groups, factors: Rows, index: mx.array) -> mx.array:
        """Codes and low-rank part at the places `index`, float32 [B, H, N, E]."""
        channel, row = self._places(index)
        token = row + self.block * mx.arange(row.shape[2])[:, None]
        line, place = (channel, token) if self._along_tokens else (token, channel)
        numbers = numbers_at(base, line, place, self.inner.bits, self.inner.group)
        if factors:
            left, right = self._blocks(factors[0]), factors[1]
            at = [mx.take_along_axis(x, i[..., None], axis=-2) for x, i in ((left, row), (right, channel))]
            numbers = numbers + (at[0].astype(mx.float32) * at[1].astype(mx.float32)).sum(axis=-1)
        return numbers


def _one_hot(index: mx.array, size: int) -> mx.array:
    """Float32 [..., E, size] with a one at each `index` int [..., E]."""
    return (index[..., None] == mx.arange(size)).astype(mx.float32)


def _added(x: mx.array, channel: mx.array, numbers: mx.array) -> mx.array:
    """`x` [B, H, M, D] with `numbers` [B, H, M, E] added at the `channel` int [B, H, E] of each; these may repeat."""
    flat, count = x.flatten(0, 2), numbers.shape[-1]
    channel = mx.broadcast_to(channel[:, :, None], numbers.shape).reshape(-1, count)
    line = mx.arange(flat.shape[0])[:, None]
    return flat.at[line, channel].add(numbers.reshape(-1, count)).reshape(x.shape)


def _energy(x: mx.array) -> mx.array:
    """Sum of squares [B, H, N] of blocks, at most what float32 can hold."""
    return mx.minimum(mx.square(x).sum(axis=(-1, -2)), mx.finfo(mx.float32).max)
