"""Names: how an option of a functional method is called in the flat, documented configuration."""

# All documented parameters of KVCacheConfig, in their order.
_FIELDS = """
method head_dim bit_width_inlier bit_width_outlier jl_dim n_outlier_channels n_calib_tokens
enable_vectorized_attend enable_outlier_two_stream enable_fused_query_dot
seed dtype capacity sliding_window store observers options
key_sub_dim value_sub_dim key_codebook_bits value_codebook_bits residual_length kivi_group_size
svdq_rank svdq_energy_threshold svdq_bit_schedule svdq_group_size
kitty_hi_fraction kitty_hi_bit kitty_lo_bit kitty_group_size
adakv_target_avg_bits adakv_lo_bit adakv_mid_bit adakv_hi_bit adakv_group_size
adakv_update_interval adakv_importance adakv_obs_window
xquant_group_size xquant_base_bits xquant_residual_bits xquant_group_quant_size xquant_max_ctx
kvquant_bits kvquant_outlier_fraction kvquant_group_size kvquant_lloyd_iters kvquant_refit_interval kvquant_n_sink
palu_rank palu_energy_threshold palu_n_head_groups palu_hi_bit palu_lo_bit palu_hi_fraction palu_group_size
palu_quantize_values
cachegen_bits cachegen_group_size cachegen_use_delta cachegen_per_channel cachegen_layer_groups
cachegen_resolved_bits
minicache_start_frac minicache_group_size minicache_retention_threshold minicache_slerp_t minicache_max_ctx
gear_bits gear_rank gear_energy_threshold gear_sparse_fraction gear_group_size gear_quantize_values
zipcache_hi_bits zipcache_lo_bits zipcache_hi_fraction zipcache_group_size zipcache_quantize_values
snap_dtype snap_batched_scoring snap_backend snap_budget snap_obs_window snap_n_sink
stream_n_sink stream_window_size
h2o_budget h2o_n_sink h2o_rope_base h2o_grace h2o_decay
tova_budget tova_n_sink tova_backend
pyramid_budget pyramid_backend pyramid_n_sink pyramid_beta pyramid_resolved_budget
squeeze_budget squeeze_n_sink squeeze_strength squeeze_resolved_budget
chunkkv_budget chunkkv_chunk_size chunkkv_n_sink chunkkv_score chunkkv_reuse_layers
cam_budget cam_n_sink cam_merge cam_merge_keys cam_merge_gate
xkv_group_size xkv_rank xkv_energy_threshold xkv_latent_bits xkv_group_quant_size xkv_max_ctx
nsn_bits nsn_residual_length nsn_codebook_size nsn_subvector_dim nsn_seed nsn_max_ctx
knorm_budget knorm_n_sink knorm_recent knorm_keep
skvq_bits_key skvq_bits_value skvq_group_size skvq_window skvq_n_sink skvq_reorder skvq_clip_search
skvq_clip_alpha skvq_max_ctx
qfilters_budget qfilters_n_sink qfilters_recent qfilters_calib_tokens qfilters_sign qfilters_min_retention
qfilters_on_low_retention
keyformer_budget keyformer_n_sink keyformer_recent keyformer_tau keyformer_tau_init keyformer_tau_end
keyformer_anneal_steps keyformer_rope_base keyformer_seed
morphkv_budget morphkv_n_sink morphkv_window
kvzip_budget kvzip_n_sink kvzip_probe
kvtc_bit_budget kvtc_bit_choices kvtc_beta
curdkv_budget curdkv_n_sink curdkv_rank_cap curdkv_rope_base
nestedkv_budget nestedkv_n_sink nestedkv_window nestedkv_beta nestedkv_tau nestedkv_kappa
nestedkv_safeguard_alpha
amc_k_high amc_k_mid amc_use_query_saliency amc_query_alpha amc_adaptive_thresholds amc_threshold_window
amc_gamma amc_calib_variance amc_group_size
a2ats_codebook_bits a2ats_sub_dim a2ats_window a2ats_b a2ats_use_query_aware a2ats_beta
a2ats_retrieval_fraction a2ats_rope_base a2ats_rope_scaling a2ats_query_h a2ats_codebook
anchorkv_theta anchorkv_window anchorkv_rho anchorkv_anchor_frac anchorkv_residual_bits anchorkv_seed
rocketkv_compression_ratio rocketkv_page_size rocketkv_head_topk1 rocketkv_obs_window rocketkv_n_sink
age_recent_boundary age_mid_boundary age_bits_recent age_bits_mid age_bits_old age_group_size
n_sink_tokens smooth_factors key_codebook value_codebook
spectral_key_d_eff spectral_val_d_eff spectral_apply_qjl spectral_model_name
use_metal_kernels fused_sdpa fused_sdpa_max_ctx fused_sdpa_memory_bound
"""
ORDER: tuple[str, ...] = tuple(_FIELDS.split())

# Where the prefix is not the method's name.
PREFIX: dict[str, str] = {
    "vecinfer": "",
    "kivi_sink": "kivi_",
    "snapkv": "snap_",
    "streaming_llm": "stream_",
    "pyramidkv": "pyramid_",
    "nsnquant": "nsn_",
    "age_tiered": "age_",
}

_CODED = {"bits": "bit_width_inlier", "seed": "seed"}
_OUTLIERS = {
    "n_outlier_channels": "n_outlier_channels",
    "n_calib_tokens": "n_calib_tokens",
    "bits_outlier": "bit_width_outlier",
    "outlier_two_stream": "enable_outlier_two_stream",
}

# Options whose field has a name of its own.
RENAMED: dict[str, dict[str, str]] = {
    "turboquant_prod": {**_CODED, **_OUTLIERS, "jl_dim": "jl_dim"},
    "turboquant_mse": {**_CODED, **_OUTLIERS},
    "turboquant_rvq": _CODED,
    "polar": _CODED,
    "spectral": _CODED,
    "qjl": {"jl_dim": "jl_dim", "seed": "seed"},
    "cam": {"seed": "seed"},
    "kivi": {"bits": "bit_width_inlier", "residual_length": "residual_length"},
    "kivi_sink": {
        "bits": "bit_width_inlier",
        "residual_length": "residual_length",
        "n_sink": "n_sink_tokens",
    },
}

# Fields of the configuration itself: no options class holds them.
OWN = frozenset(
    ("bit_width_inlier", "jl_dim", "seed", "n_sink_tokens", "smooth_factors", "key_codebook", "value_codebook")
) | {*_OUTLIERS.values()}
# Fields that several options classes hold and that may be set beside them.
SHARED = frozenset(("residual_length",))


def name_of(method: str, option: str) -> str:
    """What a functional option is called in the configuration or, where it is not documented, in its options class."""
    return RENAMED.get(method, {}).get(option) or PREFIX.get(method, f"{method}_") + option


def field_of(method: str, option: str) -> str | None:
    """The documented field of a functional option, or None where none is documented."""
    field = name_of(method, option)
    return field if field in ORDER else None
