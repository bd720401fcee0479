"""SVDq against numpy: axes, partition, codes, dropped channels, rotation, calibration, sinks, trims, bytes, options."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from svdq_oracle import (
    DIM,
    HEADS,
    UNIT,
    assert_same,
    begin,
    check_codes,
    feed,
    fitted,
    held,
    layout,
    live,
    numbers,
    orthogonal,
    read_back,
    rows_in_order,
    sample,
    tables,
    widths,
)

import vq_functional as vq
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.lowrank.svdq_basis import SVDqBasis
from vq_functional.ops.rope import Rope

DEFAULT = (8, 4, 2, 1, 1, 0, 0, 0)
SMALL: dict[str, Any] = {"n_fit": 40, "residual_length": 8, "n_sink": 2, "bit_schedule": (8, 4, 1, 0)}
dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])
few = settings(max_examples=12, deadline=None)


# Axes


@pytest.mark.parametrize("n_sink", [0, 2, 5, 40])
@pytest.mark.parametrize("n_fit, residual, group", [(64, 8, 32), (64, 0, 32), (90, 70, 16), (48, 20, 48)])
def test_axes_are_those_of_the_first_rows_without_the_sinks(n_sink: int, n_fit: int, residual: int, group: int) -> None:
    first, coded = layout(n_fit, residual, group, 170)
    keys = sample(170, seed=n_sink)
    later = mx.where(mx.arange(170)[:, None] < first, keys, 30 * keys[:, :, ::-1])
    transform = vq.svdq(n_fit=n_fit, residual_length=residual, group_size=group, n_sink=n_sink, bit_schedule=(8,) * 4)
    for x in (keys, later):
        state = feed(transform, x)
        mean, basis = tables(state)
        assert state.coded.item() == coded and first >= n_fit and basis.shape == (HEADS, DIM, DIM)
        for head in range(HEADS):
            want_mean, want_axes, _ = fitted(numbers(keys)[0, head, n_sink:first])
            np.testing.assert_allclose(mean[head], want_mean, atol=1e-5)
            np.testing.assert_allclose(basis[head], want_axes, atol=5e-3)
            np.testing.assert_allclose(basis[head, :, :8], want_axes[:, :8], atol=1e-4)
            np.testing.assert_allclose(basis[head].T @ basis[head], np.eye(DIM), atol=1e-5)
            spread = ((numbers(keys)[0, head, n_sink:first] - mean[head]) @ basis[head]).var(axis=0)
            assert (np.diff(spread) <= 1e-5 * spread[0]).all()
            assert (np.take_along_axis(basis[head], np.abs(basis[head]).argmax(axis=0)[None], axis=0) > 0).all()


@few
@given(
    rank=st.integers(1, 40),
    schedule=st.lists(st.integers(0, 8), min_size=1, max_size=9).filter(any),
    group=st.sampled_from([8, 16, 32, 48, 64]),
)
def test_channels_are_cut_in_groups_of_near_equal_size(rank: int, schedule: list[int], group: int) -> None:
    bits, explicit = widths(rank, schedule), rank >= 4 * len(schedule) or 0 not in schedule
    sizes = [len(part) for part in np.array_split(np.arange(rank), len(schedule))]
    assert len(bits) == rank == sum(sizes)
    dim = 40 if explicit else rank
    transform = vq.svdq(rank=rank if explicit else None, bit_schedule=schedule, group_size=group)
    state = transform.init_state(vq.KVSpec(kv_heads=1, key_dim=dim, value_dim=4, capacity=math.lcm(group, 32)))
    sections = [(width, len(list(same))) for width, same in itertools.groupby(filter(None, bits))]
    *codes, scales, zeros = state.keys.rows
    columns = state.values.rows[0].shape[2]
    assert [x.shape for x in codes] == [(1, 1, count, columns * width // 32) for width, count in sections]
    assert scales.shape == zeros.shape == (1, 1, sum(count for _, count in sections), columns // group)
    assert [x.shape for x in state.keys.tables] == [(1, 1, dim, scales.shape[2]), (1, 1, dim)]


# Codes


@pytest.mark.parametrize(
    "schedule",
    [(8, 4, 2, 1), (7, 5, 3), (6, 0, 1, 0), (1,), (8,), (0, 3, 3, 1), (2, 1, 1, 8, 4)],
    ids=lambda bits: "".join(map(str, bits)),
)
@pytest.mark.parametrize("one_bit", ["cond_mean", "minmax"])
@pytest.mark.parametrize("group", [32, 16])
def test_every_code_equals_the_oracle(schedule: tuple[int, ...], one_bit: str, group: int) -> None:
    transform = vq.svdq(**SMALL | {"n_sink": 0, "bit_schedule": schedule, "one_bit": one_bit, "group_size": group})
    for dim in (DIM, 22):
        keys = sample(110, dim)
        state, bits = feed(transform, keys), widths(dim, schedule)
        came, (mean, basis) = numbers(keys)[0], tables(state)
        assert state.coded.item() == 96
        check_codes(state, came[:, :96], (mean, basis), {"bits": bits, "group": group, "one_bit": one_bit}, mx.float32)
        read = rows_in_order(transform, state)[0]
        assert np.array_equal(read[:, 96:], came[:, 96:])
        for head in range(HEADS):  # with axes and codes of the oracle throughout
            want_mean, axes, _ = fitted(came[head, :40])
            latents = (came[head, :96] - want_mean) @ axes
            want = read_back(latents, bits, group, one_bit) @ axes.T + want_mean
            assert np.mean(np.abs(read[head, :96] - want).max(axis=-1) < 2e-3) > 0.9
            assert abs(np.square(read[head] - came[head]).sum() / np.square(want - came[head, :96]).sum() - 1) < 0.02


@dtypes
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_every_code_equals_the_oracle_in_each_dtype(dtype: mx.Dtype, dim: int) -> None:
    keys = sample(72, dim, decay=0.9, dtype=dtype)
    transform, schedule = vq.svdq(**SMALL | {"n_sink": 0}), SMALL["bit_schedule"]
    state, bits = feed(transform, keys), widths(dim, schedule)
    mean, basis = tables(state)
    assert state.keys.tables[0].dtype == state.keys.rows[-1].dtype == state.keys.rows[-2].dtype == dtype
    came, read = numbers(keys)[0], rows_in_order(transform, state)[0]
    check_codes(state, came[:, :64], (mean, basis), {"bits": bits, "group": 32, "one_bit": "cond_mean"}, dtype)
    for head in range(HEADS):
        want_mean, axes, _ = fitted(came[head, :40])
        np.testing.assert_allclose(mean[head], want_mean, atol=1e-5)
        np.testing.assert_allclose(basis[head, :, :6], axes[:, :6], atol=max(1e-3, UNIT[dtype]))
        kept = np.flatnonzero(bits)
        latents = read_back((came[head, :64] - mean[head]) @ basis[head], [bits[i] for i in kept], 32, "cond_mean")
        want = latents @ basis[head].T + mean[head]
        error, loss = read[head, :64] - want, np.square(want - came[head, :64]).mean()
        allowed = np.square(2 * UNIT[dtype] * np.abs(came).max())  # of codes that round the other way too
        assert np.square(error).mean() <= 0.05 * loss + allowed
        assert np.mean(np.abs(error).max(axis=-1) <= 4 * UNIT[dtype] * np.abs(came).max() + 1e-4) > 0.75


@few
@given(
    cuts=st.lists(st.sampled_from([1, 1, 2, 7, 31, 33, 40]), min_size=1, max_size=6),
    n_fit=st.sampled_from([10, 32, 40, 70]),
    residual=st.sampled_from([0, 5, 32, 40]),
    group=st.sampled_from([16, 32, 96]),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_same_codes(cuts: list[int], n_fit: int, residual: int, group: int, seed: int) -> None:
    n = sum(cuts)
    keys, options = sample(n, seed=seed), {"n_fit": n_fit, "residual_length": residual, "group_size": group}
    transform = vq.svdq(**SMALL | options)
    pieces, whole = (feed(transform, keys, cuts=c) for c in (cuts[:-1], ()))
    assert pieces.coded.item() == whole.coded.item() == layout(n_fit, residual, group, n)[1]
    if whole.coded.item():
        assert_same(live(pieces), live(whole))
    for got, want in zip(rows_in_order(transform, pieces), rows_in_order(transform, whole)):
        assert np.array_equal(got, want)


def test_single_tokens_settle_nothing_before_the_rows_to_fit_are_there() -> None:
    keys, transform = sample(72), vq.svdq(**SMALL)
    state, whole = begin(transform, keys, keys), feed(transform, keys)
    for i in range(72):
        state, *_ = transform.update(state, keys[:, :, i : i + 1], keys[:, :, i : i + 1])
        assert state.coded.item() == layout(40, 8, 32, i + 1)[1]
        if i < 39:
            assert np.array_equal(rows_in_order(transform, state)[0], numbers(keys)[0, :, : i + 1])
    assert_same(live(state), live(whole))


# What the axes and the bits are for


def latent_basis(dim: int, heads: int = HEADS, rank: int | None = None, seed: int | None = None) -> SVDqBasis:
    axes = [np.eye(dim) if seed is None else orthogonal(dim, seed + i) for i in range(heads)]
    return SVDqBasis(mx.array(np.array(axes)[..., :rank].astype(np.float32)), mx.zeros((heads, dim)))


@pytest.mark.parametrize(
    "decay, minmax, means, kivi", [(0.9, 5e-4, 4e-4, 0.154), (0.95, 0.0185, 0.0079, 0.155), (0.98, 0.253, 0.085, 0.155)]
)
def test_conditional_means_lose_less_than_the_ends_of_the_range(
    decay: float, minmax: float, means: float, kivi: float
) -> None:
    rng, spread = np.random.default_rng(0), decay ** np.arange(128)
    turn = orthogonal(128, 3)
    latents = rng.normal(size=(1, 1, 2048, 128)) * spread
    keys = mx.array((latents @ turn.T).astype(np.float32))
    basis = SVDqBasis(mx.array(turn[None].astype(np.float32)), mx.zeros((1, 128)))
    options: dict[str, Any] = {"residual_length": 0, "n_sink": 0, "basis": basis}
    methods = (vq.svdq(one_bit="minmax", **options), vq.svdq(**options), vq.kivi(bits=2, residual_length=0))
    for transform, want in zip(methods, (minmax, means, kivi)):
        read = transform.read(feed(transform, keys, keys[..., :32]))[0][:, :, :2048]
        loss = mx.square(read - keys).sum().item() / (2048 * np.square(spread).sum())
        assert abs(loss - want) <= 0.1 * want + 5e-5


def test_one_bit_of_normal_numbers() -> None:
    keys = mx.array(np.random.default_rng(1).normal(size=(1, HEADS, 4096, 8)).astype(np.float32))
    for one_bit, want in (("cond_mean", 0.333), ("minmax", 1.96)):
        transform = vq.svdq(bit_schedule=(1,), one_bit=one_bit, basis=latent_basis(8), n_sink=0, residual_length=0)
        read = transform.read(feed(transform, keys))[0][:, :, :4096]
        assert mx.square(read - keys).mean().item() == pytest.approx(want, rel=0.05)


def test_eight_bits_a_channel_are_nearly_exact() -> None:
    keys, transform = sample(72), vq.svdq(**SMALL | {"bit_schedule": (8,) * 4})
    state = feed(transform, keys)
    came, read = numbers(keys)[0, :, :64], rows_in_order(transform, state)[0][:, :64]
    _, basis = tables(state)
    for head in range(HEADS):
        off = np.abs((read[head] - came[head]) @ basis[head])
        assert (off <= 0.005 * np.ptp(came[head] @ basis[head], axis=0) + 1e-5).all()
        assert off.max() > 0


@pytest.mark.parametrize("rank", [None, 48])
def test_keys_of_few_directions_cost_little(rank: int | None) -> None:
    rng = np.random.default_rng(0)
    keys = mx.array((rng.normal(size=(1, HEADS, 136, 6)) @ rng.normal(size=(HEADS, 6, 64))).astype(np.float32))
    transform = vq.svdq(rank=rank, n_fit=40, residual_length=8)
    read, came = rows_in_order(transform, feed(transform, keys))[0], numbers(keys)[0]
    assert np.linalg.norm(read - came) / np.linalg.norm(came) <= 0.01


def test_what_is_left_out_touches_no_code() -> None:
    basis, rng = latent_basis(DIM, seed=5), np.random.default_rng(0)
    latents = rng.normal(size=(HEADS, 72, DIM)) * 0.8 ** np.arange(DIM)
    other = np.where(np.arange(DIM) < 8, latents, 9 * rng.normal(size=latents.shape))  # groups of 4: 8 4 0 0
    transform = vq.svdq(bit_schedule=(8, 4, 0, 0), basis=basis, residual_length=8, n_sink=0)
    turn = numbers(basis.basis.array).swapaxes(-1, -2)
    states = [feed(transform, mx.array((x @ turn)[None].astype(np.float32))) for x in (latents, other)]
    for head in range(HEADS):
        one, two = (held(state, widths(DIM, (8, 4, 0, 0)), 0, head) for state in states)
        assert np.mean(np.array(one[0]) != np.array(two[0])) < 0.01
        np.testing.assert_allclose(one[1:], two[1:], atol=2e-5)
    read = rows_in_order(transform, states[1])[0][:, :64] @ turn.swapaxes(-1, -2)
    assert np.abs(read[..., 8:]).max() < 1e-5 < np.abs(read[..., :8]).max()


@pytest.mark.parametrize("value", [3.3, -5.0, 0.0, 1e-30])
@dtypes
@pytest.mark.parametrize("schedule", [(8, 4, 1, 0), (1,), (3, 2)])
def test_equal_keys_are_exact(value: float, dtype: mx.Dtype, schedule: tuple[int, ...]) -> None:
    row = mx.where(mx.arange(DIM) % 3 == 0, value, -2 * value)
    keys = mx.broadcast_to(row, (1, HEADS, 72, DIM)).astype(dtype)
    for one_bit in ("cond_mean", "minmax"):
        transform = vq.svdq(**SMALL | {"bit_schedule": schedule, "one_bit": one_bit})
        assert np.array_equal(rows_in_order(transform, feed(transform, keys))[0], numbers(keys)[0])


@pytest.mark.parametrize("scale", [2.0**-13, 2.0**10, 1e-4, 1e3, 1e-18, 1e18])
def test_keys_may_have_any_size(scale: float) -> None:
    keys, transform = sample(72), vq.svdq(**SMALL)
    one, two = (rows_in_order(transform, feed(transform, x))[0] for x in (keys, keys * scale))
    limit = 0.0 if math.log2(scale).is_integer() else 1e-2 * np.abs(one).max()
    assert np.linalg.norm(two / scale - one) <= max(limit, 1e-5) * math.sqrt(one.size) / 4
    assert np.isfinite(two).all()


def test_a_bias_that_dwarfs_the_rest_costs_nothing() -> None:
    keys, bias = sample(136, 32, decay=0.9), mx.where(mx.arange(32) % 8 == 3, 600.0, 0.0)
    transform = vq.svdq(**SMALL)
    plain, moved = (rows_in_order(transform, feed(transform, x))[0] for x in (keys, keys + bias))
    errors = [np.square(got - numbers(x)[0]).mean() for got, x in ((plain, keys), (moved, keys + bias))]
    assert errors[1] <= 1.05 * errors[0]


# Heads, sequences, sinks, odd numbers


def test_heads_and_sequences_stand_alone() -> None:
    keys, values = sample(104, batch=3), sample(104, 12, seed=5, batch=3)
    keys[1] *= 1000
    transform = vq.svdq(**SMALL)
    state = feed(transform, keys, values)
    swapped = feed(transform, keys[:, ::-1], values[:, ::-1])
    for row in range(3):
        span = slice(row, row + 1)
        assert_same(live(state, row), live(feed(transform, keys[span], values[span])))
        assert_same(live(state, row), [x[::-1] for x in live(swapped, row)])
    bases = tables(state, 0)[1], tables(state, 1)[1]
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.combinations([*bases[0], *bases[1]], 2))


@pytest.mark.parametrize("rope", [None, Rope(8, base=50.0)], ids=["plain", "rope"])
def test_left_padding_leaves_no_trace(rope: Rope | None) -> None:
    keys, transform = sample(80, batch=2), vq.svdq(**SMALL, rope=rope)
    keys[1, :, :7] = 900
    state = feed(transform, keys, padding=mx.array([0, 7]))
    for row, padding in enumerate((0, 7)):
        alone = feed(transform, keys[row : row + 1, :, padding:])
        assert state.coded[row].item() == alone.coded.item() == 64
        assert_same(live(state, row), live(alone))
        for got, want in zip(rows_in_order(transform, state, row), rows_in_order(transform, alone)):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("n_sink", [1, 4, 40])
def test_sinks_are_exact_and_move_no_axis(n_sink: int) -> None:
    keys = sample(150)
    loud = mx.where(mx.arange(150)[:, None] < n_sink, 100 * sample(150, seed=9, decay=1.0), keys)
    transform = vq.svdq(**SMALL | {"n_sink": n_sink, "n_fit": 64})
    one, two = (feed(transform, x) for x in (keys, loud))
    assert np.array_equal(rows_in_order(transform, two)[0][:, :n_sink], numbers(loud)[0, :, :n_sink])
    assert_same(one.keys.tables, two.keys.tables)
    behind = math.ceil(n_sink / 32) * 32  # groups without sinks
    for a, b in zip(*(rows_in_order(transform, state) for state in (one, two))):
        assert np.array_equal(a[:, behind:], b[:, behind:])


@pytest.mark.parametrize("size", [1, 100])
def test_sinks_off_the_axes_cost_their_neighbours_nothing(size: float) -> None:
    keys = sample(104, 64, decay=0.8)
    loud = mx.where(mx.arange(104)[:, None] < 4, size * sample(104, 64, seed=9, decay=1.0), keys)
    transform = vq.svdq(n_fit=72, residual_length=8)
    errors = [
        np.square(rows_in_order(transform, feed(transform, x))[0] - numbers(x)[0])[:, 4:32].mean() for x in (keys, loud)
    ]
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [9, 31, 39, 63])
@dtypes
def test_a_number_that_is_not_finite_stays_alone(at: int, bad: float, dtype: mx.Dtype) -> None:
    keys, transform = sample(72, dtype=dtype), vq.svdq(**SMALL | {"bit_schedule": (8, 6, 4, 2)})
    spot = (mx.arange(72)[:, None] == at) & (mx.arange(DIM) == 5)
    clean, spoilt = (feed(transform, x) for x in (keys, mx.where(spot, bad, keys)))
    assert all(mx.isfinite(x).all() for x in flatten(spoilt.keys)[0] if x.dtype != mx.uint32)
    errors = [rows_in_order(transform, state)[0] - numbers(keys)[0] for state in (clean, spoilt)]
    assert np.isfinite(errors[1][:, :64]).all()
    others = np.arange(64) != at
    limit = 2.5 * np.square(errors[0][:, :64][:, others]).mean() + (UNIT[dtype] * numbers(mx.abs(keys)).max()) ** 2
    assert np.square(errors[1][:, :64][:, others]).mean() <= limit
    nearest = numbers(keys)[0, :, [at + 1 if at % 32 < 31 else at - 31, at], 5]
    assert np.abs(errors[1][:, at]).max() <= np.abs(nearest[0] - nearest[1]).max() + 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_without_a_finite_number_are_read_as_finite_ones(bad: float) -> None:
    for keys in (mx.full((1, HEADS, 72, DIM), bad), mx.where(mx.arange(72)[:, None] < 60, bad, sample(72))):
        transform = vq.svdq(**SMALL)
        state = feed(transform, keys.astype(mx.float16))
        read = np.array(transform.read(state)[0].astype(mx.float32))[0, :, 2:64]
        assert np.isfinite(read).all() and all(mx.isfinite(x).all() for x in state.keys.tables)


@dtypes
@pytest.mark.parametrize("schedule", [(8, 8), (1, 1), (2, 4)])
@pytest.mark.parametrize("dim", [16, 64])
def test_the_largest_numbers_stay_finite(dtype: mx.Dtype, schedule: tuple[int, ...], dim: int) -> None:
    largest = 60000.0 if dtype == mx.float16 else 1e35
    keys = (mx.sign(sample(72, dim, decay=1.0)) * largest).astype(dtype)
    transform = vq.svdq(**SMALL | {"bit_schedule": schedule})
    state = feed(transform, keys)
    read, came = rows_in_order(transform, state)[0], numbers(keys)[0]
    assert np.isfinite(read).all()
    loss = np.square((read - came)[:, 2:64] / largest).mean()
    assert loss < {(8, 8): 2e-3, (1, 1): 0.5, (2, 4): 0.2}[schedule]


# Rotated keys and a given basis


def turned(x: np.ndarray, rope: Rope, sign: int = 1) -> np.ndarray:
    """Rows [H, S, D] turned by their place; halves are paired."""
    half = rope.dims // 2
    angle = sign * np.arange(x.shape[1])[:, None] * rope.base ** (-2 * np.arange(half) / rope.dims)
    a, b, rest = x[..., :half], x[..., half : rope.dims], x[..., rope.dims :]
    turn = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle), rest]
    return np.concatenate(turn, axis=-1)


@pytest.mark.parametrize("dims", [8, 16])
@pytest.mark.parametrize("n_sink", [0, 2])
def test_with_rope_keys_are_held_as_before_it(dims: int, n_sink: int) -> None:
    rope, bare = Rope(dims, base=50.0), sample(110)
    keys = mx.array(turned(numbers(bare)[0], rope)[None].astype(np.float32))
    transform = vq.svdq(**SMALL | {"rope": rope, "n_sink": n_sink})
    for cuts in ((), (1, 40, 7), (30, 1, 1, 60)):
        state = feed(transform, keys, cuts=cuts)
        positions = state.keys.rows[-1]
        assert positions.dtype == mx.int32 and positions[:, :, :3].tolist() == [[[0, 32, 64]]]
        (mean, basis), before = tables(state), numbers(bare)[0]
        bits = widths(DIM, SMALL["bit_schedule"])
        for head in range(HEADS):
            want_mean, axes, _ = fitted(before[head, n_sink:40])
            np.testing.assert_allclose(mean[head], want_mean, atol=1e-4)
            np.testing.assert_allclose(basis[head, :, :6], axes[:, :6], atol=2e-3)
            np.testing.assert_allclose(np.abs(basis[head].T @ axes).diagonal(), 1, atol=0.01)
        span = slice(32 if n_sink else 0, 96)
        held_rows = [
            read_back((before[h, :96] - mean[h]) @ basis[h], [b for b in bits if b], 32, "cond_mean") @ basis[h].T
            + mean[h]
            for h in range(HEADS)
        ]
        want, read = turned(np.array(held_rows), rope), rows_in_order(transform, state)[0]
        assert np.mean(np.abs(read[:, :96] - want)[:, span].max(axis=-1) < 1e-3) > 0.9
        assert np.array_equal(read[:, 96:], numbers(keys)[0, :, 96:])
        assert np.array_equal(read[:, :n_sink], numbers(keys)[0, :, :n_sink])


@pytest.mark.parametrize("rank", [None, 12])
def test_a_given_basis_is_used_as_it_is(rank: int | None) -> None:
    keys, found = sample(104), vq.svdq_calibrate(sample(300, seed=3)[0].swapaxes(0, 1), rank=14)
    options: dict[str, Any] = {"bit_schedule": (8, 4, 1), "n_sink": 0, "basis": found, "rank": rank}
    bits, kept = widths(rank or 14, (8, 4, 1)), rank or 14
    axes = numbers(found.mean.array), numbers(found.basis.array)[..., :kept]
    for residual in (0, 40, None):
        transform = vq.svdq(**options, residual_length=residual)
        assert layout(1, 32 if residual is None else residual, 32, 104)[1] == feed(transform, keys).coded.item()
        for cuts in ((), (1, 30, 9, 1, 40)):
            state = feed(transform, keys, cuts=cuts)
            coded = state.coded.item()
            assert state.keys.tables == ()
            o = {"bits": bits, "group": 32, "one_bit": "cond_mean"}
            check_codes(state, numbers(keys)[0, :, :coded], axes, o, mx.float32)
            read, came = rows_in_order(transform, state)[0], numbers(keys)[0]
            for h in range(HEADS):
                latents = (came[h, :coded] - axes[0][h]) @ axes[1][h]
                want = read_back(latents, bits, 32, "cond_mean") @ axes[1][h].T + axes[0][h]
                assert np.mean(np.abs(read[h, :coded] - want).max(axis=-1) < 1e-3) > 0.9


# Calibration


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("from_numpy", [False, True])
def test_calibration_keeps_the_fewest_axes_that_hold_the_share(share: float, from_numpy: bool) -> None:
    rows = sample(200, seed=4)[0].swapaxes(0, 1)
    rows[:, 1] *= mx.where(mx.arange(DIM) < 5, 3.0, 0.2)
    spoilt = mx.where((mx.arange(200) == 7)[:, None, None], math.nan, rows)
    spoilt = np.array(spoilt) if from_numpy else spoilt
    found = vq.svdq_calibrate(spoilt, energy_threshold=share)
    ranks = []
    for head in range(HEADS):
        mean, axes, sigma = fitted(np.delete(numbers(rows)[:, head], 7, axis=0))
        ranks.append(next(r for r in range(1, DIM + 1) if sigma[:r].sum() >= share * sigma.sum() * (1 - 1e-9)))
        np.testing.assert_allclose(numbers(found.mean.array)[head], mean, atol=1e-5)
        count = min(found.rank, 10)
        np.testing.assert_allclose(numbers(found.basis.array)[head, :, :count], axes[:, :count], atol=1e-4)
    assert found.rank == max(ranks) and found.basis.array.dtype == mx.float32
    assert vq.svdq_calibrate(spoilt, energy_threshold=share, rank=3).rank == 3
    assert vq.svdq_calibrate(spoilt, 9 * spoilt, energy_threshold=share) == found
    again = SVDqBasis.from_arrays(found.arrays())
    assert again == found and hash(vq.svdq(basis=again)) == hash(vq.svdq(basis=found))


@pytest.mark.parametrize("places", [None, np.arange(200) * 3 % 71])
def test_calibration_with_rope_is_that_of_keys_before_it(places: np.ndarray | None) -> None:
    rope, bare = Rope(8, base=50.0), sample(200, seed=6)
    at = mx.array(np.arange(200) if places is None else places)
    keys = rope.apply(bare, at)[0].swapaxes(0, 1)
    found = vq.svdq_calibrate(keys, rope=rope, positions=None if places is None else at, rank=6)
    for head in range(HEADS):
        mean, axes, _ = fitted(numbers(bare)[0, head])
        np.testing.assert_allclose(numbers(found.mean.array)[head], mean, atol=1e-4)
        np.testing.assert_allclose(numbers(found.basis.array)[head], axes[:, :6], atol=1e-3)


def test_equal_rows_and_zeros_need_one_axis() -> None:
    for value in (0.0, 2.5):
        found = vq.svdq_calibrate(mx.full((40, HEADS, DIM), value))
        assert found.rank == 1 and np.array_equal(numbers(found.mean.array), np.full((HEADS, DIM), value))
        keys = mx.full((1, HEADS, 72, DIM), value)
        transform = vq.svdq(basis=found)
        assert np.array_equal(rows_in_order(transform, feed(transform, keys))[0], numbers(keys)[0])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_calibrated_rank_does_not_depend_on_size(scale: float) -> None:
    rows = numbers(sample(60))[0].swapaxes(0, 1)
    one, two = (vq.svdq_calibrate(x) for x in (rows, rows * scale))
    assert one.rank == two.rank < DIM
    np.testing.assert_allclose(numbers(two.basis.array), numbers(one.basis.array), atol=1e-4)


# Attention and calls


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-4), (mx.float16, 3e-3)], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bit_schedule": (7, 5, 3, 2)},
        {"group_size": 16},
        {"one_bit": "minmax", "bit_schedule": (6, 1)},
        {"rope": Rope(16, base=50.0)},
        {"basis": latent_basis(32, seed=3)},
        {"bits_v": 4, "n_sink": 0},
        {"group_size": 96},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_on_codes_is_dense_attention(
    options: dict[str, Any], dtype: mx.Dtype, limit: float, tokens: int
) -> None:
    keys, values = sample(140, 32, decay=0.9, dtype=dtype), sample(140, 20, seed=1, dtype=dtype)
    queries = mx.random.normal((1, 2 * HEADS, tokens, 32), key=mx.random.key(0)).astype(dtype)
    transform = vq.svdq(**SMALL | options)
    state = feed(transform, keys, values)
    assert state.coded.item() >= 96
    got, (held_keys, held_values) = numbers(transform.attend(state, queries, 0.2)), rows_in_order(transform, state)
    for h, t in itertools.product(range(2 * HEADS), range(tokens)):
        seen = 140 - tokens + t + 1
        score = held_keys[h // 2, :seen] @ numbers(queries)[0, h, t] * 0.2
        weights = np.exp(score - score.max())
        want = weights / weights.sum() @ held_values[h // 2, :seen]
        np.testing.assert_allclose(got[0, h, t], want, atol=limit * np.abs(held_values).max())


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    keys, values = sample(200), sample(200, 12, seed=1)
    transform, end = vq.svdq(**SMALL), 0
    state = begin(transform, keys, values)
    for count in (20, 1, 60, 1, 40, 78):
        span, coded = slice(end, end + count), state.coded.item()
        before = rows_in_order(transform, state)
        mask = np.array(transform.make_mask(state, count))[0, 0, -1]
        state, *out = transform.update(state, keys[:, :, span], values[:, :, span])
        end += count
        for got, old, x in zip(out, before, (keys, values)):
            got = numbers(got)[0][:, mask]
            assert np.array_equal(got[:, coded:], numbers(x)[0, :, coded:end])
            assert np.array_equal(got[:, :coded], old[:, :coded])


# Trims


@pytest.mark.parametrize("rope", [None, Rope(16, base=50.0)], ids=["plain", "rope"])
@pytest.mark.parametrize("drop", [1, 9, 14, 15, 30, 70, 101, 110])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int, rope: Rope | None) -> None:
    keys, transform = sample(110), vq.svdq(**SMALL | {"rope": rope})
    state, kept = feed(transform, keys), 110 - drop
    short = transform.trim(state, drop)
    assert short.offset.item() == kept
    assert short.coded.item() == (min(96, kept // 32 * 32) if kept >= 32 else 0)
    for got, want in zip(rows_in_order(transform, short), rows_in_order(transform, state)):
        np.testing.assert_array_equal(got, want[:, :kept])
    again, *_ = transform.update(short, keys[:, :, kept:], keys[:, :, kept:])
    assert again.coded.item() == 96
    if drop <= 14:
        assert_same(live(again), live(state))
    if kept >= 32:
        assert_same(again.keys.tables, state.keys.tables)
    else:  # the first packing comes again: axes of what was kept as it read, and of what came
        rows = np.concatenate([rows_in_order(transform, short)[0], numbers(keys)[0, :, kept:]], axis=1)
        for head, x in enumerate(rows if rope is None else turned(rows, rope, -1)):
            mean, axes, _ = fitted(x[2:40])
            np.testing.assert_allclose(tables(again)[0][head], mean, atol=1e-4)
            np.testing.assert_allclose(tables(again)[1][head, :, :5], axes[:, :5], atol=2e-3)


def test_after_a_trim_to_nothing_new_keys_have_their_own_axes() -> None:
    keys, other, transform = sample(80), sample(80, seed=8), vq.svdq(**SMALL)
    empty = transform.trim(feed(transform, keys), 80)
    again, *_ = transform.update(empty, other, other)
    assert_same(live(again), live(feed(transform, other)))


# Values, bytes, options


@pytest.mark.parametrize("bits_v", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("dim", [32, 20, 48])
def test_values_are_as_they_came_or_in_groups_of_a_token(bits_v: int | None, dim: int) -> None:
    keys, values = sample(72), sample(72, dim, seed=1, decay=0.95)
    transform = vq.svdq(**SMALL | {"bits_v": bits_v, "group_size": 16, "n_sink": 0})
    got, want = rows_in_order(transform, feed(transform, keys, values))[1], numbers(values)[0]
    for head, row in itertools.product(range(HEADS), range(64 if bits_v else 0)):
        for start in range(0, dim, 16):
            part = want[head, row, start : start + 16]
            want[head, row, start : start + 16] = read_back(part[:, None], [bits_v], len(part), "minmax")[:, 0]
    assert np.mean(np.abs(got - want) < 1e-5) > 0.99 and (bits_v or np.array_equal(got, want))


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("given_rank", [None, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 64, "n_fit": 70, "residual_length": 3, "n_sink": 0},
        {"bits_v": 4},
        {"bits_v": 3, "group_size": 48},
        {"rope": Rope(16)},
        {"bit_schedule": (5, 3, 1), "one_bit": "minmax"},
    ],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_bytes(dim: int, given_rank: int | None, options: dict[str, Any], calibrated: bool) -> None:
    o = {"bit_schedule": DEFAULT, "group_size": 32, "n_sink": 4, "bits_v": None} | options
    group, block = o["group_size"], math.lcm(o["group_size"], 32)
    n_fit = o.get("n_fit") or max(2 * given_rank if given_rank else 128, group, 2 * o["n_sink"])
    residual = o.get("residual_length", block if calibrated else max(n_fit - block, 0))
    first, _ = layout(1 if calibrated else n_fit, residual, group, 0)
    bits = widths(given_rank or dim, o["bit_schedule"])
    kept, full = sum(width > 0 for width in bits), -(-dim // group) * group
    key = sum(bits) / 8 + 4 * kept / group
    value = 4 * math.ceil(full * o["bits_v"] / 32) + 4 * full / group if o["bits_v"] else 2 * dim
    columns = -(-300 // block) * block
    shared = o["n_sink"] * 8 + 4 * (o["n_sink"] > 0) + 8  # sinks' places and signals, counters
    once = (first + o["n_sink"]) * 4 * dim + (0 if calibrated else 2 * dim * kept + 4 * dim)
    want = 3 * (columns * (key + value) + once) + shared
    want += 4 * columns // block if "rope" in options else 0
    basis = latent_basis(dim, 3) if calibrated else None
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, capacity=300)
    assert vq.nbytes(vq.svdq(**options, rank=given_rank, basis=basis).init_state(spec)) == want
    if not options and dim == 128:
        assert key == (10.5 if given_rank else 42)


def test_every_option_has_an_effect() -> None:
    keys, values = sample(140, 32, decay=0.9), sample(140, 32, seed=1)
    base = {"n_fit": 40, "residual_length": 8, "n_sink": 2}
    found = vq.svdq_calibrate(keys[0].swapaxes(0, 1), rank=32)

    def read(**options: Any) -> tuple[list[np.ndarray], int]:
        transform = vq.svdq(**base | options)
        state = feed(transform, keys, values)
        return rows_in_order(transform, state), vq.nbytes(state)

    plain, plain_bytes = read()
    changes: list[dict[str, Any]] = [
        {"rank": 34 - 2},
        {"bit_schedule": [8, 4, 2, 1]},
        {"group_size": 16},
        {"one_bit": "minmax"},
        {"n_fit": 80},
        {"residual_length": 40},
        {"n_sink": 9},
        {"bits_v": 4},
        {"rope": Rope(8)},
        {"basis": found},
    ]
    for change in changes[1:]:
        rows, held_bytes = read(**change)
        assert held_bytes != plain_bytes or any(not np.array_equal(a, b) for a, b in zip(rows, plain)), change
    wide = read(bit_schedule=(8, 4, 2, 1), rank=16)[1], read(bit_schedule=(8, 4, 2, 1), rank=24)[1]
    assert wide[0] < wide[1] and np.array_equal(read(**changes[0])[0][0], plain[0])
    assert np.array_equal(read(bit_schedule=list(DEFAULT))[0][0], plain[0])


@pytest.mark.parametrize(
    "options, fitted_to, window",
    [
        ({}, 128, 96),
        ({"rank": 32}, 64, 32),
        ({"rank": 40}, 80, 48),
        ({"rank": 8, "bit_schedule": (4,)}, 32, 0),
        ({"rank": 8, "bit_schedule": (4,), "group_size": 64}, 64, 0),
        ({"rank": 8, "bit_schedule": (4,), "n_sink": 30}, 60, 28),
        ({"group_size": 48}, 128, 32),
        ({"n_fit": 40}, 40, 8),
        ({"residual_length": 10}, 138, 10),
        ({"basis": latent_basis(64)}, 64, 32),
    ],
    ids=str,
)
def test_how_many_rows_are_fitted_and_stay_exact(options: dict[str, Any], fitted_to: int, window: int) -> None:
    state = vq.svdq(**options).init_state(vq.KVSpec(kv_heads=HEADS, key_dim=64, value_dim=8, capacity=256))
    assert state.recent.keys.shape[2] == fitted_to
    transform, block = vq.svdq(**options), math.lcm(options.get("group_size", 32), 32)
    keys, values = sample(256, 64), sample(256, 8)
    for n in (fitted_to - 1, fitted_to):
        state = feed(transform, keys[:, :, :n], values[:, :, :n])
        assert state.coded.item() == (0 if n < fitted_to else (n - window) // block * block)


BAD: dict[str, list[Any]] = {
    "rank": [0, -1, 2.0, True, 16, 31],
    "energy_threshold": [0, -0.1, 1.01, math.nan, "0.9", True],
    "bit_schedule": [(), (0, 0), (9,), (8, -1), (8, 4.0), (8, True), "84", 8, None],
    "group_size": [0, -32, 32.0, None, True],
    "one_bit": ["means", None, 1],
    "n_fit": [0, 5, 2.5, True],
    "residual_length": [-1, 1.0, False],
    "n_sink": [-1, 0.5, None],
    "bits_v": [0, 9, 2.0, True],
    "rope": [10000.0, {"dims": 16}, True],
    "basis": [np.eye(4), "given", {}],
}


@pytest.mark.parametrize("field, value", [(field, x) for field, values in BAD.items() for x in values])
def test_options_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^svdq: `{field}` .*; got "):
        vq.svdq(**{field: value})


def test_a_rank_that_leaves_out_a_few_channels_is_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match=r"^svdq: `rank` must be at least 32.*; got 16$"):
        vq.svdq(rank=16)
    vq.svdq(rank=32), vq.svdq(rank=16, bit_schedule=(8, 4, 2, 0)), vq.svdq(rank=1, bit_schedule=(8, 4))


def start(dim: int, heads: int = HEADS, **options: Any) -> Any:
    keys = mx.zeros((1, heads, 72, dim))
    return feed(vq.svdq(**options), keys)


@pytest.mark.parametrize(
    "field, call",
    [
        ("svdq: `rank`", lambda: start(16, rank=32)),
        ("svdq: `rank`", lambda: vq.svdq(rank=9, bit_schedule=(4,), basis=latent_basis(16, rank=8))),
        ("svdq: `rope`", lambda: start(16, rope=Rope(18))),
        ("svdq: `basis`", lambda: start(20, basis=latent_basis(16))),
        ("svdq: `basis`", lambda: start(16, heads=3, basis=latent_basis(16))),
        ("svdq: `basis`", lambda: SVDqBasis(mx.ones((1, 4, 2)), mx.zeros((1, 4)))),
        ("svdq: `basis`", lambda: SVDqBasis(mx.full((1, 4, 2), math.nan), mx.zeros((1, 4)))),
        ("svdq: `basis`", lambda: SVDqBasis(mx.eye(4), mx.zeros((4,)))),
        ("svdq: `mean`", lambda: SVDqBasis(mx.eye(4)[None], mx.zeros((1, 3)))),
        ("svdq_calibrate: `keys`", lambda: vq.svdq_calibrate(mx.zeros((4, 16)))),
        ("svdq_calibrate: `keys`", lambda: vq.svdq_calibrate(mx.zeros((0, 2, 16)))),
        ("svdq_calibrate: `rank`", lambda: vq.svdq_calibrate(mx.zeros((4, 2, 16)), rank=17)),
        ("svdq_calibrate: `rank`", lambda: vq.svdq_calibrate(mx.zeros((4, 2, 16)), rank=0)),
        ("svdq_calibrate: `energy_threshold`", lambda: vq.svdq_calibrate(mx.zeros((4, 2, 16)), energy_threshold=0)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, call: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{field} .*; got "):
        call()


def test_no_policy_moves_rows_that_share_scales() -> None:
    with pytest.raises(vq.QuantizerConfigError):
        vq.chain(vq.h2o_policy(), vq.svdq())


def test_a_state_copied_by_rows_reads_as_its_source() -> None:
    keys, transform = sample(80, batch=3), vq.svdq(**SMALL)
    state = feed(transform, keys)
    picked = map_leaves(lambda x: x[mx.array([2, 0])], state)
    for row, source in enumerate((2, 0)):
        for got, want in zip(rows_in_order(transform, picked, row), rows_in_order(transform, state, source)):
            assert np.array_equal(got, want)
