"""Attention over parts against one softmax over the concatenation, in double precision."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.codebook.turboquant_mse import turboquant_mse_codec
from vq_functional.core.codec import Codec, Part, PlainCodec, bind
from vq_functional.core.errors import QuantizerConfigError
from vq_functional.ops.attention import Parts, attend, decode, logits, lower_right, masked, probabilities
from vq_functional.quantize.int8 import int8_codec

DIM, SCALE = 64, 64**-0.5
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
LAYOUTS = {
    "plain": (PlainCodec(),),
    "codes": (int8_codec(),),
    "codes and plain": (int8_codec(), PlainCodec()),
    "three parts": (turboquant_mse_codec(bits=3), PlainCodec(), int8_codec()),
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).split(".")[-1])
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
groups = pytest.mark.parametrize("group", [1, 4])


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def parts_of(x: mx.array, layout: tuple[Codec, ...]) -> Parts:
    """Rows of `x` in as many parts as the layout has, of unequal sizes."""
    count, parts, start = x.shape[2], [], 0
    for i, codec in enumerate(layout):
        end = count if i == len(layout) - 1 else start + count // (len(layout) + i)
        coder = bind(codec, x.shape[3], x.dtype)
        parts.append(Part(coder, coder.encode(x[:, :, start:end]), end - start))
        start = end
    return tuple(parts)


def scene(
    layout: tuple[Codec, ...], columns: int, n: int, group: int, dtype: mx.Dtype = mx.float32, batch: int = 2
) -> tuple[Parts, Parts, mx.array]:
    keys = parts_of(draw(batch, 2, columns, DIM, dtype=dtype), layout)
    values = parts_of(draw(batch, 2, columns, 96, seed=1, dtype=dtype), layout[::-1])
    return keys, values, draw(batch, 2 * group, n, DIM, seed=2, dtype=dtype)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def attended_by_hand(keys: mx.array, values: mx.array, queries: mx.array, mask: np.ndarray | None = None) -> np.ndarray:
    """Head by head and query by query; a bool or additive `mask` broadcasts to [B, Hq, S, C]."""
    k, v, q = numbers(keys), numbers(values), numbers(queries)
    batch, query_heads, n, _ = q.shape
    out = np.zeros((batch, query_heads, n, v.shape[-1]))
    if mask is not None:
        mask = np.broadcast_to(mask, (batch, query_heads, n, k.shape[2]))
    for b, head, i in itertools.product(range(batch), range(query_heads), range(n)):
        kv_head = head * k.shape[1] // query_heads
        scores = k[b, kv_head] @ q[b, head, i] * SCALE
        if mask is not None:
            row = mask[b, head, i]
            scores = np.where(row, scores, -1e30) if row.dtype == bool else scores + row
        out[b, head, i] = softmax(scores) @ v[b, kv_head]
    return out


def staircase(n: int, columns: int) -> np.ndarray:
    """Query i sees column j when j <= i + columns - n."""
    return np.array([[j <= i + columns - n for j in range(columns)] for i in range(n)])


def assert_equal_to_hand(
    layout: tuple[Codec, ...], columns: int, n: int, group: int, dtype: mx.Dtype, mask, by_hand: np.ndarray | None
) -> None:
    keys, values, queries = scene(layout, columns, n, group, dtype)
    got = attend(keys, values, queries, SCALE, mask)
    assert got.dtype == dtype and got.shape == (2, 2 * group, n, 96)
    want = attended_by_hand(decode(keys), decode(values), queries, by_hand)
    # Plain rows alone go through MLX's own attention, which may round its scores to the input dtype.
    factor = 2 if layout == LAYOUTS["plain"] else 1
    np.testing.assert_allclose(numbers(got), want, atol=factor * TOLERANCE[dtype])


@dtypes
@layouts
@groups
@pytest.mark.parametrize("n", [1, 5])
def test_without_a_mask(n: int, group: int, layout: tuple[Codec, ...], dtype: mx.Dtype) -> None:
    assert_equal_to_hand(layout, 40, n, group, dtype, None, None)


@dtypes
@layouts
@groups
@pytest.mark.parametrize("n", [1, 5, 40])
def test_causal_is_lower_right(n: int, group: int, layout: tuple[Codec, ...], dtype: mx.Dtype) -> None:
    assert_equal_to_hand(layout, 40, n, group, dtype, "causal", staircase(n, 40))


MASK_SHAPES = {"2-d": (5, 40), "heads of queries": (8, 5, 40), "all heads": (2, 1, 5, 40), "each head": (2, 8, 5, 40)}


@layouts
@pytest.mark.parametrize("shape", MASK_SHAPES.values(), ids=MASK_SHAPES.keys())
@pytest.mark.parametrize("kind", ["bool", "additive", "minus infinity"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_arrays_as_masks(dtype: mx.Dtype, kind: str, shape: tuple[int, ...], layout: tuple[Codec, ...]) -> None:
    seen = np.random.default_rng(3).random(shape) < 0.7
    seen[..., 0] = True
    if kind == "bool":
        mask = mx.array(seen)
    elif kind == "additive":
        mask = draw(*shape, seed=4, dtype=dtype)
    else:
        mask = mx.where(mx.array(seen), 0.0, -mx.inf).astype(dtype)
    by_hand = seen if kind == "bool" else numbers(mask)
    assert_equal_to_hand(layout, 40, 5, 4, dtype, mask, by_hand)


@pytest.mark.parametrize("layout", [LAYOUTS["codes"], LAYOUTS["codes and plain"]], ids=["codes", "codes and plain"])
def test_one_query_of_a_padded_batch_at_eight_bits(layout: tuple[Codec, ...]) -> None:
    hidden = np.arange(66)[None, None, None] >= np.array([0, 9])[:, None, None, None]
    assert_equal_to_hand(layout, 66, 1, 4, mx.float32, mx.array(hidden), hidden)
    per_head = draw(2, 8, 1, 66, seed=5)
    assert_equal_to_hand(layout, 66, 1, 4, mx.float32, per_head, numbers(per_head))


@dtypes
@layouts
def test_a_query_that_sees_nothing_stays_finite(layout: tuple[Codec, ...], dtype: mx.Dtype) -> None:
    keys, values, queries = scene(layout, 20, 3, 2, dtype)
    seen = np.ones((3, 20), bool)
    seen[1] = False
    masks = [mx.array(seen), mx.where(mx.array(seen), 0.0, mx.finfo(dtype).min).astype(dtype)]
    for mask in masks:
        got = attend(keys, values, queries, SCALE, mask)
        assert mx.isfinite(got).all()
        want = attended_by_hand(decode(keys), decode(values), queries)
        np.testing.assert_allclose(numbers(got)[:, :, [0, 2]], want[:, :, [0, 2]], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "layout", [layout for name, layout in LAYOUTS.items() if name != "plain"], ids=[n for n in LAYOUTS if n != "plain"]
)
def test_a_query_behind_minus_infinities_stays_finite(layout: tuple[Codec, ...]) -> None:
    keys, values, queries = scene(layout, 20, 3, 2)
    mask = mx.where(mx.arange(3)[:, None] == 1, -mx.inf, mx.zeros((3, 20)))
    assert mx.isfinite(attend(keys, values, queries, SCALE, mask)).all()


@pytest.mark.parametrize("n, columns", [(10, 4), (4, 10), (1, 1), (1, 7), (6, 6)])
def test_lower_right_corner(n: int, columns: int) -> None:
    assert np.array_equal(np.array(lower_right(n, columns)), staircase(n, columns))


@pytest.mark.parametrize("layout", [LAYOUTS["codes"], LAYOUTS["codes and plain"]], ids=["codes", "codes and plain"])
def test_more_queries_than_columns(layout: tuple[Codec, ...]) -> None:
    keys, values, queries = scene(layout, 8, 12, 1)
    got = attend(keys, values, queries, SCALE, "causal")
    want = attended_by_hand(decode(keys), decode(values), queries, staircase(12, 8))
    assert mx.isfinite(got).all()
    np.testing.assert_allclose(numbers(got)[:, :, 4:], want[:, :, 4:], atol=2e-5)


@given(columns=st.integers(1, 30), n=st.integers(1, 6), group=st.sampled_from([1, 2, 3]), cut=st.floats(0, 1))
def test_where_the_parts_are_cut_makes_no_difference(columns: int, n: int, group: int, cut: float) -> None:
    keys, values = draw(1, 2, columns, DIM), draw(1, 2, columns, DIM, seed=1)
    queries = draw(1, 2 * group, n, DIM, seed=2)
    coder, at = bind(int8_codec(), DIM, mx.float32), int(cut * columns)

    def parts(x: mx.array, edges: list[int]) -> Parts:
        spans = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
        return tuple(Part(coder, coder.encode(x[:, :, a:b]), b - a) for a, b in spans)

    whole, split = [0, columns], [0, at, columns]
    one = attend(parts(keys, whole), parts(values, whole), queries, SCALE)
    two = attend(parts(keys, split), parts(values, split), queries, SCALE)
    other = attend(parts(keys, whole), parts(values, split), queries, SCALE)
    assert mx.allclose(one, two, atol=1e-6) and mx.allclose(one, other, atol=1e-6)


@dtypes
@layouts
@groups
def test_logits_are_scaled_products_by_kv_head(group: int, layout: tuple[Codec, ...], dtype: mx.Dtype) -> None:
    keys, _, queries = scene(layout, 30, 4, group, dtype)
    got = logits(keys, queries, SCALE)
    assert got.dtype == mx.float32 and got.shape == (2, 2, group, 4, 30)
    k, q = numbers(decode(keys)), numbers(queries)
    for head in range(2 * group):
        want = q[:, head] @ k[:, head // group].swapaxes(-1, -2) * SCALE
        # A coder's products skip the rounding of decoded rows to the input dtype.
        np.testing.assert_allclose(numbers(got)[:, head // group, head % group], want, atol=4 * TOLERANCE[dtype])


def test_scores_are_summed_in_single_precision() -> None:
    keys, queries = (draw(1, 1, s, 256, seed=s, dtype=mx.float16) * 8 for s in (20, 3))
    for codec in (PlainCodec(), int8_codec()):
        parts = parts_of(keys, (codec,))
        want = numbers(queries) @ numbers(decode(parts)).swapaxes(-1, -2)
        got = numbers(logits(parts, queries, 1.0))[:, 0]
        assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()
    huge = mx.full((1, 1, 1, 256), 30000.0, mx.float16)
    assert mx.isfinite(logits(parts_of(huge, (PlainCodec(),)), huge, 1.0)).all()


@layouts
@groups
def test_probabilities_over_visible_columns(group: int, layout: tuple[Codec, ...]) -> None:
    keys, _, queries = scene(layout, 30, 4, group)
    visible = np.random.default_rng(6).random((2, 2, 4, 30)) < 0.5
    visible[:, :, 2] = False
    got = probabilities(keys, queries, SCALE, mx.array(visible))
    assert got.dtype == mx.float32 and got.shape == (2, 2, group, 4, 30)
    k, q = numbers(decode(keys)), numbers(queries)
    for b, head, i in itertools.product(range(2), range(2 * group), range(4)):
        seen = visible[b, head // group, i]
        want = np.zeros(30)
        if seen.any():
            want[seen] = softmax(k[b, head // group][seen] @ q[b, head, i] * SCALE)
        np.testing.assert_allclose(numbers(got)[b, head // group, head % group, i], want, atol=2e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_takes_no_probability(bad: float) -> None:
    keys, queries = draw(1, 1, 10, DIM), draw(1, 1, 2, DIM, seed=1)
    keys[0, 0, 3, 0] = bad
    got = probabilities(parts_of(keys, (PlainCodec(),)), queries, SCALE, mx.ones((1, 1, 2, 10), mx.bool_))
    assert got[..., 3].max().item() == 0
    assert mx.allclose(got.sum(axis=-1), mx.ones((1, 1, 1, 2)), atol=1e-5)


def test_masked_lowers_and_never_overflows() -> None:
    scores = draw(1, 2, 2, 3, 6)
    lowest = mx.finfo(mx.float32).min
    assert mx.array_equal(masked(scores, None), scores)
    for mask in (mx.full((3, 6), -mx.inf), mx.full((3, 6), lowest)):
        got = masked(scores, mask)
        assert mx.isfinite(got).all() and got.min().item() >= lowest
    seen = mx.array(staircase(3, 6))
    assert mx.array_equal(masked(scores, seen), masked(scores, "causal"))


def test_decode_joins_the_parts_in_order() -> None:
    x = draw(1, 2, 12, DIM, dtype=mx.bfloat16)
    parts = parts_of(x, (PlainCodec(), PlainCodec(), PlainCodec()))
    assert mx.array_equal(decode(parts), x)


@pytest.mark.parametrize(
    "field, mask, heads",
    [("mask", "upper", 8), ("mask", mx.ones((2, 3, 5, 20)), 8), ("queries", None, 3)],
    ids=["word", "heads of a mask", "heads of queries"],
)
def test_what_cannot_be_is_refused_by_name(field: str, mask: mx.array | str | None, heads: int) -> None:
    keys, values, _ = scene(LAYOUTS["codes"], 20, 5, 4)
    with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
        attend(keys, values, draw(2, heads, 5, DIM), SCALE, mask)
