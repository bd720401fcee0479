"""ZipCache: more bits for tokens that later queries look at, fewer for the others (arXiv 2405.14256).

Saliency is the mean attention of the probes that can see a token; where no
real query comes, the norm of its key stands in. Differs from the paper: tokens
are classed and packed `window` at a time, in the prompt too, and in between
they are exact; all query heads of a KV head are added up.
"""

import math
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, PlainCodec, Rows
from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number, check_seed
from vq_functional.core.spec import Layout
from vq_functional.core.transform import Transform
from vq_functional.ops.masks import query_positions
from vq_functional.ops.packing import alignment
from vq_functional.ops.rows import top_mask
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.vectors import norm
from vq_functional.quantize.blocks import Blocks, BlockState, Recent
from vq_functional.quantize.groups import ChannelGroups
from vq_functional.quantize.saliency import Probes, attention_received
from vq_functional.quantize.two_classes import FloatGroups, ScaledChannels, TwoClasses, pack_classes

PROXIES = ("small_keys", "large_keys")
WIDTHS = (2, 3, 4, 5, 6, 8)
TOKEN_GROUPS = (16, 32, 64, 128)
CHANNEL_GROUPS = (128, 64, 32)  # channels of one token that share a scale: the most that divide the head size


@attrs.frozen(kw_only=True)
class ZipCacheOptions:
    """`hi_fraction` of the tokens, in each `window` whole groups, get `hi_bits` bits, the others `lo_bits`.

    Keys: `group_size` tokens of a channel share scale and zero, or with
    `cst_keys` as values: channels are scaled once and a token has a range.
    `hi_bits_v` and `lo_bits_v`: of values, where they differ; values as they
    came without `quantize_values`. `probe_share` of a prompt's queries are
    asked, half of them the newest, half drawn by `seed`. `proxy` tells which
    keys make a token salient where no real query comes.
    """

    hi_bits: int = 4
    lo_bits: int = 2
    hi_fraction: float = 0.2
    group_size: int = 32
    quantize_values: bool = True
    window: int = 128
    cst_keys: bool = False
    hi_bits_v: int | None = None
    lo_bits_v: int | None = None
    probe_share: float = 0.1
    seed: int = 42
    proxy: str = "small_keys"

    def __attrs_post_init__(self) -> None:
        for field in ("hi_bits", "lo_bits"):
            check_choice("zipcache", field, getattr(self, field), WIDTHS)
            own = getattr(self, f"{field}_v")
            check_choice("zipcache", f"{field}_v", own, (None, *WIDTHS))
            used = self.quantize_values or own is None
            check(used, "zipcache", f"{field}_v", "can't be set without `quantize_values`", own)
        check(self.hi_bits >= self.lo_bits, "zipcache", "hi_bits", f"must be at least {self.lo_bits}", self.hi_bits)
        hi, lo = self.value_bits
        check(hi >= lo, "zipcache", "hi_bits_v", f"must be at least {lo}", hi)
        check_between("zipcache", "hi_fraction", self.hi_fraction, 0, 1)
        check_choice("zipcache", "group_size", self.group_size, TOKEN_GROUPS)
        check_choice("zipcache", "quantize_values", self.quantize_values, (True, False))
        check_int("zipcache", "window", self.window, 1)
        rule = f"must be a multiple of {self.step} rows"
        check(self.window % self.step == 0, "zipcache", "window", rule, self.window)
        check_choice("zipcache", "cst_keys", self.cst_keys, (True, False))
        check_number("zipcache", "probe_share", self.probe_share, 0, 1)
        check_seed("zipcache", self.seed)
        check_choice("zipcache", "proxy", self.proxy, PROXIES)

    @property
    def value_bits(self) -> tuple[int, int]:
        """Bits of the two classes of values."""
        return self.hi_bits_v or self.hi_bits, self.lo_bits_v or self.lo_bits

    @property
    def step(self) -> int:
        """Rows of a class come in groups that fill whole words."""
        return math.lcm(self.group_size, alignment(self.hi_bits), alignment(self.lo_bits))

    @property
    def salient(self) -> int:
        """Rows of a window in the class of more bits."""
        wanted = round(self.hi_fraction * self.window / self.step, 9)  # without the rounding error of the fraction
        return math.ceil(wanted) * self.step


