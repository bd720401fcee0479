"""MorphKV: old rows stay by the attention of the newest tokens (arXiv 2503.00979).

With real queries the paper's rule: each of the last `window` queries spreads
one softmax over the rows before the window, and `fuse` joins these. Without
them the keys of the window stand in: over all rows, by their mean.

Differs from the paper: the first `n_sink` rows are kept, and the window's
queries are not: each row remembers its scores with them. A call of several
tokens selects once, at its end.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_choice, check_int
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.ops.rows import newest_rows, pick
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.tables import counting


@attrs.frozen(kw_only=True)
class MorphKVOptions:
    """`budget` counts every kept row, sinks and the `window` newest rows included.

    `fuse`: a row counts by its greatest share of the window's attention
    ("max") or by the sum of its shares ("sum"); with real queries only.
    """

    budget: int = 512
    n_sink: int = 4
    window: int = 8
    fuse: str = "max"
    protect: Spans = protect_field("morphkv")

    def __attrs_post_init__(self) -> None:
        check_int("morphkv", "window", self.window, 1)
        check_policy("morphkv", self.budget, self.n_sink, self.window, self.protect, "window")
        check_choice("morphkv", "fuse", self.fuse, ("max", "sum"))


@attrs.frozen
class MorphKVPolicy(Policy):
    """Memory is a ring: a row's scores float32 [B, H, slots, window] with the last queries, by position.

    The query at position p has column p modulo `window`; LOWEST stands for no
    query. A row that leaves the window has met all of these queries.
    """

    fuse: str = "max"
    name = "morphkv"

    @property
    def window(self) -> int:
        return self.recent

    def init(self, batch: int, heads: int, slots: int) -> tuple[mx.array]:
        return (mx.zeros((batch, heads, slots, self.window), mx.float32),)

    def score(self, memory: tuple[mx.array], scene: Scene) -> tuple[tuple[mx.array], mx.array]:
        memory = (self._turned(memory[0], scene),)
        return memory, self._shares_of_keys(scene) if scene.proxy else self.rank(memory, scene)

    def rank(self, memory: tuple[mx.array], scene: Scene) -> mx.array:
        (ring,) = memory
        old = (scene.position >= 0) & (scene.position < scene.offset[:, None, None] - self.window)
        shares = _log_shares(ring, old[..., None], axis=2)
        return shares.max(axis=-1) if self.fuse == "max" else mx.logsumexp(shares, axis=-1)

    def _turned(self, ring: mx.array, scene: Scene) -> mx.array:
        """The ring with the scores of this call's last queries in their columns."""
        count = min(self.window, scene.queries.shape[2])
        age = (scene.offset[:, None] - 1 - counting(self.window)) % self.window
        fresh = age < mx.minimum(scene.tokens, count)[:, None]
        if scene.proxy:
            return mx.where(fresh[:, None, None], LOWEST, ring)
        index = mx.maximum(scene.lengths[:, None] - count + counting(count), 0)
        logits = scene.logits(mx.take_along_axis(scene.queries, index[:, None, :, None], axis=2)).sum(axis=2)
        logits = mx.where(mx.isfinite(logits), logits, LOWEST)
        place = mx.maximum(count - 1 - age, 0)
        latest = mx.take_along_axis(logits, place[:, None, :, None], axis=2)
        return mx.where(fresh[:, None, None], latest.swapaxes(2, 3), ring)

    def _shares_of_keys(self, scene: Scene) -> mx.array:
        """Logarithm float32 [B, H, T] of the attention that the newest `window` keys pay in all."""
        index = newest_rows(scene.position, min(self.window, scene.position.shape[2]))
        asking = (pick(scene.position, index) >= 0)[..., None]
        logits = scene.logits(pick(scene.keys(), index))[:, :, 0]
        return mx.logsumexp(_log_shares(logits, asking & (scene.position >= 0)[:, :, None], axis=3), axis=2)


def _log_shares(logits: mx.array, seen: mx.array, axis: int) -> mx.array:
    """Logarithm of the softmax along `axis` over what is `seen`, LOWEST elsewhere: far from its peak softmax is 0."""
    seen = seen & mx.isfinite(logits) & (logits > LOWEST)
    logits = mx.where(seen, logits, LOWEST)
    shares = mx.maximum(logits - mx.logsumexp(logits, axis=axis, keepdims=True), LOWEST)
    return mx.where(seen, shares, LOWEST)


def morphkv_policy(**options: Any) -> MorphKVPolicy:
    """Rows stay that the newest tokens attend to; options as in MorphKVOptions."""
    o = MorphKVOptions(**options)
    return MorphKVPolicy(o.budget, o.n_sink, o.window, o.protect, o.fuse)


def morphkv(**options: Any) -> Transform:
    """Evict by the attention of the newest tokens; kept rows stay as they came."""
    return chain(morphkv_policy(**options), rows(), name="morphkv")
