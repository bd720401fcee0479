"""NestedKV: keys that are unusual against a global, a block and a sliding mean stay; single tokens are appended."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import (
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

from vq_functional import QuantizerConfigError, rows
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten
from vq_functional.evict.nestedkv import nestedkv, nestedkv_policy

GROUPS = st.sampled_from([None, 1, 2])  # queries a KV head, which change nothing
KINDS = pytest.mark.parametrize("group", [None, 2], ids=["keys", "queries"])
PRIOR = (0.4, 0.4, 0.2)  # of the global, the block and the sliding mean
NEAR_TIE = 1e-4  # relative: a score is a sum of distances that were stretched to [0, 1]


def stretched(x: list[float]) -> list[float]:
    """Moved and scaled to [0, 1]; zeros where all are equal."""
    span = max(x) - min(x)
    return [(a - min(x)) / span if span > 1e-12 else 0.0 for a in x]


def gap(anomaly: list[float]) -> float:
    """Mean of the top tenth less mean of the bottom tenth."""
    ranked, count = sorted(anomaly), max(round(0.1 * len(anomaly)), 1)
    return sum(ranked[-count:]) / count - sum(ranked[:count]) / count


class NestedKVHead(Head):
    """Anomaly of each key among the rows shown, as if these were contiguous."""

    def __init__(
        self,
        budget: int,
        n_sink: int = 4,
        window: int = 64,
        beta: float = 3.0,
        tau: float = 0.6,
        kappa: float = 10.0,
        protect: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(budget, n_sink, 0, protect)
        self.window, self.beta, self.tau, self.kappa = window, beta, tau, kappa

    def settle(self, shown: list[int], new: list[int], queries: np.ndarray | None) -> None:
        if len(new) == 1:
            self.held = shown
            return
        self.scores = dict(zip(shown, self.anomalies([self.keys[i] for i in shown])))
        self.keep(shown, self.scores)

    def anomalies(self, keys: list[np.ndarray]) -> list[float]:
        """Scores of `keys`, in [0, 1]."""
        keys = [key / max(math.sqrt(float(key @ key)), 1e-12) for key in keys]
        each = [stretched(self.distances(keys, means)) for means in self.means(keys)]
        weights = self.weights(each)
        blend = [sum(w * x for w, x in zip(weights, row)) for row in zip(*each)]
        surprise = stretched([float(np.std(row)) for row in zip(*each)])
        mean = sum(surprise) / len(surprise)
        scores = []
        for row, mixed, u in zip(zip(*each), blend, surprise):
            gate = 1 / (1 + math.exp(-self.kappa * (u - mean - self.tau)))
            scores.append((1 - gate) * mixed + gate * max(row))
        return scores

    def means(self, keys: list[np.ndarray]) -> list[list[np.ndarray]]:
        """For each key: the mean of all keys, of its block, and of the last `window` keys up to it."""
        n = len(keys)
        block = min(max(n // 32, 128), 256, n)
        whole, local, sliding = [], [], []
        for i in range(n):
            start = i // block * block
            whole.append(sum(keys) / n)
            local.append(sum(keys[start : start + block]) / len(keys[start : start + block]))
            recent = keys[max(i + 1 - self.window, 0) : i + 1]
            sliding.append(sum(recent) / len(recent))
        return [whole, local, sliding]

    def distances(self, keys: list[np.ndarray], means: list[np.ndarray]) -> list[float]:
        return [-float(key @ mean) for key, mean in zip(keys, means)]

    def weights(self, each: list[list[float]]) -> list[float]:
        if len(each[0]) <= 1:
            return list(PRIOR)
        raw = [prior * math.exp(self.beta * gap(anomaly)) for prior, anomaly in zip(PRIOR, each)]
        return [x / sum(raw) for x in raw]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    n_sink = draw(st.integers(0, 3))
    return {
        "budget": n_sink + draw(st.integers(1, 16)),
        "n_sink": n_sink,
        "window": draw(st.sampled_from([1, 2, 5, 64])),
        "beta": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "tau": draw(st.sampled_from([-0.2, 0.0, 0.6])),
        "kappa": draw(st.sampled_from([0.0, 3.0, 10.0])),
    }


@given(seeds(), options(), cuts(30), GROUPS, st.integers(1, 2), st.integers(1, 3), st.sampled_from([2, 16, 64]))
def test_rows_by_anomaly(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None, batch: int, heads: int, dim: int
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, batch=batch, heads=heads, dim=dim, value_dim=dim + 1, group=group)
    calls = plain_calls(pattern, batch)
    told, margin = expect(lambda: NestedKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(nestedkv(**chosen), told, stream, calls, capacity=total)


@pytest.mark.parametrize("pattern", [[300], [127, 2], [128], [200, 1, 1, 120]], ids=str)
@pytest.mark.parametrize("window", [3, 64, 500])
@KINDS
def test_prompt_of_several_blocks(pattern: list[int], window: int, group: int | None) -> None:
    """A block is at least 128 keys; the last one may be shorter."""
    total, chosen = sum(pattern), {"budget": 60, "n_sink": 2, "window": window}
    stream, calls = make_stream(0, total, heads=1, dim=32, group=group), plain_calls(pattern, 1)
    told, margin = expect(lambda: NestedKVHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(nestedkv(**chosen), told, stream, calls, capacity=total)


def test_keys_with_a_common_part() -> None:
    """Keys of a model lie around a mean far from zero, that drifts."""
    stream, random = make_stream(1, 260, heads=2, dim=32), np.random.default_rng(2)
    drift = np.cumsum(random.standard_normal((1, 2, 260, 32)), axis=2) * 0.2 + 4 * random.standard_normal((1, 2, 1, 32))
    stream = Stream((stream.keys + drift).astype(np.float32), stream.values, None, mx.float32)
    calls = plain_calls([220, 1, 39], 1)
    told, margin = expect(lambda: NestedKVHead(50), stream, calls)
    assert margin > NEAR_TIE
    compare(nestedkv(budget=50), told, stream, calls, capacity=60)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@KINDS
def test_scores_are_float32_for_half_precision_rows(dtype: mx.Dtype, group: int | None) -> None:
    chosen = {"budget": 20, "n_sink": 2, "window": 8}
    stream, calls = make_stream(2, 90, dim=64, group=group, dtype=dtype), plain_calls([60, 1, 1, 3, 25], 1)
    told, margin = expect(lambda: NestedKVHead(**chosen), stream, calls)
    assert margin > NEAR_TIE
    compare(nestedkv(**chosen), told, stream, calls, capacity=64)


@given(seeds(), options(), st.data(), cuts(30), GROUPS)
def test_protected_spans_stay(
    seed: int, chosen: dict[str, Any], data: st.DataObject, pattern: list[int], group: int | None
) -> None:
    protect = data.draw(spans(5, first=chosen["n_sink"]))
    chosen = chosen | {"budget": chosen["budget"] + sum(end - start for start, end in protect)}
    total = sum(pattern)
    stream, calls = make_stream(seed, total, group=group), plain_calls(pattern, 1)
    told, margin = expect(lambda: NestedKVHead(**chosen, protect=protect), stream, calls)
    assume(margin > NEAR_TIE)
    compare(nestedkv(**chosen, protect=protect), told, stream, calls, capacity=total)
    seen = {i for start, end in protect for i in range(start, end) if i < total}
    assert all(seen <= set(head.held) for head in told[-1].values())


@given(seeds(), options(), right_padded(2, longest=14), GROUPS)
def test_right_padding_is_no_row(seed: int, chosen: dict[str, Any], calls: list[Call], group: int | None) -> None:
    stream = make_stream(seed, 90, batch=2, group=group)
    told, margin = expect(lambda: NestedKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(nestedkv(**chosen), told, stream, calls, capacity=90)


@given(seeds(), options(), st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts(12), GROUPS)
def test_left_padding_is_no_row(
    seed: int, chosen: dict[str, Any], padding: tuple[int, int], pattern: list[int], group: int | None
) -> None:
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(seed, sum(pattern) + 7, batch=2, group=group)
    told, margin = expect(lambda: NestedKVHead(**chosen), stream, calls)
    assume(margin > NEAR_TIE)
    compare(nestedkv(**chosen), told, stream, calls, capacity=80)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padded_prompts_of_several_blocks(left: bool) -> None:
    """Lengths on either side of a block's edge, so that block and tenth differ between the sequences."""
    stream, chosen = make_stream(3, 270, batch=2, heads=1, dim=16), {"budget": 40, "n_sink": 2, "window": 20}
    calls = left_padded_calls([270, 1], (0, 145)) if left else [Call(270, (270, 125))]
    told, margin = expect(lambda: NestedKVHead(**chosen), make_longer(stream), calls)
    assert margin > NEAR_TIE
    compare(nestedkv(**chosen), told, make_longer(stream), calls, capacity=60)


