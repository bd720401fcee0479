"""Outlier channels apart: which are chosen, what both codecs get and give back, bytes, calls, trims, files, options."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from feeding import draw, feed, feed_more, numbers

import vq_functional as vq
from vq_adapters import KVCacheBuilder, KVCacheConfig, KVCacheFactory, TransformKVCache, TurboQuantKVCache, load, save
from vq_functional.codebook.outlier_channels import OutlierChannels
from vq_functional.core.codec import bind
from vq_functional.core.transform import Fill
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.quantize.blocks import Blocks

WARMUP, HEADS, DIM = 24, 2, 64
LARGE = {0: (3, 17, 40), 1: (5, 62)}  # planted channels of each head
BUILDS = {"turboquant_mse": vq.turboquant_mse, "turboquant_prod": vq.turboquant_prod}
CODECS = {"turboquant_mse": vq.turboquant_mse_codec, "turboquant_prod": vq.turboquant_prod_codec}
methods = pytest.mark.parametrize("method", BUILDS)
ways = pytest.mark.parametrize("way", [{"n_outlier_channels": 6}, {"bits_outlier": 3}], ids=["int8", "3 bits"])
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)


def build(method: str, **options: Any) -> Any:
    return BUILDS[method](n_calib_tokens=WARMUP, **options)


def planted(n: int, batch: int = 1, seed: int = 0, dtype: mx.Dtype = mx.float16) -> mx.array:
    """Normal keys whose LARGE channels are 20 times as large."""
    size = np.ones((1, HEADS, 1, DIM))
    for head, channels in LARGE.items():
        size[:, head, :, list(channels)] = 20
    return (draw(batch, HEADS, n, DIM, seed=seed) * mx.array(size, mx.float32)).astype(dtype)


def coder_of(method: str, dtype: mx.Dtype = mx.float16, dim: int = DIM, **options: Any) -> Any:
    return bind(CODECS[method](n_calib_tokens=WARMUP, **options), dim, dtype)


def chosen(x: mx.array, count: int) -> np.ndarray:
    """Channels of the largest mean |x| over the first rows: [B, H, count], rising."""
    means = np.abs(numbers(x)[:, :, :WARMUP]).mean(axis=2)
    return np.sort(np.argsort(-means, axis=-1, kind="stable")[..., :count], axis=-1)


def live(transform: Any, state: Any, row: int = 0) -> tuple[mx.array, ...]:
    """What is held of one batch row, without unused room."""
    one = map_leaves(lambda leaf: leaf[row : row + 1], state)
    fill = Fill(one.offset.item(), one.offset.item(), one.coded.item())
    keys, values = transform.parts(one, fill)
    return (one.offset, one.coded, *(array for part in (*keys, *values) for array in part.rows))


def assert_same(one: tuple[mx.array, ...], other: tuple[mx.array, ...]) -> None:
    assert all(a.dtype == b.dtype and mx.array_equal(a, b) for a, b in zip(one, other, strict=True))


def read(transform: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    n = state.offset[0].item()
    keys, values = transform.read(state, Fill(n, n, state.coded[0].item()))
    return numbers(keys), numbers(values)


# Channels


@pytest.mark.parametrize("count", [1, 3, 16, 63])
@pytest.mark.parametrize("rows", [WARMUP, 90])
def test_channels_of_the_largest_mean_over_the_first_rows(rows: int, count: int) -> None:
    """A head and a batch row of its own each; what comes later does not count."""
    x = mx.concatenate([planted(WARMUP, batch=2), 1000 * draw(2, HEADS, rows - WARMUP, DIM, seed=7)], axis=2)
    (order,) = coder_of("turboquant_mse", mx.float32, n_outlier_channels=count).tables(x.astype(mx.float32))
    assert order.shape == (2, HEADS, DIM) and order.dtype == mx.uint16
    got = np.array(order.astype(mx.int32))
    assert np.array_equal(np.sort(got[..., :count], axis=-1), chosen(x, count))
    assert np.array_equal(np.sort(got, axis=-1), np.broadcast_to(np.arange(DIM), got.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_choose_nothing(bad: float) -> None:
    x = planted(WARMUP)
    coder = coder_of("turboquant_mse", n_outlier_channels=3)
    broken = mx.where((mx.arange(WARMUP) == 5)[:, None] & (mx.arange(DIM) > 45), mx.array(bad, mx.float16), x)
    tables = coder.tables(broken)
    assert np.array_equal(np.sort(np.array(tables[0])[..., :3], axis=-1), chosen(x, 3))
    others = np.arange(WARMUP) != 5
    assert np.isfinite(numbers(coder.decode((*coder.encode_by(broken, tables), *tables)))[:, :, others]).all()


# What the codecs get and give back


@methods
@ways
def test_each_codec_has_its_channels(way: dict[str, int], method: str) -> None:
    x = planted(40)
    coder = coder_of(method, **way)
    tables = coder.tables(x)
    rows = coder.encode_by(x, tables)
    order, count = np.array(tables[0].astype(mx.int32))[0], coder.outer.dim
    ordered = np.stack([np.array(x)[0, head][:, order[head]] for head in range(HEADS)])[None]
    filled = np.zeros((1, HEADS, 40, coder.inner.dim), np.float16)
    filled[..., : DIM - count] = ordered[..., count:]
    inner, outer = coder.inner.encode(mx.array(filled)), coder.outer.encode(mx.array(ordered[..., :count]))
    assert_same(rows, (*inner, *outer))
    want = np.zeros((HEADS, 40, DIM))
    for head in range(HEADS):
        want[head][:, order[head, :count]] = numbers(coder.outer.decode(outer))[0, head]
        want[head][:, order[head, count:]] = numbers(coder.inner.decode(inner))[0, head][:, : DIM - count]
    assert np.array_equal(numbers(coder.decode((*rows, *tables)))[0], want)


def test_eight_bits_and_one_scale_a_token() -> None:
    x = planted(40)
    coder = coder_of("turboquant_mse", n_outlier_channels=6)
    tables = coder.tables(x)
    got, channels = numbers(coder.decode((*coder.encode_by(x, tables), *tables))), chosen(x, 6)
    for head in range(HEADS):
        exact, held = (y[0, head][:, channels[0, head]] for y in (numbers(x), got))
        assert (np.abs(held - exact) <= np.abs(exact).max(axis=-1, keepdims=True) * (0.5 / 127 + 2e-3)).all()


@methods
@ways
@dtypes
def test_products_and_sums_are_those_of_what_is_read(dtype: mx.Dtype, way: dict[str, int], method: str) -> None:
    x = planted(40, dtype=dtype)
    coder = coder_of(method, dtype, **way)
    tables = coder.tables(x)
    rows = (*coder.encode_by(x, tables), *tables)
    queries, weights = draw(1, HEADS, 5, DIM, seed=3), draw(1, HEADS, 5, 40, seed=4)
    held = coder.decode(rows)
    assert held.dtype == dtype and held.shape == x.shape
    fine = {mx.float16: 2e-3, mx.bfloat16: 1e-2, mx.float32: 2e-6}[dtype]
    dots, sums = numbers(queries) @ numbers(held).swapaxes(-1, -2), numbers(weights) @ numbers(held)
    for got, want in ((coder.dot(queries, rows), dots), (coder.mix(weights, rows), sums)):
        assert got.dtype == mx.float32
        np.testing.assert_allclose(numbers(got), want, atol=fine * np.abs(want).max())


@methods
def test_planted_channels_cost_the_others_nothing(method: str) -> None:
    x = planted(200)

    def error(**options: Any) -> float:
        coder = coder_of(method, **options) if options else bind(CODECS[method](), DIM, mx.float16)
        tables = coder.tables(x)
        return np.square(numbers(coder.decode((*coder.encode_by(x, tables), *tables))) - numbers(x)).mean()

    assert error(n_outlier_channels=3) < error() / 5
    assert error(bits_outlier=4) < error() / 5


# Bytes


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim, count, coded", [(64, 8, 64), (64, 1, 64), (128, 8, 128), (128, 40, 96), (80, 8, 72)])
def test_bytes_of_eight_bit_channels(dim: int, count: int, coded: int, bits: int) -> None:
    """As many as without, or fewer; one a channel in whole words, and a scale; an order and exact rows a head."""
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, batch=2, capacity=40)
    state = build("turboquant_mse", bits=bits, n_outlier_channels=count).init_state(spec)
    key = 4 * math.ceil(coded * bits / 32) + 2 + 4 * math.ceil(count / 4) + 2
    assert vq.nbytes(state) == 2 * (3 * (40 * (key + dim + 2) + WARMUP * 4 * dim + 2 * dim) + 8)


@pytest.mark.parametrize("dim", [64, 128])
def test_bytes_of_two_widths(dim: int) -> None:
    """A quarter of the channels at 3 bits, the others at 2, each with a norm."""
    spec = vq.KVSpec(kv_heads=3, key_dim=dim, value_dim=dim, capacity=40)
    state = build("turboquant_mse", bits_outlier=3).init_state(spec)
    key = 4 * math.ceil(dim // 4 * 3 / 32) + 2 + 4 * math.ceil(dim * 3 // 4 * 2 / 32) + 2
    assert vq.nbytes(state) == 3 * (40 * (key + dim + 2) + WARMUP * 4 * dim + 2 * dim) + 8


# Calls


@methods
@ways
@pytest.mark.parametrize("cuts", [[60], [1] * 60, [WARMUP - 1, 1, 35], [10, 1, 40, 9]], ids=len)
def test_state_does_not_depend_on_how_a_prompt_was_cut(cuts: list[int], way: dict[str, int], method: str) -> None:
    transform, keys, values = build(method, **way), planted(60), draw(1, HEADS, 60, DIM, seed=1, dtype=mx.float16)
    whole, pieces = feed(transform, keys, values), feed(transform, keys, values, cuts[:-1])
    assert whole.coded.item() == 60
    assert_same(live(transform, pieces), live(transform, whole))


def test_rows_are_exact_until_the_channels_are_chosen() -> None:
    transform, keys = build("turboquant_mse", n_outlier_channels=3), planted(WARMUP)
    short = feed(transform, keys[:, :, : WARMUP - 1], keys[:, :, : WARMUP - 1])
    assert short.coded.item() == 0
    assert np.array_equal(read(transform, short)[0], numbers(keys)[:, :, : WARMUP - 1])
    full = feed_more(transform, short, keys[:, :, WARMUP - 1 :], keys[:, :, WARMUP - 1 :])
    assert full.coded.item() == WARMUP
    assert not np.array_equal(read(transform, full)[0], numbers(keys))


@methods
@ways
def test_batch_rows_do_not_meet(way: dict[str, int], method: str) -> None:
    transform = build(method, **way)
    keys = mx.concatenate([planted(50), planted(50, seed=5)[..., ::-1]])
    both = feed(transform, keys, keys, [WARMUP - 2, 5])
    for row in range(2):
        alone = feed(transform, keys[row : row + 1], keys[row : row + 1], [WARMUP - 2, 5])
        assert_same(live(transform, both, row), live(transform, alone))


@methods
@ways
def test_grouped_queries_attend_to_what_is_read(way: dict[str, int], method: str) -> None:
    transform, keys, values = build(method, **way), planted(50), draw(1, HEADS, 50, 80, seed=1, dtype=mx.float16)
    state = feed(transform, keys[:, :, :49], values[:, :, :49])
    held = transform.write(state, keys[:, :, 49:], values[:, :, 49:])
    queries = (draw(1, 3 * HEADS, 1, DIM, seed=3) / 4).astype(mx.float16)
    got = numbers(transform.attend(held, queries, DIM**-0.5, fill=Fill(50, 50, 49)))[0]
    k, v = (numbers(x)[0] for x in transform.read(held, Fill(50, 50, 49)))
    for head in range(3 * HEADS):
        scores = k[head // 3] @ numbers(queries)[0, head, 0] * DIM**-0.5
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[head, 0], weights / weights.sum() @ v[head // 3], atol=4e-3)


@ways
@pytest.mark.parametrize("left", [50, WARMUP, WARMUP - 1, 1, 0])
def test_a_trim_leaves_rows_as_they_read(left: int, way: dict[str, int]) -> None:
    """Fewer than the first rows are exact ones again, and tell the channels anew once there are enough."""
    transform, keys = build("turboquant_mse", **way), planted(60)
    whole = feed(transform, keys, keys, capacity=100)
    short = transform.trim(whole, 60 - left)
    assert short.coded.item() == (left if left >= WARMUP else 0)
    for got, want in zip(read(transform, short), read(transform, whole), strict=True):
        assert np.array_equal(got, want[:, :, :left])
    new = planted(40, seed=9)[..., ::-1]
    again = feed_more(transform, short, new, new, [1, 2])
    if left >= WARMUP:
        straight = mx.concatenate([keys[:, :, :left], new], axis=2)
        assert_same(live(transform, again), live(transform, feed(transform, straight, straight, capacity=100)))
    else:
        first = mx.concatenate([mx.array(read(transform, short)[0], mx.float16), new], axis=2)
        got = np.array(again.keys.tables[0])[..., : bind(transform.key, DIM, mx.float16).outer.dim]
        assert np.array_equal(np.sort(got, axis=-1), chosen(first, got.shape[-1]))


# Options


@methods
@pytest.mark.parametrize(
    "options, field",
    [
        ({"n_outlier_channels": -1}, "n_outlier_channels"),
        ({"n_outlier_channels": 1.5}, "n_outlier_channels"),
        ({"n_outlier_channels": 2, "bits_outlier": 3}, "n_outlier_channels"),
        ({"n_outlier_channels": 4, "n_calib_tokens": 0}, "n_calib_tokens"),
        ({"n_calib_tokens": 50}, "n_calib_tokens"),
        ({"bits_outlier": 0}, "bits_outlier"),
        ({"bits_outlier": 9}, "bits_outlier"),
        ({"outlier_two_stream": "yes"}, "outlier_two_stream"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], field: str, method: str) -> None:
    for make in (BUILDS[method], CODECS[method]):
        with pytest.raises(vq.QuantizerConfigError, match=f"{method}: `{field}`"):
            make(**options)


@methods
def test_as_many_channels_as_a_head_has_are_refused(method: str) -> None:
    for count in (DIM, DIM + 1):
        with pytest.raises(vq.QuantizerConfigError, match=f"{method}: `n_outlier_channels` must be below"):
            build(method, n_outlier_channels=count).init_state(vq.KVSpec(kv_heads=1, key_dim=DIM, value_dim=DIM))


@methods
def test_without_them_rows_stand_alone(method: str) -> None:
    assert BUILDS[method]() == BUILDS[method](n_outlier_channels=0, n_calib_tokens=None, bits_outlier=None)
    assert BUILDS[method]() == vq.rows(key=CODECS[method](), value=vq.int8_codec(), name=method)


@methods
@pytest.mark.parametrize("dim, count", [(64, 16), (128, 32), (8, 3)])
def test_a_quarter_of_the_channels_where_no_number_is_given(dim: int, count: int, method: str) -> None:
    for way in ({"bits_outlier": 3}, {"outlier_two_stream": True}):
        assert coder_of(method, dim=dim, **way).outer.dim == count


def test_any_codec_of_rows_that_stand_alone() -> None:
    """Behind exact rows and beside sinks, or on the values' side."""
    for inner in (vq.polar_codec(), vq.qjl_codec(), vq.int8_codec()):
        codec = OutlierChannels(inner, vq.int8_codec(), 4, WARMUP)
        assert (codec.name, codec.keys_only, codec.values_only) == (inner.name, inner.keys_only, inner.values_only)
        value = vq.int8_codec() if inner.keys_only else codec
        state = feed(vq.blocks(key=codec, value=value, residual=8, n_sink=2), planted(60), planted(60))
        assert state.coded.item() == 52
    with pytest.raises(vq.QuantizerConfigError, match="`key` must be a codec whose rows stand alone"):
        vq.rows(key=OutlierChannels(vq.int8_codec(), vq.int8_codec(), 4, WARMUP))
    with pytest.raises(vq.QuantizerConfigError, match="outlier_channels: `inner` must be a codec whose rows"):
        OutlierChannels(codec, vq.int8_codec(), 4, WARMUP)


