"""The cache class of anchorkv."""

from __future__ import annotations

from typing import cast

from vq_adapters.method_cache import FULL_SEQ_BYTES, TOKENS_SEEN, MethodKVCache, ratio
from vq_functional.core.transform import Transform
from vq_functional.hybrid.anchor_codes import slot_bytes
from vq_functional.hybrid.anchor_state import INDEX_BYTES, Sizes
from vq_functional.hybrid.anchorkv import AnchorKV


class AnchorKVKVCache(MethodKVCache):
    """Prompt rows as multiples of a few exact ones (`anchorkv_theta`, `anchorkv_window`, `anchorkv_anchor_frac`).

    No token is given up. A prompt into which `trim` has cut counts as one that ended there.
    """

    method = "anchorkv"
    full_seq_bytes = FULL_SEQ_BYTES
    tokens_kept = TOKENS_SEEN
    tokens_total = TOKENS_SEEN

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(transform, AnchorKV)

    @property
    def anchorkv_bytes(self) -> int:
        """Bytes of anchors, multiples and residuals, and of exact rows; room that is not filled is not counted."""
        if self._state is None:
            return 0
        layout, row = self._state.layout, self._as_came(1, "key_dim", "value_dim")
        coded = sum(fill.coded for fill in self._counts_now())
        key, value = (slot_bytes(dim, self._sizes.bits) for dim in (layout.key_dim, layout.value_dim))
        keys, values = self._residuals()
        prompt = self.n_anchor_total * (row + 4) + 2 * INDEX_BYTES * self._heads() * coded + keys * key + values * value
        return prompt + row * (self._rows() - self._heads() * coded)

    @property
    def compression_ratio(self) -> float:
        """Bytes as they came / bytes held; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.anchorkv_bytes)

    @property
    def n_anchor_total(self) -> int:
        """Anchors, all heads and batch rows summed."""
        return self._heads() * sum(int(self._sizes.anchors(fill.coded)) for fill in self._counts_now())

    @property
    def n_residual_total(self) -> int:
        """Coded residuals of keys and of values, all heads and batch rows summed."""
        return sum(self._residuals())

    @property
    def _sizes(self) -> Sizes:
        return cast(AnchorKV, self.transform).rule.sizes

    def _residuals(self) -> tuple[int, int]:
        """Of keys and of values."""
        if self._state is None:
            return 0, 0
        layout = self._state.layout
        counts = [self._sizes.residuals(fill.coded, layout) for fill in self._counts_now()]
        return sum(int(keys) for keys, _ in counts), sum(int(values) for _, values in counts)
