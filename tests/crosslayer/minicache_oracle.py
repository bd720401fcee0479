"""Inputs, and minicache token by token in numpy."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq
from vq_functional.core.tree import flatten
from vq_functional.crosslayer.minicache import MiniCacheOptions

HEADS, DIM = 2, 8
SMALL: dict[str, Any] = {"block": 8, "residual_length": 5, "n_sink": 2, "retained_share": 0.25}  # two slots
UNIT = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def like(
    layers: int, n: int, spread: float = 0.5, seed: int = 0, heads: int = HEADS, dim: int = DIM, offset: float = 0
) -> np.ndarray:
    """Rows [1, layers * heads, n, dim] around common ones, all layers with another length and offset."""
    x = normal(1, heads, n, dim, seed=seed) + spread * normal(layers, heads, n, dim, seed=seed + 100)
    x = x * np.linspace(0.5, 3, layers)[:, None, None, None] + offset * normal(layers, heads, 1, dim, seed=seed + 200)
    return x.reshape(1, layers * heads, n, dim)


def array(x: np.ndarray, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return numbers(array(x, dtype))


def spec_of(keys: mx.array, values: mx.array, layers: int = 1, capacity: int | None = None) -> vq.KVSpec:
    """Of the stack, or with `layers` of one of so many."""
    batch, heads, n, dim = keys.shape
    sizes = {"batch": batch, "kv_heads": heads // layers, "key_dim": dim, "value_dim": values.shape[3]}
    return vq.KVSpec(**sizes, dtype=keys.dtype, capacity=capacity or n)


def feed(
    method: Any,
    keys: mx.array,
    values: mx.array | None = None,
    cuts: Sequence[int] = (),
    capacity: int | None = None,
    padding: mx.array | None = None,
) -> Any:
    values = keys if values is None else values
    state, start = method.init_state(spec_of(keys, values, capacity=capacity), padding), 0
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        span = slice(start, start + count)
        state, *_ = method.update(state, keys[:, :, span], values[:, :, span])
        start += count
    return state


def by_layer(method: Any, keys: mx.array, values: mx.array, cuts: Sequence[int]) -> tuple[Any, list[Any]]:
    """The group after calls layer by layer, and what the last call of each layer returned."""
    layers, start, out = method.layers, 0, []
    group = method.init_group(spec_of(keys, values, layers))
    for count in [*cuts, keys.shape[2] - sum(cuts)]:
        span = slice(start, start + count)
        start, out = start + count, []
        for m, (k, v) in enumerate(zip(*(mx.split(x[:, :, span], layers, axis=1) for x in (keys, values)))):
            _, group, *read = method.member(m).update_in(None, group, k, v)
            out.append(read)
    return group, out


def columns(method: Any, held: Any, row: int = 0) -> list[int]:
    """Where the tokens of a batch row stand among what is read, in order."""
    position = np.array(method.positions(held))[row, 0]
    return [np.flatnonzero(position == i)[0] for i in range(held.offset[row].item())]


def rows_in_order(method: Any, state: Any, row: int = 0) -> list[np.ndarray]:
    """Keys and values [M * H, S, D] of all tokens."""
    return [numbers(x)[row][:, columns(method, state, row)] for x in method.read(state)]


def same(one: Any, two: Any) -> bool:
    pairs = zip(flatten(one)[0], flatten(two)[0], strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b, equal_nan=True) for a, b in pairs)


class Held:
    """The arrays of one side of a batch row by name, those of all layers as [M, H, ...], without unused room."""

    def __init__(self, rows: Any, o: MiniCacheOptions, bits: int | None, layers: int, count: int, row: int = 0):
        directions, rest = rows[: 3 if bits else 1], list(rows[3 if bits else 1 :])
        blocks, room = count // o.block, directions[0].shape[2] // o.block

        def cut(x: mx.array, own: bool) -> np.ndarray:
            y = np.array(x if x.dtype != mx.bfloat16 else x.astype(mx.float32))[row]
            y = y[:, : y.shape[1] // room * blocks]
            return y.reshape(layers, -1, *y.shape[1:]) if own else y

        self.direction = [cut(x, own=False) for x in directions]
        self.sizes = cut(rest.pop(0), own=True)[..., 0].astype(np.float64)
        self.centers = cut(rest.pop(0), own=True).astype(np.float64) if o.center else None
        if slots_of(o):
            retained, places, unlike = rest
            assert (places.dtype, unlike.dtype) == (mx.uint8, mx.uint8)
            kept = cut(retained, own=True)
            self.retained = kept.reshape(*kept.shape[:2], blocks, slots_of(o), -1).astype(np.float64)
            self.places = cut(places, own=False).reshape(-1, blocks, slots_of(o)).astype(int)
            self.unlike = cut(unlike, own=False).astype(int)
        else:
            assert not rest


def held_of(state: Any, o: MiniCacheOptions, layers: int, side: str = "keys", row: int = 0) -> Held:
    bits = bits_of(o, side)
    return Held(getattr(state, side).rows, o, bits, layers, state.coded[row].item(), row)


def bits_of(o: MiniCacheOptions, side: str) -> int | None:
    own = o.bits_k if side == "keys" else o.bits_v
    return o.direction_bits if own is None else own


def slots_of(o: MiniCacheOptions) -> int:
    return math.ceil(Fraction(str(o.retained_share)) * o.block)


def frontier(o: MiniCacheOptions, n: int) -> int:
    return max(0, n - o.residual_length) // o.block * o.block


# The oracle, for one block of one head: rows [M, R, D]


def slerp(a: np.ndarray, b: np.ndarray, s: float) -> tuple[np.ndarray, float]:
    """A unit vector on the arc, and how far single precision may be from it."""
    if not (a.any() and b.any()):
        return (a if a.any() else b), 1e-6
    cosine = np.clip(a @ b, -1, 1)
    angle = math.acos(cosine)
    flat = math.sin(angle) < 1e-6
    p, q = (1 - s, s) if flat else (math.sin((1 - s) * angle), math.sin(s * angle))
    between = p * a + q * b
    length = np.linalg.norm(between)
    if length <= 1e-6:
        return a, 1e-6
    doubt = 1e-6 * (p + q) / length
    return between / length, doubt if flat or cosine > 0 else doubt + 1e-6 / math.sin(angle) ** 2


def shared(rows: np.ndarray, t: float) -> tuple[np.ndarray, float, float]:
    """Direction of a token's `rows` [M, D], how alike they are, and the doubt of both."""
    lengths = np.linalg.norm(rows, axis=-1)
    units = [x / size if size > 0 else x for x, size in zip(rows, lengths)]
    e, doubt = units[0], 1e-6
    for j, unit in enumerate(units[1:], 2):
        e, more = slerp(e, unit, min(1, 2 * t / j))
        doubt += more
    if len(rows) == 2:
        return e, units[0] @ units[1] if lengths.all() else 1.0, doubt
    return e, min([unit @ e for unit in units if unit.any()], default=1.0), doubt


