"""Channels by rank; symmetric codes of 8 and of 4 bits: x ~ code * S / 2**(bits - 1), S the largest size of a group."""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx

from vq_functional.core.codec import Rows
from vq_functional.ops.ranges import mended
from vq_functional.ops.rows import extend_last
from vq_functional.ops.vectors import TINY, to_dtype


@attrs.frozen
class SymmetricCodes:
    """Codes of the last axis, `rank` numbers in groups of `group` neighbours, 8 or 4 `bits` each.

    Arrays: uint8 [..., rank], or [..., ceil(rank / 2)] with two codes a byte, the first one low, both counted
    from the lowest; and S / 2 of each group [..., G] in `dtype`: two of its numbers can lie twice its range apart.
    """

    rank: int
    bits: int
    group: int
    dtype: mx.Dtype

    def encode(self, x: mx.array) -> Rows:
        """Arrays of float32 `x` [..., rank]. NaN is 0, an infinity the end on its side; neither counts for S."""
        padded = extend_last(x, self._groups * self._width)
        grouped = padded.reshape(*x.shape[:-1], self._groups, self._width)
        largest = mx.where(mx.isfinite(grouped), mx.abs(grouped), 0).max(axis=-1)
        scales = to_dtype(largest * 0.5, self.dtype)
        scale, half = scales.astype(mx.float32)[..., None], 2 ** (self.bits - 1)
        share = mx.where(scale > 0, grouped / mx.where(scale > 0, scale, 1) * (half / 2), 0)
        codes = mx.clip(mx.round(mx.where(mx.isnan(share), 0, share)), -half, half - 1)
        codes = (codes.flatten(-2)[..., : self.rank] + half).astype(mx.uint8)
        return (codes if self.bits == 8 else _nibbles(codes)), scales

    def numbers(self, arrays: Rows) -> mx.array:
        """Float32 [..., rank]."""
        return _numbers(self.rank, self.bits, self._width)(*arrays)

    @property
    def _width(self) -> int:
        return min(self.group, self.rank)

    @property
    def _groups(self) -> int:
        return -(-self.rank // self._width)


def _nibbles(codes: mx.array) -> mx.array:
    """Bytes of codes 0 to 15, two each."""
    pairs = extend_last(codes, codes.shape[-1] + codes.shape[-1] % 2)
    pairs = pairs.reshape(*pairs.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


@functools.lru_cache(maxsize=64)
def _numbers(rank: int, bits: int, width: int) -> Callable[[mx.array, mx.array], mx.array]:
    half = 2 ** (bits - 1)

    def numbers(codes: mx.array, scales: mx.array) -> mx.array:
        if bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], axis=-1).flatten(-2)[..., :rank]
        x = codes.astype(mx.float32) - half
        scale = scales.astype(mx.float32) * (2 / half)
        if scale.shape[-1] == 1:
            return x * scale
        return x * mx.repeat(scale, width, axis=-1)[..., :rank]

    return mx.compile(numbers)


def channels_by_variance(x: mx.array) -> tuple[mx.array, mx.array]:
    """Channels int [B, H, D] of rows `x` [B, H, S, D] by falling variance, and their means in this order."""
    x = mended(x.astype(mx.float32))
    size = mx.maximum(mx.abs(x).max(axis=(2, 3), keepdims=True), TINY)  # so that squares can't overflow
    x = x / size
    means = x.mean(axis=2, keepdims=True)
    order = mx.argsort(-mx.square(x - means).mean(axis=2), axis=-1)
    return order, mx.take_along_axis((means * size)[:, :, 0], order, axis=-1)


def by_rank(x: mx.array, order: mx.array) -> mx.array:
    """`x` [B, H, ..., D] with its channels in `order` [B, H, D]."""
    return mx.take_along_axis(x, _along_last(order, x), axis=-1)


def by_channel(ranked: mx.array, order: mx.array) -> mx.array:
    """Inverse of `by_rank`."""
    return mx.put_along_axis(mx.zeros_like(ranked), _along_last(order, ranked), ranked, axis=-1)


def _along_last(order: mx.array, x: mx.array) -> mx.array:
    shape = *order.shape[:2], *(1,) * (x.ndim - 3), order.shape[2]
    return mx.broadcast_to(order.reshape(shape), x.shape)
