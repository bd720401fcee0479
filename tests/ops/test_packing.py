"""Bit streams: every code of every width comes back, and the layout is that of ``mx.quantize``."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.ops.packing import alignment, pack, pack_slices, unpack, unpack_slices, words

every_width = pytest.mark.parametrize("bits", range(1, 9))


def stream_of(codes: list[int], bits: int) -> list[int]:
    """Words of a bit stream, one bit at a time, least significant first."""
    stream = [0] * -(-len(codes) * bits // 32)
    for place, code in enumerate(codes):
        for bit in range(bits):
            at = place * bits + bit
            stream[at // 32] |= (code >> bit & 1) << at % 32
    return stream


def codes_of(stream: list[int], bits: int, count: int) -> list[int]:
    """Codes of a bit stream, one bit at a time."""
    codes = []
    for place in range(count):
        code = 0
        for bit in range(bits):
            at = place * bits + bit
            code |= (stream[at // 32] >> at % 32 & 1) << bit
        codes.append(code)
    return codes


def random_codes(bits: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape)


@every_width
def test_every_code_at_every_place_of_a_word(bits: int) -> None:
    count = alignment(bits)
    codes = np.stack([np.roll(np.arange(max(count, 2**bits)) % 2**bits, place)[:count] for place in range(2**bits)])
    packed = pack(mx.array(codes), bits)
    assert packed.dtype == mx.uint32
    assert packed.tolist() == [stream_of(row, bits) for row in codes.tolist()]
    assert np.array_equal(np.array(unpack(packed, bits, count)), codes)


@every_width
def test_every_length_that_does_not_fill_the_last_word(bits: int) -> None:
    for count in range(1, 2 * alignment(bits) + 2):
        codes = random_codes(bits, 2, count, seed=count)
        packed = pack(mx.array(codes), bits)
        assert packed.shape == (2, words(count, bits)) == (2, -(-count * bits // 32))
        assert packed.tolist() == [stream_of(row, bits) for row in codes.tolist()]
        assert np.array_equal(np.array(unpack(packed, bits, count)), codes)


@given(data=st.data(), bits=st.integers(1, 8), batch=st.integers(1, 3), heads=st.integers(1, 3))
def test_any_leading_axes(data: st.DataObject, bits: int, batch: int, heads: int) -> None:
    count = data.draw(st.integers(1, 130))
    codes = random_codes(bits, batch, heads, count, seed=data.draw(st.integers(0, 99)))
    packed = pack(mx.array(codes), bits)
    assert packed.shape == (batch, heads, words(count, bits))
    got = unpack(packed, bits, count)
    assert got.dtype == mx.uint32 and np.array_equal(np.array(got), codes)
    assert got[-1, -1].tolist() == codes_of(packed[-1, -1].tolist(), bits, count)


@every_width
def test_all_ones_fill_the_words(bits: int) -> None:
    packed = pack(mx.full((3, alignment(bits)), 2**bits - 1, mx.uint32), bits)
    assert set(np.array(packed).ravel().tolist()) == {2**32 - 1}


@every_width
@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32, mx.uint32, mx.int64])
def test_codes_of_any_integer_dtype(bits: int, dtype: mx.Dtype) -> None:
    codes = random_codes(bits, 2, 70)
    assert pack(mx.array(codes).astype(dtype), bits).tolist() == [stream_of(row, bits) for row in codes.tolist()]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_layout_is_that_of_mlx(bits: int, group: int) -> None:
    numbers = mx.random.normal((4, 256), key=mx.random.key(bits))
    packed, scales, zeros = mx.quantize(numbers, group_size=group, bits=bits)
    codes = unpack(packed, bits, 256)
    read = mx.dequantize(packed, scales, zeros, group_size=group, bits=bits)
    steps = (read - mx.repeat(zeros, group, axis=-1)) / mx.repeat(scales, group, axis=-1)
    assert mx.array_equal(mx.round(steps).astype(mx.uint32), codes)
    assert mx.array_equal(pack(codes, bits), packed)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_unpacks_what_was_packed(bits: int) -> None:
    codes = random_codes(bits, 3, 128)
    ones = mx.ones((3, 4))
    got = mx.dequantize(pack(mx.array(codes), bits), ones, mx.zeros((3, 4)), group_size=32, bits=bits)
    assert np.array_equal(np.array(got), codes)


@every_width
def test_alignment_is_the_least_count_that_fills_words(bits: int) -> None:
    assert alignment(bits) == next(count for count in range(1, 33) if count * bits % 32 == 0)


@every_width
def test_a_strided_view_of_packed_rows_reads_alike(bits: int) -> None:
    codes = random_codes(bits, 2, 16, 64)
    buffer = mx.zeros((2, 256, words(64, bits)), mx.uint32)
    buffer[:, 5:21] = pack(mx.array(codes), bits)
    view = buffer[:, 5:21]
    wide = mx.concatenate([view, mx.full(view.shape, 2**32 - 1, mx.uint32)], axis=-1)
    turned = pack(mx.array(codes).swapaxes(-1, -2), bits)
    assert np.array_equal(np.array(unpack(view, bits, 64)), codes)
    assert np.array_equal(np.array(unpack(wide[..., : words(64, bits)], bits, 64)), codes)
    assert np.array_equal(np.array(unpack(turned, bits, 16)), codes.swapaxes(-1, -2))


@every_width
@pytest.mark.parametrize("count", [32, 64, 96, 128, 1, 20, 40, 80, 100])
def test_slices_take_the_same_words_and_come_back(bits: int, count: int) -> None:
    codes = np.concatenate([random_codes(bits, 3, count), np.arange(count)[None] % 2**bits])
    packed = pack_slices(mx.array(codes), bits)
    assert packed.dtype == mx.uint32 and packed.shape == (4, words(count, bits))
    assert np.array_equal(np.array(unpack_slices(packed, bits, count)), codes)
    if count % 32 == 0 and 32 % bits:
        want, shift = [[] for _ in codes], 0
        for width in (4, 2, 1):
            if bits & width:
                want = [
                    row + stream_of((part >> shift & 2**width - 1).tolist(), width) for row, part in zip(want, codes)
                ]
                shift += width
        assert packed.tolist() == want
    else:
        assert mx.array_equal(packed, pack(mx.array(codes), bits))
