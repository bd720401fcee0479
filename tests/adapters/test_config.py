"""KVCacheConfig against the documented parameters, and what it makes of them."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import vq_adapters
import vq_functional as vq
from vq_adapters import KVCacheConfig, QuantizerConfigError, TransformKVCache
from vq_adapters.config import CALIBRATED, IDLE, NO_EFFECT, SPEED_FIELDS, Layer
from vq_adapters.documented import CONFIG_FIELDS, METHOD_NAMES, fields_of, options_of
from vq_adapters.names import ORDER, OWN, SHARED, field_of
from vq_adapters.options import OPTIONS, further_fields, options_fields
from vq_functional.core.table import Table
from vq_functional.methods import METHODS, TABLE
from vq_functional.ops.rope import Rope

PAGES = Path(__file__).parents[2] / "docs" / "methods"
DOCUMENTED = json.loads(Path(__file__).with_name("documented_parameters.json").read_text())


def page(method: str) -> str:
    """The text of a method's page."""
    return (PAGES / f"{method}.md").read_text()


def plain(value: Any) -> Any:
    """A default as the documentation's data writes it."""
    if isinstance(value, dict):
        return tuple(value["tuple"]) if "tuple" in value else value["list"]
    return value


PARAMETERS = {name: plain(default) for name, default in DOCUMENTED["parameters"]}

