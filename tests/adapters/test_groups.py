"""Layers of one list that depend on each other: agreed budgets, choices taken over, schedules, a second pass."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from models import CHUNK, FunctionalCache, build, each, feed, forced, greedy, log_probabilities, ours, tokens

import vq_functional as vq
from vq_adapters import (
    ChunkKVCache,
    ChunkKVIndexReuseCoordinator,
    ChunkKVOptions,
    KVCacheBuilder,
    KVCacheConfig,
    KVzipOptions,
    LayerGroup,
    PyramidKVOptions,
    SqueezeAttentionCache,
    SqueezeAttentionOptions,
    SqueezeCoordinator,
    TransformKVCache,
    attention_hook,
    kvzip_prefill,
    load,
    save,
)
from vq_functional import QuantizerConfigError
from vq_functional.evict.pyramidkv import pyramid_budgets
from vq_functional.evict.squeeze import concentration, squeeze_budgets

LAYERS, BUDGET = 4, 24
SQUEEZE = KVCacheConfig(
    method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=BUDGET, squeeze_n_sink=2, squeeze_strength=1.0)
)
CHUNKS = KVCacheConfig(
    method="chunkkv",
    options=ChunkKVOptions(
        chunkkv_budget=BUDGET, chunkkv_chunk_size=4, chunkkv_n_sink=2, chunkkv_score="key_norm", chunkkv_reuse_layers=2
    ),
)
CHUNKS_BY_MASS = KVCacheConfig(
    method="chunkkv",
    options=ChunkKVOptions(chunkkv_budget=BUDGET, chunkkv_chunk_size=4, chunkkv_n_sink=2, chunkkv_reuse_layers=3),
)
PYRAMID = KVCacheConfig(
    method="pyramidkv", options=PyramidKVOptions(pyramid_budget=BUDGET, pyramid_n_sink=2, pyramid_beta=1.6)
)
LISTED = {
    "four": KVCacheConfig(
        method="pyramidkv",
        options=PyramidKVOptions(pyramid_budget=[BUDGET, 8, 40, 5], pyramid_n_sink=2, pyramid_beta=1.0),
    ),
    "two": KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=[24, 8], pyramid_beta=1.0)),
}
CONFIGS = {"squeeze": SQUEEZE, "chunkkv": CHUNKS, "chunkkv by mass": CHUNKS_BY_MASS, "pyramidkv": PYRAMID}
EACH = pytest.mark.parametrize("name", CONFIGS)
HOOKED = pytest.mark.parametrize("hooked", [False, True], ids=["arrays", "hooked"])
# Rows of one batch that differ need masks, and layers that hold different numbers of rows need one each: the hook's.
RAGGED = pytest.mark.parametrize(
    ("name", "hooked"), [*((name, True) for name in CONFIGS), ("chunkkv", False), ("chunkkv by mass", False)]
)
# A prompt in two chunks, single tokens, another prompt, and single tokens again.
CALLS = [
    tokens(50, 1),
    tokens(30, 2),
    *([one] for one in tokens(9, 3)),
    tokens(13, 4),
    *([one] for one in tokens(5, 5)),
]


def uneven() -> nn.Module:
    """A model whose layers differ in how much their keys have in common."""
    model = build("qwen2", num_hidden_layers=LAYERS)
    for factor, layer in zip((0, 1, 3, 9), model.layers):
        layer.self_attn.k_proj.bias = layer.self_attn.k_proj.bias * factor
    return model


def cache_list(model: nn.Module, config: KVCacheConfig | vq.Transform) -> list[Any]:
    return KVCacheBuilder.for_model(model, config)


def hook(model: nn.Module, hooked: bool) -> contextlib.AbstractContextManager[Any]:
    return attention_hook(model) if hooked else contextlib.nullcontext()


def positions(cache: TransformKVCache) -> list[list[list[int]]]:
    """Positions held, rising, by batch row and head."""
    ordered = cache.transform.ordered(cache._settled_state())
    return [[[i for i in head if i >= 0] for head in row] for row in ordered.position.tolist()]


def check_followers(caches: Sequence[Any]) -> None:
    """Every layer of a block holds the positions of its leader."""
    held = [positions(cache) for cache in caches]
    for layer, cache in enumerate(caches):
        leader = cache.transform.leader
        assert held[layer] == held[layer if leader is None else leader]


def together(model: nn.Module, caches: Sequence[Any], rows: Sequence[Sequence[int]]) -> mx.array:
    """Logits [B, S, vocabulary] of one call of a batch."""
    logits = model(mx.array(rows), cache=list(caches)).astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def merged(*lists: Sequence[Any]) -> list[Any]:
    """One list of batch caches."""
    return [type(layer[0]).merge(list(layer)) for layer in zip(*lists)]


# What the layers hold


class Record:
    """Queries, keys and values of every call of a cache."""

    def __init__(self, cache: Any) -> None:
        self.calls: list[list[mx.array]] = []
        update, attend = cache.update_and_fetch, cache.attend

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self.calls.append([keys, values])
            return update(keys, values)

        def attend_and_listen(queries: mx.array, *more: Any, **named: Any) -> mx.array:
            self.calls[-1].append(queries)
            return attend(queries, *more, **named)

        cache.update_and_fetch, cache.attend = update_and_fetch, attend_and_listen


def by_hand(transforms: Sequence[vq.Transform], records: Sequence[Record]) -> Iterator[list[Any]]:
    """States of all layers after each call, from the functional transforms alone."""
    heads, dim = records[0].calls[0][0].shape[1::2]
    spec = vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim, dtype=mx.float32)
    states = [transform.init_state(spec) for transform in transforms]
    for number in range(len(records[0].calls)):
        group = None
        for layer, (transform, record) in enumerate(zip(transforms, records)):
            keys, values, *queries = record.calls[number]
            if number == 0 and transform.agrees:
                asked, held = queries[0] if queries else keys, transform.write(states[layer], keys, values)
                states[layer] = transform.observe(held, asked, proxy=not queries)
            else:
                states[layer], group, *_ = transform.update_in(states[layer], group, keys, values, *queries)
        if number == 0 and transforms[0].agrees:
            first = [record.calls[0][0] for record in records]
            told = [transforms[0].policy.tell(keys, mx.ones((1, keys.shape[2]), mx.bool_)).item() for keys in first]
            budgets = transforms[0].policy.agree(told)
            states = [x.compact(one, mx.array([most]), most) for x, one, most in zip(transforms, states, budgets)]
        yield list(states)


@EACH
@HOOKED
def test_layers_hold_what_the_functional_transforms_keep(name: str, hooked: bool) -> None:
    model = uneven()
    caches = cache_list(model, CONFIGS[name])
    records = [Record(cache) for cache in caches]
    held = []
    with hook(model, hooked):
        for call in CALLS:
            feed(model, caches, call)
            held.append([positions(cache) for cache in caches])
    transforms = [cache.transform for cache in caches]
    assert all(len(call) == 2 + hooked for record in records for call in record.calls)
    for got, states in zip(held, by_hand(transforms, records), strict=True):
        ordered = [transform.ordered(state).position.tolist() for transform, state in zip(transforms, states)]
        assert got == [[[[i for i in head if i >= 0] for head in row] for row in layer] for layer in ordered]


@EACH
@HOOKED
@pytest.mark.parametrize("first", [60, 17, 1])
def test_the_first_call_is_that_of_a_plain_cache(name: str, hooked: bool, first: int) -> None:
    model = uneven()
    want = feed(model, make_prompt_cache(model), tokens(first))
    with hook(model, hooked):
        got = feed(model, cache_list(model, CONFIGS[name]), tokens(first))
    assert mx.array_equal(got, want)


@EACH
def test_the_configuration_stays_as_it_was(name: str) -> None:
    model, config = uneven(), copy.deepcopy(CONFIGS[name])
    caches = cache_list(model, config)
    feed(model, caches, tokens(60))
    assert config == CONFIGS[name]
    assert (config.squeeze_resolved_budget, config.pyramid_resolved_budget) == (None, None)


def run_by_hand(model: nn.Module, caches: Sequence[Any], call: Sequence[int]) -> mx.array:
    """Logits [S, vocabulary] where every layer has the mask of its own cache."""
    hidden = model.model.embed_tokens(mx.array([list(call)]))
    for layer, cache in zip(model.layers, caches, strict=True):
        hidden = layer(hidden, cache.make_mask(len(call)), cache)
    return model.lm_head(model.model.norm(hidden))[0]


@pytest.mark.parametrize("config", [PYRAMID, LISTED["four"]], ids=["schedule", "list"])
def test_layers_of_unequal_budgets_under_one_mask(config: KVCacheConfig) -> None:
    model = uneven()
    caches = cache_list(model, config)
    one_by_one = [FunctionalCache(cache.transform, dim=16) for cache in caches]
    for call in CALLS:
        want = run_by_hand(model, one_by_one, call)
        assert mx.allclose(feed(model, caches, call), want, atol=1e-3)


def test_two_layers_and_a_second_chunk_under_the_mask_of_the_first() -> None:
    """Budgets 24 and 8, a prompt of 40 tokens, then 8 more."""
    model = build("llama")
    caches = cache_list(model, LISTED["two"])
    one_by_one = [FunctionalCache(cache.transform) for cache in caches]
    for call, sizes in ((tokens(40, 1), [24, 8]), (tokens(8, 2), [24, 8]), ([7], [24, 8])):
        want = run_by_hand(model, one_by_one, call)
        assert mx.allclose(feed(model, caches, call), want, atol=1e-3)
        assert [cache.size() for cache in caches] == sizes


# Budgets that are agreed


def told_by(model: nn.Module, call: Sequence[int]) -> list[float]:
    """What each layer's keys of a first call have in common."""
    plain = make_prompt_cache(model)
    feed(model, plain, call)
    return [concentration(cache.keys[:, :, : cache.offset]).item() for cache in plain]


