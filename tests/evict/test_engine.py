"""The eviction engine: slots, masks, batches and stores, whatever the policy."""

import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
    NEAR_TIE,
    H2OHead,
    Stream,
    chunks,
    cuts,
    equal,
    expect,
    feed,
    held_positions,
    held_rows,
    make_stream,
    parts_of,
    plain_calls,
    resume,
    same,
    seeds,
    to_numpy,
)

from vq_functional import (
    PlainCodec,
    Policy,
    QuantizerConfigError,
    blocks,
    chain,
    h2o,
    h2o_policy,
    int8_codec,
    kivi,
    nbytes,
    qjl_codec,
    rows,
    sliding_window,
    snapkv_policy,
    streaming_llm_policy,
    turboquant_mse_codec,
    turboquant_rvq_codec,
)
from vq_functional.core.policy import Scene
from vq_functional.core.store import RowStore
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.evict.engine import Evicting

POLICIES = {
    "streaming_llm": streaming_llm_policy(n_sink=2, window_size=10),
    "h2o": h2o_policy(budget=12, n_sink=2, grace=3),
    "snapkv": snapkv_policy(budget=12, obs_window=4, n_sink=2),
}
BUDGET = 12
STORES = {
    "plain": rows(),
    "float16": rows(key=PlainCodec("float16"), value=PlainCodec("float16")),
    "mse2": rows(key=turboquant_mse_codec(bits=2), value=int8_codec()),
    "mse3": rows(key=turboquant_mse_codec(bits=3), value=turboquant_mse_codec(bits=4)),
    "rvq": rows(key=turboquant_rvq_codec(), value=int8_codec()),
    "qjl": rows(key=qjl_codec(), value=int8_codec()),
}
ALL = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
CAPPED = pytest.mark.parametrize("policy", [POLICIES["streaming_llm"], POLICIES["h2o"]], ids=["streaming_llm", "h2o"])
EVERY_STORE = pytest.mark.parametrize("store", STORES.values(), ids=STORES)
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PATTERN = [20, 1, 1, 1, 5, 1, 1, 17, 1, 1, 1, 1]  # prompts and single tokens in turn
TOTAL = sum(PATTERN)


# Slots


@CAPPED
@EVERY_STORE
@KINDS
def test_decode_step_writes_one_slot_and_names_the_next(policy: Policy, store: RowStore, group: int | None) -> None:
    transform, stream = chain(policy, store), make_stream(0, 60, batch=2, dim=64, group=group)
    state = feed(transform, stream, [30])
    assert transform.capacity(state) == BUDGET + 1
    for token in range(30, 60):
        before, positions = state.rows, state.position
        state = resume(transform, state, stream, [1], token)
        free = positions < 0
        assert free.sum(axis=-1).tolist() == [[1, 1], [1, 1]]
        pairs = zip(flatten(before)[0], flatten(state.rows)[0])
        moved = [(old != new).reshape(*positions.shape, -1).any(axis=-1) for old, new in pairs]
        assert mx.array_equal(mx.stack(moved).any(axis=0), free)
        written = mx.where(free, token, positions)
        victim = state.position < 0
        assert victim.sum(axis=-1).tolist() == [[1, 1], [1, 1]]
        assert mx.array_equal(state.position, mx.where(victim, -1, written))


def test_appended_token_takes_the_first_free_slot() -> None:
    transform, stream = chain(POLICIES["snapkv"], rows()), make_stream(1, 60)
    state = feed(transform, stream, [30], capacity=42)
    for token in range(30, 60):
        before = state
        state = resume(transform, state, stream, [1], token)
        slot = BUDGET + token - 30
        expected = mx.where(mx.arange(42) == slot, token, before.position)
        assert mx.array_equal(state.position, expected)
        moved = (before.rows.keys[0] != state.rows.keys[0]).any(axis=-1)
        assert mx.array_equal(moved, mx.broadcast_to(mx.arange(42) == slot, moved.shape))


