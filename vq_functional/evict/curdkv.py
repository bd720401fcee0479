"""CurDKV: keep the rows that span most of what attention puts out (arXiv 2509.15038).

A prompt is cut by the paper's score: key norm times value norm, each compared
within a window of positions. Every later token then shares out 1 among the
rows before it, by their leverage on the attention output; a row's mean share
decides. Real queries attend with real queries; without them the newest key does.

Differs from the paper: tokens after the prompt evict too; windows compare with
their mean; the first `n_sink` rows are kept by position.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_choice, check_int, check_number
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.core.tree import map_leaves
from vq_functional.evict.chain import chain
from vq_functional.ops.attention import decode
from vq_functional.ops.rows import pick, put, read_rows, token_order
from vq_functional.ops.tables import counting
from vq_functional.ops.vectors import TINY

WINDOW = 16  # positions within which norms are compared
SHIFT = 0.0003  # of the sum of all eigenvalues
STEPS = (  # each the best for what those before it leave of [0.0003, 1]; they end within 0.0002 of 1
    (8.5011, -25.2295, 18.7259),
    (4.2345, -3.1446, 0.5847),
    (4.1628, -3.0948, 0.579),
    (3.8891, -2.9026, 0.5571),
    (3.1156, -2.3356, 0.4928),
    (2.1509, -1.531, 0.404),
    (1.8801, -1.2557, 0.3756),
)


@attrs.frozen(kw_only=True)
class CurDKVOptions:
    """`budget` counts every kept row, sinks included; `rank_cap` leading directions count.

    `prefill` scores a call of several tokens by norms at once ("cur") or by the
    leverage of each of its tokens ("exact", slow). `decode` scores single tokens
    by "leverage", by norms ("cur"), or keeps them all ("append"). `rope_base` is
    accepted for configurations written elsewhere and has no effect.
    """

    budget: int = 512
    n_sink: int = 4
    rank_cap: int = 16
    rope_base: float = 10000.0
    prefill: str = "cur"
    decode: str = "leverage"
    protect: Spans = protect_field("curdkv")

    def __attrs_post_init__(self) -> None:
        check_policy("curdkv", self.budget, self.n_sink, 0, self.protect)
        check_int("curdkv", "rank_cap", self.rank_cap, 1)
        check_number("curdkv", "rope_base", self.rope_base, 0)
        check_choice("curdkv", "prefill", self.prefill, ("cur", "exact"))
        check_choice("curdkv", "decode", self.decode, ("leverage", "cur", "append"))


@attrs.frozen
class Shares:
    """What tokens have shared out to each row."""

    total: mx.array  # float32 [B, H, slots]
    count: mx.array  # float32 [B, H, slots]: tokens that did


@attrs.frozen
class CurDKVPolicy(Policy):
    """Priority is the mean share."""

    rank_cap: int = 16
    prefill: str = "cur"
    decode: str = "leverage"
    name = "curdkv"

    def init(self, batch: int, heads: int, slots: int) -> Shares:
        zeros = mx.zeros((batch, heads, slots), mx.float32)
        return Shares(zeros, zeros)

    def score(self, memory: Shares, scene: Scene) -> tuple[Shares, mx.array]:
        values = _finite(decode(scene.value_parts))
        after = self._after_one(memory, scene, values)
        if scene.queries.shape[2] > 1:
            after = _where(scene.tokens > 1, self._after_several(memory, scene, values), after)
        after = _where(scene.tokens > 0, after, memory)
        return after, self.rank(after, scene)

    def rank(self, memory: Shares, scene: Scene) -> mx.array:
        return memory.total / mx.maximum(memory.count, 1)

    def _after_one(self, memory: Shares, scene: Scene, values: mx.array) -> Shares:
        if self.decode == "append":
            return memory
        if self.decode == "cur":
            return _by_norms(scene, values)
        query, token = scene.queries, scene.query_position
        if query.shape[2] > 1:
            query, token = read_rows(query, scene.lengths - 1, 1), read_rows(token, scene.lengths - 1, 1, axis=1)
        return self._by_leverage(memory, scene, values, query, token)

    def _after_several(self, memory: Shares, scene: Scene, values: mx.array) -> Shares:
        if self.prefill == "cur":
            return _by_norms(scene, values)
        for i in range(scene.queries.shape[2]):
            here = slice(i, i + 1)
            query, token = scene.queries[:, :, here], scene.query_position[:, here]
            memory = self._by_leverage(memory, scene, values, query, token)
        return memory

    def _by_leverage(self, memory: Shares, scene: Scene, values: mx.array, query: mx.array, token: mx.array) -> Shares:
        """Shares after the token at position `token` int [B, 1], by its `query` [B, Hq, 1, D].

        Old rows get theirs as if the new one were not there; the new row begins with its own among all.
        """
        token = token[:, None]
        known = (scene.position >= 0) & (token >= 0)
        before, new = known & (scene.position < token), known & (scene.position == token)
        visible = known[:, :, None] & (scene.position[:, :, None] < token[:, :, None] + counting(2)[:, None])
        squares = mx.square(scene.attention(query, visible).mean(axis=2))
        energy = mx.square(values).sum(axis=-1)
        if self.rank_cap < min(values.shape[2:]):
            directions = leading(values, energy, mx.where(new, squares[:, :, 1], squares[:, :, 0]), self.rank_cap)
            energy = mx.square(directions @ values.swapaxes(-1, -2)).sum(axis=-2)
        shares = _shares(squares * energy[:, :, None])
        total = mx.where(new, shares[:, :, 1], memory.total + shares[:, :, 0])
        return Shares(total, mx.where(new, 1.0, memory.count + before))


@attrs.frozen
class AppendingPolicy(CurDKVPolicy):
    """Single tokens are only appended."""

    prompt_only = True


def _shares(parts: mx.array) -> mx.array:
    """Float32 `parts` [..., T] as shares of the whole; 0 where there is nothing to share."""
    shares = parts / mx.maximum(parts.sum(axis=-1, keepdims=True), TINY)
    return mx.where(mx.isfinite(shares), shares, 0.0)


def leading(x: mx.array, energy: mx.array, squares: mx.array, rank: int) -> mx.array:
    """Orthonormal [B, H, rank, D]: nearly the leading directions of rows of `x` [B, H, T, D] times their weights.

    One step of subspace iteration from the `rank` largest rows. `squares`
    [B, H, T] are those of the weights, `energy` the squared lengths of the rows.
    """
    sizes = squares * energy
    squares = squares / mx.maximum(sizes.sum(axis=-1, keepdims=True), TINY)
    start = pick(x, mx.argpartition(sizes, -rank, axis=-1)[..., -rank:])
    # The shift keeps directions apart that would all fall onto the first one in float32.
    return _orthonormal(_unit((start @ x.swapaxes(-1, -2) * squares[:, :, None]) @ x + SHIFT * start))


def _orthonormal(x: mx.array) -> mx.array:
    """Nearly orthonormal [..., R, D] that span what the unit rows of `x` [..., R, D] span; what they barely add fades.

    Newton-Schulz: each step takes the singular values s of `x` to s * (a + b * s^2 + c * s^4), arXiv 2505.16932.
    """
    x = x * x.shape[-2] ** -0.5
    for a, b, c in STEPS:
        gram = x @ x.swapaxes(-1, -2)
        x = mx.addmm(x, mx.addmm(gram, gram, gram, c, b), x, beta=a)
    return x


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.maximum(mx.square(x).sum(axis=-1, keepdims=True), TINY))


def _by_norms(scene: Scene, values: mx.array) -> Shares:
    """|k|^2 |v|^2 as shares of the whole, each factor as a multiple of its window's mean.

    By the mean and not the sum, since earlier calls have left holes in old windows.
    """
    live, order = scene.position >= 0, token_order(scene.position)
    sizes = [mx.square(x).sum(axis=-1) for x in (_finite(scene.keys()), values)]
    factors = pick(mx.where(live[..., None], mx.stack([*sizes, mx.ones(live.shape)], axis=-1), 0.0), order)
    sums = _window_sums(factors, pick(scene.position, order)[..., None] // WINDOW)
    relative = factors[..., :2] * sums[..., 2:] / mx.maximum(sums[..., :2], TINY)
    product = put(sizes[0], order, relative[..., 0] * relative[..., 1])
    product = mx.where(mx.isfinite(product), product, 0.0)
    return Shares(product / mx.maximum(product.sum(axis=-1, keepdims=True), TINY), live.astype(mx.float32))


def _window_sums(x: mx.array, window: mx.array) -> mx.array:
    """For each row of `x` [B, H, T, 3] the sum over its window; the rows of a window, at most 16, are neighbours."""
    ahead = behind = x
    for reach in (1, 2, 4, 8):
        if reach < x.shape[2]:
            same = window[:, :, reach:] == window[:, :, :-reach]
            room = mx.zeros((*x.shape[:2], reach, x.shape[3]))
            ahead = ahead + mx.concatenate([mx.where(same, ahead[:, :, reach:], 0.0), room], axis=2)
            behind = behind + mx.concatenate([room, mx.where(same, behind[:, :, :-reach], 0.0)], axis=2)
    return ahead + behind - x


def _finite(x: mx.array) -> mx.array:
    """Float32 `x` with 0 for NaN and infinities."""
    x = x.astype(mx.float32)
    return mx.where(mx.isfinite(x), x, 0.0)


def _where(condition: mx.array, one: Shares, other: Shares) -> Shares:
    """By batch row."""
    return map_leaves(lambda x, y: mx.where(condition[:, None, None], x, y), one, other)


def curdkv_policy(**options: Any) -> CurDKVPolicy:
    """Rows with the largest mean share of the attention output stay; options as in CurDKVOptions."""
    o = CurDKVOptions(**options)
    kind = AppendingPolicy if o.decode == "append" else CurDKVPolicy
    return kind(o.budget, o.n_sink, 0, o.protect, o.rank_cap, o.prefill, o.decode)


def curdkv(**options: Any) -> Transform:
    """Evict by leverage on the attention output; kept rows stay as they came."""
    return chain(curdkv_policy(**options), rows(), name="curdkv")
