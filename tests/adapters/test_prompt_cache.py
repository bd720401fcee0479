"""Prompt caches: mlx_lm's store of prefixes, its files, and states that are damaged."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    LRUPromptCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from models import COMPOSED, EVICTING, TRANSFORMS, TRIMMABLE, cache_list, feed, forced, greedy, ours, shared, tokens

import vq_functional as vq
from vq_adapters import TransformKVCache, persistence
from vq_functional.core.describe import describe
from vq_functional.core.store import RowStore

ALL = {**TRANSFORMS, "rows": vq.rows()}
BY_ROWS = [name for name, transform in ALL.items() if isinstance(transform, RowStore)]
HISTORY = tokens(37, 1)
# Calls that fill a cache: chunks of a prompt, then single tokens.
CALLS = [HISTORY[:16], HISTORY[16:32], HISTORY[32:35], HISTORY[35:36], HISTORY[36:]]
NEXT = [tokens(5, 2), [3], [4], tokens(17, 3), [5]]


def filled(name: str, architecture: str = "llama") -> list[Any]:
    model = shared(architecture)
    caches = cache_list(model, ALL[name])
    forced(model, caches, CALLS)
    return caches


def go_on(caches: list[Any], architecture: str = "llama") -> mx.array:
    return forced(shared(architecture), caches, NEXT)


def states(caches: list[Any]) -> list[list[mx.array]]:
    return [[mx.array(array) for array in without_group(cache.state)] for cache in caches]


def without_group(state: Sequence[mx.array]) -> list[mx.array]:
    """A state without the name of the group that its list has for itself."""
    return with_header(state, lambda data: data.update(group=data["group"] and data["group"][1:]))


def same_states(caches: list[Any], expected: list[list[mx.array]]) -> bool:
    return all(
        len(cache.state) == len(arrays) and all(map(mx.array_equal, without_group(cache.state), arrays))
        for cache, arrays in zip(caches, expected, strict=True)
    )


# mlx_lm's store of prefixes


@pytest.mark.parametrize("name", ALL)
def test_an_exact_hit_is_a_copy(name: str) -> None:
    store, caches = LRUPromptCache(), filled(name)
    before, expected = states(caches), go_on(copy.deepcopy(caches))
    store.insert_cache("model", HISTORY, caches)
    assert store.nbytes == sum(cache.nbytes for cache in caches) > 0
    for _ in range(2):
        hit, rest = store.fetch_nearest_cache("model", HISTORY)
        assert rest == []
        assert mx.array_equal(go_on(hit), expected)
        assert same_states(caches, before)


@pytest.mark.parametrize("name", ALL)
def test_a_shorter_prefix_goes_on_as_if_never_stored(name: str) -> None:
    store, more = LRUPromptCache(), tokens(12, 4)
    store.insert_cache("model", HISTORY, filled(name))
    hit, rest = store.fetch_nearest_cache("model", HISTORY + more)
    assert rest == more
    assert [cache.offset for cache in hit] == [len(HISTORY)] * 2
    cold = greedy(shared("llama"), filled(name), more, 8)
    chosen, logits = greedy(shared("llama"), hit, rest, 8)
    assert chosen == cold[0]
    assert mx.array_equal(logits, cold[1])


@pytest.mark.parametrize("name", [*TRIMMABLE, "rows"])
def test_a_longer_entry_is_trimmed_to_the_common_prefix(name: str) -> None:
    store, caches = LRUPromptCache(), filled(name)
    before = states(caches)
    store.insert_cache("model", HISTORY, caches)
    wanted = [*HISTORY[:20], (HISTORY[20] + 1) % 96, 7]
    hit, rest = store.fetch_nearest_cache("model", wanted)
    assert rest == wanted[20:]
    assert [(cache.offset, cache.size()) for cache in hit] == [(20, 20)] * 2
    model, cold = shared("llama"), cache_list(shared("llama"), ALL[name])
    forced(model, cold, [HISTORY[:16], HISTORY[16:20]])
    logits, expected = feed(model, hit, rest), feed(model, cold, rest)
    if name in BY_ROWS:
        assert mx.allclose(logits, expected, atol=1e-3)
    else:
        # Rows that were packed stay so; the answer is off by no more than that: two bits in nsnquant, and in
        # minicache one direction for layers that have nothing in common, in anchorkv multiples of a few rows.
        most = {"nsnquant": 0.4, "minicache": 0.5, "anchorkv": 0.6}.get(name, 0.2)
        assert mx.abs(logits - expected).mean() < most * mx.std(expected)
    assert same_states(caches, before)


@pytest.mark.parametrize("name", EVICTING)
def test_a_longer_entry_is_no_hit_where_rows_are_gone(name: str) -> None:
    store = LRUPromptCache()
    store.insert_cache("model", HISTORY, filled(name))
    wanted = [*HISTORY[:20], (HISTORY[20] + 1) % 96]
    assert store.fetch_nearest_cache("model", wanted) == (None, wanted)


@pytest.mark.parametrize("name", ALL)
def test_prefixes_stay_where_they_are_needed(name: str) -> None:
    store, model, more = LRUPromptCache(), shared("llama"), tokens(9, 4)
    short = filled(name)
    store.insert_cache("model", HISTORY, short)
    hit, rest = store.fetch_nearest_cache("model", HISTORY + more)
    feed(model, hit, rest)
    store.insert_cache("model", HISTORY + more, hit)
    kept = [hit] if ALL[name].trimmable else [short, hit]
    assert len(store) == len(kept)
    assert store.nbytes == sum(cache.nbytes for caches in kept for cache in caches)
    hit, rest = store.fetch_nearest_cache("model", HISTORY)
    assert rest == (HISTORY[-1:] if ALL[name].trimmable else [])
    store.trim_to(n_bytes=store.nbytes - 1)
    assert len(store) == len(kept) - 1


@pytest.mark.parametrize("name", ALL)
def test_the_second_reading_equals_the_first(name: str) -> None:
    """A copy of a prefix is not encoded again: it equals a run that never paused, bit for bit."""
    model = shared("llama")
    caches = cache_list(model, ALL[name])
    feed(model, caches, tokens(64, 5))
    twin = copy.deepcopy(caches)
    cold = cache_list(model, ALL[name])
    expected = forced(model, cold, [tokens(64, 5), tokens(16, 6)])[64:]
    assert mx.array_equal(feed(model, twin, tokens(16, 6)), expected)
    assert same_states(twin, states(cold))
    assert [cache.offset for cache in caches] == [64, 64]
    assert mx.array_equal(feed(model, caches, tokens(16, 6)), expected)


@pytest.mark.parametrize("name", ALL)
def test_copies_go_their_own_ways(name: str) -> None:
    model, caches = shared("llama"), filled(name)
    before = states(caches)
    left, right = copy.deepcopy(caches), copy.deepcopy(caches)
    assert all(a is not b for a, b in zip(left, right, strict=True))
    forced(model, left, [tokens(20, 7), [1], [2]])
    expected = forced(model, filled(name), [tokens(9, 8), [3]])
    assert mx.array_equal(forced(model, right, [tokens(9, 8), [3]]), expected)
    assert same_states(caches, before)


# mlx_lm's files


def test_mlx_lm_knows_our_class_by_name() -> None:
    assert mlx_cache.TransformKVCache is TransformKVCache


@pytest.mark.parametrize("name", ALL)
def test_a_file_brings_back_what_was_saved(name: str, tmp_path: Path) -> None:
    caches, file = filled(name), str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches, {"model": "tiny"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "tiny"}
    assert [type(cache) for cache in loaded] == [TransformKVCache] * 2
    for cache, back in zip(caches, loaded, strict=True):
        assert back.transform == cache.transform
        assert (back.offset, back.size(), back.nbytes) == (cache.offset, cache.size(), cache.nbytes)
        assert back.is_trimmable() == cache.is_trimmable()
    assert same_states(loaded, states(caches))
    assert mx.array_equal(go_on(loaded), go_on(caches))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_half_precision_survives_a_file(name: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    model, file = shared("llama", dtype), str(tmp_path / "prompt.safetensors")
    caches = cache_list(model, ALL[name])
    forced(model, caches, CALLS)
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert mx.array_equal(forced(model, loaded, NEXT), forced(model, caches, NEXT))
    assert loaded[0].keys.dtype == dtype


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "lfm2", "falcon_h1"])
def test_files_hold_other_kinds_of_caches_too(architecture: str, tmp_path: Path) -> None:
    caches, file = filled("h2o", architecture), str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    assert mx.array_equal(go_on(loaded, architecture), go_on(caches, architecture))


@pytest.mark.parametrize("name", ALL)
def test_empty_caches_keep_their_place_in_a_file(name: str, tmp_path: Path) -> None:
    model, file = shared("llama"), str(tmp_path / "prompt.safetensors")
    caches = cache_list(model, ALL[name])
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert len(loaded) == 2
    assert all(cache.empty() and cache.offset == 0 for cache in loaded)
    assert mx.array_equal(go_on(loaded), go_on(caches))


def test_our_caches_inside_a_cache_list(tmp_path: Path) -> None:
    x, file = mx.random.normal((1, 2, 20, 64), key=mx.random.key(0)), str(tmp_path / "prompt.safetensors")
    pair = CacheList(TransformKVCache(TRANSFORMS["kivi"]), KVCache())
    for cache in pair.caches:
        cache.update_and_fetch(x, x)
    assert (pair.size(), pair.empty(), pair.is_trimmable()) == (20, False, True)
    assert pair.nbytes == sum(cache.nbytes for cache in pair.caches)
    save_prompt_cache(file, [pair])
    (loaded,) = load_prompt_cache(file)
    for cache, back in zip(pair.caches, loaded.caches, strict=True):
        for left, right in zip(cache.update_and_fetch(x, x), back.update_and_fetch(x, x), strict=True):
            assert mx.array_equal(left, right)
    assert loaded.trim(4) == 4
    assert [cache.offset for cache in loaded.caches] == [36, 36]


CHILD = """
import sys
from pathlib import Path
import mlx.core as mx
import vq_adapters
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from models import forced, shared
from test_prompt_cache import NEXT
for file in sorted(Path(sys.argv[1]).glob("*.prompt.safetensors")):
    caches = load_prompt_cache(str(file))
    save_prompt_cache(str(file.with_suffix(".again.safetensors")), caches)
    logits = forced(shared("llama"), caches, NEXT)
    mx.save_safetensors(str(file.with_suffix(".logits.safetensors")), {"logits": logits})
