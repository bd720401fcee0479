"""Blocks whose keys are coded by their positions, such as keys that are held as they were before their rotation."""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Coder, Rows
from vq_functional.core.spec import Layout
from vq_functional.quantize.blocks import Blocks, Recent


class PositionedCoder(Coder):
    """A coder that must know where rows stand."""

    def encode_at(self, x: mx.array, tables: Rows, position: mx.array) -> Rows:
        """Rows of `x` [B, H, S, D] that stand at `position` int [B, S]."""
        raise TypeError(f"{type(self).__name__} does not encode by position")


@attrs.frozen
class PositionedBlocks(Blocks):
    """Blocks that tell the coder of the keys where their rows stand."""

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows], start: mx.array) -> tuple[Rows, Rows]:
        key, value = (side.coder for side in self.sides(layout))
        assert isinstance(key, PositionedCoder)
        position = start[:, None] + mx.arange(recent.keys.shape[2], dtype=mx.int32)
        return key.encode_at(recent.keys, tables[0], position), value.encode_by(recent.values, tables[1])
