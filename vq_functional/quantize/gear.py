"""GEAR: affine groups, a low-rank part of what they miss, and the numbers farthest off exactly (arXiv 2403.05527).

Differs from the paper: every block has a right factor of its own, so results
don't depend on how a prompt was cut; outliers are the farthest numbers of a
block and not of each vector. A number that is not finite is held as if it
repeated the next one of its channel.
"""

import math
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Codec, Coder, PlainCodec
from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number
from vq_functional.core.transform import Transform
from vq_functional.ops.low_rank import noise_spectrum, start_basis
from vq_functional.ops.packing import alignment
from vq_functional.ops.spectrum import least_rank
from vq_functional.quantize.blocks import Blocks, BlockState
from vq_functional.quantize.gear_blocks import GearBlocks
from vq_functional.quantize.groups import ChannelGroups, TokenGroups
from vq_functional.quantize.sinks import sink_rule

BITS = (1, 2, 3, 4, 5, 6, 8)
STORES = ("value", "diff")
FACTOR_BITS = 1.5  # what the factors of a rank that nobody asked for may take of each number


@attrs.frozen(kw_only=True)
class GEAROptions:
    """Codes of `bits` in groups of `group_size`, corrected in blocks of `block` rows (None: the smallest that fits).

    `rank` of the low-rank part, 0 for none; None: what holds the share
    `energy_threshold` of the singular values of white noise, where that takes
    at most 1.5 bits a number. `sparse_fraction` of the numbers is held exactly,
    as "value" or as "diff" from the other parts (`sparse_store`).
    `quantize_values` False: values as they came. `residual_length` newest rows
    are exact (None: one block), and `n_sink` first ones. `bits_k` and `bits_v`
    override `bits`.
    """

    bits: int = 2
    rank: int | None = None
    energy_threshold: float = 0.9
    sparse_fraction: float = 0.01
    group_size: int = 32
    quantize_values: bool = True
    block: int | None = None
    residual_length: int | None = None
    n_sink: int = 0
    sparse_store: str = "value"
    bits_k: int | None = None
    bits_v: int | None = None

    def __attrs_post_init__(self) -> None:
        check_choice("gear", "bits", self.bits, BITS)
        for field, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            check_choice("gear", field, bits, (None, *BITS))
        check_int("gear", "group_size", self.group_size, 1)
        check_number("gear", "energy_threshold", self.energy_threshold, 0, 1)
        check_between("gear", "sparse_fraction", self.sparse_fraction, 0, below=0.5)
        check_choice("gear", "quantize_values", self.quantize_values, (True, False))
        used = self.quantize_values or self.bits_v is None
        check(used, "gear", "bits_v", "can't be set without `quantize_values`", self.bits_v)
        check_choice("gear", "sparse_store", self.sparse_store, STORES)
        check_int("gear", "n_sink", self.n_sink, 0)
        for field, number in (("rank", self.rank), ("residual_length", self.residual_length)):
            check_int("gear", field, number, 0, optional=True)
        check_int("gear", "block", self.block, 1, optional=True)
        fits = self.block is None or self.block % self.least_block == 0
        check(fits, "gear", "block", f"must be a multiple of {self.least_block}", self.block)

    @property
    def least_block(self) -> int:
        """Whole groups that fill whole words."""
        return math.lcm(self.group_size, *(alignment(bits or self.bits) for bits in (self.bits_k, self.bits_v)))


@attrs.frozen
class GearCodec(Codec):
    """D * bits / 8 + 4 D / group_size + 2 r + 2 D r / block + 4 E / block bytes a row; keys also 8 / block."""

    bits: int
    group_size: int
    unit: int
    rank: int | None
    energy_threshold: float
    sparse_fraction: float
    sparse_store: str
    along: str  # groups along "tokens" or "channels"
    name = "gear"

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.group_size if self.along == "tokens" else 1

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        groups = ChannelGroups if self.along == "tokens" else TokenGroups
        inner = groups(dim, dtype, self.bits, self.group_size)
        rank, entries = self.rank_of(dim), round(self.sparse_fraction * self.unit * dim)
        if not rank and not entries:
            return inner
        return GearBlocks(dim, dtype, inner, self.unit, start_basis(dim, rank), entries, self.sparse_store == "diff")

    def rank_of(self, dim: int) -> int:
        """Rank of a block's low-rank part for head size `dim`."""
        if self.rank is None:
            most = int(FACTOR_BITS * self.unit * dim / (16 * (self.unit + dim)))
            wanted = least_rank(noise_spectrum(self.unit, dim), self.energy_threshold)
            return min(wanted, max(1, min(most, dim // 8)))
        check(self.rank <= dim, "gear", "rank", f"must be at most the head size {dim}", self.rank)
        return min(self.rank, self.unit)


def recovery_ratio(transform: Blocks, state: BlockState) -> float:
    """1 - squared error of all parts / squared error of codes alone, of the keys in blocks; 0.0 without any.

    Reads back.
    """
    key = transform.sides(state.layout)[0]
    if not isinstance(key.coder, GearBlocks):
        return 0.0
    errors = np.array(state.keys.rows[-1], np.float64)
    errors = errors.reshape(*errors.shape[:2], -1, 2)
    packed = np.arange(errors.shape[2]) < np.array(state.coded)[:, None] // key.size
    plain, left = (errors * packed[:, None, :, None]).sum(axis=(0, 1, 2)).tolist()
    return 1 - left / plain if plain > 0 else 0.0


def gear(**options: Any) -> Transform:
    """Keys and values in corrected groups, the newest rows exact; keeps every token."""
    o = GEAROptions(**options)
    block = o.block or o.least_block
    part = (o.rank, float(o.energy_threshold), float(o.sparse_fraction), o.sparse_store)
    key = GearCodec(o.bits_k or o.bits, o.group_size, block, *part, along="tokens")
    value = GearCodec(o.bits_v or o.bits, o.group_size, block, *part, along="channels")
    return Blocks(
        "gear",
        key,
        value if o.quantize_values else PlainCodec(),
        block if o.residual_length is None else o.residual_length,
        sink_rule(o.n_sink),
    )
