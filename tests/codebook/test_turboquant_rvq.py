"""TurboQuant in two stages: distortion tables of both residual codebooks, cosines, calls, products, bytes."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, directions, distortion, draw, feed, feed_more, numbers

import vq_functional as vq
from vq_functional.core.codec import Coder, bind
from vq_functional.core.tree import map_leaves

HEADS = 2
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
residuals = pytest.mark.parametrize("residual", ["fitted", "laplace"])


def coder_of(bits: int, dim: int, dtype: mx.Dtype = mx.float32, **options: Any) -> Coder:
    return bind(vq.turboquant_rvq_codec(bits=bits, **options), dim, dtype)


# Distortion


@pytest.mark.parametrize(
    "residual, bits, want",
    [
        ("fitted", 1, 0.1305),
        ("fitted", 2, 0.0197),
        ("fitted", 3, 0.0019),
        ("laplace", 1, 0.1326),
        ("laplace", 2, 0.0234),
        ("laplace", 3, 0.0028),
    ],
)
def test_distortion_of_unit_vectors(residual: str, bits: int, want: float) -> None:
    # The table is that of normal coordinates and has four decimals; shorter vectors have lighter tails.
    got = distortion(coder_of(bits, 1024, residual=residual, unbiased=False), directions(512, 1024))
    assert got == pytest.approx(want, abs=0.03 * want + 5e-5)
    got = distortion(coder_of(bits, 128, residual=residual, unbiased=False), directions(2048, 128))
    assert 0.92 * want - 5e-5 <= got <= 1.03 * want + 5e-5


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_second_stage_helps_in_every_batch(bits: int, dim: int) -> None:
    one = bind(vq.turboquant_mse_codec(bits=bits, unbiased=False), dim, mx.float32)
    for residual in ("fitted", "laplace"):
        two = coder_of(bits, dim, residual=residual, unbiased=False)
        for seed in range(5):
            x = draw(1, 1, 256, dim, seed=seed)
            assert distortion(two, x) < distortion(one, x)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_fitted_table_beats_the_assumed_one(bits: int) -> None:
    x = directions(2048, 128)
    fitted, laplace = (coder_of(bits, 128, residual=kind, unbiased=False) for kind in ("fitted", "laplace"))
    assert distortion(fitted, x) < distortion(laplace, x)


@residuals
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("bits, least", [(1, 0.93), (2, 0.988), (3, 0.998)])
def test_cosines(bits: int, least: float, unbiased: bool, residual: str) -> None:
    x = draw(1, 1, 1024, 128, seed=2)
    coder = coder_of(bits, 128, residual=residual, unbiased=unbiased)
    read = coder.decode(coder.encode(x))
    cosine = (read * x).sum(-1) / mx.linalg.norm(read, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert cosine.mean().item() >= least


@residuals
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_products_shrink_unless_the_length_makes_up_for_it(bits: int, residual: str) -> None:
    x = directions(2048, 128)
    plain, unbiased = (coder_of(bits, 128, residual=residual, unbiased=flag) for flag in (False, True))
    assert (plain.decode(plain.encode(x)) * x).sum(axis=-1).mean().item() < 1
    products = (unbiased.decode(unbiased.encode(x)) * x).sum(axis=-1)
    # The length takes bfloat16.
    assert mx.abs(products - 1).max().item() <= 2.0**-8 * 1.01
    assert products.mean().item() == pytest.approx(1, abs=1e-3)


def test_the_first_stage_is_that_of_one_stage() -> None:
    x = draw(1, 2, 30, 128, seed=3)
    for bits in (1, 2, 3):
        single = bind(vq.turboquant_mse_codec(bits=bits, seed=9), 128, mx.float32).encode(x)[0]
        assert mx.array_equal(coder_of(bits, 128, seed=9).encode(x)[0], single)


@residuals
@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_decode_is_length_times_both_levels_turned_back(bits: int, dim: int, residual: str) -> None:
    coder, x = coder_of(bits, dim, residual=residual), draw(1, 2, 10, dim, seed=4)
    *codes, lengths = coder.encode(x)
    first, second = (numbers(stage.decode(part)) for stage, part in zip(coder.stages, codes, strict=True))
    rotation = numbers(coder.rotation.apply(mx.eye(dim)))
    want = numbers(lengths)[..., None] * ((first + second) @ rotation.T)
    np.testing.assert_allclose(numbers(coder.decode((*codes, lengths))), want, atol=2e-5)
    # Each coordinate's second level is the nearest one to what the first left over.
    turned = numbers(x / mx.linalg.norm(x, axis=-1, keepdims=True)) @ rotation
    levels = np.array(coder.stages[1].levels).astype(np.float64)
    best = np.abs((turned - first)[..., None] - levels).min(axis=-1)
    np.testing.assert_allclose(np.abs(turned - first - second), best, atol=1e-5)


# Norms


@dtypes
@pytest.mark.parametrize("factor", [2.0**-4, 2.0, 2.0**4])
def test_a_factor_changes_the_norm_alone(factor: float, dtype: mx.Dtype) -> None:
    x = draw(1, 2, 50, 64, dtype=dtype)
    for bits in (1, 2, 3):
        *codes, lengths = coder_of(bits, 64, dtype).encode(x)
        *same, scaled = coder_of(bits, 64, dtype).encode(x * factor)
        assert all(map(mx.array_equal, codes, same)) and mx.array_equal(lengths * factor, scaled)


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_zero_key_is_zero(dim: int, bits: int, dtype: mx.Dtype) -> None:
    coder, x = coder_of(bits, dim, dtype), draw(1, 1, 3, dim, dtype=dtype)
    x[:, :, 1] = 0
    read = coder.decode(coder.encode(x))
    assert mx.isfinite(read).all() and (read[:, :, 1] == 0).all()


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("unbiased", [False, True])
def test_norms_past_half_precision_stay_finite(unbiased: bool, bits: int) -> None:
    largest = (mx.sign(draw(1, 2, 8, 128)) * 65504).astype(mx.float16)
    coder = coder_of(bits, 128, mx.float16, unbiased=unbiased)
    read = coder.decode(coder.encode(largest))
    assert mx.isfinite(read).all()
    x = (mx.sign(draw(1, 2, 8, 128)) * 20000).astype(mx.float16)
    read = numbers(coder.decode(coder.encode(x)))
    assert np.square(read - numbers(x)).sum() / np.square(numbers(x)).sum() < 0.5 * 4.0**-bits * 2.7207


# Seeds and calls


def test_seeds() -> None:
    x = draw(1, 2, 100, 64)

    def stages(seed: int) -> list[np.ndarray]:
        coder = bind(vq.turboquant_rvq_codec(bits=3, seed=seed), 64, mx.float32)
        return [np.array(stage.decode(part)) for stage, part in zip(coder.stages, coder.encode(x)[:2])]

    for one, same, other in zip(stages(7), stages(7), stages(8)):
        assert np.array_equal(one, same)
        assert (one != other).mean() > 0.25


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_how_a_prompt_was_cut_leaves_no_trace(bits: int, dtype: mx.Dtype) -> None:
    transform = vq.turboquant_rvq(bits=bits)
    keys, values = draw(1, HEADS, 40, 64, dtype=dtype), draw(1, HEADS, 40, 80, seed=1, dtype=dtype)
    one_shot = feed(transform, keys, values)
    assert_same(feed(transform, keys, values, [1] * 39), one_shot)
    assert_same(feed(transform, keys, values, [5, 1, 16]), one_shot)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_trim_and_the_same_rows_again_leave_no_trace(bits: int) -> None:
    transform = vq.turboquant_rvq(bits=bits)
    keys, values = draw(1, HEADS, 30, 64), draw(1, HEADS, 30, 64, seed=1)
    whole = feed(transform, keys, values)
    for x in (1, 7, 30):
        short = transform.trim(whole, x)
        assert short.offset.item() == 30 - x
        assert_same(feed_more(transform, short, keys[:, :, 30 - x :], values[:, :, 30 - x :]), whole, 30)


@pytest.mark.parametrize("cuts", [[], [3, 20], [1] * 10])
def test_a_padded_batch_equals_each_row_alone(cuts: list[int]) -> None:
    transform = vq.turboquant_rvq(bits=2)
    keys, values = draw(3, HEADS, 40, 64, dtype=mx.float16), draw(3, HEADS, 40, 64, seed=1, dtype=mx.float16)
    padding = [0, 5, 13]
    for row, pad in enumerate(padding):
        keys[row, :, :pad] = values[row, :, :pad] = math.nan
    spec = vq.KVSpec(batch=3, kv_heads=HEADS, key_dim=64, value_dim=64, capacity=64)
    both = feed_more(transform, transform.init_state(spec, mx.array(padding)), keys, values, cuts)
    for row, pad in enumerate(padding):
        alone = feed(transform, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:])
        assert_same(map_leaves(lambda x, row=row: x[row : row + 1], both), alone, 40 - pad)


@dtypes
def test_values_come_back_bit_for_bit(dtype: mx.Dtype) -> None:
    transform = vq.turboquant_rvq()
    keys, values = draw(1, HEADS, 20, 64, dtype=dtype), draw(1, HEADS, 20, 40, seed=1, dtype=dtype)
    read_keys, read_values = transform.read(feed(transform, keys, values, [13, 1]))
    assert read_keys.dtype == read_values.dtype == dtype
    assert mx.array_equal(read_values[:, :, :20], values)
    assert (read_keys[:, :, 20:] == 0).all()


def test_values_in_eight_bits() -> None:
    transform = vq.turboquant_rvq(value_bits=8)
    keys, values = draw(1, HEADS, 20, 64), draw(1, HEADS, 20, 80, seed=1)
    _, read = transform.read(feed(transform, keys, values))
    coder = bind(vq.int8_codec(), 80, mx.float32)
    assert mx.array_equal(read[:, :, :20], coder.decode(coder.encode(values)))


# Products and attention


@dtypes
@residuals
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_products_equal_those_of_the_decoded_rows(bits: int, dim: int, residual: str, dtype: mx.Dtype) -> None:
    rows = coder_of(bits, dim, dtype, residual=residual).encode(draw(2, 2, 33, dim, dtype=dtype))
    coder = coder_of(bits, dim, residual=residual)
    plain = numbers(coder.decode(rows))
    queries, weights = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, 33, seed=2)
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    np.testing.assert_allclose(numbers(scores), numbers(queries) @ plain.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ plain, rtol=1e-5, atol=1e-4)


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_attention_on_codes_equals_attention_over_what_is_read(n: int, bits: int, dtype: mx.Dtype) -> None:
    transform = vq.turboquant_rvq(bits=bits)
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


def test_a_call_attends_to_its_own_rows_as_later_calls_will() -> None:
    transform = vq.turboquant_rvq(bits=1)
    keys, values = draw(1, HEADS, 20, 64), draw(1, HEADS, 20, 64, seed=1)
    spec = vq.KVSpec(kv_heads=HEADS, key_dim=64, value_dim=64, dtype=mx.float32, capacity=64)
    state, now, _ = transform.update(transform.init_state(spec), keys, values)
    _, later, _ = transform.update(state, keys[:, :, :1], values[:, :, :1])
    assert mx.array_equal(now[:, :, :20], later[:, :, :20])


# Bytes and options


@dtypes
@pytest.mark.parametrize("bits, dim, key_bytes", [(1, 128, 34), (2, 128, 66), (3, 128, 98), (3, 80, 66), (2, 64, 34)])
def test_bytes_follow_the_formula(dim: int, bits: int, key_bytes: int, dtype: mx.Dtype) -> None:
    assert key_bytes == 8 * math.ceil(dim * bits / 32) + 2
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, dtype=dtype, capacity=40)
    exact = vq.nbytes(vq.turboquant_rvq(bits=bits).init_state(spec))
    assert exact == 2 * 3 * 40 * (key_bytes + dim * dtype.size) + 2 * 4
    small = vq.nbytes(vq.turboquant_rvq(bits=bits, value_bits=8).init_state(spec))
    assert small == 2 * 3 * 40 * (key_bytes + dim + dtype.size) + 2 * 4


@pytest.mark.parametrize(
    "options",
    [{"bits": 0}, {"bits": 9}, {"bits": []}, {"bits": [2, 3]}, {"seed": -1}, {"value_bits": 4}, {"residual": "normal"}],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"turboquant_rvq: `{next(iter(options))}`"):
        vq.turboquant_rvq(**options)


def test_no_attribute_sends_mlx_lm_to_its_own_kernels() -> None:
    assert not hasattr(vq.turboquant_rvq(), "bits") and not hasattr(vq.turboquant_rvq(), "group_size")
