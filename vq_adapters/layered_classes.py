"""The cache classes of evicting methods that give each layer a budget, a role or something to fold."""

from __future__ import annotations

import numpy as np

from vq_adapters.config import KVCacheConfig, Layer
from vq_adapters.evicting_classes import KEPT_BYTES, BudgetKVCache
from vq_adapters.group import LayerGroup
from vq_functional.core.errors import check_int


class LayeredKVCache(BudgetKVCache):
    """Base: every layer has a budget of its own."""

    @property
    def layer_budget(self) -> int:
        """Rows that may stay in each head of this layer."""
        return self._budget()


class GroupedKVCache(LayeredKVCache):
    """Base: layers that tell each other something.

    `coordinator` is the group of a cache list and `layer_id` the place in it; `KVCacheBuilder.for_model` sees to both.
    Without them the layer stands alone.
    """

    def __init__(
        self, config: KVCacheConfig, layer_id: int | None = None, coordinator: LayerGroup | None = None
    ) -> None:
        if coordinator is None or layer_id is None:
            super().__init__(config)
            return
        last = min((len(entries) - 1 for entries in config._lists().values()), default=None)
        check_int(self.method, "layer_id", layer_id, 0, last)
        super().__init__(config.for_layer(Layer(layer_id, (layer_id if last is None else last) + 1)))
        self.join(coordinator, layer_id)


class PyramidKVCache(LayeredKVCache):
    """The rows that attention has used most, fewer in later layers (`pyramid_budget`, `pyramid_beta`)."""

    method = "pyramidkv"
    pyramid_kept_bytes = KEPT_BYTES


class SqueezeAttentionCache(GroupedKVCache):
    """The rows that attention has used most, under budgets that layers agree on (`squeeze_budget`, `squeeze_strength`).

    See `GroupedKVCache` for `layer_id` and `coordinator`.
    """

    method = "squeeze"
    squeeze_kept_bytes = KEPT_BYTES

    @property
    def concentration(self) -> float:
        """What the layer told of its first call, for the first batch row; 0.0 before. Reads one number back."""
        told = None if self._group is None else self._group.told(self._layer)
        return 0.0 if told is None else float(np.array(told)[0])


class ChunkKVCache(GroupedKVCache):
    """Whole chunks of neighbouring tokens (`chunkkv_budget`, `chunkkv_chunk_size`, `chunkkv_reuse_layers`).

    See `GroupedKVCache` for `layer_id` and `coordinator`; a layer that stands alone chooses for itself.
    """

    method = "chunkkv"
    chunkkv_kept_bytes = KEPT_BYTES

    @property
    def chunk_size(self) -> int:
        """Tokens that stay or go together."""
        return self._evicting.policy.chunk_size  # type: ignore[attr-defined]

    @property
    def is_index_reuse_leader(self) -> bool:
        """Whether this layer chooses for itself."""
        return self.transform.leader is None


class CaMKVCache(LayeredKVCache):
    """The rows that attention has used most, with the others folded into them (`cam_budget`, `cam_merge`)."""

    method = "cam"
    cam_kept_bytes = KEPT_BYTES

    @property
    def merge_mode(self) -> str:
        """How an evicted row is folded into rows that stay."""
        return self._evicting.policy.merge  # type: ignore[attr-defined]

    @property
    def merge_gate(self) -> bool:
        """Whether chance decides if it is."""
        return self._evicting.policy.merge_gate  # type: ignore[attr-defined]
