"""Kitty: keys at few bits a channel, and page by page the channels that matter most at more (arXiv 2511.18643).

Differs from the paper: the newest `residual_length` rows are always exact, so
results don't depend on how a prompt was cut; sinks lie in pages like any other
row, out of the range of their groups, and are read from where they are exact.
"""

import math
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, PlainCodec, Rows
from vq_functional.core.errors import check_between, check_choice, check_int
from vq_functional.core.transform import Transform
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.packing import alignment, pack, unpack
from vq_functional.ops.rows import top_rows
from vq_functional.ops.vectors import TINY, to_dtype
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.groups import ChannelGroups, TokenGroups
from vq_functional.quantize.sinks import sink_rule

RANKINGS = ("magnitude", "variance")
VALUE_GROUPS = (128, 64, 32)  # channels of a value that share a scale: the most that divide its size


@attrs.frozen(kw_only=True)
class KittyOptions:
    """`hi_fraction` of a page's channels get `hi_bit` bits, the others `lo_bit`; a page is `group_size` tokens.

    `n_sink` first and `residual_length` newest rows stay exact (None: one
    page). `value_bits` a number of the values, None: as they came. `ranking`
    names what makes a channel matter: its mean "magnitude" or its "variance".
    """

    hi_fraction: float = 0.25
    hi_bit: int = 4
    lo_bit: int = 2
    group_size: int = 32
    n_sink: int = 32
    residual_length: int | None = None
    value_bits: int | None = 2
    ranking: str = "magnitude"

    def __attrs_post_init__(self) -> None:
        check_between("kitty", "hi_fraction", self.hi_fraction, 0, 1)
        check_int("kitty", "lo_bit", self.lo_bit, 1, 8)
        check_int("kitty", "hi_bit", self.hi_bit, self.lo_bit, 8)
        check_int("kitty", "group_size", self.group_size, 1)
        check_int("kitty", "n_sink", self.n_sink, 0)
        check_int("kitty", "residual_length", self.residual_length, 0, optional=True)
        check_int("kitty", "value_bits", self.value_bits, 1, 8, optional=True)
        check_choice("kitty", "ranking", self.ranking, RANKINGS)


