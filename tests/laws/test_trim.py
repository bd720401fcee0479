"""Law: a trim is exact, or it is refused and changes nothing."""

import attrs
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.common import SPEC, Run, Subject, assert_same, begin, feed, keys_and_values, live, over, spans
from vq_adapters import QuantizerConfigError, TransformKVCache
from vq_functional.core.codec import PlainCoder
from vq_functional.core.transform import Transform

TOTAL = 100


def trimmed(transform: Transform, run: Run, n: int) -> Run:
    return Run(transform.trim(run.state, n), transform.trimmed(run.fill, n))


def exact_rows(transform: Transform, run: Run) -> int:
    """How many of the newest rows are not in groups, so that they stand alone."""
    return run.fill.rows - run.fill.coded


@over(without=["evicts"])
@given(tokens=st.integers(1, TOTAL), dropped=st.integers(0, TOTAL + 5))
def test_the_rest_reads_as_before(subject: Subject, tokens: int, dropped: int) -> None:
    """Rows that were in groups included: none is quantized a second time."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, tokens)
    run = feed(transform, begin(transform), keys, values)
    rest = max(tokens - dropped, 0)
    after = trimmed(transform, run, dropped)
    assert after.fill.tokens == after.fill.rows == rest
    assert after.state.offset.tolist() == [rest] * SPEC.batch
    grouped = run.fill.coded > rest  # groups can only be read whole
    before = transform.read(run.state, run.fill if grouped else attrs.evolve(run.fill, tokens=rest, rows=rest))
    wanted = tuple(x[:, :, :rest] for x in before)
    assert_same(transform.read(after.state, after.fill), wanted, f"{tokens} tokens without {dropped}")


@over(without=["evicts"])
@given(tokens=st.integers(1, TOTAL), dropped=st.integers(1, TOTAL), pieces=st.sampled_from([[1], [5, 1], [40]]))
def test_trimmed_and_fed_again_equals_never_trimmed(
    subject: Subject, tokens: int, dropped: int, pieces: list[int]
) -> None:
    """As far back as the rows stand alone; every row of a row store does."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, tokens + sum(pieces))
    straight = feed(transform, begin(transform), keys[:, :, :tokens], values[:, :, :tokens])
    dropped = min(dropped, exact_rows(transform, straight))
    rest = tokens - dropped
    back = trimmed(transform, straight, dropped)
    again = feed(transform, back, keys[:, :, rest:tokens], values[:, :, rest:tokens])
    assert_same(live(transform, again), live(transform, straight), f"{dropped} of {tokens} rows back and again")
    new = keys[:, :, tokens:], values[:, :, tokens:]
    one, two = feed(transform, again, *new, pieces), feed(transform, straight, *new, pieces)
    assert_same(live(transform, one), live(transform, two), "later")


@over(without=["evicts", "anchors"])
def test_after_a_deep_trim_the_newest_rows_are_those_of_a_fresh_start(subject: Subject) -> None:
    """Tokens that come after it are held like any others."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 160)
    run = feed(transform, begin(transform), keys[:, :, :TOTAL], values[:, :, :TOTAL])
    run = trimmed(transform, run, 60)
    run = feed(transform, run, keys[:, :, TOTAL:], values[:, :, TOTAL:], [1] * 20 + [40])
    assert run.fill.tokens == 100
    joined = [mx.concatenate([x[:, :, :40], x[:, :, TOTAL:]], axis=2) for x in (keys, values)]
    fresh = feed(transform, begin(transform), *joined)
    assert run.fill == fresh.fill
    for got, want in zip(transform.read(run.state, run.fill), transform.read(fresh.state, fresh.fill)):
        newest = slice(100 - 32, 100)
        assert_same(got[:, :, newest], want[:, :, newest], "the newest rows")
    key_parts, _ = transform.parts(run.state, run.fill)
    assert sum(part.count for part in key_parts if isinstance(part.coder, PlainCoder)) <= 63


@over(without=["evicts", "anchors"])
def test_rounds_of_drafts(subject: Subject) -> None:
    """20 rounds of four tokens in and three back: counters, rows and bytes are those of a cache without drafts."""
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 60)
    junk = keys_and_values(SPEC, 3, seed=8)
    cache, straight = TransformKVCache(transform), TransformKVCache(transform)
    assert cache.is_trimmable()
    for either in (cache, straight):
        either.update_and_fetch(keys[:, :, :40], values[:, :, :40])
    for i in range(40, 60):
        draft = [mx.concatenate([x[:, :, i : i + 1], y], axis=2) for x, y in zip((keys, values), junk)]
        cache.update_and_fetch(*draft)
        assert cache.trim(3) == 3
        straight.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        assert (cache.offset, cache.size()) == (i + 1, i + 1)
    assert_same(cache.keys_and_values(), straight.keys_and_values(), "rows after the drafts")
    assert cache.nbytes == straight.nbytes


@over(without=["evicts"])
def test_a_trim_past_the_start_empties(subject: Subject) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, 50)
    cache.update_and_fetch(keys, values)
    assert cache.trim(60) == 50
    assert (cache.offset, cache.size()) == (0, 0)
    cache.update_and_fetch(keys, values)
    fresh = TransformKVCache(subject.transform)
    fresh.update_and_fetch(keys, values)
    assert_same(cache.keys_and_values(), fresh.keys_and_values(), "after a new start")


@over("evicts")
@pytest.mark.parametrize("tokens", [10, 60], ids=["before-eviction", "after-eviction"])
def test_evicting_caches_refuse(subject: Subject, tokens: int) -> None:
    """Rows that are gone can't come back: honest at every moment, and nothing happens."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(SPEC, tokens)
    for span in spans([tokens - 2, 1, 1]):
        cache.update_and_fetch(keys[:, :, span], values[:, :, span])
    before = cache.state
    assert not cache.is_trimmable()
    assert cache.trim(3) == 0
    assert (cache.offset, cache.trim(tokens)) == (tokens, 0)
    assert_same(cache.state, before, "after a refused trim")
    with pytest.raises(QuantizerConfigError, match=r"trim"):
        subject.transform.trim(cache._state, 1)
