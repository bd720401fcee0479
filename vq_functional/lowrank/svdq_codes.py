"""Keys as latents along principal axes: every latent channel in groups along tokens, the first ones in more bits."""

import math

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.lowrank.svdq_basis import LIMIT, Plan, SVDqBasis, fitted_basis
from vq_functional.ops.affine import Groups, dequantize, matmul, quantize
from vq_functional.ops.low_rank import shrink
from vq_functional.ops.packing import WORD, pack
from vq_functional.ops.ranges import mended
from vq_functional.ops.rope import Rope
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.positioned import PositionedCoder

ONE_BIT = ("cond_mean", "minmax")


@attrs.frozen
class LatentChannelsCodec(Codec):
    """Of r' channels with bits sum(bits) / 8 + 4 r' / group_size bytes a row.

    Once a head 2 D r' + 4 D, unless a basis is `given`. With `rope` keys are held
    as they were before the rotation: 4 bytes a unit for its position, in all
    heads together.
    """

    rank: int | None
    schedule: tuple[int, ...]
    group_size: int
    one_bit: str
    n_fit: int
    n_sink: int
    rope: Rope | None
    given: SVDqBasis | None
    name = "latent_channels"
    keys_only = True
    mixes = True

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups that fill whole words at any width."""
        return math.lcm(self.group_size, WORD)

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return 0 if self.given else self.n_fit

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        if self.given is not None:
            of = self.given.basis.shape[1]
            check(of == dim, "svdq", "basis", f"must be of head size {dim}", of)
        if self.rope is not None:
            check(self.rope.dims <= dim, "svdq", "rope", f"must not turn more than {dim} numbers", self.rope.dims)
        rank = self.rank or (self.given.rank if self.given else dim)
        check(rank <= dim, "svdq", "rank", f"must be at most the head size {dim}", rank)
        coder = LatentChannels(dim, dtype, self, Plan.of(rank, self.schedule), ())
        if self.given is None:
            return coder
        tables = coder.as_tables(self.given.basis.array[None], self.given.mean.array[None])
        mx.eval(tables)
        return attrs.evolve(coder, given=tables)


@attrs.frozen(eq=False)
class LatentChannels(PositionedCoder):
    """l = (k - mean) V and k ~ l V^T + mean.

    Codes uint32 [B, H, channels, S * bits / 32] of each section, then scales and
    zeros [B, H, r', S / group] of all, of l times `_shrink`; with `rope` the
    positions int32 [B, 1, S / unit] of first rows. Tables: V [B, H, D, r'] and
    the mean float32 [B, H, D].
    """

    dim: int
    dtype: mx.Dtype
    codec: LatentChannelsCodec
    plan: Plan
    given: Rows  # tables that no sequence has of its own, B = 1

    @property
    def axes(self) -> tuple[int, ...]:
        return (3,) * (len(self.plan.sections) + 2) + (2,) * bool(self.codec.rope)

    def tables(self, x: mx.array) -> Rows:
        if self.given:
            return ()
        first = min(self.codec.n_sink, x.shape[2] - 1)
        rows = self._before_rope(finite(x[:, :, first:]), mx.arange(first, x.shape[2]))
        return self.as_tables(*fitted_basis(rows))

    def as_tables(self, basis: mx.array, mean: mx.array) -> Rows:
        """Tables of float32 axes and mean."""
        return basis[..., mx.array(self.plan.axes)].astype(self.dtype), mean

    def encode(self, x: mx.array) -> Rows:
        return self.encode_by(x, ())

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        return self.encode_at(x, tables, mx.broadcast_to(mx.arange(x.shape[2]), (x.shape[0], x.shape[2])))

    def encode_at(self, x: mx.array, tables: Rows, position: mx.array) -> Rows:
        _, basis, mean = self._opened(tables)
        heads = basis.shape[1]
        check(x.shape[1] == heads, "svdq", "basis", f"must be of {x.shape[1]} heads", heads)
        x = self._before_rope(finite(self._units(x).flatten(1, 2)).reshape(x.shape), position)
        latents, largest = self._by_unit(x - mean, basis * self._shrink), mx.finfo(self.dtype).max
        latents = mx.clip(latents, -largest, largest).swapaxes(-1, -2)
        packed = self._packed(latents)
        scales, zeros = (mx.concatenate([getattr(part, of) for part in packed], axis=2) for of in ("scales", "zeros"))
        rows = (*(part.codes for part in packed), scales, zeros)
        return (*rows, position[:, None, :: self.codec.unit].astype(mx.int32)) if self.codec.rope else rows

    def decode(self, rows: Rows) -> mx.array:
        arrays, basis, mean = self._opened(rows)
        x = self._by_unit(self._latents(arrays).swapaxes(-1, -2), (basis / self._shrink).swapaxes(-1, -2)) + mean
        if self.codec.rope:
            position = arrays[-1][:, 0, :, None] + mx.arange(self.codec.unit)
            x = self.codec.rope.apply(x, position.flatten(1))
        return to_dtype(x, self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        if self.codec.rope:
            return self._dot_turned(self.codec.rope, queries, rows)
        arrays, basis, mean = self._opened(rows)
        scores, asked, start = queries @ mean.swapaxes(-1, -2), queries @ (basis / self._shrink), 0
        for groups, (count, bits) in zip(self._groups(arrays), self.plan.sections, strict=True):
            part = asked[..., start : start + count]
            scores = scores + matmul(part, groups, bits, self.codec.group_size, transpose=False)
            start += count
        return scores

    def _dot_turned(self, rope: Rope, queries: mx.array, rows: Rows) -> mx.array:
        """Products with keys as `rope` turns them; the two halves of its pairs are never put together."""
        arrays, basis, mean = self._opened(rows)
        keys, mean = (basis / self._shrink) @ self._latents(arrays), mean.swapaxes(-1, -2)
        cos, sin = (x[:, None] for x in rope.runs(arrays[-1][:, 0], self.codec.unit))
        (first, second), rest = rope.pairs, slice(rope.dims, None)
        x, y = (keys[..., part, :] + mean[..., part, :] for part in (first, second))
        scores = queries[..., first] @ (x * cos - y * sin) + queries[..., second] @ (x * sin + y * cos)
        if rope.dims == self.dim:
            return scores
        return scores + queries[..., rest] @ (keys[..., rest, :] + mean[..., rest, :])

    def _latents(self, arrays: Rows) -> mx.array:
        """Float32 [B, H, r', S] of the rows, times `_shrink`."""
        sections = zip(self._groups(arrays), self.plan.sections, strict=True)
        numbers = [dequantize(groups, bits, self.codec.group_size) for groups, (_, bits) in sections]
        return mx.concatenate(numbers, axis=2)

    def _packed(self, latents: mx.array) -> list[Groups]:
        """Groups of each section of `latents` [B, H, r', S]."""
        packed, start, group = [], 0, self.codec.group_size
        for count, bits in self.plan.sections:
            part = latents[:, :, start : start + count]
            means = bits == 1 and self.codec.one_bit == "cond_mean"
            packed.append(halves(part, group, self.dtype) if means else quantize(part, bits, group, self.dtype))
            start += count
        return packed

    def _groups(self, arrays: Rows) -> list[Groups]:
        """Groups of each section."""
        scales, zeros = arrays[len(self.plan.sections) :][:2]
        found, start = [], 0
        for codes, (count, _) in zip(arrays, self.plan.sections, strict=False):
            end = start + count
            found.append(Groups(codes, scales[:, :, start:end], zeros[:, :, start:end]))
            start = end
        return found

    def _opened(self, rows: Rows) -> tuple[Rows, mx.array, mx.array]:
        """Arrays of the rows; basis float32 [B, H, D, r']; mean float32 [B, H, 1, D]."""
        arrays, (basis, mean) = (rows, self.given) if self.given else (rows[:-2], rows[-2:])
        return arrays, basis.astype(mx.float32), mean[:, :, None]

    @property
    def _shrink(self) -> float:
        return shrink(self.dim, self.dtype)

    def _before_rope(self, x: mx.array, position: mx.array) -> mx.array:
        """`x` [B, H, S, D] as it was before it was turned to `position` int [S] or [B, S]."""
        return self.codec.rope.undo(x, position) if self.codec.rope else x

    def _by_unit(self, x: mx.array, matrix: mx.array) -> mx.array:
        """`x` [B, H, S, N] times `matrix` [B, H, N, M], a unit at once: rounding is the same however rows came."""
        return (self._units(x) @ matrix[:, :, None]).flatten(2, 3)

    def _units(self, x: mx.array) -> mx.array:
        """`x` [B, H, S, N] as [B, H, S / unit, unit, N]."""
        batch, heads, count, width = x.shape
        return x.reshape(batch, heads, count // self.codec.unit, self.codec.unit, width)


def finite(x: mx.array) -> mx.array:
    """Float32 `x` [B, H, S, D] with the number of the next row where one is not finite."""
    return mx.clip(mended(x.astype(mx.float32)), -LIMIT, LIMIT)


def halves(x: mx.array, group: int, dtype: mx.Dtype) -> Groups:
    """One-bit groups of finite float32 `x` [..., N]: the levels are the means of what is above and below the mean."""
    x = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    # From the middle on, so that the mean of equal numbers is exactly that number.
    middle = x.min(axis=-1) * 0.5 + x.max(axis=-1) * 0.5
    offset = x - middle[..., None]
    above = offset > (offset * (1 / group)).sum(axis=-1, keepdims=True)
    largest = mx.finfo(dtype).max
    zeros = mx.clip(middle + _mean(offset, ~above), -largest, largest).astype(dtype)
    reach = middle + _mean(offset, above) - zeros.astype(mx.float32)
    scales = mx.where(above.any(axis=-1), mx.minimum(reach, largest), 0).astype(dtype)
    return Groups(pack(above.flatten(-2), 1), scales, zeros)


def _mean(x: mx.array, chosen: mx.array) -> mx.array:
    """Mean along the last axis of the `chosen` numbers; zero where there is none."""
    share = chosen / mx.maximum(chosen.sum(axis=-1, keepdims=True), 1)
    return (x * share).sum(axis=-1)
