"""Budgets as users give them: one a layer, a share of the prompt, bytes of a model's caches; and what is protected."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_cache
from models import EVICTING, SMALL, build, feed, forced, ours, shared, tokens

import vq_functional as vq
from vq_adapters import (
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
    StreamingLLMOptions,
    TransformKVCache,
)
from vq_adapters.budgets import rows_within, to_bytes
from vq_adapters.documented import options_of
from vq_adapters.names import field_of
from vq_adapters.options import OPTIONS
from vq_functional.methods import METHODS

BUDGETED = [name for name in METHODS if "budget" in options_of(name)]
# Budgets of layers follow from their mean, which must be a whole number.
SHARED_OUT = ("pyramidkv", "squeeze")
PROMPT_ONLY = ("snapkv", "nestedkv")
PROMPT = [tokens(12, 1), tokens(28, 2), tokens(24, 3)]  # 64 tokens
SINGLE = [[token] for token in tokens(8, 4)]


def config(method: str, budget: Any, **more: Any) -> KVCacheConfig:
    """Small options of a method, under a budget of any kind."""
    values = {field_of(method, name): value for name, value in {**SMALL[method], "budget": budget}.items()}
    documented = {field: value for field, value in values.items() if field is not None}
    return KVCacheConfig(method=method, options=OPTIONS[method](**documented), **more)


def run(caches: list[Any], calls: list[list[int]], architecture: str = "llama", dtype: mx.Dtype = mx.float32) -> None:
    for call in calls:
        feed(shared(architecture, dtype), caches, call)


def sizes(caches: list[Any]) -> list[int]:
    return [cache.size() for cache in ours(caches)]


def held(caches: list[Any]) -> int:
    """Bytes of the caches that are ours."""
    return sum(cache.nbytes for cache in ours(caches))


def kept(method: str, budget: int, seen: int) -> int:
    """Rows that stay of so many tokens, the last 8 of them single ones."""
    if method == "chunkkv":
        return 2 + (budget - 2 - 3) // 4 * 4 + (seen - 2) % 4
    return budget + (8 if method in PROMPT_ONLY else 0)


class TestByLayer:
    @pytest.mark.parametrize("kind", [list, tuple])
    @pytest.mark.parametrize("method", BUDGETED)
    def test_each_layer_has_its_own(self, method, kind):
        """Exactly that, also where layers share out a mean budget."""
        caches = KVCacheBuilder.for_model(shared("llama"), config(method, kind((16, 24))))
        run(caches, [*PROMPT, *SINGLE])
        assert sizes(caches) == [kept(method, 16, 72), kept(method, 24, 72)]

    def test_windows(self):
        options = StreamingLLMOptions(stream_n_sink=2, stream_window_size=[14, 20])
        chosen = KVCacheConfig(method="streaming_llm", options=options)
        caches = KVCacheBuilder.for_model(shared("llama"), chosen)
        run(caches, [*PROMPT, *SINGLE])
        assert sizes(caches) == [16, 22]

    def test_layers_that_are_replaced_count(self):
        """The first two of three layers keep the model's own windows."""
        caches = KVCacheBuilder.for_model(shared("gemma3_text"), config("h2o", [16]))
        run(caches, PROMPT, "gemma3_text")
        assert sizes(caches) == [16]

    @pytest.mark.parametrize("budgets", [[16], [16, 24, 32]])
    def test_a_list_of_another_length(self, budgets):
        rule = "h2o: `h2o_budget` must have one entry for each of the 2 layers"
        with pytest.raises(QuantizerConfigError, match=rule):
            KVCacheBuilder.for_model(shared("llama"), config("h2o", budgets))

    def test_a_list_is_not_for_one_cache(self):
        with pytest.raises(QuantizerConfigError, match="h2o: `h2o_budget` must be one value"):
            KVCacheFactory.create(config("h2o", [16, 24]))

    @pytest.mark.parametrize("budgets", [[16, 0], [16, 6], [16, "24"], [16, None], [16, [24]]], ids=str)
    def test_every_entry_is_checked_at_once(self, budgets):
        with pytest.raises(QuantizerConfigError, match=r"h2o: `(h2o_)?budget`"):
            config("h2o", budgets)

    def test_entries_of_different_kinds(self):
        caches = KVCacheBuilder.for_model(shared("llama"), config("h2o", [0.5, 16]))
        run(caches, [*PROMPT, *SINGLE])
        assert sizes(caches) == [32, 16]


