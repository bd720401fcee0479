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
from xquant_oracle import UNIT, feed, numbers, rows_in_order, same, spec_of, unpacked

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.tree import flatten
from vq_functional.crosslayer.xkv import XKVOptions
from vq_functional.crosslayer.xkv_basis import XKVBasis
from vq_functional.ops.rotations import random_rotation

SMALL: dict[str, Any] = {"n_fit": 100, "residual_length": 8, "n_sink": 2}  # 104 rows are there before any is packed
HEADS, DIM, N, CODED = 4, 16, 150, 128
dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])


def sample(
    n: int = N,
    dim: int = DIM,
    seed: int = 0,
    heads: int = HEADS,
    decay: float = 0.93,
    dtype: mx.Dtype = mx.float32,
    batch: int = 1,
) -> mx.array:
    """Rows around a mean [batch, heads, n, dim], whose heads have their axes in common."""
    size, rows = heads * dim, []
    for rng in map(np.random.default_rng, range(100 * seed, 100 * seed + batch)):
        axes = np.linalg.qr(rng.normal(size=(size, size)))[0]
        x = rng.normal(size=(n, size)) * decay ** np.arange(size) @ axes + rng.normal(size=size)
        rows.append(x.reshape(n, heads, dim).swapaxes(0, 1))
    return mx.array(np.array(rows).astype(np.float32)).astype(dtype)


def calibrated(keys: mx.array, values: mx.array | None = None, **options: Any) -> XKVBasis:
    sides = (x[0].swapaxes(0, 1) for x in (keys, keys if values is None else values))
    return vq.xkv_calibrate(*sides, **options)


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


def live(state: Any, row: int = 0) -> list[mx.array]:
    """What is held of a batch row, without unused room."""
    coded, offset = state.coded[row].item(), state.offset[row].item()
    packed = [x[row, :, :coded] for side in (state.keys, state.values) for x in side.rows]
    tables = [x[row] for side in (state.keys, state.values) for x in side.tables] if coded else []
    return [*packed, *tables, *(x[row, :, : offset - coded] for x in (state.recent.keys, state.recent.values))]


# The oracle, for one batch row


def joint(x: np.ndarray) -> np.ndarray:
    """Rows [S, n D] of the heads x [n, S, D] side by side."""
    return np.concatenate(list(x), axis=-1)


def layout(n: int, n_fit: int, residual: int | None, given: bool = False) -> tuple[int, int]:
    """E, and the rows in codes after `n` tokens."""
    if residual is None:
        residual = 32 if given else max(n_fit - 32, 0)
    blocks = 1 if given else max(1, math.ceil((n_fit - residual) / 32))
    least = residual + 32 * blocks
    return least, (n - residual) // 32 * 32 if n >= least else 0


def width_of(features: int, o: XKVOptions, side: int) -> int:
    """R of the keys (`side` 0) or the values."""
    rank = o.rank_v if side and o.rank_v else o.rank
    wanted = min(math.ceil(o.fitted / 2), math.ceil(features / 2)) if rank is None else min(rank, features)
    return math.ceil(wanted / o.group_quant_size) * o.group_quant_size


def bits_of(o: XKVOptions, side: int) -> int:
    return (o.bits_k, o.bits_v)[side] or o.latent_bits


def turn(width: int, o: XKVOptions, side: int) -> np.ndarray:
    """Q, or no rotation."""
    mixed = o.rotate and bits_of(o, side) < 16
    return numbers(random_rotation(width, seed=0).apply(mx.eye(width))) if mixed else np.eye(width)


