"""RocketKV: evict from the prompt, then let each new token attend to the best pages only (arXiv 2502.14051).

Stage 1 is SnapKV with a share of the prompt as its budget. In stage 2 a page
is a run of neighbouring rows with the largest and the smallest number of its
keys in each channel; from these an upper bound of a query's scores picks the
pages that it attends to, exactly. Stage 2 saves reading and no room, and works
where `attend` is called: the rows that `update` returns are all that are held.

Differs from the paper: the first `n_sink` rows are kept; the sign of each
query, not of its group's sum, picks the bound of a channel; whole pages are
chosen, and the newest row's page always.
"""

import math
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Rows
from vq_functional.core.errors import check, check_int, check_number
from vq_functional.core.policy import Scene, Spans, protect_field
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import RowStore, rows
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves
from vq_functional.evict.engine import Evicting
from vq_functional.evict.slots import SlotState, free_slot
from vq_functional.evict.snapkv import SnapKVPolicy
from vq_functional.ops.attention import Mask, attend
from vq_functional.ops.rows import extend_rows, pick, put, token_order
from vq_functional.ops.softmax import LOWEST, softmax
from vq_functional.ops.tables import counting
from vq_functional.ops.vectors import TINY

OWN = 0.1  # of its own vote counts beside the best one near a row: a peak comes before its neighbours


@attrs.frozen(kw_only=True)
class RocketKVOptions:
    """`compression_ratio` c is split between the stages as the paper does.

    `page_size` rows to a page and `head_topk1` channels in the bound follow from c
    when None. `obs_window` last queries of a prompt vote in stage 1, and a row
    counts as the best of `pool_kernel` neighbours (odd; 1 = off).
    """

    compression_ratio: float = 8.0
    page_size: int | None = None
    head_topk1: int | None = None
    obs_window: int = 32
    n_sink: int = 4
    pool_kernel: int = 63
    protect: Spans = protect_field("rocketkv")

    def __attrs_post_init__(self) -> None:
        check_number("rocketkv", "compression_ratio", self.compression_ratio, 1)
        finite = math.isfinite(self.compression_ratio)
        check(finite, "rocketkv", "compression_ratio", "must be finite", self.compression_ratio)
        check_int("rocketkv", "obs_window", self.obs_window, 1)
        check_int("rocketkv", "n_sink", self.n_sink, 0)
        check_int("rocketkv", "pool_kernel", self.pool_kernel, 1)
        check(self.pool_kernel % 2 == 1, "rocketkv", "pool_kernel", "must be odd", self.pool_kernel)
        for field in ("page_size", "head_topk1"):
            if getattr(self, field) is not None:
                check_int("rocketkv", field, getattr(self, field), 1)


def stage_ratios(ratio: float) -> tuple[float, float]:
    """Compression of the two stages; their product is `ratio`."""
    share = min(max(0.2 + 0.06 * math.log2(ratio), 0.2), 0.8)
    return ratio**share, ratio ** (1 - share)


def page_length(ratio: float) -> int:
    """Rows to a page where stage 2 compresses by `ratio`."""
    return math.ceil(math.sqrt(ratio))


def channel_ratio(ratio: float, page: int) -> float:
    """What is left of `ratio` beside pages of `page` rows: by so much fewer channels, and fewer pages, are read."""
    return max(ratio / page, 1.0)


def top_channels(ratio: float, dim: int) -> int:
    """Channels of `dim` that enter the bound."""
    return max(1, round(dim / ratio))


@attrs.frozen
class RocketKVPolicy(SnapKVPolicy):
    """SnapKV with a share of the prompt for its budget; a row counts as the best of its `max_kernel` neighbours."""

    max_kernel: int = 1
    name = "rocketkv"

    def smoothed(self, votes: mx.array, scene: Scene) -> mx.array:
        order = token_order(scene.position)
        ranked = pick(mx.where((scene.position < 0) | self._window(scene), 0, votes), order)
        return put(votes, order, _max_pooled(ranked, self.max_kernel) + OWN * ranked)

    @property
    def shielded(self) -> int:
        """Shorter prompts stay whole: the window that votes needs something to vote on."""
        return super().shielded + self.obs_window


