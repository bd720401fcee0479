"""Observers of what a cache does to keys and values: events of each call, and the distortion that they tell of.

A cache without observers makes no event. Making one waits for the arrays of
its call, so observed caches are slower.
"""

from __future__ import annotations

import abc
import statistics
import time
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.core.tree import leaves_of, nbytes
from vq_functional.ops.vectors import TINY

if TYPE_CHECKING:
    from vq_adapters.cache import TransformKVCache


@attrs.frozen(eq=False)
class QuantizationEvent:
    """One moment of one cache.

    stage: "update", once a call has been written and read; "attend", once real queries have come.
    input_shape: of the keys, or of the queries.
    elapsed_ms: of writing and reading; 0 for "attend".
    memory_delta_bytes: by how much the state grew.
    metadata: "cache" and "method" always. For "update": "keys" and "values" as they came; "keys_out" and
    "values_out" as the call sees all that is held; "positions", the token of each of these columns, int [B, H or 1, C],
    below zero for none; "tokens" int32 [B], seen before. For "attend": "queries", of the last "update".
    """

    stage: str
    input_shape: tuple[int, ...]
    elapsed_ms: float = 0.0
    memory_delta_bytes: int = 0
    metadata: dict[str, Any] = attrs.field(factory=dict)


class QuantizationObserver(abc.ABC):
    """Somebody to tell of events. Called by caches in the thread of the model, never inside a compiled function."""

    @abc.abstractmethod
    def on_event(self, event: QuantizationEvent) -> None:
        """Take note; arrays of the event are the caller's own and must not be written to."""


class Watch:
    """What one call of a cache was like before it wrote, to tell its observers afterwards."""

    def __init__(self, cache: TransformKVCache, n: int, nbytes_before: int) -> None:
        """`cache` has made room for the `n` tokens of the call, and written none of them."""
        self._cache, self._bytes = cache, nbytes_before
        state, fill = cache._whole_state(), cache._fills[0] if cache._uniform() else None
        self._positions = cache.transform.positions_after(state, n, fill)
        self._tokens = state.offset
        mx.eval(self._positions, leaves_of(state))
        self._start = time.perf_counter()

    def tell(self, keys: mx.array, values: mx.array, keys_out: mx.array, values_out: mx.array) -> None:
        """Make the event of the call that took `keys` and `values` and gave back the others."""
        cache = self._cache
        mx.eval(keys_out, values_out, leaves_of(cache._state))
        elapsed = (time.perf_counter() - self._start) * 1000
        arrays = {"keys": keys, "values": values, "keys_out": keys_out, "values_out": values_out}
        metadata = {**_named(cache), **arrays, "positions": self._positions, "tokens": self._tokens}
        grown = nbytes(cache._state) - self._bytes
        _tell(cache, QuantizationEvent("update", keys.shape, elapsed, grown, metadata))


def tell_queries(cache: TransformKVCache, queries: mx.array) -> None:
    """Tell the observers of a cache the real queries of its last call."""
    _tell(cache, QuantizationEvent("attend", queries.shape, metadata={**_named(cache), "queries": queries}))


def check_observers(method: str, observers: Any) -> None:
    """Refuse a list that holds anything but observers."""
    known = all(isinstance(observer, QuantizationObserver) for observer in observers)
    check(known, method, "observers", "must be QuantizationObservers", observers)


def _tell(cache: TransformKVCache, event: QuantizationEvent) -> None:
    for observer in cache.observers:
        observer.on_event(event)


def _named(cache: TransformKVCache) -> dict[str, Any]:
    return {"cache": cache, "method": cache.transform.name}


# Distortion


@attrs.define(eq=False)
class Distortion:
    """Relative errors (Frobenius norms) of one call, over all rows that it sees and whose originals are known."""

    method: str
    tokens: int  # seen, this call's included
    keys: float
    values: float
    products: float  # of inner products with the call's queries, or with its keys where no queries come
    proxy: bool  # whether keys stood in


@attrs.define(eq=False)
class _Exact:
    """Rows of one cache as they came."""

    first: int  # token of the first row
    keys: mx.array  # [B, H, T, D]
    values: mx.array
    shown: mx.array | None = None  # the last call's keys as they came, [B, H, C, D], and as they were given back
    given: mx.array | None = None


