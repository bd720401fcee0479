"""Observers hear of every call, and change none; the distortion they measure is that of what a call sees."""

import copy
import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import BY_CALLS, SMALL, TRANSFORMS, build, forced, shared, tokens

import vq_functional as vq
from vq_adapters import (
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
    TransformKVCache,
    attention_hook,
    observers,
)
from vq_adapters.observers import DistortionObserver, QuantizationEvent, QuantizationObserver, relative_error
from vq_functional.core.transform import Transform
from vq_functional.core.tree import flatten

CALLS = (20, 1, 1, 5, 1)


class Noting(QuantizationObserver):
    def __init__(self) -> None:
        self.events: list[QuantizationEvent] = []

    def on_event(self, event: QuantizationEvent) -> None:
        self.events.append(event)


def draw(n: int, seed: int = 0, heads: int = 2, dim: int = 64, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, heads, n, dim), key=mx.random.key(seed)).astype(mx.float16)


def observed(transform: Transform, *watching: QuantizationObserver) -> TransformKVCache:
    cache = TransformKVCache(transform)
    cache.observers = watching
    return cache


def feed(cache: TransformKVCache, calls: Sequence[int] = CALLS, attends: bool = False) -> list[mx.array]:
    """What the calls gave back, and where they attend, their attention too."""
    found = []
    for i, n in enumerate(calls):
        held = cache.update_and_fetch(draw(n, 2 * i), draw(n, 2 * i + 1))
        found += list(held)
        if attends:
            found.append(cache.attend(draw(n, 50 + i, heads=4), *held, 0.125, None if n == 1 else "causal"))
    return found


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


# Events


def test_the_fields_of_an_event() -> None:
    event = QuantizationEvent(stage="update", input_shape=(1, 2), elapsed_ms=1.5, memory_delta_bytes=3)
    assert event.metadata == {} and event.metadata is not QuantizationEvent("x", ()).metadata
    assert QuantizationEvent("x", (1,), 2.0, 3, {"a": 1}).metadata == {"a": 1}
    with pytest.raises(TypeError):
        QuantizationObserver()  # type: ignore[abstract]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("attends", [False, True], ids=["fetched", "attended"])
