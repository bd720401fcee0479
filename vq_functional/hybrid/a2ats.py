"""A2ATS: codes of un-rotated keys find the few rows that a token attends to (arXiv 2502.12665).

A key far away is scored as if it were `b` positions away, wherever it is; then
one codebook of un-rotated keys serves all positions, and a token's scores are
table look-ups. It attends to the rows of the highest scores, to its
neighbours and to the first rows. Every row is held, by a store; the codes save
reading and no room, and work where `attend` is called.

Differs from the paper: codes of short sub-vectors; the rows that are found
keep their true rotation. Without a calibrated codebook keys are counted from
the mean of the first rows and coded as vecinfer codes rows.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Rows, plain_part
from vq_functional.core.errors import check, check_int
from vq_functional.core.spec import KVSpec, Layout
from vq_functional.core.store import HeldRows, RowState, RowStore, first_rows, rows
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import map_leaves, static_field
from vq_functional.core.warn import warn_uncalibrated
from vq_functional.hybrid.a2ats_codes import fitted_codebook, query_moment
from vq_functional.hybrid.a2ats_options import A2ATSOptions
from vq_functional.ops.attention import Mask, Parts, attend, decode
from vq_functional.ops.kmeans import on_host
from vq_functional.ops.rows import drop_left_padding, extend_rows, pick, read_rows, top_rows, write_rows
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.spectrum import to_samples
from vq_functional.quantize.int8 import int8_codec


@attrs.frozen
class A2ATSState:
    held: RowState
    codes: Rows  # uint8 or uint16 [B, H, C, D / sub_dim], and bfloat16 [B, H, C] without a codebook
    single: bool = static_field()  # the last call was one token, and its key chooses what `read` shows

    @property
    def offset(self) -> mx.array:
        return self.held.offset

    @property
    def layout(self) -> Layout:
        return self.held.layout

    @property
    def rows(self) -> HeldRows:
        return self.held.rows


@attrs.frozen
class A2ATS(Transform):
    """A row store, with codes of its keys as they were before rotation."""

    name: str
    options: A2ATSOptions
    store: RowStore

    def init_state(self, spec: KVSpec, left_padding: mx.array | None = None) -> A2ATSState:
        self.options.check_layout(spec.layout)
        codes = self.options.codes(spec.key_dim).empty(spec.batch, spec.kv_heads, spec.key_dim, spec.capacity)
        return A2ATSState(self.store.init_state(spec, left_padding), codes, False)

    def write(self, state: A2ATSState, keys: mx.array, values: mx.array, lengths: mx.array | None = None) -> A2ATSState:
        n, start = keys.shape[2], mx.maximum(state.offset, 0)
        held = self.store.write(state.held, keys, values, lengths)
        fresh = drop_left_padding(keys, mx.maximum(-state.offset, 0))
        codes = self._coded(held, fresh, start[:, None] + mx.arange(n))
        codes = map_leaves(lambda buffer, x: write_rows(buffer, x, start), state.codes, codes)
        return A2ATSState(held, codes, self._by_proxy(n))

    def settle(
        self, held: A2ATSState, queries: mx.array, lengths: mx.array | None = None, proxy: bool = False
    ) -> A2ATSState:
        return A2ATSState(held.held, held.codes, False)

    def parts(self, held: A2ATSState, fill: Fill | None = None) -> tuple[Parts, Parts]:
        return self.store.parts(held.held, fill and Fill(fill.tokens, fill.tokens))

    def read(self, held: A2ATSState, fill: Fill | None = None) -> tuple[mx.array, mx.array]:
        """All columns; after a single token under a `proxy` those that its key chooses, in token order."""
        if not held.single:
            return super().read(held, fill)
        key_coder, _ = self.store.coders(held.layout)
        newest = key_coder.decode(tuple(read_rows(x, held.offset - 1, 1) for x in held.rows.keys))
        index, _ = self._chosen(held, newest, self._seen(held, None))
        count = None if fill is None else self.options.reach.count(fill.tokens)
        keys, values = self._picked(held, index[..., :count])
        return decode(keys), decode(values)

    def attend(
        self, held: A2ATSState, queries: mx.array, scale: float, mask: Mask = None, fill: Fill | None = None
    ) -> mx.array:
        """As every transform's, but a single query attends to what it retrieves, unless `mask` is additive."""
        if held.single and isinstance(mask, mx.array):  # for the columns that `read` shows
            return mx.fast.scaled_dot_product_attention(queries, *self.read(held, fill), scale=scale, mask=mask)
        every = self.options.reach.count(held.rows.count) == held.rows.count and self.options.far_rope == "exact"
        additive = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        if queries.shape[2] != 1 or every or additive:
            return super().attend(held, queries, scale, mask, fill)
        seen = self._seen(held, mask)
        index, real = self._chosen(held, queries, seen)
        batch, heads, count = index.shape
        seen = mx.broadcast_to(seen, (batch, heads, *seen.shape[2:]))
        visible = mx.take_along_axis(seen, index[:, :, None], axis=-1) & real[:, :, None]
        visible = mx.broadcast_to(visible, (batch, heads, queries.shape[1] // heads, count))
        keys, values = self._picked(held, index)
        if self.options.far_rope == "constant":
            keys = self._moved(held, keys, index)
        return attend(keys, values, queries, scale, visible.reshape(batch, -1, 1, count))

    def select(self, held: A2ATSState, queries: mx.array) -> mx.array:
        """Positions int32 [B, H, K] of the rows that single `queries` [B, Hq, 1, D] attend to, rising, then -1."""
        index, real = self._chosen(held, queries, self._seen(held, None))
        return mx.where(real, index, -1).astype(mx.int32)

    def far_queries(self, queries: mx.array, positions: mx.array) -> mx.array:
        """`queries` [B, Hq, S, D] of `positions` int [B, S], turned as they meet un-rotated keys far away."""
        return self.options.rotation(queries.shape[3]).turn(queries, self.options.b - positions)

    def positions(self, held: A2ATSState) -> mx.array:
        return self.store.positions(held.held)

    def positions_after(self, state: A2ATSState, n: int, fill: Fill | None = None) -> mx.array:
        if not self._by_proxy(n):
            return self.store.positions_after(state.held, n, fill)
        columns = state.rows.count if fill is None else fill.tokens + 1
        return self.options.reach.positions(state.offset + 1, self.options.reach.count(columns))[:, None]

    def grow(self, state: A2ATSState, capacity: int) -> A2ATSState:
        held = self.store.grow(state.held, capacity)
        return A2ATSState(held, map_leaves(lambda x: extend_rows(x, held.rows.count), state.codes), state.single)

    def trim(self, state: A2ATSState, n: int) -> A2ATSState:
        return A2ATSState(self.store.trim(state.held, n), state.codes, state.single)

    def written(self, fill: Fill, n: int) -> Fill:
        tokens = fill.tokens + n
        return Fill(tokens, self.options.reach.count(tokens) if self._by_proxy(n) else tokens)

    def settled(self, fill: Fill, n: int) -> Fill:
        return Fill(fill.tokens, fill.tokens)

    def settles(self, fill: Fill, n: int) -> bool:
        return self._by_proxy(n)

    def capacity(self, state: A2ATSState) -> int:
        return state.rows.count

    def overflows(self, state: A2ATSState, n: int) -> mx.array:
        return self.store.overflows(state.held, n)

    def _by_proxy(self, n: int) -> bool:
        return self.options.proxy is not None and n == 1

    def _coded(self, held: RowState, keys: mx.array, positions: mx.array) -> Rows:
        """Codes of new `keys` at `positions` int [B, S]; without a codebook none of rows that all tokens attend to."""
        finite = mx.where(mx.isfinite(keys), keys, 0).astype(mx.float32)
        bare = self.options.rotation(keys.shape[3]).undo(finite, positions)
        codes = self.options.codes(held.layout.key_dim)
        if self.options.codebook is not None:
            return codes.encode(bare)
        coded = codes.encode(bare - self._centre(held))
        real = (positions >= self.options.n_sink)[:, None, :]
        return tuple(mx.where(real if x.ndim == 3 else real[..., None], x, 0).astype(x.dtype) for x in coded)

    def _centre(self, held: RowState) -> mx.array:
        """Mean float32 [B, H, 1, D] of the first keys before rotation."""
        keys = first_rows(held.rows, self.options.n_sink).keys
        if keys[0].shape[2] == 0:
            return mx.array(0.0)
        vectors = self.store.coders(held.layout)[0].decode(keys).astype(mx.float32)
        positions = mx.arange(vectors.shape[2])
        bare = self.options.rotation(vectors.shape[3]).undo(vectors, positions)
        real = (positions < held.offset[:, None])[:, None, :, None] & mx.isfinite(bare)
        return mx.where(real, bare, 0).sum(axis=2, keepdims=True) / mx.maximum(real.sum(axis=2, keepdims=True), 1)

    def _chosen(self, held: A2ATSState, queries: mx.array, seen: mx.array) -> tuple[mx.array, mx.array]:
        """Columns int [B, H, K] that single `queries` attend to, rising, and which of them count.

        `seen` bool [B, H or 1, G or 1, C].
        """
        batch, heads, columns = held.rows.keys[0].shape[:3]
        last = held.offset[:, None] - 1
        turned = self.far_queries(queries.astype(mx.float32), last)
        grouped = turned.reshape(batch, heads, -1, turned.shape[3])
        score = self.options.codes(held.layout.key_dim).scores(grouped, held.codes).max(axis=2)
        always, useful = self.options.reach.always(mx.arange(columns), last)[:, None], seen.any(axis=2)
        priority = mx.where(always, mx.inf, mx.where(mx.isfinite(score), score, LOWEST))
        keep = self.options.reach.count(held.offset)
        index = top_rows(mx.where(useful, priority, -mx.inf), keep, self.options.reach.count(columns), latest=False)
        count = mx.minimum(useful.sum(axis=-1), keep[:, None])[..., None]
        return index, mx.broadcast_to(mx.arange(index.shape[2]) < count, index.shape)

    def _picked(self, held: A2ATSState, index: mx.array) -> tuple[Parts, Parts]:
        return self.store.as_parts(held.layout, map_leaves(lambda x: pick(x, index), held.rows))

    def _moved(self, held: A2ATSState, keys: Parts, index: mx.array) -> Parts:
        """Keys of columns `index` [B, H, K]; those outside the window at distance `b` from the newest token."""
        vectors, last = decode(keys), held.offset[:, None, None] - 1
        turn = mx.where(last - index >= self.options.window, last - self.options.b - index, 0)
        moved = self.options.rotation(vectors.shape[3]).turn(vectors, turn)
        return (plain_part(moved),)

    def _seen(self, held: A2ATSState, mask: Mask) -> mx.array:
        """Bool [B, H or 1, G or 1, C]: what the newest token's queries may look at."""
        if not isinstance(mask, mx.array):
            return self.visible(held, 1)
        heads, columns = held.rows.keys[0].shape[1:3]
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mx.pad(mask, [(0, 0)] * 3 + [(0, columns - mask.shape[3])])
        return mask.reshape(mask.shape[0], heads if mask.shape[1] > 1 else 1, -1, columns)


@attrs.frozen(eq=False)
class A2ATSTables:
    """What `a2ats_calibrate` finds for one layer, under the names of the options."""

    query_h: mx.array  # float32 [H, D / sub_dim, sub_dim, sub_dim]: second moments of queries
    codebook: mx.array  # float32 [H, D / sub_dim, 2**bits, sub_dim]

    def arrays(self) -> dict[str, mx.array]:
        """The arrays by name: options of `a2ats`, and what a file can hold."""
        return attrs.asdict(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "A2ATSTables":
        """Inverse of `arrays`."""
        return cls(**arrays)


def a2ats_calibrate(keys: Any, queries: Any, *, positions: Any = None, rounds: int = 20, **options: Any) -> A2ATSTables:
    """Codebooks of one layer from sampled `keys` [N, H, D] and `queries` [N, Hq, D], rotated as a cache gets them.

    Of MLX or numpy, as are `positions` int [N] that they are rotated to; None: 0
    to N - 1. Options as in A2ATSOptions; `rounds` of k-means. Rows with NaN or
    infinities are left out. Raises QuantizerConfigError for other shapes and
    where no row is left.
    """
    o, method = A2ATSOptions(**options), "a2ats_calibrate"
    check_int(method, "rounds", rounds, 1)
    came, asked = to_samples(method, "keys", keys), to_samples(method, "queries", queries, "Hq")
    count, heads, dim = came.shape
    check(dim % o.sub_dim == 0, method, "keys", f"must be [N, H, multiple of {o.sub_dim}]", came.shape)
    fits = asked.shape[::2] == (count, dim) and asked.shape[1] % heads == 0
    check(fits, method, "queries", f"must be [{count}, multiple of {heads}, {dim}]", asked.shape)
    positions = mx.arange(count) if positions is None else mx.array(positions)
    check(positions.shape == (count,), method, "positions", f"must be [{count}]", positions.shape)
    bare, far = (mx.array(x.swapaxes(0, 1)[None].astype(np.float32)) for x in (came, asked))
    bare, far = o.rotation(dim).undo(bare, positions), o.rotation(dim).turn(far, o.b - positions)
    moment = query_moment(on_host(far.reshape(heads, -1, dim)), o.sub_dim)
    weight = moment if o.use_query_aware else None
    codebook = fitted_codebook(on_host(bare[0]), weight, o.sub_dim, 2**o.codebook_bits, rounds, o.seed)
    return A2ATSTables(mx.array(moment), mx.array(codebook))


def a2ats(*, store: RowStore | None = None, **options: Any) -> Transform:
    """Retrieve by codes, attend to rows that `store` holds: 8 bits a number when None, `rows()` for exact ones."""
    o = A2ATSOptions(**options)
    store = store or rows(key=int8_codec(), value=int8_codec())
    check(isinstance(store, RowStore), "a2ats", "store", "must hold rows that stand alone", store)
    check(not store.key.keys_only, "a2ats", "store", "must give its keys back as vectors", store.key.name)
    if o.codebook is None:
        warn_uncalibrated("a2ats", "without a codebook one for normal numbers stands in")
    return A2ATS("a2ats", o, store)
