"""Affine groups: numbers that share a scale and a zero, along the tokens of a channel or the channels of a token."""

import math

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check_int
from vq_functional.ops.affine import Groups, dequantize, filled_up, matmul, quantize
from vq_functional.ops.packing import alignment
from vq_functional.ops.vectors import to_dtype


@attrs.frozen
class ChannelGroupsCodec(Codec):
    """One channel of `group_size` neighbouring tokens shares scale and zero: D * (bits / 8 + 4 / group_size) a row."""

    bits: int
    group_size: int
    name = "channel_groups"

    def __attrs_post_init__(self) -> None:
        check_int(self.name, "bits", self.bits, 1, 8)
        check_int(self.name, "group_size", self.group_size, 1)

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups that fill whole words."""
        return math.lcm(self.group_size, alignment(self.bits))

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return ChannelGroups(dim, dtype, self.bits, self.group_size)


@attrs.frozen
class ChannelGroups(Coder):
    """Codes uint32 [B, H, D, T * bits / 32], scales and zeros [B, H, D, T / group]."""

    dim: int
    dtype: mx.Dtype
    bits: int
    group: int

    @property
    def axes(self) -> tuple[int, ...]:
        return (3, 3, 3)

    def encode(self, x: mx.array) -> Rows:
        return quantize(x.swapaxes(-1, -2), self.bits, self.group, self.dtype)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(dequantize(Groups(*rows), self.bits, self.group), self.dtype).swapaxes(-1, -2)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return matmul(queries, Groups(*rows), self.bits, self.group, transpose=False)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return matmul(weights, Groups(*rows), self.bits, self.group, transpose=True)


@attrs.frozen
class TokenGroupsCodec(Codec):
    """`group_size` neighbouring channels of one token share scale and zero; rows stand alone.

    D * bits / 8 + 4 * ceil(D / group_size) bytes a row; a last group that is not full is filled up.
    """

    bits: int
    group_size: int
    name = "token_groups"

    def __attrs_post_init__(self) -> None:
        check_int(self.name, "bits", self.bits, 1, 8)
        check_int(self.name, "group_size", self.group_size, 1)

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return TokenGroups(dim, dtype, self.bits, self.group_size)


@attrs.frozen
class TokenGroups(Coder):
    """Codes uint32 [B, H, T, words], scales and zeros [B, H, T, ceil(D / group)]."""

    dim: int
    dtype: mx.Dtype
    bits: int
    group: int

    def encode(self, x: mx.array) -> Rows:
        return quantize(filled_up(x, self.group), self.bits, self.group, self.dtype)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(dequantize(Groups(*rows), self.bits, self.group)[..., : self.dim], self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        missing = -self.dim % self.group
        queries = mx.pad(queries, [(0, 0)] * 3 + [(0, missing)]) if missing else queries
        return matmul(queries, Groups(*rows), self.bits, self.group, transpose=True)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return matmul(weights, Groups(*rows), self.bits, self.group, transpose=False)[..., : self.dim]
