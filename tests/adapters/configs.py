"""One small configuration of each documented class, what its statistics are called, and how it is fed."""

from typing import Any

import mlx.core as mx

from vq_adapters import (
    A2ATSKVCache,
    A2ATSOptions,
    AdaKVCache,
    AdaKVOptions,
    AgeTieredKVCache,
    AgeTieredKVOptions,
    AMCKVCache,
    AMCOptions,
    AnchorKVKVCache,
    AnchorKVOptions,
    CacheGenKVCache,
    CacheGenOptions,
    CaMKVCache,
    CaMOptions,
    ChunkKVCache,
    ChunkKVOptions,
    CurDKVCache,
    CurDKVOptions,
    GEARKVCache,
    GEAROptions,
    H2OKVCache,
    H2OOptions,
    KeyformerKVCache,
    KeyformerOptions,
    KittyKVCache,
    KittyOptions,
    KIVIKVCache,
    KIVIOptions,
    KNormKVCache,
    KVCacheConfig,
    KVQuantKVCache,
    KVQuantOptions,
    KVTCKVCache,
    KVTCOptions,
    KVzipCache,
    KVzipOptions,
    L2NormOptions,
    MiniCacheKVCache,
    MiniCacheOptions,
    MorphKVCache,
    MorphKVOptions,
    NestedKVCache,
    NestedKVOptions,
    NSNQuantKVCache,
    NSNQuantOptions,
    PALUKVCache,
    PALUOptions,
    PyramidKVCache,
    PyramidKVOptions,
    QFiltersKVCache,
    QFiltersOptions,
    RocketKVKVCache,
    RocketKVOptions,
    SinkProtectedKVCache,
    SKVQKVCache,
    SKVQOptions,
    SnapKVKVCache,
    SnapKVOptions,
    SqueezeAttentionCache,
    SqueezeAttentionOptions,
    StreamingLLMKVCache,
    StreamingLLMOptions,
    SVDqKVCache,
    SVDqOptions,
    TOVAKVCache,
    TOVAOptions,
    TransformKVCache,
    TurboQuantRVQKVCache,
    VecInferKVCache,
    VecInferOptions,
    XKVKVCache,
    XKVOptions,
    XQuantKVCache,
    XQuantOptions,
    ZipCacheKVCache,
    ZipCacheOptions,
)

B, H, D, DV = 2, 2, 64, 32
CALLS = (10, 30, 1, 1, 1)  # 43 tokens

