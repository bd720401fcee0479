"""A2ATS against its formulas in numpy: rotations, codes, scores, what a token attends to, calibration, bytes."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.hybrid.a2ats import A2ATSTables

HEADS, DIM, SIZE, PLACES = 2, 16, 4, 4
SMALL: dict[str, Any] = {"codebook_bits": 3, "sub_dim": SIZE, "window": 4, "n_sink": 2, "b": 30}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "original_max_position_embeddings": 64}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
ROPES: list[dict[str, Any]] = [
    *({}, {"rope_base": 500.0}, {"rope_dims": 8}, {"rope_traditional": True}, {"rope_scaling": {"type": "default"}}),
    {"rope_traditional": True, "rope_dims": 12, "rope_base": 100.0},
    {"rope_scaling": LLAMA3, "rope_base": 50.0},
]
every_rope = pytest.mark.parametrize("rope", ROPES, ids=lambda o: "-".join(o) or "plain")
pytestmark = pytest.mark.filterwarnings("ignore:a2ats. without a codebook")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


ENTRIES, MOMENT = normal(HEADS, PLACES, 8, SIZE, seed=1), normal(HEADS, PLACES, SIZE, SIZE, seed=2)
MOMENT = MOMENT @ MOMENT.swapaxes(-1, -2)
TABLES: dict[str, Any] = {"codebook": ENTRIES, "query_h": MOMENT}


def method(*, store: Any = None, **options: Any) -> Any:
    """Over exact rows unless a `store` is given."""
    return vq.a2ats(store=store or vq.rows(), **SMALL | options)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def feed(transform: Any, keys: Any, values: Any = None, cuts: Any = (), capacity: int = 40, padding: Any = None) -> Any:
    keys = mx.array(keys)
    values = keys if values is None else mx.array(values)
    batch, heads, n, dim = keys.shape
    sizes = {"batch": batch, "kv_heads": heads, "key_dim": dim, "value_dim": values.shape[3]}
    state = transform.init_state(vq.KVSpec(**sizes, dtype=keys.dtype, capacity=capacity), padding)
    edges = [*itertools.accumulate([0, *cuts]), n]
    for start, end in itertools.pairwise(edges):
        state, *_ = transform.update(state, keys[:, :, start:end], values[:, :, start:end])
    return state


# The oracle


def turned(x: np.ndarray, positions: Any, rope: dict[str, Any]) -> np.ndarray:
    """Rows [..., S, D] rotated to `positions` [S], pair by pair."""
    out, dims = np.array(x, np.float64), rope.get("rope_dims") or x.shape[-1]
    scaling = rope.get("rope_scaling") or {}
    for i in range(dims // 2):
        f = rope.get("rope_base", 10000.0) ** (-2 * i / dims)
        if scaling.get("rope_type") == "llama3":
            length, whole = 2 * math.pi / f, scaling["original_max_position_embeddings"]
            low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
            t = min(max((whole / length - low) / (high - low), 0), 1)
            f = (1 - t) * f / factor + t * f
        a, b = (2 * i, 2 * i + 1) if rope.get("rope_traditional") else (i, i + dims // 2)
        cos, sin = np.cos(np.asarray(positions) * f), np.sin(np.asarray(positions) * f)
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return out


def four_axes(x: np.ndarray) -> np.ndarray:
    return x.reshape((1, 1, *x.shape)[-4:]).astype(np.float64)


def errors(bare: np.ndarray, entries: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """(k - e) H (k - e)^T [H, S, M, K] of keys [H, S, D]."""
    cut = bare.reshape(*bare.shape[:2], -1, 1, entries.shape[-1])
    off = cut - four_axes(entries)[:, None]
    return ((off @ four_axes(moment)[:, None]) * off).sum(axis=-1)


def coded(codes: mx.array, entries: np.ndarray = ENTRIES) -> np.ndarray:
    """The entries [H, S, D] at codes [1, H, S, M]."""
    index = np.array(codes)[0].astype(int)
    full = np.broadcast_to(four_axes(entries), (index.shape[0], index.shape[2], *entries.shape[-2:]))
    picked = [[full[h, m, index[h, :, m]] for m in range(index.shape[2])] for h in range(index.shape[0])]
    return np.array(picked).swapaxes(1, 2).reshape(*index.shape[:2], -1)


def chosen(score: np.ndarray, options: dict[str, Any]) -> tuple[list[int], float]:
    """Rows that the newest of n tokens attends to by their scores [n], and how clear the last choice is."""
    n, share = len(score), Fraction(str(options.get("retrieval_fraction", 0.2)))
    always = {*range(max(n - max(options["window"], 1), 0), n), *range(min(options["n_sink"], n))}
    others = sorted(set(range(n)) - always, key=lambda i: (-score[i], i))
    count = min(math.ceil(share * n), len(others))
    gap = score[others[count - 1]] - score[others[count]] if 0 < count < len(others) else math.inf
    return sorted(always | set(others[:count])), gap or math.inf


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float = 0.25) -> np.ndarray:
    weights = np.exp(scale * (keys @ query - (keys @ query).max()))
    return weights @ values / weights.sum()


# Rotation


@every_rope
@pytest.mark.parametrize("b", [0, 30, 2048])
def test_far_queries_meet_keys_as_at_distance_b(b: int, rope: dict[str, Any]) -> None:
    query, bare, m = normal(1, 2, 1, DIM), normal(1, 2, 5, DIM, seed=1), 2100
    given = mx.array(turned(query, [m], rope).astype(np.float32))
    got = numbers(method(b=b, **rope).far_queries(given, mx.array([[m]]))) @ bare.swapaxes(-1, -2)
    np.testing.assert_allclose(got, turned(query, [b], rope) @ bare.swapaxes(-1, -2), atol=2e-3)
    true = turned(query, [m], rope) @ turned(bare, [m - b] * 5, rope).swapaxes(-1, -2)
    np.testing.assert_allclose(got, true, atol=2e-3)


@every_rope
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_keys_are_coded_as_before_rotation(dtype: mx.Dtype, rope: dict[str, Any]) -> None:
    """A codebook of every sub-vector: the code of each is its own place, and far scores are exact."""
    bare, query = normal(1, HEADS, 32, DIM), normal(1, HEADS, 1, DIM, seed=1)
    entries = bare[0].reshape(HEADS, 32, PLACES, SIZE).swapaxes(1, 2)
    transform = method(codebook_bits=5, codebook=entries, retrieval_fraction=0.25, **rope)
    state = feed(transform, mx.array(turned(bare, np.arange(32), rope).astype(np.float32)).astype(dtype), cuts=[7, 1])
    assert np.array_equal(np.array(state.codes[0])[0, :, :32], np.tile(np.arange(32)[:, None], (HEADS, 1, PLACES)))
    index = transform.select(state, mx.array(turned(query, [31], rope).astype(np.float32)))
    for head in range(HEADS):
        score = bare[0, head] @ turned(query, [30], rope)[0, head, 0]
        want, gap = chosen(score, SMALL | {"retrieval_fraction": 0.25})
        assert gap > 1e-3
        assert [i for i in index[0, head].tolist() if i >= 0] == want


# Codes and scores


def check_codes(codes: mx.array, error: np.ndarray) -> None:
    """Each code is that of the smallest error [H, S, M, K], or of one that is as small but for rounding."""
    index = np.array(codes)[0, :, : error.shape[1]].astype(int)
    taken = np.take_along_axis(error, index[..., None], axis=-1)[..., 0]
    assert (taken <= error.min(axis=-1) + 1e-4 * (1 + taken)).all()
    assert (index == error.argmin(axis=-1)).mean() > 0.98


@pytest.mark.parametrize("axes", [0, 1, 2], ids=["one", "places", "heads"])
@pytest.mark.parametrize("aware", [True, False])
def test_a_code_is_the_entry_of_the_smallest_error_in_scores(axes: int, aware: bool) -> None:
    tables = {name: x[(0,) * (2 - axes)] for name, x in TABLES.items()}
    keys, queries = normal(1, HEADS, 40, DIM, seed=axes), normal(1, HEADS, 3, DIM, seed=9)
    transform = method(**tables, use_query_aware=aware)
    state = feed(transform, keys)
    moment = tables["query_h"] if aware else np.eye(SIZE)
    check_codes(state.codes[0], errors(turned(keys, -np.arange(40), {})[0], tables["codebook"], moment))
    got = transform.options.codes(DIM).scores(mx.array(queries), state.codes)
    want = queries[0] @ coded(state.codes[0], tables["codebook"]).swapaxes(1, 2)
    np.testing.assert_allclose(numbers(got)[0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_without_a_moment_differences_in_length_count_less(beta: float) -> None:
    keys = normal(1, HEADS, 40, DIM)
    state, bare = feed(method(codebook=ENTRIES, beta=beta), keys), turned(keys, -np.arange(40), {})[0]
    lengths = np.linalg.norm(bare.reshape(HEADS, 40, PLACES, 1, SIZE), axis=-1)
    off = np.square(lengths - np.linalg.norm(ENTRIES, axis=-1)[:, None])
    check_codes(state.codes[0], errors(bare, ENTRIES, np.eye(SIZE)) - beta * off)


def test_weighing_by_queries_lowers_the_error_of_their_scores() -> None:
    queries = normal(500, SIZE, seed=3) * np.array([5, 1, 0.2, 0.1], np.float32) @ normal(SIZE, SIZE, seed=4)
    moment, keys = queries.T @ queries / 500, normal(1, HEADS, 40, DIM)
    bare = turned(keys, -np.arange(40), {})[0]
    found = []
    for aware in (True, False):
        state = feed(method(codebook=ENTRIES, query_h=moment, use_query_aware=aware), keys)
        off = (bare - coded(state.codes[0])).reshape(-1, SIZE)
        found.append(np.square(off @ queries.T).mean())
    assert found[0] < 0.9 * found[1]


def test_without_a_codebook_keys_count_from_the_mean_of_the_first() -> None:
    keys = normal(1, HEADS, 30, DIM) * 3 + 20 * normal(HEADS, 1, DIM, seed=1)
    transform = method(codebook_bits=6, n_sink=3, beta=0.0)
    codes, gain = feed(transform, keys, cuts=[5, 1]).codes
    bare = turned(keys, -np.arange(30), {})[0]
    off = bare - bare[:, :3].mean(axis=1, keepdims=True)
    inner = transform.options.codes(DIM)
    rotation, entries = numbers(inner.rotation.apply(mx.eye(DIM))), numbers(inner.codebook.entries)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(DIM), atol=1e-6)
    rms = np.sqrt(np.square(off).mean(axis=-1))[:, 3:]
    assert gain.dtype == mx.bfloat16 and (gain[:, :, :3] == 0).all()
    np.testing.assert_allclose(numbers(gain)[0, :, 3:30], rms, rtol=2.0**-7)
    check_codes(codes[:, :, 3:], errors((off[:, 3:] @ rotation) / rms[..., None], entries, np.eye(SIZE)))
    query = normal(1, HEADS, 2, DIM, seed=5)
    want = (query[0] @ rotation) @ coded(codes, entries).swapaxes(1, 2) * numbers(gain)[0][:, None]
    np.testing.assert_allclose(numbers(inner.scores(mx.array(query), (codes, gain)))[0], want, rtol=1e-3, atol=1e-3)


# What a token attends to


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "window": draw(st.integers(0, 6)),
        "n_sink": draw(st.integers(0, 4)),
        "retrieval_fraction": draw(st.sampled_from([0, 0.05, 0.2, 0.3, 0.5, 1])),
        "far_rope": draw(st.sampled_from(["exact", "constant"])),
    }


@given(layouts(), st.integers(1, 36), st.integers(1, 3), st.integers(0, 99), st.booleans())
@settings(max_examples=25)
def test_a_token_attends_to_its_window_the_sinks_and_the_best_others(
    options: dict[str, Any], n: int, group: int, seed: int, padded: bool
) -> None:
    assume(options["window"] or options["far_rope"] == "exact")
    keys, values = normal(2, HEADS, n, DIM, seed=seed), normal(2, HEADS, n, 6, seed=seed + 1)
    queries = normal(2, group * HEADS, 1, DIM, seed=seed + 2)
    transform = method(**TABLES, **options)
    state = feed(transform, keys, values, [n - 1], padding=mx.array([0, min(3, n - 1) if padded else 0]))
    index, out = transform.select(state, mx.array(queries)), numbers(transform.attend(state, mx.array(queries), 0.25))
    for row, count in enumerate(state.offset.tolist()):
        held, last = keys[row, :, n - count :], count - 1
        far = turned(queries[row], [30 - last], {}).reshape(HEADS, group, DIM)
        score = np.einsum("hgd,hsd->hgs", far, coded(state.codes[0][row : row + 1])[:, :count]).max(axis=1)
        for head in range(HEADS):
            want, gap = chosen(score[head], SMALL | options)
            assume(gap > 1e-4)
            assert [i for i in index[row, head].tolist() if i >= 0] == want
            seen = held[head, want]
            if options["far_rope"] == "constant":
                moved = [last - 30 - i if last - i >= options["window"] else 0 for i in want]
                seen = turned(seen, moved, {})
            for i in range(head * group, head * group + group):
                expected = attention(queries[row, i, 0], seen, values[row, head, n - count :][want])
                np.testing.assert_allclose(out[row, i, 0], expected, rtol=1e-3, atol=1e-4)


def test_of_equal_scores_the_earlier_rows_are_retrieved() -> None:
    transform = method(codebook=np.zeros_like(ENTRIES), retrieval_fraction=0.1)
    state = feed(transform, normal(1, HEADS, 30, DIM))
    index = transform.select(state, mx.array(normal(1, HEADS, 1, DIM)))
    assert [i for i in index[0, 1].tolist() if i >= 0] == [0, 1, 2, 3, 4, 26, 27, 28, 29]


@pytest.mark.parametrize("position", [5, 17, 30])
@pytest.mark.parametrize("far_rope", ["exact", "constant"])
def test_a_planted_key_is_found_without_calibration(position: int, far_rope: str) -> None:
    bare, query = normal(1, 1, 40, 64), normal(1, 1, 1, 64, seed=1)
    bare[0, 0, position] = 2 * turned(query, [30 - 39], {})[0, 0, 0]
    keys = turned(bare, np.arange(40), {}).astype(np.float32)
    transform = method(sub_dim=8, codebook_bits=8, retrieval_fraction=0.02, far_rope=far_rope)
    index = transform.select(feed(transform, keys), mx.array(query))
    assert [i for i in index[0, 0].tolist() if i >= 0] == [0, 1, position, 36, 37, 38, 39]


def seen_of(keys: np.ndarray, values: np.ndarray, queries: np.ndarray, seen: Any) -> np.ndarray:
    """Attention [Hq, S, Dv] of the newest S tokens over the rows that `seen` [S, n] shows."""
    group = queries.shape[1] // HEADS
    rows = [
        [attention(q, keys[0, h // group, mask], values[0, h // group, mask]) for q, mask in zip(queries[0, h], seen)]
        for h in range(queries.shape[1])
    ]
    return np.array(rows)


@pytest.mark.parametrize("n, kind", [(1, "all"), (1, "additive"), (3, "several"), (1, "short")])
def test_when_attention_is_over_all_rows(n: int, kind: str) -> None:
    count = 5 if kind == "short" else 30
    keys, values, queries = normal(1, HEADS, count, DIM), normal(1, HEADS, count, 6), normal(1, 4, n, DIM, seed=1)
    transform = method(**TABLES, retrieval_fraction=1.0 if kind == "all" else 0.05)
    state = feed(transform, keys, values)
    mask = mx.where(mx.arange(40) < count, 0.0, -mx.inf)[None, None, None] if kind == "additive" else None
    got = numbers(transform.attend(state, mx.array(queries), 0.25, mask))[0]
    want = seen_of(keys, values, queries, np.tri(count, dtype=bool)[-n:])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_hidden_rows_take_nobodys_place() -> None:
    keys, values, queries = normal(1, HEADS, 30, DIM), normal(1, HEADS, 30, 6), normal(1, 4, 1, DIM, seed=1)
    transform = method(**TABLES, retrieval_fraction=0.2)
    state, mask = feed(transform, keys, values), (np.arange(40) >= 18) & (np.arange(40) < 30)
    got = numbers(transform.attend(state, mx.array(queries), 0.25, mx.array(mask)[None, None, None]))[0]
    assert mask.sum() == 4 + 2 + math.ceil(0.2 * 30)  # as many as are attended to
    np.testing.assert_allclose(got, seen_of(keys, values, queries, mask[None, :30]), rtol=1e-3, atol=1e-4)


def test_without_queries_all_rows_come_back_unless_the_newest_key_stands_in() -> None:
    keys, values = mx.array(normal(1, HEADS, 31, DIM)), mx.array(normal(1, HEADS, 31, 6, seed=1))
    for proxy in (None, "last_key"):
        transform = method(**TABLES, retrieval_fraction=0.1, proxy=proxy)
        state = feed(transform, keys[:, :, :30], values[:, :, :30])
        mask = transform.make_mask(state, 1)
        state, got_keys, got_values = transform.update(state, keys[:, :, 30:], values[:, :, 30:])
        seen = mask[0, 0, 0].tolist()
        assert got_keys.shape[2] == got_values.shape[2] == len(seen)
        index = transform.select(state, keys[:, :, 30:])
        assert sum(seen) == (31 if proxy is None else 4 + 2 + 4)
        for head in range(HEADS):
            rows = list(range(31)) if proxy is None else [i for i in index[0, head].tolist() if i >= 0]
            for got, x in ((got_keys, keys), (got_values, values)):
                np.testing.assert_array_equal(numbers(got)[0, head, seen], numbers(x)[0, head, rows])


# Calls


def held_of(state: Any, count: int) -> list[mx.array]:
    return [state.offset, *(x[:, :, :count] for x in flatten((state.rows, state.codes))[0])]


@given(st.data(), st.integers(1, 20), st.booleans())
@settings(max_examples=10)
def test_any_cut_and_trim_leave_no_trace(data: st.DataObject, n: int, calibrated: bool) -> None:
    transform = vq.a2ats(**SMALL, **(TABLES if calibrated else {}))
    edges = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)) - {n})
    cuts = [b - a for a, b in itertools.pairwise([0, *edges])]
    keys, values = mx.array(normal(1, HEADS, n, DIM)), mx.array(normal(1, HEADS, n, 6, seed=1))
    whole = feed(transform, keys, values)
    assert all(map(mx.array_equal, held_of(feed(transform, keys, values, cuts), n), held_of(whole, n)))
    x = data.draw(st.integers(1, n))
    short = transform.trim(whole, x)
    assert short.offset.item() == n - x
    again, *_ = transform.update(short, keys[:, :, n - x :], values[:, :, n - x :])
    assert all(map(mx.array_equal, held_of(again, n), held_of(whole, n)))


@pytest.mark.parametrize("tables", [{}, TABLES], ids=["free", "calibrated"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_batch_rows_and_bad_keys_stay_alone(dtype: mx.Dtype, tables: dict[str, Any]) -> None:
    keys = normal(2, HEADS, 20, DIM)
    keys[1] *= 100
    bad = keys.copy()
    bad[1, :, 9, 3], bad[1, :, 10, 5], bad[1, :, 1, 0] = math.nan, math.inf, -math.inf
    transform: Any = vq.a2ats(**SMALL, **tables)
    queries = mx.array(normal(1, 4, 1, DIM, seed=1)).astype(dtype)
    alone = feed(transform, mx.array(keys[:1]).astype(dtype))
    for x in (keys, bad):
        state = feed(transform, mx.array(x).astype(dtype))
        first = map_leaves(lambda leaf: leaf[:1], state)
        assert all(map(mx.array_equal, held_of(first, 20), held_of(alone, 20)))
        out = transform.attend(first, queries, 0.25)
        assert out.dtype == dtype and mx.isfinite(out).all()
        assert mx.array_equal(out, transform.attend(alone, queries, 0.25))
        assert len([i for i in transform.select(state, mx.tile(queries, (2, 1, 1, 1)))[1, 0].tolist() if i >= 0]) == 10


# Calibration


def test_moments_and_codebooks_of_calibration() -> None:
    """Queries as they meet far keys, pooled over the heads of a group; keys as before rotation."""
    places = np.arange(8) * 5
    keys, queries = normal(8, HEADS, DIM), normal(8, 2 * HEADS, DIM, seed=1) * np.linspace(0.2, 3, DIM, dtype="f")
    tables = vq.a2ats_calibrate(mx.array(keys), mx.array(queries), positions=mx.array(places), rounds=3, **SMALL)
    far = turned(queries.swapaxes(0, 1), 30 - places, {}).reshape(HEADS, -1, PLACES, SIZE)
    want = np.einsum("hnmi,hnmj->hmij", far, far)
    got = numbers(tables.query_h)
    for x in (got, want):
        x /= np.trace(x, axis1=-2, axis2=-1)[..., None, None]
    np.testing.assert_allclose(got, want, atol=1e-4)
    bare = turned(keys.swapaxes(0, 1), -places, {})
    assert errors(bare, np.array(tables.codebook), np.eye(SIZE)).min(axis=-1).max() < 1e-6  # as many entries as keys
    assert tables.codebook.shape == (HEADS, PLACES, 8, SIZE)
    again = A2ATSTables.from_arrays(tables.arrays()).arrays()
    assert method(**tables.arrays()) == method(**again) != method(codebook=tables.codebook)


def test_a_codebook_follows_the_moment() -> None:
    """Keys in a plane of which queries see one direction: the entries differ along it."""
    keys, queries = np.zeros((200, 1, 2), np.float32), np.zeros((200, 1, 2), np.float32)
    keys[:, 0], queries[:, 0, 0] = normal(200, 2) * np.array([1, 3]), normal(200, seed=1)
    options: dict[str, Any] = {"sub_dim": 2, "codebook_bits": 2, "b": 0, "positions": mx.zeros((200,), mx.int32)}
    for aware, axis in ((True, 0), (False, 1)):
        tables = vq.a2ats_calibrate(mx.array(keys), mx.array(queries), use_query_aware=aware, **options)
        error = np.abs(keys[:, 0, None] - np.array(tables.codebook)[0, 0])
        assert error[..., axis].min(axis=1).mean() < 0.4 * (1, 3)[axis]
        assert np.ptp(np.array(tables.codebook)[0, 0, :, 1 - axis]) < (1, 3)[1 - axis] * 1.5


# Bytes and options


@pytest.mark.parametrize("dim, size, bits", [(128, 8, 8), (64, 8, 8), (64, 4, 9), (48, 48, 12)])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_bytes_follow_the_formula(dim: int, size: int, bits: int, calibrated: bool, exact: bool) -> None:
    tables = {"codebook": np.ones((2**bits, size))} if calibrated else {}
    transform = vq.a2ats(sub_dim=size, codebook_bits=bits, store=vq.rows() if exact else None, **tables)
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    row = 4 * dim if exact else 2 * (4 * math.ceil(dim / 4) + 2)
    a_token = row + dim // size * (1 + (bits > 8)) + 2 * (not calibrated)
    assert vq.nbytes(transform.init_state(spec)) == 2 * 3 * 40 * a_token + 2 * 4
    if (dim, calibrated) == (128, False):
        assert a_token == (530 if exact else 278)


BAD_VALUES: dict[str, list[Any]] = {
    "codebook_bits": [0, 13, 8.0, True],
    "sub_dim": [0, 2.0],
    "window": [-1, 1.5],
    "b": [-1, None],
    "use_query_aware": [1, None],
    "beta": [-0.1, 1.1, math.nan, True],
    "retrieval_fraction": [-0.1, 1.1, "all", math.nan],
    "rope_base": [0, -1, math.nan, "10000"],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "yarn"}, {"type": "llama3"}, "llama3", 3],
    "query_h": [np.eye(5), np.ones(4), -np.eye(4), np.triu(np.ones((4, 4))), np.eye(4) * math.nan],
    "codebook": [np.ones((7, 4)), np.ones((8, 5)), np.ones((1, 1, 1, 8, 4)), np.full((8, 4), math.inf)],
    "n_sink": [-1, 2.0],
    "rope_dims": [0, 7, 4.0],
    "rope_traditional": [0, None],
    "far_rope": ["near", None],
    "proxy": ["queries", True],
    "seed": [-1, 1.5],
}


@pytest.mark.parametrize("field, value", [(f, x) for f, values in BAD_VALUES.items() for x in values])
def test_options_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^a2ats: `{field}` .*; got "):
        method(**{field: value})


def calibrate(keys: tuple[int, ...], queries: tuple[int, ...] = (4, 2, DIM), **options: Any) -> Any:
    return vq.a2ats_calibrate(mx.zeros(keys), mx.zeros(queries), **SMALL, **options)


def start(dim: int, **options: Any) -> Any:
    return method(**options).init_state(vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=8))


@pytest.mark.parametrize(
    "named, call",
    [
        ("a2ats: `sub_dim`", lambda: start(18)),
        ("a2ats: `head_dim`", lambda: start(15, sub_dim=5)),
        ("a2ats: `rope_dims`", lambda: start(DIM, rope_dims=18)),
        ("a2ats: `codebook`", lambda: start(DIM, codebook=np.ones((3, 1, 8, SIZE)))),
        ("a2ats: `codebook`", lambda: start(DIM, codebook=np.ones((3, 8, SIZE)))),
        ("a2ats: `query_h`", lambda: start(DIM, query_h=np.tile(np.eye(SIZE), (5, 1, 1)))),
        ("a2ats: `store`", lambda: method(store=vq.kivi())),
        ("a2ats: `store`", lambda: method(store=vq.rows(key=vq.qjl_codec()))),
        ("a2ats_calibrate: `keys`", lambda: calibrate((4, 2))),
        ("a2ats_calibrate: `keys`", lambda: calibrate((4, 2, 18))),
        ("a2ats_calibrate: `queries`", lambda: calibrate((4, 2, DIM), (4, 3, DIM))),
        ("a2ats_calibrate: `queries`", lambda: calibrate((4, 2, DIM), (5, 2, DIM))),
        ("a2ats_calibrate: `positions`", lambda: calibrate((4, 2, DIM), positions=mx.arange(5))),
        ("a2ats_calibrate: `rounds`", lambda: calibrate((4, 2, DIM), rounds=0)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(named: str, call: Callable[[], Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{named} .*; got "):
        call()


def test_the_first_call_without_a_codebook_warns() -> None:
    code = """
import warnings
import numpy as np
from vq_functional.hybrid.a2ats import a2ats
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    a2ats(codebook=np.ones((256, 8)))
    assert not caught
    a2ats(), a2ats()
    assert [str(x.message).split(":")[0] for x in caught] == ["a2ats"] and caught[0].category is UserWarning
"""
    subprocess.run([sys.executable, "-c", code], check=True)
