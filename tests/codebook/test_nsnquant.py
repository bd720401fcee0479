"""NSNQuant against numpy: lengths, means, indices and signs of every row, errors, chunks, trims, bytes, attention."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.codebook.normal_codes import normal_codebook
from vq_functional.codebook.nsnquant import NSNQuantOptions
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves

HEADS, DIM = 2, 32
UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-22}
few = settings(max_examples=10, deadline=None)
small = functools.partial(vq.nsnquant, residual_length=16)


def draw(n: int, seed: int = 0, dim: int = DIM, dtype: mx.Dtype = mx.float16, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, HEADS, n, dim), key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def begin(transform: Any, keys: mx.array, values: mx.array) -> Any:
    dims: dict[str, Any] = {"key_dim": keys.shape[3], "value_dim": values.shape[3], "dtype": keys.dtype}
    return transform.init_state(vq.KVSpec(batch=keys.shape[0], kv_heads=HEADS, capacity=keys.shape[2], **dims))


def feed(transform: Any, keys: mx.array, values: mx.array, cuts: Sequence[int] = ()) -> Any:
    state, start = begin(transform, keys, values), 0
    for count in cuts or [keys.shape[2]]:
        span = slice(start, start + count)
        state, *_ = transform.update(state, keys[:, :, span], values[:, :, span])
        start += count
    return state


def rows_in_order(transform: Any, state: Any) -> list[np.ndarray]:
    """Keys and values [B, H, n, D] of all tokens held, in token order."""
    position = np.array(transform.positions(state))[0, 0]
    columns = [np.flatnonzero(position == i)[0] for i in range(state.offset[0].item())]
    return [numbers(x)[:, :, columns] for x in transform.read(state)]


def assert_same(one: Any, two: Any) -> None:
    for got, want in zip(flatten(one)[0], flatten(two)[0], strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)


def squared_error(got: np.ndarray, want: np.ndarray) -> float:
    return np.square(got - want).sum() / np.square(want).sum()


# The oracle


def hadamard(dim: int) -> np.ndarray:
    """Orthonormal, of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(dim)


def size(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1, keepdims=True) / math.sqrt(x.shape[-1])


