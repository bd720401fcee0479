"""XQuant against numpy: shared codes, lines, residuals, ranges moved inwards, calls, attention, bytes, options."""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xquant_oracle import (
    DIM,
    HEADS,
    SMALL,
    UNIT,
    alike,
    array,
    block_of,
    check,
    coded_rows,
    columns,
    feed,
    live,
    normal,
    numbers,
    rows_in_order,
    same,
    spec_of,
)

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.tree import map_leaves
from vq_functional.crosslayer.xquant import XQuantOptions

dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])
fits = pytest.mark.parametrize("fit", ["lsq", "minmax"])
pytestmark = pytest.mark.filterwarnings("ignore:xquant. without `residual_bits`")


# Codes, lines and residuals


@dtypes
@fits
@pytest.mark.parametrize("bits, residual", [(1, 0), (2, 4), (3, 3), (4, 1), (5, 8), (8, 2)])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_everything_held_equals_the_oracle(dtype: mx.Dtype, fit: str, bits: int, residual: int, layers: int) -> None:
    check(
        *(alike(layers, 39, seed=seed, dim=dim, heads=1) * 3 + 1 for seed, dim in ((1, 4), (2, 8))),
        layers,
        dtype,
        fit=fit,
        base_bits=bits,
        residual_bits=residual,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"bits_k": 4, "bits_v": 3},
        {"bits_k": 1},
        {"bits_v": 6},
        {"eta": 0.045},
        {"eta": 0.3, "fit": "minmax", "base_bits": 1},
        {"eta": 0.1, "residual_bits": 0, "base_bits": 3},
        {"n_sink": 0},
        {"n_sink": 20},
        {"residual_length": 0},
        {"group_quant_size": 12},
        {"group_quant_size": 1},
        {"group_quant_size": 3, "bits_v": 5},
        {"group_quant_size": 32, "residual_length": 1},
    ],
)
def test_other_options(options: dict[str, Any]) -> None:
    keys, values = alike(3, 70, seed=1, dim=3), alike(3, 70, seed=2, dim=7)
    check(keys * 2 - 1, values, 3, cuts=[11, 1, 30], **options)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes, bits = st.integers(1, 9), st.integers(1, 8)
    return {
        "layers": draw(st.integers(1, 3)),
        "dims": (draw(st.integers(1, 4)), draw(sizes)),
        "dtype": draw(st.sampled_from(list(UNIT))),
        "cuts": draw(st.lists(st.sampled_from([1, 1, 2, 7, 19]), max_size=4)),
        "base_bits": draw(bits),
        "residual_bits": draw(st.integers(0, 8)),
        "bits_k": draw(st.none() | bits),
        "bits_v": draw(st.none() | bits),
        "group_quant_size": draw(st.sampled_from([1, 2, 4, 8])),
        "fit": draw(st.sampled_from(["lsq", "minmax"])),
        "eta": draw(st.sampled_from([0.0, 0.0, 0.1, 1 / 3])),
        "residual_length": draw(st.integers(0, 9)),
        "n_sink": draw(st.integers(0, 6)),
    }


@given(cases(), st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.5]))
@settings(max_examples=15, deadline=None)
def test_any_shapes_calls_and_numbers(case: dict[str, Any], seed: int, bad: float) -> None:
    """Some numbers are not finite, some channels are constant or huge."""
    layers, dims, dtype = case.pop("layers"), case.pop("dims"), case.pop("dtype")
    rng, sides, n = np.random.default_rng(seed), [], sum(case["cuts"]) + 43
    heads = layers * (1 + seed % 2)
    for dim in dims:
        x = rng.standard_normal((2, heads, n, dim)) * rng.choice([0.01, 1, 1, 300], (2, heads, 1, dim))
        x = np.where(rng.random((2, heads, 1, dim)) < 0.1, 3.3, x)
        sides.append(np.where(rng.random(x.shape) < bad, rng.choice([math.nan, math.inf, -math.inf], x.shape), x))
    check(*sides, layers, dtype, **case)


