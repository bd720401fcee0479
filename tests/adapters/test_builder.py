"""The factory, the fluent builder, the cache list of a model, and the report on it."""

import copy
import re
import warnings
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_cache
from models import build, shared, tokens

import vq_functional as vq
from vq_adapters import (
    STANDALONE_METHODS,
    H2OKVCache,
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizationObserver,
    QuantizerConfigError,
    SlidingWindowKVCache,
    TransformKVCache,
    TurboQuantKVCache,
    TurboQuantRVQKVCache,
    attention_hook,
    install_attention,
    report,
)
from vq_adapters.architecture import attentions, head_dim
from vq_adapters.builder import _join, _stacked
from vq_adapters.classes import CLASSES
from vq_adapters.config import Layer
from vq_adapters.rotation import rope_of
from vq_functional.methods import METHODS, TABLE

H2O = KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=16, h2o_n_sink=2, h2o_grace=4))
every_method = pytest.mark.parametrize("method", METHODS)


def configured(**values: Any) -> KVCacheConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KVCacheConfig(**values)


def run(model: nn.Module, caches: list[Any]) -> mx.array:
    """Logits of a prompt in two chunks and three single tokens."""
    out = [model(mx.arange(start, stop)[None], cache=caches) for start, stop in ((0, 12), (12, 40))]
    out += [model(mx.array([[token]]), cache=caches) for token in (7, 8, 9)]
    return mx.concatenate(out, axis=1)


