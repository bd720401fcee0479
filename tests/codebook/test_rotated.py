"""A rotation before a codec: its codes of the rotated row, products without turning rows back, spread outliers."""

import json
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, draw, feed, feed_more, numbers
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.codebook.rotated import rotated
from vq_functional.core.codec import Codec, Coder, PlainCodec, bind
from vq_functional.core.describe import describe, restore
from vq_functional.ops.rotations import random_rotation
from vq_functional.quantize.affine_rows import affine_codec

CODECS: dict[str, Codec] = {
    "plain": PlainCodec(),
    "int8": vq.int8_codec(),
    "affine 4": affine_codec(bits=4),
    "affine 2, groups of 20": affine_codec(bits=2, group_size=20),
    "affine 1, least squares": affine_codec(bits=1, clip="least_squares"),
    "turboquant_mse 3": vq.turboquant_mse_codec(bits=3),
    "turboquant_rvq": vq.turboquant_rvq_codec(),
}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
dims = pytest.mark.parametrize("dim", [64, 80, 96])
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["fp16", "bf16", "fp32"])


def coder_of(codec: Codec, dim: int, dtype: mx.Dtype = mx.float32, seed: int = 42) -> Coder:
    return bind(rotated(codec, seed), dim, dtype)


def matrix(dim: int, seed: int = 42) -> np.ndarray:
    """P, so that a rotated row is P x."""
    return numbers(random_rotation(dim, seed).apply(mx.eye(dim))).T


def loud_channels(count: int, dim: int, factor: float = 50) -> mx.array:
    """Rows whose channels 3 and 17 are larger than the others."""
    return draw(1, 2, count, dim) * mx.where((mx.arange(dim) == 3) | (mx.arange(dim) == 17), factor, 1)


def loss(coder: Coder, x: mx.array) -> float:
    return (mx.square(coder.decode(coder.encode(x)) - x).sum() / mx.square(x).sum()).item()


# The oracle


@dims
@codecs
def test_rows_are_the_codecs_rows_of_the_rotated_vector(codec: Codec, dim: int) -> None:
    x = draw(1, 2, 11, dim)
    turned = mx.array((numbers(x) @ matrix(dim).T).astype(np.float32))
    inner = bind(codec, dim, mx.float32)
    got, want = inner.decode(coder_of(codec, dim).encode(x)), inner.decode(inner.encode(turned))
    # A number on the edge between two codes may take the other one, the sums being rounded otherwise.
    assert np.mean(np.abs(numbers(got) - numbers(want)) > 1e-4) < 0.01


@dims
@codecs
def test_decoded_rows_are_turned_back(codec: Codec, dim: int) -> None:
    coder, x = coder_of(codec, dim), draw(1, 2, 11, dim)
    rows = coder.encode(x)
    inner = bind(codec, dim, mx.float32).decode(rows)
    np.testing.assert_allclose(numbers(coder.decode(rows)), numbers(inner) @ matrix(dim), atol=1e-5)


@dims
def test_nothing_is_lost_without_a_codec(dim: int) -> None:
    coder, x, y = coder_of(PlainCodec(), dim), draw(1, 2, 30, dim), draw(1, 2, 5, dim, seed=1)
    rows = coder.encode(x)
    np.testing.assert_allclose(numbers(coder.decode(rows)), numbers(x), atol=1e-5)
    np.testing.assert_allclose(numbers(coder.dot(y, rows)), numbers(y) @ numbers(x).swapaxes(-1, -2), atol=1e-4)


