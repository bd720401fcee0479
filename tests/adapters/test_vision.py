"""Vision-language models of mlx_vlm: our caches in its own generation, and images that eviction leaves alone."""

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm import prepare_inputs
from mlx_vlm.apc import APCManager
from mlx_vlm.generate import PromptCacheState, generate, generate_step, stream_generate
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import cache as vlm_cache
from mlx_vlm.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer
from mlx_vlm.utils import StoppingCriteria
from models import SMALL, ours, tokenizer, tokens
from PIL import Image
from transformers import Qwen2VLImageProcessor

import vq_functional as vq
from vq_adapters import (
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    KVzipOptions,
    QuantizerConfigError,
    TransformKVCache,
    attention_hook,
    kvzip_prefill,
    load,
    report,
    save,
)
from vq_adapters.vision import image_spans
from vq_functional.core.transform import Transform
from vq_functional.methods import TABLE, Method

VOCABULARY = 96
IMAGE, VIDEO, START, END = 90, 91, 92, 93
CHUNK = 16
COUNT = 8  # tokens that are generated
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
_EYE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@attrs.frozen
class Family:
    """Configurations of one architecture, and what an image is to it."""

    text: dict[str, Any]
    vision: dict[str, Any]
    model: dict[str, Any]
    rows: int  # of an image in the prompt
    pixels: tuple[int, ...]
    more: dict[str, Any] = attrs.field(factory=dict)  # beside the pixels


