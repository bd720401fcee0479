"""Attention over rows that are held in parts, some of them as codes."""

import math
from typing import TypeAlias

import mlx.core as mx

from vq_functional.core.codec import Part, PlainCoder
from vq_functional.core.errors import check
from vq_functional.ops.softmax import LOWEST, softmax, softmax_of
from vq_functional.ops.tables import counting
from vq_functional.ops.vectors import to_dtype

Mask: TypeAlias = mx.array | str | None
Parts: TypeAlias = tuple[Part, ...]


def decode(parts: Parts) -> mx.array:
    """All columns as vectors [B, H, C, D]."""
    return _joined([part.decode() for part in parts], axis=2)


def logits(parts: Parts, queries: mx.array, scale: float) -> mx.array:
    """Scaled scores float32 [B, H, G, S, C]; `queries` [B, H*G, S, D] are grouped by KV head."""
    grouped = _by_kv_head(queries, _kv_heads(parts))
    batch, heads, group, n, dim = grouped.shape
    flat = (grouped.astype(mx.float32) * scale).reshape(batch, heads, group * n, dim)
    scores = _joined([part.dot(flat) for part in parts], axis=-1)
    return scores.reshape(batch, heads, group, n, scores.shape[-1])


def rescaled(queries: mx.array, scale: float) -> mx.array:
    """Queries [..., D] whose scores q . k / sqrt(D) are those of `queries` at `scale`; float32 where they differ."""
    factor = scale * queries.shape[-1] ** 0.5
    return queries if math.isclose(factor, 1) else queries.astype(mx.float32) * factor


def probabilities(parts: Parts, queries: mx.array, scale: float, visible: mx.array) -> mx.array:
    """Softmax float32 [B, H, G, S, C] over the `visible` [B, H, S, C] columns; zero where none is.

    For scoring: a NaN or infinite score counts as the lowest one.
    """
    scores = logits(parts, queries, scale)
    seen = mx.expand_dims(visible, 2) & mx.isfinite(scores)
    return softmax_of(scores, seen)


def attend(key_parts: Parts, value_parts: Parts, queries: mx.array, scale: float, mask: Mask = None) -> mx.array:
    """One softmax over all parts, straight from their codes.

    `queries` [B, Hq, S, D]; `mask` None, "causal" (lower right), bool or
    additive, broadcast to [B, Hq or 1, S, C]. Returns [B, Hq, S, Dv].
    """
    if all(isinstance(part.coder, PlainCoder) for part in key_parts + value_parts):
        keys, values = decode(key_parts), decode(value_parts)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    weights = softmax(masked(logits(key_parts, queries, scale), mask))
    return to_dtype(mixed(value_parts, weights), queries.dtype)


def mixed(value_parts: Parts, weights: mx.array) -> mx.array:
    """Sums float32 [B, H*G, S, Dv] of values by `weights` [B, H, G, S, C], straight from codes."""
    batch, heads, group, n, columns = weights.shape
    flat = weights.reshape(batch, heads, group * n, columns)
    out, start = mx.array(0.0), 0
    for part in value_parts:
        out = out + part.mix(flat[..., start : start + part.count])
        start += part.count
    return out.reshape(batch, heads * group, n, -1)


def masked(scores: mx.array, mask: Mask) -> mx.array:
    """Scores [B, H, G, S, C] with a mask of any accepted kind applied."""
    if mask is None:
        return scores
    _, heads, group, n, columns = scores.shape
    if isinstance(mask, str):
        check(mask == "causal", "attend", "mask", 'must be None, "causal" or an array', mask)
        mask = lower_right(n, columns)
    mask = _mask_by_kv_head(mask, heads, group)
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, LOWEST)
    return mx.maximum(scores + mask.astype(mx.float32), LOWEST)


def lower_right(n: int, columns: int) -> mx.array:
    """Bool [n, columns]: the last `n` columns are the queries' own, each sees up to itself."""
    return counting(n)[:, None] + (columns - n) >= counting(columns)


def _mask_by_kv_head(mask: mx.array, heads: int, group: int) -> mx.array:
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    rule = f"must have 1 or {heads * group} heads"
    check(mask.shape[1] in (1, heads * group), "attend", "mask", rule, mask.shape)
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], heads, group, *mask.shape[2:])


def _kv_heads(parts: Parts) -> int:
    # Coded rows may share their arrays between heads; exact ones, which stand last, do not.
    return parts[-1].rows[0].shape[1]


def _by_kv_head(queries: mx.array, heads: int) -> mx.array:
    batch, query_heads, n, dim = queries.shape
    check(query_heads % heads == 0, "attend", "queries", f"must have a multiple of {heads} heads", queries.shape)
    return queries.reshape(batch, heads, query_heads // heads, n, dim)


def _joined(arrays: list[mx.array], axis: int) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)
