"""Fields of different widths in one bit stream a token, and rows that are held in principal components this way."""

import math

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.describe import Described
from vq_functional.core.errors import check
from vq_functional.core.table import Table
from vq_functional.lowrank.allocation import (
    allocate,
    excess_variance,
    mean_squares,
    observed_ranges,
    spread_ranges,
    steps_between,
)
from vq_functional.lowrank.head_groups import HeadGroups, principal_basis
from vq_functional.ops.packing import WORD
from vq_functional.ops.ranges import from_mean, mended
from vq_functional.ops.vectors import TINY, to_dtype

RANGES = ("spread", "observed")
LOT = 512  # rows packed at once: bounds what a long prompt takes on the way


def pack_fields(codes: mx.array, width: mx.array, count: int) -> mx.array:
    """Words uint32 [B, H, count, S] of codes [B, H, r, S] below 2**width, for `width` int [B, H, r].

    Tokens run along the last axis, so that each field is found once for all of them.
    """
    batch, heads, _, rows = codes.shape
    if count == 0:
        return mx.zeros((batch, heads, 0, rows), mx.uint32)
    word, shift = _places(width)
    # A field without bits may stand behind the last word, as may what no field crosses into.
    place = mx.arange(0, batch * heads * (count + 2), count + 2).reshape(batch, heads, 1) + word
    room = mx.zeros((batch * heads * (count + 2), rows), mx.uint32)
    # Fields are apart: their sum is their union.
    room = room.at[place].add(codes << shift)
    room = room.at[place + 1].add(mx.where(shift > 0, codes >> (WORD - shift), 0))
    return room.reshape(batch, heads, count + 2, rows)[:, :, :count]


def unpack_fields(words: mx.array, width: mx.array) -> mx.array:
    """Codes as float32 [B, H, r, S], the inverse of `pack_fields`; zeros for fields without bits."""
    batch, heads, count, rows = words.shape
    width = mx.broadcast_to(width, (batch, heads, width.shape[-1]))
    if count == 0:
        return mx.zeros((*width.shape, rows))
    return _unpack(words, width)


@mx.compile
def _unpack(words: mx.array, width: mx.array) -> mx.array:
    batch, heads, count, rows = words.shape
    word, shift = _places(width)
    first = mx.arange(0, batch * heads * count, count).reshape(batch, heads, 1)
    flat = words.reshape(batch * heads * count, rows)
    low, high = (flat[first + mx.minimum(place, count - 1)] for place in (word, word + 1))
    high = mx.where(shift > 0, high << (WORD - shift), 0)
    mask = (mx.array(1, mx.uint32) << width.astype(mx.uint32)) - 1
    return (((low >> shift) | high) & mask[..., None]).astype(mx.float32)


def most_bits(width: mx.array) -> int:
    """Bits of the row of widths [..., r] that has most. Reads back."""
    return int(np.array(width.astype(mx.int32)).sum(axis=-1).max(initial=0))


def _places(width: mx.array) -> tuple[mx.array, mx.array]:
    """Word int32 [B, H, r] in which each field begins, and its bit there, uint32 [B, H, r, 1]."""
    width = width.astype(mx.int32)
    offset = mx.cumsum(width, axis=-1) - width
    return offset // WORD, (offset % WORD).astype(mx.uint32)[..., None]


@attrs.frozen
class Components(Described):
    """What is known of the components of rows of H heads: tables of a codec whose rows have none of their own."""

    basis: Table  # [H, D, r], columns are axes
    mean: Table  # [H, D]
    width: Table  # [H, r]
    scale: Table  # [H, r], 0 without bits
    shift: Table


@attrs.frozen(kw_only=True)
class VariableCodesCodec(Codec):
    """4 * ceil(budget / 32) bytes a row; once a head 2 D (r + 1) + 9 r, unless components are `given`."""

    budget: int
    choices: tuple[int, ...]
    beta: float
    rank: int | None
    shrinkage: float | None
    margin: float
    ranges: str
    n_fit: int
    n_sink: int
    chunk: int
    given: Components | None = None
    name = "variable_codes"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.chunk

    @property
    def shared(self) -> int:  # type: ignore[override]
        return 1

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return 0 if self.given else self.n_fit

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        if self.given is None:
            rank = dim if self.rank is None else self.rank
            check(rank <= dim, "kvtc", "rank", f"must be at most the head size {dim}", rank)
            budget = min(self.budget, rank * max(self.choices))
            return VariableCodes(dim, dtype, self, rank, budget, ())
        _, of, rank = self.given.basis.shape
        check(of == dim, "kvtc", "basis", f"must be of head size {dim}", of)
        tables = (self.given.basis, self.given.mean, self.given.width, self.given.scale, self.given.shift)
        basis, mean, width, scale, shift = (table.array[None] for table in tables)
        given = basis, mean, width.astype(mx.uint8), scale, shift
        mx.eval(given)
        return VariableCodes(dim, dtype, self, rank, most_bits(width), given)


