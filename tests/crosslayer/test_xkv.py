"""xKV against numpy: axes and spread of joined layers, latents and codes, calls, attention, bases, bytes, options."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xkv_oracle import (
    DIM,
    HEADS,
    N,
    assert_axes,
    bits_of,
    calibrated,
    check_state,
    factors,
    given_factors,
    joint,
    layout,
    quantized,
    sample,
    turn,
    width_of,
)
from xquant_oracle import UNIT, feed, numbers, rows_in_order, same, spec_of

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.tree import flatten
from vq_functional.crosslayer.xkv import XKVOptions
from vq_functional.crosslayer.xkv_basis import XKVBasis

SMALL: dict[str, Any] = {"n_fit": 100, "residual_length": 8, "n_sink": 2}  # 104 rows are there before any is packed
CODED = 128  # of N
dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])


def by_layer(method: Any, keys: mx.array, values: mx.array, cuts: Sequence[int]) -> tuple[Any, list[mx.array]]:
    """The group after these calls, each layer by layer, and what the last one returned of all layers."""
    group, start = method.init_group(spec_of(keys, values, method.layers)), 0
    for count in cuts:
        out, span = [], slice(start, start + count)
        for m in range(method.layers):
            own = (mx.split(x[:, :, span], method.layers, axis=1)[m] for x in (keys, values))
            state, group, *read = method.member(m).update_in(None, group, *own)
            out.append(read)
            assert state is group[m]
        start += count
    return group, [mx.concatenate(list(side), axis=1) for side in zip(*out)]


def live(state: Any, row: int = 0) -> tuple[mx.array, ...]:
    """What is held of a batch row, without unused room."""
    coded, offset = state.coded[row].item(), state.offset[row].item()
    packed = (x[row, :, :coded] for side in (state.keys, state.values) for x in side.rows)
    tables = (x[row] for side in (state.keys, state.values) for x in side.tables if coded)
    return (*packed, *tables, *(x[row, :, : offset - coded] for x in (state.recent.keys, state.recent.values)))


def check(keys: mx.array, values: mx.array, layers: int = 2, cuts: Sequence[int] = (), **options: Any) -> Any:
    method = vq.xkv(layers=layers, **SMALL | options)
    state = feed(method, keys, values, cuts)
    check_state(method, state, (keys, values), XKVOptions(**SMALL | options))
    return state


# Axes and spread


@pytest.mark.parametrize("layers, heads, n_sink", [(1, 1, 0), (1, 3, 5), (2, 2, 5), (3, 1, 0), (3, 2, 2)])
@pytest.mark.parametrize("centred", [True, False])
def test_axes_and_spread_are_those_of_all_layers_first_rows(
    layers: int, heads: int, n_sink: int, centred: bool
) -> None:
    keys, values = (sample(dim=dim, seed=dim, heads=layers * heads) for dim in (16, 9))
    method = vq.xkv(layers=layers, rank=70, centred=centred, **SMALL | {"n_sink": n_sink})
    state = feed(method, keys, values)
    for held, x in ((state.keys, keys), (state.values, values)):
        axes, mean, s = factors(held)
        assert axes.shape == (layers * heads * x.shape[3], 32 * math.ceil(min(70, axes.shape[0]) / 32))
        share = assert_axes(joint(numbers(x)[0])[n_sink:104], axes, mean, centred)
        np.testing.assert_allclose(s, np.sqrt(np.maximum(share / 0.05, 1)), atol=1e-4)
    index = mx.arange(N)[:, None]
    for other in (mx.where(index < 104, keys, 30 * keys[..., ::-1]), mx.where(index < n_sink, 50.0, keys)):
        assert same(feed(method, other, values).keys.tables, state.keys.tables)


@dtypes
@pytest.mark.parametrize("bits", [4, 16])
def test_tables_in_each_dtype(dtype: mx.Dtype, bits: int) -> None:
    keys = sample(dtype=dtype)
    state = feed(vq.xkv(layers=2, latent_bits=bits, rank=64, **SMALL), keys)
    assert [x.dtype for x in state.keys.tables[1:]] == [dtype, mx.float32]
    assert state.keys.tables[0].dtype.size == dtype.size
    axes, mean, s = factors(state.keys)
    share = assert_axes(joint(numbers(keys)[0])[2:104], axes, mean, True, {mx.float32: 2e-6}.get(dtype, UNIT[dtype]))
    want = np.sqrt(np.maximum(share / 0.05, 1)) if bits < 16 else np.ones(64)
    unit = s.max() / want.max()
    np.testing.assert_allclose(s / unit, want, rtol=1e-2)
    assert abs(math.log2(unit) % 1 - 0.5) > 0.49 and (abs(unit - 1) < 1e-2 or dtype == mx.float16)


@pytest.mark.parametrize("n_fit, residual", [(1, None), (40, None), (64, 32), (90, 70), (33, 0)])
@pytest.mark.parametrize("given_basis", [False, True])
def test_how_many_rows_are_fitted_and_stay_exact(n_fit: int, residual: int | None, given_basis: bool) -> None:
    keys, basis = sample(200), calibrated(sample(70, seed=1), rank=8) if given_basis else None
    least, _ = layout(0, n_fit, residual, given_basis)
    options = {"n_fit": n_fit, "residual_length": residual, "n_sink": 0, "basis": basis}
    method = vq.xkv(layers=2, rank=8, **options)
    for n in (least - 1, least, least + 31, least + 32, 200):
        state, coded = feed(method, keys[:, :, :n]), layout(n, n_fit, residual, given_basis)[1]
        assert state.coded.item() == coded and state.recent.keys.shape[2] == least
        assert np.array_equal(rows_in_order(method, state)[0][:, coded:], numbers(keys)[0, :, coded:n])
    assert coded > 0


@pytest.mark.parametrize(
    "options, fitted, window, width",
    [({}, 192, 160, 96), ({"rank": 120}, 240, 208, 128), ({"rank": 33, "rank_v": 128}, 256, 224, 64)],
)
def test_default_fit_window_and_rank(options: dict[str, Any], fitted: int, window: int, width: int) -> None:
    o, state = XKVOptions(**options), feed(vq.xkv(layers=2, **options), sample(1, 64))
    assert (o.fitted, o.residual, state.recent.keys.shape[2]) == (fitted, window, fitted)
    assert state.keys.tables[0].shape == (1, HEADS, 64, width)


# Codes


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rank": 64, "latent_bits": 8},
    {"rank": 20, "latent_bits": 2},
    {"rank": 40, "rank_v": 10, "bits_k": 3, "bits_v": 6},
    {"rank": 40, "group_quant_size": 64, "latent_bits": 5},
    {"rank": 64, "group_quant_size": 128},
    {"rank": 40, "rotate": False},
    {"centred": False},
    {"latent_bits": 16},
    {"rank": 64, "bits_v": 16, "rotate": False},
    {"latent_bits": 16, "bits_k": 4, "centred": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_everything_held_equals_the_oracle(options: dict[str, Any]) -> None:
    keys, values = sample(), sample(dim=20, seed=1)
    o, state = XKVOptions(**SMALL | options), check(keys, values, **options)
    for side, x in enumerate((keys, values)):  # with axes, spread and codes of the oracle throughout
        rows = joint(numbers(x)[0])
        mean = rows[2:104].mean(axis=0) if o.centred else np.zeros(rows.shape[1])
        _, sigma, axes = np.linalg.svd(rows[2:104] - mean, full_matrices=True)
        like, _, _ = factors((state.keys, state.values)[side])
        width = width_of(len(mean), o, side)
        axes, sigma = (np.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, width)])[..., :width] for y in (axes.T, sigma))
        axes = axes * np.where((axes * like).sum(axis=0) < 0, -1, 1)
        coded, q = bits_of(o, side) < 16, turn(width, o, side)
        s = np.sqrt(np.maximum(sigma / sigma[0] / 0.05, 1)) if coded else np.ones(width)
        a = (rows[2:CODED] - mean) @ (axes / s) @ q
        want = (quantized(a, bits_of(o, side), o.group_quant_size) if coded else a) @ q.T * s @ axes.T + mean
        got = joint(rows_in_order(vq.xkv(layers=2, **SMALL | options), state)[side])[2:CODED]
        loss = np.square(want - rows[2:CODED]).sum()
        assert np.mean(np.abs(got - want).max(axis=-1) < 2e-3) > 0.8
        assert np.square(got - want).sum() <= 0.05 * loss + 1e-6


@dtypes
@pytest.mark.parametrize("layers, heads, dim", [(2, 1, 64), (3, 2, 5), (1, 3, 20)])
@pytest.mark.parametrize("bits", [4, 16])
def test_everything_held_equals_the_oracle_in_each_dtype(
    dtype: mx.Dtype, layers: int, heads: int, dim: int, bits: int
) -> None:
    keys, values = (sample(110, dim + s, seed=s, heads=layers * heads, dtype=dtype) for s in (0, 1))
    check(keys, values, layers, latent_bits=bits, rank=40)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "layers": draw(st.integers(1, 3)),
        "rank": draw(st.none() | st.integers(1, 70)),
        "rank_v": draw(st.none() | st.integers(1, 70)),
        "latent_bits": draw(st.sampled_from([2, 3, 4, 5, 6, 8, 16])),
        "bits_k": draw(st.sampled_from([None, 3, 16])),
        "group_quant_size": draw(st.sampled_from([32, 64])),
        "rotate": draw(st.booleans()),
        "centred": draw(st.booleans()),
        "n_fit": draw(st.sampled_from([10, 40, 70])),
        "residual_length": draw(st.sampled_from([None, 0, 5, 40])),
        "n_sink": draw(st.integers(0, 9)),
    }


@given(
    cases(),
    st.lists(st.sampled_from([1, 1, 2, 7, 31, 33, 64]), min_size=1, max_size=5),
    st.tuples(st.integers(1, 17), st.integers(1, 17)),
    st.sampled_from(list(UNIT)),
    st.sampled_from([0.0, 0.0, 0.01]),
)
@settings(max_examples=20, deadline=None)
def test_any_shapes_calls_and_numbers(
    case: dict[str, Any], cuts: list[int], dims: tuple[int, int], dtype: mx.Dtype, bad: float
) -> None:
    """Layer by layer in pieces as at once; some numbers are not finite."""
    case, n = dict(case), sum(cuts)
    layers, sides = case.pop("layers"), []
    for seed, dim in enumerate(dims):
        x = sample(n, dim, seed, heads=layers * (1 + n % 2), dtype=dtype, batch=2)
        sides.append(mx.where(mx.random.uniform(shape=x.shape, key=mx.random.key(seed)) < bad, math.inf, x))
    method = vq.xkv(layers=layers, **case)
    state, (group, _) = feed(method, *sides), by_layer(method, *sides, cuts)
    check_state(method, state, sides, XKVOptions(**case))
    for row in range(2):
        assert same(live(method.join(group), row), live(state, row))
    assert all(own.keys.rows == own.values.rows == () and own.sinks is None for own in group[1:])
    assert {own.offset[0].item() for own in group} == {n}


def test_single_tokens_settle_nothing_before_the_rows_to_fit_are_there() -> None:
    keys, method = sample(106), vq.xkv(layers=2, **SMALL)
    state = method.init_state(spec_of(keys, keys))
    for i in range(106):
        state, *_ = method.update(state, keys[:, :, i : i + 1], keys[:, :, i : i + 1])
        assert state.coded.item() == (96 if i >= 103 else 0)
    assert same(live(state), live(feed(method, keys)))


# What sharing is for


@pytest.mark.parametrize("layers, heads, dim", [(1, 1, 32), (2, 2, 10), (3, 1, 11)])
@dtypes
def test_all_axes_without_codes_are_exact(layers: int, heads: int, dim: int, dtype: mx.Dtype) -> None:
    keys = sample(dim=dim, heads=layers * heads, dtype=dtype)
    method = vq.xkv(layers=layers, rank=10**4, latent_bits=16, n_fit=100, residual_length=8)
    for got in rows_in_order(method, feed(method, keys)):
        error = np.linalg.norm(got - numbers(keys)[0]) / np.linalg.norm(numbers(keys)[0])
        assert error <= {mx.float32: 2e-6, mx.float16: 2e-3}.get(dtype, 8e-3)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_what_is_lost_is_the_energy_of_the_tail(layers: int) -> None:
    keys = sample(200, decay=0.98)
    method = vq.xkv(layers=layers, rank=32, latent_bits=16, n_fit=200, residual_length=8, n_sink=0)
    read, rows = rows_in_order(method, feed(method, keys))[0], joint(numbers(keys)[0])
    axes, mean, _ = factors(feed(method, keys).keys)
    tail = np.square(np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)[32:]).sum()
    lost = np.square(rows - mean - (rows - mean) @ axes @ axes.T)
    assert lost.sum() == pytest.approx(tail, rel=1e-3)
    assert np.square(joint(read) - rows).sum() == pytest.approx(lost[:192].sum(), rel=1e-3)


def test_layers_of_one_source_share_a_latent() -> None:
    """24 numbers a token for all layers, later tokens too: with 32 components they are kept, whatever M."""
    rng = np.random.default_rng(0)
    x = mx.array((rng.normal(size=(1, 1, 300, 24)) @ rng.normal(size=(1, 8, 24, 32)) + 3).astype(np.float32))
    width = []
    for layers in (1, 2, 4):
        method = vq.xkv(layers=layers, rank=32, latent_bits=16, n_fit=64)
        state = feed(method, x[:, : 2 * layers])
        read, want = rows_in_order(method, state)[0], numbers(x)[0, : 2 * layers]
        assert np.linalg.norm(read - want) <= 1e-5 * np.linalg.norm(want)
        width.append(state.keys.rows[0].shape[1:])
    assert len(set(width)) == 1
    alone = vq.xkv(layers=2, rank=32, n_fit=64)
    read, want = rows_in_order(alone, feed(alone, x[:, :4]))[0], numbers(x)[0, :4]
    early, late = (np.square(read - want)[:, span].mean() for span in (slice(4, 64), slice(64, 250)))
    assert late < 2 * early < 0.02 * want.var()


@pytest.mark.parametrize("layers", [2, 4])
def test_identical_layers_need_no_more_axes(layers: int) -> None:
    keys = sample(300, 64, heads=1, decay=0.97)
    alone, together = (calibrated(mx.concatenate([keys] * m, axis=1), energy_threshold=0.9) for m in (1, layers))
    assert alone.key_basis.shape[2] == together.key_basis.shape[2] == 32
    assert together.key_basis.shape[0] == layers
    method = vq.xkv(layers=layers, **SMALL, rank=64)
    read = np.split(rows_in_order(method, feed(method, mx.concatenate([keys[:, :, :N]] * layers, axis=1)))[0], layers)
    for other in read[1:]:
        np.testing.assert_allclose(other, read[0], atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rotate", [True, False])
def test_latents_are_off_by_half_a_step(bits: int, rotate: bool) -> None:
    keys, options = sample(decay=0.97), SMALL | {"rank": 64, "latent_bits": bits, "rotate": rotate}
    method = vq.xkv(layers=2, **options)
    state = feed(method, keys)
    axes, mean, s = factors(state.keys)
    came, read = numbers(keys)[0], rows_in_order(method, state)[0]
    latents = [(joint(x)[2:CODED] - mean) @ (axes / s) @ turn(64, XKVOptions(**options), 0) for x in (came, read)]
    a, held = (x.reshape(CODED - 2, 2, 32) for x in latents)
    off = np.abs(held - a) / (np.ptp(a, axis=-1, keepdims=True) / (2**bits - 1))
    assert off.max() <= 0.5 + 2e-3 and np.square(off).mean() == pytest.approx(1 / 12, rel=0.2)


def test_rotation_and_mean_pay() -> None:
    keys, error = sample(decay=0.95), {}
    for options in ({}, {"rotate": False}, {"centred": False}):
        x = keys + 5 if "centred" in options else keys
        for o in (options, {}):
            method = vq.xkv(layers=2, **SMALL | {"rank": 64, "latent_bits": 3} | o)
            error[str(options), str(o)] = np.square(rows_in_order(method, feed(method, x))[0] - numbers(x)[0]).sum()
    plain, centred = str({"rotate": False}), str({"centred": False})
    assert error[plain, "{}"] < error[plain, plain] and error[centred, "{}"] < error[centred, centred]


# Odd numbers


@pytest.mark.parametrize("value", [3.3, -5.0, 0.0, 1e-30])
@pytest.mark.parametrize("bits", [2, 16])
@dtypes
def test_equal_rows_come_back(value: float, bits: int, dtype: mx.Dtype) -> None:
    row = mx.where(mx.arange(DIM) % 3 == 0, value, -2 * value)
    keys = mx.broadcast_to(row, (1, HEADS, 110, DIM)).astype(dtype)
    method = vq.xkv(layers=2, latent_bits=bits, **SMALL)
    for got in rows_in_order(method, feed(method, keys)):
        np.testing.assert_allclose(got, numbers(keys)[0], rtol=UNIT[dtype], atol=1e-36)


@pytest.mark.parametrize("scale", [2.0**-13, 2.0**10, 1e-4, 1e3, 1e-18, 1e18])
def test_the_size_of_numbers_does_not_matter(scale: float) -> None:
    keys, method = sample(), vq.xkv(layers=2, **SMALL, rank=64)
    one, two = (rows_in_order(method, feed(method, x)) for x in (keys, keys * scale))
    for a, b in zip(one, two):
        limit = 1e-5 if math.log2(scale).is_integer() else 1e-2
        assert np.linalg.norm(b / scale - a) <= limit * np.linalg.norm(a)


def test_a_bias_that_dwarfs_the_rest_costs_nothing() -> None:
    keys, bias = sample(), mx.where(mx.arange(DIM) % 5 == 3, 600.0, 0.0)
    method = vq.xkv(layers=2, **SMALL, rank=64)
    errors = [rows_in_order(method, feed(method, x))[0] - numbers(x)[0] for x in (keys, keys + bias)]
    assert np.square(errors[1]).mean() <= 1.05 * np.square(errors[0]).mean()


@dtypes
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("alone", [False, True])
def test_the_largest_numbers_are_kept(dtype: mx.Dtype, late: bool, bits: int, alone: bool) -> None:
    """All of a row or one number, also along axes that the first rows don't spread along."""
    signs, at = mx.sign(sample(decay=1.0)[:, :1, :, :1]), mx.arange(N)[:, None]
    loud = signs * mx.where((mx.arange(DIM) == 3) | (not alone), 60000.0, 0.0)
    keys = mx.where((at >= 104) | (not late), loud, sample()).astype(dtype)
    for rotate in (True, False):
        method = vq.xkv(layers=2, **SMALL, rank=64, latent_bits=bits, rotate=rotate)
        state = feed(method, keys)
        read = rows_in_order(method, state)[0]
        assert np.isfinite(read).all() and np.abs(read - numbers(keys)[0]).max() <= 0.05 * 60000
        queries = (keys[:, :, ::7].astype(mx.float32) / 60000).astype(dtype)
        assert mx.isfinite(method.attend(state, queries[:, :, -1:], 1e-3)).all()