class DistortionObserver(QuantizationObserver):
    """Compares what each call sees with what once came in.

    Keeps every row as it came, so that the gain in memory is gone: a tool for
    measuring. Takes single sequences, and batches whose rows have the same
    number of tokens; other calls are left out.
    """

    def __init__(self) -> None:
        self.records: list[Distortion] = []
        self._exact: weakref.WeakKeyDictionary[Any, _Exact] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[Any, Distortion] = weakref.WeakKeyDictionary()

    def on_event(self, event: QuantizationEvent) -> None:
        cache = event.metadata["cache"]
        if event.stage == "attend":
            self._compare_products(cache, event.metadata["queries"])
        elif event.stage == "update":
            tokens = set(event.metadata["tokens"].tolist())
            if len(tokens) == 1 and min(tokens) >= 0:
                self._compare(cache, min(tokens), event.metadata)
            else:
                self._exact.pop(cache, None)

    def mean(self) -> dict[str, float]:
        """Mean errors of all calls, by what they are of; RuntimeError while there are none."""
        if not self.records:
            raise RuntimeError("DistortionObserver: `mean` must follow a call of an observed cache")
        fields = ("keys", "values", "products")
        return {field: statistics.fmean(getattr(record, field) for record in self.records) for field in fields}

    def _compare(self, cache: Any, tokens: int, told: dict[str, Any]) -> None:
        exact = self._exact[cache] = _extended(self._exact.get(cache), tokens, told["keys"], told["values"])
        positions = told["positions"] - exact.first
        count = exact.keys.shape[2]
        known = ((positions >= 0) & (positions < count))[..., None]
        index = mx.clip(positions, 0, count - 1)[..., None]
        errors = []
        for rows, out in ((exact.keys, told["keys_out"]), (exact.values, told["values_out"])):
            shape = (*rows.shape[:2], index.shape[2], rows.shape[3])
            came = mx.take_along_axis(rows, mx.broadcast_to(index, (*shape[:3], 1)), axis=2)
            came, given = (mx.where(known, x.astype(mx.float32), 0) for x in (came, out))
            errors.append((came, given, relative_error(given, came)))
        exact.shown, exact.given = errors[0][:2]
        record = Distortion(cache.transform.name, tokens + told["keys"].shape[2], errors[0][2], errors[1][2], 0.0, True)
        self.records.append(record)
        self._last[cache] = record
        self._compare_products(cache, told["keys"], proxy=True)

    def _compare_products(self, cache: Any, queries: mx.array, proxy: bool = False) -> None:
        exact, record = self._exact.get(cache), self._last.get(cache)
        if exact is None or record is None or exact.shown is None or exact.given is None:
            return
        batch, heads, _, dim = exact.shown.shape
        asked = queries.astype(mx.float32).reshape(batch, heads, -1, dim)
        products = [asked @ rows.swapaxes(-1, -2) for rows in (exact.given, exact.shown)]
        record.products, record.proxy = relative_error(*products), proxy


def relative_error(got: mx.array, wanted: mx.array) -> float:
    """|got - wanted| / |wanted| (Frobenius), scaled first so that squares can't overflow."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    size = mx.maximum(mx.abs(wanted).max(), TINY)
    lost, whole = (mx.square(x / size).sum() for x in (got - wanted, wanted))
    return mx.sqrt(lost / mx.maximum(whole, TINY)).item()  # type: ignore[return-value]


def _extended(exact: _Exact | None, tokens: int, keys: mx.array, values: mx.array) -> _Exact:
    """The rows of the first `tokens` tokens, as far as they are known, and then these."""
    if (
        exact is None
        or exact.keys.shape[:2] != keys.shape[:2]
        or not exact.first < tokens <= exact.first + exact.keys.shape[2]
    ):
        return _Exact(tokens, keys, values)
    held = tokens - exact.first
    joined = [
        mx.concatenate([old[:, :, :held], new], axis=2) for old, new in ((exact.keys, keys), (exact.values, values))
    ]
    return _Exact(exact.first, *joined)