@attrs.frozen
class KittyCodec(Codec):
    """D * (lo_bit / 8 + 4 / group_size) + N * ((hi_bit - lo_bit) / 8 + 1 / group_size) bytes a row; N are boosted."""

    hi_fraction: float
    hi_bit: int
    lo_bit: int
    group_size: int
    ranking: str
    name = "kitty"

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole pages that fill whole words."""
        return math.lcm(self.group_size, alignment(self.lo_bit), alignment(self.hi_bit))

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    def boosted(self, dim: int) -> int:
        """Channels of a head of size `dim` that get `hi_bit` bits."""
        return int(dim * self.hi_fraction + 1e-6)  # the fraction may be a rounded one

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        boosted = self.boosted(dim)
        if boosted in (0, dim) or self.lo_bit == self.hi_bit:
            return ChannelGroups(dim, dtype, self.hi_bit if boosted == dim else self.lo_bit, self.group_size)
        return KittyPages(dim, dtype, self.lo_bit, self.hi_bit - self.lo_bit, self.group_size, boosted, self.ranking)


@attrs.frozen
class KittyPages(Coder):
    """x ~ zero + scale * (low + 2**bits * high), in pages of `group` tokens.

    Arrays [B, H, P, ...]: the low plane uint32 [D, words], scales and zeros
    [D, 1], the high plane uint32 [N, words] of the N boosted channels, and
    which these are, uint8 (uint16 where D > 256) [N], rising.
    """

    dim: int
    dtype: mx.Dtype
    bits: int  # of the low plane
    more: int  # of the high plane
    group: int
    boosted: int
    ranking: str

    def encode(self, x: mx.array) -> Rows:
        batch, heads, count, dim = x.shape
        pages = x.astype(mx.float32).reshape(batch, heads, count // self.group, self.group, dim).swapaxes(-1, -2)
        channel = self._channels(pages)
        at = channel[..., None]
        fine = quantize(mx.take_along_axis(pages, at, axis=3), self.bits + self.more, self.group, self.dtype)
        codes = unpack(fine.codes, self.bits + self.more, self.group)
        low, scales, zeros = quantize(pages, self.bits, self.group, self.dtype)
        low = mx.put_along_axis(low, at, pack(codes & (2**self.bits - 1), self.bits), axis=3)
        scales = mx.put_along_axis(scales, at, fine.scales, axis=3)
        which = channel.astype(mx.uint8 if dim <= 256 else mx.uint16)
        return low, scales, zeros, pack(codes >> self.bits, self.more), which

    def decode(self, rows: Rows) -> mx.array:
        low, scales, zeros, high, channel = rows
        pages = dequantize(Groups(low, scales, zeros), self.bits, self.group)
        at = channel.astype(mx.int32)[..., None]
        boosted = dequantize(self._high(high, scales, at), self.more, self.group)
        boosted = boosted + mx.take_along_axis(pages, at, axis=3)
        pages = mx.put_along_axis(pages, at, boosted, axis=3)
        return to_dtype(pages, self.dtype).swapaxes(-1, -2).flatten(2, 3)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        if queries.shape[2] > self.group:  # queries are gathered page by page: for many, vectors are cheaper
            return super().dot(queries, rows)
        low, scales, zeros, high, channel = rows
        at = channel.astype(mx.int32)[..., None]
        queries = queries[:, :, None]
        scores = matmul(queries, Groups(low, scales, zeros), self.bits, self.group, transpose=False)
        asked = mx.take_along_axis(queries, at.swapaxes(-1, -2), axis=4)
        scores = scores + matmul(asked, self._high(high, scales, at), self.more, self.group, transpose=False)
        return scores.swapaxes(2, 3).flatten(3)

    def _channels(self, pages: mx.array) -> mx.array:
        """Boosted channels int [B, H, P, N] of `pages` [B, H, P, D, group], rising; of equal ones the first."""
        score = (_magnitude if self.ranking == "magnitude" else _variance)(pages)
        batch, heads, count, dim = score.shape
        keep = mx.full((batch,), self.boosted)
        index = top_rows(score.reshape(batch, heads * count, dim), keep, self.boosted, latest=False)
        return index.reshape(batch, heads, count, self.boosted)

    def _high(self, high: mx.array, scales: mx.array, at: mx.array) -> Groups:
        """What the high plane adds to the boosted channels."""
        step = mx.take_along_axis(scales, at, axis=3).astype(mx.float32) * 2**self.bits
        return Groups(high, step, mx.zeros_like(step))


def _magnitude(pages: mx.array) -> mx.array:
    """Mean magnitude of each channel; a number that is not finite does not count."""
    finite = mx.isfinite(pages)
    count = mx.maximum(finite.sum(axis=-1, keepdims=True), 1)
    return mx.where(finite, mx.abs(pages) / count, 0).sum(axis=-1)


def _variance(pages: mx.array) -> mx.array:
    """Variance of each channel, in units of the page's largest number so that squares can't overflow."""
    finite = mx.isfinite(pages)
    x = mx.where(finite, pages, 0)
    x = x / mx.maximum(mx.abs(x).max(axis=(-1, -2), keepdims=True), TINY)
    count = mx.maximum(finite.sum(axis=-1, keepdims=True), 1)
    away = mx.where(finite, x - x.sum(axis=-1, keepdims=True) / count, 0)
    return mx.square(away).sum(axis=-1) / count[..., 0]


@attrs.frozen
class KittyValueCodec(Codec):
    """Values token by token, 128, 64 or 32 channels to a scale: D * bits / 8 + 4 * D / channels bytes a row."""

    bits: int
    name = "kitty_values"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        group = next((size for size in VALUE_GROUPS if dim % size == 0), VALUE_GROUPS[-1])
        return TokenGroups(dim, dtype, self.bits, group)


def kitty(**options: Any) -> Transform:
    """Keys in pages with boosted channels, sinks and the newest rows exact; keeps every token."""
    o = KittyOptions(**options)
    key = KittyCodec(o.hi_fraction, o.hi_bit, o.lo_bit, o.group_size, o.ranking)
    value = PlainCodec() if o.value_bits is None else KittyValueCodec(o.value_bits)
    residual = o.group_size if o.residual_length is None else o.residual_length
    return Blocks("kitty", key, value, residual, sink_rule(o.n_sink))
