"""Kitty against loops over pages in numpy: boosted channels, planes, sinks, errors, trims, bytes and attention."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kivi import HEADS, UNIT_ROUNDING, attended, draw, dtypes, feed, feed_more, numbers, rows_in_order
from test_kivi_sink import LIMIT, bits_of, same

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten
from vq_functional.quantize.kitty import KittyOptions

SMALL = {"group_size": 16, "n_sink": 4, "residual_length": 5}  # blocks of 16
THREE_BITS = {"group_size": 8, "lo_bit": 3, "n_sink": 1, "residual_length": 0}  # blocks of 32
rankings = pytest.mark.parametrize("ranking", ["magnitude", "variance"])


def live(state: Any, group: int, row: int = 0) -> tuple[mx.array, ...]:
    """What a state holds of one batch row whose pages have two planes, without unused room."""
    coded, offset = state.coded[row].item(), state.offset[row].item()
    return (
        *(x[row, :, : coded // group] for x in state.keys.rows),
        *(x[row, :, :coded] for x in flatten(state.values.rows)[0]),
        *(x[row, :, : offset - coded] for x in (state.recent.keys, state.recent.values)),
        *((x[row] for x in flatten(state.sinks)[0]) if coded else ()),
    )


def loud_channels(x: mx.array, size: float, *channels: int) -> mx.array:
    """`x` with some channels `size` times as large."""
    return mx.where(mx.array(np.isin(np.arange(x.shape[-1]), channels)), x * size, x).astype(x.dtype)


# The oracle


def held(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Float32 numbers as `dtype` holds them."""
    return np.array(mx.array(x).astype(dtype).astype(mx.float32))


def quantized(x: np.ndarray, bits: int, dtype: mx.Dtype, sink: np.ndarray) -> tuple[np.ndarray, ...]:
    """Codes, scale and zero of float32 `x` [g], whose range neither the `sink` ones nor NaN and infinities enter."""
    ranged = x[np.isfinite(x) & (~sink | sink.all())]
    low, high = (ranged.min(), ranged.max()) if len(ranged) else (np.float32(0), np.float32(0))
    zero, scale = held(low, dtype), held((high - low) / np.float32(2**bits - 1), dtype)
    if scale == 0:
        return np.zeros(len(x), int), scale, zero
    inside = np.clip(np.where(np.isnan(x), low, x), low, high)
    return np.clip(np.round((inside - zero) / scale), 0, 2**bits - 1).astype(int), scale, zero


def boosted_of(page: np.ndarray, ranking: str, count: int) -> list[int]:
    """The `count` channels of `page` [g, D] with the highest scores; of equal ones the first."""
    score = []
    for channel in page.T.astype(np.float64):
        finite = channel[np.isfinite(channel)]
        score.append(np.abs(finite).mean() if ranking == "magnitude" else finite.var())
    return sorted(sorted(range(len(score)), key=lambda c: (-score[c], c))[:count])


def residual_of(o: KittyOptions) -> int:
    return o.group_size if o.residual_length is None else o.residual_length


