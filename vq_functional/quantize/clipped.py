"""Groups of a token's channels with clipped ranges, the channels in an order that the first rows tell."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check
from vq_functional.core.table import Table
from vq_functional.ops.packing import pack
from vq_functional.ops.ranges import drawn_in, finite_range
from vq_functional.ops.vectors import TINY
from vq_functional.quantize.groups import TokenGroups
from vq_functional.quantize.orders import channel_order, in_groups, in_place
from vq_functional.quantize.sinks import behind_sinks, rows_to_fit

CENTERS = ("midpoint", "zero")
HEADROOM = 224  # what the largest number of the first rows is scaled to; eight-bit numbers end at 448


@attrs.frozen
class ClippedGroupsCodec(Codec):
    """4 * ceil(D' * bits / 32) + 4 * D' / group_size bytes a row, D' being D in whole groups; half the last with `fp8`.

    Once for each head 2 * D bytes for the order of its channels, and 4 with `fp8`.
    """

    side: str  # "key" or "value"
    bits: int
    group_size: int
    order: str | None  # None: as they come
    clips: tuple[float, ...]  # shares of the range; of several each group takes the best
    clip_center: str
    fp8: bool
    n_fit: int
    n_sink: int
    given: Table | None  # order [H, D]
    name = "skvq"
    unit = 32

    @property
    def warmup(self) -> int:  # type: ignore[override]
        ordered = self.order is not None and self.given is None
        return rows_to_fit(self.n_fit, self.n_sink) if ordered or self.fp8 else 0

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        if self.given is not None:
            self.check_given(self.given.shape[1] == dim, f"must be of head size {dim}")
        return ClippedGroups(dim, dtype, self, TokenGroups(dim, dtype, self.bits, self.group_size))

    def check_given(self, fits: bool, rule: str) -> None:
        """Refuse orders that are not of this layer."""
        check(fits, self.name, f"{self.side}_order", rule, self.given and self.given.shape)


@attrs.frozen
class ClippedGroups(Coder):
    """Rows of `groups`, its scales and zeros perhaps in eight bits; tables are the order and the unit of these."""

    dim: int
    dtype: mx.Dtype
    codec: ClippedGroupsCodec
    groups: TokenGroups

    def tables(self, x: mx.array) -> Rows:
        c, tables = self.codec, list[mx.array]()
        x = behind_sinks(x, c.n_fit, c.n_sink).astype(mx.float32)
        if c.order is not None:
            order = self._given(x) if c.given is not None else channel_order(x, c.order, c.group_size)
            tables.append(order.astype(mx.uint16))
        if c.fp8:
            low, high = (end[..., 0] for end in finite_range(x.flatten(2), axis=-1))
            tables.append(mx.maximum(mx.maximum(-low, high), TINY) * (1 / HEADROOM))
        return tuple(tables)

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        order, unit = self._split(tables)
        x = x.astype(mx.float32)
        if order is not None:
            x = mx.take_along_axis(x, order, axis=-1)
        x = in_groups(x, self.groups.group)
        low, high = finite_range(x, axis=-1)
        x = drawn_in(x, low, high)
        scales, zeros = self._numbers(*self._clipped(x, low, high, unit), unit)
        codes = self._codes(x, self._read(scales, unit), self._read(zeros, unit)).astype(mx.uint32)
        return pack(codes.flatten(-2), self.codec.bits), scales[..., 0], zeros[..., 0]

    def decode(self, rows: Rows) -> mx.array:
        groups, order = self._groups(rows)
        return self._back(self.groups.decode(groups), order)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        groups, order = self._groups(rows)
        if order is not None:
            queries = mx.take_along_axis(queries, order, axis=-1)
        return self.groups.dot(queries, groups)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        groups, order = self._groups(rows)
        return self._back(self.groups.mix(weights, groups), order)

    # Clipping

    def _clipped(self, x: mx.array, low: mx.array, high: mx.array, unit: mx.array | None) -> tuple[mx.array, mx.array]:
        """Ends [..., G, 1] of the levels of the groups `x` [..., G, g]; of equally good ones the widest."""
        candidates = [self._shrunk(low, high, clip) for clip in self.codec.clips]
        size = mx.maximum(mx.maximum(-low, high), TINY)
        best, least = candidates[0], mx.array(0.0)
        if len(candidates) > 1:
            least = self._error(x, *best, size, unit)
        for ends in candidates[1:]:
            error = self._error(x, *ends, size, unit)
            better = error < least
            best = mx.where(better, ends[0], best[0]), mx.where(better, ends[1], best[1])
            least = mx.where(better, error, least)
        return best

    def _shrunk(self, low: mx.array, high: mx.array, clip: float) -> tuple[mx.array, mx.array]:
        if clip == 1:
            return low, high
        center = low * 0.5 + high * 0.5 if self.codec.clip_center == "midpoint" else mx.zeros_like(low)
        return center - clip * (center - low), center + clip * (high - center)

    def _error(self, x: mx.array, low: mx.array, high: mx.array, size: mx.array, unit: mx.array | None) -> mx.array:
        """Squared error [..., G, 1] of levels from `low` to `high`, in units of the groups' `size`."""
        scale, zero = (self._read(numbers, unit) for numbers in self._numbers(low, high, unit))
        read = (self._codes(x, scale, zero) * scale + zero).astype(self.dtype)
        # Scaled first so that squares can't overflow.
        return mx.square((read.astype(mx.float32) - x) / size).sum(axis=-1, keepdims=True)

    def _codes(self, x: mx.array, scale: mx.array, zero: mx.array) -> mx.array:
        # Where the scale is zero, numbers lie so near the zero that they round to code 0.
        return mx.clip(mx.round((x - zero) / mx.where(scale > 0, scale, 1)), 0, 2**self.codec.bits - 1)

    # Numbers that a group shares

    def _numbers(self, low: mx.array, high: mx.array, unit: mx.array | None) -> tuple[mx.array, mx.array]:
        """Scales and zeros as they are held."""
        top = 2**self.codec.bits - 1
        if unit is None:
            largest = mx.finfo(self.dtype).max
            return mx.minimum((high - low) / top, largest).astype(self.dtype), low.astype(self.dtype)
        zeros = -eight_bits_above(-low / unit)
        zero = mx.from_fp8(mx.to_fp8(zeros), mx.float32) * unit
        return mx.to_fp8(eight_bits_above((high - zero) / top / unit)), mx.to_fp8(zeros)

    def _read(self, numbers: mx.array, unit: mx.array | None) -> mx.array:
        return numbers.astype(mx.float32) if unit is None else mx.from_fp8(numbers, mx.float32) * unit

    # Tables

    def _given(self, x: mx.array) -> mx.array:
        batch, heads, _, dim = x.shape
        order = self.codec.given.array  # type: ignore[union-attr]
        self.codec.check_given(order.shape[0] == heads, f"must be of {heads} heads")
        return mx.broadcast_to(order, (batch, heads, dim))

    def _split(self, tables: Rows) -> tuple[mx.array | None, mx.array | None]:
        """Order int32 [B, H, 1, D] and unit float32 [B, H, 1, 1, 1], where there are any."""
        order = tables[0][:, :, None].astype(mx.int32) if self.codec.order is not None else None
        return order, tables[-1][..., None, None, None] if self.codec.fp8 else None

    def _groups(self, rows: Rows) -> tuple[Rows, mx.array | None]:
        """Rows of `groups`, and the order."""
        codes, scales, zeros, *tables = rows
        order, unit = self._split(tuple(tables))
        if unit is not None:
            scales, zeros = (self._read(numbers, unit[..., 0]) for numbers in (scales, zeros))
        return (codes, scales, zeros), order

    @staticmethod
    def _back(x: mx.array, order: mx.array | None) -> mx.array:
        """`x` [B, H, M, D] with its channels where they came from."""
        return x if order is None else in_place(x, order)


def eight_bits_above(x: mx.array) -> mx.array:
    """The E4M3 number next to float32 `x`, not below it; 448 at most."""
    nearest = mx.from_fp8(mx.to_fp8(x), mx.float32)
    # Steps are 1/8 to 1/16 of a number, so that this rounds to the next one up.
    above = mx.from_fp8(mx.to_fp8(nearest + mx.abs(nearest) / 12), mx.float32)
    return mx.where(nearest < x, above, nearest)
