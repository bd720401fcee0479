"""QJL: unbiased scores, their variance and correlation, signs bit by bit, linearity, bytes."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import directions, draw, feed, feed_more, numbers

import vq_functional as vq
from vq_functional.core.codec import Coder, bind
from vq_functional.core.tree import flatten

HEADS = 2
SEEDS = 500
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
sketches = pytest.mark.parametrize("sketch", ["gaussian", "orthogonal"])


def coder_of(dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Coder:
    return bind(vq.qjl_codec(**options), dim, dtype)


def bits_of(plane: mx.array, count: int) -> np.ndarray:
    """Bits [rows, count] of packed words, least significant first."""
    rows = plane.reshape(-1, plane.shape[-1]).tolist()
    return np.array([[row[i // 32] >> i % 32 & 1 for i in range(count)] for row in rows])


def constant(dim: int, sketch: str) -> float:
    """What makes the estimate unbiased: sqrt(pi/2), or sqrt(pi) Gamma((D+1)/2) / (sqrt(D) Gamma(D/2))."""
    if sketch == "gaussian":
        return math.sqrt(math.pi / 2)
    return math.sqrt(math.pi) * math.gamma((dim + 1) / 2) / (math.sqrt(dim) * math.gamma(dim / 2))


def pair(cosine: float, dim: int) -> tuple[mx.array, mx.array]:
    """Query of length 3 and key of length 2 at a given cosine."""
    one, two = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, 2)))[0].T
    query, key = 3 * one, 2 * (cosine * one + math.sqrt(1 - cosine**2) * two)
    return (mx.array(x.astype(np.float32))[None, None, None] for x in (query, key))


# The estimate


@sketches
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9, -0.9])
@pytest.mark.parametrize("dim, size", [(32, 32), (32, 64), (64, 32)])
def test_the_estimate_is_unbiased_over_seeds(dim: int, size: int, cosine: float, sketch: str) -> None:
    query, key = pair(cosine, dim)
    estimates = []
    for seed in range(SEEDS):
        coder = coder_of(dim, jl_dim=size, seed=seed, sketch=sketch)
        estimates.append(coder.dot(query, coder.encode(key)).item())
    product = 6 * cosine
    variance = (math.pi / 2 * 36 - product**2) / size
    # The length of the key takes bfloat16.
    assert np.mean(estimates) == pytest.approx(product, abs=4 * math.sqrt(variance / SEEDS) + 2.0**-8 * abs(product))
    assert np.var(estimates) < 1.3 * variance


@pytest.mark.parametrize("sketch, size", [("gaussian", 32), ("gaussian", 64), ("orthogonal", 32)])
def test_variance_over_seeds(sketch: str, size: int) -> None:
    dim = 32
    queries, keys = directions(16, dim), directions(16, dim, seed=1)
    products = numbers(queries @ keys.swapaxes(-1, -2))[0, 0]
    estimates = []
    for seed in range(SEEDS):
        coder = coder_of(dim, jl_dim=size, seed=seed, sketch=sketch)
        estimates.append(numbers(coder.dot(queries, coder.encode(keys)))[0, 0])
    got = np.var(estimates, axis=0)
    if sketch == "gaussian":
        want = (math.pi / 2 - products**2) / size
    else:
        # Of one whole orthogonal block, averaged over pairs.
        want = np.full(got.shape, (math.pi / 2 - 1) / size)
    assert got.mean() == pytest.approx(want.mean(), rel=0.1)


@pytest.mark.parametrize(
    "sketch, size, want, margin",
    [
        ("gaussian", 64, 0.49, 0.03),
        ("gaussian", 128, 0.63, 0.03),
        ("gaussian", 256, 0.75, 0.03),
        ("gaussian", 512, 0.85, 0.02),
        ("orthogonal", 64, 0.57, 0.03),
        ("orthogonal", 128, 0.80, 0.02),
        ("orthogonal", 256, 0.88, 0.02),
        ("orthogonal", 512, 0.94, 0.02),
    ],
)
def test_correlation_with_exact_scores(sketch: str, size: int, want: float, margin: float) -> None:
    keys, queries = draw(1, 1, 512, 128), draw(1, 1, 64, 128, seed=1)
    coder = coder_of(128, jl_dim=size, sketch=sketch)
    got, exact = (numbers(x).ravel() for x in (coder.dot(queries, coder.encode(keys)), queries @ keys.swapaxes(-1, -2)))
    assert np.corrcoef(got, exact)[0, 1] == pytest.approx(want, abs=margin)


@sketches
@pytest.mark.parametrize("dim, size", [(64, 64), (64, 96), (80, 96), (128, 512)])
def test_scores_are_the_formula_over_the_signs(dim: int, size: int, sketch: str) -> None:
    coder = coder_of(dim, jl_dim=size, sketch=sketch)
    keys, queries = draw(2, 2, 20, dim), draw(2, 2, 3, dim, seed=1)
    plane, lengths = coder.encode(keys)
    matrix = numbers(coder.matrix)
    signs = 2.0 * bits_of(plane, size).reshape(2, 2, 20, size) - 1
    projected = numbers(queries) @ matrix.T
    want = constant(dim, sketch) / size * numbers(lengths)[:, :, None] * (projected @ signs.swapaxes(-1, -2))
    got = coder.dot(queries, (plane, lengths))
    assert got.dtype == mx.float32
    np.testing.assert_allclose(numbers(got), want, atol=1e-5 * np.abs(want).max(), rtol=1e-5)


@sketches
def test_scores_are_linear_in_the_query(sketch: str) -> None:
    coder = coder_of(64, jl_dim=128, sketch=sketch)
    rows = coder.encode(draw(1, 2, 30, 64))
    one, two = draw(1, 2, 5, 64, seed=1), draw(1, 2, 5, 64, seed=2)
    together, apart = coder.dot(one + two, rows), coder.dot(one, rows) + coder.dot(two, rows)
    assert mx.abs(together - apart).max().item() <= 1e-5 * mx.abs(apart).max().item()
    assert mx.allclose(coder.dot(4 * one, rows), 4 * coder.dot(one, rows), rtol=1e-6)


@sketches
@pytest.mark.parametrize("dim, size", [(64, 64), (80, 96)])
def test_products_with_decoded_rows_are_the_same_estimate(dim: int, size: int, sketch: str) -> None:
    coder = coder_of(dim, jl_dim=size, sketch=sketch)
    rows, queries = coder.encode(draw(1, 2, 20, dim)), draw(1, 2, 3, dim, seed=1)
    want = numbers(queries) @ numbers(coder.decode(rows)).swapaxes(-1, -2)
    np.testing.assert_allclose(numbers(coder.dot(queries, rows)), want, rtol=1e-4, atol=1e-4)


# Signs and lengths


@sketches
@pytest.mark.parametrize("dim, size", [(64, 64), (64, 160), (80, 96), (128, 32)])
def test_bits_are_the_signs_of_the_projections(dim: int, size: int, sketch: str) -> None:
    coder, x = coder_of(dim, jl_dim=size, sketch=sketch), draw(1, 2, 20, dim)
    plane, lengths = coder.encode(x)
    assert plane.dtype == mx.uint32 and plane.shape == (1, 2, 20, size // 32)
    projected = numbers(x).reshape(-1, dim) @ numbers(coder.matrix).T
    clear = np.abs(projected) > 1e-4
    assert (bits_of(plane, size) == (projected > 0))[clear].all() and clear.mean() > 0.999
    assert lengths.dtype == mx.bfloat16
    np.testing.assert_allclose(numbers(lengths), np.linalg.norm(numbers(x), axis=-1), rtol=2.0**-8)


@sketches
@pytest.mark.parametrize("factor", [2.0**-8, 0.25, 2.0, 2.0**6])
def test_a_positive_factor_leaves_the_signs_alone(factor: float, sketch: str) -> None:
    coder, x = coder_of(64, sketch=sketch), draw(1, 2, 50, 64)
    (plane, lengths), (same, scaled) = coder.encode(x), coder.encode(x * factor)
    assert mx.array_equal(plane, same) and mx.array_equal(lengths * factor, scaled)


@sketches
def test_a_negated_key_flips_every_bit(sketch: str) -> None:
    coder, x = coder_of(64, jl_dim=96, sketch=sketch), draw(1, 2, 50, 64)
    (one, length), (two, same) = coder.encode(x), coder.encode(-x)
    assert mx.array_equal(one ^ two, mx.full(one.shape, 2**32 - 1, mx.uint32))
    assert mx.array_equal(length, same)


@dtypes
def test_a_zero_key_scores_zero(dtype: mx.Dtype) -> None:
    coder, x = coder_of(64, dtype), draw(1, 1, 3, 64, dtype=dtype)
    x[:, :, 1] = 0
    plane, lengths = coder.encode(x)
    assert (plane[:, :, 1] == 2**32 - 1).all() and lengths[..., 1].item() == 0
    assert coder.dot(mx.ones((1, 1, 1, 64)), (plane, lengths))[..., 1].item() == 0
    assert (coder.decode((plane, lengths))[:, :, 1] == 0).all()


def test_lengths_past_half_precision_stay_finite() -> None:
    coder, x = coder_of(128, mx.float16, jl_dim=512), (mx.sign(draw(1, 1, 16, 128)) * 60000).astype(mx.float16)
    rows = coder.encode(x)
    assert mx.isfinite(rows[1]).all() and mx.isfinite(coder.decode(rows)).all()
    scores, exact = numbers(coder.dot(x.astype(mx.float32), rows)), numbers(x) @ numbers(x).swapaxes(-1, -2)
    assert np.isfinite(scores).all() and np.corrcoef(scores.ravel(), exact.ravel())[0, 1] > 0.9


def test_projections_are_summed_in_single_precision() -> None:
    x = (draw(1, 1, 64, 256) * 8).astype(mx.float16)
    coder = coder_of(256, mx.float16)
    projected = numbers(x).reshape(64, 256) @ numbers(coder.matrix).T
    wrong = bits_of(coder.encode(x)[0], 256) != (projected > 0)
    assert np.abs(projected)[wrong].max(initial=0) < 1e-2


# The sketch


@pytest.mark.parametrize("dim, size", [(64, 64), (64, 128), (64, 96), (80, 96), (128, 32)])
def test_orthogonal_rows_come_in_blocks(dim: int, size: int) -> None:
    matrix = numbers(coder_of(dim, jl_dim=size, sketch="orthogonal").matrix)
    assert matrix.shape == (size, dim)
    for start in range(0, size, dim):
        block = matrix[start : start + dim]
        np.testing.assert_allclose(block @ block.T, dim * np.eye(len(block)), atol=1e-3)
    if size > dim:
        assert np.abs(matrix[:dim] @ matrix[dim:].T).max() > 1


def test_gaussian_rows_are_standard_normal() -> None:
    matrix = numbers(coder_of(128, jl_dim=512, sketch="gaussian").matrix)
    assert abs(matrix.mean()) < 0.02 and matrix.std() == pytest.approx(1, abs=0.02)
    assert (matrix**4).mean() == pytest.approx(3, abs=0.15)


@sketches
def test_seeds(sketch: str) -> None:
    x = draw(1, 2, 50, 64)
    one, same, other = (coder_of(64, seed=seed, sketch=sketch).encode(x)[0] for seed in (7, 7, 8))
    assert mx.array_equal(one, same)
    assert (bits_of(one, 64) != bits_of(other, 64)).mean() > 0.4


@pytest.mark.parametrize("dim, size", [(64, 64), (80, 96), (128, 128), (100, 128)])
def test_one_projection_a_coordinate_by_default(dim: int, size: int) -> None:
    assert coder_of(dim).encode(draw(1, 1, 1, dim))[0].shape[-1] == size // 32


# Calls


@sketches
@pytest.mark.parametrize("dim", [64, 80])
def test_how_a_prompt_was_cut_flips_no_clear_sign(dim: int, sketch: str) -> None:
    transform = vq.qjl(sketch=sketch)
    keys, values = draw(1, HEADS, 40, dim), draw(1, HEADS, 40, 80, seed=1)
    one_shot = feed(transform, keys, values)
    coder = coder_of(dim, sketch=sketch)
    projected = np.abs(numbers(keys).reshape(-1, dim) @ numbers(coder.matrix).T)
    lengths = np.linalg.norm(numbers(keys).reshape(-1, dim), axis=-1)[:, None]
    clear = projected > 1e-6 * lengths * np.linalg.norm(numbers(coder.matrix), axis=-1)
    for cuts in ([1] * 39, [5, 1, 16]):
        cut = feed(transform, keys, values, cuts)
        one, two = (bits_of(state.rows.keys[0][:, :, :40], clear.shape[1]) for state in (one_shot, cut))
        assert (one == two)[clear].all()
        assert mx.array_equal(cut.rows.keys[1], one_shot.rows.keys[1])
        assert all(map(mx.array_equal, cut.rows.values, one_shot.rows.values))


def test_five_rows_at_once_are_five_rows() -> None:
    transform = vq.qjl()
    keys, values = draw(1, HEADS, 5, 64), draw(1, HEADS, 5, 64, seed=1)
    one, two = feed(transform, keys, values), feed(transform, keys, values, [1] * 4)
    assert all(map(mx.array_equal, flatten(one)[0], flatten(two)[0]))


def test_trim_and_the_same_rows_again_leave_no_trace() -> None:
    transform = vq.qjl()
    keys, values = draw(1, HEADS, 30, 64), draw(1, HEADS, 30, 64, seed=1)
    whole = feed(transform, keys, values)
    for x in (1, 7, 30):
        short = transform.trim(whole, x)
        assert short.offset.item() == 30 - x
        again = feed_more(transform, short, keys[:, :, 30 - x :], values[:, :, 30 - x :])
        for a, b in zip(flatten(again.rows)[0], flatten(whole.rows)[0]):
            assert mx.array_equal(a[:, :, :30], b[:, :, :30])


@dtypes
@pytest.mark.parametrize("n", [1, 4])
def test_attention_on_signs_is_softmax_of_the_estimates(n: int, dtype: mx.Dtype) -> None:
    transform = vq.qjl(jl_dim=128)
    keys, values = draw(1, HEADS, 50, 64, dtype=dtype), draw(1, HEADS, 50, 80, seed=1, dtype=dtype)
    held = transform.write(
        feed(transform, keys, values), draw(1, HEADS, n, 64, seed=2, dtype=dtype), draw(1, HEADS, n, 80, dtype=dtype)
    )
    queries = draw(1, 3 * HEADS, n, 64, seed=3, dtype=dtype)
    got = transform.attend(held, queries, 64**-0.5)
    assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
    coder, (plane, lengths) = coder_of(64, jl_dim=128), held.rows.keys
    signs = 2.0 * bits_of(plane, 128).reshape(HEADS, -1, 128) - 1
    v = numbers(transform.read(held)[1])[0]
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    for head in range(3 * HEADS):
        for i in range(n):
            kv, seen = head // 3, 51 + i
            sums = signs[kv, :seen] @ (numbers(coder.matrix) @ numbers(queries)[0, head, i])
            scores = constant(64, "orthogonal") / 128 * numbers(lengths)[0, kv, :seen] * sums / 8
            weights = np.exp(scores - scores.max())
            want = weights / weights.sum() @ v[kv, :seen]
            np.testing.assert_allclose(numbers(got)[0, head, i], want, atol=tolerance)


# Bytes and options


@pytest.mark.parametrize("dim, size, key_bytes", [(128, None, 18), (128, 512, 66), (64, 32, 6), (80, None, 14)])
def test_bytes_follow_the_formula(dim: int, size: int | None, key_bytes: int) -> None:
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    state = vq.qjl(jl_dim=size).init_state(spec)
    assert vq.nbytes(state) == 2 * 3 * 40 * (key_bytes + dim + 2) + 2 * 4


@pytest.mark.parametrize(
    "options", [{"jl_dim": 0}, {"jl_dim": 48}, {"jl_dim": True}, {"seed": -1}, {"sketch": "sparse"}], ids=str
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    for build in (vq.qjl, vq.qjl_codec):
        with pytest.raises(vq.QuantizerConfigError, match=f"qjl: `{next(iter(options))}`"):
            build(**options)


def test_signs_are_no_codec_for_values() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="`value`"):
        vq.rows(value=vq.qjl_codec())
