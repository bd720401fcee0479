"""Vector quantization: sub-vectors as indices of codebook entries; scores and weighted sums straight from the indices.

Distances are sums of squared differences, number by number and not as a
matrix product: large offsets cancel nothing, and an index does not depend on
how many rows are coded at once.
"""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Rows
from vq_functional.ops.codebooks import lloyd_max
from vq_functional.ops.kmeans import Floats, kmeans
from vq_functional.ops.packing import pack, unpack

CHUNK = 2**20  # distances at a time
FITTED_BITS = 8  # larger codebooks without calibration are made of smaller ones
SAMPLES, ROUNDS, SEED = 2**15, 12, 0
BYTE = 8


@attrs.frozen(eq=False)
class Codebook:
    """Entries [K, d] for all sub-vectors, or [H or 1, M or 1, K, d] by head and by place in the row."""

    entries: mx.array  # float32
    columns: mx.array = attrs.field(init=False)  # float32 [d, ..., K]: by coordinate, shaped for [B, H, S, M, K]
    lengths: mx.array = attrs.field(init=False)  # float32 [..., K]

    def __attrs_post_init__(self) -> None:
        columns = mx.contiguous(mx.moveaxis(self.entries, -1, 0))
        columns = mx.expand_dims(columns, 2) if columns.ndim == 4 else columns
        lengths = _length(columns, 0)[0]
        mx.eval(self.entries, columns, lengths)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "lengths", lengths)

    @property
    def size(self) -> int:
        """Sub-vectors have so many numbers."""
        return self.entries.shape[-1]

    @property
    def count(self) -> int:
        return self.entries.shape[-2]

    def nearest(self, x: mx.array, radial: float = 1.0) -> mx.array:
        """Index uint32 [B, H, S, M] of the entry nearest to each float32 [B, H, S, M, d]; of equal ones the lowest.

        `radial` below 1 weighs the difference in length, which is a part of the distance, less.
        """
        if x.size == 0:
            return mx.zeros(x.shape[:-1], mx.uint32)
        search = _search(self.size, radial)
        batch, heads, n, places, _ = x.shape
        step = max(1, CHUNK // (batch * heads * places * self.count))
        chunks = [x[:, :, i : i + step] for i in range(0, n, step)]
        found = [search(chunk, _length(chunk, -1), self.columns, self.lengths) for chunk in chunks]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)

    def at(self, index: mx.array) -> mx.array:
        """Coordinates float32 [d, *index.shape] of the entries at `index`, for a codebook [K, d]."""
        # A gather of numbers along an axis is several times faster than one of short rows.
        flat = mx.broadcast_to(index.reshape(1, index.size), (self.size, index.size))
        return mx.take_along_axis(self.columns, flat, axis=1).reshape(self.size, *index.shape)

    def table(self, x: mx.array) -> mx.array:
        """Products float32 [B, H, M, n, K] of sub-vectors [B, H, n, M, d] with all entries."""
        return x.swapaxes(2, 3) @ self.entries.swapaxes(-1, -2)


def table_scores(table: mx.array, index: mx.array) -> mx.array:
    """Sums float32 [B, H, n, S] over the places of a `table` [B, H, M, n, K] at `index` [B, H, S, M]."""
    batch, heads, places, n, _ = table.shape
    index = mx.broadcast_to(index.swapaxes(2, 3)[:, :, :, None], (batch, heads, places, n, index.shape[2]))
    return mx.take_along_axis(table, index, axis=-1).sum(axis=2)


def _length(x: mx.array, axis: int) -> mx.array:
    return mx.sqrt(mx.square(x).sum(axis=axis, keepdims=True))


@functools.lru_cache(maxsize=64)
def _search(size: int, radial: float) -> Callable[..., mx.array]:
    def search(x: mx.array, length: mx.array, columns: mx.array, lengths: mx.array) -> mx.array:
        distance = functools.reduce(mx.add, [mx.square(x[..., j : j + 1] - columns[j]) for j in range(size)])
        if radial != 1:
            distance = distance - (1 - radial) * mx.square(length - lengths)
        return mx.argmin(distance, axis=-1)

    return mx.compile(search)


@attrs.frozen(eq=False)
class MirroredCodebook(Codebook):
    """Entries in all 2**d orthants of those in the first: index = place in the first + count there * signs."""

    first: Codebook = attrs.field(kw_only=True)

    def nearest(self, x: mx.array, radial: float = 1.0) -> mx.array:
        negative = (x < 0).astype(mx.uint32) << mx.arange(self.size, dtype=mx.uint32)
        return self.first.nearest(mx.abs(x), radial) + self.first.count * negative.sum(axis=-1)


@attrs.frozen(eq=False)
class ProductCodebook(Codebook):
    """Entries of `low` beside those of `high`: index = place in low + count there * place in high."""

    low: Codebook = attrs.field(kw_only=True)
    high: Codebook = attrs.field(kw_only=True)

    def nearest(self, x: mx.array, radial: float = 1.0) -> mx.array:
        low, high = x[..., : self.low.size], x[..., self.low.size :]
        return self.low.nearest(low, radial) + self.low.count * self.high.nearest(high, radial)


