"""Affine groups against a loop over groups in numpy: scales, zeros, codes, errors and products."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.ops import affine
from vq_functional.ops.affine import FUSED_BITS, FUSED_GROUPS, Groups, dequantize, fused, matmul, quantize
from vq_functional.ops.device import on_gpu
from vq_functional.ops.packing import words

EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
dtypes = pytest.mark.parametrize("dtype", EPSILON, ids=lambda dtype: str(dtype).split(".")[-1])
every_width = pytest.mark.parametrize("bits", range(1, 9))
every_group = pytest.mark.parametrize("group", [1, 8, 16, 32, 64, 128])


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Float32 values of `x` rounded to the nearest number of `dtype`, ties to even."""
    if dtype == mx.float16:
        return x.astype(np.float16).astype(np.float32)
    if dtype == mx.float32:
        return x.astype(np.float32)
    raw = x.astype(np.float32).view(np.uint32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def codes_of(stream: list[int], bits: int, count: int) -> list[int]:
    """Codes of a bit stream, one bit at a time, least significant first."""
    codes = []
    for place in range(count):
        code = 0
        for bit in range(bits):
            at = place * bits + bit
            code |= (stream[at // 32] >> at % 32 & 1) << bit
        codes.append(code)
    return codes


def quantized_by_hand(x: np.ndarray, bits: int, group: int, dtype: mx.Dtype) -> tuple[np.ndarray, ...]:
    """Codes, scales and zeros of the rows of `x` [M, N], group by group."""
    top = np.float32(2**bits - 1)
    codes = np.zeros(x.shape, np.int64)
    scales, zeros = (np.zeros((x.shape[0], x.shape[1] // group), np.float32) for _ in range(2))
    for row, place in itertools.product(range(x.shape[0]), range(x.shape[1] // group)):
        span = slice(place * group, (place + 1) * group)
        members = x[row, span].astype(np.float32)
        zero = rounded(members.min(), dtype)
        scale = rounded((members.max() - members.min()) / top, dtype)
        if scale > 0:
            codes[row, span] = np.clip(np.round((members - zero) / scale), 0, top)
        scales[row, place], zeros[row, place] = scale, zero
    return codes, scales, zeros


@dtypes
@every_group
@every_width
def test_codes_scales_and_zeros_equal_the_loop(bits: int, group: int, dtype: mx.Dtype) -> None:
    x = draw(3, 256, seed=bits * group, dtype=dtype)
    got = quantize(x, bits, group, dtype)
    assert got.codes.shape == (3, words(256, bits)) and got.codes.dtype == mx.uint32
    assert got.scales.shape == got.zeros.shape == (3, 256 // group)
    assert got.scales.dtype == got.zeros.dtype == dtype
    codes, scales, zeros = quantized_by_hand(numbers(x), bits, group, dtype)
    assert np.array_equal(numbers(got.zeros), zeros)
    np.testing.assert_allclose(numbers(got.scales), scales, rtol=EPSILON[dtype] if dtype == mx.float32 else 0, atol=0)
    assert [codes_of(row, bits, 256) for row in got.codes.tolist()] == codes.tolist()


@dtypes
@every_width
def test_scale_and_zero_are_rounded_before_codes_are_chosen(bits: int, dtype: mx.Dtype) -> None:
    x = draw(4, 64, seed=5) * 3 + 100
    got = quantize(x, bits, 32, dtype)
    scales, zeros = (np.repeat(numbers(a), 32, axis=-1) for a in (got.scales, got.zeros))
    steps = np.where(scales > 0, (numbers(x) - zeros) / np.where(scales > 0, scales, 1), 0)
    want = np.clip(np.round(steps), 0, 2**bits - 1).astype(int)
    assert [codes_of(row, bits, 64) for row in got.codes.tolist()] == want.tolist()


@dtypes
@every_group
@every_width
def test_error_is_half_a_step(bits: int, group: int, dtype: mx.Dtype) -> None:
    x = draw(4, 256, seed=group, dtype=dtype)
    groups = quantize(x, bits, group, dtype)
    error = np.abs(numbers(dequantize(groups, bits, group)) - numbers(x)).reshape(4, -1, group)
    scales = numbers(groups.scales)[..., None]
    bound = scales / 2
    if dtype == mx.bfloat16 and bits == 8:
        # 255 steps of a scale with 8 significant bits can end up to a whole step short of the highest number.
        bound = np.maximum(bound, np.ptp(numbers(x).reshape(error.shape), axis=-1, keepdims=True) - 255 * scales)
    assert (error <= bound * (1 + 1e-3) + 1e-6).all()


@given(data=st.data(), bits=st.integers(1, 8), group=st.sampled_from([8, 32, 64]))
def test_error_bound_for_any_numbers(data: st.DataObject, bits: int, group: int) -> None:
    finite = st.floats(-65504, 65504, width=16)
    x = mx.array(data.draw(st.lists(finite, min_size=group, max_size=group)), dtype=mx.float16)[None]
    groups = quantize(x, bits, group, mx.float16)
    step, top = numbers(groups.scales).item(), 2**bits - 1
    # A scale below the smallest half float, or above the largest, leaves the end of the range out.
    left_out = np.ptp(numbers(x)) - top * step
    error = np.abs(numbers(dequantize(groups, bits, group)) - numbers(x))
    assert error.max() <= max(step / 2, left_out) * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize(
    "bits, group, want",
    [
        (1, 32, 1.96),
        (2, 32, 0.154),
        (3, 32, 0.0281),
        (4, 32, 0.0061),
        (2, 128, 0.251),
        (3, 128, 0.0458),
        (4, 128, 0.01),
    ],
)
def test_normalised_error_of_gaussian_numbers(bits: int, group: int, want: float) -> None:
    x = draw(1024, 128, seed=9)
    read = dequantize(quantize(x, bits, group, mx.float16), bits, group)
    assert (mx.square(read - x).sum() / mx.square(x).sum()).item() == pytest.approx(want, rel=0.05)


@dtypes
@pytest.mark.parametrize("value", [3.3, -5.0, 1e-30, 0.0, 65504.0])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_equal_numbers_come_back_exactly(bits: int, value: float, dtype: mx.Dtype) -> None:
    x = mx.full((2, 64), value).astype(dtype)
    groups = quantize(x, bits, 32, dtype)
    assert mx.array_equal(dequantize(groups, bits, 32).astype(dtype), x)
    assert mx.array_equal(groups.codes, mx.zeros_like(groups.codes))


@every_width
def test_two_values_come_back(bits: int) -> None:
    x = mx.where(mx.random.bernoulli(shape=(4, 64), key=mx.random.key(1)), -1.5, 2.25)
    read = dequantize(quantize(x, bits, 32, mx.float32), bits, 32)
    assert mx.allclose(read, x, rtol=1e-6, atol=1e-6)


# More than 6 bits of a bfloat16 scale don't span a group to within half a step, so that its ends can move.
@pytest.mark.parametrize(
    "bits, dtype",
    [(bits, dtype) for dtype in EPSILON for bits in range(1, 9) if bits <= 6 or dtype != mx.bfloat16],
)
def test_quantizing_again_gives_the_same_codes(bits: int, dtype: mx.Dtype) -> None:
    once = quantize(draw(8, 128, seed=2, dtype=dtype), bits, 32, dtype)
    again = quantize(dequantize(once, bits, 32), bits, 32, dtype)
    assert mx.array_equal(again.codes, once.codes)
    assert mx.array_equal(again.zeros, once.zeros)


@dtypes
@pytest.mark.parametrize("factor", [0.25, 2.0, 16.0])
def test_a_power_of_two_leaves_the_codes_alone(factor: float, dtype: mx.Dtype) -> None:
    x = draw(4, 64, seed=3, dtype=dtype)
    for bits in (1, 2, 3, 4, 8):
        plain, scaled = (quantize(a, bits, 32, dtype) for a in (x, x * factor))
        assert mx.array_equal(plain.codes, scaled.codes)
        assert mx.array_equal(plain.scales * factor, scaled.scales)


@every_width
@pytest.mark.parametrize("group", [32, 64])
def test_a_range_past_half_precision_stays_finite(bits: int, group: int) -> None:
    x = np.random.default_rng(0).uniform(-60000, 60000, (2, group)).astype(np.float16)
    x[:, 0], x[:, -1] = -60000, 60000
    groups = quantize(mx.array(x), bits, group, mx.float16)
    read = dequantize(groups, bits, group)
    assert mx.isfinite(read.astype(mx.float16)).all()
    half_step = min(np.float32(120000) / (2**bits - 1), np.finfo(np.float16).max) / 2  # at one bit about the middle
    assert np.abs(numbers(read) - x.astype(np.float32)).max() <= half_step * (1 + 1e-3)


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stays_alone(bad: float, dtype: mx.Dtype) -> None:
    x = draw(2, 64, seed=4, dtype=dtype)
    poisoned = mx.where(mx.arange(64) == 5, mx.array(bad, dtype), x)
    groups = quantize(poisoned, 4, 32, dtype)
    read = dequantize(groups, 4, 32)
    assert mx.isfinite(read).all()
    others = np.arange(64) != 5
    error = np.abs(numbers(read) - numbers(x))[:, others]
    assert (error <= np.repeat(numbers(groups.scales), 32, axis=-1)[:, others] / 2 * (1 + 1e-3)).all()
    finite = numbers(x)[:, :32][:, others[:32]]
    want = finite.max(axis=-1) if bad == float("inf") else finite.min(axis=-1)
    assert np.allclose(numbers(read)[:, 5], want, atol=numbers(groups.scales).max())


def test_nothing_finite_in_a_group() -> None:
    x = mx.full((1, 32), mx.nan)
    assert mx.array_equal(dequantize(quantize(x, 2, 32, mx.float16), 2, 32), mx.zeros((1, 32)))


@pytest.mark.parametrize("gpu", [False, True], ids=["as here", "as on a GPU"])
@dtypes
@every_group
@every_width
def test_products_equal_those_of_the_numbers(
    bits: int, group: int, dtype: mx.Dtype, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affine, "on_gpu", lambda: gpu or on_gpu())
    groups = quantize(draw(2, 2, 64, 128, seed=6, dtype=dtype), bits, group, dtype)
    plain = dequantize(groups, bits, group)
    for rows, heads, (transpose, size) in itertools.product((1, 3, 5), (2, 1), ((True, 128), (False, 64))):
        x = draw(2, heads, rows, size, seed=7)
        got = matmul(x, groups, bits, group, transpose)
        want = numbers(x).astype(np.float64) @ (numbers(plain).swapaxes(-1, -2) if transpose else numbers(plain))
        assert got.dtype == mx.float32
        np.testing.assert_allclose(numbers(got), want, rtol=1e-5, atol=1e-4)


def test_kernels_are_used_where_mlx_has_them_and_agree_with_unpacking() -> None:
    assert all(fused(bits, group) for bits, group in itertools.product(FUSED_BITS, FUSED_GROUPS))
    assert not any(fused(bits, group) for bits, group in itertools.product(range(1, 9), (1, 8, 16, 48, 256)))
    assert not any(fused(7, group) for group in FUSED_GROUPS)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_prefix_of_a_larger_buffer_reads_alike(bits: int) -> None:
    rows = quantize(draw(1, 2, 256, 64, seed=8), bits, 32, mx.float16)
    first = Groups(*(x[:, :, :16] for x in rows))
    plain = dequantize(rows, bits, 32)[:, :, :16]
    assert mx.array_equal(dequantize(first, bits, 32), plain)
    queries, weights = draw(1, 2, 4, 64, seed=9), draw(1, 2, 4, 16, seed=10)
    assert mx.allclose(matmul(queries, first, bits, 32, True), queries @ plain.swapaxes(-1, -2), atol=1e-4)
    assert mx.allclose(matmul(weights, first, bits, 32, False), weights @ plain, atol=1e-4)

    columns = quantize(draw(1, 2, 64, 256, seed=11), bits, 32, mx.float16)
    first = Groups(columns.codes[..., : words(64, bits)], columns.scales[..., :2], columns.zeros[..., :2])
    plain = dequantize(columns, bits, 32)[..., :64]
    assert mx.array_equal(dequantize(first, bits, 32), plain)
    assert mx.allclose(matmul(queries, first, bits, 32, False), queries @ plain, atol=1e-4)
