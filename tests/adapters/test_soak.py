"""A server under load: 200 requests, 8 at a time, that share prefixes and come and go while others are answered."""

import contextlib
import gc
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache
from models import TRANSFORMS, build, cache_list, feed, read, tokens
from servers import Client, made_of, serving, write_model

from vq_adapters import TransformKVCache, attention_hook, load, save
from vq_adapters.group import LayerGroup

TALKS, TURNS, AT_ONCE = 25, 8, 8  # a talk is a chain of requests, each of which goes on from the answer before
WARM = 12  # talks before memory is measured first, enough to fill the store
ENTRIES, NBYTES = 24, 4_000_000  # bounds of the store of prefixes
LAYERS = 2
ROOM = 64 * 1024  # bytes: allocator rounding and what a new length of call leaves behind once
FEW = 50  # arrays: what the same leaves behind
NEAR = 0.02  # of the spread of the logits: what sums in another order, and codes that flip by them, may move

Told = list[tuple[list[int], list[int]]]  # prompts and their answers


class Store(LRUPromptCache):
    """Writes down what it hands out, by the prompt that asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ENTRIES, NBYTES)
        self.folder = folder
        self.found: dict[tuple[int, ...], tuple[Path, int]] = {}

    def fetch_nearest_cache(self, model: Any, prompt: list[int]) -> tuple[Any, list[int]]:
        caches, rest = super().fetch_nearest_cache(model, prompt)
        if caches is not None:
            path = self.folder / f"{len(self.found)}"
            save(path, caches)
            self.found[tuple(prompt)] = path, len(prompt) - len(rest)
        return caches, rest


def talk(ask: Client, number: int) -> Told:
    """A chain of requests that begins with what four others begin with, too; it begins anew where it has grown long."""
    told: Told = []
    history = tokens(20 + 9 * (number % 5), number % 5)
    for turn in range(TURNS):
        prompt = [*history, *tokens(2 + (5 * number + 7 * turn) % 23, 10 + number)]
        answer, _ = ask(prompt, max_tokens=2 + (number + 3 * turn) % 7)
        told.append((prompt, answer))
        history = [*prompt, *answer] if len(prompt) < 100 else tokens(20, number)
    return told


def active() -> int:
    """Bytes of all arrays."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def held(store: Store) -> dict[str, int]:
    """What is there while nobody asks."""
    time.sleep(0.3)  # the last answer is put aside after it was sent
    nbytes = active()
    kinds = [type(thing) for thing in gc.get_objects()]
    return {
        "bytes": nbytes - store.nbytes,
        "caches": kinds.count(TransformKVCache) - LAYERS * len(store),
        "groups": kinds.count(LayerGroup),
        "arrays": kinds.count(mx.array),
    }


def follows(model: Any, caches: list[Any], rest: list[int], answer: Iterable[int]) -> bool:
    """Whether each token of an answer is the likeliest of a run on these caches that was told those before it."""
    read(model, caches, rest)
    token, likeliest = rest[-1], True
    for chosen in answer:
        logits = feed(model, caches, [token])[-1]
        likeliest &= bool(logits[chosen] >= logits.max() - NEAR * mx.std(logits))
        token = chosen
    feed(model, caches, [token])
    return likeliest


def same_rows(caches: list[Any], others: list[Any]) -> bool:
    """Apart from a code here and there."""
    pairs = [zip(one.keys_and_values(), other.keys_and_values()) for one, other in zip(caches, others, strict=True)]
    return all(mx.abs(x - y).mean() < 0.01 * mx.std(x) for pair in pairs for x, y in pair)


@pytest.mark.parametrize(("name", "hooked"), [("kivi", False), ("h2o", True), ("xquant", False)])
def test_load(name: str, hooked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, store, transform = set(threading.enumerate()), Store(tmp_path), TRANSFORMS[name]
    with serving(
        write_model(tmp_path / "model"),
        made_of(transform),
        monkeypatch,
        hooked=hooked,
        store=store,
        decode_concurrency=6,
    ) as ask:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            told = list(pool.map(lambda number: talk(ask, number), range(WARM)))
            warm = held(store)
            told += pool.map(lambda number: talk(ask, number), range(WARM, TALKS))
            after = held(store)
        entries, claimed, full = len(store), store.nbytes, active()
        store.trim_to(n_sequences=0)
        freed = full - active()
    assert set(threading.enumerate()) == threads
    assert entries == ENTRIES and claimed <= NBYTES
    assert abs(freed - claimed) <= ROOM, "what the store lets go is what it said it held"
    assert after["bytes"] <= warm["bytes"] + ROOM
    assert after["caches"] <= LAYERS, "no more than one list, of the last answer"
    assert after["groups"] <= ENTRIES + 1
    assert after["arrays"] <= warm["arrays"] + FEW

    model = build("llama")
    ends: dict[tuple[int, ...], list[Any]] = {}
    wrong, went_on = [], 0
    with attention_hook(model) if hooked else contextlib.nullcontext():
        for prompt, answer in (pair for one in told for pair in one):
            path, count = store.found.get(tuple(prompt), (None, 0))
            caches = cache_list(model, transform) if path is None else load(path)
            end = ends.get(tuple(prompt[:count]))
            if end is not None:
                went_on += 1
                assert same_rows(caches, end)
            if not follows(model, caches, prompt[count:], answer):
                wrong.append((prompt, answer))
            ends[tuple(prompt + answer)] = caches
    assert wrong == []
    assert went_on > TALKS
