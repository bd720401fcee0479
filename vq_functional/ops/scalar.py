"""Codes of one scalar codebook for every coordinate of a vector."""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx

from vq_functional.ops.codebooks import Edges, boundaries, nearest
from vq_functional.ops.levels import POLYNOMIAL_BITS, Coefficients, levels_at, levels_of_numbers, polynomial
from vq_functional.ops.packing import cut, pack_slices
from vq_functional.ops.signs import GROUP, one_bit_kernels, pack_signs, sign_matmul, split_signs


class ScalarCodes:
    """Packed codes [..., C, width] of float32 numbers [..., C, dim]."""

    levels: mx.array  # float32 [2**bits], symmetric, rising
    bits: int
    dim: int
    edges: Edges
    coefficients: Coefficients | None  # of the levels as a polynomial of the index, where that beats a table

    def _derive(self) -> None:
        """Set what follows from the levels."""
        few = self.bits <= POLYNOMIAL_BITS
        object.__setattr__(self, "edges", boundaries(self.levels))
        object.__setattr__(self, "coefficients", polynomial(self.levels) if few else None)

    def encode(self, y: mx.array) -> tuple[mx.array, mx.array]:
        """Codes of the nearest levels, and these levels."""
        index = nearest(y, self.edges)
        return self.pack(index), self._at(index)

    def _at(self, index: mx.array) -> mx.array:
        """Float32: levels at indices of any shape."""
        if self.coefficients is None:
            return self.levels[index]
        return levels_of_numbers(self.coefficients)(index)

    def pack(self, index: mx.array) -> mx.array:
        """Codes of the level indices [..., dim]."""
        raise TypeError(f"{type(self).__name__} does not pack")

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
    """Level indices as `pack_slices` packs them."""

    levels: mx.array
    bits: int
    dim: int
    edges: Edges = attrs.field(init=False)
    coefficients: Coefficients | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._derive()

    def pack(self, index: mx.array) -> mx.array:
        return pack_slices(index, self.bits)

    def decode(self, codes: mx.array) -> mx.array:
        return levels_at(codes, self.levels, self.coefficients, self.bits, self.dim)


@attrs.frozen(eq=False)
class PlaneCodes(ScalarCodes):
    """One or two bits of a symmetric codebook as sign planes, one after the other.

    The four levels +-inner and +-outer are a*s + b*t with s the sign, t = s for
    outer and -s for inner levels, a = (inner + outer)/2, b = (outer - inner)/2.
    """

    levels: mx.array
    bits: int
    dim: int
    edges: Edges = attrs.field(init=False)
    coefficients: Coefficients | None = attrs.field(init=False)
    weights: mx.array = attrs.field(init=False)  # float32 [bits]

    def __attrs_post_init__(self) -> None:
        self._derive()
        inner, outer = self.levels[2 ** (self.bits - 1)], self.levels[-1]
        weights = mx.stack([(inner + outer) / 2, (outer - inner) / 2])[: self.bits]
        mx.eval(weights)
        object.__setattr__(self, "weights", weights)

    def pack(self, index: mx.array) -> mx.array:
        positive = index >= 2 ** (self.bits - 1)
        if self.bits == 1:
            return pack_signs(positive)
        outer = (index == 0) | (index == 3)
        return mx.concatenate([pack_signs(positive), pack_signs(positive == outer)], axis=-1)

    def decode(self, codes: mx.array) -> mx.array:
        return _weighted_signs(self.dim)(self._planes(codes), self.weights)

    def dot(self, x: mx.array, codes: mx.array) -> mx.array:
        return self._products(x, codes, transpose=True) if one_bit_kernels() else super().dot(x, codes)

    def mix(self, weights: mx.array, codes: mx.array) -> mx.array:
        return self._products(weights, codes, transpose=False) if one_bit_kernels() else super().mix(weights, codes)

    def _products(self, x: mx.array, codes: mx.array, transpose: bool) -> mx.array:
        products = [sign_matmul(x, plane, self.dim, transpose) for plane in self._planes(codes)]
        return functools.reduce(mx.add, [a * y for a, y in zip(self.weights, products)])

    def _planes(self, codes: mx.array) -> list[mx.array]:
        width = codes.shape[-1] // self.bits
        return [codes[..., i * width : (i + 1) * width] for i in range(self.bits)]


@functools.lru_cache(maxsize=64)
def _weighted_signs(dim: int) -> Callable[[list[mx.array], mx.array], mx.array]:
    """Sum of weights times signs, in one fused pass over the planes."""

    def weighted(planes: list[mx.array], weights: mx.array) -> mx.array:
        return cut(functools.reduce(mx.add, [weights[i] * split_signs(plane) for i, plane in enumerate(planes)]), dim)

    return mx.compile(weighted)


def scalar_codes(levels: mx.array, bits: int, dim: int) -> ScalarCodes:
    """Planes where they waste no bits, else a stream of indices."""
    kind = PlaneCodes if bits <= 2 and dim % GROUP == 0 else LevelCodes
    return kind(levels, bits, dim)
