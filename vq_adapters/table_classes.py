"""The cache classes of methods that code by orders, levels and codebooks: skvq, kvquant, nsnquant, vecinfer, a2ats."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from vq_adapters.coded_classes import CodedKVCache, FittedKVCache, PackedKVCache
from vq_adapters.method_cache import ratio, row_bytes
from vq_functional.core.errors import check
from vq_functional.core.transform import Transform
from vq_functional.hybrid.a2ats import A2ATS
from vq_functional.ops.masks import causal as visible
from vq_functional.ops.masks import query_positions
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.normalised_keys import NormalisedKeysCodec
from vq_functional.quantize.signpost_rows import SignpostCoder, Signposts


class FrontierKVCache(PackedKVCache):
    """Base: old rows in blocks of codes, and how far these reach."""

    @property
    def residual_fp16_bytes(self) -> int:
        """Bytes of the newest keys and values and of the sinks, which are exact."""
        return self._newest() + self._sinks()

    @property
    def quantized_tokens(self) -> int:
        """Tokens of the first batch row that are in blocks, sinks among them."""
        return self._counts_now()[0].coded

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number in blocks with all that belongs to it; 16.0 while there are none."""
        return self._key_bits(16.0)


class SKVQKVCache(FrontierKVCache):
    """Clipped groups of alike channels behind a window (`skvq_bits_key`, `skvq_bits_value`, `skvq_window` and others).

    Bytes of keys and values in codes are without those of the orders.
    """

    method = "skvq"

    @property
    def perm_bytes(self) -> int:
        """Bytes of the orders of channels, once there are codes; with `skvq_fp8` also of the units of scales."""
        return self._tables("keys") + self._tables("values")

    @property
    def tokens_seen(self) -> int:
        """Tokens of the first batch row."""
        return self._counts_now()[0].tokens

    @property
    def key_perms(self) -> mx.array | None:
        """Channels int32 [H, D] of the first batch row in their order; None without codes or `skvq_reorder`."""
        return self._order("keys", cast(Blocks, self.transform).key)

    @property
    def value_perms(self) -> mx.array | None:
        """The same of values."""
        return self._order("values", cast(Blocks, self.transform).value)

    def _order(self, side: str, codec: Any) -> mx.array | None:
        state: Any = self._settled_state()
        if codec.order is None or self.quantized_tokens == 0:
            return None
        return cast(mx.array, getattr(state, side).tables[0][0].astype(mx.int32))


class NSNQuantKVCache(FrontierKVCache):
    """Normalized chunks of rows by one codebook (`nsn_bits`, `nsn_residual_length` and others).

    The codebook belongs to no cache and is not counted.
    """

    method = "nsnquant"


class KVQuantKVCache(FittedKVCache):
    """Normalised numbers by a table of levels (`kvquant_bits`, `kvquant_outlier_fraction` and others).

    Bytes of keys and values in codes include ranges, levels and exact numbers.
    """

    method = "kvquant"

    @property
    def nuq_bits(self) -> int:
        """Bits of a key's code."""
        return self._signposts[0].bits

    @property
    def outlier_fraction(self) -> float:
        """Share of a row's numbers that is exact."""
        return self._signposts[0].outliers

    @property
    def outlier_count(self) -> int:
        """Numbers of keys and values in codes that are exact, all heads and batch rows summed."""
        if self._state is None:
            return 0
        dims = self._state.layout.key_dim, self._state.layout.value_dim
        slots = sum(side.slots(dim) for side, dim in zip(self._signposts, dims, strict=True))
        return slots * self._heads() * sum(fill.coded for fill in self._counts_now())

    @property
    def n_sink(self) -> int:
        """First tokens that stay exact."""
        return self._signposts[0].n_sink

    @property
    def sink_kept(self) -> int:
        """How many of these have come, in the first batch row."""
        return min(self.n_sink, self._counts_now()[0].tokens)

    @property
    def key_outlier_thresh(self) -> mx.array | None:
        """Lowest and highest numbers float32 [2, H, D] of each key channel's range, in the first batch row.

        None while there are no codes, and with `kvquant_refit_interval`, where every block has ranges of its own.
        """
        state, codec = self._coded_state(), cast(NormalisedKeysCodec, cast(Blocks, self.transform).key)
        if state is None or codec.interval:
            return None
        center, reach = codec.given.array if codec.given else (end[0] for end in state.keys.tables[:2])
        return mx.stack([center - reach, center + reach])

    @property
    def key_levels(self) -> mx.array | None:
        """Levels float32 [2**bits] of normalised keys, in the first batch row; None while there are no codes."""
        return self._levels(0)

    @property
    def value_levels(self) -> mx.array | None:
        """The same of values."""
        return self._levels(1)

    @property
    def effective_bits(self) -> float:
        """Bits a key number in codes with all that belongs to it; `nuq_bits` while there are none."""
        return self._key_bits(float(self.nuq_bits))

    @property
    def _signposts(self) -> tuple[Signposts, Signposts]:
        transform: Any = self.transform
        return transform.key.signposts, transform.value.signposts

    def _coded_state(self) -> Any:
        """The state; None while there are no codes in the first batch row."""
        state = self._settled_state()
        return state if self._counts_now()[0].coded else None

    def _levels(self, side: int) -> mx.array | None:
        state = self._coded_state()
        if state is None:
            return None
        if self._signposts[side].fits_levels:
            return cast(mx.array, (state.keys, state.values)[side].tables[-1][0])
        coder = cast(Blocks, self.transform).sides(state.layout)[side].coder
        return cast(SignpostCoder, coder).first_levels


