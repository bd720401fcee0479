"""Q-Filters: the projection of a key on its head's direction decides; directions are given or found."""

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
    parts_of,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import KVSpec, QuantizerConfigError, chain, int8_codec, rows, turboquant_mse_codec
from vq_functional.core.policy import Scene
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten
from vq_functional.evict.engine import Evicting
from vq_functional.evict.qfilters import (
    Filters,
    QFiltersPolicy,
    qfilters,
    qfilters_direction,
    qfilters_policy,
    with_direction,
)

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
STAND_INS = pytest.mark.parametrize("stand_in", ["mean", "axis"])
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PATTERNS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [25, 1, 34]], ids=["once", "decode", "chunks"])


class QFiltersHead(Head):
    """Projection of the key on `direction` [D], times `sign`."""

    def __init__(
        self,
        direction: np.ndarray,
        budget: int,
        n_sink: int = 0,
        recent: int = 0,
        sign: int = 1,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, recent, protect)
        self.direction = direction.astype(np.float64) * sign

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        self.scores = {i: sum(k * f for k, f in zip(self.keys[i], self.direction)) for i in shown}
        self.keep(shown, self.scores)


@attrs.frozen
class Calibrated(Evicting):
    """A transform whose empty states have directions, float32 [B, H, D]."""

    direction: mx.array

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> Any:
        return with_direction(super().init_state(spec, left_padding), self.direction)


def calibrated(direction: np.ndarray, **options: Any) -> Calibrated:
    """Q-Filters with the `direction` of each head."""
    return Calibrated("qfilters", qfilters_policy(**options), rows(), mx.array(direction))


def directions(seed: int, stream: Stream) -> np.ndarray:
    """A direction for each head of each sequence."""
    shape = (stream.batch, stream.heads, stream.keys.shape[3])
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def expect_by(direction: np.ndarray, stream: Stream, calls: Sequence[Call], **chosen: Any) -> Any:
    """`expect` with the `direction` [B, H, D] of each head."""
    each = iter(direction.reshape(-1, direction.shape[-1]))
    return expect(lambda: QFiltersHead(next(each), **chosen), stream, calls)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    budget = draw(st.integers(1, 16))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    recent = draw(st.integers(0, min(6, budget - 1 - n_sink)))
    return {"budget": budget, "n_sink": n_sink, "recent": recent, "sign": draw(st.sampled_from([1, -1]))}


# A given direction


