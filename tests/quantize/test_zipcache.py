"""ZipCache against numpy: saliency query by query, both classes code by code, channels, errors, trims, bytes."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.quantize.zipcache import ZipCacheOptions

HEADS, QUERY_HEADS, DIM = 2, 4, 32
SMALL = {"window": 64, "group_size": 16}  # 16 salient rows of 64
few = settings(max_examples=10, deadline=None)


def draw(
    n: int, seed: int = 0, dim: int = DIM, heads: int = HEADS, dtype: mx.Dtype = mx.float16, batch: int = 1
) -> Any:
    return mx.random.normal((batch, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


def inputs(n: int, seed: int = 0, **more: Any) -> tuple[mx.array, mx.array, mx.array]:
    """Keys, values and queries."""
    return (
        draw(n, 3 * seed, **more),
        draw(n, 3 * seed + 1, **more),
        3 * draw(n, 3 * seed + 2, heads=QUERY_HEADS, **more),
    )


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def begin(transform: Any, keys: mx.array, values: mx.array, capacity: int | None = None) -> Any:
    dims: dict[str, Any] = {"key_dim": keys.shape[3], "value_dim": values.shape[3], "dtype": keys.dtype}
    return transform.init_state(
        vq.KVSpec(batch=keys.shape[0], kv_heads=keys.shape[1], capacity=capacity or keys.shape[2], **dims)
    )


def feed(transform: Any, keys: mx.array, values: mx.array, queries: Any = None, calls: Sequence[Any] = ()) -> Any:
    """State after calls of (tokens, whether real queries come); a bare number of tokens: as `queries` tells."""
    state, start = begin(transform, keys, values), 0
    for entry in calls or [keys.shape[2]]:
        count, asks = entry if isinstance(entry, tuple) else (entry, queries is not None)
        span = slice(start, start + count)
        asking = queries[:, :, span] if asks else None
        state, *_ = transform.update(state, keys[:, :, span], values[:, :, span], asking)
        start += count
    return state


def rows_in_order(transform: Any, state: Any, row: int = 0) -> list[np.ndarray]:
    """Keys and values of all tokens held, in token order."""
    position = np.array(transform.positions(state))[row, 0]
    columns = [np.flatnonzero(position == i)[0] for i in range(state.offset[row].item())]
    return [numbers(x)[row][:, columns] for x in transform.read(state)]


def assert_same(one: Any, two: Any) -> None:
    for got, want in zip(flatten(one)[0], flatten(two)[0], strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)


# The oracle, for one batch row of 16-bit numbers


def half(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def quantized(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and zeros of groups along the last axis."""
    x = x.reshape(*x.shape[:-1], -1, group)
    zero, scale = half(x.min(axis=-1)), half(np.ptp(x, axis=-1) / np.float32(2**bits - 1))
    codes = np.clip(np.round((x - zero[..., None]) / scale[..., None]), 0, 2**bits - 1)
    return codes.reshape(*x.shape[:-2], -1), scale, zero


