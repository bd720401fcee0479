"""How a prompt becomes anchors, indices and residuals: choice, projection and utility."""

import functools
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import bind
from vq_functional.core.spec import Layout
from vq_functional.core.tree import map_leaves
from vq_functional.hybrid.anchor_codes import AnchoredCodec, AnchoredCoder, AnchoredSide
from vq_functional.hybrid.anchor_state import Sizes
from vq_functional.ops.rows import chosen, pick, top_mask
from vq_functional.ops.softmax import softmax_of
from vq_functional.ops.vectors import TINY, norm, to_dtype

LIMIT = mx.finfo(mx.float32).max / 64  # rows of numbers up to here have multiples and residuals that can't overflow


@attrs.frozen
class Rule:
    """What is chosen of a prompt: all of it plain numbers."""

    sizes: Sizes
    window: int
    n_sink: int
    rho: float
    pool_kernel: int
    codec: AnchoredCodec

    def counts(self, columns: int, layout: Layout, length: mx.array) -> mx.array:
        """Int32 [4, B]: anchors, those of them that scores choose, key and value residuals of prompts `length`."""
        return _counts(self, columns, layout)[:, length]


@functools.lru_cache(maxsize=256)
def _counts(rule: Rule, columns: int, layout: Layout) -> mx.array:
    tokens = np.arange(columns + 1)
    anchors = rule.sizes.anchors(tokens)
    scored = np.floor(rule.rho * np.maximum(anchors - rule.window - rule.n_sink, 0))
    table = mx.array(np.stack([anchors, scored, *rule.sizes.residuals(tokens, layout)]).astype(np.int32))
    mx.eval(table)
    return table


@attrs.frozen(eq=False)
class Prompt:
    """Keys and values float32 [B, H, P, D] of which the first `length` int [B] count; zero behind them.

    `queries` [B, H, G * W, D] of the last W tokens; `proxy`: keys stand in.
    """

    keys: mx.array
    values: mx.array
    queries: mx.array
    length: mx.array
    window: int
    proxy: bool

    @property
    def columns(self) -> mx.array:
        """Int [1, 1, P]."""
        return mx.arange(self.keys.shape[2])[None, None]

    @property
    def live(self) -> mx.array:
        """Bool [B, 1, P]: rows of the prompt."""
        return self.columns < self.length[:, None, None]

    def attention(self) -> mx.array:
        """Weights float32 [B, H, G * W, P] of the window's queries, causal; a standing-in key does not see itself."""
        asked = self.queries.shape[2]
        position = (self.length - self.window)[:, None] + mx.arange(asked) % self.window
        last = position - 1 if self.proxy else position
        seen = self.columns[:, None] <= last[:, None, :, None]
        scores = (self.queries * self.queries.shape[3] ** -0.5) @ self.keys.swapaxes(-1, -2)
        return softmax_of(scores, seen)


def cleaned(x: mx.array, live: mx.array | None = None) -> mx.array:
    """Float32 `x` within LIMIT, with zeros for numbers that are not finite, and for rows that are not `live`."""
    keep = mx.isfinite(x) if live is None else mx.isfinite(x) & live[..., None]
    return mx.where(keep, mx.clip(x.astype(mx.float32), -LIMIT, LIMIT), 0)


def anchored(rule: Rule, layout: Layout, prompt: Prompt) -> tuple[AnchoredSide, AnchoredSide, mx.array]:
    """Keys and values of a prompt as the rule holds them, and the positions int32 [B, H, k] of its anchors."""
    columns, counts = prompt.keys.shape[2], rule.counts(prompt.keys.shape[2], layout, prompt.length)
    weights = prompt.attention()
    anchor = _chosen_anchors(rule, prompt, weights.sum(axis=2), counts)
    room, *slots = rule.sizes.room(columns, layout)
    index, real = chosen(anchor, room)
    keys, values = (Projected.of(x, anchor, index, real) for x in (prompt.keys, prompt.values))
    squares, free = mx.square(weights), prompt.live & ~anchor
    held = []
    for side, dim, used, count, most in (
        (keys, layout.key_dim, key_utility(prompt, squares, weights, keys.residual), counts[2], slots[0]),
        (values, layout.value_dim, value_utility(squares, values.residual), counts[3], slots[1]),
    ):
        utility = mx.where(free & ~mx.isnan(used), used, -mx.inf)
        coder = cast(AnchoredCoder, bind(rule.codec, dim, layout.dtype))
        held.append(side.coded(coder, utility, count, most))
    return held[0], held[1], mx.where(real, index, -1).astype(mx.int32)


def _chosen_anchors(rule: Rule, prompt: Prompt, votes: mx.array, counts: mx.array) -> mx.array:
    """Bool [B, H, P]: sinks and window, then rows of the best `votes` [B, H, P], then rows drawn at random."""
    columns, live, length = prompt.columns, prompt.live, prompt.length[:, None, None]
    window = live & (columns >= length - rule.window)
    fixed = window | (live & (columns < rule.n_sink))
    free = mx.broadcast_to(live & ~fixed, votes.shape)
    wanted, scored = counts[0] - rule.window - rule.n_sink, counts[1]
    pooled = _pooled(mx.where(window, 0, votes), rule.pool_kernel)
    best = top_mask(mx.where(free, pooled, -mx.inf), mx.maximum(scored, 0), latest=False)
    drawn = mx.where(free & ~best, draws(rule.codec.seed, *votes.shape[1:]), -mx.inf)
    return fixed | best | top_mask(drawn, mx.maximum(wanted - scored, 0), latest=False)