def drawn(block: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """`block` [R, D] of one layer with its sinks inside the range of the others, channel by channel."""
    out = block.copy()
    for channel, x in enumerate(block.T):
        others = x[~sink & np.isfinite(x)]
        if len(others):
            out[sink, channel] = np.clip(x[sink], others.min(), others.max())
    return out


def mean_row(block: np.ndarray) -> np.ndarray:
    """Mean [D] of the finite numbers of each channel; zero where there is none."""
    return np.array([x[np.isfinite(x)].mean() if np.isfinite(x).any() else 0 for x in block.T])


def check_direction(held: Sequence[np.ndarray], e: np.ndarray, doubt: float, bits: int | None, dtype: mx.Dtype) -> Any:
    """What a token's direction `e` [D] is read as; `held` what the state has of it."""
    if bits is None:
        assert (np.abs(held[0] - e) <= doubt + UNIT[dtype] * np.abs(e) + 2.0**-24).all()
        return held[0].astype(np.float64)
    stream = np.unpackbits(held[0].view(np.uint8), bitorder="little").reshape(-1, bits)
    codes, out = stream @ 2.0 ** np.arange(bits), []
    assert len(codes) == -(-len(e) // 32) * 32 and len(held[1]) == len(held[2]) == len(codes) // 32
    for i, (scale, zero) in enumerate(zip(*(x.astype(np.float64) for x in held[1:]))):
        x = rounded(e, dtype)[32 * i : 32 * i + 32]
        off = doubt + UNIT[dtype] * np.abs(x).max()
        step = (x.max() - x.min()) / (2**bits - 1)
        assert abs(zero - x.min()) <= off
        assert abs(scale - step) <= 2 * off / (2**bits - 1) + UNIT[dtype] * step + 2.0**-24
        code = codes[32 * i : 32 * i + len(x)]
        if scale > 0:
            nearest = np.clip((x - zero) / scale, 0, 2**bits - 1)
            assert (np.abs(code - nearest) <= 0.501 + off / scale).all()
        out.append(code * scale + zero)
    return rounded(np.concatenate(out), dtype)


def check_choice(
    alike: np.ndarray, doubt: np.ndarray, places: list[int], unlike: int, o: MiniCacheOptions, slots: int
) -> None:
    """The slots hold the most unlike of the tokens that should not be merged, and all of these are counted."""
    low, high = np.clip(alike - doubt, -1, 1), np.clip(alike + doubt, -1, 1)
    if o.retention == "cosine":
        surely, perhaps = high < o.retention_threshold, low < o.retention_threshold
    else:
        near, far = np.arccos(high) / math.pi, np.arccos(low) / math.pi
        surely = near > 0.95 * far.max() + 0.05 * far.min()
        perhaps = far > 0.95 * near.max() + 0.05 * near.min()
    assert surely.sum() <= unlike <= perhaps.sum()
    count = min(slots, unlike)
    kept, empty = places[:count], places[count:]
    assert empty == [o.block] * (slots - count) and len(set(kept)) == count
    assert all(perhaps[kept])
    assert all(low[a] <= high[b] for a, b in itertools.pairwise(kept))
    others = [i for i in range(o.block) if i not in kept and surely[i]]
    assert all(low[a] <= high[b] for a in kept for b in others)
    assert count == slots or not others


def check_block(
    x: np.ndarray, sink: np.ndarray, held: Held, at: tuple[int, int], o: MiniCacheOptions, bits: Any, dtype: mx.Dtype
) -> np.ndarray:
    """Rows [M, R, D] as read, of those that came, `x`; `at` tells head and block."""
    head, n = at
    span, slots = slice(n * o.block, n * o.block + o.block), slots_of(o)
    reach = np.abs(x[np.isfinite(x)]).max(initial=0)
    small = 2.0**-24 if dtype == mx.float16 else 0
    if held.centers is None:
        centers = np.zeros((len(x), 1, x.shape[2]))
    else:
        x = np.array([drawn(block, sink) for block in x])
        centers = held.centers[:, head, n, None]
        want = np.array([mean_row(block) for block in x])
        assert (np.abs(centers[:, 0] - want) <= UNIT[dtype] * np.abs(want) + 2e-6 * reach + small).all()
    clean = np.where(np.isfinite(x), x, centers)
    apart = clean - centers
    found = [shared(apart[:, i], o.slerp_t) for i in range(o.block)]
    alike, doubt = (np.array([token[i] for token in found]) for i in (1, 2))
    kept: list[int] = []
    if slots:
        places = held.places[head, n].tolist()
        check_choice(alike, doubt, places, held.unlike[head, n], o, slots)
        kept = [i for i in places if i < o.block]
        want = np.zeros((len(x), slots, x.shape[2]))
        want[:, : len(kept)] = clean[:, kept]
        assert np.array_equal(held.retained[:, head, n], want)
    read = np.zeros(x.shape)
    for i in range(o.block):
        direction = check_direction([y[head, span][i] for y in held.direction], found[i][0], doubt[i], bits, dtype)
        length = max(np.linalg.norm(direction), 1e-30)
        for m in range(len(x)):
            size, unit = held.sizes[m, head, span][i], 2 * math.sqrt(x.shape[2])
            want = np.linalg.norm(apart[m, i]) / length / unit
            assert (size == 0) if i in kept else abs(size - want) <= (UNIT[dtype] + 4e-6) * want + 1e-7 * reach + small
            read[m, i] = clean[m, i] if i in kept else size * unit * direction + centers[m, 0]
    return read


def check_state(
    method: Any, state: Any, keys: mx.array, values: mx.array, o: MiniCacheOptions, layers: int, row: int = 0
) -> None:
    """Everything that is held and read of a batch row."""
    n, dtype = keys.shape[2], keys.dtype
    coded = frontier(o, n)
    assert (state.coded[row].item(), state.offset[row].item()) == (coded, n)
    sink = np.arange(coded) < o.n_sink
    for side, x, read in zip(("keys", "values"), (keys, values), rows_in_order(method, state, row)):
        x = numbers(x)[row]
        np.testing.assert_array_equal(read[:, coded:], x[:, coded:])
        np.testing.assert_array_equal(read[:, :coded][:, sink], x[:, :coded][:, sink])
        if o.merge not in ("both", side):
            np.testing.assert_array_equal(read, x)
            assert len(getattr(state, side).rows) == 1
            continue
        if coded == 0:
            continue
        held = held_of(state, o, layers, side, row)
        heads = len(x) // layers
        old = x[:, :coded].reshape(layers, heads, coded, x.shape[2])
        want = np.zeros(old.shape)
        for head, i in itertools.product(range(heads), range(coded // o.block)):
            span = slice(i * o.block, i * o.block + o.block)
            part = old[:, head, span]
            want[:, head, span] = check_block(part, sink[span], held, (head, i), o, bits_of(o, side), dtype)
        reach = np.abs(x[np.isfinite(x)]).max(initial=0)
        got = read[:, :coded].reshape(old.shape)[:, :, ~sink]
        np.testing.assert_allclose(got, want[:, :, ~sink], rtol=UNIT[dtype], atol=2e-6 * reach + 2.0**-24)


def check(keys: np.ndarray, values: np.ndarray, layers: int, dtype: mx.Dtype = mx.float16, **options: Any) -> None:
    cuts, options = options.pop("cuts", ()), SMALL | options
    method, k, v = vq.minicache(layers=layers, **options), array(keys, dtype), array(values, dtype)
    state = feed(method, k, v, cuts)
    for row in range(len(keys)):
        check_state(method, state, k, v, MiniCacheOptions(**options), layers, row)
