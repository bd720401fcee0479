"""Rows captured from models are what their layers see; calibrations are found once and never taken for another's."""

import importlib
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import ARCHITECTURES, VOCABULARY, build, forced, log_probabilities, ours, shared, tokenizer, tokens
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import WhitespaceSplit

import vq_functional as vq
from vq_adapters import (
    KVCacheBuilder,
    KVCacheConfig,
    PALUOptions,
    QuantizerConfigError,
    TransformKVCache,
    XKVOptions,
    calibration,
    load,
    recording,
    save,
)
from vq_adapters.architecture import attentions
from vq_adapters.artifacts import FileArtifactStore
from vq_adapters.calibration import (
    CALIBRATORS,
    Captured,
    calibrate,
    calibration_name,
    capture,
    fingerprint,
    load_calibration,
)
from vq_adapters.rotation import rope_of
from vq_functional.codebook.spectral import spectral
from vq_functional.codebook.spectral_basis import SpectralBasis, spectral_calibrate
from vq_functional.core.describe import describe
from vq_functional.core.table import Table
from vq_functional.ops.rope import Rope

NAME = "scaled_dot_product_attention"
TEXTS = [tokens(40, seed) for seed in range(3)]
SIDES = operator.attrgetter("keys"), operator.attrgetter("values")


def numbers(x: mx.array | None) -> np.ndarray:
    assert x is not None
    return np.array(x.astype(mx.float32))


def by_hand(model: nn.Module, text: list[int], monkeypatch: pytest.MonkeyPatch) -> list[list[mx.array]]:
    """Keys and values of mlx_lm's own caches [n, H, D], and the queries of all attention calls [n, Hq, D]."""
    module = importlib.import_module(type(model).__module__)
    original, asked = getattr(module, NAME), []

    def attention(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        asked.append(queries[0].swapaxes(0, 1))
        return original(queries, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, NAME, attention)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([text]), cache=caches))
    held = [[x[0, :, : len(text)].swapaxes(0, 1) for x in (cache.keys, cache.values)] for cache in caches]
    return [[*pair, queries] for pair, queries in zip(held, asked, strict=True)]


