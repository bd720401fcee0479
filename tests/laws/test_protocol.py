"""Law: what mlx_lm asks of a cache is there at every moment, and nothing that would lead it astray."""

import itertools
import math

import mlx.core as mx
import pytest

from laws.common import SPEC, Subject, assert_same, keys_and_values, live, over, run_of, spans
from vq_adapters import QuantizerConfigError, TransformKVCache


@over()
def test_an_empty_cache_answers_everything(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    assert (cache.offset, cache.size(), cache.nbytes, cache.trim(3)) == (0, 0, 0, 0)
    assert cache.empty()
    assert cache.keys is None and cache.values is None
    assert bool(cache) is True
    mx.eval(cache.state)
    assert isinstance(cache.is_trimmable(), bool)
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"
    again = TransformKVCache.from_state(cache.state)
    assert (again.offset, again.empty()) == (0, True)
    with pytest.raises(QuantizerConfigError):
        cache.keys_and_values()


@over()
@pytest.mark.parametrize("held", [0, 20], ids=["empty", "filled"])
def test_make_mask_takes_every_combination(subject: Subject, held: int) -> None:
    """As wide as the rows that come next, and no query sees more than its window."""
    for n, window, return_array in itertools.product([1, 5, 12], [None, 8], [False, True]):
        cache = TransformKVCache(subject.transform, query_heads=SPEC.kv_heads)
        keys, values = keys_and_values(SPEC, held + n)
        if held:
            cache.update_and_fetch(keys[:, :, :held], values[:, :, :held])
        mask = cache.make_mask(n, return_array=return_array, window_size=window)
        keys_out, _ = cache.update_and_fetch(keys[:, :, held:], values[:, :, held:])
        if isinstance(mask, mx.array):
            assert mask.shape[-2:] == (n, keys_out.shape[2])
            seen = mask.sum(axis=-1)
            assert (seen >= 1).all() and (seen <= min(window or math.inf, held + n)).all()
        else:
            assert not return_array
            assert window is None or held + n <= window
            assert mask == (None if n == 1 else "causal")


@over()
def test_no_attribute_switches_the_attention_path(subject: Subject) -> None:
    """mlx_lm takes `bits` for its own quantized layout; a length of 0 would hide an empty cache's mask."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 40)
    for _ in range(2):
        for name in ("bits", "group_size", "__len__", "to_quantized"):
            assert not hasattr(cache, name)
        cache.update_and_fetch(keys, values)


@over()
def test_numbers_at_every_moment(subject: Subject) -> None:
    """Counters follow each call at once, and none of them computes anything."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 60)
    for span in spans([16, 1, 16, 1, 1, 25]):
        cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        assert cache.offset == span.stop
        assert 0 < cache.size() <= span.stop
        assert isinstance(cache.nbytes, int) and cache.nbytes > 0
        assert not cache.empty()
        assert cache.keys.shape == cache.values.shape == (2, 2, cache.size(), 64)


@over()
def test_setting_keys_ties_and_changes_nothing(subject: Subject) -> None:
    """Models that run in a pipeline assign `cache.keys = mx.depends(cache.keys, ...)`."""
    cache = TransformKVCache(subject.transform)
    cache.update_and_fetch(*keys_and_values(SPEC, 30))
    before = live(subject.transform, run_of(cache))
    cache.keys = mx.depends([cache.keys], [mx.zeros((1,))])[0]
    cache.values = mx.depends([cache.values], [mx.zeros((1,))])[0]
    assert_same(live(subject.transform, run_of(cache)), before, "after setting keys and values")


@over()
def test_wrong_input_changes_nothing(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 30)
    cache.update_and_fetch(keys, values)
    before = cache.state
    wrong = [
        (keys[0], values[0]),
        (keys, values[:, :, :5]),
        (keys[:, :1], values[:, :1]),
        (keys[..., :32], values),
        (keys, values[..., :32]),
        (keys[:1], values[:1]),
        (keys.astype(mx.float32), values.astype(mx.float32)),
    ]
    for k, v in wrong:
        with pytest.raises(QuantizerConfigError):
            cache.update_and_fetch(k, v)
        assert_same(cache.state, before, f"after {k.shape} {v.shape}")
    assert cache.offset == 30
