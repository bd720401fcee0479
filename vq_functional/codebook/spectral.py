"""SpectralQuant: principal axes of a layer's own keys and values, a few of them apart from the rest (Gopinath 2026).

A row is turned into the axes of its head; the first `d_eff` coordinates and
the others are two blocks, each with its own scale and scalar codebook. Keys
may add a sign sketch of what the codebook leaves over in the first block.

Differs from the paper: a random rotation inside each block evens out its
coordinates; codebooks are solved for the size of a block; scales are fitted
to the codes; sketches are orthogonal. Without calibrated axes a random
rotation stands in.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.codebook.spectral_basis import SpectralBasis, check_axes
from vq_functional.codebook.spectral_codes import BlockCodes, RestSketch, block_codes, rest_sketch
from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import SEEDS, check, check_choice, check_int, check_seed
from vq_functional.core.store import rows
from vq_functional.core.table import Table, to_table
from vq_functional.core.transform import Transform
from vq_functional.core.warn import warn_uncalibrated
from vq_functional.ops.packing import words
from vq_functional.ops.rotations import random_orthogonal
from vq_functional.ops.rows import extend_rows
from vq_functional.ops.vectors import TINY, to_dtype

SKETCH_SEED = 1_000_003  # apart from the seed of the rotations: the two must be independent
TILE = 8  # rows to a matrix product, so that a row comes out the same in any company
SCALES, CODEBOOKS, SKETCHES = ("least_squares", "rms"), ("sphere", "gaussian"), ("orthogonal", "gaussian")


@attrs.frozen(kw_only=True)
class SpectralOptions:
    """`bits` a coordinate; `bits_k` and `bits_v` for keys and values alone.

    `basis` is what `spectral_calibrate` found; without one, `key_d_eff` and
    `val_d_eff` are the sizes of the first blocks. `apply_qjl` sketches what is
    left over of keys. `model_name` is for stores of calibrated axes. `scale`,
    `codebook`, `sketch` and `fold` as in `spectral_codec`.
    """

    bits: int = 2
    key_d_eff: int = 4
    val_d_eff: int = 50
    apply_qjl: bool = True
    model_name: str = "model"
    seed: int = 42
    bits_k: int | None = None
    bits_v: int | None = None
    basis: SpectralBasis | None = None
    scale: str = "least_squares"
    codebook: str = "sphere"
    sketch: str = "orthogonal"
    fold: bool = True

    def __attrs_post_init__(self) -> None:
        for field in ("bits", "bits_k", "bits_v"):
            check_int("spectral", field, getattr(self, field), 1, 8, optional=field != "bits")
        for field in ("key_d_eff", "val_d_eff"):
            check_int("spectral", field, getattr(self, field), 1)
        check_seed("spectral", self.seed)
        check_choice("spectral", "apply_qjl", self.apply_qjl, (True, False))
        named = isinstance(self.model_name, str) and self.model_name != ""
        check(named, "spectral", "model_name", "must be a name", self.model_name)
        known = self.basis is None or isinstance(self.basis, SpectralBasis)
        check(known, "spectral", "basis", "must come from spectral_calibrate", self.basis)
        check_choice("spectral", "sketch", self.sketch, SKETCHES)
        _check_ways(self.scale, self.codebook, self.sketch, self.fold)


def _check_ways(scale: str, codebook: str, sketch: str | None, fold: bool) -> None:
    check_choice("spectral", "scale", scale, SCALES)
    check_choice("spectral", "codebook", codebook, CODEBOOKS)
    check_choice("spectral", "sketch", sketch, (*SKETCHES, None))
    check_choice("spectral", "fold", fold, (True, False))


@attrs.frozen
class SpectralCodec(Codec):
    """4 * ceil(D * bits / 32) bytes a row and two numbers of the input dtype.

    A sketch takes ceil(d_eff / 8) + 2 bytes more where d_eff > 1. Keys or values.
    """

    bits: int
    d_eff: int  # size of the first block
    seed: int
    axes: Table | None  # [H or 1, D, D]
    scale: str
    codebook: str
    sketch: str | None
    fold: bool
    name = "spectral"

    def __attrs_post_init__(self) -> None:
        check_int("spectral", "bits", self.bits, 1, 8)
        check_int("spectral", "d_eff", self.d_eff, 1)
        check_seed("spectral", self.seed)
        _check_ways(self.scale, self.codebook, self.sketch, self.fold)
        if self.axes is not None:
            check_axes("axes", self.axes.array, self.d_eff)

    @property
    def head_dim(self) -> int | None:
        """The head size that the axes are of; None where any will do."""
        return None if self.axes is None else self.axes.shape[1]

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        rule = f"must be at most the head size {dim}; `val_d_eff` is 50 unless told otherwise"
        check(self.d_eff <= dim, self.name, "d_eff", rule, self.d_eff)
        # A fitted scale leaves nothing over of a single coordinate.
        exact = self.d_eff == 1 and self.scale == "least_squares"
        sketch = None if self.sketch is None or exact else rest_sketch(self.d_eff, self.seed + SKETCH_SEED, self.sketch)
        codes = block_codes(self.bits, self.d_eff, dim, self.codebook)
        shares = mx.array([1 / self.d_eff, 1 / (dim - self.d_eff) if dim > self.d_eff else 0.0])
        mx.eval(shares)
        return SpectralCoder(dim, dtype, self._matrix(dim), codes, shares, self.scale, sketch)

    def _matrix(self, dim: int) -> mx.array:
        """What rows are multiplied with, float32 [H or 1, D, D]."""
        if self.axes is None:
            warn_uncalibrated("spectral", "without a `basis` random axes stand in for principal ones")
            matrix = random_orthogonal(dim, self.seed)[None]
            mx.eval(matrix)
            return matrix
        check(self.head_dim == dim, self.name, "axes", f"must be of head size {dim}", self.head_dim)
        axes = self.axes.array
        if not self.fold:
            return axes
        # Coordinates of unequal variance would share one scale.
        ends = {(0, self.d_eff), (self.d_eff, dim)} - {(dim, dim)}
        parts = [axes[..., a:b] @ random_orthogonal(b - a, self.seed + i) for i, (a, b) in enumerate(sorted(ends))]
        matrix = mx.concatenate(parts, axis=-1)
        mx.eval(matrix)
        return matrix


@attrs.frozen(eq=False)
class SpectralCoder(Coder):
    """x ~ U (scale of the block * level), and in the first block the sketch of what that leaves over."""

    dim: int
    dtype: mx.Dtype
    matrix: mx.array  # U, float32 [H or 1, D, D]
    codes: BlockCodes
    shares: mx.array  # float32 [2]: one over the size of each block, zero for none
    scale: str
    sketch: RestSketch | None

    def encode(self, x: mx.array) -> Rows:
        heads = self.matrix.shape[0]
        check(heads in (1, x.shape[1]), "spectral", "keys", f"must have the {heads} heads of the basis", x.shape)
        y, codes = turned(x.astype(mx.float32), self.matrix), self.codes
        # Scaled first so that squares can't overflow.
        largest = mx.maximum(mx.abs(y).max(axis=-1, keepdims=True), TINY)
        z = y / largest
        rms = mx.sqrt(codes.sums(z * z) * self.shares)
        unit = z / mx.maximum(codes.spread(rms), TINY)
        coded, levels = codes.encode(unit)
        if self.scale == "least_squares":
            rms = rms * codes.sums(unit * levels) / mx.maximum(codes.sums(levels * levels), TINY)
        scales = rms * largest
        # A row that is not finite is held as zero.
        scales = to_dtype(mx.where(mx.isfinite(scales), scales, 0), self.dtype)
        if self.sketch is None:
            return coded, scales
        scale = scales[..., :1].astype(mx.float32)
        rest = mx.where(scale > 0, (y / mx.where(scale > 0, scale, 1) - levels), 0)[..., : codes.first]
        return coded, scales, *self.sketch.encode(rest, self._half)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(turned(self._coordinates(rows), self.matrix.swapaxes(-1, -2)), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        queries = queries @ self.matrix
        products = queries @ self.codes.decode(*rows[:2]).swapaxes(-1, -2)
        if self.sketch is None:
            return products
        asked = queries[..., : self.codes.first] @ self.sketch.matrix.T
        return products + asked @ self._sketched(rows).swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return (weights @ self._coordinates(rows)) @ self.matrix.swapaxes(-1, -2)

    def empty(self, batch: int, heads: int, count: int, unit: int = 1) -> Rows:
        shape = (batch, heads, count)
        codes = mx.zeros((*shape, words(self.dim, self.codes.bits)), mx.uint32)
        scales = mx.zeros((*shape, 2), self.dtype)
        if self.sketch is None:
            return codes, scales
        return codes, scales, mx.zeros((*shape, -(-self.sketch.size // 8)), mx.uint8), mx.zeros(shape, self._half)

    @property
    def _half(self) -> mx.Dtype:
        return mx.float16 if self.dtype == mx.float32 else self.dtype

    def _coordinates(self, rows: Rows) -> mx.array:
        """Float32 [..., D] along the columns of U."""
        coordinates = self.codes.decode(*rows[:2])
        if self.sketch is None:
            return coordinates
        first = self.codes.first
        rest = self._sketched(rows) @ self.sketch.matrix
        return mx.concatenate([coordinates[..., :first] + rest, coordinates[..., first:]], axis=-1)

    def _sketched(self, rows: Rows) -> mx.array:
        """Float32 [..., m]: what the projections weigh in the first block."""
        assert self.sketch is not None
        return self.sketch.weights(*rows[2:]) * rows[1][..., :1].astype(mx.float32)


def turned(x: mx.array, matrix: mx.array) -> mx.array:
    """Float32 `x` [B, H, S, D] times `matrix` [H or 1, D, D], bit for bit the same for a row in any call."""
    batch, heads, n, dim = x.shape
    padded = extend_rows(x, -(-n // TILE) * TILE)
    tiles = padded.reshape(batch, heads, -1, TILE, dim) @ matrix[:, None]
    return tiles.reshape(padded.shape)[:, :, :n]


def spectral_codec(
    *,
    bits: int = 2,
    d_eff: int = 4,
    axes: Table | mx.array | None = None,
    seed: int = 42,
    scale: str = "least_squares",
    codebook: str = "sphere",
    sketch: str | None = "orthogonal",
    fold: bool = True,
) -> SpectralCodec:
    """Codec for keys or values, with calibrated `axes` [H or 1, D, D] or random ones.

    `d_eff`: size of the first block. `scale` "least_squares" or "rms".
    `codebook` of the "sphere" of a block's size or "gaussian". `sketch` of what
    is left over in the first block: None, "orthogonal" or "gaussian". `fold`
    rotates calibrated axes inside blocks.
    """
    return SpectralCodec(bits, d_eff, seed, to_table(axes), scale, codebook, sketch, fold)


def spectral(**options: Any) -> Transform:
    """Keys and values as two blocks of scalar codes along principal axes; keeps every token."""
    o = SpectralOptions(**options)
    key: dict[str, Any] = {"bits": o.bits_k or o.bits, "seed": o.seed, "d_eff": o.key_d_eff}
    value: dict[str, Any] = {"bits": o.bits_v or o.bits, "seed": (o.seed + 1) % SEEDS, "d_eff": o.val_d_eff}
    if o.basis is not None:
        key |= {"axes": o.basis.key_axes, "d_eff": o.basis.key_d_eff}
        value |= {"axes": o.basis.val_axes, "d_eff": o.basis.val_d_eff}
    ways: dict[str, Any] = {"scale": o.scale, "codebook": o.codebook, "fold": o.fold}
    sketch = o.sketch if o.apply_qjl else None
    keys, values = spectral_codec(sketch=sketch, **key, **ways), spectral_codec(sketch=None, **value, **ways)
    return rows(key=keys, value=values, name="spectral")
