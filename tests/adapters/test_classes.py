"""The documented cache classes: their statistics, and that they stay what they are."""

import copy
from typing import Any

import mlx.core as mx
import pytest

from vq_adapters import (
    H2OKVCache,
    H2OOptions,
    KIVIKVCache,
    KIVIOptions,
    KVCacheConfig,
    QuantizerConfigError,
    SnapKVKVCache,
    SnapKVOptions,
    StreamingLLMKVCache,
    StreamingLLMOptions,
    TransformKVCache,
    TurboQuantRVQKVCache,
)
from vq_adapters.classes import CLASSES

B, H, D, DV = 2, 2, 64, 32
ITEM = {mx.float16: 2, mx.bfloat16: 2, mx.float32: 4}

CONFIGS: dict[Any, KVCacheConfig] = {
    StreamingLLMKVCache: KVCacheConfig(
        method="streaming_llm", options=StreamingLLMOptions(stream_n_sink=2, stream_window_size=14)
    ),
    H2OKVCache: KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=16, h2o_n_sink=2, h2o_grace=4)),
    SnapKVKVCache: KVCacheConfig(
        method="snapkv", options=SnapKVOptions(snap_budget=16, snap_n_sink=2, snap_obs_window=6)
    ),
    KIVIKVCache: KVCacheConfig(
        method="kivi", bit_width_inlier=4, options=KIVIOptions(kivi_group_size=32, residual_length=8)
    ),
    TurboQuantRVQKVCache: KVCacheConfig(method="turboquant_rvq", bit_width_inlier=2),
}
CALLS = (10, 30, 1, 1, 1)  # 43 tokens
BUDGET = 16
# Every documented statistic and its value while empty.
EMPTY: dict[Any, dict[str, float]] = {
    StreamingLLMKVCache: {
        "stream_kept_bytes": 0,
        "full_seq_bytes": 0,
        "streaming_ratio": 1.0,
        "tokens_seen": 0,
        "tokens_in_window": 0,
        "tokens_kept": 0,
    },
    H2OKVCache: {
        "h2o_kept_bytes": 0,
        "full_seq_bytes": 0,
        "compression_ratio": 1.0,
        "tokens_seen": 0,
        "tokens_kept": 0,
    },
    SnapKVKVCache: {
        "evicted_key_bytes": 0,
        "evicted_value_bytes": 0,
        "full_key_bytes": 0,
        "full_value_bytes": 0,
        "tokens_kept": 0,
        "tokens_total": 0,
        "eviction_ratio": 1.0,
        "keep_rate": 1.0,
    },
    KIVIKVCache: {
        "compressed_key_bytes": 0,
        "compressed_value_bytes": 0,
        "fp16_key_bytes": 0,
        "fp16_value_bytes": 0,
        "residual_fp16_bytes": 0,
        "assigned_avg_bits": 4.0,
        "effective_compression_ratio": 1.0,
    },
    TurboQuantRVQKVCache: {"compressed_key_bytes": 0, "fp16_key_bytes": 0, "assigned_bits": 2},
}

classes = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
dtypes = pytest.mark.parametrize("dtype", ITEM, ids=str)


