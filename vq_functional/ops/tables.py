"""Small arrays that a trace holds as they are, instead of the steps that make them at each call."""

import functools

import mlx.core as mx

LONG = 4096  # a longer count is made anew: it is no longer small, and its call has more to do


def counting(n: int) -> mx.array:
    """0, 1, ..., n - 1 as int32 [n]."""
    return _counting(n) if n <= LONG else mx.arange(n)


@functools.lru_cache(maxsize=512, typed=True)
def filled(number: float, *shape: int) -> mx.array:
    """An integer as int32 array, or a float as float32; never a mere number.

    As a mere number it would be part of a compiled kernel, and each size need its own.
    """
    return _made(mx.full(shape, number, mx.int32 if isinstance(number, int) else mx.float32))


@functools.lru_cache(maxsize=512)
def first_rows(batch: int, heads: int, count: int) -> mx.array:
    """Index int32 [B, H, 1] of each head's first row among all rows of [B, H, count]."""
    return _made((mx.arange(batch * heads) * count).reshape(batch, heads, 1))


@functools.lru_cache(maxsize=512)
def _counting(n: int) -> mx.array:
    return _made(mx.arange(n))


def _made(table: mx.array) -> mx.array:
    mx.eval(table)
    return table
