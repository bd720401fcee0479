"""AnchorKV against its formulas in numpy: anchors, factors, residuals, bytes, and what any cut of a prompt gives."""

import copy
import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from anchorkv_oracle import (
    DIM,
    GROUP,
    HEADS,
    MAX_1960,
    SIDES,
    SMALL,
    anchor_count,
    asked,
    drive,
    feed,
    formula,
    heads_of,
    leftover,
    normal,
    numbers,
    positions,
    referred,
    residual_counts,
    restored,
    rows,
    same,
    vote,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.codec import bind
from vq_functional.core.transform import Fill
from vq_functional.core.tree import map_leaves
from vq_functional.hybrid.anchor_codes import AnchoredCodec, normal_levels

with_queries = pytest.mark.parametrize("hook", [True, False], ids=["queries", "keys"])

CASES: list[dict[str, Any]] = [
    {},
    {"rho": 1.0, "pool_kernel": 1},
    {"rho": 1.0, "n_sink": 0, "residual_bits": 3},
    {"window": 1, "theta": 0.3, "rho": 0.0},
    {"residual_bits": 1, "pool_kernel": 7, "anchor_frac": 0.3, "theta": 0.6, "seed": 7},
    {"residual_bits": 4, "theta": 1.0},
]


def compressed(options: dict[str, Any], n: int = 90, hook: bool = True, value_dim: int = DIM, **more: Any) -> Any:
    method = vq.anchorkv(**options)
    keys, values, queries = rows(n, 1, **more), rows(n, 2, **more | {"dim": value_dim}), asked(n, 3, **more)
    before = feed(method, keys, values, queries if hook else None)
    return method, method.compress(before, n), keys, values, queries if hook else None


# What is chosen, and how rows are held


@with_queries
@pytest.mark.parametrize("changed", CASES, ids=str)
def test_anchors_follow_their_votes(changed: dict[str, Any], hook: bool) -> None:
    n, options = 90, {"rho": 0.7, "pool_kernel": 5} | SMALL | changed
    _, state, keys, values, queries = compressed(options, n, hook)
    window, sinks = options["window"], options["n_sink"]
    fixed = {*range(sinks), *range(n - window, n)}
    count = anchor_count(n, options)
    for head, (k, _, q) in enumerate(heads_of(keys, values, queries)):
        at = positions(state, head)
        assert at == sorted(set(at)) and len(at) == count and fixed <= set(at)
        votes = vote(weights(k, q, window, not hook), window, options["pool_kernel"])
        free = sorted(set(range(n)) - fixed, key=lambda t: (-votes[t], t))
        scored = math.floor(options["rho"] * (count - window - sinks))
        assert set(free[:scored]) <= set(at)
        if options["rho"] == 1.0:
            assert set(at) == fixed | set(free[:scored])
        elif count - scored - len(fixed) > 3:
            assert set(at) != fixed | set(free[: count - len(fixed)])


@with_queries
@pytest.mark.parametrize("changed", CASES, ids=str)
def test_rows_are_multiples_of_their_nearest_anchors(changed: dict[str, Any], hook: bool) -> None:
    options = SMALL | changed
    _, state, keys, values, queries = compressed(options, hook=hook, value_dim=48)
    for side, which in ((state.keys, 0), (state.values, 1)):
        for head, parts in enumerate(heads_of(keys, values, queries)):
            x, at = parts[which], positions(state, head)
            index, gain = np.array(side.index)[0, head, : len(x)], numbers(side.gain)[0, head, : len(x)]
            _, left = leftover(side, x, at, head)
            assert np.array_equal(numbers(side.anchors)[0, head, : len(at)], x[at])
            for t, row in enumerate(x):
                length = np.linalg.norm(row)
                cosine = x[at] @ row / np.linalg.norm(x[at], axis=1) / length
                if t in at:
                    assert at[index[t]] == t and gain[t] == 1
                    continue
                own = x[at[index[t]]]
                assert abs(cosine[index[t]]) >= np.abs(cosine).max() - 1e-6
                assert gain[t] == pytest.approx(row @ own / (own @ own), rel=1.1e-3, abs=1e-6)
                assert abs(left[t] @ own) <= 1e-3 * length * np.linalg.norm(own)
                assert left[t] @ left[t] == pytest.approx(length**2 * (1 - cosine[index[t]] ** 2), abs=1e-3 * length**2)


@with_queries
@pytest.mark.parametrize("changed", CASES, ids=str)
def test_residuals_of_the_highest_use_are_coded(changed: dict[str, Any], hook: bool) -> None:
    n, options = 90, SMALL | changed
    _, state, keys, values, queries = compressed(options, n, hook)
    window = options["window"]
    uses = np.zeros((2, HEADS, n))
    for head, (k, v, q) in enumerate(heads_of(keys, values, queries)):
        at, a = positions(state, head), weights(k, q, window, not hook)
        left = [leftover(side, x, at, head)[1] for side, x in ((state.keys, k), (state.values, v))]
        for g, w in itertools.product(range(len(q)), range(window)):
            output, query = a[g, w] @ v, q[g, n - window + w]
            for t in range(n):
                score = query @ left[0][t] / math.sqrt(DIM)
                uses[0, head, t] += a[g, w, t] ** 2 * score**2 * ((v[t] - output) ** 2).sum()
                uses[1, head, t] += a[g, w, t] ** 2 * (left[1][t] ** 2).sum()
        uses[:, head, at] = -np.inf
    expected = residual_counts(n, options, HEADS, (DIM, DIM), 2)
    for side, use, count in zip((state.keys, state.values), uses, expected, strict=True):
        chosen = referred(side)
        assert len(chosen) == count == len(set(chosen))
        assert [t * HEADS + head for head, t in chosen] == sorted(t * HEADS + head for head, t in chosen)
        inside = min((use[one] for one in chosen), default=np.inf)
        outside = max((use[h, t] for h in range(HEADS) for t in range(n) if (h, t) not in chosen), default=-np.inf)
        assert inside > -np.inf and inside >= outside * (1 - 1e-3) - 1e-9 * use.max()


@pytest.mark.parametrize("dims", [(32, 32), (20, 48)], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_read_rows_are_anchors_factors_and_coded_residuals(bits: int, dims: tuple[int, int]) -> None:
    options = SMALL | {"residual_bits": bits, "theta": 0.6}
    more = {"dim": dims[0], "dtype": mx.float32}
    method, state, keys, values, queries = compressed(options, 90, value_dim=dims[1], **more)
    levels = numbers(normal_levels(bits))
    assert np.allclose(levels, [*(-x for x in MAX_1960[bits][::-1]), *MAX_1960[bits]], atol=1e-3)
    parts = heads_of(keys, values, queries)
    for which, (side, out) in enumerate(zip((state.keys, state.values), method.read(state), strict=True)):
        coder = bind(AnchoredCodec(bits, 42), dims[which], mx.float32)
        rotation = numbers(coder.rotation.apply(mx.eye(dims[which]))).T
        assert np.allclose(rotation @ rotation.T, np.eye(dims[which]), atol=1e-5)
        got, chosen = numbers(out)[0], set(referred(side))
        assert chosen
        for head in range(HEADS):
            x, at = parts[head][which], positions(state, head)
            near, left = leftover(side, x, at, head)
            for t in range(90):
                more_of = restored(rotation, levels, left[t]) if (head, t) in chosen else 0
                assert np.allclose(got[head, t], near[t] + more_of, atol=2e-3 * np.linalg.norm(x[t]))
                if (head, t) in chosen:
                    assert ((got[head, t] - x[t]) ** 2).sum() <= (left[t] ** 2).sum() * 1.001 + 1e-12
                elif t in at:
                    assert np.array_equal(got[head, t], x[t])


@pytest.mark.parametrize(
    ("bits", "low", "high"), [(1, 0.34, 0.38), (2, 0.105, 0.13), (3, 0.03, 0.04), (4, 0.008, 0.012)]
)
def test_what_the_codec_loses_of_normal_rows(bits: int, low: float, high: float) -> None:
    x = mx.array(normal(1, 200, 128, seed=5))
    coder = bind(AnchoredCodec(bits, 42), 128, mx.float32)
    codes, scales = coder.coded(x)
    out = coder.rotation.undo(coder.levels.decode(codes) * scales[..., None].astype(mx.float32))
    assert low <= (mx.square(x - out).sum() / mx.square(x).sum()).item() <= high


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_multiples_of_one_row_are_kept_and_zero_rows_stay_zero(dtype: Any) -> None:
    factors = normal(1, HEADS, 80, 1, seed=1) * 2
    factors[:, :, 40] = 0
    x = mx.array(factors * normal(1, HEADS, 1, DIM, seed=2)).astype(dtype)
    method = vq.anchorkv(**SMALL | {"theta": 0.01})
    keys, values = method.read(method.compress(feed(method, x, x), 80))
    for out in (keys, values):
        error = np.abs(numbers(out)[:, :, :80] - numbers(x)).max(axis=-1)
        assert (error <= (1e-2 if dtype == mx.bfloat16 else 2e-3) * np.abs(numbers(x)).max()).all()
        assert not numbers(out)[:, :, 40].any()


def test_more_room_means_more_residuals_and_no_more_than_there_are() -> None:
    keys, values, n = rows(90, 1), rows(90, 2), 90
    before, errors = 0, []
    for theta in (0.05, 0.2, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0):
        options = SMALL | {"theta": theta}
        method = vq.anchorkv(**options)
        state = method.compress(feed(method, keys, values), n)
        count = len(referred(state.keys)) + len(referred(state.values))
        assert count >= before and count == sum(residual_counts(n, options, HEADS, (DIM, DIM), 2))
        before = count
        errors.append(np.square(numbers(method.read(state)[0])[:, :, :n] - numbers(keys)).sum())
    assert before == 2 * HEADS * (n - anchor_count(n, SMALL)) and errors == sorted(errors, reverse=True)


# Bytes


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize(
    ("n", "more", "heads", "dims", "dtype", "changed"),
    [
        (128, 1, 2, (32, 32), mx.float16, {}),
        (90, 3, 2, (32, 32), mx.float16, {"residual_bits": 3}),
        (300, 65, 1, (64, 64), mx.bfloat16, {"theta": 0.3, "window": 8}),
        (200, 2, 3, (32, 64), mx.float16, {"theta": 0.5}),
        (130, 1, 2, (20, 16), mx.float32, {"theta": 0.02}),
    ],
)
def test_bytes_of_a_cache_and_nothing_raw(
    n: int, more: int, heads: int, dims: tuple[int, int], dtype: Any, changed: dict[str, Any], hook: bool
) -> None:
    options = SMALL | changed
    cache = TransformKVCache(vq.anchorkv(**options))
    keys, values = (rows(n + more, i, heads=heads, dim=dims[i], dtype=dtype) for i in SIDES)
    drive(cache, keys, values, rows(n + more, 3, heads=2 * heads, dim=dims[0], dtype=dtype), [n], hook)
    assert cache.nbytes >= n * heads * sum(dims) * dtype.size
    drive(
        cache,
        keys[:, :, n:],
        values[:, :, n:],
        rows(more, 3, heads=2 * heads, dim=dims[0], dtype=dtype),
        [1] * more,
        hook,
    )
    tail = math.ceil(more / 64) * 64
    assert cache.nbytes == formula(n, tail, options, heads, dims, dtype.size)
    used = formula(n, 0, options, heads, dims, dtype.size) - 12
    full = n * heads * sum(dims) * dtype.size
    if n % 64 == 0 and sum(residual_counts(n, options, heads, dims, dtype.size)):
        assert used <= options["theta"] * full
    assert used < full or dtype == mx.float32


def test_short_prompts_stay_exact_and_the_next_longer_one_does_not() -> None:
    keys, values, queries = rows(40, 1), rows(40, 2), asked(40, 3)
    for n, coded in ((2, 0), (23, 0), (24, 24), (25, 25)):
        cache = TransformKVCache(vq.anchorkv(**SMALL | {"theta": 0.01}))
        drive(cache, keys, values, queries, [n, *[1] * (40 - n)])
        exact = all(mx.array_equal(a, b).item() for a, b in zip(cache.keys_and_values(), (keys, values), strict=True))
        assert cache._settled_state().coded.item() == coded and exact == (coded == 0)


def test_update_alone_never_compresses() -> None:
    keys, values = rows(60, 1), rows(60, 2)
    method = vq.anchorkv(**SMALL)
    state = feed(method, keys, values, cuts=[50, *[1] * 9])
    held, _ = method.read(state)
    assert state.coded.item() == 0 and state.prompt.item() == 50
    assert mx.array_equal(held[:, :, :60], keys).item()


# Attention


@pytest.mark.parametrize("dims", [(32, 32), (20, 48)], ids=str)
@pytest.mark.parametrize("changed", [{}, {"anchor_frac": 0.9, "theta": 1.0, "window": 20}, {"theta": 0.01}], ids=str)
def test_attention_on_codes_is_attention_over_the_rows_they_read_as(
    changed: dict[str, Any], dims: tuple[int, int]
) -> None:
    n, options = 110, SMALL | changed
    keys, values = (rows(n, i, dim=dims[i], dtype=mx.float32) for i in SIDES)
    queries = asked(n, 3, dim=dims[0], dtype=mx.float32)
    cache = TransformKVCache(vq.anchorkv(**options))
    drive(cache, keys, values, queries, [100])
    first = drive(cache, keys[:, :, 100:], values[:, :, 100:], queries[:, :, 100:], [1])[0]
    q = numbers(queries)[0]

    def expected(at: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        rowwise = []
        for i in range(HEADS * GROUP):
            scores = k[i // GROUP, : at + 1] @ q[i, at] * dims[0] ** -0.5
            a = np.exp(scores - scores.max())
            rowwise.append(a @ v[i // GROUP, : at + 1] / a.sum())
        return np.array(rowwise)

    exact = expected(100, numbers(keys)[0], numbers(values)[0])
    assert np.allclose(numbers(first)[0, :, 0], exact, atol=1e-4)
    outs = drive(cache, keys[:, :, 101:], values[:, :, 101:], queries[:, :, 101:], [1, 1, 5, 1, 1])
    k, v = (numbers(x)[0] for x in cache.keys_and_values())
    got = numbers(mx.concatenate(outs, axis=2))[0]
    for at in range(101, n):
        assert np.allclose(got[:, at - 101], expected(at, k, v), atol=1e-4), at
    assert np.array_equal(k[:, 100:], numbers(keys)[0, :, 100:])


# The same from any cut, in any company, and after any copy


@with_queries
@pytest.mark.parametrize("cuts", [[50], [3, 97], [2, 2, 2], [64, 1 + 5, 30], [94]], ids=str)
def test_any_cut_of_a_prompt_gives_the_same_state(cuts: list[int], hook: bool) -> None:
    n, more = 100, 5
    keys, values, queries = rows(n + more, 1), rows(n + more, 2), asked(n + more, 3)
    rest = [n - sum(cuts)] if n > sum(cuts) else []
    states = []
    for pieces in ([n], [*cuts, *rest]):
        cache = TransformKVCache(vq.anchorkv(**SMALL))
        drive(cache, keys, values, queries, [*pieces, *[1] * more], hook)
        states.append(cache._settled_state())
    same(*states)


@given(st.data())
@settings(max_examples=6)
def test_functions_and_adapter_agree_for_any_shape(data: Any) -> None:
    n, window = data.draw(st.integers(16, 70)), data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([mx.float16, mx.bfloat16, mx.float32]))
    hook, batch = data.draw(st.booleans()), data.draw(st.integers(1, 2))
    options = SMALL | {"window": window, "theta": data.draw(st.sampled_from([0.05, 0.3, 0.8]))}
    cut = data.draw(st.integers(2, n - 2))
    keys, values = (rows(n + 1, i, dim=16, batch=batch, dtype=dtype) for i in SIDES)
    queries = asked(n + 1, 3, dim=16, batch=batch, dtype=dtype)
    method = vq.anchorkv(**options)
    cache = TransformKVCache(method)
    drive(cache, keys, values, queries, [cut, n - cut, 1], hook)
    state = feed(method, *(x[:, :, :n] for x in (keys, values)), queries[:, :, :n] if hook else None)
    last = [x[:, :, n:] for x in (keys, values, queries)][: 3 if hook else 2]
    stepped, *_ = method.after([Fill(tokens=n + 1, rows=n + 1)] * batch).update(state, *last)
    direct, *_ = method.update(method.compress(state, n), *last)
    expected = cache.keys_and_values()
    for one in (stepped, direct):
        room = one.keys.index.shape[2]
        for out, want in zip(method.read(one), expected, strict=True):
            got = mx.concatenate([out[:, :, :n], out[:, :, room : room + 1]], axis=2) if one.coded[0] else out
            assert mx.array_equal(got[:, :, : n + 1], want).item()
    assert (np.array(stepped.coded) == n).all() and mx.array_equal(expected[0][:, :, n], keys[:, :, n]).item()


@with_queries
def test_a_batch_row_is_the_row_alone(hook: bool) -> None:
    n, more = 80, 3
    both = [f(n + more, i, batch=2) for i, f in enumerate((rows, rows, asked))]
    cache = TransformKVCache(vq.anchorkv(**SMALL))
    drive(cache, *both, [n, *[1] * more], hook)
    for row in range(2):
        alone = TransformKVCache(vq.anchorkv(**SMALL))
        drive(alone, *(x[row : row + 1] for x in both), [n, *[1] * more], hook)
        same(map_leaves(lambda x, row=row: x[row : row + 1], cache._settled_state()), alone._settled_state())


def test_merged_caches_go_on_as_if_alone() -> None:
    keys, values, queries = rows(100, 1), rows(100, 2), asked(100, 3)
    later = [f(4, 50 + i) for i, f in enumerate((rows, rows, asked))]
    alone = []
    for pieces in ([90, 1, 1], [70], [10, 1], []):
        alone.append(TransformKVCache(vq.anchorkv(**SMALL)))
        drive(alone[-1], keys, values, queries, pieces)
    together = TransformKVCache.merge([copy.deepcopy(one) for one in alone])
    outs = drive(together, *(mx.concatenate([x] * 4) for x in later), [1] * 4)
    for i, one in enumerate(alone):
        own = drive(one, *later, [1] * 4)
        same(together.extract(i).keys_and_values(), one.keys_and_values())
        for a, b in zip(own, outs, strict=True):
            assert np.allclose(numbers(a), numbers(b[i : i + 1]), atol=2e-3 * np.abs(numbers(a)).max())


@pytest.mark.parametrize("padded", ["left", "right"])
def test_padding_leaves_no_trace(padded: str) -> None:
    n, short, more = 90, 60, 3
    full = [f(n + more, i) for i, f in enumerate((rows, rows, asked))]
    part = [f(short + more, 20 + i) for i, f in enumerate((rows, rows, asked))]
    filler = [mx.full((1, x.shape[1], n - short, DIM), 9.0, x.dtype) for x in part]
    prompts = []
    for a, b, c in zip(full, part, filler, strict=True):
        ends = [c, b[:, :, :short]] if padded == "left" else [b[:, :, :short], c]
        prompts.append(mx.concatenate([a[:, :, :n], mx.concatenate(ends, axis=2)]))
    empty = TransformKVCache(vq.anchorkv(**SMALL))
    cache = empty.to_batch([0, n - short] if padded == "left" else [0, 0])
    if padded == "right":
        cache.prepare(lengths=[n, short])
    drive(cache, *prompts, [50, 40])
    if padded == "right":
        cache.finalize()
    drive(cache, *(mx.concatenate([a[:, :, n:], b[:, :, short:]]) for a, b in zip(full, part, strict=True)), [1] * more)
    for i, (inputs, length) in enumerate(((full, n), (part, short))):
        one = TransformKVCache(vq.anchorkv(**SMALL))
        drive(one, *inputs, [length, *[1] * more])
        same(cache.extract(i).keys_and_values(), one.keys_and_values())


@with_queries
@pytest.mark.parametrize("pieces", [[80], [80, 1], [80, *[1] * 4]], ids=str)
def test_copies_and_saved_states_go_on_alike(pieces: list[int], hook: bool) -> None:
    n = 90
    inputs = [f(n, i) for i, f in enumerate((rows, rows, asked))]
    cache = TransformKVCache(vq.anchorkv(**SMALL))
    drive(cache, *inputs, pieces, hook)
    others = [copy.deepcopy(cache), TransformKVCache.from_state(cache.state)]
    rest = [x[:, :, sum(pieces) :] for x in inputs]
    outs = drive(cache, *rest, [1, 1, 3, 1], hook)
    for other in others:
        same(tuple(drive(other, *rest, [1, 1, 3, 1], hook)), tuple(outs))
        same(other._settled_state(), cache._settled_state())


@pytest.mark.parametrize("dropped", [1, 4, 5, 6, 30, 60, 84, 85])
def test_trimmed_rows_are_gone_and_the_others_as_before(dropped: int) -> None:
    n, more = 80, 5
    inputs = [f(n + more, i) for i, f in enumerate((rows, rows, asked))]
    cache = TransformKVCache(vq.anchorkv(**SMALL))
    drive(cache, *inputs, [n, *[1] * more])
    before, left = cache.keys_and_values(), n + more - dropped
    assert cache.trim(dropped) == dropped and cache.offset == left
    same(cache.keys_and_values(), tuple(x[:, :, :left] for x in before))
    again = [f(3, 70 + i) for i, f in enumerate((rows, rows, asked))]
    drive(cache, *again, [2, 1])
    for out, old, new in zip(cache.keys_and_values(), before, again, strict=False):
        same(out, mx.concatenate([old[:, :, :left], new], axis=2))


@with_queries
@pytest.mark.parametrize("dropped", [2, 5, 20])
def test_a_trim_before_the_prompt_ends_leaves_no_trace(dropped: int, hook: bool) -> None:
    inputs = [f(85, i) for i, f in enumerate((rows, rows, asked))]
    plain, trimmed = (TransformKVCache(vq.anchorkv(**SMALL)) for _ in range(2))
    drive(plain, *inputs, [80], hook)
    left = 80 - dropped
    wrong = [mx.concatenate([x[:, :, :left], x[:, :, 5 : 5 + dropped]], axis=2) for x in inputs]
    drive(trimmed, *wrong, [50, 28, 2], hook)
    trimmed.trim(dropped)
    drive(trimmed, *(x[:, :, left:] for x in inputs), [dropped], hook)
    same(trimmed._settled_state().queries, plain._settled_state().queries)
    for cache in (plain, trimmed):
        drive(cache, *(x[:, :, 80:] for x in inputs), [1, 1], hook)
    same(trimmed._settled_state(), plain._settled_state())


def test_the_tail_grows_and_stays_exact() -> None:
    n, more = 60, 140
    inputs = [f(n + more, i) for i, f in enumerate((rows, rows, asked))]
    cache = TransformKVCache(vq.anchorkv(**SMALL))
    drive(cache, *inputs, [n, *[1] * 70, 20, *[1] * 50])
    for out, x in zip(cache.keys_and_values(), inputs, strict=False):
        assert out.shape[2] == n + more and mx.array_equal(out[:, :, n:], x[:, :, n:]).item()
    state = cache._settled_state()
    assert state.coded.item() == n and state.offset.item() == n + more


# Queries, seeds, numbers that are none, options


def test_real_queries_weigh_otherwise_than_keys() -> None:
    options = SMALL | {"rho": 1.0}
    (_, asking, *_), (_, standing, *_) = (compressed(options, hook=hook) for hook in (True, False))
    assert not mx.array_equal(asking.position, standing.position).item()
    assert referred(asking.values) != referred(standing.values)


def test_draws_follow_the_seed_and_the_head() -> None:
    options = SMALL | {"rho": 0.0, "anchor_frac": 0.3}
    x = mx.repeat(rows(90, 1, heads=1), HEADS, axis=1)
    states = []
    for seed in (42, 42, 43, 2**32 - 1):
        method = vq.anchorkv(**options | {"seed": seed})
        states.append(method.compress(feed(method, x, x), 90))
    same(states[0], states[1])
    drawn = [positions(state, head) for state in states[1:] for head in range(HEADS)]
    assert len({tuple(one) for one in drawn}) == len(drawn)
    draws = np.array([p for one in drawn for p in one if 2 <= p < 84])
    assert abs(draws.mean() - 42.5) < 10 and len(draws) == 6 * (27 - 8)


@with_queries
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 50, 86, 89])
def test_numbers_that_are_none_count_as_zero(at: int, poison: float, hook: bool) -> None:
    method, states = vq.anchorkv(**SMALL), []
    for number in (poison, 0.0):
        inputs = [numbers(f(90, i)) for i, f in enumerate((rows, rows, asked))]
        inputs[0][0, 0, at], inputs[1][0, 1, at, 3:7], inputs[2][0, 2, at] = number, number, number
        fed = [mx.array(x).astype(mx.float16) for x in inputs][: 3 if hook else 2]
        states.append(method.compress(feed(method, *fed), 90))
    same(states[0], states[1]) if not hook else same(method.read(states[0]), method.read(states[1]))
    assert all(mx.isfinite(x).all().item() for x in method.read(states[0]))


@pytest.mark.parametrize(("dtype", "size"), [(mx.float16, 6e4), (mx.bfloat16, 1e18), (mx.float32, 1e18)], ids=str)
def test_a_huge_row_harms_no_other(dtype: Any, size: float) -> None:
    keys, values = rows(90, 1, dtype=dtype), rows(90, 2, dtype=dtype)
    keys[:, :, 40], values[:, :, 50] = size, -size
    method = vq.anchorkv(**SMALL | {"theta": 1.0, "residual_bits": 4})
    out = method.read(method.compress(feed(method, keys, values), 90))
    for got, x, huge in zip(out, (keys, values), (40, 50), strict=True):
        assert mx.isfinite(got).all().item()
        for t in set(range(90)) - {huge}:
            assert (
                np.square(numbers(got)[:, :, t] - numbers(x)[:, :, t]).sum()
                <= 0.05 * np.square(numbers(x)[:, :, t]).sum()
            )


EFFECTS: dict[str, Any] = {"theta": 0.6, "window": 7, "rho": 0.1, "anchor_frac": 0.2, "residual_bits": 3}
EFFECTS |= {"seed": 1, "n_sink": 5, "pool_kernel": 1}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_option_has_an_effect(name: str) -> None:
    options = SMALL | {"anchor_frac": 0.3}
    read = [m.read(s) for m, s, *_ in (compressed(o) for o in (options, options | {name: EFFECTS[name]}))]
    assert not mx.array_equal(read[0][0][:, :, :90], read[1][0][:, :, :90]).item()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("theta", x) for x in (0, -0.1, 1.5, math.nan, "half", True)),
        *(("window", x) for x in (0, -1, 2.0, True)),
        *(("rho", x) for x in (-0.1, 1.01, math.nan)),
        *(("anchor_frac", x) for x in (0, 1.01, math.inf)),
        *(("residual_bits", x) for x in (0, 5, 8, 2.0, True)),
        *(("seed", x) for x in (-1, 2**32, 1.5)),
        *(("n_sink", x) for x in (-1, 1.0)),
        *(("pool_kernel", x) for x in (0, 4, 3.0)),
    ],
)
def test_wrong_options_are_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^anchorkv: `{name}` .*; got "):
        vq.anchorkv(**{name: wrong})


