"""Stack: layers whose old rows are packed together; each keeps its newest rows, exact, to itself.

A `Stack` is the transform of all layers at once, over their heads stacked on
axis 1. Its `member` is the transform of one layer: it takes the layer's rows,
and what it reads lies with the first member. When the last member of a call
has taken its rows, all settle together.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.transform import Fill, Transform, check_group
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.crosslayer.layer_coder import LayerCodec, heads_of
from vq_functional.ops.attention import Parts
from vq_functional.quantize.blocks import Blocks, BlockState, Coded
from vq_functional.quantize.sinks import Sinks

Members = tuple[BlockState, ...]


@attrs.frozen
class Group:
    """The states of all members, and how far a call has come: every member takes part in turn, with as many tokens."""

    members: Members
    turn: int = static_field()  # the layer that is next
    tokens: int = static_field()  # of the call that has begun; 0 between calls

    def __getitem__(self, layer: int) -> BlockState:
        return self.members[layer]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[BlockState]:
        return iter(self.members)


@attrs.frozen
class Stack(Blocks):
    """Blocks over the heads of `layers` layers, stacked on axis 1: [B, layers * H, S, D]."""

    layers: int = 1

    def sides(self, layout: Layout) -> Any:
        rule = f"must be a multiple of the {self.layers} layers"
        check(layout.kv_heads % self.layers == 0, self.name, "kv_heads", rule, layout.kv_heads)
        return super().sides(layout)

    def member(self, layer: int) -> "Member":
        """The transform of one of the layers."""
        check(0 <= layer < self.layers, self.name, "layer", f"must be below {self.layers}", layer)
        return Member(self, layer)

    def after(self, fills: Sequence[Fill]) -> "Stack":
        return cast(Stack, super().after(fills))

    def init_group(self, spec: KVSpec, left_padding: mx.array | None = None) -> Group:
        """Empty states of all members; `spec` is that of one layer."""
        return Group(tuple(self.member(layer).init_state(spec, left_padding) for layer in range(self.layers)), 0, 0)

    def join(self, members: Group | Members) -> BlockState:
        """The state of the stack, whose members have seen the same tokens: a group is joined between calls."""
        turn = members.turn if isinstance(members, Group) else 0
        check(turn == 0, self.name, "group", "must have come to the end of its call", f"layer {turn} to come")
        first = members[0]
        recent = map_leaves(lambda *rows: mx.concatenate(list(rows), axis=1), *(one.recent for one in members))
        heads = first.layout.kv_heads * self.layers
        return attrs.evolve(first, recent=recent, layout=attrs.evolve(first.layout, kv_heads=heads))

    def split(self, state: BlockState) -> Group:
        """Inverse of `join`: what is packed, and the sinks, lie with the first member."""
        layout = attrs.evolve(state.layout, kv_heads=state.layout.kv_heads // self.layers)
        nothing = Coded((), ())

        def one(layer: int) -> BlockState:
            recent = map_leaves(lambda x: heads_of(x, layer, self.layers), state.recent)
            own = attrs.evolve(state, recent=recent, layout=layout)
            return own if layer == 0 else attrs.evolve(own, keys=nothing, values=nothing, sinks=None)

        return Group(tuple(one(layer) for layer in range(self.layers)), 0, 0)

    def settle_together(self, members: Members, queries: mx.array, lengths: mx.array | None = None) -> Members:
        """`settle` of all members after a call that all have taken part in."""
        return self.split(self.settle(self.join(members), queries, lengths, proxy=True)).members


@attrs.frozen
class Member(Transform):
    """One layer of a stack.

    `group` of `update_in` is the states of all members, from `Stack.init_group`,
    `Stack.split` or the layer before; the layer's own state is the one in the group.
    """

    stack: Stack
    layer: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.stack.name

    @property
    def place(self) -> int:
        return self.layer

    @property
    def reader(self) -> Blocks:
        """What reads this layer out of a state that has borrowed what it shares."""
        return _reader(self.stack, self.layer)

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> BlockState:
        whole = attrs.evolve(spec, kv_heads=spec.kv_heads * self.stack.layers)
        return self.stack.split(self.stack.init_state(whole, left_padding))[self.layer]

    def borrowed(self, held: BlockState, first: BlockState) -> BlockState:
        """The state with what it shares with the other layers, which lies in that of the `first` member."""
        sinks = first.sinks
        if isinstance(sinks, Sinks):
            keys, values = (heads_of(x, self.layer, self.stack.layers) for x in (sinks.keys, sinks.values))
            sinks = attrs.evolve(sinks, keys=keys, values=values)
        return attrs.evolve(held, keys=first.keys, values=first.values, sinks=sinks)

    def returned(self, held: BlockState, own: BlockState) -> BlockState:
        """The state with what its `own` state holds of what is shared: inverse of `borrowed`."""
        return attrs.evolve(held, keys=own.keys, values=own.values, sinks=own.sinks)

    def update_in(
        self, state: Any, group: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None
    ) -> tuple[Any, Any, mx.array, mx.array]:
        check_group(self.name, group)
        self._check_turn(group)
        own, last = group[self.layer], self.layer == self.stack.layers - 1
        self.check_input(keys, values, queries, own)
        n, rule = keys.shape[2], f"must hold {group.tokens} tokens, as many as the layers before had"
        check(n == group.tokens or self.layer == 0, self.name, "keys", rule, n)
        full = self.reader.overflows(self.borrowed(own, group[0]), n) if n else None
        held = self.write(own, keys, values) if n else own
        keys_out, values_out = self.reader.read(self.borrowed(held, held if self.layer == 0 else group[0]))
        if full is not None:
            keys_out, values_out = (mx.where(full[:, None, None, None], mx.nan, x) for x in (keys_out, values_out))
        members = (*group.members[: self.layer], held, *group.members[self.layer + 1 :])
        if n and last:
            members = self.stack.settle_together(members, keys)
        group = Group(members, 0, 0) if last else Group(members, self.layer + 1, n)
        return group[self.layer], group, keys_out, values_out

    def _check_turn(self, group: Any) -> None:
        """Refuse a `group` of another stack, and a call that leaves a layer out."""
        check(isinstance(group, Group), self.name, "group", "must come from `init_group`", type(group).__name__)
        rule = f"must have the states of all {self.stack.layers} layers"
        check(len(group) == self.stack.layers, self.name, "group", rule, len(group))
        rule = f"must go to layer {group.turn} next, as all layers take part in every call, in order"
        check(group.turn == self.layer, self.name, "group", rule, f"layer {self.layer}")

    # What reads nothing that is shared

    def write(self, state: Any, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> Any:
        return self.reader.write(state, keys, values, lengths)

    def written(self, fill: Fill, n: int) -> Fill:
        return self.stack.written(fill, n)

    def settled(self, fill: Fill, n: int) -> Fill:
        return self.stack.settled(fill, n)

    def trimmed(self, fill: Fill, n: int) -> Fill:
        return self.stack.trimmed(fill, n)

    def settles(self, fill: Fill, n: int) -> bool:
        return self.stack.settles(fill, n)

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        return self.stack.room(fill, n, count)

    def grow(self, state: Any, capacity: int) -> Any:
        return self.reader.grow(state, capacity) if self.layer == 0 else state

    def widen(self, state: Any, extent: Any) -> Any:
        return self.reader.widen(state, extent) if self.layer == 0 else state

    def capacity(self, state: Any) -> int:
        """Packed rows that the state has room for; 0 where they lie with the first member."""
        return self.reader.capacity(state) if self.holds(state) else 0

    def fits(self, state: Any, fill: Fill) -> bool:
        if self.holds(state):
            return self.reader.fits(state, fill)
        return fill.rows - fill.coded <= self.stack.recent_rows

    def holds(self, state: Any) -> bool:
        """Whether what is shared is there, as the first member's or borrowed."""
        return bool(state.values.rows)

    # What reads a state that has borrowed what it shares

    def parts(self, held: Any, fill: Fill | None = None) -> tuple[Parts, Parts]:
        return self.reader.parts(self._whole(held), fill)

    def trim(self, state: Any, n: int) -> Any:
        return self.reader.trim(self._whole(state), n)

    def _whole(self, state: Any) -> Any:
        """The state; refused where what it would read is another layer's, or that of all layers."""
        own = state.sinks is None or state.sinks.keys.shape[1] == state.layout.kv_heads
        return self._with_codes(state, own)

    # What needs no more than the room that the layers share

    def positions(self, held: Any) -> mx.array:
        return self.reader.positions(self._with_codes(held))

    def positions_after(self, state: Any, n: int, fill: Fill | None = None) -> mx.array:
        return self.reader.positions_after(self._with_codes(state), n, fill)

    def _with_codes(self, state: Any, own: bool = True) -> Any:
        rule = "must have borrowed what the first layer of its stack holds"
        check(self.holds(state) and own, self.name, "state", rule, f"layer {self.layer} alone")
        return state


def stack_sizes(layers: int, group_size: int, first: int = 0, rest_alone: bool = False) -> list[int]:
    """Sizes of the stacks of consecutive layers: the `first` ones stand alone, then come groups.

    What is left at the end is a smaller group, or with `rest_alone` layers that stand alone.
    """
    first = min(first, layers)
    groups, rest = divmod(layers - first, group_size)
    end = [1] * rest if rest_alone else [rest] * (rest > 0)
    return [1] * first + [group_size] * groups + end


@functools.lru_cache(maxsize=1024)
def _reader(stack: Stack, layer: int) -> Blocks:
    key, value = (LayerCodec(codec, layer, stack.layers) for codec in (stack.key, stack.value))
    return Blocks(stack.name, key, value, stack.residual, stack.sinks, stack.max_ctx)
