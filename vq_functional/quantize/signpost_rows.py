"""Rows of normalised numbers as signposts, the numbers that fit worst exact: what keys and values have in common."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.describe import Described
from vq_functional.core.table import Table
from vq_functional.ops.free_levels import FreeCodes, level_codes
from vq_functional.ops.outliers import largest
from vq_functional.ops.ranges import drawn_in
from vq_functional.ops.scalar import ScalarCodes
from vq_functional.ops.vectors import TINY, to_dtype
from vq_functional.quantize.signposts import fitted_signposts, gaussian_signposts, uniform_signposts
from vq_functional.quantize.sinks import behind_sinks, rows_to_fit


@attrs.frozen
class Signposts(Described):
    """What keys and values have in common; `levels` is a kind of table or a table [2**bits]."""

    bits: int
    outliers: float  # share of a row's numbers
    levels: str | Table
    sweeps: int  # of the fit of levels
    n_fit: int
    n_sink: int

    @property
    def fits_levels(self) -> bool:
        return self.levels == "fitted"

    @property
    def rows_to_fit(self) -> int:
        """First rows, sinks among them, that are looked at."""
        return rows_to_fit(self.n_fit, self.n_sink)

    def slots(self, dim: int) -> int:
        """Numbers of a row that are held exactly."""
        return min(max(1, round(dim * self.outliers)), dim - 1) if self.outliers else 0

    def codes(self, dim: int, rows: int, outliers: float = 0.0) -> ScalarCodes:
        """Codes for ranges that `rows` numbers told without a share of `outliers`; where a fit begins."""
        if isinstance(self.levels, Table):
            levels = self.levels.array
        elif self.levels == "uniform":
            levels = uniform_signposts(self.bits)
        else:
            levels = gaussian_signposts(self.bits, rows, outliers)
        return level_codes(levels, self.bits, dim)

    def behind_sinks(self, x: mx.array) -> mx.array:
        """The rows of `x` [B, H, S, D] to fit to."""
        return behind_sinks(x, self.n_fit, self.n_sink)


@attrs.frozen(eq=False)
class SignpostCoder(Coder):
    """x ~ center + reach * level; `slots` numbers of each row are exact.

    Arrays begin with codes uint32 [B, H, S, words], and where there are slots
    their channels uint8 [B, H, S, slots] (uint16 where D > 256) and numbers.
    """

    dim: int
    dtype: mx.Dtype
    signposts: Signposts
    codes: ScalarCodes

    @property
    def slots(self) -> int:
        return self.signposts.slots(self.dim)

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self.numbers(rows), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return queries @ self.numbers(rows).swapaxes(-1, -2)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return weights @ self.numbers(rows)

    def numbers(self, rows: Rows) -> mx.array:
        """Float32 [B, H, S, D]."""
        raise TypeError(f"{type(self).__name__} has no numbers")

    def codes_by(self, tables: Rows) -> ScalarCodes:
        """Codes by the levels of a sequence, where these are fitted."""
        return FreeCodes(tables[-1], self.signposts.bits, self.dim) if self.signposts.fits_levels else self.codes

    def pack(self, x: mx.array, center: mx.array, reach: mx.array, codes: ScalarCodes) -> Rows:
        """Codes of float32 `x` [B, H, S, D], and its exact numbers."""
        x = drawn_in(x, center - reach, center + reach)
        y = (x - center) / mx.maximum(reach, TINY)
        packed, level = codes.encode(y)
        if not self.slots:
            return (packed,)
        # Numbers beyond the range come first, the farthest before all.
        channel = largest(mx.where(mx.abs(y) > 1, mx.abs(y), mx.abs(y - level)), self.slots)
        exact = mx.take_along_axis(x, channel, axis=-1)
        return packed, channel.astype(mx.uint8 if self.dim <= 256 else mx.uint16), to_dtype(exact, self.dtype)

    def unpack(self, rows: Rows, center: mx.array, reach: mx.array, codes: ScalarCodes) -> mx.array:
        """Inverse of `pack`, of its arrays at the beginning of `rows`."""
        x = codes.decode(rows[0]) * reach + center
        if not self.slots:
            return x
        return mx.put_along_axis(x, rows[1].astype(mx.int32), rows[2].astype(mx.float32), axis=-1)

    def counted(self, x: mx.array, center: mx.array, reach: mx.array) -> tuple[mx.array, mx.array]:
        """Finite `x` [B, H, S, D] normalised to [-1, 1], and 1 where it has no slot and so is to tell levels."""
        y = (x - center) / mx.maximum(reach, TINY)
        counts = mx.ones_like(y)
        if self.slots:
            channel = largest(mx.abs(y), self.slots)
            inside = mx.abs(mx.take_along_axis(y, channel, axis=-1)) <= 1
            counts = mx.put_along_axis(counts, channel, inside.astype(mx.float32), axis=-1)
        return mx.clip(y, -1, 1), counts

    def fit(self, x: mx.array, center: mx.array, reach: mx.array) -> mx.array:
        """Levels float32 [B, L] for the rows `x` [B, H, S, D]."""
        y, counts = (each.flatten(1) for each in self.counted(x, center, reach))
        return fitted_signposts(y, counts, self.first_levels, self.signposts.sweeps)

    @property
    def first_levels(self) -> mx.array:
        """Levels [L] that a fit begins with."""
        return self.codes.levels.reshape(-1)
