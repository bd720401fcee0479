"""The cache classes of methods that evict from prompts only."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from vq_adapters.evicting_classes import EvictingKVCache
from vq_adapters.method_cache import FULL_SEQ_BYTES, KEEP_RATE, TOKENS_SEEN, ratio
from vq_functional.core.errors import check
from vq_functional.core.tree import map_leaves
from vq_functional.hybrid.rocketkv import RocketKV


class SnapKVKVCache(EvictingKVCache):
    """A prompt compressed by the votes of its last tokens (`snap_budget`, `snap_obs_window`, `snap_n_sink`)."""

    method = "snapkv"
    tokens_total = TOKENS_SEEN
    keep_rate = KEEP_RATE

    @property
    def evicted_key_bytes(self) -> int:
        """Bytes of the keys that are kept, whatever the documented name says."""
        return self._held("keys")

    @property
    def evicted_value_bytes(self) -> int:
        """Bytes of the values that are kept, whatever the documented name says."""
        return self._held("values")

    @property
    def full_key_bytes(self) -> int:
        """Bytes of the keys of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim")

    @property
    def full_value_bytes(self) -> int:
        """Bytes of the values of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "value_dim")

    @property
    def tokens_kept(self) -> int:
        """Rows kept, all heads summed."""
        return self._rows()

    @property
    def eviction_ratio(self) -> float:
        """Full bytes / kept bytes of keys and values; 1.0 while empty."""
        full = self.full_key_bytes + self.full_value_bytes
        return ratio(full, self._held("keys", "values"))


class RocketKVKVCache(EvictingKVCache):
    """A share of each prompt, read page by page with the hook (`rocketkv_compression_ratio`, `rocketkv_obs_window`)."""

    method = "rocketkv"
    full_fp16_bytes_total = FULL_SEQ_BYTES
    tokens_total = TOKENS_SEEN
    keep_rate = KEEP_RATE

    @property
    def _rocket(self) -> RocketKV:
        return cast(RocketKV, self.transform)

    @property
    def stage1_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def stage2_aux_bytes(self) -> int:
        """Bytes of the bounds of the pages of kept rows."""
        pages = self._heads() * sum(-(-fill.rows // self._rocket.page) for fill in self._counts_now())
        return 2 * self._as_came(pages, "key_dim")

    @property
    def compression_ratio(self) -> float:
        """Full bytes / bytes of kept rows and pages; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.stage1_bytes + self.stage2_aux_bytes)

    @property
    def tokens_kept(self) -> int:
        """Rows kept, all heads summed."""
        return self._rows()

    @property
    def stage1_ratio(self) -> float:
        """Tokens of a prompt for each row that stays."""
        return 1 / self._evicting.policy.budget

    @property
    def page_size(self) -> int:
        """Rows to a page."""
        return self._rocket.page

    @property
    def head_topk1(self) -> int:
        """Channels that enter a page's bound; 0 before the head size is known."""
        return 0 if self._state is None else self._rocket.channels_of(self._state.layout.key_dim)

    def select_indices(self, query: mx.array, b: int, h: int, keep_recent: int = 0) -> mx.array:
        """Held rows int32 [n], rising, that a query [D] of KV head `h` in batch row `b` should look at."""
        state = self._settled_state()
        check(state is not None, "rocketkv", "query", "must come after an update", None)
        heads = state.layout.kv_heads
        one = map_leaves(lambda x: x[b : b + 1], state)
        queries = mx.broadcast_to(query.reshape(1, 1, 1, -1), (1, heads, 1, query.size))
        found: Any = self._rocket.select(one, queries, keep_recent=keep_recent)[0, h].tolist()
        return mx.array([row for row in found if row >= 0], mx.int32)
