"""The cache classes of methods that pack old rows in blocks, with what each has to tell beside bytes."""

from __future__ import annotations

from typing import Any, cast

from vq_adapters.coded_classes import VALUE_FP16_BYTES, BlocksKVCache
from vq_adapters.method_cache import FULL_SEQ_BYTES, TOKENS_SEEN, MethodKVCache, ratio
from vq_functional.core.transform import Transform
from vq_functional.quantize.age_tiered import AgeTiered
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.head_stacks import HeadStacks, HeadStacksCodec
from vq_functional.quantize.kitty import KittyCodec


class SinkProtectedKVCache(BlocksKVCache):
    """KIVI with a few tokens exact (`n_sink_tokens`, and the fields of kivi)."""

    method = "kivi_sink"

    @property
    def sink_positions(self) -> list[int]:
        """Positions of the sinks of the first batch row, the most unusual first. Reads back."""
        return self.sink_positions_for(0)

    def sink_positions_for(self, index: int) -> list[int]:
        """The same of batch row `index`. Reads back."""
        state: Any = self._settled_state()
        if state is None or state.sinks is None:
            return []
        listed: Any = state.sinks.position[index].tolist()
        return [position for position in listed if position >= 0]

    @property
    def sink_fp16_bytes(self) -> int:
        """Bytes of the exact keys and values of sinks."""
        return self._sinks()


class KittyKVCache(BlocksKVCache):
    """Keys in pages whose channels differ in bits (`kitty_hi_fraction`, `kitty_hi_bit`, `kitty_lo_bit`)."""

    method = "kitty"
    value_fp16_bytes = VALUE_FP16_BYTES

    @property
    def hi_fraction(self) -> float:
        """Share of the channels of a page with more bits."""
        return self._codec.hi_fraction

    @property
    def hi_bit(self) -> int:
        """Bits of these."""
        return self._codec.hi_bit

    @property
    def lo_bit(self) -> int:
        """Bits of the others."""
        return self._codec.lo_bit

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number in codes, scales and zeros not counted."""
        more, codec = self.hi_bit - self.lo_bit, self._codec
        if self._state is None:
            return self.lo_bit + self.hi_fraction * more
        dim = self._state.layout.key_dim
        return self.lo_bit + more * codec.boosted(dim) / dim

    @property
    def _codec(self) -> KittyCodec:
        return cast(KittyCodec, cast(Blocks, self.transform).key)


class AdaKVCache(BlocksKVCache):
    """Keys at unequal bits for the heads of a layer (`adakv_target_avg_bits` and others); values as they come."""

    method = "adakv"
    value_fp16_bytes = VALUE_FP16_BYTES

    @property
    def head_bits(self) -> list[int]:
        """Bits of each head in the newest block of the first batch row. Reads back."""
        state: Any = self._settled_state()
        coded = 0 if state is None else self._counts_now()[0].coded
        if coded == 0:
            return []
        transform = cast(Blocks, self.transform)
        if not isinstance(transform.key, HeadStacksCodec):
            return [transform.key.bits] * state.layout.kv_heads  # type: ignore[attr-defined]
        key = transform.sides(state.layout)[0]
        found = cast(HeadStacks, key.coder).bits((*key.first(state.keys.rows, coded), *state.keys.tables))
        return cast(list[int], found[0, :, -1].tolist())

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number in codes, the mean over the heads, scales and zeros not counted."""
        return self.target_avg_bits

    @property
    def target_avg_bits(self) -> float:
        """The mean that the heads share."""
        key: Any = cast(Blocks, self.transform).key
        return float(key.mean if isinstance(key, HeadStacksCodec) else key.bits)

    @property
    def allowed_bits(self) -> tuple[int, ...]:
        """Widths that a head can have, rising."""
        key: Any = cast(Blocks, self.transform).key
        return key.widths if isinstance(key, HeadStacksCodec) else (key.bits,)


class AgeTieredKVCache(MethodKVCache):
    """Fewer bits for older tokens (`age_recent_boundary`, `age_mid_boundary`, `age_bits_recent` and others)."""

    method = "age_tiered"
    full_seq_bytes = FULL_SEQ_BYTES
    tokens_seen = TOKENS_SEEN

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(transform, AgeTiered)

    @property
    def age_tiered_bytes(self) -> int:
        """Bytes of the tokens that are held, those that are exact included; room that is not filled is not counted."""
        if self._state is None:
            return 0
        o, layout, total = self._transform.options, self._state.layout, 0
        for fill in self._counts_now():
            tiers = (fill.coded - fill.older, fill.older - fill.oldest, fill.oldest)
            for count, bits in zip(tiers, self._transform.widths, strict=True):
                numbers = (layout.key_dim + layout.value_dim) * count
                total += numbers * bits // 8 + 2 * numbers * layout.dtype.size // o.group_size
            total += self._as_came(fill.tokens - fill.coded, "key_dim", "value_dim")
        return self._heads() * total

    @property
    def _transform(self) -> AgeTiered:
        return cast(AgeTiered, self.transform)

    @property
    def compression_ratio(self) -> float:
        """Bytes as they came / bytes held; 1.0 while empty."""
        return ratio(self.full_seq_bytes, self.age_tiered_bytes)

    @property
    def tokens_kept(self) -> int:
        """Tokens of the first batch row."""
        return self._counts_now()[0].tokens

    @property
    def tokens_recent(self) -> int:
        """Tokens of the first batch row at `age_bits_recent`, and those that are exact."""
        fill = self._counts_now()[0]
        return fill.tokens - fill.older

    @property
    def tokens_mid(self) -> int:
        """Tokens of the first batch row at `age_bits_mid`."""
        fill = self._counts_now()[0]
        return fill.older - fill.oldest

    @property
    def tokens_old(self) -> int:
        """Tokens of the first batch row at `age_bits_old`."""
        return self._counts_now()[0].oldest