FAMILIES = {
    "qwen2_vl": Family(
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START},
        16,
        (64, 96),
        {"image_grid_thw": mx.array([[1, 8, 8]])},
    ),
    "llava": Family(
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **_EYE},
        {"image_token_index": IMAGE},
        16,
        (1, 3, 16, 16),
    ),
    "idefics3": Family(
        {"model_type": "llama"},
        {"model_type": "idefics3", **_EYE},
        {"image_token_id": IMAGE},
        4,
        (1, 1, 3, 16, 16),
    ),
    "gemma3": Family(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 16,
        },
        {"model_type": "siglip_vision_model", **_EYE},
        {"image_token_index": IMAGE, "hidden_size": 64},
        16,
        (1, 3, 16, 16),
    ),
}
WAYS = (None, "instance", "module")
LOSSLESS: dict[str, Transform] = {
    "rows": vq.rows(),
    "kivi": vq.kivi(residual_length=512),
    "h2o": vq.h2o(budget=512),
}
LOSSY: dict[str, Transform] = {
    "kivi": vq.kivi(bits=4, group_size=16, residual_length=8),
    "h2o": vq.h2o(budget=24, n_sink=2, grace=4),
}
PROTECTING = [row for row in TABLE if "protect" in attrs.fields_dict(row.options)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def built() -> dict[str, nn.Module]:
    """Each model once; no test changes one for good."""
    return {name: build(name) for name in FAMILIES}


@pytest.fixture
def model(family: str, built: dict[str, nn.Module]) -> Iterator[nn.Module]:
    yield built[family]
    vars(built[family].language_model).pop("make_cache", None)


@pytest.fixture
def qwen(built: dict[str, nn.Module]) -> nn.Module:
    return built["qwen2_vl"]


def build(name: str) -> nn.Module:
    """A small random model."""
    mx.random.seed(0)
    module, one = importlib.import_module(f"mlx_vlm.models.{name}"), FAMILIES[name]
    text, vision = module.TextConfig(**{**_TEXT, **one.text}), module.VisionConfig(**one.vision)
    config = module.ModelConfig(
        text_config=text, vision_config=vision, model_type=name, vocab_size=VOCABULARY, **one.model
    )
    model = module.Model(config)
    mx.eval(model.parameters())
    return model.eval()


def prompt(name: str, after: int = 20, before: int = 3) -> tuple[mx.array, mx.array, dict[str, Any]]:
    """Tokens [1, S] with one image among them, its pixels, and what belongs to these."""
    one = FAMILIES[name]
    text = [token for token in tokens(VOCABULARY) if token < IMAGE]
    ids = [*text[:before], START, *[IMAGE] * one.rows, END, *text[before : before + after]]
    return mx.array([ids]), mx.random.normal(one.pixels, key=mx.random.key(1)), one.more


def forget(model: nn.Module) -> None:
    """Take away the positions that a Qwen model keeps of its last prompt."""
    for name in ("_rope_deltas", "_position_ids"):
        if hasattr(model.language_model, name):
            setattr(model.language_model, name, None)


def generated(model: nn.Module, name: str, caches: list[Any], *text: int) -> tuple[list[int], mx.array]:
    """Tokens and log-probabilities of mlx_vlm's `generate_step`."""
    forget(model)
    ids, pixels, more = prompt(name, *text)
    steps = generate_step(
        ids, model, pixels, mx.ones_like(ids), max_tokens=COUNT, prompt_cache=caches, prefill_step_size=CHUNK, **more
    )
    chosen, rows = zip(*steps, strict=True)
    return list(chosen), mx.stack(rows)


def hook(model: nn.Module, way: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if way is None else attention_hook(model, way)


def own(model: nn.Module) -> list[Any]:
    return vlm_cache.make_prompt_cache(model.language_model)


def positions(cache: TransformKVCache) -> list[set[int]]:
    """Positions that each head of the first batch row holds."""
    ordered = cache.transform.ordered(cache._settled_state())
    return [{place for place in head if place >= 0} for head in ordered.position[0].tolist()]


class TestForModel:
    def test_plain_caches_are_replaced_and_others_stay(self, model: nn.Module) -> None:
        before, caches = own(model), KVCacheBuilder.for_model(model, vq.rows())
        for old, new in zip(before, caches, strict=True):
            plain = type(old) is vlm_cache.KVCache
            assert type(new) is (TransformKVCache if plain else type(old))
        assert {row.used for row in report(caches)} <= {"rows", "RotatingKVCache"}
        assert ours(caches)

    def test_a_model_that_reads_the_state_of_its_caches_is_refused(self) -> None:
        language = importlib.import_module("mlx_vlm.models.gemma3n.language")
        config = importlib.import_module("mlx_vlm.models.gemma3n.config").TextConfig.from_dict(
            {
                **_TEXT,
                "model_type": "gemma3n_text",
                "num_hidden_layers": 4,
                "intermediate_size": [96] * 4,
                "head_dim": 32,
                "vocab_size_per_layer_input": VOCABULARY,
                "num_kv_shared_layers": 2,
                "laurel_rank": 8,
                "hidden_size_per_layer_input": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.0] * 4,
                "altup_num_inputs": 2,
            }
        )
        with pytest.raises(QuantizerConfigError, match=r"for_model: `model` must leave.*`state`"):
            KVCacheBuilder.for_model(language.LanguageModel(config), vq.rows())


class TestGeneration:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", LOSSLESS)
    def test_without_loss_it_is_the_model_with_its_own_caches(
        self, family: str, model: nn.Module, name: str, way: str | None
    ) -> None:
        chosen, expected = generated(model, family, own(model))
        with hook(model, way):
            same, rows = generated(model, family, KVCacheBuilder.for_model(model, LOSSLESS[name]))
        assert same == chosen
        assert mx.allclose(rows, expected, atol=1e-4).item()

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", LOSSY)
    def test_with_loss_it_runs_in_less_memory(self, family: str, model: nn.Module, name: str, way: str | None) -> None:
        ids, plain = prompt(family)[0], KVCacheBuilder.for_model(model, vq.rows())
        caches = KVCacheBuilder.for_model(model, LOSSY[name])
        expected = generated(model, family, plain)[1]
        with hook(model, way):
            rows = generated(model, family, caches)[1]
        assert mx.isfinite(rows).all().item()
        assert mx.abs(rows - expected).max().item() > 1e-4
        for cache, whole in zip(ours(caches), ours(plain), strict=True):
            assert cache.offset == whole.offset == ids.shape[1] + COUNT
            assert cache.nbytes < whole.nbytes

    def test_stream_generate(self, family: str, model: nn.Module) -> None:
        def text(caches: list[Any]) -> str:
            return "".join(part.text for part in streamed(model, family, prompt(family)[0], prompt_cache=caches))

        assert text(KVCacheBuilder.for_model(model, vq.h2o(budget=512))) == text(own(model)) != ""


class TestHook:
    @pytest.mark.parametrize("way", WAYS[1:])
    def test_rows_are_ranked_by_the_real_queries(self, family: str, model: nn.Module, way: str) -> None:
        caches = KVCacheBuilder.for_model(model, LOSSY["h2o"])
        by_keys = generated(model, family, KVCacheBuilder.for_model(model, LOSSY["h2o"]))[1]
        with attention_hook(model, way):
            by_queries = generated(model, family, caches)[1]
        assert all(cache._hooked for cache in ours(caches))
        assert mx.abs(by_keys - by_queries).max().item() > 1e-3

    @pytest.mark.parametrize("way", WAYS[1:])
    def test_attention_over_codes(
        self, family: str, model: nn.Module, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        attend = TransformKVCache._attend_codes

        def counted(self: TransformKVCache, queries: mx.array, *rest: Any) -> mx.array:
            asked.append(queries.shape[2])
            return attend(self, queries, *rest)

        monkeypatch.setattr(TransformKVCache, "_attend_codes", counted)
        expected = generated(model, family, KVCacheBuilder.for_model(model, vq.turboquant_mse(bits=4)))[1]
        assert asked == []
        caches = KVCacheBuilder.for_model(model, vq.turboquant_mse(bits=4))
        with attention_hook(model, way):
            rows = generated(model, family, caches)[1]
        assert asked.count(1) >= COUNT * len(ours(caches))
        assert mx.allclose(rows, expected, atol=2e-2).item()

    @pytest.mark.parametrize("way", WAYS[1:])
    def test_nothing_is_left_of_it(self, model: nn.Module, way: str) -> None:
        kinds = [type(module) for module in model.modules()]
        attention = importlib.import_module(type(model.language_model).__module__).scaled_dot_product_attention
        with attention_hook(model, way):
            pass
        assert [type(module) for module in model.modules()] == kinds
        assert importlib.import_module(type(model.language_model).__module__).scaled_dot_product_attention is attention


def processor() -> SimpleNamespace:
    """As much of one as generation from tokens needs."""
    words = tokenizer()
    words.stopping_criteria = StoppingCriteria([VOCABULARY], words)
    return SimpleNamespace(tokenizer=words, detokenizer=NaiveStreamingDetokenizer(words))


def streamed(model: nn.Module, name: str, ids: mx.array, **options: Any) -> list[Any]:
    """All that `stream_generate` yields for these tokens and the family's image."""
    forget(model)
    _, pixels, more = prompt(name)
    given = {"input_ids": ids, "pixel_values": pixels, "mask": mx.ones_like(ids), **more}
    return list(stream_generate(model, processor(), "", max_tokens=COUNT, prefill_step_size=CHUNK, **given, **options))


def serve(model: nn.Module, method: Transform) -> list[Any]:
    """Have the model make our caches, as generation that makes its own caches needs it; returns one list."""
    caches = KVCacheBuilder.for_model(model, method)
    model.language_model.make_cache = lambda: copy.deepcopy(caches)
    return caches


def row(model: nn.Module, name: str, after: int) -> tuple[list[int], dict[str, Any]]:
    """One prompt as BatchGenerator takes it."""
    forget(model)
    ids, pixels, more = prompt(name, after)
    features = model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **more).to_dict()
    unused = ("attention_mask_4d",)
    return ids[0].tolist(), {key: x for key, x in features.items() if x is not None and key not in unused}


def batched(
    model: nn.Module,
    rows: Sequence[tuple[list[int], dict[str, Any]]],
    counts: Sequence[int],
    at_once: int = 2,
    step: int = CHUNK,
    after_first: Callable[[BatchGenerator], None] = lambda generator: None,
) -> list[list[int]]:
    """Tokens of each prompt from mlx_vlm's continuous batching."""
    forget(model)
    generator = BatchGenerator(
        model.language_model,
        processor(),
        prefill_batch_size=at_once,
        completion_batch_size=4,
        prefill_step_size=step,
    )
    kwargs = [dict(given) for _, given in rows]
    uids = generator.insert([ids for ids, _ in rows], list(counts), prompt_kwargs=kwargs)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    first = True
    while generator.has_work:
        for response in generator.next()[1]:
            found[response.uid].append(response.token)
        if first:
            after_first(generator)
        first = False
    generator.close()
    return [found[uid] for uid in uids]


class TestBatches:
    @pytest.mark.parametrize("at_once", [1, 2])
    @pytest.mark.parametrize("name", LOSSLESS)
    def test_rows_of_unequal_length(self, family: str, model: nn.Module, name: str, at_once: int) -> None:
        """Two prompts padded together, or one after the other joining; the shorter answer leaves early."""
        rows = [row(model, family, after) for after in (20, 27)]
        expected = batched(model, rows, (3, COUNT), at_once)
        serve(model, LOSSLESS[name])
        assert batched(model, rows, (3, COUNT), at_once) == expected
        assert [len(chosen) for chosen in expected] == [3, COUNT]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", LOSSY)
    def test_a_row_is_what_it_is_alone(self, family: str, model: nn.Module, name: str, way: str | None) -> None:
        rows = [row(model, family, after) for after in (20, 27)]
        serve(model, LOSSY[name])
        with hook(model, way):
            alone = [batched(model, [one], (COUNT,), 1, step=512)[0] for one in rows]
            assert batched(model, rows, (COUNT, COUNT), step=512) == alone

    def test_a_row_that_is_taken_out_while_prompts_are_read(self, family: str, model: nn.Module) -> None:
        rows = [row(model, family, after) for after in (20, 27)]
        serve(model, LOSSLESS["h2o"])
        alone = batched(model, rows[1:], (COUNT,), 1)
        left = batched(model, rows, (COUNT, COUNT), after_first=lambda generator: generator.remove(0))
        assert left == [[], *alone]


class TestCutMasks:
    """qwen3_vl_moe cuts masks to the number of tokens; ours may have more columns."""

    @pytest.fixture(scope="class")
    def moe(self) -> nn.Module:
        mx.random.seed(0)
        module = importlib.import_module("mlx_vlm.models.qwen3_vl_moe")
        text = module.TextConfig(
            **_TEXT,
            model_type="qwen3_vl_moe_text",
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            max_position_embeddings=4096,
            rope_theta=1e4,
            rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        )
        sizes = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4}
        vision = module.VisionConfig(depth=1, **sizes)
        model = module.Model(module.ModelConfig(text, vision, "qwen3_vl_moe", vocab_size=VOCABULARY))
        mx.eval(model.parameters())
        return model.eval()

    @pytest.mark.parametrize("way", WAYS[1:])
    @pytest.mark.parametrize("name", LOSSLESS)
    def test_with_the_hook_rows_may_be_unequal(self, moe: nn.Module, name: str, way: str) -> None:
        rows = []
        for length in (20, 38):
            ids = mx.array([tokens(length, length)])
            forget(moe)
            features = moe.get_input_embeddings(ids, None, mask=mx.ones_like(ids)).to_dict()
            rows.append((ids[0].tolist(), {key: x for key, x in features.items() if x is not None}))
        expected = batched(moe, rows, (3, COUNT))
        serve(moe, LOSSLESS[name])
        with hook(moe, way):
            assert batched(moe, rows, (3, COUNT)) == expected
        del moe.language_model.make_cache


