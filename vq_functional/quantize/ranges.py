"""Groups along tokens whose codes can be made coarser later: low end and range are the same at any width."""

import math

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.ops.affine import Groups, dequantize, matmul, steps
from vq_functional.ops.packing import alignment, pack, unpack
from vq_functional.ops.ranges import finite_range
from vq_functional.ops.vectors import to_dtype


@attrs.frozen
class RangeGroupsCodec(Codec):
    """One channel of `group_size` neighbouring tokens shares low end and range.

    D * (bits / 8 + 4 / group_size) bytes a row.
    """

    bits: int
    group_size: int
    name = "range_groups"

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups that fill whole words."""
        return math.lcm(self.group_size, alignment(self.bits))

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    def bind(self, dim: int, dtype: mx.Dtype) -> "RangeGroups":
        return RangeGroups(dim, dtype, self.bits, self.group_size)


@attrs.frozen
class RangeGroups(Coder):
    """Codes uint32 [B, H, D, T * bits / 32], half ranges and low ends [B, H, D, T / group].

    Half of the range, since the whole of it can exceed what a half float holds.
    """

    dim: int
    dtype: mx.Dtype
    bits: int
    group: int

    @property
    def axes(self) -> tuple[int, ...]:
        return (3, 3, 3)

    def encode(self, x: mx.array) -> Rows:
        x = x.swapaxes(-1, -2).astype(mx.float32)
        x = x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)
        low, high = (end[..., 0] for end in finite_range(x, axis=-1))
        halves = (high * 0.5 - low * 0.5).astype(self.dtype)
        low = low.astype(self.dtype)
        codes = steps(x, self._step(halves), low.astype(mx.float32), self.bits)
        return pack(codes.flatten(-2), self.bits), halves, low

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(dequantize(self._groups(rows), self.bits, self.group), self.dtype).swapaxes(-1, -2)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return matmul(queries, self._groups(rows), self.bits, self.group, transpose=False)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return matmul(weights, self._groups(rows), self.bits, self.group, transpose=True)

    def coarser(self, rows: Rows, bits: int) -> Rows:
        """The same rows at `bits`. Where the highest codes divide, these are the codes of the numbers themselves."""
        if bits == self.bits:
            return rows
        codes, halves, low = rows
        fine, coarse = 2**self.bits - 1, 2**bits - 1
        numbers = unpack(codes, self.bits, halves.shape[-1] * self.group)
        return pack((2 * coarse * numbers + fine) // (2 * fine), bits), halves, low

    def _groups(self, rows: Rows) -> Groups:
        codes, halves, low = rows
        return Groups(codes, self._step(halves), low.astype(mx.float32))

    def _step(self, halves: mx.array) -> mx.array:
        return halves.astype(mx.float32) * (2 / (2**self.bits - 1))
