"""The methods beside mlx_lm's caches on a real model: time, bytes, and how far the logits stray.

    python examples/benchmarks/decode.py --methods "kivi|h2o" --csv decode.csv
    python examples/benchmarks/decode.py --peak

Every row runs beside a plain 16-bit cache of its own, their one-token steps in
turn; ratios are to that cache, medians over the steps and then over the repeats.
"""

import argparse
import contextlib
import csv
import ctypes
import functools
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openblas import use_openblas

use_openblas()

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

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
    prefill,
    resident_bytes,
    step,
    table_head,
    table_line,
    teacher_forced,
)
from prose import token_slice
from vq_adapters import (
    KVCacheBuilder,
    KVCacheConfig,
    KVzipCache,
    LayerGroup,
    RocketKVOptions,
    TransformKVCache,
    attention_hook,
    kvzip_prefill,
)
from vq_adapters.options import OPTIONS
from vq_functional import Transform
from vq_functional.core.store import RowStore

START = 1000  # of the slice of prose
BUDGET = 128
EVICTING = tuple(
    name
    for name, method in vq.METHODS.items()
    if "evicts" in method.traits and "budget" in attrs.fields_dict(method.options)
)
SHOWN = ("kivi", "turboquant_rvq", "turboquant_mse", "qjl")  # quantizers that have rows of their own
QUANTIZING = tuple(name for name, method in vq.METHODS.items() if "evicts" not in method.traits and name not in SHOWN)
TIGHT = 32
OVER_CODES = {"h2o": 140, "tova": 149, "snapkv": 280}  # rows in the bytes of 32 plain ones; of snapkv in half of them
PEAK_STEPS, PEAK_WINDOWS = 200, 4
MIB = 2**20

HOOK_NOTE = "hook: attention reads codes where there are any, and an evicting method sees the real queries."


# What is measured


