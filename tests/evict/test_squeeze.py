"""SqueezeAttention: what a layer tells of its keys, the budgets that follow, and rows that go once these are known."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
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
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, h2o, rows
from vq_functional.evict.engine import Evicting
from vq_functional.evict.squeeze import concentration, squeeze, squeeze_budgets, squeeze_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any budget of one layer; sinks and recent rows may fill it."""
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    recent = draw(st.integers(1, min(6, budget - n_sink)))
    return {"budget": budget, "n_sink": n_sink, "recent": recent, "decay": draw(st.sampled_from([1.0, 0.98, 0.7]))}


# What a layer tells


def gram(keys: np.ndarray) -> float:
    """Mean cosine of two different ones of `keys` [N, D], from all pairs."""
    unit = keys.astype(np.float64) / (np.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    cosines, n = unit @ unit.T, len(keys)
    return (cosines.sum() - np.trace(cosines)) / (n * (n - 1)) if n > 1 else 0.0


def keys_like(seed: int, batch: int, heads: int, n: int, dim: int = 16, pull: float = 0.7) -> np.ndarray:
    """Normals around one common direction for each head."""
    random = np.random.default_rng(seed)
    common = random.standard_normal((batch, heads, 1, dim))
    return (random.standard_normal((batch, heads, n, dim)) + pull * common).astype(np.float32)


@given(seeds(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 60), st.sampled_from([2, 16, 64]))
def test_concentration_is_the_mean_cosine_of_all_pairs(seed: int, batch: int, heads: int, n: int, dim: int) -> None:
    keys = keys_like(seed, batch, heads, n, dim)
    mean, first = (concentration(mx.array(keys), reduce=reduce) for reduce in ("mean", "head0"))
    assert mean.shape == (batch,) and mean.dtype == mx.float32
    pairs = np.array([[gram(head) for head in row] for row in keys])
    np.testing.assert_allclose(to_numpy(mean), pairs.mean(axis=1), atol=1e-5)
    np.testing.assert_allclose(to_numpy(first), pairs[:, 0], atol=1e-5)


@given(seeds(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_concentration_is_of_tokens_and_not_of_padding(seed: int, padding: list[tuple[int, int]]) -> None:
    """Padding on either side, large so that it would show."""
    keys = keys_like(seed, len(padding), 2, 20)
    valid = np.array([[left <= i < 20 - right for i in range(20)] for left, right in padding])
    got = concentration(mx.array(np.where(valid[:, None, :, None], keys, 100.0)), mx.array(valid))
    want = [np.mean([gram(head[row_valid]) for head in row]) for row, row_valid in zip(keys, valid)]
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "head0"])
def test_concentration_of_known_keys(reduce: str) -> None:
    def told(keys: mx.array) -> float:
        return concentration(keys, reduce=reduce).item()

    assert told(
        mx.broadcast_to(mx.random.normal((1, 2, 1, 32), key=mx.random.key(1)), (1, 2, 40, 32))
    ) == pytest.approx(1)
    assert told(mx.broadcast_to(mx.eye(32), (1, 2, 32, 32))) == pytest.approx(0, abs=1e-6)
    pair = mx.stack([mx.ones((1, 2, 8)), -mx.ones((1, 2, 8))], axis=2)
    assert told(pair) == pytest.approx(-1)
    assert told(mx.ones((1, 2, 1, 8))) == 0.0
    assert told(mx.zeros((1, 2, 5, 8))) == 0.0


@given(seeds(), st.floats(1e-3, 1e3))
def test_concentration_does_not_depend_on_size(seed: int, factor: float) -> None:
    keys = mx.array(keys_like(seed, 2, 2, 30))
    sizes = mx.random.uniform(0.5, 2.0, (2, 2, 30, 1), key=mx.random.key(seed)) * factor
    np.testing.assert_allclose(to_numpy(concentration(keys * sizes)), to_numpy(concentration(keys)), atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_concentration_is_float32_for_half_precision_keys(dtype: mx.Dtype) -> None:
    """A thousand keys whose squares are infinite in float16."""
    keys = mx.array(keys_like(2, 2, 2, 1000, 8) * 2000).astype(dtype)
    got = concentration(keys)
    assert got.dtype == mx.float32
    want = [np.mean([gram(head) for head in row]) for row in to_numpy(keys)]
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-4)


@pytest.mark.parametrize("n", [46_341, 46_342, 70_000])
def test_concentration_of_long_prompts(n: int) -> None:
    """Their pairs are more than an int32 can count."""
    assert concentration(mx.ones((1, 1, n, 2), mx.float16)).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_key_that_is_no_number_does_not_count(bad: float) -> None:
    keys = keys_like(5, 2, 3, 30)
    broken = keys.copy()
    broken[1, 0, 4, 2] = broken[1, 2, 9] = bad
    told = concentration(mx.array(broken))
    heads = [np.delete(keys[1, 0], 4, axis=0), keys[1, 1], np.delete(keys[1, 2], 9, axis=0)]
    np.testing.assert_allclose(to_numpy(told)[1], np.mean([gram(head) for head in heads]), atol=1e-5)


def test_batch_rows_tell_on_their_own() -> None:
    keys = keys_like(3, 3, 2, 25)
    alone = [concentration(mx.array(keys[row : row + 1])).item() for row in range(3)]
    keys[1, 0, 7, 3] = np.nan
    together = concentration(mx.array(keys)).tolist()
    np.testing.assert_allclose([together[0], together[2]], [alone[0], alone[2]], atol=1e-6)


def test_the_policy_tells_by_its_own_reduction() -> None:
    keys, valid = mx.array(keys_like(4, 2, 3, 30)), mx.ones((2, 30), mx.bool_)
    for reduce in ("mean", "head0"):
        told = squeeze_policy(reduce=reduce).tell(keys, valid)
        assert mx.array_equal(told, concentration(keys, valid, reduce))


# Budgets


@pytest.mark.parametrize(
    ("strength", "budgets"), [(1.0, [200, 125, 50, 25]), (0.5, [150, 112, 75, 62]), (0.0, [100] * 4)]
)
def test_known_budgets(strength: float, budgets: list[int]) -> None:
    """Four layers with mean 100 and four sinks."""
    assert squeeze_budgets([0.2, 0.5, 0.8, 0.9], 100, strength, least=5) == budgets
    policy = squeeze_policy(budget=100, strength=strength, recent=1)
    assert policy.agree([0.2, 0.5, 0.8, 0.9]) == budgets


def by_hand(told: Sequence[float], budget: int, strength: float) -> list[float]:
    """Shares of the layers before floor and rounding."""
    rest = [1 - min(max(one, 0.0), 1.0) for one in told]
    weights = [one * len(told) / sum(rest) if sum(rest) > 0 else 1.0 for one in rest]
    return [budget * (1 - strength + strength * weight) for weight in weights]


TOLD = st.lists(st.floats(-1, 1), min_size=1, max_size=32, unique=True)


@given(TOLD, st.integers(1, 600), st.floats(0, 1), st.integers(1, 20))
def test_budgets_are_the_shares_and_never_over_the_mean(
    told: list[float], budget: int, strength: float, least: int
) -> None:
    least = min(least, budget)
    got, shares = squeeze_budgets(told, budget, strength, least), by_hand(told, budget, strength)
    assert all(isinstance(one, int) and one >= least for one in got)
    assert len(told) * (budget - 0.5) <= sum(got) <= len(told) * budget
    if min(shares) >= least:
        assert all(abs(one - share) <= 1 + 1e-6 for one, share in zip(got, shares))


@given(TOLD, st.integers(1, 600), st.floats(0, 1), st.integers(1, 20))
def test_a_more_concentrated_layer_gets_no_more(told: list[float], budget: int, strength: float, least: int) -> None:
    got = squeeze_budgets(sorted(told), budget, strength, min(least, budget))
    assert all(one >= other for one, other in itertools.pairwise(got))


@given(TOLD, st.integers(20, 600), st.floats(0, 0.9), st.randoms(use_true_random=False))
def test_the_order_of_layers_does_not_matter(told: list[float], budget: int, strength: float, random: Any) -> None:
    """Where no two layers are equally far from a whole number of rows, and none is halfway between two."""
    rests = np.sort([0.5, *(share % 1 for share in by_hand(told, budget, strength))])
    assume(np.diff(rests).min() > 1e-6)
    order = list(range(len(told)))
    random.shuffle(order)
    got = squeeze_budgets(told, budget, strength)
    assert squeeze_budgets([told[i] for i in order], budget, strength) == [got[i] for i in order]


@pytest.mark.parametrize("strength", [0, 0.5, 1])
@pytest.mark.parametrize("layers", [1, 2, 7, 32])
def test_small_budgets_add_up(strength: float, layers: int) -> None:
    """Most layers fall below the floor."""
    told = [0.0] + [1 - 0.001 * layer for layer in range(1, layers)]
    got = squeeze_budgets(told, 16, strength, 5)
    assert sum(got) <= 16 * layers and min(got) >= 5
    assert strength > 0 or got == [16] * layers


def test_budgets_where_nothing_tells_layers_apart() -> None:
    for told in ([0.5] * 6, [1.0] * 6, [-0.2] * 6, [0.0] * 6):
        assert squeeze_budgets(told, 40, 1.0, 5) == [40] * 6
    assert squeeze_budgets([0.9], 40, 1.0, 5) == [40]
    assert squeeze_budgets([-0.5, 0.0], 40, 1.0, 5) == squeeze_budgets([1.5, 1.0], 40, 1.0, 5) == [40, 40]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_layer_that_tells_no_number_leaves_whole_budgets(bad: float) -> None:
    got = squeeze_budgets([0.2, bad, 0.8], 100, 1.0, 5)
    assert all(isinstance(one, int) and one >= 5 for one in got) and sum(got) <= 300


def test_floors_leave_room_for_sinks_spans_and_recent_rows() -> None:
    policy = squeeze_policy(budget=20, n_sink=3, recent=4, protect=[(10, 13)])
    got = policy.agree([0.0, 1.0, 1.0])
    assert got[0] == 40 and got[1:] == [10, 10]


# One layer on its own: the mean budget from the first call on


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    told, margin = expect(lambda: head_of(**chosen), stream, calls)
    if margin > NEAR_TIE:
        compare(squeeze(**chosen), told, stream, calls)
    return margin > NEAR_TIE


def head_of(budget: int, n_sink: int, recent: int, decay: float, protect: Sequence[tuple[int, int]] = ()) -> H2OHead:
    return H2OHead(budget, n_sink, recent, decay, protect)


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_mass(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    stream = make_stream(5, 60, dim=64, group=group, dtype=dtype)
    chosen = {"budget": 12, "n_sink": 2, "recent": 3, "decay": 0.98}
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), **chosen)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["recent"]
    protect = data.draw(spans(free, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern), group=group), squeeze(**chosen, protect=protect)
    assume(agrees(stream, plain_calls(pattern, 1), **chosen, protect=protect))
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(held) for held in held_positions(transform, feed(transform, stream, pattern))[0])


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_gives_no_mass(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    assume(agrees(make_stream(seed, 60, batch=2, group=group), calls, **chosen))


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_gives_no_mass(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    assume(agrees(make_stream(seed, sum(pattern) + 7, batch=2, group=group), calls, **chosen))


@given(seeds(), options(), cuts(30), GROUPS, st.sampled_from([0.0, 0.5, 1.0]))
def test_one_layer_is_h2o(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, strength: float
) -> None:
    assume(chosen["n_sink"] + chosen["recent"] < chosen["budget"])
    stream = make_stream(seed, sum(pattern), batch=2, group=group)
    other = h2o(grace=chosen["recent"], **{name: chosen[name] for name in ("budget", "n_sink", "decay")})
    state = feed(squeeze(**chosen, strength=strength), stream, pattern)
    assert same(state, feed(other, stream, pattern))
    assert same(state, feed(squeeze(**chosen | {"budget": 500, "resolved_budget": chosen["budget"]}), stream, pattern))


def test_a_resolved_budget_needs_no_agreement() -> None:
    assert squeeze().agrees and squeeze(strength=0.0).agrees
    assert not squeeze(resolved_budget=77).agrees
    assert squeeze_policy(resolved_budget=77).budget == 77


# Two phases: the whole first call stays, and then what the layers have agreed on


@attrs.frozen
class InTwoPhases(Evicting):
    """Goes down to `limits`, one a batch row, at the end of the first call; its own budget must be none of them."""

    limits: tuple[int, ...]

    def settle_in(self, held: Any, group: Any, queries: mx.array, lengths: Any = None, proxy: bool = False) -> Any:
        agreed = mx.array(self.limits, mx.int32)
        if mx.array_equal(held.limit, agreed):
            return super().settle_in(held, group, queries, lengths, proxy)
        return self.compact(self.observe(held, queries, lengths, proxy), agreed, max(self.limits)), group


class PatientHead(H2OHead):
    """Holds the whole first call, takes its mass in one go, and then goes down to `limit`."""

    def __init__(self, limit: int, n_sink: int, recent: int, decay: float) -> None:
        super().__init__(10**6, n_sink, recent, decay)
        self.limit, self.stride = limit, None

    def call(self, keys: np.ndarray, queries: np.ndarray | None = None) -> list[int]:
        shown = super().call(keys, queries)
        if self.budget != self.limit:
            self.budget, self.stride = self.limit, H2OHead.stride
            self.keep(self.held, self.scores)
        return shown


LIMITS = st.tuples(st.integers(0, 24), st.integers(0, 24))  # above what sinks and recent rows take


def agrees_later(stream: Stream, calls: Sequence[Call], extra: Sequence[int], **chosen: Any) -> bool:
    """`agrees` for batch rows whose budgets are set after the first call, `extra` rows above the least."""
    more = {name: chosen[name] for name in ("n_sink", "recent", "decay")}
    limits = tuple(chosen["n_sink"] + chosen["recent"] + one for one in extra)
    places = iter(np.ndindex(stream.batch, stream.heads))
    told, margin = expect(lambda: PatientHead(limits[next(places)[0]], **more), stream, calls)
    if margin > NEAR_TIE:
        compare(InTwoPhases("squeeze", squeeze_policy(budget=50, **more), rows(), limits), told, stream, calls)
    return margin > NEAR_TIE


@given(seeds(), options(), LIMITS, st.integers(1, 60), cuts(30), GROUPS)
def test_rows_under_budgets_that_come_after_the_first_call(
    seed: int, chosen: dict[str, Any], extra: tuple[int, int], first: int, pattern: list[int], group: int | None
) -> None:
    stream = make_stream(seed, first + sum(pattern), batch=2, group=group)
    assume(agrees_later(stream, plain_calls([first, *pattern], 2), extra, **chosen))


@given(seeds(), options(), LIMITS, right_padded(2, longest=30), GROUPS)
def test_right_padding_of_the_first_call_is_no_row(
    seed: int, chosen: dict[str, Any], extra: tuple[int, int], calls: list[Call], group: int | None
) -> None:
    assume(agrees_later(make_stream(seed, 180, batch=2, group=group), calls, extra, **chosen))


@given(seeds(), options(), LIMITS, st.tuples(st.integers(0, 9), st.integers(0, 9)), cuts(), GROUPS)
def test_left_padding_of_the_first_call_is_no_row(
    seed: int, chosen: dict[str, Any], extra: tuple[int, int], padding: tuple[int, int], pattern: list[int], group: Any
) -> None:
    calls = left_padded_calls([20, *pattern], padding)
    stream = make_stream(seed, 20 + sum(pattern), batch=2, group=group)
    assume(agrees_later(stream, calls, extra, **chosen))


def observed(transform: Any, stream: Stream, n: int) -> Any:
    """The state after a first call of `n` tokens that gave nothing up."""
    keys, values, queries = parts_of(stream, 0, n)
    held = transform.write(transform.init_state(stream.spec()), keys, values)
    return transform.observe(held, keys if queries is None else queries, proxy=queries is None)


@KINDS
@pytest.mark.parametrize("n", [1, 24, 25, 70, 300])
def test_the_whole_first_call_stays_until_the_layers_agree(n: int, group: int | None) -> None:
    stream, transform = make_stream(6, n, heads=1, dim=8, group=group), squeeze(budget=8, n_sink=1, recent=1)
    state = observed(transform, stream, n)
    position, keys, values = held_rows(transform, state)
    assert position.tolist() == [[list(range(n))]]
    assert equal((keys, values), [mx.array(x) for x in (stream.keys, stream.values)])
    for limit in (2, 8, 20, 400):
        after = transform.compact(state, mx.array([limit]), limit)
        assert len(held_positions(transform, after)[0][0]) == min(n, limit)
        assert after.limit.tolist() == [limit]


@pytest.mark.parametrize(("group", "n"), [(2, 90), (1, 90), (None, 24), (None, 7)])
def test_equal_budgets_are_h2o_from_the_first_call_on(group: int | None, n: int) -> None:
    """Queries of any number, and standing-in keys as long as they settle at once."""
    stream, chosen = make_stream(7, n + 60, batch=2, group=group), {"budget": 12, "n_sink": 2, "decay": 0.98}
    transform, other = squeeze(**chosen, recent=3), h2o(**chosen, grace=3)
    policy = transform.policy
    budgets = policy.agree([0.3, 0.3]) + attrs.evolve(policy, strength=0.0).agree([0.1, 0.9])
    assert budgets == [12] * 4
    state, want = transform.compact(observed(transform, stream, n), mx.array([12, 12]), 12), feed(other, stream, [n])
    for start, later in ((n, []), (n, [1] * 20), (n + 20, [40])):
        state, want = (resume(x, one, stream, later, start) for x, one in ((transform, state), (other, want)))
        assert equal(held_rows(transform, state), held_rows(other, want))
        assert mx.array_equal(transform.ordered(state).memory, other.ordered(want).memory)


def test_a_layer_above_the_mean_holds_more_than_the_mean() -> None:
    policy = squeeze_policy(budget=20, n_sink=2, recent=2)
    streams = [make_stream(8, 90), make_stream(9, 90)]
    streams[1].keys[...] = keys_like(9, 1, 2, 90, pull=3.0)
    told = [policy.tell(mx.array(x.keys[:, :, :50]), mx.ones((1, 50), mx.bool_)).item() for x in streams]
    budgets, transform = policy.agree(told), squeeze(budget=20, n_sink=2, recent=2)
    assert budgets[0] > 25 > 15 > budgets[1] and sum(budgets) <= 40
    for stream, budget in zip(streams, budgets):
        state = transform.compact(observed(transform, stream, 50), mx.array([budget]), budget)
        for n, start in ((0, 50), (1, 50), (30, 51), (1, 81)):
            state = resume(transform, state, stream, [n], start)
            assert [len(held) for held in held_positions(transform, state)[0]] == [budget] * 2


# Numbers that are none


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_key_that_is_no_number_stays_in_its_batch_row(group: int | None, bad: float) -> None:
    transform = squeeze(budget=20, n_sink=2, recent=3)
    stream = make_stream(10, 80, batch=2, group=group)
    clean = held_rows(transform, feed(transform, stream.rows([1]), [50] + [1] * 30))
    stream.keys[0, 0, 20, 5] = bad
    state = feed(transform, stream, [50] + [1] * 30)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(set(held)) == 20 and {0, 1, 77, 78, 79} <= set(held)
    assert equal([x[1:] for x in held_rows(transform, state)], clean)


# Options


@pytest.mark.parametrize("build", [squeeze, squeeze_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": 0.25}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 5, "recent": 2}, "budget"),
        ({"budget": 5, "protect": [(30, 31)]}, "budget"),
        ({"resolved_budget": 0}, "budget"),
        ({"resolved_budget": 4}, "budget"),
        ({"resolved_budget": "64"}, "budget"),
        ({"resolved_budget": 64.0}, "budget"),
        ({"resolved_budget": 0.25}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"strength": -0.1}, "strength"),
        ({"strength": 2.0}, "strength"),
        ({"strength": math.nan}, "strength"),
        ({"strength": "full"}, "strength"),
        ({"strength": True}, "strength"),
        ({"reduce": "max"}, "reduce"),
        ({"reduce": None}, "reduce"),
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.5}, "decay"),
        ({"recent": 0}, "recent"),
        ({"recent": 1.5}, "recent"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^squeeze: .*`\w*{field}`.*; got "):
        build(**chosen)


@KINDS
def test_smallest_budgets(group: int | None) -> None:
    stream = make_stream(11, 40, group=group)
    for chosen, kept in (({"budget": 5}, [0, 1, 2, 3, 39]), ({"budget": 1, "n_sink": 0}, [39])):
        transform = squeeze(**chosen)
        assert held_positions(transform, feed(transform, stream, [20] + [1] * 20)) == [[kept] * 2]
