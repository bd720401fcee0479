"""AdaKV: unequal bits for the keys of a layer's heads, the heads that matter more get more (after arXiv 2407.11550).

Differs from the paper, which divides a budget of rows among heads: here bits
are divided, in the same direction. Values are held as they came unless
`value_bits` is set.
"""

from typing import Any, cast

import attrs
import mlx.core as mx

from vq_functional.core.codec import PlainCodec, Rows
from vq_functional.core.errors import check_between, check_choice, check_int
from vq_functional.core.spec import Layout
from vq_functional.core.transform import Transform
from vq_functional.core.warn import warn
from vq_functional.ops.rows import drop_left_padding, extend_rows, write_rows
from vq_functional.ops.vectors import TINY
from vq_functional.quantize.blocks import Blocks, BlockState, Recent
from vq_functional.quantize.groups import ChannelGroupsCodec, TokenGroupsCodec
from vq_functional.quantize.head_importance import row_entropy
from vq_functional.quantize.head_stacks import HeadStacks, HeadStacksCodec
from vq_functional.quantize.sinks import sink_rule

IMPORTANCES = ("norm_variance", "attention_entropy")


@attrs.frozen(kw_only=True)
class AdaKVOptions:
    """Keys of a head get `lo_bit`, `mid_bit` or `hi_bit` bits, `target_avg_bits` on the mean over a layer's heads.

    Heads are ranked by `importance` for every `update_interval` blocks of
    rows, 0: once, by the first block. For "attention_entropy" the `obs_window`
    newest of these rows are asked. `n_sink` first and `residual_length` newest
    rows stay exact (None: `group_size`). `value_bits` a number of the values,
    None: as they came.
    """

    target_avg_bits: float = 2.5
    lo_bit: int = 2
    mid_bit: int = 3
    hi_bit: int = 4
    group_size: int = 32
    update_interval: int = 1
    importance: str = "norm_variance"
    obs_window: int = 32
    residual_length: int | None = None
    value_bits: int | None = None
    n_sink: int = 0

    def __attrs_post_init__(self) -> None:
        check_int("adakv", "lo_bit", self.lo_bit, 1, 8)
        check_int("adakv", "mid_bit", self.mid_bit, self.lo_bit, 8)
        check_int("adakv", "hi_bit", self.hi_bit, self.mid_bit, 8)
        check_between("adakv", "target_avg_bits", self.target_avg_bits, self.lo_bit, self.hi_bit)
        check_int("adakv", "group_size", self.group_size, 1)
        check_int("adakv", "update_interval", self.update_interval, 0)
        check_choice("adakv", "importance", self.importance, IMPORTANCES)
        check_int("adakv", "obs_window", self.obs_window, 1)
        check_int("adakv", "n_sink", self.n_sink, 0)
        check_int("adakv", "residual_length", self.residual_length, 0, optional=True)
        check_int("adakv", "value_bits", self.value_bits, 1, 8, optional=True)


@attrs.frozen
class AdaKVBlocks(Blocks):
    """Blocks whose heads are ranked by the attention of real queries, where these come.

    Remembers of each exact row the entropy [B, H, R] of its attention to the
    rows of its own unit, the mean over query heads; 0 where keys stand in.
    """

    @property
    def observes(self) -> bool:
        return True

    def begin_memory(self, batch: int, layout: Layout) -> mx.array:
        return mx.zeros((batch, layout.kv_heads, self.recent_rows))

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> mx.array:
        known: mx.array = held.recent.memory
        if proxy:
            return known
        before = held.offset - (queries.shape[2] if lengths is None else lengths)
        start = mx.maximum(before, 0) - held.coded
        asking = drop_left_padding(queries, mx.maximum(-before, 0))
        row = mx.arange(known.shape[2])
        new = (row >= start[:, None]) & (row < (held.offset - held.coded)[:, None])
        entropy = self._entropy(held.recent.keys, asking, start)[..., : known.shape[2]]
        return mx.where(new[:, None], mx.maximum(entropy, TINY), known)

    def fit(self, layout: Layout, first: Recent) -> tuple[Rows, Rows]:
        key, value = self.sides(layout)
        return cast(HeadStacks, key.coder).tables_by(first.keys, first.memory), value.coder.tables(first.values)

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows], start: mx.array) -> tuple[Rows, Rows]:
        key, value = self.sides(layout)
        keys = cast(HeadStacks, key.coder).pack(recent.keys, tables[0], recent.memory)
        return keys, value.coder.encode_by(recent.values, tables[1])

    def _entropy(self, keys: mx.array, queries: mx.array, start: mx.array) -> mx.array:
        """Entropy [B, H, R] by the rows of `queries` [B, Hq, S, D], the first of them at `start` int [B]."""
        batch, heads, count, dim = keys.shape
        unit = self.key.unit
        room = -(-count // unit) * unit
        asked = write_rows(mx.zeros((batch, queries.shape[1], room, dim)), queries.astype(mx.float32), start)
        asked = asked.reshape(batch, heads, queries.shape[1] // heads, room // unit, unit, dim)
        units = extend_rows(keys, room).reshape(batch, heads, 1, room // unit, unit, dim)
        entropy = row_entropy(asked, units)
        return (entropy.sum(axis=2) * (1 / entropy.shape[2])).flatten(2)


def adakv(**options: Any) -> Transform:
    """Keys in groups at more bits for heads that matter more, the newest rows exact; keeps every token."""
    o = AdaKVOptions(**options)
    value = PlainCodec() if o.value_bits is None else TokenGroupsCodec(o.value_bits, o.group_size)
    residual = o.group_size if o.residual_length is None else o.residual_length
    sinks = sink_rule(o.n_sink)
    if o.target_avg_bits in (o.lo_bit, o.hi_bit):
        warn(f"adakv: at {o.target_avg_bits} bits on the mean all heads are equal")
        return Blocks("adakv", ChannelGroupsCodec(int(o.target_avg_bits), o.group_size), value, residual, sinks)
    widths = tuple(sorted({o.lo_bit, o.mid_bit, o.hi_bit}))
    key = HeadStacksCodec(o.target_avg_bits, widths, o.group_size, o.update_interval, o.importance, o.obs_window)
    kind = AdaKVBlocks if o.importance == "attention_entropy" else Blocks
    return kind("adakv", key, value, residual, sinks)
