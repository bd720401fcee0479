"""Transform: one layer's cache as pure functions of an immutable state.

A call has three moments. `write` takes the new rows in and drops nothing;
`parts` (and so `read` and `attend`) show everything that this call's queries
may see; `settle` then applies the method's rule: it evicts, or packs groups.
`update` is the three in a row. A caller that learns the real queries late
(the attention hook) uses the moments one by one.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.core.spec import FLOATS, KVSpec
from vq_functional.ops.attention import Mask, Parts, attend, decode
from vq_functional.ops.masks import causal, query_positions


@attrs.frozen
class Fill:
    """How full a state is, as plain numbers: they follow from token counts and options, never from data."""

    tokens: int = 0  # seen so far: the position of the next token
    rows: int = 0  # held
    coded: int = 0  # of these, rows that are packed in groups along tokens
    prompt: int = 0  # tokens that came in calls of several
    limit: int = 0  # rows that may stay, where this is agreed between layers; 0 where the options say it
    older: int = 0  # of the coded rows, those that have gone on to coarser codes
    oldest: int = 0  # of these, those that have gone on a second time

    def plus(self, n: int) -> "Fill":
        """After `n` more tokens whose rows are all held."""
        return Fill(self.tokens + n, self.rows + n, self.coded, self.prompt, self.limit, self.older, self.oldest)


class Transform:
    """Base of all methods. `state` is what `settle` returns, `held` what `write` returns."""

    name: str
    trimmable: ClassVar[bool] = True  # rows can be dropped from the end
    evicts: ClassVar[bool] = False  # some rows are given up
    indivisible: ClassVar[str | None] = None  # why processes can't have a part of the heads each; None where they can

    @property
    def coded(self) -> bool:
        """Whether some of what is held are codes, so that `attend` saves reading them as vectors."""
        return True

    @property
    def observes(self) -> bool:
        """Whether it remembers something of the queries of every call, single tokens included."""
        return False

    @property
    def window(self) -> int | None:
        """Positions that a query sees at most, itself included; None where there is no such bound."""
        return None

    @property
    def leads(self) -> bool:
        """Whether other layers take over what this one chooses."""
        return False

    @property
    def leader(self) -> int | None:
        """The layer that chooses for this one; None where it chooses itself."""
        return None

    @property
    def agrees(self) -> bool:
        """Whether the layers agree on their budgets after the first call."""
        return False

    @property
    def place(self) -> int | None:
        """Its place among the layers that pack their rows together; None where it stands alone."""
        return None

    @property
    def in_group(self) -> bool:
        """Whether the layers of a model have something to tell each other."""
        return self.leads or self.agrees or self.leader is not None or self.place is not None

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> Any:
        """Empty state. `left_padding` int [B]: rows of the first call that are padding."""
        raise TypeError(f"{self.name} has no state of its own")

    def write(self, state: Any, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> Any:
        """Take in `keys` [B, H, S, Dk] and `values` [B, H, S, Dv]; drop nothing.

        `lengths` int [B]: how many of the S rows, from the left, are no padding.
        """
        raise TypeError(f"{self.name} does not write")

    def settle(self, held: Any, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False) -> Any:
        """Apply the method's rule after a call whose queries were `queries` [B, Hq, S, D].

        Scores are q . k / sqrt(D); for a model with another scale, pass `rescaled(queries, scale)`.
        `proxy`: the keys stand in for queries that nobody handed over.
        """
        return held

    def observe(self, held: Any, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False) -> Any:
        """`settle` after a call that gives nothing up and packs nothing."""
        return held

    def settle_in(
        self, held: Any, group: Any, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> tuple[Any, Any]:
        """`settle` as one of a group of layers: `group` is what an earlier layer hands on in this call, or None.

        Returns the state and what the next layers get.
        """
        return self.settle(held, queries, lengths, proxy), group

    def parts(self, held: Any, fill: Fill | None = None) -> tuple[Parts, Parts]:
        """Key parts and value parts; with `fill`, without the columns that hold no row."""
        raise TypeError(f"{self.name} has no parts")

    def positions(self, held: Any) -> mx.array:
        """Token position int [B, H or 1, C] of each column of `parts`; below zero where there is none."""
        raise TypeError(f"{self.name} has no positions")

    def positions_after(self, state: Any, n: int, fill: Fill | None = None) -> mx.array:
        """`positions` after a `write` of `n` tokens; with `fill`, of the columns that will hold rows."""
        raise TypeError(f"{self.name} has no positions")

    def visible(self, held: Any, n: int, lengths: mx.array | None = None) -> mx.array:
        """Bool [B, 1, n, C]: what the last call's `n` queries see of all columns of `parts`."""
        start = held.offset - (n if lengths is None else lengths)
        return causal(self.positions(held)[:, :1], query_positions(start, n))

    def make_mask(self, state: Any, n: int, fill: Fill | None = None, window: int | None = None) -> mx.array:
        """Bool [B, 1, n, C] for the coming call of `n` tokens; C is the width that it will return.

        Every position that is held lies before the call, so one head axis is exact
        whatever rows a head keeps; with a `window` it is [B, H, n, C] where heads differ.
        """
        columns = self.positions_after(state, n, fill)
        return causal(columns if window else columns[:, :1], query_positions(state.offset, n), window)

    def ordered(self, state: Any) -> Any:
        """The same state with its rows in token order, as `parts` shows them; empty columns last."""
        return state

    def grow(self, state: Any, capacity: int) -> Any:
        """The same rows in arrays with room for `capacity` rows."""
        return state

    def opened(self, state: Any, n: int) -> Any:
        """An empty state as a first call of `n` tokens takes it, without room that stays empty to its end."""
        return state

    def extent(self, state: Any) -> Any:
        """Plain numbers that the shapes of the state's arrays follow from."""
        return self.capacity(state)

    def common(self, extents: Sequence[Any]) -> Any:
        """The extent that has room for states of all these."""
        return max(extents)

    def widen(self, state: Any, extent: Any) -> Any:
        """The state in arrays of exactly this extent, to stand beside others; an empty one may get narrower."""
        return self.grow(state, extent)

    def trim(self, state: Any, n: int) -> Any:
        """Without the newest `n` rows; the others read exactly as before."""
        check(False, self.name, "trim", "is refused: evicted rows can't come back", n)

    def written(self, fill: Fill, n: int) -> Fill:
        """`fill` after `write` of `n` tokens."""
        return fill.plus(n)

    def settled(self, fill: Fill, n: int) -> Fill:
        """`fill` after `settle` of a call of `n` tokens."""
        return fill

    def trimmed(self, fill: Fill, n: int) -> Fill:
        """`fill` after `trim` of `n` rows."""
        tokens = max(fill.tokens - n, 0)
        return Fill(tokens, tokens)

    def settles(self, fill: Fill, n: int) -> bool:
        """Whether `settle` does anything after a call of `n` tokens that led to `fill`."""
        return False

    def after(self, fills: Sequence[Fill]) -> "Transform":
        """The same method for the end of a call that leads to these `fills`, one a batch row.

        Where it is another one it spares the step some work, or knows the shapes of what the step leaves.
        """
        return self

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        """Capacity that a call of `n` tokens needs, `count` of them no padding; 0 where the capacity is fixed."""
        return fill.rows + n

    def narrowed(self, state: Any, fills: Sequence[Fill]) -> Any:
        """After a call of several tokens: without room beyond what these `fills`, one a batch row, need.

        `settle` knows shapes alone, from which the rows that a share of the prompt may keep do not follow.
        """
        return state

    def capacity(self, state: Any) -> int:
        """Rows that the state's arrays have room for."""
        raise TypeError(f"{self.name} has no capacity")

    def fits(self, state: Any, fill: Fill) -> bool:
        """Whether the state's arrays can be as full as `fill` says."""
        return fill.rows <= self.capacity(state)

    def overflows(self, state: Any, n: int) -> mx.array | None:
        """Bool [B]: rows of the batch that have no room for `n` more tokens; None where that can't be."""
        return None

    def update(
        self, state: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None
    ) -> tuple[Any, mx.array, mx.array]:
        """One call: the next state, and the keys and values for this call's attention.

        `keys` [B, H, S, Dk], `values` [B, H, S, Dv], `queries` [B, Hq, S, Dk] or
        None (keys stand in), as `settle` takes them. The returned rows are everything held plus the new
        rows; only what is stored shrinks. A call past the capacity returns NaN
        rows (nothing can be raised from inside a compiled step): `grow` first.
        Raises QuantizerConfigError for wrong shapes or dtypes.
        """
        state, _, keys_out, values_out = self.update_in(state, None, keys, values, queries)
        return state, keys_out, values_out

    def update_in(
        self, state: Any, group: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None
    ) -> tuple[Any, Any, mx.array, mx.array]:
        """`update` as one of a group of layers: takes what the layer before hands on, and hands on its own."""
        self.check_input(keys, values, queries, state)
        if keys.shape[2] == 0:
            return state, group, *self.read(state)
        full = self.overflows(state, keys.shape[2])
        held = self.write(state, keys, values)
        keys_out, values_out = self.read(held)
        if full is not None:
            keys_out, values_out = (mx.where(full[:, None, None, None], mx.nan, x) for x in (keys_out, values_out))
        asking = keys if queries is None else queries
        settled, group = self.settle_in(held, group, asking, proxy=queries is None)
        return settled, group, keys_out, values_out

    def read(self, held: Any, fill: Fill | None = None) -> tuple[mx.array, mx.array]:
        """Keys and values [B, H, C, D] of all columns, or of those that hold rows."""
        key_parts, value_parts = self.parts(held, fill)
        return decode(key_parts), decode(value_parts)

    def attend(
        self, held: Any, queries: mx.array, scale: float, mask: Mask = None, fill: Fill | None = None
    ) -> mx.array:
        """Attention [B, Hq, S, Dv] of the last call's queries, straight from what is held.

        `mask` None or "causal" means causal; an array has the width of `parts`.
        """
        key_parts, value_parts = self.parts(held, fill)
        if fill is None and not isinstance(mask, mx.array):
            mask = self.visible(held, queries.shape[2])
        elif mask is None and queries.shape[2] > 1:
            mask = "causal"
        return attend(key_parts, value_parts, queries, scale, mask)

    def check_input(self, keys: mx.array, values: mx.array, queries: mx.array | None = None, state: Any = None) -> None:
        """Refuse arrays that no layer's cache can take, or not the one of this `state`."""
        if queries is None and state is not None and _fit(keys, values, state):
            return
        check(keys.ndim == 4, self.name, "keys", "must be [B, H, S, D]", keys.shape)
        check(0 not in keys.shape[:2], self.name, "keys", "must have batch rows and heads", keys.shape)
        same = values.ndim == 4 and values.shape[:3] == keys.shape[:3]
        check(same, self.name, "values", f"must be {[*keys.shape[:3], 'Dv']}", values.shape)
        check(keys.dtype in FLOATS, self.name, "keys", "must be float16, bfloat16 or float32", keys.dtype)
        if state is not None:
            rows, layout = state.offset.shape[0], state.layout
            check(keys.shape[0] == rows, self.name, "keys", f"must have {rows} batch rows", keys.shape)
            for field, x, dim in (("keys", keys, layout.key_dim), ("values", values, layout.value_dim)):
                came, wanted = (x.shape[1], x.shape[3], x.dtype), (layout.kv_heads, dim, layout.dtype)
                check(came == wanted, self.name, field, f"must have heads, size and dtype {wanted}", came)
        if queries is not None:
            batch, heads, n, dim = keys.shape
            fits = queries.ndim == 4 and (queries.shape[0], *queries.shape[2:]) == (batch, n, dim)
            rule = f"must be [{batch}, multiple of {heads}, {n}, {dim}]"
            check(fits and queries.shape[1] % heads == 0, self.name, "queries", rule, queries.shape)
            check(queries.dtype in FLOATS, self.name, "queries", "must be float16, bfloat16 or float32", queries.dtype)


def _fit(keys: mx.array, values: mx.array, state: Any) -> bool:
    """Whether nothing is to be refused, which at every step is known without putting any refusal into words."""
    shape, other, layout = keys.shape, values.shape, state.layout
    return (
        len(shape) == 4
        and len(other) == 4
        and shape[:3] == other[:3]
        and 0 < shape[0] == state.offset.shape[0]
        and (shape[1], shape[3], other[3]) == (layout.kv_heads, layout.key_dim, layout.value_dim)
        and keys.dtype == layout.dtype
        and values.dtype == layout.dtype
    )


def check_group(name: str, group: Any) -> None:
    """Refuse to go on without what an earlier layer should have handed on."""
    if group is None:
        raise RuntimeError(f"{name}: `group` must come from the layer that leads this one; got None")
