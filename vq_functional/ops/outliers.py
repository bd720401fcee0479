"""Numbers that stand out of a block of rows, and those that are none."""

import mlx.core as mx


def filled(x: mx.array) -> mx.array:
    """Blocks [..., C, D] in which a number that is not finite repeats the next finite one of its channel.

    At the end the last one before; 0 in a channel that has none.
    """
    count = x.shape[-2]
    row, finite = mx.arange(count)[:, None], mx.isfinite(x)
    following = mx.cummin(mx.where(finite, row, count), axis=-2, reverse=True)
    before = mx.maximum(mx.where(finite, row, -1).max(axis=-2, keepdims=True), 0)
    found = mx.take_along_axis(x, mx.where(following < count, following, before), axis=-2)
    return mx.where(mx.isfinite(found), found, 0)


def largest(x: mx.array, count: int) -> mx.array:
    """Index int32 [..., count] of the largest numbers of `x` [..., N], none below zero; of equal ones the first."""
    if count == 1:
        return mx.argmax(x, axis=-1, keepdims=True).astype(mx.int32)
    bits = (2**32 - 1 - x.view(mx.uint32)).astype(mx.uint64)  # as integers, such floats have the same order
    ranked = mx.partition(bits << 32 | mx.arange(x.shape[-1]).astype(mx.uint64), count - 1, axis=-1)
    return (ranked[..., :count] & (2**32 - 1)).astype(mx.int32)
