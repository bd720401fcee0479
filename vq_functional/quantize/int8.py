"""Eight bits a number, one scale a token: code = round(x / scale) + 128 in [1, 255]."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.ops.affine import FUSED_GROUPS, Groups, matmul
from vq_functional.ops.device import on_gpu
from vq_functional.ops.packing import pack, unpack
from vq_functional.ops.vectors import to_dtype

CENTER, LEVELS = 128, 127


@attrs.frozen
class Int8Codec(Codec):
    """4 * ceil(D / 4) bytes a row and one scale in the input dtype; keys or values."""

    name = "int8"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return Int8Coder(dim, dtype, max((size for size in FUSED_GROUPS if dim % size == 0), default=None))


@attrs.frozen
class Int8Coder(Coder):
    dim: int
    dtype: mx.Dtype
    group: int | None  # the largest that MLX has kernels for, where one divides the head size

    def encode(self, x: mx.array) -> Rows:
        x = x.astype(mx.float32)
        finite = mx.where(mx.isfinite(x), mx.abs(x), 0)
        scale = (finite.max(axis=-1) / LEVELS).astype(self.dtype)
        step = scale.astype(mx.float32)[..., None]
        code = mx.where(step > 0, x / mx.where(step > 0, step, 1), 0)
        code = mx.clip(mx.round(mx.where(mx.isnan(code), 0, code)), -LEVELS, LEVELS) + CENTER
        return pack(code.astype(mx.uint32), 8), scale

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self._numbers(rows), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self._product(queries, rows, transpose=True)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return self._product(weights, rows, transpose=False)

    def _product(self, x: mx.array, rows: Rows, transpose: bool) -> mx.array:
        if self.group is not None and on_gpu():
            return matmul(x, self._affine(rows), 8, self.group, transpose)
        steps, scale = self._steps(rows[0]), rows[1].astype(mx.float32)[..., None, :]
        return (x @ steps.swapaxes(-1, -2)) * scale if transpose else (x * scale) @ steps

    def _numbers(self, rows: Rows) -> mx.array:
        if self.group is None:
            return self._steps(rows[0]) * rows[1].astype(mx.float32)[..., None]
        return mx.dequantize(*self._affine(rows), group_size=self.group, bits=8)

    def _steps(self, codes: mx.array) -> mx.array:
        return unpack(codes, 8, self.dim).astype(mx.float32) - CENTER

    def _affine(self, rows: Rows) -> Groups:
        codes, scale = rows
        groups = self.dim // (self.group or self.dim)
        scales = mx.repeat(scale.astype(mx.float32)[..., None], groups, axis=-1)
        return Groups(codes, scales, scales * -CENTER)


def int8_codec() -> Int8Codec:
    """Codec for keys or values."""
    return Int8Codec()
