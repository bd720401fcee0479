"""SpectralQuant against its formulas in numpy: axes, levels, scales, sketches, errors, calibration, bytes."""

import itertools
import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, draw, feed, feed_more, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_adapters import KVCacheConfig, SpectralQuantKVCache, SpectralQuantOptions
from vq_functional.codebook.spectral import SpectralCoder
from vq_functional.core.tree import map_leaves
from vq_functional.core.warn import warn_uncalibrated
from vq_functional.ops.spectrum import effective_size, participation_ratio, spectral_gap, water_fill_bits

pytestmark = pytest.mark.filterwarnings("ignore:spectral")
few = settings(max_examples=10)
PAPER: dict[str, Any] = {"scale": "rms", "codebook": "gaussian"}
SHARES = np.r_[0.4, 0.25, 0.15, 0.1, np.full(124, 0.1 / 124)]
FALLING = np.arange(1, 129) ** -1.5
widths = pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
sketches = pytest.mark.parametrize("sketch", [None, "orthogonal", "gaussian"])
Array = np.ndarray


def coder_of(dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Any:
    coder = vq.spectral_codec(**options).bind(dim, dtype)
    assert isinstance(coder, SpectralCoder)
    return coder


def orthogonal(dim: int, heads: int = 1, seed: int = 0) -> Any:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(heads, dim, dim)))[0].astype(np.float32)


def basis_of(heads: int, key_dim: int, value_dim: int) -> vq.SpectralBasis:
    keys, values = (mx.array(orthogonal(dim, heads)) for dim in (key_dim, value_dim))
    return vq.SpectralBasis(keys, mx.ones((heads, key_dim)), 4, values, mx.ones((heads, value_dim)), 5)


def rows_along(axes: Array, energy: Array, count: int, seed: int = 0) -> Any:
    """Normal rows [count, D] of these mean squares along the columns of `axes` [D, D]."""
    return np.random.default_rng(seed).normal(size=(count, len(energy))) * np.sqrt(energy) @ axes.T


def read(coder: Any, rows: Any) -> Any:
    """What is read back of `rows` [N, D] of one head."""
    x = mx.array(np.asarray(rows, np.float32))[None, None].astype(coder.dtype)
    return numbers(coder.decode(coder.encode(x)))[0, 0]


def lost(coder: Any, rows: Any) -> float:
    """Mean squared error relative to the mean square."""
    return float(np.square(read(coder, rows) - rows).sum() / np.square(rows).sum())


# The oracle


def density(size: int, codebook: str) -> tuple[Array, Array]:
    """Values of a coordinate of unit mean square and their masses; on the sphere by its angle from the equator."""
    if codebook == "gaussian":
        grid = np.linspace(-9, 9, 200_001)
        return grid, np.exp(-grid * grid / 2)
    angle = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    return np.sin(angle) * math.sqrt(size), np.cos(angle) ** (size - 2)


def constant(size: int, sketch: str) -> float:
    if sketch == "gaussian":
        return math.sqrt(math.pi / 2)
    return math.sqrt(math.pi) * math.gamma((size + 1) / 2) / (math.sqrt(size) * math.gamma(size / 2))


def by_hand(coder: Any, x: Array, d: int, scale: str, sketch: str | None, half: Any) -> tuple[Array, bool]:
    """One row read back, and whether no choice was close; levels, axes and projections are the coder's."""
    axes, clear, parts = numbers(coder.matrix)[0], True, []
    h, every = x @ axes, numbers(coder.codes.levels).reshape(-1, 2**coder.codes.bits)
    for block, levels in zip((h[:d], h[d:]) if d < len(x) else (h,), every, strict=True):
        rms = np.sqrt(np.square(block).mean())
        gap = np.abs(block[:, None] / rms - levels)
        first, second = np.sort(gap, axis=1)[:, :2].T
        c = levels[gap.argmin(axis=1)]
        s = float(half(rms if scale == "rms" else block @ c / (c @ c)))
        clear &= bool((second - first > 4e-5).all())
        parts.append(s * c)
        if len(parts) == 1 and sketch is not None:
            e, a = block / s - c, numbers(coder.sketch.matrix)
            clear &= bool((np.abs(a @ e) > 1e-4).all())
            parts[0] = s * c + s * np.linalg.norm(e) * constant(d, sketch) / d * a.T @ np.where(a @ e >= 0, 1, -1)
    return axes @ np.concatenate(parts), clear


