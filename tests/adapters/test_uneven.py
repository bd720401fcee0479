"""Layers that hold different numbers of rows: the one mask of a model does not fit them all."""

import copy
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from models import CHUNK, build, feed, greedy, tokens

from vq_adapters import (
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    PyramidKVOptions,
    QuantizerConfigError,
    SqueezeAttentionOptions,
    attention_hook,
)

CONFIGS = {
    "pyramidkv": KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=16, pyramid_beta=1.5)),
    "squeeze": KVCacheConfig(method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=16)),
    "list": KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=[24, 30])),
}
PROMPTS = [tokens(length, seed) for seed, length in enumerate((5, 40, 17))]


def answers(model: Any, config: KVCacheConfig) -> dict[int, list[int]]:
    """Tokens of each prompt, all of them in one batch."""
    generator = BatchGenerator(model, prefill_step_size=CHUNK, prefill_batch_size=3, completion_batch_size=3)
    lists = [KVCacheBuilder.for_model(model, config) for _ in PROMPTS]
    uids = generator.insert(PROMPTS, max_tokens=[8] * len(PROMPTS), caches=lists)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while True:
        prompts, responses = generator.next()
        for response in responses:
            found[response.uid].append(response.token)
        if not prompts and not responses:
            return found


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches_answer_as_one_by_one_with_the_hook(name: str) -> None:
    model, config = build("llama"), CONFIGS[name]
    with attention_hook(model):
        alone = [greedy(model, KVCacheBuilder.for_model(model, config), prompt, 8)[0] for prompt in PROMPTS]
        assert list(answers(model, config).values()) == alone


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches_are_refused_by_name_without_the_hook(name: str) -> None:
    with pytest.raises(QuantizerConfigError, match="needs the attention hook"):
        answers(build("llama"), CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_single_sequences_need_no_hook(name: str) -> None:
    model = build("llama")
    caches = KVCacheBuilder.for_model(model, CONFIGS[name])
    for start in range(0, 40, 10):
        feed(model, caches, PROMPTS[1][start : start + 10])
    copied = copy.deepcopy(caches)
    assert feed(model, caches, [3]).tolist() == feed(model, copied, [3]).tolist()
    assert len({cache.size() for cache in caches}) > 1 or name == "squeeze"
