"""CacheGen: groups along tokens at fewer bits in deeper layers, with an entropy codec for export (arXiv 2310.07240).

Differs from the paper: what is held has fixed width, since codes of varying
length could only be read one after the other; `encode_state` codes them for
storage and transfer. All tokens are quantized in the same way, and differences
are taken of codes, so that they lose nothing.
"""

import math
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows
from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.transform import Transform
from vq_functional.ops.affine import Groups, quantize
from vq_functional.ops.packing import alignment, pack, unpack
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.groups import ChannelGroups
from vq_functional.quantize.sinks import sink_rule

LEAST, MOST = 2, 8  # bits


@attrs.frozen(kw_only=True)
class CacheGenOptions:
    """`bits` in the first of `layer_groups` bands of layers, one less in each next, never below 2.

    A layer's band follows from `layer` and `layers`, its place and their number;
    `resolved_bits` sets its width outright. `group_size` tokens of a channel
    share scale and zero; `residual_length` newest and `n_sink` first rows are
    exact. `bits_k` and `bits_v` override `bits`. `use_delta` and `per_channel` are about export and
    estimates: differences of codes, and frequencies of single channels.
    """

    bits: int = 4
    group_size: int = 32
    use_delta: bool = True
    per_channel: bool = True
    layer_groups: int = 3
    resolved_bits: int | None = None
    layer: int | None = None
    layers: int | None = None
    residual_length: int = 0
    n_sink: int = 0
    bits_k: int | None = None
    bits_v: int | None = None

    def __attrs_post_init__(self) -> None:
        check_int("cachegen", "bits", self.bits, LEAST, MOST)
        for field in ("resolved_bits", "bits_k", "bits_v"):
            check_int("cachegen", field, getattr(self, field), LEAST, MOST, optional=True)
        check_int("cachegen", "group_size", self.group_size, 1)
        check_choice("cachegen", "use_delta", self.use_delta, (True, False))
        check_choice("cachegen", "per_channel", self.per_channel, (True, False))
        check_int("cachegen", "layer_groups", self.layer_groups, 1)
        check_int("cachegen", "residual_length", self.residual_length, 0)
        check_int("cachegen", "n_sink", self.n_sink, 0)
        check_int("cachegen", "layers", self.layers, 1, optional=True)
        check_int("cachegen", "layer", self.layer, 0, self.layers and self.layers - 1, optional=True)
        placed = (self.layer is None) == (self.layers is None)
        check(placed, "cachegen", "layer", "must be set with `layers` or not at all", (self.layer, self.layers))

    @property
    def layer_bits(self) -> tuple[int, int]:
        """Bits of this layer's keys and values."""
        key, value = (self.resolved_bits or bits or self.bits for bits in (self.bits_k, self.bits_v))
        if self.resolved_bits is not None or self.layer is None or self.layers is None:
            return key, value
        less = layer_band(self.layer, self.layers, self.layer_groups)
        return max(LEAST, key - less), max(LEAST, value - less)


def layer_band(layer: int, layers: int, bands: int) -> int:
    """Which of `bands` the `layer` of so many belongs to, 0 for the first."""
    return max(band for band in range(bands) if round(layers * band / bands) <= layer)


@attrs.frozen
class CacheGenCodec(Codec):
    """D * (width / 8 + 4 / group_size) bytes a row, where `width` is `bits`, and 8 for 7."""

    bits: int
    group_size: int
    use_delta: bool
    per_channel: bool
    name = "cachegen"

    @property
    def width(self) -> int:
        """Bits that a code takes: MLX multiplies with codes of 7 bits only in fields of 8."""
        return 8 if self.bits == 7 else self.bits

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups that fill whole words."""
        return math.lcm(self.group_size, alignment(self.width))

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        kind = ChannelGroups if self.width == self.bits else SevenBitGroups
        return kind(dim, dtype, self.width, self.group_size)


@attrs.frozen
class SevenBitGroups(ChannelGroups):
    """Codes of 7 bits in fields of 8."""

    def encode(self, x: mx.array) -> Rows:
        codes, scales, zeros = quantize(x.swapaxes(-1, -2), 7, self.group, self.dtype)
        return Groups(pack(unpack(codes, 7, x.shape[2]), self.bits), scales, zeros)


def cachegen(**options: Any) -> Transform:
    """Keys and values in groups along tokens, at this layer's width; keeps every token."""
    o = CacheGenOptions(**options)
    key, value = (CacheGenCodec(bits, o.group_size, o.use_delta, o.per_channel) for bits in o.layer_bits)
    return Blocks("cachegen", key, value, o.residual_length, sink_rule(o.n_sink))
