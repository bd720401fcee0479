"""xKV: one low-rank factor for the tokens of several layers, and a small one for each layer (arXiv 2503.18893).

Differs from the paper: the axes are those of a sequence's first rows, or given,
and later rows are projected onto them; keys are held as they come, after the
rotation; the first and the newest rows are exact.
"""

from typing import Any

import attrs

from vq_functional.core.errors import check, check_choice, check_int, check_number
from vq_functional.crosslayer.shared_factors import EXACT, SharedFactorsCodec
from vq_functional.crosslayer.stack import Stack, stack_sizes
from vq_functional.crosslayer.xkv_basis import CALIBRATE, XKVBasis
from vq_functional.lowrank.latents import BLOCK
from vq_functional.ops.affine import FUSED_BITS, FUSED_GROUPS
from vq_functional.quantize.sinks import sink_rule

N_FIT = 192
LATENT_BITS = (*FUSED_BITS, EXACT)


@attrs.frozen(kw_only=True)
class XKVOptions:
    """`rank` components for all heads of `group_size` consecutive layers, `rank_v` for their values (None: as many).

    `latent_bits` a component (`bits_k` and `bits_v` override them; 16: as they are), of which
    `group_quant_size` share scale and zero; `rotate` mixes them first. The axes
    are fitted to the first `n_fit` rows without the sinks (None: 192, or twice
    the rank), about their mean if `centred`, or are those of `basis`, from
    `xkv_calibrate`. `rank` None: half of `n_fit`, at most half the features.
    `residual_length` newest rows stay exact (None: what the room for `n_fit`
    rows allows, and 32 with a basis), and `n_sink` first ones; `max_ctx` tokens
    at most. `energy_threshold` is for `xkv_calibrate`.
    """

    group_size: int = 2
    rank: int | None = None
    energy_threshold: float = 0.95
    latent_bits: int = 4
    group_quant_size: int = 32
    max_ctx: int = 8192
    rank_v: int | None = None
    bits_k: int | None = None
    bits_v: int | None = None
    rotate: bool = True
    centred: bool = True
    n_fit: int | None = None
    residual_length: int | None = None
    n_sink: int = 4
    basis: XKVBasis | None = None

    def __attrs_post_init__(self) -> None:
        for field in ("latent_bits", "bits_k", "bits_v"):
            if getattr(self, field) is not None or field == "latent_bits":
                check_choice("xkv", field, getattr(self, field), LATENT_BITS)
        for field, low in (("rank", 1), ("rank_v", 1), ("n_fit", 1), ("residual_length", 0)):
            if getattr(self, field) is not None:
                check_int("xkv", field, getattr(self, field), low)
        check_int("xkv", "group_size", self.group_size, 1)
        check_int("xkv", "max_ctx", self.max_ctx, 1)
        check_number("xkv", "energy_threshold", self.energy_threshold, 0, 1)
        check_choice("xkv", "group_quant_size", self.group_quant_size, FUSED_GROUPS)
        for field in ("rotate", "centred"):
            check_choice("xkv", field, getattr(self, field), (True, False))
        check_int("xkv", "n_sink", self.n_sink, 0, self.fitted - 1)
        known = self.basis is None or isinstance(self.basis, XKVBasis)
        check(known, "xkv", "basis", f"must come from {CALIBRATE}", self.basis)

    @property
    def fitted(self) -> int:
        """First rows that the axes are fitted to."""
        return max(N_FIT, 2 * max(self.rank or 0, self.rank_v or 0)) if self.n_fit is None else self.n_fit

    @property
    def residual(self) -> int:
        """Newest rows that stay exact."""
        if self.residual_length is not None:
            return self.residual_length
        return BLOCK if self.basis else max(self.fitted - BLOCK, 0)

    def stacks(self, layers: int) -> list[int]:
        """Sizes of the groups of a model's `layers`; the last one may be smaller."""
        return stack_sizes(layers, self.group_size)

    def codecs(self, layers: int) -> tuple[SharedFactorsCodec, SharedFactorsCodec]:
        """Codecs of keys and values of a group of `layers`."""
        shared = self.group_quant_size, self.centred, self.rotate, self.fitted, self.n_sink, layers
        given = (self.basis.key, self.basis.value) if self.basis else (None, None)
        key = SharedFactorsCodec(self.rank, self.bits_k or self.latent_bits, *shared, given[0])
        rank_v = self.rank if self.rank_v is None else self.rank_v
        return key, SharedFactorsCodec(rank_v, self.bits_v or self.latent_bits, *shared, given[1])


def xkv(*, layers: int = 1, **options: Any) -> Stack:
    """Coded latents that `layers` layers share, over their stacked heads; first and newest rows exact."""
    o = XKVOptions(**options)
    check_int("xkv", "layers", layers, 1)
    key, value = o.codecs(layers)
    sinks = sink_rule(o.n_sink)
    return Stack("xkv", key, value, residual=o.residual, sinks=sinks, layers=layers, max_ctx=o.max_ctx)
