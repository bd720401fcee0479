"""Rotary positions: equal to MLX's and mlx_lm's own, at any positions, and undone."""

import itertools
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope

from vq_functional.core.errors import QuantizerConfigError
from vq_functional.ops.rope import Rope, llama3_freqs, scaled_rope

HALF_UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES = {
    "plain": Rope(64),
    "traditional": Rope(64, traditional=True),
    "partial": Rope(16),
    "partial traditional": Rope(24, 500000.0, traditional=True),
    "scaled": Rope(64, 500000.0, 0.25),
    "llama3": Rope(64, 500000.0, freqs=llama3_freqs(64, 500000.0, factor=8.0)),
}
ropes = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
dtypes = pytest.mark.parametrize("dtype", HALF_UNIT, ids=lambda dtype: str(dtype).split(".")[-1])


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.uniform(-1, 1, shape, key=mx.random.key(seed)).astype(dtype)


def largest_difference(x: mx.array, y: mx.array) -> float:
    return mx.abs(x.astype(mx.float32) - y.astype(mx.float32)).max().item()


def turned_by_hand(rope: Rope, x: mx.array, positions: np.ndarray) -> np.ndarray:
    """Each pair as a complex number times exp(i * angle), in double precision; `positions` [B, H, S]."""
    out = np.array(x.astype(mx.float32), dtype=np.float64)
    half = rope.dims // 2
    for batch, head, row in itertools.product(*map(range, out.shape[:3])):
        for i in range(half):
            slow = rope.base ** (2 * i / rope.dims) if rope.freqs is None else rope.freqs[i]
            first, second = (2 * i, 2 * i + 1) if rope.traditional else (i, i + half)
            vector = out[batch, head, row]
            turned = complex(vector[first], vector[second])
            turned *= np.exp(1j * positions[batch, head, row] * rope.scale / slow)
            vector[first], vector[second] = turned.real, turned.imag
    return out


@dtypes
@ropes
def test_equals_complex_products_at_scattered_positions(rope: Rope, dtype: mx.Dtype) -> None:
    x = draw(2, 2, 5, 64, dtype=dtype)
    positions = np.array([[[3, 0, 200, 7, 1], [9, 8, 1000, 6, 5]], [[0, 1, 2, 3, 4], [700, 90, 3, 1, 12]]])
    got = rope.apply(x, mx.array(positions))
    assert got.dtype == dtype and got.shape == x.shape
    want = turned_by_hand(rope, x, positions)
    # float32 angles near 1000 are off by up to 2^-14, and the result is rounded once.
    assert np.abs(np.array(got.astype(mx.float32)) - want).max() <= 1.5 * (2.0**-14 + HALF_UNIT[dtype])