@HOOKED
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_budgets_come_from_the_first_call_of_all_layers(strength: float, hooked: bool) -> None:
    model = uneven()
    options = SqueezeAttentionOptions(squeeze_budget=BUDGET, squeeze_n_sink=2, squeeze_strength=strength)
    caches = cache_list(model, KVCacheConfig(method="squeeze", options=options))
    least = caches[0].transform.policy.shielded
    want = squeeze_budgets(told_by(model, CALLS[0]), BUDGET, strength, least)
    with hook(model, hooked):
        for call in CALLS:
            feed(model, caches, call)
            assert [cache.size() for cache in caches] == [cache.layer_budget for cache in caches] == want
    assert sum(want) <= LAYERS * BUDGET
    assert max(want) > BUDGET > min(want) or strength == 0
    assert strength > 0 or want == [BUDGET] * LAYERS
    assert [round(cache.concentration, 4) for cache in caches] == [round(one, 4) for one in told_by(model, CALLS[0])]


def test_a_short_first_call_sets_budgets_that_later_calls_fill() -> None:
    model = uneven()
    caches = cache_list(model, SQUEEZE)
    least = caches[0].transform.policy.shielded
    want = squeeze_budgets(told_by(model, tokens(12)), BUDGET, 1.0, least)
    feed(model, caches, tokens(12))
    assert [cache.size() for cache in caches] == [min(12, one) for one in want]
    for seen, call in ((62, tokens(50, 1)), (63, [5])):
        feed(model, caches, call)
        assert [cache.size() for cache in caches] == want and caches[0].offset == seen
    assert max(want) > BUDGET


