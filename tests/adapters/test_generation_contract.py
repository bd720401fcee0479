"""What mlx_lm's generation and prompt caches promise of a cache, with ours in place of the built-in ones."""

import copy
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, speculative_generate_step, stream_generate
from mlx_lm.models.cache import CacheList, KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import (
    CHUNK,
    COMPOSED,
    LOSSLESS,
    TRANSFORMS,
    TRIMMABLE,
    WINDOWED,
    build,
    cache_list,
    feed,
    forced,
    greedy,
    log_probabilities,
    read,
    shared,
    tokenizer,
    tokens,
    tolerance,
)

import vq_functional as vq
from vq_adapters import TransformKVCache

ALL = {**TRANSFORMS, "rows": vq.rows()}
# One of each way to hold rows: what these tests ask is answered by the adapter, not by a method.
SOME = ["rows", "turboquant_mse", "kivi", "svdq", "xquant", "h2o", "snapkv", COMPOSED, WINDOWED]
PROMPT = tokens(35, 1)


def logprobs_of(caches: list[Any], prompt: list[int], count: int, **more: Any) -> tuple[list[int], mx.array]:
    """Tokens and log-probabilities of `generate_step`."""
    more = {"prefill_step_size": CHUNK, **more}
    steps = generate_step(mx.array(prompt), shared("llama"), max_tokens=count, prompt_cache=caches, **more)
    chosen, rows = zip(*steps, strict=True)
    return list(chosen), mx.stack(rows)


def close(name: str, x: mx.array, y: mx.array) -> bool:
    return bool(mx.allclose(x, y, atol=tolerance(ALL[name], y)))


# Prompts


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_prompt_in_chunks_is_the_whole_prompt(name: str) -> None:
    """Where next to nothing is lost; elsewhere what is lost may depend on where a prompt was cut."""
    whole, cut = (
        logprobs_of(cache_list(shared("llama"), LOSSLESS[name]), PROMPT, 1, prefill_step_size=step)[1]
        for step in (2048, 7)
    )
    assert mx.allclose(cut, whole, atol=tolerance(LOSSLESS[name], whole))


@pytest.mark.parametrize("name", SOME)
def test_progress_is_told_as_for_built_in_caches(name: str) -> None:
    told: list[tuple[int, int]] = []
    caches = cache_list(shared("llama"), ALL[name])
    logprobs_of(caches, PROMPT, 1, prompt_progress_callback=lambda *pair: told.append(pair))
    assert told == [(0, 35), (16, 35), (32, 35), (34, 35), (35, 35)]


@pytest.mark.parametrize("name", SOME)
def test_embeddings_in_place_of_tokens(name: str) -> None:
    model = shared("llama")
    expected = logprobs_of(cache_list(model, ALL[name]), PROMPT, 3)
    embeddings = model.model.embed_tokens(mx.array(PROMPT))
    caches = cache_list(model, ALL[name])
    chosen, logprobs = logprobs_of(caches, PROMPT, 3, input_embeddings=embeddings)
    assert chosen == expected[0]
    assert close(name, logprobs, expected[1])


# Turns


@pytest.mark.parametrize("name", SOME)
def test_turns_of_a_talk(name: str) -> None:
    """A reader who stops early leaves a cache that holds what was read, and goes on from there."""
    model, caches, twin = (
        shared("llama"),
        cache_list(shared("llama"), ALL[name]),
        cache_list(shared("llama"), ALL[name]),
    )
    seen = 0
    for prompt, most, stop in ((PROMPT, 6, 6), (tokens(19, 2), 20, 4), ([7], 3, 1), (tokens(3, 3), 5, 5)):
        responses = stream_generate(
            model, tokenizer(), prompt, max_tokens=most, prompt_cache=caches, prefill_step_size=CHUNK
        )
        chosen = [response.token for response in itertools.islice(responses, stop)]
        responses.close()
        assert chosen == greedy(model, twin, prompt, stop)[0]
        feed(model, twin, chosen[-1:])
        seen += len(prompt) + stop
        assert [cache.offset for cache in caches] == [seen] * 2


