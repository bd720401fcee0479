"""The layout of `ops.packing` on the host: codes as a bit stream, least significant bit first."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[Any]


def to_stream(codes: Ints, bits: int) -> Ints:
    """Bytes uint8 [..., ceil(N * bits / 8)] of `codes` [..., N] below 2**bits, at most 8 bits."""
    bit = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(bit.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little")


def from_stream(stream: Ints, bits: int, count: int) -> Ints:
    """Codes uint8 [..., count] of bytes uint8 [..., at least ceil(count * bits / 8)]."""
    bit = np.unpackbits(stream, axis=-1, count=count * bits, bitorder="little")
    places = 1 << np.arange(bits, dtype=np.uint8)
    return (bit.reshape(*stream.shape[:-1], count, bits) * places).sum(axis=-1, dtype=np.uint8)