def test_a_first_call_of_one_token_leaves_budgets_equal() -> None:
    model = uneven()
    caches = cache_list(model, SQUEEZE)
    for call in ([3], tokens(60)):
        feed(model, caches, call)
    assert [cache.size() for cache in caches] == [BUDGET] * LAYERS


def test_a_transform_for_all_layers_agrees_too() -> None:
    model = uneven()
    caches = cache_list(model, vq.squeeze(budget=BUDGET, n_sink=2, recent=3))
    feed(model, caches, CALLS[0])
    want = squeeze_budgets(told_by(model, CALLS[0]), BUDGET, 1.0, 5)
    assert [cache.size() for cache in caches] == want


def random_rows(n: int, seed: int, batch: int = 1, pull: float = 0.0) -> list[mx.array]:
    """Keys and values [batch, 2, n, 16]; keys with a common direction of size `pull`."""
    draw = mx.random.split(mx.random.key(seed), 3)
    keys, values = (mx.random.normal((batch, 2, n, 16), key=key) for key in draw[:2])
    return [keys + pull * mx.random.normal((1, 2, 1, 16), key=draw[2]), values]


def manual(layers: int, group: Any) -> list[SqueezeAttentionCache]:
    return [SqueezeAttentionCache(SQUEEZE, layer_id=layer, coordinator=group) for layer in range(layers)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_the_order_of_reports_does_not_matter(order: list[int]) -> None:
    caches = manual(3, SqueezeCoordinator())
    for layer in order:
        caches[layer].update_and_fetch(*random_rows(50, layer, pull=[0.0, 0.5, 2.0][layer]))
    told = [cache.concentration for cache in caches]
    want = squeeze_budgets(told, BUDGET, 1.0, caches[0].transform.policy.shielded)
    assert [caches[layer].size() for layer in order] == [want[layer] for layer in order]
    assert len(set(want)) == 3


def test_a_layer_that_never_runs_does_not_count() -> None:
    caches = manual(3, SqueezeCoordinator())
    for layer in (0, 2):
        caches[layer].update_and_fetch(*random_rows(50, layer, pull=float(layer)))
    told = [caches[layer].concentration for layer in (0, 2)]
    want = squeeze_budgets(told, BUDGET, 1.0, caches[0].transform.policy.shielded)
    assert [caches[layer].size() for layer in (0, 2)] == want
    assert caches[1].size() == 0 and caches[1].concentration == 0.0


def test_a_layer_on_its_own_has_the_mean_budget_at_once() -> None:
    for cache in (SqueezeAttentionCache(SQUEEZE), TransformKVCache(vq.squeeze(budget=BUDGET, n_sink=2))):
        cache.update_and_fetch(*random_rows(50, 1))
        assert cache.size() == BUDGET


def test_a_resolved_budget_takes_no_part() -> None:
    model = uneven()
    options = SqueezeAttentionOptions(squeeze_budget=BUDGET, squeeze_n_sink=2, squeeze_resolved_budget=30)
    caches = cache_list(model, KVCacheConfig(method="squeeze", options=options))
    feed(model, caches, tokens(60))
    assert [cache.size() for cache in caches] == [30] * LAYERS


def test_batch_rows_agree_each_for_itself() -> None:
    """Numbers of one row that are none change no budget of another."""
    caches, lone = manual(2, SqueezeCoordinator()), manual(2, SqueezeCoordinator())
    for layer in range(2):
        keys, values = random_rows(50, layer, batch=2, pull=2.0 * layer)
        lone[layer].update_and_fetch(keys[1:], values[1:])
        keys[0, 0, 7, 3] = mx.nan
        caches[layer].update_and_fetch(keys, values)
    for one, other in zip(caches, lone):
        assert positions(one)[1] == positions(other)[0]


# Choices that are taken over


@pytest.mark.parametrize("config", [CHUNKS, CHUNKS_BY_MASS], ids=["two", "three"])
@HOOKED
def test_followers_hold_the_positions_of_their_leader_at_every_step(config: KVCacheConfig, hooked: bool) -> None:
    model = build("llama", num_hidden_layers=5)
    caches = cache_list(model, config)
    size = config.chunkkv_reuse_layers
    assert [cache.is_index_reuse_leader for cache in caches] == [layer % size == 0 for layer in range(5)]
    with hook(model, hooked):
        for call in CALLS:
            feed(model, caches, call)
            check_followers(caches)
    leaders = [positions(cache) for cache in caches[::size]]
    assert len(caches[0].keys) == 1 and (config is CHUNKS_BY_MASS or leaders[0] != leaders[1])


@HOOKED
def test_blocks_of_one_layer_are_independent(hooked: bool) -> None:
    """Each layer as a list of its own would have it."""
    model = uneven()
    options = ChunkKVOptions(chunkkv_budget=BUDGET, chunkkv_chunk_size=4, chunkkv_n_sink=2, chunkkv_score="key_norm")
    caches = cache_list(model, KVCacheConfig(method="chunkkv", options=options))
    alone = [TransformKVCache(cache.transform) for cache in caches]
    with hook(model, hooked):
        assert mx.array_equal(forced(model, caches, CALLS), forced(model, alone, CALLS))
    assert len({str(positions(cache)) for cache in caches}) == LAYERS


def test_layers_that_are_not_replaced_belong_to_no_block() -> None:
    """Of four layers only the second and the last have attention."""
    model = build("lfm2")
    caches = cache_list(model, CHUNKS)
    for call in CALLS:
        feed(model, caches, call)
        block = ours(caches)
        assert [cache.is_index_reuse_leader for cache in block] == [True, False]
        assert positions(block[0]) == positions(block[1])
    assert [cache.transform.policy.budget for cache in ours(cache_list(model, PYRAMID))] == [
        cache.layer_budget for cache in cache_list(build("llama"), PYRAMID)
    ]


def test_caches_made_one_by_one_form_blocks_through_a_coordinator() -> None:
    model, group = uneven(), ChunkKVIndexReuseCoordinator()
    caches = [ChunkKVCache(CHUNKS, layer_id=layer, coordinator=group) for layer in range(LAYERS)]
    other = cache_list(model, CHUNKS)
    for call in CALLS:
        assert mx.array_equal(feed(model, caches, call), feed(model, other, call))
        check_followers(caches)


def test_a_follower_without_its_leader_raises() -> None:
    group = ChunkKVIndexReuseCoordinator()
    leader, follower = (ChunkKVCache(CHUNKS, layer_id=layer, coordinator=group) for layer in range(2))
    leader.update_and_fetch(*random_rows(50, 1))
    follower.update_and_fetch(*random_rows(50, 2))
    assert positions(leader) == positions(follower)
    follower.update_and_fetch(*random_rows(1, 3))
    with pytest.raises(RuntimeError, match=r"^chunkkv: "):
        follower.size()


# Schedules


def test_every_layer_has_its_place_in_the_schedule() -> None:
    model = uneven()
    caches = cache_list(model, PYRAMID)
    want = pyramid_budgets(LAYERS, BUDGET, 1.6, least=3)
    assert [cache.transform.policy.budget for cache in caches] == want
    assert sum(want) <= LAYERS * BUDGET and len(set(want)) == LAYERS
    for call in CALLS:
        feed(model, caches, call)
        assert [cache.size() for cache in caches] == [cache.layer_budget for cache in caches] == want


# Lists apart


@EACH
@HOOKED
def test_two_lists_never_mix(name: str, hooked: bool) -> None:
    """Two prompts of other lengths, call by call in turn."""
    model = uneven()
    plans = [CALLS, [tokens(25, 7), *([one] for one in tokens(15, 8)), tokens(33, 9), [1], [2]]]
    with hook(model, hooked):
        want = [
            [feed(model, caches, call) for call in plan]
            for plan in plans
            for caches in [cache_list(model, CONFIGS[name])]
        ]
        lists, got = [cache_list(model, CONFIGS[name]) for _ in plans], [[], []]
        for turn in range(max(map(len, plans))):
            for which, plan in enumerate(plans):
                if turn < len(plan):
                    got[which].append(feed(model, lists[which], plan[turn]))
    for one, other in zip(got, want):
        assert all(mx.array_equal(x, y) for x, y in zip(one, other, strict=True))


COPIES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "list": copy.deepcopy,
    "layers": lambda caches: [copy.deepcopy(cache) for cache in caches],
}


