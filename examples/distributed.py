"""One model in several processes, each with the compressed caches of its own layers or heads.

    mlx.launch -n 2 python examples/distributed.py --method kivi --parallel pipeline
    mlx.launch -n 3 python examples/distributed.py --method h2o --parallel tensor
    python examples/distributed.py --method kivi

The first gives each process a part of the layers, the second a part of every layer's heads, the last is the same in one
process. SmolLM2 has 9 query heads and 3 KV heads.
"""

from openblas import use_openblas

use_openblas()

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models import ministral3
from mlx_lm.utils import sharded_load

from measuring import SMOLLM2, load_model, positive
from vq_adapters import KVCacheBuilder, KVCacheConfig, QuantizerConfigError, attention_hook
from vq_adapters.architecture import attentions

HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads")


def as_ministral3(model: Any) -> Any:
    """A llama as mlx_lm's `ministral3`: the same network and weights, and it can be split by layers."""
    rope = {
        "rope_theta": model.args.rope_theta,
        "llama_4_scaling_beta": 0.0,  # the one difference: queries that grow with their position
        "original_max_position_embeddings": model.args.max_position_embeddings,
    }
    own = {**vars(model.args), "model_type": "ministral3", "rope_parameters": rope}
    twin = ministral3.Model(ministral3.ModelArgs.from_dict(own))
    weights: Any = tree_flatten(model.parameters())
    twin.load_weights(weights, strict=True)
    return twin.eval()


def check_heads(model: Any, processes: int) -> None:
    """Raise ValueError where the heads of a layer don't go up in the processes: mlx_lm would cut them apart."""
    for attention in attentions(model):
        counts = {name: getattr(attention, name, processes) for name in HEADS}
        for name, count in counts.items():
            if count % processes:
                raise ValueError(f"{count} heads ({name}) can't be shared by {processes} processes; try another number")


def split(model: Any, parallel: str, group: Any) -> Any:
    """The model with this process's layers or heads only; raises ValueError where it can't be split."""
    if parallel == "pipeline":
        if not hasattr(model.model, "pipeline"):
            raise ValueError(f"mlx_lm can't split {type(model).__module__} by layers; try --parallel tensor")
        model.model.pipeline(group)
    else:
        if not hasattr(model, "shard"):
            raise ValueError(f"mlx_lm can't split {type(model).__module__} by heads; try --parallel pipeline")
        check_heads(model, group.size())
        model.shard(group)
    mx.eval(model.parameters())
    return model


def load_part(name: str, parallel: str, group: Any) -> tuple[Any, Any]:
    """This process's part of a model, and the tokenizer."""
    if name == SMOLLM2:
        model, tokenizer = load_model()
        model = as_ministral3(model) if parallel == "pipeline" else model
    elif parallel == "pipeline" and group.size() > 1:
        return sharded_load(name, pipeline_group=group)  # reads the files of its own layers only
    else:
        model, tokenizer = mlx_lm.load(name, lazy=True)[:2]
    return (split(model, parallel, group) if group.size() > 1 else model), tokenizer


def generate(model: Any, tokenizer: Any, text: str, count: int, caches: list[Any]) -> str:
    """The likeliest `count` tokens of an answer; every process computes the same."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    with attention_hook(model):
        parts = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=count, prompt_cache=caches)
        return "".join(part.text for part in parts)


def wait_for_all(group: Any) -> None:
    """Return when every process has come here; one that ends earlier takes the others' connections with it."""
    mx.synchronize(generation_stream)  # generation looks a token ahead, and leaves it at work
    mx.eval(mx.distributed.all_sum(mx.array(1), group=group))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="name or path for mlx_lm's load (default: %(default)s)")
    parser.add_argument("--method", default="kivi", help="of the caches (default: %(default)s)")
    parser.add_argument(
        "--parallel", choices=("tensor", "pipeline"), default="pipeline", help="heads or layers (default: %(default)s)"
    )
    parser.add_argument("--prompt", default="Why is the sky blue?", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=60, help="to write (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Generate in all processes; the first one prints the text, and each what its caches hold."""
    args, group = parse(argv), mx.distributed.init()
    try:
        config = KVCacheConfig(method=args.method)
        model, tokenizer = load_part(args.model, args.parallel, group)
        caches = KVCacheBuilder.for_model(model, config)
    except (QuantizerConfigError, ValueError, OSError) as error:
        raise SystemExit(f"{args.model}: {error}") from None
    text = generate(model, tokenizer, args.prompt, args.max_tokens, caches)
    wait_for_all(group)
    if group.rank() == 0:
        print(text, flush=True)
    held = sum(cache.nbytes for cache in caches)
    print(f"process {group.rank()}: {len(caches)} layers, {held} bytes in their caches", flush=True)


if __name__ == "__main__":
    main()
