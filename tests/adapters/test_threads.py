"""Threads: caches may be made in one and used in another, and two may run at once."""

import copy
import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from models import CHUNK, TRANSFORMS, build, cache_list, forced, ours, shared, tokens

import vq_functional as vq
from vq_adapters import KVCacheBuilder, KVCacheConfig, TransformKVCache, attention_hook, load, save
from vq_functional.core.transform import Transform
from vq_functional.methods import METHODS

CALLS = [tokens(35, 1), *([token] for token in tokens(8, 2))]
MORE = [*([token] for token in tokens(8, 3)), tokens(9, 4)]


def elsewhere(function: Callable[[], mx.array]) -> mx.array:
    """The result of a function that runs in a new thread, which evaluates it: no other thread could."""

    def run() -> mx.array:
        result = function()
        mx.eval(result)
        return result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def answer(transform: Transform) -> mx.array:
    model = shared("llama")
    caches = cache_list(model, transform)
    return mx.concatenate([forced(model, caches, CALLS), forced(model, caches, MORE)])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_made_here_used_there_and_here_again(name: str) -> None:
    model, expected = shared("llama"), answer(TRANSFORMS[name])
    caches = cache_list(model, TRANSFORMS[name])
    first = elsewhere(lambda: forced(model, caches, CALLS))
    second = forced(model, caches, MORE)
    assert mx.array_equal(mx.concatenate([first, second]), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_prompt_read_here_is_answered_there(name: str) -> None:
    model, expected = shared("llama"), answer(TRANSFORMS[name])
    caches = cache_list(model, TRANSFORMS[name])
    first = forced(model, caches, CALLS)
    second = elsewhere(lambda: forced(model, caches, MORE))
    assert mx.array_equal(mx.concatenate([first, second]), expected)


# Options that no other test uses, so that all tables are made in the thread under test.
FRESH = {
    "turboquant_mse": lambda seed: vq.turboquant_mse(bits=3, seed=seed),
    "turboquant_rvq": lambda seed: vq.turboquant_rvq(bits=2, seed=seed, value_bits=8),
    "qjl": lambda seed: vq.qjl(jl_dim=96, seed=seed),
    "qjl gaussian": lambda seed: vq.qjl(jl_dim=96, seed=seed, sketch="gaussian"),
    "kivi": lambda seed: vq.kivi(bits=3, group_size=32, residual_length=seed % 7),
    "h2o": lambda seed: vq.h2o(budget=20, n_sink=1, grace=3, decay=1 - seed / 1e6),
}


@pytest.mark.parametrize("name", FRESH)
def test_tables_made_in_a_thread_outlive_it(name: str) -> None:
    first = elsewhere(lambda: answer(FRESH[name](70_001)))
    assert mx.array_equal(first, answer(FRESH[name](70_001)))


@pytest.mark.parametrize("name", FRESH)
def test_a_hooked_model_in_another_thread(name: str) -> None:
    model = build("llama")
    with attention_hook(model):
        caches = cache_list(model, FRESH[name](70_002))
        first = elsewhere(lambda: forced(model, caches, CALLS))
        second = forced(model, caches, MORE)
        alone = cache_list(model, FRESH[name](70_002))
        expected = forced(model, alone, [*CALLS, *MORE])
    assert mx.array_equal(mx.concatenate([first, second]), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_two_threads_at_once(name: str) -> None:
    """Both begin with a transform that nobody has compiled yet."""
    transforms, prompts = [TRANSFORMS[name]] * 2, [tokens(21, 1), tokens(30, 2)]
    if name in FRESH:
        transforms = [FRESH[name](70_003)] * 2
    barrier, answers, failures = threading.Barrier(2), {}, []

    def run(i: int) -> None:
        try:
            model = shared("llama")
            caches = cache_list(model, transforms[i])
            barrier.wait(timeout=60)
            stream = mx.new_stream(mx.default_device())
            steps = generate_step(
                mx.array(prompts[i]), model, stream, max_tokens=20, prompt_cache=caches, prefill_step_size=CHUNK
            )
            answers[i] = [token for token, _ in steps], [cache.offset for cache in ours(caches)]
        except Exception as error:
            failures.append(error)

    shared("llama")
    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for i in range(2):
        model = shared("llama")
        steps = generate_step(
            mx.array(prompts[i]),
            model,
            max_tokens=20,
            prompt_cache=cache_list(model, transforms[i]),
            prefill_step_size=CHUNK,
        )
        assert answers[i] == ([token for token, _ in steps], [len(prompts[i]) + 20] * 2)


def at_once(function: Callable[[], mx.array]) -> list[mx.array]:
    """The results of a function in two threads that begin together; each evaluates its own."""
    barrier = threading.Barrier(2)

    def run(_: int) -> mx.array:
        barrier.wait(timeout=60)
        result = function()
        mx.eval(result)
        return result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def forget() -> None:
    """As if no method had been used in this process: no tables, no compiled steps."""
    for made in [thing for thing in gc.get_objects() if isinstance(thing, functools._lru_cache_wrapper)]:
        if made.__module__.startswith("vq_"):
            made.cache_clear()


def made_here_differs() -> list[str]:
    """Methods whose caches, made for a model in this thread, answer otherwise in another one that uses them first."""
    model, found = shared("llama"), []
    for method in METHODS:
        forget()
        config = KVCacheConfig(method=method, residual_length=8, h2o_budget=24, snap_budget=40, spectral_val_d_eff=16)
        caches, others = (KVCacheBuilder.for_model(model, config) for _ in range(2))
        there = elsewhere(lambda caches=caches: forced(model, caches, CALLS[:2]))
        if not mx.array_equal(there, forced(model, others, CALLS[:2])):
            found.append(method)
    return found


def at_once_differs() -> list[str]:
    """Methods whose answer in this thread is not that of two threads that used them first, at once."""
    model, found = shared("llama"), []
    for name, transform in TRANSFORMS.items():
        forget()

        def first(transform: Transform = transform) -> mx.array:
            return forced(model, cache_list(model, transform), CALLS[:2])

        if not all(mx.array_equal(answer, first()) for answer in at_once(first)):
            found.append(name)
    return found


@pytest.mark.parametrize("function", [made_here_differs, at_once_differs], ids=lambda function: function.__name__)
def test_first_use(function: Callable[[], list[str]]) -> None:
    """In a process of its own, which a mistake may end; it leaves at once, since MLX may fail to end its threads."""
    command = f"import os, test_threads as t; print(t.{function.__name__}(), flush=True); os._exit(0)"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout.strip()) == (0, "[]"), child.stderr


# Ways to make a layer of a list of the same layer of another one: of a list, or of a batch of one.
WAYS: dict[str, Callable[[TransformKVCache], TransformKVCache]] = {
    "copy": copy.deepcopy,
    "file": lambda cache: TransformKVCache.from_state(cache.state),
    "merge": lambda cache: TransformKVCache.merge([cache]),
    "extract": lambda cache: cache.extract(0),
}


@pytest.mark.parametrize("way", WAYS)
def test_lists_that_threads_make_at_once_stay_apart(way: str) -> None:
    """Layers of a list work together; those of another list, made of the same at the same time, have no part in it."""
    model = build("llama", num_hidden_layers=4)
    caches = cache_list(model, TRANSFORMS["xquant"])
    forced(model, caches, CALLS[:1])
    source = [TransformKVCache.merge([cache]) for cache in caches] if way == "extract" else caches
    mx.eval([cache.state for cache in source])
    expected = forced(model, copy.deepcopy(caches), CALLS[1:3])
    barrier = threading.Barrier(3, timeout=60)

    def answered(_: int) -> mx.array:
        """By a list that is made layer by layer, no thread ahead of the others."""
        made = []
        for cache in source:
            barrier.wait()
            made.append(WAYS[way](cache))
        answers = forced(model, made, CALLS[1:3])
        mx.eval(answers)
        return answers

    with ThreadPoolExecutor(3) as pool:
        for answer in pool.map(answered, range(3)):
            assert mx.allclose(answer, expected, atol=1e-3)


def test_a_file_read_by_threads_at_once(tmp_path: Path) -> None:
    model, path = build("llama", num_hidden_layers=8), tmp_path / "caches"
    caches = cache_list(model, TRANSFORMS["xquant"])
    forced(model, caches, CALLS[:1])
    save(path, caches)
    expected = forced(model, caches, CALLS[1:3])
    for answer in at_once(lambda: mx.stack([forced(model, load(path), CALLS[1:3]) for _ in range(5)])):
        assert mx.allclose(answer, mx.broadcast_to(expected, answer.shape), atol=1e-3)