def _max_pooled(x: mx.array, kernel: int) -> mx.array:
    """Largest of `kernel` neighbours along the last axis, zeros beyond both ends."""
    reach, width = kernel // 2, 1
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(reach, reach)])
    while width < kernel:
        step = min(width, kernel - width)
        x = mx.maximum(x[..., :-step], x[..., step:])
        width += step
    return x


@attrs.frozen
class Pages:
    """Bounds [B, H, pages, 2 * D] of the keys of each page, in their dtype; its lowest number where no row is.

    For each channel the largest number of the keys, then that of the negated
    keys, so that one product bounds what a query of any sign may find.
    """

    bounds: mx.array

    @property
    def high(self) -> mx.array:
        """The largest number of each channel [B, H, pages, D]."""
        return self.bounds[..., : self.bounds.shape[-1] // 2]

    @property
    def low(self) -> mx.array:
        """The smallest number of each channel [B, H, pages, D]."""
        return -self.bounds[..., self.bounds.shape[-1] // 2 :]

    def with_row(self, key: mx.array, page: mx.array, real: mx.array) -> "Pages":
        """With `key` [B, H, 1, D], where it is `real` bool [B], in the page int [B, H, 1] of its head."""
        batch, heads = page.shape[:2]
        place = counting(batch)[:, None, None], counting(heads)[:, None], page
        new = mx.where(real[:, None, None, None], _signed(key), mx.finfo(key.dtype).min)
        # Read and written by one operation, so that it is done in place.
        return Pages(self.bounds.at[place].maximum(new))

    def scores(self, queries: mx.array, scale: float, channels: int, useful: mx.array) -> mx.array:
        """What attention float32 [B, H, pages] the bound gives each `useful` page, or its logarithm.

        `queries` [B, H*G, 1, D] share the `channels` in which they are largest on average.
        """
        batch, heads, _, width = self.bounds.shape
        dim = width // 2
        grouped = queries.astype(mx.float32).reshape(batch, heads, -1, dim)
        size = mx.abs(grouped)
        channel = mx.argpartition(-size.sum(axis=2, keepdims=True), channels - 1, axis=-1)[..., :channels]
        channel = mx.concatenate([channel, channel + dim], axis=-1)
        query = mx.maximum(mx.take_along_axis(_signed(grouped), channel, axis=-1), 0)
        bounds = mx.take_along_axis(self.bounds, channel, axis=-1).astype(mx.float32)
        part = query.sum(axis=-1, keepdims=True) / mx.maximum(size.sum(axis=-1, keepdims=True), TINY)
        logits = query @ bounds.swapaxes(-1, -2) * scale * mx.rsqrt(mx.maximum(part, TINY))
        logits = mx.where(useful[:, :, None] & mx.isfinite(logits), logits, LOWEST)
        if logits.shape[2] == 1:  # a single query ranks by its logits, which keep their full precision
            return logits[:, :, 0]
        return softmax(logits).sum(axis=2)


def _signed(x: mx.array) -> mx.array:
    """`x` [..., D] and then its negative, [..., 2 * D]."""
    return mx.concatenate([x, -x], axis=-1)


@attrs.frozen
class RocketKV(Evicting):
    """A prompt policy over a row store, with pages in the carry of its state.

    Rows are in token order from the first slot on, since single tokens take the
    first empty one; page p holds the slots from p times its length on.
    """

    page: int
    ratio: float  # of channels, and of pages
    channels: int | None = None

    @property
    def coded(self) -> bool:
        """True over plain rows too: `attend` saves reading some of them."""
        return True

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> SlotState:
        rule = f"must be at most the head size {spec.key_dim}"
        check(self.channels is None or self.channels <= spec.key_dim, self.name, "head_topk1", rule, self.channels)
        state = super().init_state(spec, left_padding)
        shape = spec.batch, spec.kv_heads, self._count(state.slots), 2 * spec.key_dim
        return attrs.evolve(state, carry=Pages(mx.full(shape, mx.finfo(spec.dtype).min, spec.dtype)))

    def write(self, state: SlotState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> SlotState:
        held = super().write(state, keys, values, lengths)
        if keys.shape[2] != 1:
            return held
        key = self._keys(held, self.store.encode(state.layout, keys, values).keys)
        real = (held.offset > state.offset) & (held.offset > 0)
        return attrs.evolve(held, carry=state.carry.with_row(key, free_slot(state.position) // self.page, real))

    def settle_in(
        self, held: SlotState, group: Any, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> tuple[SlotState, Any]:
        state, group = super().settle_in(held, group, queries, lengths, proxy)
        return self._paged(state) if held.new else state, group

    def widen(self, state: SlotState, capacity: int) -> SlotState:
        state = super().widen(state, capacity)
        count, bounds = self._count(state.slots), state.carry.bounds
        bounds = extend_rows(bounds[:, :, :count], count, mx.finfo(bounds.dtype).min)
        return attrs.evolve(state, carry=Pages(bounds))

    def ordered(self, state: SlotState) -> SlotState:
        return self._paged(super().ordered(state))

    def attend(
        self, held: SlotState, queries: mx.array, scale: float, mask: Mask = None, fill: Fill | None = None
    ) -> mx.array:
        """As every transform's, but a single query attends to the best pages only, unless `mask` is additive."""
        additive = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        if queries.shape[2] != 1 or held.new or additive or self.ratio == 1:
            return super().attend(held, queries, scale, mask, fill)
        seen = _seen(held, mask)
        index, real = self._rows(held, *self._best_pages(held, queries, scale, seen, None, 1))
        if seen is not None:
            visible = mx.take_along_axis(seen, index[:, :, None], axis=-1) & real[:, :, None]
        else:  # a query that is padding sees everything, so that what it finds is finite
            visible = (real | (held.offset <= 0)[:, None, None])[:, :, None]
        batch, heads, count = index.shape
        visible = mx.broadcast_to(visible, (batch, heads, queries.shape[1] // heads, count))
        parts = self.store.as_parts(held.layout, map_leaves(lambda x: pick(x, index), held.rows))
        return attend(*parts, queries, scale, visible.reshape(batch, -1, 1, count))

    def select(self, state: SlotState, query: mx.array, k2: int | None = None, keep_recent: int = 0) -> mx.array:
        """Slots int32 [B, H, K] of the pages that `query` [B, Hq, 1, D] should look at, rising, then -1.

        `k2` pages, None for the method's own number, among them those of the
        `keep_recent` newest rows; more where these and the best page need it.
        """
        check_int(self.name, "k2", k2, 1, optional=True)
        check_int(self.name, "keep_recent", keep_recent, 0)
        pages, chosen = self._best_pages(state, query, query.shape[-1] ** -0.5, None, k2, keep_recent)
        pages = mx.sort(mx.where(chosen, pages, self._count(state.slots)), axis=-1)
        index, real = self._rows(state, pages, chosen)
        return mx.where(real, index, -1).astype(mx.int32)

    def channels_of(self, dim: int) -> int:
        """Channels of a head of size `dim` that enter a page's bound."""
        return self.channels or top_channels(self.ratio, dim)

    def _best_pages(
        self,
        state: SlotState,
        queries: mx.array,
        scale: float,
        seen: mx.array | None,
        k2: int | None,
        keep_recent: int,
    ) -> tuple[mx.array, mx.array]:
        """The best pages int [B, H, K], best first, and which of them count.

        `seen` bool [B, H, G or 1, slots]: what a query may look at, None for all rows.
        """
        total, held = self._count(state.slots), _held(state)
        if seen is None:
            useful = counting(total) * self.page < held
        else:
            useful = self._by_page(seen.any(axis=2)[..., None], False).any(axis=(3, 4))
        score = state.carry.scores(queries, scale, self.channels_of(queries.shape[-1]), useful)
        recent = (counting(total) >= (held - keep_recent) // self.page) & (keep_recent > 0)
        priority = mx.where(useful, mx.where(recent, mx.inf, score), -mx.inf)
        # The newest rows touch so many pages at most; one more is chosen by its score.
        least = (keep_recent + self.page - 2) // self.page + 2 if keep_recent else 1
        size = min(max(math.ceil(total / self.ratio) if k2 is None else k2, least), total)
        pages = -(-held // self.page)
        wanted = mx.maximum(mx.round(pages / self.ratio).astype(mx.int32) if k2 is None else k2, least)
        best = mx.argsort(-priority, axis=-1)[..., :size].astype(mx.int32)
        return best, counting(size) < mx.minimum(wanted, pages)

    def _rows(self, state: SlotState, pages: mx.array, chosen: mx.array) -> tuple[mx.array, mx.array]:
        """The slots int [B, H, K * page] of `pages` int [B, H, K], and which are of `chosen` ones and hold a row."""
        batch, heads, _ = pages.shape
        index = (pages[..., None] * self.page + counting(self.page)).reshape(batch, heads, -1)
        chosen = mx.repeat(chosen, self.page, axis=-1)
        return mx.minimum(index, state.slots - 1), chosen & (index < _held(state))

    def _paged(self, state: SlotState) -> SlotState:
        """The state with its pages made anew."""
        keys, live = self._keys(state, state.rows.keys), (state.position >= 0)[..., None]
        end = mx.finfo(keys.dtype).min
        return attrs.evolve(state, carry=Pages(self._by_page(mx.where(live, _signed(keys), end), end).max(axis=3)))

    def _by_page(self, x: mx.array, rest: float) -> mx.array:
        """`x` [B, H, slots, D] as [B, H, pages, page, D], the last page filled up with `rest`."""
        batch, heads, slots, dim = x.shape
        count = self._count(slots)
        return extend_rows(x, count * self.page, rest).reshape(batch, heads, count, self.page, dim)

    def _keys(self, state: SlotState, keys: Rows) -> mx.array:
        """Vectors [B, H, S, D] of held keys."""
        return self.store.coders(state.layout)[0].decode(keys)

    def _count(self, slots: int) -> int:
        """Pages of so many slots."""
        return -(-slots // self.page)


def _held(state: SlotState) -> mx.array:
    """Rows int [B, H, 1] of each head; they fill the first slots."""
    return (state.position >= 0).sum(axis=-1, keepdims=True)


def _seen(held: SlotState, mask: Mask) -> mx.array | None:
    """Bool [B, H, G or 1, slots]: what one query of each head may look at; None for all rows."""
    if not isinstance(mask, mx.array):
        return None
    batch, heads, slots = held.position.shape
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, slots - mask.shape[-1])])
    mask = mask.reshape(mask.shape[0], heads if mask.shape[1] > 1 else 1, -1, slots)
    return mx.broadcast_to(mask, (batch, heads, *mask.shape[2:]))


def rocketkv_policy(**options: Any) -> RocketKVPolicy:
    """Stage 1 alone: a share of each prompt stays; options as in RocketKVOptions."""
    o = RocketKVOptions(**options)
    stage1, _ = stage_ratios(o.compression_ratio)
    return RocketKVPolicy(
        1 / stage1,
        o.n_sink,
        protect=o.protect,
        obs_window=o.obs_window,
        pool_kernel=1,
        max_kernel=o.pool_kernel,
    )


def rocketkv(*, store: RowStore | None = None, **options: Any) -> Transform:
    """Keep a share of each prompt, and read the best pages of it; rows stay as they came, or as `store` holds them."""
    o, store = RocketKVOptions(**options), store or rows()
    check(isinstance(store, RowStore), "rocketkv", "store", "must hold rows that stand alone", store)
    check(not store.key.keys_only, "rocketkv", "store", "must give its keys back as vectors", store.key.name)
    _, stage2 = stage_ratios(o.compression_ratio)
    page = o.page_size or page_length(stage2)
    policy, ratio = rocketkv_policy(**options), channel_ratio(stage2, page)
    return RocketKV("rocketkv", policy, store, page, ratio, o.head_topk1)
