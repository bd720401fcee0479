"""The documented cache classes: their members, and that they stay what they are."""

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from configs import CALLS, CONFIGS, DV, EMPTY, READ_BACK, B, D, H, counted, feed, leaves_equal, rows, statistics

import vq_adapters
import vq_functional as vq
from vq_adapters import KVCache, QuantizerConfigError, TransformKVCache
from vq_adapters.classes import CLASSES

DOCUMENTED = json.loads(Path(__file__).with_name("documented_classes.json").read_text())
# Documented properties that every cache has.
PROTOCOL = {"offset", "state", "nbytes", "merge"}

classes = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)


def test_every_class_is_here():
    assert set(CLASSES.values()) == set(CONFIGS) == set(EMPTY)
    assert {kind.method: kind for kind in CONFIGS} == CLASSES
    for kind in CONFIGS:
        assert getattr(vq_adapters, kind.__name__) is kind
        assert kind.__name__ in vq_adapters.__all__


def signature(member: Any, bound: bool) -> str:
    """Parameters and defaults as the documentation writes them, without types."""
    parameters = list(inspect.signature(member).parameters.values())[1 if bound else 0 :]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


@pytest.mark.parametrize("name", DOCUMENTED)
class TestDocumented:
    def test_constructor(self, name):
        wanted = DOCUMENTED[name]["signature"]
        if wanted is not None:
            assert signature(getattr(vq_adapters, name), bound=False) == wanted

    def test_methods(self, name):
        kind = getattr(vq_adapters, name)
        for text in DOCUMENTED[name]["methods"]:
            member, _, parameters = text.removeprefix("static ").partition("(")
            static = text.startswith("static ")
            assert isinstance(inspect.getattr_static(kind, member), staticmethod) == static
            assert signature(getattr(kind, member), bound=not static) == f"({parameters}"

    def test_properties(self, name):
        kind, wanted = getattr(vq_adapters, name), set(DOCUMENTED[name]["properties"])
        for member in wanted - {"merge"}:
            assert isinstance(inspect.getattr_static(kind, member), property), member
            assert getattr(kind, member).__doc__
        if kind in EMPTY:
            assert set(EMPTY[kind]) == wanted - PROTOCOL

    def test_caches_of_a_model_join_in_batches(self, name):
        """Where the documentation has a property that raises."""
        kind = getattr(vq_adapters, name)
        if issubclass(kind, TransformKVCache):
            assert inspect.ismethod(kind.merge)
        else:
            assert not hasattr(kind, "merge")
            assert "merge" not in DOCUMENTED[name]["properties"]


@pytest.mark.parametrize("wrong", ["kivi", CONFIGS[CLASSES["kivi"]], vq.h2o_policy(), None], ids=type)
def test_a_cache_is_of_a_transform(wrong):
    rule = r"^TransformKVCache: `transform` must be a Transform, such as kivi\(bits=4\); got "
    with pytest.raises(QuantizerConfigError, match=rule):
        TransformKVCache(wrong)


@classes
def test_a_cache_tells_what_it_is(kind):
    """In a batch by its rows; to look at it changes nothing."""
    cache = kind(CONFIGS[kind])
    assert repr(cache) == f"{kind.__name__}({kind.method}, 0 tokens, 0 bytes)"
    cache.update_and_fetch(*rows(12))
    before = cache._unsettled
    assert repr(cache).startswith(f"{kind.__name__}({kind.method}, {' + '.join(['12'] * B)} tokens, ")
    assert cache._unsettled is before
    held = cache.nbytes
    assert repr(cache).endswith(f", {held} bytes)")


def test_names_of_the_same():
    assert vq_adapters.L2NormKVCache is vq_adapters.KNormKVCache
    assert issubclass(vq_adapters.TurboQuantKVCache, KVCache)


