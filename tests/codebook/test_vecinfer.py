"""VecInfer against its formulas in numpy: nearest entries, bit streams, factors, rotations, calibration, bytes."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import assert_same, draw, feed, feed_more, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

import vq_functional as vq
from vq_functional.codebook.vecinfer import VecInferTables
from vq_functional.core.codec import bind
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.ops.kmeans import kmeans
from vq_functional.ops.vector_codes import pack_index, unpack_index

HEADS, DIM = 2, 32
pytestmark = pytest.mark.filterwarnings("ignore:vecinfer. without codebooks")
dtypes = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=lambda dtype: str(dtype).split(".")[-1]
)
SMALL: dict[str, Any] = {"key_codebook_bits": 6, "value_codebook_bits": 5, "value_sub_dim": 4}
FACTORS = np.exp(np.random.RandomState(1).standard_normal((HEADS, DIM))).astype(np.float32)
TABLES: dict[str, Any] = {
    "smooth_factors": FACTORS,
    "key_codebook": np.random.RandomState(2).standard_normal((64, 4)).astype(np.float32),
    "value_codebook": np.random.RandomState(3).standard_normal((32, 4)).astype(np.float32),
}
both_ways = pytest.mark.parametrize("options", [SMALL, SMALL | TABLES], ids=["free", "calibrated"])


def coder_of(side: str, dim: int = DIM, dtype: mx.Dtype = mx.float32, **options: Any) -> Any:
    return bind(vq.vecinfer_codec(side=side, **options), dim, dtype)


# The oracle


def hadamard(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(dim)


def distances(x: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Squared distances [..., M, K] of the sub-vectors of rows [..., D]."""
    cut = x.reshape(*x.shape[:-1], -1, 1, entries.shape[1]).astype(np.float64)
    return np.square(cut - entries.astype(np.float64)).sum(axis=-1)


def stream_codes(words: list[int], bits: int, count: int) -> list[int]:
    """Codes of a bit stream, one bit at a time, least significant first."""
    total = sum(word << 32 * at for at, word in enumerate(words))
    return [total >> place * bits & (2**bits - 1) for place in range(count)]


def indices_of(codes: Any, bits: int, count: int) -> np.ndarray:
    """Indices [..., count]: a stream; from eight bits on bytes, and the rest of the bits as a stream beside them."""
    low, *high = (np.array(x) for x in codes)
    lead = low.shape[:-1]
    if low.dtype == np.uint8:
        found = low.reshape(-1, count).astype(np.int64)
        for row, words in zip(found, high[0].reshape(len(found), -1).tolist() if high else ()):
            row += np.array(stream_codes(words, bits - 8, count)) << 8
        return found.reshape(*lead, count)
    rows = [stream_codes(words, bits, count) for words in low.reshape(-1, low.shape[-1]).tolist()]
    return np.array(rows).reshape(*lead, count)


def check_nearest(got: np.ndarray, x: np.ndarray, entries: np.ndarray, gap: float = 1e-5) -> None:
    """Each index is that of the nearest entry, or of one that is as near but for rounding."""
    distance = distances(x, entries)
    taken = np.take_along_axis(distance, got[..., None], axis=-1)[..., 0]
    assert (taken <= distance.min(axis=-1) * (1 + gap) + gap**2).all()
    assert (got == distance.argmin(axis=-1)).mean() > 0.999


def error(coder: Any, x: mx.array) -> np.ndarray:
    """Squared error by channel over the squares of the channel, and over all."""
    plain, off = numbers(x), numbers(coder.decode(coder.encode(x))) - numbers(x)
    by_channel = np.square(off).sum(axis=(0, 1, 2)) / np.square(plain).sum(axis=(0, 1, 2))
    return np.array([np.square(off).sum() / np.square(plain).sum(), by_channel.mean()])


# Codes


