"""Palu against numpy: joint axes, widths, codes, mixing, absorbed attention, calibration, trims, bytes, options."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from palu_oracle import (
    DEFAULTS,
    DIM,
    HEADS,
    assert_axes,
    calibrated,
    check_codes,
    fitted,
    groups_of,
    joint,
    layout,
    live,
    read_back,
    read_of,
    sample,
    sections_of,
    tables,
    width_of,
)
from svdq_oracle import UNIT, assert_same, begin, feed, numbers, orthogonal, rows_in_order

import vq_functional as vq
from vq_functional.core.tree import flatten
from vq_functional.lowrank.palu import PALUBasis

SMALL: dict[str, Any] = {"n_fit": 100, "residual_length": 8, "n_sink": 2, "n_head_groups": 2}  # heads 0, 1 and 2
N = 150
dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])
few = settings(max_examples=10, deadline=None)


def label(options: Any) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, dict) else str(options)


def check_state(state: Any, keys: mx.array, values: mx.array, options: dict[str, Any], found: Any = None) -> None:
    """Shapes, dtypes and codes of both sides of the first sequence."""
    o, coded = DEFAULTS | options, state.coded.item()
    for side, (held, x) in enumerate(((state.keys, keys), (state.values, values))):
        mean, basis = tables(held) if found is None else found[side]
        sections = sections_of(basis.shape[-1], options, side)
        rows = numbers(x)[0, :, :coded]
        check_codes(held, rows, (mean, basis), sections, o["n_head_groups"], o["group_size"], x.dtype)


# Axes


@pytest.mark.parametrize("heads, groups", [(1, 4), (2, 4), (3, 2), (4, 2), (5, 3), (5, 1)])
@pytest.mark.parametrize("n_sink", [0, 5])
def test_axes_are_those_of_the_joined_first_rows(heads: int, groups: int, n_sink: int) -> None:
    keys, values = sample(N, 16, heads=heads), sample(N, 24, seed=1, heads=heads)
    options = SMALL | {"n_head_groups": groups, "n_sink": n_sink}
    transform, (first, coded) = vq.palu(**options, mixing=False), layout(N, 100, 8)
    later = mx.where(mx.arange(N)[:, None] < first, keys, 30 * keys[:, :, ::-1])
    before = mx.where(mx.arange(N)[:, None] < n_sink, 50 * keys[..., ::-1], keys)
    state = feed(transform, keys, values)
    assert state.coded.item() == coded and first == 104
    for held, x in ((state.keys, keys), (state.values, values)):
        mean, basis = tables(held)
        assert basis.shape == (heads, x.shape[3], width_of(heads, x.shape[3], options))
        for group in groups_of(heads, groups):
            assert_axes(numbers(x)[0, group, n_sink:first], mean[group], basis[group])
    for other in (later, before):
        assert_same(feed(transform, other, values).keys.tables, state.keys.tables)


@dtypes
def test_axes_in_each_dtype(dtype: mx.Dtype) -> None:
    keys = sample(N, dtype=dtype)
    state = feed(vq.palu(**SMALL, rank=DIM, mixing=False), keys)
    assert [x.dtype for x in state.keys.tables] == [dtype, dtype]
    mean, basis = tables(state.keys)
    for group in groups_of(HEADS, 2):
        assert_axes(numbers(keys)[0, group, 2:104], mean[group], basis[group], max(2e-6, UNIT[dtype]))


@pytest.mark.parametrize("n_fit, residual", [(1, 0), (1, None), (40, None), (64, 32), (64, 0), (90, 70), (33, 0)])
def test_how_many_rows_are_fitted_and_stay_exact(n_fit: int, residual: int | None) -> None:
    keys, (first, _) = sample(200, 16), layout(0, n_fit, residual)
    transform = vq.palu(n_fit=n_fit, residual_length=residual, n_sink=0, rank=8)
    for n in (first - 1, first, first + 31, first + 32, 200):
        state, coded = feed(transform, keys[:, :, :n]), layout(n, n_fit, residual)[1]
        assert state.coded.item() == coded and state.recent.keys.shape[2] == first
        assert np.array_equal(rows_in_order(transform, state)[0][:, coded:], numbers(keys)[0, :, coded:n])
    assert coded > 0


def test_default_fit_and_window() -> None:
    state = feed(vq.palu(), sample(160, 16))
    assert state.recent.keys.shape[2] == 128 and state.coded.item() == 64
    state = feed(vq.palu(basis=calibrated(sample(160, 16), rank=8)), sample(160, 16))
    assert state.recent.keys.shape[2] == 64 and state.coded.item() == 128


# Codes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": DIM},
        {"rank": 20, "n_head_groups": 1},
        {"rank": 32, "hi_bit": 8, "lo_bit": 5, "hi_fraction": 0.5, "n_head_groups": 1},
        {"rank": 22, "hi_fraction": 0},
        {"rank": 22, "hi_fraction": 1, "hi_bit": 3},
        {"rank": 32, "hi_bit": 6, "lo_bit": 6, "n_head_groups": 4},
        {"rank": 32, "bits_k": 5, "bits_v": 3},
        {"rank": 32, "bits_v": 8, "lo_bit": 3},
        {"rank": 32, "group_size": 64, "n_head_groups": 1},
        {"rank": 21, "quantize_values": False},
        {"rank": 32, "mixing": True},
        {"rank": 32, "bits_k": 4, "mixing": False},
    ],
    ids=label,
)
def test_every_code_equals_the_oracle(options: dict[str, Any]) -> None:
    keys, values = sample(N), sample(N, 40, seed=1)
    options = SMALL | {"n_sink": 0} | options
    transform = vq.palu(**options)
    state = feed(transform, keys, values)
    assert state.coded.item() == 128
    check_state(state, keys, values, options)
    transform = vq.palu(**options | {"mixing": False})
    state = feed(transform, keys, values)
    read, bases = rows_in_order(transform, state), [tables(held)[1] for held in (state.keys, state.values)]
    for side, x in enumerate((keys, values)):  # with axes and codes of the oracle throughout
        want, came = read_of(numbers(x)[0], 128, slice(0, 104), options, side, bases[side]), numbers(x)[0]
        assert np.array_equal(read[side][:, 128:], came[:, 128:])
        assert np.mean(np.abs(read[side][:, :128] - want).max(axis=-1) < 2e-3) > 0.8
        loss = np.square(want - came[:, :128]).sum()
        assert np.square(read[side][:, :128] - want).sum() <= 0.05 * loss + 1e-6
        assert abs(np.square(read[side] - came).sum() - loss) <= 0.02 * loss + 1e-6


@dtypes
@pytest.mark.parametrize("heads, dim", [(2, 64), (3, 20), (5, 16)])
def test_every_code_equals_the_oracle_in_each_dtype(dtype: mx.Dtype, heads: int, dim: int) -> None:
    keys, values = (sample(110, dim, seed=s, heads=heads, dtype=dtype) for s in (0, 1))
    options = SMALL | {"n_sink": 0, "rank": min(dim, 40)}
    for more in ({}, {"quantize_values": False}):
        state = feed(vq.palu(**options | more), keys, values)
        assert state.coded.item() == 96
        check_state(state, keys, values, options | more)


@few
@given(
    heads=st.integers(1, 6),
    groups=st.integers(1, 5),
    dim=st.integers(2, 70),
    rank=st.none() | st.integers(1, 70),
    share=st.sampled_from([0, 0.01, 0.25, 1 / 3, 0.5, 0.9, 1]),
    size=st.sampled_from([32, 64]),
    bits=st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=2, max_size=2).map(sorted),
    one=st.sampled_from([None, 3, 8]),
)
def test_shapes_follow_from_the_options(
    heads: int, groups: int, dim: int, rank: int | None, share: float, size: int, bits: list[int], one: int | None
) -> None:
    options = {"n_head_groups": groups, "rank": rank and min(rank, dim), "hi_fraction": share, "group_size": size}
    options |= {"lo_bit": bits[0], "hi_bit": bits[1], "bits_k": one, "quantize_values": one != 3}
    spec = vq.KVSpec(batch=2, kv_heads=heads, key_dim=dim, value_dim=dim, capacity=64)
    state = vq.palu(**options, n_fit=32).init_state(spec)
    width, count = width_of(heads, dim, options), min(heads, groups)
    assert width % size == 0 and width >= math.ceil(heads / count) * (options["rank"] or dim / 2) > width - size
    for side, held in enumerate((state.keys, state.values)):
        want = []
        for part, width_bits in sections_of(width, options, side):
            last = [part] if width_bits is None else [part * width_bits // 32, part // size, part // size]
            want += [(2, count, 64, x) for x in last]
        assert [x.shape for x in held.rows] == want
        assert [x.shape for x in held.tables] == [(2, heads, dim, width), (2, heads, dim)]


@pytest.mark.parametrize(
    "rank, share, first",
    [(32, 0.25, 32), (64, 0.25, 32), (128, 0.25, 32), (128, 0.5, 64), (96, 0.99, 64), (96, 0.01, 32), (128, 0, 0)],
)
def test_leading_components_have_more_bits(rank: int, share: float, first: int) -> None:
    transform = vq.palu(rank=rank, hi_fraction=share, hi_bit=8, lo_bit=2)
    state = transform.init_state(vq.KVSpec(kv_heads=1, key_dim=128, value_dim=128, capacity=32))
    words = [x.shape[-1] for x in state.keys.rows if x.dtype == mx.uint32]
    assert words == [x for x in (first * 8 // 32, (rank - first) * 2 // 32) if x]


@few
@given(
    cuts=st.lists(st.sampled_from([1, 1, 2, 7, 31, 33, 64, 90]), min_size=1, max_size=6),
    n_fit=st.sampled_from([10, 40, 70, 128]),
    residual=st.sampled_from([None, 0, 5, 40]),
    groups=st.integers(1, 3),
    given_basis=st.booleans(),
)
def test_any_cut_gives_the_same_codes(
    cuts: list[int], n_fit: int, residual: int | None, groups: int, given_basis: bool
) -> None:
    keys, values = sample(sum(cuts), seed=2), sample(sum(cuts), 16, seed=3)
    basis = calibrated(sample(90), sample(90, 16), n_head_groups=groups, rank=9) if given_basis else None
    transform = vq.palu(n_fit=n_fit, residual_length=residual, n_head_groups=groups, basis=basis)
    pieces, whole = (feed(transform, keys, values, c) for c in (cuts[:-1], ()))
    coded = layout(sum(cuts), n_fit, residual, given_basis)[1]
    assert pieces.coded.item() == whole.coded.item() == coded
    if coded:
        assert_same(live(pieces), live(whole))
    for got, want in zip(rows_in_order(transform, pieces), rows_in_order(transform, whole)):
        assert np.array_equal(got, want)


def test_single_tokens_settle_nothing_before_the_rows_to_fit_are_there() -> None:
    keys, transform = sample(106), vq.palu(**SMALL)
    state, whole = begin(transform, keys, keys), feed(transform, keys)
    for i in range(106):
        state, *_ = transform.update(state, keys[:, :, i : i + 1], keys[:, :, i : i + 1])
        assert state.coded.item() == layout(i + 1, 100, 8)[1]
    assert_same(live(state), live(whole))


# What the axes and the widths are for


@pytest.mark.parametrize("heads, groups, dim", [(1, 1, 32), (3, 2, 20), (4, 2, 16), (3, 1, 33)])
def test_full_rank_without_codes_is_exact(heads: int, groups: int, dim: int) -> None:
    keys, values = sample(N, dim, heads=heads), sample(N, dim, seed=1, heads=heads)
    transform = vq.palu(**SMALL | {"n_head_groups": groups}, rank=dim, quantize_values=False)
    got, want = rows_in_order(transform, feed(transform, keys, values))[1], numbers(values)[0]
    assert 0 < np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_what_is_lost_is_the_energy_of_the_tail() -> None:
    """Over the rows that the axes are of; the more heads share their axes, the less at equal bytes."""
    values, lost = sample(200, 64, heads=4, decay=0.97), []
    came = numbers(values)[0]
    for groups in (1, 2, 4):
        options = {"n_head_groups": groups, "rank": 32}
        transform = vq.palu(n_fit=200, residual_length=8, n_sink=0, quantize_values=False, **options)
        state = feed(transform, values)
        basis = tables(state.values)[1]
        off, tail, kept = came - came.mean(axis=1, keepdims=True), 0.0, 0.0
        for group in groups_of(4, groups):
            tail += np.square(fitted(joint(came[group]))[2][width_of(4, 64, options) :]).sum()
            kept += np.square(sum(off[h] @ basis[h] for h in group)).sum()
        assert np.square(off).sum() - kept == pytest.approx(tail, rel=1e-3)
        read = rows_in_order(transform, state)[1]
        assert np.square(read - came)[:, :192].sum() == pytest.approx(tail, rel=0.1)
        lost.append(tail)
    stacked = np.square(fitted(np.concatenate(list(off)))[2][32:]).sum()
    assert lost[0] < lost[1] < lost[2] and lost[0] < stacked


def test_heads_of_one_source_share_a_latent() -> None:
    """Four heads of 24 numbers: 32 components of one group hold them, and none of a group a head."""
    rng = np.random.default_rng(0)
    rows = mx.array((rng.normal(size=(1, 1, 200, 24)) @ rng.normal(size=(1, 4, 24, 64)) + 3).astype(np.float32))
    errors = {}
    for groups in (1, 4):
        transform = vq.palu(n_head_groups=groups, rank=8, quantize_values=False, n_fit=64)
        state = feed(transform, rows)
        assert state.values.rows[0].shape == (1, groups, 224, 32)
        read = rows_in_order(transform, state)[1]
        errors[groups] = np.linalg.norm(read - numbers(rows)[0]) / np.linalg.norm(numbers(rows)[0])
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_a_higher_rank_loses_no_more(groups: int) -> None:
    values, losses = sample(N, 64, decay=0.98), []
    for rank in (8, 24, 32, 48, 64):
        transform = vq.palu(**SMALL | {"n_head_groups": groups, "n_fit": 130}, rank=rank, quantize_values=False)
        losses.append(np.square(rows_in_order(transform, feed(transform, values))[1] - numbers(values)[0]).sum())
    assert all(b <= a + 1e-6 * losses[0] for a, b in itertools.pairwise(losses)) and losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@dtypes
def test_latents_are_off_by_half_a_step(bits: int, dtype: mx.Dtype) -> None:
    keys = sample(N, 64, dtype=dtype)
    transform = vq.palu(**SMALL, rank=64, bits_k=bits, mixing=False)
    state = feed(transform, keys)
    mean, basis = tables(state.keys)
    read, came = rows_in_order(transform, state)[0], numbers(keys)[0]
    axes = [joint(basis[g].swapaxes(1, 2)).T for g in groups_of(HEADS, 2)]
    for group, turn in zip(groups_of(HEADS, 2), axes):
        off = np.abs(joint((read - came)[group])[2:128] @ turn).reshape(126, -1, 32)
        latents = (joint((came - mean[:, None])[group])[2:128] @ turn).reshape(126, -1, 32)
        step = np.ptp(latents, axis=-1, keepdims=True) / (2**bits - 1)
        there = step[..., 0] > 0  # a smaller group has fewer components
        assert (off <= 0.5 * step + 8 * UNIT[dtype] * np.abs(came).max()).all()
        assert (
            np.square((off / np.maximum(step, 1e-30))[there]).mean() == pytest.approx(1 / 12, rel=0.4)
            or dtype != mx.float32
        )


@pytest.mark.parametrize("hi, lo", [(8, 4), (4, 2)])
def test_leading_components_are_the_finer_ones(hi: int, lo: int) -> None:
    keys = sample(N, 64)
    errors = {}
    for widths in ((hi, lo), (lo, lo), (hi, hi)):
        transform = vq.palu(**SMALL, rank=64, hi_bit=widths[0], lo_bit=widths[1], mixing=False)
        errors[widths] = np.square(rows_in_order(transform, feed(transform, keys))[0] - numbers(keys)[0]).sum()
    assert errors[hi, hi] < errors[hi, lo] < 0.5 * errors[lo, lo]


# Mixing


@pytest.mark.parametrize("heads, rank, group", [(1, 32, 32), (2, 40, 32), (2, 64, 64), (3, 32, 32)])
@pytest.mark.parametrize("two", [True, False])
def test_mixing_turns_the_axes_of_one_width(heads: int, rank: int, group: int, two: bool) -> None:
    keys = sample(160, 64, heads=heads, decay=0.98)
    options = {"n_head_groups": 1, "rank": rank, "group_size": group, "n_fit": 136, "residual_length": 8}
    options |= {} if two else {"bits_k": 4}
    plain, mixed = (feed(vq.palu(**options, mixing=m), keys) for m in (False, True))
    axes, turned = (joint(tables(state.keys)[1].swapaxes(1, 2)).T for state in (plain, mixed))
    turn, sections = axes.T @ turned, sections_of(axes.shape[1], options, 0)
    np.testing.assert_allclose(turn @ turn.T, np.eye(len(turn)), atol=1e-5)
    np.testing.assert_allclose(axes @ turn, turned, atol=1e-5)
    start = 0
    for count, _ in sections:
        end = start + count
        assert np.abs(turn[start:end, :start]).max(initial=0) < 1e-5 > np.abs(turn[start:end, end:]).max(initial=0)
        assert np.abs(turn[start:end, start:end]).max() < 0.9  # no component stays by itself
        spread = [((joint(numbers(keys)[0]) @ x)[4:136].var(axis=0))[start:end] for x in (axes, turned)]
        assert spread[1].max() / spread[1].min() < 0.5 * spread[0].max() / spread[0].min()
        start = end
    assert np.array_equal(tables(plain.keys)[0], tables(mixed.keys)[0])


@pytest.mark.parametrize(
    "options, by_default",
    [
        ({"rank": 64}, (False, False)),
        ({"rank": 64, "bits_k": 4}, (True, False)),
        ({"rank": 64, "bits_v": 4}, (False, True)),
        ({"rank": 32}, (True, True)),
        ({"rank": 64, "hi_fraction": 0}, (True, True)),
        ({"rank": 64, "hi_fraction": 1}, (True, True)),
        ({"rank": 64, "hi_bit": 2}, (True, True)),
        ({"rank": 64, "quantize_values": False}, (False, False)),
    ],
    ids=label,
)
def test_mixing_is_the_default_where_there_is_one_width(options: dict[str, Any], by_default: tuple[bool, bool]) -> None:
    keys, fit = sample(N, 64, heads=1), {"n_fit": 100, "residual_length": 8}
    states = [feed(vq.palu(**fit, **options, mixing=m), keys) for m in (None, True, False)]
    for side, is_mixed in zip(("keys", "values"), by_default):
        default, mixed, plain = (getattr(state, side) for state in states)
        assert_same(default.tables, (mixed if is_mixed else plain).tables)
        exact = side == "values" and not options.get("quantize_values", True)
        assert mx.array_equal(mixed.tables[0], plain.tables[0]).item() == exact


def test_mixing_helps_where_one_width_serves_all() -> None:
    keys, errors = sample(N, 64, decay=0.93), []
    for mixing in (True, False):
        transform = vq.palu(**SMALL, rank=64, bits_k=3, mixing=mixing)
        errors.append(np.square(rows_in_order(transform, feed(transform, keys))[0] - numbers(keys)[0]).sum())
    assert errors[0] < 0.8 * errors[1]


# Odd numbers


@pytest.mark.parametrize("value", [3.3, -5.0, 0.0, 1e-30])
@dtypes
def test_equal_rows_are_exact(value: float, dtype: mx.Dtype) -> None:
    row = mx.where(mx.arange(DIM) % 3 == 0, value, -2 * value)
    keys = mx.broadcast_to(row, (1, HEADS, 110, DIM)).astype(dtype)
    for more in ({}, {"bits_k": 3, "rank": DIM}, {"quantize_values": False}):
        transform = vq.palu(**SMALL | more)
        for got in rows_in_order(transform, feed(transform, keys)):
            np.testing.assert_allclose(got, numbers(keys)[0], rtol=UNIT[dtype], atol=1e-36)


@pytest.mark.parametrize("scale", [2.0**-13, 2.0**10, 1e-4, 1e3, 1e-18, 1e18])
def test_rows_may_have_any_size(scale: float) -> None:
    keys, transform = sample(N), vq.palu(**SMALL, rank=DIM)
    one, two = (rows_in_order(transform, feed(transform, x)) for x in (keys, keys * scale))
    for a, b in zip(one, two):
        limit = 1e-5 if math.log2(scale).is_integer() else 1e-2
        assert np.linalg.norm(b / scale - a) <= limit * np.linalg.norm(a)


def test_a_bias_that_dwarfs_the_rest_costs_nothing() -> None:
    keys, bias = sample(N), mx.where(mx.arange(DIM) % 8 == 3, 600.0, 0.0)
    transform = vq.palu(**SMALL, rank=DIM)
    errors = [
        np.square(rows_in_order(transform, feed(transform, x))[0] - numbers(x)[0])[:, 2:128].mean()
        for x in (keys, keys + bias)
    ]
    assert errors[1] <= 1.05 * errors[0]


@dtypes
@pytest.mark.parametrize("rank, bits", [(DIM, 8), (16, 4)])
def test_the_largest_numbers_stay_finite(dtype: mx.Dtype, rank: int, bits: int) -> None:
    largest = 60000.0 if dtype == mx.float16 else 1e35
    keys = (mx.sign(sample(N, decay=1.0)) * largest).astype(dtype)
    for coded in (True, False):
        transform = vq.palu(**SMALL, rank=rank, bits_k=bits, quantize_values=coded)
        state = feed(transform, keys)
        assert all(np.isfinite(got).all() for got in rows_in_order(transform, state))
        for at in range(0, N, 7):  # a query that sees little but one row
            queries = (keys[:, :, at : at + 1].astype(mx.float32) / largest).astype(dtype)
            assert mx.isfinite(transform.attend(state, queries, 20 / largest)).all()


@dtypes
@pytest.mark.parametrize("pair", [False, True])
def test_rows_longer_than_a_half_float_reaches_are_kept(dtype: mx.Dtype, pair: bool) -> None:
    """Numbers of 60000: every one fits float16, and their row's component along its axis is larger."""
    size = np.where(np.arange(DIM) < 2, 60000.0, 0.0) if pair else np.full(DIM, 60000.0)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(1, 1, N, 1))
    keys = mx.array((signs * size).astype(np.float32)).astype(dtype)
    for more in ({"bits_k": 8, "mixing": False}, {"quantize_values": False}):
        transform = vq.palu(**SMALL | {"n_sink": 0}, **more)
        for got in rows_in_order(transform, feed(transform, keys)):
            assert np.abs(got - numbers(keys)[0]).max() <= 0.05 * 60000


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("at", [1, 9, 103, 120])
@dtypes
def test_a_number_that_is_not_finite_stays_alone(at: int, bad: float, dtype: mx.Dtype) -> None:
    """It enters the fit as the next one of its channel, and is held as the channel's mean."""
    keys, transform, head, channel = sample(N, dtype=dtype), vq.palu(**SMALL), 1, 5
    spot = (mx.arange(N)[:, None] == at) & (mx.arange(DIM) == channel) & (mx.arange(HEADS)[:, None, None] == head)
    following = at + 1 if at != 103 else 2  # 2 to 103 are fitted to
    spoilt, state = mx.where(spot, bad, keys), feed(transform, mx.where(spot, bad, keys))
    other = feed(transform, mx.where(spot, keys[:, :, following : following + 1], keys))
    assert_same(state.keys.tables, other.keys.tables)
    assert all(mx.isfinite(x).all() for x in flatten(state.keys)[0] if x.dtype != mx.uint32)
    got, want = (rows_in_order(transform, x)[0] for x in (state, other))
    others = np.arange(N) != at
    assert np.array_equal(got[:, others], want[:, others])
    if at < 2:  # a sink
        assert np.array_equal(got[:, at], numbers(spoilt)[0, :, at], equal_nan=True)
        return
    mean, basis = tables(state.keys)
    rows = numbers(keys)[0]
    rows[head, at, channel] = mean[head, channel]
    held, sections = (mean, basis), sections_of(basis.shape[-1], SMALL, 0)
    check_codes(state.keys, rows[:, :128], held, sections, 2, 32, dtype)
    assert np.isfinite(got[:, at]).all()
    latents = read_back(sum((rows[h, [at]] - mean[h]) @ basis[h] for h in (0, 1)), sections, 32, dtype)
    wanted = latents[0] @ basis[head].T + mean[head]
    assert np.abs(got[head, at] - wanted).max() <= 0.6 * np.abs(wanted - mean[head]).max()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("upto", [60, 100, 110])
