"""LayerGroup: what the caches of one list tell each other. One list, one group; nothing is shared with another list."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vq_functional.core.stage import ALONE, Stage
from vq_functional.core.transform import Transform
from vq_functional.core.tree import leaves_of
from vq_functional.evict.engine import Evicting

if TYPE_CHECKING:
    from vq_adapters.settling import SettlingState


class LayerGroup:
    """The state that the layers of one cache list have in common.

    A layer may tell something of its first call, from which all agree on their
    budgets; and a layer that leads hands on what it chose in a call.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key or uuid.uuid4().hex
        self.uneven = False  # layers may hold different numbers of rows
        self._transforms: set[Transform] = set()
        self._members: weakref.WeakValueDictionary[int, SettlingState] = weakref.WeakValueDictionary()
        self._told: dict[int, mx.array] = {}
        self._agreed: dict[int, list[int]] | None = None
        self._handed: dict[int, tuple[list[int], Any]] = {}
        self._descendants: weakref.WeakValueDictionary[Hashable, LayerGroup] = weakref.WeakValueDictionary()

    def join(self, layer: int, cache: SettlingState) -> None:
        """Make `cache` the group's cache of a layer."""
        self._members[layer] = cache
        self._transforms.add(cache.transform)
        self.uneven |= unlike(self._transforms)

    def member(self, layer: int) -> SettlingState | None:
        """The cache of a layer, if it is there."""
        return self._members.get(layer)

    def members(self) -> list[SettlingState]:
        """The caches of all layers that are there."""
        return list(self._members.values())

    def goes_on(self, layer: int) -> bool:
        """Whether `layer` comes next in a list that is made from its first layer to its last."""
        return all(one < layer for one in self._members)

    def descend(self, way: Hashable, layer: int) -> LayerGroup:
        """The group of a list that a thread makes of this one in some `way`, from its first layer to its last."""
        way = (threading.get_ident(), way)
        found = self._descendants.get(way)
        if found is None or not found.goes_on(layer):
            found = self._descendants[way] = LayerGroup()
            found.uneven = self.uneven
        return found

    def tell(self, layer: int, told: mx.array) -> None:
        """What a layer tells of a first call, float32 [B]; a layer that tells again begins anew for all."""
        if layer in self._told:
            self._told, self._agreed = {}, None
        self._told[layer] = told

    def told(self, layer: int) -> mx.array | None:
        """What a layer told; None before."""
        return self._told.get(layer)

    def agreed(self, layer: int, agree: Callable[[Sequence[float]], list[int]], stage: Stage = ALONE) -> list[int]:
        """The layer's budgets, one a batch row: by `agree` from what all layers have told. Reads back once.

        In a pipeline the first layer that asks waits for the other processes.
        """
        if self._agreed is None:
            layers = sorted(self._told)
            told = mx.stack([self._told[one] for one in layers], axis=1)
            rows: Any = stage.gathered(told, self._leaves()).tolist()
            budgets = [stage.part(agree(row)) for row in rows]
            self._agreed = {one: [row[place] for row in budgets] for place, one in enumerate(layers)}
        return self._agreed[layer]

    def _leaves(self) -> list[mx.array]:
        """All that the layers hold."""
        return [leaf for cache in self.members() for leaf in leaves_of(cache._state)]

    def hand_on(self, layer: int, tokens: list[int], chosen: Any) -> None:
        """What the leading `layer` chose in the call that brought the batch rows to so many `tokens`."""
        self._handed[layer] = (tokens, chosen)

    def handed(self, layer: int, tokens: list[int]) -> Any:
        """What the leading `layer` chose in the same call; None where it did not take part."""
        leader = self.member(layer)
        if leader is not None and self._handed.get(layer, ([], None))[0] != tokens:
            leader._settle()
        seen, chosen = self._handed.get(layer, ([], None))
        return chosen if seen == tokens else None


def unlike(transforms: Iterable[Transform]) -> bool:
    """Whether layers of these transforms may hold different numbers of rows."""
    transforms = list(transforms)
    return any(one.agrees for one in transforms) or len({_rows_kept(one) for one in transforms}) > 1


def _rows_kept(transform: Transform) -> int | float | None:
    """What bounds the rows that a transform holds; None where nothing does."""
    return transform.policy.budget if isinstance(transform, Evicting) else transform.window


_LOADED: weakref.WeakValueDictionary[tuple[int, str], LayerGroup] = weakref.WeakValueDictionary()


def loaded(key: str, layer: int, uneven: bool) -> LayerGroup:
    """The group of a saved list that this thread is loading, from its first layer to its last."""
    way = (threading.get_ident(), key)
    found = _LOADED.get(way)
    if found is None or not found.goes_on(layer):
        found = _LOADED[way] = LayerGroup(key)
        found.uneven = uneven
    return found
