"""Merged rows: a direction that the layers share, each layer's lengths along it, and the most unlike rows apart."""

import math
from typing import NamedTuple

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.crosslayer.directions import shared_direction, too_unlike
from vq_functional.crosslayer.layer_coder import StackCoder, heads_of
from vq_functional.ops.rows import pick
from vq_functional.ops.vectors import TINY, norm, to_dtype


@attrs.frozen
class MergedRowsCodec(Codec):
    """Rows of M `layers`, in blocks of `block` tokens that stand alone.

    Bytes a token of one KV head, for all layers: those of a direction and 2 M;
    with `slots` (2 M D + 1) * slots / block + 1 / block, with `center` 2 M D / block.
    """

    layers: int
    block: int
    slots: int
    direction: Codec
    slerp_t: float
    retention: str
    threshold: float
    center: bool
    name = "merged_rows"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.block

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.block if self.center else 1

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return MergedRows(dim, dtype, self.layers, self, bind(self.direction, dim, dtype))


class Merged(NamedTuple):
    """What is held of T tokens in N blocks of M layers with H heads each."""

    direction: Rows  # of [B, H, T, D], as its own coder holds it
    sizes: mx.array  # [B, M * H, T, 1]: half the root mean square of a row, less its center; zero if retained
    centers: mx.array | None  # [B, M * H, N, D]: mean row of a block, off which directions are taken
    retained: mx.array | None  # [B, M * H, N * slots, D]: rows that are not merged, the most unlike first
    places: mx.array | None  # uint8 [B, H, N * slots]: where in its block each is; `block` where a slot is empty
    unlike: mx.array | None  # uint8 [B, H, N]: rows that should not be merged, whether there was a slot or not