@ALL
@pytest.mark.parametrize("store", [STORES["plain"], STORES["mse3"]], ids=["plain", "mse3"])
@given(pattern=cuts())
def test_sorted_view_is_in_token_order_with_rows_and_memory_in_step(
    policy: Policy, store: RowStore, pattern: list[int]
) -> None:
    transform, total = chain(policy, store), sum(pattern)
    state = feed(transform, make_stream(2, total, dim=64), pattern, capacity=total)
    ordered = transform.ordered(state)
    for head in range(2):
        position = ordered.position[0, head].tolist()
        count = sum(i >= 0 for i in position)
        assert position[:count] == sorted(set(position[:count])) and position[count:] == [-1] * (len(position) - count)
        assert all(i < total for i in position)
        slots = [state.position[0, head].tolist().index(i) for i in position[:count]]
        for leaf, sorted_leaf in zip(*(flatten((s.rows, s.memory))[0] for s in (state, ordered))):
            assert mx.array_equal(sorted_leaf[0, head, :count], leaf[0, head][mx.array(slots)])


@ALL
@KINDS
@given(pattern=cuts(20))
def test_empty_slot_remembers_nothing(policy: Policy, group: int | None, pattern: list[int]) -> None:
    transform, total = chain(policy, rows()), sum(pattern)
    stream = make_stream(3, total, group=group)
    state, start = transform.init_state(stream.spec(total)), 0
    for n in pattern:
        state = resume(transform, state, stream, [n], start)
        start += n
        for memory in flatten(state.memory)[0]:
            assert not mx.where(state.position < 0, memory, 0).any().item()


@ALL
@given(pattern=cuts(20))
def test_row_counts_follow_from_token_counts(policy: Policy, pattern: list[int]) -> None:
    transform, total = chain(policy, rows()), sum(pattern)
    stream = make_stream(4, total, batch=2)
    state, fill, start = transform.init_state(stream.spec(total)), Fill(), 0
    for n in pattern:
        held = transform.write(state, *parts_of(stream, start, n)[:2]) if n else state
        fill = transform.written(fill, n)
        assert (held.position >= 0).sum(axis=-1).tolist() == [[fill.rows] * 2] * 2
        state = resume(transform, state, stream, [n], start)
        fill, start = transform.settled(fill, n), start + n
        assert (state.position >= 0).sum(axis=-1).tolist() == [[fill.rows] * 2] * 2
        assert state.offset.tolist() == [fill.tokens] * 2 == [start] * 2


@CAPPED
def test_state_is_one_slot_more_than_the_budget(policy: Policy) -> None:
    transform, stream = chain(policy, rows()), make_stream(5, 50, batch=2, dim=16, value_dim=24, dtype=mx.float16)
    memory = 4 if policy.name == "h2o" else 0
    size = 2 * 2 * (BUDGET + 1) * ((16 + 24) * 2 + 4 + memory) + 2 * 12
    for state in (transform.init_state(stream.spec(1000)), feed(transform, stream, [40] + [1] * 10)):
        assert nbytes(state) == size


# What a call shows


@ALL
@given(pattern=cuts(20))
def test_view_without_empty_columns_is_stored_rows_then_new_ones(policy: Policy, pattern: list[int]) -> None:
    transform, total = chain(policy, rows()), sum(pattern)
    stream = make_stream(6, total)
    state, fill, start = transform.init_state(stream.spec(total)), Fill(), 0
    for n in filter(None, pattern):
        columns = transform.positions_after(state, n, fill)
        mask = transform.make_mask(state, n, fill)
        stored = {(head, i) for head in range(2) for i in held_positions(transform, state)[0][head]}
        held, fill = transform.write(state, *parts_of(stream, start, n)[:2]), transform.written(fill, n)
        keys, values = transform.read(held, fill)
        assert columns.shape == keys.shape[:3] == (1, 2, fill.rows) and mask.shape == (1, 1, n, fill.rows)
        new = set(range(start, start + n))
        for head in range(2):
            place = columns[0, head].tolist()
            assert {(head, i) for i in place} == {x for x in stored if x[0] == head} | {(head, i) for i in new}
            if n > 1:
                assert place[-n:] == list(range(start, start + n))
            assert np.array_equal(to_numpy(keys)[0, head], stream.keys[0, head, place])
            assert np.array_equal(to_numpy(values)[0, head], stream.values[0, head, place])
        state = resume(transform, state, stream, [n], start)
        fill, start = transform.settled(fill, n), start + n


