"""Speculative decoding: exact where rows can be taken back, refused before the first token where not."""

import contextlib
import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from models import (
    BY_CALLS,
    CHUNK,
    EVICTING,
    TRANSFORMS,
    TRIMMABLE,
    build,
    cache_list,
    feed,
    forced,
    in_place,
    log_probabilities,
    shared,
    tokenizer,
    tokens,
    tolerance,
)

import vq_functional as vq
from vq_adapters import TransformKVCache, attention_hook
from vq_functional.core.store import RowStore

ALL = {**TRANSFORMS, "rows": vq.rows()}
BY_ROWS = [name for name, transform in ALL.items() if isinstance(transform, RowStore)]
WAYS = pytest.mark.parametrize(("guesses", "hooked"), [(1, True), (4, False), (4, True)])
DRAFTS = {"same": 0, "other": 1}  # every draft accepted; nearly every draft refused


def plain(model: Any, caches: list[Any], prompt: list[int], count: int) -> tuple[list[int], mx.array]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=CHUNK)
    chosen, rows = zip(*steps, strict=True)
    return list(chosen), mx.stack(rows)


def speculative(
    model: Any, draft: Any, caches: list[Any], prompt: list[int], count: int, guesses: int
) -> tuple[list[int], mx.array, int]:
    """Tokens, log-probabilities, and how many tokens the draft gave."""
    steps = speculative_generate_step(
        mx.array(prompt),
        model,
        draft,
        num_draft_tokens=guesses,
        max_tokens=count,
        prompt_cache=caches,
        prefill_step_size=CHUNK,
    )
    chosen, rows, drafted = zip(*steps, strict=True)
    return list(chosen), mx.stack(rows), sum(drafted)


@WAYS
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", BY_ROWS)
def test_tokens_equal_those_without_a_draft(name: str, kind: str, guesses: int, hooked: bool) -> None:
    model, draft, prompt = build("llama"), build("llama", seed=DRAFTS[kind]), tokens(35)
    with attention_hook(model) if hooked else contextlib.nullcontext():
        expected, logprobs = plain(model, cache_list(model, ALL[name]), prompt, 24)
        caches = cache_list(model, ALL[name]) + cache_list(draft, ALL[name])
        chosen, got, drafted = speculative(model, draft, caches, prompt, 24, guesses)
    assert chosen == expected
    assert mx.allclose(got, logprobs, atol=tolerance(ALL[name], logprobs))
    assert (drafted > 10) == (kind == "same")


@WAYS
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", sorted(set(TRIMMABLE) - set(BY_ROWS)))
def test_a_draft_costs_no_accuracy(name: str, kind: str, guesses: int, hooked: bool) -> None:
    """Where a call reads its own rows exactly, its answers depend on how tokens are cut into calls.

    They must then be as near to those of an exact cache as single tokens are.
    """
    model, draft, prompt = build("llama"), build("llama", seed=DRAFTS[kind]), tokens(35)
    with attention_hook(model) if hooked else contextlib.nullcontext():
        caches = cache_list(model, ALL[name]) + cache_list(draft, ALL[name])
        chosen, got, _ = speculative(model, draft, caches, prompt, 24, guesses)
        assert mx.argmax(got, axis=-1).tolist() == chosen
        calls = [prompt[:16], prompt[16:32], prompt[32:34], prompt[34:], *([token] for token in chosen[:-1])]
        single, exact = (
            forced(model, caches, calls)[34:] for caches in (cache_list(model, ALL[name]), make_prompt_cache(model))
        )
    errors = [mx.abs(log_probabilities(x) - log_probabilities(exact)).mean().item() for x in (got, single)]
    assert 0 < errors[0] < 1.6 * errors[1]


@pytest.mark.parametrize("name", [*TRIMMABLE, "rows"])
def test_the_cache_ends_where_the_built_in_one_does(name: str) -> None:
    model, draft, prompt = shared("llama"), build("llama", seed=1), tokens(20)
    caches = cache_list(model, ALL[name]) + cache_list(draft, ALL[name])
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=4, prompt_cache=caches, prefill_step_size=CHUNK
    )
    chosen = [next(steps)[0] for _ in range(7)]
    steps.close()
    built_in = make_prompt_cache(model) + make_prompt_cache(draft)
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=4, prompt_cache=built_in, prefill_step_size=CHUNK
    )
    for _ in chosen:
        next(steps)
    steps.close()
    assert {cache.offset for cache in caches[:2]} == {cache.size() for cache in caches[:2]}
    if name == "rows":
        assert [cache.offset for cache in caches] == [cache.offset for cache in built_in]


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_targets_are_refused_before_the_first_token(name: str) -> None:
    model, draft = shared("llama"), shared("llama")
    caches = cache_list(model, ALL[name]) + make_prompt_cache(draft)
    assert can_trim_prompt_cache(caches[:2]) is False
    steps = speculative_generate_step(mx.array(tokens(20)), model, draft, prompt_cache=caches)
    with pytest.raises(ValueError, match=r"trimmable.*TransformKVCache"):
        next(steps)
    assert all(cache.empty() for cache in caches)


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_drafts_only_cost_guesses(name: str) -> None:
    model, draft, prompt = shared("llama"), build("llama"), tokens(35)
    expected, _ = plain(model, cache_list(model, vq.rows()), prompt, 20)
    caches = cache_list(model, vq.rows()) + cache_list(draft, ALL[name])
    assert speculative(model, draft, caches, prompt, 20, 3)[0] == expected


