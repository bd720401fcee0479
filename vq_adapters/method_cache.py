"""MethodKVCache: TransformKVCache made from a configuration, with statistics.

Statistics come from host counters and array shapes; nothing is read back, and
reading them changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import mlx.core as mx

from vq_adapters.cache import TransformKVCache
from vq_adapters.config import KVCacheConfig
from vq_functional.core.errors import check
from vq_functional.core.transform import Fill, Transform


class MethodKVCache(TransformKVCache):
    """Base of the documented classes: one layer's cache by one method.

    Raises QuantizerConfigError for a configuration of another method.
    """

    method: ClassVar[str]

    def __init__(self, config: KVCacheConfig) -> None:
        check(config.method == self.method, type(self).__name__, "method", f"must be {self.method}", config.method)
        super().__init__(config.transform(), max_tokens=config.max_tokens)

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        check(self._serves(transform), type(self).__name__, "transform", f"must be of {self.method}", transform.name)
        super()._reset(transform, max_tokens, query_heads)

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        """Whether the statistics have a meaning for this transform."""
        raise TypeError(f"{cls.__name__} serves no transform")

    def _counts_now(self) -> list[Fill]:
        """How full the batch rows are once the last call has ended."""
        if self._unsettled is None or self._waits or self._holds:
            return self._fills
        return self._advance(self.transform.settled, self._unsettled.counts)

    def _heads(self) -> int:
        return 0 if self._state is None else self._state.layout.kv_heads

    def _tokens(self) -> int:
        """Tokens seen, all heads and batch rows summed."""
        return self._heads() * sum(fill.tokens for fill in self._counts_now())

    def _rows(self) -> int:
        """Rows held, all heads and batch rows summed."""
        return self._heads() * sum(fill.rows for fill in self._counts_now())

    def _as_came(self, rows: int, *dims: str) -> int:
        """Bytes of `rows` rows of these sizes ("key_dim", "value_dim") in the dtype they came in."""
        if self._state is None:
            return 0
        layout = self._state.layout
        return rows * sum(getattr(layout, dim) for dim in dims) * layout.dtype.size

    def _held(self, *sides: str) -> int:
        """Bytes of the rows that a row store holds of "keys" and "values"."""
        if self._state is None:
            return 0
        return self._rows() * sum(row_bytes(getattr(self._state.rows, side)) for side in sides)


# Statistics that several classes have.
FULL_SEQ_BYTES = property(
    lambda cache: cache._as_came(cache._tokens(), "key_dim", "value_dim"),
    doc="Bytes of the keys and values of all tokens seen, as they came.",
)
TOKENS_SEEN = property(lambda cache: cache._tokens(), doc="Tokens seen, all heads and batch rows summed.")
KEEP_RATE = property(
    lambda cache: ratio(cache.tokens_kept, cache.tokens_total), doc="`tokens_kept` / `tokens_total`; 1.0 while empty."
)


def row_bytes(rows: Iterable[mx.array]) -> int:
    """Bytes of one row of arrays [B, H, C, width]."""
    return sum(math.prod(x.shape[3:]) * x.itemsize for x in rows)


def row_of_batch(x: mx.array) -> int:
    """Bytes of one batch row of an array [B, ...]."""
    return math.prod(x.shape[1:]) * x.itemsize


def ratio(full: float, held: float) -> float:
    """`full` / `held`; 1.0 where nothing is held."""
    return full / held if held else 1.0
