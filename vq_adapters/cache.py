"""TransformKVCache: any transform as a cache that mlx_lm can use in place of its own."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx

from vq_adapters import batching, persistence
from vq_adapters.group import LayerGroup
from vq_adapters.steps import steps
from vq_adapters.tagged import TaggedArray, tag
from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import flatten, map_leaves, nbytes
from vq_functional.evict.engine import Evicting
from vq_functional.ops.attention import Mask, lower_right

STEP = 64  # rows by which a growing store grows
FEW = 8  # up to so many queries attention reads codes; more are cheaper over vectors


class TransformKVCache:
    """One attention layer's cache.

    Counts tokens on the host from shapes, grows the state, and keeps mlx_lm's
    protocol. Nothing of the state is copied or read back.

    transform: what is held and how.
    max_tokens: a hard cap; a call past it raises and changes nothing.
    query_heads: the layer's; only a window mask over heads that keep different rows needs it.
    """

    def __init__(self, transform: Transform, *, max_tokens: int | None = None, query_heads: int | None = None) -> None:
        self._reset(transform, max_tokens, query_heads)

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        self.transform = transform
        self.max_tokens = max_tokens
        self.query_heads = query_heads
        self._state: Any = None
        self._fills = [Fill()]  # one a batch row, or one for all while nothing differs
        self._batched = False
        self._remaining: list[int] | None = None  # valid tokens to come of a right-padded prompt
        self._padding: list[int] | None = None  # left padding to come
        self._call: object | None = None  # names the last call until its attention is done
        self._unsettled: tuple[mx.array, list[int], mx.array | None] | None = None
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
        self._open(keys, values, n)
        counts, lengths = self._counts(n)
        view = self._fills[0] if self._uniform() else None
        if n:
            view = view and self.transform.written(view, n)
            self._write(keys, values, counts, lengths)
        held_keys, held_values = self.transform.read(self._state, view)
        self._call = object()
        held_keys = mx.depends([held_keys], list(flatten(self._state)[0]))[0]
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
        if first and self._uneven() and isinstance(mask, mx.array):
            mask = self._own_mask(queries.shape[2])
        if first and sinks is None and queries.shape[2] <= FEW and self.transform.coded:
            out = self._attend_codes(queries, scale, mask)
        else:
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if first and (self.transform.evicts or queries.shape[2] > FEW):
            self._settle(queries)
        return mx.depends([out], list(flatten(self._state)[0]))[0]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any) -> Mask:
        """Mask of the coming call of `N` tokens, as wide as what that call will return."""
        self._settle()
        mask = self._mask(N, return_array, window_size)
        if isinstance(mask, mx.array) and self._uneven():
            rule = "is drawn for one layer and used by all, which hold different numbers of rows: "
            fits = self._hooked is not False and window_size is None
            check(fits, self.transform.name, "mask", rule + "it needs the attention hook, and no window", window_size)
        return mask

    def _mask(self, N: int, return_array: bool, window_size: int | None) -> Mask:
        if not self._uniform():
            return self._by_query_head(self.transform.make_mask(self._state_for(N), N, None, window_size))
        window_size = self._window(N, window_size)
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        if window_size is None or self._fills[0].tokens + N <= window_size:
            return lower_right(N, self.transform.written(self._fills[0], N).rows)
        return self._by_query_head(self.transform.make_mask(self._state_for(N), N, self._fills[0], window_size))

    # What mlx_lm's generation, prompt caches and server call

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, and first a description of the transform and the counters as UTF-8 JSON bytes."""
        self._settle()
        return persistence.pack(self)

    @state.setter
    def state(self, arrays: Sequence[mx.array]) -> None:
        persistence.unpack(self, arrays)

    @classmethod
    def from_state(cls, state: Sequence[mx.array], meta_state: Any = None) -> "TransformKVCache":
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
        fresh = min(n, self._unsettled[0].shape[2]) if self._unsettled is not None else 0
        self._drop(fresh)
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

    def empty(self) -> bool:
        """Whether no token has come yet."""
        return self._state is None

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that are held, in token order: after an evicting call fewer than that call returned."""
        self._settle()
        check(self._state is not None, self.transform.name, "keys", "are there only after an update", None)
        return self.transform.read(self.transform.ordered(self._state), self._fills[0] if self._uniform() else None)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "TransformKVCache":
        self._settle()
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)  # arrays of a state never change, so both may hold them
        copy._fills = list(self._fills)
        copy._rejoin(self, "copy")
        return copy

    # Batches: one class is single cache and batch cache

    @classmethod
    def merge(cls, caches: Sequence["TransformKVCache"]) -> "TransformKVCache":
        """One batch cache of several caches of a layer, empty ones and ones of other lengths included."""
        return batching.merge(caches)

    def extend(self, other: "TransformKVCache") -> None:
        """Add the rows of another batch cache of this layer."""
        batching.extend(self, other)

    def filter(self, keep: Iterable[int] | mx.array) -> None:
        """Keep the batch rows `keep`, in that order."""
        batching.select(self, keep)

    def extract(self, index: int) -> "TransformKVCache":
        """A single cache with one batch row."""
        return batching.extract(self, index)

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a padded prompt: `lengths` valid tokens a row, over all its chunks; or padding on the left."""
        if left_padding is not None and max(left_padding, default=0) > 0:
            batching.pad_left(self, left_padding)
        elif lengths is not None:
            self._batched = True
            self._fills = batching.spread(self._fills, len(lengths))
            self._remaining = [int(length) for length in lengths]

    def finalize(self) -> None:
        """End of a padded prompt."""
        self._settle()
        self._remaining = None

    def to_batch(self, left_padding: Sequence[int]) -> "TransformKVCache":
        """An empty batch cache for prompts that are padded on the left."""
        batch = self._fresh("batch")
        batching.pad_left(batch, left_padding)
        return batch

    # The state's moments

    @property
    def _evicting(self) -> Evicting:
        return cast(Evicting, self.transform)

    def _settle(self, queries: mx.array | None = None) -> None:
        """End the last call by its real queries, or by its keys when nobody handed any over."""
        if self._unsettled is not None:
            self._end_call(queries)
        if self._waits and queries is None and self._group is not None:
            self._waits = False
            agreed = zip(self._fills, self._group.agreed(self._layer, self._evicting.policy.agree), strict=True)
            self.compact([fill.limit or budget for fill, budget in agreed])

    def _end_call(self, queries: mx.array | None) -> None:
        keys, counts, lengths = cast(tuple[mx.array, list[int], mx.array | None], self._unsettled)
        asked, proxy = (keys, True) if queries is None else (queries, False)
        self._hooked = not proxy
        if self._holds:
            self._state = self._evicting.retain(self._state)
        elif self._waits:
            self._state = self._evicting.observe(self._state, asked, lengths, proxy)
        else:
            self._state = self._settled(asked, lengths, proxy)
            self._fills = self._advance(self.transform.settled, counts)
        self._unsettled = None

    def _settled(self, asked: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        """The state after `settle`, compiled for single tokens."""
        eager, compiled = asked.shape[2] > 1 or lengths is not None, steps(self.transform)
        if self._group is None or not (self.transform.leads or self.transform.leader is not None):
            if eager:
                return self.transform.settle(self._state, asked, lengths, proxy=proxy)
            return (compiled.settle_by_keys if proxy else compiled.settle)(self._state, asked)
        leader, tokens = self.transform.leader, [fill.tokens for fill in self._fills]
        told = None if leader is None else self._group.handed(leader, tokens)
        if eager:
            state, told = self.transform.settle_in(self._state, told, asked, lengths, proxy=proxy)
        else:
            state, told = (compiled.settle_in_by_keys if proxy else compiled.settle_in)(self._state, told, asked)
        if self.transform.leads:
            self._group.hand_on(self._layer, tokens, told)
        return state

    def _tell(self, group: LayerGroup, keys: mx.array, counts: list[int]) -> None:
        """Tell the other layers of the first call, whose rows all stay until the next."""
        n = keys.shape[2]
        column, count = mx.arange(n), mx.array(counts)[:, None]
        valid = column < count if self._padding is None else column >= n - count
        group.tell(self._layer, self._evicting.policy.tell(keys, valid))
        self._waits = True

    def _write(self, keys: mx.array, values: mx.array, counts: list[int], lengths: mx.array | None) -> None:
        n = keys.shape[2]
        begins = any(fill.tokens == 0 and count > 0 for fill, count in zip(self._fills, counts, strict=True))
        if self._group is not None and self.transform.agrees and begins:
            self._tell(self._group, keys, counts)
        write = steps(self.transform).write if n == 1 and lengths is None else self.transform.write
        self._state = write(self._state, keys, values, lengths)
        self._fills = self._advance(self.transform.written, counts)
        if self._remaining is not None:
            self._remaining = [left - count for left, count in zip(self._remaining, counts, strict=True)]
        if self._padding is not None:
            left = [pad - n + count for pad, count in zip(self._padding, counts, strict=True)]
            self._padding = left if any(left) else None
        if any(self.transform.settles(fill, n) for fill in self._fills):
            self._unsettled = (keys, counts, lengths)

    def _drop(self, n: int) -> None:
        if n > 0:
            self._state = self.transform.trim(self._state, n)
            self._fills = [self.transform.trimmed(fill, n) for fill in self._fills]

    def _settled_state(self) -> Any:
        self._settle()
        return self._state

    def _attend_codes(self, queries: mx.array, scale: float, mask: Mask) -> mx.array:
        if isinstance(mask, mx.array):
            view = self._fills[0] if self._uniform() else None
            return self.transform.attend(self._state, queries, scale, mask, view)
        if queries.shape[2] == 1:
            return steps(self.transform).attend(scale)(self._state, queries)
        return self.transform.attend(self._state, queries, scale, mask)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse what doesn't fit, before anything changes."""
        name, n = self.transform.name, keys.shape[2] if keys.ndim == 4 else 0
        self.transform.check_input(keys, values, layout=None if self._state is None else self._state.layout)
        rows = len(self._fills)
        open_batch = self._state is None and not self._batched
        check(open_batch or keys.shape[0] == rows, name, "keys", f"must have {rows} batch rows", keys.shape)
        if self.max_tokens is not None:
            most = max(fill.tokens for fill in self._fills) + n
            check(most <= self.max_tokens, name, "capacity", f"is {self.max_tokens} tokens", most)

    def _open(self, keys: mx.array, values: mx.array, n: int) -> None:
        """Make the state, or the room in it, for a call of `n` tokens."""
        if self._state is not None:
            self._reserve(n)
            return
        self._fills = batching.spread(self._fills, keys.shape[0])
        batch, heads, _, key_dim = keys.shape
        self._state = self._blank(batch, heads, key_dim, values.shape[3], keys.dtype, n)

    def _blank(self, batch: int, heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, n: int) -> Any:
        spec = KVSpec(
            batch=batch,
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            capacity=self._capacity(n),
        )
        padding = None if self._padding is None else mx.array(self._padding, mx.int32)
        return self.transform.init_state(spec, padding)

    def _state_for(self, n: int) -> Any:
        """The state with room for `n` tokens; a blank one before the first call, whose shapes nobody knows yet."""
        self._reserve(n)
        if self._state is not None:
            return self._state
        return self._blank(len(self._fills), 1, 32, 32, mx.float16, n)

    def _reserve(self, n: int) -> None:
        if self._state is not None and self._room(n) > self.transform.capacity(self._state):
            self._state = self.transform.grow(self._state, self._capacity(n))

    def _room(self, n: int) -> int:
        counts = self._counts(n)[0]
        rooms = (self.transform.room(fill, n, count) for fill, count in zip(self._fills, counts, strict=True))
        return max(rooms, default=0)

    def _capacity(self, n: int) -> int:
        return max(-(-self._room(n) // STEP) * STEP, 1)

    def _uneven(self) -> bool:
        """Whether the mask of one layer may not fit another."""
        return self._group is not None and self._group.uneven and any(fill.tokens for fill in self._fills)

    def _own_mask(self, n: int) -> mx.array:
        """This layer's mask of the last call of `n` tokens, as wide as what that call returned."""
        lengths = None if self._unsettled is None else self._unsettled[2]
        mask = self.transform.visible(self._state, n, lengths)
        if not self._uniform():
            return mask
        width, new = self._fills[0].rows, n if n > 1 else 0
        return mx.concatenate([mask[..., : width - new], mask[..., mask.shape[-1] - new :]], axis=-1)

    def _window(self, n: int, asked: int | None) -> int | None:
        """The window that a mask for `n` tokens must draw; None where all that is returned lies within it."""
        own = self.transform.window
        if own is None or (asked is not None and asked < own):
            return asked
        return None if n == 1 or self._fills[0].tokens + n <= own else own

    def _by_query_head(self, mask: mx.array) -> mx.array:
        heads = mask.shape[1]
        return mask if heads == 1 or self.query_heads is None else mx.repeat(mask, self.query_heads // heads, axis=1)

    def _counts(self, n: int) -> tuple[list[int], mx.array | None]:
        """Tokens of a call of `n` that are no padding, by batch row; as an array too where there is right padding."""
        if self._padding is not None:
            return [n - min(pad, n) for pad in self._padding], None
        if self._remaining is None:
            return [n] * len(self._fills), None
        counts = [min(left, n) for left in self._remaining]
        return counts, mx.array(counts, mx.int32)

    def _advance(self, moment: Any, counts: list[int]) -> list[Fill]:
        return [moment(fill, count) for fill, count in zip(self._fills, counts, strict=True)]

    def _uniform(self) -> bool:
        return self._padding is None and all(fill == self._fills[0] for fill in self._fills[1:])

    def _fresh(self, way: Hashable) -> "TransformKVCache":
        """An empty cache of the same kind, for the list that is made of this one's in some `way`."""
        fresh = type(self).__new__(type(self))
        fresh._reset(self.transform, self.max_tokens, self.query_heads)
        fresh._rejoin(self, way)
        return fresh

    def _rejoin(self, origin: "TransformKVCache", way: Hashable) -> None:
        if origin._group is not None:
            self.join(origin._group.descend(way, origin._layer), origin._layer)

    def _tie(self, value: mx.array) -> None:
        """Keep `value` in the graph of whatever reads the state next."""
        self._settle()
        self._state = map_leaves(lambda leaf: mx.depends([leaf], [value])[0], self._state)