"""


def test_another_process_goes_on(tmp_path: Path) -> None:
    for i, name in enumerate(ALL):
        save_prompt_cache(str(tmp_path / f"{i}.prompt.safetensors"), filled(name))
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], cwd=Path(__file__).parent, check=True)
    for i, name in enumerate(ALL):
        caches = filled(name)
        again = load_prompt_cache(str(tmp_path / f"{i}.prompt.again.safetensors"))
        assert same_states(again, states(caches))
        logits = mx.load(str(tmp_path / f"{i}.prompt.logits.safetensors"))["logits"]
        expected = go_on(caches)
        assert mx.allclose(logits, expected, atol=0.01 * mx.std(expected).item())


@pytest.mark.parametrize("name", ALL)
def test_a_batch_comes_back_as_a_batch(name: str) -> None:
    model = shared("llama")
    batch = [
        TransformKVCache.merge(list(layer)) for layer in zip(filled(name), cache_list(model, ALL[name]), strict=True)
    ]
    call = mx.array([tokens(6, 1), tokens(6, 2)])
    model(call, cache=batch)
    back = [TransformKVCache.from_state(list(cache.state), "") for cache in batch]
    assert all(cache.offset.tolist() == [43, 6] for cache in back)
    assert mx.array_equal(model(call, cache=back), model(call, cache=batch))


def test_a_transform_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables make that long, and mlx_lm asks every layer for its state at every chunk of a prompt."""
    asked: list[Any] = []
    monkeypatch.setattr(persistence, "describe", lambda transform: asked.append(transform) or describe(transform))
    caches = [TransformKVCache(vq.kivi(bits=3, residual_length=40)) for _ in range(2)]
    for cache in (*caches, *copy.deepcopy(caches), TransformKVCache.merge(caches)):
        assert cache.state and TransformKVCache.from_state(cache.state).transform == cache.transform
    assert asked == [caches[0].transform]