@dtypes
@pytest.mark.parametrize("rotate", [True, False])
def test_late_rows_along_a_weak_axis_are_kept(dtype: mx.Dtype, rotate: bool) -> None:
    """All numbers of a row are 60000, along the axis with the least spread among the first rows."""
    rng, at = np.random.default_rng(0), np.arange(N)[:, None]
    x = 10 * rng.normal(size=(N, 1)) * np.tile([1, -1], 32) + 0.01 * rng.normal(size=(N, 1))
    x = np.where(at < 104, x, 60000 * np.sign(rng.normal(size=(N, 1))))
    keys = mx.array(x.reshape(N, HEADS, DIM).swapaxes(0, 1)[None].astype(np.float32)).astype(dtype)
    method = vq.xkv(layers=2, rotate=rotate, **SMALL)
    read = rows_in_order(method, feed(method, keys))[0]
    assert np.abs(read - numbers(keys)[0])[:, 104:].max() <= 0.05 * 60000


@pytest.mark.parametrize("bad, layer", [(math.nan, 0), (-math.inf, 1)])
@pytest.mark.parametrize("at", [1, 103, 120])
@dtypes
def test_a_number_that_is_not_finite_is_its_channels_mean(bad: float, layer: int, at: int, dtype: mx.Dtype) -> None:
    """Of this row alone; it enters the fit as the next one of its channel."""
    keys, head, channel = sample(dtype=dtype), 2 * layer + 1, 5
    spot = (mx.arange(N)[:, None] == at) & (mx.arange(DIM) == channel) & (mx.arange(HEADS)[:, None, None] == head)
    following = at + 1 if at != 103 else 2
    state = check(mx.where(spot, bad, keys), keys)
    other = check(mx.where(spot, keys[:, :, following : following + 1], keys), keys)
    assert same(state.keys.tables, other.keys.tables) and same(state.values, other.values)
    assert all(mx.isfinite(x).all() for x in flatten(state.keys)[0])
    method, others = vq.xkv(layers=2, **SMALL), np.arange(N) != at
    got, want = (rows_in_order(method, x)[0] for x in (state, other))
    assert np.array_equal(got[:, others], want[:, others]) and np.isfinite(got[:, at]).all() == (at > 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("upto", [60, 110])
@pytest.mark.parametrize("centred", [True, False])
def test_rows_without_a_finite_number_are_read_as_finite_ones(bad: float, upto: int, centred: bool) -> None:
    keys = mx.where(mx.arange(110)[:, None] < upto, bad, sample(110)).astype(mx.float16)
    for bits in (4, 16):
        method = vq.xkv(layers=2, latent_bits=bits, centred=centred, **SMALL)
        state = feed(method, keys)
        assert all(mx.isfinite(x[:, :, 2:96]).all() for x in method.read(state))
        assert all(mx.isfinite(t).all() for t in state.keys.tables)


# Sequences and sinks


def test_sequences_stand_alone() -> None:
    keys, values = sample(batch=3), sample(dim=12, seed=5, batch=3)
    keys[1] *= 1000
    values[2, :, 20] = math.nan
    method = vq.xkv(layers=2, **SMALL)
    state = feed(method, keys, values, [9])
    for row in range(3):
        span = slice(row, row + 1)
        assert same(live(state, row), live(feed(method, keys[span], values[span])))


def test_left_padding_leaves_no_trace() -> None:
    keys, method = sample(batch=2), vq.xkv(layers=2, **SMALL)
    keys[1, :, :7] = 900
    state = feed(method, keys, padding=mx.array([0, 7]))
    for row, padding in enumerate((0, 7)):
        alone = feed(method, keys[row : row + 1, :, padding:])
        assert state.coded[row].item() == alone.coded.item() == 128 and same(live(state, row), live(alone))
        assert all(map(np.array_equal, rows_in_order(method, state, row), rows_in_order(method, alone)))


@pytest.mark.parametrize("n_sink", [1, 4, 40])
def test_sinks_are_exact_and_move_nothing(n_sink: int) -> None:
    keys, method = sample(), vq.xkv(layers=2, **SMALL | {"n_sink": n_sink})
    loud = mx.where(mx.arange(N)[:, None] < n_sink, 100 * sample(seed=9), keys)
    one, two = (feed(method, x) for x in (keys, loud))
    assert same(one.keys.tables, two.keys.tables)
    for a, b in zip(*(rows_in_order(method, state) for state in (one, two))):
        assert np.array_equal(b[:, :n_sink], numbers(loud)[0, :, :n_sink])
        assert np.array_equal(a[:, n_sink:], b[:, n_sink:])


# A given basis


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("bits", [5, 16])
def test_a_given_basis_is_used_as_it_is(layers: int, bits: int) -> None:
    keys, values = sample(), sample(dim=20, seed=1)
    basis = calibrated(sample(300, seed=3), sample(300, 20, seed=4), rank=20, rank_v=50)
    options: dict[str, Any] = {"basis": basis, "latent_bits": bits, "n_sink": 3}
    method = vq.xkv(layers=layers, **options)
    whole = feed(method, keys, values)
    for cuts in ((), (1, 50, 1, 40)):
        state = feed(method, keys, values, cuts)
        assert state.coded.item() == 96 and state.keys.tables == state.values.tables == ()
        check_state(method, state, (keys, values), XKVOptions(**options), given_factors(basis, bits))
        assert same(live(state), live(whole))
    for ignored in ({"rank": 3}, {"rank_v": 10**4}, {"centred": False}, {"energy_threshold": 0.2}, {"n_fit": 9}):
        assert same(live(feed(vq.xkv(layers=layers, **options | ignored), keys, values)), live(whole))
    assert feed(vq.xkv(layers=layers, **options, residual_length=0), keys, values).coded.item() == 128
    again = XKVBasis.from_arrays(basis.arrays())
    assert again == basis and hash(vq.xkv(basis=again)) == hash(vq.xkv(basis=basis))


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("kind, centred", [("numpy", True), ("float32", False), ("bfloat16", True)])
def test_calibration_keeps_the_fewest_axes_that_hold_the_energy(share: float, kind: str, centred: bool) -> None:
    rows = [sample(200, dim, dim, decay=decay)[0].swapaxes(0, 1) for dim, decay in ((40, 0.98), (16, 0.6))]
    rows = [x.astype(mx.bfloat16 if kind == "bfloat16" else mx.float32) for x in rows]
    spoilt = [mx.where((mx.arange(200) == 7)[:, None, None], math.nan, x) for x in rows]
    came = [np.array(x) for x in spoilt] if kind == "numpy" else spoilt
    basis = vq.xkv_calibrate(*came, energy_threshold=share, centred=centred)
    for x, (axes, mean, _), (_, _, spread) in zip(rows, given_factors(basis), (basis.key, basis.value)):
        left = np.delete(numbers(x), 7, axis=0).reshape(199, -1)
        off = left - left.mean(axis=0) * centred
        energy = np.cumsum(np.square(np.linalg.svd(off, compute_uv=False)))
        rank = np.flatnonzero(energy >= share * energy[-1] * (1 - 1e-9))[0] + 1
        assert axes.shape == (left.shape[1], math.ceil(rank / 32) * 32) or (share == 1 and axes.shape[1] >= 32)
        assert_axes(left, axes, mean, centred)
        np.testing.assert_allclose(numbers(spread.array), np.sqrt(np.square(off @ axes).mean(axis=0)), atol=1e-4)


# Attention and calls


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-4), (mx.float16, 5e-3), (mx.bfloat16, 4e-2)])
@pytest.mark.parametrize("options", [OPTIONS[i] for i in (0, 3, 6, 8, 9, 10)], ids=str)
def test_attention_on_latents_is_attention_on_what_is_read(
    options: dict[str, Any], dtype: mx.Dtype, limit: float
) -> None:
    """Of all layers at once and of each by itself; two query heads share a head."""
    keys, values, asked = sample(dtype=dtype), sample(dim=20, seed=1, dtype=dtype), 2
    queries = mx.random.normal((1, 2 * HEADS, asked, DIM), key=mx.random.key(0)).astype(dtype)
    method = vq.xkv(layers=2, **SMALL | options)
    state = feed(method, keys, values)
    (k, v), q, want = rows_in_order(method, state), numbers(queries)[0], np.zeros((2 * HEADS, asked, 20))
    for h, i in itertools.product(range(2 * HEADS), range(asked)):
        end = N - asked + i + 1
        score = 0.2 * k[h // 2, :end] @ q[h, i]
        weights = np.exp(score - score.max())
        want[h, i] = weights @ v[h // 2, :end] / weights.sum()
    limit *= np.abs(v).max()
    np.testing.assert_allclose(numbers(method.attend(state, queries, 0.2))[0], want, atol=limit)
    members = method.split(state)
    for m, asking in enumerate(mx.split(queries, 2, axis=1)):
        member = method.member(m)
        alone = member.attend(member.borrowed(members[m], members[0]), asking, 0.2)
        np.testing.assert_allclose(numbers(alone)[0], np.split(want, 2)[m], atol=limit)


def test_scores_and_sums_by_the_formula() -> None:
    keys, values, basis = sample(96), sample(96, seed=1), calibrated(sample(200, seed=3), rank=20)
    options = {"basis": basis, "n_sink": 0, "residual_length": 0, "latent_bits": 8}
    method, o = vq.xkv(layers=2, **options), XKVOptions(**options)
    state, query = feed(method, keys, values), mx.random.normal((1, HEADS, 1, DIM), key=mx.random.key(1))
    got, turned, found = numbers(method.attend(state, query, 0.3))[0, :, 0], turn(32, o, 0), given_factors(basis)
    sides = zip((keys, values), found)
    a_k, a_v = (quantized((joint(numbers(x)[0]) - mean) @ (v / s) @ turned, 8, 32) for x, (v, mean, s) in sides)
    (v_k, mean_k, s_k), (v_v, mean_v, s_v) = found
    for h, q in enumerate(numbers(query)[0, :, 0]):
        own = slice(h * DIM, (h + 1) * DIM)
        weights = np.exp(0.3 * (a_k @ (q @ v_k[own] * s_k @ turned) + q @ mean_k[own]))
        weights /= weights.sum()
        want = (weights @ a_v) @ turned.T * s_v @ v_v[own].T + weights.sum() * mean_v[own]
        np.testing.assert_allclose(got[h], want, atol=2e-3)


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    keys, values, cuts = sample(230), sample(230, 12, seed=1), (20, 1, 90, 1, 40, 78)
    method, end = vq.xkv(layers=2, **SMALL), 0
    state = method.init_state(spec_of(keys, values))
    for i, count in enumerate(cuts):
        span, coded, before = slice(end, end + count), state.coded.item(), rows_in_order(method, state)
        mask = np.array(method.make_mask(state, count))[0, 0, -1]
        state, *out = method.update(state, keys[:, :, span], values[:, :, span])
        end += count
        _, layers = by_layer(method, keys, values, cuts[: i + 1])
        for got, alone, old, x in zip(out, layers, before, (keys, values)):
            read = numbers(got)[0][:, mask]
            assert np.array_equal(read[:, coded:], numbers(x)[0, :, coded:end]) and mx.array_equal(got, alone)
            assert np.array_equal(read[:, :coded], old[:, :coded])
    assert state.coded.item() == 192


@pytest.mark.parametrize("drop", [1, 22, 23, 53, 54, 70, 150])
@pytest.mark.parametrize("given_basis", [False, True])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int, given_basis: bool) -> None:
    keys, values, kept = sample(), sample(dim=20, seed=1), N - drop
    basis = calibrated(sample(200, seed=3), sample(200, 20, seed=4), rank=12) if given_basis else None
    method, least = vq.xkv(layers=2, **SMALL, basis=basis), 32 if given_basis else 96
    state = feed(method, keys, values)
    short = method.trim(state, drop)
    assert (short.offset.item(), vq.nbytes(short)) == (kept, vq.nbytes(state))
    for got, want in zip(rows_in_order(method, short), rows_in_order(method, state)):
        np.testing.assert_array_equal(got, want[:, :kept])
    again, *_ = method.update(short, keys[:, :, kept:], values[:, :, kept:])
    assert again.coded.item() == 128 and again.offset.item() == N
    if drop <= 22 or drop == N:
        assert same(live(again), live(state))
    if kept >= least:
        assert same(again.keys.tables, state.keys.tables)


# Bytes and options


@dtypes
@pytest.mark.parametrize("layers, heads, dims", [(1, 1, (128, 128)), (2, 3, (64, 80)), (4, 2, (5, 3))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 100, "rank_v": 40, "n_sink": 0},
        {"bits_k": 3, "bits_v": 6, "group_quant_size": 64, "n_fit": 70, "residual_length": 9},
        {"latent_bits": 16, "rank": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("given_basis", [False, True])
def test_bytes(
    dtype: mx.Dtype, layers: int, heads: int, dims: tuple[int, int], options: dict[str, Any], given_basis: bool
) -> None:
    o, item, total, count = XKVOptions(**options), dtype.size, 0, layers * heads
    least, _ = layout(0, o.fitted, o.residual_length, given_basis)
    room = 320  # in blocks, for 300 tokens
    for side, dim in enumerate(dims):
        width, bits = width_of(count * dim, o, side), bits_of(o, side)
        total += room * (width * item if bits == 16 else width * bits // 8 + 2 * item * width // o.group_quant_size)
        total += (least + o.n_sink) * item * dim * count
        if not given_basis:
            total += count * dim * (width * (4 if dtype == mx.float32 else 2) + item) + 4 * width
    if given_basis:
        widths = [width_of(count * dim, o, side) for side, dim in enumerate(dims)]
        zeros = [(np.zeros((count, d, w)), np.zeros((count, d)), np.zeros(w)) for d, w in zip(dims, widths)]
        options = options | {"basis": XKVBasis(*zeros[0], *zeros[1])}
    sizes = {"batch": 3, "key_dim": dims[0], "value_dim": dims[1], "dtype": dtype, "capacity": 300}
    method = vq.xkv(layers=layers, **options)
    held = method.init_state(vq.KVSpec(kv_heads=count, **sizes))
    assert vq.nbytes(held) == 3 * (total + 8 + (8 * o.n_sink + 4 if o.n_sink else 0))
    first, *others = map(vq.nbytes, method.init_group(vq.KVSpec(kv_heads=heads, **sizes)))
    assert others == [3 * (least * item * sum(dims) * heads + 8)] * (layers - 1) and first > max([0, *others])


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 30},
        {"rank_v": 20},
        {"latent_bits": 3},
        {"group_quant_size": 64},
        {"bits_k": 5},
        {"bits_v": 5},
        {"rotate": False},
        {"centred": False},
        {"n_fit": 70},
        {"residual_length": 40},
        {"n_sink": 9},
        {"basis": calibrated(sample(100, seed=5), rank=48)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    """`rank_v`, `bits_k` and `bits_v` on their side alone."""
    reads = []
    for options in ({}, change):
        method = vq.xkv(layers=2, **SMALL | {"rank": 64} | options)
        reads.append(rows_in_order(method, feed(method, sample())))
    differ = [not np.array_equal(a, b) for a, b in zip(*reads)]
    assert differ == {"rank_v": [False, True], "bits_k": [True, False], "bits_v": [False, True]}.get(
        next(iter(change)), [True, True]
    )


BAD: dict[str, list[Any]] = {
    "layers": [0, 2.0, True, None],
    "group_size": [0, 2.0, True, None],
    "rank": [0, -1, 2.0, True],
    "energy_threshold": [0, -0.1, 1.01, math.nan, "0.9", True, None],
    "latent_bits": [0, 1, 7, 9, 32, 4.0, True, None],
    "group_quant_size": [0, 16, 48, 256, 32.0, None, True],
    "max_ctx": [0, None, math.inf],
    "rank_v": [0, -1, 2.0, True],
    "bits_k": [0, 1, 7, 4.0, True],
    "bits_v": [0, 1, 7, "4"],
    "rotate": [0, 1, None, "no"],
    "centred": [0, 1, None],
    "n_fit": [0, -1, 2.5, True],
    "residual_length": [-1, 1.0, False],
    "n_sink": [-1, 0.5, 192, None, True],
    "basis": [np.eye(4), "given", {}],
}


@pytest.mark.parametrize("field, value", [(field, x) for field, values in BAD.items() for x in values])
def test_options_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^xkv: `{field}` .*; got "):
        vq.xkv(**{field: value})


def test_every_option_is_checked_and_groups_of_a_model_have_their_size() -> None:
    assert {field.name for field in attrs.fields(XKVOptions)} == BAD.keys() - {"layers"}
    assert vq.xkv(layers=2, group_size=5, energy_threshold=0.5) == vq.xkv(layers=2)
    for layers, size, want in ((7, 3, [3, 3, 1]), (4, 2, [2, 2]), (1, 2, [1]), (0, 2, []), (5, 9, [5])):
        assert XKVOptions(group_size=size).stacks(layers) == want


def start(heads: int = 2, dim: int = 32, layers: int = 2, **options: Any) -> Any:
    method, spec = vq.xkv(layers=layers, **options), vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim, capacity=64)
    x = mx.zeros((1, heads, 64, dim), mx.float16)
    return method.update(method.init_state(spec), x, x)


def basis_of(axes: Any, mean: Any = None, spread: Any = None, values: Any = None) -> XKVBasis:
    mean = np.zeros(np.shape(axes)[:2]) if mean is None else mean
    spread = np.ones(np.shape(axes)[-1]) if spread is None else spread
    values = axes if values is None else values
    return XKVBasis(axes, mean, spread, values, np.zeros(np.shape(values)[:2]), np.ones(np.shape(values)[-1]))


def calibrate(keys: tuple[int, ...], values: tuple[int, ...] | None = None, **options: Any) -> XKVBasis:
    return vq.xkv_calibrate(mx.zeros(keys), mx.zeros(values or keys), **options)


AXES = np.eye(64)[:, :32].reshape(2, 32, 32)


@pytest.mark.parametrize(
    "named, call",
    [
        ("xkv: `kv_heads`", lambda: start(3)),
        ("xkv: `layer`", lambda: vq.xkv(layers=2).member(2)),
        ("xkv: `layer`", lambda: vq.xkv(layers=2).member(-1)),
        ("xkv: `basis`", lambda: start(dim=64, basis=basis_of(AXES))),
        ("xkv: `basis`", lambda: start(heads=4, basis=basis_of(AXES))),
        ("xkv: `basis`", lambda: start(group_quant_size=64, basis=basis_of(AXES))),
        ("xkv: `basis`", lambda: start(basis=basis_of(AXES[..., :20]))),
        ("xkv: `key_basis`", lambda: basis_of(2 * AXES)),
        ("xkv: `key_basis`", lambda: basis_of(AXES[0], np.zeros((2, 32)))),
        ("xkv: `key_basis`", lambda: basis_of(AXES * math.nan)),
        ("xkv: `key_mean`", lambda: basis_of(AXES, np.zeros((2, 31)))),
        ("xkv: `key_mean`", lambda: basis_of(AXES, np.full((2, 32), math.inf))),
        ("xkv: `key_spread`", lambda: basis_of(AXES, spread=np.ones(31))),
        ("xkv: `value_basis`", lambda: basis_of(AXES, values=np.ones((2, 32, 32)))),
        ("xkv: `value_basis`", lambda: basis_of(AXES, values=np.eye(32)[None])),
        ("xkv_calibrate: `keys`", lambda: calibrate((20, 2))),
        ("xkv_calibrate: `keys`", lambda: calibrate((0, 2, 16))),
        ("xkv_calibrate: `values`", lambda: calibrate((20, 2, 16), (20, 16))),
        ("xkv_calibrate: `rank`", lambda: calibrate((20, 2, 16), rank=0)),
        ("xkv_calibrate: `rank_v`", lambda: calibrate((20, 2, 16), rank_v=0)),
        ("xkv_calibrate: `energy_threshold`", lambda: calibrate((20, 2, 16), energy_threshold=1.5)),
        ("xkv_calibrate: `group_quant_size`", lambda: calibrate((20, 2, 16), group_quant_size=16)),
        ("xkv_calibrate: `centred`", lambda: calibrate((20, 2, 16), centred=1)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(named: str, call: Callable[[], Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{named} .*; got "):
        call()


def test_no_tokens_past_max_ctx_and_no_policy() -> None:
    method, keys = vq.xkv(layers=2, max_ctx=40, n_fit=32), sample(41, dtype=mx.float16)
    cache = TransformKVCache(method)
    cache.update_and_fetch(keys[:, :, :40], keys[:, :, :40])
    with pytest.raises(vq.QuantizerConfigError, match=r"^xkv: `keys` must stay within `max_ctx` = 40; got 41$"):
        cache.update_and_fetch(keys[:, :, 40:], keys[:, :, 40:])
    assert cache.offset == 40
    with pytest.raises(vq.QuantizerConfigError):
        vq.chain(vq.h2o(budget=32).policy, vq.xkv())
