"""The cache classes of methods that pack the rows of several layers together.

A layer's bytes are its own share: what all layers read counts for the first of
them, so that the sum over a cache list is what is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import attrs
import mlx.core as mx
import numpy as np

from vq_adapters.coded_classes import VALUE_FP16_BYTES, CodedKVCache
from vq_adapters.config import KVCacheConfig
from vq_adapters.group import LayerGroup
from vq_adapters.method_cache import row_of_batch
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.transform import Transform
from vq_functional.crosslayer.layer_coder import LayerCoder
from vq_functional.crosslayer.merged_rows import MergedRows
from vq_functional.crosslayer.shared_factors import EXACT, SharedFactorsCodec
from vq_functional.crosslayer.stack import Member, Stack

SIDES = ("keys", "values")


class StackedKVCache(CodedKVCache):
    """Base: one layer of a stack, or one that stands alone.

    `coordinator` is the group of a cache list, in which this is the layer `member` of the stack `group_id` of
    `layers` layers; without one the layer stands alone. `KVCacheBuilder.for_model` sees to all of it.
    """

    _alone = 0  # the number of a layer that stands alone

    def __init__(
        self, config: KVCacheConfig, group_id: int, coordinator: LayerGroup | None, member: int, layers: int
    ) -> None:
        place = config._place
        if layers > 1:
            config = config.for_layer(attrs.evolve(place, stack=layers, member=member))
        super().__init__(config)
        self._alone = group_id if place.count is None else place.index
        if coordinator is not None and layers > 1:
            sizes = _stack_sizes(coordinator)
            check(sizes <= {layers}, self.method, "coordinator", f"must have groups of {layers} layers", sizes)
            layer = group_id * layers + member
            free = coordinator.member(layer) is None
            check(free, self.method, "group_id", f"must be of a group without a layer {member} yet", group_id)
            self.join(coordinator, layer)

    @classmethod
    def _serves(cls, transform: Transform) -> bool:
        alone = isinstance(transform, Stack) and transform.layers == 1
        return transform.name == cls.method and (alone or isinstance(transform, Member))

    @property
    def group_id(self) -> int:
        """The number of its stack among those of its cache list."""
        if self.transform.place is None:
            return self._alone
        return (self._layer - self._member.layer) // self._member.stack.layers

    def _coded(self, side: str, arrays: slice = slice(None)) -> int:
        """This layer's share of what "keys" or "values" take in codes, or of some of the arrays that hold them."""
        state = self._whole_state()
        if state is None:
            return 0
        held, columns = getattr(state, side), self.transform.capacity(state)
        own = self._shares(side, [row_of_batch(x) for x in (*held.rows, *held.tables)])
        rows, tables = sum(own[: len(held.rows)][arrays]), sum(own[len(held.rows) :])
        return sum(rows * fill.coded // columns + tables * (fill.coded > 0) for fill in self._counts_now())

    def _shares(self, side: str, sizes: list[int]) -> list[int]:
        """This layer's part of arrays of these sizes."""
        if self.transform.place is None:
            return sizes
        return self._layer_coder(side).shares(sizes)

    def _layer_coder(self, side: str) -> LayerCoder:
        units: Sequence[Any] = self._member.reader.sides(self._state.layout)
        return units[SIDES.index(side)].coder


class RoleKVCache(StackedKVCache):
    """Base: the first layer of a stack has another role than those behind it.

    Who leads makes a group of itself and `n_readers` more in the `coordinator`; the others join one after the other.
    """

    roles: ClassVar[tuple[str, str]]
    _role: str | None = None

    def __init__(
        self, config: KVCacheConfig, role: str, group_id: int, coordinator: LayerGroup | None, n_readers: int
    ) -> None:
        check_choice(self.method, "role", role, self.roles)
        check_int(self.method, "group_id", group_id, 0)
        check_int(self.method, "n_readers", n_readers, 0)
        member, layers = 0, 1
        if coordinator is not None and role == self.roles[0]:
            layers = n_readers + 1
        elif coordinator is not None:
            member, layers = _next_member(self.method, coordinator, group_id)
        super().__init__(config, group_id, coordinator, member, layers)
        self._role = role

    @property
    def role(self) -> str:
        """What the layer is to its stack."""
        if self.transform.place is None:
            return self._role or self.roles[0]
        return self.roles[self.transform.place > 0]


def _next_member(method: str, coordinator: LayerGroup, group_id: int) -> tuple[int, int]:
    """The first place that is free in a stack that has begun, and the stack's layers."""
    layers = max(_stack_sizes(coordinator), default=0)
    begun = coordinator.member(group_id * layers) is not None
    check(begun, method, "group_id", "must be of a group whose first layer is there", group_id)
    free = [member for member in range(layers) if coordinator.member(group_id * layers + member) is None]
    check(bool(free), method, "group_id", f"must be of a group with fewer than {layers} layers yet", group_id)
    return free[0], layers


def _stack_sizes(coordinator: LayerGroup) -> set[int]:
    """Layers of the stacks that have begun."""
    transforms = (cache.transform for cache in coordinator.members())
    return {one.stack.layers for one in transforms if isinstance(one, Member)}


class XQuantKVCache(RoleKVCache):
    """Codes of the first layer of a group that the others read by scales and zeros of their own.

    Options: `xquant_group_size`, `xquant_base_bits`, `xquant_residual_bits` and others. The first layer is the
    "anchor", the others "reuse" its codes.
    """

    method = "xquant"
    roles = ("anchor", "reuse")

    def __init__(
        self,
        config: KVCacheConfig,
        role: str = "anchor",
        group_id: int = 0,
        coordinator: LayerGroup | None = None,
        n_readers: int = 1,
    ) -> None:
        super().__init__(config, role, group_id, coordinator, n_readers)

    @property
    def reuse_param_bytes(self) -> int:
        """Bytes of the scales and zeros by which a layer reads the anchor's codes; 0 for an anchor."""
        if not self.transform.place:
            return 0
        return sum(self._coded(side, slice(1, 3)) for side in SIDES)

    @property
    def effective_pair_bits(self) -> float:
        """Bits a key number of this layer in codes with all that belongs to it; 0.0 while there are none."""
        coded = self._heads() * sum(fill.coded for fill in self._counts_now())
        return 8 * self.compressed_key_bytes / (coded * self._state.layout.key_dim) if coded else 0.0


class MiniCacheKVCache(RoleKVCache):
    """Directions that the layers of a group share, with lengths and unlike rows of their own.

    Options: `minicache_start_frac`, `minicache_group_size`, `minicache_retention_threshold`, `minicache_slerp_t`. The
    first layer, the "primary", is merged like those behind it. Tokens are those in blocks, of one layer, summed over
    heads and batch rows, and counted by the keys.
    """

    method = "minicache"
    roles = ("primary", "merge")

    def __init__(
        self,
        config: KVCacheConfig,
        role: str = "primary",
        group_id: int = 0,
        coordinator: LayerGroup | None = None,
        n_readers: int = 1,
    ) -> None:
        super().__init__(config, role, group_id, coordinator, n_readers)

    @property
    def n_retained(self) -> int:
        """Tokens that are too unlike and held as they came. Reads back."""
        return self._tokens_in_blocks()[0]

    @property
    def n_merged(self) -> int:
        """Tokens whose direction is shared. Reads back."""
        return self._tokens_in_blocks()[1]

    @property
    def retention_rate(self) -> float:
        """Retained tokens / all of these; 0.0 while there are none. Reads back."""
        retained, merged = self._tokens_in_blocks()
        return retained / (retained + merged) if retained else 0.0

    def _tokens_in_blocks(self) -> tuple[int, int]:
        """Retained and merged ones."""
        self._settle()
        state = self._whole_state()
        if state is None or self.transform.place is None:
            return 0, 0
        coder, total = self._layer_coder("keys").whole, self._heads() * int(np.array(state.coded).sum())
        if not isinstance(coder, MergedRows):  # only values are merged
            return total, 0
        places, block = coder.opened(state.keys.rows).places, coder.codec.block
        if places is None:
            return 0, total
        packed = mx.arange(places.shape[2]) // coder.codec.slots < (state.coded // block)[:, None]
        retained = int(np.array(((places < block) & packed[:, None]).sum()))
        return retained, total - retained


class XKVKVCache(StackedKVCache):
    """One latent a token for the heads of a group of layers (`xkv_group_size`, `xkv_rank`, `xkv_latent_bits`).

    With a `coordinator` it is the layer `member_idx` of the group `group_id`. Bytes of keys and of values include this
    layer's part of the axes.
    """

    method = "xkv"
    value_fp16_bytes = VALUE_FP16_BYTES

    def __init__(
        self, config: KVCacheConfig, member_idx: int = 0, group_id: int = 0, coordinator: LayerGroup | None = None
    ) -> None:
        layers = 1 if coordinator is None else config.xkv_group_size
        check_int(self.method, "group_id", group_id, 0)
        check_int(self.method, "member_idx", member_idx, 0, None if coordinator is None else layers - 1)
        super().__init__(config, group_id, coordinator, member_idx, layers)

    @property
    def member_idx(self) -> int:
        """Its place in the group; 0 for a layer that stands alone."""
        return self.transform.place or 0

    @property
    def shared_basis_bytes(self) -> int:
        """Bytes of the axes of all layers of the group, keys and values, once there are codes; 0 but in the first.

        None for axes that were found beforehand.
        """
        state = self._whole_state()
        if state is None or self.transform.place:
            return 0
        one = sum(row_of_batch(x) for x in (*state.keys.tables, *state.values.tables))
        return one * sum(fill.coded > 0 for fill in self._counts_now())

    @property
    def rank(self) -> int:
        """Components of a key latent; 0 before the first call where only that tells."""
        codec = self._codec
        if codec.given is not None:
            return codec.given[0].shape[2]
        if self._state is None:
            return codec.rank or 0
        return codec.rank_of(self._numbers)

    @property
    def assigned_avg_bits(self) -> float:
        """Bits a key number in codes, scales and zeros not counted; before the first call those of a component."""
        bits = self._codec.bits
        if self._state is None:
            return float(bits)
        bits = 8 * self._state.layout.dtype.size if bits == EXACT else bits
        return self.rank * bits / self._numbers

    @property
    def _codec(self) -> SharedFactorsCodec:
        return cast(SharedFactorsCodec, self._stack.key)

    @property
    def _stack(self) -> Stack:
        return cast(Stack, self.transform) if self.transform.place is None else self._member.stack

    @property
    def _numbers(self) -> int:
        """Key numbers of a token in all layers of the group."""
        return self._stack.layers * self._heads() * self._state.layout.key_dim
