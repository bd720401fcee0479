"""Codes as bytes without loss: a range coder, by how often each code comes (after arXiv 2310.07240)."""

import struct
import zlib

import numpy as np

from vq_functional.core.errors import QuantizerConfigError
from vq_functional.ops.bit_streams import Ints, from_stream, to_stream
from vq_functional.ops.rans import decode, encode
from vq_functional.quantize.code_models import RUN, Model, choose, context, context_shift, ideal_bits, layout

VERSION = 1
STEPS = 4096  # of the coder, where there are enough codes; of more codes each step takes more
# Version, bits, run, whether coded; heads, tokens, channels of a head; bytes of the tables, lanes, words
HEADER = struct.Struct("<BBB?IIIIII")
CHECKSUM = struct.Struct("<I")


def encode_codes(codes: Ints, bits: int, use_delta: bool = True, per_channel: bool = True) -> bytes:
    """Bytes of `codes` [S, N, D] below 2**bits: N tokens of S heads; at fixed width where nothing takes less.

    `use_delta` allows codes to go by earlier ones, `per_channel` frequencies of single channels.
    """
    heads, count, dim = codes.shape
    flat = codes.swapaxes(0, 1).reshape(count, heads * dim).astype(np.uint8)
    body, sizes = _coded(flat, choose(flat, bits, heads, use_delta, per_channel)) if codes.size else (b"", (0, 0, 0))
    fixed = to_stream(flat.reshape(-1), bits).tobytes()
    coded = len(body) < len(fixed)
    header = HEADER.pack(VERSION, bits, RUN, coded, *codes.shape, *(sizes if coded else (0, 0, 0)))
    data = header + (body if coded else fixed)
    return data + CHECKSUM.pack(zlib.crc32(data))


def decode_codes(data: bytes) -> Ints:
    """The codes uint8 [S, N, D] that `encode_codes` took; raises QuantizerConfigError for other data."""
    try:
        return _decoded(data)
    except (ValueError, IndexError, struct.error, zlib.error) as error:
        raise QuantizerConfigError(f"decode_codes: `data` must be whole; got {error}") from error


def entropy_bits(codes: Ints, bits: int, use_delta: bool = True, per_channel: bool = True) -> float:
    """Bits that an ideal coder needs for `codes` [S, N, D] if it goes about it like `encode_codes`, without tables."""
    heads, count, dim = codes.shape
    flat = codes.swapaxes(0, 1).reshape(count, heads * dim)
    return ideal_bits(flat, bits, heads, use_delta, per_channel) if codes.size else 0.0


def _coded(codes: Ints, model: Model) -> tuple[bytes, tuple[int, int, int]]:
    """Tables, states and words; and how many bytes, lanes and words these are."""
    table, follows = model.tables(len(codes))
    table = np.where(follows, table + context(codes, model.bits), table)
    lanes = min(max(1, codes.size // STEPS), codes.shape[1])
    symbols = model.symbols(codes)
    states, words = encode(symbols.reshape(-1), table.reshape(-1), model.frequency(), lanes)
    tables = zlib.compress(model.way.astype(np.uint8).tobytes() + model.levels.tobytes(), 9)
    body = tables + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
    return body, (len(tables), lanes, len(words))


def _decoded(data: bytes) -> Ints:
    version, bits, run, coded, heads, count, dim, *sizes = HEADER.unpack_from(data)
    body, (checksum,) = data[HEADER.size : -CHECKSUM.size], CHECKSUM.unpack(data[-CHECKSUM.size :])
    if zlib.crc32(data[: -CHECKSUM.size]) != checksum or (version, run) != (VERSION, RUN):
        raise ValueError("a wrong checksum or version")
    if coded:
        codes = _uncoded(body, bits, heads, (count, heads * dim), *sizes)
    else:
        codes = from_stream(np.frombuffer(body, np.uint8), bits, count * heads * dim)
    return codes.reshape(count, heads, dim).swapaxes(0, 1)


def _uncoded(body: bytes, bits: int, heads: int, shape: tuple[int, int], size: int, lanes: int, count: int) -> Ints:
    """Codes uint8 [N, C] of `_coded`."""
    numbers = np.frombuffer(zlib.decompress(body[:size]), np.uint8)
    way, levels = numbers[: shape[1]].astype(int), numbers[shape[1] :]
    _, known = layout(bits, heads, way)
    model = Model(bits, heads, way, levels.reshape(known - 1, 2 ** (bits + 1) - 1))
    table, follows = model.tables(shape[0])
    states = np.frombuffer(body, "<u4", lanes, size).astype(np.uint32)
    words = np.frombuffer(body, "<u2", count, size + 4 * lanes)
    follows = np.broadcast_to(follows, shape).reshape(-1)
    shift = context_shift(bits)
    symbols = decode(states, words, table.reshape(-1), model.frequency(), follows, shape[1], shift)
    return model.codes(symbols.reshape(shape))
