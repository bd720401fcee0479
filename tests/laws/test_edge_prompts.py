"""Law: prompts of no token, of one, and of less than a window or budget are prompts like all others."""

import attrs
import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Subject, assert_same, begin, call, feed, keys_and_values, live, over, run_of, tokens
from vq_adapters import TransformKVCache

STEP = 16


def chunks(n: int) -> list[int]:
    """How generation feeds a prompt: pieces of at most `STEP`, the last token by itself."""
    whole, rest = divmod(n - 1, STEP)
    return [STEP] * whole + ([rest] if rest else []) + [1]


@over()
@pytest.mark.parametrize("n", [1, 2, 16, 17, 32, 33])
def test_prompts_around_the_chunk_size(subject: Subject, n: int) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, n)
    start = 0
    for piece in chunks(n):
        new = slice(start, start + piece)
        held = cache.update_and_fetch(keys[:, :, new], values[:, :, new])
        out = cache.attend(tokens(piece, 7, heads=4), *held, 0.125, cache.make_mask(piece) and "causal")
        assert out.shape == (2, 4, piece, 64)
        assert mx.isfinite(out).all()
        start += piece
    assert cache.offset == n
    if "chunk_invariant" in subject.traits:
        whole = feed(subject.transform, begin(subject.transform), keys, values)
        assert_same(live(subject.transform, run_of(cache)), live(subject.transform, whole), f"{n} tokens in chunks")


@over(without=["share"])
@pytest.mark.parametrize("pieces", [[1], [7], [8], [9], [23], [24], [1, 10], [1, 1, 22], [12, 12]])
def test_nothing_is_given_up_while_there_is_room(subject: Subject, pieces: list[int]) -> None:
    """A prompt shorter than window or budget is held whole; a row that came alone before it is not forgotten."""
    transform, n = subject.transform, sum(pieces)
    keys, values = keys_and_values(SPEC, n)
    run = feed(transform, begin(transform), keys, values, pieces)
    store = transform.store if transform.evicts else transform
    wanted = feed(store, begin(store), keys, values)
    assert run.fill.rows == n
    state = transform.ordered(run.state) if transform.evicts else run.state
    assert_same(
        tuple(part.rows for part in sum(transform.parts(state, run.fill), ())),
        tuple(part.rows for part in sum(store.parts(wanted.state, wanted.fill), ())),
        f"calls {pieces}",
    )


@over()
def test_no_tokens(subject: Subject) -> None:
    """A call without tokens changes nothing and returns what is held."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 40)
    empty = begin(transform)
    after, *_ = call(transform, empty, keys[:, :, :0], values[:, :, :0])
    assert_same(after.state, empty.state, "an empty state")
    full = feed(transform, empty, keys, values)
    after, keys_out, values_out = call(transform, full, keys[:, :, :0], values[:, :, :0])
    assert_same(after.state, full.state, "a state with rows")
    assert_same((keys_out, values_out), transform.read(full.state), "what is returned")


@over()
def test_no_tokens_through_the_adapter(subject: Subject) -> None:
    keys, values = keys_and_values(SPEC, 9)
    cache, straight = TransformKVCache(subject.transform), TransformKVCache(subject.transform)
    for new in (slice(0, 0), slice(0, 8), slice(8, 8), slice(8, 9)):
        keys_out, values_out = cache.update_and_fetch(keys[:, :, new], values[:, :, new])
        assert keys_out.shape[2] == values_out.shape[2] == cache.offset == new.stop
    for new in (slice(0, 8), slice(8, 9)):
        straight.update_and_fetch(keys[:, :, new], values[:, :, new])
    one, two = (live(subject.transform, run_of(each)) for each in (cache, straight))
    assert_same(one, two, "calls without tokens in between")


@over()
@pytest.mark.parametrize("n", [1, 5])
def test_no_batch_rows(subject: Subject, n: int) -> None:
    """A batch of nobody is refused by name."""
    spec = attrs.evolve(SPEC, batch=0)
    with pytest.raises(vq.QuantizerConfigError, match="`keys` must have batch rows"):
        call(subject.transform, begin(subject.transform, spec), *keys_and_values(spec, n))


@over(without=["evicts"])
def test_rows_that_are_all_dropped_read_as_none(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    cache.update_and_fetch(*keys_and_values(SPEC, 5))
    cache.trim(5)
    assert [x.shape for x in cache.keys_and_values()] == [(2, 2, 0, 64)] * 2
