"""What our caches cost beside a method's arithmetic: microseconds a layer and step, and tokens a second of a batch.

    python examples/benchmarks/overhead.py
    python examples/benchmarks/overhead.py --batch 8 --methods kivi h2o

The first table has a store that holds rows as they come, beside mlx_lm's
KVCache: both do next to nothing, so that what they differ by is the adapter's.
The second has a real model in two of mlx_lm's continuous batches, with plain
caches and with the method's, which take turns every few tokens.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openblas import use_openblas

use_openblas()

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

import vq_functional as vq
from measuring import load_model, machine, positive, table_head, table_line
from prose import token_slice
from vq_adapters import KVCacheBuilder, KVCacheConfig, TransformKVCache, install_attention

LAYERS, KV_HEADS, QUERY_HEADS, DIM = 30, 3, 9, 64  # of SmolLM2-135M
HELD, STEPS, ROUNDS = 40, 64, 8
LENGTHS = (384, 448, 512, 320, 480, 416, 352, 512)  # tokens of the prompts of a batch, in turn
ANSWER, TURN = 64, 8  # tokens in all, and between one kind of cache and the other


def drawn(n: int, heads: int, seed: int) -> mx.array:
    """Standard normal rows float16 [1, heads, n, DIM]."""
    return mx.random.normal((1, heads, n, DIM), key=mx.random.key(seed)).astype(mx.float16)


# The adapter alone


def lists() -> dict[str, tuple[Callable[[], Any], bool]]:
    """Caches of a layer, and whether they attend by themselves, as with the hook."""
    return {
        "mlx_lm KVCache": (KVCache, False),
        "rows as they come": (lambda: TransformKVCache(vq.rows()), False),
        "rows as they come, hook": (lambda: TransformKVCache(vq.rows()), True),
    }


def filled(make: Callable[[], Any]) -> list[Any]:
    """A cache a layer, each with the same few rows."""
    caches = [make() for _ in range(LAYERS)]
    for cache in caches:
        cache.update_and_fetch(drawn(HELD, KV_HEADS, 0), drawn(HELD, KV_HEADS, 1))
    mx.eval([cache.state for cache in caches])
    return caches


def one_step(caches: Sequence[Any], hook: bool, keys: mx.array, values: mx.array, queries: mx.array) -> float:
    """Microseconds a layer of a token that goes through all layers, each attending by what the one before put out."""
    start = time.perf_counter()
    caches[0].make_mask(1, return_array=False, window_size=None)
    for cache in caches:
        held_keys, held_values = cache.update_and_fetch(keys, values)
        if hook:
            queries = cache.attend(queries, held_keys, held_values, DIM**-0.5)
        else:
            queries = mx.fast.scaled_dot_product_attention(queries, held_keys, held_values, scale=DIM**-0.5)
    mx.eval(queries)
    return (time.perf_counter() - start) * 1e6 / len(caches)


def adapter_times() -> dict[str, float]:
    """Median microseconds a layer and step, by kind; the kinds take turns step by step."""
    rows = [
        (drawn(1, KV_HEADS, 3 * i), drawn(1, KV_HEADS, 3 * i + 1), drawn(1, QUERY_HEADS, 3 * i + 2))
        for i in range(STEPS)
    ]
    mx.eval(rows)
    found: dict[str, list[float]] = {name: [] for name in lists()}
    for number in range(ROUNDS):
        caches = {name: filled(make) for name, (make, _) in lists().items()}
        for new in rows:
            for name, (_, hook) in lists().items():
                took = one_step(caches[name], hook, *new)
                if number > 0:  # the first round compiles
                    found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


# Batches


def answering(model: Any, prompts: Sequence[list[int]], caches: list[list[Any]]) -> BatchGenerator:
    """A generator whose requests have all had their prompts read, and answer on whatever they say."""
    size = len(prompts)
    generator = BatchGenerator(model, completion_batch_size=size, prefill_batch_size=size)
    generator.insert(list(prompts), [2 * ANSWER] * size, caches=caches)
    while len(generator.next_generated()) < size:
        pass
    return generator


def turn_seconds(generator: BatchGenerator) -> float:
    """Seconds of the next few tokens of every request."""
    start = time.perf_counter()
    for _ in range(TURN):
        generator.next_generated()
    mx.synchronize(generator.stream)
    return time.perf_counter() - start


def batch_turns(model: Any, tokenizer: Any, method: str, size: int) -> Iterator[tuple[float, float]]:
    """Tokens a second of plain caches and of the method's, one pair a turn."""
    prompts = [token_slice(tokenizer, 600 * i, LENGTHS[i % len(LENGTHS)]) for i in range(size)]
    ours = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, bit_width_inlier=4))
    plain = [[KVCache() for _ in model.layers] for _ in prompts]
    generators = [answering(model, prompts, caches) for caches in (plain, [copy.deepcopy(ours) for _ in prompts])]
    for _ in range(ANSWER // TURN):
        first, second = (size * TURN / turn_seconds(generator) for generator in generators)
        yield first, second


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=positive, default=8, help="requests at a time (default: %(default)s)")
    parser.add_argument("--methods", nargs="*", default=["kivi"], help="for the batch (default: kivi)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs that the batch is the median of")
    args = parser.parse_args(argv)
    print(f"{machine()}; {LAYERS} layers, {KV_HEADS} heads of {DIM}, {HELD} to {HELD + STEPS} tokens held\n")
    print(table_head(["caches", "us a layer and step", "more than mlx_lm's"]), flush=True)
    times = adapter_times()
    plain = times["mlx_lm KVCache"]
    for name, took in times.items():
        print(table_line([name, f"{took:.1f}", f"{took - plain:.1f}"]), flush=True)
    model, tokenizer = load_model()
    print(f"\nSmolLM2, {args.batch} requests at once, {ANSWER} tokens each after {min(LENGTHS)} to {max(LENGTHS)}\n")
    print(table_head(["method", "tokens a second", "plain", "x plain"]), flush=True)
    install_attention(model)
    for method in args.methods:
        pairs = [pair for _ in range(args.repeats) for pair in batch_turns(model, tokenizer, method, args.batch)]
        plain, own = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(mine / theirs for theirs, mine in pairs)
        print(table_line([method, f"{own:.1f}", f"{plain:.1f}", f"{ratio:.2f}"]), flush=True)


if __name__ == "__main__":
    main()
