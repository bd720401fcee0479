"""Law: a state that is saved and loaded goes on exactly as the one that was not."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from laws.common import SPEC, Subject, assert_same, keys_and_values, over, spans
from vq_adapters import QuantizerConfigError, TransformKVCache


def through_a_file(cache: TransformKVCache, path: Path) -> TransformKVCache:
    """As mlx_lm stores a prompt cache: named arrays in one safetensors file."""
    file = str(path / "cache.safetensors")
    mx.save_safetensors(file, {str(i): array for i, array in enumerate(cache.state)})
    loaded = mx.load(file)
    return TransformKVCache.from_state([loaded[str(i)] for i in range(len(loaded))], cache.meta_state)


def ahead(cache: TransformKVCache, keys: mx.array, values: mx.array, pieces: Sequence[int]) -> list[mx.array]:
    """Everything that the calls return, plain arrays in order."""
    out = []
    for span in spans(pieces):
        out += [mx.array(x) for x in cache.update_and_fetch(keys[:, :, span], values[:, :, span])]
    mx.eval(out)
    return out


@over()
@pytest.mark.parametrize("before", [[40], [70, 1, 1, 1], [1], []], ids=["prompt", "decoded", "one-token", "empty"])
def test_loaded_equals_never_saved(subject: Subject, before: list[int], tmp_path: Path) -> None:
    keys, values = keys_and_values(SPEC, 120)
    cache = TransformKVCache(subject.transform)
    ahead(cache, keys, values, before)
    loaded = through_a_file(cache, tmp_path)
    start = sum(before)
    assert loaded.transform == cache.transform
    assert (loaded.offset, loaded.size(), loaded.nbytes) == (start, cache.size(), cache.nbytes)
    assert_same(loaded.state, cache.state, "what was loaded")
    rest, pieces = (keys[:, :, start:], values[:, :, start:]), [1, 1, 5, *[1] * 30]
    assert_same(tuple(ahead(loaded, *rest, pieces)), tuple(ahead(cache, *rest, pieces)), "what later calls return")
    assert_same(loaded.state, cache.state, "later")


@over()
def test_state_can_be_read_after_each_chunk(subject: Subject) -> None:
    """Reading changes nothing, and `mx.eval` reaches every array."""
    keys, values = keys_and_values(SPEC, 64)
    read, unread = TransformKVCache(subject.transform), TransformKVCache(subject.transform)
    for span in spans([16, 16, 1, 1, 16]):
        new = keys[:, :, span], values[:, :, span]
        read.update_and_fetch(*new)
        unread.update_and_fetch(*new)
        state = read.state
        assert len(state) > 1 and all(type(array) is mx.array for array in state)
        mx.eval(state)
        assert read.nbytes > 0 and read.size() > 0 and not read.empty()
    assert_same(read.state, unread.state, "after reading `state` in between")


@over()
def test_damaged_states_are_refused(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    ahead(cache, *keys_and_values(SPEC, 30), [30])
    description, *leaves = cache.state
    wider = [mx.concatenate([leaf, leaf], axis=-1) for leaf in leaves]
    for damaged in ([], leaves, [description], [description, *leaves[:-1]], [description, *wider]):
        with pytest.raises(QuantizerConfigError):
            TransformKVCache.from_state(damaged)
        before = cache.state
        with pytest.raises(QuantizerConfigError):
            cache.state = damaged
        assert_same(cache.state, before, "the cache that was asked to load it")
