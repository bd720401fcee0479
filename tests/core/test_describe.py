"""Descriptions: every transform survives JSON, and a file can name nothing but what is loaded."""

import json
from typing import Any

import mlx.core as mx
import pytest

import vq_functional as vq
from vq_functional.core.codec import Codec, PlainCodec
from vq_functional.core.describe import describe, restore
from vq_functional.core.transform import Transform
from vq_functional.core.tree import flatten
from vq_functional.methods import TABLE

SPEC = vq.KVSpec(kv_heads=2, key_dim=64, value_dim=64, capacity=96)
TRANSFORMS = {
    **{method.name: method.build() for method in TABLE},
    "kivi, options": vq.kivi(bits=3, group_size=64, residual_length=0),
    "turboquant_rvq, options": vq.turboquant_rvq(bits=1, seed=7, value_bits=8, residual="laplace"),
    "qjl, options": vq.qjl(jl_dim=96, seed=3, sketch="gaussian"),
    "rows": vq.rows(),
    "rows of codecs": vq.rows(key=PlainCodec("float16"), value=vq.int8_codec(), name="mine"),
    "policy over codes": vq.chain(
        vq.h2o_policy(budget=40, n_sink=2, grace=3, protect=[(5, 7), (9, 10)]),
        vq.rows(key=vq.turboquant_mse_codec(bits=3), value=vq.int8_codec()),
    ),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def through_json(part: Any) -> Any:
    return restore(json.loads(json.dumps(describe(part))))


def draw(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.float16)


@transforms
def test_a_transform_survives_json(transform: Transform) -> None:
    back = through_json(transform)
    assert type(back) is type(transform) and back == transform and hash(back) == hash(transform)
    assert describe(back) == describe(transform)


@transforms
def test_the_restored_one_does_the_same(transform: Transform) -> None:
    back = through_json(transform)
    results = []
    for each in (transform, back):
        state = each.init_state(SPEC)
        for i, n in enumerate((40, 1)):
            state, *rows = each.update(state, draw(1, 2, n, 64, seed=i), draw(1, 2, n, 64, seed=9 + i))
        leaves, structure = flatten(state)
        results.append(((*leaves, *rows), structure))
    (one, first), (two, second) = results
    assert first == second
    assert all(mx.array_equal(a, b, equal_nan=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("method", TABLE, ids=lambda method: method.name)
def test_options_survive_json(method: Any) -> None:
    options = method.options()
    assert through_json(options) == options


@pytest.mark.parametrize(
    "codec", [PlainCodec(), PlainCodec("bfloat16"), vq.int8_codec(), vq.qjl_codec(), vq.turboquant_rvq_codec(bits=3)]
)
def test_a_codec_survives_json(codec: Codec) -> None:
    assert through_json(codec) == codec


def test_a_description_names_the_kind_and_every_option() -> None:
    data = describe(vq.kivi(bits=4, group_size=64, residual_length=96))
    assert (data["kind"], data["name"], data["residual"]) == ("Blocks", "kivi", 96)
    assert data["key"] == {"kind": "ChannelGroupsCodec", "bits": 4, "group_size": 64}


@transforms
def test_two_transforms_have_two_descriptions(transform: Transform) -> None:
    same = [name for name, other in TRANSFORMS.items() if describe(other) == describe(transform)]
    assert len(same) == 1


@pytest.mark.parametrize(
    "kind", ["system", "os.system", "eval", "Path", "Exception", "BlockState", "mx", "", None, 3, "__import__"]
)
def test_a_kind_that_is_not_loaded_is_refused(kind: Any) -> None:
    for data in ({"kind": kind}, {"kind": "Blocks", "key": {"kind": kind, "bits": 2}}, [{"kind": kind}]):
        with pytest.raises(vq.QuantizerConfigError, match="`kind`"):
            restore(data)


def test_a_kind_that_is_not_loaded_may_only_be_not_imported() -> None:
    with pytest.raises(vq.QuantizerConfigError, match=r"import the module that defines it .*; got 'MyPolicy'$"):
        restore({"kind": "MyPolicy", "budget": 8})


def test_a_description_without_a_kind_is_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="`kind`"):
        restore({"bits": 2})


@pytest.mark.parametrize("field, value", [("bits", 9), ("bits", "2"), ("group_size", 0)])
def test_options_from_a_file_obey_the_rules_of_options(field: str, value: Any) -> None:
    data = describe(vq.kivi())
    data["key"][field] = value
    with pytest.raises(vq.QuantizerConfigError, match=f"`{field}`"):
        restore(data)


def test_policy_from_a_file_keeps_its_spans() -> None:
    policy = vq.h2o_policy(budget=40, protect=[(5, 7)])
    assert through_json(policy).protect == ((5, 7),)
