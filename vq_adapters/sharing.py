"""SharingState: layers that pack their rows together settle together, and read what lies with the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from vq_adapters.counted import spread
from vq_adapters.settling import SettlingState
from vq_adapters.steps import settle_together
from vq_functional.core.errors import check
from vq_functional.crosslayer.stack import Member


class SharingState(SettlingState):
    """Of no effect where the transform has no `place` in a stack of layers."""

    @property
    def _member(self) -> Member:
        return cast(Member, self.transform)

    def _whole_state(self) -> Any:
        """The state with what it shares with the other layers of its stack."""
        if self.transform.place is None or self._state is None:
            return self._state
        return self._member.borrowed(self._state, self._partners()[0]._state)

    def _partners(self) -> list[SharingState]:
        """The caches of all layers of the stack; raises RuntimeError where one is missing."""
        first = self._layer - self._member.layer
        found = [
            None if self._group is None else self._group.member(first + layer)
            for layer in range(self._member.stack.layers)
        ]
        for layer, cache in enumerate(found):
            if cache is None or cache.transform.place != layer:
                rule = f"needs the caches of {self._member.stack.layers} layers in one list"
                raise RuntimeError(f"{self.transform.name}: `group` {rule}; layer {first + layer} is missing")
        return cast("list[SharingState]", found)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        super()._check(keys, values)
        if self.transform.place is None:
            return
        partners, tokens = self._partners(), self._tokens_after(keys)
        first, came = partners[0]._state, (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        if self._member.layer > 0 and first is not None:
            layout = first.layout
            wanted = (layout.kv_heads, layout.key_dim, layout.value_dim, layout.dtype)
            rule = f"must have heads, sizes and dtype of the group's first layer {wanted}"
            check(came == wanted, self.transform.name, "keys", rule, came)
        if self._unsettled is not None and not self._all_have_come(partners):
            missing = next(one for one in partners if one._unsettled is None or _tokens(one) != _tokens(self))
            raise RuntimeError(f"{self.transform.name}: layer {missing._layer} took no part in the last call")
        if self._member.layer > 0 and _tokens(partners[self._member.layer - 1]) != tokens:
            rule = f"layer {self._layer} must come after layer {self._layer - 1} in every call, with the same tokens"
            raise RuntimeError(f"{self.transform.name}: {rule}")

    def _tokens_after(self, keys: mx.array) -> list[int]:
        """Tokens of each batch row once a call with these keys is taken in."""
        fills, counts = spread(self._fills, keys.shape[0]), self._counts(keys.shape[2])[0]
        counts = counts if len(counts) == len(fills) else counts * len(fills)
        return [fill.tokens + count for fill, count in zip(fills, counts, strict=True)]

    def _settle(self, queries: mx.array | None = None) -> None:
        if self.transform.place is None:
            super()._settle(queries)
        elif self._unsettled is not None:
            partners = self._partners()
            if self._all_have_come(partners):
                _end_calls(self._member, partners)

    def _settled_state(self) -> Any:
        state = super()._settled_state()
        if self.transform.place is not None and self._unsettled is not None:
            raise RuntimeError(f"{self.transform.name}: some layers of the group have not had their part of a call yet")
        return state

    def _state_for(self, n: int) -> Any:
        if self.transform.place is None:
            return super()._state_for(n)
        if self._state is None:  # the first layer's has room for what all share
            return super()._state_for(n) if self._member.layer == 0 else self._partners()[0]._state_for(n)
        self._reserve(n, self._counts(n)[0])
        return self._whole_state()

    def _all_have_come(self, partners: Sequence[SharingState]) -> bool:
        return all(one._unsettled is not None and _tokens(one) == _tokens(self) for one in partners)

    def _drop(self, n: int) -> None:
        if self.transform.place is None:
            super()._drop(n)
        elif n > 0:
            cut = self.transform.trim(self._whole_state(), n)
            self._state = self._member.returned(cut, self._state)
            self._fills = [self.transform.trimmed(fill, n) for fill in self._fills]


def _tokens(cache: SettlingState) -> list[int]:
    return [fill.tokens for fill in cache._fills]


def _end_calls(member: Member, caches: Sequence[SharingState]) -> None:
    """End the last call of all layers of a stack."""
    call = caches[0]._unsettled
    for cache in caches:
        cache._unsettled = None
    if call is None or not call.settles:
        return
    stack = member.stack.after(caches[0]._fills)
    states = tuple(cache._state for cache in caches)
    for cache in caches:
        cache._state = None
    if call.keys.shape[2] > 1 or call.lengths is not None:
        states = stack.settle_together(states, call.keys, call.lengths)
    else:
        states = settle_together(stack)(states, call.keys)
    for cache, state in zip(caches, states, strict=True):
        cache._state = state
        cache._fills = cache._advance(cache.transform.settled, call.counts)
