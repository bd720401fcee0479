"""MiniCache against numpy: directions, lengths, retained rows, means, codes, calls, attention, bytes, options."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from minicache_oracle import (
    DIM,
    HEADS,
    SMALL,
    UNIT,
    Held,
    array,
    by_layer,
    check,
    columns,
    feed,
    frontier,
    held_of,
    like,
    normal,
    numbers,
    rows_in_order,
    same,
    slots_of,
    spec_of,
)

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.tree import map_leaves
from vq_functional.crosslayer.minicache import MiniCacheOptions

dtypes = pytest.mark.parametrize("dtype", list(UNIT), ids=lambda dtype: str(dtype).split(".")[-1])
centers = pytest.mark.parametrize("center", [True, False], ids=["center", "plain"])
PLAIN: dict[str, Any] = {"residual_length": 0, "n_sink": 0, "block": 8, "center": False}  # the paper's rule, all merged


def merged(x: np.ndarray, dtype: mx.Dtype = mx.float16, layers: int = 2, **options: Any) -> tuple[Held, np.ndarray]:
    """What is held of the keys `x` [1, M * H, S, D], and the rows [M, H, S, D] as they read."""
    options = PLAIN | options
    method, o = vq.minicache(layers=layers, **options), MiniCacheOptions(**options)
    state = feed(method, array(x, dtype))
    assert state.coded.item() == x.shape[2]
    read = rows_in_order(method, state)[0]
    return held_of(state, o, layers), read.reshape(layers, -1, *read.shape[1:])


def by_layers(x: np.ndarray, dtype: mx.Dtype = mx.float16, layers: int = 2) -> np.ndarray:
    """`x` [1, M * H, S, D] as [M, H, S, D], in `dtype`."""
    y = numbers(array(x, dtype))[0]
    return y.reshape(layers, -1, *y.shape[1:])


def length(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(axis=-1) / length(x) / length(y)


# Everything that is held


@dtypes
@centers
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_everything_held_equals_the_oracle(dtype: mx.Dtype, center: bool, bits: int | None, layers: int) -> None:
    keys, values = like(layers, 30, dim=5, heads=1, offset=3), like(layers, 30, dim=40, heads=1, seed=7)
    check(keys, values, layers, dtype, center=center, direction_bits=bits)


@centers
@pytest.mark.parametrize(
    "options",
    [
        {"slerp_t": 0.0},
        {"slerp_t": 0.6},
        {"slerp_t": 1},
        {"retention": "range"},
        {"retention": "range", "retained_share": 0.6, "block": 20},
        {"retention_threshold": 0.3},
        {"retention_threshold": -1},
        {"retention_threshold": 1, "retained_share": 0.99},
        {"retained_share": 0},
        {"block": 1, "retained_share": 0.5},
        {"block": 33, "retained_share": 0.1},
        {"merge": "keys", "direction_bits": 8},
        {"merge": "values"},
        {"bits_k": 4},
        {"bits_v": 8},
        {"direction_bits": 8, "bits_k": 4},
        {"direction_bits": 4, "bits_v": 8},
        {"n_sink": 0, "residual_length": 0},
        {"n_sink": 11, "residual_length": 1},
        {"n_sink": 100},
    ],
)
def test_other_options(options: dict[str, Any], center: bool) -> None:
    keys, values = like(3, 60, dim=6, heads=1, offset=1), like(3, 60, dim=33, heads=1, seed=7)
    check(keys, values, 3, cuts=[11, 1, 30], center=center, **options)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    bits = st.sampled_from([None, 4, 8])
    merge = draw(st.sampled_from(["both", "both", "keys", "values"]))
    return {
        "layers": draw(st.integers(2, 4)),
        "dims": (draw(st.integers(1, 9)), draw(st.sampled_from([1, 3, 8, 31, 40]))),
        "dtype": draw(st.sampled_from(list(UNIT))),
        "cuts": draw(st.lists(st.sampled_from([1, 1, 2, 7, 13]), max_size=4)),
        "slerp_t": draw(st.sampled_from([0, 0.3, 0.5, 0.6, 1])),
        "retention": draw(st.sampled_from(["cosine", "cosine", "range"])),
        "retention_threshold": draw(st.sampled_from([-1, 0, 0.5, 0.9, 0.99])),
        "block": draw(st.integers(1, 12)),
        "retained_share": draw(st.sampled_from([0, 0.05, 0.3, 0.7])),
        "merge": merge,
        "center": draw(st.booleans()),
        "direction_bits": draw(bits),
        "bits_k": draw(bits) if merge != "values" else None,
        "bits_v": draw(bits) if merge != "keys" else None,
        "residual_length": draw(st.integers(0, 6)),
        "n_sink": draw(st.integers(0, 6)),
    }


@given(cases(), st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.5]))
@settings(max_examples=20, deadline=None)
def test_any_shapes_calls_and_numbers(case: dict[str, Any], seed: int, bad: float) -> None:
    """Some numbers are not finite; some rows are zero or huge, some channels constant."""
    layers, dims, dtype = case.pop("layers"), case.pop("dims"), case.pop("dtype")
    rng, sides, n = np.random.default_rng(seed), [], sum(case["cuts"]) + 14
    for dim in dims:
        x = np.concatenate([like(layers, n, seed=seed + i, heads=1 + seed % 2, dim=dim) for i in range(2)])
        x = x * rng.choice([0, 0.01, 1, 1, 1, 300], (*x.shape[:3], 1))
        x = np.where(rng.random((*x.shape[:2], 1, dim)) < 0.1, 3.3, x)
        sides.append(np.where(rng.random(x.shape) < bad, rng.choice([math.nan, math.inf, -math.inf], x.shape), x))
    check(*sides, layers, dtype, **case)


# Directions and lengths, by the paper's rule


@dtypes
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("layers", [2, 3])
def test_lengths_stay_and_directions_are_unit_vectors(dtype: mx.Dtype, bits: int | None, layers: int) -> None:
    """Merged or retained, and at any angle."""
    limit = max(2e-3, 2 * UNIT[dtype])
    for spread in (0.1, 1, 10):
        x = like(layers, 64, spread, dim=64)
        held, read = merged(x, dtype, layers, direction_bits=bits)
        np.testing.assert_allclose(length(read), length(by_layers(x, dtype, layers)), rtol=limit)
        if bits is None:
            np.testing.assert_allclose(length(held.direction[0]), 1, atol=limit)


@centers
@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("t", [0.3, 0.5, 1.0])
def test_equal_layers_lose_nothing(center: bool, layers: int, t: float) -> None:
    x = np.tile(normal(1, HEADS, 64, 16), (1, layers, 1, 1))
    held, read = merged(x, layers=layers, slerp_t=t, center=center)
    want = by_layers(x, layers=layers)
    assert (length(read - want) <= 2e-3 * length(want)).all()
    assert not held.unlike.any() and (held.places == 8).all()


@pytest.mark.parametrize("t, layer", [(0, 0), (1, 1)])
def test_the_ends_of_the_arc_are_the_layers_own_directions(t: float, layer: int) -> None:
    x = like(2, 64, 2.0)
    held, read = merged(x, slerp_t=t, retained_share=0)
    own = by_layers(x)[layer]
    np.testing.assert_allclose(held.direction[0], own / length(own)[..., None], atol=2e-3)
    assert (length(read[layer] - own) <= 2e-3 * length(own)).all()


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9])
def test_layers_swapped_with_the_other_share_of_the_arc(t: float) -> None:
    x = like(2, 64, 1.0)
    swapped = np.concatenate([x[:, HEADS:], x[:, :HEADS]], axis=1)
    one, two = merged(x, slerp_t=t)[0], merged(swapped, slerp_t=1 - t)[0]
    np.testing.assert_allclose(one.direction[0], two.direction[0], atol=2e-3)
    assert np.array_equal(one.places, two.places) and np.array_equal(one.unlike, two.unlike)


@pytest.mark.parametrize("retention", ["cosine", "range"])
@pytest.mark.parametrize("factor", [2.0**-6, 3.0, 100.0])
def test_a_longer_layer_changes_its_lengths_alone(retention: str, factor: float) -> None:
    x = like(2, 64, 1.0)
    longer = x.copy()
    longer[:, HEADS:] *= factor
    one, two = (merged(y, mx.float32, retention=retention)[0] for y in (x, longer))
    np.testing.assert_allclose(one.direction[0], two.direction[0], atol=1e-5)
    assert np.array_equal(one.places, two.places) and np.array_equal(one.unlike, two.unlike)
    for layer, times in enumerate((1, factor)):
        np.testing.assert_allclose(times * one.sizes[layer], two.sizes[layer], rtol=1e-5)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
def test_both_layers_are_off_by_their_share_of_the_angle(t: float, spread: float) -> None:
    x = like(2, 64, spread, dim=16)
    _, read = merged(x, mx.float32, slerp_t=t, retained_share=0)
    own = by_layers(x, mx.float32)
    angle = np.arccos(cosine(*own))
    for layer, off in enumerate((t * angle, (1 - t) * angle)):
        np.testing.assert_allclose(cosine(read[layer], own[layer]), np.cos(off), atol=1e-5)
        error = length(read[layer] - own[layer])
        np.testing.assert_allclose(error, 2 * np.sin(off / 2) * length(own[layer]), atol=2e-3)


def test_of_many_layers_all_weigh_about_the_same() -> None:
    """At the default; the direction is that of the mean of unit vectors where they are near to each other."""
    x = like(4, 64, 0.2, dim=32)
    held, _ = merged(x, mx.float32, 4)
    own = by_layers(x, mx.float32, 4)
    mean = (own / length(own)[..., None]).mean(axis=0)
    assert cosine(held.direction[0], mean).min() > 0.9999
    apart = cosine(own, held.direction[0]).mean(axis=(1, 2))
    assert np.ptp(apart) < 0.1 * (1 - apart.mean())


@dtypes
@pytest.mark.parametrize("t, kept", [(0.0, 0), (0.4, 0), (0.5, 0), (0.6, 1), (1.0, 1)])
@pytest.mark.parametrize("bits", [None, 8])
def test_opposite_rows(dtype: mx.Dtype, t: float, kept: int, bits: int | None) -> None:
    """The straight line between them leads to the nearer one; the first stays where it leads to nothing."""
    x = normal(1, 1, 16, 32)
    x = np.concatenate([x, -2 * x], axis=1)
    _, read = merged(x, dtype, slerp_t=t, retained_share=0, direction_bits=bits)
    own, limit = by_layers(x, dtype), max(1e-2, 4 * UNIT[dtype])
    want = own[kept] * np.array([1, 2])[:, None, None, None] / (1 + kept)
    assert (length(read - want) <= limit * length(want)).all()


@centers
def test_nearly_opposite_or_equal_rows_are_finite(center: bool) -> None:
    x = normal(1, 1, 64, 16)
    off = normal(1, 1, 64, 16, seed=1) * 10 ** np.linspace(-8, -1, 64)[:, None]
    for sign, t in itertools.product((1, -1), (0.3, 0.5, 0.7)):
        for layers in (2, 3):
            y = np.concatenate([x, sign * x + off, x - off][:layers], axis=1)
            held, read = merged(y, mx.float32, layers, slerp_t=t, retained_share=0, center=center)
            assert np.isfinite(read).all() and np.isfinite(held.sizes).all()
            np.testing.assert_allclose(length(held.direction[0]), 1, atol=1e-4)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_row_of_zeros_has_no_direction(layers: int, missing: int) -> None:
    """The others' stays, it is like any other, and reads as zeros."""
    x = np.tile(normal(1, 1, 16, 8), (1, layers, 1, 1))
    x[:, missing, 5] = x[:, :, 9] = 0
    held, read = merged(x, layers=layers)
    want = by_layers(x, layers=layers)
    assert (length(read - want) <= 2e-3 * length(want)).all() and not held.unlike.any()
    assert (read[missing, 0, 5] == 0).all() and (read[:, :, 9] == 0).all()