def test_rows_without_a_finite_number_are_read_as_finite_ones(bad: float, upto: int) -> None:
    keys = mx.where(mx.arange(110)[:, None] < upto, bad, sample(110)).astype(mx.float16)
    for more in ({}, {"quantize_values": False, "bits_k": 4}):
        transform = vq.palu(**SMALL | more)
        state = feed(transform, keys)
        for x, side in zip(transform.read(state), (state.keys, state.values)):
            assert mx.isfinite(x[:, :, 2:96]).all() and all(mx.isfinite(t).all() for t in side.tables)


# Heads, sequences, sinks


def test_groups_and_sequences_stand_alone() -> None:
    keys, values = sample(N, batch=3), sample(N, 12, seed=5, batch=3)
    keys[1] *= 1000
    transform = vq.palu(**SMALL)
    state = feed(transform, keys, values)
    for row in range(3):
        span = slice(row, row + 1)
        assert_same(live(state, row), live(feed(transform, keys[span], values[span])))
    other = mx.where(mx.arange(HEADS)[:, None, None] == 2, -3 * keys[..., ::-1], keys)  # alone in its group
    changed = feed(transform, other, values)
    one, two = (rows_in_order(transform, x)[0] for x in (state, changed))
    assert np.mean(np.abs(one[:2] - two[:2]) < 1e-4) > 0.98 and not np.array_equal(one[2], two[2])
    other = mx.where(mx.arange(HEADS)[:, None, None] == 1, -3 * keys[..., ::-1], keys)
    two = rows_in_order(transform, feed(transform, other, values))[0]
    assert np.mean(np.abs(one[2] - two[2]) < 1e-4) > 0.98 and np.mean(np.abs(one[0] - two[0]) < 1e-4) < 0.5


