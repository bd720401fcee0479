"""Single numbers of affine groups, straight from the packed codes."""

import mlx.core as mx

from vq_functional.ops.affine import Groups
from vq_functional.ops.packing import WORD


def numbers_at(groups: Groups, line: mx.array, place: mx.array, bits: int, group: int) -> mx.array:
    """Float32 numbers [B, H, ...] at `place` int [B, H, ...] of row `line` of `groups` [B, H, lines, ...]."""
    bit = place * bits
    word, shift = bit // WORD, (bit % WORD).astype(mx.uint32)
    code = _at(groups.codes, line, word) >> shift
    if WORD % bits:  # some codes go on in the next word
        after = _at(groups.codes, line, mx.minimum(word + 1, groups.codes.shape[-1] - 1))
        code = code | ((after << 1) << (WORD - 1 - shift))
    scale, zero = (_at(x, line, place // group).astype(mx.float32) for x in (groups.scales, groups.zeros))
    return (code & (2**bits - 1)).astype(mx.float32) * scale + zero


def _at(x: mx.array, line: mx.array, place: mx.array) -> mx.array:
    index = (line * x.shape[-1] + place).flatten(2)
    return mx.take_along_axis(x.flatten(2), index, axis=2).reshape(line.shape)
