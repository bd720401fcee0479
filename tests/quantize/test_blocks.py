"""Blocks with any codecs on their sides: frontier, exact rows, sinks, fitted tables, batches, trims, room, masks."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_kivi import HEADS, attended, draw, feed, feed_more, numbers, rows_in_order

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.quantize.blocks import Blocks, BlockState, blocks
from vq_functional.quantize.groups import ChannelGroupsCodec, TokenGroupsCodec
from vq_functional.quantize.ranges import RangeGroupsCodec
from vq_functional.quantize.sinks import SIGNALS

KEY_DIM, VALUE_DIM = 64, 48


@attrs.frozen
class MiddleCodec(Codec):
    """Differences, in half precision and turned, from the middle of the first `warmup` rows; `unit` rows a block."""

    warmup: int
    unit: int
    name = "middle"

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return MiddleCoder(dim, dtype)


@attrs.frozen
class MiddleCoder(Coder):
    """Reads half of each difference, so that it shows which middle it was taken from."""

    dim: int
    dtype: mx.Dtype
    axes = (3,)

    def tables(self, x: mx.array) -> Rows:
        x = x.astype(mx.float32)
        return ((x.min(axis=2, keepdims=True) + x.max(axis=2, keepdims=True)) / 2,)

    def encode_by(self, x: mx.array, tables: Rows) -> Rows:
        return ((x.astype(mx.float32) - tables[0]).astype(mx.float16).swapaxes(-1, -2),)

    def decode(self, rows: Rows) -> mx.array:
        rest, middle = rows
        return (rest.swapaxes(-1, -2).astype(mx.float32) * 0.5 + middle).astype(self.dtype)


def middle(x: np.ndarray) -> np.ndarray:
    return (x.min(axis=1, keepdims=True) + x.max(axis=1, keepdims=True)) / 2


CASES: dict[str, tuple[Codec, Codec]] = {
    "mse, int8": (vq.turboquant_mse_codec(bits=3), vq.int8_codec()),
    "prod, plain": (vq.turboquant_prod_codec(), vq.PlainCodec()),
    "qjl, polar": (vq.qjl_codec(), vq.polar_codec()),
    "plain, rvq": (vq.PlainCodec(), vq.turboquant_rvq_codec()),
    "channel groups, mse": (ChannelGroupsCodec(2, 8), vq.turboquant_mse_codec(bits=2)),
    "ranges, token groups": (RangeGroupsCodec(4, 8), TokenGroupsCodec(3, 16)),
    "middle, int8": (MiddleCodec(10, 1), vq.int8_codec()),
    "channel groups, middle": (ChannelGroupsCodec(4, 16), MiddleCodec(40, 4)),
}
FITTED = [name for name in CASES if "middle" in name]
SOME = ["mse, int8", "ranges, token groups", "channel groups, middle"]
each = pytest.mark.parametrize("case", CASES)
some = pytest.mark.parametrize("case", SOME)
residuals = pytest.mark.parametrize("residual", [0, 1, 33])
signals = pytest.mark.parametrize("signal", SIGNALS)


def build(case: str, residual: int = 0, **more: Any) -> Blocks:
    key, value = CASES[case]
    return blocks(key=key, value=value, residual=residual, **more)


def some_rows(n: int, seed: int = 0, batch: int = 1, dtype: mx.Dtype = mx.float16) -> tuple[mx.array, mx.array]:
    keys, values = draw(n, KEY_DIM, 2 * seed, dtype, batch), draw(n, VALUE_DIM, 2 * seed + 1, dtype, batch)
    return keys, values


def by_hand(n: int, case: str, residual: int) -> tuple[int, int, int]:
    """Rows in blocks after `n` tokens; rows of a block, and of the first packing."""
    key, value = CASES[case]
    block = math.lcm(key.unit, value.unit)
    least = max(block, -(-(max(key.warmup, value.warmup) - residual) // block) * block)
    past = max(n - residual, 0)
    return (past // block * block if past >= least else 0), block, least


def live(transform: Any, state: BlockState, row: int = 0) -> tuple[mx.array, ...]:
    """What a state holds of one batch row, without unused room."""
    one = map_leaves(lambda leaf: leaf[row : row + 1], state)
    n, coded = one.offset.item(), one.coded.item()
    parts = itertools.chain(*transform.parts(one, Fill(n, n, coded)))
    sinks = flatten(one.sinks)[0] if coded else ()
    return (one.coded, one.offset, *(array for part in parts for array in part.rows), *sinks)


def assert_same_live(transform: Any, one: Any, two: Any, row: int = 0, other_row: int = 0) -> None:
    pairs = zip(live(transform, one, row), live(transform, two, other_row), strict=True)
    assert all(a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in pairs)


def assert_reads(got: np.ndarray, want: np.ndarray, codec: Codec) -> None:
    """Equal, but for sums over a sketch, whose order depends on how many rows are read at once."""
    np.testing.assert_allclose(got, want, **({"rtol": 2.0**-10, "atol": 1e-4} if codec.keys_only else {"rtol": 0}))


def coded_by_hand(codec: Codec, x: mx.array, coded: int, first: int) -> np.ndarray:
    """The first `coded` rows as they read once they are coded, by tables of the `first` rows."""
    coder = bind(codec, x.shape[3], x.dtype)
    tables = coder.tables(x[:, :, :first])
    return numbers(coder.decode((*coder.encode_by(x[:, :, :coded], tables), *tables)))[0]


# What is coded and what is exact


@each
@residuals
@pytest.mark.parametrize("cuts", [[], [45, 1, 30], [7] * 11 + [1] * 20], ids=len)
def test_old_rows_read_as_their_codes_and_new_ones_exactly(cuts: list[int], residual: int, case: str) -> None:
    transform, (keys, values) = build(case, residual), some_rows(110)
    state = feed(transform, keys, values, cuts)
    coded, _, least = by_hand(110, case, residual)
    assert state.coded.item() == coded > 0 and transform.least == least
    for got, x, codec in zip(rows_in_order(transform, state), (keys, values), CASES[case]):
        assert_reads(got[:, :coded], coded_by_hand(codec, x, coded, residual + least), codec)
        assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:])


@some
@residuals
def test_frontier_token_by_token(residual: int, case: str) -> None:
    transform, n = build(case, residual), 100
    keys, values = some_rows(n)
    state = feed(transform, keys[:, :, :0], values[:, :, :0], capacity=n)
    for i in range(n):
        state, *_ = transform.update(state, keys[:, :, i : i + 1], values[:, :, i : i + 1])
        coded, block, least = by_hand(i + 1, case, residual)
        assert state.coded.item() == coded
        assert min(i + 1, residual) <= i + 1 - coded < residual + (block if coded else least)


@signals
@pytest.mark.parametrize("case", ["mse, int8", "qjl, polar", "middle, int8", "channel groups, mse"])
def test_sinks_read_exactly_among_codes(case: str, signal: str) -> None:
    transform, n, count = build(case, 20, n_sink=3, sink_signal=signal), 110, 3
    keys, values = some_rows(n)
    state = feed(transform, keys, values, [50, *[1] * 40])
    coded, block, least = by_hand(n, case, 20)
    size = np.linalg.norm(numbers(keys)[0].astype(np.float64), axis=-1).mean(axis=0)
    typical = np.sort(size[:block])[block // 2]
    rank = {
        "first": -np.arange(n),
        "large_keys": size,
        "small_keys": -size,
        "unusual_keys": np.abs(np.log(size / typical)),
    }[signal][:coded]
    sinks = np.lexsort((np.arange(coded), -rank))[:count].tolist()
    assert state.sinks.position[0].tolist() == sinks
    others = [i for i in range(coded) if i not in sinks]
    for got, x, codec in zip(rows_in_order(transform, state), (keys, values), CASES[case]):
        assert np.array_equal(got[:, sinks], numbers(x)[0][:, sinks])
        assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:])
        if codec.shared == 1:
            assert_reads(got[:, others], coded_by_hand(codec, x, coded, 20 + least)[:, others], codec)


# How the rows came


@each
@given(
    data=st.data(),
    residual=st.sampled_from([0, 1, 33]),
    sinks=st.sampled_from([{}, *({"n_sink": 3, "sink_signal": signal} for signal in SIGNALS)]),
)
def test_how_a_prompt_was_cut_leaves_no_trace(
    case: str, data: st.DataObject, residual: int, sinks: dict[str, Any]
) -> None:
    transform, n = build(case, residual, **sinks), data.draw(st.integers(1, 120))
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=4)))
    cuts = [b - a for a, b in itertools.pairwise([0, *(edge for edge in edges if edge < n), n])]
    keys, values = some_rows(n)
    assert_same_live(transform, feed(transform, keys, values, cuts), feed(transform, keys, values))


def in_a_batch(
    transform: Any, prompts: list[tuple[mx.array, mx.array]], left: bool, cuts: Sequence[int], new: int
) -> TransformKVCache:
    """A batch cache that took in prompts of other lengths, padded with large rows, then `new` single tokens."""
    lengths = [keys.shape[2] - new for keys, _ in prompts]
    longest, cache = max(lengths), TransformKVCache(transform)
    if left:
        cache.prepare(left_padding=[longest - length for length in lengths])
    else:
        cache.prepare(lengths=lengths)

    def padded(side: int) -> mx.array:
        batch = []
        for prompt, length in zip(prompts, lengths):
            junk = prompt[side][:, :, :1].astype(mx.float32) * 1000
            junk = mx.repeat(junk, longest - length, axis=2).astype(mx.float16)
            real = prompt[side][:, :, :length]
            batch.append(mx.concatenate([junk, real] if left else [real, junk], axis=2))
        return mx.concatenate(batch)

    keys, values = padded(0), padded(1)
    edges = [0, *itertools.accumulate(cuts), longest]
    for start, stop in itertools.pairwise(edges):
        mx.eval(cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop]))
    cache.finalize()
    for i in range(new):
        step = (mx.concatenate([p[side][:, :, k + i : k + i + 1] for p, k in zip(prompts, lengths)]) for side in (0, 1))
        mx.eval(cache.update_and_fetch(*step))
    return cache


@some
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("residual, sinks", [(0, {}), (33, {"n_sink": 2, "sink_signal": "unusual_keys"})], ids=str)
@pytest.mark.parametrize("cuts", [[], [20, 25]], ids=len)
def test_a_padded_batch_is_its_rows_alone(
    cuts: list[int], residual: int, sinks: dict[str, Any], left: bool, case: str
) -> None:
    transform, new = build(case, residual, **sinks), 20
    prompts = [some_rows(length + new, seed) for seed, length in enumerate((70, 58, 9))]
    cache = in_a_batch(transform, prompts, left, cuts, new)
    for row, (keys, values) in enumerate(prompts):
        single = TransformKVCache(transform)
        mx.eval(single.update_and_fetch(keys, values))
        alone, one = single._settled_state(), cache.extract(row)
        assert one.offset == single.offset == keys.shape[2] and one._fills == single._fills
        assert_same_live(transform, cache._settled_state(), alone, row)
        assert all(map(mx.array_equal, one.keys_and_values(), single.keys_and_values()))


@pytest.mark.parametrize("case", ["channel groups, mse", "ranges, token groups", "channel groups, middle"])
def test_a_request_that_packs_nothing_keeps_its_blocks_beside_one_that_does(case: str) -> None:
    transform, new = build(case, 3), 60
    prompts = [some_rows(length + new, seed) for seed, length in enumerate((62, 55))]
    cache = in_a_batch(transform, prompts, False, [20, 20], new)
    for row, (keys, values) in enumerate(prompts):
        assert_same_live(transform, cache._settled_state(), feed(transform, keys, values), row)


@some
def test_batch_rows_share_nothing(case: str) -> None:
    transform = build(case, 10, n_sink=2, sink_signal="large_keys")
    loud = mx.array([1.0, 100.0, 0.01], mx.float16)[:, None, None, None]
    keys, values = (x * loud for x in some_rows(100, batch=3))
    state = feed(transform, keys, values, [40, *[1] * 30])
    for row in range(3):
        assert_same_live(transform, state, feed(transform, keys[row : row + 1], values[row : row + 1]), row)


# Fitted tables


@pytest.mark.parametrize("case", FITTED)
@pytest.mark.parametrize("cuts", [[], [1] * 60, [50, 20]], ids=len)
def test_tables_are_fitted_to_the_first_rows_of_each_sequence_and_stay(cuts: list[int], case: str) -> None:
    transform, padding = build(case, 5), [0, 7]
    keys, values = some_rows(120, batch=2)
    keys[1, :, :7] = values[1, :, :7] = math.nan
    _, _, least = by_hand(120, case, 5)
    state = feed(transform, keys, values, cuts, left_padding=mx.array(padding))
    for codec, held, x in zip(CASES[case], (state.keys, state.values), (keys, values)):
        for row, pad in enumerate(padding):
            if codec.warmup:
                want = middle(numbers(x)[row, :, pad : pad + 5 + least])
                assert np.array_equal(np.array(held.tables[0][row]), want)
            else:
                assert held.tables == ()


@pytest.mark.parametrize("case", FITTED)
def test_tables_are_fitted_anew_once_all_blocks_are_gone(case: str) -> None:
    transform = build(case)
    keys, values = some_rows(110)
    _, _, least = by_hand(0, case, 0)
    whole = feed(transform, keys, values)
    short = transform.trim(whole, 110 - least + 1)
    assert short.coded.item() == 0 and short.offset.item() == least - 1
    other = some_rows(60, seed=7)
    again = feed_more(transform, short, *other)
    for held, codec, read, x in zip((again.keys, again.values), CASES[case], rows_in_order(transform, short), other):
        if codec.warmup:
            first = np.concatenate([read, numbers(x)[0, :, :1]], axis=1)
            assert np.array_equal(np.array(held.tables[0][0]), middle(first))
    assert_same_live(transform, feed_more(transform, transform.trim(whole, 110), keys, values), whole)


# Trim and room


@each
@pytest.mark.parametrize("sinks", [{}, {"n_sink": 3, "sink_signal": "large_keys"}], ids=["", "sinks"])
@pytest.mark.parametrize("x", [1, 20, 45, 90])
def test_what_a_trim_leaves_reads_as_before(x: int, sinks: dict[str, Any], case: str) -> None:
    transform, n = build(case, 10, **sinks), 110
    keys, values = some_rows(n)
    whole = feed(transform, keys, values, capacity=160)
    coded, block, least = by_hand(n, case, 10)
    reopened = (n - x) // block * block if n - x >= least else 0
    short = transform.trim(whole, x)
    assert short.offset.item() == n - x and short.coded.item() == min(coded, reopened)
    pairs = zip(rows_in_order(transform, short), rows_in_order(transform, whole), CASES[case])
    for got, want, codec in pairs:
        assert_reads(got, want[:, : n - x], codec)
    new = some_rows(x + 30, seed=3)
    later = feed_more(transform, short, *new, [1] * 12)
    assert later.coded.item() == max(by_hand(n + 30, case, 10)[0], short.coded.item())
    end = later.coded.item()
    for got, rows in zip(rows_in_order(transform, later), new):
        assert np.array_equal(got[:, end:], numbers(rows)[0, :, end - (n - x) :])
    if x <= n - coded:
        again = feed_more(transform, short, keys[:, :, n - x :], values[:, :, n - x :])
        assert_same_live(transform, again, whole)


@each
@pytest.mark.parametrize("x", [1, 20, 60])
def test_a_trim_of_full_arrays(x: int, case: str) -> None:
    """The last blocks are read where they are, though fewer rows lie behind their beginning than come back at most."""
    transform, (keys, values) = build(case), some_rows(96)
    whole = feed(transform, keys, values, capacity=96)
    assert whole.coded.item() == transform.capacity(whole) == 96
    short = transform.trim(whole, x)
    for got, want, codec in zip(rows_in_order(transform, short), rows_in_order(transform, whole), CASES[case]):
        assert_reads(got, want[:, : 96 - x], codec)


@pytest.mark.parametrize("case", FITTED)
def test_room_follows_the_rows_and_not_how_many_tables_are_fitted_to(case: str) -> None:
    cache, (keys, values) = TransformKVCache(build(case)), some_rows(192)
    cache.update_and_fetch(keys[:, :, :128], values[:, :, :128])
    assert cache.transform.capacity(cache._settled_state()) == 128
    for i in range(128, 192):
        cache.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert cache.transform.capacity(cache._settled_state()) == 192
    straight = feed(cache.transform, keys, values, capacity=192)
    assert_same_live(cache.transform, cache._state, straight)


@each
def test_rejected_drafts_leave_no_trace(case: str) -> None:
    transform, (keys, values), wrong = build(case, 16), some_rows(75), some_rows(3, seed=5)
    cache, plain = TransformKVCache(transform), TransformKVCache(transform)
    cache.update_and_fetch(keys[:, :, :55], values[:, :, :55])
    for i in range(55, 75):
        cache.update_and_fetch(
            *(mx.concatenate([x[:, :, i : i + 1], w], axis=2) for x, w in zip((keys, values), wrong))
        )
        assert cache.trim(3) == 3 and cache.offset == i + 1
    plain.update_and_fetch(keys, values)
    assert_same_live(transform, cache._settled_state(), plain._settled_state())


@each
def test_counts_on_the_host_are_those_of_the_state(case: str) -> None:
    transform = build(case, 20)
    keys, values = some_rows(150)
    state, fill = feed(transform, keys[:, :, :0], values[:, :, :0], capacity=1), Fill()
    for n, trimmed in ((3, 1), (1, 0), (40, 0), (30, 25), (1, 0), (1, 1), (60, 2), (5, 70), (1, 0), (20, 0)):
        came = transform.written(fill, n)
        room, settles = transform.room(fill, n), transform.settles(came, n)
        if room > transform.capacity(state):
            state = transform.grow(state, room)
        assert not transform.overflows(state, n).any()
        before, start = state.coded.item(), fill.tokens
        state, *_ = transform.update(state, keys[:, :, start : start + n], values[:, :, start : start + n])
        assert settles or state.coded.item() == before
        fill = transform.settled(came, n)
        if trimmed:
            state, fill = transform.trim(state, trimmed), transform.trimmed(fill, trimmed)
        assert (fill.tokens, fill.rows, fill.coded) == (state.offset.item(), state.offset.item(), state.coded.item())
        assert transform.fits(state, fill)


@each
def test_grow_keeps_what_is_held_and_makes_room(case: str) -> None:
    transform = build(case, 3, n_sink=2, sink_signal="first")
    keys, values = some_rows(150)
    small = feed(transform, keys[:, :, :60], values[:, :, :60], capacity=64)
    large = transform.grow(small, 160)
    assert transform.capacity(large) >= 160 > transform.capacity(small)
    assert_same_live(transform, large, small)
    grown = feed_more(transform, large, keys[:, :, 60:], values[:, :, 60:], [40, 1])
    assert_same_live(transform, grown, feed(transform, keys, values))
    assert vq.nbytes(transform.grow(small, 32)) == vq.nbytes(small)


@some
@pytest.mark.parametrize("batch", [1, 2])
def test_a_call_past_the_capacity_returns_no_plausible_numbers(batch: int, case: str) -> None:
    transform = build(case, 32)
    full = feed(transform, *some_rows(96, batch=batch))
    assert full.coded.tolist() == [64] * batch
    for n in (70, 90):
        _, *out = transform.update(full, *some_rows(n, batch=batch))
        assert all(mx.isnan(x).all() for x in out)
    with pytest.raises(vq.QuantizerConfigError, match="blocks: `keys` must fit the capacity"):
        transform.update(full, *some_rows(200, batch=batch))


@some
@pytest.mark.parametrize("residual", [0, 32])
def test_single_tokens_past_the_capacity_are_right_until_they_are_nan(residual: int, case: str) -> None:
    """A step that packs nothing must not touch the blocks either."""
    transform, (keys, values) = build(case, residual), some_rows(250)
    whole = feed(transform, keys, values)
    state = feed(transform, keys[:, :, :64], values[:, :, :64])
    for n in range(64, 250):
        new = keys[:, :, n : n + 1], values[:, :, n : n + 1]
        held = transform.write(state, *new)
        state, *out = transform.update(state, *new)
        if mx.isnan(out[0]).any():
            break
        coded = held.coded.item()
        for got, want in zip(rows_in_order(transform, held), rows_in_order(transform, whole)):
            assert np.array_equal(got[:, :coded], want[:, :coded])
    assert n < 249


# Masks and attention


@each
def test_a_mask_shows_each_query_the_rows_up_to_its_own(case: str) -> None:
    transform, (keys, values), start = build(case, 20, n_sink=2), some_rows(115), 0
    state = feed(transform, keys[:, :, :0], values[:, :, :0], capacity=115)
    fill = Fill()
    for n in (30, 1, 60, 1, 23):
        end, masks = start + n, (transform.make_mask(state, n), transform.make_mask(state, n, fill))
        before = transform.read(state, fill)
        held = transform.write(state, keys[:, :, start:end], values[:, :, start:end])
        fill = transform.written(fill, n)
        for mask, out in zip(masks, (transform.read(held), transform.read(held, fill))):
            mask = np.array(mask)
            assert mask.shape == (1, 1, n, out[0].shape[2]) and out[1].shape[2] == out[0].shape[2]
            assert mask[0, 0].sum(axis=-1).tolist() == list(range(start + 1, end + 1))
            for got, x, old, codec in zip(out, (keys, values), before, CASES[case]):
                shown = numbers(got)[0][:, np.flatnonzero(mask[0, 0, -1])]
                assert_reads(shown[:, :start], numbers(old)[0], codec)
                assert np.array_equal(shown[:, start:], numbers(x)[0, :, start:end])
        state = transform.settle(held, keys[:, :, start:end])
        fill, start = transform.settled(fill, n), end


@each
@residuals
@pytest.mark.parametrize("n, dtype", [(1, mx.float16), (5, mx.float32)], ids=str)
def test_attention_on_codes_equals_attention_over_what_is_read(
    n: int, dtype: mx.Dtype, residual: int, case: str
) -> None:
    transform, total = build(case, residual, n_sink=3, sink_signal="large_keys"), 110 + n
    keys, values = some_rows(total, dtype=dtype)
    state = feed(transform, keys[:, :, :110], values[:, :, :110], capacity=total)
    held = transform.write(state, keys[:, :, 110:], values[:, :, 110:])
    queries = mx.random.normal((1, 3 * HEADS, n, KEY_DIM), key=mx.random.key(5)).astype(dtype)
    want = attended(numbers(queries)[0], *rows_in_order(transform, held), start=110)
    for fill in (None, Fill(total, total, state.coded.item())):
        got = transform.attend(held, queries, KEY_DIM**-0.5, None, fill)
        assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, VALUE_DIM)
        np.testing.assert_allclose(numbers(got)[0], want, atol=3e-3 if dtype == mx.float16 else 1e-5)


@some
def test_compiled_steps_equal_eager_ones(case: str) -> None:
    transform = build(case, 5, n_sink=2, sink_signal="unusual_keys")
    keys, values = some_rows(105)
    eager = compiled = feed(transform, keys[:, :, :50], values[:, :, :50], capacity=128)
    step = vq.compile(transform)
    for start, end in itertools.pairwise([50, *range(51, 86), 105]):
        new = keys[:, :, start:end], values[:, :, start:end]
        assert mx.array_equal(step.make_mask(compiled, end - start), transform.make_mask(eager, end - start))
        eager, *want = transform.update(eager, *new)
        compiled, *got = step.update(compiled, *new)
        assert all(map(mx.array_equal, got, want))
    assert all(map(mx.array_equal, flatten(compiled)[0], flatten(eager)[0]))


# What a method remembers of its exact rows


@attrs.frozen
class Counting(Blocks):
    """Remembers of each exact row how many calls it has seen."""

    def begin_memory(self, batch: int, layout: Any) -> Any:
        return mx.zeros((batch, layout.kv_heads, self.recent_rows), mx.int32)

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        row = mx.arange(held.recent.memory.shape[2])
        return mx.where(row < (held.offset - held.coded)[:, None, None], held.recent.memory + 1, 0)


@some
def test_memory_stays_with_its_rows(case: str) -> None:
    transform, cuts = Counting("counting", *CASES[case], 33), [30, 1, 1, 25, 1, 40, 1, 1]
    keys, values = some_rows(sum(cuts))
    state = feed(transform, keys, values, cuts)
    ends = list(itertools.accumulate(cuts))
    seen = [sum(end > position for end in ends) for position in range(state.coded.item(), sum(cuts))]
    assert state.coded.item() > 0
    assert (np.array(state.recent.memory)[0, :, : len(seen)] == seen).all()


# Options


@pytest.mark.parametrize(
    "options, field",
    [
        *(({"residual": -1}, "residual"), ({"residual": 1.5}, "residual")),
        *(({"value": vq.qjl_codec()}, "value"), ({"value": vq.turboquant_prod_codec()}, "value")),
        *(({"n_sink": -1}, "n_sink"), ({"n_sink": True}, "n_sink")),
        ({"n_sink": 2, "sink_signal": "largest"}, "sink_signal"),
    ],
    ids=str,
)
def test_sides_and_sizes_that_cannot_be_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    mse = vq.turboquant_mse_codec()
    with pytest.raises(vq.QuantizerConfigError, match=f"mine: `{field}`"):
        blocks(**({"key": mse, "value": mse, "name": "mine"} | options))


@pytest.mark.parametrize("codec", [MiddleCodec(10, 1), ChannelGroupsCodec(2, 32)], ids=lambda codec: codec.name)
def test_rows_that_do_not_stand_alone_are_for_blocks_only(codec: Codec) -> None:
    for side in ("key", "value"):
        with pytest.raises(vq.QuantizerConfigError, match=f"rows: `{side}` must be a codec whose rows stand alone"):
            vq.rows(**{side: codec})
    with pytest.raises(vq.QuantizerConfigError, match="blocks"):
        vq.chain(vq.h2o_policy(budget=40), blocks(key=codec))
