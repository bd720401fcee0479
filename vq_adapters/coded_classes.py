"""The cache classes of methods that hold codes. Names that say fp16 mean rows as they came.

A class that has no more to tell than its base is its method's name and a line of text.
"""

from __future__ import annotations

import math
from typing import Any

from vq_adapters.method_cache import MethodKVCache, ratio
from vq_functional.core.transform import Transform
from vq_functional.core.tree import flatten
from vq_functional.quantize.blocks import Blocks


class CodedKVCache(MethodKVCache):
    """Base: every row in codes, by a key codec of the method's name."""

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return getattr(cls._key_codec(transform), "name", None) == cls.method

    @staticmethod
    def _key_codec(transform: Transform) -> Any:
        return getattr(getattr(transform, "store", transform), "key", None)

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of the keys in codes, with all numbers that belong to them."""
        return self._coded("keys")

    @property
    def compressed_value_bytes(self) -> int:
        """Bytes of the values in codes, with all numbers that belong to them."""
        return self._coded("values")

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes of the keys of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "key_dim")

    @property
    def fp16_value_bytes(self) -> int:
        """Bytes of the values of all tokens seen, as they came."""
        return self._as_came(self._tokens(), "value_dim")

    def _coded(self, side: str) -> int:
        """Bytes that "keys" or "values" take in codes."""
        return self._held(side)


class PackedKVCache(CodedKVCache):
    """Base: old rows in blocks of codes, the newest exact."""

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(transform, Blocks) and transform.name == cls.method

    def _coded(self, side: str, arrays: int | None = None) -> int:
        """Bytes of "keys" or "values" in codes, or of the first `arrays` that hold them."""
        if self._state is None:
            return 0
        held, columns = flatten(getattr(self._state, side).rows)[0][:arrays], self.transform.capacity(self._state)
        room = sum(math.prod(x.shape[1:]) * x.itemsize for x in held)
        return sum(room * fill.coded // columns for fill in self._counts_now())


class BlocksKVCache(PackedKVCache):
    """The same, with what most of these methods tell."""

    @property
    def residual_fp16_bytes(self) -> int:
        """Bytes of the newest keys and values, which are exact."""
        exact = self._heads() * sum(fill.rows - fill.coded for fill in self._counts_now())
        return self._as_came(exact, "key_dim", "value_dim")

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a number in codes, scales and zeros not counted; the mean of keys and values."""
        return (self.transform.key.bits + self.transform.value.bits) / 2  # type: ignore[attr-defined]

    @property
    def effective_compression_ratio(self) -> float:
        """Bytes as they came / bytes of codes and exact rows; 1.0 while empty."""
        held = self.compressed_key_bytes + self.compressed_value_bytes + self.residual_fp16_bytes
        return ratio(self.fp16_key_bytes + self.fp16_value_bytes, held)


class KIVIKVCache(BlocksKVCache):
    """Keys and values in affine groups, the newest exact (`bit_width_inlier`, `kivi_group_size`, `residual_length`)."""

    method = "kivi"


class TurboQuantRVQKVCache(CodedKVCache):
    """Keys in two passes of rotated scalar codes (`bit_width_inlier` each), values as they come."""

    method = "turboquant_rvq"

    @property
    def assigned_bits(self) -> int:
        """Bits a coordinate in each of the two passes."""
        return self._key_codec(self.transform).bits
