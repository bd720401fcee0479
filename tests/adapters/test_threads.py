"""Threads: caches may be made in one and used in another, and two may run at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from models import CHUNK, TRANSFORMS, build, cache_list, forced, ours, shared, tokens

import vq_functional as vq
from vq_adapters import attention_hook
from vq_functional.core.transform import Transform

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