class TestReuse:
    """The second prompt goes on where the first one ends."""

    def turns(self, family: str, model: nn.Module, **options: Any) -> tuple[list[str], list[int]]:
        first = prompt(family)[0]
        longer = mx.concatenate([first, mx.array([[token for token in tokens(60, 5) if token < IMAGE]])], axis=1)
        parts = [streamed(model, family, ids, **options) for ids in (first, longer, longer)]
        return ["".join(part.text for part in turn) for turn in parts], [turn[-1].cached_tokens for turn in parts]

    def test_a_conversation(self, family: str, model: nn.Module) -> None:
        expected, plain = self.turns(family, model, prompt_cache_state=PromptCacheState())
        serve(model, LOSSLESS["rows"])
        assert self.turns(family, model, prompt_cache_state=PromptCacheState()) == (expected, plain)

    def test_evicted_rows_are_read_again(self, family: str, model: nn.Module) -> None:
        serve(model, LOSSY["h2o"])
        expected = self.turns(family, model)
        assert self.turns(family, model, prompt_cache_state=PromptCacheState()) == expected
        assert expected[1] == [0, 0, 0]

    @pytest.mark.parametrize("method", [LOSSLESS["rows"], LOSSY["h2o"]], ids=("rows", "h2o"))
    def test_the_automatic_prefix_cache(self, family: str, model: nn.Module, method: Transform) -> None:
        serve(model, method)
        expected, _ = self.turns(family, model)
        got, reused = self.turns(family, model, apc_manager=APCManager(num_blocks=64, block_size=4))
        assert got == expected
        assert reused[2] > 0


