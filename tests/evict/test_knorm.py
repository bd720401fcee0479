"""Key norms: rows with the smallest keys stay, or with the largest ones by `keep`."""

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

from vq_functional import QuantizerConfigError, rows, turboquant_mse_codec
from vq_functional.evict.chain import chain
from vq_functional.evict.knorm import knorm, knorm_policy

GROUPS = st.sampled_from([None, 2])  # queries a KV head; None: keys stand in
ARMS = pytest.mark.parametrize("keep", ["low", "high"])


class KNormHead(Head):
    """Scores are the norms of the keys as they came."""

    def __init__(
        self, budget: int, n_sink: int, recent: int, keep: str = "low", protect: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().__init__(budget, n_sink, recent, protect)
        self.sign = {"low": -1.0, "high": 1.0}[keep]

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        for i in new:
            self.scores[i] = float(np.linalg.norm(self.keys[i]))
        self.keep(shown, {i: self.sign * self.scores[i] for i in shown})


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(lambda: KNormHead(**chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(knorm(**chosen), told, stream, calls)
    return margin > NEAR_TIE


def norms_of(state: Any) -> np.ndarray:
    """Norms remembered, float32 [B, H, slots]."""
    assert state.memory.dtype == mx.float32
    return to_numpy(state.memory)


@st.composite
def options(draw: st.DrawFn, most: int = 6) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    recent = draw(st.integers(0, min(most, budget - 1 - n_sink)))
    return {"budget": budget, "n_sink": n_sink, "recent": recent, "keep": draw(st.sampled_from(["low", "high"]))}


@given(seeds(), options(), cuts(), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_norms(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@ARMS
def test_norms_are_float32_for_half_precision_rows(dtype: mx.Dtype, keep: str) -> None:
    stream = make_stream(0, 60, dim=64, dtype=dtype)
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), budget=12, n_sink=2, recent=3, keep=keep)


@pytest.mark.parametrize("pattern", [[40], [1] * 40, [25, 1, 14]], ids=["once", "decode", "chunks"])
@ARMS
def test_norms_past_the_range_of_float16(pattern: list[int], keep: str) -> None:
    """The squares of these entries are infinite in float16, and so are most of the norms."""
    stream = make_stream(1, 40, dim=64, dtype=mx.float16)
    size = np.random.default_rng(1).permutation(np.linspace(15000, 60000, 40)).astype(np.float16)
    stream.keys[...] = np.sign(stream.keys) * size[:, None]
    assert agrees(stream, plain_calls(pattern, 1), budget=12, n_sink=1, recent=0, keep=keep)


@given(seeds(), options(), st.data(), cuts())
def test_protected_spans_stay(seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int]) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["recent"] - 1
    protect, total = data.draw(spans(free, first=chosen["n_sink"])), sum(pattern)
    stream, transform = make_stream(seed, total), knorm(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < total}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


# What stays, whatever the cuts


@given(seeds(), options(), cuts(), st.sampled_from([mx.float32, mx.float16]), st.booleans())
def test_any_cut_gives_the_same_rows_bit_for_bit(
    seed: int, chosen: dict[str, Any], pattern: list[int], dtype: mx.Dtype, spared: bool
) -> None:
    total, span = sum(pattern), (chosen["n_sink"] + 2, chosen["n_sink"] + 4)
    if spared:
        chosen = chosen | {"budget": chosen["budget"] + 2, "protect": [span]}
    stream, transform = make_stream(seed, total, batch=2, dtype=dtype), knorm(**chosen)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    held = [(*held_rows(transform, x), held_norms(transform, x)) for x in states]
    assert equal(held[0], held[1]) and equal(held[0], held[2])


def held_norms(transform: Any, state: Any) -> mx.array:
    """Norms of the rows held, in token order."""
    ordered = transform.ordered(state)
    return ordered.memory[..., : int((ordered.position[0, 0] >= 0).sum())]


@pytest.mark.parametrize("pattern", [[90], [1] * 90, [7] * 12 + [6]], ids=["once", "decode", "sevens"])
@pytest.mark.parametrize("recent", [0, 5])
@ARMS
def test_best_norms_of_all_rows_seen(pattern: list[int], recent: int, keep: str) -> None:
    stream, transform = make_stream(2, 90, batch=2, heads=3), knorm(budget=20, n_sink=3, recent=recent, keep=keep)
    held = held_positions(transform, feed(transform, stream, pattern))
    norms = np.linalg.norm(stream.keys.astype(np.float64), axis=-1) * (1 if keep == "low" else -1)
    for row, head in np.ndindex(2, 3):
        free = range(3, 90 - recent)
        best = sorted(free, key=lambda i: norms[row, head, i])[: 17 - recent]
        assert held[row][head] == sorted([0, 1, 2, *best, *range(90 - recent, 90)])


@given(seeds(), cuts(20), st.sampled_from(["low", "high"]))
def test_a_smaller_budget_keeps_a_subset(seed: int, pattern: list[int], keep: str) -> None:
    stream = make_stream(seed, sum(pattern))
    small, large = (knorm(budget=budget, n_sink=2, keep=keep) for budget in (7, 15))
    held = [held_positions(x, feed(x, stream, pattern))[0] for x in (small, large)]
    assert all(set(few) <= set(many) for few, many in zip(*held))


@given(seeds(), options(), cuts())
def test_a_row_that_went_never_returns(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    stream, transform, start = make_stream(seed, sum(pattern)), knorm(**chosen), 0
    state, gone = transform.init_state(stream.spec()), [set(), set()]
    for n in pattern:
        state, start = resume(transform, state, stream, [n], start), start + n
        for lost, held in zip(gone, held_positions(transform, state)[0]):
            assert not lost & set(held)
            lost |= {*range(start)} - set(held)


@given(seeds(), cuts())
def test_high_is_low_on_inverted_norms(seed: int, pattern: list[int]) -> None:
    stream = make_stream(seed, sum(pattern))
    inverted = stream.keys / (stream.keys.astype(np.float64) ** 2).sum(axis=-1, keepdims=True)
    other = Stream(inverted.astype(np.float32), stream.values, None, mx.float32)
    common = {"budget": 9, "n_sink": 1, "recent": 2}
    assume(expect(lambda: KNormHead(**common), stream, plain_calls(pattern, 1))[1] > NEAR_TIE)
    pairs = ((knorm(**common, keep="low"), stream), (knorm(**common, keep="high"), other))
    held = [held_positions(x, feed(x, y, pattern)) for x, y in pairs]
    assert held[0] == held[1]


@pytest.mark.parametrize("seed", range(3))
@ARMS
def test_rotating_all_keys_changes_nothing(seed: int, keep: str) -> None:
    stream, chosen = make_stream(seed, 50, dim=32), {"budget": 12, "n_sink": 2, "recent": 1, "keep": keep}
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((32, 32)))[0]
    turned = Stream((stream.keys @ turn).astype(np.float32), stream.values, None, mx.float32)
    assert expect(lambda: KNormHead(**chosen), stream, plain_calls([50], 1))[1] > NEAR_TIE
    transform = knorm(**chosen)
    held = [held_positions(transform, feed(transform, x, [30] + [1] * 20)) for x in (stream, turned)]
    assert held[0] == held[1]


@given(seeds(), options(), cuts())
def test_queries_are_not_looked_at(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    asked = make_stream(seed, sum(pattern), group=2)
    alone, transform = Stream(asked.keys, asked.values, None, mx.float32), knorm(**chosen)
    assert same(feed(transform, asked, pattern), feed(transform, alone, pattern))


@pytest.mark.parametrize("pattern", [[30], [1] * 30, [13, 1, 16]], ids=["once", "decode", "chunks"])
@ARMS
def test_of_equal_norms_the_later_rows_stay(pattern: list[int], keep: str) -> None:
    """Signs differ, so that the keys do too."""
    stream = make_stream(3, 30)
    stream = Stream(np.sign(stream.keys), stream.values, None, mx.float32)
    transform = knorm(budget=7, n_sink=2, keep=keep)
    assert held_positions(transform, feed(transform, stream, pattern)) == [[[0, 1, 25, 26, 27, 28, 29]] * 2]


@ARMS
def test_newest_row_may_go_at_once(keep: str) -> None:
    stream = make_stream(4, 31)
    stream.keys[:, :, -1] *= 100 if keep == "low" else 0.01
    transform = knorm(budget=30, keep=keep)
    for pattern in ([31], [30, 1]):
        assert held_positions(transform, feed(transform, stream, pattern)) == [[list(range(30))] * 2]


@given(options(), cuts(20))
def test_sinks_newest_rows_and_budget(chosen: dict[str, Any], pattern: list[int]) -> None:
    transform, total = knorm(**chosen), sum(pattern)
    state = feed(transform, make_stream(5, total, batch=2), pattern)
    safe = {*range(min(chosen["n_sink"], total)), *range(max(total - chosen["recent"], 0), total)}
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(held) == min(total, chosen["budget"]) and safe <= set(held)


@given(seeds(), options(), cuts(9))
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    total = sum(pattern)
    transform, plain = knorm(**chosen | {"budget": max(chosen["budget"], total)}), rows()
    stream = make_stream(seed, total, batch=2)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


def test_budget_as_a_share_of_the_prompt() -> None:
    stream, pattern = make_stream(6, 60), [40, *[1] * 20]
    held = [held_rows(x, feed(x, stream, pattern)) for x in (knorm(budget=0.25, recent=2), knorm(budget=10, recent=2))]
    assert equal(*held)


# Memory


@pytest.mark.parametrize("pattern", [[40], [1] * 40, [25, 1, 14]], ids=["once", "decode", "chunks"])
def test_norm_is_that_of_the_key_as_it_came(pattern: list[int]) -> None:
    """Over codes of two bits, whose decoded keys have other norms."""
    stream, codes = make_stream(7, 40, dim=64), rows(key=turboquant_mse_codec(bits=2), value=turboquant_mse_codec())
    method, plain = chain(knorm_policy(budget=10, n_sink=1), codes), knorm(budget=10, n_sink=1)
    state, exact = feed(method, stream, pattern), feed(plain, stream, pattern)
    position = method.ordered(state).position[..., :10]
    assert mx.array_equal(position, plain.ordered(exact).position[..., :10])
    came = np.take_along_axis(np.linalg.norm(stream.keys, axis=-1), np.array(position), axis=-1)
    np.testing.assert_allclose(norms_of(method.ordered(state))[..., :10], came, rtol=1e-6)
    decoded = np.linalg.norm(to_numpy(method.read(method.ordered(state))[0])[:, :, :10], axis=-1)
    assert np.abs(decoded / came - 1).max() > 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_norms_follow_their_rows(dtype: mx.Dtype) -> None:
    stream, transform = make_stream(8, 60, batch=2, dtype=dtype), knorm(budget=9, n_sink=2, recent=3)
    state = feed(transform, stream, [20, 1, 1, 1, 9] + [1] * 28)
    again = np.linalg.norm(to_numpy(transform.read(state)[0]), axis=-1)
    held = np.array(state.position) >= 0
    np.testing.assert_allclose(norms_of(state)[held], again[held], rtol=1e-6)
    assert not norms_of(state)[~held].any()


# Padding


@given(seeds(), options(), right_padded(2))
def test_right_padding_is_no_row(seed: int, chosen: dict[str, Any], calls: list[Call]) -> None:
    assume(agrees(make_stream(seed, 60, batch=2), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts())
def test_left_padding_is_no_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int]
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2), calls, **chosen))


