"""The documented cache classes of methods that hold codes. Names that say fp16 mean rows as they came."""

from __future__ import annotations

import math
from typing import Any

from vq_adapters.method_cache import MethodKVCache, ratio
from vq_functional.codebook.turboquant_rvq import TurboQuantRVQCodec
from vq_functional.core.transform import Transform
from vq_functional.quantize.kivi import KIVI


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
        return ratio(full, self.compressed_key_bytes + self.compressed_value_bytes + self.residual_fp16_bytes)

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
