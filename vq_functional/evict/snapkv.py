"""SnapKV: compress a prompt to the rows that its last queries attend to (arXiv 2404.14469).

With real queries the paper's rule: votes of the last `obs_window` queries,
causal, pooled over neighbours, the window itself kept. Without them the keys
of the window vote, unpooled, and may be evicted. Single tokens are appended
and never evicted, so `budget` caps the prompt and not the whole.

Differs from the paper: the first `n_sink` rows are kept; the query heads of a
KV head vote together; when a call is shorter than the window, the votes of
earlier calls fill the rest of it.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import PlainCodec
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field, spared
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.ops.masks import causal
from vq_functional.ops.rows import newest_rows, pick, token_order
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.tables import counting


@attrs.frozen(kw_only=True)
class SnapKVOptions:
    """`budget` rows of a prompt stay, sinks included; `obs_window` last queries vote.

    `pool_kernel` (odd; 1 = off) and `force_window` default to None: 5 and True
    with real queries, 1 and False without; a window that `budget` has no room for is
    cut to what is left beside sinks, protected rows and one free row. `backend` and `batched_scoring` are
    accepted and change nothing; `dtype` "float16" stores the kept rows so.
    """

    budget: int = 512
    obs_window: int = 32
    n_sink: int = 4
    dtype: str = "auto"
    batched_scoring: bool = True
    backend: str = "auto"
    pool_kernel: int | None = None
    force_window: bool | None = None
    protect: Spans = protect_field("snapkv")

    def __attrs_post_init__(self) -> None:
        check_int("snapkv", "obs_window", self.obs_window, 1)
        window = self.obs_window if self.force_window else 0
        check_policy("snapkv", self.budget, self.n_sink, window, self.protect, "obs_window")
        check_choice("snapkv", "dtype", self.dtype, ("auto", "float16"))
        check_choice("snapkv", "backend", self.backend, ("auto", "mlx", "metal", "reference"))
        check_choice("snapkv", "batched_scoring", self.batched_scoring, (True, False))
        check_choice("snapkv", "force_window", self.force_window, (None, True, False))
        if self.pool_kernel is not None:
            check_int("snapkv", "pool_kernel", self.pool_kernel, 1)
            check(self.pool_kernel % 2 == 1, "snapkv", "pool_kernel", "must be odd", self.pool_kernel)


@attrs.frozen
class SnapKVPolicy(Policy):
    """Priority is the share of votes; memory is the votes of the last call."""

    obs_window: int = 32
    pool_kernel: int | None = None
    force_window: bool | None = None
    name = "snapkv"
    prompt_only = True
    latest = False

    def init(self, batch: int, heads: int, slots: int) -> mx.array:
        return mx.zeros((batch, heads, slots), mx.float32)

    def score(self, votes: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        cast = self._cast_by_keys(scene) if scene.proxy else self._cast_by_queries(votes, scene)
        cast = mx.where(scene.tokens[:, None, None] > 1, cast, votes)
        return cast, mx.where(scene.sound(), self.smoothed(cast, scene), LOWEST)

    def smoothed(self, votes: mx.array, scene: Scene) -> mx.array:
        """What a row's own votes and those of its neighbours count, float32 [B, H, T]."""
        kernel = self.pool_kernel or (1 if scene.proxy else 5)
        return votes if kernel == 1 else _pooled(mx.where(self._window(scene), 0, votes), scene.position, kernel)

    def protected(self, scene: Scene) -> mx.array:
        return super().protected(scene) | self._window(scene)

    def _window(self, scene: Scene) -> mx.array:
        """Bool [B, H, T]: rows of the observation window, where these are kept."""
        if not (self.force_window if self.force_window is not None else not scene.proxy):
            return mx.zeros(scene.position.shape, mx.bool_)
        room = scene.limit - self.n_sink - spared(self.protect, self.n_sink) - 1
        return scene.position >= (scene.offset - mx.minimum(self.obs_window, room))[:, None, None]

    def _cast_by_queries(self, votes: mx.array, scene: Scene) -> mx.array:
        window = min(self.obs_window, scene.queries.shape[2])
        index = scene.lengths[:, None] - window + counting(window)
        voting, index = index >= 0, mx.maximum(index, 0)
        position = mx.where(voting, mx.take_along_axis(scene.query_position, index, axis=1), -1)
        voting = position >= 0
        queries = mx.take_along_axis(scene.queries, index[:, None, :, None], axis=2)
        visible = causal(scene.position, position) & voting[:, None, :, None]
        count = mx.maximum(voting.sum(axis=-1), 1)[:, None, None]
        new = scene.attention(queries, visible).mean(axis=2).sum(axis=2) / count
        share = mx.where(scene.offset[:, None, None] > scene.lengths[:, None, None], count / self.obs_window, 1.0)
        return share * new + (1 - share) * votes

    def _cast_by_keys(self, scene: Scene) -> mx.array:
        window = min(self.obs_window, scene.position.shape[2])
        index = newest_rows(scene.position, window)
        voting = pick(scene.position, index) >= 0
        visible = (scene.position >= 0)[:, :, None] & voting[..., None]
        cast = scene.attention(pick(scene.keys(), index), visible)[:, :, 0].sum(axis=2)
        return cast / mx.maximum(voting.sum(axis=-1), 1)[..., None]


def _pooled(votes: mx.array, position: mx.array, kernel: int) -> mx.array:
    """Average of `kernel` neighbours in token order, zeros beyond both ends."""
    order = token_order(position)
    ranked = mx.take_along_axis(mx.where(position < 0, 0, votes), order, axis=-1)
    reach = kernel // 2
    padded = mx.pad(ranked, [(0, 0), (0, 0), (reach, reach)])
    total = padded[..., : ranked.shape[-1]]
    for shift in range(1, kernel):
        total = total + padded[..., shift : shift + ranked.shape[-1]]
    return mx.take_along_axis(total * (1 / kernel), mx.argsort(order, axis=-1), axis=-1)


def snapkv_policy(**options: Any) -> SnapKVPolicy:
    """Prompt rows with the most votes stay; options as in SnapKVOptions."""
    o = SnapKVOptions(**options)
    return SnapKVPolicy(o.budget, o.n_sink, 0, o.protect, o.obs_window, o.pool_kernel, o.force_window)


def snapkv(**options: Any) -> Transform:
    """Compress prompts by votes; kept rows stay as they came, or in float16 by `dtype`."""
    o = SnapKVOptions(**options)
    codec = PlainCodec("float16" if o.dtype == "float16" else None)
    return chain(snapkv_policy(**options), rows(key=codec, value=codec), name="snapkv")
