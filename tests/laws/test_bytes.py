"""Law: `nbytes` is what is resident, byte for byte, and it is less than plain float16."""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from laws.common import METHODS, PAIRS, SMALL, Subject, begin, feed, keys_and_values, over, run_of, tokens
from vq_adapters import TransformKVCache
from vq_functional.core.tree import flatten

TOKENS, HEADS, DIM = 640, 2, 64
PLAIN = TOKENS * HEADS * 2 * DIM * 2
ONE = vq.KVSpec(kv_heads=HEADS, key_dim=DIM, value_dim=DIM, capacity=TOKENS)
OPAQUE = (str, bytes, int, float, complex, type, mx.Dtype, types.ModuleType, types.FunctionType, types.MethodType)


def reachable(root: Any) -> list[Any]:
    """Every array of MLX or numpy that can be reached through attributes, slots and containers."""
    seen, found, waiting = set(), [], [root]
    while waiting:
        item = waiting.pop()
        if item is None or isinstance(item, OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, mx.array | np.ndarray):
            found.append(item)
            continue
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += list(item)
        waiting += list(getattr(item, "__dict__", {}).values())
        for kind in type(item).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            waiting += [getattr(item, name) for name in names if hasattr(item, name)]
    return found


def filled(subject: Subject, pieces: Sequence[int], *, attends: bool = False) -> TransformKVCache:
    """A cache that has seen `pieces` of tokens, its attention done as the hook does it or not at all."""
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(ONE, sum(pieces))
    start = 0
    for n in pieces:
        held = cache.update_and_fetch(keys[:, :, start : start + n], values[:, :, start : start + n])
        if attends:
            held = cache.attend(tokens(n, start, batch=1, heads=4), *held, 0.125, None if n == 1 else "causal")
        mx.eval(held)
        start += n
    return cache


@over(without=["anchors"])
@pytest.mark.parametrize("pieces", [[TOKENS], [600] + [1] * 40], ids=["prompt", "decoded"])
@pytest.mark.parametrize("attends", [False, True], ids=["fetched", "attended"])
def test_nbytes_is_what_can_be_reached(subject: Subject, pieces: list[int], attends: bool) -> None:
    """Between steps nothing but the state is held: no second copy of what it holds as codes."""
    cache = filled(subject, pieces, attends=attends)
    total = cache.nbytes
    arrays = reachable(cache)
    assert isinstance(total, int)
    assert total == sum(array.nbytes for array in arrays) == vq.nbytes(cache._state)
    assert total == sum(array.size * array.dtype.size for array in arrays)
    assert total < PLAIN


@over()
def test_nbytes_of_a_functional_state(subject: Subject) -> None:
    keys, values = keys_and_values(ONE, TOKENS)
    state = feed(subject.transform, begin(subject.transform, ONE), keys, values).state
    assert vq.nbytes(state) == sum(array.nbytes for array in reachable(state))


@over("packs", without=["pages", "anchors"])
def test_no_array_holds_the_keys_unpacked(subject: Subject) -> None:
    """Keys four times as wide as values: what is not codes is no larger than what values take."""
    spec = vq.KVSpec(kv_heads=2, key_dim=128, value_dim=32, capacity=512)
    keys, values = keys_and_values(spec, 512)
    run = feed(subject.transform, begin(subject.transform, spec), keys, values, [480] + [1] * 32)
    room = subject.transform.capacity(run.state) * spec.kv_heads * spec.value_dim
    floats = [leaf for leaf in flatten(run.state)[0] if mx.issubdtype(leaf.dtype, mx.floating)]
    codes = [leaf for leaf in flatten(run.state)[0] if leaf.dtype in (mx.uint8, mx.uint32)]
    assert codes
    assert max(leaf.size for leaf in floats) <= room


# Bytes by the formulas of the methods' descriptions


def words(count: int, bits: int) -> int:
    """Bytes of `count` codes in whole 32-bit words."""
    return 4 * math.ceil(count * bits / 32)


EIGHT_BITS = words(DIM, 8) + 2


def row_bytes(key: int, value: int) -> Callable[[int, int], int]:
    """Rows alone: so much a token and head, and one int32 offset a batch row."""
    return lambda capacity, heads: capacity * heads * (key + value) + 4


