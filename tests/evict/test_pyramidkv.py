"""PyramidKV: a schedule of budgets over the layers, and in each layer the rule of h2o or of snapkv."""

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
)

from vq_functional import QuantizerConfigError, h2o, rows, snapkv
from vq_functional.evict.pyramidkv import PyramidKVOptions, pyramid_budgets, pyramidkv, pyramidkv_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
RULES = st.sampled_from(["linear", "paper"])


def agrees(stream: Stream, calls: Sequence[Call], **chosen: Any) -> bool:
    """Whether no choice was close; where so, checks every call."""
    head = {"budget": chosen["budget"], "n_sink": chosen["n_sink"], "grace": chosen["recent"]}
    head |= {"decay": chosen["decay"], "protect": chosen.get("protect", ())}
    told, margin = expect(lambda: H2OHead(**head), stream, calls)
    if margin > NEAR_TIE:
        compare(pyramidkv(**chosen), told, stream, calls)
    return margin > NEAR_TIE


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any budget of one layer; sinks and recent rows may fill it."""
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    recent = draw(st.integers(1, min(6, budget - n_sink)))
    return {"budget": budget, "n_sink": n_sink, "recent": recent, "decay": draw(st.sampled_from([1.0, 0.98, 0.7]))}


def voting(**chosen: Any) -> Any:
    """The paper's selection under this layer's budget."""
    return pyramidkv(**chosen, scorer="snapkv")


# The schedule


def by_hand(layers: int, budget: int, beta: float, least: int) -> list[int]:
    """Equal steps around the mean, lifted to the floor, the excess taken from the others; then rounded."""
    span = (budget - least) * (beta - 1)
    if layers == 1:
        return [max(budget, least)]
    shares = [budget + span - 2 * span * layer / (layers - 1) for layer in range(layers)]
    clamped: set[int] = set()
    for _ in range(layers):
        clamped |= {layer for layer, share in enumerate(shares) if share < least}
        shares = [float(least) if layer in clamped else share for layer, share in enumerate(shares)]
        excess = sum(shares) - budget * layers
        if excess <= 1e-9:
            break
        spare = sum(share - least for layer, share in enumerate(shares) if layer not in clamped)
        for layer in set(range(layers)) - clamped:
            shares[layer] -= excess * (shares[layer] - least) / spare
    return [max(round(share), least) for share in shares]


@pytest.mark.parametrize(
    ("beta", "budgets"),
    [
        (1, [512] * 8),
        (1.5, [766, 693, 621, 548, 476, 403, 331, 258]),
        (2, [1019, 874, 729, 584, 440, 295, 150, 5]),
        (3, [1296, 1050, 804, 558, 312, 66, 5, 5]),
    ],
)
def test_known_schedules(beta: float, budgets: list[int]) -> None:
    """Eight layers with mean 512 and four sinks."""
    assert pyramid_budgets(8, 512, beta, least=5) == by_hand(8, 512, beta, 5) == budgets


@given(st.integers(1, 40), st.integers(1, 600), st.floats(1, 8), st.integers(1, 20))
def test_the_schedule_is_that_of_the_loop_and_never_over_the_mean(
    layers: int, budget: int, beta: float, least: int
) -> None:
    least = min(least, budget)
    got, loop = pyramid_budgets(layers, budget, beta, least=least), by_hand(layers, budget, beta, least)
    assert len(got) == layers and all(isinstance(share, int) for share in got)
    if sum(loop) <= layers * budget:
        assert got == loop
    assert all(loop_share - 1 <= share <= loop_share for share, loop_share in zip(got, loop))
    assert layers * (budget - 0.5) <= sum(got) <= layers * budget


@given(st.integers(1, 40), st.integers(1, 600), st.floats(1, 30), st.integers(0, 20), RULES)
def test_schedules_add_up_fall_and_leave_every_layer_a_free_row(
    layers: int, budget: int, beta: float, n_sink: int, rule: str
) -> None:
    n_sink = min(n_sink, budget - 1)
    got = pyramid_budgets(layers, budget, beta, rule, n_sink + 1)
    assert len(got) == layers and all(share > n_sink for share in got)
    assert layers * (budget - 0.5) <= sum(got) <= layers * budget
    assert all(one >= other for one, other in itertools.pairwise(got))


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
@pytest.mark.parametrize("beta", [1, 2, 4, 8, 20])
@pytest.mark.parametrize("rule", ["linear", "paper"])
def test_steep_schedules_of_small_budgets(layers: int, beta: float, rule: str) -> None:
    chosen = {"budget": 64, "n_sink": 4, "beta": beta, "rule": rule, "layers": layers}
    got = [PyramidKVOptions(**chosen, layer=layer).layer_budget for layer in range(layers)]
    assert sum(got) <= 64 * layers and min(got) > 4 and got == sorted(got, reverse=True)
    assert got == pyramid_budgets(layers, 64, beta, rule, 5)
    assert beta > 1 or got == [64] * layers


@given(st.integers(2, 40), st.integers(2, 600), st.floats(1, 20), st.floats(1, 20), st.integers(1, 20), RULES)
def test_a_steeper_schedule_begins_no_lower(
    layers: int, budget: int, beta: float, other: float, least: int, rule: str
) -> None:
    flat, steep = (pyramid_budgets(layers, budget, x, rule, min(least, budget)) for x in sorted([beta, other]))
    assert flat[0] <= steep[0]


@pytest.mark.parametrize(("layers", "budget", "beta"), [(8, 128, 20), (32, 512, 20), (4, 96, 3), (5, 60, 1.5)])
def test_the_papers_schedule(layers: int, budget: int, beta: float) -> None:
    """From twice the mean without its part of beta down to that part, in equal steps."""
    last = budget / beta
    steps = np.linspace(2 * budget - last, last, layers)
    got = pyramid_budgets(layers, budget, beta, "paper", least=5)
    assert np.abs(np.array(got) - steps).max() <= 1
    assert sum(got) <= layers * budget


def test_no_layer_and_one_layer() -> None:
    assert pyramid_budgets(0, 64, 2.0) == []
    for rule in ("linear", "paper"):
        assert pyramid_budgets(1, 64, 5.0, rule, 5) == [64]


def test_a_layer_has_its_place_in_the_schedule() -> None:
    schedule = pyramid_budgets(6, 40, 1.8, least=3)
    assert len(set(schedule)) == 6
    for layer, budget in enumerate(schedule):
        assert pyramidkv_policy(budget=40, n_sink=2, beta=1.8, layer=layer, layers=6).budget == budget
    assert pyramidkv_policy(budget=40).budget == pyramidkv_policy(budget=40, layer=2).budget == 40
    assert pyramidkv_policy(budget=40, layers=6).budget == 40
    assert pyramidkv_policy(budget=40, layer=5, layers=6, resolved_budget=77).budget == 77


def test_options_stay_as_they_were_given() -> None:
    """What a layer's budget comes to is not written into the mean."""
    options = PyramidKVOptions(budget=64, layer=0, layers=4)
    assert options.layer_budget > 64
    assert (options.budget, options.resolved_budget) == (64, None)


