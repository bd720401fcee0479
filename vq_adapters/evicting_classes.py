"""The documented cache classes of evicting methods, and those of the others by the names they go by."""

from __future__ import annotations

import warnings
from typing import Any, cast

import mlx.core as mx
import numpy as np

from vq_adapters.config import KVCacheConfig, Layer
from vq_adapters.group import LayerGroup
from vq_adapters.method_cache import MethodKVCache, ratio
from vq_functional.core.errors import check
from vq_functional.core.transform import Transform
from vq_functional.core.tree import map_leaves, nbytes
from vq_functional.hybrid.rocketkv import RocketKV


class EvictingKVCache(MethodKVCache):
    """Base: a cache whose transform has this method's policy, over any store of rows."""

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return getattr(getattr(transform, "policy", None), "name", None) == cls.method

    @property
    def full_seq_bytes(self) -> int:
        """Bytes of the keys and values of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim", "value_dim")

    def _budget(self) -> int:
        """Rows that may stay in each head, in the first batch row."""
        fill = self._counts_now()[0]
        return fill.limit or self._evicting.policy.limit(fill.prompt)


class BudgetKVCache(EvictingKVCache):
    """Base: statistics that most of these classes have."""

    @property
    def compression_ratio(self) -> float:
        """`full_seq_bytes` / bytes of the keys and values that are kept; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self._held("keys", "values"))

    @property
    def tokens_seen(self) -> int:
        """Tokens seen, all heads summed."""
        return self._tokens()

    @property
    def tokens_kept(self) -> int:
        """Rows that the first head keeps."""
        return self._counts_now()[0].rows