@attrs.frozen
class ZipCacheCodec(Codec):
    """Of `window` rows, `salient` at `hi_bits` and the others at `lo_bits`.

    Groups along `group_size` tokens, D * (bits / 8 + 4 / group_size) bytes a
    row; with a group size of 0 along channels, D * bits / 8 + 4 * groups
    bytes, and channels scaled. And a byte for the place of the row in its window.
    """

    hi_bits: int
    lo_bits: int
    salient: int
    window: int
    group_size: int
    name = "zipcache"

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def classes(self) -> int:
        """How many classes have rows."""
        return 1 if self.salient in (0, self.window) else 2

    @property
    def bits(self) -> float:
        """Bits a number in codes, on the mean over the rows."""
        return self.lo_bits + (self.hi_bits - self.lo_bits) * self.salient / self.window

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        channels = next((size for size in CHANNEL_GROUPS if dim % size == 0), CHANNEL_GROUPS[-1])
        kind, group = (ChannelGroups, self.group_size) if self.group_size else (FloatGroups, channels)
        hi, lo = (kind(dim, dtype, bits, group) for bits in (self.hi_bits, self.lo_bits))
        both = TwoClasses(hi, lo, self.window, self.salient) if self.classes == 2 else hi if self.salient else lo
        return both if self.group_size else ScaledChannels(both)


@attrs.frozen
class ZipCacheBlocks(Blocks):
    """Blocks whose rows are classed by saliency when they are packed.

    Remembers of each exact row the attention that probes paid it, and how many
    could see it: float32 [B, H, R] both.
    """

    probes: Probes = Probes(0.1, 0)
    large_keys: bool = False

    @property
    def observes(self) -> bool:
        return True

    def begin_memory(self, batch: int, layout: Layout) -> tuple[mx.array, mx.array]:
        zeros = mx.zeros((batch, layout.kv_heads, self.recent_rows))
        return zeros, zeros

    def remember(self, held: BlockState, queries: mx.array, lengths: mx.array | None, proxy: bool) -> Any:
        mass, count = held.recent.memory
        if proxy:
            return mass, count
        n, end = queries.shape[2], held.offset
        position = query_positions(end - (n if lengths is None else lengths), n)
        position = mx.where(position < end[:, None], position, -1)
        queries, position = self.probes.choose(queries, position, end)
        columns = self.positions(held)
        paid, seen = attention_received(self.parts(held)[0], columns, queries, position)
        exact = columns.shape[2] - mass.shape[2]
        return mass + paid[..., exact:], count + seen[..., exact:]

    def encode(self, layout: Layout, recent: Recent, tables: tuple[Rows, Rows], start: mx.array) -> tuple[Rows, Rows]:
        salient = self._salient(recent)
        keys, values = (
            pack_classes(side.coder, x, salient, table)
            for side, x, table in zip(self.sides(layout), (recent.keys, recent.values), tables, strict=True)
        )
        return keys, values

    def _salient(self, recent: Recent) -> mx.array:
        """Bool [B, H, S / window, window]: the rows that get more bits; of equal ones the first."""
        mass, count = (x.reshape(*x.shape[:2], -1, self.block) for x in recent.memory)
        length = norm(recent.keys).reshape(mass.shape)
        asked = count > 0
        saliency = mx.where(asked, mass / mx.maximum(count, 1), -1)  # who was never seen comes last
        saliency = mx.where(asked.any(axis=-1, keepdims=True), saliency, length if self.large_keys else -length)
        saliency = mx.where(mx.isfinite(saliency), saliency, LOWEST)
        keep = mx.full(mass.shape[:1], self.key.salient)  # type: ignore[attr-defined]
        return top_mask(saliency.flatten(1, 2), keep, latest=False).reshape(mass.shape)


def zipcache(**options: Any) -> Transform:
    """Keys and values in two widths by saliency, the rows of the open window exact; keeps every token."""
    o = ZipCacheOptions(**options)
    key = ZipCacheCodec(o.hi_bits, o.lo_bits, o.salient, o.window, 0 if o.cst_keys else o.group_size)
    value = ZipCacheCodec(*o.value_bits, o.salient, o.window, 0) if o.quantize_values else PlainCodec()
    if key.classes == 1:
        return Blocks("zipcache", key, value)
    probes = Probes(o.probe_share, o.seed)
    return ZipCacheBlocks("zipcache", key, value, probes=probes, large_keys=o.proxy == "large_keys")
