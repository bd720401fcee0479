"""Law: a call that does not fit is refused, or its rows are NaN; it never overwrites what is held unnoticed."""

import attrs
import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Run, Subject, assert_same, begin, call, feed, keys_and_values, over, run_of, spans
from vq_adapters import QuantizerConfigError, TransformKVCache
from vq_functional.core.transform import Transform


@over()
@pytest.mark.parametrize("last", [1, 7])
def test_a_cap_refuses_and_changes_nothing(subject: Subject, last: int) -> None:
    keys, values = keys_and_values(SPEC, 70)
    cache = TransformKVCache(subject.transform, max_tokens=64)
    for span in spans([40, 1, 22]):
        cache.update_and_fetch(keys[:, :, span], values[:, :, span])
    fits = 64 - cache.offset
    if last > fits:
        before = cache.state
        with pytest.raises(QuantizerConfigError, match=r"64"):
            cache.update_and_fetch(keys[:, :, :last], values[:, :, :last])
        assert_same(cache.state, before, "after a refusal")
        assert cache.offset == 63
    cache.update_and_fetch(keys[:, :, 63:64], values[:, :, 63:64])
    before = cache.state
    with pytest.raises(QuantizerConfigError, match=r"capacity"):
        cache.update_and_fetch(keys[:, :, 64:65], values[:, :, 64:65])
    assert_same(cache.state, before, "after a refusal at the cap")
    assert (cache.offset, cache.max_tokens) == (64, 64)


def first_overflow(transform: Transform, run: Run, n: int, limit: int) -> Run | None:
    """The run just before a call of `n` tokens overflows; None when `limit` tokens never do."""
    spec = attrs.evolve(SPEC, capacity=limit)
    keys, values = keys_and_values(spec, limit)
    for span in spans([n] * (limit // n)):
        full = transform.overflows(run.state, n)
        if full is not None and full.all():
            return run
        assert full is None or not full.any()
        run, keys_out, values_out = call(transform, run, keys[:, :, span], values[:, :, span])
        assert mx.isfinite(keys_out).all() and mx.isfinite(values_out).all()
    return None


@over()
@pytest.mark.parametrize("n", [1, 5])
def test_past_the_capacity_rows_are_nan(subject: Subject, n: int) -> None:
    """Nothing can be raised inside a compiled step, so the step says it aloud in what it returns."""
    transform = subject.transform
    run = first_overflow(transform, begin(transform, attrs.evolve(SPEC, capacity=64)), n, limit=150)
    if run is None:
        assert transform.evicts, "only what gives up rows has room for ever"
        return
    assert run.fill.tokens >= 64 - n
    keys, values = keys_and_values(SPEC, n, seed=3)
    for update in (transform.update, vq.compile(transform).update)[: 2 if n == 1 else 1]:
        _, *rows = call(transform, run, keys, values, update=update)
        for x in rows:
            assert mx.isnan(x).all()
    grown = Run(transform.grow(run.state, transform.capacity(run.state) + 64), run.fill)
    _, *rows = call(transform, grown, keys, values)
    for x in rows:
        assert mx.isfinite(x).all()


@over(without=["evicts"])
def test_only_the_batch_row_that_overflows_says_so(subject: Subject) -> None:
    """A row that begins with padding still has room when its neighbour has none."""
    transform = subject.transform
    spec = attrs.evolve(SPEC, capacity=64)
    state = transform.init_state(spec, mx.array([0, 40]))
    run = feed(transform, Run(state), *keys_and_values(spec, 60))
    while not (full := transform.overflows(run.state, 1)).any():
        run = feed(transform, run, *keys_and_values(spec, 1))
    assert full.tolist() == [True, False]
    _, keys_out, values_out = call(transform, run, *keys_and_values(spec, 1))
    for x in (keys_out, values_out):
        assert mx.isnan(x[0]).all()
        assert mx.isfinite(x[1]).all()


@over()
def test_a_growing_cache_never_overflows(subject: Subject) -> None:
    """The adapter makes room before it is needed, for single tokens and for prompts."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 300)
    for span in spans([100, *[1] * 30, 100, *[1] * 70]):
        keys_out, values_out = cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        assert mx.isfinite(keys_out).all() and mx.isfinite(values_out).all()
    run = run_of(cache)
    assert cache.offset == 300
    assert subject.transform.capacity(run.state) <= run.fill.rows + 64
