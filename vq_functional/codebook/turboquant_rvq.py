"""TurboQuant with a second pass: the residual of the first codebook goes through one of its own.

An extension of arXiv 2504.19874 without a paper. Keys only; values stay as
they came, or take 8 bits by `value_bits`. The second codebook is solved for
the residual's true density; `residual="laplace"` takes the Laplacian that
other software assumes.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.turboquant_mse import RotatedCoder
from vq_functional.core.codec import Codec, Coder
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.ops.codebooks import laplace_codebook, residual_codebook, sphere_codebook
from vq_functional.ops.rotations import random_rotation
from vq_functional.ops.scalar import scalar_codes
from vq_functional.quantize.int8 import int8_codec


@attrs.frozen(kw_only=True)
class TurboQuantRVQOptions:
    """`bits` a coordinate in each of two stages; `value_bits` None (exact) or 8.

    `unbiased` and `rounds` as in TurboQuantMSEOptions.
    """

    bits: int = 2
    seed: int = 42
    value_bits: int | None = None
    residual: str = "fitted"
    unbiased: bool = True
    rounds: int = 1

    def __attrs_post_init__(self) -> None:
        check_int("turboquant_rvq", "bits", self.bits, 1, 8)
        check_seed("turboquant_rvq", self.seed)
        check_choice("turboquant_rvq", "unbiased", self.unbiased, (True, False))
        check_int("turboquant_rvq", "rounds", self.rounds, 1)
        check_choice("turboquant_rvq", "value_bits", self.value_bits, (None, 8))
        check_choice("turboquant_rvq", "residual", self.residual, ("fitted", "laplace"))


@attrs.frozen
class TurboQuantRVQCodec(Codec):
    """2 * 4 * ceil(D * bits / 32) + 2 bytes a row; keys or values."""

    bits: int
    seed: int
    residual: str
    unbiased: bool
    rounds: int
    name = "turboquant_rvq"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        check(dim >= 3, self.name, "head_dim", "must be at least 3", dim)
        second = residual_codebook if self.residual == "fitted" else laplace_codebook
        levels = (sphere_codebook(dim, self.bits), second(dim, self.bits))
        stages = tuple(scalar_codes(table, self.bits, dim) for table in levels)
        return RotatedCoder(dim, dtype, random_rotation(dim, self.seed, self.rounds), stages, self.unbiased)


def turboquant_rvq_codec(**options: Any) -> TurboQuantRVQCodec:
    """Codec for keys or values; options as in TurboQuantRVQOptions, `value_bits` aside."""
    o = TurboQuantRVQOptions(**options)
    return TurboQuantRVQCodec(o.bits, o.seed, o.residual, o.unbiased, o.rounds)


def turboquant_rvq(**options: Any) -> Transform:
    """Keys in two passes of rotated scalar codes; keeps every token."""
    o = TurboQuantRVQOptions(**options)
    key = turboquant_rvq_codec(**options)
    return rows(key=key, value=int8_codec() if o.value_bits else None, name="turboquant_rvq")