def held(arrays: Sequence[mx.array], count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` numbers a chunk [H, chunks, count] as held, and half a step of each: zero where they are not in codes."""
    if len(arrays) == 1:
        x = numbers(arrays[0])[0].reshape(HEADS, -1, count)
        return x, np.zeros_like(x)
    words, scales, zeros = (np.array(arrays[0])[0], *(numbers(x)[0] for x in arrays[1:]))
    codes = (words[..., None] >> np.arange(0, 32, 4) & 15).reshape(HEADS, words.shape[1], -1)[..., :count]
    group = 64 if count % 64 == 0 else count
    assert scales.shape[-1] == zeros.shape[-1] == count // group
    scales, zeros = scales.repeat(group, -1), zeros.repeat(group, -1)
    return codes * scales + zeros, scales / 2


def assert_rounded(got: np.ndarray, want: np.ndarray, half_step: np.ndarray, unit: float) -> None:
    rounding = unit * np.where(half_step > 0, 2 * np.abs(want).max(), 1.1 * np.abs(want))  # a scale and a zero, or one
    assert (np.abs(got - want) <= half_step * (1 + 1e-3) + rounding + 1e-6).all()


def entries_of(o: NSNQuantOptions, bits: int) -> np.ndarray:
    return numbers(normal_codebook(o.subvector_dim, o.codebook_size, o.seed, bits == 2).entries)


def decoded(index: np.ndarray, signs: np.ndarray | None, entries: np.ndarray, dim: int) -> np.ndarray:
    y = entries[index].reshape(*index.shape[:-1], dim)
    return y if signs is None else y * (2.0 * signs - 1)


def assert_side(rows: Any, x: np.ndarray, read: np.ndarray, o: NSNQuantOptions, bits: int, unit: float) -> None:
    """All that is held of whole chunks `x` [H, n, D], step by step from the numbers as held, and how it is read."""
    dim, r, chunks = x.shape[-1], o.residual_length, x.shape[1] // o.residual_length
    step = 3 if o.double_quantization else 1
    codes, rest = [np.array(a)[0, :, : chunks * r] for a in rows[:bits]], rows[bits:]
    assert len(rest) == 3 * step and all(a.dtype == np.uint8 for a in codes)
    (s1, step1), (s2, step2), (mean, step_o) = (
        tuple(a[:, :chunks] for a in held(rest[i * step : (i + 1) * step], count))
        for i, count in enumerate((r, r, dim))
    )
    x = x.reshape(HEADS, chunks, r, dim)
    assert_rounded(s1, size(x)[..., 0], step1, unit)
    x = x / s1[..., None]
    assert_rounded(mean, x.mean(axis=2), step_o, unit)
    x = x - mean[:, :, None]
    z = x / size(x)
    np.testing.assert_allclose(np.linalg.norm(z, axis=-1), math.sqrt(dim), rtol=1e-3)
    y = (z @ hadamard(dim)).reshape(HEADS, chunks * r, dim)
    signs = None
    if bits == 2:
        signs = np.unpackbits(codes[1], axis=-1, bitorder="little")[..., :dim]
        assert (signs == (y >= 0))[np.abs(y) > 1e-5].all()
    entries = entries_of(o, bits)
    target = (np.abs(y) if bits == 2 else y).reshape(HEADS, chunks * r, -1, o.subvector_dim)
    distance = np.square(target[..., None, :] - entries).sum(axis=-1)
    chosen = np.take_along_axis(distance, codes[0][..., None].astype(int), axis=-1)[..., 0]
    assert codes[0].shape == target.shape[:-1] and (chosen <= distance.min(axis=-1) + 1e-4).all()
    c = decoded(codes[0], signs, entries, dim).reshape(z.shape)
    want = size(x) / size(c) if o.rescale else size(x)
    assert_rounded(s2, want[..., 0], step2, unit)
    again = s1[..., None] * (s2[..., None] * (c @ hadamard(dim)) + mean[:, :, None])
    np.testing.assert_allclose(read.reshape(again.shape), again, rtol=1.1 * unit, atol=2e-5 * np.abs(again).max())


def check(n: int, key_dim: int = DIM, value_dim: int = DIM, dtype: mx.Dtype = mx.float16, **options: Any) -> None:
    o = NSNQuantOptions(**{"residual_length": 16, **options})
    transform = vq.nsnquant(**attrs.asdict(o))
    keys, values = 4 * draw(n, 1, key_dim, dtype) + draw(1, 2, key_dim, dtype) * 9, draw(n, 3, value_dim, dtype)
    state, coded = feed(transform, keys, values), n // o.residual_length * o.residual_length
    assert state.coded.item() == coded
    sides = zip((state.keys, state.values), (keys, values), rows_in_order(transform, state), (o.bits_k, o.bits_v))
    for side, x, read, bits in sides:
        assert_side(side.rows, numbers(x)[0, :, :coded], read[0, :, :coded], o, bits or o.bits, UNIT[dtype])
        assert np.array_equal(read[:, :, coded:], numbers(x)[:, :, coded:])


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("bits", [1, 2])
def test_every_number_held_equals_the_oracle(bits: int, double: bool, rescale: bool) -> None:
    check(40, 64, 128, bits=bits, double_quantization=double, rescale=rescale)


@pytest.mark.parametrize(
    "options",
    [
        {"bits_k": 2, "bits_v": 1},
        {"bits_k": 1},
        {"bits_v": 1},
        {"subvector_dim": 4, "codebook_size": 16},
        {"subvector_dim": 16, "codebook_size": 32, "bits_v": 1},
        {"subvector_dim": 2, "codebook_size": 2},
        {"seed": 7, "codebook_size": 100},
        {"residual_length": 5},
        {"residual_length": 64, "double_quantization": True},
        {"dtype": mx.bfloat16},
        {"dtype": mx.float32},
    ],
)
def test_every_number_held_equals_the_oracle_with_other_options(options: dict[str, Any]) -> None:
    check(2 * options.get("residual_length", 16) + 3, **options)


@pytest.mark.parametrize("magnitudes", [False, True])
def test_entries_are_the_means_of_their_cells(magnitudes: bool) -> None:
    entries = numbers(normal_codebook(2, 8, 1234, magnitudes).entries)
    samples = np.random.default_rng(5).standard_normal((60_000, 2))
    samples = np.abs(samples) if magnitudes else samples
    cell = np.square(samples[:, None] - entries).sum(axis=-1).argmin(axis=-1)
    for i in range(8):
        np.testing.assert_allclose(samples[cell == i].mean(axis=0), entries[i], atol=0.05)
    assert not np.array_equal(entries, numbers(normal_codebook(2, 8, 1235, magnitudes).entries))


@pytest.mark.parametrize(
    "bits, rescale, cosine, error",
    [(1, False, 0.815, 0.32), (1, True, 0.815, 0.35), (2, False, 0.945, 0.096), (2, True, 0.945, 0.098)],
)
def test_error_of_gaussian_rows(bits: int, rescale: bool, cosine: float, error: float) -> None:
    x = draw(256, 1, 128, mx.float32)
    transform = vq.nsnquant(bits=bits, rescale=rescale, residual_length=128)
    for got in rows_in_order(transform, feed(transform, x, x)):
        want = numbers(x)
        norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
        assert ((got * want).sum(axis=-1) / norms).mean() > cosine
        assert squared_error(got, want) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", [80, 96, 112, 256])
def test_any_head_size(dim: int, bits: int) -> None:
    keys, values = draw(70, 0, dim), draw(70, 1, 40)
    transform = vq.nsnquant(bits=bits)
    for got, x in zip(rows_in_order(transform, feed(transform, keys, values)), (keys, values)):
        assert squared_error(got[:, :, :64], numbers(x)[:, :, :64]) < (0.42 if bits == 1 else 0.13)


@pytest.mark.parametrize("bits", [1, 2])
def test_rows_are_read_with_the_length_that_they_had(bits: int) -> None:
    x = draw(32, dtype=mx.float32)
    transform = small(bits=bits)
    state = feed(transform, x, x)
    mean = (numbers(state.keys.rows[-1]).repeat(16, axis=2) * numbers(state.keys.rows[bits])[..., None])[:, :, :32]
    got, want = (np.linalg.norm(a - mean, axis=-1) for a in (rows_in_order(transform, state)[0], numbers(x)))
    np.testing.assert_allclose(got, want, rtol=1e-4)


# Invariants


@pytest.mark.parametrize("bits", [1, 2])
def test_a_common_offset_costs_nothing(bits: int) -> None:
    x, offset = draw(64, 0, 64, mx.float32), 20 * draw(1, 1, 64, mx.float32)
    transform = vq.nsnquant(bits=bits)
    plain, shifted = (rows_in_order(transform, feed(transform, a, a))[0] for a in (x, x + offset))
    error = squared_error(plain, numbers(x))
    assert np.square(shifted - numbers(x + offset)).sum() / np.square(numbers(x)).sum() < 1.2 * error


@pytest.mark.parametrize("factor", [0.25, 8.0])
def test_scaling_a_chunk_scales_lengths_only(factor: float) -> None:
    x = draw(32)
    rows, scaled = (feed(small(), a, a).keys.rows for a in (x, x * factor))
    for i, (one, two) in enumerate(zip(rows, scaled, strict=True)):
        assert mx.array_equal(two, one * factor if i == 2 else one)


def test_a_chunk_does_not_depend_on_the_others() -> None:
    x = draw(64)
    other = mx.concatenate([x[:, :, :16], 5 * draw(16, 9), x[:, :, 32:]], axis=2)
    state, changed = (feed(small(), a, a).keys.rows for a in (x, other))
    for one, two in zip(state, changed, strict=True):
        chunks = [mx.array_equal(a, b) for a, b in zip(one.split(4, axis=2), two.split(4, axis=2))]
        assert chunks == [True, False, True, True]


@few
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5), double=st.booleans(), bits=st.sampled_from([1, 2]))
def test_how_a_prompt_was_cut_leaves_no_trace(cuts: list[int], double: bool, bits: int) -> None:
    keys, values = draw(sum(cuts)), draw(sum(cuts), 1)
    transform = small(bits=bits, double_quantization=double)
    pieces, whole = feed(transform, keys, values, cuts), feed(transform, keys, values)
    assert pieces.coded.item() == sum(cuts) // 16 * 16
    assert_same((pieces.keys, pieces.values), (whole.keys, whole.values))
    for got, want in zip(rows_in_order(transform, pieces), rows_in_order(transform, whole)):
        assert np.array_equal(got, want)


def test_token_by_token_equals_one_shot() -> None:
    x = draw(50)
    single, whole = feed(small(), x, x, [1] * 50), feed(small(), x, x)
    assert_same((single.keys, single.values, single.coded), (whole.keys, whole.values, whole.coded))


def test_batch_rows_stand_alone() -> None:
    x = draw(40, batch=3)
    state = feed(small(), x, x)
    for row in range(3):
        alone = feed(small(), x[row : row + 1], x[row : row + 1])
        assert_same(map_leaves(lambda a, row=row: a[row : row + 1], state), alone)


def test_left_padding_leaves_no_trace() -> None:
    x = draw(40, batch=2)
    x[1, :, :5] = 30
    spec = vq.KVSpec(batch=2, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, capacity=40)
    state, *_ = small().update(small().init_state(spec, mx.array([0, 5])), x, x)
    keys, _ = small().read(state)
    alone = feed(small(), x[1:, :, 5:], x[1:, :, 5:])
    assert alone.coded.item() == state.coded[1].item() == 32
    assert np.array_equal(numbers(keys)[1:, :, :32], rows_in_order(small(), alone)[0][:, :, :32])


# Rows out of the common


def test_queries_leave_no_trace() -> None:
    x = draw(40)
    state, *_ = small().update(begin(small(), x, x), x, x, mx.concatenate([x, 3 * x], axis=1))
    assert_same(state, feed(small(), x, x))


@pytest.mark.parametrize("double", [True, False])
def test_zero_rows_read_as_zeros(double: bool) -> None:
    x = draw(32)
    x[:, :, 5:7] = 0
    transform = small(double_quantization=double)
    zeros = mx.zeros_like(x)
    assert not rows_in_order(transform, feed(transform, zeros, zeros))[0].any()
    got = rows_in_order(transform, feed(transform, x, zeros))[0]
    assert not got[:, :, 5:7].any() and squared_error(got, numbers(x)) < 0.2


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("scale", [1.0, -300.0, 1e-2])
def test_equal_rows_come_back(scale: float, dtype: mx.Dtype) -> None:
    x = mx.broadcast_to((scale * draw(1)).astype(dtype), (1, HEADS, 16, DIM))
    for rows in rows_in_order(small(), feed(small(), x, x)):
        assert (np.abs(rows - numbers(x)) <= 4 * UNIT[dtype] * np.abs(numbers(x)).max()).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_counts_as_zero(bad: float) -> None:
    spot = (mx.arange(32)[:, None] == 3) & (mx.arange(DIM) == 5)
    x, clean = (mx.where(spot, value, draw(32)).astype(mx.float16) for value in (bad, 0))
    state, want = feed(small(), x, x), feed(small(), clean, clean)
    assert_same((state.keys, state.values), (want.keys, want.values))


@pytest.mark.parametrize("size_of_rows", [3e4, 1e-3])
def test_large_and_small_rows(size_of_rows: float) -> None:
    x = (mx.clip(draw(32, dtype=mx.float32), -2, 2) * size_of_rows).astype(mx.float16)
    got = rows_in_order(small(), feed(small(), x, x))[0]
    assert squared_error(got, numbers(x)) < 0.13


# Attention, trim, bytes, options


@pytest.mark.parametrize("bits, asked", [(1, 1), (1, 9), (2, 1), (2, 9)])
@pytest.mark.parametrize("options", [{}, {"double_quantization": True}, {"subvector_dim": 4}, {"rescale": False}])
@pytest.mark.parametrize("dims", [(32, 64), (80, 32)])
def test_attention_on_codes_is_attention_over_rows(bits: int, asked: int, options: Any, dims: tuple[int, int]) -> None:
    keys, values = draw(70, 0, dims[0], mx.float32), draw(70, 1, dims[1], mx.float32)
    transform = small(bits=bits, **options)
    state = feed(transform, keys, values)
    queries = mx.random.normal((1, 4, asked, dims[0]), key=mx.random.key(2))
    got = numbers(transform.attend(state, queries, 0.2))
    held_keys, held_values = rows_in_order(transform, state)
    for h, i in itertools.product(range(4), range(asked)):
        seen = 70 - asked + i + 1
        weights = np.exp(0.2 * held_keys[0, h // 2, :seen] @ numbers(queries)[0, h, i])
        np.testing.assert_allclose(got[0, h, i], weights / weights.sum() @ held_values[0, h // 2, :seen], atol=2e-5)


def test_a_call_sees_its_own_rows_and_exact_ones_exactly() -> None:
    x, end = draw(60), 0
    state = begin(small(), x, x)
    for count in (10, 15, 1, 34):
        coded, mask = state.coded.item(), np.array(small().make_mask(state, count))[0, 0, -1]
        state, *out = small().update(state, *[x[:, :, end : end + count]] * 2)
        end += count
        for got in out:
            assert np.array_equal(numbers(got)[:, :, mask][:, :, coded:], numbers(x)[:, :, coded:end])


@pytest.mark.parametrize("drop", [1, 6, 7, 22, 23, 69, 70])
def test_rows_that_stay_after_a_trim_read_as_before(drop: int) -> None:
    x, more = draw(70), draw(20, 5)
    state = feed(small(), x, x)
    trimmed = small().trim(state, drop)
    kept = 70 - drop
    assert trimmed.offset.item() == kept and trimmed.coded.item() == kept // 16 * 16
    for got, want in zip(rows_in_order(small(), trimmed), rows_in_order(small(), state)):
        assert np.array_equal(got, want[:, :, :kept])
    again, *_ = small().update(trimmed, more, more)
    whole = np.concatenate([numbers(x)[:, :, :kept], numbers(more)], axis=2)
    assert squared_error(rows_in_order(small(), again)[0], whole) < 0.2


@pytest.mark.parametrize("dim, r", [(128, 64), (64, 128), (96, 32)])
@pytest.mark.parametrize("bits_k, bits_v, sub", [(2, 2, 8), (1, 1, 8), (2, 1, 4)])
@pytest.mark.parametrize("double", [True, False])
def test_bytes(dim: int, r: int, bits_k: int, bits_v: int, sub: int, double: bool) -> None:
    def groups(count: int) -> int:
        return count // 64 if count % 64 == 0 else 1

    def a_chunk(bits: int) -> int:
        codes = r * (dim // sub + (dim // 8 if bits == 2 else 0))
        if double:
            return codes + 2 * (r // 2 + 4 * groups(r)) + dim // 2 + 4 * groups(dim)
        return codes + 4 * r + 2 * dim

    transform = vq.nsnquant(
        bits_k=bits_k, bits_v=bits_v, subvector_dim=sub, residual_length=r, double_quantization=double
    )
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=dim, capacity=3 * r)
    want = HEADS * (3 * (a_chunk(bits_k) + a_chunk(bits_v)) + r * 4 * dim) + 8
    assert vq.nbytes(transform.init_state(spec)) == want


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 3}, r"`bits` must be one of \(1, 2\); got 3"),
        ({"bits": True}, r"`bits` must be one of \(1, 2\); got True"),
        ({"bits_k": 0}, r"`bits_k` must be one of \(None, 1, 2\); got 0"),
        ({"bits_v": 4}, r"`bits_v` must be one of \(None, 1, 2\); got 4"),
        ({"residual_length": 1}, "`residual_length` must be an integer >= 2; got 1"),
        ({"codebook_size": 257}, r"`codebook_size` must be an integer in \[2, 256\]; got 257"),
        ({"codebook_size": 1}, r"`codebook_size` must be an integer in \[2, 256\]; got 1"),
        ({"subvector_dim": 0}, "`subvector_dim` must be an integer >= 1; got 0"),
        ({"seed": 0.5}, r"`seed` must be an integer in \[0, 4294967295\]; got 0.5"),
        ({"max_ctx": 0}, "`max_ctx` must be an integer >= 1; got 0"),
        ({"double_quantization": 1}, r"`double_quantization` must be one of \(True, False\); got 1"),
        ({"rescale": None}, r"`rescale` must be one of \(True, False\); got None"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^nsnquant: {message}$"):
        vq.nsnquant(**options)


def test_rows_past_max_ctx_are_none() -> None:
    method = vq.nsnquant(max_ctx=40, residual_length=16)
    state = feed(method, draw(40), draw(40, 1))
    _, keys, values = method.update(state, draw(1, 2), draw(1, 3))
    assert mx.isnan(keys).all() and mx.isnan(values).all()
    with pytest.raises(vq.QuantizerConfigError, match="nsnquant: `keys` must stay within `max_ctx` = 40; got 41"):
        method.room(Fill(40, 40, 32), 1)


def test_a_head_size_that_the_sub_vectors_do_not_divide_is_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match=r"^nsnquant: `head_dim` must be a multiple of 8; got 36$"):
        begin(vq.nsnquant(), draw(1, 0, 36), draw(1))