# Retained rows


@dtypes
@centers
@pytest.mark.parametrize("retention", ["cosine", "range"])
def test_retained_rows_are_bit_equal(dtype: mx.Dtype, center: bool, retention: str) -> None:
    x = like(3, 64, 3.0, offset=2)
    held, read = merged(x, dtype, 3, retention=retention, center=center, retained_share=0.4)
    own, count = by_layers(x, dtype, 3), 0
    for head, block, place in itertools.product(range(HEADS), range(8), range(8)):
        if place in held.places[head, block]:
            at = slice(None), head, 8 * block + place
            assert np.array_equal(read[at], own[at]) and (held.sizes[at] == 0).all()
            count += 1
    assert count == np.minimum(held.unlike, 4).sum() and count >= 16


@centers
def test_threshold_at_its_ends(center: bool) -> None:
    x = like(2, 64, 1.0)
    nothing, _ = merged(x, retention_threshold=-1, retained_share=0.5, center=center)
    assert not nothing.unlike.any() and (nothing.places == 8).all() and not nothing.retained.any()
    everything, _ = merged(x, retention_threshold=1, retained_share=0.5, center=center)
    assert (everything.unlike == 8).all() and everything.places.max() < 8


def test_keys_and_values_choose_for_themselves() -> None:
    keys = np.tile(normal(1, 1, 8, DIM), (1, 2, 1, 1))
    values = keys.copy()
    keys[0, 1, 3] *= -1
    values[0, 1, 6] *= -1
    state = feed(vq.minicache(layers=2, **PLAIN), array(keys), array(values))
    assert state.keys.rows[3].tolist() == [[[3]]] and state.values.rows[3].tolist() == [[[6]]]