@EACH
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("after", [0, 1, 2, 7])
def test_copies_go_on_alone(name: str, way: str, after: int) -> None:
    """Copied before the first call, while layers still wait for each other, and later."""
    model = uneven()
    caches = cache_list(model, CONFIGS[name])
    for call in CALLS[:after]:
        mx.eval(model(mx.array([call]), cache=caches))
    copies = [COPIES[way](caches) for _ in range(2)]
    other = [tokens(40, 11), [3], [4], tokens(9, 12)]
    got = [
        forced(model, copies[0], CALLS[after:]),
        forced(model, copies[1], other),
        forced(model, caches, CALLS[after:]),
    ]
    fresh = [cache_list(model, CONFIGS[name]) for _ in range(2)]
    want = [
        forced(model, one, [*CALLS[:after], *rest])[-len(x) :]
        for one, rest, x in zip(fresh, (CALLS[after:], other), got)
    ]
    assert mx.allclose(got[0], want[0], atol=1e-4) and mx.allclose(got[2], want[0], atol=1e-4)
    assert mx.allclose(got[1], want[1], atol=1e-4)
    if "chunkkv" in name:
        for one in (*copies, caches):
            check_followers(one)


@EACH
@HOOKED
def test_a_copy_in_turn_with_its_original(name: str, hooked: bool) -> None:
    model = uneven()
    caches = cache_list(model, CONFIGS[name])
    with hook(model, hooked):
        feed(model, caches, CALLS[0])
        twin = copy.deepcopy(caches)
        for call in CALLS[1:]:
            assert mx.array_equal(feed(model, caches, call), feed(model, twin, call))


