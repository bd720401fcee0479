"""One request at a time through mlx_lm's own generation."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import (
    BY_CALLS,
    CHUNK,
    COMPOSED,
    EVICTING,
    LOSSLESS,
    SMALL,
    TRANSFORMS,
    WIDE,
    WINDOWED,
    cache_list,
    feed,
    forced,
    functional_caches,
    greedy,
    log_probabilities,
    ours,
    paired,
    shared,
    tokenizer,
    tokens,
    tolerance,
)

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.methods import TABLE

LENGTHS = (1, 2, 16, 17, 32, 33)
# Methods that only append single tokens.
PROMPT_ONLY = ("snapkv", "nestedkv", "rocketkv")
# Error of all logits relative to their size that codes of LOSSLESS may cause; without an entry: none at all.
CODE_ERROR = {
    "turboquant_mse": 0.15,
    "turboquant_rvq": 0.08,
    "qjl": 0.4,
    "spectral": 0.05,
    "turboquant_prod": 0.05,
    "polar": 0.15,
    "vecinfer": 0.1,
    "a2ats": 0.04,
    COMPOSED: 0.15,
    WINDOWED: 0.03,
}


def generate(model: Any, caches: list[Any], prompt: list[int], count: int) -> tuple[list[int], mx.array]:
    """Tokens and log-probabilities of `generate_step`."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=CHUNK)
    chosen, rows = zip(*steps, strict=True)
    return list(chosen), mx.stack([row.astype(mx.float32) for row in rows])


def rows_held(name: str, calls: list[int]) -> int:
    """Rows that a method of SMALL holds after calls of so many tokens."""
    tokens, prompt, rows = 0, 0, 0
    for n in calls:
        tokens, prompt, rows = tokens + n, prompt + (n if n > 1 else 0), rows + n
        if name in EVICTING and (n > 1 or name not in PROMPT_ONLY):
            rows = min(rows, cap(name, tokens, prompt))
    return rows


def cap(name: str, tokens: int, prompt: int) -> int:
    """Rows that may stay after so many tokens, of which `prompt` came in calls of several."""
    if name == "chunkkv" and tokens > 16:
        return 2 + 2 * 4 + (tokens - 2) % 4  # sinks, two chunks, and the unfinished one
    if name == "rocketkv":
        return max(int(prompt / 4**0.32 + 0.5), 2 + 6 + 1)  # sinks, window, and one free row
    return 16


def test_every_method_has_options_of_its_own() -> None:
    assert {row.name for row in TABLE} == set(SMALL) == set(WIDE)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in BY_CALLS])
def test_generate_step_equals_the_functional_triple_fed_by_hand(name: str, length: int) -> None:
    model, prompt = shared("llama"), tokens(length)
    by_hand = functional_caches(TRANSFORMS[name], len(model.layers))
    expected, logits = greedy(model, by_hand, prompt, 12)
    caches = cache_list(model, TRANSFORMS[name])
    chosen, logprobs = generate(model, caches, prompt, 12)
    assert chosen == expected
    assert mx.allclose(logprobs, log_probabilities(logits), atol=tolerance(TRANSFORMS[name], logits))
    assert [cache.offset for cache in caches] == [length + 12] * 2


@pytest.mark.parametrize("name", TRANSFORMS)
def test_stream_generate_gives_the_tokens_of_generate_step(name: str) -> None:
    model, prompt = shared("llama"), tokens(33)
    expected, _ = generate(model, cache_list(model, TRANSFORMS[name]), prompt, 12)
    responses = stream_generate(
        model,
        tokenizer(),
        prompt,
        max_tokens=12,
        prompt_cache=cache_list(model, TRANSFORMS[name]),
        prefill_step_size=CHUNK,
    )
    assert [response.token for response in responses] == expected


@pytest.mark.parametrize("name", TRANSFORMS)
def test_kv_bits_leaves_our_caches_alone(name: str) -> None:
    model, prompt = shared("llama"), tokens(20)
    expected, _ = generate(model, cache_list(model, TRANSFORMS[name]), prompt, 4)
    caches = cache_list(model, TRANSFORMS[name])
    before = list(caches)
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=4,
        prompt_cache=caches,
        prefill_step_size=CHUNK,
        kv_bits=4,
        kv_group_size=32,
        quantized_kv_start=0,
    )
    assert [token for token, _ in steps] == expected
    assert all(cache is same for cache, same in zip(caches, before, strict=True))