def test_the_largest_block_has_a_place_for_every_row() -> None:
    """And marks an empty slot; counts are right where every row is too unlike."""
    x = np.tile(normal(1, 1, 255, DIM), (1, 2, 1, 1))
    for place in (0, 127, 254):
        y = x.copy()
        y[0, 1, place] *= -1
        held, read = merged(y, block=255, retained_share=0.01)
        assert held.places.tolist() == [[[place, 255, 255]]] and held.unlike.tolist() == [[1]]
        assert np.array_equal(read[:, 0, place], by_layers(y)[:, 0, place])
    held, read = merged(normal(1, 2, 255, DIM), block=255, retained_share=0.999, retention_threshold=1)
    assert held.unlike.tolist() == [[255]] and sorted(held.places[0, 0].tolist()) == list(range(255))


@given(st.integers(1, 255), st.integers(0, 999))
@example(100, 70)
@example(100, 550)
@settings(max_examples=25, deadline=None)
def test_slots_are_the_share_rounded_up(block: int, share: int) -> None:
    o = MiniCacheOptions(block=block, retained_share=share / 1000)
    assert o.slots == math.ceil(Fraction(share, 1000) * block) == slots_of(o) <= block


# Means


@pytest.mark.parametrize("bits", [None, 8])
def test_a_common_offset_of_a_layer_costs_nothing(bits: int | None) -> None:
    """Each layer has its own, and one is a few hundred times as large as the rest."""
    x, offset = like(2, 64, 0.5, dim=32), normal(1, 2 * HEADS, 1, 32, seed=5)
    offset[..., ::9] = 600
    options = {"center": True, "direction_bits": bits}
    one, read = merged(x, mx.float32, **options)
    two, other = merged(x + offset, mx.float32, **options)
    assert np.array_equal(one.places, two.places)
    np.testing.assert_allclose(one.sizes, two.sizes, rtol=1e-3)
    np.testing.assert_allclose(two.centers - one.centers, by_layers(offset, mx.float32).repeat(8, axis=2), atol=1e-3)
    np.testing.assert_allclose(other - by_layers(offset, mx.float32), read, atol=0.1 if bits else 5e-3)
    assert one.unlike.any() and not merged(x + offset, mx.float32)[0].unlike.any()


