"""GEAR against blocks in numpy: exact numbers, codes, low-rank part, errors, frontier, trims, bytes and attention."""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from vq_functional.core.transform import Fill
from vq_functional.ops.low_rank import low_rank, start_basis
from vq_functional.quantize.gear import recovery_ratio

HEADS = 2
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
ROUNDING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


def draw(n: int, dim: int, seed: int = 0, dtype: mx.Dtype = mx.float16, batch: int = 1) -> mx.array:
    """Rows with heavy tails and channels of unlike sizes and means."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(4, (batch, HEADS, n, dim)) * rng.lognormal(0, 0.5, dim) + rng.normal(0, 2, dim)
    return mx.array(x.astype(np.float32)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def feed(transform: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = (), capacity: int = 0) -> Any:
    """State after the rows came in pieces of `cuts`; the rest, if any, comes in one."""
    batch, heads, n, dim = keys.shape
    spec = vq.KVSpec(batch=batch, kv_heads=heads, key_dim=dim, value_dim=values.shape[3], dtype=keys.dtype,
                     capacity=capacity or n)  # fmt: skip
    return feed_more(transform, transform.init_state(spec), keys, values, cuts)


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


def arrays(state: Any) -> list[mx.array]:
    return [*state.keys.rows, *state.values.rows, state.recent.keys, state.recent.values]


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


def affine(x: np.ndarray, bits: int, group: int, dtype: mx.Dtype) -> tuple[np.ndarray, ...]:
    """Codes, scales and zeros, each [C, D], of `x` [C, D] in groups along the first axis; the last may be shorter."""
    out = [np.zeros(x.shape, np.float32) for _ in range(3)]
    for start in range(0, len(x), group):
        part = x[start : start + group]
        zero = rounded(part.min(axis=0), dtype)
        scale = rounded((part.max(axis=0) - part.min(axis=0)) / np.float32(2**bits - 1), dtype)
        steps = np.where(scale > 0, (part - zero) / np.where(scale > 0, scale, 1), 0)
        for found, new in zip(out, (np.clip(np.round(steps), 0, 2**bits - 1), scale, zero), strict=True):
            found[start : start + group] = new
    return tuple(out)


def farthest(x: np.ndarray, count: int, axis: int) -> np.ndarray:
    """Bool [C, D]: the `count` numbers farthest from the mean of their vector along `axis`."""
    far = np.abs(x - x.mean(axis=axis, keepdims=True, dtype=np.float64))
    marks = np.zeros(x.size, bool)
    marks[np.argsort(-far.T.reshape(-1), kind="stable")[:count]] = True
    return marks.reshape(x.shape[::-1]).T


def backbone(x: np.ndarray, marks: np.ndarray, side: str, bits: int, group: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    """Codes, scales and zeros [C, D] of a block whose marked numbers are the mean of their vector's others."""
    axis = 0 if side == "keys" else 1
    count = np.maximum((~marks).sum(axis=axis, keepdims=True), 1)
    mean = (np.where(marks, 0, x).sum(axis=axis, keepdims=True, dtype=np.float64) / count).astype(np.float32)
    plain = np.where(marks, mean, x)
    if side == "keys":
        return affine(plain, bits, group, dtype)
    return tuple(part.T for part in affine(plain.T, bits, group, dtype))


def unpacked(words: mx.array, bits: int, count: int) -> np.ndarray:
    """Codes [..., count] of a bit stream in words, least significant bit first."""
    raw = np.array(words).astype("<u4").view(np.uint8)
    bit = np.unpackbits(raw, axis=-1, bitorder="little")[..., : count * bits]
    return (bit.reshape(*bit.shape[:-1], count, bits) << np.arange(bits)).sum(axis=-1)


def held_parts(transform: Any, state: Any, side: str, head: int, dim: int) -> tuple[np.ndarray, ...]:
    """Codes, scales and zeros, each [T, D], of one head as they are held."""
    codec = transform.key if side == "keys" else transform.value
    codes, scales, zeros = (x[0, head] for x in getattr(state, side).rows[:3])
    group, coded = codec.group_size, state.coded.item()
    if side == "keys":
        wide = (np.repeat(numbers(x), group, axis=-1)[:, :coded].T for x in (scales, zeros))
        return unpacked(codes, codec.bits, coded).T, *wide
    wide = (np.repeat(numbers(x), group, axis=-1)[:coded, :dim] for x in (scales, zeros))
    return unpacked(codes, codec.bits, dim)[:coded], *wide