# Adapters


FIELDS = {
    "n_outlier_channels": (6, {"n_outlier_channels": 6}),
    "bit_width_outlier": (3, {"bits_outlier": 3}),
    "enable_outlier_two_stream": (True, {"outlier_two_stream": True}),
}


@methods
@pytest.mark.parametrize("field", FIELDS)
def test_documented_fields(field: str, method: str) -> None:
    value, options = FIELDS[field]
    config = KVCacheConfig(method=method, head_dim=DIM, n_calib_tokens=WARMUP, **{field: value})
    assert config.transform() == build(method, **options)
    assert KVCacheConfig(method=method, **{field: value}).transform() == BUILDS[method](**options)
    cache = KVCacheFactory.create(config)
    keys, values, query = planted(50)[0, 0], draw(50, DIM, seed=1, dtype=mx.float16), draw(DIM, seed=2) / 8
    for count, (k, v) in enumerate(zip(keys, values, strict=True), 1):
        cache.append(k, v)
        assert cache.memory_bytes() == sum(x.nbytes for x in live(cache.store, cache._cache._state)[2:])
        assert (cache.memory_bytes() == count * 4 * DIM) == (count < WARMUP)
    k, v = (numbers(x)[0, 0] for x in cache._cache.keys_and_values())
    weights = np.exp(k @ numbers(query) * DIM**-0.5)
    np.testing.assert_allclose(numbers(cache.attend(query)), weights / weights.sum() @ v, atol=4e-3)
    cache.reset()
    assert (len(cache), cache.memory_bytes()) == (0, 0)


