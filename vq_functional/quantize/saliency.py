"""How much later queries look at a row: attention per query that can see it (arXiv 2405.14256, equation 9)."""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.describe import Described
from vq_functional.ops.attention import Parts, probabilities
from vq_functional.ops.rows import chosen, pick, top_mask

LOT = 128  # probes at a time: bounds the probability matrix of a long prompt
WHOLE = 10**9


@attrs.frozen
class Probes(Described):
    """Of the queries of a call those that are asked: a `share`, half of it the newest and half drawn by `seed`."""

    share: float
    seed: int

    def choose(self, queries: mx.array, position: mx.array, end: mx.array) -> tuple[mx.array, mx.array]:
        """Some of `queries` [B, Hq, S, D] at `position` int [B, S], and their positions; below zero is none.

        `end` int [B]: the position after the last query that is no padding.
        """
        n = queries.shape[2]
        if n == 1:
            return queries, position
        count = self._half((position >= 0).sum(axis=-1).astype(mx.int64)).astype(mx.int32)
        newest = position >= (end - count)[:, None]
        rest = mx.where((position >= 0) & ~newest, self._draws(position), -mx.inf)[:, None]
        wanted = newest[:, None] | top_mask(rest, count, latest=False)
        index, found = chosen(wanted, min(n, 2 * self._half(n)))
        return pick(queries, index), mx.where(found, pick(position[:, None], index), -1)[:, 0]

    def _half(self, tokens: Any) -> Any:
        """Half of the share of so many `tokens`, an int or an array, rounded up; integers make both agree."""
        return (tokens * round(self.share / 2 * WHOLE) + WHOLE - 1) // WHOLE

    def _draws(self, position: mx.array) -> mx.array:
        """Uniform numbers that follow from seed and position alone."""
        low = position.reshape(-1).astype(mx.uint32)
        keys = mx.stack([mx.full(low.shape, self.seed, mx.uint32), low], axis=-1)
        return mx.vmap(lambda key: mx.random.uniform(key=key))(keys).reshape(position.shape)


def attention_received(
    parts: Parts, columns: mx.array, queries: mx.array, position: mx.array
) -> tuple[mx.array, mx.array]:
    """Attention float32 [B, H, C] that the columns get, and how many queries see them, float32 [B, 1, C].

    `columns` int [B, 1, C] and `position` int [B, S] are token positions, below
    zero for none. Query heads of a KV head are added up.
    """
    mass, seen = mx.array(0.0), mx.array(0.0)
    for start in range(0, queries.shape[2], LOT):
        lot = slice(start, start + LOT)
        own = columns[:, :, None]
        visible = (own >= 0) & (own <= position[:, None, lot, None])
        weights = probabilities(parts, queries[:, :, lot], queries.shape[-1] ** -0.5, visible)
        mass = mass + weights.sum(axis=(2, 3))
        seen = seen + visible.astype(mx.float32).sum(axis=2)
    return mass, seen
