"""The per-vector caches against attention written out, and against fresh caches fed with a window."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_adapters import (
    STANDALONE_METHODS,
    KVCache,
    KVCacheConfig,
    KVCacheFactory,
    PolarQuantKVCache,
    QJLKVCache,
    QuantizerConfigError,
    SlidingWindowKVCache,
    SpectralQuantKVCache,
    SpectralQuantOptions,
    TurboQuantKVCache,
)
from vq_adapters.vectors import VECTOR_CLASSES
from vq_functional.core.codec import bind

D = 64
METHODS: dict[str, Any] = {
    "turboquant_mse": TurboQuantKVCache,
    "turboquant_prod": TurboQuantKVCache,
    "polar": PolarQuantKVCache,
    "qjl": QJLKVCache,
    "spectral": SpectralQuantKVCache,
}
methods = pytest.mark.parametrize("method", METHODS)
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)


def config(method: str, **values: Any) -> KVCacheConfig:
    return KVCacheConfig(**{"method": method, "head_dim": D, "bit_width_inlier": 2, **values})


def make(method: str, **values: Any) -> Any:
    return METHODS[method](KVCacheConfig(**{"method": method, "head_dim": D, **values}))


def tokens(n: int, dtype: mx.Dtype = mx.float16, seed: int = 0, dim: int = D) -> tuple[mx.array, mx.array]:
    one, other = mx.random.split(mx.random.key(seed))
    keys, values = mx.random.normal((n, dim), key=one), mx.random.normal((n, dim), key=other)
    return keys.astype(dtype), values.astype(dtype)


def query(seed: int = 99, dim: int = D) -> mx.array:
    return mx.random.normal((dim,), key=mx.random.key(seed)).astype(mx.float16)


def feed(cache: KVCache, keys: mx.array, values: mx.array) -> Any:
    for k, v in zip(keys, values, strict=True):
        cache.append(k, v)
    return cache


def attention(store: Any, q: mx.array, keys: mx.array, values: mx.array) -> np.ndarray:
    """Softmax over the rows as the store's codecs give each of them back, one at a time."""
    decoded = []
    for codec, rows in ((store.key, keys), (store.value, values)):
        coder = bind(codec, rows.shape[1], keys.dtype)
        decoded.append(
            [np.array(coder.decode(coder.encode(x[None, None, None])).astype(mx.float32))[0, 0, 0] for x in rows]
        )
    wanted = np.array(q.astype(mx.float32), np.float64)
    scores = np.array([k @ wanted for k in decoded[0]]) / np.sqrt(len(wanted))
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return sum(weight * v for weight, v in zip(weights, decoded[1], strict=True))


def test_classes_of_the_methods():
    assert set(VECTOR_CLASSES) >= STANDALONE_METHODS
    assert set(METHODS) <= STANDALONE_METHODS
    for method, kind in METHODS.items():
        assert type(KVCacheFactory.create(config(method))) is kind
        assert issubclass(kind, KVCache)


@methods
@dtypes
@pytest.mark.parametrize("n", [1, 5, 70])
def test_attends_to_what_the_codes_say(method, dtype, n):
    keys, values = tokens(n, dtype)
    cache = feed(make(method), keys, values)
    wanted = attention(config(method).transform(), query(), keys, values)
    got = cache.attend(query())
    assert got.shape == (D,)
    assert got.dtype == dtype
    tolerance = {mx.float16: 2e-3, mx.bfloat16: 2e-2, mx.float32: 1e-4}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), wanted, atol=tolerance)


@methods
@pytest.mark.parametrize("bound", ["capacity", "sliding_window", "wrapper"])
@given(n=st.integers(1, 20), window=st.integers(1, 9))
def test_a_window_is_a_fresh_cache_of_the_newest_tokens(method, bound, n, window):
    """Bit for bit, before the window is full as well as after."""
    keys, values = tokens(n)
    if bound == "wrapper":
        cache = SlidingWindowKVCache(make(method), window)
    else:
        cache = KVCacheFactory.create(config(method, **{bound: window}))
    feed(cache, keys, values)
    fresh = feed(make(method), keys[-window:], values[-window:])
    assert len(cache) == len(fresh) == min(n, window)
    assert mx.array_equal(cache.attend(query()), fresh.attend(query()))
    assert cache.memory_bytes() == fresh.memory_bytes()