class TestShare:
    @pytest.mark.parametrize("method", [name for name in BUDGETED if name not in SHARED_OUT])
    def test_rows_follow_the_prompt_and_stay_as_many(self, method):
        """A quarter of 64 tokens, however they were cut; single tokens don't count."""
        caches = KVCacheBuilder.for_model(shared("llama"), config(method, 0.25))
        run(caches, PROMPT)
        assert sizes(caches) == [kept(method, 16, 64) - (8 if method in PROMPT_ONLY else 0)] * 2
        full = held(caches)
        run(caches, SINGLE)
        assert sizes(caches) == [kept(method, 16, 72)] * 2
        assert method in PROMPT_ONLY or held(caches) == full

    def test_as_a_prompt_grows(self):
        """Never fewer than two sinks, four newest rows and one that is free."""
        caches = KVCacheBuilder.for_model(shared("llama"), config("h2o", 0.25))
        seen = []
        for call in (*PROMPT, *SINGLE[:2], tokens(16, 5), *SINGLE[2:4]):
            run(caches, [call])
            seen.append(sizes(caches)[0])
        assert seen == [7, 10, 16, 16, 16, 20, 20, 20]

    def test_requests_of_a_batch_have_their_own(self):
        transform, prompts = vq.h2o(budget=0.25, n_sink=2, grace=4), [tokens(64, 1), tokens(40, 2)]
        model = shared("llama")
        singles = []
        for prompt in prompts:
            singles.append([TransformKVCache(transform) for _ in model.layers])
            feed(model, singles[-1], prompt)
        batch = [TransformKVCache.merge(list(layer)) for layer in zip(*singles, strict=True)]
        for token in tokens(5, 3):
            logits = model(mx.array([[token]] * 2), cache=batch)
            alone = [feed(model, caches, [token]) for caches in singles]
            assert mx.allclose(logits, mx.stack(alone), atol=1e-3)
        assert [cache.extract(row).size() for cache in batch for row in range(2)] == [16, 10] * 2

    @pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.5, float("nan")])
    def test_shares_lie_between_0_and_1(self, share):
        with pytest.raises(QuantizerConfigError, match="h2o: `budget` must be an integer >= 1, or a share"):
            config("h2o", share)

    @pytest.mark.parametrize("method", SHARED_OUT)
    def test_budgets_that_layers_share_out_are_whole(self, method):
        with pytest.raises(QuantizerConfigError, match=f"{method}: `budget` must be an integer"):
            config(method, 0.25)