def test_every_call_is_told_and_none_changed(name: str, attends: bool) -> None:
    seen, transform = Noting(), TRANSFORMS[name]
    one, two = observed(transform, seen), TransformKVCache(transform)
    for got, want in zip(feed(one, attends=attends), feed(two, attends=attends), strict=True):
        assert mx.array_equal(got, want)
    assert all(mx.array_equal(a, b) for a, b in zip(flatten(one.state)[0], flatten(two.state)[0], strict=True))
    updates = [event for event in seen.events if event.stage == "update"]
    assert [event.input_shape for event in updates] == [(1, 2, n, 64) for n in CALLS]
    assert len(seen.events) - len(updates) == (len(CALLS) if attends else 0)
    for i, (event, n) in enumerate(zip(updates, CALLS, strict=True)):
        told = event.metadata
        assert told["method"] == transform.name and told["cache"] is one and event.elapsed_ms > 0
        assert mx.array_equal(told["keys"], draw(n, 2 * i)) and mx.array_equal(told["values"], draw(n, 2 * i + 1))
        assert told["tokens"].tolist() == [sum(CALLS[:i])]
        assert told["positions"].shape[2] == told["keys_out"].shape[2] == told["values_out"].shape[2]


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in BY_CALLS])
def test_positions_name_the_token_of_each_column(name: str) -> None:
    """Where rows are held as they came, the column of a token is that token's key."""
    seen, transform = Noting(), TRANSFORMS[name]
    feed(observed(transform, seen))
    originals = mx.concatenate([draw(n, 2 * i) for i, n in enumerate(CALLS)], axis=2)
    for event in seen.events:
        keys, positions = event.metadata["keys_out"], event.metadata["positions"]
        positions = np.broadcast_to(np.array(positions), keys.shape[:3])
        told = event.metadata["tokens"].item() + event.input_shape[2]
        assert (positions < told).all() and (positions == told - 1).any()
        for head in range(2):
            here = positions[0, head] >= 0
            want = numbers(originals)[0, head, positions[0, head][here]]
            got = numbers(keys)[0, head][here]
            if transform.coded:
                angle = (got * want).sum(axis=-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
                assert angle.mean() > 0.5
            else:
                assert (got == want).all()


def test_bytes_by_which_a_state_grows() -> None:
    seen = Noting()
    cache = observed(vq.rows(key=vq.int8_codec(), value=vq.int8_codec()), seen)
    feed(cache, [64, 1, 63, 1])
    row = 2 * 2 * (64 + 2)  # two heads, keys and values, a scale for each
    assert [event.memory_delta_bytes for event in seen.events] == [64 * row + 4, 64 * row, 0, 64 * row]
    assert cache.nbytes == 192 * row + 4


def test_all_observers_are_told_in_order() -> None:
    order: list[int] = []

    class Ordered(QuantizationObserver):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_event(self, event: QuantizationEvent) -> None:
            order.append(self.number)

    feed(observed(vq.rows(), Ordered(1), Ordered(2), Ordered(3)), [4, 1])
    assert order == [1, 2, 3] * 2


def test_an_empty_call_tells_nothing() -> None:
    seen = Noting()
    cache = observed(vq.rows(), seen)
    feed(cache, [4, 0, 1])
    assert [event.input_shape[2] for event in seen.events] == [4, 1]


# Nothing is paid where nobody watches


def test_without_observers_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made for nobody")

    monkeypatch.setattr(observers.Watch, "__init__", never)
    monkeypatch.setattr(observers, "QuantizationEvent", never)
    cache = TransformKVCache(vq.turboquant_mse())
    feed(cache, attends=True)
    assert cache.observers == ()


def test_events_are_never_told_inside_a_compiled_function() -> None:
    """Every array of an event has numbers: none is a tracer."""
    seen = Noting()
    cache = observed(vq.turboquant_mse(), seen)
    for _ in range(2):
        feed(cache, [1, 1, 1], attends=True)
    for event in seen.events:
        for x in event.metadata.values():
            if isinstance(x, mx.array):
                np.array(x.astype(mx.float32))


# Where observers go


def test_a_configuration_hands_its_observers_to_every_cache() -> None:
    seen, model = Noting(), shared("llama")
    builder = KVCacheBuilder().with_method("kivi").with_observer(seen)
    caches = KVCacheBuilder.for_model(model, builder.config())
    forced(model, caches, [tokens(10), [3]])
    assert len(seen.events) == 4 and {event.metadata["method"] for event in seen.events} == {"kivi"}
    assert [event.metadata["cache"] for event in seen.events[:2]] == caches
    with attention_hook(model):
        forced(model, caches, [[3]])
    assert [event.stage for event in seen.events[4:]] == ["update", "attend"] * 2


@pytest.mark.parametrize("window", [None, 3])
def test_per_vector_caches_tell_too(window: int | None) -> None:
    seen = Noting()
    cache = KVCacheFactory.create(
        KVCacheConfig(method="turboquant_mse", head_dim=64, observers=[seen], sliding_window=window)
    )
    for i in range(4):
        cache.append(draw(1, i)[0, 0, 0], draw(1, 9 + i)[0, 0, 0])  # type: ignore[union-attr]
    cache.reset()  # type: ignore[union-attr]
    cache.append(draw(1)[0, 0, 0], draw(1)[0, 0, 0])  # type: ignore[union-attr]
    assert [event.input_shape for event in seen.events] == [(1, 1, 1, 64)] * 5


def test_copies_and_batches_keep_their_observers() -> None:
    seen = Noting()
    cache = observed(vq.rows(key=vq.int8_codec()), seen)
    feed(cache, [8])
    batch = TransformKVCache.merge([cache, copy.deepcopy(cache)])
    assert copy.deepcopy(cache).observers == batch.observers == batch.extract(0).observers == (seen,)


@pytest.mark.parametrize("watching", [[1], [Noting], ["x", Noting()]])
def test_anything_but_observers_is_refused(watching: list[Any]) -> None:
    with pytest.raises(QuantizerConfigError, match="`observers`"):
        KVCacheConfig(method="kivi", observers=watching)
    with pytest.raises(QuantizerConfigError, match="`observers`"):
        KVCacheBuilder().with_observer(watching[0])


# Distortion


def by_hand(got: mx.array, wanted: mx.array) -> float:
    return float(np.linalg.norm(numbers(got) - numbers(wanted)) / np.linalg.norm(numbers(wanted)))


def test_no_mean_without_a_call() -> None:
    with pytest.raises(RuntimeError, match="`mean` must follow a call"):
        DistortionObserver().mean()


def test_relative_errors() -> None:
    x, y = draw(5, 1), draw(5, 2)
    assert relative_error(y, x) == pytest.approx(by_hand(y, x), rel=1e-4)
    assert relative_error(x, x) == 0 and relative_error(mx.zeros(3), mx.zeros(3)) == 0
    huge = mx.array([3e38, 1.0])
    assert relative_error(huge * 0.5, huge) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
def test_errors_of_all_rows_that_a_call_sees(bits: int) -> None:
    watching, method = DistortionObserver(), vq.turboquant_mse(bits=bits)
    found = feed(observed(method, watching), attends=True)
    keys, values = (mx.concatenate([draw(n, 2 * i + side) for i, n in enumerate(CALLS)], axis=2) for side in (0, 1))
    assert [record.tokens for record in watching.records] == [20, 21, 22, 27, 28]
    for i, record in enumerate(watching.records):
        seen = slice(0, record.tokens)
        assert record.method == "turboquant_mse" and not record.proxy
        assert record.keys == pytest.approx(by_hand(found[3 * i], keys[:, :, seen]), rel=1e-3)
        assert record.values == pytest.approx(by_hand(found[3 * i + 1], values[:, :, seen]), rel=1e-3)
        queries = numbers(draw(CALLS[i], 50 + i, heads=4)).reshape(1, 2, -1, 64)
        got, want = (queries @ numbers(x).swapaxes(-1, -2) for x in (found[3 * i], keys[:, :, seen]))
        assert record.products == pytest.approx(np.linalg.norm(got - want) / np.linalg.norm(want), rel=1e-3)
    means = watching.mean()
    assert means["keys"] == pytest.approx(np.mean([record.keys for record in watching.records]))
    assert means.keys() == {"keys", "values", "products"}


def test_keys_stand_in_for_queries_that_do_not_come() -> None:
    watching = DistortionObserver()
    (keys, _) = feed(observed(vq.turboquant_mse(), watching), [30])
    (record,) = watching.records
    got, want = (numbers(draw(30)) @ numbers(x).swapaxes(-1, -2) for x in (keys, draw(30)))
    assert record.proxy and record.products == pytest.approx(
        np.linalg.norm(got - want) / np.linalg.norm(want), rel=1e-3
    )


def test_rows_that_are_packed_later_count_from_then_on() -> None:
    watching = DistortionObserver()
    feed(observed(vq.kivi(bits=2, residual_length=32), watching), [32, 31, 1, 1, 1])
    errors = [record.keys for record in watching.records]
    assert errors[:3] == [0, 0, 0] and errors[3] > 0.1


def test_evicted_rows_are_no_error_and_kept_ones_are_exact() -> None:
    watching = DistortionObserver()
    feed(observed(vq.h2o(**SMALL["h2o"]), watching), [30, 1, 1, 10, 1])
    assert all((record.keys, record.values, record.products) == (0, 0, 0) for record in watching.records)


def test_errors_fall_with_bits() -> None:
    errors = []
    for bits in (1, 2, 3, 4, 6):
        watching = DistortionObserver()
        feed(observed(vq.turboquant_mse(bits=bits), watching))
        errors.append(watching.mean())
    assert all(a["keys"] > b["keys"] and a["products"] > b["products"] for a, b in itertools.pairwise(errors))
    assert len({round(error["values"], 6) for error in errors}) == 1


def test_taken_back_tokens_are_forgotten() -> None:
    watching = DistortionObserver()
    cache = observed(vq.rows(), watching)
    feed(cache, [10])
    assert cache.trim(4) == 4
    held = cache.update_and_fetch(draw(3, 99), draw(3, 98))
    assert held[0].shape[2] == 9 and watching.records[-1].keys == 0 and watching.records[-1].tokens == 9


def test_a_late_observer_compares_what_it_has_seen_come() -> None:
    watching, cache = DistortionObserver(), TransformKVCache(vq.turboquant_mse())
    feed(cache, [10])
    cache.observers = (watching,)
    held = cache.update_and_fetch(draw(5, 30), draw(5, 31))
    assert watching.records[0].keys == pytest.approx(by_hand(held[0][:, :, 10:], draw(5, 30)), rel=1e-3)


def test_batches_of_one_length_and_others() -> None:
    watching = DistortionObserver()
    cache = observed(vq.turboquant_mse(), watching)
    cache.update_and_fetch(draw(10, batch=3), draw(10, 1, batch=3))
    assert len(watching.records) == 1
    padded = observed(vq.turboquant_mse(), watching).to_batch([0, 3])
    padded.update_and_fetch(draw(10, batch=2), draw(10, 1, batch=2))
    assert len(watching.records) == 1
    cache.filter([2])
    cache.update_and_fetch(draw(1), draw(1, 1))
    assert watching.records[-1].tokens == 11


def test_caches_are_kept_apart_and_let_go() -> None:
    watching = DistortionObserver()
    one, two = (observed(vq.turboquant_mse(), watching) for _ in range(2))
    feed(one, [10])
    feed(two, [4])
    feed(one, [1])
    assert [record.tokens for record in watching.records] == [10, 4, 11]
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None and len(watching.records) == 3


def test_a_model_is_measured_layer_by_layer() -> None:
    watching, model = DistortionObserver(), build("llama")
    config = KVCacheConfig(method="turboquant_mse", bit_width_inlier=4, observers=[watching])
    caches = KVCacheBuilder.for_model(model, config)
    with attention_hook(model):
        got = forced(model, caches, [tokens(20), [5]])
    want = forced(model, make_prompt_cache(model), [tokens(20), [5]])
    assert got.shape == want.shape and len(watching.records) == 4
    assert all(0 < record.keys < 0.2 and 0 < record.products < 0.3 and not record.proxy for record in watching.records)
