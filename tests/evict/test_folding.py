"""Folding by the engine, whatever the rule: what lost rows held goes on where the policy says, and nowhere else."""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    Call,
    Stream,
    chunks,
    cuts,
    equal,
    feed,
    held_positions,
    held_rows,
    left_padded_calls,
    make_stream,
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    to_numpy,
)

from vq_functional import (
    PlainCodec,
    chain,
    compile,
    int8_codec,
    nbytes,
    qjl_codec,
    rows,
    streaming_llm_policy,
    turboquant_mse_codec,
)
from vq_functional.core.policy import Picked, Policy, Scene, Shares
from vq_functional.core.store import RowStore
from vq_functional.core.tree import flatten
from vq_functional.ops.rows import BIG, pick

BUDGET, SINKS = 10, 2


@attrs.frozen
class HandOn(Policy):
    """A window; each row that leaves is added to the oldest row after the sinks, so that nothing is ever lost.

    Memory counts the tokens that a row stands for. With `own` below 1 a row that
    takes others in keeps that share of itself.
    """

    with_keys: bool = False
    own: float = 1.0
    name = "hand_on"
    folds = 1

    def init(self, batch: int, heads: int, slots: int) -> mx.array:
        return mx.zeros((batch, heads, slots))

    def arrive(self, keys: mx.array, values: mx.array) -> mx.array:
        return mx.ones(keys.shape[:3])

    def score(self, memory: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        return memory, self.rank(memory, scene)

    def rank(self, memory: mx.array, scene: Scene) -> mx.array:
        return scene.position.astype(mx.float32)

    def fold(
        self, memory: mx.array, scene: Scene, kept: Picked, lost: Picked
    ) -> tuple[mx.array, Shares, Shares | None]:
        into = self.heirs(pick(scene.position, kept.index), kept.valid)
        own, given = mx.where(into, self.own, 1.0), (into[..., None] & lost.valid[:, :, None]).astype(mx.float32)
        given = given / mx.maximum(into.sum(axis=-1), 1)[..., None, None]
        total = pick(memory, kept.index) + (given * pick(memory, lost.index)[:, :, None]).sum(axis=-1)
        shares = Shares(own, given)
        return total, shares, shares if self.with_keys else None

    def heirs(self, position: mx.array, valid: mx.array) -> mx.array:
        place = mx.where(valid & (position >= self.n_sink), position, BIG)
        return (place == place.min(axis=-1, keepdims=True)) & (place < BIG)


class HandOnInStrides(HandOn):
    """The same, five standing-in keys at a time."""

    stride = 5


@attrs.frozen
class ShareOut(HandOn):
    """Each row that leaves is shared out evenly among all rows after the sinks."""

    name = "share_out"
    folds = BUDGET

    def heirs(self, position: mx.array, valid: mx.array) -> mx.array:
        return valid & (position >= self.n_sink)


HAND_ON = HandOn(BUDGET, SINKS, 1)
BOTH = HandOn(BUDGET, SINKS, 1, with_keys=True)
STRIDES = HandOnInStrides(BUDGET, SINKS, 1, with_keys=True)
SHARE_OUT = ShareOut(BUDGET, SINKS, 1, with_keys=True)
POLICIES = {"values": HAND_ON, "both": BOTH, "strides": STRIDES, "share_out": SHARE_OUT}
EXACT = pytest.mark.parametrize("policy", [HAND_ON, BOTH, STRIDES], ids=["values", "both", "strides"])
ALL = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
STORES = {
    "plain": rows(),
    "float16": rows(key=PlainCodec("float16"), value=PlainCodec("float16")),
    "int8": rows(key=int8_codec(), value=int8_codec()),
    "mse3": rows(key=turboquant_mse_codec(bits=3), value=turboquant_mse_codec(bits=3)),
    "qjl": rows(key=qjl_codec(), value=int8_codec()),
}
EVERY_STORE = pytest.mark.parametrize("store", STORES.values(), ids=STORES)
PATTERNS = pytest.mark.parametrize("pattern", [[40], [1] * 40, [15, 1, 1, 23]], ids=["once", "decode", "chunks"])


def whole_numbers(seed: int, tokens: int, **sizes: Any) -> Stream:
    """Keys and values that float32 sums exactly."""
    stream = make_stream(seed, tokens, **sizes)
    keys, values = (np.round(4 * x) for x in (stream.keys, stream.values))
    return Stream(keys, values, stream.queries, stream.dtype)


def handed_on(x: np.ndarray, count: int, limit: int = BUDGET) -> tuple[list[int], np.ndarray]:
    """Positions and rows that a head should hold after `count` tokens of `x` [T, D]."""
    first = max(SINKS, count - (limit - SINKS))
    held = [*range(min(SINKS, count)), *range(first, count)]
    expected = x[held].copy()
    if count > first:
        expected[SINKS] = x[SINKS : first + 1].sum(axis=0)
    return held, expected


def check_handed_on(transform: Any, state: Any, counts: Sequence[int], stream: Stream, limit: int = BUDGET) -> None:
    """Rows held, bit for bit, and memory, after `counts[b]` tokens of each batch row."""
    ordered = transform.ordered(state)
    keys, values = (to_numpy(x) for x in transform.read(ordered))
    for row, head in np.ndindex(stream.batch, stream.heads):
        count = counts[row]
        held, expected = handed_on(stream.values[row, head], count, limit)
        assert [i for i in ordered.position[row, head].tolist() if i >= 0] == held
        assert np.array_equal(values[row, head, : len(held)], expected)
        with_keys = transform.policy.with_keys
        expected = handed_on(stream.keys[row, head], count, limit)[1] if with_keys else stream.keys[row, head][held]
        assert np.array_equal(keys[row, head, : len(held)], expected)
        stands_for = handed_on(np.ones((count, 1)), count, limit)[1][:, 0].tolist()
        assert ordered.memory[row, head].tolist() == stands_for + [0] * (ordered.slots - len(held))


def run(transform: Any, stream: Stream, calls: Sequence[Call]) -> tuple[Any, list[int]]:
    """The state after `calls`, padding on either side, and the tokens that each batch row has seen."""
    left, counts = any(call.left for call in calls), [0] * stream.batch
    padding = [sum(call.width - call.counts[row] for call in calls) for row in range(stream.batch)]
    state = transform.init_state(stream.spec(), mx.array(padding) if left else None)
    for call, keys, values in zip(calls, *(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values))):
        lengths = None if left or not call.padded else mx.array(call.counts)
        if call.width:
            held = transform.write(state, keys, values, lengths)
            state = transform.settle(held, keys, lengths, proxy=True)
        counts = [before + count for before, count in zip(counts, call.counts)]
    return state, counts


