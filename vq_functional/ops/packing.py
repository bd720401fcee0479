"""Codes of 1 to 8 bits as a bit stream in uint32 words, least significant bit first: the layout of ``mx.quantize``."""

import math

import mlx.core as mx

WORD = 32


def words(count: int, bits: int) -> int:
    """Words that `count` codes take."""
    return -(-count * bits // WORD)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Words uint32 [..., words(N, bits)] of codes [..., N], each below 2**bits."""
    codes = codes.astype(mx.uint32)
    if WORD % bits:
        codes, bits = ((codes[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1).flatten(-2), 1
    per_word = WORD // bits
    missing = -codes.shape[-1] % per_word
    if missing:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    codes = codes.reshape(*codes.shape[:-1], -1, per_word)
    shifts = mx.arange(per_word, dtype=mx.uint32) * bits
    return (codes << shifts).sum(axis=-1).astype(mx.uint32)


def unpack(packed: mx.array, bits: int, count: int) -> mx.array:
    """Codes uint32 [..., count] of a bit stream [..., words]."""
    mask = 2**bits - 1
    if WORD % bits == 0:
        shifts = mx.arange(WORD // bits, dtype=mx.uint32) * bits
        return ((packed[..., None] >> shifts) & mask).flatten(-2)[..., :count]
    start = mx.arange(count, dtype=mx.uint32) * bits
    word, shift = start // WORD, start % WORD
    low = packed[..., word] >> shift
    high = packed[..., mx.minimum(word + 1, packed.shape[-1] - 1)] << (WORD - mx.maximum(shift, 1))
    spills = shift + bits > WORD
    return mx.where(spills, low | high, low) & mask


def lookup(packed: mx.array, table: mx.array, bits: int, count: int) -> mx.array:
    """`table` [2**bits] at the codes of a bit stream: [..., count] in the table's dtype.

    Where codes don't cross bytes one lookup serves a whole byte.
    """
    if 8 % bits:
        return table[unpack(packed, bits, count)]
    per_byte = 8 // bits
    codes = (mx.arange(256)[:, None] >> (mx.arange(per_byte) * bits)) & (2**bits - 1)
    return table[codes][mx.view(packed, mx.uint8)].flatten(-2)[..., :count]


def alignment(bits: int) -> int:
    """Smallest number of codes that fills whole words."""
    return WORD // math.gcd(WORD, bits)