@pytest.mark.parametrize("size", [1e20, 1e-20])
def test_heads_of_other_sizes_cost_a_group_nothing(size: float) -> None:
    keys, transform = sample(N), vq.palu(**SMALL)
    other, errors = mx.where(mx.arange(HEADS)[:, None, None] == 2, size * keys, keys), []
    for x in (keys, other):
        errors.append(rows_in_order(transform, feed(transform, x))[0] - numbers(x)[0])
    errors[1][2] /= size
    for heads in (slice(0, 2), slice(2, 3)):
        loss = [np.square(error[heads]).sum() for error in errors]
        assert loss[1] == pytest.approx(loss[0], rel=0.2)  # axes may turn round


def test_left_padding_leaves_no_trace() -> None:
    keys, transform = sample(N, batch=2), vq.palu(**SMALL)
    keys[1, :, :7] = 900
    state = feed(transform, keys, padding=mx.array([0, 7]))
    for row, padding in enumerate((0, 7)):
        alone = feed(transform, keys[row : row + 1, :, padding:])
        assert state.coded[row].item() == alone.coded.item() == 128
        assert_same(live(state, row), live(alone))
        for got, want in zip(rows_in_order(transform, state, row), rows_in_order(transform, alone)):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("n_sink", [1, 4, 40])