def rows(n: int, dtype: mx.Dtype = mx.float16, batch: int = B, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of `n` tokens."""
    one, other = mx.random.split(mx.random.key(seed))
    keys = mx.random.normal((batch, H, n, D), key=one).astype(dtype)
    return keys, mx.random.normal((batch, H, n, DV), key=other).astype(dtype)


def feed(cache: TransformKVCache, calls: tuple[int, ...] = CALLS, dtype: mx.Dtype = mx.float16, batch: int = B):
    """The cache after calls of these lengths."""
    for i, n in enumerate(calls):
        mx.eval(cache.update_and_fetch(*rows(n, dtype, batch, i)))
    return cache


def statistics(cache: Any) -> dict[str, float]:
    return {name: getattr(cache, name) for name in EMPTY[type(cache)]}


def leaves_equal(one: TransformKVCache, other: TransformKVCache) -> bool:
    first, second = one.state, other.state
    return len(first) == len(second) and all(bool(mx.array_equal(x, y)) for x, y in zip(first, second, strict=True))


def test_every_class_is_here():
    assert set(CLASSES.values()) == set(CONFIGS) == set(EMPTY)
    assert {kind.method: kind for kind in CONFIGS} == CLASSES


@classes
class TestStatistics:
    def test_empty(self, kind):
        cache = kind(CONFIGS[kind])
        assert statistics(cache) == EMPTY[kind]
        for name, value in EMPTY[kind].items():
            assert type(getattr(cache, name)) is type(value), name

    def test_reading_them_changes_nothing(self, kind):
        cache, other = kind(CONFIGS[kind]), kind(CONFIGS[kind])
        queries = mx.random.normal((B, 2 * H, 30, D), key=mx.random.key(9)).astype(mx.float16)
        feed(cache, (10,))
        keys, values = cache.update_and_fetch(*rows(30, seed=1))
        before = statistics(cache)
        cache.attend(queries, keys, values, D**-0.5, "causal")
        feed(other, (10,))
        keys, values = other.update_and_fetch(*rows(30, seed=1))
        other.attend(queries, keys, values, D**-0.5, "causal")
        assert leaves_equal(cache, other)
        assert before == statistics(cache) == statistics(other)

    def test_no_name_that_mlx_lm_reads_as_its_own_quantization(self, kind):
        cache = feed(kind(CONFIGS[kind]), (5,))
        assert not hasattr(cache, "bits")
        assert not hasattr(cache, "group_size")


@dtypes
class TestNumbers:
    """Bytes by hand: H heads, 43 tokens seen, 16 rows kept (snapkv: 16 of the prompt and 3 single ones)."""

    def test_streaming_llm(self, dtype):
        cache = feed(StreamingLLMKVCache(CONFIGS[StreamingLLMKVCache]), dtype=dtype)
        full, kept = (B * H * n * (D + DV) * ITEM[dtype] for n in (43, BUDGET))
        assert statistics(cache) == {
            "stream_kept_bytes": kept,
            "full_seq_bytes": full,
            "streaming_ratio": 43 / 16,
            "tokens_seen": B * H * 43,
            "tokens_in_window": 16,
            "tokens_kept": 16,
        }

    def test_h2o(self, dtype):
        cache = feed(H2OKVCache(CONFIGS[H2OKVCache]), dtype=dtype)
        full, kept = (B * H * n * (D + DV) * ITEM[dtype] for n in (43, BUDGET))
        assert statistics(cache) == {
            "h2o_kept_bytes": kept,
            "full_seq_bytes": full,
            "compression_ratio": 43 / 16,
            "tokens_seen": B * H * 43,
            "tokens_kept": 16,
        }

    def test_snapkv(self, dtype):
        cache = feed(SnapKVKVCache(CONFIGS[SnapKVKVCache]), dtype=dtype)
        item = B * H * ITEM[dtype]
        assert statistics(cache) == {
            "evicted_key_bytes": item * 19 * D,
            "evicted_value_bytes": item * 19 * DV,
            "full_key_bytes": item * 43 * D,
            "full_value_bytes": item * 43 * DV,
            "tokens_kept": B * H * 19,
            "tokens_total": B * H * 43,
            "eviction_ratio": 43 / 19,
            "keep_rate": 19 / 43,
        }

    def test_kivi(self, dtype):
        """32 of 43 tokens are in groups of 32; a group has a scale and a zero in the dtype of what came."""
        cache = feed(KIVIKVCache(CONFIGS[KIVIKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys = B * H * D * (32 * 4 // 8 + 2 * item)
        values = B * H * 32 * (DV * 4 // 8 + 2 * item)
        exact = B * H * 11 * (D + DV) * item
        full_keys, full_values = (B * H * 43 * dim * item for dim in (D, DV))
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": full_keys,
            "fp16_value_bytes": full_values,
            "residual_fp16_bytes": exact,
            "assigned_avg_bits": 4.0,
            "effective_compression_ratio": (full_keys + full_values) / (keys + values + exact),
        }

    def test_turboquant_rvq(self, dtype):
        cache = feed(TurboQuantRVQKVCache(CONFIGS[TurboQuantRVQKVCache]), dtype=dtype)
        assert statistics(cache) == {
            "compressed_key_bytes": B * H * 43 * (2 * D * 2 // 8 + 2),
            "fp16_key_bytes": B * H * 43 * D * ITEM[dtype],
            "assigned_bits": 2,
        }


def test_storage_dtype_counts_as_stored():
    config = KVCacheConfig(method="h2o", dtype=mx.float16, options=CONFIGS[H2OKVCache].options)
    cache = feed(H2OKVCache(config), dtype=mx.float32)
    assert cache.h2o_kept_bytes == B * H * BUDGET * (D + DV) * 2
    assert cache.compression_ratio == 2 * 43 / BUDGET


def test_rvq_in_a_window():
    cache = feed(TurboQuantRVQKVCache(KVCacheConfig(method="turboquant_rvq", sliding_window=8)))
    assert cache.compressed_key_bytes == B * H * 8 * (2 * D * 2 // 8 + 2)
    assert cache.fp16_key_bytes == B * H * 43 * D * 2
    assert cache.assigned_bits == 2


@pytest.mark.parametrize(("n", "coded"), [(3, 32), (20, 0)])
def test_statistics_follow_trim(n, coded):
    cache = feed(KIVIKVCache(CONFIGS[KIVIKVCache]))
    assert cache.trim(n) == n
    assert cache.fp16_key_bytes == B * H * (43 - n) * D * 2
    assert cache.residual_fp16_bytes == B * H * (43 - n - coded) * (D + DV) * 2
    other = feed(TurboQuantRVQKVCache(CONFIGS[TurboQuantRVQKVCache]))
    other.trim(n)
    assert other.compressed_key_bytes == B * H * (43 - n) * (2 * D * 2 // 8 + 2)


@classes
class TestSameClass:
    def test_same_rows_as_the_plain_class(self, kind):
        cache, plain = kind(CONFIGS[kind]), TransformKVCache(CONFIGS[kind].transform())
        feed(cache)
        feed(plain)
        assert leaves_equal(cache, plain)

    def test_deepcopy(self, kind):
        cache = feed(kind(CONFIGS[kind]))
        before = statistics(cache)
        other = copy.deepcopy(cache)
        feed(other, (4, 1))
        assert type(other) is kind
        assert statistics(cache) == before != statistics(other)

    def test_state(self, kind):
        cache = feed(kind(CONFIGS[kind]))
        other = kind.from_state(list(cache.state))
        assert type(other) is kind
        assert leaves_equal(cache, other)
        assert statistics(other) == statistics(cache)

    def test_batches(self, kind):
        """A batch's statistics are those of its rows together, and a row taken out is what it was."""
        alone = [feed(kind(CONFIGS[kind]), calls, batch=1) for calls in ((9,), CALLS, ())]
        batch = kind.merge(alone)
        assert type(batch) is kind
        name = next(name for name in EMPTY[kind] if name.endswith("bytes") and "evicted" not in name)
        assert getattr(batch, name) == sum(getattr(cache, name) for cache in alone)
        for i, cache in enumerate(alone):
            row = batch.extract(i)
            assert type(row) is kind
            assert statistics(row) == statistics(cache)
        batch.filter([1])
        assert getattr(batch, name) == getattr(alone[1], name)
        batch.extend(kind.merge(alone[:1]))
        assert type(batch) is kind
        assert getattr(batch, name) == getattr(alone[1], name) + getattr(alone[0], name)

    def test_left_padding(self, kind):
        batch = kind(CONFIGS[kind]).to_batch([3, 0])
        assert type(batch) is kind
        feed(batch, (10, 1))
        name = "fp16_key_bytes" if "fp16_key_bytes" in EMPTY[kind] else "full_key_bytes"
        name = name if name in EMPTY[kind] else "full_seq_bytes"
        dims = D + DV if name == "full_seq_bytes" else D
        assert getattr(batch, name) == H * (8 + 11) * dims * 2

    def test_capacity_is_a_hard_cap(self, kind):
        config = copy.copy(CONFIGS[kind])
        config.capacity = 12
        cache = feed(kind(config), (10,))
        before = statistics(cache)
        with pytest.raises(QuantizerConfigError, match="`capacity`"):
            cache.update_and_fetch(*rows(3))
        assert statistics(cache) == before
        feed(cache, (2,))
        assert kind.from_state(cache.state).max_tokens == 12

    def test_refuses_another_method(self, kind):
        other = next(config for owner, config in CONFIGS.items() if owner is not kind)
        with pytest.raises(QuantizerConfigError, match=f"{kind.__name__}: `method` must be {kind.method}"):
            kind(other)

    def test_refuses_the_state_of_another_method(self, kind):
        owner = next(owner for owner in CONFIGS if owner is not kind)
        state = feed(owner(CONFIGS[owner])).state
        with pytest.raises(QuantizerConfigError, match=f"{kind.__name__}: `transform` must be of {kind.method}"):
            kind.from_state(state)
        cache = feed(kind(CONFIGS[kind]))
        before = statistics(cache)
        with pytest.raises(QuantizerConfigError):
            cache.state = state
        assert statistics(cache) == before

    def test_takes_nothing_beside_a_configuration(self, kind):
        with pytest.raises(TypeError):
            kind(CONFIGS[kind], max_tokens=3)
        with pytest.raises(TypeError):
            kind()
