"""The attention hook: the same answers, the right queries, and no trace once it is undone."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import (
    ARCHITECTURES,
    BY_QUERIES,
    LOSSLESS,
    SMALL,
    TRANSFORMS,
    build,
    cache_list,
    feed,
    forced,
    ours,
    paired,
    tokens,
)

import vq_functional as vq
from vq_adapters import TransformKVCache, attention_hook, install_attention
from vq_adapters.hook import hooked
from vq_functional.core.transform import Transform
from vq_functional.methods import TABLE

WAYS = ("instance", "module")
# The same, but that attention leaves no row out: pages are long, and all rows are found.
ALL_ROWS: dict[str, dict[str, Any]] = {"rocketkv": {"page_size": 3}, "a2ats": {"retrieval_fraction": 1.0}}
PAGED = [row for row in TABLE if "pages" in row.traits]
WHOLE = {**TRANSFORMS, **{row.name: row.build(**{**SMALL[row.name], **ALL_ROWS[row.name]}) for row in PAGED}}
WITHOUT_QUERIES = [name for name in TRANSFORMS if name not in BY_QUERIES]
# Models that hand the returned keys and values to mlx_lm's attention as they are.
ATTENDING = [name for name in ARCHITECTURES if name not in ("gemma2", "plamo", "stablelm", "deepseek_v3")]
# A long prompt, a call short enough for codes, the longest of these and the first that is not, and single tokens.
CALLS = [tokens(40, 1), tokens(5, 2), tokens(8, 3), tokens(9, 4), *([token] for token in tokens(5, 5))]


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def attention_names(model: nn.Module) -> dict[str, Any]:
    """What each module that defines a part of the model calls attention."""
    modules = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    return {name: getattr(sys.modules[name], "scaled_dot_product_attention", None) for name in modules}


def close(logits: mx.array, expected: mx.array) -> bool:
    """To 2e-3 of the size of the logits, which differs between architectures."""
    return mx.allclose(logits, expected, atol=2e-3 * max(1.0, mx.std(expected).item())).item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("architecture", "name"), paired(WITHOUT_QUERIES))
def test_methods_without_a_query_rule_answer_the_same(architecture: str, name: str, way: str) -> None:
    model = build(architecture)
    expected = forced(model, cache_list(model, WHOLE[name]), CALLS)
    with attention_hook(model, way):
        logits = forced(model, cache_list(model, WHOLE[name]), CALLS)
    assert close(logits, expected)


@pytest.mark.parametrize(("architecture", "name"), paired(sorted(BY_QUERIES)))
def test_methods_with_a_query_rule_answer_the_same_while_nothing_is_evicted(architecture: str, name: str) -> None:
    model = build(architecture)
    expected = forced(model, cache_list(model, LOSSLESS[name]), CALLS)
    with attention_hook(model):
        logits = forced(model, cache_list(model, LOSSLESS[name]), CALLS)
        small = forced(model, cache_list(model, TRANSFORMS[name]), CALLS)
    assert close(logits, expected)
    assert mx.isfinite(small).all()


@pytest.mark.parametrize("way", WAYS)
def test_plain_caches_are_not_touched(way: str) -> None:
    model = build("llama")
    expected = forced(model, make_prompt_cache(model), CALLS)
    with attention_hook(model, way):
        assert mx.array_equal(forced(model, make_prompt_cache(model), CALLS), expected)
        assert mx.array_equal(model(mx.array([CALLS[0]]))[0], expected[:40])


class Watched(TransformKVCache):
    """Counts the calls whose attention it computed itself."""

    attended = 0

    def attend(self, *arguments: Any, **more: Any) -> mx.array:
        self.attended += 1
        return super().attend(*arguments, **more)


def watched(model: nn.Module, transform: Transform) -> list[Any]:
    return [Watched(transform) if type(cache) is KVCache else cache for cache in make_prompt_cache(model)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_reaches_the_caches_where_a_model_allows_it(architecture: str, way: str) -> None:
    model = build(architecture)
    caches = watched(model, TRANSFORMS["turboquant_mse"])
    with attention_hook(model, way):
        forced(model, caches, CALLS)
    reached = sum(cache.attended for cache in ours(caches))
    if architecture in ATTENDING:
        assert reached >= len(CALLS) * len(ours(caches))
    else:
        assert reached == 0
    before = reached
    forced(model, caches, [[1]])
    assert sum(cache.attended for cache in ours(caches)) == before


def test_a_cache_that_attends_to_nothing_changes_the_logits() -> None:
    class Blind(TransformKVCache):
        def attend(self, queries: mx.array, *_: Any, **__: Any) -> mx.array:
            return mx.zeros_like(queries)

    model = build("llama")
    expected = forced(model, cache_list(model, TRANSFORMS["qjl"]), CALLS)
    with attention_hook(model):
        blind = forced(model, [Blind(TRANSFORMS["qjl"]) for _ in model.layers], CALLS)
    assert not mx.allclose(blind, expected, atol=0.1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_half_precision_models_keep_their_dtype(name: str, dtype: mx.Dtype) -> None:
    model = build("llama", dtype)
    caches = cache_list(model, TRANSFORMS[name])
    with attention_hook(model):
        for call in CALLS:
            logits = model(mx.array([call]), cache=caches)
            assert logits.dtype == dtype
            assert mx.isfinite(logits).all()


# Real queries


def held_rows(keys: mx.array, values: mx.array) -> list[set[bytes]]:
    """The rows of each head, in no order."""
    rows = np.array(mx.concatenate([keys, values], axis=-1)[0].astype(mx.float32))
    return [{row.tobytes() for row in head} for head in rows]


def by_hand(transform: Transform, calls: list[tuple[mx.array, ...]], with_queries: bool) -> list[set[bytes]]:
    """Rows that the functional transform keeps after the recorded (queries, keys, values)."""
    heads, dim = calls[0][1].shape[1], calls[0][1].shape[3]
    spec = vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim, dtype=mx.float32, capacity=128)
    state = transform.init_state(spec)
    for queries, keys, values in calls:
        state, _, _ = transform.update(state, keys, values, queries=queries if with_queries else None)
    keys, values = transform.read(state)
    live = np.array(mx.broadcast_to(transform.positions(state)[0], (heads, keys.shape[2]))) >= 0
    rows = np.array(mx.concatenate([keys, values], axis=-1)[0])
    return [{row.tobytes() for row in head[mask]} for head, mask in zip(rows, live, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_the_models_own_queries_decide_what_stays(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept rows are those of the transform fed by hand with the queries that the rotary embedding gave."""
    model, transform = build("llama"), TRANSFORMS[name]
    caches, recorded = cache_list(model, transform), []
    rope, update = type(model.layers[0].self_attn.rope), TransformKVCache.update_and_fetch
    rotated: list[mx.array] = []

    def record_rope(self: Any, x: mx.array, *arguments: Any, **more: Any) -> mx.array:
        rotated.append(original_rope(self, x, *arguments, **more))
        return rotated[-1]

    def record_update(self: Any, keys: mx.array, values: mx.array) -> Any:
        recorded.append((rotated[-2], keys, values))
        return update(self, keys, values)

    original_rope = rope.__call__
    monkeypatch.setattr(rope, "__call__", record_rope)
    monkeypatch.setattr(TransformKVCache, "update_and_fetch", record_update)
    with attention_hook(model, way):
        forced(model, caches, CALLS)
    for layer, cache in enumerate(caches):
        calls = recorded[layer :: len(caches)]
        assert [call[0].shape for call in calls] == [(1, 4, len(call), 32) for call in CALLS]
        kept = held_rows(*cache.keys_and_values())
        assert kept == by_hand(transform, calls, with_queries=True)
        assert kept != by_hand(transform, calls, with_queries=False)


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_without_the_hook_the_keys_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, transform = build("llama"), TRANSFORMS[name]
    caches, recorded, update = cache_list(model, transform), [], TransformKVCache.update_and_fetch

    def record(self: Any, keys: mx.array, values: mx.array) -> Any:
        recorded.append((mx.zeros_like(keys), keys, values))
        return update(self, keys, values)

    monkeypatch.setattr(TransformKVCache, "update_and_fetch", record)
    forced(model, caches, CALLS)
    for layer, cache in enumerate(caches):
        kept = held_rows(*cache.keys_and_values())
        assert kept == by_hand(transform, recorded[layer :: len(caches)], with_queries=False)


