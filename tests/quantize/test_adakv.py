"""AdaKV against loops over units in numpy: widths, rankings, codes, queries, trims, bytes and attention."""

import itertools
import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kitty import quantized
from test_kivi import UNIT_ROUNDING, dtypes, feed, feed_more, numbers, rows_in_order
from test_kivi_sink import LIMIT, bits_of, same

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten
from vq_functional.quantize.adakv import AdaKVOptions
from vq_functional.quantize.head_importance import row_entropy

HEADS = 4
SMALL = {"group_size": 8, "residual_length": 5}  # blocks of 32
importances = pytest.mark.parametrize("importance", ["norm_variance", "attention_entropy"])


def draw(n: int, dim: int, seed: int = 0, heads: int = HEADS, dtype: mx.Dtype = mx.float16, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


def uneven(x: mx.array, *spread: float) -> mx.array:
    """`x` with lengths that vary along the rows, by `spread` in each head."""
    size = 1 + mx.array(spread)[:, None, None] * mx.random.uniform(shape=(x.shape[2], 1), key=mx.random.key(1))
    return (x * size).astype(x.dtype)


def places(transform: Any, state: Any, row: int = 0) -> list[list[int]]:
    """The heads of each unit in blocks, the least important first, or the one order of all."""
    if state.keys.tables:
        return [state.keys.tables[0][row].tolist()]
    return state.keys.rows[-1][row, :, : state.coded[row].item() // transform.block].T.tolist()


def live(transform: Any, state: Any, row: int = 0) -> tuple[mx.array, ...]:
    """What a state holds of one batch row, without unused room."""
    coded, offset = state.coded[row].item(), state.offset[row].item()
    return (
        *(x[row, :, : coded // transform.block] for x in state.keys.rows),
        *(x[row] for x in state.keys.tables if coded),
        *(x[row, :, :coded] for x in flatten(state.values.rows)[0]),
        *(x[row, :, : offset - coded] for x in flatten(state.recent)[0]),
        *((x[row] for x in flatten(state.sinks)[0]) if coded else ()),
    )


# The oracle


def widths_of(heads: int, target: float, allowed: Sequence[int]) -> list[int]:
    """Bits of the heads, the least important first."""
    mean, allowed = Fraction(str(target)), sorted(set(allowed))
    centred = [Fraction(2 * rank - heads + 1, 2 * max(heads - 1, 1)) for rank in range(heads)]
    stretch = min((allowed[-1] - mean) / centred[-1], (mean - allowed[0]) / -centred[0]) if heads > 1 else 0
    real = [mean + stretch * z for z in centred]
    bits = [min(allowed, key=lambda width: (abs(width - want), width)) for want in real]
    while True:
        missing = heads * mean - sum(bits)
        step = 1 if missing > 0 else -1
        moves = []
        for rank, at in enumerate(allowed.index(width) + step for width in bits):
            if 0 <= at < len(allowed) and abs(missing - allowed[at] + bits[rank]) < abs(missing):
                moves.append((abs(real[rank] - allowed[at]), -step * rank, rank, allowed[at]))
        if not moves:
            return bits
        *_, rank, width = min(moves)
        bits[rank] = width


def entropy_of(query: np.ndarray, seen: np.ndarray) -> float:
    """Entropy of the attention of one row to `seen` [i + 1, D], as a share of the largest possible."""
    if len(seen) == 1:
        return 1.0
    scores = seen[np.isfinite(seen).all(axis=-1)].astype(np.float64) @ query.astype(np.float64) / math.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    weights = weights[weights > 0] / weights.sum()
    return -(weights * np.log(weights)).sum() / math.log(len(seen))


def importance_of(o: AdaKVOptions, keys: np.ndarray, queries: list[np.ndarray]) -> float:
    """Importance of a head from the rows of a unit [R, D]; `queries` are those of each row, [queries, D] each."""
    if o.importance == "norm_variance":
        size = np.linalg.norm(keys.astype(np.float64), axis=-1)
        return size[np.isfinite(size)].var()
    newest = range(max(0, len(keys) - o.obs_window), len(keys))
    finite = [i for i in newest if np.isfinite(queries[i]).all()]
    return float(np.mean([np.mean([entropy_of(q, keys[: i + 1]) for q in queries[i]]) for i in finite]))


def unit_of(o: AdaKVOptions) -> int:
    aligned = (32 // math.gcd(32, bits) for bits in (o.lo_bit, o.mid_bit, o.hi_bit))
    return math.lcm(o.group_size, *aligned) * max(o.update_interval, 1)


def residual_of(o: AdaKVOptions) -> int:
    return o.group_size if o.residual_length is None else o.residual_length


def orders_of(o: AdaKVOptions, k: np.ndarray, asked: list[list[np.ndarray]] | None = None) -> list[list[int]]:
    """`places` for keys [H, S, D]; `asked` are the queries of each head and row, the keys if None."""
    asked = [[key[None] for key in head] for head in k] if asked is None else asked
    unit = unit_of(o)
    orders = []
    for start in range(0, max(0, k.shape[1] - residual_of(o)) // unit * unit, unit):
        span = slice(start, start + unit)
        score = [importance_of(o, k[head, span], asked[head][span]) for head in range(len(k))]
        orders.append(sorted(range(len(k)), key=lambda head: (score[head], head)))
    return orders if o.update_interval else orders[:1]


def assert_codes_equal_oracle(o: AdaKVOptions, transform: Any, state: Any, k: np.ndarray, dtype: mx.Dtype) -> None:
    unit, orders = unit_of(o), places(transform, state)
    scales, zeros, *packed = (x[0] for x in state.keys.rows)
    widths = widths_of(len(k), o.target_avg_bits, (o.lo_bit, o.mid_bit, o.hi_bit))
    stacks = [bits_of(x, bits, unit) for x, bits in zip(packed, sorted(set(widths)))]
    stacked = np.concatenate(stacks)  # [places, units, D, unit]
    for u, place in itertools.product(range(state.coded.item() // unit), range(len(k))):
        head = orders[u if o.update_interval else 0][place]
        for channel, i in itertools.product(range(k.shape[2]), range(unit // o.group_size)):
            rows = slice(i * o.group_size, (i + 1) * o.group_size)
            tokens = np.arange(u * unit, (u + 1) * unit)[rows]
            codes, scale, zero = quantized(k[head, tokens, channel], widths[place], dtype, tokens < o.n_sink)
            assert (scales[place, u, channel, i].item(), zeros[place, u, channel, i].item()) == (scale, zero)
            assert np.array_equal(stacked[place, u, channel, rows], codes)


# Widths


def stack_widths(heads: int, target: float, *allowed: int) -> list[int]:
    """Bits of the heads in stored order, from the shapes of an empty state."""
    lo, mid, hi = allowed
    transform = vq.adakv(target_avg_bits=target, lo_bit=lo, mid_bit=mid, hi_bit=hi)
    spec = vq.KVSpec(kv_heads=heads, key_dim=1, value_dim=1, capacity=transform.block)
    _, _, *stacks, _ = transform.init_state(spec).keys.rows
    return [x.shape[-1] * 32 // transform.block for x in stacks for _ in range(x.shape[1])]


@pytest.mark.parametrize(
    "heads, target, allowed, want",
    [
        *((8, 2.5, (2, 3, 4), "22223333"), (8, 3.0, (2, 3, 4), "22333344"), (4, 2.5, (2, 3, 4), "2233")),
        *((8, 3.0, (2, 2, 4), "22224444"), (8, 3.0, (2, 4, 4), "22224444"), (2, 3.0, (2, 3, 4), "24")),
        *((8, 2.25, (2, 3, 4), "22222233"), (16, 2.5, (2, 3, 4), "2222222233333333"), (5, 2.5, (2, 3, 4), "22233")),
        *((4, 2.75, (2, 3, 4), "2234"), (4, 2.25, (1, 2, 3), "1233"), (4, 3.5, (2, 4, 6), "2246")),
        *((1, 2.75, (2, 3, 4), "3"), (1, 2.25, (2, 3, 4), "2"), (1, 3.4, (2, 3, 8), "3"), (1, 3, (2, 3, 4), "3")),
    ],
)
def test_how_many_heads_get_which_width(heads: int, target: float, allowed: tuple[int, ...], want: str) -> None:
    assert stack_widths(heads, target, *allowed) == [int(bits) for bits in want] == widths_of(heads, target, allowed)


@given(heads=st.integers(1, 40), data=st.data())
@settings(max_examples=25)
def test_widths_are_allowed_rise_and_keep_the_budget(heads: int, data: st.DataObject) -> None:
    lo, mid, hi = sorted(
        data.draw(st.lists(st.integers(1, 8), min_size=3, max_size=3).filter(lambda x: len(set(x)) > 1))
    )
    target = data.draw(st.integers(lo * 20 + 1, hi * 20 - 1)) / 20
    bits = stack_widths(heads, target, lo, mid, hi)
    gap = max(b - a for a, b in itertools.pairwise(sorted({lo, mid, hi})))
    assert set(bits) <= {lo, mid, hi} and bits == sorted(bits) and bits == widths_of(heads, target, (lo, mid, hi))
    assert abs(sum(bits) - heads * target) <= gap / 2 + 1e-9


@pytest.mark.parametrize("target, widths", [(2, (2, 3, 4)), (4, (2, 3, 4)), (4.0, (2, 3, 4)), (3, (3, 3, 3))])
def test_at_an_end_keys_are_those_of_kivi_and_a_warning_says_so(target: float, widths: tuple[int, ...]) -> None:
    lo, mid, hi = widths
    with pytest.warns(UserWarning, match="adakv") as told:
        transform = vq.adakv(target_avg_bits=target, lo_bit=lo, mid_bit=mid, hi_bit=hi, residual_length=9)
        keys, values = draw(80, 8), draw(80, 40, seed=1)
        got = feed(transform, keys, values, [50, 1])
    assert len(told) == 1
    want = feed(vq.kivi(bits=int(target), residual_length=9), keys, values)
    assert got.coded.item() == want.coded.item() == 64
    words = [int(2 * target), 2, 2]  # of two groups
    assert all(mx.array_equal(a[..., :i], b[..., :i]) for i, a, b in zip(words, got.keys.rows, want.keys.rows))


def test_between_the_ends_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in (2.01, 2.5, 3, 3.99):
            vq.adakv(target_avg_bits=target)


# Rankings and codes


@importances
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "heads, options",
    [
        (4, {"group_size": 8}),
        (3, {"target_avg_bits": 3, "update_interval": 2, "obs_window": 40}),
        (5, {"target_avg_bits": 4.6, "lo_bit": 1, "mid_bit": 4, "hi_bit": 8, "group_size": 16, "obs_window": 1}),
        (2, {"target_avg_bits": 3, "mid_bit": 2, "group_size": 12, "update_interval": 0, "obs_window": 1000}),
    ],
    ids=str,
)
def test_rankings_and_codes_equal_the_oracle(
    heads: int, options: dict[str, Any], dtype: mx.Dtype, importance: str
) -> None:
    options = options | {"importance": importance, "residual_length": 7}
    o, transform = AdaKVOptions(**options), vq.adakv(**options)
    n = 7 + 2 * unit_of(o) + 3
    keys, values = draw(n, 6, heads, heads, dtype), draw(n, 5, 1, heads, dtype)
    state = feed(transform, keys, values, [n - 40, *[1] * 40])
    k, coded = numbers(keys)[0], 2 * unit_of(o)
    assert transform.block == unit_of(o) and state.coded.item() == coded
    assert places(transform, state) == orders_of(o, k)
    assert_codes_equal_oracle(o, transform, state, k, dtype)
    held_keys, held_values = rows_in_order(transform, state)
    assert np.array_equal(held_values, numbers(values)[0]) and np.array_equal(held_keys[:, coded:], k[:, coded:])


def test_sinks_stay_exact_and_out_of_the_range_of_their_groups() -> None:
    options = {**SMALL, "n_sink": 3}
    transform, keys, values = vq.adakv(**options), draw(80, 6), draw(80, 5, seed=1)
    keys[:, :, :3] = keys[:, :, :3] * 500
    state = feed(transform, keys, values)
    k = numbers(keys)[0]
    assert_codes_equal_oracle(AdaKVOptions(**options), transform, state, k, mx.float16)
    assert np.array_equal(rows_in_order(transform, state)[0][:, :3], k[:, :3])


def test_values_with_bits_are_those_of_kivi() -> None:
    keys, values = draw(80, 8), draw(80, 40, seed=1)
    got = feed(vq.adakv(value_bits=3, residual_length=9), keys, values)
    want = feed(vq.kivi(bits=3, group_size=32, residual_length=9), keys, values)
    assert got.coded.item() == 64
    assert all(
        mx.array_equal(a[:, :, :64], b[:, :, :64]) for a, b in zip(got.values.rows, want.values.rows, strict=True)
    )


@importances
def test_of_equal_heads_the_first_matter_less(importance: str) -> None:
    transform, x = vq.adakv(**SMALL, importance=importance), mx.repeat(draw(80, 8, heads=1), 5, axis=1)
    state = feed(transform, x, x)
    assert places(transform, state) == [[0, 1, 2, 3, 4]] * 2 and state.keys.rows[-1].dtype == mx.uint8


@importances
@pytest.mark.parametrize("interval", [0, 1])
def test_heads_in_another_order_have_the_same_bits(interval: int, importance: str) -> None:
    transform = vq.adakv(**SMALL, update_interval=interval, importance=importance, target_avg_bits=3)
    keys, values, order = draw(80, 8), draw(80, 8, seed=1), [2, 0, 3, 1]
    one, two = feed(transform, keys, values), feed(transform, keys[:, order], values[:, order])
    assert [[order[head] for head in unit] for unit in places(transform, two)] == places(transform, one)
    assert all(mx.array_equal(a, b) for a, b in zip(one.keys.rows[:5], two.keys.rows[:5], strict=True))
    got, want = rows_in_order(transform, two)[0], rows_in_order(transform, one)[0]
    assert np.array_equal(got, want[order]) and not np.array_equal(want, numbers(keys)[0])


@pytest.mark.parametrize("factor", [1e-25, 1e-4, 1e3, 1e30])
def test_only_the_order_of_the_heads_matters(factor: float) -> None:
    transform, keys = vq.adakv(**SMALL), draw(80, 8, dtype=mx.float32)
    one, two = (feed(transform, x, keys) for x in (keys, keys * factor))
    assert places(transform, one) == places(transform, two) == orders_of(AdaKVOptions(**SMALL), numbers(keys)[0])


def test_a_ranking_is_found_once_or_for_every_unit() -> None:
    calm, late = uneven(draw(32, 8), 0, 9, 3, 1), uneven(draw(48, 8, seed=2), 9, 0, 1, 3)
    keys = mx.concatenate([calm, late], axis=2)
    for interval, want in ((0, [[0, 3, 2, 1]]), (1, [[0, 3, 2, 1], [1, 2, 3, 0]])):
        transform = vq.adakv(**SMALL, update_interval=interval)
        state = feed(transform, keys, keys, [33, 20])
        assert places(transform, state) == want
        key, _ = transform.sides(state.layout)
        bits = key.coder.bits((*key.first(state.keys.rows, 64), *state.keys.tables))[0].T.tolist()
        assert bits == [[2 if unit.index(head) < 2 else 3 for head in range(HEADS)] for unit in want]


# Attention as importance


def test_entropy_goes_from_one_row_to_all_alike() -> None:
    keys = mx.random.normal((HEADS, 64, 8), key=mx.random.key(0))
    some = np.array(row_entropy(mx.random.normal((HEADS, 20, 8)), keys))
    assert some.shape == (HEADS, 20) and (some > 0.05).all() and (some < 1).all()
    alike = mx.broadcast_to(keys[:, :1], keys.shape)
    assert np.abs(np.array(row_entropy(keys, alike)) - 1).max() < 1e-4
    huge = mx.where((mx.arange(64) == 5)[:, None], 100, 0.01 * keys)
    assert (np.array(row_entropy(mx.ones((HEADS, 20, 8)), huge)) < 0.05).all()
    assert np.array(row_entropy(keys, keys))[:, 0].tolist() == [1.0] * HEADS


@given(data=st.data(), interval=st.integers(0, 2), window=st.sampled_from([1, 20, 32]))
@settings(max_examples=10)
def test_real_queries_count_where_they_come(data: st.DataObject, interval: int, window: int) -> None:
    """Keys stand in for the queries of the other calls."""
    options = {**SMALL, "update_interval": interval, "importance": "attention_entropy", "obs_window": window}
    transform, n = vq.adakv(**options), 5 + 2 * 32 * max(interval, 1)
    keys, values, queries = draw(n, 8), draw(n, 8, seed=1), 2 * draw(n, 8, seed=2, heads=3 * HEADS)
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))
    state = transform.init_state(vq.KVSpec(kv_heads=HEADS, key_dim=8, value_dim=8, capacity=n))
    asked = [[key[None] for key in head] for head in numbers(keys)[0]]
    for start, end in itertools.pairwise([0, *edges, n]):
        rows, come = slice(start, end), data.draw(st.booleans())
        now = queries[:, :, rows] if come else None
        state, *_ = transform.update(state, keys[:, :, rows], values[:, :, rows], now)
        for head, i in itertools.product(range(HEADS), range(start, end) if come else ()):
            asked[head][i] = numbers(queries)[0, 3 * head : 3 * head + 3, i]
    assert places(transform, state) == orders_of(AdaKVOptions(**options), numbers(keys)[0], asked)


def test_queries_of_padded_rows_are_their_own() -> None:
    options = {**SMALL, "importance": "attention_entropy"}
    transform, padding = vq.adakv(**options), [0, 3, 11]
    keys, values, queries = draw(80, 8, batch=3), draw(80, 8, seed=1, batch=3), 2 * draw(80, 8, 2, 2 * HEADS, batch=3)
    spec = vq.KVSpec(batch=3, kv_heads=HEADS, key_dim=8, value_dim=8, capacity=80)
    state = transform.init_state(spec, mx.array(padding))
    for rows in (slice(0, 20), slice(20, 70), slice(70, 80)):
        state, *_ = transform.update(state, keys[:, :, rows], values[:, :, rows], queries[:, :, rows])
    for row, pad in enumerate(padding):
        k, q = numbers(keys)[row, :, pad:], numbers(queries)[row, :, pad:]
        asked = [[q[2 * head : 2 * head + 2, i] for i in range(k.shape[1])] for head in range(HEADS)]
        assert places(transform, state, row) == orders_of(AdaKVOptions(**options), k, asked)


# Errors


@dtypes
@pytest.mark.parametrize("group", [16, 32])
def test_error_is_half_a_step_at_the_width_of_the_head(group: int, dtype: mx.Dtype) -> None:
    transform, x = vq.adakv(target_avg_bits=3, group_size=group, residual_length=0), draw(64, 16, dtype=dtype)
    state = feed(transform, x, x)
    got, want = rows_in_order(transform, state)[0], numbers(x)[0]
    for u, order in enumerate(places(transform, state)):
        for head, bits in zip(order, widths_of(HEADS, 3, (2, 3, 4))):
            rows = slice(u * transform.block, (u + 1) * transform.block)
            grouped = want[head, rows].reshape(-1, group, 16)
            step = np.repeat(np.ptp(grouped, axis=1) / (2**bits - 1), group, axis=0)
            rounding = UNIT_ROUNDING[dtype] * (np.abs(want[head, rows]) + 2**bits * step)
            error = np.abs(got[head, rows] - want[head, rows])
            assert (error <= step / 2 * (1 + 1e-3) + rounding + 1e-6).all() and error.max() > step.max() / 4


def test_unequal_heads_have_less_error_than_at_one_width() -> None:
    keys = (draw(64, 32) * mx.array([1, 8, 2, 4])[:, None, None]).astype(mx.float16)
    one, all_alike = (
        np.square(rows_in_order(f, feed(f, keys, keys))[0] - numbers(keys)[0]).sum()
        for f in (vq.adakv(target_avg_bits=3, residual_length=0), vq.kivi(bits=3, residual_length=0))
    )
    assert one < 0.6 * all_alike


@pytest.mark.parametrize("importance, rows", [("norm_variance", slice(2, 22)), ("attention_entropy", slice(26, 30))])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_enters_neither_range_nor_importance(
    bad: float, importance: str, rows: slice
) -> None:
    options = {**SMALL, "importance": importance, "obs_window": 8}
    transform, size = vq.adakv(**options), mx.array([0.6, 0.5, 0.2, 1])[:, None, None]
    keys = uneven(draw(80, 8) * size, 3, 3, 1, 6).astype(mx.float16)
    keys[:, 0, rows, 3] = keys[:, 2, 60:63, 1] = bad
    state = feed(transform, keys, keys)
    assert_codes_equal_oracle(AdaKVOptions(**options), transform, state, numbers(keys)[0], mx.float16)
    assert np.isfinite(rows_in_order(transform, state)[0][:, :64]).all()
    assert places(transform, state) == orders_of(AdaKVOptions(**options), numbers(keys)[0])


def test_a_range_past_half_precision_stays_finite_and_ranked() -> None:
    x = np.random.default_rng(0).uniform(-65504, 65504, (1, HEADS, 64, 8)).astype(np.float16)
    x[:, :, ::8], x[:, :, 1::8] = -65504, 65504
    transform = vq.adakv(**SMALL | {"residual_length": 0})
    state = feed(transform, mx.array(x), mx.array(x))
    got = rows_in_order(transform, state)[0]
    assert np.abs(got - x[0].astype(np.float32)).max() <= 65504 / 3 * (1 + 1e-3) + 16
    assert places(transform, state) == orders_of(
        AdaKVOptions(**SMALL | {"residual_length": 0}), x[0].astype(np.float32)
    )


# How the rows came


@importances
@given(data=st.data(), interval=st.integers(0, 2), more=st.sampled_from([{}, {"value_bits": 2}, {"n_sink": 3}]))
@settings(max_examples=10)
def test_how_a_prompt_was_cut_leaves_no_trace(
    data: st.DataObject, interval: int, more: dict[str, int], importance: str
) -> None:
    transform = vq.adakv(**SMALL, **more, update_interval=interval, importance=importance)
    n = data.draw(st.integers(2, 150))
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=5)))
    cuts = [b - a for a, b in itertools.pairwise([0, *edges, n])]
    keys, values = draw(n, 8), draw(n, 24, seed=1)
    cut, whole = feed(transform, keys, values, cuts), feed(transform, keys, values)
    assert same(live(transform, cut), live(transform, whole))


@importances
@pytest.mark.parametrize("interval", [0, 1])
def test_batch_rows_and_padding_stand_alone(interval: int, importance: str) -> None:
    transform, padding = vq.adakv(**SMALL, update_interval=interval, importance=importance), [0, 5, 13]
    keys, values = draw(90, 8, batch=3), draw(90, 8, seed=1, batch=3)
    for row, pad in enumerate(padding):
        keys[row, :, :pad], values[row, :, :pad] = math.nan, 1000
    state = feed(transform, keys, values, [40, 1, 30], left_padding=mx.array(padding))
    for row, pad in enumerate(padding):
        alone = feed(transform, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert alone.coded.item() == 64 and same(live(transform, state, row), live(transform, alone))


@importances
@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("x", [1, 15, 20, 45, 60, 80])
def test_trim_reads_as_before(x: int, interval: int, importance: str) -> None:
    transform = vq.adakv(**SMALL, update_interval=interval, importance=importance)
    keys, values = uneven(draw(80, 8), 0, 9, 3, 1), draw(80, 8, seed=1)
    whole = feed(transform, keys, values)
    short = transform.trim(whole, x)
    assert short.offset.item() == 80 - x and short.coded.item() == min(64, (80 - x) // 32 * 32)
    before, after = rows_in_order(transform, whole), rows_in_order(transform, short)
    assert all(np.array_equal(got, want[:, : 80 - x]) for got, want in zip(after, before))
    again = feed_more(transform, short, keys[:, :, 80 - x :], values[:, :, 80 - x :])
    assert 16 < x < 80 or same(live(transform, again), live(transform, whole))


@pytest.mark.parametrize("x", [40, 48, 49, 80])
def test_a_ranking_stays_while_a_row_of_its_blocks_does(x: int) -> None:
    transform, keys, rest = (
        vq.adakv(**SMALL, update_interval=0),
        uneven(draw(80, 8), 0, 9, 3, 1),
        uneven(draw(x, 8, 5), 9, 0, 1, 3) * 20,
    )
    short = transform.trim(feed(transform, keys, keys), x)
    now = np.concatenate([rows_in_order(transform, short)[0], numbers(rest)[0]], axis=1)
    before, packed = [0, 3, 2, 1], orders_of(AdaKVOptions(**SMALL), now)[short.coded.item() // 32]
    assert packed != before  # the ranking of the unit that is packed next
    assert places(transform, feed_more(transform, short, rest, rest)) == [before if x <= 48 else packed]


@pytest.mark.parametrize("x, known", [(10, 70), (45, 32)])
def test_keys_stand_in_for_queries_that_a_trim_took_back(x: int, known: int) -> None:
    """Those of rows that were in blocks, and of rows that are gone."""
    options = {**SMALL, "importance": "attention_entropy"}
    transform, keys, queries = vq.adakv(**options), draw(101, 8), 2 * draw(80, 8, seed=2)
    state = transform.init_state(vq.KVSpec(kv_heads=HEADS, key_dim=8, value_dim=8, capacity=101))
    state, *_ = transform.update(state, keys[:, :, :80], keys[:, :, :80], queries)
    short = transform.trim(state, x)
    now = np.concatenate([rows_in_order(transform, short)[0], numbers(keys)[0, :, 80 - x :]], axis=1)
    asked = np.concatenate([numbers(queries)[0, :, :known], now[:, known:]], axis=1)[:, :, None]
    later = feed_more(transform, short, *[keys[:, :, 80 - x :]] * 2)
    again = slice(short.coded.item() // 32, 3)  # units that are packed after the trim
    assert places(transform, later)[again] == orders_of(AdaKVOptions(**options), now, list(asked))[again]


# Attention, bytes and options


def attended(q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int) -> np.ndarray:
    """Causal attention [Hq, S, D] in double precision over rows in token order; queries begin at `start`."""
    keys, values = (np.repeat(x.astype(np.float64), len(q) // len(x), axis=0) for x in (keys, values))
    scores = q.astype(np.float64) @ keys.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    seen = np.arange(keys.shape[1]) <= start + np.arange(q.shape[1])[:, None]
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ values


@dtypes
@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 8, "update_interval": 0, "target_avg_bits": 3, "value_bits": 4},
        {"update_interval": 2, "n_sink": 5, "importance": "attention_entropy", "lo_bit": 1},
    ],
    ids=str,
)
def test_attention_equals_attention_over_what_is_read(options: dict[str, Any], n: int, dtype: mx.Dtype) -> None:
    transform, total = vq.adakv(**options, residual_length=16), 150 + n
    keys, values = draw(total, 64, dtype=dtype), draw(total, 80, seed=1, dtype=dtype)
    state = feed(transform, keys[:, :, :150], values[:, :, :150], capacity=total)
    written = transform.write(state, keys[:, :, 150:], values[:, :, 150:])
    queries = draw(n, 64, 5, 3 * HEADS, dtype)
    want = attended(numbers(queries)[0], *rows_in_order(transform, written), start=150)
    assert state.coded.item() == 128
    for fill in (None, Fill(total, total, 128)):
        got = transform.attend(written, queries, 64**-0.5, None, fill)
        assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
        np.testing.assert_allclose(numbers(got)[0], want, atol=LIMIT[dtype])


@dtypes
@pytest.mark.parametrize(
    "options, bits, halves",
    [
        ({}, 2.5, 312 + 1 / 32),
        ({"value_bits": 2}, 2.5, 104 + 1 / 32),
        ({"update_interval": 0, "target_avg_bits": 3.0}, 3, 320),
        ({"update_interval": 2, "importance": "attention_entropy", "group_size": 64, "n_sink": 3}, 2.5, 304 + 1 / 128),
    ],
    ids=str,
)
def test_bytes_follow_the_formula(options: dict[str, Any], bits: float, halves: float, dtype: mx.Dtype) -> None:
    """`halves` are the bytes of a coded token where numbers have 16 bits, the mean over heads; D = 128."""
    o, size, dim, heads = AdaKVOptions(**options), dtype.size, 128, 8
    unit = unit_of(o)
    key = dim * bits / 8 + 2 * size * dim / o.group_size + (1 / unit if o.update_interval else 0)
    value = dim * size if o.value_bits is None else dim * o.value_bits / 8 + 2 * size * dim / o.group_size
    assert size == 4 or key + value == halves
    exact = (residual_of(o) + unit) * (2 * dim * size + (4 if o.importance == "attention_entropy" else 0))
    once = 8 + (0 if o.update_interval else 4 * heads) + (o.n_sink * (heads * 2 * dim * size + 8) + 4) * (o.n_sink > 0)
    spec = vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim, batch=2, dtype=dtype, capacity=256)
    assert vq.nbytes(vq.adakv(**options).init_state(spec)) == 2 * (heads * (256 * (key + value) + exact) + once)


@pytest.mark.parametrize(
    "options",
    [
        *({"target_avg_bits": value} for value in (1.9, 4.1, True, "3", None, math.nan)),
        *({"lo_bit": value} for value in (0, 9, 2.0, True)),
        *({"mid_bit": 1}, {"mid_bit": None}, {"hi_bit": 2}, {"hi_bit": 9}, {"group_size": 0}, {"group_size": None}),
        *({"update_interval": -1}, {"update_interval": 1.0}, {"obs_window": 0}, {"n_sink": -1}, {"n_sink": None}),
        *(
            {"importance": "entropy"},
            {"importance": None},
            {"residual_length": -1},
            {"value_bits": 0},
            {"value_bits": 9},
        ),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^adakv: `{next(iter(options))}` must be .*; got "):
        vq.adakv(**options)


def test_tokens_share_scales_so_no_policy_can_move_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="adakv"):
        vq.chain(vq.h2o_policy(budget=40), vq.adakv())
