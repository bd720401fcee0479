"""Affine group quantization: x ~ code * scale + zero, both shared by a group along the last axis.

The codes are the bit stream that ``mx.quantized_matmul`` reads. Unlike
``mx.quantize``, scale and zero span min and max exactly (arXiv 2402.02750,
section 3.1).
"""

from typing import NamedTuple

import mlx.core as mx

from vq_functional.ops.affine_planes import has_planes, plane_matmul
from vq_functional.ops.device import on_gpu
from vq_functional.ops.packing import WORD, pack, split_words, unpack
from vq_functional.ops.ranges import finite_range
from vq_functional.ops.signs import one_bit_matmul

FUSED_BITS = (2, 3, 4, 5, 6, 8)
FUSED_GROUPS = (32, 64, 128)


class Groups(NamedTuple):
    """Quantized numbers [..., N]."""

    codes: mx.array  # uint32 [..., words(N, bits)]
    scales: mx.array  # [..., N / group]
    zeros: mx.array  # [..., N / group]


def filled_up(x: mx.array, group: int) -> mx.array:
    """`x` [..., N] with its last number repeated until the last group is full."""
    missing = -x.shape[-1] % group
    return mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1) if missing else x


def quantize(x: mx.array, bits: int, group: int, dtype: mx.Dtype) -> Groups:
    """Quantize `x` [..., N], N a multiple of `group`; scales and zeros in `dtype`.

    A number that is not finite does not enter its group's range: infinities
    take the nearest end, NaN the lowest value. Where one step can't span the
    range in `dtype`, the largest that can lies about its middle.
    """
    x = x.astype(mx.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    low, high = (end[..., 0] for end in finite_range(x, axis=-1))
    step, largest = (high - low) / (2**bits - 1), mx.finfo(dtype).max
    zeros = mx.where(step > largest, (low + high - largest) * 0.5, low).astype(dtype)
    scales = mx.minimum(step, largest).astype(dtype)
    codes = steps(x, scales.astype(mx.float32), zeros.astype(mx.float32), bits)
    return Groups(pack(codes.flatten(-2), bits), scales, zeros)


def steps(x: mx.array, scales: mx.array, zeros: mx.array, bits: int) -> mx.array:
    """Codes uint32 [..., group] of float32 `x` [..., group]: whole steps of `scales` above `zeros`, float32 [...]."""
    scale, zero = scales[..., None], zeros[..., None]
    count = mx.where(scale > 0, (x - zero) / mx.where(scale > 0, scale, 1), 0)
    return mx.clip(mx.round(mx.where(mx.isnan(count), 0, count)), 0, 2**bits - 1).astype(mx.uint32)


def dequantize(groups: Groups, bits: int, group: int) -> mx.array:
    """Float32 [..., N]; float32 throughout, since code * scale can exceed a half float."""
    scales, zeros = groups.scales.astype(mx.float32), groups.zeros.astype(mx.float32)
    count = scales.shape[-1] * group
    if WORD % bits == 0 and group * bits % WORD == 0:
        # On a CPU faster than MLX's own kernel, and one kernel as well where it is compiled.
        codes = split_words(groups.codes.reshape(*scales.shape, group * bits // WORD), bits).astype(mx.float32)
        return (codes * scales[..., None, None] + zeros[..., None, None]).flatten(-3)
    if fused(bits, group):
        return mx.dequantize(groups.codes, scales, zeros, group_size=group, bits=bits)
    codes = unpack(groups.codes, bits, count).astype(mx.float32).reshape(*scales.shape, group)
    return (codes * scales[..., None] + zeros[..., None]).flatten(-2)


def matmul(x: mx.array, groups: Groups, bits: int, group: int, transpose: bool) -> mx.array:
    """Float32 `x` [..., M, K] times the numbers [..., K, N], or with `transpose` times their transpose."""
    scales, zeros = groups.scales.astype(mx.float32), groups.zeros.astype(mx.float32)
    if not on_gpu() and has_planes(bits, group) and x.shape[-2] > bits // 2:  # fewer rows are faster in MLX's kernel
        return plane_matmul(x, (groups.codes, scales, zeros), bits, group, transpose)
    if transpose and scales.shape[-1] == 1 and fused(bits, group):  # MLX's CUDA kernel is wrong for a single group
        scales, zeros, group = mx.repeat(scales, 2, axis=-1), mx.repeat(zeros, 2, axis=-1), group // 2
    if not fused(bits, group):
        numbers = dequantize(Groups(groups.codes, scales, zeros), bits, group)
        return x @ (numbers.swapaxes(-1, -2) if transpose else numbers)
    codes = groups.codes
    if on_gpu():  # MLX's CUDA kernels take no views
        x, codes, scales, zeros = (mx.contiguous(array) for array in (x, codes, scales, zeros))
    return mx.quantized_matmul(x, codes, scales, zeros, transpose=transpose, group_size=group, bits=bits)


def fused(bits: int, group: int) -> bool:
    """Whether MLX has kernels for these codes."""
    return group in FUSED_GROUPS and (bits in FUSED_BITS or (bits == 1 and one_bit_matmul(mx.default_device().type)))
