"""One prompt, one model, several KV caches: what each holds, costs and answers.

    python examples/quickstart.py
    python examples/quickstart.py --model mlx-community/Llama-3.2-1B-Instruct-4bit

The step from mlx_lm's cache to a compressed one is `prompt_cache=`; see `generate`.
"""

from openblas import HINT, use_openblas

use_openblas()

import argparse
import time
from collections.abc import Sequence
from typing import Any

from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache

import vq_functional as vq
from measuring import (
    SMOLLM2,
    Run,
    Say,
    agreement,
    divergence,
    float16_rows,
    load_model,
    machine,
    plain_bytes,
    positive,
    resident_bytes,
    slow_blas,
    table_head,
    table_line,
    teacher_forced,
)
from prose import token_slice
from vq_adapters import (
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    QuantizerConfigError,
    SnapKVOptions,
    StreamingLLMOptions,
    attention_hook,
)

START = 1000  # of the prompt in the prose
PROMPT, SHORT_PROMPT = 1024, 96  # tokens; the short one without a fast BLAS
STEPS, SHORT_STEPS = 128, 32
PLAIN = "plain fp16"


def methods(budget: int) -> dict[str, Any]:
    """What `KVCacheBuilder.for_model` takes, by the name in the table: a configuration, or a transform."""
    codes = vq.turboquant_mse_codec(bits=3)
    return {
        "kivi, 4 bits": KVCacheConfig(method="kivi", bit_width_inlier=4, residual_length=32),
        "turboquant_rvq": KVCacheConfig(method="turboquant_rvq"),
        f"h2o, {budget} rows": KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=budget)),
        f"snapkv, {budget} rows": KVCacheConfig(method="snapkv", options=SnapKVOptions(snap_budget=budget)),
        f"streaming_llm, {budget} rows": KVCacheConfig(
            method="streaming_llm", options=StreamingLLMOptions(stream_n_sink=4, stream_window_size=budget - 4)
        ),
        f"h2o, {budget} rows of 3-bit codes": vq.chain(vq.h2o_policy(budget=budget), vq.rows(key=codes, value=codes)),
    }


def fresh_caches(model: Any, chosen: Any) -> list[Any]:
    """A cache for each layer, mlx_lm's own for None; float32 comes in as 16 bits."""
    caches = make_prompt_cache(model) if chosen is None else KVCacheBuilder.for_model(model, chosen)
    return float16_rows(caches)


def generate(model: Any, tokenizer: Any, prompt: list[int], count: int, caches: list[Any]) -> str:
    """The likeliest `count` tokens after the prompt, as text."""
    parts = stream_generate(model, tokenizer, prompt, max_tokens=count, prompt_cache=caches)
    return "".join(part.text for part in parts)


def first_words(text: str, width: int = 48) -> str:
    """The beginning of a text on one line that a table can hold."""
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= width else flat[:width].rsplit(" ", 1)[0] + " ..."


def line(name: str, run: Run, base: Run, room: int, text: str) -> str:
    """The table's line of one method."""
    held, far = resident_bytes(run.caches), divergence(base.log_probs, run.log_probs)
    cells = [
        name,
        f"{held / 2**20:.2f} MiB",
        f"{held / room:.2f}",
        f"{run.step_median * 1e3:.1f}",
        f"{run.step_median / base.step_median:.2f}",
        f"{far:.4f}",
        f"{agreement(base.log_probs, run.log_probs):.2f}",
        first_words(text),
    ]
    return table_line(cells)


NOTE = """
KV held: every array in the caches after {tokens} tokens; bytes x: over 16-bit keys and values of just these.
ms a token: median of the steps in turn; time x: over the plain cache's. KL(plain || method) and top-1
agreement: over {steps} tokens of the text that were fed one by one."""

HEAD = ("method", "KV held", "bytes x", "ms a token", "time x", "KL, nats", "top-1", "text")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="name or path for mlx_lm's load (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, metavar="N", help=f"tokens of English (default: {PROMPT})")
    parser.add_argument(
        "--generate", type=positive, default=40, metavar="N", help="tokens to write (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help=f"tokens to compare over (default: {STEPS})")
    return parser.parse_args(argv)


def compare(model: Any, tokenizer: Any, tokens: list[int], prompt: int, written: int, say: Say) -> None:
    """Generate with every cache, then run all of them over the same tokens, and print the table."""
    texts: dict[str, str] = {}
    lists: dict[str, list[Any]] = {}
    for name, choice in {PLAIN: None, **methods(max(prompt // 4, 32))}.items():
        say(f"{prompt} tokens of prompt and {written} to write: {name}")
        try:
            lists[name] = fresh_caches(model, choice)
        except QuantizerConfigError as error:
            say(f"  left out: {error}")
            continue
        texts[name] = generate(model, tokenizer, tokens[:prompt], written, fresh_caches(model, choice))
    say(f"The prompt and the {len(tokens) - prompt} tokens that follow it in the text, through all caches in turn")
    runs = teacher_forced(model, tokens, prompt, *lists.values(), say=lambda part: say(f"  {part}"))
    room = plain_bytes(runs[0].caches)
    print(f"\n{table_head(HEAD)}")
    for name, run in zip(lists, runs):
        print(line(name, run, runs[0], room, texts[name]))
    print(NOTE.format(tokens=len(tokens), steps=len(tokens) - prompt))


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the caches on one model and one prompt."""
    args, started = parse(argv), time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {text}", flush=True)

    say(f"Loading {args.model}; {machine()}")
    model, tokenizer = load_model(args.model)
    prompt = args.prompt or (SHORT_PROMPT if slow_blas() else PROMPT)
    steps = args.steps or (SHORT_STEPS if slow_blas() else STEPS)
    if slow_blas() and not args.prompt:
        say(f"Only {prompt} tokens of prompt in place of {PROMPT}, to save time. {HINT}")
    tokens = token_slice(tokenizer, START, prompt + steps)
    with attention_hook(model):  # caches see the real queries, and attention reads their codes
        compare(model, tokenizer, tokens, prompt, args.generate, say)


if __name__ == "__main__":
    main()
