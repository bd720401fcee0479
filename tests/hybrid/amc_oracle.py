"""AMC in numpy, one head and one block at a time; and how the tests of it are fed."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq
from vq_functional.core.tree import flatten
from vq_functional.hybrid.amc import tier_counts
from vq_functional.hybrid.amc_options import AMCOptions

HEADS, QUERY_HEADS, DIM = 2, 4, 16
SMALL: dict[str, Any] = {"threshold_window": 16, "n_sink": 0, "group_size": 4}  # 4, 5 and 7 rows of a block
ALL_LOW: dict[str, Any] = {"k_high": 0.0, "k_mid": 0.0}
ALL_MID: dict[str, Any] = {"k_high": 0.0, "k_mid": 1.0}
WHOLE: dict[str, Any] = {"rank_mid": 1000, "rank_low": 1000}
STEP = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-20}


def draw(n: int, seed: int = 0, dim: int = DIM, heads: int = HEADS, batch: int = 1, dtype: Any = mx.float16) -> Any:
    """Normal rows about a mean of each channel; channels and rows differ in size."""
    random = np.random.RandomState(seed)
    x = random.standard_normal((batch, heads, n, dim)) * np.exp(random.standard_normal((dim,)))
    x = x * np.exp(0.5 * random.standard_normal((batch, heads, n, 1))) + random.standard_normal((heads, 1, dim))
    return mx.array((0.3 * x).astype(np.float32)).astype(dtype)


def inputs(n: int, seed: int = 0, **more: Any) -> tuple[Any, Any, Any]:
    """Keys, values and queries."""
    return draw(n, 3 * seed, **more), draw(n, 3 * seed + 1, **more), draw(n, 3 * seed + 2, **more, heads=QUERY_HEADS)


def skewed(n: int, share: float, seed: int = 0, dim: int = 64) -> mx.array:
    """Channels of sizes exp(-j / 4), and a `share` of the rows ten times as large."""
    random = np.random.RandomState(seed)
    x = random.standard_normal((1, 1, n, dim)) * np.exp(-np.arange(dim) / 4)
    return mx.array((x * np.where(random.rand(n, 1) < share, 10, 1)).astype(np.float16))


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def begin(transform: Any, keys: mx.array, values: mx.array, padding: Any = None, capacity: int | None = None) -> Any:
    dims: dict[str, Any] = {"key_dim": keys.shape[3], "value_dim": values.shape[3], "dtype": keys.dtype}
    spec = vq.KVSpec(batch=keys.shape[0], kv_heads=keys.shape[1], capacity=capacity or keys.shape[2], **dims)
    return transform.init_state(spec, padding)


def feed(
    transform: Any, keys: Any, values: Any, queries: Any = None, calls: Sequence[Any] = (), padding: Any = None
) -> Any:
    """State after calls of (tokens, whether queries come); a bare number of tokens: as `queries` tells."""
    state, start = begin(transform, keys, values, padding), 0
    for entry in calls or [keys.shape[2]]:
        count, asks = entry if isinstance(entry, tuple) else (entry, queries is not None)
        span = slice(start, start + count)
        state, *_ = transform.update(state, keys[:, :, span], values[:, :, span], queries[:, :, span] if asks else None)
        start += count
    return state


def rows_of(transform: Any, state: Any, row: int = 0) -> list[np.ndarray]:
    """Keys and values [H, n, D] of all tokens held, in token order."""
    position = np.array(transform.positions(state))[row, 0]
    columns = [np.flatnonzero(position == i)[0] for i in range(state.offset[row].item())]
    return [numbers(x)[row][:, columns] for x in transform.read(state)]


def read(keys: Any, values: Any = None, **options: Any) -> list[np.ndarray]:
    """Keys and values of one row as they read after one call."""
    transform = vq.amc(**options)
    return rows_of(transform, feed(transform, keys, keys if values is None else values))


def assert_same(one: Any, two: Any) -> None:
    """Equal in every bit."""
    for got, want in zip(flatten(one)[0], flatten(two)[0], strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[got.itemsize]
        assert mx.array_equal(got.view(kind), want.view(kind))


# The oracle: one head, one block of C rows


def sizes(o: AMCOptions) -> tuple[int, int, int]:
    high, mid = (math.ceil(Fraction(str(share)) * o.threshold_window) for share in (o.k_high, o.k_mid))
    mid = min(mid, o.threshold_window - high)
    return high, mid, o.threshold_window - high - mid


def ranks(o: AMCOptions, dim: int) -> tuple[int, int]:
    mid, low = round(Fraction(43 * dim, 128)), 2 * round(Fraction(4 * dim, 128))
    wanted = max(mid, 1) if o.rank_mid is None else o.rank_mid, max(low, 2) if o.rank_low is None else o.rank_low
    return min(wanted[0], dim), min(wanted[1], dim)


def drawn(x: np.ndarray, start: int, o: AMCOptions) -> np.ndarray:
    """Rows from position `start` on with the sinks in the range of the others."""
    x, count = x.copy(), max(0, min(o.n_sink - start, len(x)))
    if 0 < count < len(x):
        x[:count] = np.clip(x[:count], x[count:].min(axis=0), x[count:].max(axis=0))
    return x


def saliency(keys: np.ndarray, queries: np.ndarray | None, o: AMCOptions) -> np.ndarray:
    """Saliency [C] of `keys` [C, D]; `queries` [n, D] are those that came."""
    if o.normalize == "none":
        m = np.array([min(np.mean(np.abs(k)), 1) for k in keys])
    elif o.normalize == "size":
        m = np.array([np.mean(np.abs(k)) for k in keys])
        m = m / m.max()
    else:
        m = np.array([math.dist(k, keys.mean(axis=0)) for k in keys])
        m = m / m.max()
    if not o.use_query_saliency:
        return m
    q = (keys if queries is None or not len(queries) else queries).mean(axis=0)
    cosine = np.array([k @ q / (np.linalg.norm(k) * np.linalg.norm(q)) for k in keys])
    return o.query_alpha * m + (1 - o.query_alpha) * cosine


def order_by(s: np.ndarray, o: AMCOptions) -> list[int]:
    """The row of each slot; the first of equal rows is the more salient."""
    high, mid, _ = sizes(o)
    best = sorted(range(len(s)), key=lambda t: (-s[t], t))
    return sorted(best[:high]) + sorted(best[high : high + mid]) + sorted(best[high + mid :])


def clear(s: np.ndarray, o: AMCOptions) -> bool:
    """Whether rounding can't move a row to another tier."""
    ordered, (high, mid, _) = np.sort(s)[::-1], sizes(o)
    return all(ordered[at - 1] - ordered[at] > 1e-5 for at in (high, high + mid) if 0 < at < len(s))