def has_gaussian(size: int, bits: int) -> bool:
    """Whether `gaussian_codebook` knows a way to this size."""
    return bits <= FITTED_BITS or size % 2 == 0 or _mirrors(size, bits)


@functools.lru_cache(maxsize=64)
def gaussian_codebook(size: int, bits: int) -> Codebook:
    """2**bits entries for standard normal sub-vectors of `size` numbers, the same on every machine."""
    if bits <= FITTED_BITS:
        return Codebook(mx.array(_fit(size, bits, positive=False)))
    if _mirrors(size, bits):
        first = _fit(size, bits - size, positive=True)
        signs = 1 - 2 * (np.arange(2**size)[:, None] >> np.arange(size) & 1)
        entries = (signs[:, None] * first).reshape(-1, size).astype(np.float32)
        return MirroredCodebook(mx.array(entries), first=Codebook(mx.array(first)))
    low, high = gaussian_codebook(size // 2, (bits + 1) // 2), gaussian_codebook(size // 2, bits // 2)
    beside = [mx.tile(low.entries, (high.count, 1)), mx.repeat(high.entries, low.count, axis=0)]
    return ProductCodebook(mx.concatenate(beside, axis=1), low=low, high=high)


def _mirrors(size: int, bits: int) -> bool:
    """Whether a sign for each number and a fitted codebook of magnitudes beat two codebooks of half the size."""
    return size > 1 and 1.5 * size <= bits <= size + FITTED_BITS


def _fit(size: int, bits: int, positive: bool) -> Floats:
    """Entries [2**bits, size] for standard normal sub-vectors, or for their absolute values."""
    if size == 1:
        grid = np.linspace(-8, 8, 40_001)
        return lloyd_max(grid, np.exp(-grid * grid / 2), 2**bits)[:, None].astype(np.float32)
    steps = 256 if size <= 32 else 128  # to a unit, so that all products are whole and exact
    normal = steps * np.random.RandomState(SEED).standard_normal((SAMPLES, size))
    samples = np.round(np.abs(normal) if positive else normal).astype(np.float32)
    return kmeans(samples, 2**bits, rounds=ROUNDS, seed=SEED, whole=True) / np.float32(steps)


@attrs.frozen(eq=False)
class VectorCodes:
    """Rows [..., S, dim] as one index of a codebook [K, d], `bits` wide, for every d numbers."""

    codebook: Codebook
    bits: int
    dim: int

    @property
    def places(self) -> int:
        return self.dim // self.codebook.size

    def encode(self, y: mx.array) -> Rows:
        """Packed indices of the nearest entries; `y` float32 [B, H, S, dim]."""
        return pack_index(self.codebook.nearest(self._split(y)), self.bits)

    def decode(self, codes: Rows) -> mx.array:
        """The entries, float32 [B, H, S, dim]."""
        return self._joined(self.codebook.at(self._index(codes)))

    def dot(self, x: mx.array, codes: Rows) -> mx.array:
        """Float32 `x` [B, H, n, dim] times the entries' transpose: [B, H, n, S]."""
        index, split = self._index(codes), self._split(x)
        if self._by_table(x.shape[2], index.shape[2]):
            return table_scores(self.codebook.table(split), index)
        by_coordinate = mx.moveaxis(split, -1, 0)
        return (by_coordinate @ self.codebook.at(index).swapaxes(-1, -2)).sum(axis=0)

    def mix(self, weights: mx.array, codes: Rows) -> mx.array:
        """Float32 `weights` [B, H, n, S] times the entries: [B, H, n, dim]."""
        return self._joined(weights @ self.codebook.at(self._index(codes)))

    def _by_table(self, queries: int, rows: int) -> bool:
        """Whether a table of all products costs less than the coordinates of all rows."""
        return queries * (rows + self.codebook.count / 4) < self.codebook.size * rows

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], self.places, self.codebook.size)

    def _joined(self, coordinates: mx.array) -> mx.array:
        """Rows [..., dim] of coordinates [d, ..., M]."""
        return mx.moveaxis(coordinates, 0, -1).reshape(*coordinates.shape[1:-1], self.dim)

    def _index(self, codes: Rows) -> mx.array:
        return unpack_index(codes, self.bits, self.places)


def pack_index(index: mx.array, bits: int) -> Rows:
    """Indices uint32 [..., N], each below 2**bits, in `4 * words(N, bits)` bytes or less.

    Eight bits are bytes. Of more the lowest eight are, and the rest is a bit
    stream beside them, which unpacks faster than one stream.
    """
    if bits == BYTE:
        return (index.astype(mx.uint8),)
    if bits < BYTE or index.shape[-1] % 4:
        return (pack(index, bits),)
    return ((index & (2**BYTE - 1)).astype(mx.uint8), pack(index >> BYTE, bits - BYTE))


def unpack_index(codes: Rows, bits: int, count: int) -> mx.array:
    """Indices uint32 [..., count] of `pack_index`."""
    if bits == BYTE:
        return codes[0].astype(mx.uint32)
    if len(codes) == 1:
        return unpack(codes[0], bits, count)
    return codes[0].astype(mx.uint32) | (unpack(codes[1], bits - BYTE, count) << BYTE)
