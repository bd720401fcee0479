"""Keyformer: attention mass with Gumbel noise, in the choice by keys and within the softmax by real queries."""

import functools
import itertools
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
    H2OHead,
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
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, Transform, h2o, rows
from vq_functional.evict import keyformer as module
from vq_functional.evict.keyformer import keyformer_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
CUTS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [30, 1, 1, 28]], ids=["once", "decode", "chunks"])


def keyformer(**options: Any) -> Transform:
    """The rule without a window of its own for real queries, unless one is asked for."""
    return module.keyformer(**{"recent_share": 0.0, **options})


@pytest.mark.parametrize(
    ("options", "window"), [({}, 6), ({"recent_share": 0.5}, 10), ({"recent": 2}, 2), ({"recent_share": 0.9}, 15)]
)
def test_real_queries_leave_a_share_of_the_budget_to_the_newest_rows(options: dict[str, Any], window: int) -> None:
    stream, transform = make_stream(8, 70, group=2), module.keyformer(budget=20, tau=0, **options)
    for pattern in ([70], [40] + [1] * 30):
        for head in held_positions(transform, feed(transform, stream, pattern))[0]:
            assert set(range(70 - window, 70)) <= set(head)


def test_standing_in_keys_have_no_window() -> None:
    stream = make_stream(9, 60)
    states = [feed(one, stream, [60]) for one in (module.keyformer(budget=20), keyformer(budget=20))]
    assert same(*states)


@functools.cache
def gumbel(seed: int, head: int, position: int) -> float:
    """The noise of a position in one KV head, the same in all batch rows."""
    number = ((seed + head) * 1000003 + position) % 2**64
    uniform = mx.random.uniform(1e-9, 1.0, key=mx.random.key(number)).item()
    return -math.log(-math.log(uniform))


class KeyformerHead(H2OHead):
    """Mass that keys give, without decay; the choice adds `tau` times the noise of a position."""

    def __init__(
        self,
        head: int,
        budget: int,
        n_sink: int = 0,
        recent: int = 0,
        tau: float | None = None,
        tau_init: float = 1.0,
        tau_end: float = 1.0,
        anneal_steps: int = 0,
        seed: int = 0,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, recent, 1.0, protect)
        self.head, self.seed, self.anneal_steps = head, seed, anneal_steps
        self.tau_init, self.tau_end = (tau_init, tau_end) if tau is None else (tau, tau)

    def tau_at(self, t: int) -> float:
        if self.anneal_steps == 0 or self.tau_init == self.tau_end:
            return self.tau_init
        return self.tau_init + min(t, self.anneal_steps) * (self.tau_end - self.tau_init) / self.anneal_steps

    def keep(self, shown: list[int], priority: dict[int, float]) -> None:
        tau = self.tau_at(self.offset - 1)
        noise = {i: tau * gumbel(self.seed, self.head, i) for i in shown}
        # Lifted above zero, so that the margin is relative to the sizes of both terms.
        lift = max(abs(priority[i]) + abs(noise[i]) for i in shown)
        super().keep(shown, {i: lift + priority[i] + noise[i] for i in shown})


