"""Slots: rows without order, each with its position and what the policy remembers of it."""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.spec import Layout
from vq_functional.core.store import HeldRows, first_rows
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.ops.rows import extend_rows, pick, put


@attrs.frozen
class SlotState:
    rows: HeldRows  # arrays [B, H, slots, width]
    position: mx.array  # int32 [B, H, slots]: token position, -1 in an empty slot
    memory: Any  # the policy's own arrays [B, H, slots, ...]
    carry: Any  # the policy's own arrays [B, ...]
    offset: mx.array  # int32 [B]: tokens seen
    prompt: mx.array  # int32 [B]: of these, tokens that came in calls of several, where the budget is a share of them
    limit: mx.array  # int32 [B]: rows that may stay in each head
    layout: Layout = static_field()
    new: int = static_field()  # columns at the end that a call of several tokens put there; 0 once settled

    @property
    def slots(self) -> int:
        return self.position.shape[2]


def columns(state: SlotState, start: int, end: int) -> SlotState:
    """The slots from `start` to `end`."""
    rows, memory = map_leaves(lambda x: x[:, :, start:end], (state.rows, state.memory))
    return attrs.evolve(state, rows=rows, memory=memory, position=state.position[..., start:end], new=0)


def picked(state: SlotState, index: mx.array) -> SlotState:
    """The slots `index` int [B, H, K], in that order."""
    rows, memory, position = map_leaves(lambda x: pick(x, index), (state.rows, state.memory, state.position))
    return attrs.evolve(state, rows=rows, memory=memory, position=position, new=0)


def joined(state: SlotState, other: SlotState) -> SlotState:
    """The slots of `state`, then those of `other`, which become the new ones."""
    pair = [(x.rows, x.memory, x.position) for x in (state, other)]
    rows, memory, position = map_leaves(lambda *leaves: mx.concatenate(list(leaves), axis=2), *pair)
    return attrs.evolve(state, rows=rows, memory=memory, position=position, new=other.slots)


def moved(state: SlotState, source: mx.array, target: mx.array) -> SlotState:
    """The state with copies of the slots `source` int [B, H, K] in the slots `target`."""
    held = (state.rows, state.memory, state.position)
    rows, memory, position = map_leaves(lambda x: put(x, target, pick(x, source)), held)
    return attrs.evolve(state, rows=rows, memory=memory, position=position)


def only(stays: mx.array, state: SlotState) -> SlotState:
    """The state with all slots but `stays` bool [B, H, slots] emptied."""
    position = mx.where(stays, state.position, -1)
    return attrs.evolve(state, position=position, memory=_zero_but(stays, state.memory))


def wiped(state: SlotState) -> SlotState:
    """The state with zeros in empty slots: through a mask what is left there weighs nothing, but NaN stays NaN."""
    return attrs.evolve(state, rows=_zero_but(state.position >= 0, state.rows))


def resized(state: SlotState, slots: int) -> SlotState:
    """The state with empty slots added at the end."""
    if slots <= state.slots:
        return state
    rows, memory = map_leaves(lambda x: extend_rows(x, slots), (state.rows, state.memory))
    position = mx.pad(state.position, [(0, 0), (0, 0), (0, slots - state.slots)], constant_values=-1)
    return attrs.evolve(state, rows=rows, memory=memory, position=position)


def _zero_but(stays: mx.array, tree: Any) -> Any:
    """A tree of arrays [B, H, slots, ...] with zeros in all slots but `stays` bool [B, H, slots]."""
    return map_leaves(
        lambda x: mx.where(stays.reshape(stays.shape + (1,) * (x.ndim - 3)), x, mx.array(0, x.dtype)), tree
    )


def free_slot(position: mx.array) -> mx.array:
    """Index int [B, H, 1] of the first empty slot."""
    return mx.argmax((position < 0).astype(mx.int32), axis=-1, keepdims=True)


def live_rows(held: SlotState, count: int) -> HeldRows:
    """The `count` columns that hold rows: stored ones first, those of a call of several tokens last."""
    stored = first_rows(held.rows, count - held.new)
    if held.new == 0:
        return stored
    return map_leaves(lambda old, x: mx.concatenate([old, x[:, :, -held.new :]], axis=2), stored, held.rows)
