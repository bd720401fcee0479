"""The cache classes of methods that hold codes. Names that say fp16 mean rows as they came.

A class that has no more to tell than its base is its method's name and a line of text.
"""

from __future__ import annotations

from typing import Any, cast

from vq_adapters.method_cache import FULL_SEQ_BYTES, MethodKVCache, ratio, row_of_batch
from vq_functional.core.transform import Transform
from vq_functional.core.tree import leaves_of
from vq_functional.quantize.blocks import Blocks

# What is held of them is `compressed_value_bytes`.
VALUE_FP16_BYTES = property(
    lambda cache: cache.fp16_value_bytes, doc="Bytes of the values of all tokens seen, as they came."
)


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
        held, columns = leaves_of(getattr(self._state, side).rows)[:arrays], self.transform.capacity(self._state)
        room = sum(row_of_batch(x) for x in held)
        return sum(room * fill.coded // columns for fill in self._counts_now())

    def _tables(self, side: str) -> int:
        """Bytes of the tables of "keys" or "values", once there are codes."""
        if self._state is None:
            return 0
        one = sum(row_of_batch(x) for x in getattr(self._state, side).tables)
        return one * sum(fill.coded > 0 for fill in self._counts_now())

    def _key_bits(self, empty: float) -> float:
        """Bits a key number in codes with all that belongs to it; `empty` while there are none."""
        coded = self._heads() * sum(fill.coded for fill in self._counts_now())
        if self._state is None or coded == 0:
            return empty
        return 8 * self.compressed_key_bytes / (coded * self._state.layout.key_dim)

    def _newest(self) -> int:
        """Bytes of the newest keys and values, which are exact."""
        exact = sum(fill.rows - fill.coded for fill in self._counts_now())
        return self._as_came(self._heads() * exact, "key_dim", "value_dim")

    def _sinks(self) -> int:
        """Bytes of the exact keys and values of sinks."""
        rule = cast(Blocks, self.transform).sinks
        exact = 0 if rule is None else sum(min(rule.count, fill.coded) for fill in self._counts_now())
        return self._as_came(self._heads() * exact, "key_dim", "value_dim")

    def _total(self) -> int:
        """Bytes of codes and tables, the newest rows and the sinks; room that is not filled is not counted."""
        return self._coded("keys") + self._coded("values") + self._newest() + self._sinks()


class BlocksKVCache(PackedKVCache):
    """The same, with what most of these methods tell."""

    @property
    def residual_fp16_bytes(self) -> int:
        """Bytes of the newest keys and values, which are exact."""
        return self._newest()

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a number in codes, scales and zeros not counted; the mean of keys and values."""
        return (self.transform.key.bits + self.transform.value.bits) / 2  # type: ignore[attr-defined]

    @property
    def effective_compression_ratio(self) -> float:
        """Bytes as they came / bytes of codes and exact rows, sinks among them; 1.0 while empty."""
        return ratio(self.fp16_key_bytes + self.fp16_value_bytes, self._total())


class FittedKVCache(PackedKVCache):
    """Base: old rows in blocks of codes, by tables that are fitted to the first rows and counted with their codes.

    Tables that were found beforehand belong to no cache and are not counted.
    """

    def _coded(self, side: str, arrays: int | None = None) -> int:
        return super()._coded(side, arrays) + self._tables(side)


class TotalKVCache(FittedKVCache):
    """The same, with bytes of all that is held."""

    full_seq_bytes = FULL_SEQ_BYTES

    @property
    def compression_ratio(self) -> float:
        """Bytes as they came / bytes held; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self._total())


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
