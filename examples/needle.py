"""Facts in a long text, asked for once its cache is compressed: which methods still find them?

    python examples/needle.py --methods "plain|h2o|snapkv" --budgets 128
    python examples/needle.py --csv needle.csv --plot needle.png

Eight sentences with a number each lie at even depths of English prose. A method
reads the text once and evicts as it goes, not knowing the questions. Each is
then asked of a copy of its caches; a hit is a fact whose number the model finds
likelier than 15 others.
"""

from openblas import HINT, use_openblas

use_openblas()

import argparse
import copy
import csv
import functools
import importlib.util
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import vq_functional as vq
from measuring import (
    SMOLLM2,
    float16_rows,
    load_model,
    log_softmax,
    machine,
    prefill,
    slow_blas,
    table_head,
    table_line,
)
from prose import english
from vq_adapters import (
    CaMOptions,
    ChunkKVOptions,
    CurDKVOptions,
    H2OOptions,
    KeyformerOptions,
    KVCacheBuilder,
    KVCacheConfig,
    KVzipOptions,
    L2NormOptions,
    MorphKVOptions,
    NestedKVOptions,
    PyramidKVOptions,
    QFiltersOptions,
    QuantizerConfigError,
    RocketKVOptions,
    SnapKVOptions,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    TOVAOptions,
    attention_hook,
    kvzip_prefill,
)

PLAIN = "plain"
CHUNK = 1024  # tokens of the prompt that are read at a time
START = 100  # first sentence of the prose
WRONG = 15  # numbers beside the right one
SINKS = 4

FACTS = (
    ("Alice", "The secret number of Alice is {}."),
    ("Robert", "Remember that the secret number of Robert is {}."),
    ("Maria", "By the way, the secret number of Maria is {}."),
    ("Thomas", "We were told that the secret number of Thomas is {}."),
    ("Julia", "As everybody in town knows, the secret number of Julia is {}."),
    ("Peter", "It turned out that the secret number of Peter is {}."),
    ("Helen", "Please note that the secret number of Helen is {}."),
    ("Daniel", "In case you need it, the secret number of Daniel is {}."),
)
QUESTION = "\n\nWhat is the secret number of {0}? The secret number of {0} is"
REPEAT = "\n\nRepeat the previous text exactly:"  # what kvzip has the model do

# The options class of a method and its field for the rows that a head may keep.
BUDGETS: dict[str, tuple[Any, str]] = {
    "h2o": (H2OOptions, "h2o_budget"),
    "snapkv": (SnapKVOptions, "snap_budget"),
    "tova": (TOVAOptions, "tova_budget"),
    "pyramidkv": (PyramidKVOptions, "pyramid_budget"),
    "squeeze": (SqueezeAttentionOptions, "squeeze_budget"),
    "chunkkv": (ChunkKVOptions, "chunkkv_budget"),
    "cam": (CaMOptions, "cam_budget"),
    "keyformer": (KeyformerOptions, "keyformer_budget"),
    "morphkv": (MorphKVOptions, "morphkv_budget"),
    "kvzip": (KVzipOptions, "kvzip_budget"),
    "nestedkv": (NestedKVOptions, "nestedkv_budget"),
    "knorm": (L2NormOptions, "knorm_budget"),
    "curdkv": (CurDKVOptions, "curdkv_budget"),
    "qfilters": (functools.partial(QFiltersOptions, qfilters_on_low_retention="ignore"), "qfilters_budget"),
}
METHODS = [name for name in ("streaming_llm", *BUDGETS, "rocketkv") if name in vq.METHODS]


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


# The prompt and what is asked of it


@dataclass(frozen=True)
class Fact:
    """A sentence to hide, the question for its number, and the answers, the right one first; all as token ids."""

    sentence: list[int]
    question: list[int]
    answers: list[list[int]]


