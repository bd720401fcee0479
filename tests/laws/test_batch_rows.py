"""Law: a batch row is what it would be alone, whatever its neighbours hold and however it is padded."""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.common import (
    PAIRS,
    SPEC,
    Run,
    Subject,
    assert_same,
    batch_row,
    begin,
    feed,
    keys_and_values,
    live,
    over,
    run_of,
    same_array,
    spans,
    tokens,
)
from vq_adapters import TransformKVCache
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import flatten, map_leaves

ALONE = attrs.evolve(SPEC, batch=1)
STEPS = 8


def fill_after(transform: Transform, pieces: Sequence[int]) -> Fill:
    """How full calls of these lengths leave an empty state."""
    fill = Fill()
    for n in pieces:
        fill = transform.settled(transform.written(fill, n), n) if n else fill
    return fill


def assert_row_is(transform: Transform, batch: Any, index: int, alone: Run, what: str) -> None:
    got = Run(batch_row(batch, index), alone.fill)
    assert_same(live(transform, got), live(transform, alone), f"batch row {index}, {what}")


def padded(rows: Sequence[mx.array], left: Sequence[int], right: Sequence[int], seed: int) -> mx.array:
    """One batch of rows [1, H, S, D], with rows a thousand times larger than any token as padding."""
    batch = []
    for x, before, after in zip(rows, left, right, strict=True):
        junk = tokens(before + after, seed, batch=1, dim=x.shape[3]) * 1000
        batch.append(mx.concatenate([junk[:, :, :before], x, junk[:, :, before:]], axis=2))
    return mx.concatenate(batch, axis=0)


@over()
@pytest.mark.parametrize("with_queries", [False, True], ids=["by-keys", "by-queries"])
@given(pieces=st.lists(st.sampled_from([1, 1, 3, 17, 40]), min_size=1, max_size=5))
def test_each_row_alone(subject: Subject, with_queries: bool, pieces: list[int]) -> None:
    """The other row a thousand times larger: scales, ranges and budgets don't mix."""
    transform = subject.transform
    keys, values = (mx.concatenate([x[:1], x[1:] * 1000]) for x in keys_and_values(SPEC, sum(pieces)))
    queries = tokens(sum(pieces), 7, heads=4) if with_queries else None
    batch = feed(transform, begin(transform), keys, values, pieces, queries)
    for index in range(SPEC.batch):
        row = slice(index, index + 1)
        asking = None if queries is None else queries[row]
        alone = feed(transform, begin(transform, ALONE), keys[row], values[row], pieces, asking)
        assert_row_is(transform, batch.state, index, alone, f"calls {pieces}")


@over()
def test_outputs_of_each_row_alone(subject: Subject) -> None:
    transform = subject.transform
    keys, values = (mx.concatenate([x[:1], x[1:] * 1000]) for x in keys_and_values(SPEC, 45))
    queries = tokens(5, 7, heads=4)

    def outputs(batch: int, k: mx.array, v: mx.array, q: mx.array) -> tuple[mx.array, ...]:
        run = feed(transform, begin(transform, attrs.evolve(SPEC, batch=batch)), k[:, :, :40], v[:, :, :40])
        held = transform.write(run.state, k[:, :, 40:], v[:, :, 40:])
        return (transform.attend(held, q, 0.125), *transform.read(held))

    together = outputs(2, keys, values, queries)
    for index in range(2):
        row = slice(index, index + 1)
        alone = outputs(1, keys[row], values[row], queries[row])
        for got, want in zip(together, alone):
            assert mx.allclose(got[row], want, rtol=1e-3, atol=1e-3 * float(mx.abs(want).max()))


@over(among=PAIRS)
@given(
    padding=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    pieces=st.sampled_from([[40], [3, 37], [20, 20], [30, 4, 6]]),
    with_queries=st.booleans(),
)
def test_left_padding(subject: Subject, padding: tuple[int, int], pieces: list[int], with_queries: bool) -> None:
    """Padding is no sink, uses no budget and enters no scale; decoding goes on as if it had never been."""
    transform, total = subject.transform, sum(pieces)
    singles = [keys_and_values(ALONE, total - pad + STEPS, seed=index) for index, pad in enumerate(padding)]
    keys, values = (padded([single[i] for single in singles], padding, [0, 0], 30 + i) for i in range(2))
    queries = tokens(total + STEPS, 7, heads=4) if with_queries else None
    calls = [*pieces, *[1] * STEPS]
    state = transform.init_state(SPEC, mx.array(padding))
    batch = feed(transform, Run(state), keys, values, calls, queries)
    for index, pad in enumerate(padding):
        own, left = [], pad
        for n in calls:
            own.append(n - min(left, n))
            left -= n - own[-1]
        asking = None if queries is None else queries[index : index + 1, :, pad:]
        alone = feed(transform, begin(transform, ALONE), *singles[index], own, asking)
        assert_row_is(transform, batch.state, index, alone, f"padding {padding}, calls {pieces}")