def factor(s: np.ndarray, o: AMCOptions) -> float:
    variance = o.calib_variance or (o.basis.calib_variance if o.basis else None)
    return min(max(1 - o.gamma * math.log(np.var(s) / variance), 0.1), 10)


def lowered(s: np.ndarray, slots: list[int], o: AMCOptions) -> np.ndarray:
    """Bool [C] by slot."""
    out, (high, mid, _) = np.zeros(len(s), bool), sizes(o)
    for tier in ((0, high), (high, high + mid)) if o.adaptive_thresholds else ():
        members = [s[slots[i]] for i in range(*tier)]
        for i, own in zip(range(*tier), members):
            out[i] = own < min(members) + abs(min(members)) * (factor(s, o) - 1)
    return out


def rounded(y: np.ndarray, bits: int, group: int, dtype: Any = mx.float16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, halves of S as held, and numbers of the kept channels `y` [r]."""
    half, codes, scales, out = 2 ** (bits - 1), [], [], []
    for start in range(0, len(y), group):
        part = y[start : start + group]
        scale = numbers(mx.array(np.float32(np.abs(part).max() / 2)).astype(dtype))
        code = np.clip(np.round(part / (2 * scale) * half), -half, half - 1) if scale else 0 * part
        codes, scales, out = [*codes, *code], [*scales, scale], [*out, *(code * 2 * scale / half)]
    return np.array(codes), np.array(scales), np.array(out)


def tier_reads(x: np.ndarray, tier: int, fill: np.ndarray, o: AMCOptions, dtype: Any) -> np.ndarray:
    """A row [D] with channels by rank as a tier rounds it."""
    rank, bits = ranks(o, len(x))[tier], (8, 4)[tier]
    out = fill.copy()
    about = fill[:rank] if o.fill == "block" else 0
    out[:rank] = about + rounded(x[:rank] - about, bits, o.group_size, dtype)[2]
    return out


class Held:
    """What a state holds of one side, head and block."""

    def __init__(self, o: AMCOptions, side: Any, keys: bool, row: int, head: int, block: int, dim: int) -> None:
        rest, (high, mid, low) = [x[row, head] for x in side.rows], sizes(o)

        def take(count: int) -> mx.array:
            return rest.pop(0)[block * count : (block + 1) * count]

        self.slots = np.array(take(o.threshold_window)) if keys else None
        self.exact = take(high) if high else None
        self.codes: list[tuple[np.ndarray, np.ndarray] | None] = [None, None]
        for tier, count in enumerate((mid, low)):
            if count:
                codes, scales = np.array(take(count)).astype(int), numbers(take(count))
                if tier:
                    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(count, -1)[:, : ranks(o, dim)[1]]
                self.codes[tier] = codes - (8 if tier else 128), scales
        self.means = numbers(take(1))[0] if o.fill == "block" and mid + low else None
        self.counts = np.array(take(2)) if keys and o.adaptive_thresholds else None
        assert not rest
        tables = [x[row] for x in side.tables]
        if o.basis is not None:
            assert not tables
            tables = [getattr(o.basis, f"{'key' if keys else 'value'}_{name}").array for name in ("order", "mean")]
        self.order = np.array(tables[0])[head].astype(int)
        if o.fill == "mean":
            self.means = numbers(tables[1])[head]


def check_side(o: AMCOptions, held: Held, x: np.ndarray, slots: list[int], below: np.ndarray, read: Any, dtype: Any):
    """One side of a block: what is held of `x` [C, D], and how it reads, [C, D]."""
    high, mid, _ = sizes(o)
    step, ranked = STEP[dtype], x[:, held.order]
    fill = np.zeros(x.shape[1]) if held.means is None else held.means
    if o.fill == "block" and high < len(x):
        mean = ranked[slots[high:]].mean(axis=0)
        np.testing.assert_allclose(fill, mean, rtol=step, atol=1e-6)
    for slot, t in enumerate(slots):
        if slot < high:
            want = x[t]
            if below[slot]:
                want = np.zeros(len(x[t]))
                want[held.order] = tier_reads(ranked[t], 0, fill, o, dtype)
                np.testing.assert_allclose(numbers(held.exact)[slot], want, rtol=step, atol=1e-6)
            else:
                assert np.array_equal(numbers(held.exact)[slot], want)
            assert np.isnan(read[t]).all() or np.array_equal(read[t], numbers(held.exact)[slot])
            continue
        tier, first = (0, high) if slot < high + mid else (1, high + mid)
        source = tier_reads(ranked[t], 1, fill, o, dtype) if below[slot] else ranked[t]
        rank, bits = ranks(o, x.shape[1])[tier], (8, 4)[tier]
        about = fill[:rank] if o.fill == "block" else np.zeros(rank)
        codes, scales = (array[slot - first] for array in held.codes[tier])
        want_scales = rounded(source[:rank] - about, bits, o.group_size, dtype)[1]
        np.testing.assert_allclose(scales, want_scales, rtol=step, atol=1e-7)
        wide, half = scales.repeat(min(o.group_size, rank))[:rank] * 2, 2 ** (bits - 1)
        share = (source[:rank] - about) / np.where(wide > 0, wide, 1) * half
        assert (np.abs(codes - np.clip(share, -half, half - 1)) <= 0.5 + 4e-3).all()
        want = fill.copy()
        want[:rank] = about + codes * wide / half
        if not np.isnan(read[t]).all():
            np.testing.assert_allclose(read[t][held.order], want, rtol=step, atol=1e-6)


def check_order(x: np.ndarray, held: Held, fill: str, dtype: Any) -> None:
    """Channels of the first block `x` [C, D] by falling variance, and their means."""
    variance = x.var(axis=0)[held.order]
    assert sorted(held.order) == list(range(x.shape[1]))
    assert (variance[:-1] >= variance[1:] * (1 - 1e-5)).all()
    if fill == "mean":
        np.testing.assert_allclose(held.means, x.mean(axis=0)[held.order], rtol=STEP[dtype], atol=1e-6)


def surely(condition: bool) -> None:
    assert condition, "rounding may move a row to another tier"


def check_calls(
    calls: Sequence[tuple[int, bool]], seed: int = 0, padding: Any = None, sure: Any = surely, **options: Any
) -> None:
    """All that is held after `calls` of random rows; `dims`, `dtype` and `batch` are those of the rows."""
    key_dim, value_dim = options.pop("dims", (DIM, DIM))
    dtype, batch = options.pop("dtype", mx.float16), options.pop("batch", 1)
    o, transform, n = AMCOptions(**SMALL | options), vq.amc(**SMALL | options), sum(count for count, _ in calls)
    keys, _, queries = inputs(n, seed, dim=key_dim, dtype=dtype, batch=batch)
    values = draw(n, seed + 77, dim=value_dim, dtype=dtype, batch=batch)
    state = feed(transform, keys, values, queries, calls, None if padding is None else mx.array(padding))
    asked = np.repeat([asks for _, asks in calls], [count for count, _ in calls])
    window, found = o.threshold_window, np.zeros(3, int)
    for row in range(batch):
        past = padding[row] if padding else 0
        coded = max(n - past - o.residual_length, 0) // window * window
        assert state.coded[row].item() == coded and state.offset[row].item() == n - past
        came = [numbers(x)[row, :, past:] for x in (keys, values, queries)]
        back = rows_of(transform, state, row)
        for side, exact in zip(back, came):
            assert np.array_equal(side[:, coded:], exact[:, coded:])
            assert np.array_equal(side[:, : o.n_sink], exact[:, : o.n_sink])
        for head, start in itertools.product(range(HEADS), range(0, coded, window)):
            span = slice(start, start + window)
            k, v = (drawn(x[head, span], start, o) for x in came[:2])
            group = came[2][head * 2 : head * 2 + 2, span].mean(axis=0)[asked[past:][span]]
            s = saliency(k, group, o)
            sure(clear(s, o))
            slots = order_by(s, o)
            below, block = lowered(s, slots, o), start // window
            for keyed, x, read in ((True, k, back[0]), (False, v, back[1])):
                side = state.keys if keyed else state.values
                held = Held(o, side, keyed, row, head, block, x.shape[1])
                if keyed:
                    assert held.slots.tolist() == slots
                if o.basis is None and start == 0:
                    check_order(x, held, o.fill, dtype)
                reads = read[head, span].copy()
                reads[: max(o.n_sink - start, 0)] = np.nan
                check_side(o, held, x, slots, below, reads, dtype)
            high, mid, low = sizes(o)
            moved = np.array([below[:high].sum(), below[high : high + mid].sum()])
            found += [high - moved[0], mid + moved[0] - moved[1], low + moved[1]]
            if o.adaptive_thresholds:
                keyed_block = Held(o, state.keys, True, row, head, block, key_dim)
                assert keyed_block.counts.tolist() == moved.tolist()
    assert tier_counts(transform, state) == tuple(found)