# What goes on


@EXACT
@given(seed=seeds(), pattern=cuts(), dim=st.sampled_from([2, 16]))
def test_sums_are_the_same_however_a_prompt_is_cut(policy: Policy, seed: int, pattern: list[int], dim: int) -> None:
    stream, transform = whole_numbers(seed, sum(pattern), batch=2, dim=dim, value_dim=dim + 1), chain(policy, rows())
    check_handed_on(transform, *run(transform, stream, plain_calls(pattern, 2)), stream)


@EXACT
@given(seed=seeds(), calls=right_padded(2, longest=14))
def test_right_padding_is_not_folded(policy: Policy, seed: int, calls: list[Call]) -> None:
    stream, transform = whole_numbers(seed, 90, batch=2), chain(policy, rows())
    check_handed_on(transform, *run(transform, stream, calls), stream)


@EXACT
@given(seed=seeds(), padding=st.tuples(st.integers(0, 15), st.integers(0, 15)), pattern=cuts())
def test_left_padding_is_not_folded(policy: Policy, seed: int, padding: tuple[int, int], pattern: list[int]) -> None:
    calls = left_padded_calls([*pattern, 16], padding)
    stream, transform = whole_numbers(seed, sum(pattern) + 16, batch=2), chain(policy, rows())
    check_handed_on(transform, *run(transform, stream, calls), stream)


@given(seed=seeds(), pattern=cuts(20))
def test_shares_among_many_rows_add_up(seed: int, pattern: list[int]) -> None:
    stream, total = make_stream(seed, sum(pattern), batch=2), sum(pattern)
    state = feed(chain(SHARE_OUT, rows()), stream, pattern)
    held = mx.where(state.position[..., None] >= 0, state.rows.values[0], 0)
    np.testing.assert_allclose(to_numpy(held.sum(axis=2)), stream.values.sum(axis=2), atol=1e-4 * total)
    np.testing.assert_allclose(to_numpy(state.memory.sum(axis=2)), total, rtol=1e-5)


@ALL
@PATTERNS
def test_nothing_to_fold_into(policy: Policy, pattern: list[int]) -> None:
    """All rows that stay are sinks: the others are dropped."""
    lone = attrs.evolve(policy, budget=3, n_sink=3, recent=0)
    stream = make_stream(0, 40)
    position, *held = held_rows(chain(lone, rows()), feed(chain(lone, rows()), stream, pattern))
    assert position.tolist() == [[[0, 1, 2]] * 2]
    assert equal(held, [mx.array(x[:, :, :3]) for x in (stream.keys, stream.values)])