@pytest.mark.parametrize("name", sorted(BY_QUERIES))
def test_the_models_own_scale_decides_what_stays(name: str, attention: Callable[..., mx.array]) -> None:
    """Queries times 8 at the scale 1 / sqrt(64) ask what they ask at the scale 1, too large for float16 or not."""
    caches = TransformKVCache(TRANSFORMS[name]), TransformKVCache(TRANSFORMS[name])
    for seed, n, size in ((0, 40, 1.0), (10, 1, 1.0), (20, 33, 10_000.0), (30, 1, 1.0)):
        asking = (size * random(seed, 4, n)).astype(mx.float16)
        for cache, factor, scale in zip(caches, (1, 8), (1.0, 64**-0.5), strict=True):
            rows = [random(seed + i, 2, n).astype(mx.float16) for i in (1, 2)]
            keys, values = cache.update_and_fetch(*rows)
            queries = asking if factor == 1 else asking.astype(mx.float32) * factor
            attention(queries, keys, values, cache=cache, scale=scale, mask="causal")
    for left, right in zip(caches[0].state[1:], caches[1].state[1:], strict=True):
        assert mx.array_equal(left, right) and left.dtype == right.dtype


# Keys and values that are used in other ways than once, at once


def random(seed: int, heads: int, n: int) -> mx.array:
    return mx.random.normal((1, heads, n, 64), key=mx.random.key(seed))


