"""Affine groups along channels as a codec of any width, and levels of least squared error against brute force."""

import itertools
import json
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.codec import Coder, bind
from vq_functional.core.describe import describe, restore
from vq_functional.core.tree import flatten
from vq_functional.quantize.affine_rows import affine_codec
from vq_functional.quantize.groups import TokenGroupsCodec

every_width = pytest.mark.parametrize("bits", range(1, 9))
clips = pytest.mark.parametrize("clip", [None, "least_squares"])
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["fp16", "bf16", "fp32"])
UNIT_ROUNDING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def coder_of(bits: int, dim: int, dtype: mx.Dtype = mx.float32, group: int = 32, clip: str | None = None) -> Coder:
    return bind(affine_codec(bits=bits, group_size=group, clip=clip), dim, dtype)


def lost(coder: Coder, x: mx.array) -> np.ndarray:
    """Squared error of each row."""
    return np.square(numbers(coder.decode(coder.encode(x))) - numbers(x)).sum(axis=-1)


# The oracle


def range_by_hand(row: list[float], bits: int) -> list[float]:
    """One group over its whole range."""
    low, step = min(row), (max(row) - min(row)) / (2**bits - 1)
    return [low + round((x - low) / step) * step if step else low for x in row]


def two_means(row: list[float]) -> float:
    """Least squared error with two levels: the best of all ways to split the sorted row."""
    row, best = sorted(row), math.inf
    for cut in range(1, len(row) + 1):
        parts = [np.array(part) for part in (row[:cut], row[cut:]) if part]
        best = min(best, sum(float(np.square(part - part.mean()).sum()) for part in parts))
    return best


def four_levels(row: list[float]) -> float:
    """Least squared error with four evenly spaced levels within the row's range, over a fine grid of spans."""
    ends, best = np.linspace(min(row), max(row), 41), math.inf
    for low, high in itertools.combinations(ends, 2):
        levels = np.linspace(low, high, 4)
        best = min(best, float(np.square(np.array(row)[:, None] - levels).min(axis=1).sum()))
    return best


@every_width
def test_whole_ranges_by_hand(bits: int) -> None:
    x, coder = draw(1, 1, 6, 64, seed=bits), coder_of(bits, 64)
    read = numbers(coder.decode(coder.encode(x)))[0, 0]
    for row, got in zip(numbers(x)[0, 0].tolist(), read):
        want = [y for start in (0, 32) for y in range_by_hand(row[start : start + 32], bits)]
        np.testing.assert_allclose(got, want, atol=1e-5)


@given(row=st.lists(st.integers(-60, 60), min_size=2, max_size=12))
def test_two_levels_come_near_the_best_two(row: list[int]) -> None:
    x = mx.array([float(value) for value in row])[None, None, None]
    coder = coder_of(1, len(row), group=len(row), clip="least_squares")
    got, best = lost(coder, x).item(), two_means([float(value) for value in row])
    whole = lost(coder_of(1, len(row), group=len(row)), x).item()
    assert best - 1e-2 <= got <= whole + 1e-2


def test_levels_on_usual_rows_are_within_a_few_percent_of_the_best() -> None:
    x = draw(1, 1, 60, 16, seed=3)
    for bits, best in ((1, two_means), (2, four_levels)):
        got = lost(coder_of(bits, 16, group=16, clip="least_squares"), x).sum()
        want = sum(best(row) for row in numbers(x)[0, 0].tolist())
        assert 0.99 * want <= got <= 1.12 * want


# What it is for


@pytest.mark.parametrize("bits, whole, fitted", [(1, 1.9, 0.34), (2, 0.15, 0.1), (3, 0.028, 0.025)])
def test_least_squares_lower_the_error_of_normal_rows(bits: int, whole: float, fitted: float) -> None:
    x = draw(1, 2, 500, 64)
    energy = np.square(numbers(x)).sum()
    losses = [lost(coder_of(bits, 64, mx.float16, clip=clip), x).sum() / energy for clip in (None, "least_squares")]
    assert losses[0] == pytest.approx(whole, rel=0.05) and losses[1] <= fitted


@every_width
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
def test_least_squares_never_lose_more(bits: int, heavy: bool) -> None:
    x = draw(1, 2, 100, 64, seed=bits)
    x = x * mx.exp(1.5 * draw(1, 2, 100, 64, seed=50)) if heavy else x
    whole, fitted = (lost(coder_of(bits, 64, clip=clip), x) for clip in (None, "least_squares"))
    assert (fitted <= whole * (1 + 1e-3) + 1e-6).all()


# Any width, any group, any head size


@dtypes
@clips
@every_width
@pytest.mark.parametrize("dim, group", [(64, 32), (80, 32), (96, 64), (64, 20), (33, 7)])
def test_products_equal_those_of_the_decoded_rows(
    bits: int, dim: int, group: int, clip: str | None, dtype: mx.Dtype
) -> None:
    rows = coder_of(bits, dim, dtype, group, clip).encode(draw(2, 2, 21, dim, dtype=dtype))
    coder = coder_of(bits, dim, group=group, clip=clip)
    plain = numbers(coder.decode(rows))
    queries, weights = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, 21, seed=2)
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    assert scores.dtype == sums.dtype == mx.float32 and sums.shape == (2, 2, 3, dim)
    np.testing.assert_allclose(numbers(scores), numbers(queries) @ plain.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ plain, rtol=1e-4, atol=1e-3)