@dtypes
@centers
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("level", [3.3, -5.0, 1e-30, 0.0])
def test_constant_rows_come_back(dtype: mx.Dtype, center: bool, bits: int | None, level: float) -> None:
    x = np.full((1, 2 * HEADS, 16, 5), level)
    _, read = merged(x, dtype, center=center, direction_bits=bits)
    np.testing.assert_allclose(read, by_layers(x, dtype), rtol=2 * UNIT[dtype] + 1e-6, atol=1e-37)


def test_sinks_count_as_the_nearest_of_the_others_in_means() -> None:
    x = like(2, 16, 0.3)
    loud = x.copy()
    loud[:, :, :2] = 300 * np.sign(normal(1, 2 * HEADS, 2, DIM, seed=3))
    o = MiniCacheOptions(**SMALL | {"residual_length": 0})
    method = vq.minicache(layers=2, **SMALL | {"residual_length": 0})
    state = feed(method, array(loud))
    means = held_of(state, o, 2).centers.reshape(2 * HEADS, 2, DIM)
    old = numbers(array(loud))[0]
    assert (means[:, 0] <= old[:, 2:8].max(axis=1) + 1e-2).all()
    assert (means[:, 0] >= old[:, 2:8].min(axis=1) - 1e-2).all()
    assert np.array_equal(rows_in_order(method, state)[0][:, :2], old[:, :2])


# Calls and layers


@centers
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("bits, share", [(None, 0.25), (4, 0)])
def test_cuts_and_layers_leave_no_trace(center: bool, layers: int, bits: int | None, share: float) -> None:
    """`n_sink` reaches past the first block."""
    keys, values = (array(like(layers, 60, seed=seed)) for seed in (1, 2))
    options = {"center": center, "direction_bits": bits, "retained_share": share, "n_sink": 11}
    method = vq.minicache(layers=layers, **SMALL | options)
    whole = feed(method, keys, values)
    for cuts in ([20, 1, 1, 30], [1] * 30):
        assert same(feed(method, keys, values, cuts), whole)
        group, _ = by_layer(method, keys, values, cuts)
        assert same(method.join(group), whole)
        assert [len(own.keys.rows) for own in group] == [len(whole.keys.rows)] + [0] * (layers - 1)


