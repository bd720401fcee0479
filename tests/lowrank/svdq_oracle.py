"""Inputs, and svdq head by head and channel by channel in numpy."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq

HEADS, DIM = 2, 16
UNIT = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def orthogonal(dim: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0]


def sample(
    n: int, dim: int = DIM, seed: int = 0, decay: float = 0.7, dtype: mx.Dtype = mx.float32, batch: int = 1
) -> mx.array:
    """Rows around a mean, with axes of their own in each head and sequence."""
    rng = np.random.default_rng(seed)
    rows = [
        (rng.normal(size=(n, dim)) * decay ** np.arange(dim)) @ orthogonal(dim, seed + 7 * i).T + rng.normal(size=dim)
        for i in range(batch * HEADS)
    ]
    return mx.array(np.array(rows).reshape(batch, HEADS, n, dim).astype(np.float32)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def begin(transform: Any, keys: mx.array, values: mx.array, padding: mx.array | None = None) -> Any:
    batch, heads, n, dim = keys.shape
    dims: dict[str, Any] = {"key_dim": dim, "value_dim": values.shape[3], "dtype": keys.dtype}
    return transform.init_state(vq.KVSpec(batch=batch, kv_heads=heads, capacity=n, **dims), padding)


def feed(transform: Any, keys: mx.array, values: mx.array | None = None, cuts: Sequence[int] = (), **more: Any) -> Any:
    values = keys if values is None else values
    state, start = begin(transform, keys, values, **more), 0
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        span = slice(start, start + count)
        state, *_ = transform.update(state, keys[:, :, span], values[:, :, span])
        start += count
    return state


def rows_in_order(transform: Any, state: Any, row: int = 0) -> list[np.ndarray]:
    """Keys and values [H, S, D] of all tokens held, in token order."""
    position = np.array(transform.positions(state))[row, 0]
    columns = [np.flatnonzero(position == i)[0] for i in range(state.offset[row].item())]
    return [numbers(x)[row][:, columns] for x in transform.read(state)]


def live(state: Any, row: int = 0) -> list[mx.array]:
    """What is held of one sequence's keys in codes, and its tables."""
    coded, full = state.coded[row].item(), state.values.rows[0].shape[2]
    arrays = [x[row][..., : x.shape[-1] * coded // full] for x in state.keys.rows]
    return [*arrays, *(x[row] for x in state.keys.tables)]


def assert_same(one: Sequence[mx.array], two: Sequence[mx.array]) -> None:
    for got, want in zip(one, two, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and mx.array_equal(got, want)


# The oracle


def fitted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, axes (columns, largest entry above zero) and singular values of rows [S, D]."""
    mean = rows.mean(axis=0)
    _, sigma, axes = np.linalg.svd(rows - mean, full_matrices=True)
    for axis in axes:
        axis *= np.sign(axis[np.argmax(np.abs(axis))])
    return mean, axes.T, sigma


def widths(rank: int, schedule: Sequence[int]) -> list[int]:
    """Bits of each of `rank` channels."""
    if rank < 4 * len(schedule):
        schedule = [max(bits, 1) for bits in schedule]
    out: list[int] = []
    for group, bits in enumerate(schedule):
        out += [bits] * (rank // len(schedule) + (1 if group < rank % len(schedule) else 0))
    return out


def layout(n_fit: int, residual: int, group: int, n: int) -> tuple[int, int]:
    """Rows that the axes are fitted to, and rows in codes after `n` tokens."""
    block = math.lcm(group, 32)
    least = block
    while residual + least < n_fit:
        least += block
    return residual + least, (n - residual) // block * block if n >= residual + least else 0


def levels(part: np.ndarray, bits: int, one_bit: str) -> tuple[float, float]:
    """Zero and scale of one group."""
    if bits == 1 and one_bit == "cond_mean":
        high = part > part.mean()
        low = part[~high].mean()
        return low, part[high].mean() - low if high.any() else 0.0
    return part.min(), (part.max() - part.min()) / (2**bits - 1)


def read_back(latents: np.ndarray, bits: Sequence[int], group: int, one_bit: str) -> np.ndarray:
    """Latents [S, r] as codes give them back, channels without bits as zero."""
    out = np.zeros_like(latents)
    for channel, width in enumerate(bits):
        for start in range(0, len(latents) if width else 0, group):
            part = latents[start : start + group, channel]
            zero, scale = levels(part, width, one_bit)
            cut = part > part.mean()
            code = cut if width == 1 and one_bit == "cond_mean" else np.round((part - zero) / max(scale, 1e-300))
            out[start : start + group, channel] = zero + scale * code
    return out


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of bit streams along the last axis, least significant bit first."""
    raw = np.unpackbits(np.ascontiguousarray(words)[..., None].view(np.uint8), axis=-1, bitorder="little")
    return raw.reshape(*words.shape[:-1], -1, bits) @ 2 ** np.arange(bits)


def held(state: Any, bits: Sequence[int], row: int, head: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Codes of each channel with bits, and scales and zeros [r', groups], as the state has them."""
    sections = [(width, len(list(same))) for width, same in itertools.groupby(filter(None, bits))]
    codes: list[np.ndarray] = []
    for words, (width, count) in zip(state.keys.rows, sections):
        assert words.dtype == mx.uint32 and words.shape[2] == count
        codes += list(unpacked(np.array(words)[row, head], width))
    scales, zeros = (numbers(x)[row, head] for x in state.keys.rows[len(sections) : len(sections) + 2])
    return codes, scales, zeros


def check_codes(state: Any, keys: np.ndarray, axes: Any, o: dict[str, Any], dtype: mx.Dtype, row: int = 0) -> None:
    """All codes of keys [H, coded, D] follow from mean [H, D] and axes [H, D, r']; `o` has bits, group, one_bit."""
    mean, basis = axes
    for head in range(len(keys)):
        codes, scales, zeros = held(state, o["bits"], row, head)
        latents = (keys[head] - mean[head]) @ basis[head]
        size = np.abs(latents).max() / np.abs(zeros).max()
        shrink = 2.0 ** -np.round(np.log2(size)) if dtype == mx.float16 else 1.0
        assert dtype != mx.float16 or shrink == 0.5 ** (1 + math.ceil(math.log2(keys.shape[2]) / 2))
        latents, unit, slack = latents * shrink, UNIT[dtype], 2e-6 * np.abs(keys[head]).max()
        assert len(codes) == len(scales) == latents.shape[1]
        for channel, (code, width) in enumerate(zip(codes, filter(None, o["bits"]))):
            for i in range(len(latents) // o["group"]):
                span = slice(i * o["group"], (i + 1) * o["group"])
                part, got = latents[span, channel], code[span]
                zero, scale = levels(part, width, o["one_bit"])
                assert abs(zeros[channel, i] - zero) <= unit * abs(zero) + slack
                assert abs(scales[channel, i] - scale) <= unit * (abs(scale) + 2 * abs(zero)) + slack
                if width == 1 and o["one_bit"] == "cond_mean":
                    assert ((got == 1) == (part > part.mean()))[np.abs(part - part.mean()) > slack].all()
                else:
                    steps = np.clip((part - zeros[channel, i]) / scales[channel, i], 0, 2**width - 1)
                    assert (np.abs(got - steps) <= 0.5 + slack / scales[channel, i] + 1e-5).all()


def tables(state: Any, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    basis, mean = state.keys.tables
    assert mean.dtype == mx.float32
    return numbers(mean)[row], numbers(basis)[row]
