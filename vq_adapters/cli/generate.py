"""`vq generate`: mlx_lm's own command over compressed caches, with text on stdout and figures on stderr."""

import argparse
import functools
import importlib
import sys
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from vq_adapters.cli.held import held, summary, table
from vq_adapters.cli.models import check_mlx_lm, compressing, patched, reports_in_one_line
from vq_adapters.cli.parsing import LongHelp, UsageError, add_cache_arguments, model_name
from vq_adapters.cli.progress import progress
from vq_adapters.cli.settings import configuration

# The package has a function of the same name.
generate: Any = importlib.import_module("mlx_lm.generate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command itself; all others are mlx_lm's."""
    parser.add_argument("-h", "--help", action=LongHelp, const=_help)
    parser.add_argument("--model", type=model_name, required=True, help="folder or repository of a model")
    parser.add_argument("-p", "--prompt", help="the message; without it, and for -, what stdin has")
    parser.add_argument("--report", action="store_true", help="also tell what each layer holds")
    add_cache_arguments(parser)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Stream an answer; returns the exit status."""
    config = configuration(args)
    argv = [f"--model={args.model}", f"--prompt={_prompt(args)}", *rest]
    argv += [] if args.seed is None else [f"--seed={args.seed}"]
    with reports_in_one_line(generate):
        parsed = generate.setup_arg_parser().parse_args(argv)
        check_mlx_lm(parsed, config)
        load = compressing(generate.load, config, not args.no_hook, parsed.draft_model)
        answer = functools.partial(stream, layers=args.report)
        with patched(sys, argv=["vq generate", *argv]), patched(generate, load=load, generate=answer):
            generate.main()
    return 0


def stream(
    model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, layers: bool = False, **options: Any
) -> str:
    """mlx_lm's `generate`, with the text on stdout as it comes, then figures on stderr, `layers` one by one."""
    caches = options.pop("prompt_cache", None)
    if caches is None:
        models = [one for one in (model, options.get("draft_model")) if one is not None]
        caches = [cache for one in models for cache in make_prompt_cache(one, options.get("max_kv_size"))]
    pieces: list[str] = []
    told = {"prompt_cache": caches, "prompt_progress_callback": progress(), **options}
    for response in generate.stream_generate(model, tokenizer, prompt, **told):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(flush=True)
        _tell(response, caches, layers)
    return "".join(pieces)


def _tell(last: Any, caches: list[Any], layers: bool) -> None:
    found = held(caches)
    lines = [
        f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} a second",
        f"answer: {last.generation_tokens} tokens, {last.generation_tps:.1f} a second",
        f"caches: {summary(found)}",
        f"memory: {last.peak_memory:.2f} GB at most",
    ]
    print("\n".join([*lines, table(found)] if layers else lines), file=sys.stderr, flush=True)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError("--prompt is required where stdin is a terminal")
    return "-" if args.prompt is None else args.prompt


def _help() -> None:
    generate.setup_arg_parser().print_help()