def unpacked(words: mx.array, bits: int) -> np.ndarray:
    """Codes of bit streams along the last axis, least significant bit first."""
    raw = np.unpackbits(np.array(words)[..., None].view(np.uint8), axis=-1, bitorder="little")
    count = words.shape[-1] * 32 // bits
    raw = raw.reshape(*words.shape[:-1], -1)[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return raw @ 2 ** np.arange(bits)


def salient_count(o: ZipCacheOptions) -> int:
    return o.group_size * math.ceil(Fraction(str(o.hi_fraction)) * o.window / o.group_size)


def by_rank(score: np.ndarray, count: int) -> np.ndarray:
    """Bool: the `count` highest; of equal ones the first."""
    return np.isin(np.arange(len(score)), np.argsort(-score, kind="stable")[:count])


def rounded(x: np.ndarray, salient: np.ndarray, bits: tuple[int, int], group: int, turned: bool) -> np.ndarray:
    """`x` [S, D] as read: both classes in groups along tokens (`turned`) or channels."""
    out = x.copy()
    for rows, width in ((salient, bits[0]), (~salient, bits[1])):
        codes, scale, zero = quantized(x[rows].T if turned else x[rows], width, group)
        read = codes * scale.repeat(group, -1) + zero.repeat(group, -1)
        out[rows] = read.T if turned else read
    return out


def classed(keys: Any, queries: Any, calls: Sequence[tuple[int, bool]], o: ZipCacheOptions) -> np.ndarray:
    """Bool [H, coded]: the salient rows where every query is a probe."""
    keys, queries = numbers(keys)[0].astype(np.float64), numbers(queries)[0].astype(np.float64)
    mass, count, salient = np.zeros(keys.shape[:2]), np.zeros(keys.shape[1]), np.zeros(keys.shape[:2], bool)
    exact, sign = keys.astype(np.float32), 1 if o.proxy == "large_keys" else -1
    end = coded = 0
    for tokens, asks in calls:
        end += tokens
        for k in range(end - tokens, end) if asks else ():
            count[coded : k + 1] += 1
            for h in range(queries.shape[0]):
                head = h * keys.shape[0] // queries.shape[0]
                weights = np.exp(keys[head, : k + 1] @ queries[h, k] / math.sqrt(keys.shape[2]))
                mass[head, coded : k + 1] += (weights / weights.sum())[coded:]
        while end - coded >= o.window:
            span = slice(coded, coded + o.window)
            for head in range(keys.shape[0]):
                score = np.where(count[span] > 0, mass[head, span] / np.maximum(count[span], 1), -1)
                score = score if count[span].any() else sign * np.linalg.norm(exact[head, span], axis=-1)
                salient[head, span] = by_rank(score, salient_count(o))
                bits = o.hi_bits, o.lo_bits
                keys[head, span] = rounded(exact[head, span], salient[head, span], bits, o.group_size, turned=True)
            coded += o.window
    return salient[:, :coded]


def assert_side(rows: Any, x: np.ndarray, salient: np.ndarray, bits: Sequence[int], group: int, turned: bool) -> None:
    """What is held of `x` [H, coded, D]: each class in token order, groups along tokens (`turned`) or channels."""
    for head, (part, width) in itertools.product(range(len(x)), enumerate(bits)):
        members = x[head, salient[head] == (part == 0)]
        wanted = quantized(members.T if turned else members, width, group)
        codes, scales, zeros = (array[0, head] for array in rows[3 * part : 3 * part + 3])
        got = (unpacked(codes, width), numbers(scales), numbers(zeros))
        for a, b in zip(got, wanted):
            assert np.array_equal(a[tuple(map(slice, b.shape))], b)


def places(salient: np.ndarray, window: int) -> np.ndarray:
    """Where a row is in its window when the salient ones come first."""
    split = salient.reshape(len(salient), -1, window)
    order = np.argsort(~split, axis=-1, kind="stable")
    return np.argsort(order, axis=-1).reshape(salient.shape)


def assert_equal_to_oracle(state: Any, keys: Any, values: Any, salient: np.ndarray, o: ZipCacheOptions) -> None:
    coded, dim = salient.shape[1], values.shape[3]
    assert state.coded.item() == coded
    if coded == 0:
        return
    k, v = numbers(keys)[0, :, :coded], numbers(values)[0, :, :coded]
    channels = np.sqrt(np.abs(v[:, : o.window]).max(axis=1))
    channels = half(np.maximum(channels, channels.max(axis=-1, keepdims=True) / 16))[:, None]
    assert np.array_equal(numbers(state.values.tables[0])[0], channels[:, 0])
    group_v = next(g for g in (128, 64, 32) if dim % g == 0)
    key = (o.hi_bits, o.lo_bits), o.group_size, True
    value = (o.hi_bits_v or o.hi_bits, o.lo_bits_v or o.lo_bits), group_v, False
    held = vq.zipcache(**attrs.asdict(o)).read(state)
    for side, x, c, how, read in zip((state.keys, state.values), (k, v), (1, channels), (key, value), held):
        assert_side(side.rows, x / c, salient, *how)
        assert np.array_equal(np.array(side.rows[-1])[0, :, :coded], places(salient, o.window))
        want = c * np.stack([rounded(y, rows, *how) for y, rows in zip(x / c, salient)])
        np.testing.assert_allclose(numbers(read)[0, :, :coded], want, rtol=2.0**-10, atol=1e-5)
    assert (salient.reshape(len(k), -1, o.window).sum(axis=-1) == salient_count(o)).all()


def check_calls(calls: Sequence[tuple[int, bool]], seed: int = 0, dim: int = DIM, **options: Any) -> None:
    o = ZipCacheOptions(**{"probe_share": 1, **options})
    keys, values, queries = inputs(sum(count for count, _ in calls), seed, dim=dim)
    state = feed(vq.zipcache(**{"probe_share": 1, **options}), keys, values, queries, calls)
    assert_equal_to_oracle(state, keys, values, classed(keys, queries, calls, o), o)


# Classes, codes and channels


@pytest.mark.parametrize("hi, lo", [(4, 2), (8, 3), (6, 5), (5, 4), (8, 8)])
@pytest.mark.parametrize("asks", [True, False])
def test_every_code_equals_the_oracle(hi: int, lo: int, asks: bool) -> None:
    check_calls([(130, asks)], hi_bits=hi, lo_bits=lo, window=64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hi_fraction": 0.5},
        {"hi_bits_v": 8, "lo_bits_v": 3},
        {"group_size": 64},
        {"window": 64, "group_size": 16, "hi_fraction": 0.7},
        {"proxy": "large_keys"},
        {"window": 320},
    ],
)
def test_every_code_equals_the_oracle_with_other_options(options: dict[str, Any]) -> None:
    check_calls([(rows := max(131, options.get("window", 0)), False)], seed=1, dim=96, **options)
    check_calls([(66, True), (rows - 66, True)], seed=2, dim=64, **options)


