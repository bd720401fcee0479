"""The window of the newest tokens: a ring of slots that must equal windowed attention."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Stream, cuts, feed, make_stream, parts_of, same, seeds, to_numpy

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional import QuantizerConfigError
from vq_functional.core.transform import Fill

WINDOW = 8
CODES = {"key": vq.turboquant_mse_codec(bits=3), "value": vq.int8_codec()}


def windowed_attention(stream: Stream, queries: np.ndarray, window: int) -> np.ndarray:
    """Attention [B, Hq, T, Dv] in float64: each query over itself and the `window` - 1 positions before it."""
    batch, heads, tokens, dim = queries.shape
    group = heads // stream.heads
    out = np.zeros((batch, heads, tokens, stream.values.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                seen = slice(max(0, t - window + 1), t + 1)
                keys, values = (x[b, h // group, seen].astype(np.float64) for x in (stream.keys, stream.values))
                scores = keys @ queries[b, h, t].astype(np.float64) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                out[b, h, t] = weights @ values / weights.sum()
    return out


@given(seed=seeds(), pieces=cuts(), window=st.sampled_from([1, 3, WINDOW, 64]))
@settings(max_examples=25, deadline=None)
def test_attention_is_that_of_a_window(seed: int, pieces: list[int], window: int) -> None:
    """By the arrays that are returned with the mask, and by `attend`."""
    stream = make_stream(seed, sum(pieces), batch=2, heads=2, group=2)
    wanted = windowed_attention(stream, stream.queries, window)
    transform, start = vq.sliding_window(window_size=window), 0
    state = transform.init_state(stream.spec())
    for n in pieces:
        if n == 0:
            continue
        keys, values, queries = parts_of(stream, start, n)
        mask = transform.make_mask(state, n)
        held = transform.write(state, keys, values)
        by_mask = mx.fast.scaled_dot_product_attention(queries, *transform.read(held), scale=0.25, mask=mask)
        here = wanted[:, :, start : start + n]
        np.testing.assert_allclose(to_numpy(by_mask), here, atol=1e-5)
        np.testing.assert_allclose(to_numpy(transform.attend(held, queries, 0.25)), here, atol=1e-5)
        state, start = transform.settle(held, queries), start + n


@given(seed=seeds(), pieces=cuts(), codes=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_cut_leaves_the_same_rows_in_the_same_slots(seed: int, pieces: list[int], codes: bool) -> None:
    stream = make_stream(seed, sum(pieces), batch=2, dtype=mx.float16)
    transform = vq.sliding_window(window_size=WINDOW, **(CODES if codes else {}))
    whole, cut = feed(transform, stream, [sum(pieces)]), feed(transform, stream, pieces)
    position = transform.positions(whole)[:, 0].tolist()
    newest = range(max(0, sum(pieces) - WINDOW), sum(pieces))
    for row in position:
        assert sorted(p for p in row if p >= 0) == list(newest)
        assert all(p % WINDOW == slot for slot, p in enumerate(row) if p >= 0)
    used = min(sum(pieces), WINDOW)
    held = [[leaf[:, :, :used] for leaf in (*state.rows.keys, *state.rows.values)] for state in (whole, cut)]
    assert all(mx.array_equal(one, two) for one, two in zip(*held, strict=True))


def test_rows_are_those_of_streaming_llm_without_sinks() -> None:
    stream = make_stream(3, 60)
    ring, evicting = vq.sliding_window(window_size=WINDOW), vq.streaming_llm(n_sink=0, window_size=WINDOW)
    mine, theirs = feed(ring, stream, [40] + [1] * 20), feed(evicting, stream, [40] + [1] * 20)
    rows = [transform.read(transform.ordered(state)) for transform, state in ((ring, mine), (evicting, theirs))]
    assert all(mx.array_equal(one, two[:, :, :WINDOW]) for one, two in zip(*rows, strict=True))


def test_a_wide_window_is_the_store_alone() -> None:
    stream = make_stream(4, 20, group=2)
    wide, store = vq.sliding_window(window_size=32, **CODES), vq.rows(**CODES)
    keys, values, queries = parts_of(stream, 0, 20)
    outputs = []
    for transform in (wide, store):
        held = transform.write(transform.init_state(stream.spec(capacity=32)), keys, values)
        outputs.append(transform.attend(held, queries, 0.25))
    assert mx.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("padding", [[0, 5], [3, 0]])
def test_left_padding_is_no_token(padding: list[int]) -> None:
    stream, alone = make_stream(5, 30, batch=2), vq.sliding_window(window_size=WINDOW)
    state = alone.init_state(stream.spec(), mx.array(padding))
    for n, start in ((12, 0), (1, 12), (17, 13)):
        state, _, _ = alone.update(state, *parts_of(stream, start, n))
    for row, pad in enumerate(padding):
        single = make_stream(5, 30, batch=2).rows([row])
        real = Stream(single.keys[:, :, pad:], single.values[:, :, pad:], None, single.dtype)
        want = feed(alone, real, [30 - pad])
        got = alone.read(alone.ordered(state))[0][row]
        assert mx.array_equal(got, alone.read(alone.ordered(want))[0][0])


def test_a_row_of_the_batch_that_has_no_token_keeps_all() -> None:
    """Right padding that fills a call of one column."""
    stream, transform = make_stream(6, 9, batch=2), vq.sliding_window(window_size=4)
    state = feed(transform, stream, [8])
    keys, values, _ = parts_of(stream, 8, 1)
    after = transform.settle(transform.write(state, keys, values, mx.array([1, 0])), keys, mx.array([1, 0]))
    assert after.offset.tolist() == [9, 8]
    before = transform.read(transform.ordered(state))
    assert all(mx.array_equal(x[1], y[1]) for x, y in zip(transform.read(transform.ordered(after)), before))


def test_bytes_stay_flat_and_compiled_steps_agree() -> None:
    stream = make_stream(7, 60, dtype=mx.float16)
    transform = vq.sliding_window(window_size=WINDOW, **CODES)
    step, state = vq.compile(transform), feed(transform, stream, [20])
    size, plain = vq.nbytes(state), state
    for start in range(20, 60):
        state, *_ = step.update(state, *parts_of(stream, start, 1)[:2])
        plain, *_ = transform.update(plain, *parts_of(stream, start, 1)[:2])
    assert vq.nbytes(state) == size and same(state, plain)


def test_counts_and_masks_of_the_adapter() -> None:
    stream = make_stream(8, 40, batch=1)
    cache = TransformKVCache(vq.sliding_window(window_size=WINDOW))
    assert cache.make_mask(5) == "causal"
    for start, n, width in ((0, 5, 5), (5, 1, 6), (6, 20, 26), (26, 1, WINDOW), (27, 3, WINDOW + 3)):
        mask = cache.make_mask(n)
        keys, _ = cache.update_and_fetch(*parts_of(stream, start, n)[:2])
        assert keys.shape[2] == width
        assert not isinstance(mask, mx.array) or mask.shape[-1] == width
    assert cache.size() == WINDOW and cache.offset == 30 and not cache.is_trimmable()
    assert cache._fills == [Fill(30, WINDOW)]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_windows_that_are_none(size: object) -> None:
    with pytest.raises(QuantizerConfigError, match="sliding_window: `window_size` must be an integer >= 1"):
        vq.sliding_window(window_size=size)
