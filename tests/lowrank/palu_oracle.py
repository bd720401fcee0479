"""Inputs, and palu group by group in numpy."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
from svdq_oracle import UNIT, numbers, orthogonal, unpacked

import vq_functional as vq

HEADS, DIM = 3, 32
DEFAULTS: dict[str, Any] = {
    "rank": None,
    "n_head_groups": 4,
    "hi_bit": 4,
    "lo_bit": 2,
    "hi_fraction": 0.25,
    "group_size": 32,
    "quantize_values": True,
    "bits_k": None,
    "bits_v": None,
    "n_fit": 128,
    "residual_length": None,
    "n_sink": 4,
}
Sections = list[tuple[int, int | None]]


def sample(
    n: int,
    dim: int = DIM,
    seed: int = 0,
    heads: int = HEADS,
    decay: float = 0.93,
    dtype: mx.Dtype = mx.float32,
    batch: int = 1,
) -> mx.array:
    """Rows around a mean; all heads of a sequence have their axes in common."""
    rng, size = np.random.default_rng(seed), heads * dim
    rows = []
    for i in range(batch):
        joint = (rng.normal(size=(n, size)) * decay ** np.arange(size)) @ orthogonal(size, seed + 7 * i).T
        rows.append((joint + rng.normal(size=size)).reshape(n, heads, dim).swapaxes(0, 1))
    return mx.array(np.array(rows).astype(np.float32)).astype(dtype)


def groups_of(heads: int, count: int) -> list[np.ndarray]:
    """Heads of each group."""
    return np.array_split(np.arange(heads), min(count, heads))


def layout(n: int, n_fit: int = 128, residual_length: int | None = None, given: bool = False) -> tuple[int, int]:
    """Rows that the axes are fitted to, and rows in codes after `n` tokens."""
    residual = residual_length
    if residual is None:
        residual = 32 if given else max(n_fit - 32, 0)
    least = 32
    while not given and residual + least < n_fit:
        least += 32
    return residual + least, (n - residual) // 32 * 32 if n >= residual + least else 0


def width_of(heads: int, dim: int, options: dict[str, Any]) -> int:
    """R: components of a latent."""
    o = DEFAULTS | options
    rank = dim / 2 if o["rank"] is None else o["rank"]
    return math.ceil(math.ceil(heads / min(heads, o["n_head_groups"])) * rank / o["group_size"]) * o["group_size"]


def sections_of(width: int, options: dict[str, Any], side: int) -> Sections:
    """Components and bits of each section of the keys (`side` 0) or the values."""
    o = DEFAULTS | options
    one, group, share = o[("bits_k", "bits_v")[side]], o["group_size"], o["hi_fraction"]
    if side == 1 and not o["quantize_values"]:
        return [(width, None)]
    if one or o["hi_bit"] == o["lo_bit"]:
        return [(width, one or o["hi_bit"])]
    first = round(width * share / group) * group
    if width == group and share > 0:
        first = width
    elif 0 < share < 1:
        first = min(max(first, group), width - group)
    return [(count, bits) for count, bits in ((first, o["hi_bit"]), (width - first, o["lo_bit"])) if count]


def joint(x: np.ndarray) -> np.ndarray:
    """Rows [S, n D] of the heads x [n, S, D] side by side."""
    return np.concatenate(list(x), axis=-1)


def fitted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean [F], axes [F, F] (columns) and singular values [F] of joint rows [S, F]."""
    mean = x.mean(axis=0)
    _, sigma, axes = np.linalg.svd(x - mean, full_matrices=True)
    return mean, axes.T, np.pad(sigma, (0, x.shape[1] - len(sigma)))


def assert_axes(first: np.ndarray, mean: np.ndarray, basis: np.ndarray, unit: float = 2e-6) -> None:
    """`mean` [n, D] and `basis` [n, D, R] are those of the rows `first` [n, S, D]: leading, orthonormal, in order."""
    rows, axes = joint(first), basis.reshape(-1, basis.shape[-1])
    want_mean, _, sigma = fitted(rows)
    kept = min(len(axes), axes.shape[1])
    np.testing.assert_allclose(mean.reshape(-1), want_mean, atol=unit * np.abs(rows).max())
    np.testing.assert_array_equal(axes[:, kept:], 0)
    np.testing.assert_allclose(axes[:, :kept].T @ axes[:, :kept], np.eye(kept), atol=4 * unit)
    spread = (rows - want_mean) @ axes[:, :kept]
    np.testing.assert_allclose(spread.T @ spread, np.diag(sigma[:kept] ** 2), atol=4 * unit * sigma[0] ** 2)
    lost, energy = np.square(sigma[kept:]).sum(), np.square(sigma).sum()
    np.testing.assert_allclose(energy - np.square(spread).sum(), lost, atol=4 * unit * energy)


def rounded(x: Any, dtype: mx.Dtype) -> np.ndarray:
    return numbers(mx.array(np.asarray(x, np.float32)).astype(dtype))