def heads_of(stream: Stream, **chosen: Any) -> Callable[[], KeyformerHead]:
    """The heads of all batch rows, in the order in which `expect` asks for them."""
    index = itertools.cycle(range(stream.heads))
    return lambda: KeyformerHead(next(index), **chosen)


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call. For keys that stand in."""
    told, margin = expect(heads_of(stream, **chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(keyformer(**chosen), told, stream, calls)
    return margin > NEAR_TIE


def mass_of(transform: Any, state: Any) -> np.ndarray:
    """Mass float32 [B, H, slots] of the rows held, in token order."""
    assert state.memory.dtype == mx.float32
    return to_numpy(transform.ordered(state).memory)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    return {
        "budget": budget,
        "n_sink": n_sink,
        "recent": draw(st.integers(0, min(6, budget - 1 - n_sink))),
        "tau_init": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "tau_end": draw(st.sampled_from([0.0, 1.0, 4.0])),
        "anneal_steps": draw(st.sampled_from([0, 1, 10, 40])),
        "tau": draw(st.sampled_from([None, None, 0.7])),
        "seed": draw(st.sampled_from([0, 7, 2**31])),
    }


# Keys that stand in


@given(seeds(), options(), cuts(), st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_mass_by_keys(
    seed: int, chosen: dict[str, Any], pattern: list[int], batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("seed", [3, 2**31 - 1, 2**32 - 1], ids=str)
@pytest.mark.parametrize("pattern", [[30], [1] * 30], ids=["once", "decode"])
def test_noise_of_any_seed(seed: int, pattern: list[int]) -> None:
    """Integers of 64 bits, not of 32."""
    assert agrees(make_stream(0, 30), plain_calls(pattern, 1), budget=9, n_sink=1, recent=2, tau=2.0, seed=seed)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype) -> None:
    stream, chosen = make_stream(1, 60, dim=64, dtype=dtype), {"budget": 12, "n_sink": 2, "recent": 3, "tau": 0.5}
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), **chosen)


@given(seeds(), options(), st.data(), cuts())
def test_protected_spans_stay(seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int]) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["recent"] - 1
    protect = data.draw(spans(free, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern)), keyformer(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


@pytest.mark.parametrize("pattern", [[80], [25, 55], [28, 28, 24], [1, 49, 30]], ids=str)
def test_long_calls_settle_24_keys_at_a_time(pattern: list[int]) -> None:
    """Each piece at the temperature of its own last token."""
    ramp = {"tau_init": 0.0, "tau_end": 6.0, "anneal_steps": 70}
    stream = make_stream(2, 80, batch=2)
    assert agrees(stream, plain_calls(pattern, 2), budget=10, n_sink=1, recent=2, **ramp)


@CUTS
@pytest.mark.parametrize("recent", [0, 4])
def test_in_the_heat_noise_alone_decides(pattern: list[int], recent: int) -> None:
    stream, transform = make_stream(3, 60, batch=2), keyformer(budget=14, n_sink=2, recent=recent, tau=1e7, seed=5)
    held = held_positions(transform, feed(transform, stream, pattern))
    for head in range(2):
        best = sorted(range(2, 60 - recent), key=lambda i: -gumbel(5, head, i))[: 12 - recent]
        assert held[0][head] == held[1][head] == sorted([0, 1, *best, *range(60 - recent, 60)])


def test_noise_depends_on_the_head_and_not_on_the_batch_row() -> None:
    one = make_stream(4, 50, heads=1)
    twins = Stream(*(np.tile(x, (3, 2, 1, 1)) for x in (one.keys, one.values)), None, mx.float32)
    transform = keyformer(budget=12, n_sink=1, recent=1, tau=3.0)
    held = held_positions(transform, feed(transform, twins, [30] + [1] * 20))
    assert held == [held[0]] * 3 and held[0][0] != held[0][1]
    assert held[0][0] == held_positions(transform, feed(transform, one, [30] + [1] * 20))[0][0]


def test_tau_overrides_the_ramp() -> None:
    stream, common = make_stream(5, 60), {"budget": 12, "recent": 2}
    several = [
        {"tau": 2.0},
        {"tau": 2.0, "tau_init": 0.0, "tau_end": 9.0, "anneal_steps": 5},
        {"tau_init": 2.0, "tau_end": 2.0},
        {"tau_init": 2.0, "tau_end": 2.0, "anneal_steps": 7},
        {"tau_init": 2.0, "tau_end": 9.0, "anneal_steps": 0},
    ]
    for group in (None, 2):
        asked = make_stream(5, 60, group=group)
        states = [feed(keyformer(**common, **x), asked, [30] + [1] * 30) for x in several]
        assert all(same(states[0], state) for state in states[1:])
    assert not same(states[0], feed(keyformer(**common, tau=1.0), stream, [30] + [1] * 30))


# Both kinds of voters


@given(seeds(), options(), cuts(30), GROUPS, st.sampled_from([mx.float32, mx.float16]))
def test_without_heat_it_is_h2o_bit_for_bit(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, dtype: mx.Dtype
) -> None:
    chosen = chosen | {"tau": 0.0}
    common = {"budget": chosen["budget"], "n_sink": chosen["n_sink"]}
    stream = make_stream(seed, sum(pattern), batch=2, group=group, dtype=dtype)
    cold, plain = keyformer(**chosen), h2o(**common, grace=chosen["recent"], decay=1.0)
    states = [feed(x, stream, pattern) for x in (cold, plain)]
    assert equal(held_rows(cold, states[0]), held_rows(plain, states[1]))
    assert np.array_equal(*(mass_of(x, state) for x, state in zip((cold, plain), states)))


@KINDS
@pytest.mark.parametrize(
    "ramp",
    [
        {"tau_init": 0.0, "tau_end": 5.0, "anneal_steps": 0},
        {"tau_init": 5.0, "tau_end": 0.0, "anneal_steps": 1},
        {"tau_init": 5.0, "tau_end": 0.0, "anneal_steps": 19},
    ],
    ids=str,
)
def test_ramp_that_has_cooled_down_is_h2o(group: int | None, ramp: dict[str, Any]) -> None:
    """The temperature is that of the call's last token, position 19."""
    stream, common = make_stream(6, 40, group=group), {"budget": 9, "n_sink": 1}
    cold, plain = keyformer(**common, recent=2, **ramp), h2o(**common, grace=2, decay=1.0)
    states = [feed(x, stream, [20] + [1] * 20) for x in (cold, plain)]
    assert equal(held_rows(cold, states[0]), held_rows(plain, states[1]))
    assert np.array_equal(*(mass_of(x, state) for x, state in zip((cold, plain), states)))