def answers(tokenizer: Any, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Different numbers of four digits in random order, and their tokens, equally many for all."""
    length = None
    for number in random.Random(seed).sample(range(1000, 10000), 9000):
        ids = encoded(tokenizer, f" {number}")
        length = length or len(ids)
        if len(ids) == length:
            yield str(number), ids


def make_facts(tokenizer: Any, seed: int = 0) -> list[Fact]:
    """The facts, with numbers that follow from `seed`; none of them is an answer to two questions."""
    made, supply = [], answers(tokenizer, seed)
    for name, sentence in FACTS:
        (number, right), *others = itertools.islice(supply, 1 + WRONG)
        ids = encoded(tokenizer, f" {sentence.format(number)}")
        asked, said = encoded(tokenizer, QUESTION.format(name)), [right, *(wrong for _, wrong in others)]
        shared = same_start(said)
        made.append(Fact(ids, asked + right[:shared], [answer[shared:] for answer in said]))
    return made


def same_start(texts: Sequence[list[int]]) -> int:
    """How many tokens all texts begin with alike."""
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts))
    return len(list(alike))


def filler(tokenizer: Any, count: int) -> list[list[int]]:
    """Sentences of the prose that have `count` tokens in all; the last one may be cut."""
    found, left = [], count
    for sentence in re.split(r"(?<=[.!?]) ", english())[START:]:
        if left <= 0:
            break
        found.append(encoded(tokenizer, f" {sentence}")[:left])
        left -= len(found[-1])
    if left > 0:
        raise ValueError(f"filler: the prose has no more than {count - left} tokens; got {count}")
    return found


def hidden(sentences: Sequence[list[int]], facts: Sequence[list[int]]) -> list[int]:
    """One text of all `sentences`, with fact i of n before the sentence at the share (i + 1/2) / n of it."""
    total, text, done, placed = sum(map(len, sentences)), [], 0, 0
    for sentence in sentences:
        done += len(sentence)
        while placed < len(facts) and done > total * (placed + 0.5) / len(facts):
            text += facts[placed]
            placed += 1
        text += sentence
    return text


def make_prompt(tokenizer: Any, facts: Sequence[Fact], count: int) -> list[int]:
    """`count` tokens of prose, the facts among them."""
    sentences = [fact.sentence for fact in facts]
    room = count - sum(map(len, sentences))
    if room <= 0:
        raise ValueError(f"make_prompt: `count` must exceed the {count - room} tokens of the facts; got {count}")
    return hidden(filler(tokenizer, room), sentences)


# Methods


@dataclass(frozen=True)
class Entry:
    """A method with a budget of rows a head; the plain cache has none."""

    method: str
    budget: int | None = None

    @property
    def label(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget}"


def entries(pattern: str, budgets: Sequence[int]) -> list[Entry]:
    """Methods whose name matches, each with all budgets; the plain cache first."""
    plain = [Entry(PLAIN)] if re.search(pattern, PLAIN) else []
    return plain + [Entry(name, budget) for name in METHODS if re.search(pattern, name) for budget in budgets]


def options(method: str, budget: int, tokens: int) -> Any:
    """Options with which a method keeps `budget` rows of a prompt of `tokens`."""
    if method == "streaming_llm":
        return StreamingLLMOptions(stream_n_sink=SINKS, stream_window_size=budget - SINKS)
    if method == "rocketkv":  # keeps more, of which a generated token reads so many
        return RocketKVOptions(rocketkv_compression_ratio=tokens / budget)
    kind, field = BUDGETS[method]
    return kind(**{field: budget})


def fresh_caches(model: Any, entry: Entry, tokens: int) -> list[Any]:
    """A cache for each layer; float32 comes in as 16 bits."""
    if entry.budget is None:
        return float16_rows(KVCache() for _ in model.layers)
    config = KVCacheConfig(method=entry.method, options=options(entry.method, entry.budget, tokens))
    return float16_rows(KVCacheBuilder.for_model(model, config))


def read(model: Any, prompt: Sequence[int], entry: Entry, repeat: Sequence[int]) -> list[Any]:
    """Caches that have seen the prompt, and keep what the method keeps of it."""
    caches, ids = fresh_caches(model, entry, len(prompt)), mx.array(list(prompt))[None]
    if entry.method == "kvzip":
        kvzip_prefill(model, caches, ids, chunk=CHUNK, instruction=repeat)
    else:
        prefill(model, ids, caches, CHUNK)
    return caches


# Scores


def log_likelihoods(model: Any, caches: Sequence[Any], fact: Fact) -> list[float]:
    """Of each answer after the question, in steps of one token, as in generation; `caches` stay as they are."""
    caches, ids = copy.deepcopy(list(caches)), mx.array(fact.answers)
    logits = model(mx.array([fact.question]), cache=caches)[:, -1:]
    rows = [mx.repeat(logits, len(ids), axis=0)]
    batch = float16_rows(cache.merge([cache] * len(ids)) for cache in caches)
    for i in range(ids.shape[1] - 1):
        rows.append(model(ids[:, i : i + 1], cache=batch))
        mx.eval(rows[-1])
    scores = mx.take_along_axis(log_softmax(mx.concatenate(rows, axis=1)), ids[..., None], axis=-1)
    found: Any = scores.sum(axis=(1, 2)).tolist()
    return found


def rank(scores: Sequence[float]) -> int:
    """Place of the first score, 1 for the highest; whatever is not below it goes before it."""
    first, *others = scores
    return 1 + sum(not other < first for other in others)


@dataclass(frozen=True)
class Result:
    """A line of the CSV file. `ranks` are in the order of the prompt; `rows` is the mean over the layers."""

    method: str
    budget: int | None
    rows: float
    hits: int
    mean_rank: float
    ranks: str
    seconds: float


def measure(model: Any, prompt: Sequence[int], facts: Sequence[Fact], entry: Entry, repeat: Sequence[int]) -> Result:
    """Read the prompt once, then ask for every fact."""
    start = time.perf_counter()
    with attention_hook(model):  # caches see the real queries
        caches = read(model, prompt, entry, repeat)
        ranks = [rank(log_likelihoods(model, caches, fact)) for fact in facts]
    return Result(
        entry.method,
        entry.budget,
        statistics.fmean(cache.size() for cache in caches),
        ranks.count(1),
        statistics.fmean(ranks),
        " ".join(map(str, ranks)),
        time.perf_counter() - start,
    )


# What is shown


HEAD = ("method", "budget", "rows held", f"hits of {len(FACTS)}", "mean rank", "ranks, first fact to last", "seconds")

NOTE = f"""
budget: rows that a head may keep; rows held: after the prompt, mean over the layers. Rank 1 of {1 + WRONG} is a hit;
a blind guess has rank {1 + WRONG / 2:.1f} on average."""


def line(r: Result) -> str:
    """The table's line of a result."""
    budget = "all" if r.budget is None else r.budget
    return table_line([r.method, budget, f"{r.rows:.0f}", r.hits, f"{r.mean_rank:.2f}", r.ranks, f"{r.seconds:.0f}"])


def write_csv(path: Path, results: Sequence[Result], setting: dict[str, Any]) -> None:
    """All results so far, each with the setting."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(Result)), *setting])
        writer.writeheader()
        writer.writerows({**asdict(result), **setting} for result in results)


def plot(path: Path, results: Sequence[Result]) -> None:
    """Hits against budget, a curve a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[Result]] = {}
    for result in results:
        curves.setdefault(result.method, []).append(result)
    for number, (method, points) in enumerate(curves.items()):
        if points[0].budget is None:
            axes.axhline(points[0].hits, color="black", linestyle="--", label=method)
            continue
        points = sorted(points, key=lambda result: result.budget or 0)
        style = {"color": f"C{number % 10}", "marker": "osD"[number // 10 % 3]}
        axes.plot([p.budget for p in points], [p.hits for p in points], label=method, **style)
    budgets = sorted({result.budget for result in results if result.budget is not None})
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set(xlabel="rows that a head may keep", ylabel=f"facts found, of {len(FACTS)}", ylim=(-0.3, len(FACTS) + 0.3))
    figure.legend(loc="outside right upper")
    figure.savefig(path)


# The command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="name or path for mlx_lm's load (default: %(default)s)")
    parser.add_argument("--methods", default="", metavar="REGEX", help='those that match, such as "plain|h2o"')
    parser.add_argument("--budgets", type=whole_numbers, default="64,128,256,512,1024", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (default: %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="also draw hits against budget; needs matplotlib")
    return parser.parse_args(argv)


def whole_numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def progress(started: float, text: str) -> None:
    """A line with the time, apart from the table."""
    print(f"[{time.perf_counter() - started:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Ask the chosen methods for the facts and print what they find as it comes."""
    args, say = parse(argv), functools.partial(progress, time.perf_counter())
    chosen = entries(args.methods, args.budgets)
    if not chosen:
        raise SystemExit(f"no method matches {args.methods!r}; there are: {', '.join([PLAIN, *METHODS])}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('--plot needs matplotlib: pip install "vq-functional[plots]"')
    if slow_blas():
        say(HINT)
    model, tokenizer = load_model(args.model)
    facts = make_facts(tokenizer, args.seed)
    prompt = make_prompt(tokenizer, facts, args.tokens)
    print(f"{args.model}, {machine()}; {len(facts)} facts in {args.tokens} tokens, read {CHUNK} at a time\n")
    print(table_head(HEAD), flush=True)
    setting, results = {"model": args.model, "tokens": args.tokens, "seed": args.seed}, []
    for number, entry in enumerate(chosen, 1):
        say(f"{number} of {len(chosen)}: {entry.label}")
        try:
            results.append(measure(model, prompt, facts, entry, encoded(tokenizer, REPEAT)))
        except QuantizerConfigError as error:
            say(f"left out: {error}")
            continue
        print(line(results[-1]), flush=True)
        if args.csv:
            write_csv(args.csv, results, setting)
    if args.plot:
        plot(args.plot, results)
    print(NOTE)


if __name__ == "__main__":
    main()
