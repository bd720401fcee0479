"""Masks: as wide as what the next call returns, and true to the position of every row."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from models import TRANSFORMS, WINDOWED, FunctionalCache, build, forced, tokens

import vq_functional as vq
from vq_adapters import TransformKVCache

HEADS, QUERY_HEADS, DIM = 2, 4, 64
ALL = {**TRANSFORMS, "rows": vq.rows()}
FILLS = {"empty": (), "short": (5,), "long": (40,), "decoded": (40, 1, 1, 1), "chunks": (16, 16, 7)}


@functools.lru_cache
def stream(seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of 64 tokens; rows so far apart that codes tell which one they stand for."""
    keys = mx.random.split(mx.random.key(seed))
    return tuple(mx.random.normal((1, HEADS, 64, DIM), key=key) for key in keys)  # type: ignore[return-value]


def feed(cache: TransformKVCache, n: int, seed: int = 0) -> mx.array:
    keys, values = stream(seed)
    part = slice(cache.offset, cache.offset + n)
    return cache.update_and_fetch(keys[:, :, part], values[:, :, part])[0]


def positions(returned: mx.array, seed: int = 0) -> np.ndarray:
    """Token position [H, C] of each returned key: that of the key it looks most like."""
    known = np.array(stream(seed)[0][0])
    known = known / np.linalg.norm(known, axis=-1, keepdims=True)
    return np.argmax(np.array(returned[0]) @ known.swapaxes(-1, -2), axis=-1)


def seen(columns: np.ndarray, start: int, n: int, window: int | None) -> np.ndarray:
    """Bool [H, n, C] by the rule itself: not later than the query, and no further back than the window."""
    allowed = np.zeros((columns.shape[0], n, columns.shape[1]), bool)
    for head, query, column in np.ndindex(allowed.shape):
        distance = start + query - columns[head, column]
        allowed[head, query, column] = distance >= 0 and (window is None or distance < window)
    return allowed


def narrowest(name: str, window: int | None) -> int | None:
    """The window asked for, or a method's own where that is narrower."""
    return 16 if name == WINDOWED and window is None else window


def as_array(mask: mx.array | str | None, n: int, columns: int) -> np.ndarray:
    """Bool [heads or 1, n, C], the string read as lower right and None as everything."""
    if mask is None:
        return np.ones((1, n, columns), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(n, columns, columns - n, dtype=bool)[None]
    assert mask.dtype == mx.bool_
    assert mask.shape[-2:] == (n, columns)
    return np.array(mask).reshape(-1, n, columns)


def by_kv_head(allowed: np.ndarray) -> np.ndarray:
    """The mask [H, n, C] of each KV head, whose query heads must agree."""
    if allowed.shape[0] == 1:
        return np.repeat(allowed, HEADS, axis=0)
    grouped = allowed.reshape(HEADS, -1, *allowed.shape[1:])
    assert (grouped == grouped[:, :1]).all()
    return grouped[:, 0]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ALL)
def test_a_mask_is_what_the_next_call_needs(
    name: str, fill: str, n: int, return_array: bool, window: int | None
) -> None:
    cache = TransformKVCache(ALL[name], query_heads=QUERY_HEADS)
    for tokens_fed in FILLS[fill]:
        feed(cache, tokens_fed)
    start = cache.offset
    mask = cache.make_mask(n, return_array=return_array, window_size=window)
    assert not return_array or isinstance(mask, mx.array)
    returned = feed(cache, n)
    allowed = as_array(mask, n, returned.shape[2])
    assert allowed.shape[0] in (1, QUERY_HEADS)
    assert (by_kv_head(allowed) == seen(positions(returned), start, n, narrowest(name, window))).all()


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_the_window_closes_at_its_length(name: str, n: int) -> None:
    """Around the call whose last token is the first that can't see everything."""
    for start in range(2, 12):
        cache = TransformKVCache(ALL[name], query_heads=QUERY_HEADS)
        feed(cache, start)
        mask = cache.make_mask(n, window_size=8)
        returned = feed(cache, n)
        allowed = by_kv_head(as_array(mask, n, returned.shape[2]))
        assert (allowed == seen(positions(returned), start, n, 8)).all()


@pytest.mark.parametrize("name", ALL)
def test_asking_for_a_mask_changes_nothing(name: str) -> None:
    cache, other = (TransformKVCache(ALL[name]) for _ in range(2))
    for n in (20, 1, 5, 1):
        for count in (1, 5, 70):
            cache.make_mask(count)
            cache.make_mask(count, return_array=True, window_size=8)
        assert mx.array_equal(feed(cache, n), feed(other, n))
    assert (cache.offset, cache.size()) == (other.offset, other.size())