OUTLIERS = {
    "n_outlier_channels": 8,
    "n_calib_tokens": 100,
    "bit_width_outlier": 3,
    "enable_outlier_two_stream": True,
}
# A value other than the default for every built method's documented fields.
OTHER: dict[str, dict[str, Any]] = {
    "anchorkv": {
        "anchorkv_theta": 0.5,
        "anchorkv_window": 16,
        "anchorkv_rho": 0.25,
        "anchorkv_anchor_frac": 0.125,
        "anchorkv_residual_bits": 3,
        "anchorkv_seed": 7,
    },
    "svdq": {
        "svdq_rank": 48,
        "svdq_energy_threshold": 0.5,
        "svdq_bit_schedule": (4, 3, 2, 1),
        "svdq_group_size": 64,
    },
    "palu": {
        "palu_rank": 48,
        "palu_energy_threshold": 0.5,
        "palu_n_head_groups": 2,
        "palu_hi_bit": 8,
        "palu_lo_bit": 3,
        "palu_hi_fraction": 0.5,
        "palu_group_size": 64,
        "palu_quantize_values": False,
    },
    "kvtc": {"kvtc_bit_budget": 256, "kvtc_bit_choices": (0, 2, 4, 8), "kvtc_beta": 2.5},
    "amc": {
        "amc_k_high": 0.1,
        "amc_k_mid": 0.4,
        "amc_use_query_saliency": True,
        "amc_query_alpha": 0.25,
        "amc_adaptive_thresholds": True,
        "amc_threshold_window": 32,
        "amc_gamma": 0.5,
        "amc_calib_variance": 0.5,
        "amc_group_size": 16,
    },
    "xquant": {
        "xquant_group_size": 3,
        "xquant_base_bits": 3,
        "xquant_residual_bits": 2,
        "xquant_group_quant_size": 64,
        "xquant_max_ctx": 4096,
    },
    "minicache": {
        "minicache_start_frac": 0.25,
        "minicache_group_size": 3,
        "minicache_retention_threshold": 0.5,
        "minicache_slerp_t": 0.25,
        "minicache_max_ctx": 4096,
    },
    "xkv": {
        "xkv_group_size": 3,
        "xkv_rank": 48,
        "xkv_energy_threshold": 0.5,
        "xkv_latent_bits": 3,
        "xkv_group_quant_size": 64,
        "xkv_max_ctx": 4096,
    },
    "kivi_sink": {"bit_width_inlier": 4, "kivi_group_size": 64, "residual_length": 96, "n_sink_tokens": 3},
    "kitty": {"kitty_hi_fraction": 0.5, "kitty_hi_bit": 8, "kitty_lo_bit": 4, "kitty_group_size": 64},
    "adakv": {
        "adakv_target_avg_bits": 3.0,
        "adakv_lo_bit": 1,
        "adakv_mid_bit": 2,
        "adakv_hi_bit": 8,
        "adakv_group_size": 64,
        "adakv_update_interval": 0,
        "adakv_importance": "attention_entropy",
        "adakv_obs_window": 16,
    },
    "skvq": {
        "skvq_bits_key": 4,
        "skvq_bits_value": 3,
        "skvq_group_size": 64,
        "skvq_window": 64,
        "skvq_n_sink": 3,
        "skvq_reorder": False,
        "skvq_clip_search": False,
        "skvq_clip_alpha": 0.9,
        "skvq_max_ctx": 4096,
    },
    "kvquant": {
        "kvquant_bits": 4,
        "kvquant_outlier_fraction": 0.05,
        "kvquant_group_size": 64,
        "kvquant_lloyd_iters": 4,
        "kvquant_refit_interval": 64,
        "kvquant_n_sink": 2,
    },
    "cachegen": {
        "cachegen_bits": 3,
        "cachegen_group_size": 64,
        "cachegen_use_delta": False,
        "cachegen_per_channel": False,
        "cachegen_layer_groups": 2,
        "cachegen_resolved_bits": 2,
    },
    "gear": {
        "gear_bits": 4,
        "gear_rank": 2,
        "gear_energy_threshold": 0.5,
        "gear_sparse_fraction": 0.05,
        "gear_group_size": 64,
        "gear_quantize_values": False,
    },
    "zipcache": {
        "zipcache_hi_bits": 8,
        "zipcache_lo_bits": 4,
        "zipcache_hi_fraction": 0.5,
        "zipcache_group_size": 64,
        "zipcache_quantize_values": False,
    },
    "nsnquant": {
        "nsn_bits": 1,
        "nsn_residual_length": 32,
        "nsn_codebook_size": 64,
        "nsn_subvector_dim": 4,
        "nsn_seed": 5,
        "nsn_max_ctx": 4096,
    },
    "vecinfer": {
        "key_sub_dim": 8,
        "value_sub_dim": 4,
        "key_codebook_bits": 8,
        "value_codebook_bits": 6,
        "seed": 5,
        "smooth_factors": Table.of(np.ones(64)),
        "key_codebook": Table.of(np.ones((256, 8))),
        "value_codebook": Table.of(np.ones((64, 4))),
    },
    "a2ats": {
        "a2ats_codebook_bits": 4,
        "a2ats_sub_dim": 4,
        "a2ats_window": 64,
        "a2ats_b": 1024,
        "a2ats_use_query_aware": False,
        "a2ats_beta": 0.25,
        "a2ats_retrieval_fraction": 0.5,
        "a2ats_rope_base": 1e6,
        "a2ats_rope_scaling": {"type": "default"},
        "a2ats_query_h": Table.of(np.eye(4)),
        "a2ats_codebook": Table.of(np.ones((16, 4))),
    },
    "age_tiered": {
        "age_recent_boundary": 64,
        "age_mid_boundary": 256,
        "age_bits_recent": 6,
        "age_bits_mid": 3,
        "age_bits_old": 1,
        "age_group_size": 64,
    },
    "turboquant_prod": {"bit_width_inlier": 3, "jl_dim": 256, "seed": 5, **OUTLIERS},
    "polar": {"bit_width_inlier": 3, "seed": 5},
    "streaming_llm": {"stream_n_sink": 3, "stream_window_size": 100},
    "h2o": {"h2o_budget": 64, "h2o_n_sink": 3, "h2o_grace": 5, "h2o_decay": 0.5, "h2o_rope_base": 1e6},
    "snapkv": {
        "snap_budget": 99,
        "snap_obs_window": 7,
        "snap_n_sink": 2,
        "snap_dtype": "float16",
        "snap_batched_scoring": False,
        "snap_backend": "reference",
    },
    "tova": {"tova_budget": 64, "tova_n_sink": 3, "tova_backend": "mlx"},
    "pyramidkv": {
        "pyramid_budget": 64,
        "pyramid_backend": "mlx",
        "pyramid_n_sink": 3,
        "pyramid_beta": 3.0,
        "pyramid_resolved_budget": 48,
    },
    "squeeze": {"squeeze_budget": 64, "squeeze_n_sink": 3, "squeeze_strength": 0.5, "squeeze_resolved_budget": 48},
    "chunkkv": {
        "chunkkv_budget": 64,
        "chunkkv_chunk_size": 5,
        "chunkkv_n_sink": 3,
        "chunkkv_score": "key_norm",
        "chunkkv_reuse_layers": 2,
    },
    "cam": {
        "cam_budget": 64,
        "cam_n_sink": 3,
        "cam_merge": "mean",
        "cam_merge_keys": True,
        "cam_merge_gate": False,
        "seed": 5,
    },
    "knorm": {"knorm_budget": 64, "knorm_n_sink": 3, "knorm_recent": 5, "knorm_keep": "high"},
    "qfilters": {
        "qfilters_budget": 64,
        "qfilters_n_sink": 3,
        "qfilters_recent": 5,
        "qfilters_calib_tokens": 32,
        "qfilters_sign": -1,
        "qfilters_min_retention": 0.5,
        "qfilters_on_low_retention": "ignore",
    },
    "keyformer": {
        "keyformer_budget": 64,
        "keyformer_n_sink": 3,
        "keyformer_recent": 5,
        "keyformer_tau": 0.5,
        "keyformer_tau_init": 2.0,
        "keyformer_tau_end": 3.0,
        "keyformer_anneal_steps": 100,
        "keyformer_rope_base": 1e6,
        "keyformer_seed": 5,
    },
    "morphkv": {"morphkv_budget": 64, "morphkv_n_sink": 3, "morphkv_window": 5},
    "kvzip": {"kvzip_budget": 64, "kvzip_n_sink": 3, "kvzip_probe": "latest"},
    "curdkv": {"curdkv_budget": 64, "curdkv_n_sink": 3, "curdkv_rank_cap": 5, "curdkv_rope_base": 1e6},
    "nestedkv": {
        "nestedkv_budget": 64,
        "nestedkv_n_sink": 3,
        "nestedkv_window": 5,
        "nestedkv_beta": 2.0,
        "nestedkv_tau": 0.5,
        "nestedkv_kappa": 5.0,
        "nestedkv_safeguard_alpha": 0.5,
    },
    "rocketkv": {
        "rocketkv_compression_ratio": 4.0,
        "rocketkv_page_size": 3,
        "rocketkv_head_topk1": 5,
        "rocketkv_obs_window": 7,
        "rocketkv_n_sink": 3,
    },
    "kivi": {"bit_width_inlier": 4, "kivi_group_size": 64, "residual_length": 96},
    "turboquant_mse": {"bit_width_inlier": 3, "seed": 5, **OUTLIERS},
    "turboquant_rvq": {"bit_width_inlier": 3, "seed": 5},
    "qjl": {"jl_dim": 256, "seed": 5},
    "spectral": {
        "bit_width_inlier": 3,
        "seed": 5,
        "spectral_key_d_eff": 3,
        "spectral_val_d_eff": 20,
        "spectral_apply_qjl": False,
        "spectral_model_name": "other",
    },
}
# A value other than the default for every functional option that no documented field holds, without `basis`.
PROTECT = {"protect": ((3, 9),)}
FURTHER: dict[str, dict[str, Any]] = {
    "streaming_llm": PROTECT,
    "h2o": PROTECT,
    "snapkv": {"pool_kernel": 5, "force_window": False, **PROTECT},
    "tova": {"share_heads": True, **PROTECT},
    "pyramidkv": {
        "layer": 1,
        "layers": 4,
        "rule": "paper",
        "scorer": "snapkv",
        "decay": 0.5,
        "recent": 9,
        "obs_window": 16,
        **PROTECT,
    },
    "squeeze": {"reduce": "head0", "decay": 0.5, "recent": 9, **PROTECT},
    "chunkkv": {"pin_chunks": 2, "layer": 1, **PROTECT},
    "cam": {"recent": 9, "reach": 8, **PROTECT},
    "knorm": PROTECT,
    "keyformer": {"recent_share": 0.25, **PROTECT},
    "morphkv": {"fuse": "sum", **PROTECT},
    "kvzip": PROTECT,
    "nestedkv": PROTECT,
    "rocketkv": {"pool_kernel": 31, **PROTECT},
    "qfilters": {"stand_in": "axis", **PROTECT},
    "curdkv": {"prefill": "exact", "decode": "append", **PROTECT},
    "kivi": {"bits_k": 4, "bits_v": 3},
    "kivi_sink": {"bits_k": 4, "bits_v": 3, "sink_signal": "first"},
    "turboquant_prod": {"sketch": "gaussian", "rounds": 2},
    "turboquant_mse": {"unbiased": True, "rounds": 2},
    "turboquant_rvq": {"value_bits": 8, "residual": "laplace", "unbiased": False, "rounds": 2},
    "polar": {"level_bits": (4, 3, 2, 2), "rounds": 2, "polar_values": True, "bits_k": 4, "bits_v": 4},
    "qjl": {"sketch": "gaussian"},
    "spectral": {
        "bits_k": 4,
        "bits_v": 3,
        "scale": "rms",
        "codebook": "gaussian",
        "sketch": "gaussian",
        "fold": False,
    },
    "kitty": {"n_sink": 4, "residual_length": 64, "value_bits": None, "ranking": "variance"},
    "adakv": {"residual_length": 64, "value_bits": 4, "n_sink": 4},
    "skvq": {
        "order": "kmeans",
        "n_fit": 64,
        "clip_grid": (1.0, 0.5),
        "clip_center": "zero",
        "fp8": True,
        "bits_k": 4,
        "bits_v": 3,
        "key_order": Table.of(np.tile(np.arange(64), (2, 1))),
        "value_order": Table.of(np.tile(np.arange(64), (2, 1))),
    },
    "kvquant": {
        "bits_k": 4,
        "bits_v": 2,
        "levels": "fitted",
        "n_fit": 64,
        "margin": 2.0,
        "residual_length": 32,
        "rope": Rope(64),
        "k_levels": Table.of(np.arange(8)),
        "v_levels": Table.of(np.arange(8)),
        "k_range": Table.of(np.ones((2, 2, 64))),
    },
    "vecinfer": {},
    "a2ats": {
        "n_sink": 4,
        "rope_dims": 32,
        "rope_traditional": True,
        "rope": Rope(64),
        "far_rope": "constant",
        "proxy": "last_key",
        "seed": 5,
    },
    "zipcache": {
        "window": 64,
        "cst_keys": True,
        "hi_bits_v": 8,
        "lo_bits_v": 3,
        "probe_share": 0.5,
        "seed": 5,
        "proxy": "large_keys",
    },
    "nsnquant": {"double_quantization": True, "rescale": False, "bits_k": 1, "bits_v": 1},
    "cachegen": {"layer": 3, "layers": 4, "residual_length": 32, "n_sink": 4, "bits_k": 5, "bits_v": 3},
    "gear": {
        "block": 64,
        "residual_length": 16,
        "n_sink": 4,
        "sparse_store": "diff",
        "bits_k": 4,
        "bits_v": 3,
    },
    "amc": {
        "normalize": "size",
        "fill": "zero",
        "rank_mid": 9,
        "rank_low": 3,
        "residual_length": 32,
        "n_sink": 2,
    },
    "svdq": {
        "one_bit": "minmax",
        "n_fit": 256,
        "residual_length": 32,
        "n_sink": 2,
        "bits_v": 4,
        "rope": Rope(64),
    },
    "xquant": {"fit": "minmax", "eta": 0.25, "residual_length": 32, "n_sink": 2, "bits_k": 4, "bits_v": 3},
    "palu": {"bits_k": 4, "bits_v": 3, "mixing": False, "n_fit": 64, "residual_length": 32, "n_sink": 2},
    "kvtc": {
        "bit_budget_k": 256,
        "bit_budget_v": 128,
        "n_sink": 2,
        "window": 64,
        "chunk": 32,
        "n_fit": 64,
        "rank": 16,
        "shrinkage": 0.5,
        "ranges": "observed",
        "margin": 0.5,
    },
    "minicache": {
        "retention": "range",
        "block": 32,
        "retained_share": 0.1,
        "merge": "keys",
        "center": False,
        "direction_bits": 8,
        "bits_k": 8,
        "bits_v": 4,
        "residual_length": 32,
        "n_sink": 2,
    },
    "xkv": {
        "rank_v": 32,
        "bits_k": 8,
        "bits_v": 3,
        "rotate": False,
        "centred": False,
        "n_fit": 256,
        "residual_length": 32,
        "n_sink": 2,
    },
    "anchorkv": {"n_sink": 2, "pool_kernel": 3},
    "age_tiered": {},
}
CALIBRATIONS: dict[str, Any] = {
    "spectral": vq.spectral_calibrate,
    "svdq": vq.svdq_calibrate,
    "palu": vq.palu_calibrate,
    "kvtc": vq.kvtc_calibrate,
    "amc": vq.amc_calibrate,
    "xkv": vq.xkv_calibrate,
}
# Options without which another has no effect or can't be given.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("pyramidkv", "layer"): {"layers": 4},
    ("pyramidkv", "layers"): {"layer": 1},
    ("pyramidkv", "rule"): {"layer": 1, "layers": 4},
    ("pyramidkv", "obs_window"): {"scorer": "snapkv"},
    ("cachegen", "layer"): {"layers": 4},
    ("cachegen", "layers"): {"layer": 3},
    ("polar", "bits_v"): {"polar_values": True},
}
# Methods whose rows stand alone, so that a window can be laid over them.
ROWS_ALONE = ["turboquant_mse", "turboquant_rvq", "turboquant_prod", "qjl", "polar", "spectral", "vecinfer"]
# Another way of computing the same.
SPEED: dict[str, Any] = {
    "enable_vectorized_attend": False,
    "enable_fused_query_dot": True,
    "snap_backend": "reference",
    "snap_batched_scoring": False,
    "tova_backend": "mlx",
    "pyramid_backend": "mlx",
    "use_metal_kernels": False,
    "fused_sdpa": True,
    "fused_sdpa_max_ctx": 4096,
    "fused_sdpa_memory_bound": True,
}