def test_sinks_are_exact_and_move_nothing(n_sink: int) -> None:
    keys = sample(N)
    loud = mx.where(mx.arange(N)[:, None] < n_sink, 100 * sample(N, seed=9, decay=1.0), keys)
    transform = vq.palu(**SMALL | {"n_sink": n_sink})
    one, two = (feed(transform, x) for x in (keys, loud))
    for side in ("keys", "values"):
        assert_same(getattr(one, side).tables, getattr(two, side).tables)
    for a, b in zip(*(rows_in_order(transform, state) for state in (one, two))):
        assert np.array_equal(b[:, :n_sink], numbers(loud)[0, :, :n_sink])
        assert np.array_equal(a[:, n_sink:], b[:, n_sink:])


# A given basis


def given_tables(basis: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = ((basis.key_mean, basis.key_basis), (basis.value_mean, basis.value_basis))
    return [(numbers(mean.array), numbers(axes.array)) for mean, axes in pairs]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_given_basis_is_used_as_it_is(groups: int) -> None:
    keys, values = sample(N), sample(N, 40, seed=1)
    basis = calibrated(sample(300, seed=3), sample(300, 40, seed=4), rank=20, n_head_groups=groups)
    options = {"basis": basis, "n_sink": 0, "mixing": False, "hi_bit": 5}
    for cuts in ((), (1, 50, 1, 40)):
        state = feed(vq.palu(**options), keys, values, cuts)
        assert state.coded.item() == 96 and state.keys.tables == state.values.tables == ()
        check_state(state, keys, values, {"hi_bit": 5, "n_head_groups": groups}, given_tables(basis))
    for ignored in ({"rank": 3}, {"n_head_groups": 5 - groups}, {"energy_threshold": 0.2}, {"rank": 10**6}):
        other = feed(vq.palu(**options | ignored), keys, values)
        assert_same(live(other), live(feed(vq.palu(**options), keys, values)))
    state = feed(vq.palu(**options | {"residual_length": 0}), keys, values)
    assert state.coded.item() == 128
    transform = vq.palu(**options | {"mixing": True})
    mixed = rows_in_order(transform, feed(transform, keys, values))[0]
    assert not np.array_equal(mixed, rows_in_order(vq.palu(**options), feed(vq.palu(**options), keys, values))[0])


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("groups, kind", [(1, "numpy"), (2, "float32"), (4, "bfloat16")])
def test_calibration_keeps_the_fewest_axes_that_hold_the_share(share: float, groups: int, kind: str) -> None:
    keys, values = sample(120, 48, seed=4, decay=0.98), sample(120, 20, seed=5, decay=0.6)
    rows = [x[0].swapaxes(0, 1).astype(mx.bfloat16 if kind == "bfloat16" else mx.float32) for x in (keys, values)]
    rows[0][:, 1] *= 2
    spoilt = [mx.where((mx.arange(120) == 7)[:, None, None], math.nan, x) for x in rows]
    came = [np.array(x) for x in spoilt] if kind == "numpy" else spoilt
    basis = vq.palu_calibrate(*came, energy_threshold=share, n_head_groups=groups)
    for x, (mean, axes) in zip(rows, given_tables(basis)):
        left, ranks = np.delete(numbers(x), 7, axis=0).swapaxes(0, 1), []
        for group in groups_of(HEADS, groups):
            energy = np.cumsum(np.square(fitted(joint(left[group]))[2]))
            ranks.append(next(r for r in range(1, len(energy) + 1) if energy[r - 1] >= share * energy[-1] * (1 - 1e-9)))
            if share < 1 or x is rows[0]:
                assert_axes(left[group], mean[group], axes[group])
        assert axes.shape == (HEADS, x.shape[2], math.ceil(max(ranks) / 32) * 32)
    assert basis.n_head_groups == groups
    again = PALUBasis.from_arrays(basis.arrays())
    assert again == basis and hash(vq.palu(basis=again)) == hash(vq.palu(basis=basis))


def test_calibration_with_a_rank() -> None:
    rows = sample(200, 48, decay=0.98)
    assert calibrated(rows, sample(200, 80), rank=20, n_head_groups=2).key_basis.shape == (HEADS, 48, 64)
    assert calibrated(rows, rank=48, n_head_groups=2, group_size=64).key_basis.shape == (HEADS, 48, 128)
    last = numbers(calibrated(rows, rank=48, n_head_groups=2).key_basis.array)[2]  # one head: 48 axes of 96
    assert np.array_equal(last[:, 48:], np.zeros((48, 48))) and np.abs(last[:, 47]).max() > 0.01


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_equal_rows_calibrate(value: float) -> None:
    rows = mx.full((1, HEADS, 110, DIM), value)
    basis = calibrated(rows)
    assert basis.key_basis.shape == (HEADS, DIM, 32)
    transform = vq.palu(basis=basis)
    assert np.array_equal(rows_in_order(transform, feed(transform, rows))[0], numbers(rows)[0])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_calibrated_rank_does_not_depend_on_size(scale: float) -> None:
    rows = numbers(sample(100, 64, decay=0.99))[0].swapaxes(0, 1)
    one, two = (vq.palu_calibrate(x, x, energy_threshold=0.8, n_head_groups=1) for x in (rows, rows * scale))
    assert one.key_basis.shape == two.key_basis.shape and one.key_basis.shape[2] < 3 * 64
    np.testing.assert_allclose(np.abs(numbers(two.key_basis.array)), np.abs(numbers(one.key_basis.array)), atol=1e-4)


# Attention and calls


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-4), (mx.float16, 5e-3)], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_head_groups": 1, "rank": 32},
        {"n_head_groups": 4, "hi_bit": 8, "lo_bit": 3, "rank": 40},
        {"quantize_values": False},
        {"rank": 40, "bits_k": 5, "bits_v": 3},
        {"mixing": True, "rank": 40},
        {"group_size": 128, "n_sink": 0},
    ],
    ids=label,
)
@pytest.mark.parametrize("heads, tokens", [(3, 1), (5, 2)])
def test_attention_on_latents_is_attention_on_what_is_read(
    options: dict[str, Any], dtype: mx.Dtype, limit: float, heads: int, tokens: int
) -> None:
    keys, values = sample(N, 64, heads=heads, dtype=dtype), sample(N, 40, seed=1, heads=heads, dtype=dtype)
    queries = mx.random.normal((1, 2 * heads, tokens, 64), key=mx.random.key(0)).astype(dtype)
    transform = vq.palu(**SMALL | ({"rank": 20} | options))
    state = feed(transform, keys, values)
    got, (held_keys, held_values) = numbers(transform.attend(state, queries, 0.2)), rows_in_order(transform, state)
    for h, t in itertools.product(range(2 * heads), range(tokens)):
        seen = N - tokens + t + 1
        score = held_keys[h // 2, :seen] @ numbers(queries)[0, h, t] * 0.2
        weights = np.exp(score - score.max())
        want = weights / weights.sum() @ held_values[h // 2, :seen]
        np.testing.assert_allclose(got[0, h, t], want, atol=limit * np.abs(held_values).max())


def test_scores_and_sums_by_the_formula() -> None:
    """q V_h . h_t + q . mean_h, and (sum p h) V_h^T + (sum p) mean_h, with the latents as numpy holds them."""
    keys, values, basis = sample(96), sample(96, seed=1), calibrated(sample(200, seed=3), rank=20, n_head_groups=2)
    options = {"basis": basis, "n_sink": 0, "residual_length": 0, "mixing": False, "hi_bit": 8, "lo_bit": 8}
    transform = vq.palu(**options)
    state, query = feed(transform, keys, values), mx.random.normal((1, HEADS, 1, DIM), key=mx.random.key(1))
    got, q = numbers(transform.attend(state, query, 0.3))[0, :, 0], numbers(query)[0, :, 0]
    for group in groups_of(HEADS, 2):
        latents = []
        for x, (mean, axes) in zip((keys, values), given_tables(basis)):
            rows = sum((numbers(x)[0, h] - mean[h]) @ axes[h] for h in group)
            latents.append(read_back(rows, [(axes.shape[2], 8)], 32))
        (key_mean, key_axes), (value_mean, value_axes) = given_tables(basis)
        for h in group:
            score = 0.3 * (latents[0] @ (q[h] @ key_axes[h]) + q[h] @ key_mean[h])
            weights = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
            want = weights @ latents[1] @ value_axes[h].T + weights.sum() * value_mean[h]
            np.testing.assert_allclose(got[h], want, atol=2e-3)


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    keys, values = sample(230), sample(230, 12, seed=1)
    transform, end = vq.palu(**SMALL), 0
    state = begin(transform, keys, values)
    for count in (20, 1, 90, 1, 40, 78):
        span, coded = slice(end, end + count), state.coded.item()
        before = rows_in_order(transform, state)
        mask = np.array(transform.make_mask(state, count))[0, 0, -1]
        state, *out = transform.update(state, keys[:, :, span], values[:, :, span])
        end += count
        for got, old, x in zip(out, before, (keys, values)):
            got = numbers(got)[0][:, mask]
            assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:end])
            assert np.array_equal(got[:, :coded], old[:, :coded])
    assert state.coded.item() == 192


