"""The numbers that the documented classes give, by hand: B batch rows, H heads, 43 tokens."""

import warnings
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from configs import CALLS, CONFIGS, DV, OPTIONS, B, D, H, feed, rows, statistics
from models import build, tokens

from vq_adapters import (
    A2ATSKVCache,
    A2ATSOptions,
    AdaKVCache,
    AdaKVOptions,
    AMCKVCache,
    AMCOptions,
    AnchorKVKVCache,
    CaMKVCache,
    CaMOptions,
    ChunkKVCache,
    ChunkKVIndexReuseCoordinator,
    ChunkKVOptions,
    CurDKVCache,
    H2OKVCache,
    KeyformerKVCache,
    KittyKVCache,
    KittyOptions,
    KIVIKVCache,
    KNormKVCache,
    KVCacheBuilder,
    KVCacheConfig,
    KVQuantKVCache,
    KVQuantOptions,
    KVTCKVCache,
    KVTCOptions,
    KVzipCache,
    MorphKVCache,
    NestedKVCache,
    NSNQuantKVCache,
    PALUKVCache,
    PALUOptions,
    PyramidKVCache,
    PyramidKVOptions,
    QFiltersKVCache,
    QFiltersOptions,
    QuantizerConfigError,
    RocketKVKVCache,
    SinkProtectedKVCache,
    SKVQKVCache,
    SKVQOptions,
    SnapKVKVCache,
    SqueezeAttentionCache,
    SqueezeCoordinator,
    StreamingLLMKVCache,
    SVDqKVCache,
    SVDqOptions,
    TOVAKVCache,
    TurboQuantRVQKVCache,
    VecInferKVCache,
    VecInferOptions,
    XQuantKVCache,
)
from vq_functional.core.table import Table

ITEM = {mx.float16: 2, mx.bfloat16: 2, mx.float32: 4}
TOKENS = sum(CALLS)
# Rows that stay in each head, and what the class calls their bytes.
KEPT: dict[Any, tuple[int, str]] = {
    H2OKVCache: (16, "h2o"),
    TOVAKVCache: (16, "tova"),
    PyramidKVCache: (16, "pyramid"),
    SqueezeAttentionCache: (16, "squeeze"),
    ChunkKVCache: (2 + 2 * 4 + 1, "chunkkv"),  # sinks, two chunks, and one row of the unfinished one
    CaMKVCache: (16, "cam"),
    KNormKVCache: (16, "knorm"),
    QFiltersKVCache: (16, "qfilters"),
    KeyformerKVCache: (16, "keyformer"),
    MorphKVCache: (16, "morphkv"),
    KVzipCache: (16, "kvzip"),
    CurDKVCache: (16, "curdkv"),
    NestedKVCache: (16 + 3, "nestedkv"),  # of the prompt, and single tokens
}
SIXTEEN = [kind for kind, (kept, _) in KEPT.items() if kept == 16]

dtypes = pytest.mark.parametrize("dtype", ITEM, ids=str)


