"""Folding: what an evicted row held goes on, in part, in rows that stay."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.policy import Picked, Policy, Scene, Shares
from vq_functional.core.store import HeldRows, RowStore
from vq_functional.core.tree import map_leaves
from vq_functional.evict.slots import SlotState
from vq_functional.ops.rows import chosen, pick, put


def fold(
    policy: Policy, store: RowStore, state: SlotState, source: SlotState, scene: Scene, kept: Picked, lost: Picked
) -> SlotState:
    """`state`, whose slots are the columns `kept` of `source`, with the columns `lost` folded into it.

    A row that takes nothing in keeps its bits; the others are decoded, summed in
    float32 and encoded again.
    """
    memory, values, keys = policy.fold(source.memory, scene, kept, lost)
    key_coder, value_coder = store.coders(state.layout)
    gone = map_leaves(lambda x: pick(x, lost.index), source.rows)
    most = min(kept.index.shape[2], policy.folds * lost.index.shape[2])
    held_keys = state.rows.keys
    if keys is not None:
        held_keys = _taken_in(key_coder, held_keys, gone.keys, keys, most)
    rows = HeldRows(held_keys, _taken_in(value_coder, state.rows.values, gone.values, values, most))
    return attrs.evolve(state, rows=rows, memory=memory)


def _taken_in(coder: Coder, held: Rows, gone: Rows, shares: Shares, most: int) -> Rows:
    """`held` with at most `most` rows rewritten as their sums."""
    target, hit = chosen((shares.lost != 0).any(axis=-1), most)
    old = map_leaves(lambda x: pick(x, target), held)
    lost = pick(shares.lost, target) @ coder.decode(gone).astype(mx.float32)
    total = pick(shares.own, target)[..., None] * coder.decode(old).astype(mx.float32) + lost
    fresh = coder.encode(total.astype(coder.dtype))
    fresh = map_leaves(lambda x, y: mx.where(hit.reshape(hit.shape + (1,) * (x.ndim - 3)), x, y), fresh, old)
    return map_leaves(lambda x, rows: put(x, target, rows), held, fresh)
