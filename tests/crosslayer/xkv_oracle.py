"""Inputs, and xkv in numpy."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from xquant_oracle import UNIT, numbers, rows_in_order, unpacked

import vq_functional as vq
from vq_functional.crosslayer.xkv import XKVOptions
from vq_functional.crosslayer.xkv_basis import XKVBasis
from vq_functional.ops.rotations import random_rotation

HEADS, DIM, N = 4, 16, 150


def sample(
    n: int = N,
    dim: int = DIM,
    seed: int = 0,
    heads: int = HEADS,
    decay: float = 0.93,
    dtype: mx.Dtype = mx.float32,
    batch: int = 1,
) -> mx.array:
    """Rows around a mean [batch, heads, n, dim], whose heads have their axes in common."""
    size, rows = heads * dim, []
    for rng in map(np.random.default_rng, range(100 * seed, 100 * seed + batch)):
        axes = np.linalg.qr(rng.normal(size=(size, size)))[0]
        x = rng.normal(size=(n, size)) * decay ** np.arange(size) @ axes + rng.normal(size=size)
        rows.append(x.reshape(n, heads, dim).swapaxes(0, 1))
    return mx.array(np.array(rows).astype(np.float32)).astype(dtype)


def calibrated(keys: mx.array, values: mx.array | None = None, **options: Any) -> XKVBasis:
    sides = (x[0].swapaxes(0, 1) for x in (keys, keys if values is None else values))
    return vq.xkv_calibrate(*sides, **options)


# The oracle, for one batch row


def joint(x: np.ndarray) -> np.ndarray:
    """Rows [S, n D] of the heads x [n, S, D] side by side."""
    return np.concatenate(list(x), axis=-1)


def layout(n: int, n_fit: int, residual: int | None, given: bool = False) -> tuple[int, int]:
    """E, and the rows in codes after `n` tokens."""
    if residual is None:
        residual = 32 if given else max(n_fit - 32, 0)
    blocks = 1 if given else max(1, math.ceil((n_fit - residual) / 32))
    least = residual + 32 * blocks
    return least, (n - residual) // 32 * 32 if n >= least else 0


def width_of(features: int, o: XKVOptions, side: int) -> int:
    """R of the keys (`side` 0) or the values."""
    rank = o.rank_v if side and o.rank_v else o.rank
    wanted = min(math.ceil(o.fitted / 2), math.ceil(features / 2)) if rank is None else min(rank, features)
    return math.ceil(wanted / o.group_quant_size) * o.group_quant_size


def bits_of(o: XKVOptions, side: int) -> int:
    return (o.bits_k, o.bits_v)[side] or o.latent_bits


def turn(width: int, o: XKVOptions, side: int) -> np.ndarray:
    """Q, or no rotation."""
    mixed = o.rotate and bits_of(o, side) < 16
    return numbers(random_rotation(width, seed=0).apply(mx.eye(width))) if mixed else np.eye(width)


def factors(coded: Any, row: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V [F, R], the mean [F] and s [R] of one side's `coded` part of a state."""
    axes, mean, spread = (numbers(x)[row] for x in coded.tables)
    return axes.reshape(-1, axes.shape[-1]), mean.reshape(-1), spread[0]


def assert_axes(first: np.ndarray, axes: np.ndarray, mean: np.ndarray, centred: bool, unit: float = 2e-6) -> np.ndarray:
    """`axes` [F, R] and `mean` [F] are those of the rows `first` [S, F]; returns the spread along the axes."""
    want = first.mean(axis=0) if centred else np.zeros(len(mean))
    np.testing.assert_allclose(mean, want, atol=unit * np.abs(first).max())
    kept = min(axes.shape)
    np.testing.assert_array_equal(axes[:, kept:], 0)
    np.testing.assert_allclose(axes[:, :kept].T @ axes[:, :kept], np.eye(kept), atol=8 * unit)
    sigma = np.pad(np.linalg.svd(first - want, compute_uv=False), (0, len(mean)))
    along = (first - want) @ axes[:, :kept]
    np.testing.assert_allclose(along.T @ along, np.diag(sigma[:kept] ** 2), atol=8 * unit * sigma[0] ** 2)
    return np.pad(sigma[:kept], (0, axes.shape[1] - kept)) / sigma[0]