def test_a_line_may_fall() -> None:
    x = alike(1, 32, heads=1)
    x = np.concatenate([x, 5 - 2 * x], axis=1)
    options = {"residual_bits": 0, "base_bits": 4, "group_quant_size": 8, "residual_length": 0, "n_sink": 0}
    for read in coded_rows(x, layers=2, **options):
        first, second = np.square(read - x[0]).mean(axis=(1, 2))
        assert second < 4 * first + 1e-5
    scales = feed(vq.xquant(layers=2, **options), array(x)).keys.rows[1]
    assert (scales[:, 1] < 0).all() and (scales[:, 0] > 0).all()


@dtypes
@fits
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("residual", [0, 4])
def test_constant_groups_come_back(dtype: mx.Dtype, fit: str, bits: int, residual: int) -> None:
    """Also where another layer's group is not constant."""
    options = {"base_bits": bits, "residual_bits": residual, "group_quant_size": 8, "layers": 2, "fit": fit}
    for constant in ([0, 1], [1], [0]):
        x = alike(2, 32, heads=4).reshape(2, 4, 32, DIM)
        x[constant] = np.array([3.3, -5, 1e-30, 0])[:, None, None]
        x = x.reshape(1, 8, 32, DIM)
        want = numbers(array(x, dtype))[0]
        for read in coded_rows(x, dtype, **options):
            assert np.isfinite(read).all()
            got, true = (y.reshape(2, 4, 32, DIM)[constant] for y in (read, want))
            np.testing.assert_allclose(got, true, rtol=UNIT[dtype], atol=1e-37)


# Errors on normal numbers


