"""VecInfer: product vector quantization of smoothed and rotated keys, and of values (arXiv 2510.06175).

A row is cut into sub-vectors and each becomes the index of its nearest
codebook entry. Keys are divided by a factor a channel and rotated first, which
evens their channels out; queries are multiplied and rotated alike.

Differs from the paper: without a calibrated codebook a row is rotated at
random and divided by its root mean square, so that one codebook for normal
numbers serves every layer of every model.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.store import rows
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.core.transform import Transform
from vq_functional.core.warn import warn_uncalibrated
from vq_functional.ops.kmeans import Floats, kmeans, on_host
from vq_functional.ops.rotations import Rotation, fixed_rotation, random_rotation
from vq_functional.ops.vector_codes import Codebook, VectorCodes, gaussian_codebook, has_gaussian
from vq_functional.ops.vectors import TINY, norm, scaled, to_dtype

FLOOR = 1e-4  # of smooth factors
SIDES = ("key", "value")


def table_field() -> Any:
    """An option that holds an array."""
    return attrs.field(default=None, converter=to_table)


@attrs.frozen(kw_only=True)
class VecInferOptions:
    """Sub-vectors of `key_sub_dim` and `value_sub_dim` numbers take `key_codebook_bits` and `value_codebook_bits`.

    What `vecinfer_calibrate` finds: `smooth_factors` [H, D] or [D] of keys,
    `key_codebook` and `value_codebook` [2**bits, size]. `seed` of the rotation
    where a codebook is missing.
    """

    key_sub_dim: int = 4
    value_sub_dim: int = 8
    key_codebook_bits: int = 12
    value_codebook_bits: int = 8
    smooth_factors: Table | None = table_field()
    key_codebook: Table | None = table_field()
    value_codebook: Table | None = table_field()
    seed: int = 42

    def __attrs_post_init__(self) -> None:
        check_seed("vecinfer", self.seed)
        for side in SIDES:
            size, bits, table = (getattr(self, f"{side}_{what}") for what in ("sub_dim", "codebook_bits", "codebook"))
            check_int("vecinfer", f"{side}_sub_dim", size, 1)
            check_int("vecinfer", f"{side}_codebook_bits", bits, 1, 16)
            if table is not None:
                check_table("vecinfer", f"{side}_codebook", table, (2**bits, size))
            known = table is not None or has_gaussian(size, bits)
            rule = f"must be at most 8 for sub-vectors of {size} numbers without a codebook"
            check(known, "vecinfer", f"{side}_codebook_bits", rule, bits)
        if self.smooth_factors is not None:
            check_table("vecinfer", "smooth_factors", self.smooth_factors, (None,), (None, None))
            least = self.smooth_factors.array.min().item() if 0 not in self.smooth_factors.shape else 0
            check(least > 0, "vecinfer", "smooth_factors", "must be positive", least)  # type: ignore[operator]


@attrs.frozen
class VecInferCodec(Codec):
    """4 * ceil(D / sub_dim * bits / 32) bytes a row, and 2 without a codebook; keys or values.

    `side` "value": with a codebook, a row is cut as it comes. `smooth` is for keys.
    """

    side: str
    sub_dim: int
    bits: int
    seed: int
    codebook: Table | None = None
    smooth: Table | None = None
    name = "vecinfer"

    def bind(self, dim: int, dtype: mx.Dtype) -> "VecInferCoder":
        check(dim % self.sub_dim == 0, self.name, "head_dim", f"must be a multiple of {self.sub_dim}", dim)
        codebook = (
            gaussian_codebook(self.sub_dim, self.bits) if self.codebook is None else Codebook(self.codebook.array)
        )
        codes, free = VectorCodes(codebook, self.bits, dim), self.codebook is None
        return VecInferCoder(dim, dtype, codes, self._rotation(dim), self._factors(dim), free)

    def _rotation(self, dim: int) -> Rotation | None:
        if self.codebook is not None and self.side == "value":
            return None
        return random_rotation(dim, self.seed) if self.codebook is None else fixed_rotation(dim)

    def _factors(self, dim: int) -> mx.array | None:
        """Float32 [H or 1, 1, D]."""
        if self.smooth is None:
            return None
        check(self.smooth.shape[-1] == dim, self.name, "smooth_factors", f"must be [..., {dim}]", self.smooth.shape)
        factors = self.smooth.array.reshape(-1, 1, dim)
        mx.eval(factors)
        return factors


@attrs.frozen(eq=False)
class VecInferCoder(Coder):
    """x ~ factors * rotation^T (entries), or for `free` rows their root mean square times that."""

    dim: int
    dtype: mx.Dtype
    codes: VectorCodes
    rotation: Rotation | None
    factors: mx.array | None
    free: bool

    def encode(self, x: mx.array) -> Rows:
        x = mx.where(mx.isfinite(x), x, 0).astype(mx.float32)
        if self.factors is not None:
            heads = self.factors.shape[0]
            check(heads in (1, x.shape[1]), "vecinfer", "smooth_factors", f"must have 1 or {x.shape[1]} heads", heads)
            x = x / self.factors
        y = x if self.rotation is None else self.rotation.apply(x)
        if not self.free:
            return self.codes.encode(y)
        gain = norm(y) * self.dim**-0.5
        return (*self.codes.encode(y / mx.maximum(gain, TINY)), gain[..., 0].astype(mx.bfloat16))

    def decode(self, rows: Rows) -> mx.array:
        codes, gain = self._parted(rows)
        x = self._undone(self.codes.decode(codes))
        return to_dtype(x, self.dtype) if gain is None else scaled(x, gain, self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        codes, gain = self._parted(rows)
        queries = queries if self.factors is None else queries * self.factors
        turned = queries if self.rotation is None else self.rotation.apply(queries)
        scores = self.codes.dot(turned, codes)
        return scores if gain is None else scores * gain[:, :, None]

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        codes, gain = self._parted(rows)
        return self._undone(self.codes.mix(weights if gain is None else weights * gain[:, :, None], codes))

    def _undone(self, y: mx.array) -> mx.array:
        x = y if self.rotation is None else self.rotation.undo(y)
        return x if self.factors is None else x * self.factors

    def _parted(self, rows: Rows) -> tuple[Rows, mx.array | None]:
        """Codes, and float32 root mean squares [B, H, S] where there are any."""
        return (rows[:-1], rows[-1].astype(mx.float32)) if self.free else (rows, None)


@attrs.frozen(eq=False)
class VecInferTables:
    """What `vecinfer_calibrate` finds for one layer, under the names of the options."""

    smooth_factors: mx.array  # float32 [H, D]
    key_codebook: mx.array  # float32 [2**bits, key_sub_dim]
    value_codebook: mx.array  # float32 [2**bits, value_sub_dim]

    def arrays(self) -> dict[str, mx.array]:
        """The arrays by name: options of `vecinfer`, and what a file can hold."""
        return attrs.asdict(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "VecInferTables":
        """Inverse of `arrays`."""
        return cls(**arrays)


def vecinfer_calibrate(keys: mx.array, values: mx.array, *, rounds: int = 30, **options: Any) -> VecInferTables:
    """Smooth factors and codebooks of one layer from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv].

    Keys as the cache gets them; options as in VecInferOptions. `rounds` of
    k-means. Rows with NaN or infinities are left out. Raises
    QuantizerConfigError for other shapes.
    """
    o = VecInferOptions(**options)
    check_int("vecinfer_calibrate", "rounds", rounds, 1)
    for field, x, size in (("keys", keys, o.key_sub_dim), ("values", values, o.value_sub_dim)):
        fits = x.ndim == 3 and 0 not in x.shape and x.shape[2] % size == 0
        check(fits, "vecinfer_calibrate", field, f"must be [N, H, multiple of {size}]", x.shape)
    if o.smooth_factors is None:
        largest = np.abs(np.nan_to_num(on_host(keys), nan=0, posinf=0, neginf=0)).max(axis=0)
        factors = mx.array(np.maximum(np.sqrt(largest), FLOOR))
    else:
        factors = o.smooth_factors.array
    turned = fixed_rotation(keys.shape[2]).apply(keys.astype(mx.float32) / factors)
    key = kmeans(_cut(turned, o.key_sub_dim), 2**o.key_codebook_bits, rounds=rounds, seed=o.seed)
    value = kmeans(_cut(values, o.value_sub_dim), 2**o.value_codebook_bits, rounds=rounds, seed=o.seed)
    return VecInferTables(factors, mx.array(key), mx.array(value))


def _cut(x: mx.array, size: int) -> Floats:
    return on_host(x).reshape(-1, size)


def vecinfer_codec(*, side: str = "key", **options: Any) -> VecInferCodec:
    """Codec for keys or, with `side="value"`, for values; options as in VecInferOptions."""
    check_choice("vecinfer", "side", side, SIDES)
    o = VecInferOptions(**options)
    if side == "value":
        return VecInferCodec(side, o.value_sub_dim, o.value_codebook_bits, o.seed, o.value_codebook)
    return VecInferCodec(side, o.key_sub_dim, o.key_codebook_bits, o.seed, o.key_codebook, o.smooth_factors)


def vecinfer(**options: Any) -> Transform:
    """Keys and values as indices of codebook entries; keeps every token. Warns where a codebook is missing."""
    key, value = (vecinfer_codec(side=side, **options) for side in SIDES)
    if key.codebook is None or value.codebook is None:
        warn_uncalibrated("vecinfer", "without codebooks ones for normal numbers stand in")
    return rows(key=key, value=value, name="vecinfer")
