"""The cache classes of evicting methods, by the names they are documented under or go by."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx

from vq_adapters.method_cache import FULL_SEQ_BYTES, TOKENS_SEEN, MethodKVCache, ratio
from vq_adapters.settling import Call
from vq_functional.core.transform import Transform

KEPT_BYTES = property(lambda cache: cache._held("keys", "values"), doc="Bytes of the keys and values that are kept.")


class EvictingKVCache(MethodKVCache):
    """Base: a cache whose transform has this method's policy, over any store of rows."""

    full_seq_bytes = FULL_SEQ_BYTES

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return getattr(getattr(transform, "policy", None), "name", None) == cls.method

    def _budget(self) -> int:
        """Rows that may stay in each head, in the first batch row."""
        fill = self._counts_now()[0]
        return fill.limit or self._evicting.policy.limit(fill.prompt)


class BudgetKVCache(EvictingKVCache):
    """Base: statistics that most of these classes have."""

    tokens_seen = TOKENS_SEEN

    @property
    def compression_ratio(self) -> float:
        """`full_seq_bytes` / bytes of the keys and values that are kept; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self._held("keys", "values"))

    @property
    def tokens_kept(self) -> int:
        """Rows that the first head keeps."""
        return self._counts_now()[0].rows


class StreamingLLMKVCache(EvictingKVCache):
    """Attention sinks and a window of the newest tokens (`stream_n_sink`, `stream_window_size`)."""

    method = "streaming_llm"
    stream_kept_bytes = KEPT_BYTES
    tokens_seen = TOKENS_SEEN

    @property
    def streaming_ratio(self) -> float:
        """`full_seq_bytes` / `stream_kept_bytes`; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.stream_kept_bytes)

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
    h2o_kept_bytes = KEPT_BYTES


class TOVAKVCache(BudgetKVCache):
    """The rows that the newest token attends to most (`tova_budget`, `tova_n_sink`)."""

    method = "tova"
    tova_kept_bytes = KEPT_BYTES


class KNormKVCache(BudgetKVCache):
    """The rows with the smallest keys (`knorm_budget`, `knorm_keep`)."""

    method = "knorm"
    knorm_kept_bytes = KEPT_BYTES


class KeyformerKVCache(BudgetKVCache):
    """The rows that attention has used most, with noise (`keyformer_budget`, `keyformer_tau`)."""

    method = "keyformer"
    keyformer_kept_bytes = KEPT_BYTES


class MorphKVCache(BudgetKVCache):
    """The rows that the newest tokens attend to most (`morphkv_budget`, `morphkv_window`)."""

    method = "morphkv"
    morphkv_kept_bytes = KEPT_BYTES


class KVzipCache(BudgetKVCache):
    """The rows that the context needs to be rebuilt (`kvzip_budget`, `kvzip_probe`)."""

    method = "kvzip"
    kvzip_kept_bytes = KEPT_BYTES


class CurDKVCache(BudgetKVCache):
    """The rows that span the attention output (`curdkv_budget`, `curdkv_rank_cap`)."""

    method = "curdkv"
    curdkv_kept_bytes = KEPT_BYTES


class NestedKVCache(BudgetKVCache):
    """The rows of a prompt with the most unusual keys (`nestedkv_budget`, `nestedkv_window`)."""

    method = "nestedkv"
    nestedkv_kept_bytes = KEPT_BYTES


class QFiltersKVCache(BudgetKVCache):
    """The rows whose keys point where queries point (`qfilters_budget`, `qfilters_calib_tokens`)."""

    method = "qfilters"
    _warned = False
    qfilters_kept_bytes = KEPT_BYTES

    def _end_call(self, call: Call, queries: mx.array | None) -> None:
        super()._end_call(call, queries)
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


# The same class by the name of the options.
L2NormKVCache = KNormKVCache
