"""CacheGen against groups in numpy: codes, widths of layers, bytes, estimates, and the export bit for bit."""

import itertools
import json
import math
import struct
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


def test_room_with_codes_of_rows_that_were_cut_off_comes_back_too() -> None:
    for transform in (vq.cachegen(), vq.gear(residual_length=0)):
        state = transform.trim(feed(transform, draw(130, 8), draw(130, 8, seed=1)), 80)
        assert state.coded.item() == 32 and np.array(state.keys.rows[0][..., 32 * 4 // 32 :]).any()
        assert_same(vq.decode_state(transform, vq.encode_state(transform, state)), state)


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
        vq.encode_state(vq.turboquant_mse(), state)
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


LIES = [{"capacity": -1}, {"capacity": 10**12}, {"capacity": "64"}, {"batch": 0}, {"batch": 2**40}, {"batch": None}]
LIES += [{"used": 32}, {"used": 10**6}, {"used": 1.5}, {"sections": []}, {"sections": [-1] * 10}, {"sections": "abc"}]
LIES += [{"layout": {"kv_heads": 2, "key_dim": dim, "value_dim": 4, "dtype": "float16"}} for dim in (10**9, 2**40)]


@pytest.mark.parametrize("change", [*LIES, {"layout": {}}, {"layout": None}, {"transform": None}], ids=str)
def test_headers_that_lie_are_refused(change: dict[str, Any]) -> None:
    transform = vq.cachegen()
    data = vq.encode_state(transform, feed(transform, draw(70, 4), draw(70, 4, seed=1)))
    (size,) = struct.unpack_from("<I", data, 12)
    header = json.loads(zlib.decompress(data[16 : 16 + size]))
    assert header.keys() >= change.keys()
    text = zlib.compress(json.dumps(header | change).encode(), 9)
    body = data[:12] + struct.pack("<I", len(text)) + text + data[16 + size : -4]
    with pytest.raises(vq.QuantizerConfigError):
        vq.decode_state(transform, body + struct.pack("<I", zlib.crc32(body)))


# Estimates


def least(codes: np.ndarray, bits: int, use_delta: bool, per_channel: bool) -> float:
    """Bits of `codes` [H, N, D], each channel in the cheapest of the documented ways, without tables."""

    def lengths(symbols: np.ndarray, among: np.ndarray) -> float:
        found, counts = np.unique(among, return_counts=True)
        share = counts[np.searchsorted(found, symbols)] / among.size
        return float(-np.log2(share).sum())

    total, inside = 0.0, np.arange(codes.shape[1]) % RUN > 0
    for head in codes.astype(int):
        change = (head - head[np.arange(len(head)) // RUN * RUN])[inside]
        before = np.concatenate([np.zeros_like(head[:1]), head[:-1]]) >> max(bits - 4, 0)
        for c in range(head.shape[1]):
            ways = [float(bits * len(head)), lengths(head[:, c], head)]
            ways += [lengths(head[:, c], head[:, c])] if per_channel else []
            if use_delta:
                anchors = bits * (~inside).sum()
                ways += [anchors + lengths(change[:, c], change)]
                ways += [anchors + lengths(change[:, c], change[:, c])] if per_channel else []
                mine = [(head[before[:, c] == b, c], head[before == b]) for b in np.unique(before[:, c])]
                ways += [sum(lengths(*pair) for pair in mine)]
            total += min(ways)
    return total


@pytest.mark.parametrize("bits", [2, 4, 5, 7])
def test_estimates_are_the_entropy_of_the_cheapest_ways(bits: int) -> None:
    keys = mx.cumsum(draw(100, 6), axis=2) * mx.array([1, 0, 1, 1, 1, 1])
    values, found = draw(100, 24, seed=1) ** 3, {}
    for use_delta, per_channel in itertools.product((True, False), repeat=2):
        transform = vq.cachegen(bits=bits, use_delta=use_delta, per_channel=per_channel)
        state = feed(transform, keys.astype(mx.float16), values.astype(mx.float16))
        for side, dim in (("keys", 6), ("values", 24)):
            codes = unpacked(getattr(state, side).rows.codes[0], width_of(bits))[:, :96]
            got, count = entropy_coded_bits(transform, state, side)
            assert count == HEADS * 96 * dim
            assert got == pytest.approx(least(codes, bits, use_delta, per_channel), rel=1e-6)
            assert estimated_bytes(transform, state, side) == math.ceil(got / 8) + 4 * count // 32
            found[side, use_delta, per_channel] = got
        saved = 1 - found["keys", use_delta, per_channel] / (HEADS * 96 * 6 * width_of(bits))
        assert entropy_savings(transform, state) == pytest.approx(saved)
    for side, flag in itertools.product(("keys", "values"), (True, False)):
        assert found[side, flag, True] <= found[side, flag, False]
        assert found[side, True, flag] <= found[side, False, flag]
    assert found["keys", True, True] < 0.9 * found["keys", False, True]
    with pytest.raises(vq.QuantizerConfigError, match="cachegen: `side`"):
        entropy_coded_bits(transform, state, "both")


def test_constant_channels_have_no_error_and_need_no_bits() -> None:
    transform, x = vq.cachegen(), mx.broadcast_to(mx.arange(6) - 2.5, (1, HEADS, 64, 6)).astype(mx.float16)
    state = feed(transform, x, x)
    for side, got in zip(("keys", "values"), read(transform, state), strict=True):
        np.testing.assert_array_equal(got, numbers(x))
        assert entropy_coded_bits(transform, state, side) == (0.0, HEADS * 64 * 6)
    assert entropy_savings(transform, state) == 1.0
    empty = feed(transform, x[:, :, :9], x[:, :, :9])
    assert entropy_coded_bits(transform, empty, "keys") == (0.0, 0) and entropy_savings(transform, empty) == 0.0


@pytest.mark.parametrize("bits", [2, 4])
def test_export_is_close_to_the_entropy_and_tables_are_in_it(bits: int) -> None:
    codes = geometric(1, 4000, 4, bits)
    ideal = sum(entropy(codes[..., c]) for c in range(4)) / 8
    size = len(encode_codes(codes, bits, use_delta=False))
    assert ideal < size < 1.01 * ideal + 100 + 8 * 4
    walk = np.cumsum(np.random.default_rng(0).integers(-1, 2, (1, 2000, 4)), axis=1) % 2**bits
    sizes = [len(encode_codes(walk.astype(np.uint8), bits, use_delta=use_delta)) for use_delta in (True, False)]
    assert sizes[0] < 0.9 * sizes[1] and sizes[0] > walk.size * math.log2(3) / 8 * 0.95


# States


def test_delta_and_channels_change_nothing_that_is_held() -> None:
    keys, values = draw(70, 8), draw(70, 24, seed=1)
    made = [vq.cachegen(use_delta=d, per_channel=p) for d, p in itertools.product((True, False), repeat=2)]
    states = [feed(transform, keys, values) for transform in made]
    for transform, state in zip(made, states, strict=True):
        assert_same(state, states[0])
        assert_same(vq.decode_state(transform, vq.encode_state(transform, state)), states[0])


@pytest.mark.parametrize("cuts", [[1] * 100, [5] * 20, [33, 1, 66]])
def test_the_state_does_not_depend_on_how_a_prompt_came(cuts: list[int]) -> None:
    transform, keys, values = vq.cachegen(bits=3), draw(100, 8), draw(100, 24, seed=1)
    one, two = feed(transform, keys, values, cuts), feed(transform, keys, values)
    assert one.coded.item() == two.coded.item() == 96
    for got, want in zip((*one.keys.rows, *one.values.rows), (*two.keys.rows, *two.values.rows), strict=True):
        committed = got.shape[-1] * 3 // 4  # 96 tokens of the 128 that there is room for
        assert mx.array_equal(got[..., :committed], want[..., :committed])
    for got, want in zip(read(transform, one), read(transform, two), strict=True):
        np.testing.assert_array_equal(got, want)
    for x in (3, 4, 30, 99):
        for got, want in zip(read(transform, transform.trim(one, x)), read(transform, one), strict=True):
            np.testing.assert_array_equal(got, want[:, :, : 100 - x])


@pytest.mark.parametrize("layers, groups", [(30, 3), (28, 3), (5, 3), (1, 3), (2, 5), (32, 1), (7, 7), (13, 4)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_deeper_bands_of_layers_have_fewer_bits(bits: int, layers: int, groups: int) -> None:
    edges = [round(layers * j / groups) for j in range(groups + 1)]
    options = {"bits": bits, "layers": layers, "layer_groups": groups}
    made = [vq.cachegen(layer=i, **options).key.bits for i in range(layers)]
    for j in range(groups):
        assert set(made[edges[j] : edges[j + 1]]) <= {max(2, bits - j)}
    assert made == sorted(made, reverse=True) and min(made) >= 2
    assert vq.cachegen(layer=layers - 1, resolved_bits=6, bits_v=3, **options).value.bits == 6
    last = vq.cachegen(layer=layers - 1, bits_v=8, **options)
    assert last.key.bits == made[-1] and last.value.bits == max(2, 8 - layer_band(layers - 1, layers, groups))
    assert vq.cachegen(bits=bits).key.bits == bits


@pytest.mark.parametrize("bits, group", [(2, 32), (3, 64), (4, 128), (5, 16), (7, 32), (8, 32)])
@pytest.mark.parametrize("dims", [(128, 128), (64, 80)])
def test_bytes_follow_the_formula(dims: tuple[int, int], bits: int, group: int) -> None:
    transform, block = vq.cachegen(bits=bits, group_size=group, residual_length=40), block_of(bits, group)
    spec = vq.KVSpec(batch=2, kv_heads=HEADS, key_dim=dims[0], value_dim=dims[1], capacity=256)
    token = sum(dim * width_of(bits) / 8 + 4 * dim / group for dim in dims)
    want = 2 * HEADS * (256 * token + (40 + block) * 2 * sum(dims)) + 2 * 2 * 4
    state = transform.init_state(spec)
    assert vq.nbytes(state) == want == sum(x.nbytes for x in flatten(state)[0])


@dtypes
@pytest.mark.parametrize("bits, group", [(2, 32), (3, 64), (7, 32), (4, 16)])
@pytest.mark.parametrize("n", [1, 5])
def test_attention_on_codes_equals_attention_over_what_is_read(n: int, bits: int, group: int, dtype: mx.Dtype) -> None:
    transform, total = vq.cachegen(bits=bits, group_size=group), 150 + n
    keys, values = draw(total, 64, dtype=dtype), draw(total, 80, seed=1, dtype=dtype)
    state = feed(transform, keys[:, :, :150], values[:, :, :150], capacity=total)
    held = transform.write(state, keys[:, :, 150:], values[:, :, 150:])
    queries = mx.random.normal((1, 3 * HEADS, n, 64), key=mx.random.key(5)).astype(dtype)
    got = numbers(transform.attend(held, queries, 64**-0.5))
    position = np.array(transform.positions(held))[0, 0]
    seen = (position >= 0)[None] & (position[None] <= 150 + np.arange(n)[:, None])
    k, v = (np.repeat(numbers(x), 3, axis=1).astype(np.float64) for x in transform.read(held))
    scores = np.where(seen, numbers(queries) @ k.swapaxes(2, 3) / 8, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ np.where(seen.any(axis=0)[:, None], v, 0)
    np.testing.assert_allclose(got, want, atol={mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype])


# Errors


WRONG = {"bits": (1, 9, True, 4.0), "group_size": (0, 2.5), "use_delta": (1, None), "per_channel": (0, "yes")}
WRONG |= {"layer_groups": (0, 1.5), "resolved_bits": (1, 9, "4"), "bits_k": (1, 9), "bits_v": (0, 2.5)}
WRONG |= {"residual_length": (-1, None), "n_sink": (-1, True)}


@pytest.mark.parametrize("field, wrong", [(field, x) for field, values in WRONG.items() for x in values])
def test_options_out_of_range_are_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^cachegen: `{field}` must be .*; got "):
        vq.cachegen(**{field: wrong})


@pytest.mark.parametrize(
    "layer, layers, field",
    [
        (4, 4, "layer"),
        (-1, 4, "layer"),
        (0, 0, "layers"),
        (True, 4, "layer"),
        (0.5, 4, "layer"),
        (-1, None, "layer"),
        ("a", None, "layer"),
        (None, 0, "layers"),
        (29, None, "layer"),
        (None, 30, "layer"),
    ],
)
def test_layers_that_are_none_are_refused(layer: Any, layers: Any, field: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^cachegen: `{field}` must be .*; got "):
        vq.cachegen(layer=layer, layers=layers)


def test_tokens_share_scales_so_no_policy_can_move_rows() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="cachegen"):
        vq.chain(vq.h2o_policy(budget=40), vq.cachegen())
