"""NSNQuant: normalized, shifted and normalized again, rows look standard normal: one codebook fits all (2505.18231).

The shift is the mean of a chunk of rows, which are coded together. Differs
from the paper: keys come with their rotation by position; the entries of the
codebook are the means of their cells, made from a seed, and a row is read with
the length that it had.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.normal_codes import BYTE, SignedCodes, normal_codebook
from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.transform import Transform
from vq_functional.ops.affine import Groups, dequantize, quantize
from vq_functional.ops.rotations import Rotation, fixed_rotation
from vq_functional.ops.vector_codes import VectorCodes
from vq_functional.ops.vectors import norm, to_dtype
from vq_functional.quantize.blocks import Blocks

HELD_BITS = 4  # of lengths and means in double quantization
HELD_GROUP = 64  # of them share scale and zero; all of a chunk, or of a mean, where that does not divide them
FLAT = 1e-6  # a row that differs less from the mean, in units of its length, does so by rounding


@attrs.frozen(kw_only=True)
class NSNQuantOptions:
    """`bits` a number where `subvector_dim` is 8: an index for each sub-vector, and at 2 bits a sign for each number.

    `residual_length` rows are coded together; until there are so many they are
    exact. `codebook_size` entries, made from `seed`. `rescale`: rows are read
    with the length that they had, and not with that of their entries.
    `double_quantization`: lengths and means in 4 bits. `max_ctx` tokens at
    most. `bits_k` and `bits_v` override `bits` for keys and for values.
    """

    bits: int = 2
    residual_length: int = 64
    codebook_size: int = 256
    subvector_dim: int = 8
    seed: int = 1234
    max_ctx: int = 8192
    double_quantization: bool = False
    rescale: bool = True
    bits_k: int | None = None
    bits_v: int | None = None

    def __attrs_post_init__(self) -> None:
        check_choice("nsnquant", "bits", self.bits, (1, 2))
        check_int("nsnquant", "residual_length", self.residual_length, 2)
        check_int("nsnquant", "codebook_size", self.codebook_size, 2, 2**BYTE)
        check_int("nsnquant", "subvector_dim", self.subvector_dim, 1)
        check_seed("nsnquant", self.seed)
        check_int("nsnquant", "max_ctx", self.max_ctx, 1)
        check_choice("nsnquant", "double_quantization", self.double_quantization, (True, False))
        check_choice("nsnquant", "rescale", self.rescale, (True, False))
        for field, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            check_choice("nsnquant", field, bits, (None, 1, 2))


@attrs.frozen
class NSNQuantCodec(Codec):
    """D / size + (D / 8 at 2 bits) + 4 + 2 D / chunk bytes a row of 16-bit numbers; keys or values."""

    bits: int
    chunk: int
    count: int
    size: int
    seed: int
    double: bool
    rescale: bool
    name = "nsnquant"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.chunk

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.chunk

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        check(dim % self.size == 0, self.name, "head_dim", f"must be a multiple of {self.size}", dim)
        codebook = normal_codebook(self.size, self.count, self.seed, self.bits == 2)
        codes = SignedCodes(codebook, dim) if self.bits == 2 else VectorCodes(codebook, BYTE, dim)
        return NSNQuantCoder(dim, dtype, self.chunk, fixed_rotation(dim, self.seed), codes, self.double, self.rescale)


@attrs.frozen(eq=False)
class NSNQuantCoder(Coder):
    """x ~ s1 (s2 P^T y + o), with y what the codes stand for.

    Codes uint8 [B, H, S, ...], s1 and s2 [B, H, S], o [B, H, S / chunk, D]; with `double`
    each of these as codes, scales and zeros [B, H, S / chunk, ...].
    """

    dim: int
    dtype: mx.Dtype
    chunk: int
    rotation: Rotation
    codes: SignedCodes | VectorCodes
    double: bool
    rescale: bool

    def encode(self, x: mx.array) -> Rows:
        x = mx.where(mx.isfinite(x), x, 0).astype(mx.float32)
        x = x.reshape(*x.shape[:2], -1, self.chunk, self.dim)
        # Each step goes on from the numbers of the one before as they are held, so that their rounding is no error.
        lengths = self._held(self._size(x))
        s1 = self._read(lengths, self.chunk)[..., None]
        x = mx.where(s1 > 0, x / mx.where(s1 > 0, s1, 1), 0)
        mean = self._held(x.sum(axis=3) * (1 / self.chunk))
        x = x - self._read(mean, self.dim)[..., None, :]
        s2 = self._size(x)
        codes = self.codes.encode(self.rotation.apply(x / mx.maximum(s2, FLAT)[..., None]).flatten(2, 3))
        if self.rescale:
            s2 = s2 / mx.maximum(self._size(self.codes.decode(codes)).reshape(s2.shape), FLAT)
        return *codes, *self._by_row(lengths), *self._by_row(self._held(s2)), *mean

    def decode(self, rows: Rows) -> mx.array:
        codes, s1, s2, mean = self._split(rows)
        z = self.rotation.undo(self.codes.decode(codes)).reshape(*s1.shape, self.dim)
        x = s1[..., None] * (s2[..., None] * z + mean[..., None, :])
        return to_dtype(x.flatten(2, 3), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        codes, s1, s2, mean = self._split(rows)
        shape = (*queries.shape[:3], *s1.shape[2:])
        turned = self.codes.dot(self.rotation.apply(queries), codes).reshape(shape)
        common = (queries @ mean.swapaxes(-1, -2))[..., None]
        return (s1[:, :, None] * (s2[:, :, None] * turned + common)).flatten(3)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        codes, s1, s2, mean = self._split(rows)
        weights = weights.reshape(*weights.shape[:3], *s1.shape[2:]) * s1[:, :, None]
        turned = self.codes.mix((weights * s2[:, :, None]).flatten(3), codes)
        return self.rotation.undo(turned) + weights.sum(axis=-1) @ mean

    def _size(self, x: mx.array) -> mx.array:
        """Root mean square of the numbers of each row."""
        return norm(x)[..., 0] * self.dim**-0.5

    def _held(self, x: mx.array) -> Rows:
        """Float32 `x` [B, H, chunks, n] as it is held."""
        if not self.double:
            return (to_dtype(x, self.dtype),)
        count = x.shape[-1]
        return quantize(x, HELD_BITS, HELD_GROUP if count % HELD_GROUP == 0 else count, self.dtype)

    def _by_row(self, held: Rows) -> Rows:
        return held if self.double else (held[0].flatten(2),)

    def _read(self, held: Rows, count: int) -> mx.array:
        """Float32 [B, H, chunks, count] of what `_held` gave."""
        if not self.double:
            return held[0].astype(mx.float32).reshape(*held[0].shape[:2], -1, count)
        groups = Groups(*held)
        return dequantize(groups, HELD_BITS, count // groups.scales.shape[-1])

    def _split(self, rows: Rows) -> tuple[Rows, mx.array, mx.array, mx.array]:
        """Codes; both lengths [B, H, chunks, chunk] and the means [B, H, chunks, D] in float32."""
        step = 3 if self.double else 1
        codes, numbers = rows[: -3 * step], rows[-3 * step :]
        s1, s2 = (self._read(numbers[i : i + step], self.chunk) for i in (0, step))
        return codes, s1, s2, self._read(numbers[2 * step :], self.dim)


def nsnquant_codec(
    *,
    bits: int = 2,
    residual_length: int = 64,
    codebook_size: int = 256,
    subvector_dim: int = 8,
    seed: int = 1234,
    double_quantization: bool = False,
    rescale: bool = True,
) -> NSNQuantCodec:
    """Codec for keys or values of `blocks`; options as in NSNQuantOptions."""
    o = NSNQuantOptions(
        bits=bits,
        residual_length=residual_length,
        codebook_size=codebook_size,
        subvector_dim=subvector_dim,
        seed=seed,
        double_quantization=double_quantization,
        rescale=rescale,
    )
    return NSNQuantCodec(
        o.bits, o.residual_length, o.codebook_size, o.subvector_dim, o.seed, o.double_quantization, o.rescale
    )


def nsnquant(**options: Any) -> Transform:
    """Keys and values in chunks of codes, the rows of the open chunk exact; keeps every token."""
    o = NSNQuantOptions(**options)
    own = {"max_ctx", "bits_k", "bits_v"}
    shared = attrs.asdict(o, filter=lambda field, _: field.name not in own)
    key, value = (nsnquant_codec(**shared | {"bits": bits or o.bits}) for bits in (o.bits_k, o.bits_v))
    return Blocks("nsnquant", key, value, max_ctx=o.max_ctx)
