"""PolarQuant against its recursion in numpy: codebooks, angles bit by bit, radii, norms, errors, bytes."""

import itertools
import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, directions, draw, feed, feed_more, numbers
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.codec import Coder, bind
from vq_functional.core.tree import flatten
from vq_functional.ops.rotations import Rotation

HEADS, LEVELS = 2, 4
PAPER = (4, 2, 2, 2)
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
widths = pytest.mark.parametrize("bits", [PAPER, (3, 3, 3, 3), (1, 2, 3, 4), (10, 1, 5, 4)], ids=str)
ROUNDING = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 1e-6}  # of a radius and of an output, both relative


class Still(Rotation):
    """No rotation, so that coordinates can be chosen."""

    def apply(self, x: mx.array) -> mx.array:
        return x

    def undo(self, y: mx.array) -> mx.array:
        return y


def coder_of(bits: tuple[int, ...], dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Coder:
    return bind(vq.polar_codec(level_bits=bits, **options), dim, dtype)


def still(bits: tuple[int, ...], dim: int, dtype: mx.Dtype = mx.float32) -> Coder:
    return attrs.evolve(coder_of(bits, dim, dtype), rotation=Still())


def read(coder: Coder, x: mx.array) -> np.ndarray:
    return numbers(coder.decode(coder.encode(x)))


# The oracle


def angles_of(level: int, bits: int) -> np.ndarray:
    """The angles of least squared error at a level, each the mean of its cell under sin(2 psi)^(2^(l-1) - 1)."""
    if level == 1:
        return (np.arange(2**bits) + 0.5) * 2 * np.pi / 2**bits
    psi = np.linspace(0, np.pi / 2, 200_001)
    density = np.sin(2 * psi) ** (2 ** (level - 1) - 1)
    mass, moment, cubic = (np.concatenate([[0], np.cumsum(x)]) for x in (density, density * psi, np.cbrt(density)))
    found = np.interp((np.arange(2**bits) + 0.5) / 2**bits, cubic[1:] / cubic[-1], psi)
    for _ in range(3000):
        edges = np.concatenate([[0], np.searchsorted(psi, (found[1:] + found[:-1]) / 2), [len(psi)]])
        found = np.diff(moment[edges]) / np.diff(mass[edges])
    return found


def polar(y: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Angles of each level, and the radii that stay, of coordinates [..., D]."""
    angles, radii = [], y
    for _ in range(LEVELS):
        even, odd = radii[..., 0::2], radii[..., 1::2]
        angles.append(np.arctan2(odd, even) % (2 * np.pi))
        radii = np.hypot(even, odd)
    return angles, radii


def cartesian(angles: list[np.ndarray], radii: np.ndarray) -> np.ndarray:
    for psi in reversed(angles):
        radii = np.stack([radii * np.cos(psi), radii * np.sin(psi)], axis=-1).reshape(*psi.shape[:-1], -1)
    return radii


def codes_of(packed: mx.array, bits: tuple[int, ...], dim: int) -> list[np.ndarray]:
    """Codes of each level: a stream, least significant bit first, in words of its own."""
    stream, start, found = np.array(packed)[..., None] >> np.arange(32) & 1, 0, []
    for level, width in enumerate(bits, start=1):
        count = dim >> level
        end = start + math.ceil(count * width / 32)
        segment = stream[..., start:end, :].reshape(*packed.shape[:-1], -1)[..., : count * width]
        found.append((segment.reshape(*packed.shape[:-1], count, width) << np.arange(width)).sum(axis=-1))
        start = end
    assert start == packed.shape[-1]
    return found


@pytest.mark.parametrize("dim", [64, 80])
@widths
def test_codes_are_the_nearest_angles_and_radii_what_is_left(bits: tuple[int, ...], dim: int) -> None:
    coder, x = coder_of(bits, dim), draw(1, 2, 30, dim) * 3
    packed, radii = coder.encode(x)
    turned = numbers(coder.rotation.apply(mx.eye(dim)))
    np.testing.assert_allclose(turned @ turned.T, np.eye(dim), atol=1e-5)
    angles, left = polar(numbers(x) @ turned)
    for level, (psi, got) in enumerate(zip(angles, codes_of(packed, bits, dim)), start=1):
        table = angles_of(level, bits[level - 1])
        edges = (table[1:] + table[:-1]) / 2
        clear = np.abs(psi[..., None] - edges).min(axis=-1) > 1e-3
        assert (got == np.searchsorted(edges, psi))[clear].all()
        assert clear.mean() > 0.6
    assert packed.dtype == mx.uint32
    np.testing.assert_allclose(numbers(radii), left, rtol=1e-5)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@widths
def test_decode_is_the_recursion_back(bits: tuple[int, ...], dim: int) -> None:
    coder, x = coder_of(bits, dim), draw(1, 2, 10, dim)
    packed, radii = coder.encode(x)
    turned = numbers(coder.rotation.apply(mx.eye(dim)))
    codes = codes_of(packed, bits, dim)
    angles = [angles_of(level, width)[code] for level, (width, code) in enumerate(zip(bits, codes), start=1)]
    want = cartesian(angles, numbers(radii)) @ turned.T
    np.testing.assert_allclose(numbers(coder.decode((packed, radii))), want, atol=3e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_one_number_of_bits_leaves_two_more_for_the_first_level(bits: int) -> None:
    assert vq.polar_codec(bits=bits) == vq.polar_codec(level_bits=(bits + 2, bits, bits, bits))
    assert vq.polar(bits=bits).key == vq.polar_codec(bits=bits)


# Errors


@pytest.mark.parametrize(
    "bits, error, cosine",
    [
        ((4, 2, 2, 2), 0.0320, 0.984),
        ((3, 2, 2, 2), 0.0699, 0.965),
        ((2, 2, 2, 2), 0.217, 0.891),
        ((3, 3, 3, 3), 0.0561, 0.972),
        ((4, 4, 4, 4), 0.0142, 0.993),
    ],
)
def test_errors_of_the_table(bits: tuple[int, ...], error: float, cosine: float) -> None:
    x = draw(1, 1, 2048, 128)
    got, want = read(coder_of(bits, 128), x), numbers(x)
    lengths = np.linalg.norm(want, axis=-1)
    assert (np.square(got - want).sum(axis=-1) / lengths**2).mean() == pytest.approx(error, rel=0.05)
    assert ((got * want).sum(axis=-1) / lengths / np.linalg.norm(got, axis=-1)).mean() == pytest.approx(
        cosine, abs=0.002
    )


def test_the_angles_of_half_of_all_vectors_are_no_worse() -> None:
    """Angles below zero belong to the upper half of a full turn."""
    x = directions(4096, 64)
    error = np.square(read(coder_of((3, 3, 3, 3), 64), x) - numbers(x)).sum(axis=-1)
    assert error.mean() == pytest.approx(0.056, rel=0.05)


@given(seed=st.integers(0, 1000), pattern=st.integers(0, 2**16 - 1))
def test_signs_of_coordinates_do_not_change_the_error(seed: int, pattern: int) -> None:
    coder, x = still(PAPER, 16), draw(1, 1, 8, 16, seed=seed)
    signs = np.where(pattern >> np.arange(16) & 1, 1.0, -1.0)
    np.testing.assert_allclose(read(coder, x * mx.array(signs.astype(np.float32))), signs * read(coder, x), atol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 160])
def test_fine_angles_give_the_row_back(dim: int) -> None:
    x = draw(1, 2, 20, dim)
    error = np.linalg.norm(read(coder_of((8, 6, 6, 6), dim), x) - numbers(x), axis=-1)
    assert (error <= 0.03 * np.linalg.norm(numbers(x), axis=-1)).all()


@pytest.mark.parametrize("dim, rounds", [(64, 3), (128, 3), (80, 1)])
def test_enough_rounds_make_the_error_that_of_any_direction(dim: int, rounds: int) -> None:
    axes, errors = mx.eye(dim)[None, None, ::8], []
    for seed in range(100):
        coder = vq.polar_codec(seed=seed, rounds=rounds).bind(dim, mx.float32)
        errors.append(np.square(read(coder, axes) - numbers(axes)).sum(axis=-1).mean())
    assert np.mean(errors) == pytest.approx(0.032, rel=0.06)


# Norms


def hard_rows(dim: int, dtype: mx.Dtype) -> mx.array:
    """Random rows, axes, equal numbers, alternating signs, one large number among small ones."""
    ones, signs = mx.ones((1, dim)), mx.where(mx.arange(dim) % 2, 1.0, -1.0)[None]
    spike = mx.where(mx.arange(dim) == 3, 1000.0, 0.1)[None]
    rows = mx.concatenate([draw(20, dim), mx.eye(dim)[::7], ones, signs, spike, -spike])
    return rows[None, None].astype(dtype)


@dtypes
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [(1, 1, 1, 1), PAPER, (7, 6, 6, 6)], ids=str)
def test_norms_are_kept_whatever_the_bits(bits: tuple[int, ...], dim: int, dtype: mx.Dtype) -> None:
    for coder in (coder_of(bits, dim, dtype), still(bits, dim, dtype)):
        x = hard_rows(dim, dtype)
        ratio = np.linalg.norm(read(coder, x), axis=-1) / np.linalg.norm(numbers(x), axis=-1)
        assert np.abs(ratio - 1).max() <= ROUNDING[dtype]


@dtypes
@pytest.mark.parametrize("factor", [2.0**-3, 2.0, 2.0**5])
def test_a_factor_changes_radii_alone(factor: float, dtype: mx.Dtype) -> None:
    x = draw(1, 2, 40, 64, dtype=dtype)
    for bits in (PAPER, (3, 1, 2, 4)):
        (packed, radii), (same, scaled) = (coder_of(bits, 64, dtype).encode(y) for y in (x, x * factor))
        assert radii.dtype == dtype
        assert mx.array_equal(packed, same) and mx.array_equal(radii * factor, scaled)


@pytest.mark.parametrize("size", [1e-25, 1e-4, 1e3, 1e30])
def test_any_size_of_single_precision_keys(size: float) -> None:
    x = directions(512, 64)
    got = numbers(coder_of(PAPER, 64).decode(coder_of(PAPER, 64).encode(x * size)) / size)
    np.testing.assert_allclose(got, read(coder_of(PAPER, 64), x), atol=1e-2)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_largest_half_precision_rows(dim: int) -> None:
    """A radius can be sqrt(D) times as long as the largest number."""
    x = mx.concatenate([mx.full((1, dim), 60000.0), mx.sign(draw(8, dim)) * 60000])[None, None].astype(mx.float16)
    for coder in (coder_of((8, 6, 6, 6), dim, mx.float16), still((8, 6, 6, 6), dim, mx.float16)):
        got = read(coder, x)
        assert np.isfinite(got).all()
        assert (np.linalg.norm(got - numbers(x), axis=-1) <= 0.03 * np.linalg.norm(numbers(x), axis=-1)).all()


# Angles at the ends of their range


@dtypes
@pytest.mark.parametrize("bits", [(1, 1, 1, 1), PAPER, (8, 4, 4, 4)], ids=str)
def test_coordinates_that_are_zero(bits: tuple[int, ...], dtype: mx.Dtype) -> None:
    coder, x = still(bits, 32, dtype), draw(1, 1, 4, 32, dtype=dtype)
    x[:, :, 1], x[:, :, 2], x[:, :, 3, 16:] = 0, mx.where(mx.arange(32) == 9, -3.0, 0.0), -0.0
    got = read(coder, x)
    assert np.isfinite(got).all() and (got[:, :, 1] == 0).all()
    assert (got[:, :, 2:, 16:] == 0).all() and (np.abs(got[:, :, 3, :16]).max() > 1)
    assert np.linalg.norm(got[0, 0, 2]) == pytest.approx(3, rel=ROUNDING[dtype])


@dtypes
def test_a_zero_key_is_zero(dtype: mx.Dtype) -> None:
    coder, x = coder_of(PAPER, 64, dtype), draw(1, 1, 3, 64, dtype=dtype)
    x[:, :, 1] = 0
    rows = coder.encode(x)
    assert (coder.decode(rows)[:, :, 1] == 0).all() and mx.isfinite(coder.decode(rows)).all()
    assert (coder.dot(mx.ones((1, 1, 1, 64)), rows)[..., 1] == 0).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_first_level_closes_the_circle(bits: int) -> None:
    """Just below a full turn, at it, and just above nothing; and the same around half a turn."""
    cell = 2 * np.pi / 2**bits
    for turn, zero in itertools.product((0.0, np.pi), (1e-6, -1e-6, 1e-30, -1e-30, 0.0, -0.0)):
        pair = [math.cos(turn), math.copysign(1.0, math.cos(turn)) * zero]
        x = mx.array([pair * 8], mx.float32)[None, None]
        y = read(still((bits, 6, 6, 6), 16), x)[0, 0, 0]
        away = np.abs(np.angle(np.exp(1j * (np.arctan2(y[1::2], y[0::2]) - turn))))
        np.testing.assert_allclose(away, cell / 2, atol=1e-4)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_a_quarter_turn_of_radii_takes_the_last_angle_and_none_the_first(level: int) -> None:
    bits, half = (3, 3, 3, 3), 2 ** (level - 1)
    for first, code in ((True, 0), (False, 7)):
        x = mx.where((mx.arange(16) % (2 * half) < half) == first, 1.0, 0.0)[None, None, None]
        codes = codes_of(still(bits, 16).encode(x)[0], bits, 16)
        assert (codes[level - 1] == code).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_alone(bad: float) -> None:
    clean = draw(1, 2, 6, 64, dtype=mx.float16)
    x = mx.where((mx.arange(6)[:, None] == 2) & (mx.arange(64) == 5), bad, clean).astype(mx.float16)
    coder, others = coder_of(PAPER, 64, mx.float16), mx.array([0, 1, 3, 4, 5])
    for one, two in zip(coder.encode(clean), coder.encode(x)):
        assert mx.array_equal(one[:, :, others], two[:, :, others])


# Products and attention


@dtypes
@pytest.mark.parametrize("dim", [64, 80])
@widths
def test_products_equal_those_of_the_decoded_rows(bits: tuple[int, ...], dim: int, dtype: mx.Dtype) -> None:
    coder, x = coder_of(bits, dim, dtype), draw(2, 2, 33, dim, dtype=dtype)
    rows = coder.encode(x)
    queries, weights, plain = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, 33, seed=2), numbers(coder.decode(rows))
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    assert scores.dtype == sums.dtype == mx.float32 and coder.decode(rows).dtype == dtype
    bound = {mx.float16: 1e-3, mx.bfloat16: 5e-3, mx.float32: 1e-5}[dtype]
    lengths = np.linalg.norm(numbers(x), axis=-1)
    sizes = np.linalg.norm(numbers(queries), axis=-1)[..., None] * lengths[:, :, None]
    assert (np.abs(numbers(scores) - numbers(queries) @ plain.swapaxes(-1, -2)) <= bound * sizes).all()
    room = bound * (np.abs(numbers(weights)) @ lengths[..., None])
    assert (np.abs(numbers(sums) - numbers(weights) @ plain) <= room).all()


@dtypes
@pytest.mark.parametrize("polar_values", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_attention_on_codes_equals_attention_over_what_is_read(n: int, polar_values: bool, dtype: mx.Dtype) -> None:
    transform = vq.polar(polar_values=polar_values)
    keys, values = draw(1, HEADS, 50, 64, dtype=dtype), draw(1, HEADS, 50, 80, seed=1, dtype=dtype)
    new = draw(1, HEADS, n, 64, seed=2, dtype=dtype), draw(1, HEADS, n, 80, dtype=dtype)
    held = transform.write(feed(transform, keys, values), *new)
    queries = draw(1, 3 * HEADS, n, 64, seed=3, dtype=dtype)
    got = transform.attend(held, queries, 64**-0.5)
    assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
    k, v = (numbers(x)[0] for x in transform.read(held))
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    for head, i in itertools.product(range(3 * HEADS), range(n)):
        scores = k[head // 3, : 51 + i] @ numbers(queries)[0, head, i] / 8
        weights = np.exp(scores - scores.max())
        want = weights / weights.sum() @ v[head // 3, : 51 + i]
        np.testing.assert_allclose(numbers(got)[0, head, i], want, atol=tolerance)


def test_values_are_held_as_the_options_say() -> None:
    keys, values = draw(1, HEADS, 20, 64), draw(1, HEADS, 20, 80, seed=1)
    for transform, codec in (
        (vq.polar(bits_k=3), vq.int8_codec()),
        (vq.polar(bits=3, polar_values=True), vq.polar_codec(bits=3)),
        (vq.polar(bits_k=3, bits_v=1, polar_values=True), vq.polar_codec(bits=1)),
        (vq.polar(level_bits=(3, 1, 2, 3), polar_values=True), vq.polar_codec(level_bits=(3, 1, 2, 3))),
    ):
        want = bind(codec, 80, mx.float32).encode(values)
        held = feed(transform, keys, values).rows
        assert all(mx.array_equal(got[:, :, :20], x) for got, x in zip(held.values, want, strict=True))
        want = bind(transform.key, 64, mx.float32).encode(keys)
        assert all(mx.array_equal(got[:, :, :20], x) for got, x in zip(held.keys, want, strict=True))
    assert vq.polar(bits_k=3).key == vq.polar_codec(bits=3)


# Seeds and calls


@pytest.mark.parametrize("dim", [64, 80])
def test_seeds(dim: int) -> None:
    x = draw(1, 2, 50, dim)
    one, same = (vq.polar_codec(seed=7).bind(dim, mx.float32).encode(x) for _ in range(2))
    assert all(map(mx.array_equal, one, same))
    other, twice = coder_of(PAPER, dim, seed=8).encode(x), coder_of(PAPER, dim, seed=7, rounds=2).encode(x)
    assert not mx.allclose(one[1], other[1], rtol=0.1)
    assert mx.array_equal(one[0], twice[0]) == (dim == 80)  # no rounds of a dense rotation


@dtypes
@pytest.mark.parametrize("polar_values", [False, True])
def test_how_a_prompt_was_cut_leaves_no_trace(polar_values: bool, dtype: mx.Dtype) -> None:
    transform = vq.polar(polar_values=polar_values)
    keys, values = draw(1, HEADS, 40, 64, dtype=dtype), draw(1, HEADS, 40, 64, seed=1, dtype=dtype)
    whole = feed(transform, keys, values)
    for cuts in ([1] * 39, [5, 1, 16]):
        assert_same(feed(transform, keys, values, cuts), whole)


def test_trim_and_the_same_rows_again_leave_no_trace() -> None:
    transform = vq.polar(polar_values=True)
    keys, values = draw(1, HEADS, 30, 64), draw(1, HEADS, 30, 64, seed=1)
    whole = feed(transform, keys, values)
    for x in (1, 7, 30):
        short = transform.trim(whole, x)
        assert short.offset.item() == 30 - x
        assert_same(feed_more(transform, short, keys[:, :, 30 - x :], values[:, :, 30 - x :]), whole, 30)


def test_under_a_window_the_newest_rows_read_like_a_fresh_cache() -> None:
    sides = {"key": vq.polar_codec(), "value": vq.polar_codec()}
    window, fresh = vq.sliding_window(window_size=16, **sides), vq.rows(**sides)
    keys, values = draw(1, HEADS, 50, 64), draw(1, HEADS, 50, 64, seed=1)
    got = window.ordered(feed(window, keys, values, [20, *[1] * 29])).rows
    want = feed(fresh, keys[:, :, 34:], values[:, :, 34:], capacity=16).rows
    assert all(map(mx.array_equal, flatten(got)[0], flatten(want)[0]))


# Bytes and options


@dtypes
@pytest.mark.parametrize("bits", [PAPER, (2, 2, 2, 2), (3, 1, 7, 6)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_bytes_follow_the_formula(dim: int, bits: tuple[int, ...], dtype: mx.Dtype) -> None:
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40, dtype=dtype)
    angles = sum(4 * math.ceil(width * (dim >> level) / 32) for level, width in enumerate(bits, start=1))
    key_bytes = angles + dim // 16 * dtype.size
    for polar_values, value_bytes in ((False, dim + dtype.size), (True, key_bytes)):
        state = vq.polar(level_bits=bits, polar_values=polar_values).init_state(spec)
        assert vq.nbytes(state) == 2 * 3 * 40 * (key_bytes + value_bytes) + 2 * 4
    if dim == 128 and dtype == mx.float16 and bits[1:] == (2, 2, 2):
        assert key_bytes == {4: 64, 2: 48}[bits[0]]


@pytest.mark.parametrize(
    "options",
    [
        *({"bits": 0}, {"bits": 9}, {"bits": True}, {"level_bits": (4, 2, 2)}, {"level_bits": [4, 2, 2, 2]}),
        *({"level_bits": (4, 2, 2, 0)}, {"level_bits": (11, 2, 2, 2)}, {"level_bits": (4, 2.0, 2, 2)}),
        *({"seed": -1}, {"seed": 1.5}, {"rounds": 0}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    for build in (vq.polar, vq.polar_codec):
        with pytest.raises(vq.QuantizerConfigError, match=f"polar: `{next(iter(options))}` must be"):
            build(**options)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"polar_values": 1}, "must be one of"),
        ({"bits_k": 0}, "must be an integer"),
        ({"bits_v": 9, "polar_values": True}, "must be an integer"),
        ({"bits_k": 2, "level_bits": PAPER}, "beside `level_bits`"),
        ({"bits_v": 2, "level_bits": PAPER, "polar_values": True}, "beside `level_bits`"),
        ({"bits_v": 2}, "without `polar_values`"),
    ],
    ids=str,
)
def test_options_of_two_sides_are_refused_by_name(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"polar: `{next(iter(options))}` .*{rule}"):
        vq.polar(**options)


@pytest.mark.parametrize("dim", [8, 24, 100])
def test_head_sizes_that_are_no_multiple_of_16_are_refused_by_name(dim: int) -> None:
    for sizes, transform in (((dim, 64), vq.polar()), ((64, dim), vq.polar(polar_values=True))):
        with pytest.raises(vq.QuantizerConfigError, match=f"polar: `head_dim` must be a multiple of 16; got {dim}"):
            transform.init_state(vq.KVSpec(kv_heads=1, key_dim=sizes[0], value_dim=sizes[1]))