def grouped_bytes(capacity: int, heads: int, dim: int = DIM, bits: int = 2, group: int = 32, residual: int = 32) -> int:
    """Codes, a scale and a zero a group: keys along tokens, values along channels; the exact window; two counters."""
    block = math.lcm(group, 32 // math.gcd(32, bits))
    keys = dim * (words(capacity, bits) + 4 * capacity // group)
    values = capacity * (words(dim, bits) + 4 * math.ceil(dim / group))
    window = (residual + block) * 2 * dim * 2
    return heads * (keys + values + window) + 8


def sink_group_bytes(capacity: int, heads: int, sinks: int = 5) -> int:
    """The same with exact rows of some tokens, their positions, signals, and the typical size."""
    return grouped_bytes(capacity, heads) + sinks * (heads * 2 * DIM * 2 + 8) + 4


def tiered_bytes(capacity: int, heads: int, recent: int = 32, mid: int = 32, group: int = 32) -> int:
    """Room at 8 bits, at 4 and at 2, each with a low end and a range a group; the exact group; four counters."""
    rooms = {8: recent, 4: mid, 2: max(capacity - 32, group)}  # `mid_boundary` is 32
    coded = sum(2 * DIM * (words(rows, bits) + 4 * rows // group) for bits, rows in rooms.items())
    return heads * (coded + group * 2 * DIM * 2) + 16


def kitty_bytes(capacity: int, heads: int) -> int:
    """Two planes, scales and zeros, a map; values token by token; sinks and the exact window; two counters."""
    boosted, pages = DIM // 4, capacity // 32
    keys = pages * (words(32, 2) * (DIM + boosted) + 4 * DIM + boosted)
    values = capacity * (words(DIM, 2) + 4)
    return heads * (keys + values + 3 * 32 * 2 * DIM * 2) + 32 * 8 + 4 + 8


def adakv_bytes(capacity: int, heads: int) -> int:
    """Half of the heads at 2 bits, half at 3, and which ones; values and the exact window as they came."""
    keys = capacity // 32 * (DIM * (words(32, 2) + words(32, 3)) // 2 + 4 * DIM + 1)
    return heads * (keys + capacity * 2 * DIM + 2 * 32 * 2 * DIM * 2) + 8


def fitted_bytes(row: int, first: int, sinks: int, tables: int) -> Callable[[int, int], int]:
    """Codes of `row` bytes, `first` exact rows, sinks, what was fitted to the first rows, and two counters."""
    exact = (first + sinks) * 2 * DIM * 2
    return lambda capacity, heads: heads * (capacity * row + exact + tables) + sinks * 8 + 4 + 8


def outlier_bytes(key: int, first: int = 40) -> Callable[[int, int], int]:
    """Rows alone, the room of the first ones as they came, an order of the channels, two counters."""
    return lambda capacity, heads: heads * (capacity * (key + EIGHT_BITS) + first * 4 * DIM + 2 * DIM) + 8


def zipcache_bytes(capacity: int, heads: int, window: int = 64) -> int:
    """Half of the rows at 4 bits, half at 2, and where they are; value channels' sizes; what exact rows remember."""
    half = capacity // 2
    keys = sum(DIM * (words(half, bits) + 4 * half // 32) for bits in (4, 2)) + capacity
    values = sum(half * (words(DIM, bits) + 4) for bits in (4, 2)) + capacity
    return heads * (keys + values + window * (4 * DIM + 8) + 2 * DIM) + 8


def nsnquant_bytes(capacity: int, heads: int, chunk: int = 32) -> int:
    """Indices, signs and two norms a row, a mean a chunk; the open chunk; two counters."""
    side = capacity * (2 * DIM // 8 + 4) + capacity // chunk * 2 * DIM
    return heads * (2 * side + chunk * 4 * DIM) + 8


def gear_bytes(capacity: int, heads: int, rank: int = 2, entries: int = 20, block: int = 32) -> int:
    """Those of kivi, both factors, a place and a number of each outlier, and two errors a block of keys."""
    blocks = capacity // block
    factors = capacity * 2 * rank + blocks * 2 * DIM * rank
    return grouped_bytes(capacity, heads) + heads * (2 * (factors + blocks * 4 * entries) + blocks * 8)


def cachegen_bytes(capacity: int, heads: int, bits: int = 4, group: int = 32, residual: int = 32) -> int:
    """Keys and values in groups along tokens; the exact window; two counters."""
    side = DIM * (capacity * bits // 8 + 4 * capacity // group)
    return heads * (2 * side + (residual + group) * 4 * DIM) + 8


def amc_bytes(capacity: int, heads: int, window: int = 32, residual: int = 32, sinks: int = 4) -> int:
    """Exact rows, 48 channels at 8 bits or at 4, block means; slots; orders; the exact window, with queries; sinks."""
    high, mid = math.ceil(0.2 * window), math.ceil(0.3 * window)
    side = high * 2 * DIM + mid * (48 + 4) + (window - high - mid) * (24 + 4) + 2 * DIM
    exact = (window + residual) * 3 * DIM * 2 + sinks * 2 * DIM * 2
    return heads * (capacity // window * (2 * side + window) + 2 * 2 * DIM + exact) + sinks * 8 + 4 + 8


def reused_bytes(
    capacity: int,
    heads: int,
    layers: int = 2,
    base: int = 2,
    left: int = 4,
    group: int = 32,
    residual: int = 32,
    sinks: int = 4,
) -> int:
    """Codes of the first layer, scales and zeros of all, residuals of the others; the exact window; sinks; counters."""
    first, others, lines = heads // layers, heads - heads // layers, 2 * 4 * DIM // group
    coded = first * 2 * words(DIM, base) + heads * lines + others * (2 * words(DIM, left) + lines)
    exact = (residual + group) * heads * 2 * DIM * 2 + sinks * (heads * 2 * DIM * 2 + 8) + 4
    return capacity * coded + exact + 8


def merged_bytes(
    capacity: int, heads: int, layers: int = 2, block: int = 32, residual: int = 32, sinks: int = 4
) -> int:
    """An 8-bit direction that layers share, their sizes; retained rows, places, a count, means; exact window; sinks."""
    shared, slots = heads // layers, -(-block // 20)
    tokens = capacity * (shared * (words(DIM, 8) + 4 * DIM // 32) + heads * 2)
    blocks = capacity // block * (heads * (slots + 1) * 2 * DIM + shared * (slots + 1))
    exact = (residual + block) * heads * 4 * DIM + sinks * (heads * 4 * DIM + 8) + 4
    return 2 * (tokens + blocks) + exact + 8


FORMULAS = {
    "spectral": row_bytes(words(DIM, 2) + 4 + 3, words(DIM, 2) + 4),
    "kivi": grouped_bytes,
    "turboquant_mse": row_bytes(words(DIM, 2) + 2, EIGHT_BITS),
    "turboquant_rvq": row_bytes(2 * words(DIM, 2) + 2, 2 * DIM),
    "qjl": row_bytes(words(DIM, 1) + 2, EIGHT_BITS),
    "turboquant_prod": row_bytes(2 * words(DIM, 1) + 4, EIGHT_BITS),
    "turboquant_mse-split": outlier_bytes(words(DIM, 2) + 2 + 8 + 2),
    "polar": row_bytes(
        sum(words(DIM >> level, bits) for level, bits in enumerate((4, 2, 2, 2), 1)) + DIM // 8, EIGHT_BITS
    ),
    "kivi_sink": sink_group_bytes,
    "age_tiered": tiered_bytes,
    "kitty": kitty_bytes,
    "adakv": adakv_bytes,
    "skvq": fitted_bytes(2 * (words(DIM, 2) + 8), 64, 5, 4 * DIM),
    "kvquant": fitted_bytes(2 * words(DIM, 3) + 10, 64, 1, 8 * DIM),
    "vecinfer": row_bytes(words(16, 12) + 2, words(8, 8) + 2),
    "a2ats": row_bytes(EIGHT_BITS + 8 + 2, EIGHT_BITS),
    "zipcache": zipcache_bytes,
    "nsnquant": nsnquant_bytes,
    "cachegen": cachegen_bytes,
    "gear": gear_bytes,
    "amc": amc_bytes,
    "svdq": fitted_bytes(21 + 2 * DIM, 64, 4, 2 * DIM * 40 + 4 * DIM),
    "xquant": reused_bytes,
    "palu": fitted_bytes(2 * (words(32, 4) + 4), 64, 4, 4 * DIM * 33),
    "kvtc": fitted_bytes(2 * words(DIM, 8), 48, 4, 2 * (2 * DIM * DIM + 2 * DIM + 9 * DIM)),
    "minicache": merged_bytes,
    "xkv": lambda capacity, heads: capacity * 40 + heads * (68 * 4 * DIM + 4 * DIM * 33) + 8 * 32 + 4 * 8 + 4 + 8,
}


@over("packs", among=METHODS, without=["anchors"])
@pytest.mark.parametrize("n", [64, 512])
def test_bytes_follow_the_formula(subject: Subject, n: int) -> None:
    assert subject.name in FORMULAS, f"{subject.name} packs, and its bytes have no formula here"
    cache = filled(subject, [n])
    capacity = subject.transform.capacity(run_of(cache).state)
    assert capacity <= n
    assert cache.nbytes == FORMULAS[subject.name](capacity, HEADS)


# Per-token bytes of keys and values in a store
STORED = {
    "plain": 4 * DIM,
    "turboquant_mse": 2 * (words(DIM, 3) + 2),
    "turboquant_rvq": 2 * (2 * words(DIM, 2) + 2),
    "qjl": words(DIM, 1) + 2 + EIGHT_BITS,
    "int8": 2 * EIGHT_BITS,
}


@over("evicts", where=lambda subject: "-over-" in subject.name, among=PAIRS)
def test_evicted_bytes_are_gone_and_the_rest_is_packed(subject: Subject) -> None:
    """Rows held, not tokens seen, times bytes a row; positions, memory and offset come on top."""
    cache = filled(subject, [TOKENS])
    run = run_of(cache)
    slots = subject.transform.capacity(run.state)
    row = STORED[subject.name.split("-over-")[1]]
    memory = vq.nbytes(run.state.memory)
    assert vq.nbytes(run.state.rows) == slots * HEADS * row
    carried = vq.nbytes(run.state.carry)
    assert cache.nbytes == slots * HEADS * (row + 4) + memory + carried + 12
    assert memory <= slots * HEADS * 4 * 8


@over("evicts", without=["share"])
def test_bytes_of_a_capped_cache_stay_flat(subject: Subject) -> None:
    """Prompt after prompt, whatever the number of tokens."""
    one, two = filled(subject, [200]), filled(subject, [200, 200])
    kept, budget = subject.transform.policy.kept, SMALL["budget"]
    assert (one.size(), two.size()) == (kept(200, budget, budget), kept(400, budget, budget))
    assert two.nbytes == one.nbytes
