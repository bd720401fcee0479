"""The cache classes of methods that hold rows along principal axes: svdq, palu, kvtc."""

from __future__ import annotations

from typing import Any, cast

from vq_adapters.coded_classes import VALUE_FP16_BYTES, FittedKVCache, TotalKVCache
from vq_adapters.method_cache import ratio
from vq_functional.lowrank.head_groups import HeadGroups
from vq_functional.lowrank.kvtc_stream import SIDES, encoded_codes
from vq_functional.lowrank.latents import LatentRowsCodec
from vq_functional.lowrank.svdq_basis import Plan
from vq_functional.lowrank.svdq_codes import LatentChannelsCodec
from vq_functional.lowrank.variable_codes import VariableCodesCodec
from vq_functional.quantize.blocks import Blocks


class SVDqKVCache(FittedKVCache):
    """Keys along singular axes in bits that fall with their energy (`svdq_rank`, `svdq_bit_schedule` and others).

    Values are as they come.
    """

    method = "svdq"
    value_fp16_bytes = VALUE_FP16_BYTES

    @property
    def rank(self) -> int:
        """Axes of a head, those without bits included; 0 before the first call where only that tells."""
        codec = self._codec
        known = codec.rank or (codec.given.rank if codec.given else 0)
        return known if known or self._state is None else self._state.layout.key_dim

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number in codes, scales and zeros not counted; before the first call those of a latent number."""
        schedule = self._codec.schedule
        if self._state is None:
            return sum(schedule) / len(schedule)
        sections = Plan.of(self.rank, schedule).sections
        return sum(count * bits for count, bits in sections) / self._state.layout.key_dim

    @property
    def _codec(self) -> LatentChannelsCodec:
        return cast(LatentChannelsCodec, cast(Blocks, self.transform).key)


class PALUKVCache(FittedKVCache):
    """Latents of groups of heads in codes of two widths (`palu_rank`, `palu_n_head_groups`, `palu_hi_bit` and others).

    Bytes of keys and of values include those of their projection, in the dtype of what came.
    """

    method = "palu"

    @property
    def projection_bytes(self) -> int:
        """Bytes of the axes and means of keys and values; none for those that were found beforehand."""
        return self._tables("keys") + self._tables("values")

    @property
    def rank(self) -> int:
        """Components of a key latent for each head of a group; 0 before the first call where only that tells."""
        if self._state is None:
            return self._codecs[0].rank or 0
        return self._components(0) // self._group_size(0)

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a number in codes, scales and zeros not counted, of the side that has more.

        Before the first call those of a latent number.
        """
        return max(self._bits(side) for side in range(2))

    @property
    def _codecs(self) -> tuple[LatentRowsCodec, LatentRowsCodec]:
        transform: Any = self.transform
        return transform.key, transform.value

    def _bits(self, side: int) -> float:
        codec = self._codecs[side]
        if self._state is None:
            hi, lo, share = codec.widths or (16, 16, 1.0)
            return share * hi + (1 - share) * lo
        layout, exact = self._state.layout, 8 * self._state.layout.dtype.size
        numbers = self._group_size(side) * (layout.key_dim, layout.value_dim)[side]
        return sum(count * (bits or exact) for count, bits in codec.sections(self._components(side))) / numbers

    def _components(self, side: int) -> int:
        """Components of the latent of a group of heads."""
        codec, layout = self._codecs[side], self._state.layout
        if codec.given is not None:
            return codec.given[0].shape[-1]
        return codec.rank_of(self._group_size(side), (layout.key_dim, layout.value_dim)[side])

    def _group_size(self, side: int) -> int:
        return HeadGroups.of(self._heads(), self._codecs[side].n_head_groups).size


class KVTCKVCache(TotalKVCache):
    """Principal components of each head in codes of fitting widths (`kvtc_bit_budget`, `kvtc_bit_choices`).

    What is held has fixed width; `kvtc_encode` makes the entropy-coded export.
    """

    method = "kvtc"

    @property
    def kvtc_bytes(self) -> int:
        """Bytes of codes, axes and exact rows, as they are held; room that is not filled is not counted."""
        return self._total()

    @property
    def pre_entropy_bytes(self) -> int:
        """Bytes of the codes alone, as they are held."""
        return sum(self._coded(side) - self._tables(side) for side in SIDES)

    @property
    def entropy_coding_gain(self) -> float:
        """`pre_entropy_bytes` / bytes of these codes in an export; 1.0 while there are none. Reads back."""
        state: Any = self._settled_state()
        if state is None or self.pre_entropy_bytes == 0:
            return 1.0
        parts = [part for side in SIDES for part in encoded_codes(self.transform, state, side)]
        return ratio(self.pre_entropy_bytes, sum(map(len, parts)))

    @property
    def bit_budget(self) -> int:
        """Bits a token and head of keys, and of values."""
        return cast(VariableCodesCodec, cast(Blocks, self.transform).key).budget
