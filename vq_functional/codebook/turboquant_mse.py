"""TurboQuant (MSE): unit direction, random rotation, one scalar codebook (arXiv 2504.19874, algorithm 1).

Keys by `turboquant_mse_codec`, values in 8 bits a number with one scale a
token. Differs from the paper: the rotation is a randomized Hadamard transform
where the head size allows it, and the codebook is solved for the exact
density of a coordinate at that size. Outlier channels of keys may be held
apart, and are chosen by the first rows.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.outlier_channels import OutlierOptions, every_row, own_first
from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.transform import Transform
from vq_functional.ops.codebooks import sphere_codebook
from vq_functional.ops.rotations import Rotation, random_rotation
from vq_functional.ops.scalar import ScalarCodes, scalar_codes
from vq_functional.ops.vectors import TINY, norm, scaled


@attrs.frozen(kw_only=True, field_transformer=own_first)
class TurboQuantMSEOptions(OutlierOptions):
    """`bits` a coordinate of the keys; `seed` of the rotation; outlier channels as in OutlierOptions.

    `unbiased` stores |x| / <u, u^> in place of |x|, so that products with the
    decoded row have no shrinkage, for the same bytes. `rounds` of the Hadamard
    rotation: 2 makes the error the same for all directions, sparse ones included.
    """

    bits: int = 2
    seed: int = 42
    unbiased: bool = False
    rounds: int = 1

    def __attrs_post_init__(self) -> None:
        check_int("turboquant_mse", "bits", self.bits, 1, 8)
        check_seed("turboquant_mse", self.seed)
        check_choice("turboquant_mse", "unbiased", self.unbiased, (True, False))
        check_int("turboquant_mse", "rounds", self.rounds, 1)
        self.check_outliers("turboquant_mse")


@attrs.frozen
class TurboQuantMSECodec(Codec):
    """4 * ceil(D * bits / 32) + 2 bytes a row; keys or values."""

    bits: int
    seed: int
    unbiased: bool
    rounds: int
    name = "turboquant_mse"

    def bind(self, dim: int, dtype: mx.Dtype) -> "RotatedCoder":
        check(dim >= 3, self.name, "head_dim", "must be at least 3", dim)
        codes = scalar_codes(sphere_codebook(dim, self.bits), self.bits, dim)
        return RotatedCoder(dim, dtype, random_rotation(dim, self.seed, self.rounds), (codes,), self.unbiased)


@attrs.frozen(eq=False)
class RotatedCoder(Coder):
    """x ~ norm * P^T (sum of the stages' levels), each stage coding what the ones before it left over."""

    dim: int
    dtype: mx.Dtype
    rotation: Rotation
    stages: tuple[ScalarCodes, ...]
    unbiased: bool

    def encode(self, x: mx.array) -> Rows:
        return self.split(x)[0]

    def split(self, x: mx.array) -> tuple[Rows, mx.array]:
        """Rows of `x` [B, H, S, D], and what these leave over of P x: float32 [B, H, S, D]."""
        length, x = norm(x), x.astype(mx.float32)
        rest = self.rotation.apply(x / mx.maximum(length, TINY))
        direction, coded = rest, list[mx.array]()
        for stage in self.stages:
            codes, levels = stage.encode(rest)
            coded, rest = [*coded, codes], rest - levels
        levels, held = direction - rest, length
        if self.unbiased:
            held = length / mx.maximum((direction * levels).sum(axis=-1, keepdims=True), 0.1)
        held = held.astype(mx.bfloat16)
        return (*coded, held[..., 0]), length * direction - held.astype(mx.float32) * levels

    def decode(self, rows: Rows) -> mx.array:
        *coded, length = rows
        return scaled(self.rotation.undo(self._levels(coded)), length, self.dtype)

    def turned(self, rows: Rows) -> mx.array:
        """P x as the rows hold it: float32 [B, H, S, D]."""
        *coded, length = rows
        return self._levels(coded) * length.astype(mx.float32)[..., None]

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self.dot_turned(self.rotation.apply(queries), rows)

    def dot_turned(self, queries: mx.array, rows: Rows) -> mx.array:
        """`dot` for queries that are rotated already."""
        *coded, length = rows
        sums = self._sum([stage.dot(queries, codes) for stage, codes in zip(self.stages, coded, strict=True)])
        return sums * length.astype(mx.float32)[:, :, None]

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        *coded, length = rows
        weights = weights * length.astype(mx.float32)[:, :, None]
        sums = self._sum([stage.mix(weights, codes) for stage, codes in zip(self.stages, coded, strict=True)])
        return self.rotation.undo(sums)

    def _levels(self, coded: list[mx.array]) -> mx.array:
        return self._sum([stage.decode(codes) for stage, codes in zip(self.stages, coded, strict=True)])

    @staticmethod
    def _sum(terms: list[mx.array]) -> mx.array:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


def turboquant_mse_codec(**options: Any) -> Codec:
    """Codec for keys or values; options as in TurboQuantMSEOptions."""
    o = TurboQuantMSEOptions(**options)
    inner = TurboQuantMSECodec(o.bits, o.seed, o.unbiased, o.rounds)
    return o.split(inner, attrs.evolve(inner, bits=o.bits_outlier) if o.bits_outlier else None)


def turboquant_mse(**options: Any) -> Transform:
    """Keys as rotated scalar codes, values in 8 bits; keeps every token."""
    return every_row("turboquant_mse", turboquant_mse_codec(**options))