@dtypes
@ropes
def test_turning_back_equals_complex_products_too(rope: Rope, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's kernel is never asked for a position below zero: on a GPU it takes those for large ones."""
    kernel, asked = mx.fast.rope, []

    def listening(*args: Any, offset: mx.array, **more: Any) -> mx.array:
        asked.append(offset)
        return kernel(*args, offset=offset, **more)

    monkeypatch.setattr(mx.fast, "rope", listening)
    x = draw(2, 2, 5, 64, dtype=dtype)
    every = np.array([[[3, 0, -200, 7, -1], [9, 8, -1000, 6, 5]], [[0, -1, 2, -3, 4], [700, 90, -3, -1, 12]]])
    for steps in (every, every[:, 0], every[0, 0]):
        wide = np.broadcast_to(steps[:, None] if steps.ndim == 2 else steps, every.shape)
        got, want = rope.turn(x, mx.array(steps)), turned_by_hand(rope, x, wide)
        assert got.dtype == dtype
        assert np.abs(np.array(got.astype(mx.float32)) - want).max() <= 1.5 * (2.0**-14 + HALF_UNIT[dtype])
    assert len(asked) == 3 and min(offset.min().item() for offset in asked) == 0


@pytest.mark.parametrize("offset", [0, 7, 4096])
@ropes
def test_consecutive_positions_are_bit_equal_to_mlx(rope: Rope, offset: int) -> None:
    x = draw(2, 3, 6, 64)
    base = rope.base if rope.freqs is None else None
    freqs = None if rope.freqs is None else mx.array(rope.freqs)
    plain = {"traditional": rope.traditional, "base": base, "scale": rope.scale, "freqs": freqs}
    want = mx.fast.rope(x, rope.dims, offset=offset, **plain)
    assert mx.array_equal(rope.apply(x, offset + mx.arange(6)), want)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims, scale", [(64, 1.0), (32, 0.5)])
def test_equals_the_layer_of_mlx(dims: int, scale: float, traditional: bool) -> None:
    x = draw(1, 2, 9, 64)
    layer = nn.RoPE(dims, traditional=traditional, base=10000.0, scale=scale)
    rope = Rope(dims, 10000.0, scale, traditional)
    assert mx.array_equal(rope.apply(x, 11 + mx.arange(9)), layer(x, offset=11))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0},
        {"type": "llama3", "factor": 3.0, "original_max_position_embeddings": 512},
    ],
    ids=["none", "default", "linear", "llama3", "llama3 x 32", "llama3 short"],
)
@pytest.mark.parametrize("traditional", [False, True])
def test_equals_the_rotation_that_mlx_lm_builds(scaling: dict | None, traditional: bool) -> None:
    model = initialize_rope(64, 500000.0, traditional, scaling, 131072)
    rope = scaled_rope(64, 500000.0, traditional=traditional, scaling=scaling)
    x = draw(1, 2, 40, 64)
    for offset in (0, 300):
        got = rope.apply(x, offset + mx.arange(40))
        assert largest_difference(got, model(x, offset=offset)) <= 1e-5
    assert largest_difference(rope.undo(model(x, offset=300), 300 + mx.arange(40)), x) <= 2e-5


def test_llama3_frequencies_follow_the_number_of_turns() -> None:
    dims, base, factor, low, high, original = 128, 500000.0, 8.0, 1.0, 4.0, 8192
    got = llama3_freqs(dims, base, factor=factor, low=low, high=high, original=original)
    kinds = set()
    for i in range(dims // 2):
        plain = base ** (2 * i / dims)
        wavelength = 2 * np.pi * plain
        if wavelength < original / high:
            want, kind = plain, "kept"
        elif wavelength > original / low:
            want, kind = plain * factor, "slowed"
        else:
            smooth = (original / wavelength - low) / (high - low)
            want, kind = 1 / ((1 - smooth) / (factor * plain) + smooth / plain), "between"
        kinds.add(kind)
        assert got[i] == pytest.approx(want, rel=1e-5)
    assert kinds == {"kept", "slowed", "between"}
    assert list(got) == sorted(got)


@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 1e-5), (mx.float16, 1e-3), (mx.bfloat16, 8e-3)])
@ropes
def test_undo_returns_the_input(rope: Rope, dtype: mx.Dtype, tolerance: float) -> None:
    x = draw(2, 2, 64, 64, dtype=dtype)
    positions = mx.random.permutation(2000, key=mx.random.key(1))[:128].reshape(2, 64)
    back = rope.undo(rope.apply(x, positions), positions)
    assert back.dtype == dtype
    assert largest_difference(back, x) <= tolerance


@ropes
def test_rotations_add_up(rope: Rope) -> None:
    x, near, far = draw(1, 2, 8, 64), mx.arange(8) * 3, mx.arange(8)[::-1] + 40
    twice = rope.apply(rope.apply(x, near), far)
    assert largest_difference(twice, rope.apply(x, near + far)) <= 1e-4
    assert mx.array_equal(rope.undo(x, near), rope.turn(x, -near))
    assert mx.array_equal(rope.apply(x, mx.zeros(8, mx.int32)), x)


@given(shift=st.integers(0, 2000), distance=st.integers(0, 100))
def test_products_depend_on_the_distance_alone(shift: int, distance: int) -> None:
    rope, q, k = Rope(64), draw(1, 1, 1, 64), draw(1, 1, 1, 64, seed=1)

    def product(query: int, key: int) -> float:
        return (rope.apply(q, mx.array([query])) * rope.apply(k, mx.array([key]))).sum().item()

    assert product(shift + distance, shift) == pytest.approx(product(distance, 0), abs=5e-3)