def configured(**values: Any) -> KVCacheConfig:
    """A configuration whose warnings are of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KVCacheConfig(**values)


def quiet(**values: Any) -> KVCacheConfig:
    """A configuration that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(vecinfer|a2ats|spectral): .*stand")  # tables that nobody calibrated
        return KVCacheConfig(**values)


class TestSignature:
    def test_all_documented_parameters_in_their_order(self):
        assert len(PARAMETERS) == 225
        assert list(inspect.signature(KVCacheConfig).parameters) == list(PARAMETERS)
        assert [field.name for field in dataclasses.fields(KVCacheConfig)] == list(PARAMETERS)

    @pytest.mark.parametrize("name", PARAMETERS)
    def test_documented_default(self, name):
        wanted = PARAMETERS[name]
        value = getattr(quiet(), name)
        assert value == wanted
        assert type(value) is type(wanted)
        parameter = inspect.signature(KVCacheConfig).parameters[name]
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if name != "observers":
            assert parameter.default == wanted

    def test_observers_are_a_new_list_each_time(self):
        assert KVCacheConfig().observers is not KVCacheConfig().observers

    def test_values_go_by_position_too(self):
        config = KVCacheConfig("turboquant_mse", 64, 3)
        assert (config.method, config.head_dim, config.bit_width_inlier) == ("turboquant_mse", 64, 3)

    def test_methods(self):
        assert METHOD_NAMES[: len(DOCUMENTED["methods"])] == tuple(DOCUMENTED["methods"])
        assert set(METHOD_NAMES) == set(METHODS)

    @pytest.mark.parametrize(
        ("make", "wanted"),
        [
            (lambda: KVCacheConfig(h2o_budgets=3), "KVCacheConfig: `h2o_budgets` .*; did you mean h2o_budget or"),
            (lambda: KVCacheConfig(method="kivi", bits=3), "KVCacheConfig: `bits` .*; did you mean bit_width_inlier"),
            (lambda: KVCacheConfig("snapkv", budgets=3), "KVCacheConfig: `budgets` .*; did you mean snap_budget or"),
            (lambda: KVCacheConfig(method="kivi", kivi_bits_k=4), r".*; write options=KIVIOptions\(kivi_bits_k=...\)"),
            (lambda: vq_adapters.H2OOptions(budget=3), "H2OOptions: `budget` .*; did you mean h2o_budget?"),
            (lambda: vq.kivi(bit=3), "kivi: `bit` must be a known option; did you mean bits or bits_v or bits_k"),
            (lambda: vq.h2o_policy(xyz=3), "h2o: `xyz` must be a known option; got 3"),
        ],
    )
    def test_unknown_names_are_refused_and_like_ones_told(self, make, wanted):
        with pytest.raises(QuantizerConfigError, match=f"^{wanted}"):
            make()