def read_back(latents: np.ndarray, sections: Sections, group: int, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """Latents [S, R] as they are held."""
    out, start = rounded(latents, dtype), 0
    for count, bits in sections:
        for at in range(start, start + count if bits else 0, group):
            part = latents[:, at : at + group]
            zero = rounded(part.min(axis=1, keepdims=True), dtype)
            scale = rounded(np.ptp(part, axis=1, keepdims=True) / (2**bits - 1), dtype)
            steps = np.clip(np.round((part - zero) / np.maximum(scale, 1e-300)), 0, 2**bits - 1)
            out[:, at : at + group] = zero + scale * steps
        start += count
    return out


def read_of(x: np.ndarray, coded: int, span: slice, options: dict[str, Any], side: int, like: np.ndarray) -> np.ndarray:
    """The first `coded` of the rows x [H, S, D] as they are read, with axes of the rows in `span`, signed as `like`."""
    o, (heads, _, dim) = DEFAULTS | options, x.shape
    width, out = width_of(heads, dim, options), np.zeros((heads, coded, dim))
    for group in groups_of(heads, o["n_head_groups"]):
        rows = joint(x[group])
        mean, axes, _ = fitted(rows[span])
        axes = np.pad(axes, ((0, 0), (0, width)))[:, :width]
        axes = axes * np.where((axes * joint(like[group].swapaxes(1, 2)).T).sum(axis=0) < 0, -1, 1)
        latents = read_back((rows[:coded] - mean) @ axes, sections_of(width, options, side), o["group_size"])
        out[group] = (latents @ axes.T + mean).reshape(coded, len(group), dim).swapaxes(0, 1)
    return out


def tables(coded: Any, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean [H, D] and basis [H, D, R] of one side's `coded` part of a state."""
    basis, mean = coded.tables
    return numbers(mean)[row], numbers(basis)[row]


def shrunk(heads: int, groups: int, dim: int, dtype: mx.Dtype) -> float:
    """What float16 latents are held times: a power of two that their length needs."""
    size = max(map(len, groups_of(heads, groups)))
    return 0.5 ** (1 + math.ceil(math.log2(size * dim) / 2)) if dtype == mx.float16 else 1.0


def check_codes(
    held: Any, x: np.ndarray, found: Any, sections: Sections, groups: int, group: int, dtype: mx.Dtype, row: int = 0
) -> None:
    """All that is held of the rows x [H, S, D] follows from their mean [H, D] and basis [H, D, R], `found`."""
    (mean, basis), arrays, unit = found, list(held.rows), UNIT[dtype]
    for place, members in enumerate(groups_of(len(x), groups)):
        latents = sum((x[h] - mean[h]) @ basis[h] for h in members) * shrunk(len(x), groups, x.shape[2], dtype)
        slack, start, rest = 4e-6 * np.abs(x[members]).max() * math.sqrt(len(members)), 0, arrays
        for count, bits in sections:
            part = latents[:, start : start + count]
            start += count
            if bits is None:
                assert rest[0].dtype == dtype and rest[0].shape[-1] == count
                got = numbers(rest[0])[row, place, : len(part)]
                assert (np.abs(got - part) <= unit * np.abs(part) + slack).all()
                rest = rest[1:]
                continue
            assert rest[0].dtype == mx.uint32 and rest[0].shape[-1] == count * bits // 32
            assert rest[1].dtype == rest[2].dtype == dtype and rest[1].shape[-1] == rest[2].shape[-1] == count // group
            codes = unpacked(np.array(rest[0])[row, place, : len(part)], bits).astype(int)
            scales, zeros = (numbers(a)[row, place, : len(part)] for a in rest[1:3])
            for i in range(count // group):
                came, scale, zero = part[:, i * group : (i + 1) * group], scales[:, i], zeros[:, i]
                want = np.ptp(came, axis=1) / (2**bits - 1)
                assert (np.abs(zero - came.min(axis=1)) <= unit * np.abs(came.min(axis=1)) + slack).all()
                assert (np.abs(scale - want) <= unit * scale + slack).all()
                step = np.maximum(scale, 1e-30)[:, None]
                steps = np.clip((came - zero[:, None]) / step, 0, 2**bits - 1)
                off = np.abs(codes[:, i * group : (i + 1) * group] - steps)
                assert (off <= 0.5 + slack / step + 1e-5).all()
            rest = rest[3:]
        assert rest == []


def live(state: Any, row: int = 0) -> list[mx.array]:
    """What is held of one sequence in codes, and its tables."""
    coded = state.coded[row].item()
    held = [x[row][:, :coded] for side in (state.keys, state.values) for x in side.rows]
    return [*held, *(x[row] for side in (state.keys, state.values) for x in side.tables)]


def calibrated(x: mx.array, values: mx.array | None = None, **options: Any) -> Any:
    """`palu_calibrate` of the rows [1, H, N, D]."""
    keys, values = (y[0].swapaxes(0, 1) for y in (x, x if values is None else values))
    return vq.palu_calibrate(keys, values, **options)