@given(data=st.data(), bits=st.sampled_from([1, 2, 3, 4, 6]), dim=st.sampled_from([20, 64]), fit=st.booleans())
@pytest.mark.parametrize("scale", ["least_squares", "rms"])
@sketches
@few
def test_rows_are_two_blocks_of_levels_and_a_sketch(
    sketch: str | None, scale: str, data: Any, bits: int, dim: int, fit: bool
) -> None:
    d, codebook = data.draw(st.sampled_from([2, 4, dim - 1, dim])), data.draw(st.sampled_from(["sphere", "gaussian"]))
    dtype, half, unit = data.draw(st.sampled_from([(mx.float32, np.float32, 2e-6), (mx.float16, np.float16, 2e-3)]))
    options: Any = {"scale": scale, "codebook": codebook, "sketch": sketch, "axes": orthogonal(dim) if fit else None}
    coder, x, checked = coder_of(dim, dtype, bits=bits, d_eff=d, **options), draw(12, dim, seed=bits, dtype=dtype), 0
    for row, got in zip(numbers(x * 3), read(coder, numbers(x * 3))):
        want, clear = by_hand(coder, row, d, scale, sketch, half)
        # The length of what is left over is a half precision number in any case.
        atol = np.linalg.norm(row) * (unit if sketch is None else max(unit, 5e-4))
        assert not clear or np.abs(got - want).max() < atol
        checked += clear
    assert checked >= 6


SIZES = [("sphere", size, bits) for size in (2, 3, 4) for bits in (1, 2, 3, 5)]


@pytest.mark.parametrize("codebook, size, bits", [*SIZES, ("sphere", 4, 7), ("gaussian", 1, 2), ("gaussian", 4, 3)])
def test_levels_are_the_means_of_their_cells(codebook: str, size: int, bits: int) -> None:
    both = numbers(coder_of(size + 16, bits=bits, d_eff=size, codebook=codebook).codes.levels).reshape(2, -1)
    for block, levels in zip((size, 16), both, strict=True):
        values, mass = density(block, codebook)
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
        means = np.bincount(cell, mass * values, 2**bits) / np.bincount(cell, mass, 2**bits)
        assert (np.diff(levels) > 0).all() and np.abs(levels - means).max() < 2e-4


def test_axes_are_rotated_inside_their_blocks_alone() -> None:
    axes, x, q = orthogonal(24, heads=3), numbers(draw(3, 5, 24)), numbers(draw(3, 5, 24, seed=1))
    ways: list[dict[str, Any]] = [{}, {}, {"seed": 7}, {"fold": False}]
    turned, same, other, plain = (numbers(coder_of(24, axes=axes, d_eff=5, **way).matrix) for way in ways)
    assert (plain == axes).all() and (same == turned).all()
    for u in (turned, other, numbers(coder_of(24).matrix)):
        np.testing.assert_allclose(u.swapaxes(-1, -2) @ u, np.broadcast_to(np.eye(24), u.shape), atol=1e-5)
    np.testing.assert_allclose((q @ turned * (x @ turned)).sum(-1), (q * x).sum(-1), rtol=1e-4, atol=1e-4)
    for block in (slice(0, 5), slice(5, 24)):
        new, old = turned[..., block], axes[..., block]
        np.testing.assert_allclose(new @ new.swapaxes(-1, -2), old @ old.swapaxes(-1, -2), atol=1e-5)
        assert min(np.abs(new - old).max(), np.abs(new - other[..., block]).max()) > 0.1


