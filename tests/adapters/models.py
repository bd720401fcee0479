"""Tiny random models of mlx_lm's architectures, small transforms, and the plain ways of running them."""

import functools
import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_adapters.entries import changed
from vq_adapters.group import LayerGroup
from vq_functional.core.transform import Transform
from vq_functional.core.tree import flatten
from vq_functional.crosslayer.stack import Stack
from vq_functional.methods import TABLE, Method

VOCABULARY = 96
CHUNK = 16  # prefill step size throughout

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_OWN_HEAD_DIM = {key: size for key, size in _SIZES.items() if key != "head_dim"}
_MLA: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "model_type": "llama", "num_key_value_heads": 1},
    "qwen2": _OWN_HEAD_DIM,
    "qwen3": {**_SIZES, "rope_theta": 1e6},
    "phi3": _OWN_HEAD_DIM,
    "gemma": _SIZES,
    "gemma2": {**_SIZES, "query_pre_attn_scalar": 32.0},
    "gemma3_text": {
        **_SIZES,
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
    },
    "gemma4_text": {
        **_SIZES,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    },
    "gpt_oss": {**_SIZES, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "olmo2": _SIZES,
    "plamo": {**_OWN_HEAD_DIM, "n_shared_head": 2},
    "stablelm": {
        **_OWN_HEAD_DIM,
        "rope_theta": 1e4,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "deepseek_v2": {**_MLA, "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 2048}},
    "deepseek_v3": _MLA,
    "lfm2": {
        **_OWN_HEAD_DIM,
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 96,
        "full_attn_idxs": [1, 3],
    },
    "falcon_h1": {
        **_SIZES,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
}

SMALL: dict[str, dict[str, Any]] = {
    "streaming_llm": {"n_sink": 2, "window_size": 14},
    "h2o": {"budget": 16, "n_sink": 2, "grace": 4},
    "snapkv": {"budget": 16, "n_sink": 2, "obs_window": 6},
    "tova": {"budget": 16, "n_sink": 2},
    "pyramidkv": {"budget": 16, "n_sink": 2, "recent": 4},
    "squeeze": {"budget": 16, "n_sink": 2, "recent": 4},
    "chunkkv": {"budget": 16, "n_sink": 2, "chunk_size": 4},
    "cam": {"budget": 16, "n_sink": 2, "recent": 4},
    "knorm": {"budget": 16, "n_sink": 2},
    "qfilters": {"budget": 16, "n_sink": 2, "calib_tokens": 8, "min_retention": None},
    "keyformer": {"budget": 16, "n_sink": 2},
    "morphkv": {"budget": 16, "n_sink": 2, "window": 4},
    "kvzip": {"budget": 16, "n_sink": 2},
    "curdkv": {"budget": 16, "n_sink": 2, "rank_cap": 4},
    "nestedkv": {"budget": 16, "n_sink": 2, "window": 8},
    "rocketkv": {"compression_ratio": 4.0, "n_sink": 2, "obs_window": 6, "pool_kernel": 5},
    "kivi": {"bits": 4, "group_size": 32, "residual_length": 8},
    "turboquant_mse": {"bits": 3},
    "turboquant_rvq": {"bits": 2, "value_bits": 8},
    "qjl": {"jl_dim": 64},
    "spectral": {"val_d_eff": 16},
    "turboquant_prod": {"bits": 4},
    "polar": {"bits": 2},
    "kivi_sink": {"bits": 4, "group_size": 32, "residual_length": 8, "n_sink": 2},
    "age_tiered": {"recent_boundary": 8, "mid_boundary": 24, "group_size": 8, "bits_old": 4},
    "kitty": {"n_sink": 4, "residual_length": 8},
    "adakv": {"residual_length": 8},
    "skvq": {"window": 8, "n_sink": 2},
    "kvquant": {"bits": 4, "n_fit": 32, "residual_length": 8},
    "vecinfer": {"value_sub_dim": 4},
    "a2ats": {"window": 6, "n_sink": 2, "retrieval_fraction": 0.3},
    "zipcache": {"window": 32},
    "nsnquant": {"residual_length": 8},
    "cachegen": {"residual_length": 8},
    "gear": {"residual_length": 8},
    "amc": {"threshold_window": 32, "rank_mid": 32, "rank_low": 32, "use_query_saliency": True},
    "svdq": {"n_fit": 32, "residual_length": 8},
    "xquant": {"residual_length": 8},
    "palu": {"n_fit": 32, "residual_length": 8},
    "kvtc": {"window": 8, "n_fit": 32},
    "minicache": {"block": 16, "residual_length": 8, "direction_bits": 8, "retained_share": 0.75},
    "xkv": {"n_fit": 32, "residual_length": 8, "rank": 32, "latent_bits": 8},
    "anchorkv": {"window": 4, "theta": 0.3, "anchor_frac": 0.1, "n_sink": 1},
}
WIDE: dict[str, dict[str, Any]] = {
    "streaming_llm": {"window_size": 512},
    "h2o": {"budget": 512},
    "snapkv": {"budget": 512},
    "tova": {"budget": 512},
    "pyramidkv": {"budget": 512},
    "squeeze": {"budget": 512},
    "chunkkv": {"budget": 512},
    "cam": {"budget": 512},
    "knorm": {"budget": 512},
    "qfilters": {"budget": 512},
    "keyformer": {"budget": 512},
    "morphkv": {"budget": 512},
    "kvzip": {"budget": 512},
    "curdkv": {"budget": 512},
    "nestedkv": {"budget": 512},
    "rocketkv": {"compression_ratio": 1.001},
    "kivi": {"residual_length": 512},
    "turboquant_mse": {"bits": 6},
    "turboquant_rvq": {"bits": 4},
    "qjl": {"jl_dim": 4096},
    "spectral": {"bits": 7, "val_d_eff": 16},
    "turboquant_prod": {"bits": 8},
    "polar": {"bits": 5},
    "kivi_sink": {"residual_length": 512},
    "age_tiered": {"recent_boundary": 512},
    "kitty": {"residual_length": 512},
    "adakv": {"residual_length": 512},
    "skvq": {"window": 512},
    "kvquant": {"residual_length": 512},
    "vecinfer": {"key_sub_dim": 2, "key_codebook_bits": 14, "value_sub_dim": 2, "value_codebook_bits": 14},
    "zipcache": {"window": 512},
    "nsnquant": {"residual_length": 512},
    "cachegen": {"residual_length": 512},
    "gear": {"residual_length": 512},
    "a2ats": {"retrieval_fraction": 1.0},
    "amc": {"residual_length": 512},
    "svdq": {"residual_length": 512},
    "xquant": {"residual_length": 512},
    "palu": {"residual_length": 512},
    "kvtc": {"window": 512},
    "minicache": {"residual_length": 512},
    "xkv": {"residual_length": 512},
    "anchorkv": {"window": 512},
}
COMPOSED = "h2o over turboquant_mse"
WINDOWED = "sliding_window over int8"


def _composed(bits: int, **options: Any) -> Transform:
    store = vq.rows(key=vq.turboquant_mse_codec(bits=bits), value=vq.int8_codec())
    return vq.chain(vq.h2o_policy(**options), store)


def _windowed(size: int) -> Transform:
    return vq.sliding_window(window_size=size, key=vq.int8_codec(), value=vq.int8_codec())


def _stacked(row: Method) -> dict[str, int]:
    return {"layers": 2} if "stacks" in row.traits else {}


# Every method with options so small that short prompts evict or pack, one composition, and one window.
TRANSFORMS: dict[str, Transform] = {
    **{row.name: row.build(**SMALL.get(row.name, {}), **_stacked(row)) for row in TABLE},
    COMPOSED: _composed(3, **SMALL["h2o"]),
    WINDOWED: _windowed(16),
}
# The same with options so wide that next to nothing is lost.
LOSSLESS: dict[str, Transform] = {
    **{row.name: row.build(**WIDE.get(row.name, {}), **_stacked(row)) for row in TABLE},
    COMPOSED: _composed(6, **WIDE["h2o"]),
    WINDOWED: _windowed(512),
}
# For each stack the method of one layer alone.
ALONE: dict[Transform, Transform] = {
    kinds[row.name]: row.build(**options.get(row.name, {}))
    for kinds, options in ((TRANSFORMS, SMALL), (LOSSLESS, WIDE))
    for row in TABLE
    if "stacks" in row.traits
}
# What these hold depends on which calls are of one token: the first of these ends the prompt.
BY_CALLS = {row.name for row in TABLE if "anchors" in row.traits}
OWN_AXES = ("palu", "kvtc", "xkv")  # their codes are of principal components of the rows
BY_QUERIES = {row.name for row in TABLE if "uses_queries" in row.traits} | {COMPOSED}
TRIMMABLE = [name for name, transform in TRANSFORMS.items() if transform.trimmable]
EVICTING = [name for name, transform in TRANSFORMS.items() if transform.evicts]


def paired(names: Iterable[str]) -> list[tuple[str, str]]:
    """(architecture, name): each name with llama and with every fourth of the others, in turn.

    All architectures meet methods of every kind in the sweep over families.
    """
    first, *others = ARCHITECTURES
    return [(architecture, name) for i, name in enumerate(names) for architecture in (first, *others[i % 4 :: 4])]


def build(architecture: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **sizes: Any) -> nn.Module:
    """A new random model; equal arguments give equal weights."""
    config = {"model_type": architecture, **ARCHITECTURES[architecture], **sizes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(functools.partial(_random, seed), model.parameters()))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model.eval()


@functools.lru_cache(maxsize=64)
def shared(architecture: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """`build`, once for all tests that leave the model as it is."""
    return build(architecture, dtype)


def _random(seed: int, path: str, weight: mx.array) -> mx.array:
    """Matrices that make attention peaked and logits far apart; norms stay as they are."""
    key = mx.random.key(hash_text(path) + seed)
    if weight.ndim == 1:
        return mx.random.normal(weight.shape, key=key) if path.endswith(("bias", "sinks")) else weight
    fan_in = weight.size // weight.shape[0] if weight.ndim == 3 and "conv" in path else weight.shape[-1]
    gain = 1.0 if "embed" in path else 1.5 / fan_in**0.5
    return mx.random.normal(weight.shape, key=key) * gain


def hash_text(text: str) -> int:
    """The same number in every process."""
    return sum((i + 1) * ord(char) for i, char in enumerate(text)) * 1000


def in_place(caches: list[Any], transform: Transform, kind: type[TransformKVCache] = TransformKVCache) -> list[Any]:
    """The list with our cache in place of each plain KVCache; layers that are no whole stack stand alone."""
    count = sum(type(cache) is KVCache for cache in each(caches))
    layers, group = transform.layers if isinstance(transform, Stack) else 1, LayerGroup()
    whole, places = count // layers * layers, itertools.count()

    def put(cache: Any) -> Any:
        if type(cache) is not KVCache:
            return cache
        index = next(places)
        if not isinstance(transform, Stack) or index >= whole:
            return kind(ALONE.get(transform, transform))
        made = kind(transform.member(index % layers))
        made.join(group, index)
        return made

    return [changed(entry, put) for entry in caches]


def cache_list(model: nn.Module, transform: Transform, kind: type[TransformKVCache] = TransformKVCache) -> list[Any]:
    """Our cache in place of each plain KVCache that the model makes; what else it makes stays."""
    return in_place(make_prompt_cache(model), transform, kind)


def each(caches: Sequence[Any]) -> list[Any]:
    """The caches of a list, those inside a CacheList one by one."""
    return [cache for entry in caches for cache in getattr(entry, "caches", (entry,))]


def ours(caches: Sequence[Any]) -> list[TransformKVCache]:
    """The caches of a list that are ours."""
    return [cache for cache in each(caches) if isinstance(cache, TransformKVCache)]


def tokens(length: int, seed: int = 0) -> list[int]:
    """A random prompt that repeats no token within a vocabulary's length.

    In a first layer, rows of equal tokens have equal norms: ties, where these decide.
    """
    keys = mx.random.split(mx.random.key(1000 + seed), length // VOCABULARY + 1)
    return mx.concatenate([mx.random.permutation(VOCABULARY, key=key) for key in keys]).tolist()[:length]


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: "t7" is 7. The end of text lies beyond the vocabulary, so that no model says it."""
    known = {f"t{i}": i for i in range(VOCABULARY)} | {"<end>": VOCABULARY, "<unknown>": VOCABULARY + 1}
    words = Tokenizer(models.WordLevel(known, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")


def feed(model: nn.Module, caches: Sequence[Any], prompt: Sequence[int]) -> mx.array:
    """Logits [S, vocabulary] of one call."""
    logits = model(mx.array([list(prompt)]), cache=caches)[0].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def read(model: nn.Module, caches: Sequence[Any], prompt: Sequence[int], chunk: int = CHUNK) -> None:
    """The prompt but its last token, in chunks as mlx_lm's generation cuts them."""
    for start in range(0, len(prompt) - 1, chunk):
        feed(model, caches, prompt[start : min(start + chunk, len(prompt) - 1)])


def greedy(model: nn.Module, caches: Sequence[Any], prompt: Sequence[int], count: int) -> tuple[list[int], mx.array]:
    """The likeliest tokens after a prompt, and the logits [count, vocabulary] that chose them."""
    read(model, caches, prompt)
    token, chosen, rows = prompt[-1], [], []
    for _ in range(count):
        rows.append(feed(model, caches, [token])[-1])
        token = int(mx.argmax(rows[-1]).item())
        chosen.append(token)
    return chosen, mx.stack(rows)


def forced(model: nn.Module, caches: Sequence[Any], calls: Sequence[Sequence[int]]) -> mx.array:
    """Logits [all tokens, vocabulary] of the given calls."""
    return mx.concatenate([feed(model, caches, call) for call in calls])


def log_probabilities(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def tolerance(transform: Transform, logits: mx.array) -> float:
    """How far logits may be off where the same numbers are added in another order.

    A number on the edge between two codes may then take the other one; rows turn to an edge where axes are fitted
    to them, as these turn by more than the rounding.
    """
    if not transform.coded:
        return 1e-3
    return (0.05 if transform.name in OWN_AXES else 0.01) * mx.std(logits).item()


class FunctionalCache:
    """The functional triple in the plainest way: fixed capacity, eager, every mask an array."""

    def __init__(self, transform: Transform, kv_heads: int = 2, dim: int = 32, capacity: int = 256) -> None:
        spec = vq.KVSpec(kv_heads=kv_heads, key_dim=dim, value_dim=dim, dtype=mx.float32, capacity=capacity)
        self.transform = transform
        self.held = transform.init_state(spec)
        self.offset = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.transform.make_mask(self.held, N, window=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        self.held, keys, values = self.transform.update(self.held, keys, values)
        return keys, values

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, for `mx.eval`."""
        return flatten(self.held)[0]


class FunctionalMember(FunctionalCache):
    """One layer of a stack, whose layers share one `group`: a list that holds the states of all."""

    def __init__(self, stack: Stack, layer: int, group: list[Any]) -> None:
        self.member, self.group, self.offset = stack.member(layer), group, 0
        group[:] = [stack.init_group(vq.KVSpec(kv_heads=2, key_dim=32, value_dim=32, dtype=mx.float32, capacity=256))]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        own, first = self.group[0][self.member.layer], self.group[0][0]
        return self.member.make_mask(self.member.borrowed(own, first), N, window=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        self.held, self.group[0], keys, values = self.member.update_in(None, self.group[0], keys, values)
        return keys, values


def functional_caches(transform: Transform, layers: int) -> list[FunctionalCache]:
    """One a layer; a stack of as many layers is one group."""
    if not isinstance(transform, Stack):
        return [FunctionalCache(transform) for _ in range(layers)]
    group: list[Any] = []
    return [FunctionalMember(transform, layer, group) for layer in range(layers)]
