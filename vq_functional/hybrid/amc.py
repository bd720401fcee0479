"""AMC: the tokens that matter as they came, the others in fewer channels and fewer bits (arXiv 2607.10109).

Tokens are ranked and packed `threshold_window` at a time. Differs from what is
reported of the paper: magnitude is the distance from the block's mean, which
also fills dropped channels; channels are ordered by the first block unless
a `basis` is given; thresholds are those of the block. The paper's rules are options.
"""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Part, Rows
from vq_functional.core.errors import check
from vq_functional.core.spec import Layout
from vq_functional.core.transform import Transform
from vq_functional.hybrid.amc_codes import channels_by_variance
from vq_functional.hybrid.amc_options import AMCBasis, AMCOptions
from vq_functional.hybrid.amc_saliency import Saliency, slots_by
from vq_functional.hybrid.amc_tiers import Tiers
from vq_functional.ops.rows import drop_left_padding, write_rows
from vq_functional.ops.spectrum import to_samples
from vq_functional.ops.vectors import to_dtype
from vq_functional.quantize.blocks import Blocks, BlockState, Recent
from vq_functional.quantize.sinks import sink_rule


@attrs.frozen
class AMCBlocks(Blocks):
    """Blocks whose rows are ranked when they are packed. With `saliency` by queries it remembers of each exact
    row the mean of the queries that stood there, [B, H, R, D] in the dtype of the keys, zero where none came."""

    saliency: Saliency = Saliency("deviation", None, 0.0, None)

    @property
    def observes(self) -> bool:
        return self.saliency.alpha is not None

    def begin_memory(self, batch: int, layout: Layout) -> Any:
        if not self.observes:
            return ()
        return mx.zeros((batch, layout.kv_heads, self.recent_rows, layout.key_dim), layout.dtype)

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        memory = held.recent.memory
        if not self.observes:
            return memory
        batch, query_heads, n, dim = queries.shape
        heads = memory.shape[1]
        mean = mx.zeros((batch, heads, n, dim), memory.dtype)
        if not proxy:
            grouped = queries.astype(mx.float32).reshape(batch, heads, query_heads // heads, n, dim)
            mean = to_dtype(mx.where(mx.isfinite(grouped), grouped, 0).mean(axis=2), memory.dtype)
        start = held.offset - (n if lengths is None else lengths)
        row = mx.maximum(start, 0) - held.coded
        return write_rows(memory, drop_left_padding(mean, mx.maximum(-start, 0)), row)

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows], start: mx.array) -> tuple[Rows, Rows]:
        key, value = (side.coder for side in self.sides(layout))
        assert isinstance(key, Tiers) and isinstance(value, Tiers)
        high, mid, _ = key.codec.counts
        saliency = self.saliency.of(self._blocks(recent.keys), self._blocks(recent.memory) if self.observes else None)
        slots = slots_by(saliency, high, mid)
        lowered = self.saliency.lowered(saliency, slots, high, mid)
        return (
            key.pack(recent.keys, slots, lowered, tables[0]),
            value.pack(recent.values, slots, lowered, tables[1]),
        )

    def _coded_parts(self, held: BlockState, start: mx.array | None, columns: int | None = None) -> list[Part]:
        """As of any blocks, and the values read the slots that the keys hold."""
        key, value = super()._coded_parts(held, start, columns)
        return [key, attrs.evolve(value, rows=(key.rows[0], *value.rows))]

    def _blocks(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self.block, x.shape[3])


def tier_counts(transform: AMCBlocks, state: BlockState) -> tuple[int, int, int]:
    """Rows in blocks, of all heads and batch rows, that read as the high, the middle and the low tier. Reads back."""
    key = transform.sides(state.layout)[0].coder
    assert isinstance(key, Tiers)
    high, mid, low = key.codec.counts
    blocks = state.coded // transform.block
    total = int(np.array(blocks).sum()) * state.layout.kv_heads
    from_high = from_mid = 0
    if key.codec.lowered:
        counts = state.keys.rows[-1].reshape(*state.keys.rows[-1].shape[:2], -1, 2)
        packed = mx.arange(counts.shape[2]) < blocks[:, None]
        moved = np.array(mx.where(packed[:, None, :, None], counts, 0)).sum(axis=(0, 1, 2))
        from_high, from_mid = int(moved[0]), int(moved[1])
    return total * high - from_high, total * mid + from_high - from_mid, total * low + from_mid


def amc_calibrate(keys: Any, values: Any, *, queries: Any = None, **options: Any) -> AMCBasis:
    """Order of channels of one layer, from neighbouring rows `keys` [N, H, Dk] and `values` [N, H, Dv], MLX or numpy.

    `queries` [N, Hq, Dk] count with `use_query_saliency`. Options as in AMCOptions; without
    them `calib_variance` is that of the defaults. Raises QuantizerConfigError for other shapes
    and where no row is finite.
    """
    o = AMCOptions(**{**options, "adaptive_thresholds": False})
    keys, values = _to_rows("keys", keys), _to_rows("values", values)
    count, heads, dim = keys.shape
    rule = f"must be [{count}, {heads}, Dv]"
    check(values.shape[:2] == (count, heads), "amc_calibrate", "values", rule, values.shape)
    if queries is not None:
        queries = _to_rows("queries", queries)
        fits = queries.shape[::2] == (count, dim) and queries.shape[1] % heads == 0
        check(fits, "amc_calibrate", "queries", f"must be [{count}, a multiple of {heads}, {dim}]", queries.shape)
        queries = _in_blocks(queries.reshape(count, heads, -1, dim).mean(axis=2), o.threshold_window)
    saliency = o.saliency.of(_in_blocks(keys, o.threshold_window), queries)
    variance = float(o.saliency.variance(saliency).mean().item())  # type: ignore[arg-type]
    found = [channels_by_variance(x.swapaxes(0, 1)[None]) for x in (keys, values)]
    (key_order, key_mean), (value_order, value_mean) = ((order[0], mean[0]) for order, mean in found)
    return AMCBasis(
        key_order=key_order,
        value_order=value_order,
        key_mean=key_mean,
        value_mean=value_mean,
        calib_variance=max(variance, 1e-12),
    )


def _to_rows(field: str, x: Any) -> mx.array:
    """Sampled rows float32 [N, H, D]."""
    return mx.array(to_samples("amc_calibrate", field, x).astype(np.float32))


def _in_blocks(x: mx.array, window: int) -> mx.array:
    """Whole blocks [H, N, C, D] of rows `x` [N, H, D]; all rows are one block where they are fewer."""
    window = min(window, x.shape[0])
    blocks = x[: x.shape[0] // window * window].swapaxes(0, 1)
    return blocks.reshape(blocks.shape[0], -1, window, blocks.shape[2])


def amc(**options: Any) -> Transform:
    """Rows in three tiers by saliency, with fewer channels and bits for the lower ones; keeps every token."""
    o = AMCOptions(**options)
    sinks = sink_rule(o.n_sink)
    return AMCBlocks("amc", o.codec(True), o.codec(False), o.residual_length, sinks, saliency=o.saliency)
