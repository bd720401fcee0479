"""The per-vector caches: one head, keys and values [d] one at a time, attention of single queries."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from vq_adapters.cache import TransformKVCache
from vq_adapters.config import KVCacheConfig, in_window
from vq_adapters.method_cache import row_bytes
from vq_adapters.observers import QuantizationObserver
from vq_functional.codebook.spectral_basis import SpectralBasis
from vq_functional.core.errors import check, check_int
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import RowStore
from vq_functional.core.table import Table
from vq_functional.core.transform import Transform
from vq_functional.core.tree import leaves_of, nbytes
from vq_functional.evict.sliding_window import Ring
from vq_functional.quantize.blocks import Blocks


class KVCache(abc.ABC):
    """One head's cache, vector by vector; the caller rotates keys and queries."""

    @abc.abstractmethod
    def append_key(self, k: mx.array) -> None:
        """Take in the key [d] of the next token; its value follows."""

    @abc.abstractmethod
    def append_value(self, v: mx.array) -> None:
        """Take in the value [d] of the oldest key that has none."""

    def append(self, k: mx.array, v: mx.array) -> None:
        """Take in one token."""
        self.append_key(k)
        self.append_value(v)

    @abc.abstractmethod
    def attend(self, q: mx.array) -> mx.array:
        """Attention [d] of one query [d] over all tokens held; zeros while there are none."""

    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of the tokens held."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Tokens held."""


class VectorKVCache(KVCache):
    """A transform that keeps every row, over one head of one sequence.

    Keys wait for their values in the order they came. `window`: at most so
    many tokens are held, and the oldest gives way; for rows that stand alone.
    """

    def __init__(self, store: RowStore | Blocks, head_dim: int, window: int | None = None) -> None:
        self.store, self.head_dim, self.window = store, head_dim, window
        self.observers: tuple[QuantizationObserver, ...] = getattr(self, "observers", ())
        self._transform: Transform = store if window is None else in_window(store, window)
        self.reset()

    def append_key(self, k: mx.array) -> None:
        self._waiting.append(self._vector("append_key", "k", k))

    def append_value(self, v: mx.array) -> None:
        v = self._vector("append_value", "v", v)
        if not self._waiting:
            raise RuntimeError(f"{type(self).__name__}: `append_value` must follow `append_key`")
        self._take(self._waiting[0], v)
        self._waiting.popleft()

    def append(self, k: mx.array, v: mx.array) -> None:
        k, v = self._vector("append", "k", k), self._vector("append", "v", v)
        waiting = f"{len(self._waiting)} waiting"
        check(not self._waiting, self._name("append"), "k", "must not come while a key waits for its value", waiting)
        self._take(k, v)

    def attend(self, q: mx.array) -> mx.array:
        q = self._vector("attend", "q", q)
        if len(self) == 0:
            return mx.zeros((self.head_dim,), self._dtype)
        state, transform = self._cache._settled_state(), self._transform
        state = transform.ordered(state)  # oldest first, so that a window's sums run as a fresh cache's
        q = q.astype(mx.float32)[None, None, None]
        out = transform.attend(state, q, self.head_dim**-0.5, fill=self._cache._fills[0])
        return out[0, 0, 0].astype(self._dtype)

    def memory_bytes(self) -> int:
        """Bytes of the tokens held; arrays have room for some more."""
        if self._cache.empty():
            return 0
        state = self._cache._settled_state()
        keys, values = self._transform.parts(state, self._cache._fills[0])
        return sum(nbytes(part.rows) for part in (*keys, *values))

    def reset(self) -> None:
        self._cache = TransformKVCache(self._transform)
        self._cache.observers = self.observers
        self._waiting: deque[mx.array] = deque()
        self._dtype: mx.Dtype = mx.float16

    def __len__(self) -> int:
        return self._cache.size()

    def __repr__(self) -> str:
        window = "" if self.window is None else f" of at most {self.window}"
        return f"{type(self).__name__}({self.store.name}: {len(self)} tokens{window}, {self._cache.offset} seen)"

    def _take(self, k: mx.array, v: mx.array) -> None:
        check(k.dtype == v.dtype, self._name("append_value"), "v", f"must be {k.dtype} like its key", v.dtype)
        self._cache.update_and_fetch(k[None, None, None], v[None, None, None])
        mx.eval(leaves_of(self._cache._settled_state()))
        self._dtype = v.dtype

    def _vector(self, call: str, field: str, x: Any) -> mx.array:
        x = x if isinstance(x, mx.array) else mx.array(x)
        check(x.shape == (self.head_dim,), self._name(call), field, f"must be one vector [{self.head_dim}]", x.shape)
        return x

    def _name(self, call: str) -> str:
        return f"{type(self).__name__}.{call}"