@classes
class TestStatistics:
    def test_empty(self, kind):
        cache = kind(CONFIGS[kind])
        assert statistics(cache) == EMPTY[kind]
        for name, value in EMPTY[kind].items():
            assert type(getattr(cache, name)) is type(value), name

    @pytest.mark.parametrize("n", [1, 30])
    def test_reading_them_changes_nothing(self, kind, n):
        cache, other = kind(CONFIGS[kind]), kind(CONFIGS[kind])
        queries = mx.random.normal((B, 2 * H, n, D), key=mx.random.key(9)).astype(mx.float16)
        feed(cache, (20,))
        keys, values = cache.update_and_fetch(*rows(n, seed=1))
        before = statistics(cache)
        cache.attend(queries, keys, values, D**-0.5, "causal" if n > 1 else None)
        feed(other, (20,))
        keys, values = other.update_and_fetch(*rows(n, seed=1))
        other.attend(queries, keys, values, D**-0.5, "causal" if n > 1 else None)
        assert leaves_equal(cache, other)
        assert before == statistics(cache) == statistics(other)

    def test_reading_them_evaluates_nothing(self, kind):
        """Nothing has a value while a function is traced, so that whoever asks for one gets an error."""
        cache, read = kind(CONFIGS[kind]), []

        def traced(keys, values, key, value):
            cache.update_and_fetch(keys, values)
            read.append(counted(cache))
            returned = cache.update_and_fetch(key, value)
            read.append(counted(cache))
            return tuple(mx.array(x) for x in returned)

        mx.compile(traced)(*rows(30), *rows(1, seed=1))
        other = feed(kind(CONFIGS[kind]), (30,))
        assert read[0] == counted(other)
        other.update_and_fetch(*rows(1, seed=1))
        assert read[1] == counted(other)

    def test_those_that_read_back_say_so(self, kind):
        for name in READ_BACK.get(kind, set()):
            assert re.search(r"Reads .*back", getattr(kind, name).__doc__)

    def test_no_name_that_mlx_lm_reads_as_its_own_quantization(self, kind):
        cache = feed(kind(CONFIGS[kind]), (5,))
        assert not hasattr(cache, "bits")
        assert not hasattr(cache, "group_size")


@classes
class TestSameClass:
    def test_same_rows_as_the_plain_class(self, kind):
        config = CONFIGS[kind]
        cache, plain = kind(config), TransformKVCache(config.transform(), max_tokens=config.max_tokens)
        feed(cache)
        feed(plain)
        assert leaves_equal(cache, plain)

    def test_deepcopy(self, kind):
        cache = feed(kind(CONFIGS[kind]))
        before = statistics(cache)
        other = copy.deepcopy(cache)
        feed(other, (4, 1))
        assert type(other) is kind
        assert statistics(cache) == before != statistics(other)

    def test_state(self, kind):
        cache = feed(kind(CONFIGS[kind]))
        other = kind.from_state(list(cache.state))
        assert type(other) is kind
        assert leaves_equal(cache, other)
        assert statistics(other) == statistics(cache)

    def test_batches(self, kind):
        """A batch's statistics are those of its rows together, and a row taken out is what it was."""
        alone = [feed(kind(CONFIGS[kind]), calls, batch=1) for calls in ((9,), CALLS, ())]
        batch = kind.merge(alone)
        assert type(batch) is kind
        name = next(name for name in EMPTY[kind] if name.endswith("bytes") and "evicted" not in name)
        assert getattr(batch, name) == sum(getattr(cache, name) for cache in alone)
        for i, cache in enumerate(alone):
            row = batch.extract(i)
            assert type(row) is kind
            assert statistics(row) == statistics(cache)
        batch.filter([1])
        assert getattr(batch, name) == getattr(alone[1], name)
        batch.extend(kind.merge(alone[:1]))
        assert type(batch) is kind
        assert getattr(batch, name) == getattr(alone[1], name) + getattr(alone[0], name)

    def test_left_padding(self, kind):
        batch = kind(CONFIGS[kind]).to_batch([3, 0])
        assert type(batch) is kind
        feed(batch, (10, 1))
        name = "fp16_key_bytes" if "fp16_key_bytes" in EMPTY[kind] else "full_key_bytes"
        name = name if name in EMPTY[kind] else "full_seq_bytes"
        dims = D + DV if name == "full_seq_bytes" else D
        assert getattr(batch, name) == H * (8 + 11) * dims * 2

    def test_capacity_is_a_hard_cap(self, kind):
        config = copy.copy(CONFIGS[kind])
        config.capacity = 12
        cache = feed(kind(config), (10,))
        before = statistics(cache)
        with pytest.raises(QuantizerConfigError, match="`capacity`"):
            cache.update_and_fetch(*rows(3))
        assert statistics(cache) == before
        feed(cache, (2,))
        assert kind.from_state(cache.state).max_tokens == 12

    def test_refuses_another_method(self, kind):
        other = next(config for owner, config in CONFIGS.items() if owner is not kind)
        with pytest.raises(QuantizerConfigError, match=f"{kind.__name__}: `method` must be {kind.method}"):
            kind(other)

    def test_refuses_the_state_of_another_method(self, kind):
        owner = next(owner for owner in CONFIGS if owner is not kind)
        state = feed(owner(CONFIGS[owner])).state
        with pytest.raises(QuantizerConfigError, match=f"{kind.__name__}: `transform` must be of {kind.method}"):
            kind.from_state(state)
        cache = feed(kind(CONFIGS[kind]))
        before = statistics(cache)
        with pytest.raises(QuantizerConfigError):
            cache.state = state
        assert statistics(cache) == before

    def test_takes_nothing_beside_a_configuration(self, kind):
        with pytest.raises(TypeError):
            kind(CONFIGS[kind], max_tokens=3)
        with pytest.raises(TypeError):
            kind()
