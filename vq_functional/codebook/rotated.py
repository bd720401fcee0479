"""A random rotation before any per-token codec: what is large in few channels spreads over all of them.

Codes of a rotated row serve products as they are, since a rotation keeps
them: queries are rotated once and sums are turned back once, never the rows.
"""

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows, bind
from vq_functional.core.errors import check, check_seed
from vq_functional.ops.rotations import Rotation, random_rotation
from vq_functional.ops.vectors import to_dtype


@attrs.frozen
class RotatedCodec(Codec):
    """As many bytes a row as `codec` takes; for what `codec` is for."""

    codec: Codec
    seed: int

    def __attrs_post_init__(self) -> None:
        alone = isinstance(self.codec, Codec) and self.codec.unit == 1 and self.codec.warmup == 0
        check(alone, "rotated", "codec", "must be a codec whose rows stand alone", self.codec)
        check_seed("rotated", self.seed)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"rotated {self.codec.name}"

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.codec.keys_only

    @property
    def values_only(self) -> bool:  # type: ignore[override]
        return self.codec.values_only

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return RotatedRows(dim, dtype, bind(self.codec, dim, dtype), random_rotation(dim, self.seed))


@attrs.frozen(eq=False)
class RotatedRows(Coder):
    """Rows of `coder`, which codes P x."""

    dim: int
    dtype: mx.Dtype
    coder: Coder
    rotation: Rotation

    def encode(self, x: mx.array) -> Rows:
        # A coordinate of P x can exceed the dtype that x fits in, and with it what codecs store in that dtype.
        limit = mx.finfo(self.dtype).max
        return self.coder.encode(mx.clip(self.rotation.apply(x.astype(mx.float32)), -limit, limit))

    def decode(self, rows: Rows) -> mx.array:
        return to_dtype(self.rotation.undo(self.coder.decode(rows).astype(mx.float32)), self.dtype)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self.coder.dot(self.rotation.apply(queries), rows)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return self.rotation.undo(self.coder.mix(weights, rows))


def rotated(codec: Codec, seed: int = 42) -> RotatedCodec:
    """`codec` for rows that are rotated at random first, by `seed`; keys or values, as `codec` takes them."""
    return RotatedCodec(codec, seed)
