"""Bytes against error: where the quantizers lie, and which combinations are best for their bytes.

    python examples/benchmarks/frontier.py --csv frontier.csv --plot frontier.png
    python examples/benchmarks/frontier.py --prompt 1920 --csv long.csv --plot long.png
    python examples/benchmarks/frontier.py --read frontier.csv long.csv --plot both.png

Rows, options and columns are those of decode.py; all go through the attention
hook except mlx_lm's own. The plot has one panel for each number of tokens.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode
from decode import Entry

import vq_functional as vq
from vq_adapters import KVCacheConfig, TransformKVCache
from vq_functional import Transform

COMBINED = ((6, 6), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1))  # bits of keys and of values
METHODS = tuple(name for name, method in vq.METHODS.items() if "evicts" not in method.traits)


def combined(key_bits: int, value_bits: int) -> Transform:
    """Rotated codes behind 32 exact rows, the first four tokens exact for good."""
    key, value = vq.turboquant_mse_codec(bits=key_bits), vq.turboquant_mse_codec(bits=value_bits)
    return vq.blocks(key=key, value=value, residual=32, n_sink=4)


def entries() -> list[Entry]:
    """mlx_lm's caches, every quantizer as it is, some at other widths, and the combination."""
    found = [entry for entry in decode.entries() if entry.name == "plain fp16" or entry.name.startswith("mlx_lm")]
    found += [Entry(name, KVCacheConfig(method=name), True) for name in METHODS]
    for bits in (4, 3):
        for name, method in (("kivi", vq.kivi), ("kivi_sink", vq.kivi_sink)):
            found.append(_entry(f"{name}, {bits} bits", method(bits=bits, residual_length=32)))
    for key_bits, value_bits in COMBINED:
        name = f"codes and sinks, {key_bits} and {value_bits} bits"
        found.append(_entry(name, combined(key_bits, value_bits)))
    return found


def _entry(name: str, transform: Transform) -> Entry:
    return Entry(name, lambda layer: TransformKVCache(transform), True)


# The plot


def read_points(paths: Sequence[Path]) -> dict[int, list[tuple[str, float, float]]]:
    """Name, bytes ratio and KL of every line, by tokens held at the end."""
    points: dict[int, list[tuple[str, float, float]]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                tokens = int(row["prompt"]) + int(row["steps"])
                point = row["method"], float(row["bytes_ratio"]), float(row["kl_nats"])
                points.setdefault(tokens, []).append(point)
    return points


def best(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The points that no other one beats in both, by rising bytes."""
    kept: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda point: (point[1], point[2])):
        if not kept or point[2] < kept[-1][2]:
            kept.append(point)
    return kept


def family(name: str) -> str:
    """What a point is drawn as."""
    for start in ("mlx_lm", "codes and sinks"):
        if name.startswith(start):
            return start
    return "methods of this library"


def plot(paths: Sequence[Path], image: Path) -> None:
    """Draw the points of the files, and a line through the best ones."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    panels = read_points(paths)
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5.5), sharey=True, squeeze=False)
    for axis, (tokens, points) in zip(axes[0], sorted(panels.items()), strict=True):
        drawn = [(name, size, max(error, 1e-5)) for name, size, error in points if name != "plain fp16"]
        for kind in sorted({family(name) for name, _, _ in drawn}):
            here = [point for point in drawn if family(point[0]) == kind]
            axis.scatter([size for _, size, _ in here], [error for _, _, error in here], label=kind)
        edge = best(drawn)
        axis.plot([size for _, size, _ in edge], [error for _, _, error in edge], color="gray", linewidth=0.8)
        for name, size, height in drawn:
            axis.annotate(name, (size, height), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set(yscale="log", xlabel="resident bytes / plain 16-bit cache", title=f"{tokens:,} tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL to the plain cache, nats")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(image, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the rows and plot them, or plot what was measured before."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog="all others as in decode.py")
    parser.add_argument("--read", type=Path, nargs="+", metavar="CSV", help="plot these files and measure nothing")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw what --csv or --read names")
    args, rest = parser.parse_known_args(argv)
    files = args.read or [args.csv]
    if args.plot and files == [None]:
        parser.error("--plot draws what --csv or --read names")
    if not args.read:
        decode.main(["--scores", *(["--csv", str(args.csv)] if args.csv else []), *rest], entries)
    if args.plot:
        plot(files, args.plot)


if __name__ == "__main__":
    main()
