"""Keys in normalised channels: every channel of a head has a range, and all have one table of levels."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.core.table import Table
from vq_functional.ops.ranges import mended
from vq_functional.ops.rope import Rope
from vq_functional.ops.vectors import TINY, to_dtype
from vq_functional.quantize.positioned import PositionedCoder
from vq_functional.quantize.signpost_rows import SignpostCoder, Signposts, largest
from vq_functional.quantize.signposts import range_error

BLOCK = 32  # rows packed at a time
FENCE = 3  # distance from the quartiles, in distances between these


@attrs.frozen
class NormalisedKeysCodec(Codec):
    """Channels in ranges that the first rows tell, that are `given` [2, H, D], or of `interval` rows each.

    4 * ceil(D * bits / 32) bytes a row, 3 a slot, and 4 * D / interval. With
    `rope` keys are held as they were before the rotation: 4 / 32 bytes a row
    for its position, in all heads together.
    """

    signposts: Signposts
    margin: float  # of a fitted range, in standard errors
    interval: int
    rope: Rope | None
    given: Table | None
    name = "normalised_keys"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.interval or BLOCK

    @property
    def fits_range(self) -> bool:
        return self.given is None and self.interval == 0

    @property
    def positioned(self) -> bool:
        """Whether a row's code depends on its position."""
        return self.rope is not None or self.interval > 0

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return self.signposts.rows_to_fit if self.fits_range or self.signposts.fits_levels else 0

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        if self.given is not None:
            size = self.given.shape[2]
            check(size == dim, "kvquant", "head_dim", f"must be that of `k_range`, {size}", dim)
        if self.rope is not None:
            check(self.rope.dims <= dim, "kvquant", "rope", f"must not turn more than {dim} numbers", self.rope.dims)
        rows = self.interval or self.signposts.rows_to_fit - self.signposts.n_sink
        codes = self.signposts.codes(dim, rows, self.signposts.outliers)
        return NormalisedKeys(dim, dtype, self.signposts, codes, self)


