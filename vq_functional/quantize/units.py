"""How the arrays of a coder run along tokens: every one has its axis, and its extent for a unit of rows."""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.core.tree import flatten, rebuild
from vq_functional.ops.rows import read_rows, write_rows


@attrs.frozen(eq=False)
class Units:
    """A coder's arrays, in units of `size` rows. Row numbers are multiples of `size`."""

    coder: Coder
    size: int
    spans: tuple[tuple[int, int], ...]  # axis and extent of one unit, for each array

    def empty(self, batch: int, heads: int, count: int) -> Rows:
        """Zeroed room for `count` rows."""
        return self.coder.empty(batch, heads, count, self.size)

    def empty_tables(self, batch: int, heads: int) -> Rows:
        """Room for the coder's tables."""
        tables = self.coder.tables(mx.zeros((1, heads, self.size, self.coder.dim), self.coder.dtype))
        return tuple(mx.zeros((batch, *table.shape[1:]), table.dtype) for table in tables)

    def write(self, held: Rows, new: Rows, start: mx.array, end: mx.array, roomy: bool = False) -> Rows:
        """`held` with `new` from row `start` int [B] up to row `end` int [B]; what was before `start` stays.

        `new` may reach past what `held` has room for, and be longer than it; rows
        up to `end` must fit. `roomy`: all of `new` does, so that nothing need be read.
        """
        at, count = start // self.size, (end - start) // self.size

        def put(i: int, x: mx.array, axis: int, extent: int) -> mx.array:
            came, room = new[i].shape[axis] // extent, x.shape[axis] // extent
            if roomy and came <= room:
                return write_rows(x, new[i], at * extent, axis)
            width = min(came, room)
            first = mx.clip(at, 0, room - width)
            place = (first - at)[:, None] + mx.arange(width)
            index = (mx.clip(place, 0, came - 1) * extent)[..., None] + mx.arange(extent)
            fresh = mx.take_along_axis(new[i], _along(index.flatten(1), axis, x), axis=axis)
            real = mx.repeat((place >= 0) & (place < count[:, None]), extent, axis=1)
            old = read_rows(x, first * extent, width * extent, axis)
            return write_rows(x, mx.where(_along(real, axis, x), fresh, old), first * extent, axis)

        return self._each(held, put)

    def read(self, held: Rows, start: mx.array, count: int) -> Rows:
        """`count` rows from `start` int [B]."""
        at, units = start // self.size, count // self.size
        return self._each(held, lambda i, x, axis, extent: read_rows(x, at * extent, units * extent, axis))

    def first(self, held: Rows, count: int) -> Rows:
        """The first `count` rows, as views."""
        units = count // self.size
        return self._each(held, lambda i, x, axis, extent: x[(slice(None),) * axis + (slice(units * extent),)])

    def grown(self, held: Rows, count: int) -> Rows:
        """The same rows with room for `count`."""

        def wider(i: int, x: mx.array, axis: int, extent: int) -> mx.array:
            missing = count // self.size * extent - x.shape[axis]
            return mx.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)])

        return self._each(held, wider)

    def count(self, held: Rows) -> int:
        """Rows that `held` has room for."""
        axis, extent = self.spans[0]
        return held[0].shape[axis] // extent * self.size

    def _each(self, held: Rows, change: Callable[[int, mx.array, int, int], mx.array]) -> Rows:
        changed = [change(i, x, *span) for i, (x, span) in enumerate(zip(held, self.spans, strict=True))]
        return rebuild(flatten(held)[1], changed)


def _along(x: mx.array, axis: int, like: mx.array) -> mx.array:
    """`x` [B, N] shaped to run along `axis` of `like` [B, ...]."""
    shape = [1] * like.ndim
    shape[0], shape[axis] = x.shape
    wide = [1 if at in (0, axis) else like.shape[at] for at in range(like.ndim)]
    return mx.broadcast_to(x.reshape(shape), [max(pair) for pair in zip(shape, wide, strict=True)])


@functools.lru_cache(maxsize=512)
def units(codec: Codec, dim: int, dtype: mx.Dtype, heads: int) -> Units:
    """The units of a codec for a head size and number of heads."""
    coder = bind(codec, dim, dtype)
    one = coder.empty(1, heads, codec.unit, codec.unit)
    axes = coder.axes or (2,) * len(one)
    return Units(coder, codec.unit, tuple((axis, x.shape[axis]) for axis, x in zip(axes, one, strict=True)))
