"""What an entropy coder would make of CacheGen's codes: estimates, each read back on request.

`nbytes` tells what is held.
"""

import math

import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Codec
from vq_functional.core.errors import check, check_choice
from vq_functional.ops.bit_streams import Ints, from_stream
from vq_functional.quantize.blocks import Blocks, BlockState
from vq_functional.quantize.cachegen import CacheGenCodec
from vq_functional.quantize.code_stream import entropy_bits

SIDES = ("keys", "values")


def entropy_coded_bits(transform: Blocks, state: BlockState, side: str) -> tuple[float, int]:
    """Bits of the codes of "keys" or "values", and how many codes these are.

    Shannon's entropy of the codes or of their differences, without tables: what
    an ideal coder would need. Reads back.
    """
    codec = _codec(transform, side)
    codes = codes_along_tokens(getattr(state, side).rows[0], codec.width)
    total, count = 0.0, 0
    for row, coded in zip(codes, np.array(state.coded).tolist(), strict=True):
        total += entropy_bits(row[:, :coded], codec.bits, codec.use_delta, codec.per_channel)
        count += row[:, :coded].size
    return total, count


def estimated_bytes(transform: Blocks, state: BlockState, side: str) -> int:
    """Bytes of what is in groups of "keys" or "values" after entropy coding, scales and zeros included. Reads back."""
    bits, count = entropy_coded_bits(transform, state, side)
    group, scales = _codec(transform, side).group_size, getattr(state, side).rows[1]
    return math.ceil(bits / 8) + 2 * (count // group) * scales.itemsize


def entropy_savings(transform: Blocks, state: BlockState) -> float:
    """The share of the keys' codes, as held, that entropy coding would save; 0.0 without any. Reads back."""
    bits, count = entropy_coded_bits(transform, state, "keys")
    return 1 - bits / (count * _codec(transform, "keys").width) if count else 0.0


def codes_along_tokens(words: mx.array, width: int) -> Ints:
    """Codes uint8 [B, H, T, D] of words uint32 [B, H, D, W] that hold them along tokens, `width` bits each."""
    stream = np.array(words).astype("<u4").view(np.uint8)
    return from_stream(stream, width, stream.shape[-1] * 8 // width).swapaxes(-1, -2)


def _codec(transform: Blocks, side: str) -> CacheGenCodec:
    check_choice("cachegen", "side", side, SIDES)
    codec: Codec = transform.key if side == "keys" else transform.value
    check(isinstance(codec, CacheGenCodec), "cachegen", "transform", "must hold its codes in this way", codec)
    assert isinstance(codec, CacheGenCodec)
    return codec
