"""Facts in a long text, asked for once its cache is compressed: which methods still find them?

    python examples/needle.py --methods "plain|h2o|snapkv" --budgets 128
    python examples/needle.py --jobs 8 --csv needle.csv --plot needle.png

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
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields
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
    positive,
    prefill,
    slow_blas,
    table_head,
    table_line,
)
from prose import english
from vq_adapters import KVCacheBuilder, KVCacheConfig, QuantizerConfigError, attention_hook, kvzip_prefill
from vq_adapters.options import OPTIONS

PLAIN = "plain"
NO_FACTS = "plain, no facts"  # the same prose without them: what a guess is worth
METHODS = [method.name for method in vq.METHODS.values() if "evicts" in method.traits]
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
    """A method with a budget of rows a head; plain caches have none."""

    method: str
    budget: int | None = None


def entries(pattern: str, budgets: Sequence[int]) -> list[Entry]:
    """Methods whose name matches, each with all budgets; the plain cache first."""
    every = [Entry(PLAIN), Entry(NO_FACTS), *itertools.starmap(Entry, itertools.product(METHODS, budgets))]
    return [entry for entry in every if re.search(pattern, entry.method)]


def options(method: str, budget: int, tokens: int) -> Any:
    """Options with which a method keeps `budget` rows of a prompt of `tokens`."""
    kind = OPTIONS[method]
    if method == "streaming_llm":
        return kind(stream_n_sink=SINKS, stream_window_size=budget - SINKS)
    if method == "rocketkv":  # holds more, of which a generated token reads so many
        return kind(rocketkv_compression_ratio=tokens / budget)
    field = next(field.name for field in fields(kind) if field.name.endswith("_budget"))
    return kind(**{field: budget})


def fresh_caches(model: Any, entry: Entry, tokens: int) -> list[Any]:
    """A cache for each layer; float32 comes in as 16 bits."""
    if entry.budget is None:
        return float16_rows(KVCache() for _ in model.layers)
    config = KVCacheConfig(method=entry.method, options=options(entry.method, entry.budget, tokens))
    return float16_rows(KVCacheBuilder.for_model(model, config))


def read(model: Any, prompt: Sequence[int], entry: Entry, repeat: Sequence[int]) -> list[Any]:
    """Caches that have seen the prompt, and hold what the method keeps of it."""
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
    """What a method kept and found; ranks are in the order of the prompt."""

    method: str
    budget: int | None
    rows: float  # held after the prompt, mean over the layers
    ranks: tuple[int, ...]

    @property
    def hits(self) -> int:
        return self.ranks.count(1)

    @property
    def mean_rank(self) -> float:
        return statistics.fmean(self.ranks)


@dataclass(frozen=True)
class Task:
    """What every method is given."""

    model: Any
    facts: list[Fact]
    prompt: list[int]
    prose: list[int]  # as many tokens without the facts
    repeat: list[int]


def measure(task: Task, entry: Entry) -> Result:
    """Read the prompt once, then ask for every fact."""
    with attention_hook(task.model):  # caches see the real queries
        caches = read(task.model, task.prose if entry.method == NO_FACTS else task.prompt, entry, task.repeat)
        ranks = [rank(log_likelihoods(task.model, caches, fact)) for fact in task.facts]
    return Result(entry.method, entry.budget, statistics.fmean(cache.size() for cache in caches), tuple(ranks))


# Several methods at once


@dataclass(frozen=True)
class Setting:
    """What a task follows from."""

    model: str
    tokens: int
    seed: int


@functools.cache
def prepared(setting: Setting) -> Task:
    """The task, made once a process."""
    model, tokenizer = load_model(setting.model)
    facts = make_facts(tokenizer, setting.seed)
    prompt, prose = (make_prompt(tokenizer, sentences, setting.tokens) for sentences in (facts, []))
    return Task(model, facts, prompt, prose, encoded(tokenizer, REPEAT))


def one_result(setting: Setting, entry: Entry) -> Result | None:
    """What `measure` finds; None, with the reason on stderr, for a budget that the method refuses."""
    progress(f"{entry.method}, {entry.budget or 'all'} rows")
    task = prepared(setting)
    try:
        return measure(task, entry)
    except QuantizerConfigError as error:
        progress(f"left out: {error}")
        return None


def all_results(setting: Setting, chosen: Sequence[Entry], jobs: int) -> Iterator[Result]:
    """Results as they come, from `jobs` processes with a model each; from this one if that is 1."""
    if jobs == 1:
        yield from filter(None, (one_result(setting, entry) for entry in chosen))
        return
    # mlx compiles for a CPU into files that all processes share, and loads what another has half written.
    os.environ |= {"MLX_DISABLE_COMPILE": "1", "OPENBLAS_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(one_result, setting, entry) for entry in chosen]
        yield from filter(None, (done.result() for done in as_completed(waiting)))


def progress(text: str) -> None:
    """A line with the time of day, apart from the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# What is shown

