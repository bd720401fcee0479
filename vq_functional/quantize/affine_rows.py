"""Rows in affine groups along channels: code * scale + zero, any bits and group size; keys or values.

`clip="least_squares"` places the levels for the least squared error in place
of the whole range: a fifth of the error at 1 bit, two thirds at 2. Large
numbers then come out too small. That suits keys, best rotated; sums over many
values add such errors up, where those of whole ranges cancel.
"""

from typing import TypeAlias

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.errors import check_choice
from vq_functional.ops.affine import filled_up
from vq_functional.quantize.groups import TokenGroups, TokenGroupsCodec

Span: TypeAlias = tuple[mx.array, mx.array]  # lowest and highest level of each group, [..., 1]

ROUNDS = 3  # of nearest codes, then the least-squares line through them
CLIPS = (None, "least_squares")

# Steps of the best uniform quantizer of a standard normal variable, by bits (Max 1960, table II).
NORMAL_STEP = {1: 1.596, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}


@attrs.frozen
class FittedGroupsCodec(TokenGroupsCodec):
    """Groups of channels whose levels need not reach their lowest and highest numbers; the same bytes."""

    name = "fitted_groups"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return FittedGroups(dim, dtype, self.bits, self.group_size)


@attrs.frozen
class FittedGroups(TokenGroups):
    """Rows cut to the span of their best levels, then coded over that span."""

    def encode(self, x: mx.array) -> Rows:
        return super().encode(_cut(filled_up(x, self.group), self.bits, self.group)[..., : self.dim])


def _cut(x: mx.array, bits: int, group: int) -> mx.array:
    """`x` [..., N] with each group within the levels that fit it best; a group whose whole range is better stays."""
    x = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group)
    finite = mx.isfinite(x)
    count = mx.maximum(finite.sum(axis=-1, keepdims=True), 1)
    mean = mx.where(finite, x, 0).sum(axis=-1, keepdims=True) / count
    y = mx.where(finite, x - mean, 0)
    size = mx.abs(y).max(axis=-1, keepdims=True)  # scaled first so that squares can't overflow
    y = y / mx.where(size > 0, size, 1)
    whole = y.min(axis=-1, keepdims=True), y.max(axis=-1, keepdims=True)
    best = _best_span(y, whole, mx.sqrt(mx.square(y).sum(axis=-1, keepdims=True) / count), bits)
    better = _error(y, best, bits) < _error(y, whole, bits)
    low, high = (mean + size * end for end in best)
    return mx.where(better, mx.clip(x, low, high), x).flatten(-2)


def _best_span(y: mx.array, whole: Span, deviation: mx.array, bits: int) -> Span:
    """Lowest and highest level: those of a normal variable, then lines through the codes that they give."""
    top = 2**bits - 1
    reach = NORMAL_STEP[bits] * top / 2 * deviation
    low, high = -reach, reach
    for _ in range(ROUNDS):
        codes = _codes(y, low, high, top)
        offset = codes - codes.sum(axis=-1, keepdims=True) * (1 / y.shape[-1])
        spread = mx.square(offset).sum(axis=-1, keepdims=True)
        slope = (offset * y).sum(axis=-1, keepdims=True) / mx.where(spread > 0, spread, 1)
        zero = ((y - slope * codes).sum(axis=-1, keepdims=True)) * (1 / y.shape[-1])
        low, high = mx.maximum(zero, whole[0]), mx.minimum(zero + slope * top, whole[1])
    return low, high


def _codes(y: mx.array, low: mx.array, high: mx.array, top: int) -> mx.array:
    step = (high - low) * (1 / top)
    return mx.clip(mx.round((y - low) / mx.where(step > 0, step, 1)), 0, top)


def _error(y: mx.array, span: Span, bits: int) -> mx.array:
    low, high = span
    levels = low + (high - low) * (1 / (2**bits - 1)) * _codes(y, low, high, 2**bits - 1)
    return mx.square(y - levels).sum(axis=-1, keepdims=True)


def affine_codec(*, bits: int = 4, group_size: int = 32, clip: str | None = None) -> TokenGroupsCodec:
    """Codec for keys or values: `group_size` channels share scale and zero; `bits` 1 to 8.

    `clip` None spans each group's lowest and highest number; "least_squares"
    the levels of least squared error, for keys rather than values.
    """
    check_choice("affine_codec", "clip", clip, CLIPS)
    kind = TokenGroupsCodec if clip is None else FittedGroupsCodec
    return kind(bits, group_size)