@pytest.mark.parametrize(("architecture", "name"), paired(LOSSLESS))
def test_wide_options_give_the_logits_of_the_built_in_cache(architecture: str, name: str) -> None:
    model = shared(architecture)
    calls = [tokens(16, 1), tokens(7, 2), tokens(1, 3), *([token] for token in tokens(6, 4))]
    expected = forced(model, make_prompt_cache(model), calls)
    caches = cache_list(model, LOSSLESS[name])
    assert ours(caches)
    logits = forced(model, caches, calls)
    if name not in CODE_ERROR:
        assert mx.array_equal(logits, expected)
    error = mx.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()).item()
    assert error <= CODE_ERROR.get(name, 0.0)


@pytest.mark.parametrize(("architecture", "name"), paired(TRANSFORMS))
def test_small_options_run_and_bite_in_every_architecture(architecture: str, name: str) -> None:
    model, prompt = shared(architecture), tokens(49)
    caches = cache_list(model, TRANSFORMS[name])
    chosen, logprobs = generate(model, caches, prompt, 4)
    assert mx.isfinite(logprobs).all()
    calls = [prompt[:16], prompt[16:32], prompt[32:48], prompt[48:], *([token] for token in chosen)]
    expected = log_probabilities(forced(model, make_prompt_cache(model), calls)[48:52])
    alone = name == "minicache" and len(ours(caches)) == 1  # which holds rows as they come
    assert mx.allclose(logprobs, expected, atol=1e-2) == alone
    assert {cache.size() for cache in ours(caches)} == {rows_held(name, [len(call) for call in calls])}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_half_precision_models_keep_their_dtype(name: str, dtype: mx.Dtype) -> None:
    model, caches = shared("llama", dtype), cache_list(shared("llama", dtype), TRANSFORMS[name])
    logits = model(mx.array([tokens(17)]), cache=caches)
    logits = model(mx.array([[5]]), cache=caches)
    assert logits.dtype == dtype
    assert mx.isfinite(logits).all()
    keys, values = caches[0].keys_and_values()
    assert (keys.dtype, values.dtype) == (dtype, dtype)


def test_recurrent_layers_keep_their_own_caches() -> None:
    model = shared("lfm2")
    own = [type(cache) for cache in make_prompt_cache(model)]
    kinds = [type(cache) for cache in cache_list(model, TRANSFORMS["h2o"])]
    assert kinds == [TransformKVCache if kind is KVCache else kind for kind in own]
    assert kinds.count(TransformKVCache) == 2


@pytest.mark.parametrize("name", TRANSFORMS)
def test_everything_can_be_asked_before_the_first_token(name: str) -> None:
    cache = TransformKVCache(TRANSFORMS[name])
    assert (cache.offset, cache.size(), cache.nbytes) == (0, 0, 0)
    assert isinstance(cache.offset, int)
    assert cache.empty() is True
    assert bool(cache)
    assert cache.trim(3) == 0
    assert cache.is_trimmable() is TRANSFORMS[name].trimmable
    assert (cache.keys, cache.values) == (None, None)
    assert cache.meta_state == ""
    assert len(cache.state) > 0
    mx.eval(cache.state)
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"


@pytest.mark.parametrize("name", TRANSFORMS)
def test_everything_can_be_asked_after_every_call(name: str) -> None:
    model, calls = shared("llama"), [16, 16, 1, 1, 3]
    caches = cache_list(model, TRANSFORMS[name])
    for i, n in enumerate(calls):
        model(mx.array([tokens(n, i)]), cache=caches)
        for cache in caches:
            assert all(isinstance(array, mx.array) for array in cache.state)
            mx.eval(cache.state)
            assert cache.offset == sum(calls[: i + 1])
            assert cache.size() == rows_held(name, calls[: i + 1])
            assert cache.nbytes == sum(array.nbytes for array in cache.state[1:]) > 0
            assert cache.empty() is False
            keys, values = cache.keys_and_values()
            assert keys.shape == values.shape == (1, 2, cache.size(), 32)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_reading_state_between_calls_changes_nothing(name: str) -> None:
    model, calls = shared("llama"), [tokens(16, 1), tokens(9, 2), *([token] for token in tokens(8, 3))]
    untouched = cache_list(model, TRANSFORMS[name])
    expected = mx.concatenate([model(mx.array([call]), cache=untouched)[0] for call in calls])
    caches = cache_list(model, TRANSFORMS[name])
    rows = []
    for call in calls:
        rows.append(model(mx.array([call]), cache=caches)[0])
        for cache in caches:
            mx.eval(cache.state)
            assert cache.size() <= cache.offset
            cache.make_mask(1)
            cache.keys_and_values()
    assert mx.array_equal(mx.concatenate(rows), expected)