def factors(coded: Any, row: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V [F, R], the mean [F] and s [R] of one side's `coded` part of a state."""
    axes, mean, spread = (numbers(x)[row] for x in coded.tables)
    return axes.reshape(-1, axes.shape[-1]), mean.reshape(-1), spread[0]


def assert_axes(first: np.ndarray, axes: np.ndarray, mean: np.ndarray, centred: bool, unit: float = 2e-6) -> np.ndarray:
    """`axes` [F, R] and `mean` [F] are those of the rows `first` [S, F]; returns the spread along the axes."""
    want = first.mean(axis=0) if centred else np.zeros(len(mean))
    np.testing.assert_allclose(mean, want, atol=unit * np.abs(first).max())
    kept = min(axes.shape)
    np.testing.assert_array_equal(axes[:, kept:], 0)
    np.testing.assert_allclose(axes[:, :kept].T @ axes[:, :kept], np.eye(kept), atol=8 * unit)
    sigma = np.pad(np.linalg.svd(first - want, compute_uv=False), (0, len(mean)))
    along = (first - want) @ axes[:, :kept]
    np.testing.assert_allclose(along.T @ along, np.diag(sigma[:kept] ** 2), atol=8 * unit * sigma[0] ** 2)
    return np.pad(sigma[:kept], (0, axes.shape[1] - kept)) / sigma[0]


def quantized(a: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Latents [S, R] in codes and back."""
    parts = a.reshape(len(a), -1, group)
    low, step = parts.min(axis=2, keepdims=True), np.ptp(parts, axis=2, keepdims=True) / (2**bits - 1)
    return (low + step * np.round((parts - low) / np.maximum(step, 1e-300))).reshape(a.shape)


def check_side(
    held: Any, x: np.ndarray, found: Any, o: XKVOptions, side: int, dtype: mx.Dtype, row: int = 0
) -> np.ndarray:
    """All that is held of the rows x [M * H, S, D] follows from V, the mean and s, `found`; returns what it reads as."""
    (axes, mean, s), bits, group, unit = found, bits_of(o, side), o.group_quant_size, UNIT[dtype]
    n, width, q = x.shape[1], axes.shape[1], turn(axes.shape[1], o, side)
    off = np.where(np.isfinite(joint(x)), joint(x) - mean, 0)
    a, slack = off @ (axes / s) @ q, 4e-6 * np.abs(off).max(initial=0) * math.sqrt(len(mean)) / s.min()
    rows = [r[row, 0, :n] for r in held.rows]
    assert all(r.shape[1] == 1 for r in held.rows)
    if bits == 16:
        assert [(r.dtype, r.shape[-1]) for r in rows] == [(dtype, width)]
        read = numbers(rows[0])
        assert (np.abs(read - a) <= unit * np.abs(a) + slack).all()
    else:
        assert [r.dtype for r in rows] == [mx.uint32, dtype, dtype]
        assert [r.shape[-1] for r in rows] == [width * bits // 32, width // group, width // group]
        codes = unpacked(rows[0], bits, width).reshape(n, -1, group)
        scale, zero = (numbers(r)[..., None] for r in rows[1:])
        parts = a.reshape(n, -1, group)
        low, step = parts.min(axis=2, keepdims=True), np.ptp(parts, axis=2, keepdims=True) / (2**bits - 1)
        assert (np.abs(zero - low) <= unit * np.abs(low) + slack).all()
        assert (np.abs(scale - step) <= unit * step + slack).all()
        nearest = np.clip((parts - zero) / np.maximum(scale, 1e-30), 0, 2**bits - 1)
        assert (np.abs(codes - nearest) <= 0.5001 + slack / np.maximum(scale, 1e-30)).all()
        read = (zero + scale * codes).reshape(n, width)
    back = read @ q.T * s @ axes.T + mean
    return back.reshape(n, len(x), -1).swapaxes(0, 1)


def check_state(method: Any, state: Any, sides: Sequence[mx.array], o: XKVOptions, found: Any = None) -> None:
    """Everything that is held and read of the keys and values `sides`, in each batch row."""
    n, coded = sides[0].shape[2], layout(sides[0].shape[2], o.fitted, o.residual_length, found is not None)[1]
    for row, (side, x) in itertools.product(range(len(sides[0])), enumerate(sides)):
        assert (state.coded[row].item(), state.offset[row].item()) == (coded, n)
        held, came, read = (state.keys, state.values)[side], numbers(x)[row], rows_in_order(method, state, row)[side]
        exact = (np.arange(n) < o.n_sink) | (np.arange(n) >= coded)
        np.testing.assert_array_equal(read[:, exact], came[:, exact])
        if coded:
            own = factors(held, row) if found is None else found[side]
            want = check_side(held, came[:, :coded], own, o, side, x.dtype, row)
            size = np.abs(came[np.isfinite(came)]).max(initial=0)
            got, want = (y[:, :coded][:, ~exact[:coded]] for y in (read, want))
            np.testing.assert_allclose(got, want, rtol=UNIT[x.dtype], atol=1e-5 * size + 2.0**-24)


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
    state, features = feed(method, keys, values), layers * heads * 16
    for held, x in ((state.keys, keys), (state.values, values)):
        axes, mean, s = factors(held)
        assert axes.shape == (layers * heads * x.shape[3], 32 * math.ceil(min(70, axes.shape[0]) / 32))
        share = assert_axes(joint(numbers(x)[0])[n_sink:104], axes, mean, centred)
        np.testing.assert_allclose(s, np.sqrt(np.maximum(share, 0.05)), atol=1e-4)
    index = mx.arange(N)[:, None]
    for other in (mx.where(index < 104, keys, 30 * keys[..., ::-1]), mx.where(index < n_sink, 50.0, keys)):
        assert same(feed(method, other, values).keys.tables, state.keys.tables)
    assert features == factors(state.keys)[0].shape[0]


@dtypes
@pytest.mark.parametrize("bits", [4, 16])
def test_tables_in_each_dtype(dtype: mx.Dtype, bits: int) -> None:
    keys = sample(dtype=dtype)
    state, kept = feed(vq.xkv(layers=2, latent_bits=bits, rank=64, **SMALL), keys), mx.float16
    assert [x.dtype for x in state.keys.tables] == [mx.float32 if dtype == mx.float32 else kept, dtype, mx.float32]
    axes, mean, s = factors(state.keys)
    share = assert_axes(joint(numbers(keys)[0])[2:104], axes, mean, True, {mx.float32: 2e-6}.get(dtype, UNIT[dtype]))
    want = np.sqrt(np.maximum(share, 0.05)) if bits < 16 else np.ones(64)
    np.testing.assert_allclose(s / s.max(), want, atol=1e-2)
    assert math.log2(s.max()).is_integer() and (s.max() == 1 or dtype == mx.float16)


@pytest.mark.parametrize("n_fit, residual", [(1, 0), (1, None), (40, None), (64, 32), (64, 0), (90, 70), (33, 0)])
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
        s = np.sqrt(np.maximum(sigma / sigma[0], 0.05)) if coded else np.ones(width)
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
    assert alone.key_basis.shape[2] == together.key_basis.shape[2] == 64
    assert together.key_basis.shape[0] == layers
    method = vq.xkv(layers=layers, **SMALL, rank=64)
    read = np.split(rows_in_order(method, feed(method, mx.concatenate([keys[:, :, :N]] * layers, axis=1)))[0], layers)
    for other in read[1:]:
        np.testing.assert_allclose(other, read[0], atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_floor_of_errors_of_latents(bits: int) -> None:
    """Half a step at most, for later rows too, and as much as rounding makes; without the rotation the same bound."""
    keys = sample(decay=0.97)
    for rotate in (True, False):
        options = SMALL | {"rank": 64, "latent_bits": bits, "rotate": rotate}
        method = vq.xkv(layers=2, **options)
        state = feed(method, keys)
        axes, mean, s = factors(state.keys)
        q = turn(64, XKVOptions(**options), 0)
        a, read = ((joint(y)[2:CODED] - mean) @ (axes / s) @ q for y in (numbers(keys)[0], np.array(0)) if y.ndim), None
        (a,) = a
        read = (joint(rows_in_order(method, state)[0])[2:CODED] - mean) @ (axes / s) @ q
        step = np.ptp(a.reshape(len(a), -1, 32), axis=-1, keepdims=True) / (2**bits - 1)
        off = np.abs(read - a).reshape(len(a), -1, 32) / step
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