@dataclass(frozen=True)
class Entry:
    """One row of the table; `cache` builds that of a layer, or is what `for_model` takes."""

    name: str
    cache: Callable[[int], Any] | KVCacheConfig | Transform
    hook: bool = False
    read: Callable[..., Any] = prefill

    @property
    def label(self) -> str:
        return f"{self.name}, hook" if self.hook else self.name

    def caches(self, model: Any) -> list[Any]:
        """One fresh cache a layer; keys and values come in as 16 bits."""
        if isinstance(self.cache, (KVCacheConfig, Transform)):
            return float16_rows(KVCacheBuilder.for_model(model, self.cache))
        caches, group = [self.cache(layer) for layer in range(len(model.layers))], LayerGroup()
        for layer, cache in enumerate(caches):
            if isinstance(cache, TransformKVCache):
                cache.join(group, layer)
        return float16_rows(caches)

    def attention(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The hook, for the rows that use it."""
        return attention_hook(model) if self.hook else contextlib.nullcontext()


def entries() -> list[Entry]:
    """All rows, in order."""
    quantized = [_quantized(bits, group) for bits in (8, 4) for group in (64, 32)]
    return [
        Entry("plain fp16", lambda layer: KVCache()),
        *quantized,
        *_transform("kivi 4 bits, 32 exact", lambda layer: vq.kivi(bits=4, residual_length=32), (False, True)),
        *_transform("kivi 2 bits, 128 exact", lambda layer: vq.kivi(), (False, True)),
        *_transform("turboquant_rvq", lambda layer: vq.turboquant_rvq(seed=42 + layer), (False, True)),
        *_transform("turboquant_mse", lambda layer: vq.turboquant_mse(seed=42 + layer), (False, True)),
        *_transform("qjl", lambda layer: vq.qjl(seed=42 + layer), (False, True)),
        *(Entry(name, KVCacheConfig(method=name), True) for name in QUANTIZING),
        *_transform("rows of 4-bit codes", lambda layer: codes(4, 4, layer), (False, True)),
        *_transform("streaming_llm 4+124", lambda layer: vq.streaming_llm(n_sink=4, window_size=124), (False,)),
        *(entry for name in EVICTING for entry in _budgeted(name)),
        Entry("kvzip 128, second pass", _config("kvzip"), True, _second_pass),
        *_configured("rocketkv", KVCacheConfig(method="rocketkv", options=RocketKVOptions()), (False, True)),
        *(entry for name, budget in OVER_CODES.items() for entry in (_tight(name), _overcodes(name, budget))),
    ]


def _config(method: str, budget: int = BUDGET) -> KVCacheConfig:
    """The method with its defaults, but a budget of its own."""
    options = OPTIONS[method]
    field = next(name for name in options.__dataclass_fields__ if name.endswith("_budget"))
    return KVCacheConfig(method=method, options=options(**{field: budget}))


def _budgeted(method: str) -> list[Entry]:
    return _configured(f"{method} {BUDGET}", _config(method), (False, True))


def _configured(name: str, config: KVCacheConfig, hooks: Sequence[bool]) -> list[Entry]:
    return [Entry(name, config, hook) for hook in hooks]


def _second_pass(model: Any, ids: mx.array, caches: Sequence[Any], chunk: int | None) -> None:
    """`kvzip_prefill` for caches of kvzip."""
    if isinstance(caches[0], KVzipCache):
        kvzip_prefill(model, caches, ids, chunk=chunk or ids.shape[1])
    else:
        prefill(model, ids, caches, chunk)


def _quantized(bits: int, group: int) -> Entry:
    return Entry(f"mlx_lm {bits} bits, group {group}", lambda layer: QuantizedKVCache(group_size=group, bits=bits))


def _transform(name: str, transform: Callable[[int], Transform], hooks: Sequence[bool]) -> list[Entry]:
    return [Entry(name, lambda layer: TransformKVCache(transform(layer)), hook) for hook in hooks]


def codes(key_bits: int, value_bits: int, layer: int) -> RowStore:
    """Keys and values as TurboQuant codes, each turned by a rotation of its own."""
    key = vq.turboquant_mse_codec(bits=key_bits, seed=42 + layer, unbiased=key_bits != value_bits)
    return vq.rows(key=key, value=vq.turboquant_mse_codec(bits=value_bits, seed=1042 + layer))


def _overcodes(method: str, budget: int) -> Entry:
    """The method over rows of 3 bits a number: 4 for keys, 2 for values."""
    policy = getattr(vq, f"{method}_policy")(budget=budget)

    def cache(layer: int) -> TransformKVCache:
        return TransformKVCache(vq.chain(policy, codes(4, 2, layer)))

    return Entry(f"{method} {budget} over 3-bit codes", cache, True)


def _tight(method: str) -> Entry:
    return Entry(f"{method} {TIGHT}", _config(method, TIGHT), True)


def plain_caches(model: Any) -> list[Any]:
    """mlx_lm's own, one a layer; keys and values come in as 16 bits."""
    return float16_rows(KVCache() for _ in model.layers)


# Scores and times


@dataclass(frozen=True)
class Score:
    """A line of the CSV file of `--scores`."""

    method: str
    hook: bool
    kl_nats: float
    top1: float
    bytes: int
    bytes_ratio: float

    head: ClassVar[Sequence[str]] = ("method", "hook", "KL, nats", "top-1", "bytes x")

    def cells(self) -> list[str]:
        """Those of the table's line."""
        hook = "yes" if self.hook else "no"
        return [self.method, hook, f"{self.kl_nats:.4f}", f"{self.top1:.3f}", f"{self.bytes_ratio:.3f}"]


@dataclass(frozen=True)
class Result(Score):
    """A line of the CSV file. `decode_ratio` is of medians, `decode_ratio_mean` of means over the steps."""

    decode_ms: float
    plain_decode_ms: float
    decode_ratio: float
    decode_ratio_low: float
    decode_ratio_high: float
    decode_ratio_mean: float
    prefill_seconds: float
    plain_prefill_seconds: float
    prefill_ratio: float

    head = (*Score.head, "decode x", "decode x (mean)", "ms a step", "prefill x")

    def cells(self) -> list[str]:
        """Those of the table's line."""
        spread = f"{self.decode_ratio:.2f} ({self.decode_ratio_low:.2f} to {self.decode_ratio_high:.2f})"
        times = f"{self.decode_ratio_mean:.2f}", f"{self.decode_ms:.1f}", f"{self.prefill_ratio:.2f}"
        return [*super().cells(), spread, *times]


def score(entry: Entry, base: Run, own: Run) -> Score:
    """How an entry's run compares with the plain one; frees the entry's logits and caches."""
    held, room = resident_bytes(own.caches), plain_bytes(base.caches)
    stray = divergence(base.log_probs, own.log_probs), agreement(base.log_probs, own.log_probs)
    own.rows, own.caches = [], ()
    return Score(entry.name, entry.hook, *stray, held, held / room)


def scores(model: Any, tokens: Sequence[int], prompt: int, chosen: Sequence[Entry], say: Say) -> Iterator[Score]:
    """Scores and bytes of every entry; one run of plain caches serves all."""
    base = teacher_forced(model, tokens, prompt, plain_caches(model), say=functools.partial(say, "plain"))[0]
    for number, entry in enumerate(chosen, 1):
        here = functools.partial(say, f"{number} of {len(chosen)}", entry.label)
        with entry.attention(model):
            own = teacher_forced(model, tokens, prompt, entry.caches(model), read=entry.read, say=here)[0]
        yield score(entry, base, own)


def measurements(
    model: Any, tokens: Sequence[int], prompt: int, chosen: Sequence[Entry], repeats: int, say: Say
) -> Iterator[Result]:
    """Scores, bytes and times of every entry."""
    progress("warming up")
    prefill(model, mx.array(list(tokens[:prompt]))[None], plain_caches(model))
    for number, entry in enumerate(chosen, 1):
        yield measure(model, tokens, prompt, entry, repeats, functools.partial(say, f"{number} of {len(chosen)}"))


def measure(model: Any, tokens: Sequence[int], prompt: int, entry: Entry, repeats: int, say: Say) -> Result:
    """Run an entry beside plain caches; scores and bytes are those of the first repeat, times medians of all."""
    pairs, found = [], []
    for repeat in range(repeats):
        lists = [plain_caches(model), entry.caches(model)]
        turn = 1 if repeat % 2 == 0 else -1
        with entry.attention(model):
            here = functools.partial(say, entry.label, f"repeat {repeat + 1} of {repeats}")
            runs = teacher_forced(model, tokens, prompt, *lists[::turn], read=entry.read, say=here)
        base, own = runs[::turn]
        found.append(score(entry, base, own))
        base.rows, base.caches = [], ()
        pairs.append((base, own))
    medians = [own.step_median / base.step_median for base, own in pairs]

    def middle(number: Callable[[Any, Any], float]) -> float:
        return statistics.median(number(base, own) for base, own in pairs)

    return Result(
        **vars(found[0]),
        decode_ms=middle(lambda base, own: own.step_median) * 1e3,
        plain_decode_ms=middle(lambda base, own: base.step_median) * 1e3,
        decode_ratio=statistics.median(medians),
        decode_ratio_low=min(medians),
        decode_ratio_high=max(medians),
        decode_ratio_mean=middle(lambda base, own: own.step_mean / base.step_mean),
        prefill_seconds=middle(lambda base, own: own.prefill_seconds),
        plain_prefill_seconds=middle(lambda base, own: base.prefill_seconds),
        prefill_ratio=middle(lambda base, own: own.prefill_seconds / base.prefill_seconds),
    )


# Peak memory


def peaks(model: Any, tokens: Sequence[int], prompt: int, entry: Entry) -> tuple[list[int], int]:
    """Peak bytes of mlx in each of four windows of decode steps, and by how much the caches grew since the first."""
    caches, ids, size = entry.caches(model), mx.array(list(tokens))[None], PEAK_STEPS // PEAK_WINDOWS
    found, held = [], []
    with entry.attention(model):
        prefill(model, ids[:, :prompt], caches)
        for window in range(PEAK_WINDOWS):
            mx.reset_peak_memory()
            for i in range(prompt + window * size, prompt + (window + 1) * size):
                step(model, ids[:, i : i + 1], caches)
            found.append(mx.get_peak_memory())
            held.append(resident_bytes(caches))
    return found, held[-1] - held[0]


def report_peaks(model: Any, tokens: Sequence[int], prompt: int, chosen: Sequence[Entry]) -> None:
    """One line an entry. Flat: the peak rose by no more than the caches and plain rows of the new tokens.

    Those rows are what a cache that attention reads as arrays decodes for one call.
    """
    size, plain = PEAK_STEPS // PEAK_WINDOWS, plain_caches(model)
    prefill(model, mx.array(list(tokens[:prompt]))[None], plain)
    decoded = plain_bytes(plain) // prompt * PEAK_STEPS
    windows = [f"steps {i * size + 1} to {(i + 1) * size}" for i in range(PEAK_WINDOWS)]
    print(f"Peak memory of {PEAK_STEPS} decode steps after {prompt} tokens, in MiB\n")
    print(table_head(["method", "hook", *windows, "caches grew by", "flat"]), flush=True)
    for entry in chosen:
        found, grown = peaks(model, tokens, prompt, entry)
        flat = "yes" if found[-1] - found[0] <= grown + decoded else "NO"
        cells = [f"{peak / MIB:.1f}" for peak in (*found, grown)]
        print(table_line([entry.name, "yes" if entry.hook else "no", *cells, flat]), flush=True)


# The command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="name or path for mlx_lm's load (default: %(default)s)")
    parser.add_argument("--methods", default="", metavar="REGEX", help='only the rows that match, such as "h2o.*hook"')
    parser.add_argument("--prompt", type=positive, default=512, help="tokens before the steps (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=128, help="one-token steps (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="runs to take medians of (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="threads of OpenBLAS (default: its own choice)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--scores", action="store_true", help="no times: the plain caches run once for all rows")
    parser.add_argument("--peak", action="store_true", help=f"peak memory over {PEAK_STEPS} steps, and nothing else")
    return parser.parse_args(argv)


def set_threads(count: int) -> None:
    """Let the OpenBLAS in this process use `count` threads."""
    try:
        ctypes.CDLL("libopenblas.so.0").openblas_set_num_threads(count)
    except (OSError, AttributeError):
        print("--threads has no effect without OpenBLAS", file=sys.stderr)


def progress(*parts: str) -> None:
    """One line, apart from the table, that a terminal overwrites."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{', '.join(parts):<100}", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def csv_lines(path: Path | None, kind: type[Score], setting: dict[str, Any]) -> Iterator[Callable[[Score], None]]:
    """A function that adds a line, and the setting of all, to the file at `path`, if there is one."""
    if path is None:
        yield lambda found: None
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(kind)), *setting])
        writer.writeheader()

        def add(found: Score) -> None:
            writer.writerow({**asdict(found), **setting})
            file.flush()

        yield add


def main(argv: Sequence[str] | None = None, rows: Callable[[], list[Entry]] = entries) -> None:
    """Measure the chosen `rows` and print them as they come."""
    args = parse(argv)
    chosen = [entry for entry in rows() if re.search(args.methods, entry.label)]
    if not chosen:
        raise SystemExit(f"no row matches {args.methods!r}; there are: {'; '.join(entry.label for entry in rows())}")
    if args.threads:
        set_threads(args.threads)
    steps = PEAK_STEPS if args.peak else args.steps
    model, tokenizer = load_model(args.model)
    tokens = token_slice(tokenizer, START, args.prompt + steps)
    print(f"{args.model}, {machine()}; {args.prompt} tokens of prompt, {steps} steps, keys and values of 16 bits\n")
    if args.peak:
        report_peaks(model, tokens, args.prompt, chosen)
        return
    kind = Score if args.scores else Result
    print(table_head(kind.head), flush=True)
    given = ("model", "prompt", "steps", "repeats", "threads")
    setting = {"machine": machine(), **{name: getattr(args, name) for name in given}}
    found: Iterator[Score] = scores(model, tokens, args.prompt, chosen, progress)
    if not args.scores:
        found = measurements(model, tokens, args.prompt, chosen, args.repeats, progress)
    with csv_lines(args.csv, kind, setting) as add:
        for row in found:
            print(table_line(row.cells()), flush=True)
            add(row)
    print(f"\n{HOOK_NOTE}")


if __name__ == "__main__":
    main()
