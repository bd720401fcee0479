"""TurboQuant (MSE) against its formulas in numpy: codes bit by bit, distortion tables, norms, products, bytes."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, directions, distortion, draw, feed, feed_more, numbers
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.codec import Coder, bind
from vq_functional.core.tree import map_leaves

HEADS = 2
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
every_width = pytest.mark.parametrize("bits", range(1, 9))


def coder_of(bits: int, dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Coder:
    return bind(vq.turboquant_mse_codec(bits=bits, **options), dim, dtype)


# The oracle


def levels_by_hand(dim: int, bits: int) -> np.ndarray:
    """Lloyd-Max levels of a coordinate of a uniform unit vector, moved to cell means until they rest."""
    grid = np.linspace(-1, 1, 200_001)[1:-1]
    density = (1 - grid * grid) ** ((dim - 3) / 2)
    mass, moment = (np.concatenate([[0], np.cumsum(x)]) for x in (density, density * grid))
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass[1:] / mass[-1], grid)
    for _ in range(2000):
        edges = np.concatenate([[0], np.searchsorted(grid, (levels[1:] + levels[:-1]) / 2), [len(grid)]])
        levels = np.diff(moment[edges]) / np.diff(mass[edges])
    return levels


def hadamard(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(dim)


def stream_codes(words: list[int], bits: int, count: int) -> list[int]:
    """Codes of a bit stream, one bit at a time, least significant first."""
    codes = []
    for place in range(count):
        code = 0
        for bit in range(bits):
            at = place * bits + bit
            code |= (words[at // 32] >> at % 32 & 1) << bit
        codes.append(code)
    return codes


def indices_of(words: list[int], bits: int, dim: int) -> list[int]:
    """Level indices of one packed row.

    Head sizes that are multiples of 32: one or two bits as sign planes, widths
    that would cross words as slices of 4, 2 and 1 bits. Others: one stream.
    """
    if dim % 32:
        return stream_codes(words, bits, dim)
    width = dim // 32
    if bits == 1:
        return stream_codes(words, 1, dim)
    if bits == 2:
        positive, agrees = (stream_codes(words[i * width : (i + 1) * width], 1, dim) for i in range(2))
        return [{(1, 1): 3, (1, 0): 2, (0, 1): 1, (0, 0): 0}[pair] for pair in zip(positive, agrees)]
    if 32 % bits == 0:
        return stream_codes(words, bits, dim)
    total, shift, start = [0] * dim, 0, 0
    for part in (4, 2, 1):
        if bits & part:
            codes = stream_codes(words[start : start + part * width], part, dim)
            total = [code | new << shift for code, new in zip(total, codes)]
            shift, start = shift + part, start + part * width
    return total


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codes_are_the_cells_of_the_rotated_direction(bits: int, dim: int) -> None:
    coder, x = coder_of(bits, dim), draw(1, 2, 20, dim, seed=bits) * 3
    codes, lengths = coder.encode(x)
    levels = levels_by_hand(dim, bits)
    edges = (levels[1:] + levels[:-1]) / 2
    rotation = numbers(coder.rotation.apply(mx.eye(dim)))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(dim), atol=1e-5)
    rows = numbers(x).reshape(-1, dim)
    for row, words in zip(rows, codes.reshape(40, -1).tolist()):
        turned = row / np.linalg.norm(row) @ rotation
        want = [sum(edge < y for edge in edges) for y in turned]
        got = indices_of(words, bits, dim)
        near = np.abs(turned[:, None] - edges).min(axis=1) < 3e-4
        assert all(a == b or close for a, b, close in zip(got, want, near))
    assert lengths.dtype == mx.bfloat16
    np.testing.assert_allclose(numbers(lengths).ravel(), np.linalg.norm(rows, axis=-1), rtol=2.0**-8)


@pytest.mark.parametrize("dim", [64, 80, 96])
@every_width
def test_decode_is_length_times_the_levels_turned_back(bits: int, dim: int) -> None:
    coder, x = coder_of(bits, dim), draw(1, 2, 10, dim, seed=3)
    rows = coder.encode(x)
    levels = np.array(coder.stages[0].levels).astype(np.float64)
    rotation = numbers(coder.rotation.apply(mx.eye(dim)))
    indices = [indices_of(words, bits, dim) for words in rows[0].reshape(20, -1).tolist()]
    want = numbers(rows[1]).reshape(20, 1) * (levels[np.array(indices)] @ rotation.T)
    np.testing.assert_allclose(numbers(coder.decode(rows)).reshape(20, dim), want, atol=2e-5)


@pytest.mark.parametrize("dim", [64, 80, 96])
@every_width
def test_levels_at_codes_are_those_of_the_table(bits: int, dim: int) -> None:
    stage = coder_of(bits, dim).stages[0]
    index = mx.arange(40)[:, None] * 7 + mx.arange(dim) * 3
    index = (index % 2**bits).astype(mx.uint32)
    codes = stage.pack(index)
    assert [indices_of(words, bits, dim) for words in codes.tolist()] == index.tolist()
    largest = mx.abs(stage.levels).max().item()
    assert mx.abs(stage.decode(codes) - stage.levels[index]).max().item() <= 2.0**-21 * largest


@pytest.mark.parametrize("bits", [1, 2])
def test_planes_hold_signs_of_the_rotated_direction(bits: int) -> None:
    dim, x = 128, draw(1, 1, 30, 128, seed=4)
    coder = coder_of(bits, dim)
    codes, _ = coder.encode(x)
    turned = numbers(coder.rotation.apply(x / mx.linalg.norm(x, axis=-1, keepdims=True)))[0, 0]
    cut = 0.9816 / math.sqrt(dim)  # between the inner and the outer level of a normal coordinate
    for row, words in zip(turned, codes[0, 0].tolist()):
        signs = stream_codes(words[:4], 1, dim)
        assert signs == (row > 0).astype(int).tolist()
        if bits == 2:
            clear = np.abs(np.abs(row) - cut) > 0.01 * cut
            agrees = np.array(stream_codes(words[4:], 1, dim))
            assert (agrees == ((row > 0) == (np.abs(row) > cut)))[clear].all()


# Distortion


@pytest.mark.parametrize("bits, want", [(1, 0.361), (2, 0.116), (3, 0.0340), (4, 0.0093)])
def test_distortion_of_unit_vectors(bits: int, want: float) -> None:
    got = distortion(coder_of(bits, 128, unbiased=False), directions(2048, 128))
    assert got == pytest.approx(want, rel=0.03)
    assert got <= 2.7207 * 4.0**-bits


@pytest.mark.parametrize("dim", [64, 80, 96])
@every_width
def test_distortion_stays_under_the_bound_at_any_width(bits: int, dim: int) -> None:
    got = distortion(coder_of(bits, dim, unbiased=False), directions(512, dim))
    assert got <= 2.7207 * 4.0**-bits
    assert got >= 0.5 * 4.0**-bits


@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_distortion_does_not_depend_on_the_direction(bits: int, dim: int) -> None:
    coders = [coder_of(bits, dim, seed=seed, unbiased=False, rounds=2) for seed in range(200)]
    axes = mx.eye(dim)[None, None, ::8]
    one_hot = np.mean([distortion(coder, axes) for coder in coders])
    usual = distortion(coders[0], directions(2048, dim))
    assert one_hot == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize("bits, slope", [(1, 0.637), (2, 0.883), (3, 0.966), (4, 0.991)])
def test_products_shrink_by_the_distortion_or_not_at_all(bits: int, slope: float) -> None:
    x = directions(2048, 128)
    for unbiased, want in ((False, slope), (True, 1.0)):
        coder = coder_of(bits, 128, unbiased=unbiased)
        products = (coder.decode(coder.encode(x)) * x).sum(axis=-1)
        assert products.mean().item() == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("dim", [80, 96, 112, 160, 192, 320])
def test_head_sizes_that_are_no_power_of_two(dim: int) -> None:
    coder, x, y = coder_of(8, dim), draw(1, 2, 16, dim), draw(1, 2, 4, dim, seed=1)
    rows = coder.encode(x)
    error = mx.linalg.norm(coder.decode(rows) - x, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert error.max().item() < 0.02
    exact = y @ x.swapaxes(-1, -2)
    lengths = mx.linalg.norm(y, axis=-1)[..., None] * mx.linalg.norm(x, axis=-1)[..., None, :]
    assert (mx.abs(coder.dot(y, rows) - exact) / lengths).max().item() < 0.01


# Norms and scale


@dtypes
@pytest.mark.parametrize("factor", [2.0**-4, 2.0, 2.0**4])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_factor_changes_the_norm_alone(dim: int, factor: float, dtype: mx.Dtype) -> None:
    x = draw(1, 2, 50, dim, dtype=dtype)
    for bits in (1, 2, 3, 4):
        coder = coder_of(bits, dim, dtype)
        (codes, lengths), (same, scaled) = coder.encode(x), coder.encode(x * factor)
        assert mx.array_equal(codes, same) and mx.array_equal(lengths * factor, scaled)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_norms_are_kept(bits: int) -> None:
    coder, x = coder_of(bits, 128, unbiased=False), draw(1, 1, 5000, 128, seed=5)
    ratio = mx.linalg.norm(coder.decode(coder.encode(x)), axis=-1) / mx.linalg.norm(x, axis=-1)
    assert ratio.min().item() >= 0.75 and ratio.max().item() <= 1.1


@dtypes
@every_width
@pytest.mark.parametrize("dim", [64, 80])
def test_a_zero_key_is_zero(dim: int, bits: int, dtype: mx.Dtype) -> None:
    coder, x = coder_of(bits, dim, dtype), draw(1, 1, 3, dim, dtype=dtype)
    x[:, :, 1] = 0
    read = coder.decode(coder.encode(x))
    assert mx.isfinite(read).all() and (read[:, :, 1] == 0).all()
    scores = coder.dot(mx.ones((1, 1, 1, dim)), coder.encode(x))
    assert mx.isfinite(scores).all() and scores[..., 1].item() == 0


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_norms_past_half_precision_stay_finite(bits: int) -> None:
    x = (mx.sign(draw(1, 1, 8, 128)) * 20000).astype(mx.float16)
    coder = coder_of(bits, 128, mx.float16, unbiased=False)
    read = numbers(coder.decode(coder.encode(x)))
    assert np.isfinite(read).all()
    error = np.square(read - numbers(x)).sum() / np.square(numbers(x)).sum()
    assert error < 2.7207 * 4.0**-bits
    largest = mx.full((1, 1, 1, 128), 65504.0, mx.float16)
    assert mx.isfinite(coder.decode(coder.encode(largest))).all()


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e30])
def test_any_size_of_single_precision_keys(size: float) -> None:
    x = directions(256, 64) * size
    coder = coder_of(3, 64, unbiased=False)
    read = coder.decode(coder.encode(x)) / size
    assert mx.square(read - x / size).sum(axis=-1).mean().item() == pytest.approx(0.0335, rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_alone(bad: float) -> None:
    clean = draw(1, 2, 6, 64, dtype=mx.float16)
    x = mx.where((mx.arange(6)[:, None] == 2) & (mx.arange(64) == 5), bad, clean).astype(mx.float16)
    coder = coder_of(3, 64, mx.float16)
    others = mx.array([0, 1, 3, 4, 5])
    for one, two in zip(coder.encode(clean), coder.encode(x)):
        assert mx.array_equal(one[:, :, others], two[:, :, others])


# Seeds and calls


@pytest.mark.parametrize("dim", [64, 80])
def test_seeds(dim: int) -> None:
    x = draw(1, 2, 50, dim)
    same = [bind(vq.turboquant_mse_codec(bits=2, seed=7), dim, mx.float32).encode(x)[0] for _ in range(2)]
    other = coder_of(2, dim, seed=8).encode(x)[0]
    assert mx.array_equal(*same)
    indices = [[indices_of(words, 2, dim) for words in codes.reshape(100, -1).tolist()] for codes in (same[0], other)]
    assert np.not_equal(*map(np.array, indices)).mean() > 0.25


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_how_a_prompt_was_cut_leaves_no_trace(bits: int, dtype: mx.Dtype) -> None:
    transform = vq.turboquant_mse(bits=bits)
    keys, values = draw(1, HEADS, 40, 64, dtype=dtype), draw(1, HEADS, 40, 80, seed=1, dtype=dtype)
    one_shot = feed(transform, keys, values)
    assert_same(feed(transform, keys, values, [1] * 39), one_shot)
    assert_same(feed(transform, keys, values, [5, 1, 16]), one_shot)


@given(data=st.data(), bits=st.integers(1, 8), n=st.integers(1, 40))
def test_any_cut_leaves_no_trace(data: st.DataObject, bits: int, n: int) -> None:
    transform = vq.turboquant_mse(bits=bits)
    edges = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)) - {n})
    cuts = [b - a for a, b in itertools.pairwise([0, *edges])]
    keys, values = draw(1, HEADS, n, 96), draw(1, HEADS, n, 64, seed=1)
    assert_same(feed(transform, keys, values, cuts), feed(transform, keys, values))


def test_a_dense_rotation_moves_few_codes_by_one() -> None:
    coder, x = coder_of(4, 80), draw(1, 2, 100, 80)
    whole = coder.encode(x)[0].reshape(200, -1).tolist()
    single = mx.concatenate([coder.encode(x[:, :, i : i + 1])[0] for i in range(100)], axis=2).reshape(200, -1)
    one, two = (np.array([indices_of(words, 4, 80) for words in rows]) for rows in (whole, single.tolist()))
    assert (one != two).mean() <= 1e-3 and np.abs(one - two).max() <= 1


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_trim_and_the_same_rows_again_leave_no_trace(bits: int) -> None:
    transform = vq.turboquant_mse(bits=bits)
    keys, values = draw(1, HEADS, 30, 64), draw(1, HEADS, 30, 64, seed=1)
    whole = feed(transform, keys, values)
    for x in (1, 7, 30):
        short = transform.trim(whole, x)
        assert short.offset.item() == 30 - x
        assert_same(feed_more(transform, short, keys[:, :, 30 - x :], values[:, :, 30 - x :]), whole, 30)
    assert transform.trim(whole, 99).offset.item() == 0


def test_batch_rows_are_alone() -> None:
    transform = vq.turboquant_mse(bits=3)
    loud = mx.array([1.0, 1000.0])[:, None, None, None]
    keys, values = draw(2, HEADS, 20, 64) * loud, draw(2, HEADS, 20, 64, seed=1)
    both = feed(transform, keys, values)
    alone = feed(transform, keys[:1], values[:1])
    assert_same(map_leaves(lambda x: x[:1], both), alone)


# Products and attention


@dtypes
@pytest.mark.parametrize("dim", [64, 80, 96])
@every_width
def test_products_equal_those_of_the_decoded_rows(bits: int, dim: int, dtype: mx.Dtype) -> None:
    rows = coder_of(bits, dim, dtype).encode(draw(2, 2, 33, dim, dtype=dtype))
    coder = coder_of(bits, dim)
    plain = numbers(coder.decode(rows))
    queries, weights = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, 33, seed=2)
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    assert scores.dtype == sums.dtype == mx.float32
    np.testing.assert_allclose(numbers(scores), numbers(queries) @ plain.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ plain, rtol=1e-5, atol=1e-4)


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 4])
def test_attention_on_codes_equals_attention_over_what_is_read(n: int, bits: int, dtype: mx.Dtype) -> None:
    transform = vq.turboquant_mse(bits=bits)
    keys, values = draw(1, HEADS, 50, 64, dtype=dtype), draw(1, HEADS, 50, 80, seed=1, dtype=dtype)
    state = feed(transform, keys, values)
    held = transform.write(state, draw(1, HEADS, n, 64, seed=2, dtype=dtype), draw(1, HEADS, n, 80, dtype=dtype))
    queries = draw(1, 3 * HEADS, n, 64, seed=3, dtype=dtype)
    got = transform.attend(held, queries, 64**-0.5)
    assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
    k, v = (numbers(x)[0] for x in transform.read(held))
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    for head, i in itertools.product(range(3 * HEADS), range(n)):
        scores = k[head // 3, : 51 + i] @ numbers(queries)[0, head, i] / 8
        weights = np.exp(scores - scores.max())
        want = weights / weights.sum() @ v[head // 3, : 51 + i]
        np.testing.assert_allclose(numbers(got)[0, head, i], want, atol=tolerance)


@dtypes
def test_rows_come_back_in_the_dtype_they_came_in(dtype: mx.Dtype) -> None:
    transform = vq.turboquant_mse(bits=4)
    keys, values = draw(1, HEADS, 20, 64, dtype=dtype), draw(1, HEADS, 20, 64, seed=1, dtype=dtype)
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=64, value_dim=64, dtype=dtype, capacity=32)
    _, read_keys, read_values = transform.update(transform.init_state(spec), keys, values)
    assert read_keys.dtype == read_values.dtype == dtype
    assert (read_keys[:, :, 20:] == 0).all() and (read_values[:, :, 20:] == 0).all()
    for read, x, least in ((read_keys, keys, 0.99), (read_values, values, 0.9999)):
        a, b = numbers(read)[:, :, :20], numbers(x)
        cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        assert cosine.min() > least


# Bytes and options


@every_width
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_bytes_follow_the_formula(dim: int, bits: int) -> None:
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    key_bytes, value_bytes = 4 * math.ceil(dim * bits / 32) + 2, dim + 2
    state = vq.turboquant_mse(bits=bits).init_state(spec)
    assert vq.nbytes(state) == 2 * 3 * 40 * (key_bytes + value_bytes) + 2 * 4
    if (dim, bits) == (128, 2):
        assert (key_bytes, value_bytes) == (34, 130)


@pytest.mark.parametrize(
    "options", [{"bits": 0}, {"bits": 9}, {"bits": True}, {"bits": [2, 3]}, {"seed": -1}, {"seed": 1.5}], ids=str
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    for build in (vq.turboquant_mse, vq.turboquant_mse_codec):
        with pytest.raises(vq.QuantizerConfigError, match=f"turboquant_mse: `{next(iter(options))}`"):
            build(**options)


def test_a_head_size_of_one_is_refused_by_name() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="turboquant_mse: `head_dim`"):
        vq.turboquant_mse().init_state(vq.KVSpec(kv_heads=1, key_dim=1, value_dim=8))
