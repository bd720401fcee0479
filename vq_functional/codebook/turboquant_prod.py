"""TurboQuant (inner product): scalar codes and a sign sketch of what they leave over (arXiv 2504.19874, algorithm 2).

Products with queries that are not quantized are unbiased. Values in 8 bits.
Differs from the paper: the rotation is a randomized Hadamard transform where
the head size allows it, the sketch is taken in the rotated space, by default
with orthogonal rows, and the rest that it is taken of counts the rounding of
the norm.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.outlier_channels import OutlierOptions, every_row, own_first
from vq_functional.codebook.qjl import QJLCodec, check_sketch
from vq_functional.codebook.turboquant_mse import RotatedCoder, TurboQuantMSECodec
from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_int
from vq_functional.core.transform import Transform
from vq_functional.ops.vectors import to_dtype

SKETCH_SEED = 104_729  # apart from the rotation's seed: the two must be independent


@attrs.frozen(kw_only=True, field_transformer=own_first)
class TurboQuantProdOptions(OutlierOptions):
    """`bits` a coordinate of the keys, one of them for the sketch; at 1 there is only the sketch.

    `jl_dim` projections, a multiple of 32; None for one a coordinate. `seed` of
    rotation and sketch; `sketch` with "orthogonal" or "gaussian" rows; `rounds`
    of the Hadamard rotation. Outlier channels as in OutlierOptions; their codes
    are unbiased ones of turboquant_mse, and have no sketch.
    """

    bits: int = 2
    jl_dim: int | None = None
    seed: int = 42
    sketch: str = "orthogonal"
    rounds: int = 1

    def __attrs_post_init__(self) -> None:
        check_int("turboquant_prod", "bits", self.bits, 1, 8)
        check_sketch("turboquant_prod", self.jl_dim, self.seed, self.sketch)
        check_int("turboquant_prod", "rounds", self.rounds, 1)
        self.check_outliers("turboquant_prod")


@attrs.frozen
class TurboQuantProdCodec(Codec):
    """4 * ceil(D * (bits - 1) / 32) + jl_dim / 8 + 4 bytes a row, 2 less at 1 bit; keys only."""

    bits: int
    jl_dim: int | None
    seed: int
    sketch: str
    rounds: int
    name = "turboquant_prod"
    keys_only = True

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        sketch = QJLCodec(self.jl_dim, self.seed + SKETCH_SEED, self.sketch)
        if self.bits == 1:
            return sketch.bind(dim, dtype)
        check(dim >= 3, self.name, "head_dim", "must be at least 3", dim)
        codes = TurboQuantMSECodec(self.bits - 1, self.seed, False, self.rounds).bind(dim, dtype)
        return TurboQuantProdCoder(dim, dtype, codes, sketch.bind(dim, mx.float32))


@attrs.frozen(eq=False)
class TurboQuantProdCoder(Coder):
    """x ~ P^T (codes' share of P x + sketch's estimate of the rest)."""

    dim: int
    dtype: mx.Dtype
    codes: RotatedCoder
    sketch: Coder

    def encode(self, x: mx.array) -> Rows:
        coded, rest = self.codes.split(x)
        return *coded, *self.sketch.encode(rest)

    def decode(self, rows: Rows) -> mx.array:
        turned = self.codes.turned(rows[:2]) + self.sketch.decode(rows[2:])
        return to_dtype(self.codes.rotation.undo(turned), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        turned = self.codes.rotation.apply(queries)
        return self.codes.dot_turned(turned, rows[:2]) + self.sketch.dot(turned, rows[2:])


def turboquant_prod_codec(**options: Any) -> Codec:
    """Codec for keys; options as in TurboQuantProdOptions."""
    o = TurboQuantProdOptions(**options)
    outer = TurboQuantMSECodec(o.bits_outlier, o.seed, True, o.rounds) if o.bits_outlier else None
    return o.split(TurboQuantProdCodec(o.bits, o.jl_dim, o.seed, o.sketch, o.rounds), outer)


def turboquant_prod(**options: Any) -> Transform:
    """Keys as rotated scalar codes and a sketch of the rest, values in 8 bits; keeps every token."""
    return every_row("turboquant_prod", turboquant_prod_codec(**options))