def block_of(o: KittyOptions) -> int:
    return math.lcm(o.group_size, *(32 // math.gcd(32, bits) for bits in (o.lo_bit, o.hi_bit)))


def frontier(n: int, o: KittyOptions) -> int:
    return max(0, n - residual_of(o)) // block_of(o) * block_of(o)


def assert_keys_equal_oracle(o: KittyOptions, state: Any, k: np.ndarray, dtype: mx.Dtype) -> None:
    dim, coded = k.shape[2], frontier(k.shape[1], o)
    pages = coded // o.group_size
    count = math.floor(dim * o.hi_fraction + 1e-6)
    low, scales, zeros, high, channel = (x[0, :, :pages] for x in state.keys.rows)
    assert channel.dtype == (mx.uint8 if dim <= 256 else mx.uint16) and channel.shape == (HEADS, pages, count)
    low, high = bits_of(low, o.lo_bit, o.group_size), bits_of(high, o.hi_bit - o.lo_bit, o.group_size)
    sink = np.arange(coded) < o.n_sink
    for head, page in itertools.product(range(HEADS), range(pages)):
        rows = slice(page * o.group_size, (page + 1) * o.group_size)
        x = k[head, rows]
        boosted = boosted_of(x, o.ranking, count)
        assert channel[head, page].tolist() == boosted
        for c in range(dim):
            bits = o.hi_bit if c in boosted else o.lo_bit
            codes, scale, zero = quantized(x[:, c], bits, dtype, sink[rows])
            assert (scales[head, page, c].item(), zeros[head, page, c].item()) == (scale, zero)
            assert np.array_equal(low[head, page, c], codes % 2**o.lo_bit)
            if c in boosted:
                assert np.array_equal(high[head, page, boosted.index(c)], codes // 2**o.lo_bit)


def assert_values_equal_oracle(o: KittyOptions, state: Any, v: np.ndarray, dtype: mx.Dtype) -> None:
    dim, bits = v.shape[2], o.value_bits
    group = next((size for size in (128, 64, 32) if dim % size == 0), 32)
    width = -(-dim // group) * group
    filled = np.pad(v, ((0, 0), (0, 0), (0, width - dim)), mode="edge")
    codes, scales, zeros = (x[0] for x in state.values.rows)
    codes = bits_of(codes, bits, width)
    for head, token, i in itertools.product(range(HEADS), range(frontier(v.shape[1], o)), range(width // group)):
        span = slice(i * group, (i + 1) * group)
        want, scale, zero = quantized(filled[head, token, span], bits, dtype, np.zeros(group, bool))
        assert (scales[head, token, i].item(), zeros[head, token, i].item()) == (scale, zero)
        assert np.array_equal(codes[head, token, span], want)


def assert_equal_to_oracle(options: dict[str, Any], keys: mx.array, values: mx.array, cuts: tuple[int, ...]) -> Any:
    o, state = KittyOptions(**options), feed(vq.kitty(**options), keys, values, cuts)
    k, v = numbers(keys)[0], numbers(values)[0]
    coded = frontier(k.shape[1], o)
    assert state.coded.item() == coded >= 2 * o.group_size and state.offset.item() == k.shape[1]
    assert_keys_equal_oracle(o, state, k, keys.dtype)
    assert_values_equal_oracle(o, state, v, keys.dtype)
    for recent, x in ((state.recent.keys, k), (state.recent.values, v)):
        assert np.array_equal(numbers(recent)[0, :, : x.shape[1] - coded], x[:, coded:])
    return state


@rankings
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "lo, hi, group, key_dim, value_dim",
    [
        (2, 4, 32, 10, 40),
        (2, 4, 8, 260, 64),
        (1, 8, 16, 9, 80),
        (3, 4, 32, 6, 96),
        (4, 6, 48, 5, 192),
        (2, 8, 64, 6, 256),
    ],
)
def test_every_code_equals_the_oracle(
    lo: int, hi: int, group: int, key_dim: int, value_dim: int, dtype: mx.Dtype, ranking: str
) -> None:
    options = {"lo_bit": lo, "hi_bit": hi, "group_size": group, "ranking": ranking, "n_sink": group}
    options |= {"residual_length": 7, "value_bits": hi - 1, "hi_fraction": 0.3}
    n = 7 + 2 * block_of(KittyOptions(**options)) + 3
    assert_equal_to_oracle(options, draw(n, key_dim, lo, dtype), draw(n, value_dim, hi, dtype), (n // 2, 1, 1))


@rankings
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_enters_neither_range_nor_ranking(bad: float, ranking: str) -> None:
    options = {"group_size": 32, "residual_length": 0, "n_sink": 0, "ranking": ranking}
    keys, values = draw(64, 8), draw(64, 64, seed=1)
    keys[:, :, 40, :3] = values[:, :, 40, :3] = bad
    state = assert_equal_to_oracle(options, keys, values, ())
    assert all(np.isfinite(x).all() for x in rows_in_order(vq.kitty(**options), state))


# Which channels are boosted


@pytest.mark.parametrize("fraction, dim, count", [(0.25, 64, 16), (0.29, 100, 29), (1 / 3, 48, 16), (0.99, 10, 9)])
def test_how_many_channels_are_boosted(fraction: float, dim: int, count: int) -> None:
    state = feed(vq.kitty(hi_fraction=fraction, residual_length=0), draw(32, dim), draw(32, 32))
    assert state.keys.rows[3].shape == (1, HEADS, 1, count, 2) and state.keys.rows[4].shape == (1, HEADS, 1, count)


def test_of_equal_channels_the_first_are_boosted() -> None:
    x = mx.repeat(draw(32, 1), 12, axis=-1) * mx.where(mx.arange(12) == 9, 2, 1)
    state = feed(vq.kitty(residual_length=0), x.astype(mx.float16), x.astype(mx.float16))
    assert state.keys.rows[4][0, :, 0].tolist() == [[0, 1, 9]] * HEADS


@given(channel=st.integers(0, 15), page=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_a_loud_channel_is_boosted_in_its_page_and_leaves_the_others_alone(channel: int, page: int, seed: int) -> None:
    transform, calm = vq.kitty(group_size=16, n_sink=0, residual_length=0), draw(48, 16, seed=seed)
    inside = (mx.arange(48) // 16 == page)[:, None]
    loud = mx.where(inside, loud_channels(calm, 100, channel), calm)
    states = [feed(transform, x, calm) for x in (calm, loud)]
    (was, now), reads = zip(*((np.array(s.keys.rows[4])[0], rows_in_order(transform, s)[0]) for s in states))
    for head, p in itertools.product(range(HEADS), range(3)):
        apart = set(was[head, p].tolist()) ^ set(now[head, p].tolist()) | ({channel} if p == page else set())
        assert channel in now[head, p] if p == page else not apart
        others = [c for c in range(16) if c not in apart]
        one, two = (read[head, 16 * p : 16 * p + 16, others] for read in reads)
        assert np.array_equal(one, two)


@dtypes
@pytest.mark.parametrize("lo, hi, fraction, bits", [(2, 5, 0, 2), (2, 5, 0.06, 2), (2, 5, 1, 5), (3, 3, 0.5, 3)])
def test_with_one_width_keys_are_those_of_kivi(lo: int, hi: int, fraction: float, bits: int, dtype: mx.Dtype) -> None:
    transform = vq.kitty(lo_bit=lo, hi_bit=hi, hi_fraction=fraction, n_sink=0, residual_length=10)
    keys, values = draw(120, 16, dtype=dtype), draw(120, 64, seed=1, dtype=dtype)
    got = feed(transform, keys, values, [50, 1, 60])
    want = feed(vq.kivi(bits=bits, group_size=32, residual_length=10), keys, values, [50, 1, 60])
    assert got.coded.item() == want.coded.item() == 96
    for x, other in zip(got.keys.rows, want.keys.rows, strict=True):
        filled = slice(x.shape[-1] * 96 // 128)  # there is room for four groups
        assert x.dtype == other.dtype and mx.array_equal(x[..., filled], other[..., filled])


# Errors


@dtypes
@pytest.mark.parametrize("lo, hi, group", [(2, 4, 32), (1, 8, 16), (3, 5, 128)])
def test_error_is_half_a_step_of_the_channel(lo: int, hi: int, group: int, dtype: mx.Dtype) -> None:
    transform = vq.kitty(lo_bit=lo, hi_bit=hi, group_size=group, residual_length=0, n_sink=0)
    x = loud_channels(draw(128, 16, dtype=dtype), 20, 3, 11)
    state = feed(transform, x, x)
    assert state.coded.item() == 128
    scale = np.repeat(numbers(state.keys.rows[1])[0, ..., 0], group, axis=1)
    got, _ = rows_in_order(transform, state)
    # A whole step at 8 bits of bfloat16, whose scale may end short of the highest number.
    steps = 1.0 if dtype == mx.bfloat16 and hi == 8 else 0.5
    assert (np.abs(got - numbers(x)[0]) <= steps * scale * (1 + 1e-3) + UNIT_ROUNDING[dtype] * np.abs(got) + 1e-6).all()


def test_a_quarter_of_uneven_channels_takes_most_of_the_error() -> None:
    sizes = mx.exp(mx.random.normal((HEADS, 1, 128), key=mx.random.key(9)))
    x = (draw(256, 128, dtype=mx.float32) * sizes).astype(mx.float16)

    def error(fraction: float) -> float:
        transform = vq.kitty(hi_fraction=fraction, group_size=128, residual_length=0, n_sink=0)
        got, _ = rows_in_order(transform, feed(transform, x, x))
        return np.square(got - numbers(x)[0]).sum() / np.square(numbers(x)[0]).sum()

    plain, quarter, all_of_them = error(0), error(0.25), error(1)
    assert plain == pytest.approx(0.248, rel=0.1) and all_of_them == pytest.approx(0.0098, rel=0.1)
    assert quarter <= 0.25 * plain and quarter == pytest.approx(0.045, rel=0.3)


def test_a_range_past_half_precision_stays_finite() -> None:
    transform = vq.kitty(residual_length=0, n_sink=0)
    x = np.random.default_rng(0).uniform(-65504, 65504, (1, HEADS, 32, 32)).astype(np.float16)
    x[:, :, 0], x[:, :, 1], x[..., 0], x[..., 1] = -65504, 65504, -65504, 65504
    for got in rows_in_order(transform, feed(transform, mx.array(x), mx.array(x))):
        assert np.isfinite(got).all()
        assert np.abs(got - x[0].astype(np.float32)).max() <= 65504 / 3 * (1 + 1e-3) + 16


@dtypes
@pytest.mark.parametrize("value", [3.3, -5.0, 1e-30, 0.0])
def test_equal_rows_come_back_exactly(value: float, dtype: mx.Dtype) -> None:
    transform, x = vq.kitty(residual_length=0, n_sink=0), mx.full((1, HEADS, 64, 40), value).astype(dtype)
    state = feed(transform, x, x)
    assert state.coded.item() == 64
    assert all(np.array_equal(got, numbers(x)[0]) for got in rows_in_order(transform, state))


# Sinks, the frontier, and how the rows came


@pytest.mark.parametrize("options", [{}, SMALL, THREE_BITS], ids=str)
def test_frontier_and_exact_rows_token_by_token(options: dict[str, int]) -> None:
    transform, o = vq.kitty(**options), KittyOptions(**options)
    n = residual_of(o) + 2 * block_of(o) + 3
    keys, values = draw(n, 8), draw(n, 8, seed=1)
    state = feed(transform, keys[:, :, :1], values[:, :, :1], capacity=n)
    size = vq.nbytes(state)
    for i in range(1, n):
        state, *_ = transform.update(state, keys[:, :, i : i + 1], values[:, :, i : i + 1])
        assert state.coded.item() == frontier(i + 1, o)
    assert state.coded.item() == 2 * block_of(o) and vq.nbytes(state) == size
    exact = [*range(o.n_sink), *range(state.coded.item(), n)]
    for got, x in zip(rows_in_order(transform, state), (keys, values)):
        assert np.array_equal(got[:, exact], numbers(x)[0][:, exact])
        assert (got != numbers(x)[0])[:, o.n_sink : state.coded.item()].any()


def test_a_sink_leaves_no_trace_in_its_page() -> None:
    """Codes of the other rows and the boosted channels are those that the page has without it."""
    x = loud_channels(draw(40, 8), 9, 1, 6)
    loud = mx.where((mx.arange(40) < 2)[:, None], loud_channels(x, 500, 3), x)
    states = [feed(vq.kitty(**SMALL | {"n_sink": 2}), keys, x) for keys in (x, loud)]
    calm, other = (s.keys.rows for s in states)
    assert mx.array_equal(states[1].sinks.keys[0], loud[0, :, :2])
    assert other[4][0, :, 0].tolist() == calm[4][0, :, 0].tolist() == [[1, 6]] * HEADS
    assert same(calm[1:3], other[1:3])
    assert np.array_equal(bits_of(calm[0], 2, 16)[..., 2:], bits_of(other[0], 2, 16)[..., 2:])


@given(data=st.data(), residual=st.sampled_from([0, 1, 20]), n_sink=st.sampled_from([0, 3, 16, 21]))
@settings(max_examples=10)
@rankings
def test_how_a_prompt_was_cut_leaves_no_trace(data: st.DataObject, residual: int, n_sink: int, ranking: str) -> None:
    transform = vq.kitty(group_size=16, residual_length=residual, n_sink=n_sink, ranking=ranking)
    n = data.draw(st.integers(2, 100))
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=5)))
    cuts = [b - a for a, b in itertools.pairwise([0, *edges, n])]
    keys, values = draw(n, 8), draw(n, 24, seed=1)
    assert same(live(feed(transform, keys, values, cuts), 16), live(feed(transform, keys, values), 16))


def test_token_by_token_equals_one_shot_with_queries_and_without() -> None:
    transform, keys, values = vq.kitty(**SMALL), draw(60, 8), draw(60, 24, seed=1)
    one_shot = live(feed(transform, keys, values), 16)
    assert same(live(feed(transform, keys, values, [1] * 60), 16), one_shot)
    queries = mx.random.normal((1, 3 * HEADS, 60, 8)).astype(mx.float16)
    asked, *_ = transform.update(feed(transform, keys[:, :, :0], values[:, :, :0], capacity=60), keys, values, queries)
    assert same(live(asked, 16), one_shot)


def test_padding_is_no_sink_and_batch_rows_stand_alone() -> None:
    transform, padding = vq.kitty(**SMALL), [0, 5, 19]
    keys, values = draw(70, 8, batch=3), draw(70, 24, seed=1, batch=3)
    for row, pad in enumerate(padding):
        keys[row, :, :pad], values[row, :, :pad] = math.nan, 1000
    for cuts in ([], [3, 40], [1] * 25):
        state = feed(transform, keys, values, cuts, left_padding=mx.array(padding))
        for row, pad in enumerate(padding):
            alone = feed(transform, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
            assert alone.coded.item() >= 32 and same(live(state, 16, row), live(alone, 16))


@pytest.mark.parametrize("x", [1, 7, 12, 30, 45, 57, 60])
def test_trim_reads_as_before_and_sinks_that_it_takes_back_are_none(x: int) -> None:
    transform, keys, values = vq.kitty(**SMALL), draw(60, 8), draw(60, 24, seed=1)
    whole = feed(transform, keys, values)
    short = transform.trim(whole, x)
    assert whole.coded.item() == 48 and short.offset.item() == 60 - x
    assert short.coded.item() == min(48, (60 - x) // 16 * 16)
    before, after = rows_in_order(transform, whole), rows_in_order(transform, short)
    assert all(np.array_equal(got, want[:, : 60 - x]) for got, want in zip(after, before))
    more = draw(x, 8, seed=2), draw(x, 24, seed=3)
    later = feed_more(transform, short, *more)
    for got, old, new in zip(rows_in_order(transform, later), (keys, values), more):
        now = np.concatenate([numbers(old)[0][:, : 60 - x], numbers(new)[0]], axis=1)
        assert np.array_equal(got[:, :4], now[:, :4]) and np.array_equal(got[:, 48:], now[:, 48:])
    again = feed_more(transform, short, keys[:, :, 60 - x :], values[:, :, 60 - x :])
    assert 12 < x < 57 or same(live(again, 16), live(whole, 16))


# Attention, bytes and options


@dtypes
@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("lo, hi, group, value_bits, dim", [(2, 4, 32, 2, 64), (1, 3, 8, None, 260)])
def test_attention_equals_attention_over_what_is_read(
    lo: int, hi: int, group: int, value_bits: int | None, dim: int, n: int, dtype: mx.Dtype
) -> None:
    sizes = {"group_size": group, "n_sink": 5, "residual_length": 16, "value_bits": value_bits}
    transform, total = vq.kitty(lo_bit=lo, hi_bit=hi, **sizes), 120 + n
    keys, values = loud_channels(draw(total, dim, dtype=dtype), 4, 7, dim - 2), draw(total, 80, seed=1, dtype=dtype)
    state = feed(transform, keys[:, :, :120], values[:, :, :120], capacity=total)
    written = transform.write(state, keys[:, :, 120:], values[:, :, 120:])
    queries = mx.random.normal((1, 3 * HEADS, n, dim), key=mx.random.key(5)).astype(dtype)
    want = attended(numbers(queries)[0], *rows_in_order(transform, written), start=120)
    for fill in (None, Fill(total, total, state.coded.item())):
        got = transform.attend(written, queries, dim**-0.5, None, fill)
        assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80) and state.coded.item() == 96
        np.testing.assert_allclose(numbers(got)[0], want, atol=LIMIT[dtype])


@dtypes
@pytest.mark.parametrize(
    "options, halves",
    [
        ({}, 57 + 36),
        ({"group_size": 128}, 44.25 + 36),
        ({"value_bits": None}, 57 + 256),
        ({"lo_bit": 3, "hi_bit": 8, "hi_fraction": 0.5, "value_bits": 4}, 48 + 40 + 16 + 2 + 68),
        ({"n_sink": 0, "residual_length": 9, "hi_fraction": 0}, 48 + 36),
    ],
    ids=str,
)
def test_bytes_follow_the_formula(options: dict[str, Any], halves: float, dtype: mx.Dtype) -> None:
    """`halves` are the bytes of a token in pages where numbers have 16 bits; D = 128."""
    o, size, dim = KittyOptions(**options), dtype.size, 128
    boosted = int(dim * o.hi_fraction)
    key = dim * o.lo_bit / 8 + boosted * (o.hi_bit - o.lo_bit) / 8 + (2 * size * dim + boosted) / o.group_size
    token = key + (dim * size if o.value_bits is None else dim * o.value_bits / 8 + 2 * size)
    assert size == 4 or token == halves
    exact, sinks = (residual_of(o) + block_of(o)) * 2 * dim * size, o.n_sink * (3 * 2 * dim * size + 8)
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, dtype=dtype, capacity=256)
    counters = 12 if o.n_sink else 8
    assert vq.nbytes(vq.kitty(**options).init_state(spec)) == 2 * (3 * (256 * token + exact) + sinks + counters)


@pytest.mark.parametrize(
    "options",
    [
        *({"hi_fraction": value} for value in (-0.1, 1.01, True, "1", None, math.nan)),
        *({"lo_bit": value} for value in (0, 9, 2.5, True)),
        *({"hi_bit": value} for value in (1, 9, None)),
        *({"group_size": 0}, {"group_size": 2.0}, {"n_sink": -1}, {"n_sink": None}, {"residual_length": -1}),
        *({"value_bits": 0}, {"value_bits": 9}, {"ranking": "random"}, {"ranking": None}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^kitty: `{next(iter(options))}` must be .*; got "):
        vq.kitty(**options)


def test_tokens_share_scales_so_no_policy_can_move_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="kitty"):
        vq.chain(vq.h2o_policy(budget=40), vq.kitty())
