"""KIVI with sinks against loops over blocks in numpy: sinks, ranges without them, codes, trims, bytes, attention."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_kivi import HEADS, attended, block_of, draw, dtypes, feed, feed_more, frontier, numbers, rows_in_order

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.quantize.sinks import SIGNALS

SMALL = {"bits": 2, "group_size": 8, "residual_length": 5}  # blocks of 16
LIMIT = {mx.float16: 2e-3, mx.bfloat16: 2e-2, mx.float32: 1e-5}
signals = pytest.mark.parametrize("signal", SIGNALS)


def planted(x: mx.array, size: float, *positions: int) -> mx.array:
    """`x` [B, H, S, D] with the rows at `positions` `size` times as large."""
    chosen = mx.array(np.isin(np.arange(x.shape[2]), positions))
    return mx.where(chosen[:, None], x * size, x).astype(x.dtype)


def bits_of(packed: mx.array, bits: int, count: int) -> np.ndarray:
    """Codes [..., count] of a bit stream, least significant bit first."""
    stream = (np.array(packed)[..., None] >> np.arange(32) & 1).reshape(*packed.shape[:-1], -1)
    return (stream[..., : count * bits].reshape(*packed.shape[:-1], count, bits) << np.arange(bits)).sum(axis=-1)


def live(state: Any, bits: int, group: int, row: int = 0) -> tuple[mx.array, ...]:
    """What a state holds of one batch row, without unused room."""
    coded, offset, sinks = state.coded[row].item(), state.offset[row].item(), state.sinks
    codes, *pairs = (x[row] for x in state.keys.rows)
    return (
        codes[..., : coded * bits // 32],
        *(x[..., : coded // group] for x in pairs),
        *(x[row, :, :coded] for x in state.values.rows),
        *(x[row, :, : offset - coded] for x in (state.recent.keys, state.recent.values)),
        *((x[row] for x in flatten(sinks)[0]) if coded else ()),
    )


def same(one: tuple[mx.array, ...], two: tuple[mx.array, ...]) -> bool:
    return all(a.shape == b.shape and mx.array_equal(a, b).item() for a, b in zip(one, two, strict=True))


# The oracle: float16 input


def signals_of(keys: np.ndarray, signal: str, block: int) -> np.ndarray:
    size = np.linalg.norm(keys.astype(np.float64), axis=-1).mean(axis=0)
    if signal == "first":
        return -np.arange(len(size), dtype=float)
    if signal == "unusual_keys":
        return np.abs(np.log(size / np.sort(size[:block])[block // 2]))
    return size if signal == "large_keys" else -size


def sinks_by_block(signal: np.ndarray, coded: int, count: int, block: int) -> tuple[list[int], np.ndarray]:
    """Sinks of the first `coded` rows, the highest signal first, and which rows were sinks when they were packed."""
    sinks: list[int] = []
    was_sink = np.zeros(coded, bool)
    for start in range(0, coded, block):
        rows = range(start, start + block)
        sinks = sorted((*sinks, *rows), key=lambda i: (-signal[i], i))[:count]
        was_sink[[i for i in rows if i in sinks]] = True
    return sinks, was_sink


def grouped(x: np.ndarray, sink: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    """Codes, scale and zero of float32 `x` [g] whose range the `sink` ones stay out of."""
    others = x[~sink] if not sink.all() else x
    top = 2**bits - 1
    zero = np.float16(others.min())
    scale = np.float16((others.max() - others.min()) / np.float32(top))
    inside = np.clip(x, others.min(), others.max())
    step = np.float32(scale) if scale > 0 else np.float32(np.inf)
    return np.clip(np.round((inside - np.float32(zero)) / step), 0, top).astype(int), scale, zero


def assert_equal_to_oracle(
    state: Any, keys: mx.array, values: mx.array, count: int, signal: str, bits: int, group: int, residual: int
) -> None:
    k, v = numbers(keys)[0], numbers(values)[0]
    block, coded = block_of(bits, group), frontier(k.shape[1], bits, group, residual)
    assert state.coded.item() == coded and coded > 0
    sinks, was_sink = sinks_by_block(signals_of(k, signal, block), coded, count, block)
    if signal != "first":  # a key of a common size enters the range of its group
        was_sink &= signals_of(k, "unusual_keys", block)[:coded] > math.log(2)
    assert state.sinks.position[0].tolist() == sinks + [-1] * (count - len(sinks))
    assert np.array_equal(numbers(state.sinks.keys)[0, :, : len(sinks)], k[:, sinks])
    assert np.array_equal(numbers(state.sinks.values)[0, :, : len(sinks)], v[:, sinks])
    for turned, held, flags in (
        (k[:, :coded].swapaxes(-1, -2), state.keys.rows, was_sink),
        (v[:, :coded], state.values.rows, np.zeros(v.shape[-1], bool)),
    ):
        codes, scales, zeros = bits_of(held[0], bits, turned.shape[-1])[0], *(numbers(x)[0] for x in held[1:])
        for head, line in itertools.product(range(HEADS), range(turned.shape[1])):
            for i in range(turned.shape[-1] // group):
                span = slice(i * group, (i + 1) * group)
                want, scale, zero = grouped(turned[head, line, span], flags[span], bits)
                assert (scales[head, line, i], zeros[head, line, i]) == (scale, zero)
                assert np.array_equal(codes[head, line, span], want)


@signals
@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("bits, group, residual", [(2, 8, 5), (4, 16, 0), (3, 8, 20)])
def test_every_code_and_sink_equals_the_oracle(bits: int, group: int, residual: int, count: int, signal: str) -> None:
    transform = vq.kivi_sink(bits=bits, group_size=group, residual_length=residual, n_sink=count, sink_signal=signal)
    keys, values = draw(90, 4, seed=bits), draw(90, 16, seed=group)
    keys = planted(planted(keys, 25, 20, 21), 0.04, 0, 50)
    state = feed(transform, keys, values)
    assert_equal_to_oracle(state, keys, values, count, signal, bits, group, residual)


# Sinks


@dtypes
@pytest.mark.parametrize("n_sink", [1, 3])
@pytest.mark.parametrize(
    "signal, size", [("unusual_keys", 25), ("unusual_keys", 0.04), ("large_keys", 25), ("small_keys", 0.04)]
)
@pytest.mark.parametrize("position", [0, 17, 63])
def test_a_token_apart_is_exact_wherever_it_is(
    position: int, signal: str, size: float, n_sink: int, dtype: mx.Dtype
) -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=n_sink, sink_signal=signal)
    keys, values = planted(draw(90, 64, dtype=dtype), size, position), draw(90, 24, seed=1, dtype=dtype)
    state = feed(transform, keys, values, [40, 30, *[1] * 20])
    assert state.coded.item() == 80 and position in state.sinks.position[0].tolist()
    assert state.sinks.position[0, 0].item() == position
    for got, x in zip(rows_in_order(transform, state), (keys, values)):
        others = [i for i in range(80) if i not in state.sinks.position[0].tolist()]
        assert np.array_equal(got[:, position], numbers(x)[0, :, position])
        assert (got[:, others] != numbers(x)[0][:, others]).any()


def test_the_first_tokens() -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=4, sink_signal="first")
    keys, values = planted(draw(90, 8), 25, 50), draw(90, 8, seed=1)
    state = feed(transform, keys, values)
    assert state.sinks.position[0].tolist() == [0, 1, 2, 3]
    got, _ = rows_in_order(transform, state)
    assert np.array_equal(got[:, :4], numbers(keys)[0, :, :4])


@signals
@given(n=st.integers(0, 100), n_sink=st.integers(1, 20), seed=st.integers(0, 20))
def test_sinks_are_the_highest_of_all_coded_rows(signal: str, n: int, n_sink: int, seed: int) -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=n_sink, sink_signal=signal)
    keys, values = draw(n + 1, 4, seed=seed), draw(n + 1, 4, seed=1)
    state = feed(transform, keys, values)
    coded = state.coded.item()
    positions = [p for p in state.sinks.position[0].tolist() if p >= 0]
    assert len(positions) == min(n_sink, coded) and all(p < coded for p in positions)
    if coded:
        ranks = signals_of(numbers(keys)[0], signal, 16)[:coded]
        assert positions == np.lexsort((np.arange(coded), -ranks))[:n_sink].tolist()


def test_rows_of_equal_size_leave_the_earlier_ones_as_sinks() -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=3, sink_signal="large_keys")
    keys = mx.ones((1, HEADS, 60, 8), mx.float16) * mx.where(mx.arange(60) % 10 == 9, 2, 1)[:, None]
    state = feed(transform, keys.astype(mx.float16), draw(60, 8), [25, *[1] * 35])
    assert state.sinks.position[0].tolist() == [9, 19, 29]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_sink_leaves_no_trace_in_its_group(count: int, bits: int) -> None:
    """The other rows have the codes that they have beside a row within their range."""
    sizes = {"bits": bits, "group_size": 8, "residual_length": 3, "sink_signal": "large_keys"}
    calm, values = draw(90, 8), draw(90, 8, seed=1)
    loud = planted(calm, 25, 3)
    lengths = np.linalg.norm(numbers(calm)[0, :, :8], axis=-1).mean(axis=0)
    near, other = [i for i in np.argsort(lengths).tolist() if i != 3][:2]
    calm[:, :, 3] = (calm[:, :, near] + calm[:, :, other]) / 2
    one = feed(vq.kivi_sink(**sizes, n_sink=count + 1), loud, values, [50, *[1] * 40])
    two = feed(vq.kivi_sink(**sizes, n_sink=count), calm, values)
    coded = one.coded.item()
    assert coded >= 64 and two.coded.item() == coded
    assert one.sinks.position[0].tolist() == [3, *(two.sinks.position[0].tolist() if count else [])]
    (codes, *got), (other_codes, *want) = (live(state, bits, 8)[:6] for state in (one, two))
    assert same(tuple(got), tuple(want))
    apart = (bits_of(codes, bits, coded) != bits_of(other_codes, bits, coded)).any(axis=(0, 1))
    assert np.flatnonzero(apart).tolist() in ([], [3])


def test_a_sink_that_is_displaced_is_read_through_its_code() -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=1, sink_signal="large_keys")
    keys, values = planted(planted(draw(60, 8), 25, 3), 50, 33), draw(60, 8, seed=1)
    state = feed(transform, keys, values)
    assert state.sinks.position.item() == 33
    got, _ = rows_in_order(transform, state)
    group = np.delete(numbers(keys)[0, :, :8], 3, axis=1)
    assert not np.array_equal(got[:, 3], numbers(keys)[0, :, 3])
    assert (np.abs(got[:, 3]) <= np.abs(group).max(axis=1) * 1.001).all()
    assert np.array_equal(got[:, 33], numbers(keys)[0, :, 33])


# Beside plain KIVI


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_without_sinks_it_is_kivi(bits: int, dtype: mx.Dtype) -> None:
    sizes = {"bits": bits, "group_size": 32, "residual_length": 10}
    keys, values = planted(draw(120, 8, dtype=dtype), 25, 7), draw(120, 24, seed=1, dtype=dtype)
    got, want = (
        flatten(feed(transform, keys, values, [50, 1, 60]))
        for transform in (vq.kivi_sink(**sizes, n_sink=0), vq.kivi(**sizes))
    )
    assert got[1] == want[1] and same(got[0], want[0])


def errors(transform: Any, keys: mx.array, values: mx.array) -> list[np.ndarray]:
    """Squared errors [H, S] of keys and of values."""
    held = rows_in_order(transform, feed(transform, keys, values))
    return [np.square(got - numbers(x)[0]).mean(axis=-1) for got, x in zip(held, (keys, values))]


@signals
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_sinks_cost_no_accuracy_where_there_is_no_outlier(bits: int, signal: str) -> None:
    keys, values = draw(512, 64), draw(512, 64, seed=1)
    sizes = {"bits": bits, "residual_length": 0}
    plain, protected = (
        errors(transform, keys, values) for transform in (vq.kivi(**sizes), vq.kivi_sink(**sizes, sink_signal=signal))
    )
    assert all(with_sinks.mean() <= without.mean() + 1e-6 for with_sinks, without in zip(protected, plain))


def test_neighbours_of_an_outlier_gain_most() -> None:
    keys, values = planted(draw(64, 64), 25, 40), draw(64, 64, seed=1)
    plain, protected = (errors(f(bits=2, residual_length=0), keys, values)[0] for f in (vq.kivi, vq.kivi_sink))
    group = [i for i in range(32, 64) if i != 40]
    assert plain[:, group].mean() >= 5 * protected[:, group].mean()


# How the rows came


@signals
@given(data=st.data(), bits=st.sampled_from([2, 3]), residual=st.sampled_from([0, 1, 33]), n_sink=st.integers(1, 6))
def test_how_a_prompt_was_cut_leaves_no_trace(
    signal: str, data: st.DataObject, bits: int, residual: int, n_sink: int
) -> None:
    transform = vq.kivi_sink(bits=bits, group_size=8, residual_length=residual, n_sink=n_sink, sink_signal=signal)
    n = data.draw(st.integers(1, 110))
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=5)))
    cuts = [b - a for a, b in itertools.pairwise([0, *(edge for edge in edges if edge < n), n])]
    keys, values = planted(draw(n, 8), 25, *data.draw(st.sets(st.integers(0, n - 1), max_size=3))), draw(n, 24, seed=1)
    assert same(live(feed(transform, keys, values, cuts), bits, 8), live(feed(transform, keys, values), bits, 8))


@signals
def test_token_by_token_equals_one_shot(signal: str) -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=3, sink_signal=signal)
    keys, values = planted(draw(90, 8), 25, 4, 30, 55), draw(90, 24, seed=1)
    one_shot = live(feed(transform, keys, values), 2, 8)
    assert same(live(feed(transform, keys, values, [1] * 90), 2, 8), one_shot)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("cuts", [[], [3, 40], [1] * 12], ids=str)
def test_padding_is_no_sink_and_batch_rows_choose_alone(cuts: list[int], signal: str) -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=3, sink_signal=signal)
    padding = [0, 5, 13]
    keys, values = draw(100, 8, batch=3), draw(100, 24, seed=1, batch=3)
    keys[0, :, 11], keys[1, :, 30], keys[2, :, 60] = keys[0, :, 11] * 25, keys[1, :, 30] * 25, keys[2, :, 60] * 0.04
    for row, pad in enumerate(padding):
        keys[row, :, :pad] = math.nan if row == 1 else 1000
        values[row, :, :pad] = math.nan
    state = feed(transform, keys, values, cuts, left_padding=mx.array(padding))
    for row, pad in enumerate(padding):
        alone = feed(transform, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert same(live(state, 2, 8, row), live(alone, 2, 8))
    order = mx.array([2, 0, 1])
    turned = feed(transform, keys[order], values[order], cuts, left_padding=mx.array(padding)[order])
    assert mx.array_equal(turned.sinks.position, state.sinks.position[order])
    gathered = map_leaves(lambda leaf: leaf[order], state)
    assert all(same(live(gathered, 2, 8, row), live(turned, 2, 8, row)) for row in range(3))


# Trim


@pytest.mark.parametrize("x", [1, 4, 9, 23, 40, 52, 85, 90])
def test_what_a_trim_leaves_reads_as_before(x: int) -> None:
    """A sink in a block that is cut open stays exact; one behind the cut is gone."""
    transform = vq.kivi_sink(**SMALL, n_sink=3, sink_signal="large_keys")
    keys, values = planted(draw(90, 8), 25, 34, 50, 66), draw(90, 8, seed=1)
    whole = feed(transform, keys, values, capacity=144)
    short = transform.trim(whole, x)
    assert short.offset.item() == 90 - x
    before, after = rows_in_order(transform, whole), rows_in_order(transform, short)
    assert all(np.array_equal(got, want[:, : 90 - x]) for got, want in zip(after, before))
    more = draw(40, 8, seed=2), draw(40, 8, seed=3)
    later = feed_more(transform, short, *more)
    left = [p for p in (34, 50, 66) if p < 90 - x]
    sinks = [p for p in later.sinks.position[0].tolist() if p in left or p >= 90 - x]
    assert sinks[: len(left)] == sorted(left, key=sinks.index) and set(left) <= set(sinks)
    for got, old, new in zip(rows_in_order(transform, later), (keys, values), more):
        now = np.concatenate([numbers(old)[0][:, : 90 - x], numbers(new)[0]], axis=1)
        assert np.array_equal(got[:, sinks], now[:, sinks])


@pytest.mark.parametrize("x", [4, 23, 40, 60, 90])
def test_trim_and_the_same_rows_again_give_the_same_sinks(x: int) -> None:
    transform = vq.kivi_sink(**SMALL, n_sink=3, sink_signal="large_keys")
    keys, values = planted(draw(90, 8), 25, 34, 50, 66), draw(90, 8, seed=1)
    whole = feed(transform, keys, values)
    again = feed_more(transform, transform.trim(whole, x), keys[:, :, 90 - x :], values[:, :, 90 - x :])
    assert sorted(again.sinks.position[0].tolist()) == [34, 50, 66]
    assert mx.array_equal(again.sinks.keys, whole.sinks.keys) and mx.array_equal(again.sinks.values, whole.sinks.values)
    if x <= 10:
        assert same(live(again, 2, 8), live(whole, 2, 8))


# Attention, bytes and options


@dtypes
@signals
@pytest.mark.parametrize("n", [1, 5])
def test_attention_equals_attention_over_exact_sinks_and_codes(n: int, signal: str, dtype: mx.Dtype) -> None:
    transform, total = vq.kivi_sink(residual_length=16, n_sink=4, sink_signal=signal), 150 + n
    keys = planted(planted(draw(total, 64, dtype=dtype), 6, 3, 70), 0.04, 0, 100)
    values = planted(draw(total, 80, seed=1, dtype=dtype), 3, 3, 100)
    state = feed(transform, keys[:, :, :150], values[:, :, :150], capacity=total)
    held = transform.write(state, keys[:, :, 150:], values[:, :, 150:])
    queries = mx.random.normal((1, 3 * HEADS, n, 64), key=mx.random.key(5)).astype(dtype)
    want = attended(numbers(queries)[0], *rows_in_order(transform, held), start=150)
    for fill in (None, Fill(total, total, state.coded.item())):
        got = transform.attend(held, queries, 64**-0.5, None, fill)
        assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
        np.testing.assert_allclose(numbers(got)[0], want, atol=LIMIT[dtype] * np.abs(want).max())


@dtypes
@pytest.mark.parametrize("n_sink", [1, 5, 64])
def test_bytes_are_those_of_kivi_and_of_the_sinks(n_sink: int, dtype: mx.Dtype) -> None:
    spec = vq.KVSpec(kv_heads=3, key_dim=64, value_dim=80, batch=2, dtype=dtype, capacity=256)
    sizes = {"bits": 4, "bits_v": 3, "group_size": 64, "residual_length": 100}
    got, plain = (
        vq.nbytes(f(**sizes).init_state(spec)) for f in (lambda **o: vq.kivi_sink(n_sink=n_sink, **o), vq.kivi)
    )
    assert got - plain == 2 * (n_sink * (3 * (64 + 80) * dtype.size + 8) + 4)


def test_keys_and_values_take_their_own_bits() -> None:
    transform = vq.kivi_sink(bits=2, bits_k=4, bits_v=8, residual_length=0)
    state = feed(transform, draw(32, 64), draw(32, 64, seed=1))
    words = [side.rows[0].nbytes // 4 // HEADS // transform.capacity(state) * 32 for side in (state.keys, state.values)]
    assert words == [64 * 4, 64 * 8]


@pytest.mark.parametrize(
    "options",
    [
        *({"n_sink": -1}, {"n_sink": True}, {"n_sink": 2.5}, {"sink_signal": "largest"}, {"sink_signal": None}),
        *({"bits": 0}, {"bits": 9}, {"bits_k": 0}, {"bits_v": 9}, {"group_size": 0}, {"residual_length": -1}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"kivi_sink: `{next(iter(options))}` must be"):
        vq.kivi_sink(**options)


def test_scales_are_shared_along_tokens_so_no_policy_can_move_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="kivi_sink"):
        vq.chain(vq.h2o_policy(budget=40), vq.kivi_sink())
