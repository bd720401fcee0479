"""Codes of up to 16 bits as a bit stream in uint32 words, least significant bit first: as ``mx.quantize`` has them."""

import functools
import math

import mlx.core as mx

WORD = 32
WHOLE = {8: mx.uint8, 16: mx.uint16}  # widths at which codes are numbers of MLX


def words(count: int, bits: int) -> int:
    """Words that `count` codes take."""
    return -(-count * bits // WORD)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Words uint32 [..., words(N, bits)] of codes [..., N], each below 2**bits."""
    codes = codes.astype(mx.uint32)
    if WORD % bits:
        codes, bits = ((codes[..., None] >> _steps(bits)) & 1).flatten(-2), 1
    per_word = WORD // bits
    missing = -codes.shape[-1] % per_word
    if missing:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    if bits in WHOLE:
        return codes.astype(WHOLE[bits]).view(mx.uint32)
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_word, per_word)
    shifts = _steps(per_word, bits)
    return (codes << shifts).sum(axis=-1).astype(mx.uint32)


def unpack(packed: mx.array, bits: int, count: int) -> mx.array:
    """Codes uint32 [..., count] of a bit stream [..., words]."""
    if WORD % bits == 0:
        return cut(split_words(packed, bits), count)
    bit = split_words(packed, 1).flatten(-2)[..., : count * bits].reshape(*packed.shape[:-1], count, bits)
    return (bit << _steps(bits)).sum(axis=-1).astype(mx.uint32)


def split_words(packed: mx.array, bits: int) -> mx.array:
    """Codes uint32 [..., words, 32 / bits] of words that no code crosses."""
    if bits in WHOLE:
        return packed.view(WHOLE[bits]).reshape(*packed.shape, WORD // bits).astype(mx.uint32)
    shifts = _steps(WORD // bits, bits)
    return (packed[..., None] >> shifts) & (2**bits - 1)


@functools.lru_cache(maxsize=64)
def _steps(count: int, width: int = 1) -> mx.array:
    """Where the codes of a word begin: 0, width, 2 width, ... as uint32 [count]."""
    steps = mx.arange(count, dtype=mx.uint32) * width
    mx.eval(steps)
    return steps


def cut(numbers: mx.array, count: int) -> mx.array:
    """The first `count` numbers of each row [..., words, per word]."""
    flat = numbers.flatten(-2)
    return flat if flat.shape[-1] == count else flat[..., :count]


def pack_slices(codes: mx.array, bits: int) -> mx.array:
    """`pack`, with widths that would cross words cut into slices of 4, 2 and 1 bits, one after the other.

    Takes the same words where N is a multiple of 32, and unpacks faster;
    elsewhere the codes stay one stream.
    """
    parts, shift = [], 0
    for width in _widths(bits, codes.shape[-1]):
        parts.append(pack((codes >> shift) & (2**width - 1), width))
        shift += width
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def unpack_slices(packed: mx.array, bits: int, count: int) -> mx.array:
    """Codes uint32 [..., count] of `pack_slices`."""
    total, shift, start = mx.array(0, mx.uint32), 0, 0
    for width in _widths(bits, count):
        end = start + words(count, width)
        total = total + (unpack(packed[..., start:end], width, count) << shift)
        shift, start = shift + width, end
    return total


def _widths(bits: int, count: int) -> tuple[int, ...]:
    if count % WORD or WORD % bits == 0:
        return (bits,)
    return tuple(width for width in (4, 2, 1) if bits & width)


def alignment(bits: int) -> int:
    """Smallest number of codes that fills whole words."""
    return WORD // math.gcd(WORD, bits)