class StreamingLLMKVCache(EvictingKVCache):
    """Attention sinks and a window of the newest tokens (`stream_n_sink`, `stream_window_size`)."""

    method = "streaming_llm"

    @property
    def stream_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def streaming_ratio(self) -> float:
        """`full_seq_bytes` / `stream_kept_bytes`; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.stream_kept_bytes)

    @property
    def tokens_seen(self) -> int:
        """Tokens seen, all heads summed."""
        return self._tokens()

    @property
    def tokens_in_window(self) -> int:
        """Rows that the first head keeps: sinks and window."""
        return self._counts_now()[0].rows

    @property
    def tokens_kept(self) -> int:
        """Same as `tokens_in_window`."""
        return self.tokens_in_window


class H2OKVCache(BudgetKVCache):
    """The rows that attention has used most (`h2o_budget`, `h2o_n_sink`, `h2o_grace`, `h2o_decay`)."""

    method = "h2o"

    @property
    def h2o_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class SnapKVKVCache(EvictingKVCache):
    """A prompt compressed by the votes of its last tokens (`snap_budget`, `snap_obs_window`, `snap_n_sink`)."""

    method = "snapkv"

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
    def tokens_total(self) -> int:
        """Tokens seen, all heads summed."""
        return self._tokens()

    @property
    def evictionratio(self) -> float:
        """Full bytes / kept bytes of keys and values; 1.0 while empty."""
        full = self.full_key_bytes + self.full_value_bytes
        return ratio(full, self._held("keys", "values"))

    @property
    def keep_rate(self) -> float:
        """`tokens_kept` / `tokens_total`; 1.0 while empty."""
        return ratio(self.tokens_kept, self.tokens_total)


class TOVAKVCache(BudgetKVCache):
    """The rows that the newest token attends to most (`tova_budget`, `tova_n_sink`)."""

    method = "tova"

    @property
    def tova_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class PyramidKVCache(BudgetKVCache):
    """The rows that attention has used most, fewer in later layers (`pyramid_budget`, `pyramid_beta`)."""

    method = "pyramidkv"

    @property
    def pyramid_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def layer_budget(self) -> int:
        """Rows that may stay in each head of this layer."""
        return self._budget()


class SqueezeAttentionCache(BudgetKVCache):
    """The rows that attention has used most, under budgets that layers agree on (`squeeze_budget`, `squeeze_strength`).

    `coordinator` is the group of a cache list and `layer_id` the place in it; `KVCacheBuilder.for_model` sees to both.
    """

    method = "squeeze"

    def __init__(
        self, config: KVCacheConfig, layer_id: int | None = None, coordinator: LayerGroup | None = None
    ) -> None:
        super().__init__(config)
        if coordinator is not None and layer_id is not None:
            self.join(coordinator, layer_id)

    @property
    def squeeze_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def layer_budget(self) -> int:
        """Rows that may stay in each head of this layer."""
        return self._budget()

    @property
    def concentration(self) -> float:
        """What the layer told of its first call, for the first batch row; 0.0 before. Reads one number back."""
        told = None if self._group is None else self._group.told(self._layer)
        return 0.0 if told is None else float(np.array(told)[0])


class ChunkKVCache(BudgetKVCache):
    """Whole chunks of neighbouring tokens (`chunkkv_budget`, `chunkkv_chunk_size`, `chunkkv_reuse_layers`).

    `coordinator` is the group of a cache list and `layer_id` the place in it; `KVCacheBuilder.for_model` sees to both.
    Without them the layer chooses for itself.
    """

    method = "chunkkv"

    def __init__(
        self, config: KVCacheConfig, layer_id: int | None = None, coordinator: LayerGroup | None = None
    ) -> None:
        super().__init__(config if layer_id is None else config.for_layer(Layer(layer_id, layer_id + 1)))
        if coordinator is not None and layer_id is not None:
            self.join(coordinator, layer_id)

    @property
    def chunkkv_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def layer_budget(self) -> int:
        """Rows that may stay in each head of this layer."""
        return self._budget()

    @property
    def chunk_size(self) -> int:
        """Tokens that stay or go together."""
        return self._evicting.policy.chunk_size  # type: ignore[attr-defined]

    @property
    def is_index_reuse_leader(self) -> bool:
        """Whether this layer chooses for itself."""
        return self.transform.leader is None


class CaMKVCache(BudgetKVCache):
    """The rows that attention has used most, with the others folded into them (`cam_budget`, `cam_merge`)."""

    method = "cam"

    @property
    def cam_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def layer_budget(self) -> int:
        """Rows that may stay in each head of this layer."""
        return self._budget()

    @property
    def merge_mode(self) -> str:
        """How an evicted row is folded into rows that stay."""
        return self._evicting.policy.merge  # type: ignore[attr-defined]

    @property
    def merge_gate(self) -> bool:
        """Whether chance decides if it is."""
        return self._evicting.policy.merge_gate  # type: ignore[attr-defined]


class KNormKVCache(BudgetKVCache):
    """The rows with the smallest keys (`knorm_budget`, `knorm_keep`)."""

    method = "knorm"

    @property
    def knorm_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class KeyformerKVCache(BudgetKVCache):
    """The rows that attention has used most, with noise (`keyformer_budget`, `keyformer_tau`)."""

    method = "keyformer"

    @property
    def keyformer_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class MorphKVCache(BudgetKVCache):
    """The rows that the newest tokens attend to most (`morphkv_budget`, `morphkv_window`)."""

    method = "morphkv"

    @property
    def morphkv_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class KVzipCache(BudgetKVCache):
    """The rows that the context needs to be rebuilt (`kvzip_budget`, `kvzip_probe`)."""

    method = "kvzip"

    @property
    def kvzip_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class CurDKVCache(BudgetKVCache):
    """The rows that span the attention output (`curdkv_budget`, `curdkv_rank_cap`)."""

    method = "curdkv"

    @property
    def curdkv_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class NestedKVCache(BudgetKVCache):
    """The rows of a prompt with the most unusual keys (`nestedkv_budget`, `nestedkv_window`)."""

    method = "nestedkv"

    @property
    def nestedkv_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")


class QFiltersKVCache(BudgetKVCache):
    """The rows whose keys point where queries point (`qfilters_budget`, `qfilters_calib_tokens`)."""

    method = "qfilters"
    _warned = False

    @property
    def qfilters_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    def _end_call(self, queries: mx.array | None) -> None:
        super()._end_call(queries)
        self._check_retention()

    def _check_retention(self) -> None:
        """Warn once, or raise, when less is left of the tokens than `min_retention`."""
        policy: Any = self._evicting.policy
        share = min((fill.rows / fill.tokens for fill in self._fills if fill.tokens), default=1.0)
        if policy.min_retention is None or share >= policy.min_retention or policy.on_low_retention == "ignore":
            return
        text = f"qfilters: {share:.0%} of the tokens are left, less than `min_retention` = {policy.min_retention}"
        if policy.on_low_retention == "raise":
            raise ValueError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=2)


class RocketKVKVCache(EvictingKVCache):
    """A share of each prompt, read page by page with the hook (`rocketkv_compression_ratio`, `rocketkv_obs_window`)."""

    method = "rocketkv"

    @property
    def _rocket(self) -> RocketKV:
        return cast(RocketKV, self.transform)

    @property
    def stage1_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def stage2_aux_bytes(self) -> int:
        """Bytes of the bounds of all pages."""
        return 0 if self._state is None else nbytes(self._state.carry)

    @property
    def full_fp16_bytes_total(self) -> int:
        """Bytes of the keys and values of all tokens seen, as they came."""
        return self.full_seq_bytes

    @property
    def compression_ratio(self) -> float:
        """Full bytes / bytes of kept rows and pages; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.stage1_bytes + self.stage2_aux_bytes)

    @property
    def tokens_kept(self) -> int:
        """Rows kept, all heads summed."""
        return self._rows()

    @property
    def tokens_total(self) -> int:
        """Tokens seen, all heads summed."""
        return self._tokens()

    @property
    def keep_rate(self) -> float:
        """`tokens_kept` / `tokens_total`; 1.0 while empty."""
        return ratio(self.tokens_kept, self.tokens_total)

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


# The same class by the name of the options.
L2NormKVCache = KNormKVCache