@dtypes
class TestBytes:
    @pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
    def test_budgets(self, kind, dtype):
        kept, name = KEPT[kind]
        cache = feed(kind(CONFIGS[kind]), dtype=dtype)
        row = B * H * (D + DV) * ITEM[dtype]
        assert getattr(cache, f"{name}_kept_bytes") == row * kept
        assert cache.full_seq_bytes == row * TOKENS
        assert cache.compression_ratio == TOKENS / kept
        assert cache.tokens_seen == B * H * TOKENS
        assert cache.tokens_kept == kept

    def test_streaming_llm(self, dtype):
        cache = feed(StreamingLLMKVCache(CONFIGS[StreamingLLMKVCache]), dtype=dtype)
        row = B * H * (D + DV) * ITEM[dtype]
        assert statistics(cache) == {
            "stream_kept_bytes": row * 16,
            "full_seq_bytes": row * TOKENS,
            "streaming_ratio": TOKENS / 16,
            "tokens_seen": B * H * TOKENS,
            "tokens_in_window": 16,
            "tokens_kept": 16,
        }

    def test_snapkv(self, dtype):
        """16 rows of the prompt and 3 single tokens."""
        cache = feed(SnapKVKVCache(CONFIGS[SnapKVKVCache]), dtype=dtype)
        item = B * H * ITEM[dtype]
        assert statistics(cache) == {
            "evicted_key_bytes": item * 19 * D,
            "evicted_value_bytes": item * 19 * DV,
            "full_key_bytes": item * TOKENS * D,
            "full_value_bytes": item * TOKENS * DV,
            "tokens_kept": B * H * 19,
            "tokens_total": B * H * TOKENS,
            "eviction_ratio": TOKENS / 19,
            "keep_rate": 19 / TOKENS,
        }

    def test_rocketkv(self, dtype):
        """A ratio of 4 is 4**0.32 and 4**0.68: of 40 prompt tokens 26 stay, beside 3 single ones, in 15 pages of 2."""
        cache = feed(RocketKVKVCache(CONFIGS[RocketKVKVCache]), dtype=dtype)
        item = B * H * ITEM[dtype]
        kept, pages, full = item * 29 * (D + DV), item * 15 * 2 * D, item * TOKENS * (D + DV)
        assert statistics(cache) == {
            "stage1_bytes": kept,
            "stage2_aux_bytes": pages,
            "full_fp16_bytes_total": full,
            "compression_ratio": full / (kept + pages),
            "tokens_kept": B * H * 29,
            "tokens_total": B * H * TOKENS,
            "keep_rate": 29 / TOKENS,
            "stage1_ratio": 4**0.32,
            "page_size": 2,
            "head_topk1": 50,  # 64 / (4**0.68 / 2)
        }

    def test_kivi(self, dtype):
        """32 of 43 tokens are in groups of 32; a group has a scale and a zero in the dtype of what came."""
        cache = feed(KIVIKVCache(CONFIGS[KIVIKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys = B * H * D * (32 * 4 // 8 + 2 * item)
        values = B * H * 32 * (DV * 4 // 8 + 2 * item)
        exact = B * H * 11 * (D + DV) * item
        full_keys, full_values = (B * H * TOKENS * dim * item for dim in (D, DV))
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": full_keys,
            "fp16_value_bytes": full_values,
            "residual_fp16_bytes": exact,
            "assigned_avg_bits": 4.0,
            "effective_compression_ratio": (full_keys + full_values) / (keys + values + exact),
        }

    @pytest.mark.parametrize(("kind", "n_sink"), [(SinkProtectedKVCache, 5), (KittyKVCache, 32), (AdaKVCache, 3)])
    def test_rows_of_sinks_are_held_beside_codes(self, kind, n_sink, dtype):
        options = {
            SinkProtectedKVCache: {"n_sink_tokens": n_sink},
            KittyKVCache: {"options": KittyOptions(kitty_n_sink=n_sink)},
            AdaKVCache: {"options": AdaKVOptions(adakv_n_sink=n_sink)},
        }
        cache = feed(kind(KVCacheConfig(method=kind.method, **options[kind])), (300,), dtype=dtype)
        exact = cache.residual_fp16_bytes + B * H * n_sink * (D + DV) * ITEM[dtype]
        held = cache.compressed_key_bytes + cache.compressed_value_bytes + exact
        full = B * H * 300 * (D + DV) * ITEM[dtype]
        assert cache.effective_compression_ratio == full / held

    def test_svdq(self, dtype):
        """Of 16 axes four each have 8, 4, 2 and no bits; 32 of 43 tokens are in codes."""
        cache = feed(SVDqKVCache(CONFIGS[SVDqKVCache]), dtype=dtype)
        item = ITEM[dtype]
        codes = 32 * 4 * (8 + 4 + 2) // 8 + 12 * 2 * item
        assert statistics(cache) == {
            "compressed_key_bytes": B * H * (codes + D * 12 * item + 4 * D),
            "compressed_value_bytes": B * H * 32 * DV * item,
            "fp16_key_bytes": B * H * TOKENS * D * item,
            "fp16_value_bytes": B * H * TOKENS * DV * item,
            "value_fp16_bytes": B * H * TOKENS * DV * item,
            "rank": 16,
            "assigned_avg_bits": 4 * (8 + 4 + 2) / D,
        }

    def test_palu(self, dtype):
        """Both heads share a latent of 32 components at 4 bits; 64 of 161 tokens are in codes."""
        cache = feed(PALUKVCache(CONFIGS[PALUKVCache]), (160, 1), dtype=dtype)
        item = ITEM[dtype]
        codes = B * 64 * (32 * 4 // 8 + 2 * item)
        key, value = (B * H * dim * (32 + 1) * item for dim in (D, DV))
        assert statistics(cache) == {
            "compressed_key_bytes": codes + key,
            "compressed_value_bytes": codes + value,
            "fp16_key_bytes": B * H * 161 * D * item,
            "fp16_value_bytes": B * H * 161 * DV * item,
            "projection_bytes": key + value,
            "rank": 16,
            "assigned_avg_bits": 32 * 4 / (H * DV),
        }

    def test_kvtc(self, dtype):
        """128 bits a token; 64 of 201 tokens are in codes, of which four are sinks."""
        cache = feed(KVTCKVCache(CONFIGS[KVTCKVCache]), (200, 1), dtype=dtype)
        item = ITEM[dtype]
        codes = B * H * 64 * 128 // 8
        key, value = (B * H * (dim * (dim + 1) * item + dim * (1 + 4 + 4)) for dim in (D, DV))
        exact = B * H * (201 - 64 + 4) * (D + DV) * item
        full = [B * H * 201 * dim * item for dim in (D, DV)]
        total = 2 * codes + key + value + exact
        gain = cache.entropy_coding_gain
        assert 0.5 < gain < 2
        assert statistics(cache) == {
            "kvtc_bytes": total,
            "compressed_key_bytes": codes + key,
            "compressed_value_bytes": codes + value,
            "fp16_key_bytes": full[0],
            "fp16_value_bytes": full[1],
            "full_seq_bytes": sum(full),
            "compression_ratio": sum(full) / total,
            "pre_entropy_bytes": 2 * codes,
            "entropy_coding_gain": gain,
            "bit_budget": 128,
        }

    def test_amc(self, dtype):
        """Two blocks of 16 tokens: 4 are exact, 5 have 22 (of values 11) channels at 8 bits, 7 have 4 (2) at 4."""
        cache = feed(AMCKVCache(CONFIGS[AMCKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys = 16 + 4 * D * item + 5 * (22 + 3 * item) + 7 * (2 + item) + D * item
        values = 4 * DV * item + 5 * (11 + 2 * item) + 7 * (1 + item) + DV * item
        keys, values = B * H * (2 * keys + 2 * D), B * H * (2 * values + 2 * DV)
        full = [B * H * TOKENS * dim * item for dim in (D, DV)]
        total = keys + values + B * H * (11 + 4) * (D + DV) * item
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": full[0],
            "fp16_value_bytes": full[1],
            "amc_kept_bytes": total,
            "full_seq_bytes": sum(full),
            "compression_ratio": sum(full) / total,
            "tokens_seen": B * H * TOKENS,
            "tokens_kept": B * H * TOKENS,
            "tokens_high": B * H * (2 * 4 + 11),
            "tokens_mid": B * H * 2 * 5,
            "tokens_low": B * H * 2 * 7,
        }

    def test_xquant(self, dtype):
        """A layer by itself: 32 of 100 tokens are in groups of 32 numbers."""
        cache = feed(XQuantKVCache(CONFIGS[XQuantKVCache]), (99, 1), dtype=dtype)
        item = ITEM[dtype]
        keys = B * H * D * (32 * 2 // 8 + 2 * item)
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": B * H * 32 * (DV * 2 // 8 + 2 * item),
            "fp16_key_bytes": B * H * 100 * D * item,
            "fp16_value_bytes": B * H * 100 * DV * item,
            "role": "anchor",
            "group_id": 0,
            "reuse_param_bytes": 0,
            "effective_pair_bits": 8 * keys / (B * H * 32 * D),
        }

    def test_anchorkv(self, dtype):
        """Of a prompt of 200 tokens 12 are anchors; what 0.4 of its bytes leave is for residuals, half for keys."""
        cache = feed(AnchorKVKVCache(CONFIGS[AnchorKVKVCache]), (128, 72, 1, 1), dtype=dtype)
        row, key, value = (D + DV) * ITEM[dtype], D * 2 // 8 + 6, DV * 2 // 8 + 6
        base = H * (12 * (row + 4) + 200 * 2 * (2 + 2))
        left = int(H * 0.4 * row * 200 - base)
        pairs = left // (key + value)
        more = left - pairs * (key + value) >= value
        pairs, more = (pairs, more) if 2 * pairs + more <= 2 * H * 188 else (H * 188, False)
        full, total = B * H * 202 * row, B * (base + pairs * (key + value) + more * value + H * 2 * row)
        assert statistics(cache) == {
            "anchorkv_bytes": total,
            "full_seq_bytes": full,
            "compression_ratio": full / total,
            "tokens_kept": B * H * 202,
            "tokens_total": B * H * 202,
            "n_anchor_total": B * H * 12,
            "n_residual_total": B * (2 * pairs + more),
        }
        state = cache._settled_state()
        assert (state.position >= 0).sum() == cache.n_anchor_total
        assert sum((side.place >= 0).sum() for side in (state.keys, state.values)) == cache.n_residual_total

    def test_turboquant_rvq(self, dtype):
        cache = feed(TurboQuantRVQKVCache(CONFIGS[TurboQuantRVQKVCache]), dtype=dtype)
        assert statistics(cache) == {
            "compressed_key_bytes": B * H * TOKENS * (2 * D * 2 // 8 + 2),
            "fp16_key_bytes": B * H * TOKENS * D * ITEM[dtype],
            "assigned_bits": 2,
        }

    def test_skvq(self, dtype):
        """32 of 43 tokens are in groups of 32 channels, two sinks among them; 11 are exact."""
        cache = feed(SKVQKVCache(CONFIGS[SKVQKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys, values = (B * H * 32 * (dim * 2 // 8 + dim // 32 * 2 * item) for dim in (D, DV))
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": B * H * TOKENS * D * item,
            "fp16_value_bytes": B * H * TOKENS * DV * item,
            "residual_fp16_bytes": B * H * (11 + 2) * (D + DV) * item,
            "perm_bytes": B * H * (D + DV) * 2,
            "quantized_tokens": 32,
            "tokens_seen": TOKENS,
            "assigned_avg_bits": 2 + 2 * item * 8 / 32,
        }

    def test_kvquant(self, dtype):
        """32 of 43 tokens are in 3-bit codes, one number of each row exact with its channel in a byte."""
        cache = feed(KVQuantKVCache(CONFIGS[KVQuantKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys = B * H * (32 * (D * 3 // 8 + 1 + item) + 2 * 4 * D)
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": B * H * 32 * (DV * 3 // 8 + 1 + item + 2 * item),
            "fp16_key_bytes": B * H * TOKENS * D * item,
            "fp16_value_bytes": B * H * TOKENS * DV * item,
            "nuq_bits": 3,
            "outlier_fraction": 0.01,
            "outlier_count": B * H * 32 * 2,
            "n_sink": 1,
            "sink_kept": 1,
            "effective_bits": 8 * keys / (B * H * 32 * D),
        }

    def test_nsnquant(self, dtype):
        """A chunk of 32 tokens; every 8 numbers take an index and a byte of signs, a row has two lengths."""
        cache = feed(NSNQuantKVCache(CONFIGS[NSNQuantKVCache]), dtype=dtype)
        item = ITEM[dtype]
        keys, values = (B * H * (32 * (2 * dim // 8 + 2 * item) + dim * item) for dim in (D, DV))
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": B * H * TOKENS * D * item,
            "fp16_value_bytes": B * H * TOKENS * DV * item,
            "residual_fp16_bytes": B * H * 11 * (D + DV) * item,
            "quantized_tokens": 32,
            "assigned_avg_bits": 8 * keys / (B * H * 32 * D),
        }

    def test_vecinfer(self, dtype):
        """Every four numbers of a key and every eight of a value are a byte; a row has a gain of 16 bits."""
        cache = feed(VecInferKVCache(CONFIGS[VecInferKVCache]), dtype=dtype)
        assert statistics(cache) == {
            "compressed_key_bytes": B * H * TOKENS * (D // 4 + 2),
            "compressed_value_bytes": B * H * TOKENS * (DV // 8 + 2),
            "fp16_key_bytes": B * H * TOKENS * D * ITEM[dtype],
            "fp16_value_bytes": B * H * TOKENS * DV * ITEM[dtype],
            "codebook_bytes": 4 * 256 * 4 + 4 * 256 * 8,
            "assigned_avg_bits": (8 / 4 + 8 / 8) / 2,
        }

    def test_a2ats(self, dtype):
        """Rows of 8 bits and a scale; a byte for every eight numbers of a key, and its gain. A fifth of 43 is 9."""
        cache = feed(A2ATSKVCache(CONFIGS[A2ATSKVCache]), dtype=dtype)
        keys, values = (B * H * TOKENS * (dim + ITEM[dtype]) for dim in (D, DV))
        keys += B * H * TOKENS * (D // 8 + 2)
        full = [B * H * TOKENS * dim * ITEM[dtype] for dim in (D, DV)]
        assert statistics(cache) == {
            "compressed_key_bytes": keys,
            "compressed_value_bytes": values,
            "fp16_key_bytes": full[0],
            "fp16_value_bytes": full[1],
            "codebook_bytes": 4 * 256 * 8,
            "compression_ratio": sum(full) / (keys + values),
            "assigned_avg_bits": 1.0,
            "tokens_seen": TOKENS,
            "tokens_retrieved": 9,
        }


class TestTables:
    """Orders, ranges and levels that a cache found, of its first batch row."""

    def test_orders_of_channels(self):
        cache = SKVQKVCache(CONFIGS[SKVQKVCache])
        assert (cache.key_perms, cache.value_perms) == (None, None)
        feed(cache, (39,))
        assert (cache.key_perms, cache.value_perms) == (None, None)
        feed(cache, (1, 1))
        for order, dim in ((cache.key_perms, D), (cache.value_perms, DV)):
            assert order.dtype == mx.int32
            assert mx.array_equal(mx.sort(order, axis=-1), mx.broadcast_to(mx.arange(dim), (H, dim)))
        alone = SKVQKVCache(CONFIGS[SKVQKVCache])
        for i, n in enumerate((39, 1, 1)):
            alone.update_and_fetch(*(x[:1] for x in rows(n, seed=0 if i < 2 else 1)))
        assert mx.array_equal(alone.key_perms, cache.key_perms)

    def test_channels_in_their_own_order(self):
        options = SKVQOptions(skvq_window=8, skvq_n_sink=2, skvq_reorder=False)
        cache = feed(SKVQKVCache(KVCacheConfig(method="skvq", options=options)))
        assert (cache.key_perms, cache.value_perms, cache.perm_bytes) == (None, None, 0)
        assert cache.quantized_tokens == 32

    def test_orders_that_are_given(self):
        order = np.tile(np.arange(D)[::-1], (H, 1))
        options = SKVQOptions(skvq_window=8, skvq_key_order=Table.of(order))
        cache = feed(SKVQKVCache(KVCacheConfig(method="skvq", options=options)))
        assert cache.key_perms.tolist() == order.tolist()

    def test_units_of_scales_count_with_the_orders(self):
        options = SKVQOptions(skvq_window=8, skvq_n_sink=2, skvq_fp8=True)
        cache = feed(SKVQKVCache(KVCacheConfig(method="skvq", options=options)))
        assert cache.perm_bytes == B * H * ((D + DV) * 2 + 2 * 4)
        assert cache.assigned_avg_bits == 2 + 2 * 8 / 32

    @pytest.mark.parametrize("levels", ["gaussian", "uniform", "fitted"])
    def test_levels_and_ranges(self, levels):
        options = KVQuantOptions(kvquant_n_fit=16, kvquant_residual_length=8, kvquant_levels=levels)
        cache = KVQuantKVCache(KVCacheConfig(method="kvquant", options=options))
        for calls in ((), (39,)):
            feed(cache, calls)
            assert (cache.key_levels, cache.value_levels, cache.key_outlier_thresh) == (None, None, None)
        feed(cache, (1, 1))
        for table in (cache.key_levels, cache.value_levels):
            assert table.shape == (8,)
            assert mx.all(table[1:] > table[:-1])
            assert mx.abs(table).max() <= 1
        if levels == "uniform":
            assert mx.allclose(cache.key_levels, mx.linspace(-1, 1, 8))
        low, high = cache.key_outlier_thresh
        assert low.shape == high.shape == (H, D)
        keys = mx.sort(rows(39)[0][0, :, 1:17].astype(mx.float32), axis=1)
        assert mx.mean((low <= keys[:, 1]) & (high >= keys[:, -2])) > 0.95  # but for channels with an outlier
        if levels == "uniform":
            assert mx.all(low >= keys[:, 0] - 1e-6) and mx.all(high <= keys[:, -1] + 1e-6)

    def test_levels_and_ranges_that_are_given(self):
        tables = [np.linspace(-1, 1, 8), np.linspace(-0.9, 0.9, 8)]
        options = KVQuantOptions(
            kvquant_residual_length=8,
            kvquant_k_levels=Table.of(tables[0]),
            kvquant_v_levels=Table.of(tables[1]),
            kvquant_k_range=Table.of(np.stack([np.full((H, D), 0.5), np.full((H, D), 2.0)])),
        )
        cache = feed(KVQuantKVCache(KVCacheConfig(method="kvquant", options=options)))
        np.testing.assert_allclose(np.array(cache.key_levels), tables[0], rtol=1e-6)
        np.testing.assert_allclose(np.array(cache.value_levels), tables[1], rtol=1e-6)
        assert cache.key_outlier_thresh.tolist() == [[[-1.5] * D] * H, [[2.5] * D] * H]

    def test_blocks_with_ranges_of_their_own(self):
        options = KVQuantOptions(kvquant_refit_interval=32, kvquant_residual_length=8)
        cache = feed(KVQuantKVCache(KVCacheConfig(method="kvquant", options=options)))
        assert cache.key_outlier_thresh is None
        assert cache.key_levels.shape == (8,)

    def test_codebooks_that_are_given(self):
        books = np.random.default_rng(0).normal(size=(H, D // 8, 256, 8))
        options = A2ATSOptions(a2ats_codebook=Table.of(books))
        assert A2ATSKVCache(KVCacheConfig(method="a2ats", options=options)).codebook_bytes == 4 * books.size
        key, options = Table.of(books[0, 0, :, :4]), VecInferOptions(key_codebook_bits=8)
        config = KVCacheConfig(method="vecinfer", key_codebook=key, options=options)
        assert VecInferKVCache(config).codebook_bytes == 4 * 256 * 4 + 4 * 256 * 8


@pytest.mark.parametrize(("n", "retrieved"), [(0, 0), (1, 0), (10, 0), (11, 1), (12, 2), (20, 4), (60, 12)])
def test_what_a_token_retrieves(n, retrieved):
    """Beside eight newest rows and two sinks, a fifth of all."""
    cache = A2ATSKVCache(CONFIGS[A2ATSKVCache])
    if n:
        feed(cache, (n,), batch=1)
        seen = cache.transform.select(cache._settled_state(), rows(n, batch=1)[0][:, :, -1:])
        assert (seen >= 0).sum().item() == H * (min(n, 10) + retrieved)
    assert cache.tokens_retrieved == retrieved


def test_queries_far_from_the_keys():
    """As those of a model are turned that stand at `a2ats_b`, and what the method itself makes of rotated ones."""
    cache = A2ATSKVCache(KVCacheConfig(method="a2ats", options=A2ATSOptions(a2ats_b=100, a2ats_rope_base=500.0)))
    bare = mx.random.normal((2, 4, 3, D), key=mx.random.key(3))
    far = cache.far_query_rope(bare)
    wanted = mx.fast.rope(bare[:, :, :1], D, traditional=False, base=500.0, scale=1.0, offset=100)
    np.testing.assert_allclose(np.array(far[:, :, :1]), np.array(wanted), atol=1e-5)
    turned = mx.fast.rope(bare, D, traditional=False, base=500.0, scale=1.0, offset=7)
    positions = mx.broadcast_to(mx.arange(7, 10), (2, 3))
    np.testing.assert_allclose(np.array(cache.transform.far_queries(turned, positions)), np.array(far), atol=1e-4)
    assert mx.allclose(cache.far_query_rope(bare[0, 0, 0]), far[0, 0, 0], atol=1e-6)


class TestFusedAttention:
    """`fused_sdpa` against attention over the rows as they are read."""

    SCALE: ClassVar[float] = D**-0.5

    @pytest.mark.parametrize("n", [1, 5, 40])
    @pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 6), (False, 0), (False, 6)])
    def test_all_masks(self, n, causal, window):
        cache = feed(VecInferKVCache(CONFIGS[VecInferKVCache]), (45,), dtype=mx.float32)
        queries = mx.random.normal((B, 2 * H, n, D), key=mx.random.key(5))
        got = cache.fused_sdpa(queries, self.SCALE, causal=causal, sliding_window=window)
        at = mx.arange(45 - n, 45)[:, None] if causal else mx.full((n, 1), 44)
        column = mx.arange(45)
        mask = (column <= at) & (column > at - (window or 45))
        wanted = mx.fast.scaled_dot_product_attention(queries, *cache.keys_and_values(), scale=self.SCALE, mask=mask)
        np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-4)

    def test_in_a_sliding_window(self):
        config = KVCacheConfig(method="vecinfer", sliding_window=8, options=VecInferOptions(key_codebook_bits=8))
        cache = feed(VecInferKVCache(config), (20, 1, 1, 1), dtype=mx.float32)
        queries = mx.random.normal((B, 2 * H, 1, D), key=mx.random.key(5))
        wanted = mx.fast.scaled_dot_product_attention(queries, *cache.keys_and_values(), scale=self.SCALE)
        assert wanted.shape == (B, 2 * H, 1, DV)
        np.testing.assert_allclose(np.array(cache.fused_sdpa(queries, self.SCALE)), np.array(wanted), atol=1e-4)

    def test_rows_of_a_batch_see_their_own(self):
        alone = [feed(VecInferKVCache(CONFIGS[VecInferKVCache]), calls, batch=1) for calls in ((9,), (30, 1))]
        batch, queries = VecInferKVCache.merge(alone), rows(2, seed=7)[0]
        got = batch.fused_sdpa(queries, self.SCALE)
        for i, cache in enumerate(alone):
            wanted = cache.fused_sdpa(queries[i : i + 1], self.SCALE)
            np.testing.assert_allclose(np.array(got[i : i + 1]), np.array(wanted), atol=2e-3)

    @pytest.mark.parametrize("calls", [(), (4,)])
    def test_more_queries_than_tokens(self, calls):
        cache = feed(VecInferKVCache(CONFIGS[VecInferKVCache]), calls)
        with pytest.raises(QuantizerConfigError, match=r"fused_sdpa: `q` must be of at most"):
            cache.fused_sdpa(rows(5)[0], self.SCALE)


def test_svdq_of_all_axes():
    cache = SVDqKVCache(KVCacheConfig(method="svdq", options=SVDqOptions()))
    assert (cache.rank, cache.assigned_avg_bits) == (0, 2.0)
    feed(cache)
    assert (cache.rank, cache.assigned_avg_bits) == (D, 2.0)


@pytest.mark.parametrize(
    ("groups", "exact", "bits"),
    [
        (1, False, (32 * 4 + 32 * 2) / (2 * DV)),  # both heads share 64 components, the first group at 4 bits
        (4, False, 32 * 4 / DV),  # every head has 32 of its own, one group
        (1, True, 64 * 16 / (2 * DV)),
    ],
    ids=["one", "each", "exact values"],
)
def test_palu_counts_the_side_that_has_more_bits(groups, exact, bits):
    options = PALUOptions(palu_rank=32, palu_n_head_groups=groups, palu_quantize_values=not exact)
    cache = PALUKVCache(KVCacheConfig(method="palu", options=options))
    assert (cache.rank, cache.assigned_avg_bits) == (32, 16.0 if exact else 2.5)
    feed(cache, (160,))
    assert (cache.rank, cache.assigned_avg_bits) == (32, bits)


class TestTiers:
    ADAPTIVE: ClassVar[AMCOptions] = AMCOptions(
        amc_threshold_window=16, amc_adaptive_thresholds=True, amc_gamma=5.0, amc_calib_variance=1e3
    )

    def test_with_thresholds_that_adapt_rows_read_as_lower_tiers(self):
        """As the variance is far below the reference, thresholds are high."""
        cache = feed(AMCKVCache(KVCacheConfig(method="amc", options=self.ADAPTIVE)))
        plain = feed(AMCKVCache(CONFIGS[AMCKVCache]))
        assert cache.tokens_high + cache.tokens_mid + cache.tokens_low == cache.tokens_seen == B * H * TOKENS
        assert cache.tokens_high < plain.tokens_high
        assert cache.tokens_low > plain.tokens_low

    def test_while_there_are_no_blocks_all_are_high(self):
        cache = feed(AMCKVCache(KVCacheConfig(method="amc", options=self.ADAPTIVE)), (9,))
        assert (cache.tokens_high, cache.tokens_mid, cache.tokens_low) == (B * H * 9, 0, 0)


@pytest.mark.parametrize(("rank", "gain"), [(1, 16), (2, 8), (4, 4)])
def test_entropy_coding_gains_where_codes_repeat(rank, gain):
    """Each component has one of two values, which its 8 bits of a word of 32 say."""
    options = KVTCOptions(kvtc_rank=rank, kvtc_bit_budget=8 * rank)
    cache = KVTCKVCache(KVCacheConfig(method="kvtc", options=options))
    bits = (mx.arange(400)[:, None] >> mx.arange(rank)) & 1
    x = mx.pad((bits * 0.5 ** mx.arange(rank)).astype(mx.float16), [(0, 0), (0, D - rank)])
    mx.eval(cache.update_and_fetch(*[mx.broadcast_to(x, (B, H, 400, D))] * 2))
    # One bit a component would do; the tables of the coder take a part of what that saves.
    assert gain < cache.entropy_coding_gain < 32 / rank


def test_rows_on_hold_count_as_held():
    cache = KVzipCache(CONFIGS[KVzipCache])
    cache.hold()
    feed(cache, (10, 30))
    assert (cache.tokens_kept, cache.compression_ratio, cache.kvzip_kept_bytes) == (40, 1.0, cache.full_seq_bytes)
    cache.compact()
    assert (cache.tokens_kept, cache.compression_ratio) == (16, 40 / 16)


@pytest.mark.parametrize("kind", SIXTEEN, ids=lambda kind: kind.__name__)
def test_storage_dtype_counts_as_stored(kind):
    config = KVCacheConfig(method=kind.method, dtype=mx.float16, options=OPTIONS[kind])
    cache = feed(kind(config), dtype=mx.float32)
    assert getattr(cache, f"{KEPT[kind][1]}_kept_bytes") == B * H * 16 * (D + DV) * 2
    assert cache.compression_ratio == 2 * TOKENS / 16


def test_rvq_in_a_window():
    cache = feed(TurboQuantRVQKVCache(KVCacheConfig(method="turboquant_rvq", sliding_window=8)))
    assert cache.compressed_key_bytes == B * H * 8 * (2 * D * 2 // 8 + 2)
    assert cache.fp16_key_bytes == B * H * TOKENS * D * 2
    assert cache.assigned_bits == 2


@pytest.mark.parametrize(("n", "coded"), [(3, 32), (20, 0)])
def test_statistics_follow_trim(n, coded):
    cache = feed(KIVIKVCache(CONFIGS[KIVIKVCache]))
    assert cache.trim(n) == n
    assert cache.fp16_key_bytes == B * H * (TOKENS - n) * D * 2
    assert cache.residual_fp16_bytes == B * H * (TOKENS - n - coded) * (D + DV) * 2
    other = feed(TurboQuantRVQKVCache(CONFIGS[TurboQuantRVQKVCache]))
    other.trim(n)
    assert other.compressed_key_bytes == B * H * (TOKENS - n) * (2 * D * 2 // 8 + 2)


def served(options: Any, method: str, layers: int) -> list[Any]:
    """The caches of a model after a prompt of 40 tokens and one more."""
    model = build("llama", num_hidden_layers=layers)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, options=options))
    for call in (tokens(40), [1]):
        mx.eval(model(mx.array([call]), cache=caches))
    return caches


class TestPyramid:
    @pytest.mark.parametrize(
        ("options", "budgets"),
        [
            # 3 rows are the least: two sinks and one that is free. Steps of 26 / 3 around 16.
            ({}, [29, 20, 12, 3]),
            ({"pyramid_beta": 1.0}, [16] * 4),
            ({"pyramid_resolved_budget": 24}, [24] * 4),
        ],
        ids=["default", "flat", "resolved"],
    )
    def test_layers(self, options, budgets):
        caches = served(PyramidKVOptions(pyramid_budget=16, pyramid_n_sink=2, **options), "pyramidkv", 4)
        assert [cache.layer_budget for cache in caches] == budgets
        assert [cache.tokens_kept for cache in caches] == budgets
        assert [cache.compression_ratio for cache in caches] == [41 / budget for budget in budgets]

    def test_a_single_cache_has_the_mean(self):
        assert PyramidKVCache(CONFIGS[PyramidKVCache]).layer_budget == 16


class TestSqueeze:
    @staticmethod
    def _told() -> list[Any]:
        """Caches of two layers: in the first all keys are alike, in the second any two are at right angles."""
        group = SqueezeCoordinator()
        caches = [SqueezeAttentionCache(CONFIGS[SqueezeAttentionCache], layer, group) for layer in range(2)]
        _, values = rows(40)
        for cache, keys in zip(caches, (mx.ones((40, D)), mx.eye(D)[:40]), strict=True):
            mx.eval(cache.update_and_fetch(mx.broadcast_to(keys.astype(mx.float16), (B, H, 40, D)), values))
        return caches

    def test_concentration(self):
        assert [cache.concentration for cache in self._told()] == pytest.approx([1.0, 0.0], abs=1e-5)

    def test_every_row_stays_until_the_layers_agree(self):
        caches = self._told()
        assert [cache.layer_budget for cache in caches] == [16, 16]
        assert [cache.tokens_kept for cache in caches] == [40, 40]
        assert [cache.squeeze_kept_bytes for cache in caches] == [B * H * 40 * (D + DV) * 2] * 2

    def test_budgets_follow_concentration(self):
        """The first gets the least, two sinks and the seven newest; the second what is left of 2 * 16."""
        caches = self._told()
        for cache in caches:
            mx.eval(cache.update_and_fetch(*rows(1)))
        assert [cache.layer_budget for cache in caches] == [9, 23]
        assert [cache.tokens_kept for cache in caches] == [9, 23]
        assert [cache.compression_ratio for cache in caches] == [41 / 9, 41 / 23]
        assert [cache.concentration for cache in caches] == pytest.approx([1.0, 0.0], abs=1e-5)

    def test_alone(self):
        cache = feed(SqueezeAttentionCache(CONFIGS[SqueezeAttentionCache], layer_id=1))
        assert (cache.layer_budget, cache.tokens_kept) == (16, 16)


class TestChunks:
    REUSING = KVCacheConfig(
        method="chunkkv",
        options=ChunkKVOptions(chunkkv_budget=16, chunkkv_n_sink=2, chunkkv_chunk_size=4, chunkkv_reuse_layers=2),
    )

    def test_one_layer_of_a_block_leads(self):
        group = ChunkKVIndexReuseCoordinator()
        caches = [ChunkKVCache(self.REUSING, layer, group) for layer in range(4)]
        assert [cache.is_index_reuse_leader for cache in caches] == [True, False, True, False]
        assert [cache.chunk_size for cache in caches] == [4] * 4
        for i, n in enumerate(CALLS):
            mx.eval([cache.update_and_fetch(*rows(n, seed=i)) for cache in caches])
        assert [cache.tokens_kept for cache in caches] == [11] * 4

    @pytest.mark.parametrize("layer", [None, 0, 1])
    def test_without_a_coordinator_a_layer_chooses_for_itself(self, layer):
        cache = ChunkKVCache(self.REUSING, layer_id=layer)
        assert cache.is_index_reuse_leader
        assert feed(cache).tokens_kept == 11

    @pytest.mark.parametrize(("n", "kept"), [(16, 16), (17, 2 + 8 + 3), (18, 2 + 8), (19, 2 + 8 + 1)])
    def test_whole_chunks_go(self, n, kept):
        cache = feed(ChunkKVCache(CONFIGS[ChunkKVCache]), (n,))
        assert (cache.tokens_kept, cache.layer_budget) == (kept, 16)
        assert cache.compression_ratio == n / kept


@pytest.mark.parametrize(("mode", "gate"), [("sim_weighted", True), ("mean", False), ("drop", True)])
def test_cam_says_how_it_merges(mode, gate):
    options = CaMOptions(cam_budget=16, cam_n_sink=2, cam_merge=mode, cam_merge_gate=gate)
    cache = CaMKVCache(KVCacheConfig(method="cam", options=options))
    assert (cache.merge_mode, cache.merge_gate, cache.layer_budget) == (mode, gate, 16)


class TestRetention:
    """Q-Filters tells when too little is left: after 40 tokens 16 are 40 %."""

    @staticmethod
    def _cache(**options: Any) -> QFiltersKVCache:
        chosen = QFiltersOptions(qfilters_budget=16, qfilters_n_sink=2, qfilters_calib_tokens=8, **options)
        return QFiltersKVCache(KVCacheConfig(method="qfilters", options=chosen))

    def test_a_cache_warns_once(self):
        cache = self._cache()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            feed(cache, (10, 6)).size()
            cache.update_and_fetch(*rows(24))
        with pytest.warns(UserWarning, match=r"^qfilters: 40% of the tokens .* `min_retention` = 0\.9$") as caught:
            cache.size()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            feed(cache, (20, 1, 1)).size()
        with pytest.warns(UserWarning, match="^qfilters: 40%"):
            feed(self._cache(), (40,)).size()

    def test_real_queries(self):
        cache = self._cache()
        returned = cache.update_and_fetch(*rows(40))
        with pytest.warns(UserWarning, match="^qfilters: 40%"):
            cache.attend(rows(40, seed=1)[0], *returned, D**-0.5, "causal")

    def test_raise(self):
        cache = feed(self._cache(qfilters_on_low_retention="raise"), (16, 24))
        with pytest.raises(ValueError, match=r"^qfilters: 40% of the tokens"):
            cache.update_and_fetch(*rows(1))
        assert (cache.offset, cache.tokens_kept) == (40, 16)

    @pytest.mark.parametrize(
        "options",
        [
            {"qfilters_on_low_retention": "ignore"},
            {"qfilters_min_retention": None},
            {"qfilters_min_retention": 0.4},
            {"qfilters_min_retention": None, "qfilters_on_low_retention": "raise"},
        ],
        ids=["ignored", "off", "enough", "off, raise"],
    )
    def test_silence(self, options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert feed(self._cache(**options), (40,)).size() == 16

    def test_the_shortest_of_a_batch_counts(self):
        alone = [self._cache(qfilters_min_retention=0.4) for _ in range(2)]
        batch = QFiltersKVCache.merge(alone)
        batch.prepare(lengths=[50, 10], right_padding=[0, 40])
        batch.update_and_fetch(*rows(50))
        with pytest.warns(UserWarning, match="^qfilters: 32%"):
            batch.finalize()
