"""PolarQuant: rotated rows in recursive polar coordinates, every angle from a small codebook (arXiv 2502.02617).

Four levels turn 16 coordinates into one radius and 15 angles. Values in 8
bits, or as the keys. Differs from the paper: the rotation is a randomized
Hadamard transform where the head size allows it, and the codebooks come from
the angles' densities and not from a prompt.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.angles import AngleLevel, Lookup, angle_levels, lookups
from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.ops.rotations import Rotation, random_rotation
from vq_functional.ops.vectors import TINY, norm, to_dtype
from vq_functional.quantize.int8 import int8_codec

LEVELS = 4
BLOCK = 2**LEVELS  # coordinates that share a radius


@attrs.frozen(kw_only=True)
class PolarOptions:
    """`bits` an angle, two more at the first level; `level_bits`, from the first level to the fourth, says all.

    `seed` and `rounds` of the rotation. `polar_values`: values are held as keys
    are. `bits_k` and `bits_v`: `bits` of keys and of values, where they differ.
    """

    bits: int = 2
    level_bits: tuple[int, ...] | None = None
    seed: int = 42
    rounds: int = 1
    polar_values: bool = False
    bits_k: int | None = None
    bits_v: int | None = None

    def __attrs_post_init__(self) -> None:
        check_int("polar", "bits", self.bits, 1, 8)
        _check_level_bits(self.level_bits)
        check_seed("polar", self.seed)
        check_int("polar", "rounds", self.rounds, 1)
        check_choice("polar", "polar_values", self.polar_values, (True, False))
        for field, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            check_int("polar", field, bits, 1, 8, optional=True)
            beside = bits is None or self.level_bits is None
            check(beside, "polar", field, "can't be set beside `level_bits`", bits)
        used = self.polar_values or self.bits_v is None
        check(used, "polar", "bits_v", "can't be set without `polar_values`", self.bits_v)


def _check_level_bits(level_bits: Any) -> None:
    if level_bits is not None:
        whole = isinstance(level_bits, tuple) and len(level_bits) == LEVELS
        check(whole, "polar", "level_bits", f"must be None or {LEVELS} integers in a tuple", level_bits)
        for bits in level_bits:
            check_int("polar", "level_bits", bits, 1, 10)


@attrs.frozen
class PolarCodec(Codec):
    """The angles of each level in whole words, and D / 16 radii in the input dtype; keys or values."""

    level_bits: tuple[int, ...]
    seed: int
    rounds: int
    name = "polar"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        check(dim % BLOCK == 0, self.name, "head_dim", f"must be a multiple of {BLOCK}", dim)
        rotation = random_rotation(dim, self.seed, self.rounds)
        return PolarCoder(dim, dtype, rotation, angle_levels(dim, self.level_bits))


@attrs.frozen(eq=False)
class PolarCoder(Coder):
    """x ~ P^T y, with y the coordinates that angles and radii stand for."""

    dim: int
    dtype: mx.Dtype
    rotation: Rotation
    levels: tuple[AngleLevel, ...]
    lookups: tuple[Lookup, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "lookups", lookups(self.levels))

    @property
    def unit(self) -> int:
        """What radii are held in.

        A row can be sqrt(D) times as long as the largest float16, and that a
        power of two costs no accuracy.
        """
        return 2 ** -(-(self.dim - 1).bit_length() // 2) if self.dtype == mx.float16 else 1

    def encode(self, x: mx.array) -> Rows:
        length, x = norm(x), x.astype(mx.float32)
        radii, coded = self.rotation.apply(x / mx.maximum(length, TINY)), list[mx.array]()
        for level in self.levels:
            even, odd = radii[..., 0::2], radii[..., 1::2]
            coded.append(level.encode(even, odd))
            radii = mx.sqrt(even * even + odd * odd)
        return mx.concatenate(coded, axis=-1), to_dtype(radii * (length / self.unit), self.dtype)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self.rotation.undo(self.turned(rows)), self.dtype)

    def turned(self, rows: Rows) -> mx.array:
        """P x as the rows hold it: float32 [B, H, S, D]."""
        packed, radii = rows
        numbers = radii.astype(mx.float32) * self.unit
        for lookup in self.lookups:
            numbers = lookup.split(numbers, packed)
        return numbers

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self.rotation.apply(queries) @ self.turned(rows).swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return self.rotation.undo(weights @ self.turned(rows))


def polar_codec(
    *, bits: int = 2, level_bits: tuple[int, ...] | None = None, seed: int = 42, rounds: int = 1
) -> PolarCodec:
    """Codec for keys or values; options as in PolarOptions."""
    o = PolarOptions(bits=bits, level_bits=level_bits, seed=seed, rounds=rounds)
    return PolarCodec(o.level_bits or (o.bits + 2, o.bits, o.bits, o.bits), o.seed, o.rounds)


def polar(**options: Any) -> Transform:
    """Keys as angles and radii, values in 8 bits or as the keys; keeps every token."""
    o = PolarOptions(**options)
    key, value = (
        polar_codec(bits=bits or o.bits, level_bits=o.level_bits, seed=o.seed, rounds=o.rounds)
        for bits in (o.bits_k, o.bits_v)
    )
    return rows(key=key, value=value if o.polar_values else int8_codec(), name="polar")
