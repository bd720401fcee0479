"""Rows in two classes, and channels that are scaled: what ZipCache makes of groups along tokens or channels."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.ops.affine import Groups, dequantize
from vq_functional.ops.rows import chosen, pick
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.groups import TokenGroups

LEAST = 1 / 16  # scale of a channel, at least, as a share of its head's largest: a quiet one may yet become loud


@attrs.frozen(eq=False)
class TwoClasses(Coder):
    """Of every `window` rows, `count` are held by `hi` and the others by `lo`, each class in token order.

    Arrays: those of `hi`, those of `lo`, and where a row is in its window when the rows of `hi` come first:
    uint8 (uint16 where `window` > 256) [B, H, S].
    """

    hi: Coder
    lo: Coder
    window: int
    count: int

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.hi.dim

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.hi.dtype

    @property
    def axes(self) -> tuple[int, ...]:
        return *(self.hi.axes or (2, 2, 2)), *(self.lo.axes or (2, 2, 2)), 2

    def encode(self, x: mx.array) -> Rows:
        first = mx.arange(self.window) < self.count
        return self.pack(x, mx.broadcast_to(first, (*x.shape[:2], x.shape[2] // self.window, self.window)))

    def pack(self, x: mx.array, salient: mx.array) -> Rows:
        """Rows of `x` [B, H, S, D], of which `count` in each window are `salient`, bool [B, H, S / window, window]."""
        batch, heads, windows, size = salient.shape
        order = chosen(salient, size)[0].reshape(batch, heads * windows, size)
        x = pick(x.reshape(batch, heads * windows, size, self.dim), order)
        hi, lo = (rows.reshape(batch, heads, -1, self.dim) for rows in mx.split(x, [self.count], axis=2))
        return *self.hi.encode(hi), *self.lo.encode(lo), self._place(salient).flatten(2)

    def decode(self, rows: Rows) -> mx.array:
        hi, lo, place = self._split(rows)
        batch, heads, windows, size = place.shape
        parts = [x.reshape(batch, heads * windows, -1, self.dim) for x in (self.hi.decode(hi), self.lo.decode(lo))]
        x = pick(mx.concatenate(parts, axis=2), place.reshape(batch, heads * windows, size))
        return x.reshape(batch, heads, windows * size, self.dim)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        hi, lo, place = self._split(rows)
        shape = (*queries.shape[:3], place.shape[2])
        parts = [x.reshape(*shape, -1) for x in (self.hi.dot(queries, hi), self.lo.dot(queries, lo))]
        scores = mx.concatenate(parts, axis=-1)
        return mx.take_along_axis(scores, mx.broadcast_to(place[:, :, None], scores.shape), axis=-1).flatten(3)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        hi, lo, place = self._split(rows)
        weights = weights.reshape(*weights.shape[:3], *place.shape[2:])
        index = mx.broadcast_to(place[:, :, None], weights.shape)
        weights = mx.put_along_axis(mx.zeros_like(weights), index, weights, axis=-1)
        of_hi, of_lo = (part.flatten(3) for part in mx.split(weights, [self.count], axis=-1))
        return self.hi.mix(of_hi, hi) + self.lo.mix(of_lo, lo)

    def _place(self, salient: mx.array) -> mx.array:
        """Where a row of a window is, the salient ones coming first."""
        before = mx.cumsum(salient.astype(mx.int32), axis=-1)
        place = mx.where(salient, before - 1, self.count + mx.arange(self.window) - before)
        return place.astype(mx.uint8 if self.window <= 256 else mx.uint16)

    def _split(self, rows: Rows) -> tuple[Rows, Rows, mx.array]:
        """Arrays of `hi` and of `lo`; places [B, H, S / window, window]."""
        *arrays, place = rows
        half = len(arrays) // 2
        return (
            tuple(arrays[:half]),
            tuple(arrays[half:]),
            place.reshape(*place.shape[:2], place.shape[2] // self.window, self.window),
        )


@attrs.frozen
class FloatGroups(TokenGroups):
    """Groups along channels that are read in float32, for further arithmetic."""

    def decode(self, rows: Rows) -> mx.array:
        return dequantize(Groups(*rows), self.bits, self.group)[..., : self.dim]


@attrs.frozen(eq=False)
class ScaledChannels(Coder):
    """x ~ c y, with c of each channel from the first rows (table [B, H, D]), and y as `inner` holds it."""

    inner: Coder

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.inner.dim

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.inner.dtype

    @property
    def axes(self) -> tuple[int, ...] | None:
        return self.inner.axes

    def tables(self, x: mx.array) -> Rows:
        scales = mx.sqrt(mx.where(mx.isfinite(x), mx.abs(x), 0).astype(mx.float32).max(axis=2))
        head = scales.max(axis=-1, keepdims=True)
        return (to_dtype(mx.where(head > 0, mx.maximum(scales, LEAST * head), 1), self.dtype),)

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        return self.inner.encode(self.scaled(x, tables))

    def scaled(self, x: mx.array, tables: Rows) -> mx.array:
        """y in float32."""
        return x.astype(mx.float32) / _channels(tables)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self.inner.decode(rows[:-1]).astype(mx.float32) * _channels(rows[-1:]), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self.inner.dot(queries * _channels(rows[-1:]), rows[:-1])

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return self.inner.mix(weights, rows[:-1]) * _channels(rows[-1:])


def pack_classes(coder: Coder, x: mx.array, salient: mx.array, tables: Rows) -> Rows:
    """What `coder` makes of whole windows `x` [B, H, S, D], in the classes that `salient` tells where it has two."""
    if isinstance(coder, ScaledChannels):
        return pack_classes(coder.inner, coder.scaled(x, tables), salient, ())
    return coder.pack(x, salient) if isinstance(coder, TwoClasses) else coder.encode_by(x, tables)


def _channels(tables: Rows) -> mx.array:
    return tables[0].astype(mx.float32)[:, :, None]