def test_each_head_has_its_axes() -> None:
    axes, x = orthogonal(16, heads=2), draw(3, 2, 9, 16)
    both, shared = coder_of(16, axes=axes), coder_of(16, axes=axes[:1])
    got, same = (numbers(coder.decode(coder.encode(x))) for coder in (both, shared))
    second = numbers(x)[:, 1].reshape(27, 16)
    np.testing.assert_allclose(same[:, 0], got[:, 0], atol=1e-4)
    np.testing.assert_allclose(got[:, 1].reshape(27, 16), read(coder_of(16, axes=axes[1:]), second), atol=1e-4)
    np.testing.assert_allclose(same[:, 1].reshape(27, 16), read(shared, second), atol=1e-4)


@sketches
@pytest.mark.parametrize("dtype, atol", [(mx.float32, 1e-5), (mx.bfloat16, 4e-3), (mx.float16, 5e-4)])
@widths
def test_products_equal_those_of_the_decoded_rows(bits: int, dtype: mx.Dtype, atol: float, sketch: str | None) -> None:
    for dim, d in ((64, 4), (20, 1), (20, 20)):
        coder = coder_of(dim, dtype, bits=bits, d_eff=d, axes=orthogonal(dim, heads=2), sketch=sketch)
        rows, queries, weights = coder.encode(draw(2, 2, 11, dim, dtype=dtype)), draw(2, 2, 3, dim), draw(2, 2, 3, 11)
        read, scores, sums = coder.decode(rows), coder.dot(queries, rows), coder.mix(weights, rows)
        assert scores.dtype == sums.dtype == mx.float32 and read.dtype == dtype
        q, p, plain = numbers(queries), numbers(weights), numbers(read)
        reach = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(plain, axis=-1).max()
        np.testing.assert_allclose(numbers(scores), q @ plain.swapaxes(-1, -2), atol=atol * reach)
        np.testing.assert_allclose(numbers(sums), p @ plain, atol=atol * np.abs(p).sum(-1).max() * np.abs(plain).max())


@pytest.mark.parametrize(
    "energy, d, want",
    [
        (SHARES, 4, [0.114, 0.086, 0.085, 0.061]),
        (FALLING, 6, [0.114, 0.097, 0.155, 0.080]),
        (np.ones(128), 4, [0.114, 0.115, 0.115, 0.113]),
    ],
)
def test_errors_at_two_bits(energy: Array, d: int, want: list[float]) -> None:
    axes = orthogonal(128)
    x = rows_along(axes[0], energy, 1000)
    ways: list[dict[str, Any]] = [{}, {"axes": axes, **PAPER}, {"axes": axes, **PAPER, "fold": False}, {"axes": axes}]
    got = [lost(coder_of(128, bits=2, d_eff=d, sketch=None, **way), x) for way in ways]
    np.testing.assert_allclose(got, want, rtol=0.05)


@pytest.mark.parametrize("options, want", [(PAPER, 0.0819), ({"scale": "rms"}, 0.0747), ({}, 0.056)], ids=str)
def test_small_blocks_gain_by_the_sphere_and_by_fitted_scales(options: dict[str, Any], want: float) -> None:
    coder = coder_of(4, bits=2, d_eff=4, axes=np.eye(4)[None], sketch=None, **options)
    assert lost(coder, numbers(draw(8000, 4))) == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("scale", ["least_squares", "rms"])
@pytest.mark.parametrize("codebook", ["sphere", "gaussian"])
@widths
def test_rows_along_the_only_axis_of_a_block(bits: int, codebook: str, scale: str) -> None:
    axes = orthogonal(20)
    options: Any = {"d_eff": 1, "axes": axes, "scale": scale, "codebook": codebook, "sketch": None}
    coder = coder_of(20, mx.float16, bits=bits, **options)
    levels = numbers(coder.codes.levels)[: 2**bits]
    share = np.abs(1 - levels).min() if scale == "rms" else 0
    for length in (3, -0.2, 0.01, -50):
        x = length * axes[0, :, 0]
        assert np.linalg.norm(read(coder, x[None]) - x) == pytest.approx(abs(length) * share, abs=2e-3 * abs(length))
    assert share == 0 or codebook == "gaussian"


