"""AnchorKV: prompt tokens as scaled anchors plus a few quantized residuals (arXiv 2608.02901).

The paper is known from secondary sources only. A prompt is held exactly until
its first single token has attended to it; then a few of its rows stay as
anchors, every row becomes a multiple of the anchor that is most nearly
parallel, and what that leaves is coded where the last queries would notice it
most. Later rows stay exact.

Differs from what is reported: keys are projected as they come, rotated.
"""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Part, bind, plain_part
from vq_functional.core.errors import check, check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import start_offset
from vq_functional.core.transform import Fill, Transform
from vq_functional.hybrid.anchor_options import AnchorKVOptions
from vq_functional.hybrid.anchor_state import (
    BUCKET,
    AnchorState,
    Extent,
    asked_after,
    asked_before,
    bucket,
    empty_state,
    keys_before,
    resized,
)
from vq_functional.hybrid.anchors import Prompt, Rule, anchored, cleaned, merged
from vq_functional.ops.attention import Parts
from vq_functional.ops.rows import drop_left_padding, extend_rows, read_rows, write_rows
from vq_functional.ops.tables import counting


@attrs.frozen
class Plan:
    """What a single token ends in a batch, as plain numbers."""

    batch: int
    extent: Extent  # of the state afterwards; `columns` 0 where no prompt is anchored