# Capture


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "phi3", "olmo2"])
def test_rows_are_those_of_plain_caches(architecture: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared(architecture, dtype)
    found = capture(model, None, [TEXTS[0]])
    expected = by_hand(model, TEXTS[0], monkeypatch)
    assert len(found) == len(model.layers)
    for layer, rows in zip(found, expected, strict=True):
        for got, want in zip((layer.keys, layer.values, layer.queries), rows, strict=True):
            assert got is not None and got.dtype == dtype and mx.array_equal(got, want)


def test_each_text_begins_at_position_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama")
    found = capture(model, None, TEXTS)
    for i, text in enumerate(TEXTS):
        span = slice(40 * i, 40 * (i + 1))
        for layer, (keys, values, queries) in zip(found, by_hand(model, text, monkeypatch), strict=True):
            assert mx.array_equal(layer.keys[span], keys) and mx.array_equal(layer.values[span], values)
            assert layer.queries is not None and mx.array_equal(layer.queries[span], queries)


@pytest.mark.parametrize("most", [1, 2, 7, 30, 119, 120, 500])
def test_tokens_are_spread_evenly_over_all_texts(most: int) -> None:
    model = shared("llama")
    whole, some = (numbers(capture(model, None, TEXTS, count)[1].keys) for count in (1000, most))
    places = [np.flatnonzero((whole == row).all(axis=(1, 2)))[0] for row in some]
    assert len(places) == min(most, 120)
    assert places == sorted(set(places))
    gaps = np.diff([-places[0] - 1, *places, 2 * 120 - 1 - places[-1]])
    assert gaps.max() - gaps.min() <= max(2, 120 // len(places) // 8)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_long_texts_are_read_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama")
    whole = capture(model, None, TEXTS[:2], 50)
    monkeypatch.setattr(recording, "CHUNK", chunk)
    for one, two in zip(whole, capture(model, None, TEXTS[:2], 50), strict=True):
        for field in ("keys", "values", "queries"):
            np.testing.assert_allclose(numbers(getattr(one, field)), numbers(getattr(two, field)), atol=1e-4)


def test_texts_as_strings() -> None:
    model, text = shared("llama"), " ".join(f"t{token}" for token in TEXTS[0])
    plain = Tokenizer(tokenizer_models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    plain.pre_tokenizer = WhitespaceSplit()
    want = capture(model, None, [TEXTS[0]])
    for encoder in (tokenizer(), plain):
        got = capture(model, encoder, [text, ""])
        assert all(mx.array_equal(a.keys, b.keys) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "deepseek_v3"])
def test_every_architecture(architecture: str) -> None:
    """One entry for each layer that would be compressed; queries where the hook reaches them."""
    model = shared(architecture)
    caches = KVCacheBuilder.for_model(model, vq.rows())
    found = capture(model, None, TEXTS, 30)
    assert len(found) == len(ours(caches))
    for layer in found:
        assert layer.keys.shape[0] == layer.values.shape[0] == 30 and mx.isfinite(layer.keys).all()
        assert layer.queries is None or layer.queries.shape[0] == 30
    reached = architecture not in ("gemma2", "plamo", "stablelm", "deepseek_v2")
    assert reached == all(layer.queries is not None for layer in found) or architecture == "deepseek_v2"


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    kind, before = type(model.layers[0].self_attn), forced(model, make_prompt_cache(model), [TEXTS[0]])
    capture(model, None, TEXTS, 10)
    with pytest.raises(ValueError, match="NaN"):
        capture(model, None, [[3, float("nan")]])  # type: ignore[list-item]
    assert type(model.layers[0].self_attn) is kind and type(make_prompt_cache(model)[0]) is KVCache
    assert mx.array_equal(forced(model, make_prompt_cache(model), [TEXTS[0]]), before)


@pytest.mark.parametrize("texts", [[], [[]], [""]])
def test_no_text_is_refused(texts: list[Any]) -> None:
    with pytest.raises(QuantizerConfigError, match="`texts`"):
        capture(shared("llama"), tokenizer(), texts)


@pytest.mark.parametrize("most", [0, -1, 2.5])
def test_bad_counts_are_refused(most: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="`max_tokens`"):
        capture(shared("llama"), None, TEXTS, most)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="plain KVCache"):
        capture(shared("deepseek_v3"), None, TEXTS)


# Calibration


def same(one: Any, two: Any) -> bool:
    pairs = zip(one.arrays().items(), two.arrays().items(), strict=True)
    return all(a == b and x.dtype == y.dtype and mx.array_equal(x, y) for (a, x), (b, y) in pairs)


@pytest.fixture
def store(tmp_path: Any) -> FileArtifactStore:
    return FileArtifactStore(tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a model is read."""
    seen: list[int] = []

    def counted(*args: Any) -> list[Captured]:
        seen.append(1)
        return capture(*args)

    monkeypatch.setattr(calibration, "capture", counted)
    return seen


STACKED = [method for method in CALIBRATORS if "stacks" in vq.METHODS[method].traits]


@pytest.mark.parametrize("method", [method for method in CALIBRATORS if method not in STACKED])
def test_one_artifact_a_layer(method: str) -> None:
    model = shared("llama")
    found = calibrate(model, None, TEXTS, method, max_tokens=100)
    row = CALIBRATORS[method]
    assert len(found) == 2 and all(isinstance(artifact, row.kind) for artifact in found)
    for artifact, layer in zip(found, capture(model, None, TEXTS, 100), strict=True):
        named = {field: getattr(layer, field) for field in row.names}
        assert same(artifact, row.find(*(getattr(layer, field) for field in row.takes), **named))
        assert same(row.kind.from_arrays(artifact.arrays()), artifact)


@pytest.mark.parametrize("method", STACKED)
@pytest.mark.parametrize("options, sizes", [({}, [2, 2, 1]), ({"group_size": 3}, [3, 2]), ({"group_size": 1}, [1] * 5)])
def test_one_artifact_a_group_of_layers(
    method: str, options: dict[str, Any], sizes: list[int], store: FileArtifactStore
) -> None:
    """Found from the heads of its layers one behind the other, kept once, and the same object for all of them."""
    model, row = build("llama", num_hidden_layers=5), CALIBRATORS[method]
    found = calibrate(model, None, TEXTS, method, max_tokens=100, store=store, **options)
    layers, first = capture(model, None, TEXTS, 100), 0
    arrays, _ = store.load(method, calibration.calibration_name("model", options))
    loaded = load_calibration(model, method, store, **options)
    assert loaded is not None and len(found) == len(loaded) == 5
    for number, size in enumerate(sizes):
        group = layers[first : first + size]
        artifact = row.find(*(np.concatenate([numbers(side(x)) for x in group], axis=1) for side in SIDES))
        for own in (found, loaded):
            assert same(own[first], artifact)
            assert all(one is own[first] for one in own[first : first + size])
        kept = {name.removeprefix(f"{number}.") for name in arrays if name.startswith(f"{number}.")}
        assert kept == set(artifact.arrays())
        first += size
    assert {name.split(".")[0] for name in arrays} == {str(number) for number in range(len(sizes))}


@pytest.mark.parametrize("method", CALIBRATORS)
def test_methods_that_pack_layers_together_say_by_which_options(method: str) -> None:
    names = CALIBRATORS[method].grouped_by
    assert (method in STACKED) == bool(names)
    assert set(names) <= {field.name for field in attrs.fields(vq.METHODS[method].options)}


@pytest.mark.parametrize("method", CALIBRATORS)
def test_tables_are_of_keys_as_the_caches_hold_them(method: str) -> None:
    """Where `for_model` tells a method the model's rotation, calibration does, too."""
    rotated = {"rope"} & {field.name for field in attrs.fields(vq.METHODS[method].options)}
    assert rotated <= set(CALIBRATORS[method].names)


def test_axes_are_those_of_keys_before_their_rotation(store: FileArtifactStore) -> None:
    model = shared("llama")
    (basis, _), (layer, _) = calibrate(model, None, TEXTS, "svdq", store=store), capture(model, None, TEXTS)
    cache = KVCacheBuilder.for_model(model, KVCacheConfig(method="svdq", store=store, head_dim=32))[0]
    assert layer.rope is not None and cache.transform.key.rope == layer.rope
    bare = numbers(layer.rope.undo(layer.keys.swapaxes(0, 1)[None], layer.positions))[0]
    for head, axes, mean in zip(bare, numbers(basis.basis.array), numbers(basis.mean.array), strict=True):
        np.testing.assert_allclose(mean, head.mean(axis=0), atol=1e-4)
        left = (head - mean) - (head - mean) @ axes @ axes.T
        assert np.square(left).sum() < 0.05 * np.square(head - mean).sum()


def test_tables_of_the_options_that_a_configuration_has_come_first(store: FileArtifactStore) -> None:
    """And those of the defaults serve where there are none."""
    model = shared("llama")
    config = KVCacheConfig(method="palu", store=store, head_dim=32, options=PALUOptions(palu_n_head_groups=1))

    def serves(bases: Any) -> bool:
        given = [cache.transform.key.given[0].array for cache in KVCacheBuilder.for_model(model, config)]
        return all(mx.array_equal(x, basis.key_basis.array).item() for x, basis in zip(given, bases, strict=True))

    usual = calibrate(model, None, TEXTS, "palu", store=store)
    assert serves(usual)
    own = calibrate(model, None, TEXTS, "palu", store=store, n_head_groups=1)
    assert serves(own) and not serves(usual)


def test_no_warning_of_what_the_store_has(store: FileArtifactStore) -> None:
    model = shared("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(model, None, TEXTS, "a2ats", store=store)
        KVCacheBuilder.for_model(model, KVCacheConfig(method="a2ats", store=store, head_dim=32))


@pytest.mark.parametrize("method", STACKED)
def test_layers_that_do_not_match_are_not_put_together(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = capture(shared("llama"), None, TEXTS)
    odd = attrs.evolve(layers[1], values=layers[1].values[..., :16])
    monkeypatch.setattr(calibration, "capture", lambda *args: [layers[0], odd])
    with pytest.raises(QuantizerConfigError, match=f"{method}: `model` must have equal heads and sizes"):
        calibrate(shared("llama"), None, TEXTS, method)
    assert len(calibrate(shared("llama"), None, TEXTS, method, group_size=1)) == 2


def test_options_reach_the_method() -> None:
    model = shared("llama")
    found = calibrate(model, None, TEXTS, key_d_eff=3, val_d_eff=5, pooled=True)
    assert {(a.key_d_eff, a.val_d_eff, a.key_axes.shape) for a in found} == {(3, 5, (1, 32, 32))}
    layer = capture(model, None, TEXTS)[0]
    assert same(found[0], spectral_calibrate(layer.keys, layer.values, key_d_eff=3, val_d_eff=5, pooled=True))


def test_calibrated_axes_code_the_rows_of_the_model_better() -> None:
    model = shared("llama")
    for basis, layer in zip(calibrate(model, None, TEXTS[:2]), capture(model, None, TEXTS[2:]), strict=True):
        rows = [x.swapaxes(0, 1)[None] for x in (layer.keys, layer.values)]
        spec = vq.KVSpec(kv_heads=2, key_dim=32, value_dim=32, dtype=mx.float32, capacity=40)
        errors = []
        for method in (spectral(basis=basis, apply_qjl=False), spectral(val_d_eff=16, apply_qjl=False)):
            _, *held = method.update(method.init_state(spec), *rows)
            errors.append([mx.square(a - b).sum().item() for a, b in zip(held, rows)])
        assert all(calibrated < free for calibrated, free in zip(*errors))


def test_a_store_is_asked_first(store: FileArtifactStore, reads: list[int]) -> None:
    model = shared("llama")
    assert load_calibration(model, "spectral", store) is None
    first = calibrate(model, None, TEXTS, store=store)
    again = calibrate(model, None, [], store=store)  # whatever the texts
    loaded = load_calibration(build("llama"), "spectral", store)
    assert len(reads) == 1 and loaded is not None
    assert all(same(a, b) and same(a, c) for a, b, c in zip(first, again, loaded, strict=True))
    other = calibrate(model, None, TEXTS, store=store, pooled=True)
    calibrate(model, None, TEXTS, store=store, model_name="org/tiny")
    assert len(reads) == 3 and other[0].key_axes.shape[0] == 1
    assert len(list(store.folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("method", "options", "others"),
    [
        ("a2ats", {"query_h": np.eye(8)}, [mx.eye(8), Table.of(np.eye(8))]),
        ("vecinfer", {"smooth_factors": np.ones(32), "rounds": 1}, [mx.ones(32)]),
    ],
)
def test_arrays_are_options_too(
    method: str, options: dict[str, Any], others: list[Any], store: FileArtifactStore, reads: list[int]
) -> None:
    """In a store they are what their numbers are."""
    model, name = shared("llama"), next(iter(options))
    first = calibrate(model, None, TEXTS, method, store=store, **options)
    for other in others:
        assert all(map(same, first, calibrate(model, None, [], method, store=store, **{**options, name: other})))
    assert len(reads) == 1
    twice = {**options, name: 2 * options[name]}
    assert calibration_name("model", twice) != calibration_name("model", options)
    assert len(list(store.folder.iterdir())) == 1


def test_a_name_tells_large_arrays_apart() -> None:
    x = np.zeros((50, 50))
    y = np.where(np.arange(50) == 25, 1, x)
    assert calibration_name("model", {"query_h": mx.array(x)}) != calibration_name("model", {"query_h": mx.array(y)})


def test_tables_of_another_model_are_refused(store: FileArtifactStore, reads: list[int]) -> None:
    calibrate(shared("llama"), None, TEXTS, store=store, model_name="mine")
    before = {path: path.read_bytes() for path in store.folder.iterdir()}
    others = [build("llama", seed=1), build("llama", num_hidden_layers=3), shared("qwen3"), shared("llama", mx.float16)]
    for number, other in enumerate(others):
        with pytest.raises(QuantizerConfigError, match=r"`model_name`.*'mine'"):
            calibrate(other, None, TEXTS, store=store, model_name="mine")
        calibrate(other, None, TEXTS, store=store, model_name=f"other {number}")
    assert len(reads) == 5
    assert all(path.read_bytes() == data for path, data in before.items())


def test_damaged_tables_are_refused(store: FileArtifactStore) -> None:
    model = shared("llama")
    calibrate(model, None, TEXTS, store=store)
    (path,) = store.folder.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(QuantizerConfigError, match=path.name):
        calibrate(model, None, TEXTS, store=store)
    path.write_bytes(data)
    arrays, metadata = store.load("spectral", calibration.calibration_name("model", {}))
    for wrong in ({"0.key_axes": arrays["0.key_axes"]}, {"x": arrays["0.key_axes"]}, {**arrays, "9.x": mx.zeros(1)}):
        store.save("spectral", calibration.calibration_name("model", {}), wrong, metadata)
        with pytest.raises(QuantizerConfigError):
            load_calibration(model, "spectral", store)


def test_a_fingerprint_follows_the_weights() -> None:
    one, same_weights = build("llama"), build("llama")
    assert fingerprint(one) == fingerprint(same_weights) != fingerprint(build("llama", seed=1))
    same_weights.layers[1].self_attn.k_proj.weight[0, 0] += 1.0
    assert fingerprint(one) != fingerprint(same_weights)
    nn.quantize(one, group_size=32)
    assert fingerprint(one) != fingerprint(build("llama"))


@pytest.mark.parametrize(
    "options, field",
    [
        ({"method": "kivi"}, "method` needs no calibration; those that do are ('spectral', "),
        ({"method": "spectre"}, "method` must be one of ("),
        ({"rule": object}, "options"),
        ({"rules": 1}, "options"),
        ({"group_size": 2}, "options"),
        ({"rule": "best"}, "rule"),
        ({"method": "xkv", "latent_bits": 4}, "options"),
        ({"method": "xkv", "group_size": 0}, "group_size"),
        ({"model_name": ""}, ""),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], field: str, store: FileArtifactStore) -> None:
    with pytest.raises(QuantizerConfigError, match=re.escape(f"`{field or 'model_name'}")):
        calibrate(shared("llama"), None, TEXTS, store=store, **options)
    assert list(store.folder.iterdir()) == []


def test_methods_that_need_queries_say_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    row = calibration.Calibrator(lambda queries: queries, SpectralBasis, ("queries",))
    monkeypatch.setitem(CALIBRATORS, "asking", row)
    assert len(calibrate(shared("llama"), None, TEXTS, "asking")) == 2
    with pytest.raises(QuantizerConfigError, match="attention hook"):
        calibrate(shared("gemma2"), None, TEXTS, "asking")


# From a store into caches


def quiet(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(*args, **kwargs)


def test_a_configuration_takes_what_its_store_holds(store: FileArtifactStore) -> None:
    model = shared("llama")
    config = quiet(KVCacheConfig, method="spectral", store=store, spectral_model_name="tiny", spectral_val_d_eff=16)
    with pytest.raises(QuantizerConfigError, match=r"`store`.*'tiny'"):
        KVCacheBuilder.for_model(model, config)
    bases = calibrate(model, None, TEXTS, store=store, model_name="tiny")
    caches = KVCacheBuilder.for_model(model, config)
    for number, (cache, basis) in enumerate(zip(caches, bases, strict=True)):
        assert cache.transform == spectral(basis=basis, seed=42 + number)
    logits = forced(model, caches, [TEXTS[0], [5]])
    assert mx.isfinite(log_probabilities(logits)).all()
    with pytest.raises(QuantizerConfigError, match="`model_name`"):
        KVCacheBuilder.for_model(build("llama", seed=1), config)


@pytest.mark.parametrize("method", [name for name in CALIBRATORS if name != "spectral"])
def test_every_calibration_reaches_the_caches(method: str, store: FileArtifactStore) -> None:
    """What the store holds for a layer is in the layer's transform."""
    model = shared("llama")
    found = quiet(calibrate, model, None, TEXTS, method, store=store)
    caches = quiet(KVCacheBuilder.for_model, model, KVCacheConfig(method=method, store=store, head_dim=32))
    for cache, artifact in zip(caches, found, strict=True):
        described, arrays = str(describe(cache.transform)), [x for x in artifact.arrays().values() if x.ndim]
        assert any(str(describe(Table.of(array))) in described for array in arrays)
    assert mx.isfinite(log_probabilities(forced(model, caches, [TEXTS[0], [5]]))).all()


def test_layers_that_are_packed_together_take_the_same(store: FileArtifactStore, tmp_path: Any) -> None:
    model = build("llama", num_hidden_layers=5)
    bases = calibrate(model, None, TEXTS, "xkv", store=store)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="xkv", store=store, head_dim=32))
    stacks = [vq.xkv(basis=bases[first], layers=size) for first, size in ((0, 2), (2, 2), (4, 1))]
    members = [stacks[number].member(layer) for number in range(2) for layer in range(2)]
    assert [cache.transform for cache in caches] == [*members, stacks[2]]
    assert caches[0].transform.stack == caches[1].transform.stack != caches[2].transform.stack
    mx.eval(forced(model, caches, [tokens(100, 7)]))
    save(tmp_path / "caches.safetensors", caches)
    back = load(tmp_path / "caches.safetensors")
    assert [cache.transform for cache in back] == [cache.transform for cache in caches]
    assert mx.array_equal(forced(model, back, [[7], [9, 11]]), forced(model, caches, [[7], [9, 11]]))


def test_axes_of_a_group_code_the_rows_of_the_model_better() -> None:
    """Those of many texts beat those of another text's rows, on rows that neither has seen."""
    model, new = shared("llama"), capture(shared("llama"), None, [tokens(100, 9)])
    errors = []
    for texts in ([tokens(100, seed) for seed in range(5)], [tokens(40, 5)]):
        basis = calibrate(model, None, texts, "xkv", rank=64)[0]
        stack = vq.xkv(layers=2, basis=basis, residual_length=0, latent_bits=16)
        rows = [mx.concatenate([side(x).swapaxes(0, 1) for x in new])[None] for side in SIDES]
        spec = vq.KVSpec(kv_heads=4, key_dim=32, value_dim=32, dtype=mx.float32, capacity=128)
        state, _, _ = stack.update(stack.init_state(spec), *rows)
        held, coded = stack.read(state), state.coded.item()
        assert coded == 96
        errors.append(
            [mx.square(a[:, :, :coded] - b[:, :, :coded]).sum().item() for a, b in zip(rows, held, strict=True)]
        )
    assert all(many < few for many, few in zip(*errors, strict=True))


def test_axes_of_other_groups_are_refused(store: FileArtifactStore) -> None:
    model = build("llama", num_hidden_layers=4)
    calibrate(model, None, TEXTS, "xkv", store=store)
    options = XKVOptions(xkv_group_size=4)
    with pytest.raises(QuantizerConfigError, match=r"`(store|basis)`"):
        KVCacheBuilder.for_model(model, KVCacheConfig(method="xkv", store=store, head_dim=32, options=options))


def test_caches_with_calibrated_axes_go_on_from_their_state() -> None:
    model = shared("llama")
    caches = [TransformKVCache(spectral(basis=basis)) for basis in calibrate(model, None, TEXTS)]
    forced(model, caches, [TEXTS[0]])
    back = [TransformKVCache.from_state(cache.state) for cache in caches]
    assert [cache.transform for cache in back] == [cache.transform for cache in caches]
    merged = TransformKVCache.merge([back[0], caches[0]])
    assert merged.nbytes == 2 * back[0].nbytes
    assert mx.array_equal(forced(model, back, [[7], [9, 11]]), forced(model, caches, [[7], [9, 11]]))


# Rotation


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_the_rotation_of_a_model_is_found(architecture: str) -> None:
    """What is captured, rotated back and forth, is what the model's own module makes of it."""
    for layer, attention in zip(
        capture(shared(architecture), None, TEXTS, 30), attentions(shared(architecture)), strict=True
    ):
        keys = layer.keys[:5].swapaxes(0, 1)[None]
        assert layer.rope is not None and attention is not None
        turned = layer.rope.apply(keys, mx.arange(7, 12))
        np.testing.assert_allclose(np.array(turned), np.array(attention.rope(keys, offset=7)), atol=1e-4)


def test_frequencies_of_a_scaled_rotation_are_found() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    attention = attentions(build("llama", rope_scaling=scaling))[0]
    assert attention is not None
    found, x = rope_of(attention), mx.random.normal((1, 2, 6, 32), key=mx.random.key(3))
    assert found is not None
    turned = found.apply(x, mx.arange(100, 106))
    np.testing.assert_allclose(np.array(turned), np.array(attention.rope(x, offset=100)), atol=1e-4)


def test_a2ats_takes_the_rotation_of_the_model_unless_told_another() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build("llama", rope_theta=123.0)
        own = KVCacheBuilder.for_model(model, KVCacheConfig(method="a2ats", head_dim=32))
        told = KVCacheBuilder.for_model(model, KVCacheConfig(method="a2ats", head_dim=32, a2ats_rope_base=77.0))
    assert own[0].transform.options.rotation(32) == Rope(32, base=123.0)
    assert told[0].transform.options.rotation(32).base == 77.0
