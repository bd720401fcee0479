"""Planes of one bit a number, 1 for +1 and 0 for -1: products straight from the bits."""

import functools

import mlx.core as mx

from vq_functional.ops.device import on_gpu
from vq_functional.ops.packing import cut, pack, split_words

GROUP = 32


def pack_signs(positive: mx.array) -> mx.array:
    """Words uint32 [..., N/32] of bool [..., N]."""
    return pack(positive, 1)


def signs(plane: mx.array, dim: int) -> mx.array:
    """Float32 +1 and -1 [..., dim]."""
    return cut(split_signs(plane), dim)


def split_signs(plane: mx.array) -> mx.array:
    """Float32 +1 and -1 [..., words, 32]."""
    return split_words(plane, 1).astype(mx.float32) * 2 - 1


def sign_matmul(x: mx.array, plane: mx.array, dim: int, transpose: bool) -> mx.array:
    """Float32 `x` times the signs [..., C, dim], or with `transpose` times their transpose."""
    if dim % GROUP == 0 and one_bit_kernels():
        scales = mx.full((*plane.shape[:-1], dim // GROUP), 2.0)
        return mx.quantized_matmul(x, plane, scales, scales * -0.5, transpose=transpose, group_size=GROUP, bits=1)
    numbers = signs(plane, dim)
    return x @ (numbers.swapaxes(-1, -2) if transpose else numbers)


def one_bit_kernels() -> bool:
    """Whether products with one-bit codes are right and fast here: a CPU is faster with a dense product."""
    return on_gpu() and one_bit_matmul(mx.DeviceType.gpu)


@functools.lru_cache(maxsize=2)
def one_bit_matmul(device: mx.DeviceType) -> bool:
    """Whether MLX multiplies and unpacks one-bit codes on the default device, whose type is `device`."""
    plane = mx.array([[0x0F0F0F0F], [0xFFFF0000]], dtype=mx.uint32)
    x, ones = mx.arange(32, dtype=mx.float32)[None], mx.ones((2, 1))
    coded = (plane, 2 * ones, -ones)
    try:
        got = mx.quantized_matmul(x, *coded, transpose=True, group_size=GROUP, bits=1)
        numbers = mx.dequantize(*coded, group_size=GROUP, bits=1)
        want = signs(plane, 32)
        return bool(mx.allclose(got, x @ want.T)) and bool(mx.array_equal(numbers, want))
    except (RuntimeError, ValueError):
        return False
