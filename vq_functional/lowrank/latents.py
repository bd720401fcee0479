"""Latents: what is left of a row after a projection, in codes of a width for each section of its components."""

from typing import TypeAlias

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.table import Table
from vq_functional.lowrank.head_groups import HeadGroups, principal_basis
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.low_rank import shrink
from vq_functional.ops.ranges import from_mean, mended
from vq_functional.ops.rotations import random_rotation
from vq_functional.ops.vectors import to_dtype

Sections: TypeAlias = tuple[tuple[int, int | None], ...]  # components and their bits; None: as they are

BLOCK = 32  # rows that are projected at once: one size for all, so that rounding is the same however they came


def two_widths(rank: int, hi: int, lo: int, hi_fraction: float, group: int) -> Sections:
    """Sections of `rank` components, of which the share `hi_fraction` has `hi` bits and the rest `lo`.

    Both are whole groups, at least one each unless the share is 0 or 1 or there is but one: that one has `hi`.
    """
    first = round(rank * hi_fraction / group) * group
    if 0 < hi_fraction < 1:
        first = max(min(first, rank - group), min(group, rank))
    if hi == lo:
        return ((rank, hi),)
    return tuple((count, bits) for count, bits in ((first, hi), (rank - first, lo)) if count)


@attrs.frozen
class Latents:
    """Latents [B, G, S, R] of G groups of heads.

    For each section codes uint32 [B, G, S, words], scales and zeros [B, G, S, groups], affine along the
    components of one token; or what it holds as it is, [B, G, S, components].
    """

    sections: Sections
    group: int
    dtype: mx.Dtype

    @property
    def rank(self) -> int:
        """R."""
        return sum(count for count, _ in self.sections)

    def encode(self, latent: mx.array) -> Rows:
        """Arrays of float32 `latent` [B, G, S, R]."""
        rows: list[mx.array] = []
        largest = mx.finfo(self.dtype).max
        for (_, bits), part in zip(self.sections, self._split(latent), strict=True):
            if bits is None:
                rows.append(to_dtype(part, self.dtype))
            else:
                rows += quantize(mx.clip(part, -largest, largest), bits, self.group, self.dtype)
        return tuple(rows)

    def decode(self, rows: Rows) -> mx.array:
        """Float32 [B, G, S, R]."""
        return _joined([self._numbers(bits, held) for bits, held in self._held(rows)])

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        """Inner products float32 [B, G, M, S] of float32 `queries` [B, G, M, R] with the latents."""
        total = mx.array(0.0)
        for (bits, held), part in zip(self._held(rows), self._split(queries), strict=True):
            if bits is None:
                total = total + part @ held[0].astype(mx.float32).swapaxes(-1, -2)
            else:
                total = total + matmul(part, Groups(*held), bits, self.group, transpose=True)
        return total

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        """Weighted sums float32 [B, G, M, R] of the latents; `weights` float32 [B, G, M, S]."""
        sums = []
        for bits, held in self._held(rows):
            if bits is None:
                sums.append(weights @ held[0].astype(mx.float32))
            else:
                sums.append(matmul(weights, Groups(*held), bits, self.group, transpose=False))
        return _joined(sums)

    def _split(self, x: mx.array) -> list[mx.array]:
        """The components [..., R] of each section."""
        parts, start = [], 0
        for count, _ in self.sections:
            parts.append(x if count == x.shape[-1] else x[..., start : start + count])
            start += count
        return parts

    def _held(self, rows: Rows) -> list[tuple[int | None, Rows]]:
        """Bits and arrays of each section."""
        found, start = [], 0
        for _, bits in self.sections:
            end = start + (1 if bits is None else 3)
            found.append((bits, rows[start:end]))
            start = end
        return found

    def _numbers(self, bits: int | None, held: Rows) -> mx.array:
        return held[0].astype(mx.float32) if bits is None else dequantize(Groups(*held), bits, self.group)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