@few
@given(calls=st.lists(st.tuples(st.sampled_from([1, 1, 5, 30, 64, 70]), st.booleans()), min_size=1, max_size=5))
def test_any_calls_with_and_without_queries(calls: list[tuple[int, bool]]) -> None:
    check_calls(calls, seed=3, **SMALL)


def test_a_row_that_no_query_saw_comes_last() -> None:
    keys, values, queries = inputs(64)
    keys[:, :, 20:] *= 0.01  # the proxy would take these
    state = feed(vq.zipcache(**SMALL), keys, values, queries, [(20, True), (44, False)])
    assert (np.array(state.keys.rows[-1])[0, :, 20:] >= 16).all()
    check_calls([(20, True), (44, False)], **SMALL)


def test_of_equal_rows_the_first_are_salient() -> None:
    keys = mx.ones((1, HEADS, 64, DIM), mx.float16)
    state = feed(vq.zipcache(**SMALL), keys, keys)
    assert np.array_equal(np.array(state.keys.rows[-1]), np.broadcast_to(np.arange(64), (1, HEADS, 64)))
    for got in rows_in_order(vq.zipcache(**SMALL), state):
        assert np.abs(got - 1).max() <= 2.0**-10


@pytest.mark.parametrize("window, group", [(128, 32), (128, 16), (96, 32), (3200, 32)])
@pytest.mark.parametrize("fraction", [0, 0.05, 0.07, 0.1, 0.2, 0.25, 0.3, 0.55, 0.6, 0.7, 0.75, 0.99, 1])
def test_salient_rows_of_a_window(fraction: float, window: int, group: int) -> None:
    o = ZipCacheOptions(hi_fraction=fraction, window=window, group_size=group)
    assert o.salient == salient_count(o) <= window