@ALL
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("padding", [(0, 0), (0, 11)], ids=["full", "padded"])
def test_mask_shows_rows_up_to_the_query(policy: Policy, window: int | None, n: int, padding: tuple[int, int]) -> None:
    transform, stream = chain(policy, rows()), make_stream(7, 40, batch=2)
    state = feed(transform, stream, PATTERN[:5], capacity=40, left_padding=padding)
    mask, columns = transform.make_mask(state, n, window=window), transform.positions_after(state, n)
    assert mask.dtype == mx.bool_ and mask.shape == (2, 2 if window else 1, n, columns.shape[2])
    for row in range(2):
        for head in range(mask.shape[1]):
            for step in range(n):
                query = sum(PATTERN[:5]) - padding[row] + step
                seen = [0 <= i <= query and (window is None or query - i < window) for i in columns[row, head].tolist()]
                assert mask[row, head, step].tolist() == seen


@ALL
@EVERY_STORE
@pytest.mark.parametrize("group", [1, 2])
def test_attention_is_exact_over_the_rows_shown(policy: Policy, store: RowStore, group: int | None) -> None:
    transform, stream = chain(policy, store), make_stream(8, TOTAL, dim=64, group=group)
    state, start, scale = transform.init_state(stream.spec(TOTAL)), 0, 0.125
    for n in PATTERN:
        keys, values, queries = parts_of(stream, start, n)
        columns = to_numpy(transform.positions_after(state, n)).astype(int)
        held = transform.write(state, keys, values)
        out = to_numpy(transform.attend(held, queries, scale))
        shown_keys, shown_values = (to_numpy(x).astype(np.float64) for x in transform.read(held))
        state = transform.settle(held, queries)
        for index in range(2 * group):
            head = index // group
            for step in range(n):
                seen = [c for c, i in enumerate(columns[0, head]) if 0 <= i <= start + step]
                logits = shown_keys[0, head, seen] @ stream.queries[0, index, start + step] * scale
                weights = np.exp(logits - logits.max())
                expected = weights @ shown_values[0, head, seen] / weights.sum()
                np.testing.assert_allclose(out[0, index, step], expected, rtol=1e-3, atol=1e-4)
        start += n


# Stores


@ALL
@EVERY_STORE
@KINDS
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_survivors_are_never_encoded_again(policy: Policy, store: RowStore, group: int | None, dtype: mx.Dtype) -> None:
    transform = chain(policy, store)
    stream = make_stream(9, TOTAL, batch=2, dim=64, value_dim=32, group=group, dtype=dtype)
    state, start = transform.init_state(stream.spec(TOTAL)), 0
    coders = [codec.bind(dim, dtype) for codec, dim in ((store.key, 64), (store.value, 32))]
    first: list[list[mx.array]] = []  # by call: all arrays that keys and values became when they came
    for n in PATTERN:
        came = parts_of(stream, start, n)
        first.append([x for coder, rows_ in zip(coders, came) for x in coder.encode(rows_)])
        state, _, _ = transform.update(state, *came)
        start += n
    codes = [mx.concatenate(arrays, axis=2) for arrays in zip(*first)]
    ordered = transform.ordered(state)
    count = (ordered.position >= 0).sum(axis=-1).max().item()
    for leaf, whole in zip(flatten(ordered.rows)[0], codes):
        index = ordered.position[..., :count]
        index = index.reshape(*index.shape, *[1] * (whole.ndim - 3))
        assert leaf.dtype == whole.dtype
        assert mx.array_equal(leaf[:, :, :count], mx.take_along_axis(whole, index, axis=2))


