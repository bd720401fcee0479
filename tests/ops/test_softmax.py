"""Softmax: MLX's own, and the one for CPUs where MLX has no vector instructions."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.ops import softmax as module
from vq_functional.ops.softmax import LOWEST, softmax, softmax_of


@pytest.fixture(params=[True, False], ids=["mlx", "own"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_vector_exp", lambda: request.param)


def want(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 64), (2, 3, 4, 1, 257)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_softmax(shape: tuple[int, ...], spread: float) -> None:
    scores = mx.random.normal(shape, key=mx.random.key(0)) * spread
    got = np.array(softmax(scores))
    exact = want(np.array(scores).astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=1e-37)


def test_every_step_down_from_the_largest() -> None:
    """To the smallest normal number, each a row of its own beside a zero."""
    x = -np.linspace(0, 87, 100_001).astype(np.float32)
    got = np.array(softmax(mx.stack([mx.array(x), mx.zeros(x.shape)], axis=-1)))[:, 0]
    np.testing.assert_allclose(got, want(np.stack([x, 0 * x], -1).astype(np.float64))[:, 0], rtol=5e-6)


@pytest.mark.parametrize("low", [-104.0, -1e6, LOWEST, -mx.inf])
def test_far_below_the_largest_is_zero(low: float) -> None:
    assert softmax(mx.array([low, 2.0, low])).tolist() == [0, 1, 0]


def test_equal_scores_share() -> None:
    for level in (LOWEST, -1e30, 0.0, 3e38):
        assert softmax(mx.full((4,), level)).tolist() == [0.25] * 4


@pytest.mark.parametrize("bad", [mx.nan, mx.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    got = np.array(softmax(mx.array([[bad, 0.0, 1.0], [0.0, 0.0, 0.0]])))
    assert np.isnan(got[0]).any() and np.allclose(got[1], 1 / 3)


def test_only_what_is_seen() -> None:
    scores = mx.array([[1.0, mx.nan, 1.0], [mx.inf, 5.0, mx.nan], [0.0, 0.0, 0.0]])
    seen = mx.array([[True, False, True], [False, True, False], [False] * 3])
    assert softmax_of(scores, seen).tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]]


@given(rows=st.integers(1, 5), columns=st.integers(1, 300), masked=st.integers(0, 299), seed=st.integers(0, 2**31 - 1))
def test_weights_sum_to_one(rows: int, columns: int, masked: int, seed: int) -> None:
    scores = mx.random.normal((rows, columns), key=mx.random.key(seed)) * 20
    seen = mx.arange(columns) >= min(masked, columns - 1)
    got = softmax_of(scores, mx.broadcast_to(seen, scores.shape))
    assert mx.allclose(got.sum(axis=-1), mx.ones((rows,)), rtol=1e-5)
    assert not mx.where(seen, 0, got).any() and (got >= 0).all()
