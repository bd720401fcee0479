"""KVzip: keep the rows that the context needs to be rebuilt (arXiv 2505.23416).

A row is as important as the most attention that any query pays to it. The
paper asks with the queries of a second pass in which the model repeats the
context (`score_pass`; the adapters drive it). Without that pass the queries of
the text itself ask; without any queries, the keys that are held.

Differs from the paper: heads and layers keep equally many rows, and while
decoding rows still go.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_choice
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.engine import Evicting
from vq_functional.evict.scoring import BLOCK
from vq_functional.evict.slots import SlotState
from vq_functional.evict.tova import TOVAPolicy
from vq_functional.ops.attention import logits
from vq_functional.ops.vectors import TINY


@attrs.frozen(kw_only=True)
class KVzipOptions:
    """`budget` counts every kept row, sinks included.

    `probe` "context": every query asks, or every held key where no queries
    come; "latest": only the newest token does, which makes it tova.
    """

    budget: int = 512
    n_sink: int = 4
    probe: str = "context"
    protect: Spans = protect_field("kvzip")

    def __attrs_post_init__(self) -> None:
        check_policy("kvzip", self.budget, self.n_sink, 0, self.protect)
        check_choice("kvzip", "probe", self.probe, ("context", "latest"))


@attrs.frozen
class KVzipPolicy(Policy):
    """Priority is the most attention ever received from a query, float32 [B, H, slots]; 0 before any query has asked.

    Where queries have asked before and none come now, rows that have not been
    asked about yet stay.
    """

    name = "kvzip"

    def init(self, batch: int, heads: int, slots: int) -> mx.array:
        return mx.zeros((batch, heads, slots), mx.float32)

    def score(self, importance: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        if not scene.proxy:
            several = scene.tokens[:, None, None] > 1
            asking = (scene.query_position >= 0)[:, None]
            paid = _most_attention(scene, scene.queries, asking)
            paid = mx.where(scene.position >= 0, mx.maximum(paid, TINY), 0)
            importance = mx.where(several, mx.maximum(importance, paid), importance)
            return importance, self.rank(importance, scene)
        asked = (importance > 0).any(axis=-1, keepdims=True)
        paid = _most_attention(scene, scene.keys(), scene.position >= 0)
        return importance, mx.where(asked, self.rank(importance, scene), paid)

    def rank(self, importance: mx.array, scene: Scene) -> mx.array:
        return mx.where(importance > 0, importance, 2.0)


@attrs.frozen
class KVzipLatestPolicy(TOVAPolicy):
    """Priority is the attention that the newest token pays."""

    name = "kvzip"


def score_pass(
    transform: Evicting, state: SlotState, queries: mx.array, keys: mx.array, span: tuple[int, int], scale: float
) -> SlotState:
    """The state after queries [B, Hq, S, D] that repeat the positions `span` have asked; nothing is held of them.

    Each attends to the sinks, to the rows of the span, and to the `keys`
    [B, H, S, D] of the repeated tokens up to itself (the paper's section 3.2).
    """
    key_parts, _ = transform.parts(state)
    position = state.position[:, :, None, None]
    inside = (position >= span[0]) & (position < span[1]) | (position >= 0) & (position < transform.policy.n_sink)
    n, heads, most = keys.shape[2], keys.shape[1], mx.zeros(state.position.shape, mx.float32)
    own = keys.astype(mx.float32).swapaxes(-1, -2)[:, :, None]
    for start in range(0, n, BLOCK):
        asking = queries[:, :, start : start + BLOCK]
        stored = mx.where(inside, logits(key_parts, asking, scale), -mx.inf)
        grouped = asking.astype(mx.float32).reshape(asking.shape[0], heads, -1, *asking.shape[2:])
        before = mx.arange(n) <= mx.arange(start, start + asking.shape[2])[:, None]
        repeated = mx.where(before, grouped @ own * scale, -mx.inf)
        both = mx.softmax(mx.concatenate([stored, repeated], axis=-1), axis=-1)
        most = mx.maximum(most, both[..., : position.shape[-1]].max(axis=(2, 3)))
    within = (state.position >= span[0]) & (state.position < span[1])
    return attrs.evolve(state, memory=mx.where(within, mx.maximum(state.memory, mx.maximum(most, TINY)), state.memory))


def _most_attention(scene: Scene, queries: mx.array, asking: mx.array) -> mx.array:
    """The most attention float32 [B, H, T] that queries pay to each held row, earlier and later ones alike.

    queries [B, Hq, M, D], of which those of bool `asking` [B, H or 1, M] count.
    """
    held = (scene.position >= 0)[:, :, None]
    most = mx.zeros(scene.position.shape, mx.float32)
    for start in range(0, queries.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        paid = scene.attention(queries[:, :, block], held & asking[:, :, block, None])
        most = mx.maximum(most, paid.max(axis=(2, 3)))
    return most


def kvzip_policy(**options: Any) -> Policy:
    """Rows stay that some query has needed most; options as in KVzipOptions."""
    o = KVzipOptions(**options)
    kind = KVzipPolicy if o.probe == "context" else KVzipLatestPolicy
    return kind(o.budget, o.n_sink, 0, o.protect)


def kvzip(**options: Any) -> Transform:
    """Evict by the most attention received; kept rows stay as they came."""
    return chain(kvzip_policy(**options), rows(), name="kvzip")