@pytest.mark.parametrize("name", TRIMMABLE)
def test_trimmed_after_loading_as_before_saving(name: str, tmp_path: Path) -> None:
    model, file = shared("llama"), str(tmp_path / "prompt.safetensors")
    caches = cache_list(model, ALL[name])
    forced(model, caches, [PROMPT, tokens(3, 2)])
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert trim_prompt_cache(loaded, 11) == trim_prompt_cache(caches, 11) == 11
    assert [cache.offset for cache in loaded] == [27] * 2
    assert mx.array_equal(feed(model, loaded, tokens(4, 3)), feed(model, caches, tokens(4, 3)))


def test_a_list_is_trimmed_as_a_whole_or_not_at_all() -> None:
    model = shared("llama")
    caches = [TransformKVCache(ALL["kivi"]), TransformKVCache(ALL["h2o"])]
    feed(model, caches, PROMPT)
    before = [[mx.array(array) for array in cache.state] for cache in caches]
    assert trim_prompt_cache(caches, 5) == 0
    for cache, state in zip(caches, before, strict=True):
        assert cache.offset == 35
        assert all(map(mx.array_equal, cache.state, state))


# Arguments that are about built-in caches


@pytest.mark.parametrize("name", SOME)
def test_sizes_and_bits_of_built_in_caches_leave_ours_alone(name: str) -> None:
    model = build("llama")
    expected = greedy(model, cache_list(model, ALL[name]), PROMPT, 6)[0]
    more = {"max_kv_size": 8, "kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    caches = cache_list(model, ALL[name])
    given = list(caches)
    assert logprobs_of(caches, PROMPT, 6, **more)[0] == expected
    assert all(cache is same for cache, same in zip(caches, given, strict=True))
    model.make_cache = lambda: cache_list(shared("llama"), ALL[name])
    responses = stream_generate(model, tokenizer(), PROMPT, max_tokens=6, prefill_step_size=CHUNK, **more)
    assert [response.token for response in responses] == expected
    answer = batch_generate(
        model,
        TokenizerWrapper(tokenizer()),
        [PROMPT],
        max_tokens=6,
        max_kv_size=8,
        prefill_step_size=CHUNK,
        return_token_ids=True,
    )
    assert answer.token_ids == [expected]


def test_bits_of_built_in_caches_beside_a_draft() -> None:
    model, draft = shared("llama"), build("llama", seed=1)
    answers = []
    for more in ({}, {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}):
        caches = cache_list(model, ALL["kivi"]) + cache_list(draft, ALL["kivi"])
        steps = speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=9, prompt_cache=caches, **more)
        answers.append([token for token, _, _ in steps])
        assert all(type(cache) is TransformKVCache for cache in caches)
    assert answers[0] == answers[1]


# What is done to logits