@ALL
@given(seed=seeds(), pattern=cuts())
def test_nothing_is_folded_within_the_budget(policy: Policy, seed: int, pattern: list[int]) -> None:
    total = sum(pattern)
    roomy, plain = chain(attrs.evolve(policy, budget=max(total, 9)), rows()), rows()
    stream = make_stream(seed, total, batch=2)
    _, *held = held_rows(roomy, feed(roomy, stream, pattern))
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@EXACT
@PATTERNS
def test_budget_as_a_share_of_the_prompt(policy: Policy, pattern: list[int]) -> None:
    """Of the prompts' tokens three tenths stay; what is left of the rest is in the oldest row."""
    stream, transform = whole_numbers(1, 40), chain(attrs.evolve(policy, budget=0.3), rows())
    state = feed(transform, stream, pattern)
    limit = max(round(0.3 * sum(n for n in pattern if n > 1)), SINKS + 2)
    for head in range(2):
        held, expected = handed_on(stream.values[0, head], 40, limit)
        position, _, values = held_rows(transform, state)
        assert position[0, head].tolist() == held
        assert np.array_equal(to_numpy(values)[0, head], expected)


# Stores


def columns_that_differ(first: Any, second: Any) -> list[mx.array]:
    """For each array of rows, which columns [B, H, slots] of two states differ."""
    pairs = zip(flatten(first.rows)[0], flatten(second.rows)[0], strict=True)
    return [(x != y).reshape(*x.shape[:3], -1).any(axis=-1) for x, y in pairs]


@ALL
@EVERY_STORE
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_rows_that_take_nothing_in_keep_their_codes(policy: HandOn, store: RowStore, dtype: mx.Dtype) -> None:
    stream, pattern = make_stream(2, 60, batch=2, dim=64, dtype=dtype), [25, 1, 1, 1, 19, *[1] * 13]
    transforms = [chain(p, store) for p in (policy, streaming_llm_policy(n_sink=SINKS, window_size=BUDGET - SINKS))]
    folded, plain = (transform.ordered(feed(transform, stream, pattern)) for transform in transforms)
    assert mx.array_equal(folded.position, plain.position)
    differ = mx.stack(columns_that_differ(folded, plain)).any(axis=0)
    last = BUDGET if policy is SHARE_OUT else SINKS + 1
    touched = (mx.arange(BUDGET + 1) >= SINKS) & (mx.arange(BUDGET + 1) < last)
    assert mx.array_equal(differ[..., :BUDGET], mx.broadcast_to(touched[:BUDGET], (2, 2, BUDGET)))
    if not policy.with_keys:
        assert equal(*([x[:, :, :BUDGET] for x in s.rows.keys] for s in (folded, plain)))


@EXACT
@EVERY_STORE
@pytest.mark.parametrize("pattern", [[BUDGET, 1], [BUDGET + 1], [4, 7]], ids=str)
@pytest.mark.parametrize("own", [1.0, 0.25, 0.0])
def test_row_that_takes_in_is_decoded_summed_and_encoded(
    policy: HandOn, store: RowStore, pattern: list[int], own: float
) -> None:
    stream = make_stream(3, BUDGET + 1, dim=64, value_dim=32)
    transform = chain(attrs.evolve(policy, own=own), store)
    state = transform.ordered(feed(transform, stream, pattern))
    for codec, came, rows_, folded in (
        (store.key, stream.keys, state.rows.keys, policy.with_keys),
        (store.value, stream.values, state.rows.values, True),
    ):
        coder = codec.bind(came.shape[3], mx.float32)
        two = [coder.encode(mx.array(came[:, :, i : i + 1])) for i in (SINKS, SINKS + 1)]
        total = coder.decode(two[0]) + own * coder.decode(two[1])
        expected = coder.encode(total) if folded else two[1]
        assert equal([x[:, :, SINKS : SINKS + 1] for x in rows_], expected)


@pytest.mark.parametrize("store", [STORES["plain"], STORES["mse3"]], ids=["plain", "mse3"])
def test_decode_step_writes_the_new_row_and_the_one_that_takes_in(store: RowStore) -> None:
    transform, stream = chain(BOTH, store), make_stream(4, 50, batch=2, dim=64)
    state = feed(transform, stream, [30])
    for token in range(30, 50):
        before, state = state, resume(transform, state, stream, [1], token)
        heir = before.position == token - BUDGET + SINKS + 1
        assert mx.array_equal(mx.stack(columns_that_differ(before, state)).any(axis=0), heir | (before.position < 0))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_rows_are_summed_in_float32_and_rounded_once(dtype: mx.Dtype) -> None:
    stream = make_stream(5, 200, dtype=dtype)
    stream = Stream(np.round(stream.keys), np.round(64 * stream.values), None, dtype)
    transform = chain(HAND_ON, rows())
    _, _, values = held_rows(transform, feed(transform, stream, [200]))
    expected = mx.array(handed_on(stream.values[0, 0], 200)[1]).astype(dtype)
    assert values.dtype == dtype and mx.array_equal(values[0, 0], expected)