@pytest.mark.parametrize("method", [LOSSLESS["rows"], *LOSSY.values()], ids=("rows", *LOSSY))
def test_saved_caches_go_on(family: str, model: nn.Module, method: Transform, tmp_path: Any) -> None:
    caches = KVCacheBuilder.for_model(model, method)
    generated(model, family, caches)
    save(tmp_path / "caches", caches, {"image": "one"})
    loaded, metadata = load(tmp_path / "caches", return_metadata=True)
    assert metadata == {"image": "one"}
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    for token in (5, 17, 42):
        expected = model.language_model(mx.array([[token]]), cache=caches).logits
        assert mx.array_equal(model.language_model(mx.array([[token]]), cache=loaded).logits, expected).item()


class TestProcessors:
    """A picture and words, through a processor of mlx_vlm as it comes."""

    @pytest.fixture(scope="class")
    def words_and_pictures(self) -> Qwen2VLProcessor:
        words = tokenizer()
        words.pad_token = words.eos_token
        words.image_token, words.image_token_id = f"t{IMAGE} ", IMAGE
        words.video_token, words.video_token_id = f"t{VIDEO} ", VIDEO
        words.stopping_criteria = StoppingCriteria([VOCABULARY], words)
        pictures = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
        made = Qwen2VLProcessor(pictures, words)
        made.detokenizer = NaiveStreamingDetokenizer(words)
        return made

    @pytest.fixture
    def given(self, tmp_path: Path) -> dict[str, Any]:
        image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
        image.save(tmp_path / "picture.png")
        words = [f"t{token}" for token in tokens(60) if token < IMAGE]
        text = " ".join([*words[:30], f"t{START}", f"t{IMAGE}", f"t{END}", *words[30:]])
        return {"prompt": text, "image": str(tmp_path / "picture.png"), "max_tokens": COUNT}

    def test_generate(self, qwen: nn.Module, words_and_pictures: Qwen2VLProcessor, given: dict[str, Any]) -> None:
        expected = generate(qwen, words_and_pictures, **given)
        caches = KVCacheBuilder.for_model(qwen, LOSSLESS["kivi"])
        got = generate(qwen, words_and_pictures, **given, prompt_cache=caches)
        assert (got.text, got.prompt_tokens) == (expected.text, expected.prompt_tokens)
        assert caches[0].offset == got.prompt_tokens + COUNT

    def test_images_stay(self, qwen: nn.Module, words_and_pictures: Qwen2VLProcessor, given: dict[str, Any]) -> None:
        image, index = given.pop("image"), getattr(qwen.config, "image_token_index", None)
        inputs = prepare_inputs(words_and_pictures, images=[image], prompts=given["prompt"], image_token_index=index)
        spans = image_spans(qwen, inputs["input_ids"])
        assert spans == [(30, 39)]  # 8 rows, and the token that begins them
        options = H2OOptions(h2o_budget=24, h2o_n_sink=2, h2o_grace=4, h2o_protect=spans)
        caches = KVCacheBuilder.for_model(qwen, KVCacheConfig(method="h2o", options=options))
        inputs["mask"] = inputs.pop("attention_mask", None)
        generate(qwen, words_and_pictures, **given, prompt_cache=caches, **inputs)
        for cache in caches:
            assert all(set(range(30, 39)) <= held and len(held) == 24 for held in positions(cache))


