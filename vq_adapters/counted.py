"""CountedState: one layer's state, and plain numbers that tell how full it is and how much room it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vq_adapters.steps import steps
from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec
from vq_functional.core.transform import Fill, Transform
from vq_functional.crosslayer.stack import Stack

if TYPE_CHECKING:
    from vq_adapters.observers import QuantizationObserver

STEP = 64  # rows by which a growing store grows


class CountedState:
    """Counts tokens on the host from shapes, and grows the state; nothing of it is copied or read back."""

    def _reset(self, transform: Transform, max_tokens: int | None, query_heads: int | None) -> None:
        self.transform = transform
        self.max_tokens = max_tokens
        self.query_heads = query_heads
        self.observers: tuple[QuantizationObserver, ...] = ()  # told of every call
        self._state: Any = None
        self._fills = [Fill()]  # one a batch row, or one for all while nothing differs
        self._batched = False
        self._remaining: list[int] | None = None  # valid tokens to come of a right-padded prompt
        self._padding: list[int] | None = None  # left padding to come

    def empty(self) -> bool:
        """Whether no token has come yet."""
        return self._state is None

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse what doesn't fit, before anything changes."""
        name, n = self.transform.name, keys.shape[2] if keys.ndim == 4 else 0
        self.transform.check_input(keys, values, state=self._state)
        if self._state is None:
            self._check_rows("keys", keys.shape[0], keys.shape)
        if self.max_tokens is not None:
            most = max(fill.tokens for fill in self._fills) + n
            rule = f"(`capacity`, or the method's own `max_ctx`) is {self.max_tokens}"
            check(most <= self.max_tokens, name, "max_tokens", rule, most)

    def _check_rows(self, field: str, rows: int, got: Any) -> None:
        """Refuse another number of batch rows than there are; the first call of a single cache may have any."""
        now = len(self._fills)
        opens = self._state is None and not self._batched
        check(opens or rows == now, self.transform.name, field, f"must have {now} batch rows", got)

    def _open(self, keys: mx.array, values: mx.array, n: int) -> tuple[list[int], mx.array | None]:
        """Make the state, or the room in it, for a call of `n` tokens; returns `_counts` of it."""
        if self._state is None:
            self._fills = spread(self._fills, keys.shape[0])
            batch, heads, _, key_dim = keys.shape
            self._state = self._blank(batch, heads, key_dim, values.shape[3], keys.dtype, n)
            return self._counts(n)
        counts, lengths = self._counts(n)
        self._reserve(n, counts)
        return counts, lengths

    def _write(self, keys: mx.array, values: mx.array, counts: list[int], lengths: mx.array | None) -> None:
        """Take in a call whose rows of the batch have so many tokens in `counts`, `lengths` if padded on the right."""
        n = keys.shape[2]
        write = steps(self.transform).write if n == 1 and lengths is None else self.transform.write
        self._state = write(self._state, keys, values, lengths)
        self._fills = self._advance(self.transform.written, counts)
        if self._remaining is not None:
            self._remaining = [left - count for left, count in zip(self._remaining, counts, strict=True)]
        if self._padding is not None:
            left = [pad - n + count for pad, count in zip(self._padding, counts, strict=True)]
            self._padding = left if any(left) else None

    def _drop(self, n: int) -> None:
        if n > 0:
            self._state = self.transform.trim(self._state, n)
            self._fills = [self.transform.trimmed(fill, n) for fill in self._fills]

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

    def _state_for(self, n: int) -> Any:
        """The state with room for `n` tokens; a blank one before the first call, whose shapes nobody knows yet."""
        if self._state is None:
            return self._blank(len(self._fills), *_shapes(self.transform), mx.float16, n)
        self._reserve(n, self._counts(n)[0])
        return self._state

    def _blank(self, batch: int, heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, n: int) -> Any:
        spec = KVSpec(
            batch=batch,
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            capacity=_stepped(self._room(n, self._counts(n)[0])),
        )
        padding = None if self._padding is None else mx.array(self._padding, mx.int32)
        return self.transform.opened(self.transform.init_state(spec, padding), n)

    def _reserve(self, n: int, counts: list[int]) -> None:
        room = self._room(n, counts)
        if room > self.transform.capacity(self._state):
            self._state = self.transform.grow(self._state, _stepped(room))

    def _room(self, n: int, counts: list[int]) -> int:
        room = self.transform.room
        return max([room(fill, n, count) for fill, count in zip(self._fills, counts, strict=True)], default=0)


def _stepped(rows: int) -> int:
    """Capacity that has room for so many rows."""
    return max(-(-rows // STEP), 1) * STEP


def _shapes(transform: Transform) -> tuple[int, int, int]:
    """Heads, key and value size that a state of the transform can have."""
    store = getattr(transform, "store", transform)
    key, value = (getattr(getattr(store, side, None), "head_dim", None) or 128 for side in ("key", "value"))
    return transform.layers if isinstance(transform, Stack) else 1, key, value


def spread(fills: list[Fill], rows: int) -> list[Fill]:
    """One fill a batch row."""
    return fills * rows if len(fills) == 1 else fills