# Damage


def header(state: Sequence[mx.array]) -> dict[str, Any]:
    return json.loads(bytes(state[0].tolist()))


def with_header(state: Sequence[mx.array], change: Callable[[dict[str, Any]], Any]) -> list[mx.array]:
    data = header(state)
    change(data)
    return [mx.array(list(json.dumps(data).encode()), mx.uint8), *state[1:]]


DAMAGE: dict[str, Callable[[list[mx.array]], Any]] = {
    "nothing": lambda state: [],
    "no description": lambda state: state[1:],
    "a number for the description": lambda state: [mx.array(7), *state[1:]],
    "cut description": lambda state: [state[0][:-9], *state[1:]],
    "text that is no JSON": lambda state: [state[0] ^ 1, *state[1:]],
    "a list for the description": lambda state: [mx.array(list(b"[1, 2]"), mx.uint8), *state[1:]],
    "another version": lambda state: with_header(state, lambda data: data.update(version=99)),
    "no transform": lambda state: with_header(state, lambda data: data.pop("transform")),
    "no counters": lambda state: with_header(state, lambda data: data.pop("fills")),
    "counters of another kind": lambda state: with_header(state, lambda data: data.update(fills=[["x"]])),
    "counters of another length": lambda state: with_header(state, lambda data: data.update(fills=[[0] * 20])),
    "counters below zero": lambda state: with_header(state, lambda data: data.update(fills=[[-3, -3, 0]])),
    "counters past the arrays": lambda state: with_header(state, lambda data: data.update(fills=[[10**6, 10**6, 0]])),
    "counters of two rows": lambda state: with_header(state, lambda data: data.update(fills=data["fills"] * 2)),
    "an unknown part": lambda state: with_header(state, lambda data: data["transform"].update(kind="Nonsense")),
    "an unknown option": lambda state: with_header(state, lambda data: data["transform"].update(nonsense=1)),
    "an unknown dtype": lambda state: with_header(state, lambda data: data["layout"].update(dtype="int4")),
    "another head size": lambda state: with_header(state, lambda data: data["layout"].update(value_dim=64)),
    "another head count": lambda state: with_header(state, lambda data: data["layout"].update(kv_heads=4)),
    "no group": lambda state: with_header(state, lambda data: data.pop("group")),
    "a group of another kind": lambda state: with_header(state, lambda data: data.update(group=["x"])),
    "no layout": lambda state: with_header(state, lambda data: data.update(layout=None)),
    "an array missing": lambda state: state[:-1],
    "an array too many": lambda state: [*state, mx.zeros((1,))],
    "an array of another dtype": lambda state: [state[0], state[1].astype(mx.float16).astype(mx.int8), *state[2:]],
    "an array of another shape": lambda state: [*state[:-1], mx.concatenate([state[-1]] * 2, axis=0)],
    "no array at all": lambda state: 5,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["h2o", "snapkv", "kivi", "qjl", COMPOSED])
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, damage: str) -> None:
    state = list(filled(name)[0].state)
    broken = DAMAGE[damage](state)
    with pytest.raises(vq.QuantizerConfigError):
        TransformKVCache.from_state(broken)
    cache = filled(name)[0]
    with pytest.raises(vq.QuantizerConfigError):
        cache.state = broken
    assert same_states([cache], [state])
    assert cache.offset == len(HISTORY)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(file), filled("kivi"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RuntimeError):
        load_prompt_cache(str(file))


@pytest.mark.parametrize("name", ALL)
def test_a_state_brings_its_own_options(name: str) -> None:
    """What a file was written with decides, and never what a caller has at hand."""
    caches = filled(name)
    others = [TransformKVCache(vq.kivi(bits=8, residual_length=3), max_tokens=5) for _ in caches]
    for other, cache in zip(others, caches, strict=True):
        other.state = cache.state
    for other, cache in zip(others, caches, strict=True):
        assert (other.transform, other.max_tokens, other.offset) == (cache.transform, None, len(HISTORY))
        assert all(map(mx.array_equal, other.keys_and_values(), cache.keys_and_values()))
    assert ours(caches) == caches
    assert make_prompt_cache(shared("llama")) != caches
