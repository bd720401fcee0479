"""Codes of standard normal sub-vectors: a codebook of any number of entries, and one of magnitudes beside signs."""

import functools

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Rows
from vq_functional.ops.kmeans import kmeans
from vq_functional.ops.vector_codes import Codebook

SAMPLES, ROUNDS = 2**16, 20
BYTE = 8


@functools.lru_cache(maxsize=64)
def normal_codebook(size: int, count: int, seed: int, magnitudes: bool) -> Codebook:
    """`count` entries of `size` numbers, the means of their cells, for normal sub-vectors or for their `magnitudes`."""
    steps = 256 if size <= 32 else 128  # to a unit: samples are whole, and so all products exact
    samples = np.random.RandomState(seed).standard_normal((SAMPLES, size))
    whole = np.round(steps * (np.abs(samples) if magnitudes else samples)).astype(np.float32)
    entries = kmeans(whole, count, rounds=ROUNDS, seed=seed, whole=True) / np.float32(steps)
    return Codebook(mx.array(entries))


@attrs.frozen(eq=False)
class SignedCodes:
    """Rows [..., S, dim] as one index of a codebook of magnitudes for every d numbers, and a sign bit a number.

    Index uint8 [..., S, dim / d]; signs uint8 [..., S, ceil(dim / 8)], 1 for numbers that are not below zero.
    """

    magnitudes: Codebook
    dim: int
    width: int = attrs.field(init=False)  # numbers that are looked up together with their signs
    table: mx.array = attrs.field(init=False)  # float32 [width, d / width * 2**width * K]

    def __attrs_post_init__(self) -> None:
        size = self.magnitudes.size
        width = next(width for width in (4, 2, 1) if size % width == 0)
        signs = 2.0 * (mx.arange(2**width)[:, None] >> mx.arange(width) & 1) - 1
        parts = self.magnitudes.entries.reshape(-1, size // width, width).swapaxes(0, 1)
        table = mx.contiguous((signs[:, None] * parts[:, None]).reshape(-1, width).T)
        mx.eval(table)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "table", table)

    def encode(self, y: mx.array) -> Rows:
        """Index and signs of float32 `y` [B, H, S, dim]."""
        size = self.magnitudes.size
        index = self.magnitudes.nearest(mx.abs(y).reshape(*y.shape[:-1], self.dim // size, size))
        bits = mx.pad((y >= 0).astype(mx.uint8), [(0, 0)] * (y.ndim - 1) + [(0, -self.dim % BYTE)])
        bits = bits.reshape(*y.shape[:-1], -(-self.dim // BYTE), BYTE) << mx.arange(BYTE, dtype=mx.uint8)
        return index.astype(mx.uint8), bits.sum(axis=-1).astype(mx.uint8)

    def decode(self, codes: Rows) -> mx.array:
        """Float32 [B, H, S, dim]."""
        return self._joined(self._coordinates(codes))

    def dot(self, x: mx.array, codes: Rows) -> mx.array:
        """Float32 `x` [B, H, n, dim] times the rows' transpose: [B, H, n, S]."""
        size, width = self.magnitudes.size, self.width
        split = x.reshape(*x.shape[:-1], self.dim // size, size // width, width)
        by_coordinate = split.transpose(5, 4, 0, 1, 2, 3)
        return (by_coordinate @ self._coordinates(codes).swapaxes(-1, -2)).sum(axis=(0, 1))

    def mix(self, weights: mx.array, codes: Rows) -> mx.array:
        """Float32 `weights` [B, H, n, S] times the rows: [B, H, n, dim]."""
        return self._joined(weights @ self._coordinates(codes))

    def _coordinates(self, codes: Rows) -> mx.array:
        """Float32 [width, d / width, B, H, S, dim / d]: a sub-vector's first `width` numbers, then the next."""
        index, plane = codes
        parts = self.magnitudes.size // self.width
        fields = self._fields(plane).reshape(*index.shape, parts)
        entry = mx.moveaxis(fields, -1, 0) * self.magnitudes.count + index
        first = mx.arange(parts, dtype=mx.uint32) * (self.table.shape[1] // parts)
        entry = entry + first.reshape(parts, *(1,) * index.ndim)
        # A gather of numbers along an axis is several times faster than one of short rows.
        flat = mx.broadcast_to(entry.reshape(1, entry.size), (self.width, entry.size))
        return mx.take_along_axis(self.table, flat, axis=1).reshape(self.width, *entry.shape)

    def _fields(self, plane: mx.array) -> mx.array:
        """Signs of `width` neighbouring numbers as one number, uint32 [B, H, S, dim / width]."""
        shifts = mx.arange(0, BYTE, self.width, dtype=mx.uint8)
        fields = (plane[..., None] >> shifts) & (2**self.width - 1)
        return fields.flatten(-2)[..., : self.dim // self.width].astype(mx.uint32)

    def _joined(self, coordinates: mx.array) -> mx.array:
        """Rows [B, H, n, dim] of coordinates [width, d / width, B, H, n, dim / d]."""
        joined = coordinates.transpose(2, 3, 4, 5, 1, 0)
        return joined.reshape(*joined.shape[:-3], self.dim)