class _ConfiguredKVCache(VectorKVCache):
    """Built from a configuration; `capacity` and `sliding_window` both bound the tokens held."""

    methods: ClassVar[tuple[str, ...]]

    def __init__(self, config: KVCacheConfig) -> None:
        name = type(self).__name__
        check(config.method in self.methods, name, "method", f"must be one of {self.methods}", config.method)
        bounds = [bound for bound in (config.capacity, config.sliding_window) if bound is not None]
        transform = config.transform()
        self.observers = tuple(config.observers)
        store = transform.store if isinstance(transform, Ring) else transform
        alone = config.capacity is None or isinstance(store, RowStore)
        check(alone, config.method, "capacity", "is only for rows that stand alone", config.capacity)
        super().__init__(store, config.head_dim, min(bounds, default=None))  # type: ignore[arg-type]


class TurboQuantKVCache(_ConfiguredKVCache):
    """Keys as rotated scalar codes (`bit_width_inlier`, `seed`), values in 8 bits.

    Outlier channels of keys apart by `n_outlier_channels`, `n_calib_tokens`,
    `bit_width_outlier` and `enable_outlier_two_stream`, without a window.
    """

    methods = ("turboquant_prod", "turboquant_mse")


class QJLKVCache(_ConfiguredKVCache):
    """Keys as sign sketches (`jl_dim`, `seed`), values in 8 bits.

    Scores are unbiased and noisy: raise `jl_dim` above the head size where
    attention has to be sharp.
    """

    methods = ("qjl",)


class PolarQuantKVCache(_ConfiguredKVCache):
    """Keys in polar coordinates (`bit_width_inlier`, `seed`), values in 8 bits; angles are packed."""

    methods = ("polar",)


class SpectralQuantKVCache(_ConfiguredKVCache):
    """Keys and values in two blocks of scalar codes (`bit_width_inlier`, `spectral_key_d_eff`, `..._val_d_eff`)."""

    methods = ("spectral",)

    def compression_ratio(self) -> float:
        """Bytes of a key in 16 bits / bytes of one as it is held, whatever has come."""
        spec = KVSpec(kv_heads=1, key_dim=self.head_dim, value_dim=self.head_dim, capacity=1)
        state: Any = self._transform.init_state(spec)
        return 2 * self.head_dim / row_bytes(state.rows.keys)

    def calibrate(self, basis: SpectralBasis | Sequence[Any]) -> None:
        """Take the axes of one head; raises RuntimeError where tokens are held by other ones.

        In place of a basis: axes [D, D] of keys and of values, their energies [D], and the sizes of the first blocks.
        """
        if len(self) or self._waiting:
            raise RuntimeError(f"{type(self).__name__}: `calibrate` must come before the first token")
        basis = basis if isinstance(basis, SpectralBasis) else self._basis(basis)
        for axes in (basis.key_axes, basis.val_axes):
            fits = axes.shape in ((1, self.head_dim, self.head_dim), (self.head_dim, self.head_dim))
            rule = f"must be of one head of size {self.head_dim}"
            check(fits, self._name("calibrate"), "basis", rule, axes.shape)
        sides = {"key": (basis.key_axes, basis.key_d_eff), "value": (basis.val_axes, basis.val_d_eff)}
        codecs = {
            side: attrs.evolve(getattr(self.store, side), axes=Table.of(axes), d_eff=size)
            for side, (axes, size) in sides.items()
        }
        super(_ConfiguredKVCache, self).__init__(attrs.evolve(self.store, **codecs), self.head_dim, self.window)

    def _basis(self, entry: Sequence[Any]) -> SpectralBasis:
        """A basis of one head from its parts, those of keys and of values in turn."""
        rule = "must be a SpectralBasis, or axes, energies and sizes of keys and values in turn"
        whole = isinstance(entry, (tuple, list)) and len(entry) == 6
        check(whole, self._name("calibrate"), "basis", rule, type(entry).__name__)
        *tables, key_size, val_size = entry
        key_axes, val_axes, key_energy, val_energy = (mx.array(table).astype(mx.float32)[None] for table in tables)
        return SpectralBasis(key_axes, key_energy, int(key_size), val_axes, val_energy, int(val_size))


class SlidingWindowKVCache(VectorKVCache):
    """The rows of `inner`'s kind for the newest `window_size` tokens; `inner` must be empty and stays so."""

    def __init__(self, inner: VectorKVCache, window_size: int) -> None:
        name = type(self).__name__
        rule = "must be a per-vector cache of this package"
        check(isinstance(inner, VectorKVCache), name, "inner", rule, type(inner).__name__)
        check(len(inner) == 0, name, "inner", "must be empty", inner)
        check_int(name, "window_size", window_size, 1)
        self.observers = inner.observers
        window = window_size if inner.window is None else min(window_size, inner.window)
        super().__init__(inner.store, inner.head_dim, window)


# The per-vector class of a method.
VECTOR_CLASSES: dict[str, type[_ConfiguredKVCache]] = {
    method: kind
    for kind in (TurboQuantKVCache, PolarQuantKVCache, QJLKVCache, SpectralQuantKVCache)
    for method in kind.methods
}
