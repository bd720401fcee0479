"""Reused codes: affine groups whose codes come from the first of several layers; the others fit a line to them."""

import functools
import math

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.crosslayer.layer_coder import StackCoder, heads_of
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.outliers import filled
from vq_functional.ops.packing import alignment, unpack
from vq_functional.ops.vectors import to_dtype

FITS = ("lsq", "minmax")


@attrs.frozen
class ReusedCodesCodec(Codec):
    """Groups of `group_size` neighbouring numbers along "tokens" of a channel or "channels" of a token.

    Bytes a row of the first layer: D * (bits / 8 + 4 / group_size), of each other
    one D * 4 / group_size, and with a residual D * (residual_bits / 8 + 4 / group_size).
    """

    layers: int
    bits: int
    residual_bits: int
    group_size: int
    fit: str
    eta: float
    along: str
    name = "reused_codes"

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups that fill whole words; along channels every row stands alone."""
        if self.along == "channels":
            return 1
        return math.lcm(self.group_size, *(alignment(bits) for bits in self.widths))

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size if self.along == "tokens" else 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the codes, and of the residual's where there is one."""
        return (self.bits, self.residual_bits) if self.residual_bits and self.layers > 1 else (self.bits,)

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return ReusedCodes(dim, dtype, self.layers, self)


