"""Rows as scaled anchors, some of them with a coded residual: products straight from that form."""

import functools

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check_int
from vq_functional.ops.codebooks import GRID, lloyd_max
from vq_functional.ops.packing import words
from vq_functional.ops.rotations import Rotation, random_rotation
from vq_functional.ops.scalar import ScalarCodes, scalar_codes
from vq_functional.ops.vectors import TINY, norm, scaled, to_dtype

REACH = 8.0  # standard deviations that the levels are fitted to
SLOT = 6  # bytes of a residual beside its codes: float16 scale, int32 place
FEW_ANCHORS = 64  # up to so many a dense product is faster than adding up by index


@attrs.frozen
class AnchoredSide:
    """Keys or values of P rows a head; N of all heads' rows have a residual."""

    anchors: mx.array  # dtype [B, H, k, D]: exact rows
    index: mx.array  # uint16 [B, H, P]: the anchor of each row
    gain: mx.array  # float16 [B, H, P]: what it is multiplied by
    codes: mx.array  # uint32 [B, N, words]: rotated residuals
    scales: mx.array  # float16 [B, N]
    place: mx.array  # int32 [B, N]: row * H + head, rising; -1 in an unused slot

    @property
    def rows(self) -> Rows:
        """The arrays in order."""
        return self.anchors, self.index, self.gain, self.codes, self.scales, self.place


@attrs.frozen
class AnchoredCodec(Codec):
    """Description of how residuals are coded."""

    bits: int
    seed: int
    name = "anchorkv"

    def __attrs_post_init__(self) -> None:
        check_int("anchorkv", "residual_bits", self.bits, 1, 4)

    def bind(self, dim: int, dtype: mx.Dtype) -> "AnchoredCoder":
        rotation = random_rotation(dim, self.seed)
        return AnchoredCoder(dim, dtype, rotation, scalar_codes(normal_levels(self.bits), self.bits, dim))


@functools.lru_cache(maxsize=8)
def normal_levels(bits: int) -> mx.array:
    """Lloyd-Max levels float32 [2**bits] of the standard normal distribution."""
    grid = np.linspace(-REACH, REACH, GRID)
    levels = mx.array(lloyd_max(grid, np.exp(-grid * grid / 2), 2**bits).astype(np.float32))
    mx.eval(levels)
    return levels


def slot_bytes(dim: int, bits: int) -> int:
    """Bytes of a residual."""
    return 4 * words(dim, bits) + SLOT


@attrs.frozen(eq=False)
class AnchoredCoder(Coder):
    """Reads rows (anchors, index, gain, codes, scales, place) of an AnchoredSide."""

    dim: int
    dtype: mx.Dtype
    rotation: Rotation
    levels: ScalarCodes

    def coded(self, residuals: mx.array) -> tuple[mx.array, mx.array]:
        """Codes uint32 [B, N, words] and scales float16 [B, N] of float32 residuals [B, N, D]."""
        if residuals.size == 0:
            shape = residuals.shape[:2]
            return mx.zeros((*shape, words(self.dim, self.levels.bits)), mx.uint32), mx.zeros(shape, mx.float16)
        turned = self.rotation.apply(residuals)
        size = norm(turned) * self.dim**-0.5
        codes, _ = self.levels.encode(turned / mx.maximum(size, TINY))
        return codes, to_dtype(size[..., 0], mx.float16)

    def decode(self, rows: Rows) -> mx.array:
        anchors, index, gain, *residuals = rows
        picked = mx.take_along_axis(anchors.astype(mx.float32), index.astype(mx.uint32)[..., None], axis=2)
        out = scaled(picked, gain, mx.float32)
        if residuals[2].shape[1]:
            numbers, _, place = self._residuals(residuals, index)
            flat = out.reshape(-1, self.dim).at[place.flatten()].add(self.rotation.undo(numbers).flatten(0, 1))
            out = flat.reshape(out.shape)
        return to_dtype(out, self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        anchors, index, gain, *residuals = rows
        batch, heads, count = index.shape
        asked = queries.shape[2]
        each = mx.broadcast_to(index.astype(mx.uint32)[:, :, None], (batch, heads, asked, count))
        near = queries @ anchors.astype(mx.float32).swapaxes(-1, -2)
        scores = mx.take_along_axis(near, each, axis=-1) * gain.astype(mx.float32)[:, :, None]
        if residuals[2].shape[1] == 0:
            return scores
        numbers, head, place = self._residuals(residuals, index)
        turned = self.rotation.apply(queries).reshape(batch, heads * asked, self.dim)
        every = (numbers @ turned.swapaxes(-1, -2)).reshape(*head.shape, heads, asked)
        own = mx.take_along_axis(every, head[..., None, None], axis=2)[:, :, 0]
        more = mx.zeros((batch * heads * count, asked)).at[place.flatten()].add(own.flatten(0, 1))
        return scores + more.reshape(batch, heads, count, asked).swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        anchors, index, gain, *residuals = rows
        batch, heads, asked, count = weights.shape
        shares = _by_anchor(weights * gain.astype(mx.float32)[:, :, None], index, anchors.shape[2])
        out = shares @ anchors.astype(mx.float32)
        if residuals[2].shape[1] == 0:
            return out
        numbers, head, place = self._residuals(residuals, index)
        by_row = weights.swapaxes(-1, -2).reshape(batch * heads * count, asked)
        paid = mx.take(by_row, place, axis=0)
        by_head = mx.where(head[..., None, None] == mx.arange(heads)[:, None], paid[:, :, None], 0)
        turned = by_head.flatten(2).swapaxes(-1, -2) @ numbers
        return out + self.rotation.undo(turned).reshape(out.shape)

    def _residuals(self, residuals: list[mx.array], index: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated residuals float32 [B, N, D], their heads int [B, N], and their rows among all B * H * S.

        An unused slot, or one of a row behind the first S, is a zero residual of some row.
        """
        codes, scales, place = residuals
        batch, heads, count = index.shape
        row, head = place // heads, place % heads
        used = (place >= 0) & (row < mx.full((1,), count))
        numbers = self.levels.decode(codes) * mx.where(used, scales, 0).astype(mx.float32)[..., None]
        first = mx.arange(batch)[:, None] * heads
        flat = (first + head) * mx.full((1,), count) + row
        return numbers, head, mx.where(used, flat, 0)


def _by_anchor(weights: mx.array, index: mx.array, count: int) -> mx.array:
    """Sums float32 [B, H, M, count] of the weights [B, H, M, S] of the rows of each anchor."""
    if count <= FEW_ANCHORS:
        return weights @ (index[..., None] == mx.arange(count)).astype(mx.float32)
    batch, heads, asked, _ = weights.shape
    first = mx.arange(batch * heads).reshape(batch, heads, 1) * count
    flat = (index.astype(mx.int32) + first).flatten()
    sums = mx.zeros((batch * heads * count, asked)).at[flat].add(weights.swapaxes(-1, -2).reshape(-1, asked))
    return sums.reshape(batch, heads, count, asked).swapaxes(-1, -2)