# Trims


@pytest.mark.parametrize("drop", [1, 21, 22, 23, 30, 53, 70, 130, 150])
@pytest.mark.parametrize("given_basis", [False, True])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int, given_basis: bool) -> None:
    keys, values, kept = sample(N), sample(N, 20, seed=1), N - drop
    basis = calibrated(sample(200, seed=3), sample(200, 20, seed=4), rank=12, n_head_groups=2) if given_basis else None
    transform, least = vq.palu(**SMALL, basis=basis), 32 if given_basis else 96
    state = feed(transform, keys, values)
    short = transform.trim(state, drop)
    assert short.offset.item() == kept and vq.nbytes(short) == vq.nbytes(state)
    assert short.coded.item() == (min(128, kept // 32 * 32) if kept >= least else 0)
    for got, want in zip(rows_in_order(transform, short), rows_in_order(transform, state)):
        np.testing.assert_array_equal(got, want[:, :kept])
    again, *_ = transform.update(short, keys[:, :, kept:], values[:, :, kept:])
    assert again.coded.item() == 128 and state.offset.item() == again.offset.item()
    if drop <= 22 or drop == N:
        assert_same(live(again), live(state))
    if kept >= least:
        assert_same(again.keys.tables, state.keys.tables)
    elif not given_basis:  # the first packing comes again: axes of what was kept as it read, and of what came
        rows = np.concatenate([rows_in_order(transform, short)[0], numbers(keys)[0, :, kept:]], axis=1)
        plain = vq.palu(**SMALL)
        want = feed(plain, mx.array(rows[None].astype(np.float32)), values)
        assert_same(again.keys.tables, want.keys.tables)


@few
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=2, max_size=5))
def test_rejected_drafts_leave_counts_right(rounds: list[tuple[int, int]]) -> None:
    keys, transform = sample(400), vq.palu(**SMALL)
    state, seen = begin(transform, keys, keys), 0
    for came, dropped in rounds:
        rows = keys[:, :, seen : seen + came]
        state, *_ = transform.update(state, rows, rows)
        state, seen = transform.trim(state, dropped), max(seen + came - dropped, 0)
        assert state.offset.item() == seen and state.coded.item() <= seen
        read, coded = rows_in_order(transform, state)[0], state.coded.item()
        assert read.shape[1] == seen and np.isfinite(read).all()
        assert np.abs(read[:, coded:] - numbers(keys)[0, :, coded:seen]).max(initial=0) < 8
    assert vq.nbytes(state) == vq.nbytes(begin(transform, keys, keys))