@attrs.frozen
class AnchorKV(Transform):
    """Keeps every token; the rows of its first prompt share anchors.

    `plan` comes from `after`: without one a step anchors nothing.
    """

    options: AnchorKVOptions
    plan: Plan | None = None
    name = "anchorkv"
    indivisible = "residuals are divided among all heads of a layer"

    @property
    def observes(self) -> bool:
        return True

    @property
    def rule(self) -> Rule:
        """What is chosen of a prompt."""
        return self.options.rule

    def empty(self, layout: Layout, offset: mx.array, extent: Extent) -> AnchorState:
        """Arrays of an `extent` that hold nothing."""
        return empty_state(self.rule.sizes, layout, offset, extent, self.options.window)

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> AnchorState:
        for dim in (spec.key_dim, spec.value_dim):
            bind(self.rule.codec, dim, spec.dtype)
        return self.empty(spec.layout, start_offset(spec.batch, left_padding), Extent(spec.capacity))

    def write(
        self, state: AnchorState, keys: mx.array, values: mx.array, lengths: mx.array | None = None
    ) -> AnchorState:
        n, room = keys.shape[2], state.recent[0].shape[2]
        check(n <= room, self.name, "keys", f"must fit the capacity of {room} rows", keys.shape)
        start, padding = mx.maximum(state.offset, 0) - state.coded, mx.maximum(-state.offset, 0)
        new_keys, new_values = (
            write_rows(held, drop_left_padding(x, padding), start)
            for held, x in zip(state.recent, (keys, values), strict=True)
        )
        offset = state.offset + (n if lengths is None else lengths)
        return attrs.evolve(state, recent=(new_keys, new_values), offset=offset)

    def observe(
        self, held: AnchorState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> AnchorState:
        """Remember the queries of prompts that have not ended; keys only beside real queries."""
        counts = mx.full(held.offset.shape, queries.shape[2], mx.int32) if lengths is None else lengths
        return attrs.evolve(held, queries=asked_after(held, queries, counts, proxy))

    def settle(
        self, held: AnchorState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> AnchorState:
        if queries.shape[2] != 1:
            return self.observe(held, queries, lengths, proxy)
        ends = (held.prompt == 0) & (held.offset > 1)
        if lengths is not None:
            ends = ends & (lengths > 0)
        held = attrs.evolve(held, prompt=mx.where(ends, held.offset - 1, held.prompt))
        held = self.observe(held, queries, lengths, proxy)
        if self.plan is None:
            return held
        extent = self.plan.extent
        if self.plan.batch != held.offset.shape[0] or lengths is not None:
            extent = Extent(held.extent.rows, bucket(held.extent.rows), 0, 1)
        return self._anchored(held, extent)

    def compress(self, state: AnchorState, tokens: int, rows: int | None = None) -> AnchorState:
        """End the prompts that a settled `state` holds, of at most so many `tokens`, and anchor them. Reads back.

        `rows`: room for exact rows (None: BUCKET, or more where more stay). Those are prompts of fewer than
        `options.least` tokens and rows that came after a prompt.
        """
        check_int(self.name, "tokens", tokens, 1)
        seen = mx.maximum(state.offset, 0)
        prompt = mx.where(state.prompt == 0, seen, state.prompt)
        new = mx.where(state.coded == 0, prompt, 0)
        coded = mx.where(new >= self.options.least, new, state.coded)
        longest, exact = (int(np.array(count).max(initial=0)) for count in (new, seen - coded))
        check(tokens >= longest, self.name, "tokens", f"must be at least the {longest} of the longest prompt", tokens)
        room = max(BUCKET, bucket(exact)) if rows is None else rows
        check_int(self.name, "rows", room, exact)
        extent = Extent(room, bucket(tokens) if tokens >= self.options.least else 0, 0, 0)
        return self._anchored(attrs.evolve(state, prompt=prompt), extent)

    def parts(self, held: AnchorState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        layout, columns, recent = held.layout, held.extent.columns, held.recent
        if fill is not None:
            columns = min(fill.coded, columns)
            recent = (recent[0][:, :, : fill.rows - columns], recent[1][:, :, : fill.rows - columns])
        both = []
        for side, exact in zip((held.keys, held.values), recent, strict=True):
            dim = exact.shape[3]
            part = plain_part(exact, layout.dtype)
            anchors, index, gain, *residuals = side.rows
            rows = (anchors, index[:, :, :columns], gain[:, :, :columns], *residuals)
            both.append(((Part(bind(self.rule.codec, dim, layout.dtype), rows, columns),) if columns else ()) + (part,))
        return both[0], both[1]

    def positions(self, held: AnchorState) -> mx.array:
        recent = (held.coded[:, None] + counting(held.extent.rows))[:, None]
        if held.extent.columns == 0:  # no arithmetic on nothing: a GPU may refuse it
            return recent
        columns = counting(held.extent.columns)
        coded = mx.where(columns < held.coded[:, None], columns, -1)
        return mx.concatenate([coded[:, None], recent], axis=-1)

    def positions_after(self, state: AnchorState, n: int, fill: Fill | None = None) -> mx.array:
        if fill is None:
            return self.positions(state)
        return mx.broadcast_to(mx.arange(fill.rows + n), (state.offset.shape[0], 1, fill.rows + n))

    def grow(self, state: AnchorState, capacity: int) -> AnchorState:
        keys, values = (extend_rows(x, capacity) for x in state.recent)
        return attrs.evolve(state, recent=(keys, values))

    def widen(self, state: AnchorState, capacity: Any) -> AnchorState:
        """Room for exactly an extent, as plain numbers, or for so many exact rows."""
        if isinstance(capacity, int):
            capacity = attrs.astuple(attrs.evolve(state.extent, rows=capacity))
        return resized(state, self.empty(state.layout, state.offset, Extent(*capacity)))

    def extent(self, state: AnchorState) -> tuple[int, ...]:
        """Plain numbers that the shapes of the state's arrays follow from."""
        return attrs.astuple(state.extent)

    def common(self, extents: Sequence[Any]) -> tuple[int, ...]:
        """The extent that has room for all of these."""
        return attrs.astuple(functools.reduce(Extent.joined, (Extent(*one) for one in extents)))

    def trim(self, state: AnchorState, n: int) -> AnchorState:
        """Without the newest `n` rows. Anchors stay, so that rows of the prompt read as before."""
        offset = mx.maximum(state.offset - n, 0)
        queries = asked_before(state, state.offset - offset, n)
        coded, prompt = (mx.minimum(x, offset) for x in (state.coded, state.prompt))
        return attrs.evolve(state, queries=queries, coded=coded, prompt=prompt, offset=offset)

    def settled(self, fill: Fill, n: int) -> Fill:
        if n != 1 or fill.prompt or fill.tokens < 2:
            return fill
        prompt = fill.tokens - 1
        return attrs.evolve(fill, prompt=prompt, coded=prompt if prompt >= self.options.least else 0)

    def trimmed(self, fill: Fill, n: int) -> Fill:
        tokens = max(fill.tokens - n, 0)
        return Fill(tokens, tokens, min(fill.coded, tokens), min(fill.prompt, tokens))

    def settles(self, fill: Fill, n: int) -> bool:
        return n == 1 and self.settled(fill, n) != fill

    def after(self, fills: Sequence[Fill]) -> "AnchorKV":
        """The method for a single token that leads to these `fills`, one a batch row."""
        settled = [self.settled(fill, 1) for fill in fills]
        ended = [new.coded for old, new in zip(fills, settled, strict=True) if new != old]
        rows = bucket(max(fill.rows - fill.coded for fill in settled))
        still = any(fill.prompt == 0 for fill in settled)
        extent = Extent(rows, bucket(max(ended, default=0)), 0, int(still))
        return _planned(self.options, Plan(len(fills), extent))

    def room(self, fill: Fill, n: int, count: int | None = None) -> int:
        return fill.rows - fill.coded + n

    def capacity(self, state: AnchorState) -> int:
        return state.recent[0].shape[2]

    def fits(self, state: AnchorState, fill: Fill) -> bool:
        return fill.coded <= state.extent.columns and fill.rows - fill.coded <= state.extent.rows

    def overflows(self, state: AnchorState, n: int) -> mx.array:
        return state.offset - state.coded + n > state.recent[0].shape[2]

    def _anchored(self, held: AnchorState, extent: Extent) -> AnchorState:
        """The state in arrays of an `extent`, or with more columns, with the prompts anchored that have ended."""
        columns, before = extent.columns, held.extent
        target = Extent(extent.rows, max(columns, before.columns), before.group * extent.open, extent.open)
        wide = resized(held, self.empty(held.layout, held.offset, attrs.evolve(target, rows=before.rows)))
        coded = held.coded
        if columns:
            begins = (held.coded == 0) & (held.prompt >= self.options.least)
            prompt = self._prompt(held, target.columns, mx.where(begins, held.prompt, self.options.least))
            old = (wide.keys, wide.values, wide.position)
            keys, values, position = merged(begins, anchored(self.rule, held.layout, prompt), old)
            coded = mx.where(begins, held.prompt, held.coded)
            wide = attrs.evolve(wide, keys=keys, values=values, position=position, coded=coded)
        room = before.rows + extent.rows
        exact = [read_rows(extend_rows(x, room), coded - held.coded, extent.rows) for x in held.recent]
        return attrs.evolve(wide, recent=(exact[0], exact[1]))

    def _prompt(self, held: AnchorState, columns: int, length: mx.array) -> Prompt:
        """The first `length` int [B] tokens in `columns`, with the queries of the last of them."""
        window, group = self.options.window, held.extent.group
        live = (mx.arange(columns) < length[:, None])[:, None]
        keys, values = (cleaned(extend_rows(x, columns)[:, :, :columns], live) for x in held.recent)
        asking = keys_before(held, held.coded + length, window) if group == 0 else held.queries
        batch, heads, dim = asking.shape[0], held.layout.kv_heads, held.layout.key_dim
        queries = cleaned(asking).reshape(batch, heads, -1, dim)
        return Prompt(keys, values, queries, length, window, proxy=group == 0)


@functools.lru_cache(maxsize=512)
def _planned(options: AnchorKVOptions, plan: Plan) -> AnchorKV:
    return AnchorKV(options, plan)


def anchorkv(**options: Any) -> Transform:
    """Scaled anchors and a few residuals for the prompt; keeps every token, and those after the prompt exactly."""
    return AnchorKV(AnchorKVOptions(**options))
