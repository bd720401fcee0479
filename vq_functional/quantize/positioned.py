"""Blocks whose keys are coded by their positions, such as keys that are held as they were before their rotation."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.spec import Layout
from vq_functional.quantize.blocks import Blocks, BlockState, Recent


class PositionedCoder(Coder):
    """A coder that must know where rows stand."""

    def encode_at(self, x: mx.array, tables: Rows, position: mx.array) -> Rows:
        """Rows of `x` [B, H, S, D] that stand at `position` int [B, S]."""
        raise TypeError(f"{type(self).__name__} does not encode by position")


@attrs.frozen
class PositionedBlocks(Blocks):
    """Blocks that remember the positions of the exact rows: int32 [B, 1, R]."""

    def begin_memory(self, batch: int, layout: Layout) -> mx.array:
        return mx.zeros((batch, 1, self.recent_rows), mx.int32)

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> mx.array:
        return held.coded[:, None, None] + mx.arange(held.recent.keys.shape[2], dtype=mx.int32)

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
        key, value = (side.coder for side in self.sides(layout))
        assert isinstance(key, PositionedCoder)
        keys = key.encode_at(recent.keys, tables[0], recent.memory[:, 0])
        return keys, value.encode_by(recent.values, tables[1])