class TestMaxTokens:
    """The smaller of `capacity` and the method's own bound."""

    @pytest.mark.parametrize(
        ("values", "wanted"),
        [
            ({"method": "kivi"}, None),
            ({"method": "kivi", "capacity": 100}, 100),
            ({"method": "nsnquant"}, 8192),
            ({"method": "nsnquant", "capacity": 100}, 100),
            ({"method": "nsnquant", "capacity": 9000}, 8192),
            ({"method": "skvq"}, None),
            ({"method": "skvq", "options": vq_adapters.SKVQOptions(skvq_max_ctx=64)}, 64),
        ],
    )
    def test_bounds(self, values, wanted):
        assert quiet(**values).max_tokens == wanted


def test_an_entry_of_a_list_of_bits_is_final():
    config = quiet(method="cachegen", options=vq_adapters.CacheGenOptions(cachegen_bits=[4, 2]))
    layers = [config.for_layer(Layer(index, 2)) for index in range(2)]
    assert [(one.cachegen_bits, one.cachegen_resolved_bits) for one in layers] == [(4, 4), (2, 2)]
    assert quiet(method="cachegen").for_layer(Layer(1, 2)).cachegen_resolved_bits is None


class TestNames:
    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_defaults_agree_wherever_a_field_comes_from(self, method):
        assert {field: PARAMETERS[field] for field in fields_of(method)} == fields_of(method)

    @pytest.mark.parametrize(
        ("method", "option", "field"),
        [
            ("h2o", "budget", "h2o_budget"),
            ("snapkv", "obs_window", "snap_obs_window"),
            ("streaming_llm", "window_size", "stream_window_size"),
            ("kivi", "bits", "bit_width_inlier"),
            ("kivi", "group_size", "kivi_group_size"),
            ("kivi", "residual_length", "residual_length"),
            ("turboquant_mse", "bits", "bit_width_inlier"),
            ("turboquant_rvq", "seed", "seed"),
            ("qjl", "jl_dim", "jl_dim"),
            ("kivi_sink", "n_sink", "n_sink_tokens"),
            ("pyramidkv", "beta", "pyramid_beta"),
            ("knorm", "keep", "knorm_keep"),
            ("snapkv", "pool_kernel", None),
            ("h2o", "protect", None),
            ("qjl", "sketch", None),
            ("turboquant_rvq", "value_bits", None),
            ("turboquant_rvq", "residual", None),
        ],
    )
    def test_field_of_an_option(self, method, option, field):
        assert field_of(method, option) == field

    def test_every_field_comes_from_somewhere(self):
        reached = {field for method in METHOD_NAMES for field in fields_of(method)}
        assert reached | set(CONFIG_FIELDS) == set(ORDER)
        assert len(set(ORDER)) == len(ORDER)


class TestOptions:
    def test_all_documented_classes(self):
        assert len(DOCUMENTED["options_classes"]) == 37
        for name in DOCUMENTED["options_classes"]:
            assert getattr(vq_adapters, name).__name__ == name
            assert name in vq_adapters.__all__
        undocumented = [method for method in METHOD_NAMES if set(fields_of(method)) <= OWN]
        assert {kind.__name__ for kind in OPTIONS.values()} == {
            *DOCUMENTED["options_classes"],
            *(OPTIONS[method].__name__ for method in undocumented),
        }
        for kind in (OPTIONS[method] for method in DOCUMENTED["methods"]):
            assert getattr(vq_adapters, kind.__name__) is kind
            assert kind.__name__ in vq_adapters.__all__

    @pytest.mark.parametrize("method", OPTIONS)
    def test_documented_fields_are_the_flat_ones(self, method):
        options = OPTIONS[method]()
        documented = {field: value for field, value in dataclasses.asdict(options).items() if field in PARAMETERS}
        assert documented == {field: PARAMETERS[field] for field in options_fields(method)}

    def test_fields_by_name(self):
        assert set(OPTIONS) == set(METHOD_NAMES)
        vecinfer = ["key_sub_dim", "value_sub_dim", "key_codebook_bits", "value_codebook_bits", "residual_length"]
        assert [field.name for field in dataclasses.fields(vq_adapters.VecInferOptions)] == vecinfer
        assert set(options_fields("kivi")) == {"kivi_group_size", "residual_length"}
        assert vq_adapters.H2OOptions(h2o_budget=256).h2o_budget == 256

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_options_fill_the_flat_fields(self, method):
        if not options_fields(method):
            assert set(fields_of(method)) <= OWN
            return
        field = next(field for field in options_fields(method) if type(PARAMETERS[field]) in (int, float))
        value = OTHER.get(method, {}).get(field, 2 * PARAMETERS[field] or 1)
        config = quiet(method=method, options=OPTIONS[method](**{field: value}))
        assert getattr(config, field) == value
        assert config.options == OPTIONS[method](**{field: value})

    def test_options_of_another_method(self):
        with pytest.raises(QuantizerConfigError, match=r"h2o: `options` must be H2OOptions; got SnapKVOptions"):
            KVCacheConfig(method="h2o", options=vq_adapters.SnapKVOptions())
        with pytest.raises(QuantizerConfigError, match="turboquant_mse: `options`"):
            KVCacheConfig(method="turboquant_mse", options=vq_adapters.KIVIOptions())

    def test_bad_values_in_options_are_refused(self):
        with pytest.raises(QuantizerConfigError, match="h2o: `decay`"):
            KVCacheConfig(method="h2o", options=vq_adapters.H2OOptions(h2o_decay=2.0))

    def test_options_survive_pickling(self):
        options = vq_adapters.SnapKVOptions(snap_budget=9)
        assert pickle.loads(pickle.dumps(options)) == options

    def test_shared_field_beside_options(self):
        config = quiet(method="kivi", residual_length=64, options=vq_adapters.KIVIOptions(kivi_group_size=64))
        assert (config.residual_length, config.kivi_group_size) == (64, 64)


