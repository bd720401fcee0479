"""Law: `attend` is softmax attention over the rows that `read` gives back, however they are held."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from laws.common import Subject, begin, feed, keys_and_values, numbers, over, tokens
from vq_functional.core.codec import PlainCoder
from vq_functional.core.transform import Transform

TOLERANCE = {mx.float16: 2e-3, mx.float32: 1e-5}
STORED = 50


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: np.ndarray | None) -> np.ndarray:
    """Head by head and query by query in float64; `mask` bool or additive [B, Hq or 1, S, C]."""
    q, k, v = numbers(queries), numbers(keys), numbers(values)
    batch, query_heads, n, _ = q.shape
    group = query_heads // k.shape[1]
    out = np.zeros((batch, query_heads, n, v.shape[3]))
    for b in range(batch):
        for h in range(query_heads):
            for i in range(n):
                scores = k[b, h // group] @ q[b, h, i] * scale
                if mask is not None:
                    row = np.broadcast_to(mask, (batch, query_heads, n, scores.size))[b, h, i]
                    scores = np.where(row, scores, -np.inf) if row.dtype == bool else scores + row
                weights = np.exp(scores - scores.max())
                out[b, h, i] = weights @ v[b, h // group] / weights.sum()
    return out


def assert_attends(transform: Transform, held: Any, fill: Any, queries: mx.array, kind: str, dtype: mx.Dtype) -> None:
    n, scale = queries.shape[2], queries.shape[3] ** -0.5
    keys, values = transform.read(held, fill)
    columns = keys.shape[2]
    visible = (
        transform.visible(held, n) if fill is None else mx.tril(mx.ones((n, columns)), columns - n)[None, None] > 0
    )
    additive = mx.where(visible, tokens(n * columns, 3, batch=2, heads=1, dim=1).reshape(2, 1, n, columns), -mx.inf)
    odd_heads = (mx.arange(queries.shape[1]) % 2 == 1)[:, None, None]
    per_head = visible & ~(odd_heads & (mx.arange(columns) == 0))
    mask = {"none": None, "causal": "causal", "bool": visible, "additive": additive.astype(dtype), "heads": per_head}[
        kind
    ]
    got = numbers(transform.attend(held, queries, scale, mask, fill))
    reference = np.array((mask if isinstance(mask, mx.array) else visible).astype(mx.float32))
    want = attention(queries, keys, values, scale, reference if kind == "additive" else reference > 0)
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * np.abs(want).max()


@over(without=["pages"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive", "heads"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(("group", "dim", "dtype"), [(1, 64, mx.float16), (3, 64, mx.float32), (3, 80, mx.float16)])
def test_attend_is_attention_over_what_read_returns(
    subject: Subject, kind: str, n: int, group: int, dim: int, dtype: mx.Dtype
) -> None:
    transform = subject.transform
    spec = vq.KVSpec(batch=2, kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype, capacity=96)
    keys, values = keys_and_values(spec, STORED + n)
    run = feed(transform, begin(transform, spec), keys[:, :, :STORED], values[:, :, :STORED], [40, 1, 9])
    held = transform.write(run.state, keys[:, :, STORED:], values[:, :, STORED:])
    queries = tokens(n, 7, heads=2 * group, dim=dim, dtype=dtype)
    for fill in (None, transform.written(run.fill, n)):
        assert_attends(transform, held, fill, queries, kind, dtype)


@over("attends_codes", without=["anchors"])
def test_codes_are_not_turned_back_into_rows(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = subject.transform
    spec = vq.KVSpec(batch=2, kv_heads=2, key_dim=64, value_dim=64, capacity=96)
    keys, values = keys_and_values(spec, 81)
    run = feed(transform, begin(transform, spec), keys[:, :, :80], values[:, :, :80])
    held = transform.write(run.state, keys[:, :, 80:], values[:, :, 80:])
    key_parts, value_parts = transform.parts(held)
    coders = {type(part.coder) for part in key_parts + value_parts} - {PlainCoder}
    assert coders

    def refuse(*_: Any) -> mx.array:
        raise AssertionError("rows were rebuilt")

    for coder in coders:
        monkeypatch.setattr(coder, "decode", refuse)
    out = transform.attend(held, tokens(1, 7, heads=4), 0.125)
    assert mx.isfinite(out).all()