@attrs.frozen
class MergedRows(StackCoder):
    """The arrays of `Merged`, one after the other."""

    dim: int
    dtype: mx.Dtype
    layers: int
    codec: MergedRowsCodec
    direction: Coder

    @property
    def owners(self) -> tuple[str, ...]:
        shared = ("first",) * len(self.direction.empty(1, 1, 1))
        slots = ("all", "first", "first") if self.codec.slots else ()
        return (*shared, *("all",) * (1 + self.codec.center), *slots)

    def heads(self, rows: Rows) -> int:
        return self.opened(rows).sizes.shape[1]

    def encode(self, x: mx.array) -> Rows:
        clean, centers = self._cleaned(x)
        apart = clean if centers is None else clean - self._by_token(centers)
        batch, heads, count, dim = x.shape
        stacked = apart.reshape(batch, self.layers, heads // self.layers, count, dim)
        shared, alike = shared_direction(stacked, self.codec.slerp_t)
        direction = self.direction.encode(to_dtype(shared, self.dtype))
        read = norm(self.direction.decode(direction))
        unit = mx.maximum(mx.tile(read, (1, self.layers, 1, 1)), TINY) * self._unit
        sizes = norm(apart) / unit
        centered = () if centers is None else (centers,)
        if not self.codec.slots:
            return (*direction, to_dtype(sizes, self.dtype), *centered)
        places, unlike = self._chosen(alike)
        sizes = mx.where(self._kept(places), 0, sizes)
        retained = self._retained(to_dtype(clean, self.dtype), places)
        return (*direction, to_dtype(sizes, self.dtype), *centered, retained, places, unlike)

    def decode_layer(self, rows: Rows, layer: int) -> mx.array:
        held = self.opened(rows, layer)
        x = self.direction.decode(held.direction).astype(mx.float32) * self._lengths(held)
        if held.centers is not None:
            x = x + self._by_token(held.centers)
        x = to_dtype(x, self.dtype)
        if held.retained is None or held.places is None:
            return x
        return _put(x, held.retained, self._columns(held.places)[..., None], axis=2)

    def dot_layer(self, queries: mx.array, rows: Rows, layer: int) -> mx.array:
        held = self.opened(rows, layer)
        scores = self.direction.dot(queries, held.direction) * self._lengths(held).swapaxes(-1, -2)
        if held.centers is not None:
            common = queries @ held.centers.astype(mx.float32).swapaxes(-1, -2)
            scores = (self._blocks(scores) + common[..., None]).flatten(-2)
        if held.retained is None or held.places is None:
            return scores
        own = queries @ held.retained.astype(mx.float32).swapaxes(-1, -2)
        return _put(scores, own, self._columns(held.places)[:, :, None], axis=3)

    def mix_layer(self, weights: mx.array, rows: Rows, layer: int) -> mx.array:
        held = self.opened(rows, layer)
        lengths = self._lengths(held).swapaxes(-1, -2)
        mixed, own = self.direction.mix(weights * lengths, held.direction), None
        if held.retained is not None and held.places is not None:
            own = _take(weights, self._columns(held.places)[:, :, None])
            mixed = mixed + own @ held.retained.astype(mx.float32)
        if held.centers is None:
            return mixed
        common = self._blocks(weights).sum(axis=-1)
        if own is not None:  # a retained row is whole
            common = common - own.reshape(*common.shape, self.codec.slots).sum(axis=-1)
        return mixed + common @ held.centers.astype(mx.float32)

    def opened(self, rows: Rows, layer: int | None = None) -> Merged:
        """The arrays by name: those of all layers, or what one `layer` reads."""
        count = 1 + self.codec.center + 3 * (self.codec.slots > 0)
        others = iter(rows[-count:])
        sizes = next(others)
        centers = next(others) if self.codec.center else None
        retained, places, unlike = others if self.codec.slots else (None, None, None)
        if layer is not None:
            sizes = heads_of(sizes, layer, self.layers)
            centers, retained = (x if x is None else heads_of(x, layer, self.layers) for x in (centers, retained))
        return Merged(rows[:-count], sizes, centers, retained, places, unlike)

    @property
    def _unit(self) -> float:
        """Length of a row of size 1: no difference of two rows is too long for the dtype."""
        return 2 * math.sqrt(self.dim)

    def _lengths(self, held: Merged) -> mx.array:
        """Float32 [B, H, T, 1] along the directions."""
        return held.sizes.astype(mx.float32) * self._unit

    def _cleaned(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Float32 rows in which the mean, or zero, stands for what is not finite, and the mean row of each block."""
        real, x = mx.isfinite(x), x.astype(mx.float32)
        if not self.codec.center:
            return mx.where(real, x, 0), None
        batch, heads, count, dim = x.shape
        blocks = (batch, heads, count // self.codec.block, self.codec.block, dim)
        share = 1 / mx.maximum(real.reshape(blocks).sum(axis=3, keepdims=True), 1)
        mean = mx.where(real.reshape(blocks), x.reshape(blocks) * share, 0).sum(axis=3)
        centers = to_dtype(mean, self.dtype)
        return mx.where(real, x, self._by_token(centers)), centers

    def _chosen(self, alike: mx.array) -> tuple[mx.array, mx.array]:
        """Places uint8 [B, H, N * slots] of the retained rows, and how many rows are too unlike, uint8 [B, H, N]."""
        alike = self._blocks(alike)
        unlike = too_unlike(alike, self.codec.retention, self.codec.threshold)
        first = mx.argsort(mx.where(unlike, alike, mx.inf), axis=-1)[..., : self.codec.slots]
        count = unlike.sum(axis=-1, keepdims=True)
        places = mx.where(mx.arange(self.codec.slots) < count, first, self.codec.block)
        return places.astype(mx.uint8).flatten(-2), count[..., 0].astype(mx.uint8)

    def _kept(self, places: mx.array) -> mx.array:
        """Bool [B, M * H, T, 1]: which rows are in a slot."""
        slots = places.reshape(*places.shape[:2], -1, self.codec.slots, 1)
        kept = (slots == mx.arange(self.codec.block)).any(axis=-2).flatten(-2)
        return mx.tile(kept, (1, self.layers, 1))[..., None]

    def _retained(self, x: mx.array, places: mx.array) -> mx.array:
        """Rows [B, M * H, N * slots, D] of `x` [B, M * H, T, D]; zeros in empty slots."""
        columns = mx.tile(self._columns(places), (1, self.layers, 1))
        return mx.where((columns < x.shape[2])[..., None], pick(x, columns), 0)

    def _columns(self, places: mx.array) -> mx.array:
        """Columns int32 [B, H, N * slots]; past the last one, where a slot is empty."""
        block, slots = self.codec.block, self.codec.slots
        place = places.astype(mx.int32).reshape(*places.shape[:2], -1, slots)
        count = place.shape[2] * block
        columns = place + mx.arange(0, count, block)[:, None]
        return mx.where(place < block, columns, count).flatten(-2)

    def _blocks(self, x: mx.array) -> mx.array:
        """`x` [..., T] as [..., N, block]."""
        return x.reshape(*x.shape[:-1], -1, self.codec.block)

    def _by_token(self, centers: mx.array) -> mx.array:
        """Float32 [B, H, T, D] of centers [B, H, N, D]."""
        return mx.repeat(centers.astype(mx.float32), self.codec.block, axis=2)


def _put(x: mx.array, new: mx.array, column: mx.array, axis: int) -> mx.array:
    """`x` with the slices `new` at `column` of `axis`; what has the column past the last goes nowhere."""
    count = x.shape[axis]
    room = mx.pad(x, [(0, 1 if at == axis else 0) for at in range(x.ndim)])
    put = mx.put_along_axis(room, mx.broadcast_to(column, new.shape), new, axis=axis)
    return put[(slice(None),) * axis + (slice(count),)]


def _take(x: mx.array, column: mx.array) -> mx.array:
    """Columns [B, H, Q, R] of `x` [B, H, Q, T]; zeros for the column past the last."""
    count = x.shape[-1]
    index = mx.broadcast_to(mx.minimum(column, count - 1), (*x.shape[:-1], column.shape[-1]))
    return mx.where(column < count, mx.take_along_axis(x, index, axis=-1), 0)