# Bytes and options


@pytest.mark.parametrize("heads, dim", [(1, 128), (3, 64), (8, 80), (5, 32)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_head_groups": 1},
        {"rank": 20, "group_size": 64, "hi_bit": 6, "lo_bit": 3},
        {"quantize_values": False, "n_fit": 70, "residual_length": 3, "n_sink": 0},
        {"bits_k": 5, "bits_v": 8, "n_head_groups": 2, "rank": 30},
        {"hi_fraction": 0, "n_sink": 9},
        {"hi_fraction": 1, "rank": 32},
    ],
    ids=label,
)
@pytest.mark.parametrize("given_basis", [False, True])
def test_bytes(heads: int, dim: int, options: dict[str, Any], given_basis: bool) -> None:
    o = DEFAULTS | options
    width, groups = width_of(heads, dim, options), min(heads, o["n_head_groups"])
    a_token = 0.0
    for side in (0, 1):
        for count, bits in sections_of(width, options, side):
            a_token += 2 * count if bits is None else count * bits / 8 + 4 * count / o["group_size"]
    first, _ = layout(0, o["n_fit"], o["residual_length"], given_basis)
    columns = 320  # in blocks, for 300 tokens
    want = columns * groups * a_token + heads * 4 * dim * (first + o["n_sink"])
    want += 0 if given_basis else heads * 4 * dim * (width + 1)
    want += o["n_sink"] * 8 + 4 * (o["n_sink"] > 0) + 8  # sinks' places and signals, counters
    basis = None
    if given_basis:
        axes = np.zeros((heads, dim, width))
        for group in groups_of(heads, groups):
            axis = np.pad(np.eye(len(group) * dim), ((0, 0), (0, width)))[:, :width]
            axes[group] = axis.reshape(len(group), dim, width)
        basis = PALUBasis(axes, np.zeros((heads, dim)), axes, np.zeros((heads, dim)), o["n_head_groups"])
    spec = vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim, capacity=300)
    assert vq.nbytes(vq.palu(**options, basis=basis).init_state(spec)) == want
    if not options and heads in (1, 3):
        assert a_token * groups / heads == {128: 64, 64: 40}[dim]