@attrs.frozen
class LatentRowsCodec(Codec):
    """Of G groups of n heads (R_hi * hi + R_lo * lo) / (8 n) + 4 R / (group_size n) bytes a row and head.

    R is `rank` a head, rounded up to whole groups of components; without
    `widths` (bits of the leading and the other components, and the share of the
    former) a row takes 2 R / n. Once a head 2 D (R + 1), unless basis and mean
    are `given`.
    """

    rank: int | None
    n_head_groups: int
    widths: tuple[int, int, float] | None
    group_size: int
    mixing: bool | None
    n_fit: int
    n_sink: int
    given: tuple[Table, Table] | None
    shard: Shard = WHOLE
    name = "latent_rows"
    unit = BLOCK

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return 0 if self.given else self.n_fit

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        coder = LatentRows(dim, dtype, self, ())
        if self.given is None:
            self.rank_of(1, dim)
            return coder
        basis, mean = (table.array[None] for table in self.given)
        _, _, of, width = basis.shape
        check(of == dim, "palu", "basis", f"must be of head size {dim}", of)
        whole = width % self.group_size == 0
        check(whole, "palu", "basis", f"must have whole groups of `group_size` = {self.group_size} axes", width)
        tables = coder.as_tables(basis, mean)
        mx.eval(tables)
        return attrs.evolve(coder, given=tables)

    def rank_of(self, heads: int, dim: int) -> int:
        """Components of a group of `heads` heads."""
        rank = -(-dim // 2) if self.rank is None else self.rank
        check(rank <= dim, "palu", "rank", f"must be at most the head size {dim}", rank)
        return -(-heads * rank // self.group_size) * self.group_size

    def sections(self, rank: int) -> Sections:
        """Widths of `rank` components."""
        return ((rank, None),) if self.widths is None else two_widths(rank, *self.widths, self.group_size)


@attrs.frozen(eq=False)
class LatentRows(Coder):
    """h = (x - mean) V and x ~ h V^T + mean for the joined rows x of a group of heads.

    Arrays of `Latents`; tables: each head's rows of V [B, H, D, R] and of the mean [B, H, D], in `dtype`.
    """

    dim: int
    dtype: mx.Dtype
    codec: LatentRowsCodec
    given: Rows  # tables that no sequence has of its own, B = 1

    def heads(self, rows: Rows) -> int:
        """KV heads of `rows`, whose arrays have groups at axis 1."""
        return self._opened(rows)[1].shape[1]

    def tables(self, x: mx.array) -> Rows:
        if self.given:
            return ()
        groups = self._groups(x.shape[1])
        first = mended(x[:, :, min(self.codec.n_sink, x.shape[2] - 1) :].astype(mx.float32))
        return self.as_tables(*principal_basis(first, groups, self.codec.rank_of(groups.size, self.dim)))

    def as_tables(self, basis: mx.array, mean: mx.array) -> Rows:
        """Tables of float32 axes and mean."""
        sections = self.codec.sections(basis.shape[-1])
        if self.codec.widths and (self.codec.mixing or (self.codec.mixing is None and len(sections) == 1)):
            basis = _mixed(basis, sections)
        return basis.astype(self.dtype), to_dtype(mean, self.dtype)

    def encode(self, x: mx.array) -> Rows:
        return self.encode_by(x, ())

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        _, basis, mean = self._opened(tables)
        heads = basis.shape[1]
        check(x.shape[1] == heads, "palu", "basis", f"must be of {x.shape[1]} heads", heads)
        groups = self._groups(heads)
        onto = groups.stacked(basis * self._shrink(groups))
        return self._latents(basis).encode(projected(groups.joined(from_mean(x, mean)), onto))

    def decode(self, rows: Rows) -> mx.array:
        latents, basis, mean = self._opened(rows)
        groups = self._groups(basis.shape[1])
        numbers = self._latents(basis).decode(latents)
        joined = projected(numbers, groups.stacked(basis / self._shrink(groups)).swapaxes(-1, -2))
        return to_dtype(groups.parted(joined) + mean, self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        latents, basis, mean = self._opened(rows)
        groups = self._groups(basis.shape[1])
        asked = groups.stacked(queries @ (basis / self._shrink(groups)))
        return groups.unstacked(self._latents(basis).dot(asked, latents)) + queries @ mean.swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        latents, basis, mean = self._opened(rows)
        groups = self._groups(basis.shape[1])
        mixed = groups.unstacked(self._latents(basis).mix(groups.stacked(weights), latents))
        return mixed @ (basis / self._shrink(groups)).swapaxes(-1, -2) + weights.sum(axis=-1, keepdims=True) * mean

    def _shrink(self, groups: HeadGroups) -> float:
        return shrink(groups.size * self.dim, self.dtype)

    def _groups(self, heads: int) -> HeadGroups:
        return HeadGroups.of(heads * self.codec.shard.size, self.codec.n_head_groups).part(self.codec.shard)

    def _latents(self, basis: mx.array) -> Latents:
        return Latents(self.codec.sections(basis.shape[-1]), self.codec.group_size, self.dtype)

    def _opened(self, rows: Rows) -> tuple[Rows, mx.array, mx.array]:
        """Arrays of the latents; basis float32 [B, H, D, R]; mean float32 [B, H, 1, D]."""
        latents, (basis, mean) = (rows, self.given) if self.given else (rows[:-2], rows[-2:])
        return latents, basis.astype(mx.float32), mean.astype(mx.float32)[:, :, None]


def projected(x: mx.array, matrix: mx.array) -> mx.array:
    """`x` [B, G, S, N] times `matrix` [B, G, N, M], BLOCK rows at a time."""
    blocks = x.reshape(*x.shape[:2], -1, BLOCK, x.shape[-1])
    return (blocks @ matrix[:, :, None]).flatten(2, 3)


def _mixed(basis: mx.array, sections: Sections) -> mx.array:
    """Axes [B, H, D, R] turned at random within each section."""
    parts, start = [], 0
    for count, _ in sections:
        turned = random_rotation(count, seed=0).undo(mx.eye(count))[None, None]  # each head by itself
        parts.append(basis[..., start : start + count] @ turned)
        start += count
    return mx.concatenate(parts, axis=-1)