def test_sum_past_the_range_of_float16_is_its_largest_number() -> None:
    stream = make_stream(6, 40)
    stream = Stream(stream.keys, np.full_like(stream.values, -60000.0), None, mx.float16)
    transform = chain(HAND_ON, rows())
    _, _, values = held_rows(transform, feed(transform, stream, [20] + [1] * 20))
    assert values[:, :, SINKS].min().item() == values[:, :, SINKS].max().item() == -65504


# States


@ALL
@EVERY_STORE
def test_state_stays_as_large_as_it_was(policy: Policy, store: RowStore) -> None:
    transform, stream = chain(policy, store), make_stream(7, 60, dim=64)
    empty = transform.init_state(stream.spec())
    assert nbytes(feed(transform, stream, [25, 1, 1, 20, *[1] * 13])) == nbytes(empty)


@ALL
@pytest.mark.parametrize("store", [STORES["plain"], STORES["mse3"]], ids=["plain", "mse3"])
def test_compiled_steps_fold_alike(policy: Policy, store: RowStore) -> None:
    transform, stream = chain(policy, store), make_stream(8, 40, batch=2, dim=64)
    eager = compiled = feed(transform, stream, [20])
    step = compile(transform).update
    for token in range(20, 40):
        eager = resume(transform, eager, stream, [1], token)
        compiled, _, _ = step(compiled, *parts_of(stream, token, 1)[:2])
        assert same(eager, compiled)


@ALL
@PATTERNS
def test_older_states_stay_as_they_were(policy: Policy, pattern: list[int]) -> None:
    transform, stream = chain(policy, rows()), make_stream(9, 80)
    state = feed(transform, stream, pattern)
    before = [to_numpy(x) for x in flatten(state)[0]]
    mx.eval(flatten(resume(transform, state, stream, pattern, 40))[0])
    assert all(np.array_equal(x, to_numpy(y)) for x, y in zip(before, flatten(state)[0]))


@ALL
@given(seed=seeds(), pattern=cuts(20))
def test_batch_rows_and_heads_are_independent(policy: Policy, seed: int, pattern: list[int]) -> None:
    transform, total = chain(policy, rows()), sum(pattern)
    stream = make_stream(seed, total, batch=3)
    whole = flatten(feed(transform, stream, pattern))[0]
    for row in range(3):
        alone = flatten(feed(transform, stream.rows([row]), pattern))[0]
        assert equal([x[row : row + 1] for x in whole], alone)
    swapped = Stream(stream.keys[:, [1, 0]], stream.values[:, [1, 0]], None, stream.dtype)
    turned = flatten(feed(transform, swapped, pattern))[0]
    assert equal([x if x.ndim == 1 else x[:, mx.array([1, 0])] for x in whole], turned)


@EXACT
@pytest.mark.parametrize("pattern", [[20], [6, 1, 1, 13], [20, 20]], ids=str)
@pytest.mark.parametrize("limit", [BUDGET, 6])
def test_compacting_folds_what_it_gives_up(policy: HandOn, pattern: list[int], limit: int) -> None:
    """All calls but the last settle; the last one is only looked at."""
    total = sum(pattern)
    transform: Any = chain(policy, rows())
    stream = whole_numbers(10, total)
    state = feed(transform, stream, pattern[:-1])
    keys, values, _ = parts_of(stream, total - pattern[-1], pattern[-1])
    seen = transform.observe(transform.write(state, keys, values), keys, proxy=True)
    state = transform.compact(seen, mx.array([limit]), limit)
    check_handed_on(transform, state, [total], stream, limit)


# Numbers


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", ["keys", "values"])
@PATTERNS
def test_row_without_finite_numbers_is_not_folded(policy: Policy, bad: float, place: str, pattern: list[int]) -> None:
    """It harms no other row for longer than it stays."""
    clean = make_stream(11, 40, batch=2)
    arrays = {"keys": clean.keys.copy(), "values": clean.values.copy()}
    arrays[place][0, :, 9] = bad
    stream, transform = Stream(arrays["keys"], arrays["values"], None, clean.dtype), chain(policy, rows())
    state, other = feed(transform, stream, pattern), feed(transform, clean, pattern)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert held_positions(transform, state) == held_positions(transform, other)
    assert all(mx.isfinite(x).all().item() for x in held_rows(transform, state)[1:])
    assert mx.isfinite(state.memory).all().item()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_the_other_rows_of_a_call_are_folded_without_the_bad_one(bad: float) -> None:
    stream, transform = whole_numbers(12, 40), chain(HAND_ON, rows())
    expected = handed_on(np.delete(stream.values[0, 0], 9, axis=0), 39)[1]
    stream.values[0, 0, 9, 3] = bad
    _, _, values = held_rows(transform, feed(transform, stream, [40]))
    assert np.array_equal(to_numpy(values)[0, 0], expected)