# Batches


def batch_answers(
    model: nn.Module, prompts: Sequence[list[int]], counts: Sequence[int], lists: Sequence[list[Any]], late: int = 0
) -> list[tuple[list[int], list[mx.array]]]:
    """Tokens and their log-probabilities of each request; the last `late` ones join a running batch."""
    generator = BatchGenerator(model, prefill_step_size=CHUNK, prefill_batch_size=2, completion_batch_size=4)
    early = len(prompts) - late
    uids = list(generator.insert(list(prompts[:early]), max_tokens=list(counts[:early]), caches=list(lists[:early])))
    said: dict[int, tuple[list[int], list[mx.array]]] = {}
    for turn in range(10_000):
        if turn == 4 and late:
            more = (list(prompts[early:]), list(counts[early:]), list(lists[early:]))
            uids += generator.insert(more[0], max_tokens=more[1], caches=more[2])
        fed, responses = generator.next()
        for response in responses:
            token, logprobs = said.setdefault(response.uid, ([], []))
            token.append(response.token)
            logprobs.append(response.logprobs)
        if not fed and not responses and turn > 4:
            return [said[uid] for uid in uids]
    raise AssertionError("the generator does not end")


@RAGGED
@pytest.mark.parametrize("late", [0, 3])
def test_a_batch_answers_as_one_by_one(name: str, hooked: bool, late: int) -> None:
    model = uneven()
    prompts = [tokens(length, seed) for seed, length in enumerate((5, 60, 17, 40, 1, 50))]
    counts = [12, 6, 15, 3, 9, 4]
    with hook(model, hooked):
        want = [greedy(model, cache_list(model, CONFIGS[name]), *pair) for pair in zip(prompts, counts)]
        got = batch_answers(model, prompts, counts, [cache_list(model, CONFIGS[name]) for _ in prompts], late)
    for (said, logprobs), (chosen, logits) in zip(got, want, strict=True):
        assert said == chosen
        assert mx.allclose(mx.stack(logprobs), log_probabilities(logits), atol=1e-3)


def fed(model: nn.Module, config: KVCacheConfig, *calls: Sequence[int]) -> list[Any]:
    caches = cache_list(model, config)
    for call in calls:
        feed(model, caches, call)
    return caches


def same_steps(model: nn.Module, batch: list[Any], singles: Sequence[list[Any]], calls: Sequence[Any]) -> None:
    """The batch goes on as the single lists do; all get the same tokens."""
    for call in calls:
        logits = together(model, batch, [call] * len(singles))
        for row, single in enumerate(singles):
            assert mx.allclose(logits[row], feed(model, single, call), atol=1e-3)
            assert [positions(cache)[row] for cache in batch] == [positions(cache)[0] for cache in single]


LATER = [[5], [6], tokens(11, 20), [7], [8]]


@RAGGED
def test_lists_merge_extend_leave_and_part(name: str, hooked: bool) -> None:
    model = uneven()
    pasts = [(tokens(50, 1), [2]), (tokens(9, 2),), (tokens(16, 3), tokens(40, 4)), (tokens(30, 5),)]
    with hook(model, hooked):
        singles = [fed(model, CONFIGS[name], *calls) for calls in pasts]
        batch = merged(*copy.deepcopy(singles[:2]))
        same_steps(model, batch, singles[:2], LATER)
        more = merged(*copy.deepcopy(singles[2:]))
        same_steps(model, more, singles[2:], LATER[:2])
        for cache, other in zip(batch, more):
            cache.extend(other)
        same_steps(model, batch, singles, LATER)
        for cache in batch:
            cache.filter([3, 0, 2])
        same_steps(model, batch, [singles[row] for row in (3, 0, 2)], LATER)
        taken = [[cache.extract(row) for cache in batch] for row in range(3)]
        for row, single in zip((3, 0, 2), taken):
            for call in LATER:
                got = feed(model, single, call)
                assert mx.allclose(got, feed(model, singles[row], call), atol=1e-3)
                assert [positions(cache) for cache in single] == [positions(cache) for cache in singles[row]]