@over()
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda pair: max(pair) > 0), min_size=1, max_size=3
    ),
    with_queries=st.booleans(),
)
def test_right_padding(subject: Subject, lengths: list[tuple[int, int]], with_queries: bool) -> None:
    """Of each call a row takes in its own number of tokens; afterwards both decode."""
    transform = subject.transform
    singles = [keys_and_values(ALONE, sum(own) + STEPS, seed=i) for i, own in enumerate(zip(*lengths))]
    asked = [tokens(sum(own) + STEPS, 60 + i, batch=1, heads=4) for i, own in enumerate(zip(*lengths))]
    state, starts = transform.init_state(SPEC), [0, 0]
    for call, own in enumerate([*lengths, *[(1, 1)] * STEPS]):
        n = max(own)
        cuts = [slice(start, start + count) for start, count in zip(starts, own)]
        missing = [n - count for count in own]
        keys, values = (
            padded([single[i][:, :, cut] for single, cut in zip(singles, cuts)], [0, 0], missing, 100 + 2 * call + i)
            for i in range(2)
        )
        queries = mx.concatenate(
            [mx.pad(q[:, :, cut], ((0, 0), (0, 0), (0, gap), (0, 0))) for q, cut, gap in zip(asked, cuts, missing)]
        )
        counts = None if call >= len(lengths) else mx.array(own, mx.int32)
        held = transform.write(state, keys, values, counts)
        state = transform.settle(held, queries if with_queries else keys, counts, proxy=not with_queries)
        starts = [cut.stop for cut in cuts]
    for index, own in enumerate(zip(*lengths)):
        calls = [*own, *[1] * STEPS]
        asking = asked[index] if with_queries else None
        alone = feed(transform, begin(transform, ALONE), *singles[index], calls, asking)
        assert alone.fill == fill_after(transform, calls)
        assert_row_is(transform, state, index, alone, f"lengths {lengths}")


@over()
def test_reordering_the_batch_reorders_everything(subject: Subject) -> None:
    """All leaves have the batch on axis 0: picking rows of a state equals picking rows of the input."""
    transform, order = subject.transform, mx.array([2, 0, 1])
    spec = attrs.evolve(SPEC, batch=3)
    keys, values = keys_and_values(spec, 70)
    first = feed(transform, begin(transform, spec), keys[:, :, :40], values[:, :, :40])
    picked = Run(map_leaves(lambda leaf: leaf[order], first.state), first.fill)
    reordered = feed(transform, begin(transform, spec), keys[order][:, :, :40], values[order][:, :, :40])
    assert_same(live(transform, picked), live(transform, reordered), "after the prompt")
    rest = keys[order][:, :, 40:], values[order][:, :, 40:]
    later = [feed(transform, run, *rest, [1] * 30) for run in (picked, reordered)]
    assert_same(live(transform, later[0]), live(transform, later[1]), "30 tokens later")


# The same through the adapter's batches


def fed(transform: Transform, keys: mx.array, values: mx.array, pieces: Sequence[int]) -> TransformKVCache:
    cache = TransformKVCache(transform)
    return more(cache, keys, values, pieces)


def more(cache: TransformKVCache, keys: mx.array, values: mx.array, pieces: Sequence[int]) -> TransformKVCache:
    for span in spans(pieces):
        mx.eval(cache.update_and_fetch(keys[:, :, span], values[:, :, span]))
    return cache


def assert_caches_hold_the_same(got: TransformKVCache, want: TransformKVCache, what: str) -> None:
    one, two = run_of(got), run_of(want)
    assert one.fill == two.fill, what
    assert_same(live(got.transform, one), live(want.transform, two), what)


@over()
def test_merged_caches_go_on_as_before(subject: Subject) -> None:
    """Entries of other lengths, one of them empty."""
    transform, prompts = subject.transform, [40, 7, 0]
    singles = [keys_and_values(ALONE, n + STEPS, seed=i) for i, n in enumerate(prompts)]
    caches = [fed(transform, k[:, :, :n], v[:, :, :n], [n] if n else []) for (k, v), n in zip(singles, prompts)]
    batch = TransformKVCache.merge(caches)
    assert batch.offset.tolist() == prompts
    new = [mx.concatenate([single[i][:, :, n:] for single, n in zip(singles, prompts)], axis=0) for i in range(2)]
    more(batch, *new, [1] * STEPS)
    for index, (single, n) in enumerate(zip(singles, prompts)):
        alone = fed(transform, *single, [n, *[1] * STEPS] if n else [1] * STEPS)
        assert_caches_hold_the_same(batch.extract(index), alone, f"merged row {index}")


