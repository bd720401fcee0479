"""CacheGen against groups in numpy: codes, widths of layers, bytes, estimates, and the export bit for bit."""

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten
from vq_functional.ops.rans import decode, encode, frequencies
from vq_functional.quantize.cachegen import layer_band
from vq_functional.quantize.cachegen_estimates import entropy_coded_bits, entropy_savings, estimated_bytes
from vq_functional.quantize.code_stream import decode_codes, encode_codes

HEADS = 2
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
RUN = 10


def draw(n: int, dim: int, seed: int = 0, dtype: mx.Dtype = mx.float16, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, HEADS, n, dim), key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def feed(
    transform: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = (), capacity: int = 0, **more: Any
) -> Any:
    """State after the rows came in pieces of `cuts`; the rest, if any, comes in one."""
    batch, heads, n, dim = keys.shape
    dims = {"key_dim": dim, "value_dim": values.shape[3]}
    spec = vq.KVSpec(batch=batch, kv_heads=heads, dtype=keys.dtype, capacity=capacity or n, **dims)
    return feed_more(transform, transform.init_state(spec, **more), keys, values, cuts)


def feed_more(transform: Any, state: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = ()) -> Any:
    start, rest = 0, keys.shape[2] - sum(cuts)
    for count in [*cuts, rest] if rest else cuts:
        new = (x[:, :, start : start + count] for x in (keys, values))
        state, *_ = transform.update(state, *new)
        start += count
    return state


def read(transform: Any, state: Any) -> tuple[np.ndarray, ...]:
    """Keys and values [B, H, N, D] of all tokens held."""
    n = state.offset[0].item()
    both = transform.read(state, Fill(n, n, state.coded[0].item()))
    return tuple(numbers(x)[:, :, :n] for x in both)