class VecInferKVCache(CodedKVCache):
    """Sub-vectors as indices of codebook entries (`key_sub_dim`, `key_codebook_bits`, `key_codebook` and others)."""

    method = "vecinfer"

    @property
    def codebook_bytes(self) -> int:
        """Bytes of both codebooks, which a layer's caches share and no cache counts."""
        return sum(4 * 2**codec.bits * codec.sub_dim for codec in self._codecs)

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a number in indices; the mean of keys and values."""
        key, value = self._codecs
        return (key.bits / key.sub_dim + value.bits / value.sub_dim) / 2

    def fused_sdpa(self, q: mx.array, scale: float, *, causal: bool = True, sliding_window: int = 0) -> mx.array:
        """Attention [B, Hq, S, Dv] of the newest tokens' queries [B, Hq, S, D], straight from the indices.

        `causal` False: every query sees what the newest token's does. `sliding_window` above 0: so many positions at
        most. Raises QuantizerConfigError where fewer tokens than queries have come.
        """
        state, n = self._settled_state(), q.shape[2]
        tokens = min(fill.tokens for fill in self._fills)
        check(n <= tokens, "VecInferKVCache.fused_sdpa", "q", f"must be of at most {tokens} tokens", q.shape)
        at = query_positions(state.offset - n, n)
        at = at if causal else mx.broadcast_to(state.offset[:, None] - 1, at.shape)
        mask = visible(self.transform.positions(state), at, sliding_window or None)
        return self.transform.attend(state, q, scale, mask)

    @property
    def _codecs(self) -> tuple[Any, Any]:
        store: Any = getattr(self.transform, "store", self.transform)
        return store.key, store.value


class A2ATSKVCache(CodedKVCache):
    """Every row, and codes of keys that find those to attend to (`a2ats_codebook_bits`, `a2ats_window` and others).

    Bytes of keys include those of the codes.
    """

    method = "a2ats"

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        return isinstance(transform, A2ATS)

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebook, which a layer's caches share and no cache counts."""
        o = self._transform.options
        return 4 * 2**o.codebook_bits * o.sub_dim if o.codebook is None else o.codebook.nbytes

    @property
    def compression_ratio(self) -> float:
        """Bytes as they came / bytes of rows and codes; 1.0 while empty."""
        held = self.compressed_key_bytes + self.compressed_value_bytes
        return ratio(self.fp16_key_bytes + self.fp16_value_bytes, held)

    @property
    def assigned_avg_bits(self) -> float:
        """Bits of the codes for a key number, rows not counted."""
        return self._transform.options.codebook_bits / self._transform.options.sub_dim

    @property
    def tokens_seen(self) -> int:
        """Tokens of the first batch row."""
        return self._counts_now()[0].tokens

    @property
    def tokens_retrieved(self) -> int:
        """Rows beside the window and the first ones that its newest token attends to, where the real queries are."""
        tokens, reach = self.tokens_seen, self._transform.options.reach
        return reach.count(tokens) - min(tokens, reach.window + reach.n_sink)

    def far_query_rope(self, query: mx.array) -> mx.array:
        """Queries [..., D] from before their rotation, turned as they meet un-rotated keys at distance `a2ats_b`."""
        o, dim = self._transform.options, query.shape[-1]
        flat = query.reshape(1, 1, -1, dim)
        return o.rotation(dim).apply(flat, mx.full((flat.shape[2],), o.b)).reshape(query.shape)

    def _coded(self, side: str) -> int:
        if self._state is None:
            return 0
        held = row_bytes(getattr(self._state.rows, side)) + (row_bytes(self._state.codes) if side == "keys" else 0)
        return self._tokens() * held

    @property
    def _transform(self) -> A2ATS:
        return cast(A2ATS, self.transform)
