"""How time and bytes grow with the context: both should be straight lines, and flat where a method has a budget.

    python examples/benchmarks/long_context.py --csv long_context.csv --plot long_context.png

Keys and values are random, one layer at a time, with the shapes of a model:
what a step costs does not depend on the numbers. A step is the new token's
`update_and_fetch` and attention, through the path that the hook takes.
"""

import argparse
import csv
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openblas import use_openblas

use_openblas()

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import vq_functional as vq
from measuring import machine, resident_bytes, table_head, table_line
from vq_adapters import TransformKVCache
from vq_functional import Transform

LENGTHS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
STEPS = 64  # one-token steps at each length: two packings of 32 rows and what lies between
KV_HEADS, QUERY_HEADS, DIM = 3, 9, 64  # of SmolLM2-135M


def _cache(build: Callable[[], Transform]) -> TransformKVCache:
    return TransformKVCache(build())


def caches() -> dict[str, Callable[[], Any]]:
    """A plain cache, every method with its defaults, and codes behind exact rows and sinks."""
    made: dict[str, Callable[[], Any]] = {"plain fp16": KVCache}
    for method in vq.METHODS.values():
        made[method.name] = functools.partial(_cache, method.build)
    key, value = vq.turboquant_mse_codec(bits=3), vq.turboquant_mse_codec(bits=2)
    made["codes and sinks"] = lambda: TransformKVCache(vq.blocks(key=key, value=value, residual=32, n_sink=4))
    return made


@dataclass(frozen=True)
class Point:
    """A line of the CSV file: one layer, medians over the steps."""

    method: str
    tokens: int
    step_us: float
    step_us_mean: float
    bytes: int
    bytes_per_token: float


def drawn(n: int, heads: int, seed: int) -> mx.array:
    """Standard normal rows float16 [1, heads, n, DIM]."""
    return mx.random.normal((1, heads, n, DIM), key=mx.random.key(seed)).astype(mx.float16)


def step(cache: Any, seed: int) -> None:
    """One token."""
    keys, values = cache.update_and_fetch(drawn(1, KV_HEADS, seed), drawn(1, KV_HEADS, seed + 1))
    queries = drawn(1, QUERY_HEADS, seed + 2)
    if isinstance(cache, TransformKVCache):
        out = cache.attend(queries, keys, values, DIM**-0.5)
    else:
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5)
    mx.eval(out)


def points(name: str, cache: Any) -> Iterator[Point]:
    """The cache at each length, which it reaches by calls of several tokens and then single steps."""
    held = 0
    for length in LENGTHS:
        n = length - STEPS - held
        cache.update_and_fetch(drawn(n, KV_HEADS, length), drawn(n, KV_HEADS, length + 1))
        mx.eval(cache.state)
        seconds = []
        for i in range(STEPS):
            start = time.perf_counter()
            step(cache, length + 3 * i)
            seconds.append((time.perf_counter() - start) * 1e6)
        held, size = length, resident_bytes([cache])
        yield Point(name, length, statistics.median(seconds), statistics.fmean(seconds), size, size / length)


def plot(found: Sequence[Point], image: Path) -> None:
    """Microseconds of a step and resident bytes over the tokens, a line a method."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    figure, axes = plt.subplots(1, 2, figsize=(14, 6))
    for name in dict.fromkeys(point.method for point in found):
        line = [point for point in found if point.method == name]
        wide = 2.5 if name == "plain fp16" else 1.0
        for axis, field in zip(axes, ("step_us", "bytes"), strict=True):
            axis.plot([point.tokens for point in line], [getattr(point, field) for point in line], label=name, lw=wide)
    for axis, text in zip(axes, ("microseconds a step and layer", "resident bytes a layer"), strict=True):
        axis.set(xlabel="tokens", ylabel=text, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(image, dpi=90)


def measured(names: Sequence[str]) -> Iterator[Point]:
    """Points of these caches, printed as they come."""
    print(f"{machine()}; {KV_HEADS} heads of {DIM}, {QUERY_HEADS} query heads\n")
    print(table_head(["method", "tokens", "us a step", "bytes a token"]), flush=True)
    for name, make in caches().items():
        for point in points(name, make()) if name in names else ():
            print(table_line([name, point.tokens, f"{point.step_us:.0f}", f"{point.bytes_per_token:.0f}"]), flush=True)
            yield point


def summary(found: Sequence[Point]) -> Iterator[list[str]]:
    """Cells of a line a method: KiB at the first and last length, bytes a token between, milliseconds at both."""
    for name in dict.fromkeys(point.method for point in found):
        first, *_, last = (point for point in found if point.method == name)
        slope = (last.bytes - first.bytes) / (last.tokens - first.tokens)
        sizes, times = ([getattr(one, field) for one in (first, last)] for field in ("bytes", "step_us"))
        yield [name, *(f"{x / 1024:.0f}" for x in sizes), f"{slope:.0f}", *(f"{x / 1000:.1f}" for x in times)]


def read_points(paths: Sequence[Path]) -> list[Point]:
    """Points of earlier runs, in the order of `caches`; of several of one length the fastest."""
    kept: dict[tuple[str, int], Point] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                point = Point(row["method"], *(float(row[field.name]) for field in fields(Point)[1:]))  # type: ignore[arg-type]
                key = point.method, int(point.tokens)
                kept[key] = min(kept.get(key, point), point, key=lambda one: one.step_us)
    return [kept[name, length] for name in caches() for length in LENGTHS if (name, length) in kept]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen caches, or read what was measured before, and print a line for each length and a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", nargs="*", default=None, choices=list(caches()), help="default: all")
    parser.add_argument("--read", type=Path, nargs="+", metavar="CSV", help="measure nothing, take these files")
    parser.add_argument("--csv", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args(argv)
    found = read_points(args.read) if args.read else list(measured(args.methods or list(caches())))
    print()
    ends = f"{LENGTHS[0]:,}", f"{LENGTHS[-1]:,}"
    head = "method", f"KiB at {ends[0]}", f"at {ends[1]}", "bytes a token between"
    print(table_head([*head, f"ms a step at {ends[0]}", f"at {ends[1]}"]))
    for cells in summary(found):
        print(table_line(cells))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Point)])
            writer.writeheader()
            writer.writerows(asdict(point) for point in found)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