@pytest.mark.parametrize("sketch, want, slack", [("orthogonal", 0.39, 0.01), ("gaussian", 1.32, 0.12)])
def test_a_sketch_leaves_its_share_of_the_rest(sketch: str, want: float, slack: float) -> None:
    x, shares, slopes = numbers(draw(200, 4)), [], []
    for seed in range(250):
        options: Any = {"d_eff": 4, "axes": np.eye(4)[None], "seed": seed, "fold": False}
        plain, whole = (read(coder_of(4, sketch=kind, **options, **PAPER), x) for kind in (None, sketch))
        rest, found = x - plain, whole - plain
        shares.append(np.square(rest - found).sum() / np.square(rest).sum())
        slopes.append((rest * found).sum() / np.square(rest).sum())
    assert np.mean(shares) == pytest.approx(want, abs=slack) and np.mean(slopes) == pytest.approx(1, abs=slack)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("x", [[1.0, 0, 0, 0], [1, 0.3, -0.2, 0.5]], ids=str)
def test_a_sketch_is_unbiased_over_seeds(x: list[float], fold: bool) -> None:
    """Projections must not follow from the rotation inside the block: both are draws of one seed."""
    options: Any = {"bits": 2, "d_eff": 4, "axes": np.eye(4)[None], "fold": fold}
    found = np.concatenate([read(coder_of(4, seed=seed, **options), [x]) for seed in range(150)])
    assert (np.abs(found.mean(axis=0) - x) <= 4.5 * found.std(axis=0) / math.sqrt(150) + 1e-3).all()