class Wrapped(nn.Module):
    """A vision-language model, as far as caches are concerned: it has layers and no `make_cache`."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.language_model(tokens, cache=cache)

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.layers


class Silent(QuantizationObserver):
    def on_event(self, event):
        pass


class TestFactory:
    @every_method
    def test_the_documented_class(self, method):
        cache = KVCacheFactory.create(KVCacheConfig(method=method, head_dim=64))
        if method in STANDALONE_METHODS:
            assert hasattr(cache, "append_key")
            assert not hasattr(cache, "update_and_fetch")
        else:
            assert type(cache) is CLASSES.get(method, TransformKVCache)
            assert cache.transform == METHODS[method].build()

    def test_window_of_a_per_vector_cache(self):
        cache = KVCacheFactory.create(KVCacheConfig(method="turboquant_mse", sliding_window=5))
        assert type(cache) is SlidingWindowKVCache
        assert cache.window == 5

    def test_capacity(self):
        assert KVCacheFactory.create(KVCacheConfig(method="kivi", capacity=100)).max_tokens == 100
        assert KVCacheFactory.create(KVCacheConfig(method="qjl", capacity=100)).window == 100

    @pytest.mark.parametrize("method", ["kivi", "turboquant_mse", "turboquant_rvq"])
    def test_a_list_of_bits_is_refused(self, method):
        with pytest.raises(QuantizerConfigError, match=f"{method}: `bit_width_inlier`"):
            KVCacheFactory.create(KVCacheConfig(method=method, bit_width_inlier=[2, 4]))

    def test_takes_a_configuration_only(self):
        with pytest.raises(QuantizerConfigError, match="KVCacheFactory: `config`"):
            KVCacheFactory.create(vq.kivi())


class TestFluent:
    def test_documented_methods_return_the_builder(self):
        builder = KVCacheBuilder()
        values = {
            "with_method": "turboquant_mse",
            "with_head_dim": 64,
            "with_bit_width": 3,
            "with_jl_dim": 32,
            "with_n_outlier_channels": 4,
            "with_n_calib_tokens": 10,
            "with_vectorized_attend": False,
            "with_outlier_two_stream": True,
            "with_fused_query_dot": True,
            "with_seed": 7,
            "with_precision": mx.float16,
            "with_capacity": 100,
            "with_artifact_store": object(),
            "with_observer": Silent(),
            "with_sliding_window": 9,
        }
        for name, value in values.items():
            assert getattr(builder, name)(value) is builder

    def test_build(self):
        cache = (
            KVCacheBuilder()
            .with_method("turboquant_mse")
            .with_head_dim(64)
            .with_bit_width(inlier=3)
            .with_seed(7)
            .with_vectorized_attend()
            .with_fused_query_dot()
            .build()
        )
        assert type(cache) is TurboQuantKVCache
        assert cache.store == vq.turboquant_mse(bits=3, seed=7)
        assert cache.head_dim == 64

    def test_build_of_a_served_method(self):
        builder = KVCacheBuilder().with_method("turboquant_rvq").with_precision(mx.bfloat16).with_capacity(50)
        cache = builder.build()
        assert type(cache) is TurboQuantRVQKVCache
        assert cache.max_tokens == 50
        assert cache.transform.value == vq.PlainCodec("bfloat16")

    def test_config(self):
        config = KVCacheBuilder().with_method("qjl").with_head_dim(64).with_jl_dim(64).with_sliding_window(8).config()
        assert config == KVCacheConfig(method="qjl", head_dim=64, jl_dim=64, sliding_window=8)
        assert KVCacheBuilder().config() == KVCacheConfig()

    @pytest.mark.parametrize(
        ("name", "value", "field"),
        [
            ("with_method", "nothing", "method"),
            ("with_head_dim", 0, "head_dim"),
            ("with_head_dim", 96, "head_dim"),
            ("with_head_dim", 64.0, "head_dim"),
            ("with_bit_width", 0, "bit_width_inlier"),
            ("with_bit_width", [], "bit_width_inlier"),
            ("with_jl_dim", 0, "jl_dim"),
            ("with_n_outlier_channels", 0, "n_outlier_channels"),
            ("with_n_calib_tokens", 0, "n_calib_tokens"),
            ("with_vectorized_attend", 1, "enable_vectorized_attend"),
            ("with_outlier_two_stream", None, "enable_outlier_two_stream"),
            ("with_fused_query_dot", "yes", "enable_fused_query_dot"),
            ("with_seed", 1.5, "seed"),
            ("with_precision", "float16", "dtype"),
            ("with_capacity", 0, "capacity"),
            ("with_sliding_window", 0, "sliding_window"),
        ],
    )
    def test_values_are_checked_when_given(self, name, value, field):
        builder = KVCacheBuilder()
        with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
            getattr(builder, name)(value)
        assert builder.config() == KVCacheConfig()

    @pytest.mark.parametrize(
        ("builder", "field"),
        [
            (KVCacheBuilder().with_method("qjl").with_head_dim(32).with_jl_dim(64), "jl_dim"),
            (KVCacheBuilder().with_method("kivi").with_sliding_window(4), "sliding_window"),
            (KVCacheBuilder().with_method("kivi").with_artifact_store(object()), "store"),
            (KVCacheBuilder().with_method("kivi").with_bit_width(2, outlier=3), "bit_width_outlier"),
            (KVCacheBuilder().with_method("turboquant_mse").with_n_outlier_channels(128), "n_outlier_channels"),
            (KVCacheBuilder().with_method("turboquant_mse").with_n_calib_tokens(64), "n_calib_tokens"),
            (KVCacheBuilder().with_method("polar").with_n_outlier_channels(128), "n_outlier_channels"),
            (KVCacheBuilder().with_method("kivi").with_bit_width([2, 4]), "bit_width_inlier"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_what_does_not_go_together(self, builder, field):
        with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
            builder.build()

    def test_observers_add_up(self):
        first, second = Silent(), Silent()
        builder = KVCacheBuilder().with_method("polar").with_observer(first).with_observer(second)
        assert builder.config().observers == [first, second]


class TestForModel:
    @every_method
    def test_every_method_serves_every_layer(self, method):
        """The caches are those that the configuration's transforms make, one layer after the other."""
        model, config = build("llama"), configured(method=method, spectral_val_d_eff=16)
        caches = KVCacheBuilder.for_model(model, config)
        layers = [
            Layer(index=index, count=2, number=index, rope=rope_of(attention), stack=stack, member=member)
            for index, (attention, (stack, member)) in enumerate(zip(attentions(model), _stacked([config] * 2)))
        ]
        plain = [TransformKVCache(config.for_layer(layer).transform()) for layer in layers]
        _join(plain)
        assert [type(cache) for cache in caches] == [CLASSES.get(method, TransformKVCache)] * 2
        assert [cache.transform for cache in caches] == [cache.transform for cache in plain]
        assert mx.array_equal(run(model, caches), run(model, plain))

    def test_generation(self):
        model = build("llama")
        tokens = []
        for caches in (KVCacheBuilder.for_model(model, H2O), [TransformKVCache(H2O.transform()) for _ in range(2)]):
            steps = generate_step(mx.arange(30), model, max_tokens=6, prompt_cache=caches, prefill_step_size=16)
            tokens.append([int(token) for token, _ in steps])
            assert [cache.tokens_kept for cache in caches if type(cache) is H2OKVCache] in ([16, 16], [])
        assert tokens[0] == tokens[1]

    def test_the_configuration_is_left_as_it_was(self):
        config = KVCacheConfig(method="turboquant_rvq", bit_width_inlier=[2, 3])
        before = copy.deepcopy(config)
        KVCacheBuilder.for_model(build("llama"), config)
        assert config == before

    def test_a_composed_transform(self):
        transform = vq.chain(vq.h2o_policy(budget=16, grace=4), vq.rows(key=vq.turboquant_mse_codec(bits=3)))
        caches = KVCacheBuilder.for_model(build("llama"), transform)
        assert [type(cache) for cache in caches] == [TransformKVCache] * 2
        assert all(cache.transform == transform for cache in caches)
        assert report(caches)[0].used == "h2o over rows"

    def test_bits_by_layer(self):
        caches = KVCacheBuilder.for_model(build("llama"), KVCacheConfig(method="kivi", bit_width_inlier=[2, 4]))
        assert [cache.assigned_avg_bits for cache in caches] == [2.0, 4.0]

    def test_bits_count_the_layers_that_are_replaced(self):
        model = build("gemma3_text", num_hidden_layers=6)
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", bit_width_inlier=[2, 4]))
        assert [cache.assigned_avg_bits for cache in caches if isinstance(cache, TransformKVCache)] == [2.0, 4.0]
        assert [isinstance(cache, TransformKVCache) for cache in caches] == [False, False, True] * 2
        with pytest.raises(QuantizerConfigError, match="`bit_width_inlier` must have one entry for each of the 2"):
            KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", bit_width_inlier=[2] * 6))

    def test_seeds_by_layer(self):
        caches = KVCacheBuilder.for_model(build("gemma3_text"), KVCacheConfig(method="turboquant_rvq", seed=7))
        assert caches[2].transform == vq.turboquant_rvq(seed=9)

    def test_capacity_and_query_heads(self):
        caches = KVCacheBuilder.for_model(build("llama"), KVCacheConfig(method="qjl", capacity=20))
        assert [(cache.max_tokens, cache.query_heads) for cache in caches] == [(20, 4)] * 2

    def test_windowed_layers_stay_the_model_s_own(self):
        model = build("gemma3_text")
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [type(cache) for cache in caches] == [mlx_cache.RotatingKVCache] * 2 + [H2OKVCache]
        assert [cache.max_size for cache in caches[:2]] == [16, 16]
        wide = KVCacheBuilder.for_model(model, configured(method="h2o", h2o_budget=512))
        mx.eval(run(model, caches))
        assert mx.allclose(run(model, wide), run(model, mlx_cache.make_prompt_cache(model)), atol=1e-4)

    def test_recurrent_layers_stay_in_their_places(self):
        model = build("lfm2")
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [type(cache) for cache in caches] == [mlx_cache.ArraysCache, H2OKVCache] * 2
        mx.eval(run(model, caches))

    def test_recurrent_states_beside_keys_and_values_stay_in_their_layers(self):
        model = build("falcon_h1")
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [[type(cache) for cache in entry.caches] for entry in caches] == [
            [mlx_cache.ArraysCache, H2OKVCache]
        ] * 2
        assert [(row.layer, row.used) for row in report(caches)] == [
            (0, "ArraysCache"),
            (0, "h2o"),
            (1, "ArraysCache"),
            (1, "h2o"),
        ]
        mx.eval(run(model, caches))

    def test_caches_and_layers_need_not_match(self):
        """Later layers of gemma4 share the keys of earlier ones."""
        model = build("gemma4_text")
        caches = KVCacheBuilder.for_model(model, configured(method="h2o", h2o_budget=512))
        assert len(caches) < len(model.layers)
        own = mlx_cache.make_prompt_cache(model)
        assert [type(x) is mlx_cache.KVCache for x in own] == [type(x) is H2OKVCache for x in caches]
        assert mx.allclose(run(model, caches), run(model, own), atol=1e-4)

    def test_latent_attention_is_left_alone(self):
        with pytest.raises(QuantizerConfigError, match=r"for_model: `model` must have a plain KVCache.*latent"):
            KVCacheBuilder.for_model(build("deepseek_v3"), H2O)

    def test_expanded_latents_are_ordinary(self):
        caches = KVCacheBuilder.for_model(build("deepseek_v2"), H2O)
        assert [type(cache) for cache in caches] == [H2OKVCache] * 2

    def test_a_model_of_both(self):
        """Each entry is judged by its own layer."""
        model, latent = build("llama"), build("deepseek_v3")
        latent.layers[0].use_sliding = False  # what llama asks of its layers
        model.model.layers[0] = latent.layers[0]
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [type(cache) for cache in caches] == [mlx_cache.KVCache, H2OKVCache]
        assert report(caches)[0].reason.startswith("plain: latent attention")

    @pytest.mark.parametrize("inner", [1, 2, 3])
    def test_lists_are_left_alone_that_hold_only_keys_and_values(self, monkeypatch, inner):
        """Where some layers have an indexer, the others have a list of one."""
        model = build("llama")
        both = mlx_cache.CacheList(*(mlx_cache.KVCache() for _ in range(inner)))
        monkeypatch.setattr(type(model), "make_cache", lambda self: [both, mlx_cache.KVCache()], raising=False)
        caches = KVCacheBuilder.for_model(model, H2O)
        assert caches[0] is both
        assert type(caches[1]) is H2OKVCache

    def test_subclasses_of_the_plain_cache_are_left_alone(self, monkeypatch):
        class Special(mlx_cache.KVCache):
            pass

        model = build("llama")
        monkeypatch.setattr(type(model), "make_cache", lambda self: [Special(), mlx_cache.KVCache()], raising=False)
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [type(cache) for cache in caches] == [Special, H2OKVCache]
        assert report(caches)[0].reason == "a class of its own"

    def test_a_make_cache_of_this_model_may_call_it(self):
        """What a user sets so that mlx_lm's commands and server take our caches."""
        model = build("llama")
        model.make_cache = lambda: KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi"))
        assert [cache.transform.name for cache in mlx_cache.make_prompt_cache(model)] == ["kivi"] * 2

    def test_a_failing_make_cache_is_not_swallowed(self, monkeypatch):
        def make_cache(self):
            raise KeyError("layer_types")

        model = build("llama")
        monkeypatch.setattr(type(model), "make_cache", make_cache, raising=False)
        with pytest.raises(KeyError, match="layer_types"):
            KVCacheBuilder.for_model(model, H2O)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_nested_models(self, depth):
        inner = build("gemma3_text")
        model = inner
        for _ in range(depth):
            model = Wrapped(model)
        caches = KVCacheBuilder.for_model(model, H2O)
        assert [type(cache) for cache in caches] == [mlx_cache.RotatingKVCache] * 2 + [H2OKVCache]
        assert mx.array_equal(run(model, caches), run(inner, KVCacheBuilder.for_model(inner, H2O)))

    @pytest.mark.parametrize("name", ["afm7", "phi3small"])
    def test_models_that_count_rows_refuse_eviction(self, name):
        model = build("llama")
        kind = type("Model", (type(model),), {"__module__": f"mlx_lm.models.{name}"})
        object.__setattr__(model, "__class__", kind)
        with pytest.raises(QuantizerConfigError, match="h2o: `model` must keep all rows"):
            KVCacheBuilder.for_model(model, H2O)
        assert len(KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi"))) == 2

    def test_head_sizes_are_refused_at_once(self):
        model = build("llama")
        model.layers[1].self_attn.head_dim = 1
        with pytest.raises(QuantizerConfigError, match="`head_dim`"):
            KVCacheBuilder.for_model(model, KVCacheConfig(method="turboquant_mse"))

    @pytest.mark.parametrize(
        ("config", "instead"),
        [
            (None, "; got None"),
            ("h2o", ", such as KVCacheConfig(method='h2o'); got 'h2o'"),
            (vq.h2o_policy(), ", such as chain(policy, rows()); got H2OPolicy"),
        ],
        ids=str,
    )
    def test_takes_configurations_and_transforms(self, config, instead):
        rule = re.escape(f"for_model: `config` must be a KVCacheConfig or a Transform{instead}")
        with pytest.raises(QuantizerConfigError, match=f"^{rule}"):
            KVCacheBuilder.for_model(build("llama"), config)

    @pytest.mark.parametrize("model", ["llama", KVCacheConfig(), []], ids=str)
    def test_takes_models(self, model):
        with pytest.raises(QuantizerConfigError, match=r"^for_model: `model` must be a model of mlx; got"):
            KVCacheBuilder.for_model(model, build("llama"))
        with pytest.raises(QuantizerConfigError, match=r"^install_attention: `model` must be a model of mlx; got"):
            install_attention(model)


@pytest.mark.parametrize(
    ("architecture", "size"), [("llama", 32), ("qwen2", 16), ("qwen3", 32), ("gemma3_text", 32), ("deepseek_v2", None)]
)
def test_head_size_of_a_layer(architecture, size):
    attention = build(architecture).layers[0].self_attn
    assert head_dim(attention) == size
    if size is not None:
        nn.quantize(attention, group_size=32, bits=4)
        assert head_dim(attention) == size


class TestReport:
    def test_what_serves_each_layer(self):
        model = build("gemma3_text")
        caches = KVCacheBuilder.for_model(model, H2O)
        mx.eval(run(model, caches))
        rows = report(caches)
        assert [row.layer for row in rows] == [0, 1, 2]
        assert [row.used for row in rows] == ["RotatingKVCache", "RotatingKVCache", "h2o"]
        assert [row.reason for row in rows] == ["bounded by the model's own window"] * 2 + [""]
        assert [row.tokens for row in rows] == [43] * 3
        assert [row.nbytes for row in rows] == [cache.nbytes for cache in caches]

    def test_table(self):
        caches = [mlx_cache.ArraysCache(2), *KVCacheBuilder.for_model(build("llama"), H2O)]
        caches[0][0] = mx.zeros((1, 4))
        assert str(report(caches)) == "\n".join(
            [
                "layer  used         tokens  bytes  left as it is because",
                "0      ArraysCache          16     recurrent state, no keys and values",
                "1      h2o          0       0",
                "2      h2o          0       0",
            ]
        )

    def test_batches_and_unknown_classes(self):
        batch = TransformKVCache.merge([TransformKVCache(vq.qjl()), TransformKVCache(vq.qjl())])
        batch.update_and_fetch(mx.zeros((2, 1, 3, 32)), mx.zeros((2, 1, 3, 32)))
        rows = report([batch, object()])
        assert [(row.used, row.tokens) for row in rows] == [("qjl", 3), ("object", None)]
        assert rows[1].nbytes is None

    def test_no_caches(self):
        assert list(report([])) == []
        assert str(report([])).startswith("layer")


def test_standalone_methods():
    assert {method.name for method in TABLE if "vectors" in method.traits} == STANDALONE_METHODS
    assert {"turboquant_prod", "turboquant_mse", "polar", "qjl", "spectral"} >= STANDALONE_METHODS


# One entry a layer


def test_layers_may_have_configurations_of_their_own_or_stay_exact() -> None:
    """The exact layer reads bit for bit, the other as the same method does in all layers."""
    model = shared("llama")
    config = KVCacheConfig(method="kivi", bit_width_inlier=2, residual_length=8)
    mixed, whole = (KVCacheBuilder.for_model(model, entries) for entries in ([None, config], config))
    plain = mlx_cache.make_prompt_cache(model)
    ids = mx.array([tokens(60)])
    for caches in (mixed, whole, plain):
        mx.eval(model(ids, cache=caches))
    assert [cache.transform.name for cache in mixed] == ["rows", "kivi"]
    assert mx.array_equal(mixed[0].keys_and_values()[0], plain[0].state[0][:, :, :60])
    assert mixed[1].nbytes == whole[1].nbytes < mixed[0].nbytes


@pytest.mark.parametrize("method", ["h2o", "kivi"])
def test_exact_layers_stand_beside_evicting_ones(method: str) -> None:
    """With a window mask too, and a layer list of two methods."""
    model = shared("llama")
    entries = [None, vq.h2o(budget=16, n_sink=2, grace=4)] if method == "h2o" else [vq.kivi(residual_length=8), None]
    caches = KVCacheBuilder.for_model(model, entries)
    with attention_hook(model):
        logits = [model(mx.array([tokens(40)]), cache=caches), model(mx.array([[5]]), cache=caches)]
    assert all(mx.isfinite(x).all() for x in logits)
    assert [cache.size() for cache in caches] == ([41, 16] if method == "h2o" else [41, 41])


@pytest.mark.parametrize("entries", [[None, None, None], ["kivi", None], [None], []])
def test_bad_lists_are_refused(entries: list[Any]) -> None:
    with pytest.raises(QuantizerConfigError, match="for_model: `config` must"):
        KVCacheBuilder.for_model(shared("llama"), entries)