@attrs.frozen
class ReusedCodes(StackCoder):
    """Codes of the first layer and scales and zeros of all; then codes, scales and zeros of the others' residuals.

    N is D and L the tokens T for groups along tokens, N is T and L the channels,
    filled up to whole groups, along channels: codes uint32 [B, H, N, L * bits / 32],
    scales and zeros [B, M * H, N, L / group]; residuals the same with (M - 1) * H heads.
    """

    dim: int
    dtype: mx.Dtype
    layers: int
    codec: ReusedCodesCodec

    @property
    def axes(self) -> tuple[int, ...]:
        return (3 if self.codec.along == "tokens" else 2,) * (3 * len(self.codec.widths))

    @property
    def owners(self) -> tuple[str, ...]:
        return ("first", "all", "all", *("others",) * (3 * (len(self.codec.widths) - 1)))

    def heads(self, rows: Rows) -> int:
        return rows[1].shape[1]

    def encode(self, x: mx.array) -> Rows:
        numbers, heads = self._lines(x), x.shape[1] // self.layers
        first, others = numbers[:, :heads], numbers[:, heads:]
        whole = quantize(first, self.codec.bits, self.codec.group_size, self.dtype)
        base = self._inward(whole)
        if self.layers == 1:
            return base
        fitted, read = self._fitted(others, whole.codes)
        scales, zeros = (mx.concatenate(list(pair), axis=1) for pair in zip(base[1:], fitted, strict=True))
        if not self.codec.residual_bits:
            return whole.codes, scales, zeros
        residual = quantize(others - read, self.codec.residual_bits, self.codec.group_size, self.dtype)
        return whole.codes, scales, zeros, *residual

    def decode_layer(self, rows: Rows, layer: int) -> mx.array:
        opened = self._opened(rows, layer)
        numbers = _sum([dequantize(groups, bits, self.codec.group_size) for bits, groups in opened])
        numbers = to_dtype(numbers, self.dtype)
        return numbers.swapaxes(-1, -2) if self.codec.along == "tokens" else numbers[..., : self.dim]

    def dot_layer(self, queries: mx.array, rows: Rows, layer: int) -> mx.array:
        return self._product(self._filled_up(queries, 0), rows, layer, transpose=self.codec.along == "channels")

    def mix_layer(self, weights: mx.array, rows: Rows, layer: int) -> mx.array:
        return self._product(weights, rows, layer, transpose=self.codec.along == "tokens")[..., : self.dim]

    def _product(self, x: mx.array, rows: Rows, layer: int, transpose: bool) -> mx.array:
        opened = self._opened(rows, layer)
        return _sum([matmul(x, groups, bits, self.codec.group_size, transpose) for bits, groups in opened])

    def _opened(self, rows: Rows, layer: int) -> list[tuple[int, Groups]]:
        """Bits and numbers of one layer: the shared codes by its own lines, and its residual."""
        codes, scales, zeros, *residual = rows
        own = [(codes, *(heads_of(x, layer, self.layers) for x in (scales, zeros)))]
        if layer and residual:
            own.append(tuple(heads_of(x, layer - 1, self.layers - 1) for x in residual))
        return [(bits, Groups(*arrays)) for bits, arrays in zip(self.codec.widths, own, strict=False)]

    def _lines(self, x: mx.array) -> mx.array:
        """Float32 `x` [B, M * H, S, D] with its groups along the last axis, its next number where one is not finite."""
        x = x.swapaxes(-1, -2) if self.codec.along == "tokens" else self._filled_up(x, mx.nan)
        return filled(x.astype(mx.float32).reshape(-1, self.codec.group_size, 1)).reshape(x.shape)

    def _filled_up(self, x: mx.array, by: float) -> mx.array:
        """`x` [..., D] with whole groups of channels, where groups are along channels."""
        missing = -self.dim % self.codec.group_size if self.codec.along == "channels" else 0
        return mx.pad(x, [(0, 0)] * 3 + [(0, missing)], constant_values=mx.array(by, x.dtype)) if missing else x

    def _fitted(self, x: mx.array, packed: mx.array) -> tuple[tuple[mx.array, mx.array], mx.array]:
        """Scales and zeros for `x` [B, (M - 1) * H, N, L] over the first layer's codes, and what these then read."""
        group, bits, count = self.codec.group_size, self.codec.bits, x.shape[-1]
        codes = unpack(packed, bits, count).astype(mx.float32).reshape(*packed.shape[:-1], count // group, group)
        codes = mx.tile(codes, (1, self.layers - 1, 1, 1, 1))
        if self.codec.fit == "lsq":
            real = mx.arange(count) < (count if self.codec.along == "tokens" else self.dim)
            scales, zeros = least_squares(x.reshape(codes.shape), codes, real.reshape(-1, group), self.dtype)
        else:
            _, scales, zeros = self._inward(quantize(x, bits, group, self.dtype))
        read = _on_lines(codes, scales, zeros)
        # A flat line where a residual would leave the range of `dtype`: half the group's range bounds it.
        groups, largest = x.reshape(codes.shape), mx.finfo(self.dtype).max
        far = mx.abs(groups - read).max(axis=-1) > largest
        middle = groups.min(axis=-1) * 0.5 + groups.max(axis=-1) * 0.5
        scales, zeros = mx.where(far, 0, scales), mx.where(far, to_dtype(middle, self.dtype), zeros)
        return (scales, zeros), _on_lines(codes, scales, zeros).flatten(-2)

    def _inward(self, groups: Groups) -> Groups:
        """The same codes with both ends of each group's range moved inwards by the share `eta` of it."""
        if not self.codec.eta:
            return groups
        scales, zeros = groups.scales.astype(mx.float32), groups.zeros.astype(mx.float32)
        zeros = zeros + self.codec.eta * (2**self.codec.bits - 1) * scales
        scales, zeros = (to_dtype(x, self.dtype) for x in ((1 - 2 * self.codec.eta) * scales, zeros))
        return Groups(groups.codes, scales, zeros)


def _on_lines(codes: mx.array, scales: mx.array, zeros: mx.array) -> mx.array:
    """Float32 [..., G, group] that codes [..., G, group] read by scales and zeros [..., G]."""
    return codes * scales.astype(mx.float32)[..., None] + zeros.astype(mx.float32)[..., None]


def least_squares(x: mx.array, codes: mx.array, real: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Scales and zeros [..., G] in `dtype` of the lines over `codes` that are nearest to `x`, float32 [..., G, group].

    Only numbers that are `real`, bool [G, group], count. The zero goes with the
    scale as it is stored, so that the mean of a group is kept.
    """
    share = 1 / real.sum(axis=-1, keepdims=True)
    size = mx.abs(x).max(axis=-1, keepdims=True)
    size = mx.where(size > 0, size, 1)  # scaled first so that sums can't overflow
    y = mx.where(real, x / size, 0)
    mean = y.sum(axis=-1, keepdims=True) * share
    mean_code = mx.where(real, codes, 0).sum(axis=-1, keepdims=True) * share
    offset = mx.where(real, codes - mean_code, 0)
    spread = mx.square(offset).sum(axis=-1, keepdims=True)
    slope = (offset * (y - mean)).sum(axis=-1, keepdims=True) / mx.where(spread > 0, spread, 1)
    scales = to_dtype(size * slope, dtype)
    zeros = to_dtype(size * (mean - scales.astype(mx.float32) / size * mean_code), dtype)
    return scales[..., 0], zeros[..., 0]


def _sum(terms: list[mx.array]) -> mx.array:
    return functools.reduce(mx.add, terms)