class TestCacheLists:
    """A model of text alone whose layers have a recurrent state beside keys and values."""

    @pytest.fixture(scope="class")
    def falcon(self) -> nn.Module:
        mx.random.seed(0)
        module = importlib.import_module("mlx_vlm.models.falcon_h1")
        sizes = {"head_dim": 32, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 16}
        model = module.Model(module.ModelConfig(**{**_TEXT, **sizes}))
        mx.eval(model.parameters())
        return model.eval()

    @pytest.mark.parametrize("name", LOSSLESS)
    def test_rows_of_unequal_length(self, falcon: nn.Module, name: str) -> None:
        prompts = [tokens(length, length) for length in (20, 27)]
        rows = [(ids, {"inputs_embeds": falcon.language_model.model.embed_tokens(mx.array([ids]))}) for ids in prompts]
        expected = batched(falcon, rows, (3, COUNT))
        serve(falcon, LOSSLESS[name])
        assert batched(falcon, rows, (3, COUNT)) == expected
        del falcon.language_model.make_cache

    @pytest.mark.parametrize("name", LOSSY)
    def test_saved_caches_go_on(self, falcon: nn.Module, name: str, tmp_path: Any) -> None:
        caches = KVCacheBuilder.for_model(falcon, LOSSY[name])
        assert [row.used for row in report(caches)] == ["ArraysCache", name] * 2
        with attention_hook(falcon):
            falcon.language_model(mx.array([tokens(40)]), cache=caches)
        save(tmp_path / "caches", caches)
        loaded = load(tmp_path / "caches")
        assert type(loaded[0]) is vlm_cache.CacheList
        for token in (5, 17, 42):
            expected = falcon.language_model(mx.array([[token]]), cache=caches).logits
            assert mx.array_equal(falcon.language_model(mx.array([[token]]), cache=loaded).logits, expected).item()

    @pytest.mark.parametrize(
        ("family", "rule"), [("inkling", "positions from the number"), ("zaya1_vl", "padding from the number")]
    )
    def test_a_family_that_counts_rows_keeps_them_all(self, falcon: nn.Module, family: str, rule: str) -> None:
        kind = type("Other", (type(falcon.language_model),), {"__module__": f"mlx_vlm.models.{family}.language"})
        other = copy.copy(falcon.language_model)
        object.__setattr__(other, "__class__", kind)
        with pytest.raises(QuantizerConfigError, match=rf"h2o: `model` must keep all rows: .* {rule}"):
            KVCacheBuilder.for_model(other, LOSSY["h2o"])
        assert ours(KVCacheBuilder.for_model(other, LOSSY["kivi"]))