def call(cache: TransformKVCache, seed: int, n: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, and the keys and values that an update returned."""
    keys, values = cache.update_and_fetch(random(seed, 2, n), random(seed + 1, 2, n))
    return random(seed + 2, 4, n), keys, values


@pytest.fixture
def attention() -> Callable[..., mx.array]:
    return hooked(scaled_dot_product_attention)


def exact(queries: mx.array, keys: mx.array, values: mx.array, mask: Any = None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, mx.array(keys), mx.array(values), scale=64**-0.5, mask=mask)


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("name", WHOLE)
def test_a_second_attention_over_the_same_keys_stays_right(
    name: str, n: int, attention: Callable[..., mx.array]
) -> None:
    cache, other = TransformKVCache(WHOLE[name]), TransformKVCache(WHOLE[name])
    for each in (cache, other):
        queries, keys, values = call(each, 0, 33)
        attention(queries, keys, values, cache=each, scale=64**-0.5, mask="causal")
    mask = cache.make_mask(n)
    queries, keys, values = call(cache, 10, n)
    expected = exact(queries, keys, values, mask)
    again = random(99, 4, n)
    expected_again = exact(again, keys, values, mask)
    assert mx.allclose(attention(queries, keys, values, cache=cache, scale=64**-0.5, mask=mask), expected, atol=2e-3)
    for owner in (cache, None):
        second = attention(again, keys, values, cache=owner, scale=64**-0.5, mask=mask)
        assert mx.allclose(second, expected_again, atol=2e-3)
    queries, keys, values = call(other, 10, n)
    attention(queries, keys, values, cache=other, scale=64**-0.5, mask=mask)
    for left, right in zip(cache.state[1:], other.state[1:], strict=True):
        assert mx.array_equal(left, right)


@pytest.mark.parametrize("name", WHOLE)
def test_keys_of_an_earlier_call_stay_what_they_were(name: str, attention: Callable[..., mx.array]) -> None:
    cache = TransformKVCache(WHOLE[name])
    call(cache, 0, 30)
    queries, keys, values = call(cache, 10, 1)
    expected = exact(queries, keys, values)
    newer = call(cache, 20, 1)
    late = attention(queries, keys, values, cache=cache, scale=64**-0.5, mask=None)
    assert mx.allclose(late, expected, atol=2e-3)
    expected = exact(*newer)
    assert mx.allclose(attention(*newer, cache=cache, scale=64**-0.5, mask=None), expected, atol=2e-3)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_anything_but_the_returned_pair_falls_back(name: str, attention: Callable[..., mx.array]) -> None:
    cache, other = Watched(TRANSFORMS[name]), Watched(TRANSFORMS[name])
    queries, keys, values = call(cache, 0, 4)
    _, other_keys, other_values = call(other, 5, 4)
    pairs = [
        (keys, other_values),
        (other_keys, values),
        (values, keys),
        (keys, keys),
        (keys * 1, values),
        (keys, values[...]),
    ]
    for left, right in pairs:
        out = attention(queries, left, right, cache=cache, scale=64**-0.5, mask="causal")
        assert mx.array_equal(out, exact(queries, left, right, "causal"))
    assert (cache.attended, other.attended) == (0, 0)


@pytest.mark.parametrize("kind", [None, "causal", "bool", "heads", "additive"])
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("name", WHOLE)
def test_masks_of_every_kind(name: str, n: int, kind: str | None, attention: Callable[..., mx.array]) -> None:
    cache = TransformKVCache(WHOLE[name])
    call(cache, 0, 33)
    own = cache.make_mask(n)
    queries, keys, values = call(cache, 10, n)
    width = keys.shape[2]
    lower = mx.arange(width - n, width)[:, None] >= mx.arange(width)
    sparse = lower & (mx.random.uniform(shape=(1, 4, n, width), key=mx.random.key(3)) < 0.7)
    sparse = sparse | (mx.arange(width) == 0)
    masks = {
        None: None if n == 1 else "causal",
        "causal": "causal",
        "bool": lower,
        "heads": sparse,
        "additive": mx.where(sparse, mx.random.normal(sparse.shape, key=mx.random.key(4)), -mx.inf),
    }
    # A window holds too where a caller asks for no more than causal order.
    expected = exact(queries, keys, values, own if kind in (None, "causal") else masks[kind])
    out = attention(queries, keys, values, cache=cache, scale=64**-0.5, mask=masks[kind])
    assert mx.allclose(out, expected, atol=2e-3)


@pytest.mark.parametrize("name", WHOLE)
def test_sinks_and_the_callers_queries(name: str, attention: Callable[..., mx.array]) -> None:
    cache = TransformKVCache(WHOLE[name])
    call(cache, 0, 33)
    queries, keys, values = call(cache, 10, 1)
    kept, sinks = mx.array(queries), mx.array([0.5, -1.0, 2.0, 0.0])
    expected = mx.fast.scaled_dot_product_attention(
        queries, mx.array(keys), mx.array(values), scale=64**-0.5, sinks=sinks
    )
    out = attention(queries, keys, values, cache=cache, scale=64**-0.5, mask=None, sinks=sinks)
    assert mx.allclose(out, expected, atol=2e-3)
    assert not mx.allclose(out, exact(queries, keys, values), atol=1e-2)
    assert mx.array_equal(queries, kept)


@pytest.mark.parametrize("way", WAYS)
def test_shared_layers_read_the_owners_keys(way: str) -> None:
    """gemma4 gives what the owner returned to later layers, whose cache is None."""
    model = build("gemma4_text")
    caches = watched(model, TRANSFORMS["kivi"])
    expected = forced(model, cache_list(model, TRANSFORMS["kivi"]), CALLS)
    with attention_hook(model, way):
        logits = forced(model, caches, CALLS)
    assert close(logits, expected)
    assert [cache.attended for cache in ours(caches)] == [2 * len(CALLS)]


# Coming and going


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_undo_restores_everything(architecture: str, way: str) -> None:
    model = build(architecture)
    before, names = classes(model), attention_names(model)
    undo = install_attention(model, way)
    changed = (classes(model), attention_names(model)) != (before, names)
    assert changed == (architecture != "gemma2")  # which has no use for mlx_lm's attention
    assert all(isinstance(module, before[name]) for name, module in model.named_modules())
    undo()
    assert (classes(model), attention_names(model)) == (before, names)
    undo()
    assert (classes(model), attention_names(model)) == (before, names)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_the_block_restores_everything(way: str) -> None:
    model = build("llama")
    before, names = classes(model), attention_names(model)
    with pytest.raises(ZeroDivisionError), attention_hook(model, way) as same:
        assert same is model
        feed(model, cache_list(model, TRANSFORMS["h2o"]), CALLS[0])
        1 / 0  # noqa: B018
    assert (classes(model), attention_names(model)) == (before, names)


def test_an_unknown_way_is_refused_and_changes_nothing() -> None:
    model = build("llama")
    before, names = classes(model), attention_names(model)
    with pytest.raises(vq.QuantizerConfigError, match="way"):
        install_attention(model, "global")
    assert (classes(model), attention_names(model)) == (before, names)


@pytest.mark.parametrize("first_out", ["inner", "outer"])
@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS)
def test_installing_twice_attends_once_and_comes_off(inner: str, outer: str, first_out: str) -> None:
    model = build("llama")
    before, names = classes(model), attention_names(model)
    undos = [install_attention(model, outer), install_attention(model, inner)]
    caches = watched(model, TRANSFORMS["kivi"])
    forced(model, caches, CALLS)
    assert [cache.attended for cache in caches] == [len(CALLS)] * 2
    for undo in undos if first_out == "outer" else undos[::-1]:
        undo()
    assert (classes(model), attention_names(model)) == (before, names)


@pytest.mark.parametrize("way", WAYS)
def test_leaving_an_inner_block_keeps_the_outer_one(way: str) -> None:
    model = build("llama")
    caches = watched(model, TRANSFORMS["kivi"])
    with attention_hook(model, way):
        with attention_hook(model, way):
            forced(model, caches, [[1]])
        forced(model, caches, [[2]])
    forced(model, caches, [[3]])
    assert [cache.attended for cache in caches] == [2, 2]


def test_an_instance_hook_leaves_other_models_alone() -> None:
    model, other = build("llama"), build("llama", seed=1)
    caches = watched(other, TRANSFORMS["kivi"])
    with attention_hook(model):
        forced(other, caches, CALLS[:1])
    assert [cache.attended for cache in caches] == [0, 0]
    with attention_hook(model, "module"):
        forced(other, caches, CALLS[1:2])
    assert [cache.attended for cache in caches] == [1, 1]


def test_a_block_lasts_for_a_whole_generation() -> None:
    model = build("llama")
    caches = watched(model, TRANSFORMS["qjl"])
    with attention_hook(model):
        steps = generate_step(mx.array(tokens(20)), model, max_tokens=5, prompt_cache=caches, prefill_step_size=16)
        assert len(list(steps)) == 5
    # Two chunks, the last prompt token, and one step for each token that was given back.
    assert [cache.attended for cache in caches] == [2 + 1 + 5] * 2


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_not_part_of_it(way: str, tmp_path: Path) -> None:
    model = build("llama")
    before = dict(tree_flatten(model.parameters()))
    model.save_weights(str(tmp_path / "before.safetensors"))
    with attention_hook(model, way):
        during = dict(tree_flatten(model.parameters()))
        model.save_weights(str(tmp_path / "during.safetensors"))
        model.load_weights(str(tmp_path / "before.safetensors"))
        feed(model, cache_list(model, TRANSFORMS["kivi"]), CALLS[0])
    assert during.keys() == before.keys()
    assert all(mx.array_equal(during[name], before[name]) for name in before)
    assert (tmp_path / "during.safetensors").read_bytes() == (tmp_path / "before.safetensors").read_bytes()
    assert dict(tree_flatten(model.trainable_parameters())).keys() == before.keys()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_hooked_model_works(way: str) -> None:
    model = build("llama")
    expected = forced(model, cache_list(model, TRANSFORMS["kivi"]), CALLS)
    with attention_hook(model, way):
        twin = copy.deepcopy(model)
        assert close(forced(twin, cache_list(twin, TRANSFORMS["kivi"]), CALLS), expected)
    assert close(forced(twin, cache_list(twin, TRANSFORMS["kivi"]), CALLS), expected)


def test_a_patch_by_somebody_else_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain arrays still go to whatever the module called attention before."""
    model, seen = build("llama"), []
    install_attention(model)()  # an earlier hook must not have frozen the name

    def theirs(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        seen.append(queries.shape)
        return scaled_dot_product_attention(queries, keys, values, **more)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", theirs)
    for way in WAYS:
        with attention_hook(model, way):
            feed(model, make_prompt_cache(model), CALLS[1])
        assert llama.scaled_dot_product_attention is theirs
    assert len(seen) == 2 * 2