@RAGGED
def test_a_padded_first_prompt_of_a_batch(name: str, hooked: bool) -> None:
    """In chunks of 32, padded on the right: no, some or all columns of a row are padding."""
    model, lengths = uneven(), [50, 9, 41, 33]
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    with hook(model, hooked):
        singles = [cache_list(model, CONFIGS[name]) for _ in prompts]
        batch = merged(*(cache_list(model, CONFIGS[name]) for _ in prompts))
        for cache in batch:
            cache.prepare(lengths=lengths, right_padding=[50 - length for length in lengths])
        padded = [prompt + [0] * (50 - len(prompt)) for prompt in prompts]
        for start, end in ((0, 32), (32, 50)):
            logits = together(model, batch, [prompt[start:end] for prompt in padded])
            for row, prompt in enumerate(prompts):
                if part := prompt[start:end]:
                    assert mx.allclose(logits[row, : len(part)], feed(model, singles[row], part), atol=1e-3)
        for cache in batch:
            cache.finalize()
        same_steps(model, batch, singles, LATER)


@EACH
def test_followers_and_budgets_of_a_batch(name: str) -> None:
    """A batch of equal prompts holds what one of them does, in every row."""
    model = uneven()
    single, batch = cache_list(model, CONFIGS[name]), merged(*(cache_list(model, CONFIGS[name]) for _ in range(2)))
    for call in CALLS:
        feed(model, single, call)
        together(model, batch, [call] * 2)
        for one, other in zip(batch, single):
            assert positions(one) == positions(other) * 2
        if "chunkkv" in name:
            check_followers(batch)


# Files


FILES: dict[str, tuple[Callable[..., None], Callable[[str], Any]]] = {
    "ours": (save, load),
    "mlx_lm": (save_prompt_cache, load_prompt_cache),
}


@EACH
@HOOKED
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("after", [1, 2, 7])
def test_loaded_lists_go_on_as_before(name: str, hooked: bool, files: str, after: int, tmp_path: Path) -> None:
    """Two of them at once, and the list that was saved."""
    model = uneven()
    path, (write, read) = str(tmp_path / "caches.safetensors"), FILES[files]
    caches = cache_list(model, CONFIGS[name])
    with hook(model, hooked):
        for call in CALLS[:after]:
            mx.eval(model(mx.array([call]), cache=caches))
        write(path, caches)
        loaded = [read(path), read(path)]
        for one in loaded:
            assert [type(cache) for cache in one] == [type(cache) for cache in caches]
            assert [cache.size() for cache in one] == [cache.size() for cache in caches]
        for call in CALLS[after:]:
            want = feed(model, caches, call)
            for one in loaded:
                assert mx.array_equal(feed(model, one, call), want)
                assert [positions(cache) for cache in one] == [positions(cache) for cache in caches]


@EACH
def test_an_empty_list_comes_back_as_one_list(name: str, tmp_path: Path) -> None:
    model = uneven()
    caches = cache_list(model, CONFIGS[name])
    save(tmp_path / "caches", caches)
    back = load(tmp_path / "caches")
    assert mx.array_equal(forced(model, back, CALLS), forced(model, caches, CALLS))
    assert [positions(cache) for cache in back] == [positions(cache) for cache in caches]


@EACH
def test_a_saved_batch_comes_back(name: str, tmp_path: Path) -> None:
    model = uneven()
    with attention_hook(model):
        batch = merged(fed(model, CONFIGS[name], CALLS[0]), fed(model, CONFIGS[name], tokens(30, 9), [4]))
        save(tmp_path / "caches", batch)
        back = load(tmp_path / "caches")
        for call in LATER:
            assert mx.array_equal(together(model, back, [call] * 2), together(model, batch, [call] * 2))
            assert [positions(cache) for cache in back] == [positions(cache) for cache in batch]


@pytest.mark.parametrize("name", ["squeeze", "pyramidkv"])
@pytest.mark.parametrize("calls", [[[4]], [tokens(9)]], ids=["one", "several"])
def test_rows_that_differ_are_refused_by_name_without_the_hook(name: str, calls: list[list[int]]) -> None:
    """Also in the first call after a merge of lists that have never had it."""
    model = uneven()
    batch = merged(fed(model, CONFIGS[name], CALLS[0]), fed(model, CONFIGS[name], tokens(30, 9), [4]))
    with pytest.raises(QuantizerConfigError, match="needs the attention hook"):
        for call in calls:
            together(model, batch, [call] * 2)


