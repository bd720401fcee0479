"""Codec: how rows are held, each one (one token of one head) alone or in units of neighbours.

A `Codec` is a description; `bind` fixes head size and dtype and returns the
`Coder` that holds the tables (rotation, codebook) and does the arithmetic.
"""

import functools
from typing import TypeAlias

import attrs
import mlx.core as mx

from vq_functional.core.tree import flatten, rebuild
from vq_functional.ops.vectors import to_dtype

Rows: TypeAlias = tuple[mx.array, ...]  # each array [B, H, S, width]


class Coder:
    """A codec bound to a head size `dim` and an output `dtype`."""

    dim: int
    dtype: mx.Dtype

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Axis along tokens of each array that `encode` returns; None where it is 2 for all."""
        return None

    def tables(self, x: mx.array) -> Rows:
        """Arrays [B, ...] fitted once, to the first rows `x` [B, H, S, D]; their shapes do not depend on S.

        `encode_by` takes them; whatever reads rows finds them behind the rows' own arrays.
        """
        return ()

    def encode(self, x: mx.array) -> Rows:
        """Rows of `x` [B, H, S, D], S a multiple of the codec's `unit`; the first array has the heads at axis 1."""
        raise TypeError(f"{type(self).__name__} does not encode")

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        """`encode` by what was fitted to the first rows."""
        return self.encode(x)

    def decode(self, rows: Rows) -> mx.array:
        """Vectors [B, H, S, D] in `dtype`."""
        raise TypeError(f"{type(self).__name__} does not decode")

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        """Inner products float32 [B, H, M, S] of float32 `queries` [B, H, M, D] with the rows."""
        return queries @ self.decode(rows).astype(mx.float32).swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        """Weighted sums float32 [B, H, M, D] of the rows; `weights` float32 [B, H, M, S]."""
        return weights @ self.decode(rows).astype(mx.float32)

    def heads(self, rows: Rows) -> int:
        """KV heads that the rows are read as."""
        return rows[0].shape[1]

    def empty(self, batch: int, heads: int, count: int, unit: int = 1) -> Rows:
        """Zeroed room for `count` rows that are encoded `unit` at a time."""
        zeros = mx.zeros((1, heads, unit, self.dim), self.dtype)
        one = self.encode_by(zeros, self.tables(zeros))
        shapes = [list(array.shape) for array in one]
        for shape, axis in zip(shapes, self.axes or (2,) * len(one), strict=True):
            shape[0], shape[axis] = batch, shape[axis] * count // unit
        arrays = [mx.zeros(shape, array.dtype) for shape, array in zip(shapes, one, strict=True)]
        return rebuild(flatten(one)[1], arrays)


class Codec:
    """Description of a codec; hashable, without arrays."""

    name: str
    keys_only: bool = False
    values_only: bool = False
    unit: int = 1  # neighbouring rows that are packed together; where it is 1, every row stands alone
    shared: int = 1  # neighbouring rows whose numbers are chosen together
    mixes: bool = False  # the numbers of a row with each other, before neighbours share any
    warmup: int = 0  # rows that the coder's tables are fitted to
    indivisible: str | None = None  # why processes can't have a part of the heads each; None where they can

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        """The coder for head size `dim`; raises QuantizerConfigError for sizes it can't take."""
        raise TypeError(f"{type(self).__name__} does not bind")


@functools.lru_cache(maxsize=512)
def bind(codec: Codec, dim: int, dtype: mx.Dtype) -> Coder:
    """The codec's coder, made once per head size and dtype, so that layers share tables."""
    return codec.bind(dim, dtype)


@attrs.frozen
class PlainCodec(Codec):
    """Rows held as they come, in the input dtype or, clipped to its range, in the one that `storage` names."""

    storage: str | None = None
    name = "plain"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return PlainCoder(dim, dtype, getattr(mx, self.storage) if self.storage else dtype)


@attrs.frozen
class PlainCoder(Coder):
    """The identity, up to the storage dtype."""

    dim: int
    dtype: mx.Dtype
    storage: mx.Dtype

    def encode(self, x: mx.array) -> Rows:
        return (x if x.dtype == self.storage else to_dtype(x.astype(mx.float32), self.storage),)

    def decode(self, rows: Rows) -> mx.array:
        return rows[0].astype(self.dtype)


@attrs.frozen(eq=False)
class Part:
    """Columns of an attention matrix that are held in one way."""

    coder: Coder
    rows: Rows
    count: int

    def decode(self) -> mx.array:
        batch, heads = self.rows[0].shape[0], self.coder.heads(self.rows)
        if 0 in (batch, self.count):
            return mx.zeros((batch, heads, self.count, self.coder.dim), self.coder.dtype)
        return self.coder.decode(self.rows)

    def dot(self, queries: mx.array) -> mx.array:
        return self.coder.dot(queries, self.rows)

    def mix(self, weights: mx.array) -> mx.array:
        return self.coder.mix(weights, self.rows)


def plain_part(x: mx.array, dtype: mx.Dtype | None = None) -> Part:
    """Columns that are held exactly, as vectors [B, H, C, D]; read in their own dtype or in `dtype`."""
    return Part(bind(PlainCodec(), x.shape[3], dtype or x.dtype), (x,), x.shape[2])
