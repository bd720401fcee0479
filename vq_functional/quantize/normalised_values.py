"""Values in normalised rows: every token has a range, and all have one table of levels."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.ops.ranges import drawn_in, finite_range, mended
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.signpost_rows import SignpostCoder, Signposts

FEW = 4


@attrs.frozen
class NormalisedValuesCodec(Codec):
    """Each token in the smallest range that holds all but its exact numbers.

    4 * ceil(D * bits / 32) + 4 bytes a row, and 3 a slot.
    """

    signposts: Signposts
    name = "normalised_values"

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return self.signposts.rows_to_fit if self.signposts.fits_levels else 0

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        codes = self.signposts.codes(dim, dim - self.signposts.slots(dim))
        return NormalisedValues(dim, dtype, self.signposts, codes)


@attrs.frozen(eq=False)
class NormalisedValues(SignpostCoder):
    """Behind codes and exact numbers: center and reach [B, H, S]. Table: levels float32 [B, L]."""

    def tables(self, x: mx.array) -> Rows:
        if not self.signposts.fits_levels:
            return ()
        x = self.signposts.behind_sinks(mended(x.astype(mx.float32)))
        return (self.fit(x, *token_range(x, self.slots)),)

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        x = x.astype(mx.float32)
        center, reach = (to_dtype(end, self.dtype) for end in token_range(x, self.slots))
        ends = center.astype(mx.float32), reach.astype(mx.float32)
        return (*self.pack(x, *ends, self.codes_by(tables)), center[..., 0], reach[..., 0])

    def numbers(self, rows: Rows) -> mx.array:
        count = 1 + 2 * bool(self.slots)
        center, reach = (end.astype(mx.float32)[..., None] for end in rows[count : count + 2])
        return self.unpack(rows, center, reach, self.codes_by(rows[count + 2 :]))


def token_range(x: mx.array, slots: int) -> tuple[mx.array, mx.array]:
    """Center and reach [B, H, S, 1] of the smallest range that holds all but `slots` numbers of a row."""
    low, high = finite_range(x, axis=-1)
    if slots:
        x = drawn_in(x, low, high)
        lows, highs = _lowest(x, slots + 1), -_lowest(-x, slots + 1)[..., ::-1]
        first = mx.argmin(highs - lows, axis=-1, keepdims=True)
        low, high = (mx.take_along_axis(ends, first, axis=-1) for ends in (lows, highs))
    return low * 0.5 + high * 0.5, high * 0.5 - low * 0.5


def _lowest(x: mx.array, count: int) -> mx.array:
    """The `count` lowest numbers of each row, rising."""
    if count > FEW:
        return mx.sort(x, axis=-1)[..., :count]
    found = list[mx.array]()
    for _ in range(count):  # far cheaper than sorting whole rows
        at = mx.argmin(x, axis=-1, keepdims=True)
        found.append(mx.take_along_axis(x, at, axis=-1))
        x = mx.put_along_axis(x, at, mx.array(mx.inf), axis=-1)
    return mx.concatenate(found, axis=-1)
