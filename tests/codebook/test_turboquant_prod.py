"""TurboQuant (inner product) against its formulas: codes, rest and signs, unbiased scores, variance, bytes."""

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
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
sketches = pytest.mark.parametrize("sketch", ["gaussian", "orthogonal"])
DISTORTION = {1: 1.0, 2: 0.361, 3: 0.116, 4: 0.0340, 5: 0.0093}  # of the codes of a unit vector, by bits in all


def coder_of(bits: int, dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Coder:
    return bind(vq.turboquant_prod_codec(bits=bits, **options), dim, dtype)


def bits_of(plane: mx.array, count: int) -> np.ndarray:
    """Bits [..., count] of packed words, least significant first."""
    return (np.array(plane)[..., None] >> np.arange(32) & 1).reshape(*plane.shape[:-1], -1)[..., :count]


def constant(dim: int, sketch: str) -> float:
    if sketch == "gaussian":
        return math.sqrt(math.pi / 2)
    return math.sqrt(math.pi) * math.gamma((dim + 1) / 2) / (math.sqrt(dim) * math.gamma(dim / 2))


def pair(cosine: float, dim: int) -> tuple[mx.array, mx.array]:
    """Query of length 3 and key of length 2 at a given cosine."""
    one, two = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, 2)))[0].T
    query, key = 3 * one, 2 * (cosine * one + math.sqrt(1 - cosine**2) * two)
    return (mx.array(x.astype(np.float32))[None, None, None] for x in (query, key))


class Stages:
    """P, S and the codes of the rows of a coder of two bits or more, by definition."""

    def __init__(self, coder: Coder) -> None:
        self.rotation = numbers(coder.codes.rotation.apply(mx.eye(coder.dim)))  # u @ rotation = P u
        self.matrix = numbers(coder.sketch.matrix)
        self.codes = coder.codes.stages[0]
        self.dim = coder.dim

    def coded(self, rows: tuple[mx.array, ...]) -> np.ndarray:
        """n C[code], rotated."""
        return numbers(rows[1])[..., None] * numbers(self.codes.decode(rows[0]))

    def rest(self, keys: mx.array, rows: tuple[mx.array, ...]) -> np.ndarray:
        """P k - n C[code]."""
        return numbers(keys) @ self.rotation - self.coded(rows)

    def decode(self, rows: tuple[mx.array, ...], sketch: str) -> np.ndarray:
        signs = 2.0 * bits_of(rows[2], len(self.matrix)) - 1
        factor = constant(self.dim, sketch) / len(self.matrix)
        estimate = factor * numbers(rows[3])[..., None] * (signs @ self.matrix)
        return (self.coded(rows) + estimate) @ self.rotation.T


# What is stored


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_the_codes_are_those_of_one_bit_less(bits: int, dim: int) -> None:
    x = draw(1, 2, 40, dim)
    codes, lengths, _, _ = coder_of(bits, dim, seed=5).encode(x)
    plain = bind(vq.turboquant_mse_codec(bits=bits - 1, seed=5), dim, mx.float32).encode(x)
    assert mx.array_equal(codes, plain[0]) and mx.array_equal(lengths, plain[1])