@pytest.mark.parametrize("name", ALL)
def test_one_token_without_a_window_needs_no_mask(name: str) -> None:
    cache = TransformKVCache(ALL[name])
    feed(cache, 20)
    assert cache.make_mask(1) is None
    mask = cache.make_mask(5)
    assert isinstance(mask, mx.array) if name == WINDOWED else mask == "causal"


def test_a_window_holds_for_a_single_query() -> None:
    cache = TransformKVCache(vq.rows())
    feed(cache, 20)
    mask = as_array(cache.make_mask(1, window_size=8), 1, 21)
    assert np.flatnonzero(mask).tolist() == list(range(13, 21))


@pytest.mark.parametrize("calls", [(20,), (1,) * 20, (7, 13)], ids=lambda calls: f"{len(calls)} calls")
@pytest.mark.parametrize("name", ALL)
def test_a_window_does_not_depend_on_how_a_prompt_was_cut(name: str, calls: tuple[int, ...]) -> None:
    """Token 19 sees itself and the 7 positions before it, as far as they are held."""
    cache = TransformKVCache(ALL[name], query_heads=QUERY_HEADS)
    for n in calls:
        mask = cache.make_mask(n, window_size=8)
        returned = feed(cache, n)
    last = by_kv_head(as_array(mask, calls[-1], returned.shape[2]))[:, -1]
    for allowed, held in zip(last, positions(returned), strict=True):
        assert sorted(held[allowed]) == sorted(set(held) & set(range(12, 20)))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_ragged_batches_get_a_mask_of_their_own_rows(name: str, n: int, window: int | None) -> None:
    singles = [TransformKVCache(ALL[name]) for _ in range(3)]
    for row, length in enumerate((9, 30, 0)):
        if length:
            feed(singles[row], length, seed=row)
    starts = [single.offset for single in singles]
    batch = TransformKVCache.merge(singles)
    mask = batch.make_mask(n, window_size=window)
    parts = [[x[:, :, start : start + n] for x in stream(row)] for row, start in enumerate(starts)]
    returned, _ = batch.update_and_fetch(*(mx.concatenate(x) for x in zip(*parts, strict=True)))
    assert isinstance(mask, mx.array) and mask.dtype == mx.bool_
    assert (mask.shape[0], *mask.shape[2:]) == (3, n, returned.shape[2])
    for row, start in enumerate(starts):
        bound = narrowest(name, window)
        expected = seen(positions(returned[row : row + 1], seed=row), start, n, bound)
        allowed = np.broadcast_to(np.array(mask[row]), expected.shape)
        alone = seen(positions(feed(singles[row], n, seed=row), seed=row), start, n, bound)
        assert (allowed.sum(axis=-1) == alone.sum(axis=-1)).all()
        assert not (allowed & ~expected).any()


class OwnMask(FunctionalCache):
    """Remembers the mask of its own rows."""

    own: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.own = self.transform.make_mask(self.held, keys.shape[2])
        return super().update_and_fetch(keys, values)


def attend_by_own_mask(
    queries: mx.array, keys: mx.array, values: mx.array, cache: OwnMask, scale: float, **_: Any
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=cache.own)


@pytest.mark.parametrize(
    "store", [vq.rows(), vq.rows(key=vq.turboquant_mse_codec(bits=4), value=vq.int8_codec())], ids=["plain", "coded"]
)
def test_layers_with_other_budgets_share_a_mask(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx_lm makes one mask from one layer's cache and gives it to all layers."""
    model = build("llama")
    budgets = [vq.chain(vq.h2o_policy(budget=budget, n_sink=2, grace=3), store) for budget in (24, 8)]
    calls = [tokens(40, 1), tokens(8, 2), *([token] for token in tokens(5, 3)), tokens(12, 4), tokens(3, 5)]
    with monkeypatch.context() as patch:
        patch.setattr(llama, "scaled_dot_product_attention", attend_by_own_mask)
        expected = forced(model, [OwnMask(transform) for transform in budgets], calls)
    caches = [TransformKVCache(transform) for transform in budgets]
    assert mx.allclose(forced(model, caches, calls), expected, atol=1e-3)
    assert [cache.size() for cache in caches] == [24, 8]