@attrs.frozen(eq=False)
class VariableCodes(Coder):
    """y = (x - mean) V in codes of a width for each component: x ~ mean + V (shift + scale * code).

    Words uint32 [B, H, W, S], tokens along the last axis. Tables: V [B, H, D, r] and mean [B, H, D] in the rows'
    dtype, widths uint8 [B, H, r], scale and shift float32 [B, H, r].
    """

    dim: int
    dtype: mx.Dtype
    codec: VariableCodesCodec
    rank: int
    budget: int
    given: Rows  # tables that no sequence has of its own, B = 1

    @property
    def axes(self) -> tuple[int, ...]:
        return (3,)

    def tables(self, x: mx.array) -> Rows:
        if self.given:
            return ()
        first = mended(x[:, :, min(self.codec.n_sink, x.shape[2] - 1) :].astype(mx.float32))
        basis, mean = principal_basis(first, HeadGroups.of(x.shape[1], x.shape[1]), self.rank)
        return self.fitted(first, basis, mean)

    def fitted(self, x: mx.array, basis: mx.array, mean: mx.array) -> Rows:
        """Tables for the rows of float32 `x` [B, H, S, D], finite, with these axes [B, H, D, r] and mean [B, H, D]."""
        basis, mean = to_dtype(basis, self.dtype), to_dtype(mean, self.dtype)
        y = from_mean(x, mean[:, :, None]) @ basis.astype(mx.float32)
        size = mx.maximum(mx.abs(y).max(axis=(2, 3), keepdims=True), TINY)  # so that squares can't overflow
        y = y / size
        variance = mx.cummax(mean_squares(y), axis=-1, reverse=True)  # rounding may turn the order of equal ones
        if self.codec.shrinkage is None:
            variance = variance + excess_variance(x / size, variance)
        else:
            variance = variance + self.codec.shrinkage / self.dim * variance.sum(axis=-1, keepdims=True)
        width = allocate(variance, self.budget, self.codec.choices, self.codec.beta)
        low, high = observed_ranges(y, self.codec.margin)
        if self.codec.ranges == "spread":
            low, high = spread_ranges(low, high, mx.sqrt(variance), width)
        # No codes may be read as a row that overflows, not even those of unused room.
        room = mx.finfo(mx.float32).max / (2 * math.sqrt(y.shape[-1])) / size[:, :, 0]
        scale, shift = steps_between(mx.maximum(low, -room), mx.minimum(high, room), width)
        return basis, mean, width.astype(mx.uint8), scale * size[:, :, 0], shift * size[:, :, 0]

    def encode(self, x: mx.array) -> Rows:
        return self.encode_by(x, ())

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        opened = self._opened(tables)
        heads = opened[0].shape[1]
        check(x.shape[1] == heads, "kvtc", "basis", f"must be of {x.shape[1]} heads", heads)
        lot = max(LOT // self.codec.chunk, 1) * self.codec.chunk
        words = [self._words(x[:, :, start : start + lot], *opened) for start in range(0, x.shape[2], lot)]
        return (words[0] if len(words) == 1 else mx.concatenate(words, axis=3),)

    def _words(
        self, x: mx.array, basis: mx.array, mean: mx.array, width: mx.array, scale: mx.array, shift: mx.array
    ) -> mx.array:
        y = self._by_chunk(from_mean(x, mean[:, :, None]), basis).swapaxes(-1, -2)
        codes = _steps(y, scale[..., None], shift[..., None], width[..., None])
        width = mx.broadcast_to(width, (x.shape[0], *width.shape[1:]))
        return pack_fields(codes, width, math.ceil(self.budget / WORD))

    def decode(self, rows: Rows) -> mx.array:
        basis, mean, width, scale, shift = self._opened(rows[1:])
        y = unpack_fields(rows[0], width).swapaxes(-1, -2) * scale[:, :, None] + shift[:, :, None]
        x = self._by_chunk(y, basis.swapaxes(-1, -2)) + mean[:, :, None].astype(mx.float32)
        return to_dtype(x, self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        basis, mean, width, scale, shift = self._opened(rows[1:])
        turned = queries @ basis
        same = turned @ shift[..., None] + queries @ mean[..., None].astype(mx.float32)
        return (turned * scale[:, :, None]) @ unpack_fields(rows[0], width) + same

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        basis, mean, width, scale, shift = self._opened(rows[1:])
        total = weights.sum(axis=-1, keepdims=True)
        sums = weights @ unpack_fields(rows[0], width).swapaxes(-1, -2)
        y = sums * scale[:, :, None] + total * shift[:, :, None]
        return y @ basis.swapaxes(-1, -2) + total * mean[:, :, None].astype(mx.float32)

    def _by_chunk(self, x: mx.array, matrix: mx.array) -> mx.array:
        """`x` [B, H, S, N] times `matrix` [B, H, N, M], a chunk at once: rounding is the same however rows came."""
        return (mx.unflatten(x, 2, (-1, self.codec.chunk)) @ matrix[:, :, None]).flatten(2, 3)

    def _opened(self, tables: Rows) -> Rows:
        """V float32, mean, widths int32, scale, shift."""
        basis, mean, width, scale, shift = self.given or tables
        return basis.astype(mx.float32), mean, width.astype(mx.int32), scale, shift


@mx.compile
def _steps(y: mx.array, scale: mx.array, shift: mx.array, width: mx.array) -> mx.array:
    """Codes uint32 of `y`, the steps of `scale` above `shift`, below 2**width."""
    count = (y - shift) / mx.maximum(scale, TINY)
    top = mx.left_shift(mx.array(1), width) - 1
    return mx.clip(mx.round(mx.where(mx.isnan(count), 0, count)), 0, top).astype(mx.uint32)
