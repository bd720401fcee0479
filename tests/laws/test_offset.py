"""Law: the offset is the number of tokens seen, whatever number of rows is held."""

import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Subject, begin, feed, keys_and_values, over
from vq_adapters import TransformKVCache


@over()
def test_offset_of_a_state(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 120)
    run = begin(transform)
    assert run.state.offset.tolist() == [0, 0]
    run = feed(transform, run, keys[:, :, :64], values[:, :, :64])
    assert run.state.offset.tolist() == [64, 64]
    run = feed(transform, run, keys[:, :, 64:], values[:, :, 64:], [1] * 56, update=vq.compile(transform).update)
    assert run.state.offset.tolist() == [120, 120]
    assert run.state.offset.dtype == mx.int32
    assert run.fill.tokens == 120


@over()
def test_offset_of_the_adapter(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 164)
    assert (cache.offset, cache.size()) == (0, 0)
    cache.update_and_fetch(keys[:, :, :64], values[:, :, :64])
    for i in range(64, 164):
        assert cache.offset == i
        keys_out, _ = cache.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        mx.eval(keys_out)
    assert cache.offset == 164
    assert isinstance(cache.offset, int)
    assert cache.size() <= 164


@over("evicts", "chunk_invariant")
def test_rows_and_tokens_are_two_numbers(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 100)
    cache.update_and_fetch(keys[:, :, :64], values[:, :, :64])
    for i in range(64, 100):
        cache.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert (cache.offset, cache.size()) == (100, subject.transform.policy.budget)


@over()
@pytest.mark.parametrize("padding", [[0, 5], [3, 1]])
def test_padding_is_no_token(subject: Subject, padding: list[int]) -> None:
    transform = subject.transform
    state = transform.init_state(SPEC, mx.array(padding))
    assert state.offset.tolist() == [-pad for pad in padding]
    keys, values = keys_and_values(SPEC, 30)
    state, *_ = transform.update(state, keys, values)
    assert state.offset.tolist() == [30 - pad for pad in padding]
