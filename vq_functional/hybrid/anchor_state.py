"""How much an anchored prompt holds, and the state that holds it."""

import functools
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vq_functional.core.errors import check
from vq_functional.core.spec import Layout
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.hybrid.anchor_codes import AnchoredSide, slot_bytes
from vq_functional.ops.packing import words
from vq_functional.ops.rows import pick, read_rows
from vq_functional.ops.vectors import to_dtype

BUCKET = 64  # tokens that the room for a prompt is a multiple of
INDEX_BYTES = 4  # of a row: uint16 index and float16 gain
MOST = 2**16  # anchors that an index can name
Counts = NDArray[np.int64]


def bucket(tokens: int) -> int:
    """Room for so many tokens."""
    return -(-tokens // BUCKET) * BUCKET


@attrs.frozen
class Sizes:
    """Anchors and residuals of prompts, from the options."""

    theta: float
    anchor_frac: float
    least: int  # anchors at least
    bits: int

    def anchors(self, tokens: Any) -> Counts:
        """Anchors of each head for prompts of so many tokens."""
        count = np.rint(np.asarray(tokens) * self.anchor_frac).astype(np.int64)
        return np.minimum(np.maximum(count, self.least), tokens)

    def residuals(self, tokens: Any, layout: Layout) -> tuple[Counts, Counts]:
        """Key and value residuals of all heads together: what the budget leaves beside anchors and indices."""
        tokens = np.asarray(tokens, np.int64)
        row = (layout.key_dim + layout.value_dim) * layout.dtype.size
        anchors = self.anchors(tokens)
        base = anchors * (row + 4) + 2 * INDEX_BYTES * tokens
        left = np.floor(layout.kv_heads * (self.theta * row * tokens - base)).astype(np.int64)
        key, value = (slot_bytes(dim, self.bits) for dim in (layout.key_dim, layout.value_dim))
        pairs = np.maximum(left, 0) // (key + value)
        total = 2 * pairs + (left - pairs * (key + value) >= value)
        total = np.minimum(total, 2 * layout.kv_heads * (tokens - anchors))
        return total // 2, total - total // 2

    def room(self, columns: int, layout: Layout) -> tuple[int, int, int]:
        """Anchors of a head, key and value residuals of all heads: the most of any prompt of up to `columns` tokens."""
        return _room(self, columns, layout)


@functools.lru_cache(maxsize=256)
def _room(sizes: Sizes, columns: int, layout: Layout) -> tuple[int, int, int]:
    tokens = np.arange(columns + 1)
    keys, values = sizes.residuals(tokens, layout)
    return int(sizes.anchors(tokens)[-1]), int(keys.max()), int(values.max())


@attrs.frozen
class Extent:
    """Plain numbers that fix the shapes of a state, beside batch and layout."""

    rows: int  # exact rows
    columns: int = 0  # of the anchored prompt
    group: int = 0  # query heads of a KV head whose last queries are remembered
    open: int = 1  # 0 where no prompt can be anchored any more

    def joined(self, other: "Extent") -> "Extent":
        """Room for both."""
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Extent(*(max(pair) for pair in pairs))


@attrs.frozen
class AnchorState:
    keys: AnchoredSide  # of the anchored prompt
    values: AnchoredSide
    position: mx.array  # int32 [B, H, k]: of the anchors, rising; -1 where there is none
    recent: tuple[mx.array, mx.array]  # keys and values [B, H, R, D] behind the anchored ones, exact
    queries: mx.array  # dtype [B, H*G, W or 0, D]: of the newest W tokens of a prompt that may still be anchored
    coded: mx.array  # int32 [B]: tokens of the anchored prompt that are held
    prompt: mx.array  # int32 [B]: tokens of the prompt, once it has ended; 0 before
    offset: mx.array  # int32 [B]: tokens seen
    layout: Layout = static_field()

    @property
    def extent(self) -> Extent:
        """What the shapes follow from."""
        _, asking, window, _ = self.queries.shape
        heads = self.layout.kv_heads
        return Extent(self.recent[0].shape[2], self.keys.index.shape[2], asking // heads, int(window > 0))


def empty_side(sizes: Sizes, layout: Layout, batch: int, columns: int, keys: bool) -> AnchoredSide:
    """Zeroed room for a prompt of so many tokens."""
    dim = layout.key_dim if keys else layout.value_dim
    anchors, *slots = sizes.room(columns, layout)
    check(anchors <= MOST, "anchorkv", "anchor_frac", f"must leave at most {MOST} anchors", anchors)
    count = slots[0 if keys else 1]
    heads = layout.kv_heads
    return AnchoredSide(
        mx.zeros((batch, heads, anchors, dim), layout.dtype),
        mx.zeros((batch, heads, columns), mx.uint16),
        mx.zeros((batch, heads, columns), mx.float16),
        mx.zeros((batch, count, words(dim, sizes.bits)), mx.uint32),
        mx.zeros((batch, count), mx.float16),
        mx.full((batch, count), -1, mx.int32),
    )


def empty_state(sizes: Sizes, layout: Layout, offset: mx.array, extent: Extent, window: int) -> AnchorState:
    """A state of an `extent` in which nothing is held, for tokens from `offset` int32 [B] on."""
    batch, heads = offset.shape[0], layout.kv_heads
    keys, values = (empty_side(sizes, layout, batch, extent.columns, side) for side in (True, False))
    recent = [mx.zeros((batch, heads, extent.rows, dim), layout.dtype) for dim in (layout.key_dim, layout.value_dim)]
    return AnchorState(
        keys,
        values,
        position=mx.full((batch, heads, keys.anchors.shape[2]), -1, mx.int32),
        recent=(recent[0], recent[1]),
        queries=mx.zeros((batch, heads * extent.group, window * extent.open, layout.key_dim), layout.dtype),
        coded=mx.zeros((batch,), mx.int32),
        prompt=mx.zeros((batch,), mx.int32),
        offset=offset,
        layout=layout,
    )


def resized(state: AnchorState, blank: AnchorState) -> AnchorState:
    """What `state` holds in arrays of the shapes of `blank`, whose numbers are those of unused room."""
    if blank.queries.size and not state.queries.size:
        window, group = blank.queries.shape[2], blank.extent.group
        state = attrs.evolve(state, queries=mx.repeat(keys_before(state, state.offset, window), group, axis=1))
    arrays = attrs.evolve(blank, coded=state.coded, prompt=state.prompt, offset=state.offset)
    return map_leaves(_fitted, state, arrays)


def asked_after(held: AnchorState, queries: mx.array, counts: mx.array, proxy: bool) -> mx.array:
    """The remembered queries after a call of `counts` int [B] tokens whose queries were `queries` [B, Hq, S, D].

    Keys that stand in are only remembered beside real queries, since they are held anyway.
    """
    window, group = held.queries.shape[2], held.extent.group
    if window == 0 or (group == 0 and (proxy or queries.shape[2] == 1)):
        return held.queries
    earlier, asking = held.queries, mx.repeat(queries, group, axis=1) if proxy else queries
    if group == 0:
        before = keys_before(held, held.offset - counts, window)
        earlier = mx.repeat(before, queries.shape[1] // held.layout.kv_heads, axis=1)
    asking = to_dtype(mx.where(mx.isfinite(asking), asking, mx.nan), earlier.dtype)  # infinite ones count for nothing
    latest = read_rows(mx.concatenate([earlier, asking], axis=2), counts, window)
    return mx.where((held.prompt > 0)[:, None, None, None], earlier, latest)


def asked_before(state: AnchorState, dropped: mx.array, most: int) -> mx.array:
    """The remembered queries without those of the newest `dropped` int [B] tokens, at most `most`."""
    if state.queries.size == 0:
        return state.queries
    window = state.queries.shape[2]
    earlier = mx.repeat(keys_before(state, state.offset - window, most), state.extent.group, axis=1)
    return read_rows(mx.concatenate([earlier, state.queries], axis=2), most - dropped, window)


def keys_before(state: AnchorState, end: mx.array, count: int) -> mx.array:
    """Exact keys [B, H, count, D] of the tokens just before `end` int [B]; some key where there is no token."""
    index = (end - state.coded - count)[:, None] + mx.arange(count)
    return pick(state.recent[0], mx.maximum(index, 0)[:, None])


def _fitted(x: mx.array, like: mx.array) -> mx.array:
    """`x` cut to the shape of `like`, or filled up with what `like` has there."""
    for axis in range(1, x.ndim):
        have, want = x.shape[axis], like.shape[axis]
        if have > want:
            x = mx.split(x, [want], axis=axis)[0]
        elif have < want:
            x = mx.concatenate([x, mx.split(like, [have], axis=axis)[1]], axis=axis)
    return x