class TestBytes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("48MB", 48_000_000),
            ("1.5 MiB", 3 * 2**19),
            ("2gib", 2**31),
            ("1GB", 10**9),
            ("12KB", 12_000),
            (" 12 KiB ", 12 * 1024),
            ("700B", 700),
            ("0.25kb", 250),
        ],
    )
    def test_units(self, text, size):
        assert to_bytes("h2o", "h2o_budget", text) == size

    @pytest.mark.parametrize("text", ["", "48", "MB", "-1MB", "48 M", "1e3MB", "48MBs", "1,5MB", "0x10B", "512 rows"])
    def test_other_text(self, text):
        with pytest.raises(QuantizerConfigError, match=r"h2o: `h2o_budget` must be rows, .*, or bytes such as '48MB'"):
            config("h2o", text)

    @pytest.mark.parametrize("text", ["100KB", "0.1 MiB"])
    @pytest.mark.parametrize("method", BUDGETED)
    def test_a_list_stays_within_and_uses_them(self, method, text):
        caches = KVCacheBuilder.for_model(shared("llama"), config(method, text))
        for i in range(3):
            run(caches, [tokens(100, i)])
            assert held(caches) <= to_bytes(method, "budget", text)
        assert 0.9 * to_bytes(method, "budget", text) < held(caches) <= to_bytes(method, "budget", text)
        if method not in PROMPT_ONLY:
            run(caches, SINGLE)
            assert held(caches) <= to_bytes(method, "budget", text)

    def test_windows(self):
        options = StreamingLLMOptions(stream_n_sink=4, stream_window_size="100KB")
        chosen = KVCacheConfig(method="streaming_llm", options=options)
        caches = KVCacheBuilder.for_model(shared("llama"), chosen)
        run(caches, [tokens(300), *SINGLE])
        assert 90_000 < held(caches) <= 100_000

    @pytest.mark.parametrize("size", [9_999, 10_000, 12_345])
    def test_not_one_row_more_would_fit(self, size):
        """A head's row is 2 * 32 numbers of 4 bytes, a position and a mass; one slot is free; 12 bytes are counters."""
        caches = KVCacheBuilder.for_model(shared("llama"), config("h2o", f"{size}B"))
        run(caches, PROMPT)
        row = 2 * (2 * 32 * 4 + 4 + 4)
        budget = (size // 2 - 12) // row - 1
        assert sizes(caches) == [budget] * 2
        assert held(caches) == 2 * ((budget + 1) * row + 12)

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
    def test_half_precision_holds_twice_as_much(self, dtype):
        caches = KVCacheBuilder.for_model(shared("llama", dtype), config("h2o", "100KB"))
        run(caches, [tokens(300)], dtype=dtype)
        assert 90_000 < held(caches) <= 100_000
        exact = KVCacheBuilder.for_model(shared("llama"), config("h2o", "100KB"))
        run(exact, [tokens(300)])
        assert 1.8 < sizes(caches)[0] / sizes(exact)[0] < 2

    def test_a_storage_dtype_counts(self):
        caches = KVCacheBuilder.for_model(shared("llama"), config("h2o", "100KB", dtype=mx.float16))
        run(caches, [tokens(300)])
        assert 90_000 < held(caches) <= 100_000

    def test_bytes_are_those_of_the_layers_that_are_replaced(self):
        caches = KVCacheBuilder.for_model(shared("gemma3_text"), config("h2o", "100KB"))
        run(caches, [tokens(300)], "gemma3_text")
        assert 90_000 < held(caches) <= 100_000

    def test_too_few(self):
        with pytest.raises(QuantizerConfigError, match="h2o: `budget` in bytes must be at least 1068 a layer"):
            KVCacheBuilder.for_model(shared("llama"), config("h2o", "2134B"))
        with pytest.raises(QuantizerConfigError, match="h2o: `budget` must exceed the 6 rows"):
            KVCacheBuilder.for_model(shared("llama"), config("h2o", "2136B"))

    def test_one_cache_alone(self):
        """Nobody knows the shapes yet."""
        for make in (KVCacheFactory.create, KVCacheConfig.transform):
            with pytest.raises(QuantizerConfigError, match="h2o: `h2o_budget` in bytes is for `for_model`"):
                make(config("h2o", "48MB"))

    @pytest.mark.parametrize("transform", [vq.kivi(), vq.rows(), vq.sliding_window(window_size=8)])
    def test_methods_without_a_budget(self, transform):
        spec = vq.KVSpec(kv_heads=2, key_dim=32, value_dim=32)
        with pytest.raises(QuantizerConfigError, match=f"{transform.name}: `budget` in bytes is for methods with"):
            rows_within(transform, spec, 10**6)

    def test_other_options_stay_numbers(self):
        with pytest.raises(QuantizerConfigError, match="h2o: `grace`"):
            KVCacheConfig(method="h2o", options=H2OOptions(h2o_grace="1KB"))


class TestProtect:
    @pytest.mark.parametrize("method", [name for name in METHODS if "protect" in options_of(name)])
    def test_spans_stay_in_every_layer(self, method):
        """They are options of the functional transforms, which `for_model` takes too."""
        options = {**SMALL[method], "protect": [(20, 23), (40, 41)]}
        if "budget" in options:
            options["budget"] = 24
        caches = KVCacheBuilder.for_model(shared("llama"), METHODS[method].build(**options))
        run(caches, [*PROMPT, *SINGLE])
        for cache in caches:
            position = np.array(cache.transform.ordered(cache._settled_state()).position)[0, :, : cache.size()]
            for head in position.tolist():
                assert {0, 1, 20, 21, 22, 40} <= set(head)
                assert len(set(head)) == cache.size() < 72

    def test_every_evicting_method_has_them(self):
        assert {name for name in METHODS if "protect" in options_of(name)} == set(EVICTING) & set(METHODS)


class TestSlidingWindow:
    @pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_rvq", "qjl"])
    def test_the_newest_tokens_of_codes(self, method):
        chosen = KVCacheConfig(method=method, sliding_window=16)
        caches = KVCacheBuilder.for_model(shared("llama"), chosen)
        run(caches, PROMPT)
        assert sizes(caches) == [16, 16]
        full = held(caches)
        run(caches, SINGLE)
        assert (sizes(caches), held(caches)) == ([16, 16], full)
        assert all(cache.offset == 72 and not cache.is_trimmable() for cache in caches)

    @pytest.mark.parametrize("calls", [PROMPT, PROMPT[:1], SINGLE * 3], ids=["long", "short", "single"])
    def test_answers_are_those_of_the_window_of_mlx_lm(self, calls):
        model = shared("llama")
        own = [mlx_cache.RotatingKVCache(max_size=16, keep=0) for _ in model.layers]
        expected = forced(model, own, [*calls, *SINGLE])
        caches = KVCacheBuilder.for_model(model, vq.sliding_window(window_size=16))
        assert mx.allclose(forced(model, caches, [*calls, *SINGLE]), expected, atol=1e-3)

    def test_a_window_that_nothing_leaves(self):
        model = build("llama")
        expected = forced(model, mlx_cache.make_prompt_cache(model), [*PROMPT, *SINGLE])
        caches = KVCacheBuilder.for_model(model, vq.sliding_window(window_size=72))
        assert mx.allclose(forced(model, caches, [*PROMPT, *SINGLE]), expected, atol=1e-4)
        assert sizes(caches) == [72, 72]
