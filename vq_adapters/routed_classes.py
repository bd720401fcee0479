"""The cache classes of methods whose blocks have parts of their own: zipcache, gear, cachegen, amc."""

from __future__ import annotations

import math
from typing import Any, cast

from vq_adapters.coded_classes import PackedKVCache, TotalKVCache
from vq_adapters.method_cache import TOKENS_SEEN, ratio
from vq_functional.core.codec import PlainCodec
from vq_functional.hybrid.amc import AMCBlocks, tier_counts
from vq_functional.hybrid.amc_tiers import TiersCodec
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.cachegen import CacheGenCodec
from vq_functional.quantize.cachegen_estimates import entropy_coded_bits, entropy_savings, estimated_bytes
from vq_functional.quantize.gear import GearCodec, recovery_ratio
from vq_functional.quantize.zipcache import CHANNEL_GROUPS, ZipCacheCodec


class ZipCacheKVCache(PackedKVCache):
    """Tokens in two widths by saliency (`zipcache_hi_bits`, `zipcache_lo_bits`, `zipcache_hi_fraction`)."""

    method = "zipcache"

    @property
    def baseline_key_bytes(self) -> int:
        """Bytes of the same keys, all at `zipcache_lo_bits`."""
        codec = self._key
        return self._at_low_bits("key_dim", lambda dim: 4 * dim / codec.group_size if codec.group_size else 0.0)

    @property
    def baseline_value_bytes(self) -> int:
        """Bytes of the same values, all at `zipcache_lo_bits`."""

        def parameters(dim: int) -> float:
            return 4.0 * math.ceil(dim / next((size for size in CHANNEL_GROUPS if dim % size == 0), CHANNEL_GROUPS[-1]))

        return self._at_low_bits("value_dim", parameters)

    @property
    def compression_ratio(self) -> float:
        """Bytes of keys as they came / bytes of their codes; 1.0 while there are none."""
        return ratio(self._as_came(self._rows_in_codes(), "key_dim"), self.compressed_key_bytes)

    @property
    def effective_avg_bits(self) -> float:
        """Bits a key number in codes by the classes of the tokens, scales and zeros not counted."""
        return self._key.bits

    @property
    def _key(self) -> ZipCacheCodec:
        return cast(ZipCacheCodec, cast(Blocks, self.transform).key)

    def _rows_in_codes(self) -> int:
        return self._heads() * sum(fill.coded for fill in self._counts_now())

    def _at_low_bits(self, side: str, parameters: Any) -> int:
        if self._state is None:
            return 0
        dim = getattr(self._state.layout, side)
        return int(self._rows_in_codes() * (dim * self._key.lo_bits / 8 + parameters(dim)))


class GEARKVCache(PackedKVCache):
    """Affine groups with a low-rank part and outliers beside them (`gear_bits`, `gear_rank` and others)."""

    method = "gear"

    @property
    def base_only_key_bytes(self) -> int:
        """Bytes of the keys' codes, scales and zeros alone."""
        return self._base("keys")

    @property
    def base_only_value_bytes(self) -> int:
        """Bytes of the values' codes, scales and zeros alone."""
        return self._base("values")

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number with all that belongs to it."""
        return self._key_bits(float(cast(GearCodec, cast(Blocks, self.transform).key).bits))

    @property
    def error_recovery_ratio(self) -> float:
        """1 - squared error of the keys / squared error of their codes alone; 0.0 while there are none. Reads back."""
        state: Any = self._settled_state()
        return 0.0 if state is None else recovery_ratio(cast(Blocks, self.transform), state)

    def _base(self, side: str) -> int:
        transform = cast(Blocks, self.transform)
        plain = isinstance(transform.key if side == "keys" else transform.value, PlainCodec)
        return self._coded(side) if plain else self._coded(side, arrays=3)


class CacheGenKVCache(PackedKVCache):
    """Groups along tokens at fewer bits in deeper layers (`cachegen_bits`, `cachegen_layer_groups` and others).

    `encode_state` makes the entropy-coded export; what is held has fixed width.
    """

    method = "cachegen"

    @property
    def compressed_key_bytes(self) -> int:
        """An estimate: bytes of the keys in groups, were their codes entropy coded. Reads back."""
        return self._estimate("keys")

    @property
    def compressed_value_bytes(self) -> int:
        """An estimate: bytes of the values in groups, were their codes entropy coded. Reads back."""
        return self._estimate("values")

    @property
    def fixed_width_key_bytes(self) -> int:
        """Bytes of the keys in groups, as they are held: codes, scales and zeros."""
        return self._coded("keys")

    @property
    def fixed_width_value_bytes(self) -> int:
        """Bytes of the values in groups, as they are held: codes, scales and zeros."""
        return self._coded("values")

    @property
    def entropy_savings(self) -> float:
        """An estimate: the share of the keys' codes that entropy coding would save. Reads back."""
        state: Any = self._settled_state()
        return 0.0 if state is None else entropy_savings(cast(Blocks, self.transform), state)

    @property
    def assigned_avg_bits(self) -> float:
        """An estimate: bits a key number after entropy coding, scales and zeros not counted. Reads back."""
        state: Any = self._settled_state()
        bits, count = (0.0, 0) if state is None else entropy_coded_bits(cast(Blocks, self.transform), state, "keys")
        return bits / count if count else float(cast(CacheGenCodec, cast(Blocks, self.transform).key).bits)

    def _estimate(self, side: str) -> int:
        state: Any = self._settled_state()
        return 0 if state is None else estimated_bytes(cast(Blocks, self.transform), state, side)


class AMCKVCache(TotalKVCache):
    """Tokens in three tiers by saliency, with fewer channels and bits in lower ones (`amc_k_high`, `amc_k_mid`).

    No token is given up. The newest ones, which have no tier yet, count as high. Tokens of tiers are summed over
    all heads and batch rows.
    """

    method = "amc"
    tokens_seen = TOKENS_SEEN
    tokens_kept = TOKENS_SEEN

    @property
    def amc_kept_bytes(self) -> int:
        """Bytes of the tokens that are held, those that are exact included; room that is not filled is not counted."""
        return self._total()

    @property
    def tokens_high(self) -> int:
        """Tokens that read as they came. Reads back with `amc_adaptive_thresholds`."""
        return self._tokens() - self.tokens_mid - self.tokens_low

    @property
    def tokens_mid(self) -> int:
        """Tokens that read as 8-bit ones. Reads back with `amc_adaptive_thresholds`."""
        return self._tiers()[1]

    @property
    def tokens_low(self) -> int:
        """Tokens that read as 4-bit ones. Reads back with `amc_adaptive_thresholds`."""
        return self._tiers()[2]

    def _tiers(self) -> tuple[int, int, int]:
        """Tokens in blocks, by tier."""
        transform = cast(AMCBlocks, self.transform)
        codec = cast(TiersCodec, transform.key)
        if codec.lowered and self._state is not None:
            return tier_counts(transform, self._settled_state())
        blocks = self._heads() * sum(fill.coded for fill in self._counts_now()) // transform.block
        high, mid, low = codec.counts
        return blocks * high, blocks * mid, blocks * low