@pytest.mark.parametrize("factors", [None, FACTORS[0], FACTORS], ids=["ones", "shared", "heads"])
def test_keys_are_smoothed_turned_and_coded_by_the_nearest_entry(factors: np.ndarray | None) -> None:
    x, entries = draw(2, HEADS, 9, DIM), TABLES["key_codebook"]
    coder = coder_of("key", **SMALL, key_codebook=entries, smooth_factors=factors)
    scale = np.ones((1, 1, DIM)) if factors is None else factors.reshape(-1, 1, DIM)
    rows = coder.encode(x)
    index = indices_of(rows, 6, 8)
    check_nearest(index, numbers(x) / scale @ hadamard(DIM), entries)
    want = entries[index].reshape(x.shape) @ hadamard(DIM).T * scale
    np.testing.assert_allclose(numbers(coder.decode(rows)), want, rtol=1e-5, atol=1e-5)


def test_calibrated_values_are_coded_as_they_come() -> None:
    x, entries = draw(2, HEADS, 9, 20), TABLES["value_codebook"]
    coder = coder_of("value", 20, **SMALL, **TABLES)
    rows = coder.encode(x)
    index = indices_of(rows, 5, 5)
    check_nearest(index, numbers(x), entries)
    np.testing.assert_array_equal(numbers(coder.decode(rows)), entries[index].reshape(x.shape))


@pytest.mark.parametrize("size, bits", [(1, 5), (3, 6), (4, 8), (4, 9), (2, 9), (2, 11)], ids=str)
@pytest.mark.parametrize("side", ["key", "value"])
def test_free_rows_are_turned_and_divided_by_their_root_mean_square(side: str, size: int, bits: int) -> None:
    dim = 48
    options: dict[str, Any] = {f"{side}_sub_dim": size, f"{side}_codebook_bits": bits}
    factors = FACTORS[:, :1] + np.arange(dim) if side == "key" else np.ones((HEADS, dim))
    if side == "key":
        options["smooth_factors"] = factors
    coder, x = coder_of(side, dim, **options), draw(1, HEADS, 9, dim, seed=bits) * 7
    rotation = numbers(coder.rotation.apply(mx.eye(dim)))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(dim), atol=1e-6)
    *codes, gain = rows = coder.encode(x)
    turned = numbers(x) / factors[:, None] @ rotation
    rms = np.sqrt(np.square(turned).mean(axis=-1))
    assert gain.dtype == mx.bfloat16
    np.testing.assert_allclose(numbers(gain), rms, rtol=2.0**-8)
    index, entries = indices_of(codes, bits, dim // size), numbers(coder.codes.codebook.entries)
    assert entries.shape == (2**bits, size) and len(np.unique(entries, axis=0)) == 2**bits
    check_nearest(index, turned / rms[..., None], entries, 1e-4)
    want = numbers(gain)[..., None] * entries[index].reshape(x.shape) @ rotation.T * factors[:, None]
    np.testing.assert_allclose(numbers(coder.decode(rows)), want, rtol=1e-4, atol=1e-4)


def test_rotations() -> None:
    calibrated, free, other = (coder_of("key", seed=seed, **o) for seed, o in ((1, TABLES | SMALL), (1, {}), (2, {})))
    plain, first, second = (numbers(x.rotation.apply(mx.eye(DIM))) for x in (calibrated, free, other))
    np.testing.assert_allclose(plain, hadamard(DIM), atol=1e-6)
    np.testing.assert_allclose(np.abs(first), np.abs(plain), atol=1e-6)
    assert np.abs(first - plain).max() > 0.1 and np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (1.0, 100.0), (1e-4, 0.0), (3e4, 0.0)], ids=str)
@dtypes
def test_entries_are_coded_as_themselves(scale: float, offset: float, dtype: mx.Dtype) -> None:
    """Entries near 100 overflow half precision when squared and summed, and single precision cancels them."""
    grid = (np.random.RandomState(4).permutation(256).reshape(64, 4) % 61 - 30) / 32 * scale + offset
    entries = numbers(mx.array(grid.astype(np.float32)).astype(dtype))
    entries = np.unique(entries, axis=0)
    count = 2 ** int(math.log2(len(entries)))
    entries = entries[:count]
    options: dict[str, Any] = {
        "value_sub_dim": 4,
        "value_codebook_bits": int(math.log2(count)),
        "value_codebook": entries,
    }
    coder, x = coder_of("value", 8, dtype, **options), mx.array(entries.reshape(1, 1, -1, 8)).astype(dtype)
    rows = coder.encode(x)
    assert indices_of(rows, options["value_codebook_bits"], 2).ravel().tolist() == list(range(count))
    assert mx.array_equal(coder.decode(rows), x)