@given(st.lists(st.sampled_from([1, 1, 3, 12, 33]), min_size=1, max_size=5), st.integers(0, 9), st.integers(2, 3))
@settings(max_examples=12, deadline=None)
def test_a_call_reads_its_rows_and_those_that_were_exact_exactly(cuts: list[int], last: int, layers: int) -> None:
    n = sum(cuts) + last
    keys, values = (array(like(layers, n, seed=seed, heads=1)) for seed in (1, 2))
    method, before = vq.minicache(layers=layers, **SMALL), slice(0, n - last)
    state = feed(method, keys[:, :, before], values[:, :, before], cuts[:-1], n)
    old, coded = rows_in_order(method, state), state.coded.item()
    now, *got = method.update(state, keys[:, :, n - last :], values[:, :, n - last :])
    held = method.write(state, keys[:, :, n - last :], values[:, :, n - last :]) if last else state
    assert now.offset.item() == n and same(now, state) == (last == 0)
    for x, out, was in zip((keys, values), got, old):
        read = numbers(out)[0][:, columns(method, held)]
        assert out.dtype == mx.float16 and np.array_equal(read[:, :coded], was[:, :coded])
        assert np.array_equal(read[:, coded:], numbers(x)[0][:, coded:])
    if last:
        _, layered = by_layer(method, keys, values, cuts)
        for side in range(2):
            assert mx.array_equal(mx.concatenate([layer[side] for layer in layered], axis=1), got[side])


@centers
@pytest.mark.parametrize("dropped", [1, 5, 11, 40, 59])
def test_rows_after_a_trim(center: bool, dropped: int) -> None:
    """They read as before; within the exact rows, feeding the same again leaves no trace."""
    keys, values = (array(like(3, 59, seed=seed)) for seed in (1, 2))
    method = vq.minicache(layers=3, **SMALL, center=center)
    state = feed(method, keys, values)
    cut = method.trim(state, dropped)
    for got, want in zip(rows_in_order(method, cut), rows_in_order(method, state)):
        assert np.array_equal(got, want[:, : 59 - dropped])
    again, *_ = method.update(cut, keys[:, :, 59 - dropped :], values[:, :, 59 - dropped :])
    assert again.offset.item() == 59 and again.coded.item() == 48
    if dropped <= 11:
        assert same(again, state)


def test_one_layer_alone_is_held_as_it_comes() -> None:
    keys, values = (array(like(1, 40, seed=seed)) for seed in (1, 2))
    method = vq.minicache()
    state = feed(method, keys, values, [7, 1])
    assert state.sinks is None and all(map(np.array_equal, rows_in_order(method, state), map(only, (keys, values))))
    spec = vq.KVSpec(kv_heads=3, key_dim=8, value_dim=4, capacity=100)
    for options in ({}, SMALL, {"direction_bits": 4, "merge": "keys", "center": False}):
        assert vq.minicache(**options) == method
    assert method != vq.minicache(max_ctx=99)
    row = 3 * 2 * (8 + 4)
    assert vq.nbytes(method.init_state(spec)) == 101 * row + 8  # one exact row


def only(x: mx.array) -> np.ndarray:
    return numbers(x)[0]


# Attention


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
@centers
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("share, merge, dims", [(0.25, "both", (8, 40)), (0, "both", (5, 11)), (0.4, "values", (8, 8))])
def test_attention_is_that_over_what_is_read(
    dtype: mx.Dtype, limit: float, center: bool, bits: int | None, share: float, merge: str, dims: tuple[int, int]
) -> None:
    """Of all layers at once and of each by itself; two query heads share a head."""
    layers, n, asked = 2, 47, 3
    keys, values = (array(0.3 * like(layers, n, 1.0, seed=dim, dim=dim, offset=0.5), dtype) for dim in dims)
    queries = array(normal(1, layers * 2 * HEADS, asked, dims[0], seed=9), dtype)
    options = SMALL | {"center": center, "direction_bits": bits, "retained_share": share, "merge": merge}
    method = vq.minicache(layers=layers, **options)
    state = feed(method, keys, values)
    assert state.coded.item() == 40
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
    for m, asking in enumerate(mx.split(queries, layers, axis=1)):
        member = method.member(m)
        alone = member.attend(member.borrowed(members[m], members[0]), asking, 0.3)
        np.testing.assert_allclose(numbers(alone)[0], np.split(want, layers)[m], rtol=limit, atol=limit)


# Numbers that break out, and batches


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_bad_number_counts_as_zero_or_as_the_mean(bad: float, bits: int | None) -> None:
    x = like(3, 24, 1.0, offset=2)
    wrong, at = x.copy(), (0, HEADS + 1, 11, 3)
    others = [i for i in range(8, 16) if i != 11]
    wrong[at] = bad
    method = vq.minicache(layers=3, **PLAIN | {"direction_bits": bits})
    x[at] = 0
    assert same(feed(method, array(wrong)), feed(method, array(x)))
    x[at] = x[0, HEADS + 1, others, 3].mean()
    options = {"center": True, "direction_bits": bits, "retained_share": 0}
    (held, got), (_, want) = (merged(y, mx.float32, 3, **options) for y in (wrong, x))
    near = np.zeros(got.shape, bool)
    near[:, 1, 8:16] = True
    assert np.array_equal(got[~near], want[~near])
    np.testing.assert_allclose(got, want, atol=0.2 if bits else 1e-4)
    assert np.isfinite(held.sizes).all()