@given(seeds(), options(), cuts(), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_by_projection(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    calls, direction = plain_calls(pattern, batch), directions(seed, stream)
    told, margin = expect_by(direction, stream, calls, **chosen)
    assume(margin > NEAR_TIE)
    compare(calibrated(direction, **chosen), told, stream, calls)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_projections_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    chosen = {"budget": 12, "n_sink": 2, "recent": 3}
    stream = make_stream(0, 60, dim=64, group=group, dtype=dtype)
    calls, direction = plain_calls([20, 1, 1, 9] + [1] * 29, 1), directions(0, stream)
    told, margin = expect_by(direction, stream, calls, **chosen)
    assert margin > NEAR_TIE
    compare(calibrated(direction, **chosen), told, stream, calls)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(chosen["budget"] - chosen["n_sink"] - chosen["recent"] - 1, first=chosen["n_sink"]))
    stream, calls = make_stream(seed, sum(pattern), group=group), plain_calls(pattern, 1)
    direction = directions(seed, stream)
    told, margin = expect_by(direction, stream, calls, protect=protect, **chosen)
    assume(margin > NEAR_TIE)
    compare(calibrated(direction, protect=protect, **chosen), told, stream, calls)
    seen = {i for start, end in protect for i in range(start, end) if i < sum(pattern)}
    assert all(seen <= set(head.held) for head in told[-1].values())


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_is_no_row(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    stream = make_stream(seed, 60, batch=2, group=group)
    direction = directions(seed, stream)
    told, margin = expect_by(direction, stream, calls, **chosen)
    assume(margin > NEAR_TIE)
    compare(calibrated(direction, **chosen), told, stream, calls)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_is_no_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    direction = directions(seed, stream)
    told, margin = expect_by(direction, stream, calls, **chosen)
    assume(margin > NEAR_TIE)
    compare(calibrated(direction, **chosen), told, stream, calls)


@given(seeds(), options(), cuts(20), GROUPS)
def test_cuts_change_nothing(seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=2, group=group, dtype=mx.float16)
    transform = calibrated(directions(seed, stream), **chosen)
    states = [feed(transform, stream, how) for how in (pattern, [total], [1] * total)]
    assert equal(held_rows(transform, states[0]), held_rows(transform, states[1]))
    assert equal(held_rows(transform, states[0]), held_rows(transform, states[2]))


@PATTERNS
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_projections_of_all_rows_stay(sign: int, pattern: list[int]) -> None:
    """Without recent rows, whatever the order in which they came."""
    stream = make_stream(1, 60)
    direction = directions(1, stream)
    transform = calibrated(direction, budget=14, n_sink=2, sign=sign)
    held = held_positions(transform, feed(transform, stream, pattern))
    for head in range(2):
        projection = sign * stream.keys[0, head].astype(np.float64) @ direction[0, head]
        best = [i for i in np.argsort(-projection).tolist() if i >= 2][:12]
        assert held[0][head] == sorted([0, 1, *best])


@given(seeds(), options(), cuts())
def test_sign_turns_the_direction_round(seed: int, chosen: dict[str, Any], pattern: list[int]) -> None:
    stream = make_stream(seed, sum(pattern))
    direction, turned = directions(seed, stream), chosen | {"sign": -chosen["sign"]}
    one, other = calibrated(direction, **chosen), calibrated(-direction, **turned)
    assert equal(*(held_rows(x, feed(x, stream, pattern)) for x in (one, other)))


@given(seeds(), options(), cuts(), st.sampled_from([2.0**-10, 0.5, 64.0]))
def test_length_of_the_direction_changes_nothing(
    seed: int, chosen: dict[str, Any], pattern: list[int], factor: float
) -> None:
    stream = make_stream(seed, sum(pattern))
    direction = directions(seed, stream)
    one, other = calibrated(direction, **chosen), calibrated(factor * direction, **chosen)
    assert equal(*(held_rows(x, feed(x, stream, pattern)) for x in (one, other)))


def test_direction_that_came_with_the_other_sign() -> None:
    """Stored filters may point away from the queries: `with_direction` takes their sign."""
    stream, transform = make_stream(2, 60), qfilters(budget=14, n_sink=2)
    direction, empty = mx.array(directions(2, stream)), transform.init_state(stream.spec())
    states = [with_direction(empty, x, sign=sign) for x, sign in ((direction, 1), (-direction, -1))]
    one, other = (resume(transform, state, stream, [40, 1, 19]) for state in states)
    assert same(one, other)
    turned = resume(transform, with_direction(empty, direction, sign=-1), stream, [40, 1, 19])
    assert held_positions(transform, turned) != held_positions(transform, one)


@PATTERNS
@KINDS
def test_of_equal_projections_the_later_rows_stay(pattern: list[int], group: int | None) -> None:
    """Keys at right angles to the direction."""
    stream = make_stream(3, 60, group=group)
    keys = stream.keys.copy()
    keys[..., 5] = 0.0
    stream = Stream(keys, stream.values, stream.queries, mx.float32)
    direction = np.zeros((1, 2, 16), np.float32)
    direction[..., 5] = 1.0
    transform = calibrated(direction, budget=10, n_sink=3)
    held = held_positions(transform, feed(transform, stream, pattern))
    assert held == [[[0, 1, 2, *range(53, 60)]] * 2]


@given(options(), cuts(20), GROUPS)
def test_sinks_recent_rows_and_budget(chosen: dict[str, Any], pattern: list[int], group: int | None) -> None:
    stream, total = make_stream(4, sum(pattern), batch=2, group=group), sum(pattern)
    transform = calibrated(directions(4, stream), **chosen)
    safe = {*range(min(chosen["n_sink"], total)), *range(max(total - chosen["recent"], 0), total)}
    for held in (head for row in held_positions(transform, feed(transform, stream, pattern)) for head in row):
        assert len(held) == min(total, chosen["budget"])
        assert safe <= set(held)


@KINDS
def test_given_direction_is_never_replaced(group: int | None) -> None:
    stream = make_stream(5, 200, group=group)
    direction = directions(5, stream)
    transform = calibrated(direction, budget=150, calib_tokens=32)
    state = transform.init_state(stream.spec())
    assert state.carry.frozen.all().item()
    state = feed(transform, stream, [60, 1, 100, 1, 1, 37])
    assert np.array_equal(to_numpy(state.carry.direction), direction) and state.carry.frozen.all().item()


def test_direction_of_a_layer_serves_all_sequences() -> None:
    """[H, D] as calibration files hold it."""
    stream, transform = make_stream(6, 60, batch=2), qfilters(budget=14)
    direction = directions(6, stream)[0]
    empty = transform.init_state(stream.spec())
    one, other = (with_direction(empty, mx.array(x)) for x in (direction, np.stack([direction] * 2)))
    assert same(resume(transform, one, stream, [40, 20]), resume(transform, other, stream, [40, 20]))


@pytest.mark.parametrize("shape", [(3, 16), (2, 15), (16,), (2, 2, 16), (1, 1, 2, 16)], ids=str)
def test_refuses_directions_of_other_shapes(shape: tuple[int, ...]) -> None:
    state = qfilters(budget=14).init_state(make_stream(7, 1).spec())
    with pytest.raises(QuantizerConfigError, match=r"^qfilters: `direction` .*; got "):
        with_direction(state, mx.ones(shape))


@pytest.mark.parametrize("sign", [0, 2, -3, 0.5, None, "+"], ids=str)
def test_refuses_other_signs(sign: Any) -> None:
    state = qfilters(budget=14).init_state(make_stream(7, 1).spec())
    with pytest.raises(QuantizerConfigError, match=r"^qfilters: `sign` .*; got "):
        with_direction(state, mx.ones((2, 16)), sign=sign)


# A direction from queries


def cone(seed: int, shape: tuple[int, ...], mean: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors [B, H, S, D] around `mean` times a unit vector of their head, and these unit vectors [B, H, D]."""
    random = np.random.default_rng(seed)
    axis = random.standard_normal((*shape[:2], shape[3]))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    return (mean * axis[:, :, None] + random.standard_normal(shape)).astype(np.float32), axis


def filter_of(queries: np.ndarray) -> np.ndarray:
    """The paper's filter [D] of `queries` [S, D]: first right singular vector, on the side of the mean."""
    _, _, right = np.linalg.svd(queries.astype(np.float64), full_matrices=False)
    return right[0] * np.sign(queries.mean(axis=0) @ right[0])


def unit(x: Any) -> np.ndarray:
    x = np.array(x, np.float64)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_direction_is_the_mean_filter_of_the_group(group: int, dtype: mx.Dtype) -> None:
    queries, _ = cone(8, (2, 2 * group, 300, 32))
    queries = to_numpy(mx.array(queries).astype(dtype))
    got = unit(qfilters_direction(mx.array(queries).astype(dtype), 2))
    assert got.shape == (2, 2, 32)
    for row in range(2):
        for head in range(2):
            heads = queries[row, head * group : (head + 1) * group]
            want = unit(sum(filter_of(x) for x in heads))
            assert got[row, head] @ want > 0.999


def test_direction_is_a_float32_unit_vector() -> None:
    direction = qfilters_direction(mx.array(cone(9, (1, 4, 100, 16))[0]).astype(mx.float16), 2)
    assert direction.dtype == mx.float32
    np.testing.assert_allclose(np.linalg.norm(to_numpy(direction), axis=-1), 1, rtol=1e-4)


def test_direction_is_the_leading_one_by_a_small_lead() -> None:
    """The second moment along one axis is a tenth above that along all others."""
    random = np.random.default_rng(20)
    basis = np.linalg.qr(random.standard_normal((32, 32)))[0]
    left = np.linalg.qr(random.standard_normal((200, 32)))[0]
    sizes = np.sqrt(np.where(np.arange(32) == 7, 1.1, 1.0))
    queries = ((left * sizes) @ basis.T).astype(np.float32)
    direction = to_numpy(qfilters_direction(mx.array(queries)[None], 1))[0]
    assert filter_of(queries) @ direction > 0.999 and abs(basis[:, 7] @ direction) > 0.999


def test_direction_points_where_the_mean_query_does() -> None:
    """Not so for the leading axis of centred queries, which lies across it here."""
    queries, axis = cone(10, (1, 2, 400, 32))
    across = np.zeros_like(axis)
    across[..., 0] = 1.0
    across -= (across * axis).sum(axis=-1, keepdims=True) * axis
    queries += 2.0 * np.random.default_rng(10).standard_normal((1, 2, 400, 1)) * unit(across)[:, :, None]
    direction = unit(qfilters_direction(mx.array(queries.astype(np.float32)), 2))
    assert ((direction * axis).sum(axis=-1) > 0.9).all()
    assert (np.einsum("bhsd,bhd->bh", queries, direction) > 0).all()
    turned = unit(qfilters_direction(mx.array(-queries.astype(np.float32)), 2))
    np.testing.assert_allclose(turned, -direction, atol=1e-4)


@pytest.mark.parametrize("group", [1, 2])
def test_first_prompt_of_queries_gives_the_direction(group: int) -> None:
    stream, (queries, axis) = make_stream(11, 120), cone(11, (1, 2, 120, 16))
    queries = np.repeat(queries, group, axis=1)
    stream = Stream(stream.keys, stream.values, queries, mx.float32)
    transform = qfilters(budget=40, n_sink=2)
    state = feed(transform, stream, [100])
    direction = to_numpy(state.carry.direction)
    assert state.carry.frozen.all().item()
    assert ((unit(direction) * axis).sum(axis=-1) > 0.95).all()
    for pattern in ([100], [100, 1, 19]):
        told, margin = expect_by(direction, stream, plain_calls(pattern, 1), budget=40, n_sink=2)
        assert margin > NEAR_TIE
        held = held_positions(transform, feed(transform, stream, pattern))
        assert held[0] == [told[-1][0, head].held for head in range(2)]


def test_turned_queries_turn_the_direction() -> None:
    stream, (queries, _) = make_stream(12, 100), cone(12, (1, 2, 100, 16))
    both = [Stream(stream.keys, stream.values, x, mx.float32) for x in (queries, -queries)]
    one, other = (feed(qfilters(budget=40), x, [100]).carry.direction for x in both)
    np.testing.assert_allclose(to_numpy(one), -to_numpy(other), atol=1e-4)


# A direction from keys


def axis_of(keys: np.ndarray) -> np.ndarray:
    """Leading eigenvector [D] of the covariance of `keys` [S, D], its largest component positive."""
    centred = keys.astype(np.float64) - keys.astype(np.float64).mean(axis=0)
    axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    return axis * np.sign(axis[np.argmax(np.abs(axis))])


def minus_mean_of(keys: np.ndarray) -> np.ndarray:
    """Unit vector [D] against the mean of `keys` [S, D]."""
    mean = keys.astype(np.float64).mean(axis=0)
    return -mean / np.linalg.norm(mean)


# What stands in [D] for keys [S, D], and the cosine by which a direction that was found may miss it.
TOLD_BY = {"mean": (minus_mean_of, 1 - 1e-6), "axis": (axis_of, 0.99)}


def stretched(seed: int, tokens: int, batch: int = 1) -> Stream:
    """Keys spread four times as far along one axis of their head as along others, with a mean on top."""
    stream, random = make_stream(seed, tokens, batch=batch), np.random.default_rng(seed)
    axis = random.standard_normal((batch, 2, 1, 16))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    keys = stream.keys + 4 * random.standard_normal((batch, 2, tokens, 1)) * axis + 6 * random.standard_normal(16)
    return Stream(keys.astype(np.float32), stream.values, None, mx.float32)


@pytest.mark.parametrize(
    ("budget", "calib_tokens", "pattern", "frozen_at"),
    [
        (200, 100, [100], 100),
        (200, 100, [1] * 100, 100),
        (200, 100, [60, 1, 39], 100),
        (200, 100, [60, 60], 120),
        (80, 100, [1] * 80, 80),
        (80, 100, [50, 60], 110),
        (40, 100, [120], 120),
        (40, 20, [120], 120),
    ],
    ids=str,
)
@STAND_INS
def test_direction_is_found_once_enough_keys_came(
    stand_in: str, budget: int, calib_tokens: int, pattern: list[int], frozen_at: int
) -> None:
    """Of all keys held and new when `calib_tokens`, or what `budget` holds, is reached."""
    transform = qfilters(budget=budget, calib_tokens=calib_tokens, stand_in=stand_in)
    stream, (told_by, closeness) = stretched(13, 130), TOLD_BY[stand_in]
    before = feed(transform, stream, pattern[:-1])
    assert not before.carry.frozen.any().item()
    state = resume(transform, before, stream, pattern[-1:], sum(pattern[:-1]))
    assert state.carry.frozen.all().item()
    for head in range(2):
        want = told_by(stream.keys[0, head, :frozen_at])
        assert np.array(state.carry.direction[0, head].tolist()) @ want > closeness
    later = resume(transform, state, stream, [1, 1, 8], sum(pattern))
    assert mx.array_equal(later.carry.direction, state.carry.direction)


@pytest.mark.parametrize("pattern", [[60], [20, 40], [1] * 60, [7, 1, 52]], ids=str)
@STAND_INS
def test_first_eviction_is_by_the_direction(stand_in: str, pattern: list[int]) -> None:
    stream, transform = stretched(14, 60), qfilters(budget=30, n_sink=1, calib_tokens=16, stand_in=stand_in)
    direction = to_numpy(feed(transform, stream, pattern).carry.direction)
    told, margin = expect_by(direction, stream, plain_calls(pattern, 1), budget=30, n_sink=1)
    assert margin > NEAR_TIE
    held = held_positions(transform, feed(transform, stream, pattern))
    assert held[0] == [told[-1][0, head].held for head in range(2)]


@given(seeds(), cuts(20))
def test_mean_does_not_depend_on_cuts(seed: int, pattern: list[int]) -> None:
    """Nor on the store: it is that of the keys as they came."""
    total, codes = sum(pattern), rows(key=turboquant_mse_codec(bits=3), value=int8_codec())
    policy = qfilters_policy(budget=total + 1, n_sink=0, calib_tokens=max(total, 2))
    stream = make_stream(seed, total, batch=2, dim=64)
    want = -stream.keys.astype(np.float64).mean(axis=2)
    for transform, how in ((chain(policy, rows()), pattern), (chain(policy, codes), [1] * total)):
        got = to_numpy(feed(transform, stream, how).carry.direction)
        np.testing.assert_allclose(unit(got), unit(want), atol=1e-5)


def test_keys_against_their_mean_stay() -> None:
    """Most keys lie around one direction; the few that do not are what is kept, whichever place they have."""
    stream, (keys, _) = make_stream(22, 60), cone(22, (1, 2, 60, 16), mean=6.0)
    rare = [9, 23, 38, 51]
    keys[:, :, rare] *= -1
    transform = qfilters(budget=5, n_sink=1, calib_tokens=16)
    held = held_positions(transform, feed(transform, Stream(keys, stream.values, None, mx.float32), [60]))
    assert held == [[[0, *rare]] * 2]


def test_means_of_large_keys_do_not_overflow() -> None:
    stream, transform = make_stream(23, 40), qfilters(budget=20, n_sink=1, calib_tokens=16)
    keys = np.sign(stream.keys) * np.float32(1e38)
    keys[..., :8] = 2e38
    state = feed(transform, Stream(keys, stream.values, None, mx.float32), [30, 1, 9])
    want = minus_mean_of(keys[0, 0, :30])
    assert state.carry.frozen.all().item()
    assert to_numpy(state.carry.direction)[0, 0].astype(np.float64) @ want > 1 - 1e-6


@STAND_INS
def test_nothing_is_searched_for_once_rows_have_gone(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a call that the host's counts choose, and the end that learns, leave the same state."""
    transform, stream = qfilters(budget=20, calib_tokens=30, stand_in=stand_in), stretched(26, 40)
    state, fill, searched = transform.init_state(stream.spec()), Fill(), []
    carry_on = QFiltersPolicy.carry_on

    def counted(self: QFiltersPolicy, scene: Scene) -> Filters:
        searched.append(scene.offset.item())
        return carry_on(self, scene)

    for token in range(30):
        keys, values, _ = parts_of(stream, token, 1)
        held, fill = transform.write(state, keys, values), transform.written(fill, 1)
        state = transform.settle(held, keys, proxy=True)
        with monkeypatch.context() as patch:
            patch.setattr(QFiltersPolicy, "carry_on", counted)
            assert same(transform.after([fill]).settle(held, keys, proxy=True), state)
        fill = transform.settled(fill, 1)
    assert searched == list(range(1, 22))
    assert state.carry.frozen.all().item()


@PATTERNS
@STAND_INS
def test_keys_that_tell_nothing_leave_the_latest_rows(stand_in: str, pattern: list[int]) -> None:
    stream, transform = make_stream(24, 60), qfilters(budget=10, n_sink=3, calib_tokens=16, stand_in=stand_in)
    state = feed(transform, Stream(np.zeros_like(stream.keys), stream.values, None, mx.float32), pattern)
    assert not state.carry.direction.any().item() and state.carry.frozen.all().item()
    assert held_positions(transform, state) == [[[0, 1, 2, *range(53, 60)]] * 2]


@STAND_INS
def test_real_queries_make_the_stand_in_needless(stand_in: str) -> None:
    stream = make_stream(25, 60, group=2)
    one, other = qfilters(budget=20, stand_in=stand_in), qfilters(budget=20)
    assert same(feed(one, stream, [40, 1, 19]), feed(other, stream, [40, 1, 19]))


@given(cuts(20), GROUPS)
def test_nothing_goes_before_the_budget_is_full(pattern: list[int], group: int | None) -> None:
    total = sum(pattern)
    stream, transform, plain = make_stream(15, total, group=group), qfilters(budget=max(total, 5)), rows()
    position, *held = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2]
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@STAND_INS
def test_each_sequence_finds_its_own_direction(stand_in: str) -> None:
    stream, transform = stretched(16, 80, batch=2), qfilters(budget=30, calib_tokens=20, stand_in=stand_in)
    whole = flatten(feed(transform, stream, [50, 1, 29]))[0]
    for row in range(2):
        alone = flatten(feed(transform, stream.rows([row]), [50, 1, 29]))[0]
        assert equal([x[row : row + 1] for x in whole], alone)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@STAND_INS
def test_padding_takes_no_part_in_the_direction(stand_in: str, left: bool) -> None:
    """Padding is a hundred times as large as a key, so that it would be the axis and the mean."""
    stream, transform = stretched(17, 60, batch=2), qfilters(budget=30, calib_tokens=20, stand_in=stand_in)
    keys, values = np.full((2, 2, 60, 16), 100.0, np.float32), np.zeros((2, 2, 60, 16), np.float32)
    for row, count in enumerate((60, 45)):
        place = slice(60 - count, 60) if left else slice(0, count)
        keys[row, :, place], values[row, :, place] = stream.keys[row, :, :count], stream.values[row, :, :count]
    state = transform.init_state(stream.spec(), mx.array([0, 15]) if left else None)
    lengths = None if left else mx.array([60, 45])
    state = transform.settle(
        transform.write(state, mx.array(keys), mx.array(values), lengths), mx.array(keys), lengths, proxy=True
    )
    for row, count in enumerate((60, 45)):
        alone = feed(transform, stream.rows([row]), [count])
        np.testing.assert_allclose(to_numpy(state.carry.direction)[row], to_numpy(alone.carry.direction)[0], atol=1e-3)
        assert held_positions(transform, state)[row] == held_positions(transform, alone)[0]


# Numbers and options


@PATTERNS
@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("source", ["given", "mean", "axis"])
def test_bad_key_harms_neither_direction_nor_other_rows(
    source: str, bad: float, group: int | None, pattern: list[int]
) -> None:
    clean = make_stream(18, 60, batch=2, group=group)
    keys = clean.keys.copy()
    keys[0, :, 9] = bad
    broken = Stream(keys, clean.values, clean.queries, mx.float32)
    chosen = {"budget": 20, "n_sink": 2, "calib_tokens": 16}
    found = source != "given"
    transform = qfilters(**chosen, stand_in=source) if found else calibrated(directions(18, clean), **chosen)
    state, other = feed(transform, broken, pattern), feed(transform, clean, pattern)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert mx.isfinite(state.carry.direction).all().item()
    assert all(mx.isfinite(memory).all().item() for memory in flatten(state.memory)[0])
    for held in held_positions(transform, state)[0]:
        assert held[:2] == [0, 1] and len(held) == 20


@PATTERNS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_bad_query_has_no_part_in_the_direction(bad: float, pattern: list[int]) -> None:
    stream, (queries, axis) = make_stream(21, 60), cone(21, (1, 4, 60, 16))
    axis = unit(axis.reshape(1, 2, 2, 16).sum(axis=2))
    queries[:, 1, 5] = bad
    transform = qfilters(budget=20, calib_tokens=16)
    direction = feed(transform, Stream(stream.keys, stream.values, queries, mx.float32), pattern).carry.direction
    assert ((to_numpy(direction) * axis).sum(axis=-1) > 0.8).all()


@pytest.mark.parametrize("build", [qfilters, qfilters_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 20, "recent": 16}, "budget"),
        ({"budget": 10, "protect": [(10, 16)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"recent": -1}, "recent"),
        ({"recent": None}, "recent"),
        ({"calib_tokens": 1}, "calib_tokens"),
        ({"calib_tokens": 0}, "calib_tokens"),
        ({"calib_tokens": 2.5}, "calib_tokens"),
        ({"calib_tokens": None}, "calib_tokens"),
        ({"sign": 0}, "sign"),
        ({"sign": 2}, "sign"),
        ({"sign": "+1"}, "sign"),
        ({"sign": None}, "sign"),
        ({"min_retention": 0.0}, "min_retention"),
        ({"min_retention": -0.5}, "min_retention"),
        ({"min_retention": 1.01}, "min_retention"),
        ({"min_retention": math.nan}, "min_retention"),
        ({"min_retention": "high"}, "min_retention"),
        ({"on_low_retention": "error"}, "on_low_retention"),
        ({"on_low_retention": None}, "on_low_retention"),
        ({"on_low_retention": True}, "on_low_retention"),
        ({"stand_in": "norm"}, "stand_in"),
        ({"stand_in": None}, "stand_in"),
        ({"stand_in": 1}, "stand_in"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^qfilters: .*`{field}`.*; got "):
        build(**chosen)


@pytest.mark.parametrize("chosen", [{"min_retention": None}, {"min_retention": 1.0}, {"on_low_retention": "ignore"}])
def test_retention_has_no_say_in_what_stays(chosen: dict[str, Any]) -> None:
    stream = stretched(19, 60)
    one, other = qfilters(budget=20), qfilters(budget=20, **chosen)
    assert same(feed(one, stream, [40, 20]), feed(other, stream, [40, 20]))