@RAGGED
def test_fresh_lists_join_a_batch_that_has_begun(name: str, hooked: bool) -> None:
    """Their first call is like that of a list of its own."""
    model = uneven()
    with hook(model, hooked):
        singles = [fed(model, CONFIGS[name], CALLS[0], [2]), cache_list(model, CONFIGS[name])]
        batch = merged(*copy.deepcopy(singles))
        same_steps(model, batch, singles, [tokens(60, 21), *LATER])


# The group itself


def test_all_agree_once_until_a_layer_tells_again() -> None:
    group, asked = LayerGroup(), []
    for layer, told in ((2, 0.9), (0, 0.1)):
        group.tell(layer, mx.array([told, 0.5]))

    def agree(told: Sequence[float]) -> list[int]:
        asked.append([round(one, 3) for one in told])
        return [round(10 * one) for one in told]

    assert group.agreed(2, agree) == [9, 5] and group.agreed(0, agree) == [1, 5]
    assert asked == [[0.1, 0.9], [0.5, 0.5]]
    assert group.told(1) is None
    group.tell(0, mx.array([0.3]))
    assert group.told(2) is None and group.agreed(0, agree) == [3]


def test_what_a_leader_chose_is_for_the_same_call_only() -> None:
    group = LayerGroup()
    assert group.handed(0, [5]) is None
    group.hand_on(0, [5], "chosen")
    assert group.handed(0, [5]) == "chosen"
    assert group.handed(0, [6]) is None and group.handed(0, [5, 5]) is None and group.handed(1, [5]) is None


def test_lists_made_in_one_way_have_one_group_each() -> None:
    group = LayerGroup()
    caches = [[TransformKVCache(vq.rows()) for _ in range(2)] for _ in range(2)]
    groups = []
    for one in caches:
        for layer, cache in enumerate(one):
            cache.join(group.descend("copy", layer), layer)
        assert one[0]._group is one[1]._group is not group
        groups.append(one[0]._group)
    assert groups[0] is not groups[1]


@EACH
def test_a_layer_taken_by_itself_belongs_to_no_later_list(name: str, tmp_path: Path) -> None:
    """Whether it was copied or loaded, and while it lives."""
    model, layer = uneven(), LAYERS // 2
    caches = cache_list(model, CONFIGS[name])
    save(tmp_path / "caches", caches)
    alone = [copy.deepcopy(caches[layer]), load(tmp_path / "caches")[layer]]
    copied, loaded = copy.deepcopy(caches), load(tmp_path / "caches")
    want = forced(model, caches, CALLS[:3])
    assert mx.array_equal(forced(model, copied, CALLS[:3]), want)
    assert mx.array_equal(forced(model, loaded, CALLS[:3]), want)
    for one, group in zip(alone, (copied[0]._group, loaded[0]._group), strict=True):
        assert one._group is not group and len(group.members()) == LAYERS


# The pass that repeats the context


def kvzip_list(model: nn.Module, budget: int = BUDGET, n_sink: int = 2) -> list[Any]:
    options = KVzipOptions(kvzip_budget=budget, kvzip_n_sink=n_sink)
    return cache_list(model, KVCacheConfig(method="kvzip", options=options))


@HOOKED
@pytest.mark.parametrize(("chunk", "instruction"), [(2048, ()), (16, ()), (60, (5, 6, 7)), (7, [1])], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "gemma4_text", "falcon_h1"])
def test_the_pass_leaves_no_row_behind(architecture: str, chunk: int, instruction: Any, hooked: bool) -> None:
    model, prompt = build(architecture), mx.array(tokens(60))
    caches, plain = kvzip_list(model), make_prompt_cache(model)
    want = mx.concatenate([feed(model, plain, tokens(60)[start : start + chunk]) for start in range(0, 60, chunk)])
    with hook(model, hooked):
        logits = kvzip_prefill(model, caches, prompt, chunk=chunk, instruction=instruction)
    assert logits.shape == (1, 96) and mx.allclose(logits[0], want[-1], atol=2e-3)
    for cache, other in zip(each(caches), each(plain)):
        assert getattr(cache, "offset", 60) == getattr(other, "offset", 60)
        if isinstance(cache, TransformKVCache):
            assert (cache.size(), cache.keys.shape[2], cache.offset) == (BUDGET, BUDGET, 60)
            for held in positions(cache)[0]:
                assert held[:2] == [0, 1] and max(held) < 60
    got = feed(model, caches, [3])
    assert mx.isfinite(got).all() and [cache.size() for cache in ours(caches)] == [BUDGET] * len(ours(caches))


@HOOKED
@pytest.mark.parametrize("budget", [60, 200])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "gemma4_text", "falcon_h1"])
def test_with_room_for_the_whole_prompt_it_is_a_plain_cache(architecture: str, budget: int, hooked: bool) -> None:
    model, caches = build(architecture), kvzip_list(build(architecture), budget=budget)
    plain = make_prompt_cache(model)
    want = [feed(model, plain, tokens(60))[-1], feed(model, plain, [3])[0]]
    with hook(model, hooked):
        logits = kvzip_prefill(model, caches, mx.array([tokens(60)]), chunk=25, instruction=[4, 5])
        assert mx.allclose(logits[0], want[0], atol=2e-3)
        for cache in ours(caches):
            assert positions(cache) == [[list(range(60))] * len(positions(cache)[0])]
        assert mx.allclose(feed(model, caches, [3])[0], want[1], atol=2e-3)