@centers
@pytest.mark.parametrize("bits", [None, 8])
def test_rows_of_bad_numbers_only(center: bool, bits: int | None) -> None:
    x = like(2, 16, heads=1)
    x[0, 1] = math.nan
    x[0, 0, 3] = math.inf
    held, read = merged(x, center=center, direction_bits=bits)
    assert np.isfinite(read).all() and (read[1] == 0).all()
    own = by_layers(x)[0, 0]
    rest = [i for i in range(16) if i != 3]
    assert (length(read[0, 0] - own)[rest] <= (2e-2 if bits else 4e-3) * length(own[rest]).max()).all()
    assert not held.unlike.any()


@dtypes
@centers
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_largest_numbers_of_a_half_float_are_finite(dtype: mx.Dtype, center: bool, bits: int | None) -> None:
    x = 65504 * np.sign(normal(1, 1, 16, 32))
    x[:, :, 1::2] = -x[:, :, ::2]
    x = np.concatenate([x, x], axis=1)
    x[0, 1, 8:, ::4] *= -1
    for options in ({}, {"retained_share": 0}):
        method = vq.minicache(layers=2, **PLAIN | {"center": center, "direction_bits": bits, **options})
        state = feed(method, array(x, dtype))
        query = array(normal(1, 2, 1, 32) / 1e4, dtype)
        assert mx.isfinite(method.attend(state, query, 1.0)).all()
        read, own = rows_in_order(method, state)[0], numbers(array(x, dtype))[0]
        assert np.isfinite(read).all()
        limit = max(2e-3, 4 * UNIT[dtype]) + (0 if bits is None else 0.3 if bits == 4 else 0.02)
        assert (length(read - own)[:, :8] <= limit * length(own)[:, :8]).all()


@pytest.mark.parametrize("share", [0, 0.25])
def test_a_row_far_from_the_mean_keeps_its_length(share: float) -> None:
    """Of what is left without the mean row, which no half float holds."""
    x = np.full((1, 2, 8, 4), 65504.0)
    x[:, :, 5] = -65504
    _, read = merged(x, center=True, retained_share=share)
    np.testing.assert_allclose(read, by_layers(x), rtol=4e-3)


@centers
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-13, 2.0**10, 2.0**120])
def test_the_size_of_numbers_does_not_matter(size: float, bits: int | None, center: bool) -> None:
    x = numbers(array(like(2, 32)))
    options = {"center": center, "direction_bits": bits}
    (one, read), (two, other) = (merged(y, mx.float32, **options) for y in (x, x * size))
    assert all(map(np.array_equal, one.direction, two.direction)) and np.array_equal(one.places, two.places)
    assert np.array_equal(one.sizes * size, two.sizes)
    np.testing.assert_allclose(other / size, read, atol=1e-6)


@centers
def test_batch_rows_stand_alone(center: bool) -> None:
    keys, values = (np.concatenate([like(2, 40, seed=seed + i) for i in range(3)]) for seed in (1, 11))
    keys[1] *= 1000
    values[2, :, 20] = math.nan
    method, k, v = vq.minicache(layers=2, center=center, **SMALL), array(keys), array(values)
    state = feed(method, k, v, [9])
    for row in range(3):
        span = slice(row, row + 1)
        assert same(map_leaves(lambda x, span=span: x[span], state), feed(method, k[span], v[span], [9]))


def test_left_padding_leaves_no_trace() -> None:
    keys, values = (np.concatenate([like(2, 40, seed=seed + i) for i in range(2)]) for seed in (1, 11))
    keys[1, :, :9], values[1, :, :9] = 30, -30
    method = vq.minicache(layers=2, **SMALL)
    state = feed(method, array(keys), array(values), padding=mx.array([0, 9]))
    for row, padding in enumerate((0, 9)):
        alone = feed(method, array(keys[row : row + 1, :, padding:]), array(values[row : row + 1, :, padding:]))
        assert state.coded[row].item() == alone.coded.item() == (40 - padding - 5) // 8 * 8
        assert all(map(np.array_equal, rows_in_order(method, state, row), rows_in_order(method, alone)))


# Bytes


