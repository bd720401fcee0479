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
                noise = loose * np.linalg.norm(residual) + 2.0**-24 * np.linalg.norm(exact)
                np.testing.assert_allclose(residual.T @ p, b, atol=noise)
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


# Options of the parts


@pytest.mark.parametrize("block, dim, rank", [(32, 64, 2), (32, 128, 2), (128, 64, 4), (128, 128, 6), (32, 8, 1)])
def test_rank_none_is_what_the_factors_may_take(block: int, dim: int, rank: int) -> None:
    assert vq.gear(block=block).key.rank_of(dim) == vq.gear(block=block).value.rank_of(dim) == rank
    state = vq.gear(block=block).init_state(vq.KVSpec(kv_heads=1, key_dim=dim, value_dim=dim, capacity=block))
    assert state.keys.rows[4].shape == (1, 1, 1, dim, rank)


def test_a_low_energy_threshold_takes_the_least_rank_with_that_share_of_noise() -> None:
    for threshold in (0.01, 0.03, 0.045):
        found = set()
        for seed in range(1, 4):
            noise = np.random.default_rng(seed).standard_normal((128, 128))
            share = np.cumsum(np.linalg.svd(noise, compute_uv=False))
            found.add(1 + int((share / share[-1] < threshold).sum()))
        assert {vq.gear(block=128, energy_threshold=threshold).key.rank_of(128)} == found


def test_of_numbers_equally_far_the_lower_channel_and_earlier_token_come_first() -> None:
    sign = mx.where((mx.arange(32)[:, None] + mx.arange(16)) % 2 == 0, 1.0, -1.0)
    x = mx.broadcast_to(sign, (1, HEADS, 32, 16)).astype(mx.float16)
    state = feed(vq.gear(sparse_fraction=40 / 512, residual_length=0), x, x)
    for side in (state.keys, state.values):
        assert np.array(side.rows[5]).tolist() == [[[list(range(40))]] * HEADS]


@pytest.mark.parametrize("dim, dtype", [(512, mx.uint16), (520, mx.uint32)])
def test_places_take_16_bits_where_that_is_enough(dim: int, dtype: mx.Dtype) -> None:
    x = mx.zeros((1, 1, 128, dim), mx.float16)
    x[0, 0, 127, dim - 1] = 9.0
    transform = vq.gear(block=128, sparse_fraction=2e-5, rank=0, residual_length=0)
    state = feed(transform, x, x)
    for side in (state.keys, state.values):
        assert side.rows[3].dtype == dtype and side.rows[3].tolist() == [[[[dim * 128 - 1]]]]


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_differences_are_exact_to_rounding_only(share: float) -> None:
    keys, values = draw(96, 24), draw(96, 40, seed=1)
    made = [vq.gear(sparse_fraction=share, sparse_store=store, residual_length=0) for store in ("value", "diff")]
    one, two = (feed(transform, keys, values) for transform in made)
    for x, got, want in zip((keys, values), read(made[1], two), read(made[0], one), strict=True):
        assert (np.abs(got - want) <= 1e-3 * np.abs(numbers(x)).max()).all()
        marks = got != want
        assert (np.abs(got - numbers(x))[marks] <= 4 * 2.0**-11 * np.abs(numbers(x)).max()).all()


def test_whole_vectors_of_outliers_leave_no_nan() -> None:
    x = mx.where(mx.arange(16) % 4 == 0, 1000.0 * mx.where(mx.arange(32)[:, None] % 2 == 0, 1, -1), draw(32, 16))
    state = feed(vq.gear(sparse_fraction=0.25, residual_length=0), x.astype(mx.float16), x.astype(mx.float16))
    keys, values = read(vq.gear(sparse_fraction=0.25, residual_length=0), state)
    assert np.isfinite(keys).all() and np.isfinite(values).all()
    np.testing.assert_array_equal(keys[..., ::4], numbers(x.astype(mx.float16))[..., ::4])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_repeats_the_next_of_its_channel(bad: float) -> None:
    transform, clean = vq.gear(residual_length=0), draw(64, 32)
    clean[:, :, 3, 5], clean[:, :, 63, 7] = clean[:, :, 4, 5], clean[:, :, 62, 7]
    spoilt = mx.array(clean)
    spoilt[:, :, 3, 5] = spoilt[:, :, 63, 7] = bad
    for got, want in zip(arrays(feed(transform, spoilt, spoilt))[:-2], arrays(feed(transform, clean, clean))):
        assert mx.array_equal(got, want)


# States