def assert_same(one: Any, two: Any) -> None:
    """States alike bit for bit, NaN included."""
    (left, shape), (right, other) = flatten(one), flatten(two)
    assert shape == other and one.layout == two.layout
    for got, want in zip(left, right, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if got.size:
            assert mx.array_equal(got.reshape(-1).view(mx.uint8), want.reshape(-1).view(mx.uint8))


# The oracle


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Float32 numbers rounded to the nearest ones of `dtype`, ties to even."""
    x = np.asarray(x, np.float32)
    if dtype == mx.float16:
        return x.astype(np.float16).astype(np.float32)
    if dtype == mx.float32:
        return x
    raw = x.view(np.uint32).astype(np.uint64)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def quantized(x: np.ndarray, bits: int, group: int, dtype: mx.Dtype) -> tuple[np.ndarray, ...]:
    """Codes [H, N, D], scales and zeros [H, N / g, D] of whole groups along tokens."""
    parts = x.reshape(len(x), -1, group, x.shape[-1])
    zero = rounded(parts.min(axis=2), dtype)
    scale = rounded((parts.max(axis=2) - parts.min(axis=2)) / np.float32(2**bits - 1), dtype)
    safe = np.where(scale > 0, scale, 1)[:, :, None]
    steps = np.where(scale[:, :, None] > 0, (parts - zero[:, :, None]) / safe, 0)
    return np.clip(np.round(steps), 0, 2**bits - 1).reshape(x.shape).astype(int), scale, zero


def unpacked(words: mx.array, width: int) -> np.ndarray:
    """Codes [..., T, D] of words [..., D, W], least significant bit first."""
    bit = np.unpackbits(np.array(words).astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    codes = (bit.reshape(*bit.shape[:-1], -1, width).astype(int) << np.arange(width)).sum(axis=-1)
    return codes.swapaxes(-1, -2)


def width_of(bits: int) -> int:
    return 8 if bits == 7 else bits


def block_of(bits: int, group: int) -> int:
    return math.lcm(group, 32 // math.gcd(32, width_of(bits)))


@dtypes
@pytest.mark.parametrize("bits, group, residual", [*((bits, 32, 0) for bits in range(2, 9)), (4, 64, 9), (3, 16, 40)])
def test_groups_equal_the_oracle_and_errors_are_half_a_step(
    bits: int, group: int, residual: int, dtype: mx.Dtype
) -> None:
    transform = vq.cachegen(bits=bits, group_size=group, residual_length=residual)
    n = 150
    keys, values = draw(n, 8, dtype=dtype), draw(n, 24, seed=1, dtype=dtype)
    state = feed(transform, keys, values)
    coded = max(0, n - residual) // block_of(bits, group) * block_of(bits, group)
    assert state.coded.item() == coded > 0
    for x, held, got in zip((keys, values), (state.keys, state.values), read(transform, state), strict=True):
        exact = numbers(x)[0]
        codes, scale, zero = quantized(exact[:, :coded], bits, group, dtype)
        np.testing.assert_array_equal(unpacked(held.rows.codes[0], width_of(bits))[:, :coded], codes)
        for mine, want in ((held.rows.scales, scale), (held.rows.zeros, zero)):
            np.testing.assert_array_equal(numbers(mine)[0].swapaxes(1, 2)[:, : coded // group], want)
        step = np.repeat(scale, group, axis=1)
        rounding = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-22}[dtype]
        assert (np.abs(got[0] - exact)[:, :coded] <= step / 2 + rounding * (1 + 2 * np.abs(exact[:, :coded]))).all()
        np.testing.assert_array_equal(got[0, :, coded:], exact[:, coded:])


# Export


def geometric(heads: int, count: int, dim: int, bits: int, seed: int = 0) -> np.ndarray:
    """Codes [S, N, D] of which small ones are common."""
    drawn = np.random.default_rng(seed).geometric(0.5, (heads, count, dim)) - 1
    return np.minimum(drawn, 2**bits - 1).astype(np.uint8)


def entropy(codes: np.ndarray) -> float:
    """Shannon's entropy of the numbers, in bits of all together."""
    share = np.unique(codes, return_counts=True)[1] / max(codes.size, 1)
    return float(-(share * np.log2(share)).sum() * codes.size)


STATES = [
    (vq.cachegen(), {}),
    (vq.cachegen(bits=7, bits_v=3, n_sink=4, residual_length=5), {}),
    (vq.cachegen(bits=2, use_delta=False, per_channel=False), {"capacity": 200}),
    (vq.kivi(bits=3, group_size=32, residual_length=16), {"capacity": 150}),
    (vq.gear(n_sink=2), {}),
]


@dtypes
@pytest.mark.parametrize("transform, more", STATES, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("n", [3, 130])
def test_a_state_comes_back_bit_for_bit_and_goes_on(transform: Any, more: Any, n: int, dtype: mx.Dtype) -> None:
    keys, values = draw(n, 8, dtype=dtype, batch=2), draw(n, 40, seed=1, dtype=dtype, batch=2)
    state = feed(transform, keys, values, left_padding=mx.array([0, 2]), **more)
    data = vq.encode_state(transform, state)
    assert isinstance(data, bytes)
    again = vq.decode_state(transform, data)
    assert_same(again, state)
    assert vq.encode_state(transform, again) == data
    new = transform.grow(state, n + 40), transform.grow(again, n + 40)
    rest = draw(40, 8, 2, dtype, 2), draw(40, 40, 3, dtype, 2)
    assert_same(*(feed_more(transform, x, *rest) for x in new))


def test_damaged_bytes_are_refused() -> None:
    transform = vq.cachegen()
    data = vq.encode_state(transform, feed(transform, draw(40, 4), draw(40, 4, seed=1)))
    rng = np.random.default_rng(0)
    places = {*range(40), *range(len(data) - 8, len(data)), *rng.integers(0, len(data), 60).tolist()}
    broken = [data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :] for at in sorted(places)]
    broken += [data[:at] for at in (0, 1, 7, 8, 12, 16, 17, len(data) // 2, len(data) - 1)]
    broken += [data + b"\0", b"\0" + data, data + data, b"\x80\x04N.", bytes(100)]
    for wrong in broken:
        with pytest.raises(vq.QuantizerConfigError, match="decode_state: `data`"):
            vq.decode_state(transform, wrong)


def test_states_of_another_transform_or_kind_are_refused() -> None:
    state = feed(vq.cachegen(), draw(40, 4), draw(40, 4, seed=1))
    data = vq.encode_state(vq.cachegen(), state)
    for other in (vq.cachegen(bits=3), vq.cachegen(use_delta=False), vq.cachegen(n_sink=1), vq.kivi()):
        with pytest.raises(vq.QuantizerConfigError, match="decode_state: `transform`"):
            vq.decode_state(other, data)
    with pytest.raises(vq.QuantizerConfigError, match="encode_state: `transform`"):
        vq.encode_state(vq.int8(), state)
    for other in (vq.cachegen(bits=3), vq.cachegen(n_sink=1)):
        with pytest.raises(vq.QuantizerConfigError, match="encode_state: `state`"):
            vq.encode_state(other, state)
    with pytest.raises(vq.QuantizerConfigError, match="encode_state: `state`"):
        vq.encode_state(vq.cachegen(), (state,))


@given(
    bits=st.integers(2, 8),
    shape=st.tuples(st.integers(1, 3), st.integers(0, 45), st.integers(1, 6)),
    kind=st.sampled_from(["even", "geometric", "walk", "constant"]),
    ways=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_codes_come_back(bits: int, shape: tuple[int, int, int], kind: str, ways: tuple[bool, bool], seed: int) -> None:
    rng, top = np.random.default_rng(seed), 2**bits - 1
    codes = {
        "even": rng.integers(0, top + 1, shape),
        "geometric": geometric(*shape, bits, seed),
        "walk": np.clip(np.cumsum(rng.integers(-1, 2, shape), axis=1) + top // 2, 0, top),
        "constant": np.full(shape, top),
    }[kind].astype(np.uint8)
    data = encode_codes(codes, bits, *ways)
    again = decode_codes(data)
    assert again.dtype == np.uint8 and again.shape == shape
    np.testing.assert_array_equal(again, codes)
    for wrong in (data[:-1], data + b"\0", data[:20] + bytes([data[20] ^ 1]) + data[21:]):
        with pytest.raises(vq.QuantizerConfigError, match="decode_codes: `data`"):
            decode_codes(wrong)


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_that_gain_nothing_take_the_fixed_width_and_a_header(bits: int) -> None:
    head = len(encode_codes(np.zeros((1, 0, 1), np.uint8), bits))
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 60, 7)).astype(np.uint8)
    assert len(encode_codes(codes, bits)) == head + math.ceil(codes.size * bits / 8)
    common = geometric(2, 400, 7, bits)
    assert len(encode_codes(common, bits)) < head + common.size * bits / 8
    assert head <= 64


@pytest.mark.parametrize("lanes", [1, 8, 50])
@pytest.mark.parametrize("size", [3, 16, 255])
def test_payload_is_the_cross_entropy(size: int, lanes: int) -> None:
    rng = np.random.default_rng(size)
    shares = rng.dirichlet(np.full(size, 0.3), 4)
    frequency = frequencies(np.round(shares * 1e5).astype(np.int64) + 1)
    assert (frequency.sum(axis=1) == 2**12).all() and (frequency > 0).all()
    table = rng.integers(0, 4, 20000)
    symbols = np.array([rng.choice(size, p=shares[k]) for k in table])
    states, words = encode(symbols, table, frequency, lanes)
    payload = 4 * len(states) + 2 * len(words)
    cross = float(-np.log2(frequency[table, symbols] / 2**12).sum()) / 8
    assert payload <= cross * 1.001 + 8 * lanes
    assert payload >= sum(entropy(symbols[table == k]) for k in range(4)) / 8
    again = decode(states, words, table, frequency, np.zeros(len(table), bool), lanes)
    np.testing.assert_array_equal(again, symbols)
