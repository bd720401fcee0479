"""KVzip: keep the rows that the context needs to be rebuilt (arXiv 2505.23416).

A row is as important as the most attention that any query pays to it. The
paper asks with the queries of a second pass in which the model repeats the
context (`score_pass`; the adapters drive it), each query head for itself.
Without that pass the queries of the text itself ask, the query heads of a KV
head on average: what one head alone looks at in passing matters less to the
text that follows. Without any queries, the keys ask that are held.

Differs from the paper: heads and layers keep equally many rows, and while
decoding rows still go.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import plain_part
from vq_functional.core.errors import check_choice
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.engine import Evicting
from vq_functional.evict.scoring import BLOCK
from vq_functional.evict.slots import SlotState
from vq_functional.evict.tova import TOVAPolicy
from vq_functional.ops.attention import logits, mixed
from vq_functional.ops.masks import causal, query_positions
from vq_functional.ops.softmax import LOWEST, softmax
from vq_functional.ops.vectors import TINY, to_dtype


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
    transform: Evicting,
    state: SlotState,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    span: tuple[int, int],
    scale: float,
) -> tuple[SlotState, mx.array]:
    """The attention [B, Hq, S, Dv] of tokens that repeat the positions `span`, and a state that remembers it.

    queries [B, Hq, S, D], keys [B, H, S, D] and values [B, H, S, Dv] are those
    of the repeated tokens; nothing is held of them. Each attends to all rows
    and to the repeated tokens up to itself. What counts for a row is its share
    among the sinks, the rows of the span and the repeated tokens (the paper's
    section 3.2).
    """
    key_parts, value_parts = transform.parts(state)
    position, n = state.position, keys.shape[2]
    asked = query_positions(state.offset, n)
    columns = mx.concatenate([position, mx.broadcast_to(asked[:, None], (*position.shape[:2], n))], axis=-1)
    within = (position >= span[0]) & (position < span[1])
    counts = within | ((position >= 0) & (position < transform.policy.n_sink))
    counts = counts[:, :, None, :, None].astype(mx.float32)
    most, outs = mx.zeros(position.shape, mx.float32), []
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        scores = logits((*key_parts, plain_part(keys[:, :, :end])), queries[:, :, start:end], scale)
        seen = causal(columns[..., : scores.shape[-1]], asked[:, start:end])
        paid = softmax(mx.where(seen[:, :, None], scores, LOWEST))
        outs.append(mixed((*value_parts, plain_part(values[:, :, :end])), paid))
        stored, repeated = mx.split(paid, [position.shape[2]], axis=-1)
        among = stored @ counts + repeated.sum(axis=-1, keepdims=True)
        most = mx.maximum(most, (stored / mx.maximum(among, TINY)).max(axis=(2, 3)))
    memory = mx.where(within, mx.maximum(state.memory, mx.maximum(most, TINY)), state.memory)
    return attrs.evolve(state, memory=memory), to_dtype(mx.concatenate(outs, axis=2), queries.dtype)


def _most_attention(scene: Scene, queries: mx.array, asking: mx.array) -> mx.array:
    """The most attention float32 [B, H, T] that a query pays to each held row, earlier and later ones alike.

    queries [B, Hq, M, D], of which those of bool `asking` [B, H or 1, M] count;
    the query heads of a KV head on average.
    """
    held = (scene.position >= 0)[:, :, None]
    most = mx.zeros(scene.position.shape, mx.float32)
    for start in range(0, queries.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        paid = scene.attention(queries[:, :, block], held & asking[:, :, block, None])
        most = mx.maximum(most, paid.mean(axis=2).max(axis=2))
    return most


def kvzip_policy(**options: Any) -> Policy:
    """Rows stay that some query has needed most; options as in KVzipOptions."""
    o = KVzipOptions(**options)
    kind = KVzipPolicy if o.probe == "context" else KVzipLatestPolicy
    return kind(o.budget, o.n_sink, 0, o.protect)


def kvzip(**options: Any) -> Transform:
    """Evict by the most attention received; kept rows stay as they came."""
    return chain(kvzip_policy(**options), rows(), name="kvzip")