@sketches
@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("dim, size", [(64, None), (64, 32), (64, 160), (80, 96)])
def test_signs_and_length_are_those_of_the_rest(dim: int, size: int | None, bits: int, sketch: str) -> None:
    coder, x = coder_of(bits, dim, jl_dim=size, sketch=sketch), draw(1, 2, 40, dim) * 3
    rows = coder.encode(x)
    stages = Stages(coder)
    rest = stages.rest(x, rows)
    projected = rest @ stages.matrix.T
    assert rows[2].dtype == mx.uint32 and rows[2].shape == (1, 2, 40, len(stages.matrix) // 32)
    clear = np.abs(projected) > 1e-4
    assert (bits_of(rows[2], len(stages.matrix)) == (projected > 0))[clear].all() and clear.mean() > 0.99
    assert rows[3].dtype == rows[1].dtype == mx.bfloat16
    np.testing.assert_allclose(numbers(rows[3]), np.linalg.norm(rest, axis=-1), rtol=2.0**-8)
    np.testing.assert_allclose(numbers(rows[1]), np.linalg.norm(numbers(x), axis=-1), rtol=2.0**-8)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_the_rest_is_what_the_codes_distort(bits: int) -> None:
    length = numbers(coder_of(bits, 128).encode(directions(4096, 128))[-1])
    assert np.square(length).mean() == pytest.approx(DISTORTION[bits], rel=0.05)


@sketches
@pytest.mark.parametrize("dim", [64, 80])
def test_at_one_bit_there_is_only_the_sketch(dim: int, sketch: str) -> None:
    coder, x = coder_of(1, dim, sketch=sketch), draw(1, 2, 30, dim)
    plane, lengths = coder.encode(x)
    projected = numbers(x) @ numbers(coder.matrix).T
    clear = np.abs(projected) > 1e-4
    assert (bits_of(plane, len(projected[0, 0, 0])) == (projected > 0))[clear].all()
    queries = draw(1, 2, 4, dim, seed=1)
    signs = 2.0 * bits_of(plane, projected.shape[-1]) - 1
    sums = numbers(queries) @ numbers(coder.matrix).T @ signs.swapaxes(-1, -2)
    want = constant(dim, sketch) / projected.shape[-1] * numbers(lengths)[:, :, None] * sums
    np.testing.assert_allclose(numbers(coder.dot(queries, (plane, lengths))), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim, size", [(64, 64), (80, 96), (128, 128), (100, 128)])
def test_one_projection_a_coordinate_by_default(dim: int, size: int) -> None:
    for bits in (1, 2):
        assert coder_of(bits, dim).encode(draw(1, 1, 1, dim))[-2].shape[-1] == size // 32


# Scores


@sketches
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim, size", [(64, None), (64, 160), (80, None)])
def test_scores_and_decoded_rows_follow_the_formula(dim: int, size: int | None, bits: int, sketch: str) -> None:
    coder, x = coder_of(bits, dim, jl_dim=size, sketch=sketch), draw(1, 2, 30, dim)
    rows, queries = coder.encode(x), draw(1, 2, 5, dim, seed=1)
    decoded = Stages(coder).decode(rows, sketch)
    np.testing.assert_allclose(numbers(coder.decode(rows)), decoded, atol=2e-5)
    scores = coder.dot(queries, rows)
    assert scores.dtype == mx.float32
    want = numbers(queries) @ decoded.swapaxes(-1, -2)
    sizes = np.linalg.norm(numbers(queries), axis=-1)[..., None] * np.linalg.norm(numbers(x), axis=-1)[:, :, None]
    assert (np.abs(numbers(scores) - want) <= 1e-5 * sizes).all()


@sketches
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_sums_of_rows_are_sums_of_decoded_rows(bits: int, sketch: str) -> None:
    coder = coder_of(bits, 64, sketch=sketch)
    rows, weights = coder.encode(draw(1, 2, 30, 64)), draw(1, 2, 4, 30, seed=1)
    want = numbers(weights) @ numbers(coder.decode(rows))
    np.testing.assert_allclose(numbers(coder.mix(weights, rows)), want, rtol=1e-5, atol=1e-4)


@dtypes
def test_scores_equal_products_with_the_decoded_rows(dtype: mx.Dtype) -> None:
    coder, x = coder_of(3, 64, dtype), draw(1, 2, 40, 64, dtype=dtype)
    rows, queries = coder.encode(x), draw(1, 2, 5, 64, seed=1)
    decoded = coder.decode(rows)
    assert decoded.dtype == dtype
    want = numbers(queries) @ numbers(decoded).swapaxes(-1, -2)
    sizes = np.linalg.norm(numbers(queries), axis=-1)[..., None] * np.linalg.norm(numbers(x), axis=-1)[:, :, None]
    bound = {mx.float16: 2e-3, mx.bfloat16: 1e-2, mx.float32: 1e-5}[dtype]
    assert (np.abs(numbers(coder.dot(queries, rows)) - want) <= bound * sizes).all()


@sketches
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("dim, size", [(32, 32), (32, 64), (64, 32)])
def test_scores_are_unbiased_and_their_variance_follows_the_formula(
    dim: int, size: int, bits: int, sketch: str
) -> None:
    query, key = pair(0.6, dim)
    errors, variances, seeds = [], [], 500
    for seed in range(seeds):
        coder = vq.turboquant_prod_codec(bits=bits, jl_dim=size, seed=seed, sketch=sketch).bind(dim, mx.float32)
        rows = coder.encode(key)
        rest = numbers(key) if bits == 1 else Stages(coder).rest(key, rows) @ Stages(coder).rotation.T
        share = (numbers(query) * rest).sum()
        variances.append((math.pi / 2 * 9 * np.square(rest).sum() - share**2) / size)
        errors.append(coder.dot(query, rows).item() - 3.6)
    rounding = 2.0**-9 * 6 * math.sqrt(DISTORTION[bits])  # of the rest's length to bfloat16
    assert np.mean(errors) == pytest.approx(0, abs=4 * math.sqrt(np.mean(variances) / seeds) + rounding)
    ratio = np.mean(np.square(errors)) / np.mean(variances)
    if sketch == "gaussian":
        assert 0.8 < ratio < 1.2
    elif size <= dim:
        assert ratio < 0.9
    else:
        assert ratio < 1.1


@pytest.mark.parametrize(
    "bits, sketch, want",
    [
        *((1, "gaussian", 1.57), (2, "gaussian", 0.57), (3, "gaussian", 0.183), (4, "gaussian", 0.053)),
        *((1, "orthogonal", 0.56), (2, "orthogonal", 0.205), (3, "orthogonal", 0.067), (4, "orthogonal", 0.0195)),
    ],
)
def test_squared_error_of_products_of_unit_vectors(bits: int, sketch: str, want: float) -> None:
    errors = []
    for seed in range(8):
        keys, queries = directions(256, 128, seed=2 * seed), directions(128, 128, seed=2 * seed + 1)
        coder = coder_of(bits, 128, sketch=sketch, seed=seed)
        exact = queries @ keys.swapaxes(-1, -2)
        errors.append(128 * mx.square(coder.dot(queries, coder.encode(keys)) - exact).mean().item())
    got = np.mean(errors)
    assert got == pytest.approx(want, rel=0.08)
    assert got <= math.sqrt(3) * math.pi**2 * 4.0**-bits


@sketches
@pytest.mark.parametrize("bits, shrunk", [(2, 0.637), (3, 0.883), (4, 0.966)])
def test_the_sketch_gives_back_what_the_codes_lost(bits: int, shrunk: float, sketch: str) -> None:
    x = directions(2048, 128)
    coder = coder_of(bits, 128, sketch=sketch)
    rows = coder.encode(x)
    products = (coder.decode(rows) * x).sum(axis=-1).mean().item()
    codes_alone = (coder.decode((*rows[:3], mx.zeros_like(rows[3]))) * x).sum(axis=-1).mean().item()
    assert products == pytest.approx(1, abs=0.02)
    assert codes_alone == pytest.approx(shrunk, abs=0.01)


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_a_rest_of_no_length_leaves_the_code_term(bits: int) -> None:
    coder, queries = coder_of(bits, 64), draw(1, 2, 3, 64, seed=1)
    codes, lengths, plane, rest = coder.encode(draw(1, 2, 20, 64))
    alone = bind(vq.turboquant_mse_codec(bits=bits - 1), 64, mx.float32).dot(queries, (codes, lengths))
    assert mx.array_equal(coder.dot(queries, (codes, lengths, plane, mx.zeros_like(rest))), alone)
    assert not mx.allclose(coder.dot(queries, (codes, lengths, plane, rest)), alone, atol=0.1)


@pytest.mark.parametrize("dim", [80, 96, 112, 160, 192, 320])
def test_head_sizes_that_are_no_power_of_two(dim: int) -> None:
    coder, x, y = coder_of(8, dim), draw(1, 2, 16, dim), draw(1, 2, 4, dim, seed=1)
    rows = coder.encode(x)
    sizes = mx.linalg.norm(y, axis=-1)[..., None] * mx.linalg.norm(x, axis=-1)[:, :, None]
    exact = y @ x.swapaxes(-1, -2)
    assert (mx.abs(coder.dot(y, rows) - exact) / sizes).max().item() < 0.01
    assert mx.allclose(coder.dot(y, rows), y @ coder.decode(rows).swapaxes(-1, -2), atol=1e-3)


# Streams of random numbers


@pytest.mark.parametrize("seed", [0, 42])
def test_rotation_and_sketch_are_independent(seed: int) -> None:
    stages = Stages(coder_of(2, 80, seed=seed))  # both dense
    turned, sketch = stages.rotation.T, stages.matrix[:80] / math.sqrt(80)
    assert abs(np.trace(turned @ sketch.T)) < 5 and np.abs(turned @ sketch.T).max() < 0.7


@sketches
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_seeds(bits: int, sketch: str) -> None:
    x = draw(1, 2, 50, 64)
    one, same, other = (coder_of(bits, 64, seed=seed, sketch=sketch).encode(x) for seed in (7, 7, 8))
    assert all(map(mx.array_equal, one, same))
    assert (bits_of(one[-2], 64) != bits_of(other[-2], 64)).mean() > 0.4
    assert bits == 1 or not mx.array_equal(one[0], other[0])


def test_rounds_reach_the_rotation() -> None:
    x = draw(1, 1, 20, 64)
    one, two = (coder_of(2, 64, rounds=rounds).encode(x)[0] for rounds in (1, 2))
    assert not mx.array_equal(one, two)
    assert mx.array_equal(two, bind(vq.turboquant_mse_codec(bits=1, rounds=2), 64, mx.float32).encode(x)[0])


# Sizes, zeros, and numbers that are not finite


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_zero_key_scores_zero(bits: int, dtype: mx.Dtype) -> None:
    coder, x = coder_of(bits, 64, dtype), draw(1, 1, 3, 64, dtype=dtype)
    x[:, :, 1] = 0
    rows = coder.encode(x)
    scores = coder.dot(draw(1, 1, 4, 64, seed=1), rows)
    assert (scores[..., 1] == 0).all() and mx.isfinite(scores).all() and (scores[..., 0] != 0).all()
    assert (coder.decode(rows)[:, :, 1] == 0).all()


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [2.0**-4, 2.0**4])
def test_a_factor_changes_lengths_alone(factor: float, bits: int, dtype: mx.Dtype) -> None:
    coder, x = coder_of(bits, 64, dtype), draw(1, 2, 50, 64, dtype=dtype)
    for one, scaled in zip(coder.encode(x), coder.encode(x * factor)):
        wanted = one * factor if one.dtype == mx.bfloat16 else one
        assert mx.array_equal(scaled, wanted)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_lengths_past_half_precision_stay_finite(bits: int) -> None:
    x = (mx.sign(draw(1, 1, 16, 128)) * 60000).astype(mx.float16)
    coder = coder_of(bits, 128, mx.float16)
    rows = coder.encode(x)
    scores, exact = numbers(coder.dot(x.astype(mx.float32), rows)), numbers(x) @ numbers(x).swapaxes(-1, -2)
    assert mx.isfinite(coder.decode(rows)).all() and np.isfinite(scores).all()
    assert np.corrcoef(scores.ravel(), exact.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_alone(bad: float, bits: int) -> None:
    clean = draw(1, 2, 6, 64, dtype=mx.float16)
    x = mx.where((mx.arange(6)[:, None] == 2) & (mx.arange(64) == 5), bad, clean).astype(mx.float16)
    coder, others = coder_of(bits, 64, mx.float16), mx.array([0, 1, 3, 4, 5])
    for one, two in zip(coder.encode(clean), coder.encode(x)):
        assert mx.array_equal(one[:, :, others], two[:, :, others])


# Calls


@sketches
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_how_a_prompt_was_cut_flips_no_clear_sign(bits: int, sketch: str) -> None:
    transform, coder = vq.turboquant_prod(bits=bits, sketch=sketch), coder_of(bits, 64, sketch=sketch)
    keys, values = draw(1, HEADS, 40, 64), draw(1, HEADS, 40, 80, seed=1)
    whole = feed(transform, keys, values)
    matrix = numbers((coder if bits == 1 else coder.sketch).matrix)
    rest = numbers(keys) if bits == 1 else Stages(coder).rest(keys, coder.encode(keys))
    clear = np.abs(rest @ matrix.T) > 1e-6 * np.linalg.norm(matrix, axis=-1) * np.linalg.norm(rest, axis=-1)[..., None]
    for cuts in ([1] * 39, [5, 1, 16]):
        cut = feed(transform, keys, values, cuts)
        *one, one_plane, one_rest = (x[:, :, :40] for x in whole.rows.keys)
        *two, two_plane, two_rest = (x[:, :, :40] for x in cut.rows.keys)
        assert all(map(mx.array_equal, [*one, one_rest], [*two, two_rest]))
        assert (bits_of(one_plane, 64) == bits_of(two_plane, 64))[clear].all() and clear.mean() > 0.99
        assert all(map(mx.array_equal, whole.rows.values, cut.rows.values))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_trim_and_the_same_rows_again_leave_no_trace(bits: int) -> None:
    transform = vq.turboquant_prod(bits=bits)
    keys, values = draw(1, HEADS, 30, 64), draw(1, HEADS, 30, 64, seed=1)
    whole = feed(transform, keys, values)
    for x in (1, 7, 30):
        short = transform.trim(whole, x)
        assert short.offset.item() == 30 - x
        again = feed_more(transform, short, keys[:, :, 30 - x :], values[:, :, 30 - x :])
        assert all(map(mx.array_equal, *([x[:, :, :30] for x in flatten(s.rows)[0]] for s in (again, whole))))


@dtypes
@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_attention_is_softmax_of_the_estimates(n: int, bits: int, dtype: mx.Dtype) -> None:
    transform = vq.turboquant_prod(bits=bits)
    keys, values = draw(1, HEADS, 50, 64, dtype=dtype), draw(1, HEADS, 50, 80, seed=1, dtype=dtype)
    new = draw(1, HEADS, n, 64, seed=2, dtype=dtype), draw(1, HEADS, n, 80, dtype=dtype)
    held = transform.write(feed(transform, keys, values), *new)
    queries = draw(1, 3 * HEADS, n, 64, seed=3, dtype=dtype)
    got = transform.attend(held, queries, 64**-0.5)
    assert got.dtype == dtype and got.shape == (1, 3 * HEADS, n, 80)
    values_read = numbers(transform.read(held)[1])[0]
    exact_keys = numbers(coder_of(bits, 64).decode(held.rows.keys))[0]
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    for head in range(3 * HEADS):
        for i in range(n):
            seen = 51 + i
            scores = exact_keys[head // 3, :seen] @ numbers(queries)[0, head, i] / 8
            weights = np.exp(scores - scores.max())
            want = weights / weights.sum() @ values_read[head // 3, :seen]
            np.testing.assert_allclose(numbers(got)[0, head, i], want, atol=tolerance)


# Bytes and options


@pytest.mark.parametrize("dim, bits, size, key_bytes", [(128, 2, None, 36), (128, 3, None, 52), (64, 4, None, 36)])
def test_bytes_of_the_page(dim: int, bits: int, size: int | None, key_bytes: int) -> None:
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    state = vq.turboquant_prod(bits=bits, jl_dim=size).init_state(spec)
    assert vq.nbytes(state) == 2 * 3 * 40 * (key_bytes + dim + 2) + 2 * 4


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim, size", [(64, 32), (80, None), (96, 256)])
def test_bytes_follow_the_formula(dim: int, size: int | None, bits: int) -> None:
    spec = vq.KVSpec(kv_heads=1, key_dim=dim, value_dim=32, capacity=10)
    state = vq.turboquant_prod(bits=bits, jl_dim=size).init_state(spec)
    sketch_bytes = (size or math.ceil(dim / 32) * 32) // 8
    key_bytes = 4 * math.ceil(dim * (bits - 1) / 32) + sketch_bytes + (4 if bits > 1 else 2)
    assert vq.nbytes(state) == 10 * (key_bytes + 34) + 4


@pytest.mark.parametrize(
    "options",
    [
        *({"bits": 0}, {"bits": 9}, {"bits": True}, {"bits": 2.5}, {"jl_dim": 0}, {"jl_dim": 48}, {"jl_dim": True}),
        *({"seed": -1}, {"seed": 1.5}, {"sketch": "sparse"}, {"rounds": 0}, {"rounds": 1.5}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    for build in (vq.turboquant_prod, vq.turboquant_prod_codec):
        with pytest.raises(vq.QuantizerConfigError, match=f"turboquant_prod: `{next(iter(options))}` must be"):
            build(**options)


def test_a_head_size_of_two_is_refused_by_name() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="turboquant_prod: `head_dim`"):
        vq.turboquant_prod().init_state(vq.KVSpec(kv_heads=1, key_dim=2, value_dim=8))


def test_estimates_of_products_are_no_codec_for_values() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="`value`"):
        vq.rows(value=vq.turboquant_prod_codec())