@pytest.mark.parametrize("name", [name for name in (*TRIMMABLE, *EVICTING) if name not in BY_CALLS])
def test_models_that_make_our_caches(name: str) -> None:
    """`make_cache` is where mlx_lm's commands look."""
    model, draft, prompt = build("llama"), build("llama", seed=1), tokens(20)
    for each in (model, draft):
        each.make_cache = lambda each=each: in_place([KVCache() for _ in each.layers], ALL[name])
    assert all(type(cache) is TransformKVCache for cache in make_prompt_cache(model))
    more = {"max_tokens": 10, "prefill_step_size": CHUNK}
    alone = [response.token for response in stream_generate(model, tokenizer(), prompt, **more)]
    assert alone == plain(model, cache_list(model, ALL[name]), prompt, 10)[0]
    drafted = stream_generate(model, tokenizer(), prompt, draft_model=draft, **more)
    if ALL[name].trimmable:
        assert [response.token for response in drafted] == alone
    else:
        with pytest.raises(ValueError, match="trimmable"):
            next(drafted)


@pytest.mark.parametrize("name", [*TRIMMABLE, "rows"])
def test_rounds_of_guesses_leave_what_a_fresh_cache_holds(name: str) -> None:
    model = shared("llama")
    caches, fresh = cache_list(model, ALL[name]), cache_list(model, ALL[name])
    sentence = tokens(20, 1)
    for token in sentence:
        feed(model, caches, [token, *tokens(3, token)])
        assert trim_prompt_cache(caches, 3) == 3
    feed(model, fresh, sentence)
    for cache, other in zip(caches, fresh, strict=True):
        assert (cache.offset, cache.size(), cache.nbytes) == (other.offset, other.size(), other.nbytes)
    logits, expected = feed(model, caches, [7]), feed(model, fresh, [7])
    if ALL[name].coded:
        # A key's last bit depends on the length of the call, and where codes meet so does its code.
        most = 0.8 if name == "nsnquant" else 0.1  # one code of a chunk moves the mean of all
        assert mx.abs(logits - expected).mean() < most * mx.std(expected)
    else:
        assert mx.allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("attended", [False, True], ids=["arrays", "hooked"])
def test_refused_guesses_leave_the_newest_rows_exact(attended: bool) -> None:
    """A method that keeps its newest rows exact keeps as many after a guess that was taken back."""
    cache = TransformKVCache(vq.kivi(bits=2, group_size=32, residual_length=8))
    keys, values = (mx.random.normal((1, 2, 60, 64), key=mx.random.key(seed)) for seed in range(2))
    for start in range(50):
        call = slice(start, start + 4)
        returned = cache.update_and_fetch(keys[:, :, call], values[:, :, call])
        if attended:
            mx.eval(cache.attend(keys[:, :, call], *returned, 64**-0.5, "causal"))
        assert cache.trim(3) == 3
        held, newest = cache.keys_and_values(), slice(max(0, start + 1 - 8), start + 1)
        assert mx.array_equal(held[0][:, :, newest], keys[:, :, newest])
        assert mx.array_equal(held[1][:, :, newest], values[:, :, newest])


@pytest.mark.parametrize("name", [*TRIMMABLE, "rows"])
def test_trim_takes_back_any_number(name: str) -> None:
    model, sentence = shared("llama"), tokens(50, 1)
    full = cache_list(model, ALL[name])
    feed(model, full, sentence)
    for n in (0, 1, 9, 30, 49):
        caches = copy.deepcopy(full)
        before = [cache.keys_and_values() for cache in full]
        assert [cache.trim(n) for cache in caches] == [n] * 2
        assert [(cache.offset, cache.size()) for cache in caches] == [(50 - n, 50 - n)] * 2
        for cache, (keys, values) in zip(caches, before, strict=True):
            held = cache.keys_and_values()
            assert mx.allclose(held[0], keys[:, :, : 50 - n], atol=1e-5)
            assert mx.allclose(held[1], values[:, :, : 50 - n], atol=1e-5)
        assert mx.isfinite(feed(model, caches, sentence[-n:] if n else [1])).all()
    assert [cache.trim(80) for cache in full] == [50] * 2
    assert [cache.offset for cache in full] == [0, 0]
    again = cache_list(model, ALL[name])
    assert mx.allclose(feed(model, full, sentence), feed(model, again, sentence), atol=1e-4)


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_caches_never_claim_to_take_back(name: str) -> None:
    model = shared("llama")
    caches = cache_list(model, ALL[name])
    for n in (0, 5, 40):
        if n:
            feed(model, caches, tokens(n))
        state = [mx.array(array) for array in caches[0].state]
        assert not can_trim_prompt_cache(caches)
        assert trim_prompt_cache(caches, 2) == 0
        assert [cache.trim(2) for cache in caches] == [0, 0]
        assert all(mx.array_equal(old, new) for old, new in zip(state, caches[0].state, strict=True))