class TestSpans:
    def test_of_a_prompt(self, family: str, model: nn.Module) -> None:
        rows = FAMILIES[family].rows
        start = 3 if family == "qwen2_vl" else 4  # qwen2_vl names the token that begins an image
        assert image_spans(model, prompt(family)[0]) == [(start, 4 + rows)]

    @pytest.mark.parametrize(
        ("ids", "spans"),
        [
            ([], []),
            ([1, 2, 3], []),
            ([IMAGE], [(0, 1)]),
            ([1, IMAGE, IMAGE, 2, IMAGE], [(1, 3), (4, 5)]),
            ([START, IMAGE, IMAGE, END, START, VIDEO, END, 3], [(0, 7)]),
            ([START, 1, END, IMAGE, 2, START], [(2, 4)]),
        ],
    )
    def test_rows_with_what_begins_and_ends_them(self, ids: list[int], spans: list[tuple[int, int]]) -> None:
        config = {
            "image_token_id": IMAGE,
            "image_token_index": None,
            "video_token_index": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
        }
        for given in (config, SimpleNamespace(**config), SimpleNamespace(config=SimpleNamespace(**config))):
            assert image_spans(given, ids) == spans
        thinker = SimpleNamespace(config=SimpleNamespace(thinker_config=SimpleNamespace(**config)))
        assert image_spans(thinker, mx.array(ids, mx.int32)) == spans

    @pytest.mark.parametrize(
        ("config", "ids", "rule"),
        [
            ({"vocab_size": 96}, [1, 2], "`model` must have a configuration"),
            ({"image_token_id": IMAGE}, [[1, 2], [IMAGE, 2]], "`input_ids` must be one prompt"),
            ({"image_token_index": -200}, [1, -200, 3], "`input_ids` must hold a token of the vocabulary"),
        ],
    )
    def test_refused(self, config: dict[str, int], ids: Any, rule: str) -> None:
        with pytest.raises(QuantizerConfigError, match=f"image_spans: {rule}"):
            image_spans(config, ids)


