"""Shared factors: one latent a token for the heads of several layers, and for each head its part of the axes."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.core.table import Table
from vq_functional.crosslayer.layer_coder import StackCoder, heads_of
from vq_functional.lowrank.head_groups import HeadGroups, principal_basis
from vq_functional.lowrank.latents import BLOCK, Latents, projected
from vq_functional.ops.low_rank import shrink
from vq_functional.ops.ranges import from_mean, mended
from vq_functional.ops.rotations import Rotation, random_rotation
from vq_functional.ops.vectors import TINY, to_dtype

LEAST_SPREAD = 0.05  # of the largest one: later rows may spread more along an axis than the first ones did
EXACT = 16  # bits of latents that are held as they are


@attrs.frozen
class SharedFactorsCodec(Codec):
    """Of n heads in all, R * bits / (8 n) + 4 R / (group_size n) bytes a row and head, at 16 bits 2 R / n.

    R is `rank` (None: half of `n_fit`, at most half of the n D features), at most
    all features, rounded up to whole groups of components. Once a head
    2 D (R + 1), and 4 R for all, unless basis, mean and spread are `given`.
    """

    rank: int | None
    bits: int
    group_size: int
    centred: bool
    rotate: bool
    n_fit: int
    n_sink: int
    layers: int
    given: tuple[Table, Table, Table] | None
    name = "shared_factors"
    indivisible = "a latent is of all heads of a layer"
    unit = BLOCK

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return 0 if self.given else self.n_fit

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        coder = SharedFactors(dim, dtype, self.layers, self, ())
        if self.given is None:
            return coder
        basis, mean, spread = (table.array[None] for table in self.given)
        _, _, of, width = basis.shape
        check(of == dim, "xkv", "basis", f"must be of head size {dim}", of)
        whole = width % self.group_size == 0
        check(whole, "xkv", "basis", f"must have whole groups of `group_quant_size` = {self.group_size} axes", width)
        tables = coder.as_tables(basis, mean, spread)
        mx.eval(tables)
        return attrs.evolve(coder, given=tables)

    def rank_of(self, features: int) -> int:
        """Components of rows with so many features."""
        wanted = min(-(-self.n_fit // 2), -(-features // 2)) if self.rank is None else min(self.rank, features)
        return -(-wanted // self.group_size) * self.group_size


@attrs.frozen(eq=False)
class SharedFactors(StackCoder):
    """a = (x - mean) V / s Q and x ~ a Q^T s V^T + mean for the joined rows x of all heads; Q a fixed rotation.

    Arrays of `Latents` [B, 1, S, ...]. Tables: each head's rows of V in `dtype`
    [B, M * H, D, R], the mean [B, M * H, D], and s float32 [B, 1, R].
    """

    dim: int
    dtype: mx.Dtype
    layers: int
    codec: SharedFactorsCodec
    given: Rows  # tables that no sequence has of its own, B = 1

    @property
    def owners(self) -> tuple[str, ...]:
        latents = ("first",) * (3 if self._coded else 1)
        return latents if self.given else (*latents, "all", "all", "first")

    def heads(self, rows: Rows) -> int:
        """KV heads of `rows`, whose arrays of latents have one for all."""
        return self._opened(rows)[1].shape[1]

    def tables(self, x: mx.array) -> Rows:
        if self.given:
            return ()
        first = mended(x[:, :, min(self.codec.n_sink, x.shape[2] - 1) :].astype(mx.float32))
        groups = HeadGroups(x.shape[1], 1)
        rank = self.codec.rank_of(x.shape[1] * self.dim)
        if not self.codec.centred:  # rows and their opposites have no mean
            first = mx.concatenate([first, -first], axis=2)
        basis, mean = principal_basis(first, groups, rank)
        spread = _spread(groups.joined(from_mean(first, mean[:, :, None])), groups.stacked(basis))
        return self.as_tables(basis, mean, spread)

    def as_tables(self, basis: mx.array, mean: mx.array, spread: mx.array) -> Rows:
        """Tables of float32 axes, mean, and `spread` [B, R] along the axes."""
        share = spread / mx.maximum(spread.max(axis=-1, keepdims=True), TINY)
        # The square root goes to either side, so that the errors of equal steps are least in sum. No scale is below 1,
        # so that none makes a latent longer than its row.
        scale = mx.sqrt(mx.maximum(share / LEAST_SPREAD, 1)) if self._coded else mx.ones_like(share)
        scale = scale / shrink(basis.shape[1] * self.dim, self.dtype)
        return basis.astype(self.dtype), to_dtype(mean, self.dtype), scale[:, None]

    def encode(self, x: mx.array) -> Rows:
        return self.encode_by(x, ())

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        _, basis, mean, scale = self._opened(tables)
        heads, groups = basis.shape[1], HeadGroups(basis.shape[1], 1)
        check(x.shape[1] == heads, "xkv", "basis", f"must be of {x.shape[1]} heads", heads)
        onto = groups.stacked(self._turned(basis / scale[:, None]))
        return self._latents(basis).encode(projected(groups.joined(from_mean(x, mean[:, :, None])), onto))

    def decode_layer(self, rows: Rows, layer: int) -> mx.array:
        latents, basis, mean, scale = self._opened(rows, layer)
        groups = HeadGroups(basis.shape[1], 1)
        back = groups.stacked(self._turned(basis * scale[:, None]))
        joined = projected(self._latents(basis).decode(latents), back.swapaxes(-1, -2))
        return to_dtype(groups.parted(joined) + mean[:, :, None], self.dtype)

    def dot_layer(self, queries: mx.array, rows: Rows, layer: int) -> mx.array:
        latents, basis, mean, scale = self._opened(rows, layer)
        groups = HeadGroups(basis.shape[1], 1)
        asked = groups.stacked(self._turned(queries @ basis * scale[:, None]))
        scores = groups.unstacked(self._latents(basis).dot(asked, latents))
        return scores + queries @ mean[..., None]

    def mix_layer(self, weights: mx.array, rows: Rows, layer: int) -> mx.array:
        latents, basis, mean, scale = self._opened(rows, layer)
        groups = HeadGroups(basis.shape[1], 1)
        mixed = self._latents(basis).mix(groups.stacked(weights), latents)
        mixed = self._rotation(basis).undo(mixed) if self._rotated else mixed
        along = groups.unstacked(mixed * scale[:, None])
        return along @ basis.swapaxes(-1, -2) + weights.sum(axis=-1, keepdims=True) * mean[:, :, None]

    @property
    def _coded(self) -> bool:
        return self.codec.bits < EXACT

    @property
    def _rotated(self) -> bool:
        return self._coded and self.codec.rotate

    def _turned(self, x: mx.array) -> mx.array:
        """Components [..., R] of the rows of `x` after the rotation."""
        return self._rotation(x).apply(x) if self._rotated else x

    def _rotation(self, x: mx.array) -> Rotation:
        return random_rotation(x.shape[-1], seed=0)

    def _latents(self, basis: mx.array) -> Latents:
        bits = self.codec.bits if self._coded else None
        return Latents(((basis.shape[-1], bits),), self.codec.group_size, self.dtype)

    def _opened(self, rows: Rows, layer: int | None = None) -> tuple[Rows, mx.array, mx.array, mx.array]:
        """Arrays of the latents; basis float32 [B, H, D, R] and mean [B, H, D] of a layer or all; s [B, 1, R]."""
        latents, (basis, mean, scale) = (rows, self.given) if self.given else (rows[:-3], rows[-3:])
        if layer is not None:
            basis, mean = (heads_of(x, layer, self.layers) for x in (basis, mean))
        return latents, basis.astype(mx.float32), mean.astype(mx.float32), scale


def _spread(rows: mx.array, axes: mx.array) -> mx.array:
    """Root mean squares [B, R], up to a factor, of joined `rows` [B, 1, S, F] along `axes` [B, 1, F, R]."""
    size = mx.maximum(mx.abs(rows).max(axis=(1, 2, 3), keepdims=True), TINY)
    return mx.sqrt(mx.square((rows / size) @ axes).sum(axis=2))[:, 0]