@clips
@every_width
@pytest.mark.parametrize("dim, group", [(64, 32), (128, 64), (80, 32), (64, 20)])
def test_bytes_of_a_row(bits: int, dim: int, group: int, clip: str | None) -> None:
    groups = math.ceil(dim / group)
    empty = coder_of(bits, dim, mx.float16, group, clip).empty(2, 3, 10)
    assert sum(x.nbytes for x in empty) == 2 * 3 * 10 * (4 * math.ceil(groups * group * bits / 32) + 4 * groups)


@clips
def test_error_falls_with_bits_and_with_smaller_groups(clip: str | None) -> None:
    x = draw(1, 2, 200, 64)
    by_bits = [lost(coder_of(bits, 64, clip=clip), x).sum() for bits in range(1, 9)]
    by_group = [lost(coder_of(3, 64, group=group, clip=clip), x).sum() for group in (64, 32, 16, 8)]
    assert all(a > b for a, b in itertools.pairwise(by_bits)) and all(a > b for a, b in itertools.pairwise(by_group))


# Odd numbers


@dtypes
@clips
@every_width
@pytest.mark.parametrize("value", [0.0, 3.3, -5.0, 1e-4])
def test_equal_numbers(bits: int, value: float, clip: str | None, dtype: mx.Dtype) -> None:
    x = mx.full((1, 1, 2, 64), value).astype(dtype)
    coder = coder_of(bits, 64, dtype, clip=clip)
    read = coder.decode(coder.encode(x))
    assert read.dtype == dtype
    np.testing.assert_allclose(numbers(read), numbers(x), rtol=2 * UNIT_ROUNDING[dtype], atol=0)


@clips
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_group_past_the_range_of_half_precision(bits: int, clip: str | None) -> None:
    x = mx.where(mx.arange(64) % 3 == 0, 60000.0, -60000.0).astype(mx.float16)[None, None, None]
    coder = coder_of(bits, 64, mx.float16, clip=clip)
    read = numbers(coder.decode(coder.encode(x)))
    assert np.isfinite(read).all()
    assert np.abs(read - numbers(x)).max() <= 120000 / (2**bits - 1) / 2 + 60000 * 2.0**-10


@clips
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_in_its_group(bad: float, clip: str | None) -> None:
    clean = draw(1, 1, 4, 64, dtype=mx.float16)
    x = mx.where((mx.arange(4)[:, None] == 1) & (mx.arange(64) == 5), bad, clean).astype(mx.float16)
    coder = coder_of(4, 64, mx.float16, clip=clip)
    read, whole = (numbers(coder.decode(coder.encode(y))) for y in (x, clean))
    assert np.isfinite(read).all()
    read[0, 0, 1, :32] = whole[0, 0, 1, :32]
    assert (read == whole).all()


@clips
@pytest.mark.parametrize("factor", [0.25, 16.0])
def test_a_power_of_two_leaves_the_codes_alone(factor: float, clip: str | None) -> None:
    x, coder = draw(1, 2, 20, 64), coder_of(2, 64, clip=clip)
    one, two = coder.encode(x), coder.encode(x * factor)
    assert mx.array_equal(one[0], two[0])
    np.testing.assert_allclose(numbers(two[1]), numbers(one[1]) * factor, rtol=1e-6)


@clips
@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e30])
def test_any_size_of_single_precision_rows(size: float, clip: str | None) -> None:
    x, coder = draw(1, 1, 50, 64), coder_of(2, 64, clip=clip)
    read = numbers(coder.decode(coder.encode(x * size)) / size)
    np.testing.assert_allclose(read, numbers(coder.decode(coder.encode(x))), rtol=1e-3, atol=1e-3)


# As one codec among others


@clips
def test_rows_are_independent(clip: str | None) -> None:
    x, coder = draw(2, 2, 12, 80, dtype=mx.float16), coder_of(2, 80, mx.float16, clip=clip)
    rows = coder.encode(x)
    for i in range(12):
        for whole, alone in zip(rows, coder.encode(x[:, :, i : i + 1])):
            assert mx.array_equal(whole[:, :, i : i + 1], alone)


@clips
def test_a_compiled_step_does_the_same(clip: str | None) -> None:
    transform = vq.rows(key=affine_codec(bits=2, clip=clip), value=affine_codec(bits=4, clip=clip))
    spec = vq.KVSpec(kv_heads=2, key_dim=64, value_dim=80, capacity=8)
    states = [transform.init_state(spec), transform.init_state(spec)]
    compiled = vq.compile(transform)
    for i in range(3):
        x, y = draw(1, 2, 1, 64, seed=i, dtype=mx.float16), draw(1, 2, 1, 80, seed=9 + i, dtype=mx.float16)
        states = [update(state, x, y)[0] for update, state in zip((transform.update, compiled.update), states)]
    assert all(mx.array_equal(a, b) for a, b in zip(*(flatten(state)[0] for state in states)))


def test_a_whole_range_is_the_codec_of_other_methods() -> None:
    assert (
        affine_codec(bits=3, group_size=64)
        == TokenGroupsCodec(3, 64)
        != affine_codec(bits=3, group_size=64, clip="least_squares")
    )


@clips
def test_a_codec_survives_json(clip: str | None) -> None:
    codec = affine_codec(bits=2, group_size=16, clip=clip)
    back = restore(json.loads(json.dumps(describe(codec))))
    assert back == codec and hash(back) == hash(codec) and type(back) is type(codec)


@pytest.mark.parametrize(
    "field, value", [("bits", 0), ("bits", 9), ("bits", 2.0), ("group_size", 0), ("clip", "lsq"), ("clip", True)]
)
def test_bad_options_are_refused(field: str, value: object) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"`{field}`"):
        affine_codec(**{field: value})  # type: ignore[arg-type]
