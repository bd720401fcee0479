"""A tiny random model of every family of mlx_lm: configurations, and the families that cannot run here."""

import importlib
import importlib.util
import sys
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten
from models import ARCHITECTURES, VOCABULARY, _random

# The release whose families these are.
RELEASE = "0.32.2"

_MIXED = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {**_ROPE, "type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_LONG = {"original_max_position_embeddings": 4096, "short_factor": 1.0, "long_factor": 1.0}

# What families have in common; each takes the fields that it knows. All experts are always chosen: where two are nearly
# as good, another order of adding numbers would choose the other one.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "moe_num_experts": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_INDEXED = {**_LATENT, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_GPT = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_inner": 96,
    "n_ctx": 512,
    "n_positions": 512,
    "rotary_dim": 16,
    "num_key_value_heads": None,
}
_MAMBA = {
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "n_groups": 1,
    "time_step_rank": 4,
    "time_step_limit": [0.001, 100.0],
}
_MULTIPLIED = {
    "logits_scaling": 1.0,
    "attention_multiplier": 32**-0.5,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_MUSE = {
    "num_hidden_layers": 4,
    "layer_types": _MIXED * 2,
    "layer_rope_theta": [1e4, 0] * 2,
    "rope_parameters": _ROPE,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 1.0,
    "post_norm_eps": 1e-5,
}
_KIMI = {
    **_LATENT,
    "num_hidden_layers": 4,
    "model_max_length": 512,
    "linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 3]},
}
_LONGCAT = {
    **_LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 1,
    "moe_topk": 3,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "ngram_vocab_size_ratio": 2,
    "emb_neighbor_num": 2,
    "emb_split_num": 2,
}
_WINDOWED = {"num_hidden_layers": 4, "layer_types": _MIXED * 2}
_MSCALED = {"rope_parameters": _YARN, "qk_head_dim": 48}

# What each family needs beside `_COMMON`; families that read a nested "text_config" get these there.
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: config for name, config in ARCHITECTURES.items() if name != "mistral"},
    "Klear": {},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
    },
    "afmoe": {**_WINDOWED, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"num_hidden_layers": 2, "sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": {**_LATENT, "num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe": {},
    "bailing_moe_linear": {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {**_LATENT, "num_hidden_layers": 4, "layer_group_size": 2},
    "bitnet": {"hidden_size": 128},
    "cohere": {},
    "cohere2": {"hidden_size": 128, "num_hidden_layers": 4},
    "dbrx": {
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 2, "moe_top_k": 2},
    },
    "deepseek": {},
    "deepseek_v32": _INDEXED,
    "deepseek_v41": {
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [0, 0],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
    },
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_k": 2},
    "exaone": {"hidden_size": 128, "num_layers": 2},
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": "LG"},
    "exaone_moe": {**_WINDOWED, "is_moe_layer": [False, True] * 2},
    "falcon_h1": _MAMBA,
    "gear": {"num_hidden_layers": 4, "layer_types": ["conv_mixer", *_MIXED, "full_attention"]},
    "gemma3": ARCHITECTURES["gemma3_text"],
    "gemma3n": {
        "num_hidden_layers": 6,
        "layer_types": _MIXED * 3,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.0] * 6,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 16,
    },
    "gemma4": ARCHITECTURES["gemma4_text"],
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_INDEXED, "rope_parameters": _ROPE},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": _GPT,
    "granite": _MULTIPLIED,
    "granitemoe": _MULTIPLIED,
    "granitemoehybrid": {
        **_MAMBA,
        **_MULTIPLIED,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "helium": {},
    "hunyuan": {
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": 16},
    "jamba": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": _LATENT,
    "kimi_k3": _KIMI,
    "kimi_linear": _KIMI,
    "kimi_vl": _LATENT,
    "laguna": _WINDOWED,
    "lfm2-vl": ARCHITECTURES["lfm2"],
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "use_expert_bias": True,
        "num_dense_layers": 2,
    },
    "lille-130m": {**_GPT, "block_size": 512, "n_kv_heads": 2},
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mellum": {**_WINDOWED, "rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
    "mimo": {},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [1, 0] * 2,
        "moe_layer_freq": [0, 1] * 2,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 16,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "v_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {**_LATENT, "rope_scaling": _LONG, "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0},
    "minimax": {"rotary_dim": 16},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96,
        "moe_layer_freq": [0, 1],
        "sparse_attention_freq": [0, 1],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "ministral3": {**_WINDOWED, "rope_parameters": _YARN},
    "mistral3": {},
    "mistral4": {**_LATENT, **_MSCALED},
    "mixtral": {},
    "muse_glimmer": _MUSE,
    "muse_spark": {**_MUSE, "moe_hidden_size": 64, "num_shared_experts": 0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4, "hidden_size": 128},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
        "num_hidden_layers": 3,
    },
    "nemotron_h": {**_MAMBA, "hybrid_override_pattern": ["M", "*", "-", "*"]},
    "olmo": {
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "mlp_hidden_size": 96,
        "embedding_size": VOCABULARY,
    },
    "olmo3": _WINDOWED,
    "olmo_hybrid": {**_DELTA, "layer_types": _LINEAR * 2, "linear_allow_neg_eigval": True, "linear_num_key_heads": 4},
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 1],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi": {},
    "phi3small": {
        "vocab_size": 100352,  # it names tokens up to there
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {},
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 16},
    "pixtral": {},
    "plamo2": {**_MAMBA, "num_hidden_layers": 4, "hidden_size_per_head": 32, "mamba_step": 2},
    "plamo3": {"num_hidden_layers": 4, "window_size": 16},
    "prism_hadamard_qwen35": {**_DELTA, "intermediate_size": 128, "rope_parameters": _MROPE, "num_experts": 0},
    "qwen": {"num_attention_heads": 2, "kv_channels": 32},
    "qwen2_moe": {},
    "qwen2_vl": {},
    "qwen3_5": {**_DELTA, "rope_parameters": _MROPE, "num_experts": 0},
    "qwen3_5_moe": {**_DELTA, "rope_parameters": _MROPE},
    "qwen3_moe": {},
    "qwen3_next": _DELTA,
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4},
    "solar_open": {},
    "spark2_5": {**_WINDOWED, "rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
    "starcoder2": {},
    "step3p5": {
        **_WINDOWED,
        "num_attention_groups": 2,
        "moe_num_experts": 2,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": _LATENT,
}
# Families that run nowhere, or not here, whatever the caches; `test_architectures` checks each reason.
METAL_ONLY = "its norms, its routing and its gates are Metal kernels"
NOT_COVERED: dict[str, str] = {
    "muse_spark": METAL_ONLY,
    "olmo": 'adds its mask to the scores, which mlx_lm\'s own cache makes the word "causal"',
}

# What stands around a nested "text_config".
_PACK: dict[str, Any] = {
    "schema_version": 1,
    "tensor_namespace": "mlx-lm-text",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [{"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
}
_WRAPPED = """
gemma3 gemma3n gemma4 kimi_k25 kimi_k3 kimi_vl lfm2-vl llama4 minimax_m3_vl mistral3 muse_spark pixtral qwen2_vl
qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe
"""
_NESTED: dict[str, dict[str, Any]] = {**{name: {} for name in _WRAPPED.split()}, "prism_hadamard_qwen35": _PACK}


def installed(family: str) -> bool:
    """Whether this release of mlx_lm has the family."""
    return importlib.util.find_spec(f"mlx_lm.models.{family}") is not None


def module_of(family: str) -> types.ModuleType:
    """The module of mlx_lm that defines a family."""
    if family == "olmo":  # it only asks whether this package is there
        sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{family}")


def config_of(family: str) -> dict[str, Any]:
    """The whole configuration, as a model's config.json would have it."""
    text = {**_COMMON, "model_type": family, **FAMILIES[family]}
    if family not in _NESTED:
        return text
    return {"model_type": family, "vocab_size": VOCABULARY, "text_config": text, **_NESTED[family]}


def build_family(family: str) -> nn.Module:
    """A new random model in float32; two of a family are equal."""
    module = module_of(family)
    model = module.Model(module.ModelArgs.from_dict(config_of(family)))
    if family == "bitnet":
        _without_metal(model)
    model.update(tree_map_with_path(_numbers, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model.eval()


def _without_metal(model: nn.Module) -> None:
    """Plain layers in place of those whose product is a Metal kernel: caches don't see the difference."""
    packed = ((path, module) for path, module in model.named_modules() if type(module).__name__ == "BitLinear")
    plain = [(path, nn.Linear(one.in_features, one.out_features, bias=False)) for path, one in packed]
    model.update_modules(tree_unflatten(plain))


def _numbers(path: str, weight: mx.array) -> mx.array:
    return _random(0, path, weight) if weight.ndim and mx.issubdtype(weight.dtype, mx.floating) else weight
