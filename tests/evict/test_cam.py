"""CaM: before a row goes, its value is folded into rows that stay."""

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
    right_padded,
    same,
    seeds,
    spans,
    to_numpy,
)

from vq_functional import QuantizerConfigError, Transform, h2o
from vq_functional.core.tree import flatten
from vq_functional.evict.cam import cam, cam_policy

pytestmark = pytest.mark.filterwarnings("ignore:cam. `merge_keys`")
GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head; None: keys stand in
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
MERGES = pytest.mark.parametrize("merge", ["sim_weighted", "mean", "window"])
BLENDS = pytest.mark.parametrize("merge", ["sim_weighted", "mean"])
PATTERNS = pytest.mark.parametrize("pattern", [[60], [1] * 60, [25, 1, 34]], ids=["once", "decode", "chunks"])

Mixture = dict[int, float]  # what a row is made of: weights of original rows, by position


class CaMHead(H2OHead):
    """Attention mass without decay; the losers of a selection go on in its survivors, oldest first. No gate."""

    def __init__(
        self,
        budget: int,
        n_sink: int,
        recent: int | None = None,
        merge: str = "sim_weighted",
        merge_keys: bool = False,
        reach: int = 16,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.spared = {*range(n_sink), *(i for start, end in protect for i in range(start, end))}
        if recent is None:
            recent = min(budget // 2, budget - len(self.spared) - 1)
        super().__init__(budget, n_sink, recent, 1.0, protect)
        self.merge, self.merge_keys, self.reach = merge, merge_keys, reach
        self.mixtures: dict[int, Mixture] = {}
        self.log: list[tuple[dict[int, Mixture], dict[int, Mixture]]] = []  # by call: as shown, and as held after it

    def call(self, keys: np.ndarray, queries: np.ndarray | None = None) -> list[int]:
        new = range(self.offset, self.offset + len(keys))
        before = self.mixtures | {i: {i: 1.0} for i in new}
        shown = super().call(keys, queries)
        self.log.append((before, dict(self.mixtures)))
        return shown

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        self.mixtures |= {i: {i: 1.0} for i in new}
        super().settle(shown, new, queries)

    def keep(self, shown: list[int], priority: dict[int, float]) -> None:
        super().keep(shown, priority)
        lost = [i for i in shown if i not in self.held]
        if self.merge == "window":
            self.add_to_followers(lost)
        elif self.merge != "drop":
            self.blend_into_nearest(lost, priority)
        self.mixtures = {i: self.mixtures[i] for i in self.held}

    def add_to_followers(self, lost: list[int]) -> None:
        for loser in lost:
            followers = [i for i in self.open() if i > loser][: self.reach]
            for target in followers:
                self.mixtures[target] = mixed(self.mixtures[target], 1.0, self.mixtures[loser], 1 / len(followers))

    def blend_into_nearest(self, lost: list[int], mass: dict[int, float]) -> None:
        chosen = [(loser, *self.nearest(loser)) for loser in lost]
        for loser, target, cosine in chosen:
            weight = 0.5 if self.merge == "mean" else min(max(cosine, 0.0), 1.0)
            self.mixtures[target] = mixed(self.mixtures[target], 1 - weight, self.mixtures[loser], weight)
            self.scores[target] += mass[loser]
            if self.merge_keys:
                self.keys[target] = (1 - weight) * self.keys[target] + weight * self.keys[loser]

    def open(self) -> list[int]:
        """Survivors that are neither sinks nor in a protected span."""
        return [i for i in self.held if i not in self.spared]

    def nearest(self, loser: int) -> tuple[int, float]:
        """The open survivor whose key points most nearly the same way, and its cosine."""
        cosines = {i: cosine(self.keys[loser], self.keys[i]) for i in self.open()}
        first, *others = sorted(cosines, key=lambda i: -cosines[i])
        if others:
            self.margin = min(self.margin, cosines[first] - cosines[others[0]])
        return first, cosines[first]


def mixed(one: Mixture, share: float, other: Mixture, weight: float) -> Mixture:
    """`share` times one and `weight` times the other."""
    return {i: share * one.get(i, 0.0) + weight * other.get(i, 0.0) for i in {**one, **other}}


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def check(
    chosen: dict[str, Any], stream: Stream, calls: Sequence[Call], demand: Callable[[bool], Any], rounding: float = 2e-6
) -> None:
    """Feed `calls` to the method without its gate and compare every call with the oracle.

    `demand` takes whether no choice was close; `rounding` is the error of a value that was rewritten.
    """
    heads: list[CaMHead] = []

    def start() -> CaMHead:
        heads.append(CaMHead(**chosen))
        return heads[-1]

    told, margin = expect(start, stream, calls)
    demand(margin > NEAR_TIE)
    transform = cam(**chosen, merge_gate=False)
    left = any(call.left for call in calls)
    padding = [sum(call.width - call.counts[row] for call in calls) for row in range(stream.batch)]
    state = transform.init_state(stream.spec(), mx.array(padding) if left else None)
    inputs = zip(*(chunks(x, calls, stream.dtype) for x in (stream.keys, stream.values, stream.queries)))
    for number, (call, arrays) in enumerate(zip(calls, inputs)):
        if call.width == 0:
            continue
        columns = to_numpy(transform.positions_after(state, call.width)).astype(int)
        state, shown = step(transform, state, call, arrays)
        ordered = transform.ordered(state)
        held = transform.read(ordered)
        for index, head in enumerate(heads):
            row, place, want = index // stream.heads, index % stream.heads, told[number][divmod(index, stream.heads)]
            position = columns[row, place]
            position = np.where(position < want.offset, position, -1)
            assert sorted(position[position >= 0].tolist()) == want.shown
            check_rows(shown, position, head, head.log[number][0], stream, row, place, rounding)
            position = np.array(ordered.position[row, place].tolist())
            assert position.tolist() == want.held + [-1] * (len(position) - len(want.held))
            check_rows(held, position, head, head.log[number][1], stream, row, place, rounding)
            mass = to_numpy(ordered.memory)[row, place]
            np.testing.assert_allclose(mass[: len(want.held)], want.scores, rtol=1e-4, atol=1e-5)
            assert not mass[len(want.held) :].any()


def step(transform: Transform, state: Any, call: Call, arrays: Any) -> tuple[Any, Any]:
    """The next state, and the keys and values shown."""
    keys, values, queries = arrays
    if not call.padded or call.left:
        state, *shown = transform.update(state, keys, values, queries)
        return state, shown
    lengths, proxy = mx.array(call.counts), queries is None
    held = transform.write(state, keys, values, lengths)
    shown = transform.read(held)
    return transform.settle(held, keys if proxy else queries, lengths, proxy=proxy), shown


def check_rows(
    arrays: Any,
    position: np.ndarray,
    head: CaMHead,
    mixtures: dict[int, Mixture],
    stream: Stream,
    row: int,
    place: int,
    rounding: float,
) -> None:
    """Rows in columns of a `position`: as they came where nothing was folded into them, else their mixture."""
    for which, (array, whole) in enumerate(zip(arrays, (stream.keys, stream.values))):
        got, whole = to_numpy(array)[row, place], whole[row, place]
        for column in np.flatnonzero(position >= 0):
            mixture = mixtures[int(position[column])]
            if len(mixture) == 1 or (which == 0 and not head.merge_keys):
                assert np.array_equal(got[column], whole[position[column]])
                continue
            want = sum(weight * whole[i].astype(np.float64) for i, weight in mixture.items())
            size = sum(abs(weight) * np.abs(whole[i]).max() for i, weight in mixture.items())
            np.testing.assert_allclose(got[column], want, rtol=0, atol=rounding * size * len(mixture))


def sure(condition: bool) -> None:
    assert condition


@st.composite
def options(draw: st.DrawFn, merges: Sequence[str] = ("sim_weighted", "mean", "drop", "window")) -> dict[str, Any]:
    budget = draw(st.integers(2, 16))
    n_sink = draw(st.integers(0, min(3, budget - 2)))
    merge = draw(st.sampled_from(merges))
    return {
        "budget": budget,
        "n_sink": n_sink,
        "recent": draw(st.one_of(st.none(), st.integers(0, min(6, budget - 1 - n_sink)))),
        "merge": merge,
        "merge_keys": merge in ("sim_weighted", "mean") and draw(st.booleans()),
        "reach": draw(st.sampled_from([1, 3, 16])),
    }


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 16, 64]))
def test_rows_values_and_mass(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    check(chosen, stream, plain_calls(pattern, batch), assume)


@MERGES
@KINDS
@PATTERNS
def test_many_losers(merge: str, group: int | None, pattern: list[int]) -> None:
    """Of a prompt, standing-in keys settle 56 at a time: losers go on in survivors of their own piece."""
    chosen = {"budget": 9, "n_sink": 2, "recent": 2, "merge": merge, "reach": 4}
    check(chosen, make_stream(1, 60, batch=2, dim=32, group=group), plain_calls(pattern, 2), sure)


@pytest.mark.parametrize(("dtype", "rounding"), [(mx.float16, 1e-3), (mx.bfloat16, 8e-3)], ids=str)
@MERGES
@KINDS
def test_half_precision_rows(dtype: mx.Dtype, rounding: float, merge: str, group: int | None) -> None:
    chosen = {"budget": 12, "n_sink": 2, "recent": 3, "merge": merge}
    stream = make_stream(2, 50, dim=64, group=group, dtype=dtype)
    check(chosen, stream, plain_calls([20, 1, 1, 9] + [1] * 19, 1), sure, rounding)


@given(seeds(), options(), st.data(), cuts(), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    """And nothing is folded into them."""
    protect = data.draw(spans(5, first=chosen["n_sink"], last=20))
    chosen = chosen | {"budget": chosen["budget"] + sum(end - start for start, end in protect), "protect": protect}
    stream, calls = make_stream(seed, sum(pattern), group=group), plain_calls(pattern, 1)
    check(chosen, stream, calls, assume)


@given(seeds(), options(), right_padded(2), GROUPS)
def test_right_padding_is_never_folded(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    check(chosen, make_stream(seed, 60, batch=2, group=group), calls, assume)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(), GROUPS)
def test_left_padding_is_never_folded(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    check(chosen, stream, left_padded_calls([*pattern, 7], padding), assume)


# Invariants


@given(seeds(), options(["drop"]), cuts(30), GROUPS, st.booleans())
def test_drop_is_h2o_without_decay(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, gate: bool
) -> None:
    stream, recent = make_stream(seed, sum(pattern), batch=2, group=group), CaMHead(**chosen).recent
    plain = h2o(budget=chosen["budget"], n_sink=chosen["n_sink"], grace=recent, decay=1.0)
    transform = cam(**chosen, merge_gate=gate)
    one, other = (feed(x, stream, pattern) for x in (transform, plain))
    assert equal(held_rows(transform, one), held_rows(plain, other))
    assert mx.array_equal(transform.ordered(one).memory, plain.ordered(other).memory)
    calls = plain_calls(pattern, 2)
    told, margin = expect(lambda: H2OHead(chosen["budget"], chosen["n_sink"], recent, 1.0), stream, calls)
    assume(margin > NEAR_TIE)
    compare(transform, told, stream, calls)


def one_hot(stream: Stream) -> Stream:
    """The stream with values that tell what a row is made of: the value of token i is e_i."""
    batch, heads, tokens, _ = stream.keys.shape
    values = np.broadcast_to(np.eye(tokens, dtype=np.float32), (batch, heads, tokens, tokens))
    return Stream(stream.keys, values, stream.queries, stream.dtype)


@given(seeds(), options(["sim_weighted", "mean"]), cuts(20), GROUPS, st.booleans())
def test_blended_values_are_convex_combinations(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, gate: bool
) -> None:
    stream, transform = one_hot(make_stream(seed, sum(pattern), group=group)), cam(**chosen, merge_gate=gate)
    position, _, weights = held_rows(transform, feed(transform, stream, pattern))
    assert (weights >= 0).all().item()
    np.testing.assert_allclose(to_numpy(weights.sum(axis=-1)), 1, atol=1e-5)
    for head in range(2):
        for row, own in zip(to_numpy(weights)[0, head], position[0, head].tolist()):
            others = set(np.flatnonzero(row).tolist()) - {own}
            assert others.isdisjoint(range(chosen["n_sink"])) and others.isdisjoint(set(position[0, head].tolist()))


@given(seeds(), options(["window"]), cuts(20), GROUPS)
def test_followers_share_all_of_a_loser(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    """With a recent row there always is one to follow, so that the sum of all values never changes."""
    chosen, total = chosen | {"budget": chosen["budget"] + 1, "recent": chosen["recent"] or 1}, sum(pattern)
    transform = cam(**chosen, merge_gate=False)
    _, _, weights = held_rows(transform, feed(transform, one_hot(make_stream(seed, total, group=group)), pattern))
    np.testing.assert_allclose(to_numpy(weights.sum(axis=2)), 1, atol=1e-4)


@given(seeds(), options(["sim_weighted", "mean"]), cuts(30), GROUPS)
def test_merging_moves_mass_and_loses_none(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=2, group=group)
    mass = to_numpy(feed(cam(**chosen, merge_gate=False), stream, pattern).memory.sum(axis=-1))
    np.testing.assert_allclose(mass, total, rtol=1e-4)


@PATTERNS
def test_dropping_loses_mass(pattern: list[int]) -> None:
    """Every query gives its own row some, so that every loser has some."""
    state = feed(cam(budget=12, merge="drop"), make_stream(3, 60, group=2), pattern)
    assert (to_numpy(state.memory.sum(axis=-1)) < 59).all()


@BLENDS
@PATTERNS
@pytest.mark.parametrize("gate", [True, False])
def test_equal_values_stay_equal(merge: str, gate: bool, pattern: list[int]) -> None:
    stream = make_stream(3, 60, group=2)
    stream = Stream(stream.keys, np.full_like(stream.values, 3.3), stream.queries, mx.float32)
    transform = cam(budget=12, merge=merge, merge_gate=gate)
    _, _, values = held_rows(transform, feed(transform, stream, pattern))
    np.testing.assert_allclose(to_numpy(values), 3.3, rtol=1e-5)


@PATTERNS
def test_values_of_keys_at_right_angles_are_not_blended(pattern: list[int]) -> None:
    """Cosine 0 is weight 0: the rows are those that dropping leaves, but the mass has moved."""
    stream = make_stream(4, 60, dim=64)
    stream = Stream(
        np.broadcast_to(4 * np.eye(64, dtype=np.float32)[:60], stream.keys.shape), stream.values, None, mx.float32
    )
    transform = cam(budget=12, merge_gate=False)
    state = feed(transform, stream, pattern)
    position, keys, values = held_rows(transform, state)
    for head in range(2):
        index = position[0, head].tolist()
        assert np.array_equal(to_numpy(keys)[0, head], stream.keys[0, head][index])
        assert np.array_equal(to_numpy(values)[0, head], stream.values[0, head][index])
    np.testing.assert_allclose(to_numpy(state.memory.sum(axis=-1)), 60, rtol=1e-5)


@MERGES
@KINDS
@PATTERNS
@pytest.mark.parametrize("gate", [True, False])
def test_keys_and_sinks_are_as_they_came(merge: str, gate: bool, group: int | None, pattern: list[int]) -> None:
    """Sinks also where every loser points their way."""
    stream = make_stream(5, 60, group=group)
    keys = stream.keys.copy()
    keys[:, :, :2] *= 0.1
    keys[:, :, 2:] += 40 * keys[:, :, :1]
    stream = Stream(keys, stream.values, stream.queries, mx.float32)
    transform = cam(budget=12, n_sink=2, merge=merge, merge_gate=gate)
    position, held, values = held_rows(transform, feed(transform, stream, pattern))
    for head in range(2):
        index = position[0, head].tolist()
        assert index[:2] == [0, 1]
        assert np.array_equal(to_numpy(held)[0, head], stream.keys[0, head][index])
        assert np.array_equal(to_numpy(values)[0, head, :2], stream.values[0, head, :2])


@MERGES
@given(pattern=cuts(12))
def test_rows_within_the_budget_are_as_they_came(merge: str, pattern: list[int]) -> None:
    total = sum(pattern)
    stream, transform = make_stream(6, total), cam(budget=total + 5, merge=merge)
    position, keys, values = held_rows(transform, feed(transform, stream, pattern))
    assert position.tolist() == [[list(range(total))] * 2]
    assert np.array_equal(to_numpy(keys), stream.keys) and np.array_equal(to_numpy(values), stream.values)


@pytest.mark.parametrize("reach", [1, 4, 7, 16, 100])
def test_loser_goes_to_the_next_rows_in_even_shares(reach: int) -> None:
    """To as many as there are, where fewer follow."""
    stream = one_hot(make_stream(7, 21, group=2))
    transform = cam(budget=20, n_sink=2, recent=10, merge="window", merge_gate=False, reach=reach)
    position, _, weights = held_rows(transform, feed(transform, stream, [1] * 21))
    for head in range(2):
        held = position[0, head].tolist()
        (loser,) = set(range(21)) - set(held)
        heirs = [i for i in held if i > loser][:reach]
        want = np.eye(21)[held]
        want[[held.index(i) for i in heirs], loser] = 1 / len(heirs)
        np.testing.assert_allclose(to_numpy(weights)[0, head], want, atol=1e-6)


# Gate


def tiny_keys(directions: Sequence[int]) -> np.ndarray:
    """Keys [S, 16] along the given axes, so short that all attention is even."""
    return 1e-3 * np.eye(16, dtype=np.float32)[list(directions)]


def folded(keys: np.ndarray, seed: int = 42, merge: str = "sim_weighted", **chosen: Any) -> list[np.ndarray]:
    """What the rows of one head are made of, by position, after single tokens with `keys` [S, D]; zeros if gone."""
    stream = one_hot(Stream(keys[None, None], keys[None, None], None, mx.float32))
    transform = cam(merge=merge, seed=seed, **chosen)
    position, _, weights = held_rows(transform, feed(transform, stream, [1] * len(keys)))
    rows = dict(zip(position[0, 0].tolist(), to_numpy(weights)[0, 0]))
    return [rows.get(i, np.zeros(len(keys))) for i in range(len(keys))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("merge", "share"), [("sim_weighted", 1.0), ("mean", 0.5)])
def test_row_of_more_mass_than_its_target_is_always_folded(seed: int, merge: str, share: float) -> None:
    """Of the first four rows the last has the least mass; the fifth token points its way and has none."""
    rows = folded(tiny_keys([0, 1, 2, 3, 3]), seed, merge, budget=4, n_sink=0, recent=1)
    np.testing.assert_allclose(rows[4], [0, 0, 0, share, 1 - share], atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
@BLENDS
def test_row_without_mass_is_never_folded(seed: int, merge: str) -> None:
    """Without recent rows the newest key goes at once, and nothing has attended to it: the first rows stay for ever."""
    rows = folded(tiny_keys([0, 1, 2, 3, 3, 2, 1, 0, 2]), seed, merge, budget=4, n_sink=0, recent=0)
    np.testing.assert_array_equal(np.stack(rows[:4])[:, :4], np.eye(4))
    assert not np.stack(rows[4:]).any() and not np.stack(rows[:4])[:, 4:].any()


@MERGES
@PATTERNS
def test_row_without_mass_is_not_folded_into_one_without(merge: str, pattern: list[int]) -> None:
    """All keys attend to the first row alone, a sink."""
    keys = np.zeros((1, 1, 60, 64), np.float32)
    keys[..., 0] = 10.0
    keys[:, :, 0, 0] = 1000.0
    stream, chosen = Stream(keys, make_stream(8, 60, heads=1).values, None, mx.float32), {"budget": 6, "n_sink": 1}
    transform, drop = cam(**chosen, merge=merge), cam(**chosen, merge="drop")
    assert equal(*(held_rows(x, feed(x, stream, pattern)) for x in (transform, drop)))


@given(seeds(), st.sampled_from(["sim_weighted", "mean", "window"]))
def test_gate_freezes_the_first_rows_where_new_ones_are_not_kept(seed: int, merge: str) -> None:
    stream, chosen = make_stream(seed, 40), {"budget": 16, "n_sink": 0, "recent": 0}
    transform, drop = cam(**chosen, merge=merge), cam(**chosen, merge="drop")
    one, other = (feed(x, stream, [1] * 40) for x in (transform, drop))
    assert held_positions(transform, one) == [[list(range(16))] * 2]
    assert equal(held_rows(transform, one), held_rows(drop, other))


def test_gate_opens_by_the_ratio_of_the_masses() -> None:
    """Row 3 has 1/4 when it goes, its target, row 2, has 1/3 + 1/4: three times in seven."""
    opened = [folded(tiny_keys([0, 1, 2, 2, 5]), seed, budget=4, n_sink=0, recent=1)[2][3] for seed in range(150)]
    assert set(np.round(opened, 4)) == {0.0, 1.0}
    assert abs(np.mean(opened) - 3 / 7) < 4 * math.sqrt(12 / 49 / 150)


@pytest.mark.parametrize(("reach", "chance"), [(1, 7 / 15), (2, 14 / 15), (3, 1.0)])
def test_gate_of_the_window_opens_by_the_mean_mass_of_the_followers(reach: int, chance: float) -> None:
    """Row 2 goes with 1/3 + 1/4; row 3 has 1/4 and all that the last token gives, and the two after it nothing."""
    keys = tiny_keys([0, 1, 2, 3, 4, 3])
    keys[5] *= 1e9
    chosen = {"budget": 5, "n_sink": 1, "recent": 3, "merge": "window", "reach": reach}
    shares = [folded(keys, seed, **chosen)[3][2] for seed in range(150)]
    assert all(x == 0 or abs(x * reach - 1) < 1e-5 for x in shares)
    deviation = math.sqrt(chance * (1 - chance) / 150)
    assert abs(np.mean(shares) * reach - chance) <= 4 * deviation + 1e-5


@MERGES
@PATTERNS
@KINDS
def test_same_seed_same_run(merge: str, group: int | None, pattern: list[int]) -> None:
    stream = make_stream(8, 60, batch=2, group=group)
    one, other = (feed(cam(budget=12, merge=merge), stream, pattern) for _ in range(2))
    assert same(one, other)


@BLENDS
@PATTERNS
def test_other_seed_other_values(merge: str, pattern: list[int]) -> None:
    stream = make_stream(9, 60, group=2)
    runs = [feed(cam(budget=12, merge=merge, seed=seed), stream, pattern) for seed in range(4)]
    values = [to_numpy(x.rows.values[0]) for x in runs]
    assert any(not np.array_equal(values[0], x) for x in values[1:])


@MERGES
@PATTERNS
def test_sequence_of_a_batch_is_as_if_alone(merge: str, pattern: list[int]) -> None:
    stream = make_stream(10, 60, batch=3, group=2)
    transform = cam(budget=12, merge=merge)
    whole = flatten(feed(transform, stream, pattern))[0]
    for row in range(3):
        alone = flatten(feed(transform, stream.rows([row]), pattern))[0]
        assert equal([x[row : row + 1] for x in whole], alone)


def test_equal_heads_draw_apart() -> None:
    keys = np.broadcast_to(tiny_keys([0, 1, 2, 2, 5]), (1, 64, 5, 16))
    stream, transform = one_hot(Stream(keys, keys, None, mx.float32)), cam(budget=4, n_sink=0, recent=1)
    _, _, weights = held_rows(transform, feed(transform, stream, [1] * 5))
    assert 10 < int((to_numpy(weights)[0, :, 2, 3] == 1).sum()) < 45


# Numbers and options


@MERGES
@KINDS
@PATTERNS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_bad_key_spoils_no_other_row(merge: str, group: int | None, bad: float, pattern: list[int]) -> None:
    clean = make_stream(11, 60, batch=2, group=group)
    keys = clean.keys.copy()
    keys[0, :, 9] = bad
    broken = Stream(keys, clean.values, clean.queries, mx.float32)
    transform = cam(budget=12, n_sink=2, merge=merge, merge_gate=False)
    state, other = feed(transform, broken, pattern), feed(transform, clean, pattern)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert mx.isfinite(state.memory).all().item()
    position, held, values = held_rows(transform, state)
    assert mx.isfinite(values).all().item()
    assert mx.isfinite(mx.where((position == 9)[..., None], 0, held)).all().item()


@MERGES
@KINDS
@PATTERNS
def test_bad_value_is_never_folded(merge: str, group: int | None, pattern: list[int]) -> None:
    """Else one bad row would stay for as long as its heirs do."""
    stream = make_stream(12, 60, group=group)
    values = stream.values.copy()
    values[:, :, 9] = math.nan
    transform = cam(budget=12, n_sink=2, merge=merge, merge_gate=False)
    state = feed(transform, Stream(stream.keys, values, stream.queries, mx.float32), pattern)
    position, _, values = held_rows(transform, state)
    assert mx.isfinite(mx.where((position == 9)[..., None], 0, values)).all().item()


@pytest.mark.parametrize("build", [cam, cam_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": "64"}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 5, "recent": 1}, "budget"),
        ({"budget": 20, "recent": 16}, "budget"),
        ({"budget": 10, "protect": [(10, 16)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 0.5}, "n_sink"),
        ({"recent": -1}, "recent"),
        ({"recent": 0.5}, "recent"),
        ({"merge": "average"}, "merge"),
        ({"merge": ""}, "merge"),
        ({"merge": None}, "merge"),
        ({"merge_keys": "yes"}, "merge_keys"),
        ({"merge_keys": 1}, "merge_keys"),
        ({"merge_keys": True, "merge": "window"}, "merge_keys"),
        ({"merge_gate": None}, "merge_gate"),
        ({"merge_gate": 0}, "merge_gate"),
        ({"seed": 1.5}, "seed"),
        ({"seed": None}, "seed"),
        ({"seed": "42"}, "seed"),
        ({"reach": 0}, "reach"),
        ({"reach": -1}, "reach"),
        ({"reach": 2.5}, "reach"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^cam: .*`{field}`.*; got "):
        build(**chosen)


@pytest.mark.filterwarnings("default")
def test_warns_of_blended_keys() -> None:
    """They were rotated by different angles."""
    with pytest.warns(UserWarning, match="merge_keys"):
        cam(merge_keys=True)


@PATTERNS
def test_newest_half_stays_unless_told_otherwise(pattern: list[int]) -> None:
    transform = cam(budget=20)
    for held in held_positions(transform, feed(transform, make_stream(14, 60, group=2), pattern))[0]:
        assert held[:4] == [0, 1, 2, 3] and held[-10:] == list(range(50, 60)) and len(held) == 20


def test_smallest_budget_that_leaves_a_row_free() -> None:
    transform = cam(budget=6, recent=1)
    held = held_positions(transform, feed(transform, make_stream(13, 60, group=2), [40] + [1] * 20))[0]
    assert all(len(rows) == 6 and rows[:4] == [0, 1, 2, 3] and rows[-1] == 59 for rows in held)
