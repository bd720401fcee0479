"""Eight-bit rows against a loop in numpy: codes, scales, errors, products and bytes."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.codec import Coder, Rows, bind

DIMS = [1, 3, 16, 30, 64, 80, 96, 128]
UNIT_ROUNDING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
dtypes = pytest.mark.parametrize("dtype", UNIT_ROUNDING, ids=lambda dtype: str(dtype).split(".")[-1])


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def coded(x: mx.array) -> tuple[Coder, Rows]:
    coder = bind(vq.int8_codec(), x.shape[-1], x.dtype)
    return coder, coder.encode(x)


def rounded(x: float, dtype: mx.Dtype) -> np.float32:
    """A float32 number rounded to the nearest one of `dtype`, ties to even."""
    if dtype == mx.float16:
        return np.float32(np.float16(x))
    if dtype == mx.float32:
        return np.float32(x)
    raw = int(np.float32(x).view(np.uint32))
    return np.uint32((raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def bytes_of(words: list[int], count: int) -> list[int]:
    """The first `count` bytes of uint32 words, least significant first."""
    return [words[i // 4] >> 8 * (i % 4) & 255 for i in range(count)]


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_codes_and_scales_equal_the_loop(dim: int, dtype: mx.Dtype) -> None:
    x = draw(2, 2, 7, dim, seed=dim, dtype=dtype)
    _, (codes, scales) = coded(x)
    assert codes.dtype == mx.uint32 and codes.shape == (2, 2, 7, math.ceil(dim / 4))
    assert scales.dtype == dtype and scales.shape == (2, 2, 7)
    for index in itertools.product(range(2), range(2), range(7)):
        row, scale = numbers(x)[index], numbers(scales)[index]
        want = rounded(np.abs(row).max() / np.float32(127), dtype)
        assert scale == pytest.approx(want, rel=2.0**-23 if dtype == mx.float32 else 0)
        steps = [min(max(int(np.round(number / scale)), -127), 127) + 128 for number in row]
        assert bytes_of(codes[index].tolist(), dim) == steps


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_error_is_half_a_step(size: float, dim: int, dtype: mx.Dtype) -> None:
    x = draw(2, 2, 9, dim, dtype=dtype) * size
    coder, rows = coded(x)
    read = coder.decode(rows)
    assert read.dtype == dtype and read.shape == x.shape
    # Once more for the highest number, of which a rounded scale may end short.
    bound = numbers(rows[1])[..., None] / 2 * (1 + 1e-3) + np.abs(numbers(x)) * 2 * UNIT_ROUNDING[dtype]
    assert (np.abs(numbers(read) - numbers(x)) <= bound + 1e-7).all()


@given(row=st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=40))
def test_any_row_comes_back_within_half_a_step(row: list[float]) -> None:
    x = mx.array(row, mx.float16)[None, None, None]
    coder, rows = coded(x)
    scale, largest = numbers(rows[1]).item(), np.abs(numbers(x)).max()
    error = np.abs(numbers(coder.decode(rows)) - numbers(x)).max()
    # A scale below the smallest half float leaves the end of the range out.
    assert error <= max(scale / 2, largest - 127 * scale) * (1 + 1e-3) + largest * 2.0**-11 + 2.0**-24


@dtypes
def test_the_largest_number_keeps_its_sign_and_the_code_its_range(dtype: mx.Dtype) -> None:
    x = draw(1, 2, 50, 64, dtype=dtype)
    _, (codes, _) = coded(x)
    steps = np.array(mx.view(codes, mx.uint8)).astype(int)
    assert steps.min() == 1 and steps.max() == 255
    largest = np.abs(numbers(x)).argmax(axis=-1)
    sign = np.take_along_axis(numbers(x), largest[..., None], axis=-1) > 0
    assert (np.take_along_axis(steps, largest[..., None], axis=-1) == np.where(sign, 255, 1)).all()


@dtypes
@pytest.mark.parametrize("value", [0.0, 3.25, -5.0, 1e-30])
def test_equal_numbers(value: float, dtype: mx.Dtype) -> None:
    x = mx.full((1, 1, 2, 64), value).astype(dtype)
    coder, rows = coded(x)
    read = numbers(coder.decode(rows))
    assert np.isfinite(read).all()
    np.testing.assert_allclose(read, numbers(x), rtol=2 * UNIT_ROUNDING[dtype], atol=0)


@dtypes
@pytest.mark.parametrize("factor", [0.25, 2.0, 16.0])
def test_a_power_of_two_leaves_the_codes_alone(factor: float, dtype: mx.Dtype) -> None:
    x = draw(1, 2, 9, 64, dtype=dtype)
    (_, one), (_, two) = coded(x), coded(x * factor)
    assert mx.array_equal(one[0], two[0]) and mx.array_equal(one[1] * factor, two[1])


def test_a_sign_mirrors_the_codes() -> None:
    x = draw(1, 2, 9, 64)
    (_, one), (_, two) = coded(x), coded(-x)
    total = mx.view(one[0], mx.uint8).astype(mx.int32) + mx.view(two[0], mx.uint8).astype(mx.int32)
    assert mx.array_equal(total, mx.full(total.shape, 256)) and mx.array_equal(one[1], two[1])


def test_the_largest_half_float_stays_finite() -> None:
    x = mx.full((1, 1, 1, 64), 65504.0, mx.float16)
    coder, rows = coded(x)
    read = coder.decode(rows)
    assert mx.isfinite(read).all()
    np.testing.assert_allclose(numbers(read), 65504, rtol=1e-3)


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_alone(bad: float, dtype: mx.Dtype) -> None:
    clean = draw(1, 1, 4, 64, dtype=dtype)
    x = mx.where((mx.arange(4)[:, None] == 1) & (mx.arange(64) == 5), mx.array(bad, dtype), clean)
    coder, rows = coded(x)
    read = numbers(coder.decode(rows))
    assert np.isfinite(read).all()
    others = np.arange(64) != 5
    error = np.abs(read - numbers(clean))[..., others]
    bound = (
        numbers(rows[1])[..., None] / 2 * (1 + 1e-3) + np.abs(numbers(clean))[..., others] * 2 * UNIT_ROUNDING[dtype]
    )
    assert (error <= bound).all()
    largest = np.abs(numbers(clean)[0, 0, 1, others]).max()
    want = {"nan": 0.0, "inf": largest, "-inf": -largest}[str(bad)]
    assert read[0, 0, 1, 5] == pytest.approx(want, rel=1e-2)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_products_equal_those_of_the_decoded_rows(dim: int, dtype: mx.Dtype) -> None:
    coder, rows = coded(draw(2, 2, 33, dim, dtype=dtype))
    plain = bind(vq.int8_codec(), dim, mx.float32).decode(rows)
    queries, weights = draw(2, 2, 3, dim, seed=1, dtype=mx.float32), draw(2, 2, 3, 33, seed=2, dtype=mx.float32)
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    assert scores.dtype == sums.dtype == mx.float32
    want = numbers(queries).astype(np.float64) @ numbers(plain).swapaxes(-1, -2)
    np.testing.assert_allclose(numbers(scores), want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ numbers(plain), rtol=1e-5, atol=1e-4)


@dtypes
def test_rows_are_independent(dtype: mx.Dtype) -> None:
    x = draw(2, 2, 12, 80, dtype=dtype)
    coder, rows = coded(x)
    for i in range(12):
        for whole, alone in zip(rows, coder.encode(x[:, :, i : i + 1])):
            assert mx.array_equal(whole[:, :, i : i + 1], alone)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_bytes_of_a_row(dim: int, dtype: mx.Dtype) -> None:
    coder = bind(vq.int8_codec(), dim, dtype)
    empty = coder.empty(2, 3, 10)
    assert sum(x.nbytes for x in empty) == 2 * 3 * 10 * (4 * math.ceil(dim / 4) + dtype.size)
    assert mx.array_equal(coder.decode(empty), mx.zeros((2, 3, 10, dim), dtype))


def test_one_coder_a_head_size_and_dtype() -> None:
    assert bind(vq.int8_codec(), 64, mx.float16) is bind(vq.int8_codec(), 64, mx.float16)
    assert vq.int8_codec() == vq.int8_codec() and hash(vq.int8_codec()) == hash(vq.int8_codec())


def test_as_keys_and_values_of_a_store() -> None:
    store = vq.rows(key=vq.int8_codec(), value=vq.int8_codec())
    keys, values = draw(1, 2, 30, 64), draw(1, 2, 30, 80, seed=1)
    state = store.init_state(vq.KVSpec(kv_heads=2, key_dim=64, value_dim=80, capacity=40))
    state, *_ = store.update(state, keys, values)
    for read, x in zip(store.read(state), (keys, values)):
        assert mx.array_equal(read[:, :, :30], coded(x)[0].decode(coded(x)[1]))
    assert vq.nbytes(state) == 2 * 40 * (64 + 2 + 80 + 2) + 4
