"""TOVA: evict what the newest token attends to least (arXiv 2401.06104).

With real queries the paper's rule: attention of the newest query, averaged
over all query heads of the layer, so that all heads keep the same rows.
Without them the newest key stands in and each head decides for itself.

Differs from the paper: the first `n_sink` rows are kept.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_choice
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.ops.rows import read_rows
from vq_functional.ops.softmax import LOWEST


@attrs.frozen(kw_only=True)
class TOVAOptions:
    """`budget` counts every kept row, sinks included; `n_sink` 0 is the paper's rule.

    `share_heads`: all heads keep the same rows; None is True with real queries
    and False without. `backend` is accepted and changes nothing.
    """

    budget: int = 512
    n_sink: int = 4
    backend: str = "auto"
    share_heads: bool | None = None
    protect: Spans = protect_field("tova")

    def __attrs_post_init__(self) -> None:
        check_policy("tova", self.budget, self.n_sink, 0, self.protect)
        check_choice("tova", "backend", self.backend, ("auto", "mlx", "metal", "reference"))
        check_choice("tova", "share_heads", self.share_heads, (None, True, False))


@attrs.frozen
class TOVAPolicy(Policy):
    """Priority is the attention that the newest token pays; nothing is remembered.

    It is ranked by logarithm: far from its peak, where rows are evicted, a
    float32 softmax is zero.
    """

    share_heads: bool | None = None
    shard: Shard = WHOLE
    name = "tova"

    def score(self, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        newest = read_rows(scene.queries, scene.lengths - 1, 1)
        logits = scene.logits(newest)[..., 0, :]
        seen = (scene.position >= 0)[:, :, None] & mx.isfinite(logits)
        logits = mx.where(seen, logits, LOWEST)
        weights = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        weights = mx.where(seen, mx.maximum(weights, LOWEST), LOWEST)
        heads, group = logits.shape[1:3]
        # A single query ranks by its logits, which keep their full precision.
        own = logits[:, :, 0] if group == 1 else mx.logsumexp(weights, axis=2)
        if not self._shares(scene) or heads * self.shard.size == 1:
            return memory, own
        # Columns of different heads can be averaged only where they hold the same positions.
        position = self.shard.gathered(scene.position)
        alike = (position == position[:, :1]).all(axis=(1, 2), keepdims=True)
        shared = mx.logsumexp(weights, axis=(1, 2))[:, None]
        if self.shard.size > 1:
            shared = mx.logsumexp(self.shard.gathered(shared), axis=1, keepdims=True)
        return memory, mx.where(alike, shared, own)

    def _shares(self, scene: Scene) -> bool:
        return not scene.proxy if self.share_heads is None else self.share_heads


def tova_policy(**options: Any) -> TOVAPolicy:
    """Rows stay that the newest token attends to most; options as in TOVAOptions."""
    o = TOVAOptions(**options)
    return TOVAPolicy(o.budget, o.n_sink, 0, o.protect, o.share_heads)


def tova(**options: Any) -> Transform:
    """Evict by the newest token's attention; kept rows stay as they came."""
    return chain(tova_policy(**options), rows(), name="tova")
