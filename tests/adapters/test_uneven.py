"""Layers that hold different numbers of rows: the one mask of a model does not fit them all."""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from models import CHUNK, build, feed, greedy, tokens

from vq_adapters import (
    ChunkKVCache,
    ChunkKVOptions,
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    PyramidKVOptions,
    QuantizerConfigError,
    SqueezeAttentionCache,
    SqueezeAttentionOptions,
    SqueezeCoordinator,
    attention_hook,
)

CONFIGS = {
    "pyramidkv": KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=16, pyramid_beta=1.5)),
    "squeeze": KVCacheConfig(method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=16)),
    "list": KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=[24, 30])),
}
CHUNKS = KVCacheConfig(method="chunkkv", options=ChunkKVOptions(chunkkv_budget=[24, 30], chunkkv_chunk_size=4))
PROMPTS = [tokens(length, seed) for seed, length in enumerate((5, 40, 17))]


def for_model(name: str) -> list[Any]:
    return KVCacheBuilder.for_model(build("llama"), CONFIGS[name])


def one_by_one(kind: Any, config: KVCacheConfig) -> list[Any]:
    """Caches that the documented constructor makes a list of."""
    coordinator = SqueezeCoordinator()
    return [kind(config, layer, coordinator) for layer in range(2)]


MADE: dict[str, Callable[[], list[Any]]] = {
    **{name: lambda name=name: for_model(name) for name in CONFIGS},
    "squeeze one by one": lambda: one_by_one(SqueezeAttentionCache, CONFIGS["squeeze"]),
    "chunkkv one by one": lambda: one_by_one(ChunkKVCache, CHUNKS),
}


def answers(model: Any, made: Callable[[], list[Any]]) -> dict[int, list[int]]:
    """Tokens of each prompt, all of them in one batch."""
    generator = BatchGenerator(model, prefill_step_size=CHUNK, prefill_batch_size=3, completion_batch_size=3)
    lists = [made() for _ in PROMPTS]
    uids = generator.insert(PROMPTS, max_tokens=[8] * len(PROMPTS), caches=lists)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while True:
        prompts, responses = generator.next()
        for response in responses:
            found[response.uid].append(response.token)
        if not prompts and not responses:
            return found


@pytest.mark.parametrize("name", MADE)
def test_padded_batches_answer_as_one_by_one_with_the_hook(name: str) -> None:
    model, made = build("llama"), MADE[name]
    with attention_hook(model):
        alone = [greedy(model, made(), prompt, 8)[0] for prompt in PROMPTS]
        assert list(answers(model, made).values()) == alone


@pytest.mark.parametrize("name", MADE)
def test_padded_batches_are_refused_by_name_without_the_hook(name: str) -> None:
    with pytest.raises(QuantizerConfigError, match="needs the attention hook"):
        answers(build("llama"), MADE[name])


@pytest.mark.parametrize("name", MADE)
def test_a_models_own_mask_of_a_first_call_is_taken(name: str) -> None:
    """Nothing has been given up before it, so the mask fits all layers; an image may look ahead."""
    queries, keys, values = (mx.random.normal((1, heads, 9, 32)) for heads in (4, 2, 2))
    mask = mx.ones((9, 9), mx.bool_)
    want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    for cache in MADE[name]():
        got = cache.attend(queries, *cache.update_and_fetch(keys, values), 0.2, mask)
        assert mx.allclose(got, want, atol=1e-5)


def test_a_layer_past_a_list_of_budgets_is_refused() -> None:
    with pytest.raises(QuantizerConfigError, match=r"^chunkkv: `layer_id` must be an integer in \[0, 1\]; got 2"):
        ChunkKVCache(CHUNKS, 2, SqueezeCoordinator())


@pytest.mark.parametrize("name", CONFIGS)
def test_single_sequences_need_no_hook(name: str) -> None:
    model = build("llama")
    caches = for_model(name)
    for start in range(0, 40, 10):
        feed(model, caches, PROMPTS[1][start : start + 10])
    copied = copy.deepcopy(caches)
    assert feed(model, caches, [3]).tolist() == feed(model, copied, [3]).tolist()
    assert len({cache.size() for cache in caches}) > 1 or name == "squeeze"