@pytest.mark.parametrize("fraction, bits", [(0, 2), (1, 4)])
def test_one_class_is_a_uniform_quantizer(fraction: float, bits: int) -> None:
    keys, values, queries = inputs(130)
    transform = vq.zipcache(hi_fraction=fraction)
    state = feed(transform, keys, values, queries)
    uniform = feed(vq.kivi(bits=bits, group_size=32, residual_length=0), keys, values)
    for got, want in zip(state.keys.rows, uniform.keys.rows, strict=True):
        assert mx.array_equal(got[..., : want.shape[-1] * 128 // 160], want[..., : want.shape[-1] * 128 // 160])
    v = numbers(values)[0, :, :128] / numbers(state.values.tables[0])[0][:, None]
    assert len(state.values.rows) == 3
    assert_side(state.values.rows, v, np.ones((HEADS, 128), bool), (bits,), 32, turned=False)


# Saliency


def test_uniform_attention_gives_harmonic_sums() -> None:
    keys, values, queries = inputs(60)
    mass, count = feed(vq.zipcache(probe_share=1), keys, values, 0 * queries).recent.memory
    mean = numbers(mass)[0, :, :60] / numbers(count)[0, :, :60]
    assert mean[:, 0] / mean[:, 59] == pytest.approx(sum(1 / j for j in range(1, 61)), abs=1e-4)
    assert numbers(count)[0, 0, :60].tolist() == list(range(60, 0, -1))


@pytest.mark.parametrize("share, n", [(0.1, 100), (0.1, 61), (0.5, 33), (0.02, 7)])
def test_probes_are_the_newest_and_drawn_ones(share: float, n: int) -> None:
    keys, values, queries = inputs(n)
    memories = [feed(vq.zipcache(probe_share=share, seed=s), keys, values, queries).recent.memory for s in (1, 1, 2)]
    half_of_them = math.ceil(Fraction(str(share)) / 2 * n)
    count = numbers(memories[0][1])[0, 0, : n + 1]
    probes = np.flatnonzero(count[:-1] - count[1:])
    assert len(probes) == count[0] == 2 * half_of_them
    assert set(range(n - half_of_them, n)) <= set(probes.tolist())
    k, q = numbers(keys)[0].astype(np.float64), numbers(queries)[0].astype(np.float64)
    want = np.zeros((HEADS, n))
    for h, probe in itertools.product(range(QUERY_HEADS), probes):
        weights = np.exp(k[h // 2, : probe + 1] @ q[h, probe] / math.sqrt(DIM))
        want[h // 2, : probe + 1] += weights / weights.sum()
    np.testing.assert_allclose(numbers(memories[0][0])[0, :, :n], want, atol=1e-5)
    assert_same(memories[0], memories[1])
    assert n < 30 or not mx.array_equal(memories[0][1], memories[2][1])


def test_every_step_is_a_probe() -> None:
    keys, values, queries = inputs(20)
    one = feed(vq.zipcache(), keys, values, queries, [1] * 20).recent.memory
    all_at_once = feed(vq.zipcache(probe_share=1), keys, values, queries).recent.memory
    for got, want in zip(one, all_at_once):
        np.testing.assert_allclose(numbers(got), numbers(want), atol=1e-5)


@few
@given(cuts=st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_without_queries_how_a_prompt_was_cut_leaves_no_trace(cuts: list[int]) -> None:
    keys, values, _ = inputs(sum(cuts))
    transform = vq.zipcache(**SMALL)
    pieces, whole = feed(transform, keys, values, calls=cuts), feed(transform, keys, values)
    assert pieces.coded.item() == whole.coded.item() == sum(cuts) // 64 * 64
    assert_same((pieces.keys, pieces.values), (whole.keys, whole.values))
    for got, want in zip(rows_in_order(transform, pieces), rows_in_order(transform, whole)):
        assert np.array_equal(got, want)


# Reading


@pytest.mark.parametrize("dtype, unit", [(mx.float16, 2**-11), (mx.bfloat16, 2**-8), (mx.float32, 2**-24)])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("cst", [False, True])
def test_error_is_half_a_step_of_the_class(dtype: mx.Dtype, unit: float, dim: int, cst: bool) -> None:
    keys, values, queries = inputs(70, dim=dim, dtype=dtype)
    values[:, :, :, 3] *= 50
    transform = vq.zipcache(**SMALL, cst_keys=cst)
    state = feed(transform, keys, values, queries)
    held = rows_in_order(transform, state)
    group = next((g for g in (128, 64, 32) if dim % g == 0), 32)
    for side, x, got in list(zip((state.keys, state.values), (keys, values), held))[0 if cst else 1 :]:
        hi, lo = (numbers(side.rows[i])[0].repeat(group, -1)[..., :dim] for i in (1, 4))
        scales = np.concatenate([hi[:, :16], lo[:, :48]], axis=1)  # the salient ones first
        place = np.array(side.rows[-1])[0, :, :64, None]
        channel, error = numbers(side.tables[0])[0][:, None], np.abs(got - numbers(x)[0])
        largest = np.abs(numbers(x)[0, :, :64] / channel).max(axis=-1, keepdims=True)
        bound = channel * (np.take_along_axis(scales, place, axis=1) * (0.5 + 1e-5) + 2 * unit * largest)
        assert (error[:, :64] <= bound + np.abs(got[:, :64]) * unit).all() and (error[:, 64:] == 0).all()


def test_values_are_left_as_they_came() -> None:
    keys, values, queries = inputs(130)
    transform = vq.zipcache(quantize_values=False)
    held = rows_in_order(transform, feed(transform, keys, values, queries))
    assert np.array_equal(held[1], numbers(values)[0]) and not np.array_equal(held[0], numbers(keys)[0])


@pytest.mark.parametrize("options", [{}, {"cst_keys": True}, {"hi_fraction": 1}, {"hi_bits": 5, "window": 32}])
@pytest.mark.parametrize("dim", [32, 40])
def test_attention_over_classes_is_attention_in_token_order(options: dict[str, Any], dim: int) -> None:
    keys, values, queries = inputs(150, dim=dim, dtype=mx.float32)
    transform = vq.zipcache(**{**SMALL, "group_size": 32, **options})
    state = feed(transform, keys, values, queries)
    asked = queries[:, :, -1:]
    got = numbers(transform.attend(state, asked, dim**-0.5))
    held_keys, held_values = rows_in_order(transform, state)
    for h in range(QUERY_HEADS):
        weights = np.exp(held_keys[h // 2].astype(np.float64) @ numbers(asked)[0, h, 0] / math.sqrt(dim))
        np.testing.assert_allclose(got[0, h, 0], weights / weights.sum() @ held_values[h // 2], atol=1e-5)


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    keys, values, queries = inputs(200)
    transform, end = vq.zipcache(**SMALL), 0
    state = begin(transform, keys, values)
    for count in (50, 40, 1, 109):
        span, coded = slice(end, end + count), state.coded.item()
        mask = np.array(transform.make_mask(state, count))[0, 0, -1]
        state, *out = transform.update(state, keys[:, :, span], values[:, :, span], queries[:, :, span])
        end += count
        for got, x in zip(out, (keys, values)):
            got = numbers(got)[0][:, mask]
            assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:end])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("proxy", ["small_keys", "large_keys"])
def test_a_number_that_is_not_finite_stays_alone(bad: float, proxy: str) -> None:
    keys, values, _ = inputs(64)
    spot = (mx.arange(64)[:, None] == 3) & (mx.arange(DIM) == 5)
    transform = vq.zipcache(**SMALL, proxy=proxy)
    state = feed(transform, mx.where(spot, bad, keys), mx.where(spot, bad, values))
    assert (np.array(state.keys.rows[-1])[0, :, 3] >= 16).all()
    for got, x in zip(rows_in_order(transform, state), (keys, values)):
        assert np.isfinite(got).all() and np.abs(got - numbers(x)[0])[:, np.arange(64) != 3].max() < 1.5


def test_zeros_stay_zero() -> None:
    zeros = mx.zeros((1, HEADS, 64, DIM), mx.float16)
    for cst in (False, True):
        transform = vq.zipcache(**SMALL, cst_keys=cst)
        assert not any(got.any() for got in rows_in_order(transform, feed(transform, zeros, zeros)))


# Trim, batches, bytes, options


@pytest.mark.parametrize("drop", [1, 20, 30, 70, 149, 150])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int) -> None:
    keys, values, queries = inputs(150)
    transform = vq.zipcache(**SMALL)
    state = feed(transform, keys, values, queries)
    trimmed = transform.trim(state, drop)
    kept = 150 - drop
    assert trimmed.offset.item() == kept and trimmed.coded.item() == min(128, kept // 64 * 64)
    for got, want in zip(rows_in_order(transform, trimmed), rows_in_order(transform, state)):
        assert np.array_equal(got, want[:, :kept])
    mass, count = (numbers(x)[0] for x in trimmed.recent.memory)
    open_rows = 0 if drop > 22 else kept - 128
    assert (count[:, :open_rows] > 0).all() and not count[:, open_rows:].any() and not mass[:, open_rows:].any()


def test_batch_rows_stand_alone() -> None:
    keys, values, queries = inputs(70, batch=3)
    transform = vq.zipcache(**SMALL)
    state = feed(transform, keys, values, queries)
    for i in range(3):
        row = slice(i, i + 1)
        assert_same(map_leaves(lambda x, row=row: x[row], state), feed(transform, keys[row], values[row], queries[row]))


@pytest.mark.parametrize("asks", [True, False])
def test_left_padding_leaves_no_trace(asks: bool) -> None:
    keys, values, queries = inputs(140, batch=2)
    keys[1, :, :9], values[1, :, :9] = 30, -30
    transform = vq.zipcache(**SMALL, probe_share=1)
    spec = vq.KVSpec(batch=2, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, capacity=140)
    state = transform.init_state(spec, mx.array([0, 9]))
    state, *_ = transform.update(state, keys, values, queries if asks else None)
    for row, padding in enumerate((0, 9)):
        span = slice(row, row + 1), slice(None), slice(padding, None)
        alone = feed(transform, keys[span], values[span], queries[span] if asks else None)
        for got, want in zip(rows_in_order(transform, state, row), rows_in_order(transform, alone)):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("dim, group_v", [(32, 32), (64, 64), (96, 32), (256, 128)])
@pytest.mark.parametrize("options", [{}, {"hi_fraction": 0}, {"hi_fraction": 1}, {"group_size": 64, "hi_bits": 8}])
@pytest.mark.parametrize("cst", [False, True])
@pytest.mark.parametrize("quantize_values", [False, True])
def test_bytes(dim: int, group_v: int, options: dict[str, Any], cst: bool, quantize_values: bool) -> None:
    o = ZipCacheOptions(**options)
    share = Fraction(salient_count(o), o.window)
    both = share not in (0, 1)
    tokenwise = 4 * (dim // group_v)
    value = dim * (share * o.hi_bits + (1 - share) * 2) / 8 + tokenwise + both
    key = value if cst else value - tokenwise + Fraction(4 * dim, o.group_size)
    once = 128 * (4 * dim + 8 * both) + 2 * dim * (cst + quantize_values)
    want = HEADS * (384 * (key + (value if quantize_values else 2 * dim)) + once) + 8
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=dim, capacity=384)
    assert vq.nbytes(vq.zipcache(**options, cst_keys=cst, quantize_values=quantize_values).init_state(spec)) == want


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hi_bits": 7}, r"`hi_bits` must be one of \(2, 3, 4, 5, 6, 8\); got 7"),
        ({"lo_bits": True}, r"`lo_bits` must be one of \(2, 3, 4, 5, 6, 8\); got True"),
        ({"hi_bits_v": 1}, r"`hi_bits_v` must be one of \(None, 2, 3, 4, 5, 6, 8\); got 1"),
        ({"lo_bits_v": 16}, r"`lo_bits_v` must be one of \(None, 2, 3, 4, 5, 6, 8\); got 16"),
        ({"hi_bits": 2, "lo_bits": 4}, "`hi_bits` must be at least 4; got 2"),
        ({"lo_bits_v": 5}, "`hi_bits_v` must be at least 5; got 4"),
        *[
            ({field: 3, "quantize_values": False}, f"`{field}` can't be set without `quantize_values`; got 3")
            for field in ("hi_bits_v", "lo_bits_v")
        ],
        ({"hi_fraction": 1.1}, r"`hi_fraction` must be a finite number in \[0, 1\]; got 1.1"),
        ({"hi_fraction": math.nan}, r"`hi_fraction` must be a finite number in \[0, 1\]; got nan"),
        ({"group_size": 48}, r"`group_size` must be one of \(16, 32, 64, 128\); got 48"),
        ({"quantize_values": 1}, r"`quantize_values` must be one of \(True, False\); got 1"),
        ({"window": 0}, "`window` must be an integer >= 1; got 0"),
        ({"window": 100}, "`window` must be a multiple of 32 rows; got 100"),
        ({"window": 48, "group_size": 16, "hi_bits": 3}, "`window` must be a multiple of 32 rows; got 48"),
        ({"cst_keys": None}, r"`cst_keys` must be one of \(True, False\); got None"),
        ({"probe_share": 0}, r"`probe_share` must be a number in \(0, 1\]; got 0"),
        ({"seed": -1}, r"`seed` must be an integer in \[0, 4294967295\]; got -1"),
        ({"proxy": "keys"}, r"`proxy` must be one of \('small_keys', 'large_keys'\); got 'keys'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^zipcache: {message}$"):
        vq.zipcache(**options)


@pytest.mark.parametrize("late", [-70, 70, 1000])
def test_a_channel_that_was_empty_in_the_first_window_may_become_loud(late: int) -> None:
    values = mx.ones((1, 1, 64, 32), mx.float16)
    values[..., 5] = 0
    values[0, 0, 40, 5] = late
    transform = vq.zipcache(window=32, group_size=16)
    state = transform.init_state(vq.KVSpec(kv_heads=1, key_dim=32, value_dim=32, capacity=64))
    state, *_ = transform.update(state, values, values)
    read = numbers(transform.read(state)[1])[0, 0, :64]
    assert np.isfinite(read).all() and abs(read[40, 5] / late - 1) < 0.02
    assert np.abs(np.delete(read[40], 5) - 1).max() < 0.5