# The options of each class; most keep 16 rows, two of them sinks.
OPTIONS: dict[Any, Any] = {
    StreamingLLMKVCache: StreamingLLMOptions(stream_n_sink=2, stream_window_size=14),
    H2OKVCache: H2OOptions(h2o_budget=16, h2o_n_sink=2, h2o_grace=4),
    SnapKVKVCache: SnapKVOptions(snap_budget=16, snap_n_sink=2, snap_obs_window=6),
    TOVAKVCache: TOVAOptions(tova_budget=16, tova_n_sink=2),
    PyramidKVCache: PyramidKVOptions(pyramid_budget=16, pyramid_n_sink=2),
    SqueezeAttentionCache: SqueezeAttentionOptions(squeeze_budget=16, squeeze_n_sink=2),
    ChunkKVCache: ChunkKVOptions(chunkkv_budget=16, chunkkv_n_sink=2, chunkkv_chunk_size=4),
    CaMKVCache: CaMOptions(cam_budget=16, cam_n_sink=2),
    KNormKVCache: L2NormOptions(knorm_budget=16, knorm_n_sink=2),
    QFiltersKVCache: QFiltersOptions(
        qfilters_budget=16, qfilters_n_sink=2, qfilters_calib_tokens=8, qfilters_on_low_retention="ignore"
    ),
    KeyformerKVCache: KeyformerOptions(keyformer_budget=16, keyformer_n_sink=2),
    MorphKVCache: MorphKVOptions(morphkv_budget=16, morphkv_n_sink=2, morphkv_window=4),
    KVzipCache: KVzipOptions(kvzip_budget=16, kvzip_n_sink=2),
    CurDKVCache: CurDKVOptions(curdkv_budget=16, curdkv_n_sink=2, curdkv_rank_cap=4),
    NestedKVCache: NestedKVOptions(nestedkv_budget=16, nestedkv_n_sink=2, nestedkv_window=8),
    RocketKVKVCache: RocketKVOptions(rocketkv_compression_ratio=4.0, rocketkv_n_sink=2, rocketkv_obs_window=6),
    KIVIKVCache: KIVIOptions(kivi_group_size=32, residual_length=8),
    SinkProtectedKVCache: KIVIOptions(kivi_group_size=32, residual_length=8),
    KittyKVCache: KittyOptions(kitty_group_size=8),
    AdaKVCache: AdaKVOptions(adakv_group_size=8),
    ZipCacheKVCache: ZipCacheOptions(zipcache_group_size=32),
    GEARKVCache: GEAROptions(gear_bits=4, gear_rank=2),
    CacheGenKVCache: CacheGenOptions(cachegen_group_size=32),
    AgeTieredKVCache: AgeTieredKVOptions(age_recent_boundary=8, age_mid_boundary=24, age_group_size=8),
    AMCKVCache: AMCOptions(amc_threshold_window=16, amc_group_size=8),
    SVDqKVCache: SVDqOptions(svdq_rank=16, svdq_bit_schedule=(8, 4, 2, 0)),
    PALUKVCache: PALUOptions(palu_rank=16, palu_n_head_groups=1),
    KVTCKVCache: KVTCOptions(kvtc_bit_budget=128),
    XQuantKVCache: XQuantOptions(),
    MiniCacheKVCache: MiniCacheOptions(),
    XKVKVCache: XKVOptions(xkv_rank=16),
    AnchorKVKVCache: AnchorKVOptions(anchorkv_theta=0.4, anchorkv_window=8, anchorkv_anchor_frac=1 / 16),
    TurboQuantRVQKVCache: None,
    SKVQKVCache: SKVQOptions(skvq_window=8, skvq_n_sink=2),
    KVQuantKVCache: KVQuantOptions(kvquant_n_fit=16, kvquant_residual_length=8),
    NSNQuantKVCache: NSNQuantOptions(nsn_residual_length=32),
    VecInferKVCache: VecInferOptions(key_codebook_bits=8),
    A2ATSKVCache: A2ATSOptions(a2ats_window=8, a2ats_n_sink=2),
}
_BITS = {KIVIKVCache: 4, SinkProtectedKVCache: 4, TurboQuantRVQKVCache: 2}
CONFIGS: dict[Any, KVCacheConfig] = {
    kind: KVCacheConfig(method=kind.method, bit_width_inlier=_BITS.get(kind, 2), options=options)
    for kind, options in OPTIONS.items()
}


def _budget(name: str, **more: Any) -> dict[str, Any]:
    """Statistics that most evicting classes have."""
    common = {"full_seq_bytes": 0, "compression_ratio": 1.0, "tokens_seen": 0, "tokens_kept": 0}
    return {f"{name}_kept_bytes": 0, **common, **more}


def _packed() -> dict[str, Any]:
    """Statistics of all methods that pack blocks."""
    return dict.fromkeys(("compressed_key_bytes", "compressed_value_bytes", "fp16_key_bytes", "fp16_value_bytes"), 0)


def _blocks(bits: float, **more: Any) -> dict[str, Any]:
    """Statistics of most of them."""
    common = {**_packed(), "residual_fp16_bytes": 0, "effective_compression_ratio": 1.0}
    return {**common, "assigned_avg_bits": bits, **more}


