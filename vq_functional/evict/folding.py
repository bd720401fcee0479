"""Folding: what an evicted row held goes on, in part, in rows that stay."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.policy import Picked, Policy, Scene, Shares
from vq_functional.core.store import HeldRows, RowStore
from vq_functional.core.tree import map_leaves
from vq_functional.evict.slots import SlotState
from vq_functional.ops.rows import chosen, pick, put
from vq_functional.ops.vectors import to_dtype


@attrs.frozen(eq=False)
class Every(Picked):
    """All columns, in place."""


def of(x: mx.array, columns: Picked) -> mx.array:
    """What `x` [B, H, T, ...] holds in the `columns`."""
    return x if isinstance(columns, Every) else pick(x, columns.index)


def fold(
    policy: Policy, store: RowStore, state: SlotState, source: SlotState, scene: Scene, kept: Picked, lost: Picked
) -> SlotState:
    """`state`, whose slots are the columns `kept` of `source`, with the columns `lost` folded into it.

    The lost ones come in order of position. A row that takes nothing in keeps
    its bits; the others are decoded, summed in float32 and encoded again. A lost
    row with NaN or an infinity is not folded.
    """
    coders = store.coders(state.layout)
    gone = map_leaves(lambda x: pick(x, lost.index), source.rows)
    gone_keys, gone_values = (coder.decode(x).astype(mx.float32) for coder, x in zip(coders, (gone.keys, gone.values)))
    finite = mx.isfinite(mx.concatenate([gone_keys, gone_values], axis=-1)).all(axis=-1)
    lost = Picked(lost.index, lost.valid & finite)
    memory, values, keys = policy.fold(source.memory, scene, kept, lost)
    most = min(kept.index.shape[2], policy.folds * lost.index.shape[2])
    held = state.rows
    if keys is not None:
        held = HeldRows(_taken_in(coders[0], held.keys, _usable(gone_keys, lost), keys, most), held.values)
    held = HeldRows(held.keys, _taken_in(coders[1], held.values, _usable(gone_values, lost), values, most))
    return attrs.evolve(state, rows=held, memory=memory)


def _usable(vectors: mx.array, lost: Picked) -> mx.array:
    """Vectors [B, H, R, D] with zeros where no row is lost: a share of 0 times NaN would be NaN."""
    return mx.where(lost.valid[..., None], vectors, 0)


def _taken_in(coder: Coder, held: Rows, gone: mx.array, shares: Shares, most: int) -> Rows:
    """`held` with at most `most` rows rewritten as their sums."""
    hit, own, lost, target = (shares.lost != 0).any(axis=-1), shares.own, shares.lost, shares.target
    if target is None:
        target, hit = chosen(hit, most)
        own, lost = pick(own, target), pick(lost, target)
    old = map_leaves(lambda x: pick(x, target), held)
    # A matrix product of inner size 1 costs more than the multiplication that it is.
    added = lost @ gone if lost.shape[-1] > 1 else lost * gone
    fresh = coder.encode(to_dtype(own[..., None] * coder.decode(old).astype(mx.float32) + added, coder.dtype))
    fresh = map_leaves(lambda x, y: mx.where(hit.reshape(hit.shape + (1,) * (x.ndim - 3)), x, y), fresh, old)
    return map_leaves(lambda x, rows: put(x, target, rows), held, fresh)