def quantized(a: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Latents [S, R] in codes and back."""
    parts = a.reshape(len(a), -1, group)
    low, step = parts.min(axis=2, keepdims=True), np.ptp(parts, axis=2, keepdims=True) / (2**bits - 1)
    return (low + step * np.round((parts - low) / np.maximum(step, 1e-300))).reshape(a.shape)


def check_side(
    held: Any, x: np.ndarray, found: Any, o: XKVOptions, side: int, dtype: mx.Dtype, row: int = 0
) -> np.ndarray:
    """All that is held of the rows x [M * H, S, D] follows from `found`: V, mean and s; returns what it reads as."""
    (axes, mean, s), bits, group, unit = found, bits_of(o, side), o.group_quant_size, UNIT[dtype]
    n, width, q = x.shape[1], axes.shape[1], turn(axes.shape[1], o, side)
    off = np.where(np.isfinite(joint(x)), joint(x) - mean, 0)
    a, slack = off @ (axes / s) @ q, 4e-6 * np.abs(off).max(initial=0) * math.sqrt(len(mean)) / s.min()
    rows = [r[row, 0, :n] for r in held.rows]
    assert all(r.shape[1] == 1 for r in held.rows)
    if bits == 16:
        assert [(r.dtype, r.shape[-1]) for r in rows] == [(dtype, width)]
        read = numbers(rows[0])
        assert (np.abs(read - a) <= unit * np.abs(a) + slack).all()
    else:
        assert [r.dtype for r in rows] == [mx.uint32, dtype, dtype]
        assert [r.shape[-1] for r in rows] == [width * bits // 32, width // group, width // group]
        codes = unpacked(rows[0], bits, width).reshape(n, -1, group)
        scale, zero = (numbers(r)[..., None] for r in rows[1:])
        parts = a.reshape(n, -1, group)
        low, step = parts.min(axis=2, keepdims=True), np.ptp(parts, axis=2, keepdims=True) / (2**bits - 1)
        assert (np.abs(zero - low) <= unit * np.abs(low) + slack).all()
        assert (np.abs(scale - step) <= unit * step + slack).all()
        nearest = np.clip((parts - zero) / np.maximum(scale, 1e-30), 0, 2**bits - 1)
        assert (np.abs(codes - nearest) <= 0.5001 + slack / np.maximum(scale, 1e-30)).all()
        read = (zero + scale * codes).reshape(n, width)
    back = read @ q.T * s @ axes.T + mean
    return back.reshape(n, len(x), -1).swapaxes(0, 1)


def check_state(method: Any, state: Any, sides: Sequence[mx.array], o: XKVOptions, found: Any = None) -> None:
    """Everything that is held and read of the keys and values `sides`, in each batch row."""
    n, coded = sides[0].shape[2], layout(sides[0].shape[2], o.fitted, o.residual_length, found is not None)[1]
    for row, (side, x) in itertools.product(range(len(sides[0])), enumerate(sides)):
        assert (state.coded[row].item(), state.offset[row].item()) == (coded, n)
        held, came, read = (state.keys, state.values)[side], numbers(x)[row], rows_in_order(method, state, row)[side]
        exact = (np.arange(n) < o.n_sink) | (np.arange(n) >= coded)
        np.testing.assert_array_equal(read[:, exact], came[:, exact])
        if coded:
            own = factors(held, row) if found is None else found[side]
            want = check_side(held, came[:, :coded], own, o, side, x.dtype, row)
            size = np.abs(came[np.isfinite(came)]).max(initial=0)
            got, want = (y[:, :coded][:, ~exact[:coded]] for y in (read, want))
            np.testing.assert_allclose(got, want, rtol=UNIT[x.dtype], atol=1e-5 * size + 2.0**-24)


def given_factors(basis: XKVBasis, bits: int = 4) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    found = []
    for axes, mean, spread in ((numbers(table.array) for table in side) for side in (basis.key, basis.value)):
        s = np.sqrt(np.maximum(spread / spread.max() / 0.05, 1)) if bits < 16 else np.ones(len(spread))
        found.append((axes.reshape(-1, len(s)), mean.reshape(-1), s))
    return found