@given(seeds(), cuts(), st.sampled_from(["mse2", "mse3", "float16"]))
def test_policy_sees_keys_as_the_store_gives_them_back(seed: int, pattern: list[int], name: str) -> None:
    store, chosen = STORES[name], {"budget": 12, "n_sink": 2, "grace": 3, "decay": 0.98}
    stream, calls = make_stream(seed, sum(pattern), dim=64, group=2), plain_calls(pattern, 1)
    decoded = []
    for codec, x in ((store.key, stream.keys), (store.value, stream.values)):
        coder = codec.bind(64, mx.float32)
        pieces = [coder.decode(coder.encode(piece)) for piece in chunks(x, calls, mx.float32) if piece.shape[2]]
        decoded.append(to_numpy(mx.concatenate(pieces, axis=2)))
    told, margin = expect(lambda: H2OHead(**chosen), Stream(*decoded, stream.queries, mx.float32), calls)
    assume(margin > NEAR_TIE)
    transform = chain(h2o_policy(**chosen), store)
    state, start = transform.init_state(stream.spec()), 0
    for n, want in zip(pattern, told):
        state = resume(transform, state, stream, [n], start)
        start += n
        assert held_positions(transform, state) == [[want[0, head].held for head in range(2)]]
    mass = to_numpy(transform.ordered(state).memory)
    for head in range(2):
        scores = told[-1][0, head].scores
        np.testing.assert_allclose(mass[0, head, : len(scores)], scores, rtol=1e-3, atol=1e-5)


@ALL
def test_store_with_shared_scales_is_refused(policy: Policy) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"{policy.name}.*kivi.*`store`.*; got 'kivi'$"):
        chain(policy, kivi())


@ALL
@pytest.mark.parametrize("store", [sliding_window(window_size=8), h2o()], ids=lambda store: store.name)
def test_what_drops_rows_itself_is_no_bed(policy: Policy, store: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^{policy.name} over {store.name}: `store` must keep every row"):
        chain(policy, store)


@pytest.mark.parametrize("store", [int8_codec(), h2o_policy(), "int8"], ids=["codec", "policy", "name"])
def test_what_is_no_store_is_no_bed(store: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=r"^h2o over (int8|h2o): `store` must keep every row"):
        chain(h2o_policy(), store)


@pytest.mark.parametrize("policy", [rows(), h2o(), "h2o"], ids=["store", "method", "name"])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=r"^chain: `policy` must be a policy"):
        chain(policy, rows())


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("codec", ["int8", rows(), kivi(), 0], ids=["name", "store", "method", "number"])
@pytest.mark.parametrize("bed", [rows, blocks])
def test_what_is_no_codec_is_refused(bed: Any, side: str, codec: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=f"^{bed.__name__}: `{side}` must be a codec"):
        bed(**{side: codec})


# Policies of one's own