@pytest.mark.parametrize("cuts", [[1] * 100, [5] * 20, [33, 1, 66], [31, 2]])
def test_the_state_does_not_depend_on_how_a_prompt_came(cuts: list[int]) -> None:
    transform = vq.gear(residual_length=10, n_sink=3)
    keys, values = draw(100, 8), draw(100, 24, seed=1)
    one, two = feed(transform, keys, values, cuts), feed(transform, keys, values)
    assert one.coded.item() == 64
    for got, want in zip(read(transform, one), read(transform, two), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(read(transform, one)[0][:, :, :3], numbers(keys)[:, :, :3])
    for got, want in zip(one.keys.rows[3:] + one.values.rows[3:], two.keys.rows[3:] + two.values.rows[3:]):
        half = got.shape[2] // 2  # of the four blocks that there is room for
        assert mx.array_equal(got[:, :, :half], want[:, :, :half])


def test_heads_and_batch_rows_are_alike() -> None:
    transform, keys, values = vq.gear(residual_length=0), draw(64, 8, batch=2), draw(64, 24, seed=1, batch=2)
    one = feed(transform, keys, values)
    two = feed(transform, keys[::-1, ::-1], values[::-1, ::-1])
    for got, want in zip(arrays(one), arrays(two), strict=True):
        assert mx.array_equal(got, want[::-1, ::-1])


@pytest.mark.parametrize("options", [{"quantize_values": False}, {"bits_k": 4, "bits_v": 3}, {}], ids=str)
def test_frontier_and_sides(options: dict[str, Any]) -> None:
    transform, keys, values = vq.gear(**options), draw(150, 8), draw(150, 24, seed=1)
    state = feed(transform, keys, values)
    assert state.coded.item() == (150 - 32) // 32 * 32
    got = read(transform, state)
    assert np.array_equal(got[1], numbers(values)) == ("quantize_values" in options)
    assert transform.key.bits == options.get("bits_k", 2)
    for x in (5, 54, 80, 149):
        for cut, want in zip(read(transform, transform.trim(state, x)), got, strict=True):
            np.testing.assert_array_equal(cut, want[:, :, : 150 - x])


@pytest.mark.parametrize(
    "bits, group, block, rank, share", [(2, 32, 32, 2, 0.01), (4, 64, 128, 5, 0.05), (3, 32, 64, 0, 0.0)]
)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96)])
def test_bytes_follow_the_formula(
    dims: tuple[int, int], bits: int, group: int, block: int, rank: int, share: float
) -> None:
    transform = vq.gear(bits=bits, group_size=group, block=block, rank=rank, sparse_fraction=share, residual_length=40)
    spec = vq.KVSpec(batch=2, kv_heads=HEADS, key_dim=dims[0], value_dim=dims[1], capacity=512)
    token = 8 / block if rank or share else 0
    for dim, groups in ((dims[0], dims[0] / group), (dims[1], -(-dims[1] // group))):
        token += groups * group * bits / 8 if dim == dims[1] else dim * bits / 8
        token += 4 * groups + 2 * rank + (2 * dim * rank + 4 * round(share * block * dim)) / block
    exact = (40 + block) * 2 * sum(dims)
    assert vq.nbytes(transform.init_state(spec)) == 2 * HEADS * (512 * token + exact) + 2 * 2 * 4


def test_recovery_ratio_is_the_share_of_the_error_that_is_gone() -> None:
    transform, keys, values = vq.gear(residual_length=3), draw(80, 32), draw(80, 32, seed=1)
    state = feed(transform, keys, values)
    left = np.square(read(transform, state)[0] - numbers(keys))[:, :, :64].sum()
    plain = vq.gear(rank=0, sparse_fraction=0, residual_length=3)
    base = np.square(read(plain, feed(plain, keys, values))[0] - numbers(keys))[:, :, :64].sum()
    assert recovery_ratio(transform, state) == pytest.approx(1 - left / base, abs=2e-3)
    assert recovery_ratio(transform, feed(transform, keys[:, :, :9], values[:, :, :9])) == 0.0


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"sparse_store": "diff"}, {"rank": 0}, {"sparse_fraction": 0}, {"n_sink": 4}], ids=str
)
@pytest.mark.parametrize("n", [1, 5, 40])
def test_attention_on_codes_equals_attention_over_what_is_read(
    n: int, options: dict[str, Any], dtype: mx.Dtype
) -> None:
    transform, total = vq.gear(residual_length=16, **options), 150 + n
    keys, values = draw(total, 64, dtype=dtype) / 4, draw(total, 80, seed=1, dtype=dtype) / 4
    state = feed(transform, keys[:, :, :150], values[:, :, :150], capacity=total)
    held = transform.write(state, keys[:, :, 150:], values[:, :, 150:])
    queries = mx.random.normal((1, 3 * HEADS, n, 64), key=mx.random.key(5)).astype(dtype)
    got = numbers(transform.attend(held, queries, 64**-0.5))
    both = transform.read(held)
    position = np.array(transform.positions(held))[0, 0]
    seen = (position >= 0)[None] & (position[None] <= 150 + np.arange(n)[:, None])
    k, v = (np.repeat(numbers(x), 3, axis=1).astype(np.float64) for x in both)
    scores = np.where(seen, numbers(queries) @ k.swapaxes(2, 3) / 8, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ np.where(seen.any(axis=0)[:, None], v, 0)
    np.testing.assert_allclose(got, want, atol={mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}[dtype])


# Errors


@pytest.mark.parametrize(
    "field, wrong",
    [(field, value) for field, values in {
        "bits": (0, 7, 9, True, 2.0), "bits_k": (7, 0), "bits_v": (16, "2"), "rank": (-1, 1.5, True),
        "energy_threshold": (0, 1.01, math.nan, "1"), "sparse_fraction": (-0.01, 0.5, math.nan, None),
        "group_size": (0, 32.0), "quantize_values": (1, None), "block": (0, 33, 16), "residual_length": (-1, 2.5),
        "n_sink": (-1, None), "sparse_store": ("values", None),
    }.items() for value in values],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^gear: `{field}` must be .*; got "):
        vq.gear(**{field: wrong})


def test_bits_of_values_that_stay_as_they_came_are_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="gear: `bits_v` can't be set without `quantize_values`; got 8"):
        vq.gear(bits_v=8, quantize_values=False)


def test_a_rank_above_the_head_size_and_a_policy_are_refused() -> None:
    spec = vq.KVSpec(kv_heads=1, key_dim=64, value_dim=8, capacity=32)
    with pytest.raises(vq.QuantizerConfigError, match="gear: `rank` must be at most the head size 8; got 9"):
        vq.gear(rank=9).init_state(spec)
    assert vq.gear(rank=8).init_state(spec).values.rows[4].shape == (1, 1, 1, 8, 8)
    with pytest.raises(vq.QuantizerConfigError, match="gear"):
        vq.chain(vq.h2o_policy(budget=40), vq.gear())