@dtypes
@pytest.mark.parametrize(
    "bits, group, block, share",
    [(2, 32, None, 0.01), (1, 32, 64, 0.03), (3, 16, 32, 0.05), (6, 32, 32, 0.2), (8, 64, None, 0.0)],
)
def test_every_part_of_a_block_is_the_oracles(
    bits: int, group: int, block: int | None, share: float, dtype: mx.Dtype
) -> None:
    transform = vq.gear(bits=bits, group_size=group, block=block, sparse_fraction=share, rank=3, residual_length=5)
    size = block or group
    keys, values = draw(2 * size + 7, 24, dtype=dtype), draw(2 * size + 7, 40, seed=1, dtype=dtype)
    state = feed(transform, keys, values)
    assert state.coded.item() == 2 * size
    for side, x, got in zip(("keys", "values"), (keys, values), read(transform, state), strict=True):
        dim, rows, entries = x.shape[3], getattr(state, side).rows, round(share * size * x.shape[3])
        left, right = numbers(rows[3])[:, :, : 2 * size], numbers(rows[4])[:, :, :2]
        assert left.shape[2:] == (2 * size, 3) and right.shape[2:] == (2, dim, 3)
        np.testing.assert_array_equal(got[:, :, 2 * size :], numbers(x)[:, :, 2 * size :])
        for head in range(HEADS):
            whole = held_parts(transform, state, side, head, dim)
            for i in range(2):
                span = slice(i * size, (i + 1) * size)
                exact = numbers(x)[0, head, span]
                marks = farthest(exact, entries, 0 if side == "keys" else 1)
                parts = [part[span] for part in whole]
                for mine, want in zip(parts, backbone(exact, marks, side, bits, group, dtype), strict=True):
                    np.testing.assert_array_equal(np.where(marks, 0, mine), np.where(marks, 0, want))
                base = parts[0] * parts[1] + parts[2]
                residual = np.where(marks, 0, exact - base)
                p, b = left[0, head, span], right[0, head, i]
                loose = 8 * ROUNDING[dtype] + 1e-6
                np.testing.assert_allclose(p.T @ p, np.eye(3), atol=loose)
                np.testing.assert_allclose(residual.T @ p, b, atol=loose * np.linalg.norm(residual))
                want = rounded(base + p @ b.T, dtype)
                if entries:
                    channel, token = np.divmod(np.array(rows[5])[0, head, i].astype(int), size)
                    assert sorted(zip(token, channel)) == sorted(zip(*np.nonzero(marks)))
                    np.testing.assert_array_equal(numbers(rows[6])[0, head, i], exact[token, channel])
                    want[marks] = exact[marks]
                near = 2 * ROUNDING[dtype] * np.abs(want) + 1e-5
                assert (np.abs(got[0, head, span] - want) <= near).all()
                np.testing.assert_array_equal(got[0, head, span][marks], exact[marks])


def errors(transform: Any, keys: mx.array, values: mx.array) -> np.ndarray:
    """Squared errors [2, H, N] of the blocks of keys and values."""
    state = feed(transform, keys, values)
    size, coded = transform.block, state.coded.item()
    found = []
    for x, got in zip((keys, values), read(transform, state), strict=True):
        square = np.square(got - numbers(x))[0, :, :coded].sum(axis=-1, dtype=np.float64)
        found.append(square.reshape(HEADS, -1, size).sum(axis=-1))
    return np.array(found)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_low_rank_part_never_adds_and_more_rank_and_more_exact_numbers_take_more(bits: int) -> None:
    keys, values = draw(32 * 50, 32), draw(32 * 50, 32, seed=1)

    def made(**options: Any) -> np.ndarray:
        return errors(vq.gear(bits=bits, residual_length=0, **options), keys, values)

    by_rank = [made(rank=rank) for rank in (0, 1, 2, 4, 8)]
    for with_rank in by_rank[1:]:
        assert (with_rank <= by_rank[0] * (1 + 1e-3)).all()
    by_share = [made(rank=2, sparse_fraction=share) for share in (0, 0.01, 0.03, 0.1)]
    for row in (by_rank, by_share):
        means = np.array([x.mean(axis=(1, 2)) for x in row])
        assert (means[1:] < means[:-1] * 0.99).all()


@pytest.mark.parametrize("rank, shape", [(1, (32, 64)), (4, (32, 64)), (6, (128, 96))])
def test_three_rounds_are_near_the_best_of_that_rank(rank: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((5, *shape)).astype(np.float32)
    left, right = (np.array(part) for part in low_rank(mx.array(x), start_basis(shape[1], rank)))
    tail = np.square(np.linalg.svd(x, compute_uv=False)[:, rank:]).sum(axis=1)
    missed = np.square(x - left @ right.swapaxes(1, 2)).sum(axis=(1, 2))
    assert (missed <= 1.1 * tail).all() and (missed >= tail * (1 - 1e-4)).all()
    thin = x[:, :, :rank] @ rng.standard_normal((5, rank, shape[1])).astype(np.float32)
    left, right = (numbers(part.astype(mx.float16)) for part in low_rank(mx.array(thin), start_basis(shape[1], rank)))
    missed = np.linalg.norm(thin - left @ right.swapaxes(1, 2), axis=(1, 2))
    assert (missed <= 1e-3 * np.linalg.norm(thin, axis=(1, 2))).all()


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_without_corrections_it_is_kivi_bit_for_bit(bits: int, dtype: mx.Dtype) -> None:
    keys, values = draw(80, 8, dtype=dtype), draw(80, 40, seed=1, dtype=dtype)
    one = feed(vq.gear(bits=bits, rank=0, sparse_fraction=0.0, residual_length=10), keys, values)
    two = feed(vq.kivi(bits=bits, group_size=32, residual_length=10), keys, values)
    for got, want in zip(arrays(one), arrays(two), strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)


def test_numbers_taken_out_first_help_more_than_those_taken_out_last() -> None:
    x = np.random.default_rng(0).standard_normal((1, HEADS, 32 * 8, 32))
    x = np.where(np.random.default_rng(1).random(x.shape) < 0.006, 20 * x, x).astype(np.float32)
    first = errors(vq.gear(rank=0, sparse_fraction=0.02, residual_length=0), *2 * [mx.array(x)])
    for i, side in enumerate(("keys", "values")):
        for head in range(HEADS):
            last = 0.0
            for block in x[0, head].reshape(8, 32, 32):
                codes, scale, zero = backbone(block, np.zeros(block.shape, bool), side, 2, 32, mx.float32)
                square = np.sort(np.square(block - codes * scale - zero).reshape(-1))
                last += square[: -round(0.02 * square.size)].sum()
            assert first[i, head].sum() < 0.7 * last