@KINDS
@pytest.mark.parametrize("steps", [10**9, 2**31, 10**12])
def test_a_ramp_of_many_steps_barely_starts(group: int | None, steps: int) -> None:
    stream, common = make_stream(17, 40, group=group), {"budget": 9, "recent": 2, "tau_init": 1.0}
    slow, constant = keyformer(**common, tau_end=2.0, anneal_steps=steps), keyformer(**common)
    states = [feed(x, stream, [20] + [1] * 20) for x in (slow, constant)]
    assert equal(held_rows(slow, states[0]), held_rows(constant, states[1]))


@given(seeds(), options(), cuts(), GROUPS)
def test_each_token_gives_mass_one(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform = keyformer(**chosen | {"budget": max(chosen["budget"], total)})
    state = feed(transform, make_stream(seed, total, batch=2, group=group), pattern)
    np.testing.assert_allclose(mass_of(transform, state).sum(axis=-1), total, rtol=1e-5)


@given(seeds(), options(), cuts(9), GROUPS)
def test_cuts_before_any_eviction_change_nothing(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    """Noise belongs to positions, not to calls."""
    total = sum(pattern)
    transform = keyformer(**chosen | {"budget": max(chosen["budget"], total), "tau": 1.5})
    stream = make_stream(seed, total, group=group)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    held = [held_rows(transform, state) for state in states]
    assert held[0][0].tolist() == [[list(range(total))] * 2]
    assert equal(held[0], held[1]) and equal(held[0], held[2])
    plain = rows()
    assert equal(held[0][1:], plain.read(feed(plain, stream, pattern, capacity=total)))
    mass = [mass_of(transform, state) for state in states]
    np.testing.assert_allclose(mass[0], mass[1], atol=1e-5)
    np.testing.assert_allclose(mass[0], mass[2], atol=1e-5)


@KINDS
@pytest.mark.parametrize("other", [4, 3 + 2**31, 2**32 - 1], ids=str)
@CUTS
def test_seeds(group: int | None, pattern: list[int], other: int) -> None:
    stream, common = make_stream(7, 60, batch=2, group=group), {"budget": 12, "recent": 2, "tau": 2.0}
    one, again, changed = (feed(keyformer(**common, seed=seed), stream, pattern) for seed in (3, 3, other))
    assert same(one, again) and not same(one, changed)


@given(options(), cuts(20), GROUPS)
def test_sinks_newest_rows_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = keyformer(**chosen), sum(pattern)
    state = feed(transform, make_stream(8, total, batch=2, group=group), pattern)
    safe = {*range(min(chosen["n_sink"], total)), *range(max(total - chosen["recent"], 0), total)}
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"]) and safe <= set(held)


@KINDS
def test_budget_as_a_share_of_the_prompt(group: int | None) -> None:
    stream, pattern = make_stream(9, 40, group=group), [20, *[1] * 20]
    held = [held_rows(x, feed(x, stream, pattern)) for x in (keyformer(budget=0.5), keyformer(budget=10))]
    assert equal(*held)


@KINDS
def test_rope_base_has_no_effect(group: int | None) -> None:
    stream, pattern = make_stream(10, 40, group=group), [20, 1, 19]
    one, other = keyformer(budget=9, recent=2), keyformer(budget=9, recent=2, rope_base=1.0)
    assert same(feed(one, stream, pattern), feed(other, stream, pattern))


def test_kept_keys_are_never_rotated_again() -> None:
    raw = mx.eye(64)[mx.arange(40) % 64][None, None]
    keys = mx.fast.rope(raw, 64, traditional=False, base=500000.0, scale=1.0, offset=0).astype(mx.float16)
    transform = keyformer(budget=24, recent=4)
    state = feed(transform, Stream(to_numpy(keys), to_numpy(raw), None, mx.float16), [1] * 40)
    position, held, _ = held_rows(transform, state)
    assert state.offset.tolist() == [40] and position.shape[2] == 24
    assert mx.array_equal(held[0, 0], keys[0, 0][position[0, 0]])


# Real queries: noise within the softmax


def probe(token: int, heads: int, group: int = 1) -> Stream:
    """Queries before `token` look at row 0 alone; that of `token` has a logit of 8 for row 0 and 0 for the others."""
    keys, queries = (np.zeros((1, count, token + 1, 16), np.float32) for count in (heads, heads * group))
    keys[:, :, 0, 0], queries[:, :, :token, 0] = 1000.0, 1000.0
    keys[:, :, 0, 1], queries[:, :, token, 1] = 1.0, 32.0
    return Stream(keys, keys, queries, mx.float32)


@functools.cache
def noise_of_queries(seed: int, heads: int, tokens: int) -> np.ndarray:
    """Noise [heads, query, key], up to a constant of each query: the logarithm of what a query gives."""
    noise = np.zeros((heads, tokens, tokens))
    for token in range(tokens):
        transform = keyformer(budget=token + 2, n_sink=0, tau=1.0, seed=seed)
        mass = mass_of(transform, feed(transform, probe(token, heads), [token + 1]))[0, :, : token + 1]
        given = mass.astype(np.float64)
        given[:, 0] = 1 - given[:, 1:].sum(axis=-1)
        noise[:, token, : token + 1] = np.log(given)
        noise[:, token, 0] -= 8.0
    return noise


class StirredHead(KeyformerHead):
    """Mass that queries give by softmax((x + g) / tau): one query head a KV head, of two, and 60 tokens at most."""

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        tau, noise = self.tau_at(new[-1]), noise_of_queries(self.seed, 2, 60)[self.head]
        for query, token in zip(queries[0].astype(np.float64), new):
            seen = [i for i in shown if i <= token]
            logits = np.array([query @ self.keys[i] / math.sqrt(len(query)) + noise[token, i] for i in seen]) / tau
            weights = np.exp(logits - logits.max())
            for i, weight in zip(seen, (weights / weights.sum()).tolist()):
                self.scores[i] += weight
        H2OHead.keep(self, shown, self.scores)


def agrees_by_queries(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call. For real queries."""
    index = itertools.cycle(range(2))
    told, margin = expect(lambda: StirredHead(next(index), **chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(keyformer(**chosen), told, stream, calls)
    return margin > NEAR_TIE


@st.composite
def stirred(draw: st.DrawFn) -> dict[str, Any]:
    """Options with a temperature above zero throughout, and a sink."""
    chosen = draw(options())
    heat = {name: draw(st.sampled_from([0.3, 1.0, 2.5])) for name in ("tau_init", "tau_end")}
    budget = max(chosen["budget"], chosen["recent"] + 2)
    return chosen | heat | {"budget": budget, "n_sink": 1, "seed": draw(st.sampled_from([3, 4]))}


@given(seeds(), stirred(), cuts(), st.integers(1, 2), st.sampled_from([2, 16, 64]))
def test_rows_and_mass_by_queries(seed: int, chosen: dict[str, Any], pattern: list[int], batch: int, dim: int) -> None:
    pattern = within(pattern, 60)
    stream = make_stream(seed, sum(pattern), batch=batch, dim=dim, value_dim=dim + 1, group=1)
    assume(agrees_by_queries(stream, plain_calls(pattern, batch), **chosen))


def within(pattern: list[int], total: int) -> list[int]:
    """The calls up to `total` tokens."""
    ends = itertools.accumulate(pattern)
    return [n for n, end in zip(pattern, ends) if end <= total]


@given(seeds(), stirred(), right_padded(2))
def test_right_padding_gives_no_mass_by_queries(seed: int, chosen: dict[str, Any], calls: list[Call]) -> None:
    assume(agrees_by_queries(make_stream(seed, 60, batch=2, group=1), calls, **chosen))


@given(seeds(), stirred(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts())
def test_left_padding_gives_no_mass_by_queries(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int]
) -> None:
    calls = left_padded_calls([*within(pattern, 53), 7], padding)
    assume(agrees_by_queries(make_stream(seed, 60, batch=2, group=1), calls, **chosen))


def test_noise_of_queries_is_gumbel() -> None:
    """Over 12 queries, 4 heads and 100 keys each: spread pi / sqrt(6), skew 1.14, and no two alike."""
    noise = noise_of_queries(0, 4, 112)[:, 100:, :100].reshape(-1, 100)
    noise = noise - noise.mean(axis=-1, keepdims=True)
    assert abs(noise.std() / (math.pi / math.sqrt(6)) - 1) < 0.04
    assert abs(((noise / noise.std()) ** 3).mean() - 1.14) < 0.25
    correlation = np.corrcoef(noise) - np.eye(len(noise))
    assert np.abs(correlation).max() < 0.5 and abs(correlation.mean()) < 0.01


def test_heads_of_a_group_are_averaged() -> None:
    """Two query heads of one KV head, each sure of another row whatever the noise says."""
    stream, transform = probe(29, 2, group=2), keyformer(budget=40)
    stream.keys[:, :, 4, 2], stream.keys[:, :, 9, 3] = 1.0, 1.0
    stream.queries[:, 0::2, 29, 2], stream.queries[:, 1::2, 29, 3] = 400.0, 400.0
    np.testing.assert_allclose(mass_of(transform, feed(transform, stream, [30]))[..., [4, 9]], 0.5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 2])
@CUTS
def test_in_the_heat_all_rows_seen_get_equal_mass(pattern: list[int], group: int) -> None:
    transform, stream = keyformer(budget=60, recent=1, tau=1e6), make_stream(12, 60, batch=2, group=group)
    share = 1 / np.arange(1, 61)
    expected = np.broadcast_to(np.cumsum(share[::-1])[::-1], (2, 2, 60))
    mass = mass_of(transform, feed(transform, stream, pattern))[..., :60]
    np.testing.assert_allclose(mass, expected, rtol=1e-3)


@pytest.mark.parametrize("group", [1, 2])
def test_noise_of_queries_does_not_depend_on_the_batch_row(group: int) -> None:
    one = make_stream(13, 50, group=group)
    twins = Stream(*(np.tile(x, (3, 1, 1, 1)) for x in (one.keys, one.values, one.queries)), mx.float32)
    transform = keyformer(budget=12, recent=1, tau=2.0)
    held = held_positions(transform, feed(transform, twins, [30] + [1] * 20))
    assert held == held_positions(transform, feed(transform, one, [30] + [1] * 20)) * 3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_noisy_mass_is_float32_for_half_precision_rows(dtype: mx.Dtype) -> None:
    stream, chosen = make_stream(11, 60, dim=64, group=1, dtype=dtype), {"budget": 12, "n_sink": 2, "recent": 3}
    assert agrees_by_queries(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), **chosen, tau=0.8)


# Padding


@given(seeds(), options(), right_padded(2))
def test_right_padding_gives_no_mass(seed: int, chosen: dict[str, Any], calls: list[Call]) -> None:
    assume(agrees(make_stream(seed, 60, batch=2), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts())
def test_left_padding_gives_no_mass(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int]
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2), calls, **chosen))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_of_a_long_call_moves_no_piece(left: bool) -> None:
    """A row's 56 keys are counted from its own first token."""
    ramp = {"tau_init": 1.0, "tau_end": 3.0, "anneal_steps": 50}
    calls = [Call(60, (60, 49), left), Call(1, (1, 1), left), Call(30, (30, 30), left)]
    assert agrees(make_stream(14, 91, batch=2), calls, budget=8, n_sink=2, recent=3, **ramp)


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@CUTS
def test_key_that_is_no_number_spoils_no_other_row(group: int | None, bad: float, pattern: list[int]) -> None:
    """Row 1 of the batch is as without it; row 0 holds whole rows and finite masses."""
    stream = make_stream(15, 60, batch=2, group=group)
    clean = Stream(stream.keys.copy(), stream.values, stream.queries, mx.float32)
    stream.keys[0, :, 20, 3] = bad
    transform = keyformer(budget=12, n_sink=2, recent=2, tau=1.0)
    state = feed(transform, stream, pattern)
    for held in held_positions(transform, state)[0]:
        assert len(held) == 12 and {0, 1, 58, 59} <= set(held)
    assert np.isfinite(mass_of(transform, state)).all()
    assert held_positions(transform, state)[1] == held_positions(transform, feed(transform, clean, pattern))[1]


# Options


@pytest.mark.parametrize("build", [keyformer, keyformer_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 12, "recent": 8}, "budget"),
        ({"budget": 5, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"recent": -1}, "recent"),
        ({"recent": None}, "recent"),
        ({"tau": -0.1}, "tau"),
        ({"tau": math.nan}, "tau"),
        ({"tau": math.inf}, "tau"),
        ({"tau": "1"}, "tau"),
        ({"tau": True}, "tau"),
        ({"tau_init": -1.0}, "tau_init"),
        ({"tau_init": None}, "tau_init"),
        ({"tau_init": math.inf}, "tau_init"),
        ({"tau_end": -1}, "tau_end"),
        ({"tau_end": math.nan}, "tau_end"),
        ({"tau_end": None}, "tau_end"),
        ({"anneal_steps": -1}, "anneal_steps"),
        ({"anneal_steps": 2.5}, "anneal_steps"),
        ({"anneal_steps": None}, "anneal_steps"),
        ({"seed": 1.5}, "seed"),
        ({"seed": None}, "seed"),
        ({"seed": True}, "seed"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": -1.0}, "rope_base"),
        ({"rope_base": None}, "rope_base"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^keyformer: .*`{field}`.*; got "):
        build(**chosen)


@KINDS
def test_accepts_whole_numbers_as_temperatures(group: int | None) -> None:
    stream, pattern = make_stream(16, 40, group=group), [20] + [1] * 20
    pairs = [keyformer(budget=9, tau_init=0, tau_end=2, anneal_steps=30), keyformer(budget=9, tau=1)]
    floats = [keyformer(budget=9, tau_init=0.0, tau_end=2.0, anneal_steps=30), keyformer(budget=9, tau=1.0)]
    for one, other in zip(pairs, floats):
        assert same(feed(one, stream, pattern), feed(other, stream, pattern))
