"""States as bytes, whole and bit for bit: what CacheGen sends, for any transform that packs rows in blocks.

Codes of `cachegen` go through its entropy codec, all other arrays deflated.
No pickle, no code; what a reader would take for another state is refused.
"""

import hashlib
import json
import struct
import zlib
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import describe
from vq_functional.core.errors import QuantizerConfigError, check
from vq_functional.core.spec import FLOATS, KVSpec, Layout
from vq_functional.core.transform import Transform
from vq_functional.core.tree import Structure, flatten, rebuild
from vq_functional.ops.bit_streams import to_stream
from vq_functional.quantize.blocks import Blocks, BlockState
from vq_functional.quantize.cachegen import CacheGenCodec
from vq_functional.quantize.cachegen_estimates import codes_along_tokens
from vq_functional.quantize.code_stream import decode_codes, encode_codes

MAGIC, VERSION = b"vqstate\n", 1
SIZE, CHECKSUM = struct.Struct("<I"), struct.Struct("<I")
DTYPES = {str(dtype).removeprefix("mlx.core."): dtype for dtype in FLOATS}

# What reading bytes that `encode_state` didn't write may raise.
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, zlib.error, OverflowError)


def encode_state(transform: Transform, state: BlockState) -> bytes:
    """The settled `state` of a transform of blocks; for `decode_state` with an equal transform. Reads back."""
    check(isinstance(transform, Blocks), "encode_state", "transform", "must pack rows in blocks", transform)
    assert isinstance(transform, Blocks)
    check(isinstance(state, BlockState), "encode_state", "state", "must be of rows in blocks", type(state))
    leaves, _ = flatten(state)
    shape = {"batch": state.offset.shape[0], "capacity": transform.capacity(state)}
    same = [x.shape for x in leaves] == [x.shape for x in _like(transform, state.layout, shape)[0]]
    check(same, "encode_state", "state", "must be settled, of this transform", [x.shape for x in leaves])
    used = min(int(np.array(state.coded).max(initial=0)), shape["capacity"])
    packed = _packed_codes(transform, state)
    sections = [
        _codes_section(leaf, packed[id(leaf)], used) if id(leaf) in packed else _deflated(leaf) for leaf in leaves
    ]
    layout = attrs.asdict(state.layout) | {"dtype": str(state.layout.dtype).removeprefix("mlx.core.")}
    header = {"transform": _fingerprint(transform), "layout": layout, **shape, "used": used}
    header["sections"] = [len(section) for section in sections]
    text = zlib.compress(json.dumps(header).encode(), 9)
    data = b"".join([MAGIC, SIZE.pack(VERSION), SIZE.pack(len(text)), text, *sections])
    return data + CHECKSUM.pack(zlib.crc32(data))


def decode_state(transform: Transform, data: bytes) -> BlockState:
    """The state that `encode_state` took; raises QuantizerConfigError for damaged bytes and another transform's."""
    try:
        header, sections = _read(data)
        same = header["transform"] == _fingerprint(transform)
        check(same, "decode_state", "transform", "must be the one that was encoded", transform)
        return _restored(transform, header, sections)
    except QuantizerConfigError:
        raise
    except _DAMAGE as error:
        raise QuantizerConfigError(f"decode_state: `data` must be whole; got {error!r}") from error


def _fingerprint(transform: Transform) -> str:
    """Stands for the transform, which may hold large tables: whoever decodes has an equal one."""
    return hashlib.sha256(json.dumps(describe(transform)).encode()).hexdigest()


def _restored(transform: Any, header: dict[str, Any], sections: list[bytes]) -> BlockState:
    layout = Layout(**{**header["layout"], "dtype": DTYPES[header["layout"]["dtype"]]})
    like, structure = _like(transform, layout, header)
    packed = _packed_codes(transform, rebuild(structure, like))
    leaves = [
        _codes(section, want, packed[id(want)], header["used"]) if id(want) in packed else _inflated(section, want)
        for section, want in zip(sections, like, strict=True)
    ]
    state: BlockState = rebuild(structure, leaves)
    return state


