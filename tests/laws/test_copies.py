"""Law: a deep copy of a cache and the cache itself know nothing of each other."""

import copy
from collections.abc import Sequence

import mlx.core as mx

from laws.common import SPEC, Subject, assert_same, keys_and_values, live, over, run_of, spans
from vq_adapters import TransformKVCache


def more(cache: TransformKVCache, keys: mx.array, values: mx.array, pieces: Sequence[int]) -> TransformKVCache:
    for span in spans(pieces):
        mx.eval(cache.update_and_fetch(keys[:, :, span], values[:, :, span]))
    return cache


@over()
def test_a_copy_goes_its_own_way(subject: Subject) -> None:
    """A prompt cache that two requests continue: both get what a cold start gives, down to the last bit."""
    keys, values = keys_and_values(SPEC, 80)
    other_keys, other_values = keys_and_values(SPEC, 16, seed=5)
    original = more(TransformKVCache(subject.transform), keys, values, [64])
    duplicate = copy.deepcopy(original)
    assert type(duplicate) is type(original)
    more(duplicate, other_keys, other_values, [8, *[1] * 8])
    assert (original.offset, duplicate.offset) == (64, 80)
    more(original, keys[:, :, 64:], values[:, :, 64:], [16])
    cold = more(TransformKVCache(subject.transform), keys, values, [64, 16])
    assert_same(original.state, cold.state, "the original")
    mixed = [mx.concatenate([x[:, :, :64], y], axis=2) for x, y in ((keys, other_keys), (values, other_values))]
    cold = more(TransformKVCache(subject.transform), *mixed, [64, 8, *[1] * 8])
    assert_same(duplicate.state, cold.state, "the copy")


@over()
def test_a_copy_is_not_told_of_trims_filters_and_extensions(subject: Subject) -> None:
    keys, values = keys_and_values(SPEC, 40)
    original = more(TransformKVCache(subject.transform), keys, values, [40])
    duplicate = copy.deepcopy(original)
    before = live(subject.transform, run_of(original))
    duplicate.trim(3)
    duplicate.filter([1])
    duplicate.extend(copy.deepcopy(original))
    assert_same(live(subject.transform, run_of(original)), before, "the original")
    assert original.offset == 40


@over()
def test_copies_of_a_list_of_caches(subject: Subject) -> None:
    keys, values = keys_and_values(SPEC, 40)
    layers = [more(TransformKVCache(subject.transform), keys + i, values, [30]) for i in range(2)]
    copies = copy.deepcopy(layers)
    for cache in copies:
        more(cache, keys[:, :, 30:], values[:, :, 30:], [10])
    assert [cache.offset for cache in layers] == [30, 30]
    assert [cache.offset for cache in copies] == [40, 40]
    cold = more(TransformKVCache(subject.transform), keys, values, [30, 10])
    assert_same(copies[0].state, cold.state, "the first layer's copy")
