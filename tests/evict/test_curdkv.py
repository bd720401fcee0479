"""CurDKV: rows stay that span most of what attention puts out, by keys and values."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
    NEAR_TIE,
    Call,
    Head,
    Stream,
    chunks,
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

from vq_functional import QuantizerConfigError, rows
from vq_functional.core.tree import flatten
from vq_functional.evict.curdkv import curdkv, curdkv_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PATTERNS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [25, 1, 34]], ids=["once", "decode", "chunks"])
WINDOW = 16  # positions within which norms are compared


class CurDKVHead(Head):
    """Products of norms for a prompt; mean leverage on the attention output for single tokens."""

    def __init__(
        self,
        values: np.ndarray,
        budget: int,
        n_sink: int = 4,
        rank_cap: int = 16,
        prefill: str = "cur",
        decode: str = "leverage",
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, 0, protect)
        self.values = values.astype(np.float64)  # [T, Dv] of all tokens
        self.rank_cap, self.prefill, self.decode = rank_cap, prefill, decode
        self.sums: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        self.sums |= dict.fromkeys(new, 0.0)
        self.counts |= dict.fromkeys(new, 0)
        if len(new) == 1 and self.decode == "append":
            self.held = shown
            return
        exact = self.decode == "leverage" if len(new) == 1 else self.prefill == "exact"
        if exact:
            for step, token in enumerate(new):
                voters = [self.keys[token]] if queries is None else list(queries[:, step])
                self.take_in(token, [i for i in shown if i < token], voters)
        else:
            self.sums, self.counts = self.products(shown), dict.fromkeys(shown, 1)
        self.scores = {i: self.sums[i] / max(self.counts[i], 1) for i in shown}
        self.keep(shown, self.scores)

    def keep(self, shown: list[int], priority: dict[int, float]) -> None:
        """Rows that are alone in their windows have exactly the same score: only other scores can be close."""
        margin = self.margin
        super().keep(shown, priority)
        free = {priority[i] for i in shown if not self.protected(i)}
        cut = min((priority[i] for i in self.held if not self.protected(i)), default=0.0)
        self.margin = min([margin, *(abs(cut - x) / max(cut, x) for x in free - {cut})])

    def take_in(self, token: int, before: list[int], voters: list[np.ndarray]) -> None:
        """Old rows add what they span without the new one; the new one starts with what it spans among all."""
        for i, part in self.leverage(before, voters).items():
            self.sums[i] += part
            self.counts[i] += 1
        self.sums[token], self.counts[token] = self.leverage([*before, token], voters)[token], 1

    def leverage(self, seen: list[int], voters: list[np.ndarray]) -> dict[int, float]:
        """Shares of the rows `seen` in the `rank_cap` strongest directions of diag(attention) V."""
        if not seen:
            return {}
        attention = [self.attention(voter, seen) for voter in voters]
        output = np.stack([sum(a[i] for a in attention) / len(voters) * self.values[i] for i in seen])
        _, directions = np.linalg.eigh(output.T @ output)
        parts = ((output @ directions[:, -self.rank_cap :]) ** 2).sum(axis=-1)
        return dict(zip(seen, parts / parts.sum() if parts.sum() > 0 else parts))

    def products(self, shown: list[int]) -> dict[int, float]:
        """|k|^2 |v|^2, each as a multiple of its window's mean, as shares of the whole."""
        size = {i: (float(self.keys[i] @ self.keys[i]), float(self.values[i] @ self.values[i])) for i in shown}
        shares = {}
        for i in shown:
            near = [size[j] for j in shown if j // WINDOW == i // WINDOW]
            means = [max(sum(x), 1e-300) / len(near) for x in zip(*near)]
            shares[i] = size[i][0] / means[0] * size[i][1] / means[1]
        total = sum(shares.values())
        return {i: share / total if total > 0 else 0.0 for i, share in shares.items()}


def told_by(chosen: dict[str, Any], stream: Stream, calls: Sequence[Call]) -> tuple[list[Any], float, list[CurDKVHead]]:
    """What `expect` says, and the heads after the last call, row by row."""
    heads: list[CurDKVHead] = []

    def start() -> CurDKVHead:
        heads.append(CurDKVHead(stream.values[divmod(len(heads), stream.heads)], **chosen))
        return heads[-1]

    return *expect(start, stream, calls), heads


def check(
    chosen: dict[str, Any], stream: Stream, calls: Sequence[Call], demand: Callable[[bool], Any], capacity: int = 1
) -> None:
    """Feed `calls` and compare every call with the oracle; `demand` takes whether no choice was close."""
    told, margin, _ = told_by(chosen, stream, calls)
    demand(margin > NEAR_TIE)
    compare(curdkv(**chosen), told, stream, calls, capacity)


def sure(condition: bool) -> None:
    assert condition


@st.composite
def options(draw: st.DrawFn, decodes: Sequence[str] = ("leverage", "cur", "append")) -> dict[str, Any]:
    """Ranks that leave nothing of heads of size 16 out."""
    budget = draw(st.integers(1, 16))
    return {
        "budget": budget,
        "n_sink": draw(st.integers(0, min(3, budget - 1))),
        "rank_cap": draw(st.sampled_from([17, 64])),
        "prefill": draw(st.sampled_from(["cur", "exact"])),
        "decode": draw(st.sampled_from(decodes)),
    }


@given(seeds(), options(), cuts(24), GROUPS, st.integers(1, 2), st.integers(1, 2), st.sampled_from([4, 16]))
def test_rows(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    check(chosen, stream, plain_calls(pattern, batch), assume, total)


@pytest.mark.parametrize("prefill", ["cur", "exact"])
@pytest.mark.parametrize("decode", ["leverage", "cur", "append"])
@KINDS
def test_prompt_decode_prompt(prefill: str, decode: str, group: int | None) -> None:
    chosen = {"budget": 18, "n_sink": 2, "rank_cap": 16, "prefill": prefill, "decode": decode}
    stream = make_stream(1, 65, batch=2, dim=16, group=group)
    check(chosen, stream, plain_calls([35] + [1] * 15 + [15], 2), sure, 60)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
@pytest.mark.parametrize("prefill", ["cur", "exact"])
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None, prefill: str) -> None:
    chosen = {"budget": 12, "n_sink": 2, "rank_cap": 64, "prefill": prefill}
    stream = make_stream(2, 50, dim=64, group=group, dtype=dtype)
    check(chosen, stream, plain_calls([20, 1, 1, 9] + [1] * 19, 1), sure)


@given(seeds(), options(), st.data(), cuts(20), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(5, first=chosen["n_sink"], last=20))
    chosen = chosen | {"budget": chosen["budget"] + sum(end - start for start, end in protect), "protect": protect}
    total = sum(pattern)
    stream = make_stream(seed, total, group=group)
    check(chosen, stream, plain_calls(pattern, 1), assume, total)
    seen = {i for start, end in protect for i in range(start, end) if i < total}
    transform = curdkv(**chosen)
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern, total))[0])


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_is_no_row(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    """A sequence with one token in a wide call is as if it had come alone."""
    check(chosen, make_stream(seed, 60, batch=2, group=group), calls, assume, 60)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_is_no_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    check(chosen, stream, left_padded_calls([*pattern, 7], padding), assume, 80)


# Leverage


def memory_of(transform: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts [B, H, slots] of the rows in token order."""
    sums, counts = (to_numpy(x) for x in flatten(transform.ordered(state).memory)[0])
    return sums, counts


@given(seeds(), options(["leverage"]), cuts(20), GROUPS)
def test_sums_and_counts(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    stream, calls = make_stream(seed, sum(pattern), batch=2, group=group), plain_calls(pattern, 2)
    _, margin, heads = told_by(chosen, stream, calls)
    assume(margin > NEAR_TIE)
    transform = curdkv(**chosen)
    sums, counts = memory_of(transform, feed(transform, stream, pattern))
    for index, head in enumerate(heads):
        row, place = divmod(index, 2)
        n = len(head.held)
        assert counts[row, place].tolist() == [head.counts[i] for i in head.held] + [0] * (counts.shape[2] - n)
        np.testing.assert_allclose(sums[row, place, :n], [head.sums[i] for i in head.held], rtol=1e-4, atol=1e-6)


@KINDS
@pytest.mark.parametrize("last", [0, 1, 3])
@pytest.mark.parametrize("decode", ["leverage", "cur", "append"])
@pytest.mark.parametrize("prefill", ["cur", "exact"])
def test_short_sequence_of_a_padded_batch_is_as_if_alone(
    prefill: str, decode: str, last: int, group: int | None
) -> None:
    """One token in a wide call is a single token, and none is no call."""
    stream = make_stream(16, 24, batch=2, group=group)
    transform = curdkv(budget=12, n_sink=1, prefill=prefill, decode=decode)
    calls = [Call(15, (15, 15)), Call(1, (1, 1)), Call(6, (6, last))]
    state = transform.init_state(stream.spec(24))
    inputs = zip(*(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries)))
    for call, (keys, values, queries) in zip(calls, inputs):
        lengths, proxy = mx.array(call.counts), queries is None
        held = transform.write(state, keys, values, lengths)
        state = transform.settle(held, keys if proxy else queries, lengths, proxy=proxy)
    alone = feed(transform, stream.rows([1]), [15, 1, last], 24)
    assert held_positions(transform, state)[1] == held_positions(transform, alone)[0]
    for whole, single in zip(memory_of(transform, state), memory_of(transform, alone)):
        np.testing.assert_allclose(whole[1, :, :12], single[0, :, :12], rtol=1e-5, atol=1e-7)


@KINDS
@pytest.mark.parametrize("prefill", ["cur", "exact"])
@pytest.mark.parametrize(("padding", "pattern"), [(5, [1, 1, 1, 8, 1]), (6, [1, 1, 8, 1]), (7, [1, 8, 1])], ids=str)
def test_sequence_behind_left_padding_is_as_if_alone(
    padding: int, pattern: list[int], prefill: str, group: int | None
) -> None:
    """Of the first six columns one is a token, or none."""
    stream = make_stream(17, 20, batch=2, group=group)
    arrays = [None if x is None else x.copy() for x in (stream.keys, stream.values, stream.queries)]
    for x in arrays:
        if x is not None:
            x[1] = np.roll(x[1], padding, axis=1)
    transform = curdkv(budget=9, n_sink=1, prefill=prefill)
    state = feed(transform, Stream(*arrays, mx.float32), [6, 1, 1, 8, 1], left_padding=(0, padding))
    alone = feed(transform, stream.rows([1]), pattern)
    assert held_positions(transform, state)[1] == held_positions(transform, alone)[0]
    for whole, single in zip(memory_of(transform, state), memory_of(transform, alone)):
        np.testing.assert_allclose(whole[1], single[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("prompt", "prefill"), [(0, "cur"), (20, "cur"), (20, "exact")], ids=str)
def test_count_is_one_and_the_tokens_since(prompt: int, prefill: str) -> None:
    """A prompt scored by norms counts as one."""
    transform, stream = curdkv(budget=64, prefill=prefill), make_stream(3, 32)
    _, counts = memory_of(transform, feed(transform, stream, [prompt] * (prompt > 0) + [1] * (32 - prompt)))
    start = prompt if prefill == "cur" else 0
    assert counts[0, 0, :32].tolist() == [32 - max(i, start - 1) for i in range(32)]


@KINDS
def test_each_token_shares_out_one_among_the_rows_before_it(group: int | None) -> None:
    transform, stream = curdkv(budget=64, rank_cap=3), make_stream(4, 30, group=group)
    state = feed(transform, stream, [12])
    for token in range(12, 30):
        before, _ = memory_of(transform, state)
        state = resume(transform, state, stream, [1], token)
        after, _ = memory_of(transform, state)
        gained = (after - before)[:, :, :token]
        assert (gained >= 0).all() and (after[:, :, token] >= 0).all() and (after[:, :, token] <= 1).all()
        np.testing.assert_allclose(gained.sum(axis=-1), 1, rtol=1e-4)


@KINDS
@pytest.mark.parametrize("rank_cap", [16, 40])
def test_full_rank_is_the_norm_of_what_a_row_puts_out(rank_cap: int, group: int | None) -> None:
    """a_i^2 |v_i|^2, as shares."""
    stream, transform = make_stream(5, 30, dim=16, group=group), curdkv(budget=64, n_sink=0, rank_cap=rank_cap)
    sums = [memory_of(transform, feed(transform, stream, how))[0][0] for how in ([1] * 29, [1] * 30)]
    for head in range(2):
        keys, values = stream.keys[0, head].astype(np.float64), stream.values[0, head].astype(np.float64)
        voters = [keys[29]] if group is None else list(stream.queries_of(0, head)[:, 29].astype(np.float64))
        for rows_seen, got in ((29, (sums[1] - sums[0])[head, :29]), (30, sums[1][head, 29:30])):
            weights = [np.exp(keys[:rows_seen] @ voter / 4) for voter in voters]
            attention = sum(x / x.sum() for x in weights)
            parts = attention**2 * (values[:rows_seen] ** 2).sum(axis=-1)
            np.testing.assert_allclose(got, (parts / parts.sum())[-len(got) :], atol=1e-5)


@pytest.mark.parametrize("rank_cap", [1, 3])
@KINDS
def test_few_strong_directions_are_found(rank_cap: int, group: int | None) -> None:
    """Values in as many directions as count, and little beside; short keys, so that no row is alone in the output."""
    stream, random = make_stream(6, 40, dim=32, group=group), np.random.default_rng(6)
    basis = np.linalg.qr(random.standard_normal((32, 32)))[0]
    values = 4 * random.standard_normal((1, 2, 40, rank_cap)) @ basis[:rank_cap] + 0.1 * stream.values
    stream = Stream(0.3 * stream.keys, values.astype(np.float32), stream.queries, mx.float32)
    chosen = {"budget": 64, "rank_cap": rank_cap}
    _, _, heads = told_by(chosen, stream, plain_calls([1] * 40, 1))
    transform = curdkv(**chosen)
    sums, counts = memory_of(transform, feed(transform, stream, [1] * 40))
    for index, head in enumerate(heads):
        want = [head.sums[i] / head.counts[i] for i in range(40)]
        np.testing.assert_allclose((sums / np.maximum(counts, 1))[0, index, :40], want, rtol=0.02, atol=1e-4)


@KINDS
def test_default_rank_is_near_the_exact_shares(group: int | None) -> None:
    """Of values without any preferred direction, the hardest case: at most a tenth is shared out elsewhere."""
    stream, transform = make_stream(6, 121, batch=2, dim=64, group=group), curdkv(budget=200)
    _, _, heads = told_by({"budget": 200}, stream, plain_calls([120, 1], 2))
    sums, _ = memory_of(transform, feed(transform, stream, [120, 1]))
    before, _ = memory_of(transform, feed(transform, stream, [120]))
    for index, head in enumerate(heads):
        row, place = divmod(index, 2)
        gained = sums[row, place, :121] - np.append(before[row, place, :120], 0.0)
        want = [head.sums[i] - before[row, place, i] for i in range(120)] + [head.sums[120]]
        assert np.abs(gained - want).sum() / 2 < 0.1


@KINDS
@pytest.mark.parametrize("decode", ["leverage", "cur"])
@pytest.mark.parametrize("pattern", [[20], [1] * 20, [9, 1, 10]], ids=str)
def test_row_without_a_value_goes_first(pattern: list[int], decode: str, group: int | None) -> None:
    stream = make_stream(7, 20, group=group)
    values = stream.values.copy()
    values[:, :, 8] = 0.0
    stream = Stream(stream.keys, values, stream.queries, mx.float32)
    transform = curdkv(budget=19, n_sink=1, decode=decode)
    held = held_positions(transform, feed(transform, stream, pattern))
    assert held == [[[i for i in range(20) if i != 8]] * 2]


@pytest.mark.parametrize("decode", ["leverage", "cur"])
@pytest.mark.parametrize("pattern", [[20], [1] * 20, [9, 1, 10]], ids=str)
def test_of_equal_keys_those_with_larger_values_stay(pattern: list[int], decode: str) -> None:
    """Values of alternating size, keys all alike."""
    stream = make_stream(8, 20, dim=8)
    keys = np.ones_like(stream.keys)
    values = stream.values / np.linalg.norm(stream.values, axis=-1, keepdims=True)
    values[:, :, ::2] *= 3
    transform = curdkv(budget=19, n_sink=0, decode=decode)
    held = held_positions(transform, feed(transform, Stream(keys, values, None, mx.float32), pattern))
    for head in held[0]:
        (gone,) = set(range(20)) - set(head)
        assert gone % 2 == 1


@pytest.mark.parametrize("pattern", [[1] * 28, [24, 1, 1, 1, 1], [24, 2, 1, 1], [28]], ids=str)
@pytest.mark.parametrize("prefill", ["cur", "exact"])
@pytest.mark.parametrize("decode", ["leverage", "cur"])
@pytest.mark.parametrize("seed", range(4))
def test_newcomer_competes_on_the_scale_of_the_old_rows(
    seed: int, decode: str, prefill: str, pattern: list[int]
) -> None:
    stream, size = make_stream(seed, 28, dim=64), np.full((28, 1), 1.0, np.float32)
    size[:24], size[24] = 0.1, 1000.0
    stream = Stream(stream.keys, stream.values * size, None, mx.float32)
    transform = curdkv(budget=4, n_sink=0, prefill=prefill, decode=decode)
    assert all(24 in held for held in held_positions(transform, feed(transform, stream, pattern))[0])


@given(seeds(), options(["leverage", "cur"]), cuts(20), GROUPS)
def test_rotated_or_scaled_values_keep_the_same_rows(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    stream = make_stream(seed, sum(pattern), group=group)
    _, margin, _ = told_by(chosen, stream, plain_calls(pattern, 1))
    assume(margin > NEAR_TIE)
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((16, 16)))[0]
    transform = curdkv(**chosen)
    held = [
        held_positions(transform, feed(transform, Stream(stream.keys, x, stream.queries, mx.float32), pattern))
        for x in (stream.values, (stream.values @ turn).astype(np.float32), 64 * stream.values)
    ]
    assert held[0] == held[1] == held[2]


# Products of norms


@pytest.mark.parametrize("total", [16, 48, 96])
@KINDS
def test_prompt_of_whole_windows_is_the_papers_rule(total: int, group: int | None) -> None:
    """Norms as shares of their window's sum."""
    stream, transform = make_stream(9, total, group=group), curdkv(budget=9, n_sink=2)
    held = held_positions(transform, feed(transform, stream, [total]))
    for head in range(2):
        shares = []
        for x in (stream.keys[0, head], stream.values[0, head]):
            size = (x.astype(np.float64) ** 2).sum(axis=-1).reshape(-1, WINDOW)
            shares.append((size / size.sum(axis=-1, keepdims=True)).reshape(-1))
        best = [i for i in np.argsort(-shares[0] * shares[1]).tolist() if i >= 2][:7]
        assert held[0][head] == sorted([0, 1, *best])


@pytest.mark.parametrize("pattern", [[40], [30, 10]], ids=str)
def test_rows_of_a_window_that_is_not_full_have_no_advantage(pattern: list[int]) -> None:
    """All rows alike: the mean of a window doesn't depend on how many are left of it, so that the later ones stay."""
    stream = make_stream(9, 40)
    signs = [np.sign(x) for x in (stream.keys, stream.values)]
    transform = curdkv(budget=30, n_sink=2)
    held = held_positions(transform, feed(transform, Stream(*signs, None, mx.float32), pattern))
    assert held == [[[0, 1, *range(12, 40)]] * 2]


@given(seeds(), options(["cur", "append"]), cuts(30))
def test_keys_and_values_may_change_places(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    chosen, total = chosen | {"prefill": "cur"}, sum(pattern)
    stream, transform = make_stream(seed, total), curdkv(**chosen)
    _, margin, _ = told_by(chosen, stream, plain_calls(pattern, 1))
    assume(margin > NEAR_TIE)
    turned = Stream(stream.values, stream.keys, None, mx.float32)
    one, other = (held_positions(transform, feed(transform, x, pattern, total)) for x in (stream, turned))
    assert one == other


@given(seeds(), options(), st.integers(2, 60), GROUPS)
def test_shares_of_a_prompt_sum_to_one(seed: int, chosen: dict[str, Any], total: int, group: int | None) -> None:
    transform = curdkv(**chosen | {"budget": 64, "prefill": "cur"})
    sums, counts = memory_of(transform, feed(transform, make_stream(seed, total, batch=2, group=group), [total]))
    np.testing.assert_allclose(sums.sum(axis=-1), 1, rtol=1e-5)
    assert (counts[:, :, :total] == 1).all()


@given(seeds(), options(["cur"]), cuts(20))
def test_queries_have_no_say_in_products(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    stream, transform = make_stream(seed, sum(pattern), group=2), curdkv(**chosen | {"prefill": "cur"})
    alone = Stream(stream.keys, stream.values, None, mx.float32)
    assert same(feed(transform, stream, pattern), feed(transform, alone, pattern))


@given(options(["append"]), cuts(30), GROUPS)
def test_append_caps_prompts_alone(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = curdkv(**chosen), sum(pattern)
    stream = make_stream(10, total, batch=2, group=group)
    state, count, start = transform.init_state(stream.spec(total)), 0, 0
    assert transform.policy.prompt_only
    for n in pattern:
        before = held_positions(transform, state)
        state = resume(transform, state, stream, [n], start)
        count, start = count + n if n <= 1 else min(chosen["budget"], count + n), start + n
        for row, old_row in zip(held_positions(transform, state), before):
            for held, old in zip(row, old_row):
                assert len(held) == count
                assert held == old + list(range(start - n, start)) or n > 1


# Calls


@given(seeds(), options(["leverage", "cur"]), cuts(20), GROUPS)
def test_sinks_and_budget(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = curdkv(**chosen), sum(pattern)
    state = feed(transform, make_stream(seed, total, batch=2, group=group), pattern)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"])
        assert set(range(min(chosen["n_sink"], total))) <= set(held)


@given(seeds(), options(["leverage"]), cuts(9), GROUPS)
def test_exact_prompts_are_single_tokens_before_any_eviction(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    transform = curdkv(**chosen | {"budget": total + 5, "prefill": "exact"})
    stream = make_stream(seed, total, group=group)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    held = [held_rows(transform, state) for state in states]
    plain = rows()
    assert held[0][0].tolist() == [[list(range(total))] * 2]
    assert equal(held[0][1:], plain.read(feed(plain, stream, pattern, capacity=total)))
    sums, counts = zip(*(memory_of(transform, state) for state in states))
    for i in (1, 2):
        np.testing.assert_array_equal(counts[0], counts[i])
        np.testing.assert_allclose(sums[0], sums[i], rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("total", [1, 2, 15, 16, 17])
def test_prompt_within_the_budget_is_a_plain_cache(total: int, group: int | None) -> None:
    stream, transform, plain = make_stream(11, total, dim=64, group=group), curdkv(), rows()
    position, *held = held_rows(transform, feed(transform, stream, [total]))
    assert position.tolist() == [[list(range(total))] * 2]
    assert equal(held, plain.read(feed(plain, stream, [total], capacity=total)))


@pytest.mark.parametrize("decode", ["leverage", "cur"])
@PATTERNS
def test_of_equal_rows_the_later_ones_stay(pattern: list[int], decode: str) -> None:
    """Zero values span nothing."""
    stream = make_stream(12, 60)
    stream = Stream(stream.keys, np.zeros_like(stream.values), None, mx.float32)
    transform = curdkv(budget=10, n_sink=2, decode=decode)
    held = held_positions(transform, feed(transform, stream, pattern))
    assert held == [[[0, 1, *range(52, 60)]] * 2]


def test_rope_base_has_no_effect() -> None:
    stream, pattern = make_stream(13, 40), [20, 1, 19]
    one, other = curdkv(budget=9, n_sink=1), curdkv(budget=9, n_sink=1, rope_base=1.0)
    assert same(feed(one, stream, pattern), feed(other, stream, pattern))


def test_query_heads_of_a_group_are_averaged() -> None:
    one = make_stream(14, 40, group=1)
    three = Stream(one.keys, one.values, np.repeat(one.queries, 3, axis=1), mx.float32)
    calls = plain_calls([15, 1, 1, 1] + [1] * 22, 1)
    chosen = {"budget": 9, "n_sink": 1}
    told, margin, _ = told_by(chosen, one, calls)
    assert margin > NEAR_TIE
    compare(curdkv(**chosen), told, three, calls)


# Numbers and options


@KINDS
@PATTERNS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("chosen", [{}, {"prefill": "exact"}, {"decode": "cur"}, {"rank_cap": 3}], ids=str)
def test_bad_row_harms_neither_scores_nor_other_sequences(
    chosen: dict[str, Any], which: str, group: int | None, bad: float, pattern: list[int]
) -> None:
    clean = make_stream(15, 60, batch=2, group=group)
    keys, values = clean.keys.copy(), clean.values.copy()
    (keys if which == "key" else values)[0, :, 9] = bad
    transform, broken = curdkv(budget=20, n_sink=2, **chosen), Stream(keys, values, clean.queries, mx.float32)
    state, other = feed(transform, broken, pattern), feed(transform, clean, pattern)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert all(mx.isfinite(memory).all().item() for memory in flatten(state.memory)[0])
    sums, _ = memory_of(transform, state)
    assert (np.count_nonzero(sums[0], axis=-1) > 15).all()
    for held in held_positions(transform, state)[0]:
        assert held[:2] == [0, 1] and len(held) == 20


@pytest.mark.parametrize("build", [curdkv, curdkv_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 3, "n_sink": 4}, "budget"),
        ({"budget": 10, "protect": [(10, 16)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"rank_cap": 0}, "rank_cap"),
        ({"rank_cap": -1}, "rank_cap"),
        ({"rank_cap": 1.5}, "rank_cap"),
        ({"rank_cap": None}, "rank_cap"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": -1.0}, "rope_base"),
        ({"rope_base": math.nan}, "rope_base"),
        ({"rope_base": None}, "rope_base"),
        ({"prefill": "leverage"}, "prefill"),
        ({"prefill": None}, "prefill"),
        ({"decode": "exact"}, "decode"),
        ({"decode": ""}, "decode"),
        ({"decode": None}, "decode"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^curdkv: .*`{field}`.*; got "):
        build(**chosen)
