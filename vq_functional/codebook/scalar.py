"""Codes of one scalar codebook for every coordinate of a vector."""

import attrs
import mlx.core as mx

from vq_functional.ops.codebooks import boundaries, nearest
from vq_functional.ops.packing import lookup, pack, words
from vq_functional.ops.signs import GROUP, pack_signs, sign_matmul, signs


class ScalarCodes:
    """Packed codes [..., C, width] of float32 numbers [..., C, dim]."""

    dim: int

    def encode(self, y: mx.array) -> mx.array:
        """Codes of the nearest levels."""
        raise TypeError(f"{type(self).__name__} does not encode")

    def decode(self, codes: mx.array) -> mx.array:
        """The levels, float32 [..., C, dim]."""
        raise TypeError(f"{type(self).__name__} does not decode")

    def dot(self, x: mx.array, codes: mx.array) -> mx.array:
        """Float32 `x` [..., M, dim] times the levels' transpose: [..., M, C]."""
        return x @ self.decode(codes).swapaxes(-1, -2)

    def mix(self, weights: mx.array, codes: mx.array) -> mx.array:
        """Float32 `weights` [..., M, C] times the levels: [..., M, dim]."""
        return weights @ self.decode(codes)


@attrs.frozen(eq=False)
class LevelCodes(ScalarCodes):
    """Indices into `levels` [2**bits] as a bit stream."""

    levels: mx.array
    bits: int
    dim: int

    def encode(self, y: mx.array) -> mx.array:
        return pack(nearest(y, boundaries(self.levels)), self.bits)

    def decode(self, codes: mx.array) -> mx.array:
        return lookup(codes, self.levels, self.bits, self.dim)


@attrs.frozen(eq=False)
class PlaneCodes(ScalarCodes):
    """One or two bits of a symmetric codebook as sign planes, one after the other.

    The four levels +-inner and +-outer are a*s + b*t with s the sign, t = s for
    outer and -s for inner levels, a = (inner + outer)/2, b = (outer - inner)/2.
    """

    levels: mx.array
    bits: int
    dim: int
    weights: tuple[float, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        top = self.levels[2 ** (self.bits - 1) :].tolist()
        both = ((top[0] + top[-1]) / 2, (top[-1] - top[0]) / 2)
        object.__setattr__(self, "weights", both[: self.bits])

    def encode(self, y: mx.array) -> mx.array:
        positive = y > 0
        planes = [pack_signs(positive)]
        if self.bits == 2:
            outer = mx.abs(y) > (self.levels[2] + self.levels[3]) * 0.5
            planes.append(pack_signs(positive == outer))
        return mx.concatenate(planes, axis=-1)

    def decode(self, codes: mx.array) -> mx.array:
        planes = [weight * signs(plane, self.dim) for weight, plane in self._planes(codes)]
        return planes[0] if len(planes) == 1 else planes[0] + planes[1]

    def dot(self, x: mx.array, codes: mx.array) -> mx.array:
        return self._product(x, codes, transpose=True)

    def mix(self, weights: mx.array, codes: mx.array) -> mx.array:
        return self._product(weights, codes, transpose=False)

    def _product(self, x: mx.array, codes: mx.array, transpose: bool) -> mx.array:
        sums = [weight * sign_matmul(x, plane, self.dim, transpose) for weight, plane in self._planes(codes)]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def _planes(self, codes: mx.array) -> list[tuple[float, mx.array]]:
        width = words(self.dim, 1)
        starts = range(0, codes.shape[-1], width)
        return [(w, codes[..., i : i + width]) for w, i in zip(self.weights, starts, strict=True)]


def scalar_codes(levels: mx.array, bits: int, dim: int) -> ScalarCodes:
    """Planes where they waste no bits, else a stream of indices."""
    kind = PlaneCodes if bits <= 2 and dim % GROUP == 0 else LevelCodes
    return kind(levels, bits, dim)
