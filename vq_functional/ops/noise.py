"""Random numbers that follow from a seed and a place alone: a hash, which fuses with what it is compared to."""

import functools
from collections.abc import Sequence

import mlx.core as mx


def hashed(state: mx.array, *numbers: mx.array) -> mx.array:
    """A uint32 `state` with integers mixed in, one after the other: their order counts."""
    for number in numbers:
        state = _mixed(state ^ number.astype(mx.uint32))
    return state


def uniform(state: mx.array) -> mx.array:
    """Float32 in (0, 1) from a uint32 `state`."""
    # 23 bits and a half are exact in float32, so that neither 0 nor 1 comes out.
    return ((state >> 9).astype(mx.float32) + 0.5) * 2**-23


@functools.lru_cache(maxsize=512)
def hashed_heads(*seeds: int) -> mx.array:
    """A state uint32 [H, 1] from the seed of each head, an integer of up to 64 bits."""
    upper, lower = halves(seeds)
    state = hashed(mx.array(0, mx.uint32), lower, upper)
    mx.eval(state)  # a table, so that a trace holds it and not how it is made
    return state


def halves(numbers: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Upper and lower half uint32 [N, 1] of integers of 64 bits."""
    pairs = [divmod(number % 2**64, 2**32) for number in numbers]
    upper, lower = mx.split(mx.array(pairs, mx.uint32), 2, axis=-1)
    return upper, lower


def _mixed(x: mx.array) -> mx.array:
    """Hash uint32 to uint32, each bit of the result by all bits of `x`; 0 is nothing special."""
    x = x + mx.array(0x9E3779B9, mx.uint32)
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)
