"""A row of the largest numbers that a dtype has: every row reads finite, whatever else the tables share."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import vq_functional as vq

N = 160
METHODS: dict[str, Callable[[], Any]] = {
    "svdq": lambda: vq.svdq(n_fit=32),
    "palu": lambda: vq.palu(n_fit=64),
    "palu one group": lambda: vq.palu(n_fit=64, n_head_groups=1, quantize_values=False),
    "kvtc": lambda: vq.kvtc(n_fit=32, window=16),
    "xkv": lambda: vq.xkv(layers=2, n_fit=64),
    "xquant": lambda: vq.xquant(layers=2, residual_length=16),
    "minicache": lambda: vq.minicache(layers=2, residual_length=16),
    "anchorkv": vq.anchorkv,
}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("at", [20, N - 40], ids=["fitted", "later"])
@pytest.mark.parametrize("name", METHODS)
def test_a_row_of_the_largest_numbers_is_read_finite(name: str, at: int, dtype: mx.Dtype) -> None:
    transform = METHODS[name]()
    x = mx.random.normal((1, 2, N, 32), key=mx.random.key(0))
    huge = mx.finfo(dtype).max * mx.where(mx.arange(32) % 3 == 0, -1.0, 1.0)
    x = mx.where((mx.arange(N) == at)[:, None] & (mx.arange(2) == 0)[:, None, None], huge, x).astype(dtype)
    state = transform.init_state(vq.KVSpec(kv_heads=2, key_dim=32, value_dim=32, dtype=dtype, capacity=N + 64))
    state, _, _ = transform.update(state, x, x)
    state = transform.compress(state, N) if name == "anchorkv" else state
    assert state.coded.item() > at
    for read in transform.read(state):
        assert mx.isfinite(read).all().item()