@pytest.mark.parametrize("part", ["model", "language model"])
def test_the_second_pass_of_kvzip_reads_text(family: str, model: nn.Module, part: str) -> None:
    text = [token for token in tokens(VOCABULARY) if token < IMAGE][:40]
    options = KVzipOptions(kvzip_budget=24)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kvzip", options=options))
    forget(model)
    logits = kvzip_prefill(model if part == "model" else model.language_model, caches, mx.array(text), chunk=CHUNK)
    forget(model)
    plain = own(model)
    for start in range(0, len(text), CHUNK):
        want = model.language_model(mx.array([text[start : start + CHUNK]]), cache=plain).logits[:, -1]
    assert mx.allclose(logits, want, atol=1e-4)
    assert {(cache.offset, cache.size()) for cache in ours(caches)} == {(len(text), 24)}


class TestProtection:
    """The image lies in the middle of a long text, where eviction would reach it."""

    TEXT = (40, 40)

    def held(self, model: nn.Module, name: str, config: Transform | KVCacheConfig) -> list[set[int]]:
        """Positions in each head of each layer after the prompt and some tokens."""
        caches = KVCacheBuilder.for_model(model, config)
        generated(model, name, caches, *self.TEXT)
        return [head for cache in ours(caches) for head in positions(cache)]

    def image(self, model: nn.Module, name: str) -> tuple[list[tuple[int, int]], set[int]]:
        """Its spans, and their positions."""
        spans = image_spans(model, prompt(name, *self.TEXT)[0])
        return spans, {place for start, end in spans for place in range(start, end)}

    @pytest.mark.parametrize("way", WAYS)
    def test_images_stay(self, family: str, model: nn.Module, way: str | None) -> None:
        spans, image = self.image(model, family)
        options = {"h2o_budget": 24, "h2o_n_sink": 1, "h2o_grace": 2}
        free, bound = H2OOptions(**options), H2OOptions(**options, h2o_protect=spans)
        with hook(model, way):
            lost = self.held(model, family, KVCacheConfig(method="h2o", options=free))
            kept = self.held(model, family, KVCacheConfig(method="h2o", options=bound))
        assert not any(image <= head for head in lost)
        assert all(image <= head for head in kept)
        assert {len(head) for head in kept} == {24}

    @pytest.mark.parametrize("method", PROTECTING, ids=lambda row: row.name)
    def test_by_every_method_that_evicts(self, qwen: nn.Module, method: Method) -> None:
        spans, image = self.image(qwen, "qwen2_vl")
        size = {} if method.name in ("streaming_llm", "rocketkv") else {"budget": 32}
        free, bound = (method.build(**{**SMALL[method.name], **size, **more}) for more in ({}, {"protect": spans}))
        assert not any(image <= head for head in self.held(qwen, "qwen2_vl", free))
        assert all(image <= head for head in self.held(qwen, "qwen2_vl", bound))
