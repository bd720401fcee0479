"""KIVI: keys in groups along tokens, values in groups along channels, the newest rows exact (arXiv 2402.02750).

Differs from the paper: keys and values share one frontier, so the newest
`residual_length` rows are always exact and results don't depend on how a
prompt was cut. A number that is not finite is held as its group's lowest or
highest finite one.
"""

from typing import Any, ClassVar

import attrs

from vq_functional.core.codec import Codec
from vq_functional.core.errors import check_int
from vq_functional.core.transform import Transform
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.groups import ChannelGroupsCodec, TokenGroupsCodec


@attrs.frozen(kw_only=True)
class KIVIOptions:
    """`bits` a number; `group_size` numbers share scale and zero; `residual_length` newest rows stay exact.

    `bits_k` and `bits_v` override `bits` for keys and for values.
    """

    bits: int = 2
    group_size: int = 32
    residual_length: int = 128
    bits_k: int | None = None
    bits_v: int | None = None
    method: ClassVar[str] = "kivi"

    def __attrs_post_init__(self) -> None:
        check_int(self.method, "bits", self.bits, 1, 8)
        check_int(self.method, "group_size", self.group_size, 1)
        check_int(self.method, "residual_length", self.residual_length, 0)
        for field, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            check_int(self.method, field, bits, 1, 8, optional=True)


def kivi_codecs(o: KIVIOptions) -> tuple[Codec, Codec]:
    """Key and value codec."""
    return ChannelGroupsCodec(o.bits_k or o.bits, o.group_size), TokenGroupsCodec(o.bits_v or o.bits, o.group_size)


def kivi(**options: Any) -> Transform:
    """Keys and values in affine groups, the newest rows exact; keeps every token."""
    o = KIVIOptions(**options)
    key, value = kivi_codecs(o)
    return Blocks("kivi", key, value, o.residual_length)
