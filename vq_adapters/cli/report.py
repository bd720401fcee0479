"""`vq report`: what serves each layer of a model, and what it holds after so many tokens."""

import argparse
import json
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from vq_adapters.cli.held import Held, held, summary, table, totals
from vq_adapters.cli.models import compress
from vq_adapters.cli.parsing import add_cache_arguments, model_name, whole
from vq_adapters.cli.progress import progress
from vq_adapters.cli.settings import configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", type=model_name, required=True, help="folder or repository of a model")
    parser.add_argument("--tokens", type=whole, default=1024, metavar="N", help="random tokens to read (1024)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model bring code of its own")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_cache_arguments(parser)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Read random tokens and print what the caches hold; returns the exit status."""
    config = configuration(args)
    trust: Any = {"tokenizer_config": {"trust_remote_code": True}, "trust_remote_code": True}
    loaded: Any = load(args.model, return_config=True, **(trust if args.trust_remote_code else {}))
    model, tokenizer, settings = loaded
    compress(model, config, not args.no_hook)
    caches = make_prompt_cache(model)
    prompt = mx.random.randint(0, _vocabulary(settings, tokenizer), (args.tokens,), key=mx.random.key(0))
    options: Any = {"max_tokens": 0, "prompt_cache": caches, "prompt_progress_callback": progress()}
    for _ in generate_step(prompt, model, **options):
        pass
    layers = held(caches)
    print(json.dumps(_data(args, layers), indent=2) if args.json else f"{table(layers)}\n{summary(layers)}")
    return 0


def _vocabulary(settings: dict[str, Any], tokenizer: Any) -> int:
    text = settings.get("text_config") or {}
    return settings.get("vocab_size") or text.get("vocab_size") or tokenizer.vocab_size


def _data(args: argparse.Namespace, layers: list[Held]) -> dict[str, Any]:
    compressed, plain = totals(layers)
    return {
        "model": args.model,
        "method": args.method,
        "tokens": args.tokens,
        "nbytes": compressed,
        "plain_nbytes": plain,
        "layers": [{**attrs.asdict(one.row), "plain_nbytes": one.plain} for one in layers],
    }