@pytest.mark.parametrize("name", SOME)
def test_processors_see_all_tokens_and_have_their_way(name: str) -> None:
    """The cache then holds the tokens that they chose."""
    model, seen = shared("llama"), []

    def note(all_tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(all_tokens.tolist())
        return logits

    caches, twin = cache_list(model, ALL[name]), cache_list(model, ALL[name])
    processors = [note, *make_logits_processors({9: 1e4})]
    assert logprobs_of(caches, PROMPT, 4, logits_processors=processors)[0] == [9] * 4
    assert seen == [PROMPT + [9] * n for n in range(5)]
    read(model, twin, PROMPT)
    forced(model, twin, [PROMPT[-1:], [9], [9], [9], [9]])
    logits, expected = feed(model, caches, [3]), feed(model, twin, [3])
    assert close(name, logits, expected)


@pytest.mark.parametrize("name", SOME)
def test_requests_of_a_batch_go_their_own_ways(name: str) -> None:
    """Each has a sampler that says its own token, so their histories have nothing in common."""
    model = shared("llama")
    prompts = [tokens(length, seed) for seed, length in enumerate((20, 3, 37, 18))]
    said = [11, 22, 33, 44]
    samplers: list[Callable[[mx.array], mx.array]] = [lambda _, token=token: mx.array([token]) for token in said]
    generator = BatchGenerator(model, prefill_batch_size=3, completion_batch_size=4, prefill_step_size=CHUNK)
    caches = [cache_list(model, ALL[name]) for _ in prompts]
    uids = generator.insert(prompts, max_tokens=[5, 2, 4, 5], caches=caches, samplers=samplers)
    found: dict[int, list[mx.array]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            assert response.token == said[uids.index(response.uid)]
            found[response.uid].append(response.logprobs)
    for uid, prompt, token in zip(uids, prompts, said, strict=True):
        alone = cache_list(model, ALL[name])
        read(model, alone, prompt)
        calls = [prompt[-1:], *[[token]] * (len(found[uid]) - 1)]
        assert close(name, mx.stack(found[uid]), log_probabilities(forced(model, alone, calls)))


# Batches


@pytest.mark.parametrize("name", SOME)
def test_two_turns_of_batch_generate(name: str) -> None:
    model, more = shared("llama"), {"prefill_step_size": CHUNK, "max_tokens": [4, 7, 2]}
    turns = [[tokens(length, seed) for seed, length in enumerate(lengths)] for lengths in ((5, 33, 17), (20, 1, 6))]
    words, twins = TokenizerWrapper(tokenizer()), [cache_list(model, ALL[name]) for _ in range(3)]
    caches = [cache_list(model, ALL[name]) for _ in range(3)]
    for prompts in turns:
        answer = batch_generate(
            model,
            words,
            prompts,
            prompt_caches=caches,
            return_prompt_caches=True,
            return_token_ids=True,
            return_logprobs=True,
            **more,
        )
        caches = answer.caches
        for i, twin in enumerate(twins):
            chosen, logits = greedy(model, twin, prompts[i], more["max_tokens"][i])
            feed(model, twin, chosen[-1:])
            rows = log_probabilities(logits)
            expected = [row[token].item() for row, token in zip(rows, chosen, strict=True)]
            assert answer.token_ids[i] == chosen
            assert close(name, mx.array(answer.logprobs[i]), mx.array(expected))
            assert [cache.offset for cache in caches[i]] == [cache.offset for cache in twin]


@pytest.mark.parametrize("name", SOME)
def test_a_running_batch_tells_its_bytes(name: str) -> None:
    model = shared("llama")
    generator = BatchGenerator(model, prefill_batch_size=2, completion_batch_size=2, prefill_step_size=CHUNK)
    prompts, caches = [tokens(20, seed) for seed in range(3)], [cache_list(model, ALL[name]) for _ in range(3)]
    read(model, caches[2], tokens(20, 4))
    waiting = sum(cache.nbytes for cache in caches[2])
    generator.insert(prompts, max_tokens=[9] * 3, caches=caches)
    assert generator.prompt_cache_nbytes == waiting > 0
    generator.next_generated()
    batch = generator._generation_batch.prompt_cache
    assert generator.prompt_cache_nbytes - waiting == sum(array.nbytes for cache in batch for array in cache.state[1:])
    generator.close()


@pytest.mark.parametrize("name", ["rows", "kivi", "h2o", "xquant"])
def test_what_leaves_a_batch_holds_nothing_of_the_others(name: str) -> None:
    """Nor does it wait for somebody to evaluate it."""

    def active() -> int:
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        return mx.get_active_memory()

    model = shared("llama")
    single = cache_list(model, ALL[name])
    feed(model, single, tokens(700, 1))
    before = active()
    batch = [TransformKVCache.merge([cache] * 8) for cache in single]
    mx.eval([cache.state for cache in batch])
    left = [cache.extract(3) for cache in batch]
    del batch
    assert active() - before < sum(cache.nbytes for cache in left) + 64 * 1024
    assert mx.array_equal(feed(model, left, [5]), feed(model, single, [5]))


@pytest.mark.parametrize("name", [name for name in SOME if ALL[name].place is None])
def test_lists_of_caches_merge_and_part(name: str) -> None:
    """A CacheList of ours and a plain one, of two histories, one of them empty at first."""
    rows = [mx.random.normal((1, 2, n, 64), key=mx.random.key(n)) for n in (21, 6)]
    pairs = [CacheList(TransformKVCache(ALL[name]), KVCache()) for _ in rows]
    for cache in pairs[0].caches:
        cache.update_and_fetch(rows[0], rows[0])
    alone = copy.deepcopy(pairs)
    batch = CacheList.merge(pairs)
    both = mx.concatenate([rows[1]] * 2)
    for cache in batch.caches:
        cache.update_and_fetch(both, both)
    for i, pair in enumerate(alone):
        found = batch.extract(i)
        for cache, other in zip(found.caches, pair.caches, strict=True):
            other.update_and_fetch(rows[1], rows[1])
            for x, y in zip(cache.update_and_fetch(rows[1], rows[1]), other.update_and_fetch(rows[1], rows[1])):
                assert mx.allclose(x, y, atol=1e-3)
