"""Sinks: a few rows of each sequence that stay exact among coded ones and out of the numbers that these share.

When blocks are packed, the rows with the highest signals of all packed so far
become the sinks. One that is displaced is read through its code from then on.
"""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.describe import Described
from vq_functional.core.errors import check_choice, check_int
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.spec import KVSpec
from vq_functional.ops.rows import pick
from vq_functional.ops.vectors import TINY, norm

SIGNALS = ("first", "unusual_keys", "large_keys", "small_keys")
COMMON = 2  # times the typical size of a key, or a part of it: no more is nothing unusual
FEWEST = 16  # rows behind the sinks that tables are fitted to
LOT = 1024  # rows that are compared with each other at once


@attrs.frozen
class Sinks:
    """Exact rows of N tokens, the highest signal first."""

    keys: mx.array  # [B, H, N, D]
    values: mx.array
    position: mx.array  # int32 [B, N], below zero where there is none
    signal: mx.array  # float32 [B, N]
    typical: mx.array  # float32 [B]: the median size of the keys of the first block


@attrs.frozen
class SinkRule(Described):
    """`count` tokens by `signal`: the "first" ones, or by the size of their keys, the mean norm over the heads.

    "unusual_keys" are those that are many times larger or smaller than typical.
    """

    count: int
    signal: str = "first"
    shard: Shard = WHOLE

    def __attrs_post_init__(self) -> None:
        check_int("sinks", "count", self.count, 1)
        check_choice("sinks", "signal", self.signal, SIGNALS)

    def empty(self, spec: KVSpec) -> Sinks:
        """No sinks yet."""
        batch, layout = spec.batch, spec.layout
        keys, values = (
            mx.zeros((batch, layout.kv_heads, self.count, dim), layout.dtype)
            for dim in (layout.key_dim, layout.value_dim)
        )
        position = mx.full((batch, self.count), -1, mx.int32)
        return Sinks(keys, values, position, mx.full(position.shape, -mx.inf), mx.zeros((batch,)))

    def valid(self, sinks: Sinks, coded: mx.array) -> Sinks:
        """`sinks` without those that a trim took back: all are among the first `coded` int [B] rows."""
        holds = sinks.position < coded[:, None]
        position = mx.where(holds, sinks.position, -1)
        return attrs.evolve(sinks, position=position, signal=mx.where(holds, sinks.signal, -mx.inf))

    def choose(
        self, sinks: Sinks, keys: mx.array, values: mx.array, start: mx.array, end: mx.array, block: int
    ) -> tuple[Sinks, mx.array]:
        """The sinks after the rows from position `start` to `end`, int [B], have been packed in blocks.

        `keys` and `values` [B, H, R, D] begin at `start`. Also returns which of
        these rows, bool [B, R], were sinks when their own block was packed.
        """
        position = start[:, None] + mx.arange(keys.shape[2])
        if self.signal == "first":
            return self._choose_first(sinks, keys, values, start, end), (position < self.count) & (
                position < end[:, None]
            )
        size = self._size(keys)
        first_median = mx.sort(size[:, :block], axis=-1)[:, block // 2]
        typical = mx.where(start == 0, first_median, sinks.typical)
        signal = self._signal(size, typical[:, None])
        signal = mx.where(mx.isfinite(signal) & (position < end[:, None]), signal, -mx.inf)
        sinks, was_sink = attrs.evolve(sinks, typical=typical), []
        lot = max(LOT // block, 1) * block
        for first in range(0, keys.shape[2], lot):
            rows = slice(first, first + lot)
            came = Sinks(keys[:, :, rows], values[:, :, rows], position[:, rows], signal[:, rows], typical)
            sinks, chosen = self._choose(sinks, came, block)
            was_sink.append(chosen)
        return sinks, mx.concatenate(was_sink, axis=1)

    def apart(self, sinks: Sinks, keys: mx.array) -> mx.array:
        """Which rows, bool [B, R] of `keys` [B, H, R, D], stay out of their group's numbers if they are sinks.

        Not keys of a common size, whose codes count once they are displaced.
        """
        if self.signal == "first":
            return mx.ones((keys.shape[0], keys.shape[2]), mx.bool_)
        times = self._size(keys) / mx.maximum(sinks.typical, TINY)[:, None]
        return (times > COMMON) | (times < 1 / COMMON)

    def _choose(self, sinks: Sinks, came: Sinks, block: int) -> tuple[Sinks, mx.array]:
        signal = mx.concatenate([sinks.signal, came.signal], axis=1)
        position = mx.concatenate([sinks.position, came.position], axis=1)
        ahead = (signal[:, None] > signal[..., None]) | (
            (signal[:, None] == signal[..., None]) & (position[:, None] < position[..., None])
        )
        lot = mx.concatenate([mx.full((self.count,), -1), mx.arange(came.signal.shape[1]) // block])
        then = (ahead & (lot[None] <= lot[:, None])).sum(axis=-1)[:, self.count :]
        was_sink = (then < self.count) & (came.signal > -mx.inf)
        best = mx.argsort(ahead.sum(axis=-1), axis=-1)[:, : self.count]
        keys, values = (
            pick(mx.concatenate([old, new], axis=2), mx.broadcast_to(best[:, None], (*old.shape[:2], self.count)))
            for old, new in ((sinks.keys, came.keys), (sinks.values, came.values))
        )
        signal, position = (mx.take_along_axis(x, best, axis=1) for x in (signal, position))
        position = mx.where(signal > -mx.inf, position, -1)
        return Sinks(keys, values, position, signal, sinks.typical), was_sink

    def _choose_first(self, sinks: Sinks, keys: mx.array, values: mx.array, start: mx.array, end: mx.array) -> Sinks:
        place = mx.broadcast_to(mx.arange(self.count), sinks.position.shape)
        came, there = (place >= start[:, None]) & (place < end[:, None]), place < end[:, None]
        row = mx.broadcast_to((place - start[:, None])[:, None], (*keys.shape[:2], self.count))
        keys, values = (
            mx.where(came[:, None, :, None], pick(new, row), old)
            for new, old in ((keys, sinks.keys), (values, sinks.values))
        )
        signal = mx.where(there, -place.astype(mx.float32), -mx.inf)
        return Sinks(keys, values, mx.where(there, place, -1), signal, sinks.typical)

    def _size(self, keys: mx.array) -> mx.array:
        """Mean norm float32 [B, R] of `keys` [B, H, R, D] over all heads of the layer."""
        return self.shard.gathered(norm(keys)[..., 0]).mean(axis=1)

    def _signal(self, size: mx.array, typical: mx.array) -> mx.array:
        if self.signal == "unusual_keys":
            return mx.abs(mx.log(mx.maximum(size, TINY) / mx.maximum(typical, TINY)))
        return size if self.signal == "large_keys" else -size


def sink_rule(count: int, signal: str = "first") -> SinkRule | None:
    """The rule of `count` sinks; None for no sinks."""
    return SinkRule(count, signal) if count else None


def rows_to_fit(n_fit: int, n_sink: int) -> int:
    """First rows, `n_sink` sinks among them, that tables are fitted to."""
    return max(n_fit, n_sink + FEWEST)


def behind_sinks(x: mx.array, n_fit: int, n_sink: int) -> mx.array:
    """The rows of `x` [B, H, S, D] to fit tables to."""
    first = min(n_sink, x.shape[2] - 1)
    return x[:, :, first : max(rows_to_fit(n_fit, n_sink), first + 1)]


def without_sinks(x: mx.array, sink: mx.array, codec: Codec) -> mx.array:
    """Rows `x` [B, H, R, D] with those that are a `sink`, bool [B, R], drawn into the range of their group.

    A group is the neighbouring rows that share numbers. Where the codec mixes the
    numbers of a row, ranges are those of the mixed ones, and another row of the
    group takes the sink's place.
    """
    batch, heads, count, dim = x.shape
    shared = codec.shared
    grouped = x.reshape(batch, heads, count // shared, shared, dim)
    sink = sink.reshape(batch, 1, count // shared, shared, 1)
    if codec.mixes:
        first = mx.broadcast_to(mx.argmin(sink, axis=3, keepdims=True), (*grouped.shape[:3], 1, dim))
        others = sink & ~sink.all(axis=3, keepdims=True)
        return mx.where(others, mx.take_along_axis(grouped, first, axis=3), grouped).reshape(x.shape)
    out = sink | ~mx.isfinite(grouped)
    low = mx.where(out, mx.inf, grouped).min(axis=3, keepdims=True)
    high = mx.where(out, -mx.inf, grouped).max(axis=3, keepdims=True)
    drawn = mx.clip(grouped, low, high)
    return mx.where(sink & (low <= high), drawn, grouped).reshape(x.shape)


@attrs.frozen
class Patched(Coder):
    """Coded columns of which some are read from exact rows.

    Behind the inner coder's arrays stand the exact rows [B, H, N, D] and their
    columns int32 [B, N], below zero where there is none.
    """

    inner: Coder

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.inner.dim

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.inner.dtype

    def heads(self, rows: Rows) -> int:
        return rows[-2].shape[1]

    def decode(self, rows: Rows) -> mx.array:
        *coded, exact, column = rows
        return _put_columns(self.inner.decode(tuple(coded)), exact, column, axis=2)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        *coded, exact, column = rows
        scores = queries @ exact.astype(mx.float32).swapaxes(-1, -2)
        return _put_columns(self.inner.dot(queries, tuple(coded)), scores, column, axis=3)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        *coded, exact, column = rows
        column = mx.where(column < weights.shape[-1], column, -1)[:, None, None]
        index = mx.broadcast_to(mx.maximum(column, 0), (*weights.shape[:3], column.shape[-1]))
        own = mx.where(column >= 0, mx.take_along_axis(weights, index, axis=3), 0)
        rest = _put_columns(weights, mx.zeros_like(own), column[:, 0, 0], axis=3)
        return self.inner.mix(rest, tuple(coded)) + own @ exact.astype(mx.float32)


def _put_columns(x: mx.array, new: mx.array, column: mx.array, axis: int) -> mx.array:
    """`x` with the slices `new` at `column` int [B, N] of `axis`; a column that `x` doesn't have goes nowhere."""
    count, shape = x.shape[axis], [1] * x.ndim
    shape[0], shape[axis] = column.shape
    index = mx.where((column >= 0) & (column < count), column, count).reshape(shape)
    room = mx.pad(x, [(0, 1 if at == axis else 0) for at in range(x.ndim)])
    put = mx.put_along_axis(room, mx.broadcast_to(index, new.shape), new, axis=axis)
    return put[(slice(None),) * axis + (slice(count),)]
