"""The documented cache classes: TransformKVCache, made from a configuration, with the documented statistics.

Statistics come from host counters and array shapes; nothing is read back, and
reading them changes nothing. Names that say fp16 mean rows as they came, in
the dtype they came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import mlx.core as mx

from vq_adapters.cache import TransformKVCache
from vq_adapters.config import KVCacheConfig
from vq_functional.codebook.turboquant_rvq import TurboQuantRVQCodec
from vq_functional.core.errors import check
from vq_functional.core.transform import Fill, Transform
from vq_functional.evict.h2o import H2OPolicy
from vq_functional.evict.snapkv import SnapKVPolicy
from vq_functional.evict.streaming_llm import StreamingLLMPolicy
from vq_functional.quantize.kivi import KIVI


class MethodKVCache(TransformKVCache):
    """Base of the documented classes: one layer's cache by one method.

    Raises QuantizerConfigError for a configuration of another method.
    """

    method: ClassVar[str]

    def __init__(self, config: KVCacheConfig) -> None:
        check(config.method == self.method, type(self).__name__, "method", f"must be {self.method}", config.method)
        super().__init__(config.transform(), max_tokens=config.capacity)

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        check(self._serves(transform), type(self).__name__, "transform", f"must be of {self.method}", transform.name)
        super()._reset(transform, max_tokens, query_heads)

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        """Whether the statistics have a meaning for this transform."""
        raise TypeError(f"{cls.__name__} serves no transform")

    def _counts_now(self) -> list[Fill]:
        """How full the batch rows are once the last call has ended."""
        if self._unsettled is None:
            return self._fills
        return self._advance(self.transform.settled, self._unsettled[1])

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


def row_bytes(rows: Iterable[mx.array]) -> int:
    """Bytes of one row of arrays [B, H, C, width]."""
    return sum(math.prod(x.shape[3:]) * x.itemsize for x in rows)


def _ratio(full: float, held: float) -> float:
    return full / held if held else 1.0


class StreamingLLMKVCache(MethodKVCache):
    """Attention sinks and a window of the newest tokens (`stream_n_sink`, `stream_window_size`)."""

    method = "streaming_llm"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(getattr(transform, "policy", None), StreamingLLMPolicy)

    @property
    def stream_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def full_seq_bytes(self) -> int:
        """Bytes of the keys and values of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim", "value_dim")

    @property
    def streaming_ratio(self) -> float:
        """`full_seq_bytes` / `stream_kept_bytes`; 1.0 while empty."""
        return _ratio(self.full_seq_bytes, self.stream_kept_bytes)

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


class H2OKVCache(MethodKVCache):
    """The rows that attention has used most (`h2o_budget`, `h2o_n_sink`, `h2o_grace`, `h2o_decay`)."""

    method = "h2o"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(getattr(transform, "policy", None), H2OPolicy)

    @property
    def h2o_kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._held("keys", "values")

    @property
    def full_seq_bytes(self) -> int:
        """Bytes of the keys and values of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim", "value_dim")

    @property
    def compression_ratio(self) -> float:
        """`full_seq_bytes` / `h2o_kept_bytes`; 1.0 while empty."""
        return _ratio(self.full_seq_bytes, self.h2o_kept_bytes)

    @property
    def tokens_seen(self) -> int:
        """Tokens seen, all heads summed."""
        return self._tokens()

    @property
    def tokens_kept(self) -> int:
        """Rows that the first head keeps."""
        return self._counts_now()[0].rows


class SnapKVKVCache(MethodKVCache):
    """A prompt compressed by the votes of its last tokens (`snap_budget`, `snap_obs_window`, `snap_n_sink`)."""

    method = "snapkv"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(getattr(transform, "policy", None), SnapKVPolicy)

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
    def eviction_ratio(self) -> float:
        """Full bytes / kept bytes of keys and values; 1.0 while empty."""
        full = self.full_key_bytes + self.full_value_bytes
        return _ratio(full, self._held("keys", "values"))

    @property
    def keep_rate(self) -> float:
        """`tokens_kept` / `tokens_total`; 1.0 while empty."""
        return _ratio(self.tokens_kept, self.tokens_total)


class KIVIKVCache(MethodKVCache):
    """Keys and values in affine groups, the newest exact (`bit_width_inlier`, `kivi_group_size`, `residual_length`)."""

    method = "kivi"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(transform, KIVI)

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of the keys that are in groups: codes, scales and zeros."""
        return self._coded("keys")

    @property
    def compressed_value_bytes(self) -> int:
        """Bytes of the values that are in groups: codes, scales and zeros."""
        return self._coded("values")

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes of the keys of all tokens held, as they came."""
        return self._as_came(self._tokens(), "key_dim")

    @property
    def fp16_value_bytes(self) -> int:
        """Bytes of the values of all tokens held, as they came."""
        return self._as_came(self._tokens(), "value_dim")

    @property
    def residual_fp16_bytes(self) -> int:
        """Bytes of the newest keys and values, which are exact."""
        exact = self._heads() * sum(fill.rows - fill.coded for fill in self._counts_now())
        return self._as_came(exact, "key_dim", "value_dim")

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a number in groups, scales and zeros not counted."""
        return float(self.transform.options.bits)  # type: ignore[attr-defined]

    @property
    def effective_compression_ratio(self) -> float:
        """Bytes as they came / bytes of groups and exact rows; 1.0 while empty."""
        full = self.fp16_key_bytes + self.fp16_value_bytes
        return _ratio(full, self.compressed_key_bytes + self.compressed_value_bytes + self.residual_fp16_bytes)

    def _coded(self, side: str) -> int:
        if self._state is None:
            return 0
        groups, columns = getattr(self._state, side), self.transform.capacity(self._state)
        block = sum(math.prod(x.shape[1:]) * x.itemsize for x in groups)
        return sum(block * fill.coded // columns for fill in self._counts_now())


class TurboQuantRVQKVCache(MethodKVCache):
    """Keys in two passes of rotated scalar codes (`bit_width_inlier` each), values as they come."""

    method = "turboquant_rvq"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(cls._key_codec(transform), TurboQuantRVQCodec)

    @staticmethod
    def _key_codec(transform: Transform) -> Any:
        return getattr(getattr(transform, "store", transform), "key", None)

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of the key codes and norms that are held."""
        return self._held("keys")

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes of the keys of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim")

    @property
    def assigned_bits(self) -> int:
        """Bits a coordinate in each of the two passes."""
        return self._key_codec(self.transform).bits


# The class of a method; the others are served by TransformKVCache itself.
CLASSES: dict[str, type[MethodKVCache]] = {
    kind.method: kind for kind in (StreamingLLMKVCache, H2OKVCache, SnapKVKVCache, KIVIKVCache, TurboQuantRVQKVCache)
}