def test_offset_counts_tokens_and_size_counts_rows() -> None:
    cache = TransformKVCache(vq.streaming_llm(n_sink=4, window_size=28))
    for n in [64, *[1] * 200]:
        x = mx.random.normal((1, 2, n, 64), key=mx.random.key(n)).astype(mx.float16)
        mx.eval(cache.update_and_fetch(x, x))
    assert (cache.offset, cache.size()) == (264, 32)


def test_a_prompt_budget_does_not_cap_what_follows() -> None:
    cache = TransformKVCache(vq.snapkv(budget=16, obs_window=6))
    for n in [64, *[1] * 100]:
        x = mx.random.normal((1, 2, n, 64), key=mx.random.key(n)).astype(mx.float16)
        mx.eval(cache.update_and_fetch(x, x))
    assert (cache.offset, cache.size()) == (164, 116)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_attribute_switches_the_attention_path(name: str) -> None:
    cache = TransformKVCache(TRANSFORMS[name])
    assert not any(
        hasattr(cache, word) for word in ("bits", "group_size", "to_quantized", "__len__", "maybe_trim_front")
    )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_call_without_tokens_changes_nothing(name: str) -> None:
    x = mx.random.normal((1, 2, 9, 64), key=mx.random.key(0))
    cache, other = TransformKVCache(TRANSFORMS[name]), TransformKVCache(TRANSFORMS[name])
    for n in (8, 0, 1):
        keys, values = cache.update_and_fetch(x[:, :, :n], x[:, :, :n])
    for n in (8, 1):
        expected = other.update_and_fetch(x[:, :, :n], x[:, :, :n])
    assert (cache.offset, cache.size()) == (other.offset, other.size())
    assert mx.array_equal(keys, expected[0]) and mx.array_equal(values, expected[1])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_refused_call_changes_nothing(name: str) -> None:
    x = mx.random.normal((1, 2, 12, 64), key=mx.random.key(0))
    cache = TransformKVCache(TRANSFORMS[name], max_tokens=12)
    cache.update_and_fetch(x[:, :, :8], x[:, :, :8])
    before = [mx.array(array) for array in cache.state]
    wrong = [
        (x, x),
        (x[:, :1, :2], x[:, :1, :2]),
        (x[..., :2, :32], x[..., :2, :32]),
        (x[:, :, :2], x[:, :, :3]),
        (x[:, :, :2].astype(mx.float16), x[:, :, :2].astype(mx.float16)),
        (x[:, :, :2].astype(mx.int32), x[:, :, :2].astype(mx.int32)),
        (x[0, :, :2], x[0, :, :2]),
        (mx.concatenate([x[:, :, :2]] * 2), mx.concatenate([x[:, :, :2]] * 2)),
    ]
    for keys, values in wrong:
        with pytest.raises(vq.QuantizerConfigError, match=TRANSFORMS[name].name):
            cache.update_and_fetch(keys, values)
        assert cache.offset == 8
        assert all(mx.array_equal(old, new) for old, new in zip(before, cache.state, strict=True))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_fresh_single_cache_takes_a_batch(name: str) -> None:
    model = shared("llama")
    prompts = mx.array([tokens(20, seed) for seed in range(3)])
    caches = cache_list(model, TRANSFORMS[name])
    logits = [model(prompts[:, :16], cache=caches), model(prompts[:, 16:], cache=caches)]
    for row in range(3):
        single = cache_list(model, TRANSFORMS[name])
        for together, part in zip(logits, (prompts[row, :16], prompts[row, 16:]), strict=True):
            alone = feed(model, single, part.tolist())
            assert mx.allclose(together[row], alone, atol=tolerance(TRANSFORMS[name], alone))


class ZeroCache(TransformKVCache):
    """Forgets everything; its answers must differ, or the harness never used the cache."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super().update_and_fetch(keys, values)
        return mx.zeros_like(keys), mx.zeros_like(values)


@pytest.mark.parametrize(("architecture", "name"), paired(LOSSLESS))
def test_a_cache_of_zeros_changes_the_logits(architecture: str, name: str) -> None:
    model = shared(architecture)
    calls = [tokens(16, 1), *([token] for token in tokens(3, 2))]
    expected = forced(model, make_prompt_cache(model), calls)
    caches = cache_list(model, LOSSLESS[name], ZeroCache)
    logits = forced(model, caches, calls)
    assert mx.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()).item() > 0.05
