"""SettlingState: when a call ends, by whose queries, and what the layers of a list tell each other then."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
from typing_extensions import Self

from vq_adapters.counted import CountedState
from vq_adapters.group import LayerGroup
from vq_adapters.steps import steps
from vq_functional.core.errors import check
from vq_functional.core.transform import Transform
from vq_functional.core.tree import map_leaves
from vq_functional.evict.engine import Evicting


@attrs.frozen(eq=False)
class Call:
    """A call that has not ended yet."""

    keys: mx.array
    counts: list[int]  # tokens that are no padding, by batch row
    lengths: mx.array | None
    settles: bool  # whether its end gives rows up or packs some

    def without(self, n: int) -> Call | None:
        """The call without its newest `n` tokens."""
        left = self.keys.shape[2] - n
        lengths = None if self.lengths is None else mx.minimum(self.lengths, left)
        counts = [min(count, left) for count in self.counts]
        return Call(self.keys[:, :, :left], counts, lengths, self.settles) if left else None


class SettlingState(CountedState):
    """A call stays open until its queries come, or until somebody looks: then its keys stand in."""

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        super()._reset(transform, max_tokens, query_heads)
        self._unsettled: Call | None = None
        self._group: LayerGroup | None = None
        self._layer = 0  # in the group
        self._hooked: bool | None = None  # whether the attention hook hands queries over; None before a call has ended
        self._waits = False  # for the layers to agree: until then every row stays
        self._holds = False  # every row, until `compact`

    def join(self, group: LayerGroup, layer: int) -> None:
        """Become the cache of attention layer number `layer` in the group of a cache list."""
        self._group, self._layer = group, layer
        group.join(layer, self)

    def hold(self) -> None:
        """From now on give nothing up, until `compact`; for methods that evict."""
        check(self.transform.evicts, self.transform.name, "hold", "is for methods that evict", self.transform.name)
        self._settle()
        self._holds = True

    def compact(self, budgets: Sequence[int] | None = None) -> None:
        """Go down to `budgets` rows, one number a batch row, by what the method remembers; None for its own."""
        self._settle()
        self._holds = False
        limits = list(budgets or (self._evicting.policy.limit(fill.prompt) for fill in self._fills))
        if self._state is not None:
            self._state = self._evicting.compact(self._state, mx.array(limits, mx.int32), max(limits))
        agreed = zip(self._fills, limits, strict=True)
        self._fills = [
            attrs.evolve(fill, rows=min(fill.rows, limit), limit=limit if fill.tokens else 0) for fill, limit in agreed
        ]

    @property
    def _evicting(self) -> Evicting:
        return cast(Evicting, self.transform)

    def _write(self, keys: mx.array, values: mx.array, counts: list[int], lengths: mx.array | None) -> None:
        begins = any(fill.tokens == 0 and count > 0 for fill, count in zip(self._fills, counts, strict=True))
        if self._group is not None and self.transform.agrees and begins:
            self._tell(self._group, keys, counts)
        super()._write(keys, values, counts, lengths)
        settles = any(self.transform.settles(fill, keys.shape[2]) for fill in self._fills)
        if settles or self.transform.observes:
            self._unsettled = Call(keys, counts, lengths, settles)

    def _tell(self, group: LayerGroup, keys: mx.array, counts: list[int]) -> None:
        """Tell the other layers of the first call, whose rows all stay until the next."""
        n = keys.shape[2]
        column, count = mx.arange(n), mx.array(counts)[:, None]
        valid = column < count if self._padding is None else column >= n - count
        group.tell(self._layer, self._evicting.policy.tell(keys, valid))
        self._waits = True

    def _settle(self, queries: mx.array | None = None) -> None:
        """End the last call by its real queries, or by its keys when nobody handed any over; layers then agree."""
        self._end_last_call(queries)
        if self._waits and queries is None and self._group is not None:
            self._waits = False
            policy, stage = self._evicting.policy, self._evicting.stage
            agreed = zip(self._fills, self._group.agreed(self._layer, policy.agree, stage), strict=True)
            self.compact([fill.limit or budget for fill, budget in agreed])

    def _settle_in_a_model(self) -> None:
        """`_settle` for who may look while a model still runs: it can't wait for other processes then."""
        if self._waits and self._evicting.stage.size > 1:
            self._end_last_call()
        else:
            self._settle()

    def _end_last_call(self, queries: mx.array | None = None) -> None:
        if self._unsettled is not None:
            self._end_call(self._unsettled, queries)

    def _finish(self, queries: mx.array, scale: float) -> mx.array | None:
        """End the call of a single token and attend in the same step; None where that can't be one."""
        call = self._unsettled
        if call is None or queries.shape[2] > 1 or not self._is_full(call):
            return None
        step = steps(self.transform.after(self._fills)).finish(scale)
        out, self._state = self._in_group(lambda told: step(self._state, told, queries))
        self._fills = self._advance(self.transform.settled, call.counts)
        self._hooked, self._unsettled = True, None
        return out

    def _is_full(self, call: Call) -> bool:
        """Whether the end of a call gives rows up that all columns hold."""
        gives_up = self.transform.evicts and call.settles and not (self._holds or self._waits)
        uniform = gives_up and call.lengths is None and self._uniform()
        return uniform and self._fills[0].rows == self.transform.capacity(self._state)

    def _end_call(self, call: Call, queries: mx.array | None) -> None:
        asked, proxy = (call.keys, True) if queries is None else (queries, False)
        self._hooked = not proxy
        if self._holds:
            self._state = self._evicting.retain(self._state)
        elif self._waits or not call.settles:
            self._state = self._observed(asked, call.lengths, proxy)
        else:
            self._state = self._settled(asked, call.lengths, proxy)
            self._fills = self._advance(self.transform.settled, call.counts)
            if call.keys.shape[2] > 1:
                self._state = self.transform.narrowed(self._state, self._fills)
        self._unsettled = None

    def _observed(self, asked: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        """The state after `observe`, compiled for single tokens."""
        if asked.shape[2] > 1 or lengths is not None:
            return self.transform.observe(self._state, asked, lengths, proxy)
        compiled = steps(self.transform)
        return (compiled.observe_by_keys if proxy else compiled.observe)(self._state, asked)

    def _settled(self, asked: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        """The state after `settle`, compiled for single tokens."""
        transform = self.transform.after(self._fills)
        if asked.shape[2] > 1 or lengths is not None:
            return self._in_group(lambda told: transform.settle_in(self._state, told, asked, lengths, proxy))
        compiled = steps(transform)
        step = compiled.settle_by_keys if proxy else compiled.settle
        return self._in_group(lambda told: step(self._state, told, asked))

    def _in_group(self, end: Callable[[Any], tuple[Any, Any]]) -> Any:
        """The first of what `end` gives for what a leading layer chose; the second is handed on."""
        tokens, leader, told = [fill.tokens for fill in self._fills], self.transform.leader, None
        if self._group is not None and leader is not None:
            told = self._group.handed(leader, tokens)
        result, told = end(told)
        if self._group is not None and self.transform.leads:
            self._group.hand_on(self._layer, tokens, told)
        return result

    def _settled_state(self) -> Any:
        self._settle()
        return self._state

    def _tie(self, value: mx.array) -> None:
        """Keep `value` in the graph of whatever reads the state next."""
        self._settle_in_a_model()
        self._state = map_leaves(lambda leaf: mx.depends([leaf], [value])[0], self._state)

    def _fresh(self, way: Hashable) -> Self:
        """An empty cache of the same kind, for the list that is made of this one's in some `way`."""
        fresh = type(self).__new__(type(self))
        fresh._reset(self.transform, self.max_tokens, self.query_heads)
        fresh.observers = self.observers
        fresh._rejoin(self, way)
        return fresh

    def _rejoin(self, origin: SettlingState, way: Hashable) -> None:
        if origin._group is not None:
            self.join(origin._group.descend(way, origin._layer), origin._layer)