def make_longer(stream: Stream) -> Stream:
    """The stream with its first token again at the end."""
    longer = [np.concatenate([x, x[:, :, :1]], axis=2) for x in (stream.keys, stream.values)]
    return Stream(*longer, None, stream.dtype)


# What the score is


def kept(keys: np.ndarray, **chosen: Any) -> list[int]:
    """Positions that stay of one head's prompt `keys` [S, D]."""
    keys = mx.array(keys.astype(np.float32))[None, None]
    transform = nestedkv(**chosen)
    stream = Stream(to_numpy(keys), to_numpy(keys), None, mx.float32)
    return held_positions(transform, feed(transform, stream, [keys.shape[2]]))[0][0]


def three(keys: np.ndarray, window: int) -> np.ndarray:
    """Anomalies [3, S] of `keys` [S, D] against the three means."""
    unit, n = keys / np.linalg.norm(keys, axis=-1, keepdims=True), len(keys)
    block = min(max(n // 32, 128), 256, n)
    near = np.concatenate([np.tile(unit[i : i + block].mean(axis=0), (block, 1)) for i in range(0, n, block)])[:n]
    sliding = np.stack([unit[max(i + 1 - window, 0) : i + 1].mean(axis=0) for i in range(n)])
    each = np.stack([-(unit * mean).sum(axis=-1) for mean in (unit.mean(axis=0), near, sliding)])
    low, high = each.min(axis=-1, keepdims=True), each.max(axis=-1, keepdims=True)
    return (each - low) / (high - low)


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(np.argsort(-scores)[:count].tolist())


def blended(each: np.ndarray, beta: float, tenth: int = 10) -> np.ndarray:
    """Weighted mean [S] of anomalies [3, S], by how far the `tenth` highest and lowest lie apart."""
    ranked = np.sort(each, axis=-1)
    gaps = ranked[:, -tenth:].mean(axis=-1) - ranked[:, :tenth].mean(axis=-1)
    weights = np.array(PRIOR) * np.exp(beta * gaps)
    return weights @ each / weights.sum()


KEYS = make_stream(4, 100, heads=1, dim=16).keys[0, 0].astype(np.float64)


@pytest.mark.parametrize("beta", [0.0, 3.0])
@pytest.mark.parametrize(
    ("tau", "kappa", "share"), [(1e6, 10.0, 0.0), (-1e6, 10.0, 1.0), (0.6, 0.0, 0.5)], ids=["blend", "max", "half"]
)
def test_gate_goes_from_the_blend_to_the_maximum(tau: float, kappa: float, share: float, beta: float) -> None:
    each = three(KEYS, 8)
    scores = (1 - share) * blended(each, beta) + share * each.max(axis=0)
    assert kept(KEYS, budget=20, n_sink=0, window=8, tau=tau, kappa=kappa, beta=beta) == best(scores, 20)


def test_without_beta_the_weights_are_the_prior() -> None:
    scores = np.array(PRIOR) @ three(KEYS, 8)
    assert kept(KEYS, budget=20, n_sink=0, window=8, tau=1e6, beta=0.0) == best(scores, 20)


@pytest.mark.parametrize(
    ("n", "seed", "tenth", "other"),
    [(14, 1, 1, 2), (15, 1, 2, 1), (16, 1, 2, 1), (24, 8, 2, 3), (25, 52, 2, 3), (35, 10, 4, 3)],
)
def test_tenth_is_rounded_half_to_even(n: int, seed: int, tenth: int, other: int) -> None:
    """Keys for which another count would keep other rows."""
    keys = make_stream(seed, 100, heads=1, dim=16).keys[0, 0, :n].astype(np.float64)
    each = three(keys, 4)
    got = kept(keys, budget=8, n_sink=0, window=4, tau=1e6, beta=20.0)
    assert got == best(blended(each, 20.0, tenth), 8) != best(blended(each, 20.0, other), 8)


@pytest.mark.parametrize("n", [4500, 9000])
def test_block_grows_with_the_prompt(n: int) -> None:
    """A 32nd of it, at most 256."""
    keys = make_stream(5, n, heads=1, dim=8).keys[0, 0].astype(np.float64)
    scores = np.array(PRIOR) @ three(keys, 64)
    assert kept(keys, budget=60, n_sink=0, tau=1e6, beta=0.0) == best(scores, 60)


def test_one_key_against_the_crowd_stays() -> None:
    keys = np.ones((64, 16)) + 0.1 * KEYS[:64]
    keys[40] *= -1
    assert 40 in kept(keys, budget=2, n_sink=1)


@given(seeds(), options(), GROUPS)
def test_lengths_of_keys_change_nothing(seed: int, chosen: dict[str, Any], group: int | None) -> None:
    """Powers of two, so that the directions are the same to the last bit."""
    stream = make_stream(seed, 70, group=group)
    factor = 2.0 ** np.random.default_rng(seed).integers(-8, 9, (1, 2, 70, 1))
    scaled = Stream((stream.keys * factor).astype(np.float32), stream.values, stream.queries, mx.float32)
    _, margin = expect(lambda: NestedKVHead(**chosen), stream, plain_calls([70], 1))
    assume(margin > NEAR_TIE)
    transform = nestedkv(**chosen)
    assert held_positions(transform, feed(transform, scaled, [70])) == held_positions(
        transform, feed(transform, stream, [70])
    )


@given(seeds(), options())
def test_rotating_all_keys_alike_changes_nothing(seed: int, chosen: dict[str, Any]) -> None:
    stream = make_stream(seed, 70)
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((16, 16)))[0]
    turned = Stream((stream.keys @ turn).astype(np.float32), stream.values, None, mx.float32)
    _, margin = expect(lambda: NestedKVHead(**chosen), stream, plain_calls([70], 1))
    assume(margin > NEAR_TIE)
    transform = nestedkv(**chosen)
    assert held_positions(transform, feed(transform, turned, [70])) == held_positions(
        transform, feed(transform, stream, [70])
    )


@pytest.mark.parametrize("key", [0.0, 1.0, 3.3])
@pytest.mark.parametrize("total", [40, 200])
def test_of_equal_keys_the_later_ones_stay(total: int, key: float) -> None:
    """Whatever rounding makes of their distances to the means."""
    keys = np.full((total, 16), key)
    assert kept(keys, budget=10, n_sink=3) == [0, 1, 2, *range(total - 7, total)]


@given(seeds(), options(), cuts(30), GROUPS)
def test_queries_and_safeguard_have_no_say(
    seed: int, chosen: dict[str, Any], pattern: list[int], group: int | None
) -> None:
    total = sum(pattern)
    stream = make_stream(seed, total, group=group)
    alone = Stream(stream.keys, stream.values, None, mx.float32)
    states = [
        feed(nestedkv(**chosen), stream, pattern, total),
        feed(nestedkv(**chosen), alone, pattern, total),
        feed(nestedkv(**chosen, safeguard_alpha=1.0), stream, pattern, total),
    ]
    assert same(states[0], states[1]) and same(states[0], states[2])


# Budget and calls


@given(options(), cuts(30))
def test_budget_caps_prompts_and_single_tokens_come_on_top(chosen: dict[str, Any], pattern: list[int]) -> None:
    transform, total = nestedkv(**chosen), sum(pattern)
    stream = make_stream(5, total, batch=2)
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


@pytest.mark.parametrize("total", [1, 2, 3, 31, 32, 33, 127, 129])
def test_prompt_within_the_budget_is_a_plain_cache(total: int) -> None:
    stream, transform, plain = make_stream(6, total), nestedkv(), rows()
    position, *held = held_rows(transform, feed(transform, stream, [total], capacity=total))
    assert position.tolist() == [[list(range(total))] * 2]
    assert equal(held, plain.read(feed(plain, stream, [total], capacity=total)))


@given(seeds(), options(), st.integers(1, 20), st.integers(2, 30))
def test_cut_before_any_eviction_changes_nothing(seed: int, chosen: dict[str, Any], first: int, second: int) -> None:
    chosen, total = chosen | {"budget": max(chosen["budget"], first)}, first + second
    transform, stream = nestedkv(**chosen), make_stream(seed, total)
    held = [held_rows(transform, feed(transform, stream, how)) for how in ([first, second], [total])]
    assert equal(*held)


def test_decoded_rows_are_selected_from_like_any_others() -> None:
    """By the prompt of a later turn."""
    stream, calls = make_stream(7, 110), plain_calls([50] + [1] * 20 + [40], 1)
    told, margin = expect(lambda: NestedKVHead(14, 2, 8), stream, calls)
    assert margin > NEAR_TIE
    transform = nestedkv(budget=14, n_sink=2, window=8)
    compare(transform, told, stream, calls, capacity=40)
    assert [
        len(held) for held in held_positions(transform, feed(transform, stream, [50] + [1] * 20 + [40], 40))[0]
    ] == [14] * 2


def test_decode_tail_grows_past_the_budget() -> None:
    transform, stream = nestedkv(budget=16), make_stream(8, 124)
    state, fill = feed(transform, stream, [64], capacity=60), transform.settled(Fill(64, 64), 64)
    prompt = held_positions(transform, state)[0]
    assert [len(held) for held in prompt] == [16, 16] and fill.rows == 16 and transform.policy.prompt_only
    state = resume(transform, state, stream, [1] * 44, 64)
    assert transform.overflows(state, 1).all().item()
    state = resume(transform, transform.grow(state, 76), stream, [1] * 16, 108)
    assert held_positions(transform, state) == [[held + list(range(64, 124)) for held in prompt]]


# Numbers and options


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("pattern", [[60], [1] * 60, [25, 1, 34]], ids=["once", "decode", "chunks"])
def test_bad_key_harms_no_other_sequence(bad: float, pattern: list[int]) -> None:
    clean = make_stream(9, 60, batch=2)
    keys = clean.keys.copy()
    keys[0, :, 9] = bad
    transform, broken = nestedkv(budget=20, n_sink=2), Stream(keys, clean.values, None, mx.float32)
    state, other = feed(transform, broken, pattern, 60), feed(transform, clean, pattern, 60)
    assert equal(*([x[1:] for x in flatten(s)[0]] for s in (state, other)))
    assert all(mx.isfinite(memory).all().item() for memory in flatten(state.memory)[0])
    for held, good in zip(held_positions(transform, state)[0], held_positions(transform, other)[0]):
        assert held[:2] == [0, 1] and len(held) == len(good)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30], ids=str)