@ropes
def test_lengths_stay_and_the_rest_of_the_row_is_untouched(rope: Rope) -> None:
    x = draw(1, 2, 6, 64)
    got = rope.apply(x, mx.arange(6) * 50)
    assert mx.array_equal(got[..., rope.dims :], x[..., rope.dims :])
    assert mx.allclose(mx.linalg.norm(got, axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-5)


def test_one_two_and_three_axes_of_positions_mean_the_same() -> None:
    x, rope = draw(2, 3, 4, 32), Rope(32)
    positions = mx.array([5, 900, 0, 17])
    want = rope.apply(x, positions)
    for shape in ((2, 4), (2, 3, 4)):
        assert mx.array_equal(rope.apply(x, mx.broadcast_to(positions, shape)), want)


def test_every_batch_row_and_head_has_its_own_positions() -> None:
    x, rope = draw(2, 3, 4, 32), Rope(32)
    positions = mx.random.randint(0, 500, (2, 3, 4), key=mx.random.key(3))
    got = rope.apply(x, positions)
    for batch, head in itertools.product(range(2), range(3)):
        alone = rope.apply(x[batch : batch + 1, head : head + 1], positions[batch, head])
        assert mx.array_equal(got[batch, head], alone[0, 0])


@pytest.mark.parametrize("shape", [(1, 2, 0, 32), (0, 2, 3, 32)])
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    x = mx.zeros(shape, mx.float16)
    got = Rope(32).apply(x, mx.arange(shape[2]))
    assert got.shape == shape and got.dtype == mx.float16


def test_compiled_and_eager_agree() -> None:
    x, rope = draw(1, 2, 5, 64), ROPES["llama3"]
    step = mx.compile(lambda rows, at: rope.undo(rope.apply(rows, at), at + 1))
    for start in (0, 77):
        at = start + mx.arange(5)
        assert mx.array_equal(step(x, at), rope.undo(rope.apply(x, at), at + 1))


def test_a_rotation_is_plain_data() -> None:
    freqs = llama3_freqs(64, 500000.0, factor=8.0)
    rope = Rope(64, 500000.0, freqs=mx.array(freqs))
    assert rope == Rope(64, 500000.0, freqs=freqs) and hash(rope) == hash(Rope(64, 500000.0, freqs=freqs))
    assert rope != Rope(64, 500000.0)
    assert tuple(json.loads(json.dumps(rope.freqs))) == freqs


@pytest.mark.parametrize(
    "field, build",
    [
        ("dims", lambda: Rope(63)),
        ("dims", lambda: Rope(0)),
        ("dims", lambda: Rope(True)),
        ("base", lambda: Rope(64, 0.0)),
        ("freqs", lambda: Rope(64, freqs=(1.0, 2.0))),
        ("dims", lambda: llama3_freqs(33, factor=8.0)),
        ("factor", lambda: llama3_freqs(32, factor=0.0)),
        ("low", lambda: llama3_freqs(32, factor=8.0, low=4.0, high=4.0)),
        ("scaling", lambda: scaled_rope(64, scaling={"rope_type": "yarn", "factor": 2.0})),
        ("scaling", lambda: scaled_rope(64, scaling={"rope_type": "llama3"})),
        ("x", lambda: Rope(64).apply(mx.zeros((1, 1, 2, 32)), mx.arange(2))),
        ("x", lambda: Rope(32).undo(mx.zeros((1, 2, 32)), mx.arange(2))),
        ("positions", lambda: Rope(32).apply(mx.zeros((1, 1, 2, 32)), mx.arange(3))),
        ("positions", lambda: Rope(32).apply(mx.zeros((2, 1, 2, 32)), mx.zeros((1, 2), mx.int32))),
        ("positions", lambda: Rope(32).apply(mx.zeros((2, 1, 2, 32)), mx.array(0))),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(field: str, build) -> None:
    with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
        build()