@ARMS
@pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
def test_padding_takes_no_sink_and_no_budget(keep: str, group: int | None) -> None:
    stream = make_stream(9, 65, batch=2, group=group)
    for calls in (left_padded_calls([53] + [1] * 12, (0, 5)), [Call(40, (40, 31)), Call(9, (0, 9)), Call(1, (1, 1))]):
        assert agrees(stream, calls, budget=8, n_sink=2, recent=1, keep=keep)


# Numbers that are none


@ARMS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=str)
@pytest.mark.parametrize("pattern", [[50], [1] * 50, [30, 1, 19]], ids=["once", "decode", "chunks"])
def test_keys_without_a_norm_take_no_other_rows_place(keep: str, bad: float, pattern: list[int]) -> None:
    """More of them than the budget, one a sink; of the others stay those that would stay without them."""
    stream = make_stream(10, 50)
    broken = [1, *(i for i in range(3, 45) if i % 3)]
    stream.keys[:, :, broken, 4] = bad
    transform = knorm(budget=12, n_sink=2, recent=3, keep=keep)
    state = feed(transform, stream, pattern)
    norms = np.linalg.norm(stream.keys.astype(np.float64), axis=-1) * (1 if keep == "low" else -1)
    for head, held in enumerate(held_positions(transform, state)[0]):
        assert len(held) == 12 and {0, 1, 47, 48, 49} <= set(held)
        best = sorted((i for i in range(2, 47) if i not in broken), key=lambda i: norms[0, head, i])
        others = [i for i in held if i not in {0, 1, 47, 48, 49, *broken}]
        assert others == sorted(best[: len(others)])
        assert len(others) == 7 or (keep == "high" and bad == 1e30)


# Options


@pytest.mark.parametrize("build", [knorm, knorm_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": True, "n_sink": 0}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 12, "recent": 8}, "budget"),
        ({"budget": 5, "protect": [(30, 31)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"recent": -1}, "recent"),
        ({"recent": None}, "recent"),
        ({"keep": "mid"}, "keep"),
        ({"keep": "LOW"}, "keep"),
        ({"keep": None}, "keep"),
        ({"keep": True}, "keep"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^knorm: .*`{field}`.*; got "):
        build(**chosen)


def test_defaults_are_the_papers_arm_with_four_sinks() -> None:
    stream, pattern = make_stream(11, 60), [40] + [1] * 20
    default, told = knorm(budget=12), knorm(budget=12, n_sink=4, recent=0, keep="low")
    assert same(feed(default, stream, pattern), feed(told, stream, pattern))
    assert knorm_policy().budget == 512