@dtypes
@dims
@codecs
def test_products_equal_those_of_the_decoded_rows(codec: Codec, dim: int, dtype: mx.Dtype) -> None:
    rows = coder_of(codec, dim, dtype).encode(draw(2, 2, 33, dim, dtype=dtype))
    coder = coder_of(codec, dim)
    plain = numbers(coder.decode(rows))
    queries, weights = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, 33, seed=2)
    scores, sums = coder.dot(queries, rows), coder.mix(weights, rows)
    assert scores.dtype == sums.dtype == mx.float32
    np.testing.assert_allclose(numbers(scores), numbers(queries) @ plain.swapaxes(-1, -2), rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(numbers(sums), numbers(weights) @ plain, rtol=1e-5, atol=2e-4)


@given(dim=st.integers(3, 70), bits=st.integers(1, 8), seed=st.integers(0, 1000))
def test_any_head_size(dim: int, bits: int, seed: int) -> None:
    coder = coder_of(affine_codec(bits=bits, group_size=16), dim, seed=seed)
    rows, query = coder.encode(draw(1, 1, 4, dim, seed=seed)), draw(1, 1, 1, dim, seed=1)
    want = numbers(query) @ numbers(coder.decode(rows)).swapaxes(-1, -2)
    np.testing.assert_allclose(numbers(coder.dot(query, rows)), want, rtol=1e-5, atol=2e-4)


# What it is for


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_large_channels_no_longer_set_the_scale_of_the_others(bits: int, dim: int) -> None:
    x = loud_channels(200, dim)
    quiet = mx.array([i for i in range(dim) if i not in (3, 17)])
    codec = affine_codec(bits=bits, group_size=dim)
    plain, turned = bind(codec, dim, mx.float32), coder_of(codec, dim)
    assert loss(turned, x) < loss(plain, x)
    queries = draw(1, 2, 8, dim, seed=1) * mx.where((mx.arange(dim) == 3) | (mx.arange(dim) == 17), 0, 1)
    exact = queries @ x.swapaxes(-1, -2)
    wrong = [mx.square(coder.dot(queries, coder.encode(x)) - exact).mean().item() for coder in (turned, plain)]
    assert wrong[0] < wrong[1]
    assert mx.square((plain.decode(plain.encode(x)) - x)[..., quiet]).mean().item() > 0.5


def test_even_rows_gain_nothing_and_lose_nothing() -> None:
    x, codec = draw(1, 2, 500, 64), affine_codec(bits=4, group_size=64)
    assert loss(coder_of(codec, 64), x) == pytest.approx(loss(bind(codec, 64, mx.float32), x), rel=0.05)


# Odd numbers


@dtypes
@codecs
def test_zero_rows_are_zero(codec: Codec, dtype: mx.Dtype) -> None:
    coder, x = coder_of(codec, 64, dtype), draw(1, 1, 3, 64, dtype=dtype)
    x[:, :, 1] = 0
    read = coder.decode(coder.encode(x))
    assert read.dtype == dtype and mx.isfinite(read).all() and (read[:, :, 1] == 0).all()


@codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(codec: Codec, bad: float) -> None:
    clean = draw(1, 2, 6, 64, dtype=mx.float16)
    x = mx.where((mx.arange(6)[:, None] == 2) & (mx.arange(64) == 5), bad, clean).astype(mx.float16)
    coder, others = coder_of(codec, 64, mx.float16), mx.array([0, 1, 3, 4, 5])
    for one, two in zip(coder.encode(clean), coder.encode(x)):
        assert mx.array_equal(one[:, :, others], two[:, :, others])


@codecs
def test_the_largest_numbers_stay_finite(codec: Codec) -> None:
    sign = mx.sign(draw(1, 2, 8, 64))
    for x in (sign * 60000, mx.full((1, 2, 8, 64), 65504.0)):
        coder = coder_of(codec, 64, mx.float16)
        rows = coder.encode(x.astype(mx.float16))
        assert all(mx.isfinite(array).all() for array in rows if mx.issubdtype(array.dtype, mx.floating))
        read = numbers(coder.decode(rows))
        assert np.isfinite(read).all()
        ratio = np.linalg.norm(read, axis=-1) / np.linalg.norm(numbers(x), axis=-1)
        # A rotation can pile a row up in one channel, of which the dtype's range then holds a part.
        assert (ratio > 0.1).all() and (ratio < 3).all()


# As one codec among others


@codecs
def test_bytes_are_those_of_the_codec(codec: Codec) -> None:
    shapes = [[(x.shape, x.dtype) for x in bind(c, 80, mx.float16).empty(2, 3, 10)] for c in (codec, rotated(codec))]
    assert shapes[0] == shapes[1]


@dtypes
@codecs
def test_how_a_prompt_was_cut_leaves_no_trace(codec: Codec, dtype: mx.Dtype) -> None:
    transform = vq.rows(key=rotated(codec), value=rotated(codec, seed=7))
    keys, values = draw(1, 2, 40, 64, dtype=dtype), draw(1, 2, 40, 96, seed=1, dtype=dtype)
    one_shot = feed(transform, keys, values)
    assert_same(feed(transform, keys, values, [1] * 39), one_shot)
    assert_same(feed(transform, keys, values, [5, 1, 16]), one_shot)
    short = transform.trim(one_shot, 7)
    assert_same(feed_more(transform, short, keys[:, :, 33:], values[:, :, 33:]), one_shot, 40)


def test_seeds() -> None:
    x = draw(1, 1, 20, 64)
    codes = [coder_of(affine_codec(bits=4), 64, seed=seed).encode(x)[0] for seed in (7, 7, 8)]
    assert mx.array_equal(codes[0], codes[1]) and not mx.array_equal(codes[0], codes[2])


@codecs
def test_equal_descriptions_are_equal_and_survive_json(codec: Codec) -> None:
    one, back = rotated(codec, 3), restore(json.loads(json.dumps(describe(rotated(codec, 3)))))
    assert one == back and hash(one) == hash(back) and one != rotated(codec, 4)
    assert codec.name in one.name and bind(one, 64, mx.float16) is bind(back, 64, mx.float16)


def test_a_codec_for_keys_stays_one() -> None:
    key = rotated(vq.qjl_codec())
    assert key.keys_only
    with pytest.raises(vq.QuantizerConfigError, match="rotated qjl"):
        vq.rows(value=key)
    x, query = draw(1, 1, 50, 64), draw(1, 1, 4, 64, seed=1)
    coder = bind(key, 64, mx.float32)
    got, exact = numbers(coder.dot(query, coder.encode(x))), numbers(query) @ numbers(x).swapaxes(-1, -2)
    assert np.corrcoef(got.ravel(), exact.ravel())[0, 1] > 0.6


def test_under_a_policy_and_in_a_cache() -> None:
    store = vq.rows(key=rotated(affine_codec(bits=4)), value=rotated(vq.int8_codec()))
    for transform in (store, vq.chain(vq.h2o_policy(budget=16, n_sink=2, grace=4), store)):
        cache = TransformKVCache(transform)
        for n in (30, 1, 1):
            x = draw(1, 2, n, 64, seed=n, dtype=mx.float16)
            held = cache.update_and_fetch(x, x)
            out = cache.attend(draw(1, 4, n, 64, seed=9, dtype=mx.float16), *held, 0.125, "causal" if n > 1 else None)
            assert mx.isfinite(out).all() and out.shape == (1, 4, n, 64)


@pytest.mark.parametrize("codec", [None, "int8", vq.rows(), PlainCodec])
def test_anything_but_a_codec_is_refused(codec: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match="`codec`"):
        rotated(codec)


def test_rows_that_share_numbers_are_refused() -> None:
    from vq_functional.quantize.groups import ChannelGroupsCodec

    with pytest.raises(vq.QuantizerConfigError, match="stand alone"):
        rotated(ChannelGroupsCodec(4, 32))


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match="`seed`"):
        rotated(PlainCodec(), seed)