def _pooled(votes: mx.array, kernel: int) -> mx.array:
    """Average of `kernel` neighbours, zeros beyond both ends."""
    reach, count = kernel // 2, votes.shape[-1]
    padded = mx.pad(votes, [(0, 0), (0, 0), (reach, reach)])
    total = padded[..., :count]
    for shift in range(1, kernel):
        total = total + padded[..., shift : shift + count]
    return total * (1 / kernel)


def draws(seed: int, heads: int, count: int) -> mx.array:
    """Uniform float32 [H, count] that follow from seed, head and position alone."""
    keys = mx.random.split(mx.random.key(seed), heads)[:, None]
    keys = keys + mx.arange(count, dtype=mx.uint32)[:, None] * mx.array([0, 1], mx.uint32)
    draw = mx.vmap(lambda key: mx.random.uniform(key=key))
    return draw(keys.reshape(-1, 2)).reshape(heads, count)


@attrs.frozen(eq=False)
class Projected:
    """Rows as multiples of their nearest anchors."""

    anchors: mx.array  # float32 [B, H, k, D]
    index: mx.array  # uint16 [B, H, P]
    gain: mx.array  # float16 [B, H, P]
    residual: mx.array  # float32 [B, H, P, D]: what gain times anchor leaves

    @classmethod
    def of(cls, x: mx.array, anchor: mx.array, index: mx.array, real: mx.array) -> "Projected":
        """Rows `x` float32 [B, H, P, D]; `anchor` bool [B, H, P] as `index` [B, H, k], where `real`."""
        anchors, length = mx.where(real[..., None], pick(x, index), 0), norm(x)
        unit = x / mx.maximum(length, TINY)
        cosine = unit @ mx.where(real[..., None], pick(unit, index), 0).swapaxes(-1, -2)
        likeness = mx.where(real[:, :, None], mx.abs(cosine), -1)
        own = mx.cumsum(anchor.astype(mx.int32), axis=-1) - 1
        near = mx.where(anchor, own, mx.argmax(likeness, axis=-1).astype(mx.int32))[..., None]
        size = mx.take_along_axis(mx.maximum(norm(anchors)[..., 0], TINY), near[..., 0], axis=2)
        gain = mx.take_along_axis(cosine, near, axis=3)[..., 0] * (length[..., 0] / size)
        gain = to_dtype(mx.where(anchor, 1, gain), mx.float16)
        residual = x - gain[..., None].astype(mx.float32) * mx.take_along_axis(anchors, near, axis=2)
        return cls(anchors, near[..., 0].astype(mx.uint16), gain, residual)

    def coded(self, coder: AnchoredCoder, utility: mx.array, count: mx.array, most: int) -> AnchoredSide:
        """With residuals of the `count` int [B] rows of highest `utility` [B, H, P], over all heads."""
        batch, heads, columns, dim = self.residual.shape
        by_row = utility.swapaxes(1, 2).reshape(batch, 1, columns * heads)
        index, real = (x[:, 0] for x in chosen(top_mask(by_row, count, latest=False), most))
        rows = pick(self.residual.swapaxes(1, 2).reshape(batch, 1, columns * heads, dim), index[:, None])[:, 0]
        codes, scales = coder.coded(mx.where(real[..., None], rows, 0))
        place = mx.where(real, index, -1).astype(mx.int32) if most else index
        return AnchoredSide(to_dtype(self.anchors, coder.dtype), self.index, self.gain, codes, scales, place)


def key_utility(prompt: Prompt, squares: mx.array, weights: mx.array, residual: mx.array) -> mx.array:
    """Float32 [B, H, P]: what key residuals change in the window's outputs, squared and summed.

    `squares` and `weights` [B, H, G * W, P] of the window's attention.
    """
    outputs = weights @ prompt.values
    apart = mx.square(prompt.values).sum(axis=-1)[:, :, None] + mx.square(outputs).sum(axis=-1, keepdims=True)
    apart = mx.maximum(apart - 2 * (outputs @ prompt.values.swapaxes(-1, -2)), 0)
    scores = (prompt.queries * prompt.queries.shape[3] ** -0.5) @ residual.swapaxes(-1, -2)
    return (squares * mx.square(scores) * apart).sum(axis=2)


def value_utility(squares: mx.array, residual: mx.array) -> mx.array:
    """Float32 [B, H, P]: what value residuals change in the window's outputs, squared and summed."""
    return squares.sum(axis=2) * mx.square(residual).sum(axis=-1)


def merged(begins: mx.array, fresh: Any, held: Any) -> Any:
    """Leaves of `fresh` in the batch rows where `begins` bool [B], of `held` in the others."""

    def one(new: mx.array, old: mx.array) -> mx.array:
        return mx.where(begins.reshape(-1, *(1,) * (old.ndim - 1)), new, old) if old.size else old

    return map_leaves(one, fresh, held)