# Every statistic and its value while empty.
EMPTY: dict[Any, dict[str, Any]] = {
    StreamingLLMKVCache: {
        "stream_kept_bytes": 0,
        "full_seq_bytes": 0,
        "streaming_ratio": 1.0,
        "tokens_seen": 0,
        "tokens_in_window": 0,
        "tokens_kept": 0,
    },
    H2OKVCache: _budget("h2o"),
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
    TOVAKVCache: _budget("tova"),
    PyramidKVCache: _budget("pyramid", layer_budget=16),
    SqueezeAttentionCache: _budget("squeeze", layer_budget=16, concentration=0.0),
    ChunkKVCache: _budget("chunkkv", layer_budget=16, chunk_size=4, is_index_reuse_leader=True),
    CaMKVCache: _budget("cam", layer_budget=16, merge_mode="sim_weighted", merge_gate=True),
    KNormKVCache: _budget("knorm"),
    QFiltersKVCache: _budget("qfilters"),
    KeyformerKVCache: _budget("keyformer"),
    MorphKVCache: _budget("morphkv"),
    KVzipCache: _budget("kvzip"),
    CurDKVCache: _budget("curdkv"),
    NestedKVCache: _budget("nestedkv"),
    RocketKVKVCache: {
        "stage1_bytes": 0,
        "stage2_aux_bytes": 0,
        "full_fp16_bytes_total": 0,
        "compression_ratio": 1.0,
        "tokens_kept": 0,
        "tokens_total": 0,
        "keep_rate": 1.0,
        "stage1_ratio": 4**0.32,
        "page_size": 2,
        "head_topk1": 0,
    },
    KIVIKVCache: _blocks(4.0),
    SinkProtectedKVCache: _blocks(4.0, sink_positions=[], sink_fp16_bytes=0),
    KittyKVCache: _blocks(2.5, value_fp16_bytes=0, hi_fraction=0.25, hi_bit=4, lo_bit=2),
    AdaKVCache: _blocks(2.5, value_fp16_bytes=0, head_bits=[], target_avg_bits=2.5, allowed_bits=(2, 3, 4)),
    ZipCacheKVCache: {
        **_packed(),
        "baseline_key_bytes": 0,
        "baseline_value_bytes": 0,
        "compression_ratio": 1.0,
        "effective_avg_bits": 2.5,
    },
    GEARKVCache: {
        **_packed(),
        "base_only_key_bytes": 0,
        "base_only_value_bytes": 0,
        "assigned_avg_bits": 4.0,
        "error_recovery_ratio": 0.0,
    },
    CacheGenKVCache: {
        **_packed(),
        "fixed_width_key_bytes": 0,
        "fixed_width_value_bytes": 0,
        "entropy_savings": 0.0,
        "assigned_avg_bits": 4.0,
    },
    AgeTieredKVCache: {
        "age_tiered_bytes": 0,
        "full_seq_bytes": 0,
        "compression_ratio": 1.0,
        "tokens_seen": 0,
        "tokens_kept": 0,
        "tokens_recent": 0,
        "tokens_mid": 0,
        "tokens_old": 0,
    },
    AMCKVCache: {
        **_packed(),
        "amc_kept_bytes": 0,
        "full_seq_bytes": 0,
        "compression_ratio": 1.0,
        "tokens_seen": 0,
        "tokens_kept": 0,
        "tokens_high": 0,
        "tokens_mid": 0,
        "tokens_low": 0,
    },
    SVDqKVCache: {**_packed(), "value_fp16_bytes": 0, "rank": 16, "assigned_avg_bits": 3.5},
    PALUKVCache: {**_packed(), "projection_bytes": 0, "rank": 16, "assigned_avg_bits": 2.5},
    KVTCKVCache: {
        **_packed(),
        "kvtc_bytes": 0,
        "full_seq_bytes": 0,
        "compression_ratio": 1.0,
        "pre_entropy_bytes": 0,
        "entropy_coding_gain": 1.0,
        "bit_budget": 128,
    },
    XQuantKVCache: {
        **_packed(),
        "role": "anchor",
        "group_id": 0,
        "reuse_param_bytes": 0,
        "effective_pair_bits": 0.0,
    },
    MiniCacheKVCache: {
        **_packed(),
        "role": "primary",
        "group_id": 0,
        "n_retained": 0,
        "n_merged": 0,
        "retention_rate": 0.0,
    },
    XKVKVCache: {
        **_packed(),
        "member_idx": 0,
        "group_id": 0,
        "shared_basis_bytes": 0,
        "value_fp16_bytes": 0,
        "rank": 16,
        "assigned_avg_bits": 4.0,
    },
    AnchorKVKVCache: {
        "anchorkv_bytes": 0,
        "full_seq_bytes": 0,
        "compression_ratio": 1.0,
        "tokens_kept": 0,
        "tokens_total": 0,
        "n_anchor_total": 0,
        "n_residual_total": 0,
    },
    TurboQuantRVQKVCache: {"compressed_key_bytes": 0, "fp16_key_bytes": 0, "assigned_bits": 2},
    SKVQKVCache: {
        **_packed(),
        "residual_fp16_bytes": 0,
        "perm_bytes": 0,
        "quantized_tokens": 0,
        "tokens_seen": 0,
        "assigned_avg_bits": 16.0,
    },
    KVQuantKVCache: {
        **_packed(),
        "nuq_bits": 3,
        "outlier_fraction": 0.01,
        "outlier_count": 0,
        "n_sink": 1,
        "sink_kept": 0,
        "effective_bits": 3.0,
    },
    NSNQuantKVCache: {**_packed(), "residual_fp16_bytes": 0, "quantized_tokens": 0, "assigned_avg_bits": 16.0},
    VecInferKVCache: {**_packed(), "codebook_bytes": 4 * 256 * (4 + 8), "assigned_avg_bits": 1.5},
    A2ATSKVCache: {
        **_packed(),
        "codebook_bytes": 4 * 256 * 8,
        "compression_ratio": 1.0,
        "assigned_avg_bits": 1.0,
        "tokens_seen": 0,
        "tokens_retrieved": 0,
    },
}