# Rows


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_and_mass(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    assume(agrees(stream, plain_calls(pattern, batch), **chosen))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    stream = make_stream(0, 60, dim=64, group=group, dtype=dtype)
    chosen = {"budget": 12, "n_sink": 2, "recent": 3, "decay": 0.98}
    assert agrees(stream, plain_calls([20, 1, 1, 9] + [1] * 29, 1), **chosen)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    free = chosen["budget"] - chosen["n_sink"] - chosen["recent"]
    protect = data.draw(spans(free, first=chosen["n_sink"]))
    stream, transform = make_stream(seed, sum(pattern), group=group), pyramidkv(**chosen, protect=protect)
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


@given(seeds(), options(), cuts(30), GROUPS)
def test_the_newest_row_stays(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    transform, total = pyramidkv(**chosen), sum(pattern)
    stream, start = make_stream(seed, total, batch=2, group=group), 0
    state = transform.init_state(stream.spec())
    for n in pattern:
        state, start = resume(transform, state, stream, [n], start), start + n
        for held in (head for row in held_positions(transform, state) for head in row):
            assert len(held) == min(start, chosen["budget"])
            assert set(range(max(start - chosen["recent"], 0), start)) <= set(held)


@pytest.mark.parametrize("pattern", [[60], [1] * 60, [40, 1, 19]], ids=["once", "decode", "chunks"])
@KINDS
def test_the_deepest_layer_is_a_window(pattern: list[int], group: int | None) -> None:
    """Its budget is one row more than the sinks; every call still shows its own rows."""
    transform = pyramidkv(budget=64, n_sink=4, beta=2.0, layer=7, layers=8)
    stream, start = make_stream(1, 60, group=group), 0
    state = transform.init_state(stream.spec())
    for n in pattern:
        columns = transform.positions_after(state, n)
        assert set(range(start, start + n)) <= set(columns[0, 0].tolist())
        assert transform.make_mask(state, n).shape[-1] == columns.shape[-1]
        state, start = resume(transform, state, stream, [n], start), start + n
    assert held_positions(transform, state) == [[[0, 1, 2, 3, 59]] * 2]


@pytest.mark.parametrize("pattern", [[128], [1] * 128, [50, 1, 77]], ids=["once", "decode", "chunks"])
@KINDS
def test_defaults_hold_sinks_and_the_newest_rows(pattern: list[int], group: int | None) -> None:
    stream = make_stream(2, 128, group=group)
    for budget, newest in ((64, 16), (36, 16), (12, 4), (6, 1), (5, 1)):
        transform = pyramidkv(budget=budget)
        for held in held_positions(transform, feed(transform, stream, pattern))[0]:
            assert held[:4] == [0, 1, 2, 3] and len(held) == budget
            assert held[-newest:] == list(range(128 - newest, 128))


# Reductions


@given(seeds(), options(), cuts(30), st.integers(1, 12), GROUPS)
def test_a_flat_schedule_is_h2o(
    seed: int, chosen: dict[str, Any], pattern: list[int], layers: int, group: int | None
) -> None:
    assume(chosen["n_sink"] + chosen["recent"] < chosen["budget"])
    stream = make_stream(seed, sum(pattern), batch=2, group=group)
    layer = pyramidkv(**chosen, beta=1.0, layer=layers - 1, layers=layers)
    other = h2o(grace=chosen["recent"], **{name: chosen[name] for name in ("budget", "n_sink", "decay")})
    assert same(feed(layer, stream, pattern), feed(other, stream, pattern))


@given(seeds(), st.integers(0, 5), cuts(30), GROUPS)
def test_a_layer_depends_on_its_budget_alone(seed: int, layer: int, pattern: list[int], group: int | None) -> None:
    chosen = {"n_sink": 2, "recent": 2, "decay": 0.98}
    budget = pyramid_budgets(6, 14, 2.0, least=4)[layer]
    stream = make_stream(seed, sum(pattern), group=group)
    placed = pyramidkv(budget=14, layer=layer, layers=6, **chosen)
    others = [pyramidkv(budget=budget, **chosen), pyramidkv(budget=500, resolved_budget=budget, **chosen)]
    want = feed(placed, stream, pattern)
    assert all(same(feed(other, stream, pattern), want) for other in others)


@given(seeds(), st.integers(1, 8), st.integers(0, 3), st.integers(1, 12), cuts(30), GROUPS)
def test_votes_of_a_window_are_snapkv(
    seed: int, obs_window: int, n_sink: int, free: int, pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    chosen = {"budget": n_sink + obs_window + free, "n_sink": n_sink, "obs_window": obs_window}
    stream = make_stream(seed, total, batch=2, group=group)
    states = [feed(x(**chosen), stream, pattern, capacity=total) for x in (snapkv, voting)]
    assert same(*states)


@KINDS
def test_votes_under_a_schedule(group: int | None) -> None:
    stream, calls = make_stream(3, 90, group=group), plain_calls([60, 1, 1, 28], 1)
    schedule = pyramid_budgets(4, 30, 1.8, least=3)
    for layer, budget in enumerate(schedule):
        transform = voting(budget=30, n_sink=2, obs_window=4, beta=1.8, layer=layer, layers=4)
        told, margin = expect(lambda budget=budget: SnapKVHead(budget, 4, 2), stream, calls)
        assert margin > NEAR_TIE
        compare(transform, told, stream, calls, capacity=90)


@given(seeds(), options(), cuts(9), GROUPS)
def test_long_budget_is_a_plain_cache(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    transform, plain = pyramidkv(**chosen | {"budget": max(chosen["budget"], total)}), rows()
    stream = make_stream(seed, total, batch=2, group=group)
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2] * 2
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@pytest.mark.parametrize("scorer", ["mass", "snapkv"])
@pytest.mark.parametrize("backend", ["reference", "mlx", "metal", "auto"])
def test_backend_changes_nothing(backend: str, scorer: str) -> None:
    stream, pattern = make_stream(4, 60, group=2), [30, 1, 29]
    one, other = (pyramidkv(budget=40, scorer=scorer, **more) for more in ({}, {"backend": backend}))
    assert same(feed(one, stream, pattern, capacity=60), feed(other, stream, pattern, capacity=60))


# Numbers that are none


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_key_that_is_no_number_stays_in_its_batch_row(group: int | None, bad: float) -> None:
    transform = pyramidkv(budget=20, n_sink=2, recent=3)
    stream = make_stream(5, 80, batch=2, group=group)
    clean = held_rows(transform, feed(transform, stream.rows([1]), [50] + [1] * 30))
    stream.keys[0, 0, 20, 5] = bad
    state = feed(transform, stream, [50] + [1] * 30)
    for held in (head for row in held_positions(transform, state) for head in row):
        assert len(set(held)) == 20 and {0, 1, 77, 78, 79} <= set(held)
    assert equal([x[1:] for x in held_rows(transform, state)], clean)


# Options


@pytest.mark.parametrize("build", [pyramidkv, pyramidkv_policy])
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
        ({"resolved_budget": 8.0}, "resolved_budget"),
        ({"resolved_budget": 0.25}, "resolved_budget"),
        ({"resolved_budget": "64"}, "resolved_budget"),
        ({"n_sink": "4"}, "n_sink"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"beta": 0.5}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"beta": "steep"}, "beta"),
        ({"beta": True}, "beta"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, "backend"),
        ({"rule": "entropy"}, "rule"),
        ({"scorer": "h2o"}, "scorer"),
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.5}, "decay"),
        ({"recent": 0}, "recent"),
        ({"recent": 1.5}, "recent"),
        ({"obs_window": 0}, "obs_window"),
        ({"layer": 4, "layers": 4}, "layer"),
        ({"layer": -1, "layers": 4}, "layer"),
        ({"layer": 0, "layers": 0}, "layers"),
        ({"layer": 0, "layers": 2.0}, "layers"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^pyramidkv: .*`\w*{field}`.*; got "):
        build(**chosen)


@KINDS
def test_smallest_budgets(group: int | None) -> None:
    stream = make_stream(6, 40, group=group)
    for chosen, kept in (({"budget": 5}, [0, 1, 2, 3, 39]), ({"budget": 1, "n_sink": 0}, [39])):
        transform = pyramidkv(**chosen)
        assert held_positions(transform, feed(transform, stream, [20] + [1] * 20)) == [[kept] * 2]
