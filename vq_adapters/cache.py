"""TransformKVCache: any transform as a cache that mlx_lm can use in place of its own."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from typing_extensions import Self

from vq_adapters import persistence
from vq_adapters.batching import BatchedState
from vq_adapters.masks import coming_mask, own_mask, uneven
from vq_adapters.observers import Watch, tell_queries
from vq_adapters.steps import steps
from vq_adapters.tagged import TaggedArray, tag
from vq_functional.core.errors import check
from vq_functional.core.transform import Transform
from vq_functional.core.tree import leaves_of, nbytes
from vq_functional.ops.attention import Mask, rescaled

FEW = 8  # up to so many queries attention reads codes; more are cheaper over vectors


class TransformKVCache(BatchedState):
    """One attention layer's cache.

    Keeps mlx_lm's protocol; the bases count and grow (`CountedState`), end calls
    (`SettlingState`) and join batches (`BatchedState`).

    transform: what is held and how.
    max_tokens: a hard cap; a call past it raises and changes nothing.
    query_heads: the layer's; only a window mask over heads that keep different rows needs it.
    """

    def __init__(self, transform: Transform, *, max_tokens: int | None = None, query_heads: int | None = None) -> None:
        self._reset(transform, max_tokens, query_heads)

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        rule = "must be a Transform, such as kivi(bits=4)"
        check(isinstance(transform, Transform), type(self).__name__, "transform", rule, transform)
        super()._reset(transform, max_tokens, query_heads)
        self._call: object | None = None  # names the last call until its attention is done
        self._uneven = False  # whether a mask of the last call may have been drawn for other rows than these

    # What the model calls

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or int32 [B] in a batch."""
        if not self._batched:
            return self._fills[0].tokens
        padding = self._padding or [0] * len(self._fills)
        return mx.array([fill.tokens - pad for fill, pad in zip(self._fills, padding, strict=True)], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in [B, H, S, D] keys and values; returns those that this call's queries see.

        Raises QuantizerConfigError for shapes that don't fit and for tokens past
        `max_tokens`, with nothing changed.
        """
        self._check(keys, values)
        self._settle()
        n = keys.shape[2]
        before = nbytes(self._state) if self.observers else 0
        self._uneven = uneven(self)
        counts, lengths = self._open(keys, values, n)
        watch = Watch(self, n, before) if self.observers and n else None
        view = self._fills[0] if self._uniform() else None
        if n:
            self._write(keys, values, counts, lengths)
            if view is not None:  # right padding is returned too
                view = self._fills[0] if lengths is None else self.transform.written(view, n)
        # A view is another one at every step, and each would be a trace.
        read = steps(self.transform).read if n == 1 and view is None else self.transform.read
        held_keys, held_values = read(self._whole_state(), view)
        if watch is not None:
            watch.tell(keys, values, held_keys, held_values)
        self._call = object()
        held_keys = mx.depends([held_keys], leaves_of(self._state))[0]
        return tag(held_keys, self, "k", self._call), tag(held_values, self, "v", self._call)

    def attend(
        self,
        queries: mx.array,
        keys: TaggedArray,
        values: TaggedArray,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention [B, Hq, S, Dv] of the last call's queries; `keys` and `values` are what that call returned.

        Settles the call by the real queries, where these matter or the call is long.
        """
        first = keys.call is self._call
        self._call = None
        if first and self.observers:
            tell_queries(self, queries)
        if first and isinstance(mask, mx.array) and (self._uneven or mask.shape[-1] != keys.shape[2]):
            mask = own_mask(self, queries.shape[2])  # another layer's, or cut by the model
        waited_for = self._state if first else None  # by `keys`, and so by attention over them
        out = self._finish(queries, scale) if first and mask is None and sinks is None else None
        if out is None:
            if first and sinks is None and queries.shape[2] <= FEW and self.transform.coded:
                out, waited_for = self._attend_codes(queries, scale, mask), None
            else:
                out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            if first and (self.transform.evicts or self.transform.observes or queries.shape[2] > FEW):
                self._settle(rescaled(queries, scale))
        return out if self._state is waited_for else mx.depends([out], leaves_of(self._state))[0]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any) -> Mask:
        """Mask of the coming call of `N` tokens, as wide as what that call will return."""
        self._settle()
        return coming_mask(self, N, return_array, window_size)

    def _attend_codes(self, queries: mx.array, scale: float, mask: Mask) -> mx.array:
        state, drawn = self._whole_state(), isinstance(mask, mx.array)
        view = self._fills[0] if drawn and self._uniform() else None
        if queries.shape[2] == 1 and view is None:
            return steps(self.transform).attend(scale)(state, queries, mask if drawn else None)
        return self.transform.attend(state, queries, scale, mask, view)

    # What mlx_lm's generation, prompt caches and server call

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, and first a description of the transform and the counters as UTF-8 JSON bytes."""
        self._settled_state()
        return persistence.pack(self)

    @state.setter
    def state(self, arrays: Sequence[mx.array]) -> None:
        persistence.unpack(self, arrays)

    @classmethod
    def from_state(cls, state: Sequence[mx.array], meta_state: Any = None) -> Self:
        """A cache from what `state` gave; raises QuantizerConfigError for anything else."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @property
    def meta_state(self) -> str:
        """Nothing: the state describes itself."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        pass

    def is_trimmable(self) -> bool:
        """Whether `trim` can drop any number of the newest tokens."""
        return self.transform.trimmable

    def trim(self, n: int) -> int:
        """Drop the newest `n` tokens; returns how many. An evicting cache drops none and returns 0.

        Tokens of the last call go before it settles, so that a guess that is
        taken back packs nothing.
        """
        n = min(n, min(fill.tokens for fill in self._fills))
        if not self.is_trimmable() or self._state is None or n <= 0:
            return 0
        fresh = 0
        if self.transform.place is not None:
            self._settled_state()
        elif self._unsettled is not None:
            fresh = min(n, self._unsettled.keys.shape[2])
            self._drop(fresh)
            self._unsettled = self._unsettled.without(fresh)
        self._settle()
        self._drop(n - fresh)
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the state; evaluates nothing."""
        self._settle()
        return nbytes(self._state)

    def size(self) -> int:
        """Rows held, not tokens seen."""
        self._settle()
        return max(fill.rows for fill in self._fills)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that are held, in token order: after an evicting call fewer than that call returned."""
        self._settle_in_a_model()
        check(self._state is not None, self.transform.name, "keys", "are there only after an update", None)
        return self.transform.read(
            self.transform.ordered(self._whole_state()), self._fills[0] if self._uniform() else None
        )

    @property
    def keys(self) -> mx.array | None:
        """Keys that are held, or None before the first update."""
        return None if self._state is None else self.keys_and_values()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._tie(value)

    @property
    def values(self) -> mx.array | None:
        """Values that are held, or None before the first update."""
        return None if self._state is None else self.keys_and_values()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._tie(value)

    def __repr__(self) -> str:
        """Method, tokens of each batch row and bytes, as they are now: nothing settles."""
        tokens = " + ".join(str(fill.tokens) for fill in self._fills)
        return f"{type(self).__name__}({self.transform.name}, {tokens} tokens, {nbytes(self._state)} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._settle()
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)  # arrays of a state never change, so both may hold them
        copy._fills = list(self._fills)
        copy._rejoin(self, "copy")
        return copy