def _read(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Header and sections."""
    start = len(MAGIC) + 2 * SIZE.size
    check(data[: len(MAGIC)] == MAGIC, "decode_state", "data", "must begin with its mark", data[: len(MAGIC)])
    version, size = (SIZE.unpack_from(data, len(MAGIC) + i * SIZE.size)[0] for i in range(2))
    check(version == VERSION, "decode_state", "data", f"must be of version {VERSION}", version)
    (checksum,) = CHECKSUM.unpack(data[-CHECKSUM.size :])
    found = zlib.crc32(data[: -CHECKSUM.size])
    check(found == checksum, "decode_state", "data", f"must have the checksum {checksum}", found)
    header = json.loads(zlib.decompress(data[start : start + size]))
    sections, start = [], start + size
    for length in header["sections"]:
        sections.append(data[start : start + length])
        start += length
    return header, sections


def _like(transform: Blocks, layout: Layout, shape: dict[str, Any]) -> tuple[tuple[mx.array, ...], Structure]:
    """Leaves, not evaluated, and structure of an empty state of the same capacity."""
    spec = KVSpec(**attrs.asdict(layout), batch=shape["batch"], capacity=1)
    return flatten(transform.widen(transform.init_state(spec), shape["capacity"]))


def _packed_codes(transform: Blocks, state: BlockState) -> dict[int, CacheGenCodec]:
    """The codec of each array, by identity, that holds codes of `cachegen`."""
    sides = ((state.keys, transform.key), (state.values, transform.value))
    return {id(side.rows[0]): codec for side, codec in sides if isinstance(codec, CacheGenCodec)}


def _deflated(x: mx.array) -> bytes:
    """An array as deflated planes: the first bytes of all numbers, which are much alike, then the second ones."""
    if not x.size:
        return zlib.compress(b"")
    numbers = np.array(x.reshape(-1).view(mx.uint8)).reshape(-1, x.itemsize)
    return zlib.compress(numbers.T.tobytes(), 9)


def _inflated(section: bytes, want: mx.array) -> mx.array:
    """The array of `_deflated`, of the shape and dtype of `want`."""
    data = zlib.decompressobj().decompress(section, want.nbytes + 1)
    if len(data) != want.nbytes:
        raise ValueError(f"{len(data)} bytes for {want.nbytes}")
    if not want.size:
        return want
    numbers = np.frombuffer(data, np.uint8).reshape(want.itemsize, -1).T
    return mx.array(np.ascontiguousarray(numbers).reshape(-1)).view(want.dtype).reshape(want.shape)


def _codes_section(leaf: mx.array, codec: CacheGenCodec, used: int) -> bytes:
    """Words [B, H, D, W]: the first `used` columns by the entropy codec, the room behind them deflated."""
    codes = codes_along_tokens(leaf, codec.width)[:, :, :used]
    batch, heads, count, dim = codes.shape
    codes = codes.reshape(batch * heads, count, dim)
    coded = encode_codes(codes, codec.bits, codec.use_delta, codec.per_channel)
    room = _deflated(leaf[..., used * codec.width // 32 :])
    return SIZE.pack(len(coded)) + coded + room


def _codes(section: bytes, want: mx.array, codec: CacheGenCodec, used: int) -> mx.array:
    (size,) = SIZE.unpack_from(section)
    codes = decode_codes(section[SIZE.size : SIZE.size + size])
    batch, heads, dim, _ = want.shape
    stream = to_stream(codes.reshape(batch, heads, used, dim).swapaxes(-1, -2), codec.width)
    words = mx.array(np.ascontiguousarray(stream).view("<u4").astype(np.uint32))
    room = want[..., words.shape[-1] :]
    return mx.concatenate([words, _inflated(section[SIZE.size + size :], room)], axis=-1)