@methods
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("n", [1, 9, 65])
def test_memory_bytes(method, dim, n):
    """A key by its method, 2 bits a coordinate where these count, and a value of D + 2 or of the same bits."""
    cache = feed(make(method, head_dim=dim), *tokens(n, dim=dim))
    angles = sum(4 * -(-bits * (dim >> level) // 32) for level, bits in enumerate((4, 2, 2, 2), 1))
    keys = {
        "turboquant_mse": dim // 4 + 2,  # codes and a norm
        "turboquant_prod": dim // 8 + 2 + dim // 8 + 2,  # codes, signs, two norms
        "polar": angles + 2 * dim // 16,  # angles and radii
        "qjl": dim // 8 + 2,  # signs and a norm
        "spectral": dim // 4 + 4 + 1 + 2,  # codes, a scale of each block, signs and norm of what is left over
    }
    value = dim // 4 + 4 if method == "spectral" else dim + 2
    assert cache.memory_bytes() == n * (keys[method] + value)


def test_memory_bytes_follow_the_sketch():
    cache = feed(make("qjl", jl_dim=256), *tokens(3))
    assert cache.memory_bytes() == 3 * (256 // 8 + 2 + D + 2)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("sketch", [True, False])
def test_compression_ratio_is_that_of_keys(bits, sketch):
    options = SpectralQuantOptions(spectral_apply_qjl=sketch)
    cache = make("spectral", bit_width_inlier=bits, options=options)
    wanted = 2 * D / (D * bits // 8 + 4 + 3 * sketch)
    assert cache.compression_ratio() == wanted
    feed(cache, *tokens(3, mx.float32))
    assert cache.compression_ratio() == wanted
    assert make("spectral", bit_width_inlier=bits, options=options, capacity=2).compression_ratio() == wanted


class TestCalibrated:
    """Keys of three axes, values of five."""

    @staticmethod
    def _rows(n: int, seed: int) -> list[mx.array]:
        draws = [mx.random.normal((n, size), key=mx.random.key(seed + size)) for size in (3, 5)]
        axes = [mx.random.normal((size, D), key=mx.random.key(size)) for size in (3, 5)]
        return [draw @ axis for draw, axis in zip(draws, axes, strict=True)]

    def _basis(self) -> vq.SpectralBasis:
        return vq.spectral_calibrate(*(x[:, None] for x in self._rows(200, 0)), key_d_eff=3, val_d_eff=5)

    def test_a_basis_and_its_parts_are_the_same(self):
        basis, keys_values = self._basis(), self._rows(9, 1)
        sides = ((basis.key_axes, basis.val_axes), (basis.key_energy, basis.val_energy))
        parts = (*(x[0] for side in sides for x in side), basis.key_d_eff, basis.val_d_eff)
        caches = [make("spectral") for _ in range(3)]
        for cache, entry in zip(caches, (basis, parts, tuple(np.array(x) for x in parts)), strict=True):
            cache.calibrate(entry)
            feed(cache, *keys_values)
        for cache in caches[1:]:
            assert mx.array_equal(cache.attend(query()), caches[0].attend(query()))
        uncalibrated = feed(make("spectral"), *keys_values)
        assert not mx.array_equal(uncalibrated.attend(query()), caches[0].attend(query()))

    @pytest.mark.parametrize("window", [None, 4])
    def test_reset_keeps_them(self, window):
        cache, keys_values = make("spectral", capacity=window), self._rows(9, 1)
        cache.calibrate(self._basis())
        first = feed(cache, *keys_values).attend(query())
        cache.reset()
        assert len(cache) == 0
        assert mx.array_equal(feed(cache, *keys_values).attend(query()), first)

    @pytest.mark.parametrize(
        ("change", "rule"),
        [
            (lambda parts: parts[:5], "`basis` must be a SpectralBasis"),
            (lambda parts: None, "`basis` must be a SpectralBasis"),
            (lambda parts: (2 * parts[0], *parts[1:]), "`key_axes` must be orthogonal"),
            (lambda parts: (mx.eye(5), parts[1], parts[2][:5], *parts[3:]), "`basis` must be of one head"),
            (lambda parts: (*parts[:4], 0, 5), "`d_eff`"),
        ],
        ids=["five", "none", "not orthogonal", "another size", "empty block"],
    )
    def test_what_fits_not_is_refused(self, change, rule):
        basis = self._basis()
        parts = (basis.key_axes[0], basis.val_axes[0], basis.key_energy[0], basis.val_energy[0], 3, 5)
        cache = make("spectral")
        with pytest.raises(QuantizerConfigError, match=rule):
            cache.calibrate(change(parts))
        assert mx.array_equal(
            feed(cache, *tokens(3)).attend(query()), feed(make("spectral"), *tokens(3)).attend(query())
        )

    def test_comes_before_the_first_token(self):
        for cache in (feed(make("spectral"), *tokens(1)), make("spectral")):
            if len(cache) == 0:
                cache.append_key(query())
            with pytest.raises(RuntimeError, match="`calibrate` must come before the first token"):
                cache.calibrate(self._basis())


@methods
def test_memory_is_flat_once_the_window_is_full(method):
    cache = SlidingWindowKVCache(make(method), 8)
    sizes = [cache.memory_bytes()]
    for k, v in zip(*tokens(40), strict=True):
        cache.append(k, v)
        sizes.append(cache.memory_bytes())
    assert sizes[0] == 0
    assert all(later > earlier for earlier, later in itertools.pairwise(sizes[:9]))
    assert set(sizes[8:]) == {sizes[8]}
    assert cache._cache.nbytes < 2 * sizes[8]


@methods
def test_keys_may_come_before_their_values(method):
    keys, values = tokens(5)
    cache, other = make(method), feed(make(method), keys, values)
    for k in keys:
        cache.append_key(k)
    assert len(cache) == 0
    for v in values:
        cache.append_value(v)
    assert len(cache) == 5
    assert mx.array_equal(cache.attend(query()), other.attend(query()))


@methods
def test_a_key_without_a_value_is_not_there_yet(method):
    keys, values = tokens(4)
    cache = feed(make(method), keys[:3], values[:3])
    before, held = cache.attend(query()), cache.memory_bytes()
    cache.append_key(keys[3])
    assert (len(cache), cache.memory_bytes()) == (3, held)
    assert mx.array_equal(cache.attend(query()), before)
    with pytest.raises(QuantizerConfigError, match="a key waits"):
        cache.append(keys[3], values[3])
    cache.append_value(values[3])
    assert len(cache) == 4


@methods
def test_a_value_without_a_key(method):
    for cache in (make(method), SlidingWindowKVCache(make(method), 3)):
        with pytest.raises(RuntimeError, match="append_value"):
            cache.append_value(query())
        cache.append(query(), query())
        with pytest.raises(RuntimeError, match="append_value"):
            cache.append_value(query())


@methods
@pytest.mark.parametrize("shape", [(), (D - 1,), (D + 1,), (2, D), (1, D), (1, 1, 1, D)])
def test_wrong_sizes(method, shape):
    cache = make(method)
    wrong = mx.zeros(shape, mx.float16)
    for call in (cache.append_key, cache.append_value, cache.attend):
        with pytest.raises(
            ValueError, match=rf"{type(cache).__name__}\.{call.__name__}: `.` must be one vector \[{D}\]"
        ):
            call(wrong)
    with pytest.raises(QuantizerConfigError, match="`v`"):
        cache.append(query(), wrong)
    with pytest.raises(RuntimeError):
        cache.append_value(query())  # the key of a refused pair doesn't wait
    assert len(cache) == 0


@methods
def test_a_refused_value_leaves_its_key_waiting(method):
    cache = make(method)
    cache.append_key(query())
    for wrong in (mx.zeros((D,), mx.float32), mx.zeros((D,), mx.int32), mx.zeros((3,), mx.float16)):
        with pytest.raises(QuantizerConfigError):
            cache.append_value(wrong)
    cache.append_value(query())
    assert len(cache) == 1


@methods
def test_numbers_that_are_no_floats(method):
    cache = make(method)
    with pytest.raises(QuantizerConfigError, match="float16"):
        cache.append([1] * D, [1] * D)
    feed(cache, *(np.array(x.astype(mx.float32)) for x in tokens(2)))
    assert cache.attend(query()).dtype == mx.float32


@methods
@dtypes
def test_empty(method, dtype):
    cache = make(method)
    assert mx.array_equal(cache.attend(query()), mx.zeros((D,), mx.float16))
    assert cache.attend(query()).dtype == mx.float16
    assert (len(cache), cache.memory_bytes()) == (0, 0)
    feed(cache, *tokens(1, dtype))
    assert cache.attend(query()).dtype == dtype


@methods
@pytest.mark.parametrize("window", [None, 4])
def test_reset(method, window):
    keys, values = tokens(7)
    cache = make(method, capacity=window)
    feed(cache, *tokens(5, seed=1))
    cache.append_key(query())
    cache.reset()
    assert (len(cache), cache.memory_bytes()) == (0, 0)
    with pytest.raises(RuntimeError):
        cache.append_value(query())
    feed(cache, keys, values)
    assert mx.array_equal(cache.attend(query()), feed(make(method, capacity=window), keys, values).attend(query()))


@methods
def test_seed(method):
    keys, values = tokens(9)
    same, other = (feed(make(method, seed=seed), keys, values) for seed in (42, 43))
    assert mx.array_equal(feed(make(method), keys, values).attend(query()), same.attend(query()))
    assert not mx.array_equal(same.attend(query()), other.attend(query()))


@methods
def test_capacity_and_window_together(method):
    cache = KVCacheFactory.create(config(method, capacity=6, sliding_window=4))
    assert isinstance(cache, SlidingWindowKVCache)
    assert len(feed(cache, *tokens(9))) == 4
    assert len(feed(SlidingWindowKVCache(make(method, capacity=3), 5), *tokens(9))) == 3
    assert len(feed(make(method, capacity=6, sliding_window=4), *tokens(9))) == 4


@pytest.mark.parametrize("window", [0, -1, 2.5, None, True])
def test_bad_windows(window):
    with pytest.raises(QuantizerConfigError, match="SlidingWindowKVCache: `window_size`"):
        SlidingWindowKVCache(make("qjl"), window)


def test_what_a_window_can_wrap():
    with pytest.raises(QuantizerConfigError, match="`inner` must be empty"):
        SlidingWindowKVCache(feed(make("qjl"), *tokens(1)), 3)
    with pytest.raises(QuantizerConfigError, match="`inner` must be a per-vector cache"):
        SlidingWindowKVCache(vq.qjl(), 3)
    inner = make("qjl")
    feed(SlidingWindowKVCache(inner, 3), *tokens(5))
    assert len(inner) == 0


@methods
def test_refuses_another_method(method):
    for other in ("h2o", "turboquant_rvq", "qjl", "turboquant_mse"):
        if METHODS.get(other) is not METHODS[method]:
            with pytest.raises(QuantizerConfigError, match=f"{METHODS[method].__name__}: `method`"):
                METHODS[method](KVCacheConfig(method=other, head_dim=D))


def test_repr():
    cache = feed(make("qjl", capacity=4), *tokens(6))
    assert repr(cache) == "QJLKVCache(qjl: 4 tokens of at most 4, 6 seen)"
    assert repr(make("turboquant_mse")) == "TurboQuantKVCache(turboquant_mse: 0 tokens, 0 seen)"


def test_the_abstract_cache_appends_pairs():
    class Listed(KVCache):
        def __init__(self):
            self.calls = []

        def append_key(self, k):
            self.calls.append(("key", k))

        def append_value(self, v):
            self.calls.append(("value", v))

        def attend(self, q):
            return q

        def memory_bytes(self):
            return 0

        def reset(self):
            self.calls = []

        def __len__(self):
            return len(self.calls) // 2

    cache = Listed()
    cache.append(1, 2)
    assert cache.calls == [("key", 1), ("value", 2)]
    with pytest.raises(TypeError, match="abstract"):
        KVCache()
