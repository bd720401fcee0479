"""Random rotations: orthonormal, undone, the same in every process, and fast only where that is right."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import openblas
from vq_functional.ops.rotations import (
    DenseRotation,
    HadamardRotation,
    Rotation,
    hadamard_size,
    random_orthogonal,
    random_rotation,
)

FAST = [2, 4, 12, 16, 24, 48, 64, 96, 128, 192, 256, 384]
DENSE = [3, 10, 18, 20, 28, 36, 56, 72, 80, 100, 112, 160, 320, 576]
PRINT_DIGESTS = """
from openblas import use_openblas
use_openblas()
import hashlib, numpy as np, mlx.core as mx
from vq_functional.ops.rotations import random_rotation
for dim in (64, 80):
    print(hashlib.sha256(np.array(random_rotation(dim, 42).apply(mx.eye(dim))).tobytes()).hexdigest())
"""


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def matrix(rotation: Rotation, dim: int) -> np.ndarray:
    """P of y = P x."""
    return np.array(rotation.apply(mx.eye(dim))).astype(np.float64).T


def test_fast_sizes_are_powers_of_two_and_twelve_times_powers_of_two() -> None:
    right = {2**k for k in range(1, 14)} | {12 * 2**k for k in range(10)}
    assert {dim for dim in range(1, 2049) if hadamard_size(dim)} == {dim for dim in right if dim <= 2048}


@pytest.mark.parametrize("dim", FAST + DENSE)
def test_the_kind_follows_the_size(dim: int) -> None:
    kind = HadamardRotation if dim in FAST else DenseRotation
    assert type(random_rotation(dim, 1)) is kind


@pytest.mark.parametrize("dim", FAST + DENSE)
@pytest.mark.parametrize("seed", [0, 42])
def test_orthonormal(dim: int, seed: int) -> None:
    p = matrix(random_rotation(dim, seed), dim)
    np.testing.assert_allclose(p @ p.T, np.eye(dim), atol=2e-5)


@pytest.mark.parametrize("dim", FAST + DENSE)
def test_undo_is_the_inverse(dim: int) -> None:
    rotation, x = random_rotation(dim, 3), draw(2, 2, 5, dim)
    there, back = rotation.apply(x), rotation.undo(rotation.apply(x))
    assert there.dtype == back.dtype == mx.float32 and there.shape == back.shape == x.shape
    assert mx.allclose(back, x, atol=2e-5)
    assert mx.allclose(rotation.apply(rotation.undo(x)), x, atol=2e-5)


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_lengths_and_products_stay(dim: int) -> None:
    rotation, x, y = random_rotation(dim, 5), draw(8, dim), draw(8, dim, seed=1)
    assert mx.allclose(mx.linalg.norm(rotation.apply(x), axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-5)
    assert mx.allclose(rotation.apply(x) @ rotation.apply(y).T, x @ y.T, atol=1e-4)


def test_rows_of_one_call_do_not_touch_each_other() -> None:
    for dim in (64, 80):
        rotation, x = random_rotation(dim, 2), draw(1, 2, 6, dim)
        alone = mx.concatenate([rotation.apply(x[:, :, i : i + 1]) for i in range(6)], axis=2)
        assert mx.allclose(rotation.apply(x), alone, atol=1e-6)


@pytest.mark.parametrize("dim", [64, 80])
def test_made_once_and_different_by_seed(dim: int) -> None:
    assert random_rotation(dim, 42) is random_rotation(dim, 42)
    assert not np.allclose(matrix(random_rotation(dim, 42), dim), matrix(random_rotation(dim, 43), dim), atol=1e-2)


def test_the_global_random_state_plays_no_part() -> None:
    random_orthogonal_once = random_orthogonal(24, 9)
    mx.random.seed(123)
    before = mx.random.state[0]
    again = random_orthogonal(24, 9)
    assert mx.array_equal(random_orthogonal_once, again)
    assert mx.array_equal(mx.random.state[0], before)


def test_the_same_in_a_new_process() -> None:
    # The last bits of a QR factor depend on the LAPACK in use.
    environment = os.environ | {"PYTHONPATH": str(Path(openblas.__file__).parent)}
    command = [sys.executable, "-c", PRINT_DIGESTS]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    here = [
        hashlib.sha256(np.array(random_rotation(dim, 42).apply(mx.eye(dim))).tobytes()).hexdigest() for dim in (64, 80)
    ]
    assert out.split() == here


def test_the_dense_one_is_haar() -> None:
    # A QR factor without the signs of R's diagonal has a diagonal of one sign on average.
    traces = [np.trace(np.array(random_orthogonal(20, seed))) for seed in range(60)]
    assert abs(np.mean(traces)) < 4 / np.sqrt(len(traces))
    assert np.std(traces) == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize("dim", [64, 128, 80])
def test_a_direction_spreads_over_all_coordinates(dim: int) -> None:
    x = draw(256, dim) * mx.where(mx.arange(dim) < 4, 30.0, 1.0)
    turned = np.array(random_rotation(dim, 42).apply(x))
    energy = (turned**2).mean(axis=0)
    assert energy.max() < 4 * energy.mean() and np.array(mx.square(x).mean(axis=0)).max() > 10 * energy.mean()
