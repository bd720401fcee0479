"""SnapKV: the last queries of a prompt vote on its rows; single tokens are appended."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
    NEAR_TIE,
    Call,
    SnapKVHead,
    Stream,
    compare,
    cuts,
    equal,
    expect,
    feed,
    held_positions,
    held_rows,
    left_padded_calls,
    make_stream,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_adapters.cache import TransformKVCache
from vq_functional import KVSpec, QuantizerConfigError, rows, snapkv, snapkv_policy
from vq_functional.core.transform import Fill

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any options that leave room for the window, forced or not."""
    obs_window, n_sink = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    return {
        "budget": obs_window + n_sink + draw(st.integers(1, 12)),
        "obs_window": obs_window,
        "n_sink": n_sink,
        "pool_kernel": draw(st.sampled_from([None, 1, 3, 5, 7])),
        "force_window": draw(st.sampled_from([None, False, True])),
    }


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_votes(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    calls = plain_calls(pattern, batch)
    told, margin = expect(lambda: SnapKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(snapkv(**chosen), told, stream, calls, capacity=total)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_votes_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    chosen = {"budget": 20, "obs_window": 8, "n_sink": 2}
    stream, calls = make_stream(0, 90, dim=64, group=group, dtype=dtype), plain_calls([60, 1, 1, 3, 25], 1)
    told, margin = expect(lambda: SnapKVHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(snapkv(**chosen), told, stream, calls, capacity=64)


@given(seeds(), options(), st.data(), cuts(30), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(5, first=chosen["n_sink"]))
    chosen = chosen | {"budget": chosen["budget"] + sum(end - start for start, end in protect)}
    total = sum(pattern)
    stream, calls = make_stream(seed, total, group=group), plain_calls(pattern, 1)
    told, margin = expect(lambda: SnapKVHead(**chosen, protect=protect), stream, calls)
    assume(margin > NEAR_TIE)
    compare(snapkv(**chosen, protect=protect), told, stream, calls, capacity=total)
    seen = {i for start, end in protect for i in range(start, end) if i < total}
    assert all(seen <= set(head.held) for head in told[-1].values())


def one_shot(keys: np.ndarray, queries: np.ndarray, budget: int, window: int, kernel: int) -> list[int]:
    """The paper's rule for one head and a whole prompt: `keys` [T, D], `queries` [G, T, D]."""
    total, before = len(keys), len(keys) - window
    votes = np.zeros(before)
    for group in queries:
        for token in range(before, total):
            weights = np.exp(keys[: token + 1] @ group[token] / np.sqrt(keys.shape[1]))
            votes += (weights / weights.sum())[:before]
    pooled = np.convolve(votes, np.ones(kernel) / kernel, mode="same")
    best = np.argsort(-pooled)[: budget - window]
    return sorted([*best.tolist(), *range(before, total)])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("budget", "window"), [(24, 8), (40, 32), (9, 1)])
@pytest.mark.parametrize("kernel", [None, 7])
def test_one_call_is_the_papers_rule(budget: int, window: int, kernel: int | None, group: int | None) -> None:
    stream = make_stream(1, 120, dim=32, group=group)
    transform = snapkv(budget=budget, obs_window=window, n_sink=0, pool_kernel=kernel)
    held = held_positions(transform, feed(transform, stream, [120]))
    for head in range(2):
        keys, queries = stream.keys[0, head].astype(np.float64), stream.queries_of(0, head).astype(np.float64)
        assert held[0][head] == one_shot(keys, queries, budget, window, kernel or 5)


@KINDS
def test_window_of_one_query_is_tova(group: int | None) -> None:
    """The rows stay that the newest token attends to most."""
    stream = make_stream(2, 70, group=group)
    transform = snapkv(budget=16, obs_window=1, n_sink=4, pool_kernel=1, force_window=False)
    held = held_positions(transform, feed(transform, stream, [70]))
    for head in range(2):
        keys = stream.keys[0, head].astype(np.float64)
        voters = [keys[-1]] if group is None else list(stream.queries_of(0, head)[:, -1].astype(np.float64))
        weights = [np.exp(keys @ voter / 4) for voter in voters]
        attention = sum(x / x.sum() for x in weights)
        best = [i for i in np.argsort(-attention).tolist() if i >= 4][:12]
        assert held[0][head] == sorted([0, 1, 2, 3, *best])


@given(seeds(), options(), st.integers(2, 40), GROUPS)
def test_votes_of_a_prompt_sum_to_one(seed: int, chosen: dict[str, Any], total: int, group: int | None) -> None:
    transform = snapkv(**chosen | {"budget": 64})
    state = feed(transform, make_stream(seed, total, batch=2, group=group), [total])
    np.testing.assert_allclose(to_numpy(state.memory.sum(axis=-1)), 1, rtol=1e-5)


@given(seeds(), options(), st.lists(st.integers(2, 12), min_size=2, max_size=4))
def test_votes_of_short_calls_share_the_window(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    """Before any eviction the votes of earlier calls make up for what a short call lacks."""
    total = sum(pattern)
    transform = snapkv(**chosen | {"budget": 64})
    state = feed(transform, make_stream(seed, total, group=2), pattern)
    np.testing.assert_allclose(to_numpy(state.memory.sum(axis=-1)), 1, rtol=1e-5)


@given(options(), cuts(30), GROUPS)
def test_budget_caps_prompts_and_single_tokens_come_on_top(
    chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    transform, total = snapkv(**chosen), sum(pattern)
    stream = make_stream(3, total, batch=2, group=group)
    state, count, start = transform.init_state(stream.spec(total)), 0, 0
    for n in pattern:
        before = held_positions(transform, state)
        state = resume(transform, state, stream, [n], start)
        count, start = count + n if n <= 1 else min(chosen["budget"], count + n), start + n
        for row, old_row in zip(held_positions(transform, state), before):
            for held, old in zip(row, old_row):
                assert len(held) == count
                assert set(range(min(chosen["n_sink"], start))) <= set(held)
                assert held == old + list(range(start - n, start)) or n > 1


@given(seeds(), options(), st.lists(st.integers(2, 30), min_size=1, max_size=4), GROUPS)
def test_forced_window_stays(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = snapkv(**chosen | {"force_window": True}), sum(pattern)
    state = feed(transform, make_stream(seed, total, group=group), pattern)
    for held in held_positions(transform, state)[0]:
        assert set(range(max(total - chosen["obs_window"], 0), total)) <= set(held)


@KINDS
@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"pool_kernel": 1, "force_window": False}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"pool_kernel": 5, "force_window": False}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"pool_kernel": 1, "force_window": True}, [0, 1, 2, 3, 4, 27, 28, 29]),
        ({"pool_kernel": 5, "force_window": True}, [0, 1, 2, 3, 4, 27, 28, 29]),
    ],
    ids=str,
)
def test_of_equal_votes_the_earlier_rows_stay(chosen: dict[str, Any], kept: list[int], group: int | None) -> None:
    """Zero keys: all votes of keys are equal, and those of queries for all rows before the window."""
    transform = snapkv(budget=8, obs_window=3, n_sink=2, **chosen)
    stream = make_stream(4, 30, group=group)
    stream = Stream(np.zeros_like(stream.keys), stream.values, stream.queries, mx.float32)
    assert held_positions(transform, feed(transform, stream, [30])) == [[kept] * 2]