def repeated(model: nn.Module, asked: Sequence[int], start: int) -> list[np.ndarray]:
    """Queries [Hq, S, D] and keys [H, S, D] of the first layer for tokens at `start` and after."""
    layer, attention = model.layers[0], model.layers[0].self_attn
    hidden = layer.input_layernorm(model.model.embed_tokens(mx.array([list(asked)])))
    out = []
    for project, heads in ((attention.q_proj, attention.n_heads), (attention.k_proj, attention.n_kv_heads)):
        x = project(hidden).reshape(1, len(asked), heads, -1).transpose(0, 2, 1, 3)
        out.append(np.array(attention.rope(x, offset=start)[0]).astype(np.float64))
    return out


@pytest.mark.parametrize(("chunk", "instruction"), [(2048, []), (16, []), (25, [5, 6, 7])], ids=str)
def test_rows_stay_that_the_repetition_attends_to(chunk: int, instruction: list[int]) -> None:
    """One layer, whose queries depend on no cache: sinks, rows of the chunk, and the repeated keys up to the query."""
    model, prompt = build("llama", num_hidden_layers=1), tokens(60)
    caches = kvzip_list(model)
    kvzip_prefill(model, caches, mx.array(prompt), chunk=chunk, instruction=instruction)
    keys = repeated(model, prompt, 0)[1]
    importance = np.zeros((2, 60))
    for start in range(0, 60, chunk):
        end = min(start + chunk, 60)
        queries, own = repeated(model, [*instruction, *prompt[start:end]], 60)
        columns = sorted({0, 1} | set(range(start, end)))
        for head, query in np.ndindex(2, 2):
            for token in range(own.shape[1]):
                seen = np.concatenate([keys[head, columns], own[head, : token + 1]])
                weights = np.exp(seen @ queries[2 * head + query, token] / np.sqrt(32))
                shares = (weights / weights.sum())[: len(columns)]
                importance[head, columns] = np.maximum(importance[head, columns], shares)
    for head, held in enumerate(positions(caches[0])[0]):
        ranked = sorted(range(2, 60), key=lambda i: -importance[head, i])[: BUDGET - 2]
        assert held == sorted([0, 1, *ranked])


def test_the_hook_is_gone_after_the_pass() -> None:
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    kvzip_prefill(model, kvzip_list(model), mx.array(tokens(40)))
    assert [type(module) for module in model.modules()] == kinds


def test_prompts_shorter_than_the_budget_and_of_one_token() -> None:
    model = build("llama")
    for length in (1, 2, BUDGET, BUDGET + 1):
        caches = kvzip_list(model)
        kvzip_prefill(model, caches, mx.array(tokens(length)), chunk=8)
        assert [cache.size() for cache in caches] == [min(length, BUDGET)] * 2
        assert [cache.offset for cache in caches] == [length] * 2


def test_the_prefill_goes_on_in_files_copies_and_batches(tmp_path: Path) -> None:
    model = build("llama")
    caches = kvzip_list(model)
    kvzip_prefill(model, caches, mx.array(tokens(60)))
    save(tmp_path / "caches", caches)
    others = [load(tmp_path / "caches"), copy.deepcopy(caches)]
    batch = merged(copy.deepcopy(caches), copy.deepcopy(caches))
    for call in LATER:
        want = feed(model, caches, call)
        for other in others:
            assert mx.array_equal(feed(model, other, call), want)
        assert mx.allclose(together(model, batch, [call] * 2), want[None], atol=1e-3)


def test_the_pass_needs_empty_caches_of_kvzip() -> None:
    model = build("llama")
    prompt = mx.array(tokens(30))
    latest = cache_list(model, KVCacheConfig(method="kvzip", options=KVzipOptions(kvzip_probe="latest")))
    begun = kvzip_list(model)
    feed(model, begun, tokens(5))
    for caches in ([KVCache(), KVCache()], latest, begun, cache_list(model, vq.h2o(budget=30))):
        sizes = [cache.offset for cache in caches]
        with pytest.raises(QuantizerConfigError, match=r"^kvzip_prefill: `caches`"):
            kvzip_prefill(model, caches, prompt)
        assert [cache.offset for cache in caches] == sizes
    with pytest.raises(QuantizerConfigError, match=r"^kvzip_prefill: `chunk`"):
        kvzip_prefill(model, kvzip_list(model), prompt, chunk=0)
    for wrong in (mx.array([tokens(10)] * 2), mx.array([], mx.int32), mx.array([[]], mx.int32)):
        caches = kvzip_list(model)
        with pytest.raises(QuantizerConfigError, match=r"^kvzip_prefill: `tokens` must be one prompt"):
            kvzip_prefill(model, caches, wrong)
        assert not any(cache._holds for cache in caches)