# Statistics that follow from data: reading them reads back.
READ_BACK: dict[Any, set[str]] = {
    SqueezeAttentionCache: {"concentration"},
    SinkProtectedKVCache: {"sink_positions"},
    AdaKVCache: {"head_bits"},
    GEARKVCache: {"error_recovery_ratio"},
    CacheGenKVCache: {"compressed_key_bytes", "compressed_value_bytes", "entropy_savings", "assigned_avg_bits"},
    KVTCKVCache: {"entropy_coding_gain"},
    MiniCacheKVCache: {"n_retained", "n_merged", "retention_rate"},
}


def rows(n: int, dtype: mx.Dtype = mx.float16, batch: int = B, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of `n` tokens."""
    one, other = mx.random.split(mx.random.key(seed))
    keys = mx.random.normal((batch, H, n, D), key=one).astype(dtype)
    return keys, mx.random.normal((batch, H, n, DV), key=other).astype(dtype)


def feed(cache: Any, calls: tuple[int, ...] = CALLS, dtype: mx.Dtype = mx.float16, batch: int = B) -> Any:
    """The cache after calls of these lengths."""
    for i, n in enumerate(calls):
        mx.eval(cache.update_and_fetch(*rows(n, dtype, batch, i)))
    return cache


def statistics(cache: Any) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in EMPTY[type(cache)]}


def counted(cache: Any) -> dict[str, Any]:
    """Statistics that follow from shapes and options alone."""
    names = EMPTY[type(cache)].keys() - READ_BACK.get(type(cache), set())
    return {name: getattr(cache, name) for name in names}


def leaves_equal(one: TransformKVCache, other: TransformKVCache) -> bool:
    first, second = one.state, other.state
    return len(first) == len(second) and all(bool(mx.array_equal(x, y)) for x, y in zip(first, second, strict=True))