def test_pooling_counts_the_zeros_beyond_the_ends() -> None:
    """Of equal votes those with fewer neighbours lose: the first two rows and those beside the window."""
    stream = make_stream(5, 12)
    stream = Stream(np.zeros_like(stream.keys), stream.values, None, mx.float32)
    free = snapkv(budget=8, obs_window=2, n_sink=0, pool_kernel=5, force_window=False)
    assert held_positions(free, feed(free, stream, [12])) == [[list(range(2, 10))] * 2]
    forced = snapkv(budget=8, obs_window=2, n_sink=0, pool_kernel=5, force_window=True)
    assert held_positions(forced, feed(forced, stream, [12])) == [[[2, 3, 4, 5, 6, 7, 10, 11]] * 2]


@KINDS
@pytest.mark.parametrize("total", [1, 3, 31, 32, 33])
def test_prompt_within_the_budget_is_a_plain_cache(total: int, group: int | None) -> None:
    stream, transform, plain = make_stream(6, total, dim=64, group=group), snapkv(), rows()
    position, *held = held_rows(transform, feed(transform, stream, [total]))
    assert position.tolist() == [[list(range(total))] * 2]
    assert equal(held, plain.read(feed(plain, stream, [total], capacity=total)))


@given(seeds(), options(), cuts(12), GROUPS)
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform, plain = snapkv(**chosen | {"budget": 200}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    _, *held = held_rows(transform, feed(transform, stream, pattern))
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@given(seeds(), options(), st.integers(1, 20), st.integers(8, 30), GROUPS)
def test_last_cut_that_covers_the_window_changes_nothing(
    seed: int, chosen: dict[str, Any], first: int, second: int, group: int | None
) -> None:
    """No call before it evicts, and it brings all voters."""
    chosen = chosen | {"budget": max(chosen["budget"], first)}
    transform, total = snapkv(**chosen), first + second
    stream = make_stream(seed, total, group=group)
    _, margin = expect(lambda: SnapKVHead(**chosen), stream, plain_calls([total], 1))
    assume(margin > NEAR_TIE)
    held = [held_rows(transform, feed(transform, stream, how)) for how in ([first, second], [total])]
    assert equal(*held)


@KINDS
def test_token_before_the_prompt_is_not_forgotten(group: int | None) -> None:
    stream, calls = make_stream(7, 45, group=group), plain_calls([1, 4, 1, 39], 1)
    told, margin = expect(lambda: SnapKVHead(12, 6, 1), stream, calls)
    assert margin > NEAR_TIE and 0 in told[-1][0, 0].held
    compare(snapkv(budget=12, obs_window=6, n_sink=1), told, stream, calls)


@KINDS
def test_decode_tail_grows_past_the_budget(group: int | None) -> None:
    transform, stream = snapkv(budget=16, obs_window=8), make_stream(8, 164, group=group)
    state = feed(transform, stream, [64], capacity=100)
    prompt, fill = held_positions(transform, state), transform.settled(Fill(64, 64), 64)
    assert [len(held) for held in prompt[0]] == [16, 16] and fill.rows == 16
    for token in range(64, 164):
        if transform.room(fill, 1) > transform.capacity(state):
            state = transform.grow(state, transform.capacity(state) + 8)
        assert not transform.overflows(state, 1).any().item()
        state = resume(transform, state, stream, [1], token)
        fill = transform.settled(transform.written(fill, 1), 1)
    assert transform.policy.prompt_only and fill.rows == 116 and transform.capacity(state) == 116
    assert held_positions(transform, state) == [[held + list(range(64, 164)) for held in prompt[0]]]
    roomy = feed(transform, stream, [64] + [1] * 100, capacity=120)
    assert equal(held_rows(transform, state), held_rows(transform, roomy))


@KINDS
def test_later_prompt_selects_among_kept_and_decoded_rows_alike(group: int | None) -> None:
    stream, calls = make_stream(9, 110, group=group), plain_calls([50] + [1] * 20 + [40], 1)
    told, margin = expect(lambda: SnapKVHead(14, 6, 2), stream, calls)
    assert margin > NEAR_TIE
    compare(snapkv(budget=14, obs_window=6, n_sink=2), told, stream, calls, capacity=40)


def test_call_past_the_capacity_returns_nan() -> None:
    transform, stream = snapkv(budget=4, obs_window=1, n_sink=1), make_stream(10, 10)
    state = feed(transform, stream, [9])
    one = [mx.array(x[:, :, 9:]) for x in (stream.keys, stream.values)]
    assert transform.overflows(state, 1).tolist() == [True]
    _, *shown = transform.update(state, *one)
    assert all(mx.isnan(x).all().item() for x in shown)
    _, *shown = transform.update(transform.grow(state, 5), *one)
    assert not any(mx.isnan(x).any().item() for x in shown)


def test_growing_changes_no_row() -> None:
    transform, stream = snapkv(budget=9, obs_window=4), make_stream(11, 50, group=2)
    state = feed(transform, stream, [30])
    grown = transform.grow(state, 25)
    assert transform.capacity(grown) == 25
    assert equal(held_rows(transform, state), held_rows(transform, grown))
    assert same(transform.grow(grown, 10), grown)


@pytest.mark.parametrize("pattern", [[128], [100, 28], [40, 1, 47, 40]], ids=str)
def test_defaults_hold_sinks_and_the_newest_row(pattern: list[int]) -> None:
    transform = snapkv(budget=32)
    state = feed(transform, make_stream(12, 128, group=2), pattern, capacity=40)
    for held in held_positions(transform, state)[0]:
        assert held[:4] == [0, 1, 2, 3] and held[-1] == 127 and len(held) == 32


@given(seeds(), options(), right_padded(2, longest=14), GROUPS)
def test_right_padding_is_neither_voter_nor_row(
    seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None
) -> None:
    stream = make_stream(seed, 90, batch=2, group=group)
    told, margin = expect(lambda: SnapKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(snapkv(**chosen), told, stream, calls, capacity=90)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(12), GROUPS)
def test_left_padding_is_neither_voter_nor_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    told, margin = expect(lambda: SnapKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(snapkv(**chosen), told, stream, calls, capacity=80)


@KINDS
def test_padding_takes_no_sink_and_no_budget(group: int | None) -> None:
    stream, calls = make_stream(13, 37, batch=2, group=group), left_padded_calls([25] + [1] * 12, (0, 5))
    told, margin = expect(lambda: SnapKVHead(8, 4, 2), stream, calls)
    assert margin > NEAR_TIE
    compare(snapkv(budget=8, obs_window=4, n_sink=2), told, stream, calls, capacity=20)


def test_left_padded_prompt_of_one_token_votes_like_the_token_alone() -> None:
    """The next call is shorter than the window, so that the stored votes count."""
    chosen = {"budget": 2, "obs_window": 6, "n_sink": 0, "pool_kernel": 1, "force_window": False}
    stream, calls = make_stream(14, 5, group=1), left_padded_calls([4, 4], (3,))
    told, margin = expect(lambda: SnapKVHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(snapkv(**chosen), told, stream, calls)


def test_short_last_chunk_of_a_padded_batch_keeps_all_rows() -> None:
    """One row's prompt ends with a chunk of one token, which evicts nothing, as if it were alone."""
    stream, lengths = make_stream(15, 8, batch=2, heads=1), [8, 5]
    transform = snapkv(budget=4, obs_window=1, n_sink=1)
    batch, alone = TransformKVCache(transform), TransformKVCache(transform)
    batch.prepare(lengths=lengths, right_padding=[0, 3])
    keys, values = mx.array(stream.keys), mx.array(stream.values)
    for start, end in ((0, 4), (4, 8)):
        batch.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    batch.finalize()
    for start, end in ((0, 4), (4, 5)):
        alone.update_and_fetch(keys[1:, :, start:end], values[1:, :, start:end])
    single = batch.extract(1)
    assert single.size() == alone.size() == 5
    assert equal(single.keys_and_values(), alone.keys_and_values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("storage", ["auto", "float16"])
def test_storage_dtype(dtype: mx.Dtype, storage: str) -> None:
    transform, stream = snapkv(budget=10, obs_window=4, dtype=storage), make_stream(16, 40, dtype=dtype)
    state = feed(transform, stream, [40])
    stored = dtype if storage == "auto" else mx.float16
    position, *held = held_rows(transform, state)
    assert [x.dtype for x in (*state.rows.keys, *state.rows.values)] == [stored] * 2
    for x, whole in zip(held, (stream.keys, stream.values)):
        assert x.dtype == dtype
        for head in range(2):
            came = mx.array(whole[0, head][position[0, head].tolist()]).astype(dtype)
            assert mx.array_equal(x[0, head], came.astype(stored).astype(dtype))


def test_numbers_too_large_for_the_storage_end_at_its_range() -> None:
    came = mx.array([70_000.0, -3e38, math.nan, 2.5, *[1.0] * 12]).astype(mx.bfloat16)
    transform, x = snapkv(budget=10, dtype="float16"), mx.broadcast_to(came, (1, 2, 8, 16))
    state = transform.init_state(KVSpec(kv_heads=2, key_dim=16, value_dim=16, dtype=mx.bfloat16))
    _, *out = transform.update(state, x, x)
    for rows_out in out:
        first, second, third, *rest = rows_out[0, 0, -1].tolist()
        assert first == -second == mx.array(65504.0).astype(mx.bfloat16).item() and math.isnan(third)
        assert rest == came[3:].tolist()


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_neighbours_keep_no_broken_row(bad: float, group: int | None) -> None:
    """Votes are smoothed over neighbours, but a row without a score of its own goes first."""
    stream, transform = make_stream(18, 40, group=group), snapkv(budget=36, obs_window=4, n_sink=1, pool_kernel=5)
    for at in range(1, 36):
        keys = stream.keys.copy()
        keys[:, :, at, 3] = bad
        state = feed(transform, Stream(keys, stream.values, stream.queries, mx.float32), [40])
        assert all(at not in head for head in held_positions(transform, state)[0])


@pytest.mark.parametrize(
    "chosen", [{"backend": name} for name in ("mlx", "metal", "reference")] + [{"batched_scoring": False}], ids=str
)
def test_accepted_options_change_nothing(chosen: dict[str, Any]) -> None:
    stream, common = make_stream(17, 60, group=2), {"budget": 12, "obs_window": 5}
    one, other = snapkv(**common), snapkv(**common, **chosen)
    assert same(feed(one, stream, [40, 20]), feed(other, stream, [40, 20]))


@pytest.mark.parametrize("build", [snapkv, snapkv_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -1}, "budget"),
        ({"budget": 8.0}, "budget"),
        ({"budget": None}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 3, "n_sink": 4}, "budget"),
        ({"budget": 36, "force_window": True}, "budget"),
        ({"budget": 10, "protect": [(10, 16)]}, "budget"),
        ({"obs_window": 0}, "obs_window"),
        ({"obs_window": -2}, "obs_window"),
        ({"obs_window": 1.5}, "obs_window"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": "4"}, "n_sink"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": mx.float16}, "dtype"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, "backend"),
        ({"batched_scoring": "yes"}, "batched_scoring"),
        ({"pool_kernel": 0}, "pool_kernel"),
        ({"pool_kernel": 4}, "pool_kernel"),
        ({"pool_kernel": -5}, "pool_kernel"),
        ({"pool_kernel": 5.0}, "pool_kernel"),
        ({"force_window": "no"}, "force_window"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": [(1,)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^snapkv: .*`{field}`.*; got "):
        build(**chosen)
