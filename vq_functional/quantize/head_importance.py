"""How much a head matters: by the spread of its keys' norms, or by how dispersed its attention is."""

import mlx.core as mx

from vq_functional.ops.attention import lower_right
from vq_functional.ops.softmax import softmax_of
from vq_functional.ops.vectors import TINY, norm


def norm_variance(keys: mx.array) -> mx.array:
    """Variance [B, H, U] of the norms of `keys` [B, H, U, R, D], up to a factor that the heads share.

    A row that is not finite does not count.
    """
    size = norm(keys)[..., 0]
    finite = mx.isfinite(size)
    size = mx.where(finite, size, 0)
    size = size / mx.maximum(size.max(axis=(1, 3), keepdims=True), TINY)  # so that squares can't overflow
    count = mx.maximum(finite.sum(axis=-1, keepdims=True), 1)
    away = mx.where(finite, size - size.sum(axis=-1, keepdims=True) / count, 0)
    return mx.square(away).sum(axis=-1) / count[..., 0]


def row_entropy(queries: mx.array, keys: mx.array) -> mx.array:
    """Entropy [..., M] of the attention of each of the newest M rows among R, as a share of the largest possible.

    `queries` [..., M, D], `keys` [..., R, D]; a row sees itself and what came
    before it. The first of all sees one row only, and counts as dispersed.
    """
    newest, rows = queries.shape[-2], keys.shape[-2]
    queries = queries.astype(mx.float32) * keys.shape[-1] ** -0.5
    scores = queries @ keys.astype(mx.float32).swapaxes(-1, -2)
    seen = lower_right(newest, rows) & mx.isfinite(scores)
    weights = softmax_of(scores, seen)
    entropy = -(weights * mx.log(mx.maximum(weights, TINY))).sum(axis=-1)
    most = mx.log(mx.arange(rows - newest + 1, rows + 1).astype(mx.float32))
    return mx.where(most > 0, mx.minimum(entropy / mx.where(most > 0, most, 1), 1), 1)


def ranked(importance: mx.array) -> mx.array:
    """Heads int [B, H, U] by rising `importance` [B, H, U]; of equal ones the first comes first."""
    first, other = importance[:, :, None], importance[:, None]
    head = mx.arange(importance.shape[1])
    before = (head < head[:, None])[..., None]
    rank = ((other < first) | ((other == first) & before)).sum(axis=2)
    return mx.argsort(rank, axis=1)