@over()
def test_filtered_batches_go_on_as_before(subject: Subject) -> None:
    """After the longest request has left, the others write where they should."""
    transform, padding, prompt = subject.transform, [0, 3, 6], 40
    singles = [keys_and_values(ALONE, prompt - pad + STEPS, seed=i) for i, pad in enumerate(padding)]
    keys, values = (padded([single[i] for single in singles], padding, [0, 0, 0], 30 + i) for i in range(2))
    batch = TransformKVCache(transform)
    batch.prepare(left_padding=padding)
    more(batch, keys[:, :, :prompt], values[:, :, :prompt], [prompt])
    batch.filter([1, 2])
    rows = batch.size()
    more(batch, keys[1:, :, prompt:], values[1:, :, prompt:], [1] * STEPS)
    assert batch.size() <= rows + STEPS
    assert "evicts" in subject.traits or batch.size() == rows + STEPS
    for index in (1, 2):
        alone = fed(transform, *singles[index], [prompt - padding[index], *[1] * STEPS])
        assert_caches_hold_the_same(batch.extract(index - 1), alone, f"row {index} after filter")


@over()
def test_prepared_right_padding(subject: Subject) -> None:
    """A prompt of unequal lengths over two chunks, then decoding."""
    transform, lengths, chunks = subject.transform, [40, 27], [24, 16]
    singles = [keys_and_values(ALONE, n + STEPS, seed=i) for i, n in enumerate(lengths)]
    prompts = [
        padded([single[i][:, :, :n] for single, n in zip(singles, lengths)], [0, 0], [0, 13], 30 + i) for i in range(2)
    ]
    batch = TransformKVCache.merge([TransformKVCache(transform), TransformKVCache(transform)])
    batch.prepare(lengths=lengths, right_padding=[0, 13])
    more(batch, *prompts, chunks)
    batch.finalize()
    assert batch.offset.tolist() == lengths
    new = [mx.concatenate([single[i][:, :, n:] for single, n in zip(singles, lengths)]) for i in range(2)]
    more(batch, *new, [1] * STEPS)
    for index, calls in enumerate([[24, 16], [24, 3]]):
        alone = fed(transform, *singles[index], calls + [1] * STEPS)
        assert_caches_hold_the_same(batch.extract(index), alone, f"row {index}")


@over()
def test_attention_of_a_ragged_batch(subject: Subject) -> None:
    """Mask and rows together: each row's outputs are those that it would have alone."""
    transform, padding, calls = subject.transform, [0, 5], [12, 30, 1, 1]
    singles = [keys_and_values(ALONE, sum(calls) - pad, seed=i) for i, pad in enumerate(padding)]
    keys, values = (padded([single[i] for single in singles], padding, [0, 0], 30 + i) for i in range(2))
    queries = tokens(sum(calls), 7, heads=4)
    batch = TransformKVCache(transform)
    batch.prepare(left_padding=padding)
    alone = [TransformKVCache(transform) for _ in padding]
    for span in spans(calls):
        n = span.stop - span.start
        mask = batch.make_mask(n)
        held = batch.update_and_fetch(keys[:, :, span], values[:, :, span])
        together = batch.attend(queries[:, :, span], *held, 0.125, mask)
        for index, pad in enumerate(padding):
            row, own = slice(index, index + 1), slice(max(span.start, pad), span.stop)
            held = alone[index].update_and_fetch(keys[row, :, own], values[row, :, own])
            causal = None if own.stop - own.start == 1 else "causal"
            want = alone[index].attend(queries[row, :, own], *held, 0.125, causal)
            got = together[row, :, own.start - span.start :]
            assert mx.allclose(got, want, rtol=5e-3, atol=5e-3 * float(mx.abs(want).max()))


@over()
def test_batch_state_has_the_batch_on_axis_0(subject: Subject) -> None:
    transform = subject.transform
    assert all(leaf.shape[0] == SPEC.batch for leaf in flatten(begin(transform).state)[0])
    keys, values = keys_and_values(SPEC, 30)
    run = feed(transform, begin(transform), keys, values)
    other = feed(transform, begin(transform), keys, mx.concatenate([values[:1], values[1:] + 1]))
    for a, b in zip(flatten(run.state)[0], flatten(other.state)[0], strict=True):
        assert same_array(a[:1], b[:1])
