"""Inputs, and xquant group by group in numpy."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq
from vq_functional.core.tree import flatten
from vq_functional.crosslayer.xquant import XQuantOptions

HEADS, DIM = 2, 8
SMALL: dict[str, Any] = {"group_quant_size": 8, "residual_length": 5, "n_sink": 2}  # blocks of 16
UNIT = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def alike(layers: int, n: int, rho: float = 0.7, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> np.ndarray:
    """Rows [1, layers * heads, n, dim]: those of each further layer have correlation `rho` with the first one's."""
    x = normal(layers, heads, n, dim, seed=seed)
    x[1:] = rho * x[0] + math.sqrt(1 - rho**2) * x[1:]
    return x.reshape(1, layers * heads, n, dim)


def array(x: np.ndarray, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def spec_of(keys: mx.array, values: mx.array, layers: int = 1, capacity: int | None = None) -> vq.KVSpec:
    """Of the stack, or with `layers` of one of so many."""
    batch, heads, n, dim = keys.shape
    sizes = {"batch": batch, "kv_heads": heads // layers, "key_dim": dim, "value_dim": values.shape[3]}
    return vq.KVSpec(**sizes, dtype=keys.dtype, capacity=capacity or n)


def feed(
    method: Any,
    keys: mx.array,
    values: mx.array | None = None,
    cuts: Sequence[int] = (),
    capacity: int | None = None,
    padding: mx.array | None = None,
) -> Any:
    values = keys if values is None else values
    state, start = method.init_state(spec_of(keys, values, capacity=capacity), padding), 0
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        span = slice(start, start + count)
        state, *_ = method.update(state, keys[:, :, span], values[:, :, span])
        start += count
    return state


def columns(method: Any, state: Any, row: int = 0) -> list[int]:
    """Where the tokens of a batch row stand among what is read, in order."""
    position = np.array(method.positions(state))[row, 0]
    return [np.flatnonzero(position == i)[0] for i in range(state.offset[row].item())]


def rows_in_order(method: Any, state: Any, row: int = 0) -> list[np.ndarray]:
    """Keys and values [M * H, S, D] of all tokens."""
    return [numbers(x)[row][:, columns(method, state, row)] for x in method.read(state)]


def coded_rows(x: np.ndarray, dtype: mx.Dtype = mx.float16, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """`x` [1, M * H, S, D] as keys and as values, all of its rows coded."""
    method = vq.xquant(**{"residual_length": 0, "n_sink": 0} | options)
    state = feed(method, array(x, dtype))
    assert state.coded.item() == x.shape[2]
    keys, values = rows_in_order(method, state)
    return keys, values


def same(one: Any, two: Any) -> bool:
    pairs = zip(flatten(one)[0], flatten(two)[0], strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b, equal_nan=True) for a, b in pairs)


def live(state: Any, row: int = 0) -> list[np.ndarray]:
    """What a state holds of a batch row, without unused room."""
    coded, offset = state.coded[row].item(), state.offset[row].item()
    room = max(state.values.rows[0].shape[2], 1)
    keys = [np.array(x)[row][..., : x.shape[3] * coded // room] for x in map(raw, state.keys.rows)]
    values = [np.array(x)[row][:, :coded] for x in map(raw, state.values.rows)]
    recent = [np.array(raw(x))[row][:, : offset - coded] for x in (state.recent.keys, state.recent.values)]
    return [*keys, *values, *recent]


def raw(x: mx.array) -> mx.array:
    return x.astype(mx.float32) if x.dtype == mx.bfloat16 else x


# The oracle, for one batch row


def block_of(o: XQuantOptions, layers: int) -> int:
    """Rows that fill whole groups and whole words of both kinds of key codes."""
    widths = [o.bits_k or o.base_bits, *([o.residual_bits] if layers > 1 and o.residual_bits else [])]
    fits = (n for n in itertools.count(1) if n % o.group_quant_size == 0 and all(n * b % 32 == 0 for b in widths))
    return next(fits)


def frontier(o: XQuantOptions, layers: int, n: int) -> int:
    return max(0, n - o.residual_length) // block_of(o, layers) * block_of(o, layers)


def unpacked(words: mx.array, bits: int, count: int) -> np.ndarray:
    """Codes [..., count] of bit streams, least significant bit first."""
    stream = np.unpackbits(np.array(words)[..., None].view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*words.shape[:-1], -1)[..., : count * bits]
    return stream.reshape(*words.shape[:-1], count, bits) @ 2.0 ** np.arange(bits)


def drawn(group: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """`group` with its sinks inside the range of the others."""
    others = group[~sink & np.isfinite(group)]
    return np.where(sink, np.clip(group, others.min(), others.max()), group) if len(others) else group


def repeated(group: np.ndarray) -> np.ndarray:
    """`group` with the next finite number in place of each that is not; at the end the last one, 0 if none is."""
    finite, out = np.flatnonzero(np.isfinite(group)), group.copy()
    for i in np.flatnonzero(~np.isfinite(group)):
        later = finite[finite > i]
        out[i] = group[later[0]] if len(later) else group[finite[-1]] if len(finite) else 0
    return out


def stored(x: float, dtype: mx.Dtype) -> float:
    return mx.array(np.float32(x)).astype(dtype).astype(mx.float32).item()


def ranged(x: np.ndarray, bits: int, dtype: mx.Dtype) -> tuple[float, float]:
    low, high = np.float32(x.min()), np.float32(x.max())
    return stored((high - low) / np.float32(2**bits - 1), dtype), stored(low, dtype)


def inward(line: tuple[float, float], bits: int, eta: float, dtype: mx.Dtype) -> tuple[float, float]:
    scale, zero = line
    return stored((1 - 2 * eta) * scale, dtype), stored(zero + eta * scale * (2**bits - 1), dtype)


def fitted(x: np.ndarray, codes: np.ndarray) -> float:
    """The slope of the nearest line."""
    offset = codes - codes.mean()
    return (offset @ (x - x.mean())) / (offset @ offset) if offset.any() else 0.0


def close(got: float, want: float, size: float, dtype: mx.Dtype) -> bool:
    return abs(got - want) <= UNIT[dtype] * abs(want) + 4e-6 * size + 2.0**-24 * (dtype == mx.float16)


def check_codes(codes: np.ndarray, x: np.ndarray, line: tuple[float, float], bits: int, size: float) -> None:
    """Each code is the nearest of all."""
    scale, zero = line
    count = np.clip((x - zero) / scale, 0, 2**bits - 1) if scale > 0 else np.zeros(len(x))
    assert (np.abs(codes - count) <= 0.5001 + (2.0**-20 * size / scale if scale > 0 else 0)).all()


def check_group(
    xs: Sequence[np.ndarray], real: int, held: Sequence[Any], bits: int, o: XQuantOptions, dtype: mx.Dtype
) -> list[np.ndarray]:
    """What each layer's numbers `xs` [g] of one group are read as; `held` as in the state."""
    codes, scales, zeros, *residual = held
    line = ranged(xs[0], bits, dtype)
    check_codes(codes, xs[0], line, bits, np.abs(xs[0]).max())
    out = []
    for m, (x, scale, zero) in enumerate(zip(xs, scales, zeros)):
        size = np.abs(x).max()
        if m and o.fit == "lsq":
            slope = fitted(x[:real], codes[:real])
            wanted = slope, x[:real].mean() - scale * codes[:real].mean()
        else:
            wanted = inward(ranged(x, bits, dtype), bits, o.eta, dtype)
        assert all(close(got, want, size, dtype) for got, want in zip((scale, zero), wanted))
        out.append(codes * scale + zero)
        if m and residual:
            rest, own = x - out[-1], [part[m - 1] for part in residual]
            reach = size + np.abs(out[-1]).max()
            assert all(close(a, b, reach, dtype) for a, b in zip(own[1:], ranged(rest, o.residual_bits, dtype)))
            check_codes(own[0], rest, (own[1], own[2]), o.residual_bits, reach)
            out[-1] = out[-1] + own[0] * own[1] + own[2]
    return out


def check_side(
    rows: Any, x: np.ndarray, sink: np.ndarray, bits: int, o: XQuantOptions, turned: bool, dtype: mx.Dtype
) -> np.ndarray:
    """Rows [M, H, coded, D] as read; `x` likewise, `rows` of the state with the batch row cut out."""
    layers, heads, coded, dim = x.shape
    size, lines = o.group_quant_size, dim if turned else coded
    long = coded if turned else -(-dim // size) * size
    codes = unpacked(rows[0], bits, long)
    pairs = [numbers(y).reshape(layers, heads, lines, -1) for y in rows[1:3]]
    rest: list[np.ndarray] = []
    if len(rows) > 3:
        rest = [unpacked(rows[3], o.residual_bits, long), *map(numbers, rows[4:])]
        rest = [y.reshape(layers - 1, heads, lines, -1) for y in rest]
    assert (len(rows) > 3) == (layers > 1 and o.residual_bits > 0)
    read = np.zeros((layers, heads, lines, long))
    for head, line, i in itertools.product(range(heads), range(lines), range(long // size)):
        span, real = slice(i * size, (i + 1) * size), min(size, (coded if turned else dim) - i * size)
        groups = []
        for m in range(layers):
            y = x[m, head, :, line] if turned else x[m, head, line]
            y = np.concatenate([y[span], np.full(size - real, math.nan)])
            groups.append(repeated(drawn(y, sink[span]) if turned else y))
        held = [codes[head, line, span], *(y[:, head, line, i] for y in pairs)]
        held += [rest[0][:, head, line, span], *(y[:, head, line, i] for y in rest[1:])] if rest else []
        for m, y in enumerate(check_group(groups, real, held, bits, o, dtype)):
            read[m, head, line, span] = y
    return read.swapaxes(-1, -2) if turned else read[..., :dim]


def check_state(
    method: Any, state: Any, keys: mx.array, values: mx.array, o: XQuantOptions, layers: int, row: int = 0
) -> None:
    """Everything that is held and read of a batch row."""
    n, dtype = keys.shape[2], keys.dtype
    coded = frontier(o, layers, n)
    assert (state.coded[row].item(), state.offset[row].item()) == (coded, n) and coded > 0
    sides = (state.keys, o.bits_k or o.base_bits, True), (state.values, o.bits_v or o.base_bits, False)
    for x, read, (side, bits, turned) in zip((keys, values), rows_in_order(method, state, row), sides):
        x, sink = numbers(x)[row], np.arange(coded) < o.n_sink
        np.testing.assert_array_equal(read[:, coded:], x[:, coded:])
        np.testing.assert_array_equal(read[:, :coded][:, sink], x[:, :coded][:, sink])
        room = state.values.rows[0].shape[2]
        rows = [y[row] for y in side.rows]
        rows = [y[..., : y.shape[2] * coded // room] if turned else y[:, :coded] for y in rows]
        with np.errstate(invalid="ignore"):
            old = x[:, :coded].reshape(layers, len(x) // layers, coded, x.shape[2])
            want = check_side(rows, old, sink, bits, o, turned, dtype).reshape(x[:, :coded].shape)
        size = np.abs(x[np.isfinite(x)]).max(initial=0)
        got = read[:, :coded][:, ~sink]
        np.testing.assert_allclose(got, want[:, ~sink], rtol=UNIT[dtype], atol=4e-6 * size + 2.0**-24)


def check(keys: np.ndarray, values: np.ndarray, layers: int, dtype: mx.Dtype = mx.float16, **options: Any) -> None:
    cuts, options = options.pop("cuts", ()), SMALL | options
    method, k, v = vq.xquant(layers=layers, **options), array(keys, dtype), array(values, dtype)
    state = feed(method, k, v, cuts)
    for row in range(len(keys)):
        check_state(method, state, k, v, XQuantOptions(**options), layers, row)