@sketches
@pytest.mark.parametrize("d", [1, 4, 20])
@pytest.mark.parametrize("options", [{}, PAPER], ids=["default", "paper"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_zeros_are_zeros(bits: int, options: dict[str, Any], d: int, sketch: str | None) -> None:
    coder = coder_of(20, mx.float16, bits=bits, d_eff=d, axes=np.eye(20)[None], sketch=sketch, **options)
    x = np.array(draw(4, 20))
    x[1], x[2, :d], x[3, d:] = 0, 0, 0
    rows = coder.encode(mx.array(x).astype(mx.float16)[None, None])
    got, scores = numbers(coder.decode(rows))[0, 0], coder.dot(mx.ones((1, 1, 1, 20)), rows)
    assert np.isfinite(got).all() and mx.isfinite(scores).all() and np.abs(got[0]).max() > 0
    assert (got[1] == 0).all() and (got[2, :d] == 0).all() and (got[3, d:] == 0).all() and scores[0, 0, 0, 1] == 0


@pytest.mark.parametrize("size", [1e-25, 1e-4, 1e4, 1e30])
@pytest.mark.parametrize("options", [{}, PAPER, {"sketch": None}], ids=str)
def test_errors_do_not_depend_on_the_size_of_rows(options: dict[str, Any], size: float) -> None:
    x, coder = numbers(draw(50, 20)), coder_of(20, bits=3, **options)
    np.testing.assert_allclose(read(coder, x * size) / size, read(coder, x), atol=1e-2 * np.abs(x).max())
    half = coder_of(20, mx.float16, bits=3, **options)
    assert lost(half, np.sign(x) * 20000) < 0.1 and np.isfinite(read(half, np.sign(x) * 65504)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone_and_is_zero(bad: float) -> None:
    clean, coder = draw(1, 2, 6, 20, dtype=mx.float16), coder_of(20, mx.float16)
    x = mx.where((mx.arange(6)[:, None] == 2) & (mx.arange(20) == 5), bad, clean).astype(mx.float16)
    others = mx.array([0, 1, 3, 4, 5])
    pairs = zip(coder.encode(clean), coder.encode(x), strict=True)
    assert all(mx.array_equal(one[:, :, others], two[:, :, others]) for one, two in pairs)
    assert (coder.decode(coder.encode(x))[:, :, 2] == 0).all()


@given(data=st.data(), bits=st.integers(1, 4), n=st.integers(1, 40), heads=st.sampled_from([1, 2]))
@few
def test_cuts_trims_and_batches_leave_no_trace(data: Any, bits: int, n: int, heads: int) -> None:
    transform = vq.spectral(bits=bits, basis=basis_of(heads, 64, 20))
    edges, x = sorted(data.draw(st.sets(st.integers(1, n), max_size=3)) - {n}), data.draw(st.integers(1, n))
    keys, values = draw(2, 2, n, 64, dtype=mx.float16), draw(2, 2, n, 20, dtype=mx.float16)
    whole = feed(transform, keys, values)
    assert_same(feed(transform, keys, values, [b - a for a, b in itertools.pairwise([0, *edges])]), whole)
    short = transform.trim(whole, x)
    assert short.offset.tolist() == [n - x] * 2
    assert_same(feed_more(transform, short, keys[:, :, n - x :], values[:, :, n - x :]), whole, n)
    assert_same(map_leaves(lambda leaf: leaf[1:], whole), feed(transform, keys[1:], values[1:]))


def test_calibration_finds_the_axes_of_each_head() -> None:
    axes = orthogonal(128, heads=2)
    rows = np.stack([rows_along(axes[head], SHARES, 4000, head) * (1 + head) for head in range(2)], axis=1)
    for scale in (1.0, 1e-4, 1e4):
        found = vq.spectral_calibrate((rows * scale).astype(np.float32), rows[:50, :, :8], rule="participation")
        energy = numbers(found.key_energy)
        assert found.key_d_eff == np.ceil(energy.sum(-1) ** 2 / np.square(energy).sum(-1)).max() == 4
        overlap = np.square(axes[..., :4].swapaxes(-1, -2) @ numbers(found.key_axes)[..., :4]).sum(axis=(1, 2)) / 4
        assert (overlap >= 0.99).all()
        np.testing.assert_allclose(numbers(found.key_share), 0.9, atol=0.01)
        np.testing.assert_allclose(energy.sum(-1), scale**2 * np.array([1, 4]), rtol=0.05)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_axes_diagonalise_the_mean_square(centred: bool, pooled: bool) -> None:
    keys = numbers(draw(60, 3, 8)) + np.arange(8)
    bad = np.concatenate([keys, np.full((1, 3, 8), np.nan), np.full((1, 3, 8), np.inf)])
    found = vq.spectral_calibrate(mx.array(bad.astype(np.float32)), draw(9, 3, 6), pooled=pooled, centred=centred)
    axes, energy = numbers(found.key_axes), numbers(found.key_energy)
    heads = keys.reshape(1, -1, 8) if pooled else keys.swapaxes(0, 1)
    assert found.val_axes.shape == (len(heads), 6, 6) and (np.diff(energy) <= 0).all() and (energy >= 0).all()
    for x, u, w in zip(heads - heads.mean(axis=1, keepdims=True) * centred, axes, energy, strict=True):
        np.testing.assert_allclose(u.T @ (x.T @ x / len(x)) @ u, np.diag(w), atol=1e-4 * w.max())


@pytest.mark.parametrize("energy", [FALLING[:16], np.r_[50, FALLING[:15]], np.r_[9, 7, np.full(14, 0.02)]])
def test_the_first_block_is_the_one_that_loses_least(energy: Array) -> None:
    x = rows_along(orthogonal(16)[0], energy, 1000)
    found = vq.spectral_calibrate(x[:, None], x[:, None])
    fixed = vq.spectral_calibrate(x[:, None], x[:, None], key_d_eff=16)
    errors = [lost(coder_of(16, d_eff=d, axes=found.key_axes, sketch=None), x) for d in range(1, 17)]
    assert errors[found.key_d_eff - 1] <= 1.04 * min(errors)
    assert fixed.key_d_eff == 16 and fixed.val_d_eff == found.val_d_eff == found.key_d_eff


@given(k=st.integers(1, 64), scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e4]), rest=st.integers(0, 64))
@few
def test_participation_ratio(k: int, scale: float, rest: int) -> None:
    equal, uneven = np.r_[np.full(k, scale), np.zeros(rest)], np.arange(1.0, k + 2)
    assert participation_ratio(equal) == pytest.approx(k, rel=1e-6) and effective_size(equal) == k
    want = uneven.sum() ** 2 / np.square(uneven).sum()
    assert participation_ratio(uneven * scale) == pytest.approx(want, rel=1e-5)
    assert spectral_gap(uneven * scale, k) == pytest.approx(2) and spectral_gap(uneven, k + 1) == math.inf


@given(energy=st.lists(st.sampled_from([0, 0.01, 0.5, 1, 30]), min_size=1, max_size=12), budget=st.integers(0, 99))
@few
def test_water_filling_spends_the_budget_where_it_helps_most(energy: list[float], budget: int) -> None:
    bits, w = np.array(water_fill_bits(energy, budget)), np.array(energy)
    assert bits.sum() == min(budget, 8 * (w > 0).sum()) and (bits[w == 0] == 0).all() and bits.max() <= 8
    assert water_fill_bits(w * 1e-8, budget) == bits.tolist()
    gain = np.where(bits < 8, w * 4.0**-bits, 0)
    assert gain.max() <= np.where(bits > 0, w * 4.0 ** (1 - bits), np.inf).min() * (1 + 1e-9)


@pytest.mark.parametrize("dim, d", [(128, 4), (64, 1), (20, 20), (20, 9)])
@pytest.mark.parametrize("bits_k, bits_v", [(2, 3), (5, 1), (3, 6)])
@pytest.mark.parametrize("apply_qjl", [True, False])
def test_bytes_follow_the_formula(apply_qjl: bool, bits_k: int, bits_v: int, dim: int, d: int) -> None:
    transform = vq.spectral(bits_k=bits_k, bits_v=bits_v, key_d_eff=d, val_d_eff=4, apply_qjl=apply_qjl)
    key, value = (4 * math.ceil(dim * b / 32) + 4 for b in (bits_k, bits_v))
    key += math.ceil(d / 8) + 2 if apply_qjl and d > 1 else 0
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    assert vq.nbytes(transform.init_state(spec)) == 2 * 3 * 40 * (key + value) + 2 * 4


def test_options_reach_the_codecs() -> None:
    codec: Any = vq.spectral_codec
    free: Any = vq.spectral()
    assert free.key == codec(bits=2, d_eff=4, seed=42, sketch="orthogonal")
    assert free.value == codec(bits=2, d_eff=50, seed=43, sketch=None)
    other: Any = vq.spectral(bits=3, bits_v=5, apply_qjl=False, fold=False, **PAPER)
    assert other.key == codec(bits=3, d_eff=4, sketch=None, fold=False, **PAPER)
    assert other.value == codec(bits=5, d_eff=50, seed=43, sketch=None, fold=False, **PAPER)
    basis = basis_of(2, 16, 8)
    fitted: Any = vq.spectral(basis=basis, seed=7, sketch="gaussian", key_d_eff=2)
    assert fitted.key == codec(d_eff=4, seed=7, axes=basis.key_axes, sketch="gaussian")
    assert fitted.value == codec(d_eff=5, seed=8, axes=basis.val_axes, sketch=None)


WRONG: dict[str, list[Any]] = {
    **{"bits": [0, 9, True, 2.0], "bits_k": [0, 9, True], "bits_v": [0, 9, "2"], "seed": [-1, 1.5, None]},
    **{"key_d_eff": [0, -1, True, 1.5], "val_d_eff": [0, None], "apply_qjl": [1, None], "model_name": ["", None]},
    **{"basis": [np.eye(4), {}], "scale": ["max", None], "codebook": ["normal", None], "sketch": ["none", True]},
    **{"fold": [0, None]},
}


def test_options_out_of_range_are_refused_by_name() -> None:
    assert {*WRONG} == {field.name for field in attrs.fields(vq.METHODS["spectral"].options)}
    for field, value in ((field, value) for field, values in WRONG.items() for value in values):
        of_codec = field in ("bits", "seed", "scale", "codebook", "sketch", "fold")
        for build in (vq.spectral, vq.spectral_codec) if of_codec else (vq.spectral,):
            with pytest.raises(vq.QuantizerConfigError, match=f"^spectral: `{field}` must .*; got"):
                build(**{field: value})
    with pytest.raises(vq.QuantizerConfigError, match=r"^spectral: `sketch` must .*; got None"):
        vq.spectral(sketch=None)  # `apply_qjl` says so


@pytest.mark.parametrize("axes", [np.eye(9), np.ones((1, 9, 8)), np.eye(9)[None] * 1.01, np.full((1, 9, 9), np.nan)])
def test_axes_that_are_none_are_refused(axes: Any) -> None:
    right: Any = attrs.asdict(basis_of(1, 9, 9))
    for field, build in (("axes", vq.spectral_codec), ("key_axes", vq.SpectralBasis), ("val_axes", vq.SpectralBasis)):
        others = {} if build is vq.spectral_codec else right
        with pytest.raises(vq.QuantizerConfigError, match=f"spectral: `{field}` must be"):
            build(**{**others, field: mx.array(axes)})


@pytest.mark.parametrize(
    "message, build",
    [
        ("`d_eff` must be at most the head size 32; `val_d_eff` is 50", lambda: coder_of(32, d_eff=50)),
        ("`axes` must be of head size 32; got 16", lambda: coder_of(32, axes=orthogonal(16))),
        ("`d_eff` must be an integer in", lambda: vq.spectral_codec(axes=orthogonal(16), d_eff=17)),
        ("`d_eff` must be an integer >= 1", lambda: vq.spectral_codec(d_eff=0)),
        ("must have the 2 heads", lambda: coder_of(16, axes=orthogonal(16, heads=2)).encode(draw(1, 3, 1, 16))),
        ("`val_axes` must have energies", lambda: attrs.evolve(basis_of(1, 8, 8), val_energy=mx.ones((1, 7)))),
        ("`keys` must be", lambda: vq.spectral_calibrate(draw(5, 4), draw(5, 1, 4))),
        ("`values` must be", lambda: vq.spectral_calibrate(draw(5, 1, 4), draw(0, 1, 4))),
        ("`val_d_eff` must be", lambda: vq.spectral_calibrate(draw(5, 1, 4), draw(5, 1, 4), val_d_eff=5)),
        ("`rule` must be", lambda: vq.spectral_calibrate(draw(5, 1, 4), draw(5, 1, 4), rule="all")),
    ],
)
def test_sizes_that_do_not_fit_are_refused(message: str, build: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"spectral.*{message}"):
        build()


def test_a_random_rotation_warns() -> None:
    warn_uncalibrated.cache_clear()
    with pytest.warns(UserWarning, match=r"`spectral_calibrate` .* a model `vq_adapters.calibrate`") as caught:
        coder_of(16)
    assert caught[0].filename == __file__


def test_the_cache_of_vectors_is_calibrated_before_its_first_token() -> None:
    options = SpectralQuantOptions(spectral_val_d_eff=8)
    cache = SpectralQuantKVCache(KVCacheConfig(method="spectral", head_dim=16, options=options))
    basis, x = basis_of(1, 16, 16), draw(6, 16, dtype=mx.float16)

    def attended() -> Any:
        for row in x:
            cache.append(row, row)
        return cache.attend(x[0]).tolist()

    assert cache.attend(x[0]).tolist() == [0] * 16
    random = attended()
    with pytest.raises(RuntimeError, match="calibrate"):
        cache.calibrate(basis)
    cache.reset()
    cache.calibrate(basis)
    calibrated = attended()
    assert calibrated != random and cache.memory_bytes() == 6 * (4 + 4 + 3 + 4 + 4)
    cache.reset()
    assert attended() == calibrated
