"""Law: every head size works, values may be wider or narrower than keys; what can't be is refused by name."""

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from laws.common import (
    Run,
    Subject,
    begin,
    call,
    held_positions,
    keys_and_values,
    numbers,
    over,
    read_in_order,
    tokens,
)

SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (128, 64), (64, 96), (80, 160), (192, 128)]
PROMPT = 60


def alignment(got: mx.array, want: np.ndarray) -> np.ndarray:
    """Cosine of every row with the row it stands for."""
    a, b = numbers(got), want
    return (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def at(x: mx.array, position: np.ndarray) -> np.ndarray:
    """Rows of `x` [B, H, S, D] at `position` [B, H, rows]."""
    return np.take_along_axis(numbers(x), position[..., None], axis=2)


@over()
@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES, ids=[f"{k}x{v}" for k, v in SIZES])
def test_head_sizes(subject: Subject, key_dim: int, value_dim: int) -> None:
    transform = subject.transform
    spec = vq.KVSpec(batch=1, kv_heads=2, key_dim=key_dim, value_dim=value_dim, capacity=96)
    try:
        run = begin(transform, spec)
    except vq.QuantizerConfigError as refusal:
        assert "head_dim" in str(refusal)
        assert {key_dim, value_dim}.isdisjoint({64, 128})
        return
    keys, values = keys_and_values(spec, PROMPT)
    run = check_calls(subject, run, keys, values)
    position = held_positions(transform, run)
    for got, want, dim in zip(read_in_order(transform, run), (keys, values), (key_dim, value_dim), strict=True):
        assert got.shape[-1] == dim
        assert alignment(got, at(want, position)).min() > 0.5, "rows that are held are not those that came"


def check_calls(subject: Subject, run: Run, keys: mx.array, values: mx.array) -> Run:
    """Two prompts, a token and its attention: right shapes, right rows, nothing but numbers."""
    transform, start = subject.transform, 0
    for n in (40, 19, 1):
        new = slice(start, start + n)
        queries = tokens(n, 7, batch=1, heads=6, dim=keys.shape[3])
        held = transform.write(run.state, keys[:, :, new], values[:, :, new])
        out = transform.attend(held, queries, keys.shape[3] ** -0.5)
        assert out.shape == (1, 6, n, values.shape[3])
        assert mx.isfinite(out).all()
        run, keys_out, values_out = call(transform, run, keys[:, :, new], values[:, :, new])
        assert (keys_out.shape[3], values_out.shape[3]) == (keys.shape[3], values.shape[3])
        start += n
    return run
