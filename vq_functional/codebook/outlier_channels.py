"""Outlier channels apart: a head's few channels of large numbers in one codec, all others in another.

A codec that spends its bits on a whole direction gives few large channels most
of them. Which channels these are is told by the first rows, and fixed then.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.ops.outliers import filled
from vq_functional.ops.rotations import hadamard_size
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.int8 import int8_codec
from vq_functional.quantize.orders import in_place, sorted_by

CALIBRATION = 200  # rows
FEWEST = 3  # numbers that have a direction


def own_first(kind: type, fields: list[Any]) -> list[Any]:
    """A class's fields with those last that it inherits."""
    return sorted(fields, key=lambda field: field.inherited)


@attrs.frozen(kw_only=True)
class OutlierOptions:
    """Options of methods that can hold outlier channels of keys apart.

    `n_outlier_channels` of each head, those of the largest mean |k| over the
    first `n_calib_tokens` rows (None: 200), which are exact until then. They
    take 8 bits and one scale a token, or codes of `bits_outlier`. None or 0
    channels: a quarter of the head with `bits_outlier` or `outlier_two_stream`,
    which asks for the split without a number, else none.
    """

    n_outlier_channels: int | None = None
    n_calib_tokens: int | None = None
    bits_outlier: int | None = None
    outlier_two_stream: bool = False

    @property
    def splits(self) -> bool:
        """Whether any channels are held apart."""
        return bool(self.n_outlier_channels or self.bits_outlier or self.outlier_two_stream)

    def check_outliers(self, method: str) -> None:
        """Refuse what no head can take."""
        check_int(method, "n_outlier_channels", self.n_outlier_channels, 0, optional=True)
        check_int(method, "n_calib_tokens", self.n_calib_tokens, 1, optional=True)
        check_choice(method, "outlier_two_stream", self.outlier_two_stream, (True, False))
        check_int(method, "bits_outlier", self.bits_outlier, 1, 8, optional=True)
        few = self.bits_outlier is not None and (self.n_outlier_channels or FEWEST) < FEWEST
        rule = f"must be at least {FEWEST} with `bits_outlier`"
        check(not few, method, "n_outlier_channels", rule, self.n_outlier_channels)
        used = self.splits or self.n_calib_tokens is None
        check(used, method, "n_calib_tokens", "has no effect: no outlier channels are held apart", self.n_calib_tokens)

    def split(self, inner: Codec, outer: Codec | None) -> Codec:
        """`inner` with outlier channels in `outer` (None: 8 bits), or `inner` alone where none are held apart."""
        if not self.splits:
            return inner
        channels, warmup = self.n_outlier_channels or None, self.n_calib_tokens or CALIBRATION
        return OutlierChannels(inner, outer or int8_codec(), channels, warmup)


@attrs.frozen
class OutlierChannels(Codec):
    """Bytes of `outer` for `channels` numbers (None: a quarter) and of `inner` for the others; for what `inner` is for.

    Once for each head 2 * D bytes, for the order of its channels.
    """

    inner: Codec
    outer: Codec
    channels: int | None
    warmup: int

    def __attrs_post_init__(self) -> None:
        for field, codec in (("inner", self.inner), ("outer", self.outer)):
            alone = isinstance(codec, Codec) and codec.unit == 1 and codec.warmup == 0
            check(alone, "outlier_channels", field, "must be a codec whose rows stand alone", codec)
        if self.channels is not None:
            check_int(self.name, "n_outlier_channels", self.channels, 1)
        check_int(self.name, "n_calib_tokens", self.warmup, 1)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.inner.keys_only or self.outer.keys_only

    @property
    def values_only(self) -> bool:  # type: ignore[override]
        return self.inner.values_only or self.outer.values_only

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        channels = max(dim // 4, FEWEST) if self.channels is None else self.channels
        check(channels < dim, self.name, "n_outlier_channels", f"must be below the head size {dim}", channels)
        inner, outer = bind(self.inner, _padded(dim - channels, dim), dtype), bind(self.outer, channels, dtype)
        return ChannelsApart(dim, dtype, inner, outer, self.warmup, len(inner.empty(1, 1, 1)))


@attrs.frozen(eq=False)
class ChannelsApart(Coder):
    """Rows of `inner` and of `outer`, which take the channels in the order of the table, the last ones and the first.

    `inner` may have room for more than there are; the rest of it is zeros.
    """

    dim: int
    dtype: mx.Dtype
    inner: Coder
    outer: Coder
    warmup: int
    arrays: int  # of the inner rows

    def tables(self, x: mx.array) -> Rows:
        x = mx.abs(filled(x[:, :, : self.warmup].astype(mx.float32)))
        return (sorted_by(-(x / x.shape[2]).sum(axis=2)).astype(mx.uint16),)

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        outliers, others = self._apart(x, self._order(tables[0]))
        return *self.inner.encode(others), *self.outer.encode(outliers)

    def decode(self, rows: Rows) -> mx.array:
        inner, outer, order = self._split(rows)
        return self._together(self.outer.decode(outer), self.inner.decode(inner), order)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        inner, outer, order = self._split(rows)
        outliers, others = self._apart(queries, order)
        return self.inner.dot(others, inner) + self.outer.dot(outliers, outer)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        inner, outer, order = self._split(rows)
        return self._together(self.outer.mix(weights, outer), self.inner.mix(weights, inner), order)

    def _apart(self, x: mx.array, order: mx.array) -> tuple[mx.array, mx.array]:
        """The outlier channels of `x` [B, H, M, D], and the others with zeros behind them."""
        count = self.outer.dim
        x = mx.take_along_axis(x, order, axis=-1)
        zeros = mx.zeros((*x.shape[:-1], self.inner.dim - self.dim + count), x.dtype)
        return x[..., :count], mx.concatenate([x[..., count:], zeros], axis=-1)

    def _together(self, outliers: mx.array, others: mx.array, order: mx.array) -> mx.array:
        others = others[..., : self.dim - self.outer.dim]
        return in_place(mx.concatenate([outliers, others], axis=-1), order)

    def _split(self, rows: Rows) -> tuple[Rows, Rows, mx.array]:
        """Rows of `inner` and of `outer`, and the order."""
        return rows[: self.arrays], rows[self.arrays : -1], self._order(rows[-1])

    @staticmethod
    def _order(table: mx.array) -> mx.array:
        """The table [B, H, D] as an index int32 [B, H, 1, D]."""
        return table[:, :, None].astype(mx.int32)


def every_row(name: str, key: Codec) -> Transform:
    """Keys by `key`, values in 8 bits; keeps every token. Rows are exact until a `key` that is fitted has been."""
    return Blocks(name, key, int8_codec()) if key.warmup else rows(key=key, value=int8_codec(), name=name)


def _padded(count: int, dim: int) -> int:
    """Size that `count` of `dim` numbers are filled up to: where there is one, a size with a fast rotation."""
    count = max(count, FEWEST)
    return next((size for size in range(count, dim + 1) if hadamard_size(size)), count)
