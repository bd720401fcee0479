"""States of `kvtc` as bytes, whole and bit for bit: its codes by how often each comes, all else deflated.

Components of one width go through the entropy codec together, each by its own
frequencies or as differences, whatever takes least.
"""

import struct
import zlib
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.errors import QuantizerConfigError, check
from vq_functional.core.transform import Transform
from vq_functional.lowrank.variable_codes import VariableCodes, VariableCodesCodec, pack_fields, unpack_fields
from vq_functional.ops.bit_streams import Ints
from vq_functional.quantize.blocks import Blocks, BlockState
from vq_functional.quantize.code_stream import decode_codes, encode_codes
from vq_functional.quantize.state_stream import decode_state, encode_state

MAGIC, SIZE, CHECKSUM = b"vqkvtc1\n", struct.Struct("<I"), struct.Struct("<I")
SIDES = ("keys", "values")


def kvtc_encode(transform: Transform, state: BlockState) -> bytes:
    """The settled `state` of a transform of `kvtc`; for `kvtc_decode` with an equal transform. Reads back."""
    _check_transform("kvtc_encode", transform)
    check(isinstance(state, BlockState), "kvtc_encode", "state", "must be of rows in blocks", type(state))
    deflated = [encode_state(transform, state)]  # refuses another transform's state
    room: dict[str, mx.array] = {}
    sections: list[bytes] = []
    for side in SIDES:
        words = getattr(state, side).rows[0]
        held = mx.arange(words.shape[3]) < state.coded[:, None, None, None]
        room[side] = mx.where(held, 0, words)
        sections += encoded_codes(transform, state, side)
    sections.insert(0, encode_state(transform, _with_words(state, room)))
    # What repeats goes better deflated with all else.
    best = min(sections, deflated, key=lambda found: sum(map(len, found)))
    data = MAGIC + b"".join(SIZE.pack(len(section)) + section for section in best)
    return data + CHECKSUM.pack(zlib.crc32(data))


def encoded_codes(transform: Transform, state: BlockState, side: str) -> list[bytes]:
    """The codes of "keys" or "values" by how often each comes, without tables and exact rows. Reads back."""
    width = _widths(transform, state, side)
    codes = np.array(unpack_fields(getattr(state, side).rows[0], mx.array(width))).astype(np.uint8)
    return [_encoded(codes[part], bits) for part, bits in _parts(state, width)]


def kvtc_decode(transform: Transform, data: bytes) -> BlockState:
    """The state that `kvtc_encode` took; raises QuantizerConfigError for damaged bytes and another transform's."""
    _check_transform("kvtc_decode", transform)
    check(data[: len(MAGIC)] == MAGIC, "kvtc_decode", "data", "must begin with its mark", data[: len(MAGIC)])
    try:
        return _decoded(transform, _sections(data))
    except QuantizerConfigError:
        raise
    except (ValueError, IndexError, StopIteration, struct.error) as error:
        raise QuantizerConfigError(f"kvtc_decode: `data` must be whole; got {error}") from error


def _decoded(transform: Transform, sections: list[bytes]) -> BlockState:
    state = decode_state(transform, sections[0])
    if len(sections) == 1:
        return state
    left, words = iter(sections[1:]), {}
    for side in SIDES:
        room, width = getattr(state, side).rows[0], _widths(transform, state, side)
        codes = np.zeros((*width.shape, room.shape[3]), np.uint32)
        for part, _ in _parts(state, width):
            codes[part] = decode_codes(next(left))[0].T
        # The room holds zeros where there are codes.
        words[side] = room + pack_fields(mx.array(codes), mx.array(width), room.shape[2])
    check(next(left, None) is None, "kvtc_decode", "data", "must end with the last codes", len(sections))
    return _with_words(state, words)


def _sections(data: bytes) -> list[bytes]:
    end = len(data) - CHECKSUM.size
    if CHECKSUM.unpack_from(data, end) != (zlib.crc32(data[:end]),):
        raise ValueError("a wrong checksum")
    found, start = [], len(MAGIC)
    while start < end:
        (size,) = SIZE.unpack_from(data, start)
        start += SIZE.size + size
        found.append(data[start - size : start])
    return found


def _parts(state: BlockState, width: Ints) -> list[tuple[tuple[Any, ...], int]]:
    """Where codes [B, H, r, T] have one width: of each sequence the components of that many bits and the coded rows."""
    counts = np.array(state.coded).tolist()
    return [
        ((row, *np.nonzero(of == bits), slice(count)), int(bits))
        for row, (of, count) in enumerate(zip(width, counts, strict=True))
        for bits in np.unique(of[of > 0])
    ]


def _encoded(codes: Ints, bits: int) -> bytes:
    """Bytes of codes [C, N] of C components."""
    return encode_codes(codes.T[None], bits)


def _widths(transform: Transform, state: BlockState, side: str) -> Ints:
    """Widths uint8 [B, H, r] of "keys" or "values"."""
    assert isinstance(transform, Blocks)
    coder = dict(zip(SIDES, transform.sides(state.layout), strict=True))[side].coder
    assert isinstance(coder, VariableCodes)
    width = np.array((coder.given or getattr(state, side).tables)[2])
    return np.broadcast_to(width, (state.offset.shape[0], *width.shape[1:]))


def _with_words(state: BlockState, words: dict[str, mx.array]) -> BlockState:
    sides = {side: attrs.evolve(getattr(state, side), rows=(words[side],)) for side in SIDES}
    return attrs.evolve(state, **sides)


def _check_transform(caller: str, transform: Transform) -> None:
    codecs = (transform.key, transform.value) if isinstance(transform, Blocks) else ()
    known = bool(codecs) and all(isinstance(codec, VariableCodesCodec) for codec in codecs)
    check(known, caller, "transform", "must be of `kvtc`", transform)