def test_the_documented_example_builds() -> None:
    builder = KVCacheBuilder().with_method("turboquant_prod").with_head_dim(128).with_bit_width(inlier=2, outlier=3)
    cache = builder.with_jl_dim(128).with_seed(42).build()
    assert type(cache) is TurboQuantKVCache
    assert cache.store == vq.turboquant_prod(bits=2, bits_outlier=3, jl_dim=128, seed=42)
    assert isinstance(cache.store, Blocks)


@methods
@pytest.mark.parametrize("field", ["capacity", "sliding_window"])
def test_a_window_needs_rows_that_stand_alone(field: str, method: str) -> None:
    config = KVCacheConfig(method=method, head_dim=DIM, n_outlier_channels=6)
    setattr(config, field, 5)
    with pytest.raises(vq.QuantizerConfigError, match=f"`{field}`"):
        KVCacheFactory.create(config)


@methods
@pytest.mark.parametrize("n", [WARMUP - 4, 50])
def test_files(n: int, method: str, tmp_path: Any) -> None:
    """A cache that comes back goes on as the one that was saved."""
    config = KVCacheConfig(method=method, bit_width_outlier=3, n_calib_tokens=WARMUP)
    cache, keys = TransformKVCache(config.transform()), planted(n + 10)
    cache.update_and_fetch(keys[:, :, :n], keys[:, :, :n])
    save(tmp_path / "caches", [cache])
    (back,) = load(tmp_path / "caches")
    assert back.transform == cache.transform
    for i in range(n, n + 10):
        new = keys[:, :, i : i + 1]
        for got, want in zip(back.update_and_fetch(new, new), cache.update_and_fetch(new, new), strict=True):
            assert mx.array_equal(mx.array(got), mx.array(want))
    assert_same(flatten(back._settled_state())[0], flatten(cache._settled_state())[0])