@attrs.frozen(eq=False)
class NormalisedKeys(SignpostCoder, PositionedCoder):
    """Behind codes and exact numbers: center and reach [B, H, S / interval, D], first positions int32 [B, 1, S / unit].

    Tables: center and reach float32 [B, H, D], levels float32 [B, L].
    """

    codec: NormalisedKeysCodec

    def tables(self, x: mx.array) -> Rows:
        if not (self.codec.fits_range or self.signposts.fits_levels):
            return ()
        x = self.signposts.behind_sinks(self.before_rope(mended(x.astype(mx.float32)), self._first(x)))
        center, reach = self.range_of(x) if self.codec.given is None else self._given()
        tables = (center[:, :, 0], reach[:, :, 0]) if self.codec.fits_range else ()
        return (*tables, self.fit(x, center, reach)) if self.signposts.fits_levels else tables

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        return self.encode_at(x, tables, self._first(x))

    def encode_at(self, x: mx.array, tables: Rows, position: mx.array) -> Rows:
        """Rows of `x` [B, H, S, D] that stand at `position` int [B, S]."""
        heads = x.shape[1] if self.codec.given is None else self.codec.given.shape[1]
        check(x.shape[1] == heads, "kvquant", "keys", f"must have the {heads} heads of `k_range`", x.shape)
        x = self.before_rope(x.astype(mx.float32), position)
        own = self._own_ranges(x, position) if self.codec.interval else ()
        rows = (*self.pack(x, *self._by_row(own, tables), self.codes_by(tables)), *own)
        return (*rows, position[:, None, :: self.codec.unit].astype(mx.int32)) if self.codec.rope else rows

    def numbers(self, rows: Rows) -> mx.array:
        count = 1 + 2 * bool(self.slots)
        ends = count + 2 * bool(self.codec.interval)
        tables = rows[ends + bool(self.codec.rope) :]
        x = self.unpack(rows, *self._by_row(rows[count:ends], tables), self.codes_by(tables))
        if self.codec.rope is None:
            return x
        position = rows[ends][:, 0, :, None] + mx.arange(self.codec.unit)
        return self.codec.rope.apply(x, position.flatten(1))

    def _by_row(self, own: Rows, tables: Rows) -> tuple[mx.array, mx.array]:
        """Center and reach float32 [B, H, S or 1, D]."""
        if self.codec.interval:
            center, reach = (mx.repeat(x.astype(mx.float32), self.codec.interval, axis=2) for x in own)
            return center, reach
        return (tables[0][:, :, None], tables[1][:, :, None]) if self.codec.fits_range else self._given()

    def _given(self) -> tuple[mx.array, mx.array]:
        center, reach = self.codec.given.array  # type: ignore[union-attr]
        return center[None, :, None], reach[None, :, None]

    def range_of(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Center and reach [B, H, 1, D] told by rows `x` [B, H, S, D] from before the rotation."""
        outliers, rows = self.signposts.outliers, x.shape[2]
        center, reach = channel_range(x, outliers, self.slots)
        margin = 0.0 if self.codec.interval else self.codec.margin
        return center, reach * (1 + margin * range_error(rows, outliers))

    def _own_ranges(self, x: mx.array, position: mx.array) -> Rows:
        """Center and reach [B, H, S / interval, D] of each block, whose sinks don't count."""
        batch, heads, count, dim = x.shape
        size, interval = count // self.codec.interval, self.codec.interval
        blocks = mended(x.reshape(batch, heads * size, interval, dim)).reshape(batch, heads, size, interval, dim)
        sink = (position < self.signposts.n_sink).reshape(-1, 1, size, interval, 1)
        other = min(self.signposts.n_sink, interval - 1)
        blocks = mx.where(sink, blocks[:, :, :, other : other + 1], blocks)
        blocks = blocks.reshape(batch, heads * size, interval, dim)
        ends = channel_range(blocks, self.signposts.outliers, self.slots)
        return tuple(to_dtype(end.reshape(batch, heads, size, dim), self.dtype) for end in ends)

    def before_rope(self, x: mx.array, position: mx.array) -> mx.array:
        """Float32 `x` [B, H, S, D] as it was before it was turned to `position` int [B, S]."""
        return x if self.codec.rope is None else self.codec.rope.undo(x, position)

    @staticmethod
    def _first(x: mx.array) -> mx.array:
        """Positions [B, S] of the first rows of a sequence."""
        return mx.broadcast_to(mx.arange(x.shape[2]), (x.shape[0], x.shape[2]))


def channel_range(x: mx.array, outliers: float, slots: int) -> tuple[mx.array, mx.array]:
    """Center and reach [B, H, 1, D] of each channel of finite `x` [B, H, S, D], half its `outliers` beyond each end.

    Of a row's numbers beyond Tukey's outer fences those that get its `slots`
    don't count. Others do: where a whole row is far out, it must not saturate.
    """
    last = x.shape[2] - 1
    if slots:
        quarter, three = _ranked(x, last / 4), -_ranked(-x, last / 4)
        middle, between = quarter * 0.5 + three * 0.5, three - quarter
        away = mx.where(between > 0, mx.abs(x - middle) / mx.maximum(between, TINY), 0)
        channel = largest(away, slots)
        taken = mx.put_along_axis(mx.zeros_like(x), channel, mx.array(1.0), axis=-1) > 0
        x = mx.where(taken & (away > FENCE + 0.5), middle, x)
    place = (1 - outliers / 2) * last
    high, low = _ranked(x, place), -_ranked(-x, place)
    return low * 0.5 + high * 0.5, high * 0.5 - low * 0.5


def _ranked(x: mx.array, place: float) -> mx.array:
    """What stands at `place`, counted from the lowest number along axis 2; between two numbers their mixture."""
    first = int(place)
    ranked = mx.partition(x, first, axis=2)
    at = ranked[:, :, first : first + 1]
    if first == place:
        return at
    return at + (place - first) * (ranked[:, :, first + 1 :].min(axis=2, keepdims=True) - at)