def built(config: KVCacheConfig) -> Any:
    """What one layer gets, of a stack of two where layers are packed together."""
    stacks = "stacks" in METHODS[config.method].traits
    return config.for_layer(Layer(stack=2)).transform() if stacks else config.transform()


def build(method: str, options: dict[str, Any]) -> Any:
    """The same by the functional options."""
    row = METHODS[method]
    return row.build(**options, layers=2).member(0) if "stacks" in row.traits else row.build(**options)


def with_options(method: str, options: dict[str, Any], **values: Any) -> KVCacheConfig:
    """A configuration with further functional options."""
    fields = further_fields(method)
    given = {fields[option]: value for option, value in options.items()}
    return configured(method=method, options=OPTIONS[method](**given), **values)


def further(method: str) -> dict[str, Any]:
    """A value for every further option of a method."""
    if method not in CALIBRATIONS:
        return FURTHER[method]
    samples = mx.random.normal((80, 2, 64), key=mx.random.key(1))
    return {**FURTHER[method], "basis": CALIBRATIONS[method](samples, samples)}


class TestFurtherOptions:
    """Functional options that no documented field holds."""

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_every_functional_option_has_one_field(self, method):
        documented = {option for option in options_of(method) if field_of(method, option)}
        fields = further_fields(method)
        assert documented | set(fields) == set(options_of(method))
        assert not documented & set(fields)
        assert len(set(fields.values())) == len(fields)
        assert not set(fields.values()) & set(ORDER)

    @pytest.mark.parametrize("method", DOCUMENTED["methods"])
    def test_each_arrives(self, method):
        values = further(method)
        assert set(values) == set(further_fields(method))
        for option, value in values.items():
            beside = BESIDE.get((method, option), {})
            got = built(with_options(method, {option: value, **beside}))
            assert got == build(method, {option: value, **beside}), option
            without = {name: x for name, x in beside.items() if name != "layer" and name != "layers"}
            assert got != build(method, without), option

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_defaults_are_the_functional_ones(self, method):
        options, fields = OPTIONS[method](), further_fields(method)
        assert {option: getattr(options, field) for option, field in fields.items()} == {
            option: options_of(method)[option] for option in fields
        }
        assert built(configured(method=method, options=options)) == build(method, {})

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_the_method_s_page_names_them(self, method):
        named = re.search(r"\nOnly in `options=(\w+)\(\.\.\.\)`: (.*?)\.\n", page(method), re.S)
        if not further_fields(method):
            assert named is None
        else:
            assert named[1] == OPTIONS[method].__name__
            assert re.findall(r"`(\w+)`", named[2]) == list(further_fields(method).values())

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_go_by_keyword(self, method):
        parameters = inspect.signature(OPTIONS[method]).parameters
        further = {name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
        assert set(parameters) - further == set(options_fields(method))
        assert further >= set(further_fields(method).values())

    @pytest.mark.parametrize(
        ("method", "options", "rule"),
        [
            ("kivi", {"bits_k": 9}, "kivi: `bits_k` must be an integer in"),
            ("kivi", {"bits_v": [4, 2]}, "kivi: `bits_v` must be an integer in"),
            ("nsnquant", {"bits_v": 3}, "nsnquant: `bits_v` must be one of"),
            ("skvq", {"order": "none"}, "skvq: `order` must be one of"),
            ("h2o", {"protect": ((3, 1),)}, "h2o: `protect`"),
            ("svdq", {"basis": 3}, "svdq: `basis`"),
            ("polar", {"bits_v": 4}, "polar: `bits_v` can't be set without `polar_values`"),
        ],
    )
    def test_refused_by_name(self, method, options, rule):
        with pytest.raises(QuantizerConfigError, match=f"^{rule}"):
            with_options(method, options)

    def test_of_a_method_that_shares_the_class(self):
        with pytest.raises(QuantizerConfigError, match="kivi: `kivi_sink_signal` has no effect"):
            KVCacheConfig(method="kivi", options=vq_adapters.KIVIOptions(kivi_sink_signal="first"))
        options = vq_adapters.KIVIOptions(kivi_bits_k=4, kivi_sink_signal="first")
        assert quiet(method="kivi_sink", options=options).transform() == vq.kivi_sink(bits_k=4, sink_signal="first")

    @pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
    def test_keys_and_values_at_bits_of_their_own(self, dtype):
        """64 of 80 tokens are in groups of 32 numbers, of which each has a scale and a zero."""
        options = vq_adapters.KIVIOptions(residual_length=16, kivi_bits_k=4, kivi_bits_v=2)
        cache = vq_adapters.KIVIKVCache(quiet(method="kivi", bit_width_inlier=3, options=options))
        x = mx.random.normal((2, 3, 80, 64), key=mx.random.key(0)).astype(dtype)
        cache.update_and_fetch(x, x)
        groups = 2 * 3 * 64 * 64 // 32
        assert cache.compressed_key_bytes == groups * (32 * 4 // 8 + 2 * dtype.size)
        assert cache.compressed_value_bytes == groups * (32 * 2 // 8 + 2 * dtype.size)
        assert cache.assigned_avg_bits == 3.0
        other = vq_adapters.KIVIKVCache.from_state(cache.state)
        assert other.transform == cache.transform == vq.kivi(bits=3, bits_k=4, bits_v=2, residual_length=16)

    def test_files_tell_them(self, tmp_path):
        caches = [vq_adapters.KVCacheFactory.create(with_options("gear", {"n_sink": 4, "bits_v": 4}))]
        caches[0].update_and_fetch(*(mx.random.normal((1, 2, 40, 64)) for _ in range(2)))
        vq_adapters.save(tmp_path / "caches", caches)
        (loaded,) = vq_adapters.load(tmp_path / "caches")
        assert loaded.transform == vq.gear(n_sink=4, bits_v=4)

    def test_bits_of_a_side_go_with_a_list_for_layers(self):
        config = with_options("kivi", {"bits_k": 8}, bit_width_inlier=[2, 4])
        layers = [config.for_layer(Layer(index, 2)).transform() for index in range(2)]
        assert layers == [vq.kivi(bits=bits, bits_k=8) for bits in (2, 4)]

    def test_a_given_place_wins_over_the_one_that_is_told(self):
        layer = Layer(index=2, count=3)
        assert with_options("chunkkv", {"layer": 1}).for_layer(layer).transform() == vq.chunkkv(layer=1)
        told = with_options("pyramidkv", {"layers": 8}).for_layer(layer).transform()
        assert told == vq.pyramidkv(layer=2, layers=8)

    @pytest.mark.parametrize(
        "options", [{"rope_dims": 16}, {"rope_traditional": True}, {"rope": Rope(64, base=77.0)}], ids=str
    )
    def test_a_given_rotation_wins_over_the_model_s(self, options):
        place = Layer(count=1, rope=Rope(64, base=123.0))
        assert configured(method="a2ats").for_layer(place).transform().options.rotation(64).base == 123.0
        wanted = vq.a2ats(**options).options.rotation(64)
        assert with_options("a2ats", options).for_layer(place).transform().options.rotation(64) == wanted

    @pytest.mark.parametrize("method", ["kvquant", "svdq"])
    def test_keys_are_held_as_before_the_model_s_rotation_unless_told_otherwise(self, method):
        model_s, other = Rope(64, base=123.0), Rope(64, base=77.0)
        place = Layer(count=1, rope=model_s)
        assert configured(method=method).transform().key.rope is None
        assert configured(method=method).for_layer(place).transform().key.rope == model_s
        assert with_options(method, {"rope": other}).for_layer(place).transform().key.rope == other
        assert with_options(method, {"rope": False}).for_layer(place).transform().key.rope is None

    def test_what_a_store_holds_must_not_be_given_too(self):
        samples = mx.random.normal((80, 2, 64), key=mx.random.key(2))
        place = Layer(count=1, found=vq.kvquant_calibrate(samples, samples))
        assert configured(method="kvquant").for_layer(place).transform().key.given is not None
        config = with_options("kvquant", {"k_levels": Table.of(np.arange(8))})
        with pytest.raises(
            QuantizerConfigError, match="kvquant: `kvquant_k_levels` must not be given beside a `store`"
        ):
            config.for_layer(place).transform()

    def test_copies_and_text(self):
        config = with_options("kivi", {"bits_k": 4, "bits_v": 2}, seed=7)
        for other in (
            copy.deepcopy(config),
            pickle.loads(pickle.dumps(config)),
            dataclasses.replace(config, seed=7),
            eval(repr(config), vars(vq_adapters)),
        ):
            assert other == config
            assert other.transform() == vq.kivi(bits_k=4, bits_v=2)
        assert config != with_options("kivi", {"bits_k": 4, "bits_v": 3}, seed=7)
        assert "kivi_bits_k=4, kivi_bits_v=2" in repr(config)

    def test_json(self):
        config = with_options("skvq", {"bits_v": 4, "fp8": True})
        data = json.loads(json.dumps(dataclasses.asdict(config)))
        options = vq_adapters.SKVQOptions(**data.pop("options"))
        assert options == config.options
        assert configured(**data, options=options).transform() == config.transform()


class TestWarnings:
    @pytest.mark.parametrize(("method", "field"), [("h2o", "h2o_budget"), ("snapkv", "snap_budget")])
    def test_a_flat_field_names_the_options_class(self, method, field):
        with pytest.warns(DeprecationWarning, match=rf"`{field}`.*{OPTIONS[method].__name__}\({field}=100\)") as caught:
            config = KVCacheConfig(method=method, **{field: 100})
        assert getattr(config, field) == 100
        assert caught[0].filename == __file__

    def test_a_flat_field_at_its_default_is_silent(self):
        quiet(method="h2o", h2o_budget=512, tova_budget=512)

    def test_shared_fields_are_silent(self):
        quiet(method="kivi", bit_width_inlier=4, residual_length=64, head_dim=64, seed=7, capacity=100)
        quiet(method="qjl", jl_dim=64, seed=7, head_dim=64, sliding_window=9)

    def test_a_field_of_another_method(self):
        with pytest.warns(UserWarning, match="`tova_budget` has no effect on h2o") as caught:
            KVCacheConfig(method="h2o", tova_budget=3)
        assert [warning.filename for warning in caught] == [__file__]

    @pytest.mark.parametrize("field", IDLE)
    def test_a_field_that_is_documented_to_change_nothing(self, field):
        (method,) = (name for name in METHOD_NAMES if field in fields_of(name))
        value, kind = OTHER[method][field], OPTIONS[method]
        for given in ({field: value}, {"options": kind(**{field: value})}):
            with pytest.warns(UserWarning, match=f"`{field}` has no effect on {method}") as caught:
                config = KVCacheConfig(method=method, **given)
            assert len(caught) == 1 and config.transform() == METHODS[method].build()

    def test_the_pages_name_the_fields_that_change_nothing(self):
        """Those that choose a way of computing are among them."""
        rows = {method: re.findall(r"^\| `(\w+)` .*without effect", page(method), re.M) for method in METHOD_NAMES}
        named = {field_of(method, option) for method, options in rows.items() for option in options}
        assert set(IDLE) <= named <= {*IDLE, *SPEED_FIELDS}

    def test_a_field_of_the_options_class_that_the_method_has_no_use_for(self):
        with pytest.warns(UserWarning, match="`residual_length` has no effect on vecinfer"):
            KVCacheConfig(method="vecinfer", options=vq_adapters.VecInferOptions(residual_length=3))

    def test_a_shared_field_that_the_method_has_no_use_for(self):
        with pytest.warns(UserWarning, match="`bit_width_inlier` has no effect on h2o"):
            KVCacheConfig(method="h2o", bit_width_inlier=4)

    def test_options_win_over_a_flat_field_and_say_so(self):
        with pytest.warns(UserWarning, match=r"options give `h2o_budget`=64; not 100"):
            config = KVCacheConfig(method="h2o", h2o_budget=100, options=vq_adapters.H2OOptions(h2o_budget=64))
        assert config.h2o_budget == 64


class TestCopies:
    def test_replace(self):
        config = quiet(method="h2o", options=vq_adapters.H2OOptions(h2o_budget=64))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = dataclasses.replace(config, seed=3)
        assert (other.seed, other.h2o_budget, other.options) == (3, 64, config.options)
        assert (config.seed, config.h2o_budget) == (42, 64)
        assert dataclasses.replace(other, seed=42) == config

    def test_replace_checks(self):
        with pytest.raises(QuantizerConfigError, match="`head_dim`"):
            dataclasses.replace(KVCacheConfig(), head_dim=0)

    @pytest.mark.parametrize("array", [np.array, lambda x: mx.array(x).astype(mx.bfloat16)], ids=["numpy", "mlx"])
    def test_arrays_are_compared_by_their_numbers(self, array):
        def made(x: Any, **values: Any) -> KVCacheConfig:
            return configured(method="a2ats", options=vq_adapters.A2ATSOptions(a2ats_query_h=array(x)), **values)

        assert made(np.eye(8)) == made(np.eye(8)) == dataclasses.replace(made(np.eye(8)))
        assert made(np.eye(8)).options == made(np.eye(8)).options
        changed = made(2 * np.eye(8)), made(np.ones((2, 8, 8))), made(np.eye(8), seed=1)
        for other in (*changed, configured(method="a2ats"), None):
            assert made(np.eye(8)) != other and other != made(np.eye(8))

    def test_copy_and_pickle(self):
        config = quiet(method="qjl", jl_dim=64)
        assert copy.deepcopy(config) == config
        assert pickle.loads(pickle.dumps(config)) == config

    def test_repr_shows_what_was_set(self):
        assert repr(quiet(method="qjl", jl_dim=64)) == "KVCacheConfig(method='qjl', jl_dim=64)"


class TestRules:
    @pytest.mark.parametrize(
        ("values", "field"),
        [
            ({"method": "nothing"}, "method"),
            ({"method": None}, "method"),
            ({"head_dim": 0}, "head_dim"),
            ({"head_dim": 64.0}, "head_dim"),
            ({"bit_width_inlier": 0}, "bit_width_inlier"),
            ({"bit_width_inlier": 9}, "bit_width_inlier"),
            ({"bit_width_inlier": "2"}, "bit_width_inlier"),
            ({"bit_width_inlier": True}, "bit_width_inlier"),
            ({"bit_width_inlier": []}, "bit_width_inlier"),
            ({"bit_width_inlier": [2, 9]}, "bit_width_inlier"),
            ({"bit_width_outlier": 0}, "bit_width_outlier"),
            ({"jl_dim": 0, "method": "qjl"}, "jl_dim"),
            ({"jl_dim": 48, "method": "qjl"}, "jl_dim"),
            ({"n_calib_tokens": 0}, "n_calib_tokens"),
            ({"seed": "0"}, "seed"),
            ({"dtype": "float16"}, "dtype"),
            ({"dtype": mx.int32}, "dtype"),
            ({"capacity": 0}, "capacity"),
            ({"sliding_window": 0, "method": "qjl"}, "sliding_window"),
            ({"sliding_window": 2.5, "method": "qjl"}, "sliding_window"),
            ({"sliding_window": -1, "method": "qjl"}, "sliding_window"),
            ({"observers": None}, "observers"),
            ({"residual_length": -1, "method": "kivi"}, "residual_length"),
            ({"kivi_group_size": 0, "method": "kivi"}, "group_size"),
            ({"enable_vectorized_attend": 1}, "enable_vectorized_attend"),
            ({"use_metal_kernels": "yes"}, "use_metal_kernels"),
            ({"h2o_budget": 0, "method": "h2o"}, "budget"),
            ({"h2o_n_sink": 500, "method": "h2o"}, "budget"),
            ({"snap_dtype": "int8", "method": "snapkv"}, "dtype"),
            ({"stream_n_sink": 0, "stream_window_size": 0, "method": "streaming_llm"}, "window_size"),
        ],
    )
    def test_refused_by_name(self, values, field):
        with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
            configured(**values)

    def test_form_of_words(self):
        with pytest.raises(ValueError, match=r"^kivi: `head_dim` must be an integer >= 1; got 0$"):
            KVCacheConfig(method="kivi", head_dim=0)

    @pytest.mark.parametrize(
        "values",
        [
            {"bit_width_outlier": 3},
            {"n_outlier_channels": 4},
            {"enable_outlier_two_stream": True},
            {"n_calib_tokens": 100},
            {"store": object()},
            {"n_sink_tokens": 4},
            {"smooth_factors": mx.ones((4,))},
            {"key_codebook": mx.ones((4, 2))},
            {"value_codebook": mx.ones((4, 2))},
        ],
        ids=lambda values: next(iter(values)),
    )
    @pytest.mark.parametrize("method", OTHER)
    def test_no_field_is_without_effect_in_silence(self, method, values):
        (field,) = values
        assert field in NO_EFFECT
        if any(field_of(method, option) == field for option in options_of(method)) or (
            field == "store" and method in CALIBRATED
        ):
            return  # it is this method's own
        with pytest.raises(QuantizerConfigError, match=f"{method}: `{field}` has no effect"):
            configured(method=method, **values)

    def test_speed_fields(self):
        assert set(SPEED) == set(SPEED_FIELDS)

    @pytest.mark.parametrize("field", SPEED)
    def test_speed_fields_change_no_result(self, field):
        assert SPEED[field] != PARAMETERS[field]
        for method in METHODS:
            config = configured(method=method, **{field: SPEED[field]})
            assert getattr(config, field) == SPEED[field]
            assert config.transform() == KVCacheConfig(method=method).transform()

    def test_metal(self, monkeypatch):
        monkeypatch.setattr(mx.metal, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="`use_metal_kernels`"):
            KVCacheConfig(use_metal_kernels=True)
        assert KVCacheConfig(use_metal_kernels=False).transform() == KVCacheConfig().transform()
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        assert KVCacheConfig(use_metal_kernels=True).transform() == KVCacheConfig().transform()


class TestTransform:
    @pytest.mark.parametrize("method", TABLE, ids=lambda row: row.name)
    def test_defaults_are_the_functional_ones(self, method):
        assert quiet(method=method.name).transform() == method.build()

    def test_every_documented_method_is_checked(self):
        assert set(OTHER) == {method for method in METHODS if fields_of(method)}

    @pytest.mark.filterwarnings("ignore:cam")
    @pytest.mark.parametrize("method", OTHER)
    def test_values_reach_their_options(self, method):
        assert set(fields_of(method)) == set(OTHER[method])
        assert all(PARAMETERS[field] != value for field, value in OTHER[method].items())
        names = {option: field_of(method, option) for option in options_of(method)}
        options = {option: OTHER[method][field] for option, field in names.items() if field in OTHER[method]}
        assert configured(method=method, **OTHER[method]).transform() == METHODS[method].build(**options)

    @pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_rvq", "qjl", "cam"])
    def test_layers_have_their_own_seed(self, method):
        """By their number among all layers of the model."""
        config = quiet(method=method, seed=7)
        assert config.for_layer(Layer(index=1, number=3)).transform() == METHODS[method].build(seed=10)
        assert config.seed == 7
        last = quiet(method=method, seed=2**32 - 1).for_layer(Layer(index=1, number=3))
        assert last.transform() == METHODS[method].build(seed=2)

    @pytest.mark.parametrize("method", ["h2o", "kivi", "snapkv", "streaming_llm"])
    def test_layers_without_a_seed_are_alike(self, method):
        config = quiet(method=method)
        assert config.for_layer(Layer(index=1, count=2, number=3)).transform() == config.transform()

    def test_layers_know_their_place(self):
        pyramid, chunks = quiet(method="pyramidkv"), configured(method="chunkkv", chunkkv_reuse_layers=2)
        for index in range(3):
            layer = Layer(index=index, count=3, number=9)
            assert pyramid.for_layer(layer).transform() == vq.pyramidkv(layer=index, layers=3)
            assert chunks.for_layer(layer).transform() == vq.chunkkv(reuse_layers=2, layer=index)
        assert pyramid.transform() == vq.pyramidkv()

    def test_head_size_of_a_layer(self):
        config = quiet(method="kivi", head_dim=64)
        assert config.for_layer(Layer()).head_dim == 64
        spec = vq.KVSpec(kv_heads=2, key_dim=32, value_dim=32)
        assert config.for_layer(Layer(spec=spec)).head_dim == 32
        assert config.head_dim == 64

    @pytest.mark.parametrize("bits", [[2, 4], (2, 4)])
    def test_a_list_of_bits_is_for_layers(self, bits):
        config = quiet(method="kivi", bit_width_inlier=bits)
        with pytest.raises(QuantizerConfigError, match=r"kivi: `bit_width_inlier`.*for_model"):
            config.transform()
        layers = [config.for_layer(Layer(index=index, count=2)).transform() for index in range(2)]
        assert layers == [vq.kivi(bits=2), vq.kivi(bits=4)]
        with pytest.raises(QuantizerConfigError, match=r"`bit_width_inlier` must have one entry for each of the 3"):
            config.for_layer(Layer(count=3))

    @pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_rvq", "qjl"])
    def test_sliding_window(self, method):
        transform, rows = quiet(method=method, sliding_window=9).transform(), METHODS[method].build()
        plain = vq.sliding_window(window_size=9, key=rows.key, value=rows.value)
        assert attrs.evolve(plain, name=transform.name, store=rows) == transform

    @pytest.mark.parametrize("method", [name for name in METHODS if name not in ROWS_ALONE])
    def test_sliding_window_is_refused_by_name(self, method):
        with pytest.raises(QuantizerConfigError, match=f"{method}: `sliding_window`"):
            configured(method=method, sliding_window=9)

    @pytest.mark.parametrize("method", ROWS_ALONE)
    def test_rows_that_stand_alone_have_a_window(self, method):
        assert configured(method=method, sliding_window=9).transform().window == 9

    def test_a_store_is_for_models(self):
        """Whoever makes one cache, by whichever class, is told that the store isn't read."""
        config = configured(method="palu", store=object())
        for make in (KVCacheConfig.transform, vq_adapters.PALUKVCache, vq_adapters.KVCacheFactory.create):
            with pytest.raises(QuantizerConfigError, match="palu: `store` is for `for_model`"):
                make(config)
        config = configured(method="spectral", store=object())
        with pytest.raises(QuantizerConfigError, match="spectral: `store` is for `for_model`"):
            vq_adapters.KVCacheFactory.create(config)


class TestStorageDtype:
    @staticmethod
    def _rows(config: KVCacheConfig):
        x = mx.random.normal((1, 2, 5, 32), mx.float32)
        cache = TransformKVCache(config.transform())
        keys, values = cache.update_and_fetch(x, x)
        return cache._state.rows, keys, values, x

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
    @pytest.mark.parametrize("method", ["h2o", "snapkv", "streaming_llm"])
    def test_kept_rows(self, method, dtype):
        rows, keys, values, x = self._rows(quiet(method=method, dtype=dtype))
        assert rows.keys[0].dtype == rows.values[0].dtype == dtype
        assert mx.array_equal(keys, x.astype(dtype).astype(mx.float32))
        assert mx.array_equal(values, x.astype(dtype).astype(mx.float32))

    def test_values_beside_codes(self):
        rows, _, values, x = self._rows(quiet(method="turboquant_rvq", dtype=mx.float16))
        assert rows.values[0].dtype == mx.float16
        assert mx.array_equal(values, x.astype(mx.float16).astype(mx.float32))
        plain = KVCacheConfig(method="turboquant_rvq").transform()
        assert quiet(method="turboquant_rvq", dtype=mx.float16).transform().key == plain.key

    def test_in_a_window(self):
        transform = quiet(method="turboquant_rvq", dtype=mx.float16, sliding_window=8).transform()
        assert transform.store.value == vq.PlainCodec("float16")

    @pytest.mark.parametrize("method", ["kivi", "turboquant_mse", "qjl", "xquant", "minicache", "xkv"])
    def test_refused_where_it_can_do_nothing(self, method):
        with pytest.raises(QuantizerConfigError, match=f"{method}: `dtype`"):
            KVCacheConfig(method=method, dtype=mx.float16)

    def test_two_names_for_one_dtype(self):
        options = vq_adapters.SnapKVOptions(snap_dtype="float16")
        quiet(method="snapkv", dtype=mx.float16, options=options)
        with pytest.raises(QuantizerConfigError, match=r"`dtype` must agree"):
            KVCacheConfig(method="snapkv", dtype=mx.bfloat16, options=options)


def test_no_options_class_holds_a_field_of_the_configuration_itself():
    shared = [field for fields in map(options_fields, OPTIONS) for field in fields if field in SHARED]
    assert set(shared) == set(SHARED)
    for method in OPTIONS:
        assert not {"bit_width_inlier", "seed", "jl_dim"} & set(options_fields(method))
