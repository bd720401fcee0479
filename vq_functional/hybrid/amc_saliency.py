"""How much a row matters to AMC: its size, its distance from the others of its block, or what queries look for."""

import attrs
import mlx.core as mx

from vq_functional.core.describe import Described
from vq_functional.ops.rows import top_mask
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.vectors import TINY, norm

NORMALIZE = ("deviation", "size", "none")
LIMITS = (0.1, 10.0)  # of the factor by which a threshold moves


@attrs.frozen
class Saliency(Described):
    """Of rows by magnitude, `alpha` of it with the cosine to the queries of the block if these are asked (None: not).

    `gamma` and `calib_variance` move the thresholds (None: they stay).
    """

    normalize: str
    alpha: float | None
    gamma: float
    calib_variance: float | None

    def of(self, keys: mx.array, queries: mx.array | None = None) -> mx.array:
        """Saliency float32 [..., C] of `keys` [..., C, D], LOWEST where one is not finite.

        `queries` [..., C, D], zero where none came; where a block has none, the mean key stands in.
        """
        keys = keys.astype(mx.float32)
        finite = mx.isfinite(keys).all(axis=-1)
        keys = mx.where(finite[..., None], keys, 0)
        saliency = self._magnitude(keys, finite)
        if self.alpha is not None:
            cosine = _cosine(keys, _mean_direction(keys, queries))
            saliency = self.alpha * saliency + (1 - self.alpha) * cosine
        return mx.where(finite, saliency, LOWEST)

    def lowered(self, saliency: mx.array, slots: mx.array, high: int, mid: int) -> mx.array | None:
        """Which rows, bool [..., C] in the order of `slots`, stay below the moved threshold of their tier.

        The threshold of a tier is the saliency of its last row.
        """
        if self.calib_variance is None:
            return None
        ordered = mx.take_along_axis(saliency, slots, axis=-1)
        variance = self.variance(saliency)[..., None]
        change = -self.gamma * mx.log(mx.maximum(variance, TINY) / self.calib_variance)
        change = mx.clip(1 + change, *LIMITS) - 1
        parts = mx.split(ordered, [high, high + mid], axis=-1)
        below = [mx.zeros(part.shape, mx.bool_) for part in parts]
        for tier in (0, 1):
            if parts[tier].shape[-1]:
                real = mx.where(parts[tier] > LOWEST, parts[tier], mx.inf)
                threshold = real.min(axis=-1, keepdims=True)
                below[tier] = (parts[tier] < threshold + mx.abs(threshold) * change) & (change > 0)
        return mx.concatenate(below, axis=-1)

    def variance(self, saliency: mx.array) -> mx.array:
        """Variance [...] of the rows of a block [..., C] that are finite."""
        real = saliency > LOWEST
        count = mx.maximum(real.sum(axis=-1, keepdims=True), 1)
        mean = mx.where(real, saliency, 0).sum(axis=-1, keepdims=True) / count
        return (mx.square(mx.where(real, saliency - mean, 0)) / count).sum(axis=-1)

    def _magnitude(self, keys: mx.array, finite: mx.array) -> mx.array:
        """In [0, 1]: [..., C] of `keys` [..., C, D], zero where they are not `finite`."""
        if self.normalize == "none":
            return mx.clip(mx.abs(keys).mean(axis=-1), 0, 1)
        if self.normalize == "size":
            size = mx.abs(keys / keys.shape[-1]).sum(axis=-1)
        else:
            count = mx.maximum(finite.sum(axis=-1), 1)[..., None, None]
            away = mx.where(finite[..., None], keys - (keys / count).sum(axis=-2, keepdims=True), 0)
            size = norm(away)[..., 0]
        return size / mx.maximum(size.max(axis=-1, keepdims=True), TINY)


def slots_by(saliency: mx.array, high: int, mid: int) -> mx.array:
    """Rows int32 [B, H, N, C] of each block: the `high` most salient, then the `mid` next, then the others.

    Each tier is in token order. `saliency` [B, H, N, C]; of equal rows the first is the more salient.
    """
    batch, heads, blocks, window = saliency.shape
    flat = saliency.reshape(batch, heads * blocks, window)
    tier = mx.full(flat.shape, 2, mx.int32)
    for count in (high, high + mid):
        tier = tier - top_mask(flat, mx.full((batch,), count), latest=False)
    return mx.argsort(tier * window + mx.arange(window), axis=-1).reshape(saliency.shape).astype(mx.int32)


def _mean_direction(keys: mx.array, queries: mx.array | None) -> mx.array:
    """Sum [..., 1, D] of the queries of each block, or of its keys where there are none."""
    of_keys = keys.sum(axis=-2, keepdims=True)
    if queries is None:
        return of_keys
    queries = queries.astype(mx.float32)
    asked = (queries != 0).any(axis=(-1, -2), keepdims=True)
    return mx.where(asked, queries.sum(axis=-2, keepdims=True), of_keys)


def _cosine(keys: mx.array, direction: mx.array) -> mx.array:
    """Cosines [..., C] of `keys` [..., C, D] with `direction` [..., 1, D]; 0 for a zero vector."""
    unit = direction / mx.maximum(norm(direction), TINY)
    return (keys / mx.maximum(norm(keys), TINY) * unit).sum(axis=-1)