def test_of_equally_near_entries_the_lowest_is_taken() -> None:
    entries = np.array([[9, 9], [1, 0], [-1, 0], [1, 0]], np.float32)
    coder = coder_of("value", 4, value_sub_dim=2, value_codebook_bits=2, value_codebook=entries)
    index = indices_of(coder.encode(mx.array([[[[0.0, 5.0, 1.0, 0.0]]]])), 2, 2)
    assert index.ravel().tolist() == [1, 1]


@given(data=st.data(), bits=st.integers(1, 16), count=st.integers(1, 70))
@settings(max_examples=40)
def test_indices_of_any_width_are_packed_without_a_trace(data: st.DataObject, bits: int, count: int) -> None:
    seed = data.draw(st.integers(0, 2**31))
    index = np.random.RandomState(seed).randint(0, 2**bits, (3, count)).astype(np.uint32)
    index[0] = 2**bits - 1
    codes = pack_index(mx.array(index), bits)
    assert sum(x.nbytes for x in codes) <= 3 * 4 * math.ceil(count * bits / 32)
    np.testing.assert_array_equal(indices_of(codes, bits, count), index)
    np.testing.assert_array_equal(np.array(unpack_index(codes, bits, count)), index)


# Products


@pytest.mark.parametrize("factors", [None, FACTORS[0], FACTORS], ids=["ones", "shared", "heads"])
def test_scores_are_those_of_the_keys_where_nothing_is_lost(factors: np.ndarray | None) -> None:
    """A codebook of every sub-vector; three query heads a KV head."""
    x = draw(1, HEADS, 4, DIM)
    scale = np.ones((1, 1, DIM)) if factors is None else factors.reshape(-1, 1, DIM)
    entries = (numbers(x) / scale @ hadamard(DIM)).reshape(-1, 4)
    options = {**SMALL, "key_codebook": entries, "smooth_factors": factors, "value_codebook": TABLES["value_codebook"]}
    transform = vq.vecinfer(**options)
    held = feed(transform, x, draw(1, HEADS, 4, DIM, seed=1))
    queries = draw(1, 3 * HEADS, 1, DIM, seed=2)
    keys, values = numbers(x)[0], numbers(transform.read(held)[1])[0]
    for n in (1, 30):
        many = draw(1, HEADS, n, DIM, seed=3)
        got = numbers(coder_of("key", **options).dot(many, held.rows.keys))[0, :, :, :4]
        np.testing.assert_allclose(got, numbers(many)[0] @ keys.swapaxes(1, 2), rtol=1e-4, atol=1e-4)
    for head, got in enumerate(numbers(transform.attend(held, queries, 0.3))[0, :, 0]):
        weights = np.exp(0.3 * keys[head // 3] @ numbers(queries)[0, head, 0])
        want = weights / weights.sum() @ values[head // 3, :4]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@both_ways
@dtypes
@pytest.mark.parametrize("n, rows", [(1, 100), (1, 3), (8, 100)], ids=str)
def test_products_equal_those_of_the_decoded_rows(n: int, rows: int, dtype: mx.Dtype, options: dict[str, Any]) -> None:
    """Few queries of many rows go by a table of products, others by the entries."""
    for side in ("key", "value"):
        codes = coder_of(side, DIM, dtype, **options).encode(draw(2, HEADS, rows, DIM, dtype=dtype))
        coder = coder_of(side, **options)
        plain = numbers(coder.decode(codes))
        queries, weights = draw(2, HEADS, n, DIM, seed=1), draw(2, HEADS, n, rows, seed=2)
        scores, sums = coder.dot(queries, codes), coder.mix(weights, codes)
        assert scores.dtype == sums.dtype == mx.float32
        np.testing.assert_allclose(numbers(scores), numbers(queries) @ plain.swapaxes(-1, -2), rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(numbers(sums), numbers(weights) @ plain, rtol=1e-4, atol=2e-4)


# Errors of normal rows and of outliers


@pytest.mark.parametrize("size, bits, want", [(4, 8, 0.099), (8, 8, 0.326), (4, 12, 0.0275)])
def test_error_of_normal_rows_without_a_codebook(size: int, bits: int, want: float) -> None:
    for side in ("key", "value"):
        coder = coder_of(side, 64, mx.float32, **{f"{side}_sub_dim": size, f"{side}_codebook_bits": bits})
        assert error(coder, draw(1, 1, 600, 64, seed=5))[0] == pytest.approx(want, rel=0.05)


def test_outlier_channels() -> None:
    loud = mx.where(mx.arange(64) == 7, 50, 1)
    samples, x = draw(300, 1, 64) * loud, draw(1, 1, 300, 64, seed=1) * loud
    tables = vq.vecinfer_calibrate(samples, samples, key_codebook_bits=6, rounds=8)
    bare = vq.vecinfer_calibrate(samples, samples, key_codebook_bits=6, rounds=8, smooth_factors=mx.ones((64,)))
    smoothed, plain, free = (
        error(coder_of("key", 64, key_codebook_bits=6, smooth_factors=f, key_codebook=c), x)
        for f, c in ((tables.smooth_factors, tables.key_codebook), (None, bare.key_codebook), (None, None))
    )
    assert 3 * smoothed[0] < free[0]
    assert 1.7 * smoothed[1] < plain[1]


# Calibration


def test_factors_are_roots_of_the_largest_keys() -> None:
    keys = np.array(draw(30, HEADS, 16)).copy()
    keys[:, 1, 5], keys[3, 0, 2], keys[:, 0, 1], keys[4, 1, 3] = 0, -40, 1e-10, math.inf
    found = vq.vecinfer_calibrate(mx.array(keys), mx.array(keys), rounds=1, **SMALL).smooth_factors
    largest = np.abs(np.where(np.isfinite(keys), keys, 0)).max(axis=0)
    np.testing.assert_allclose(np.array(found), np.maximum(np.sqrt(largest), 1e-4), rtol=1e-6)


def test_codebooks_hold_every_sub_vector_where_they_can() -> None:
    """Of smoothed and rotated keys, and of values as they come; rows that are not finite are left out."""
    keys, values = np.array(draw(4, HEADS, 16)), np.array(draw(4, HEADS, 8, seed=1))
    keys[2, 1, 3], values[1, 0, 2] = math.nan, math.inf
    tables = vq.vecinfer_calibrate(mx.array(keys), mx.array(values), **SMALL)
    factors = np.sqrt(np.abs(np.nan_to_num(keys)).max(axis=0))
    turned = (keys / factors @ hadamard(16)).reshape(-1, 4)
    for codebook, x in ((tables.key_codebook, turned), (tables.value_codebook, values.reshape(-1, 4))):
        entries, x = numbers(codebook), x[np.isfinite(x).all(axis=1)]
        assert np.isfinite(entries).all()
        assert distances(x, entries).min(axis=-1).max() < 1e-9


def test_centroids_are_means_of_their_cells() -> None:
    samples = np.random.RandomState(5).standard_normal((400, 3)).astype(np.float32) + 20
    entries = kmeans(samples, 9, rounds=200, seed=1)
    cells = distances(samples, entries)[:, 0].argmin(axis=-1)
    assert len(set(cells.tolist())) == 9
    want = np.stack([samples[cells == cell].mean(axis=0) for cell in range(9)])
    np.testing.assert_allclose(entries, want, atol=1e-4)
    assert np.array_equal(entries, kmeans(samples, 9, rounds=200, seed=1))
    assert not np.array_equal(entries, kmeans(samples, 9, rounds=200, seed=2))


def test_calibration_feeds_the_method() -> None:
    keys, values = draw(40, HEADS, 16), draw(40, HEADS, 8, seed=1)
    tables, again, other = (vq.vecinfer_calibrate(keys, values, rounds=3, seed=s, **SMALL) for s in (1, 1, 2))
    arrays = tables.arrays()
    assert {name: x.shape for name, x in arrays.items()} == {
        "smooth_factors": (2, 16),
        "key_codebook": (64, 4),
        "value_codebook": (32, 4),
    }
    assert all(mx.array_equal(x, again.arrays()[name]) for name, x in arrays.items())
    assert not mx.array_equal(tables.key_codebook, other.key_codebook)
    rebuilt = VecInferTables.from_arrays(arrays).arrays()
    assert vq.vecinfer(**SMALL, **arrays) == vq.vecinfer(**SMALL, **rebuilt)
    assert vq.vecinfer(**SMALL, **arrays) != vq.vecinfer(**SMALL, **other.arrays())


# Numbers and calls


@both_ways
@dtypes
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_zeros_and_rows_that_are_not_finite_stay_alone(bad: float, dtype: mx.Dtype, options: dict[str, Any]) -> None:
    clean = draw(1, HEADS, 5, DIM, dtype=dtype)
    x, others = mx.where(mx.arange(5)[:, None] == 2, bad, clean).astype(dtype), mx.array([0, 1, 3, 4])
    for side in ("key", "value"):
        coder = coder_of(side, DIM, dtype, **options)
        for one, two in zip(coder.encode(clean), coder.encode(x)):
            assert mx.array_equal(one[:, :, others], two[:, :, others])
        read = coder.decode(coder.encode(x))
        assert read.dtype == dtype and mx.isfinite(read).all()
        assert "key_codebook" in options or (read[:, :, 2] == 0).all()


@given(data=st.data(), n=st.integers(1, 20), calibrated=st.booleans())
@settings(max_examples=10)
def test_any_cut_leaves_no_trace(data: st.DataObject, n: int, calibrated: bool) -> None:
    transform = vq.vecinfer(**SMALL, **(TABLES if calibrated else {}))
    edges = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)) - {n})
    cuts = [b - a for a, b in itertools.pairwise([0, *edges])]
    keys, values = draw(1, HEADS, n, DIM), draw(1, HEADS, n, 48, seed=1)
    whole = feed(transform, keys, values)
    assert_same(feed(transform, keys, values, cuts), whole)
    x = data.draw(st.integers(0, n))
    short = transform.trim(whole, x)
    assert short.offset.item() == n - x
    if x:
        assert_same(feed_more(transform, short, keys[:, :, n - x :], values[:, :, n - x :]), whole, n)


@both_ways
def test_batch_rows_are_alone(options: dict[str, Any]) -> None:
    loud = mx.array([1.0, 1000.0])[:, None, None, None]
    keys, values = draw(2, HEADS, 20, DIM) * loud, draw(2, HEADS, 20, DIM, seed=1) * loud
    both, alone = (feed(vq.vecinfer(**options), keys[:b], values[:b]) for b in (2, 1))
    assert_same(map_leaves(lambda x: x[:1], both), alone)


# Bytes and options


@pytest.mark.parametrize(
    "dim, options", [(128, {}), (64, {}), (128, {"key_codebook_bits": 8, "value_sub_dim": 4}), (64, SMALL)], ids=str
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_bytes_follow_the_formula(dim: int, options: dict[str, Any], calibrated: bool) -> None:
    a = {"key_sub_dim": 4, "value_sub_dim": 8, "key_codebook_bits": 12, "value_codebook_bits": 8} | options
    sides = {side: (a[f"{side}_sub_dim"], a[f"{side}_codebook_bits"]) for side in ("key", "value")}
    tables = {f"{side}_codebook": np.ones((2**bits, size)) for side, (size, bits) in sides.items()}
    transform = vq.vecinfer(**options, **(tables if calibrated else {}))
    state = transform.init_state(vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40))
    a_token = [4 * math.ceil(dim // size * bits / 32) + 2 * (not calibrated) for size, bits in sides.values()]
    assert vq.nbytes(state) == 2 * 3 * 40 * sum(a_token) + 2 * 4
    if (dim, options) == (128, {}):
        assert a_token == ([48, 16] if calibrated else [50, 18])
    kinds = {x.dtype for x in flatten(state.rows)[0]}
    assert kinds <= {mx.uint8, mx.uint32} | (set() if calibrated else {mx.bfloat16})


BAD_SIDES: dict[str, list[Any]] = {
    "sub_dim": [0, 2.0],
    "codebook_bits": [0, 17, True],
    "codebook": [np.ones((4096, 5)), np.ones((255, 8)), np.ones(4)],
}
BAD_OPTIONS: list[dict[str, Any]] = [
    *({f"{side}_{field}": bad} for side in ("key", "value") for field, values in BAD_SIDES.items() for bad in values),
    {"key_codebook": np.full((4096, 4), math.nan)},
    {"key_codebook_bits": 9, "key_sub_dim": 15},
    {"smooth_factors": np.zeros(DIM)},
    {"smooth_factors": -np.ones((HEADS, DIM))},
    {"smooth_factors": np.full(DIM, math.inf)},
    {"smooth_factors": np.ones((1, HEADS, DIM))},
    {"seed": -1},
    {"seed": 1.5},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda o: "-".join(o))
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    for build in (vq.vecinfer, vq.vecinfer_codec):
        with pytest.raises(vq.QuantizerConfigError, match=rf"^vecinfer: `{next(iter(options))}` .*; got "):
            build(**options)


def calibrate(keys: tuple[int, ...], values: tuple[int, ...] = (4, 2, 8), **options: Any) -> Any:
    return vq.vecinfer_calibrate(mx.zeros(keys), mx.zeros(values), **options)


def start(dim: int, **options: Any) -> Any:
    return vq.vecinfer(**options).init_state(vq.KVSpec(kv_heads=HEADS, key_dim=dim, value_dim=64))


def test_sizes_without_a_hadamard_transform_are_turned_densely() -> None:
    keys = mx.random.normal((300, HEADS, 80), key=mx.random.key(4))
    with_tables = vq.vecinfer_calibrate(keys, keys, key_codebook_bits=6, value_codebook_bits=6)
    for options in ({}, {"key_codebook": with_tables.key_codebook, "key_codebook_bits": 6}):
        coder = vq.vecinfer_codec(**options).bind(80, mx.float32)
        matrix = numbers(coder.rotation.apply(mx.eye(80)))
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(80), atol=1e-5)
        x = keys[:40].swapaxes(0, 1)[None]
        error = np.square(numbers(coder.decode(coder.encode(x)) - x)).sum() / np.square(numbers(x)).sum()
        assert error < 0.6


@pytest.mark.parametrize(
    "named, call",
    [
        ("vecinfer: `head_dim`", lambda: start(64, key_sub_dim=3, key_codebook_bits=8)),
        ("vecinfer: `smooth_factors`", lambda: start(64, smooth_factors=np.ones(DIM))),
        ("vecinfer: `smooth_factors`", lambda: start(DIM, smooth_factors=np.ones((HEADS + 1, DIM)))),
        ("vecinfer: `side`", lambda: vq.vecinfer_codec(side="both")),
        ("vecinfer_calibrate: `keys`", lambda: calibrate((4, 2))),
        ("vecinfer_calibrate: `keys`", lambda: calibrate((0, 2, 16))),
        ("vecinfer_calibrate: `values`", lambda: calibrate((4, 2, 16), (4, 2, 10))),
        ("vecinfer_calibrate: `rounds`", lambda: calibrate((4, 2, 16), rounds=0)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(named: str, call: Callable[[], Any]) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=f"^{named} .*; got "):
        call()


def test_the_first_call_without_a_codebook_warns() -> None:
    code = """
import warnings
import numpy as np
from vq_functional.codebook.vecinfer import vecinfer
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    vecinfer(key_codebook=np.ones((4096, 4)), value_codebook=np.ones((256, 8)))
    assert not caught
    vecinfer(), vecinfer()
    assert [str(x.message).split(":")[0] for x in caught] == ["vecinfer"] and caught[0].category is UserWarning
"""
    subprocess.run([sys.executable, "-c", code], check=True)