HEAD = ("method", "budget", "rows", "hits", "mean rank", "ranks")

NOTE = f"""
budget: rows that a head may keep; rows: held after the prompt, mean over the layers. rocketkv holds more than its
budget, and a generated token reads so many of them. Ranks are in the order of the text: 1 of {1 + WRONG} is a hit."""


def cells(result: Result) -> list[object]:
    """A result under HEAD."""
    budget, ranks = result.budget or "all", " ".join(map(str, result.ranks))
    return [result.method, budget, f"{result.rows:.0f}", result.hits, f"{result.mean_rank:.2f}", ranks]


def write_csv(path: Path, results: Sequence[Result], setting: Setting) -> None:
    """All results so far, each with the setting."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*HEAD, *(field.name for field in fields(Setting))])
        writer.writerows([*cells(result), *astuple(setting)] for result in results)


def by_method(results: Sequence[Result], budgets: Sequence[int]) -> dict[str, list[Result | None]]:
    """Each method's results in the order of `budgets`; one without a budget is the same at all of them."""
    found = {(result.method, result.budget): result for result in results}
    methods = dict.fromkeys(result.method for result in results)
    return {name: [found.get((name, budget)) or found.get((name, None)) for budget in budgets] for name in methods}


def summary(results: Sequence[Result], budgets: Sequence[int]) -> str:
    """A table of hits, and of mean ranks in brackets: a line a method, a column a budget."""
    lines = [table_head(["method", *map(str, budgets)])]
    for name, row in by_method(results, budgets).items():
        lines.append(table_line([name, *(f"{r.hits} ({r.mean_rank:.1f})" if r else "" for r in row)]))
    return "\n".join(lines)


def plot(path: Path, results: Sequence[Result], budgets: Sequence[int]) -> None:
    """Ranks as colors, a panel a budget: a line a method, a column a fact, from the start of the text to its end."""
    from matplotlib.figure import Figure

    table, lost = by_method(results, budgets), [math.nan] * len(FACTS)
    figure = Figure(figsize=(2 + 1.8 * len(budgets), 1.2 + 0.25 * len(table)), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for panel, budget, column in zip(panels, budgets, zip(*table.values())):
        ranks = [result.ranks if result else lost for result in column]
        image = panel.imshow(ranks, cmap="viridis_r", vmin=1, vmax=1 + WRONG, aspect="auto")
        panel.set(title=f"{budget} rows", xlabel="fact", xticks=range(len(FACTS)), xticklabels=range(1, 1 + len(FACTS)))
    panels[0].set_yticks(range(len(table)), list(table))
    figure.colorbar(image, ax=panels, label="rank of the right number")
    figure.savefig(path)


# The command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="name or path for mlx_lm's load (default: %(default)s)")
    parser.add_argument("--methods", default="", metavar="REGEX", help='those that match, such as "plain|h2o"')
    parser.add_argument("--budgets", type=whole_numbers, default="64,128,256,512,1024", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=3000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes, with a model each (default: %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="also draw the ranks; needs matplotlib")
    return parser.parse_args(argv)


def whole_numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Ask the chosen methods for the facts and print what they find as it comes."""
    args = parse(argv)
    chosen = entries(args.methods, args.budgets)
    if not chosen:
        raise SystemExit(f"no method matches {args.methods!r}; there are: {', '.join([PLAIN, *METHODS])}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('--plot needs matplotlib: pip install "vq-functional[plots]"')
    if slow_blas():
        progress(HINT)
    setting, results = Setting(args.model, args.tokens, args.seed), []
    print(f"{args.model}, {machine()}; {len(FACTS)} facts in {args.tokens} tokens, read {CHUNK} at a time\n")
    print(table_head(HEAD), flush=True)
    for result in all_results(setting, chosen, args.jobs):
        print(table_line(cells(result)), flush=True)
        results.append(result)
        results.sort(key=lambda result: chosen.index(Entry(result.method, result.budget)))
        if args.csv:
            write_csv(args.csv, results, setting)
    print(f"{NOTE}\n\n{summary(results, args.budgets)}")
    if args.plot:
        plot(args.plot, results, args.budgets)


if __name__ == "__main__":
    main()