def errors(x: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Mean squared errors of each layer's keys and values [M], whose numbers have power 1."""
    want = numbers(array(x))[0]
    return [np.square(read - want).mean(axis=(1, 2)) for read in coded_rows(x, layers=len(want), **options)]


@pytest.mark.parametrize(
    "bits, rho, minmax, lsq",
    [
        (2, 0, 2.37, 0.94),
        (2, 0.9, 0.42, 0.28),
        (2, 0.99, 0.185, 0.140),
        (2, 1, 0.155, 0.124),
        (4, 0.9, 0.265, 0.182),
        (4, 0.99, 0.035, 0.025),
    ],
)
def test_errors_of_reused_codes(bits: int, rho: float, minmax: float, lsq: float) -> None:
    x = alike(2, 1024, rho, heads=1, dim=64)
    for fit, want in (("minmax", minmax), ("lsq", lsq)):
        for error in errors(x, base_bits=bits, residual_bits=0, fit=fit):
            assert error[1] == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize(
    "bits, eta, want",
    [
        (1, 0, 1.96),
        (1, 1 / 6, 0.68),
        (1, 1 / 4, 0.41),
        (1, 1 / 3, 0.38),
        (2, 0, 0.154),
        (2, 0.045, 0.134),
        (2, 0.06, 0.131),
    ],
)
def test_errors_with_ranges_moved_inwards(bits: int, eta: float, want: float) -> None:
    """Of the anchor, and by range of a layer that equals it."""
    x = alike(2, 1024, 1.0, heads=1, dim=64)
    for error in errors(x, base_bits=bits, eta=eta, residual_bits=0, fit="minmax"):
        assert error == pytest.approx([want, want], rel=0.05)


def test_without_correlation_a_residual_is_a_quantizer_of_its_bits() -> None:
    x = alike(2, 1024, 0, heads=1, dim=64)
    reused, plain = errors(x, residual_bits=4), errors(x[:, 1:], base_bits=4)
    for error, alone in zip(reused, plain):
        assert error[1] == pytest.approx(0.0060, rel=0.05) and alone[0] == pytest.approx(0.0061, rel=0.05)


@pytest.mark.parametrize("eta", [0, 0.2])
def test_an_equal_layer_reads_like_the_anchor(eta: float) -> None:
    x = alike(3, 64, 1.0)
    options = {"residual_bits": 0, "group_quant_size": 8, "eta": eta}
    for read in coded_rows(x, layers=3, fit="minmax", **options):
        assert np.array_equal(read[:HEADS], read[HEADS : 2 * HEADS]) and np.array_equal(read[:HEADS], read[-HEADS:])
    for least, by_range in zip(*(errors(x, fit=fit, **options) for fit in ("lsq", "minmax"))):
        assert (least <= by_range).all()


@given(
    st.integers(0, 999),
    st.integers(1, 8),
    st.sampled_from(["normal", "cauchy", "sparse", "two"]),
    st.sampled_from([mx.float32, mx.float16]),
)
@settings(max_examples=15, deadline=None)
def test_least_squares_beats_the_range_and_the_mean_in_every_group(
    seed: int, bits: int, kind: str, dtype: mx.Dtype
) -> None:
    rng, shape = np.random.default_rng(seed), (1, 3, 32, 8)
    x = {
        "normal": lambda: rng.standard_normal(shape) + 20,
        "cauchy": lambda: np.clip(rng.standard_cauchy(shape), -1e3, 1e3),
        "sparse": lambda: np.where(rng.random(shape) < 0.1, rng.standard_normal(shape), 0),
        "two": lambda: rng.integers(0, 2, shape) * 7.0,
    }[kind]()
    want, options = numbers(array(x, dtype))[0], {"layers": 3, "base_bits": bits}
    options |= {"residual_bits": 0, "group_quant_size": 8}
    least, by_range = (coded_rows(x, dtype, fit=fit, **options) for fit in ("lsq", "minmax"))
    for side, (one, two) in enumerate(zip(least, by_range)):
        grouped = [y[1:].swapaxes(-1, -2) if side == 0 else y[1:] for y in (want, one, two)]
        true, one, two = (y.reshape(2, -1, 8) for y in grouped)
        rounding = 2 * UNIT[dtype] * np.abs(true).max(axis=-1) + 1e-6 * true.std(axis=-1) + 2.0**-24
        error, other = (np.sqrt(np.square(y - true).mean(axis=-1)) for y in (one, two))
        assert (error <= true.std(axis=-1) + rounding).all()
        assert (error <= other + rounding).all()


def test_layers_that_are_unlike_survive_at_the_default() -> None:
    x = alike(2, 128, 0, dim=64)
    for read in coded_rows(x, layers=2):
        cosine = (read * x[0]).sum(axis=-1) / np.linalg.norm(read, axis=-1) / np.linalg.norm(x[0], axis=-1)
        assert cosine[HEADS:].min() > 0.95


def test_loud_channels_of_keys_stay_to_themselves() -> None:
    x = alike(2, 64, 0.5, dim=32)
    loud = x.copy()
    loud[..., 7] *= 100
    plain, other = coded_rows(x, layers=2)[0], coded_rows(loud, layers=2)[0]
    assert np.array_equal(np.delete(plain, 7, axis=-1), np.delete(other, 7, axis=-1))
    biased, query = x.copy(), normal(32, seed=5)
    biased[..., ::9] += 600
    query[::9] /= 100
    read = coded_rows(biased, layers=2, base_bits=4)[0]
    for head in range(2 * HEADS):
        assert np.corrcoef(read[head] @ query, biased[0, head] @ query)[0, 1] > 0.99


# Layers


@fits
def test_the_anchor_does_not_know_its_readers(fit: str) -> None:
    keys, values = (array(alike(3, 60, 0.3, seed=seed)) for seed in (1, 2))
    reads, wide = [], []
    for layers in (1, 2, 3):
        method = vq.xquant(layers=layers, fit=fit, **SMALL)
        state = feed(method, keys[:, : layers * HEADS], values[:, : layers * HEADS], [7, 30])
        reads.append([x[:HEADS] for x in rows_in_order(method, state)])
        wide.append([x[: 2 * HEADS] for x in rows_in_order(method, state)])
    for some in reads[1:]:
        assert all(map(np.array_equal, reads[0], some))
    assert all(map(np.array_equal, wide[1], wide[2]))


@dtypes
@pytest.mark.parametrize("bits", [2, 4])
def test_a_layer_alone_is_kivi_with_sinks(dtype: mx.Dtype, bits: int) -> None:
    keys, values = array(alike(1, 60, seed=1), dtype), array(alike(1, 60, seed=2), dtype)
    got = feed(vq.xquant(base_bits=bits, **SMALL), keys, values, [7])
    want = feed(
        vq.kivi_sink(bits=bits, group_size=8, residual_length=5, n_sink=2, sink_signal="first"), keys, values, [7]
    )
    assert got.coded.item() == 48 and same(got, want)


def split(x: mx.array, layers: int) -> list[mx.array]:
    return mx.split(x, layers, axis=1)


def by_layer(method: Any, keys: mx.array, values: mx.array, cuts: Sequence[int]) -> tuple[Any, list[Any]]:
    """The group after calls layer by layer, and what the last call of each layer returned."""
    layers, start, out = method.layers, 0, []
    group = method.init_group(spec_of(keys, values, layers))
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        span = slice(start, start + count)
        start, out = start + count, []
        for m, (k, v) in enumerate(zip(split(keys[:, :, span], layers), split(values[:, :, span], layers))):
            _, group, *read = method.member(m).update_in(None, group, k, v)
            out.append(read)
    return group, out


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("residual", [0, 3])
def test_cuts_and_layers_leave_no_trace(layers: int, residual: int) -> None:
    """`n_sink` reaches past the first block."""
    keys, values = (array(alike(layers, 75, seed=seed)) for seed in (1, 2))
    method = vq.xquant(layers=layers, **SMALL | {"residual_bits": residual, "n_sink": 19})
    whole = feed(method, keys, values)
    for cuts in ([20, 1, 1, 40], [1] * 30):
        assert all(map(np.array_equal, live(feed(method, keys, values, cuts)), live(whole)))
        group, _ = by_layer(method, keys, values, cuts)
        assert all(map(np.array_equal, live(method.join(group)), live(whole)))
        assert [len(own.keys.rows) for own in group] == [len(whole.keys.rows)] + [0] * (layers - 1)


@given(st.lists(st.sampled_from([1, 1, 3, 12, 33]), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_a_call_reads_its_rows_and_those_that_were_exact_exactly(cuts: list[int], last: int, layers: int) -> None:
    n = sum(cuts) + last
    keys, values = (array(alike(layers, n, seed=seed, heads=1)) for seed in (1, 2))
    options = {"layers": layers, **SMALL}
    method, before = vq.xquant(**options), slice(0, n - last)
    state = feed(method, keys[:, :, before], values[:, :, before], cuts[:-1], n)
    old, coded = rows_in_order(method, state), state.coded.item()
    now, *got = method.update(state, keys[:, :, n - last :], values[:, :, n - last :])
    held = method.write(state, keys[:, :, n - last :], values[:, :, n - last :]) if last else state
    assert now.offset.item() == n and same(now, state) == (last == 0)
    for x, out, was in zip((keys, values), got, old):
        read = numbers(out)[0][:, columns(method, held)]
        assert out.dtype == mx.float16 and np.array_equal(read[:, :coded], was[:, :coded])
        assert np.array_equal(read[:, coded:], numbers(x)[0][:, coded:])
    if layers > 1 and last:
        _, out = by_layer(method, keys, values, cuts)
        for side in range(2):
            assert mx.array_equal(mx.concatenate([layer[side] for layer in out], axis=1), got[side])


@pytest.mark.parametrize("dropped", [1, 5, 11, 40])
def test_rows_after_a_trim(dropped: int) -> None:
    """They read as before; within the exact rows, feeding the same again leaves no trace."""
    keys, values = (array(alike(3, 59, seed=seed)) for seed in (1, 2))
    method = vq.xquant(layers=3, **SMALL)
    state = feed(method, keys, values)
    cut = method.trim(state, dropped)
    for got, want in zip(rows_in_order(method, cut), rows_in_order(method, state)):
        assert np.array_equal(got, want[:, : 59 - dropped])
    again, *_ = method.update(cut, keys[:, :, 59 - dropped :], values[:, :, 59 - dropped :])
    if dropped <= 59 - state.coded.item():
        assert all(map(np.array_equal, live(again), live(state)))
    assert again.offset.item() == 59


# Attention


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("group, dims", [(8, (8, 8)), (32, (32, 64)), (8, (5, 11))])
@pytest.mark.parametrize("bits, residual", [(2, 4), (3, 3), (1, 0), (8, 1)])
def test_attention_is_that_over_what_is_read(
    dtype: mx.Dtype, limit: float, group: int, dims: tuple[int, int], bits: int, residual: int
) -> None:
    """Of all layers at once and of each by itself; two query heads share a head."""
    layers, n, asked = 2, 75, 3
    keys, values = (array(alike(layers, n, seed=dim, dim=dim), dtype) for dim in dims)
    queries = array(normal(1, layers * 2 * HEADS, asked, dims[0], seed=9), dtype)
    options = SMALL | {"group_quant_size": group, "base_bits": bits, "residual_bits": residual}
    method = vq.xquant(layers=layers, **options)
    state = feed(method, keys, values)
    assert state.coded.item() > 0
    k, v = rows_in_order(method, state)
    q, want = numbers(queries)[0], np.zeros((layers * 2 * HEADS, asked, dims[1]))
    for h, i in itertools.product(range(len(q)), range(asked)):
        end = n - asked + 1 + i
        weights = np.exp(0.3 * k[h // 2, :end] @ q[h, i])
        want[h, i] = weights @ v[h // 2, :end] / weights.sum()
    got = method.attend(state, queries, 0.3)
    assert got.dtype == dtype
    np.testing.assert_allclose(numbers(got)[0], want, rtol=limit, atol=limit)
    members = method.split(state)
    for m, asking in enumerate(split(queries, layers)):
        member = method.member(m)
        alone = member.attend(member.borrowed(members[m], members[0]), asking, 0.3)
        np.testing.assert_allclose(numbers(alone)[0], np.split(want, layers)[m], rtol=limit, atol=limit)


# Numbers that break out, and batches


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("residual", [0, 4])
@fits
def test_a_bad_number_stays_in_its_group(bad: float, layer: int, residual: int, fit: str) -> None:
    x = alike(3, 32, dim=16)
    wrong, head, token, channel = x.copy(), 1, 19, 13
    wrong[0, layer * HEADS + head, token, channel] = bad
    options = {"layers": 3, "residual_bits": residual, "fit": fit, "group_quant_size": 8}
    readers = [layer] if layer else [0, 1, 2]
    for side, (got, want) in enumerate(zip(coded_rows(wrong, **options), coded_rows(x, **options))):
        assert np.isfinite(got).all()
        touched = np.zeros(got.shape, bool)
        for m in readers:
            spans = (slice(16, 24), channel) if side == 0 else (token, slice(8, 16))
            touched[(m * HEADS + head, *spans)] = True
        assert np.array_equal(got[~touched], want[~touched])
        assert np.abs(got - want).max() < 5


def test_a_group_of_bad_numbers_only() -> None:
    x = alike(2, 16, heads=1)
    for layer in range(2):
        wrong = x.copy()
        wrong[:, layer] = math.nan
        for got, want in zip(*(coded_rows(y, layers=2, group_quant_size=8) for y in (wrong, x))):
            assert (got[layer] == 0).all() and np.abs(got[1 - layer] - want[1 - layer]).max() < 3


@dtypes
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("bits, residual", [(2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize("lonely", [True, False])
@fits
def test_the_largest_numbers_come_back_within_half_a_step(
    dtype: mx.Dtype, layer: int, bits: int, residual: int, lonely: bool, fit: str
) -> None:
    """One or half of a group's numbers at the other end of what a half float holds."""
    x = alike(2, 32, heads=1, dim=32)
    x[0, layer] = 65504
    x[0, layer, ::8, ::8] = -65504
    if not lonely:
        x[0, layer, ::2] = -65504
    options = {"layers": 2, "base_bits": bits, "residual_bits": residual, "group_quant_size": 8, "fit": fit}
    want, method = numbers(array(x, dtype))[0], vq.xquant(residual_length=0, n_sink=0, **options)
    query, state = array(normal(1, 2, 1, 32) / 1e4, dtype), feed(method, array(0.95 * x, dtype))
    assert mx.isfinite(method.attend(state, query, 1.0)).all()
    for read in coded_rows(x, dtype, **options):
        assert np.isfinite(read).all()
        step = 2 * 65504 / (2**bits - 1) if layer == 0 else 2 * 2 * 65504 / (2**residual - 1)
        assert np.abs(read - want)[layer].max() <= step * (0.5 + 2**bits * UNIT[dtype]) + 65504 * 4 * UNIT[dtype]
        assert np.abs(read - want)[1 - layer].max() < 3


@fits
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-13, 2.0**10, 2.0**124])
def test_the_size_of_numbers_does_not_matter(size: float, fit: str) -> None:
    x = numbers(array(alike(2, 32))).reshape(1, 2 * HEADS, 32, DIM)
    options = {"layers": 2, "fit": fit, "base_bits": 4, "group_quant_size": 8, "dtype": mx.float32}
    for got, want in zip(coded_rows(x * size, **options), coded_rows(x, **options)):
        np.testing.assert_allclose(got / size, want, atol=1e-6)


@fits
def test_batch_rows_stand_alone(fit: str) -> None:
    keys, values = (np.concatenate([alike(2, 60, seed=seed + i) for i in range(3)]) for seed in (1, 11))
    keys[1] *= 1000
    values[2, :, 20] = math.nan
    method, k, v = vq.xquant(layers=2, fit=fit, **SMALL), array(keys), array(values)
    state = feed(method, k, v, [9])
    for row in range(3):
        span = slice(row, row + 1)
        assert same(map_leaves(lambda x, span=span: x[span], state), feed(method, k[span], v[span], [9]))


def test_left_padding_leaves_no_trace() -> None:
    keys, values = (np.concatenate([alike(2, 60, seed=seed + i) for i in range(2)]) for seed in (1, 11))
    keys[1, :, :9], values[1, :, :9] = 30, -30
    method = vq.xquant(layers=2, **SMALL)
    state = feed(method, array(keys), array(values), padding=mx.array([0, 9]))
    for row, padding in enumerate((0, 9)):
        alone = feed(method, array(keys[row : row + 1, :, padding:]), array(values[row : row + 1, :, padding:]))
        assert state.coded[row].item() == alone.coded.item() == (60 - padding - 5) // 16 * 16
        assert all(map(np.array_equal, rows_in_order(method, state, row), rows_in_order(method, alone)))


# Bytes


def bytes_of(o: XQuantOptions, layers: int, dims: tuple[int, int], spec: vq.KVSpec) -> int:
    """By the shapes of the card, a batch row and a head; then what is there once a batch row."""
    item, size = spec.dtype.size, o.group_quant_size
    rows = -(-spec.capacity // block_of(o, layers)) * block_of(o, layers)
    wide = -(-dims[1] // size)
    total = 0
    for bits, count in ((o.base_bits, 1), (o.residual_bits, layers - 1 if o.residual_bits else 0)):
        key, value = (bits, bits) if bits == o.residual_bits and count != 1 else (o.bits_k or bits, o.bits_v or bits)
        total += count * (dims[0] * rows * key // 8 + rows * 4 * -(-wide * size * value // 32))
    lines = layers + (layers - 1 if o.residual_bits else 0)
    total += lines * 2 * item * (dims[0] * rows // size + rows * wide)
    total += layers * (o.residual_length + block_of(o, layers) + o.n_sink) * sum(dims) * item
    return spec.batch * (spec.kv_heads // layers * total + 8 + (8 * o.n_sink + 4 if o.n_sink else 0))


@dtypes
@pytest.mark.parametrize("layers", [1, 3, 4])
@pytest.mark.parametrize("dims", [(128, 128), (64, 80), (5, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual_bits": 0},
        {"base_bits": 3, "residual_bits": 5, "n_sink": 0},
        {"group_quant_size": 12, "residual_length": 7},
        {"group_quant_size": 64, "base_bits": 1, "residual_bits": 1, "bits_k": 3, "bits_v": 7},
    ],
)
def test_bytes(dtype: mx.Dtype, layers: int, dims: tuple[int, int], options: dict[str, Any]) -> None:
    sizes = {"kv_heads": 2 * layers, "key_dim": dims[0], "value_dim": dims[1], "batch": 3}
    spec = vq.KVSpec(**sizes, dtype=dtype, capacity=300)
    held = vq.xquant(layers=layers, **options).init_state(spec)
    assert vq.nbytes(held) == bytes_of(XQuantOptions(**options), layers, dims, spec)


@pytest.mark.parametrize("residual, reader", [(0, 32), (4, 192)])
def test_bytes_a_token_of_anchor_and_reader(residual: int, reader: int) -> None:
    """Without a residual a reader has no array as large as its codes would be."""

    def held(layers: int, tokens: int) -> Any:
        spec = vq.KVSpec(kv_heads=layers, key_dim=128, value_dim=128, capacity=tokens)
        return vq.xquant(layers=layers, residual_bits=residual).init_state(spec)

    a_token = [(vq.nbytes(held(m, 2048)) - vq.nbytes(held(m, 1024))) / 1024 for m in (1, 2, 3)]
    assert a_token == [96, 96 + reader, 96 + 2 * reader]
    if residual == 0:
        for side in ("keys", "values"):
            one, three = ([x.nbytes for x in getattr(held(m, 2048), side).rows] for m in (1, 3))
            assert one[0] == three[0] == 128 * 2048 * 2 // 8
            assert all(x < one[0] for x in (b - a for a, b in zip(one[1:], three[1:])))


def test_many_small_calls_need_no_more_room() -> None:
    keys, values = (array(alike(3, 120, seed=seed, heads=1)) for seed in (1, 2))
    assert XQuantOptions().stacks(3) == [2, 1]
    for size in XQuantOptions().stacks(3):
        method = vq.xquant(layers=size, **SMALL)
        state = feed(method, keys[:, :size], values[:, :size], [1] * 119)
        assert vq.nbytes(state) == vq.nbytes(method.init_state(spec_of(keys[:, :size], values[:, :size])))


# Options


@pytest.mark.parametrize(
    "layers, size, want", [(7, 3, [3, 3, 1]), (4, 2, [2, 2]), (1, 2, [1]), (0, 2, []), (5, 9, [5])]
)
def test_groups_of_a_model(layers: int, size: int, want: list[int]) -> None:
    assert XQuantOptions(group_size=size).stacks(layers) == want


@pytest.mark.parametrize(
    "option",
    [
        {"base_bits": 3},
        {"residual_bits": 5},
        {"group_quant_size": 4},
        {"fit": "minmax"},
        {"eta": 0.1},
        {"residual_length": 30},
        {"n_sink": 7},
        {"bits_k": 3},
        {"bits_v": 3},
    ],
    ids=lambda option: next(iter(option)),
)
def test_every_option_changes_what_is_read(option: dict[str, Any]) -> None:
    """`bits_k` and `bits_v` those of their side alone."""
    keys, values = (array(alike(2, 75, seed=seed)) for seed in (1, 2))
    options = SMALL | {"group_quant_size": 32}
    one, two = vq.xquant(layers=2, **options), vq.xquant(layers=2, **options | option)
    reads = [rows_in_order(method, feed(method, keys, values)) for method in (one, two)]
    changed = [not np.array_equal(a, b) for a, b in zip(*reads)]
    assert changed == ["bits_v" not in option, "bits_k" not in option]


def test_the_size_of_groups_of_layers_is_for_the_builder() -> None:
    assert vq.xquant(layers=2, group_size=5) == vq.xquant(layers=2)


def test_no_tokens_past_max_ctx() -> None:
    method = vq.xquant(layers=2, max_ctx=40, **SMALL)
    keys = array(alike(2, 41))
    state = method.init_state(spec_of(keys, keys, capacity=64))
    state, *held = method.update(state, keys[:, :, :40], keys[:, :, :40])
    assert all(mx.isfinite(x).all() for x in held)
    _, *held = method.update(state, keys[:, :, 40:], keys[:, :, 40:])
    assert all(mx.isnan(x).all() for x in held)
    cache = TransformKVCache(method)
    cache.update_and_fetch(keys[:, :, :40], keys[:, :, :40])
    with pytest.raises(vq.QuantizerConfigError, match=r"^xquant: `keys` must stay within `max_ctx` = 40; got 41$"):
        cache.update_and_fetch(keys[:, :, 40:], keys[:, :, 40:])
    assert cache.offset == 40


def test_only_readers_without_a_residual_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vq.xquant(), vq.xquant(layers=2), vq.xquant(layers=1, residual_bits=0)
        assert not caught
        vq.xquant(layers=2, residual_bits=0)
    assert [w.category for w in caught] == [UserWarning] and str(caught[0].message).startswith("xquant: ")
    assert caught[0].filename == __file__


BAD_VALUES: dict[str, tuple[str, list[Any]]] = {
    "group_size": ("must be an integer >= 2", [1, 2.0, True, None]),
    "base_bits": (r"must be an integer in \[1, 8\]", [0, 9, 2.0, None, True]),
    "bits_k": (r"must be an integer in \[1, 8\]", [0, 9, "2"]),
    "bits_v": (r"must be an integer in \[1, 8\]", [0, 16, 1.5]),
    "residual_bits": (r"must be an integer in \[0, 8\]", [-1, 9, False, None]),
    "group_quant_size": ("must be an integer >= 1", [0, -32, 32.0]),
    "max_ctx": ("must be an integer >= 1", [0, None, math.inf]),
    "fit": (r"must be one of \('lsq', 'minmax'\)", ["mse", None, 1]),
    "eta": (r"must be a finite number in \[0, 0.5\)", [-0.1, 0.5, math.nan, math.inf, True, "0"]),
    "residual_length": ("must be an integer >= 0", [-1, 1.0, None]),
    "n_sink": ("must be an integer >= 0", [-1, 4.0, True]),
    "layers": ("must be an integer >= 1", [0, 2.0, True, None]),
}


@pytest.mark.parametrize("field, value", [(field, x) for field, (_, values) in BAD_VALUES.items() for x in values])
def test_options_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^xquant: `{field}` {BAD_VALUES[field][0]}; got ") as raised:
        vq.xquant(**{field: value})
    assert str(raised.value).endswith(repr(value))


def test_every_option_is_checked() -> None:
    assert {field.name for field in attrs.fields(XQuantOptions)} == BAD_VALUES.keys() - {"layers"}


@pytest.mark.parametrize(
    "message, call",
    [
        (
            "`kv_heads` must be a multiple of the 2 layers; got 3",
            lambda: vq.xquant(layers=2).init_state(vq.KVSpec(kv_heads=3, key_dim=8, value_dim=8)),
        ),
        ("`layer` must be below 2; got 2", lambda: vq.xquant(layers=2).member(2)),
        ("`layer` must be below 2; got -1", lambda: vq.xquant(layers=2).member(-1)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^xquant: {message}$"):
        call()