@attrs.frozen
class SmallNumbers(Policy):
    """The smallest first number of a key has priority, as `kind` returns it."""

    kind: str = "whole"
    name = "small_numbers"

    def score(self, memory: Any, scene: Scene) -> Any:
        priority = -scene.keys()[..., 0].astype(mx.float32)
        kinds = {"whole": priority, "narrow": priority.sum(axis=1, keepdims=True), "half": priority.astype(mx.float16)}
        return priority if self.kind == "bare" else (memory, kinds[self.kind])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"budget": 4, "n_sink": 2, "recent": 4}, "`budget` must hold the 6 rows of `n_sink`, `recent` and `protect`"),
        ({"budget": 4, "protect": [(0, 5)]}, "`budget` must hold the 5 rows of `n_sink`, `recent` and `protect`"),
        ({"budget": -3}, "`budget` must be an integer >= 1"),
        ({"budget": 1.5}, "`budget` must be an integer >= 1, or a share of the prompt"),
        ({"budget": 4, "n_sink": -1}, "`n_sink` must be an integer >= 0"),
    ],
)
def test_counts_of_a_policy_are_checked(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(QuantizerConfigError, match=f"^small_numbers: {rule}"):
        chain(SmallNumbers(**options), rows())


def test_spans_of_a_policy_are_checked_and_sorted() -> None:
    assert SmallNumbers(budget=8, protect=[(5, 7), (1, 2), (6, 9)]).protect == ((1, 2), (5, 9))  # type: ignore[arg-type]
    with pytest.raises(QuantizerConfigError, match="`protect` must be pairs of integers"):
        SmallNumbers(budget=8, protect=[(3, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("bare", "`score` must return the next memory and a priority"),
        ("narrow", r"`priority` must be float32 of shape \(2, 2, 24\)"),
        ("half", r"`priority` must be float32 of shape \(2, 2, 24\)"),
    ],
)
def test_what_a_policy_returns_is_checked(kind: str, rule: str) -> None:
    stream = make_stream(0, 20, batch=2)
    with pytest.raises(QuantizerConfigError, match=f"^small_numbers: {rule}"):
        feed(chain(SmallNumbers(budget=4, kind=kind), rows()), stream, [20])
    assert nbytes(feed(chain(SmallNumbers(budget=4), rows()), stream, [20])) > 0


@ALL
def test_default_name_names_both_parts(policy: Policy) -> None:
    assert chain(policy, rows(name="bed")).name == f"{policy.name} over bed"
    assert chain(policy, rows(), name="mine").name == "mine"


# States and batches


def test_pieces_of_long_calls_are_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the calls, and whatever is left over for the last piece."""
    traces, settle = [], Evicting._settle_stride

    def counted(self: Evicting, *arguments: Any) -> Any:
        traces.append(arguments)
        return settle(self, *arguments)

    monkeypatch.setattr(Evicting, "_settle_stride", counted)
    transform: Any = chain(h2o_policy(budget=13, n_sink=2, grace=3), rows())
    feed(transform, make_stream(15, 200), [57, 1, 29, 84, 1, 28])
    assert len(traces) == 1


@ALL
def test_call_without_tokens_changes_nothing(policy: Policy) -> None:
    transform, stream = chain(policy, rows()), make_stream(12, 30)
    state = feed(transform, stream, [20], capacity=30)
    nothing = mx.zeros((1, 2, 0, 16))
    assert same(transform.update(state, nothing, nothing)[0], state)


@ALL
@KINDS
@given(seed=seeds(), pattern=cuts(20))
def test_batch_rows_and_heads_are_independent(policy: Policy, group: int | None, seed: int, pattern: list[int]) -> None:
    transform, total = chain(policy, rows()), sum(pattern)
    stream = make_stream(seed, total, batch=3, heads=2, group=group)
    whole = flatten(feed(transform, stream, pattern, total))[0]
    for row in range(3):
        alone = flatten(feed(transform, stream.rows([row]), pattern, total))[0]
        assert equal([x[row : row + 1] for x in whole], alone)
    turned = flatten(feed(transform, stream.rows([2, 0, 1]), pattern, total))[0]
    assert equal([x[mx.array([2, 0, 1])] for x in whole], turned)
    queries = None if group is None else stream.queries[:, [2, 3, 0, 1]]
    swapped = Stream(stream.keys[:, [1, 0]], stream.values[:, [1, 0]], queries, stream.dtype)
    swapped_state = flatten(feed(transform, swapped, pattern, total))[0]
    assert equal([x if x.ndim == 1 else x[:, mx.array([1, 0])] for x in whole], swapped_state)


@ALL
def test_row_whose_prompt_is_over_waits_for_the_others(policy: Policy) -> None:
    transform, stream = chain(policy, rows()), make_stream(14, 40, batch=2)
    state = feed(transform, stream, [18, 1, 1], capacity=40)
    keys, values, _ = parts_of(stream, 20, 9)
    for n in (9, 1):
        held = transform.write(state, keys[:, :, :n], values[:, :, :n], mx.array([0, n]))
        after = transform.settle(held, keys[:, :, :n], mx.array([0, n]), proxy=True)
        assert after.offset.tolist() == [20, 20 + n]
        old, new = (map_leaves(lambda x: x[:1], s) for s in (state, after))
        assert equal(*(held_rows(transform, s) for s in (old, new)))
        assert equal(*(flatten(transform.ordered(s).memory)[0] for s in (old, new)))


# Numbers


@ALL
@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("pattern", [[40], [1] * 40, [15, 1, 24]], ids=["once", "decode", "chunks"])
def test_one_bad_row_harms_neither_scores_nor_other_sequences(
    policy: Policy, group: int | None, bad: float, pattern: list[int]
) -> None:
    transform, clean = chain(policy, rows()), make_stream(15, 40, batch=2, group=group)
    keys = clean.keys.copy()
    keys[0, :, 9] = bad
    stream = Stream(keys, clean.values, clean.queries, clean.dtype)
    state, other = feed(transform, stream, pattern, 40), feed(transform, clean, pattern, 40)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert all(mx.isfinite(memory).all().item() for memory in flatten(state.memory)[0])
    for held, good in zip(held_positions(transform, state)[0], held_positions(transform, other)[0]):
        assert held[:2] == [0, 1] and len(held) == len(good)