def test_bad_key_leaves_the_choice_among_the_others_to_their_scores(bad: float) -> None:
    """Without the bad row's part in the means, unusual rows still stay."""
    keys = np.ones((64, 16)) + 0.05 * KEYS[:64]
    keys[[20, 45]] *= -1
    keys[9] = bad
    assert {20, 45} <= set(kept(keys, budget=8, n_sink=1))


@pytest.mark.parametrize("build", [nestedkv, nestedkv_policy])
@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -1}, "budget"),
        ({"budget": 8.0}, "budget"),
        ({"budget": None}, "budget"),
        ({"budget": 4}, "budget"),
        ({"budget": 3, "n_sink": 4}, "budget"),
        ({"budget": 10, "protect": [(10, 16)]}, "budget"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": "4"}, "n_sink"),
        ({"window": 0}, "window"),
        ({"window": -2}, "window"),
        ({"window": 1.5}, "window"),
        ({"beta": -0.1}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"beta": None}, "beta"),
        ({"tau": math.inf}, "tau"),
        ({"tau": -math.inf}, "tau"),
        ({"tau": math.nan}, "tau"),
        ({"tau": "high"}, "tau"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": math.nan}, "kappa"),
        ({"safeguard_alpha": -0.1}, "safeguard_alpha"),
        ({"safeguard_alpha": 1.1}, "safeguard_alpha"),
        ({"safeguard_alpha": math.nan}, "safeguard_alpha"),
        ({"safeguard_alpha": None}, "safeguard_alpha"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^nestedkv: .*`{field}`.*; got "):
        build(**chosen)


@pytest.mark.parametrize("chosen", [{"beta": 0.0}, {"kappa": 0.0}, {"safeguard_alpha": 0.0}, {"safeguard_alpha": 1}])
def test_takes_the_ends_of_the_ranges(chosen: dict[str, Any]) -> None:
    transform = nestedkv(budget=10, **chosen)
    assert len(held_positions(transform, feed(transform, make_stream(10, 40), [40]))[0][0]) == 10