CHANGES: list[dict[str, Any]] = [
    {"rank": 30},
    {"n_head_groups": 1},
    {"hi_bit": 5},
    {"lo_bit": 3},
    {"hi_fraction": 0.6},
    {"group_size": 64},
    {"quantize_values": False},
    {"bits_k": 4},
    {"bits_v": 3},
    {"mixing": True},
    {"n_fit": 70},
    {"residual_length": 40},
    {"n_sink": 9},
    {"basis": calibrated(sample(100, 64, seed=5), rank=48, n_head_groups=2)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    keys, base = sample(N, 64), SMALL | {"rank": 48}

    def read(**options: Any) -> tuple[list[np.ndarray], int]:
        transform = vq.palu(**base | options)
        state = feed(transform, keys)
        return rows_in_order(transform, state), vq.nbytes(state)

    (plain, plain_bytes), (rows, held_bytes) = read(), read(**change)
    differ = [not np.array_equal(a, b) for a, b in zip(rows, plain)]
    assert any(differ) or held_bytes != plain_bytes
    for option, one_side in (("bits_k", [True, False]), ("bits_v", [False, True]), ("quantize_values", [False, True])):
        if option in change:
            assert differ == one_side


BAD: dict[str, list[Any]] = {
    "rank": [0, -1, 2.0, True],
    "energy_threshold": [0, -0.1, 1.01, math.nan, "0.9", True, None],
    "n_head_groups": [0, -2, 2.0, True, None],
    "hi_bit": [0, 1, 7, 9, 4.0, True, None],
    "lo_bit": [0, 1, 7, 5, 8, 2.0, None],
    "hi_fraction": [-0.1, 1.1, math.nan, "all", True, None],
    "group_size": [0, 16, 48, 256, 32.0, None, True],
    "quantize_values": [0, 1, None, "no"],
    "bits_k": [0, 1, 7, 4.0, True],
    "bits_v": [0, 1, 7, 4.0, True],
    "mixing": [0, 1, "hadamard"],
    "n_fit": [0, -1, 2.5, True, None],
    "residual_length": [-1, 1.0, False],
    "n_sink": [-1, 0.5, 128, None, True],
    "basis": [np.eye(4), "given", {}],
}


@pytest.mark.parametrize("field, value", [(field, x) for field, values in BAD.items() for x in values])
def test_options_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^palu: `{field}` .*; got "):
        vq.palu(**{field: value})


def basis_of(axes: Any, mean: Any = None, count: int = 2, values: Any = None) -> PALUBasis:
    mean = np.zeros(np.shape(axes)[:2]) if mean is None else mean
    values = axes if values is None else values
    return PALUBasis(axes, mean, values, np.zeros(np.shape(values)[:2]), count)


AXES = np.stack([orthogonal(32, 0), orthogonal(32, 1)])


@pytest.mark.parametrize(
    "named, call",
    [
        ("palu: `rank`", lambda: start(rank=33)),
        ("palu: `basis`", lambda: start(64, basis=basis_of(AXES))),
        ("palu: `basis`", lambda: start(heads=3, basis=basis_of(AXES))),
        ("palu: `basis`", lambda: start(group_size=64, basis=basis_of(AXES))),
        ("palu: `basis`", lambda: start(basis=basis_of(AXES[..., :20]))),
        ("palu: `key_basis`", lambda: basis_of(2 * AXES)),
        ("palu: `key_basis`", lambda: basis_of(AXES, count=1)),
        ("palu: `key_basis`", lambda: basis_of(AXES[0])),
        ("palu: `key_basis`", lambda: basis_of(AXES * math.nan)),
        ("palu: `key_basis`", lambda: basis_of(AXES, np.zeros((2, 31)))),
        ("palu: `key_basis`", lambda: basis_of(AXES, np.full((2, 32), math.inf))),
        ("palu: `value_basis`", lambda: basis_of(AXES, values=np.ones((2, 32, 32)))),
        ("palu: `value_basis`", lambda: basis_of(AXES, values=AXES[:1])),
        ("palu: `n_head_groups`", lambda: basis_of(AXES, count=0)),
        ("palu_calibrate: `keys`", lambda: calibrate((20, 2))),
        ("palu_calibrate: `keys`", lambda: calibrate((0, 2, 16))),
        ("palu_calibrate: `values`", lambda: calibrate((20, 2, 16), (20, 16))),
        ("palu_calibrate: `rank`", lambda: calibrate((20, 2, 16), rank=17)),
        ("palu_calibrate: `rank`", lambda: calibrate((20, 2, 16), (20, 2, 8), rank=9)),
        ("palu_calibrate: `rank`", lambda: calibrate((20, 2, 16), rank=0)),
        ("palu_calibrate: `n_head_groups`", lambda: calibrate((20, 2, 16), n_head_groups=0)),
        ("palu_calibrate: `energy_threshold`", lambda: calibrate((20, 2, 16), energy_threshold=1.5)),
        ("palu_calibrate: `energy_threshold`", lambda: calibrate((20, 2, 16), energy_threshold=0)),
        ("palu_calibrate: `group_size`", lambda: calibrate((20, 2, 16), group_size=16)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(named: str, call: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{named} .*; got "):
        call()


def start(dim: int = 32, heads: int = 2, **options: Any) -> Any:
    return vq.palu(**options).init_state(vq.KVSpec(kv_heads=heads, key_dim=dim, value_dim=dim))


def calibrate(keys: tuple[int, ...], values: tuple[int, ...] | None = None, **options: Any) -> Any:
    return vq.palu_calibrate(mx.zeros(keys), mx.zeros(values or keys), **options)


def test_no_policy_moves_its_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError):
        vq.chain(vq.h2o(budget=32).policy, vq.palu())
