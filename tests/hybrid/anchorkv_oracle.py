"""AnchorKV's formulas in numpy, token by token, and what feeds them."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np

import vq_functional as vq
from vq_functional.core.tree import flatten

HEADS, GROUP, DIM = 2, 3, 32
SMALL: dict[str, Any] = {"theta": 0.45, "window": 6, "anchor_frac": 1 / 8, "n_sink": 2}
SIDES = (0, 1)
MAX_1960 = {  # levels of the optimal quantizers of a standard normal variable
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def rows(n: int, seed: int, *, heads: int = HEADS, dim: int = DIM, batch: int = 1, dtype: Any = mx.float16) -> mx.array:
    """Rows near a few directions."""
    mixed = normal(batch, heads, n, 9, seed=seed) ** 3 @ normal(heads, 9, dim, seed=seed + 500)
    return mx.array(0.1 * mixed + 0.05 * normal(batch, heads, n, dim, seed=seed + 900)).astype(dtype)


def asked(n: int, seed: int, dim: int = DIM, **shape: Any) -> mx.array:
    return rows(n, seed, heads=HEADS * GROUP, dim=dim, **shape)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def same(a: Any, b: Any) -> None:
    """Bit equality of two trees."""
    (left, left_shape), (right, right_shape) = flatten(a), flatten(b)
    assert left_shape == right_shape
    for i, (x, y) in enumerate(zip(left, right, strict=True)):
        assert x.shape == y.shape and x.dtype == y.dtype, (i, x.shape, y.shape)
        assert mx.array_equal(x, y, equal_nan=True).item(), (i, x.shape)


def feed(method: Any, keys: mx.array, values: mx.array, queries: Any = None, cuts: Any = ()) -> Any:
    """The prompt in pieces of several tokens, not yet compressed."""
    batch, heads, n, dim = keys.shape
    sizes = {"kv_heads": heads, "key_dim": dim, "value_dim": values.shape[3], "dtype": keys.dtype}
    state = method.init_state(vq.KVSpec(batch=batch, capacity=n + 8, **sizes))
    for start, end in itertools.pairwise([*itertools.accumulate([0, *cuts]), n]):
        part = [None if x is None else x[:, :, start:end] for x in (keys, values, queries)]
        state, *_ = method.update(state, *part)
    return state


def drive(cache: Any, keys: mx.array, values: mx.array, queries: mx.array, pieces: Any, hook: bool = True) -> list[Any]:
    """An adapter through so many tokens a call; what attention gave."""
    outs, start, scale = [], 0, keys.shape[3] ** -0.5
    for n in pieces:
        k, v, q = (x[:, :, start : start + n] for x in (keys, values, queries))
        held = cache.update_and_fetch(k, v)
        outs.append(cache.attend(q, *held, scale, None if n == 1 else "causal") if hook else held[0])
        mx.eval(outs[-1])
        start += n
    return outs


# The oracle


def anchor_count(n: int, options: dict[str, Any]) -> int:
    least = options["window"] + options["n_sink"]
    return min(max(round(n * options["anchor_frac"]), least), n)


def residual_counts(n: int, options: dict[str, Any], heads: int, dims: tuple[int, int], size: int) -> tuple[int, int]:
    """Key and value residuals of all heads: pairs in turn, the value's first, until the next does not fit."""
    k, bits = anchor_count(n, options), options.get("residual_bits", 2)
    left = math.floor(heads * (options["theta"] * sum(dims) * size * n - k * (sum(dims) * size + 4) - 8 * n))
    cost = [4 * math.ceil(dim * bits / 32) + 6 for dim in dims]
    counts = [0, 0]
    for i in range(2 * heads * (n - k)):
        side = (i + 1) % 2
        left -= cost[side]
        if left < 0:
            break
        counts[side] += 1
    return counts[0], counts[1]


def formula(n: int, tail: int, options: dict[str, Any], heads: int, dims: tuple[int, int], size: int) -> int:
    """Bytes of a compressed prompt of `n` tokens with room for `tail` exact rows."""
    room = math.ceil(n / 64) * 64
    lengths = [residual_counts(i, options, heads, dims, size) for i in range(room + 1)]
    slots = [4 * math.ceil(dim * options.get("residual_bits", 2) / 32) + 6 for dim in dims]
    residuals = sum(max(one[side] for one in lengths) * slots[side] for side in SIDES)
    row = sum(dims) * size
    return heads * (anchor_count(room, options) * (row + 4) + 8 * room + tail * row) + residuals + 12


def weights(keys: np.ndarray, queries: np.ndarray, window: int, proxy: bool) -> np.ndarray:
    """Attention [M, W, N] of the last queries of keys [N, D], token by token."""
    n, dim = keys.shape
    out = np.zeros((len(queries), window, n))
    for g, w in itertools.product(range(len(queries)), range(window)):
        at = n - window + w
        last = at if proxy else at + 1
        scores = keys[:last] @ queries[g, at] / math.sqrt(dim)
        out[g, w, :last] = np.exp(scores - scores.max())
        out[g, w, :last] /= out[g, w, :last].sum()
    return out


def pooled(votes: np.ndarray, kernel: int) -> np.ndarray:
    reach = kernel // 2
    wide = np.pad(votes, reach)
    return np.array([wide[i : i + kernel].mean() for i in range(len(votes))])


def vote(a: np.ndarray, window: int, kernel: int) -> np.ndarray:
    votes = a.mean(axis=(0, 1))
    votes[-window:] = 0
    return pooled(votes, kernel)


def heads_of(keys: mx.array, values: mx.array, queries: Any) -> list[tuple[np.ndarray, ...]]:
    """Keys, values and queries [M, N, D] of each head of batch row 0."""
    k, v = numbers(keys)[0], numbers(values)[0]
    q = k[:, None] if queries is None else numbers(queries)[0].reshape(len(k), -1, *k.shape[1:])
    return list(zip(k, v, q, strict=True))


def positions(state: Any, head: int) -> list[int]:
    return [p for p in np.array(state.position)[0, head].tolist() if p >= 0]


def referred(side: Any, heads: int = HEADS) -> list[tuple[int, int]]:
    """(head, token) of each residual, in order."""
    return [(p % heads, p // heads) for p in np.array(side.place)[0].tolist() if p >= 0]


def leftover(side: Any, x: np.ndarray, at: list[int], head: int) -> tuple[np.ndarray, np.ndarray]:
    """A head's rows as factor times anchor, and what is left."""
    index, gain = np.array(side.index)[0, head, : len(x)], numbers(side.gain)[0, head, : len(x)]
    near = gain[:, None] * x[at][index]
    return near, x - near


def restored(rotation: np.ndarray, levels: np.ndarray, r: np.ndarray) -> np.ndarray:
    """A residual after its codec."""
    turned = rotation @ r
    scale = np.sqrt((turned**2).mean())
    code = np.abs(turned[:, None] / max(scale, 1e-30) - levels).argmin(axis=1)
    return rotation.T @ (levels[code] * float(np.float16(scale)))