def bytes_of(o: MiniCacheOptions, layers: int, dims: tuple[int, int], spec: vq.KVSpec) -> int:
    """By the formula of the page, a batch row and a head; then what is there once a batch row."""
    item, blocks = spec.dtype.size, -(-spec.capacity // o.block)
    total = 0
    for side, dim, own in (("keys", dims[0], o.bits_k), ("values", dims[1], o.bits_v)):
        bits = own or o.direction_bits
        if o.merge in ("both", side):
            direction = 4 * bits * -(-dim // 32) + 2 * item * -(-dim // 32) if bits else dim * item
            a_block = slots_of(o) * (layers * dim * item + 1) + (slots_of(o) > 0) + layers * dim * item * o.center
            total += blocks * (o.block * (direction + layers * item) + a_block)
        else:
            total += blocks * o.block * layers * dim * item
        total += (o.residual_length + o.block + o.n_sink) * layers * dim * item
    return spec.batch * (spec.kv_heads // layers * total + 8 + (8 * o.n_sink + 4 if o.n_sink else 0))


@dtypes
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("dims", [(128, 128), (64, 80), (5, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction_bits": 4, "center": False},
        {"direction_bits": 8, "bits_v": 4, "n_sink": 0},
        {"block": 20, "residual_length": 7, "retained_share": 0},
        {"merge": "keys", "bits_k": 8, "block": 255},
        {"merge": "values", "retention": "range", "retained_share": 0.3},
    ],
)
def test_bytes(dtype: mx.Dtype, layers: int, dims: tuple[int, int], options: dict[str, Any]) -> None:
    sizes = {"kv_heads": 2 * layers, "key_dim": dims[0], "value_dim": dims[1], "batch": 3}
    spec = vq.KVSpec(**sizes, dtype=dtype, capacity=300)
    held = vq.minicache(layers=layers, **options).init_state(spec)
    assert vq.nbytes(held) == bytes_of(MiniCacheOptions(**options), layers, dims, spec)


@pytest.mark.parametrize("bits, a_token", [(None, 520), (8, 296), (4, 168)])
def test_bytes_a_token_without_slots_and_means(bits: int | None, a_token: int) -> None:
    """As in the paper, two layers of 1024 plain bytes; 4-bit codes leave less than a sixth."""

    def held(tokens: int) -> int:
        spec = vq.KVSpec(kv_heads=2, key_dim=128, value_dim=128, capacity=tokens)
        return vq.nbytes(vq.minicache(layers=2, direction_bits=bits, retained_share=0, center=False).init_state(spec))

    assert held(2048) - held(1024) == 1024 * a_token


def test_many_small_calls_need_no_more_room() -> None:
    keys, values = (array(like(3, 120, seed=seed, heads=1)) for seed in (1, 2))
    method = vq.minicache(layers=3, **SMALL)
    state = feed(method, keys, values, [1] * 119)
    assert vq.nbytes(state) == vq.nbytes(method.init_state(spec_of(keys, values)))
    assert frontier(MiniCacheOptions(**SMALL), 120) == state.coded.item() == 112


# Options


@pytest.mark.parametrize(
    "layers, options, want",
    [
        (8, {}, [1, 1, 1, 1, 2, 2]),
        (7, {}, [1, 1, 1, 2, 2]),
        (9, {}, [1, 1, 1, 1, 2, 2, 1]),
        (9, {"start_frac": 0, "group_size": 4}, [4, 4, 1]),
        (5, {"start_frac": 1}, [1] * 5),
        (5, {"group_size": 9, "start_frac": 0}, [1] * 5),
        (8, {"start_frac": 0.8, "group_size": 2}, [1, 1, 1, 1, 1, 1, 2]),
        (1, {}, [1]),
        (0, {}, []),
    ],
)
def test_groups_of_a_model(layers: int, options: dict[str, Any], want: list[int]) -> None:
    assert MiniCacheOptions(**options).stacks(layers) == want


@given(st.integers(0, 80), st.integers(0, 100), st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_shallow_layers_and_incomplete_groups_stand_alone(layers: int, percent: int, size: int) -> None:
    first = int(layers * (percent / 100))
    want = [1] * first
    while sum(want) + size <= layers:
        want.append(size)
    want += [1] * (layers - sum(want))
    assert MiniCacheOptions(start_frac=percent / 100, group_size=size).stacks(layers) == want


@pytest.mark.parametrize(
    "option",
    [
        {"slerp_t": 0.6},
        {"retention_threshold": 0.5},
        {"retention": "range"},
        {"block": 10},
        {"retained_share": 0.5},
        {"center": False},
        {"direction_bits": 8},
        {"bits_k": 4},
        {"bits_v": 4},
        {"merge": "keys"},
        {"merge": "values"},
        {"residual_length": 30},
        {"n_sink": 7},
    ],
    ids=lambda option: "-".join(map(str, next(iter(option.items())))),
)
def test_every_option_changes_what_is_read(option: dict[str, Any]) -> None:
    """Those of one side that side alone."""
    keys, values = (array(like(2, 75, seed=seed)) for seed in (1, 2))
    one, two = vq.minicache(layers=2, **SMALL), vq.minicache(layers=2, **SMALL | option)
    reads = [rows_in_order(method, feed(method, keys, values)) for method in (one, two)]
    changed = [not np.array_equal(a, b) for a, b in zip(*reads)]
    assert changed == [
        "bits_v" not in option and option.get("merge") != "keys",
        "bits_k" not in option and option.get("merge") != "values",
    ]


def test_which_layers_are_merged_is_for_the_builder() -> None:
    assert vq.minicache(layers=2, group_size=5, start_frac=0.1) == vq.minicache(layers=2)


@pytest.mark.parametrize("layers", [1, 2])
def test_no_tokens_past_max_ctx(layers: int) -> None:
    method = vq.minicache(layers=layers, max_ctx=40, **SMALL)
    keys = array(like(layers, 41))
    state = method.init_state(spec_of(keys, keys, capacity=64))
    state, *held = method.update(state, keys[:, :, :40], keys[:, :, :40])
    assert all(mx.isfinite(x).all() for x in held)
    _, *held = method.update(state, keys[:, :, 40:], keys[:, :, 40:])
    assert all(mx.isnan(x).all() for x in held)
    cache = TransformKVCache(method)
    cache.update_and_fetch(keys[:, :, :40], keys[:, :, :40])
    with pytest.raises(vq.QuantizerConfigError, match=r"^minicache: `keys` must stay within `max_ctx` = 40; got 41$"):
        cache.update_and_fetch(keys[:, :, 40:], keys[:, :, 40:])
    assert cache.offset == 40


UNIT_RANGE = r"must be a finite number in \[0, 1\]"
BITS = r"must be one of \(None, 4, 8\)"
BAD_VALUES: dict[str, tuple[str, list[Any]]] = {
    "start_frac": (UNIT_RANGE, [-0.1, 1.1, math.nan, True, None, "0.5"]),
    "group_size": ("must be an integer >= 2", [1, 0, 2.0, True, None]),
    "retention_threshold": (r"must be a finite number in \[-1, 1\]", [-1.1, 1.01, math.nan, -math.inf, None]),
    "slerp_t": (UNIT_RANGE, [-0.01, 1.5, math.nan, False]),
    "max_ctx": ("must be an integer >= 1", [0, -5, None, 8192.0, math.inf]),
    "retention": (r"must be one of \('cosine', 'range'\)", ["angle", None, 0]),
    "block": (r"must be an integer in \[1, 255\]", [0, 256, 64.0, True]),
    "retained_share": (r"must be a finite number in \[0, 1\)", [-0.1, 1, 1.0, math.nan, True]),
    "merge": (r"must be one of \('both', 'keys', 'values'\)", ["none", None, True]),
    "center": (r"must be one of \(True, False\)", [1, 0, None, "yes"]),
    "direction_bits": (BITS, [0, 2, 16, 4.0, "8"]),
    "bits_k": (BITS, [3, True, 8.0]),
    "bits_v": (BITS, [1, False, 0]),
    "residual_length": ("must be an integer >= 0", [-1, 1.0, None]),
    "n_sink": ("must be an integer >= 0", [-1, 4.0, True]),
    "layers": ("must be an integer >= 1", [0, 2.0, True, None]),
}


@pytest.mark.parametrize("field, value", [(field, x) for field, (_, values) in BAD_VALUES.items() for x in values])
def test_options_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    message = f"^minicache: `{field}` {BAD_VALUES[field][0]}.*; got "
    with pytest.raises(vq.QuantizerConfigError, match=message) as raised:
        vq.minicache(**{field: value})
    assert str(raised.value).endswith(repr(value))


def test_every_option_is_checked() -> None:
    assert {field.name for field in attrs.fields(MiniCacheOptions)} == BAD_VALUES.keys() - {"layers"}


@pytest.mark.parametrize(
    "message, call",
    [
        (
            "`kv_heads` must be a multiple of the 2 layers; got 3",
            lambda: vq.minicache(layers=2).init_state(vq.KVSpec(kv_heads=3, key_dim=8, value_dim=8)),
        ),
        ("`layer` must be below 2; got 2", lambda: vq.minicache(layers=2).member(2)),
        ("`layer` must be below 2; got -1", lambda: vq.minicache(layers=2).member(-1)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^minicache: {message}$"):
        call()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_without_its_group_is_refused(layer: int) -> None:
    keys = array(like(1, 4))
    method = vq.minicache(layers=2)
    own = method.init_group(spec_of(keys, keys))[layer]
    with pytest.raises(RuntimeError, match=r"^minicache: `group` must .*; got None$"):
        method.member(layer).update_in(own, None, keys, keys)
