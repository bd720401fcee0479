"""Sign planes: bits, products against dense ones, with MLX's one-bit kernels and without."""

import mlx.core as mx
import numpy as np
import pytest

from vq_functional.ops import signs as module
from vq_functional.ops.signs import one_bit_matmul, pack_signs, sign_matmul, signs

DIMS = [1, 20, 32, 40, 64, 80, 96, 128]


@pytest.fixture(params=["dense", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to a product; MLX's kernels where the default device has them."""
    has_kernels = one_bit_matmul(mx.default_device().type)
    monkeypatch.setattr(module, "one_bit_kernels", lambda: request.param == "kernels" and has_kernels)


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def dense(positive: mx.array) -> np.ndarray:
    return np.where(np.array(positive), 1.0, -1.0)


@pytest.mark.parametrize("dim", DIMS)
def test_bits_stand_for_signs_least_significant_first(dim: int) -> None:
    positive = draw(2, 3, dim) > 0
    plane = pack_signs(positive)
    assert plane.dtype == mx.uint32 and plane.shape == (2, 3, -(-dim // 32))
    for row, bits in zip(plane.reshape(6, -1).tolist(), np.array(positive).reshape(6, dim)):
        assert [row[i // 32] >> i % 32 & 1 for i in range(dim)] == bits.astype(int).tolist()
    got = signs(plane, dim)
    assert got.dtype == mx.float32 and np.array_equal(np.array(got), dense(positive))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_products_equal_dense_ones(dim: int, rows: int, path: None) -> None:
    positive = draw(2, 2, rows, dim) > 0
    plane, matrix = pack_signs(positive), dense(positive)
    queries, weights = draw(2, 2, 3, dim, seed=1), draw(2, 2, 3, rows, seed=2)
    scores = sign_matmul(queries, plane, dim, transpose=True)
    sums = sign_matmul(weights, plane, dim, transpose=False)
    assert scores.dtype == sums.dtype == mx.float32
    assert scores.shape == (2, 2, 3, rows) and sums.shape == (2, 2, 3, dim)
    np.testing.assert_allclose(np.array(scores), np.array(queries) @ matrix.swapaxes(-1, -2), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(np.array(sums), np.array(weights) @ matrix, rtol=1e-5, atol=2e-5)


def test_one_query_against_the_first_rows_of_a_larger_plane(path: None) -> None:
    positive = draw(1, 2, 256, 64) > 0
    plane, matrix = pack_signs(positive)[:, :, :16], dense(positive)[:, :, :16]
    q = draw(1, 2, 1, 64, seed=3)
    got = sign_matmul(q, plane, 64, transpose=True)
    np.testing.assert_allclose(np.array(got), np.array(q) @ matrix.swapaxes(-1, -2), rtol=1e-5, atol=2e-5)
    w = draw(1, 2, 1, 16, seed=4)
    got = sign_matmul(w, plane, 64, transpose=False)
    np.testing.assert_allclose(np.array(got), np.array(w) @ matrix, rtol=1e-5, atol=2e-5)


def test_all_of_one_sign(path: None) -> None:
    x = draw(1, 64)
    for sign in (1, -1):
        plane = pack_signs(mx.full((4, 64), sign > 0))
        want = sign * x.sum().item()
        np.testing.assert_allclose(np.array(sign_matmul(x, plane, 64, transpose=True)), want, rtol=1e-4, atol=1e-5)