@pytest.mark.parametrize("n", [70, 100, 127, 128, 300])
def test_compress_loses_no_row(n: int) -> None:
    """Also of a prompt that is too short to be anchored, and of rows that came after it."""
    method, keys, values = vq.anchorkv(), rows(n + 3, 1), rows(n + 3, 2)
    state = feed(method, keys[:, :, :n], values[:, :, :n])
    for at in range(n, n + 3):
        state, *_ = method.update(state, keys[:, :, at : at + 1], values[:, :, at : at + 1])
    held = method.compress(state, n + 3)
    fill = Fill(tokens=n + 3, rows=n + 3, coded=held.coded.item())
    for out, x in zip(method.read(held, fill), (keys, values), strict=True):
        assert out.shape == x.shape
        assert mx.array_equal(out[:, :, fill.coded :], x[:, :, fill.coded :]).item()
    assert fill.coded == (n if n >= 128 else 0)
    with pytest.raises(vq.QuantizerConfigError, match=rf"^anchorkv: `rows` must be an integer >= {n + 3 - fill.coded}"):
        method.compress(state, n + 3, rows=n + 2 - fill.coded)
    with pytest.raises(vq.QuantizerConfigError, match=rf"^anchorkv: `tokens` must be at least the {n} of the longest"):
        method.compress(state, n - 1)


@pytest.mark.parametrize("tokens", [0, -1, 2.0])
def test_a_wrong_number_of_tokens_is_refused(tokens: Any) -> None:
    method = vq.anchorkv(**SMALL)
    with pytest.raises(vq.QuantizerConfigError, match=r"^anchorkv: `tokens` .*; got "):
        method.compress(feed(method, rows(60, 1), rows(60, 2)), tokens)
