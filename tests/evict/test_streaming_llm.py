"""StreamingLLM: sinks and a window of the newest rows, exactly."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    Call,
    StreamingLLMHead,
    compare,
    cuts,
    equal,
    expect,
    feed,
    held_positions,
    held_rows,
    left_padded_calls,
    make_stream,
    plain_calls,
    resume,
    right_padded,
    same,
    seeds,
    spans,
)

from vq_functional import QuantizerConfigError, rows, streaming_llm, streaming_llm_policy

SIZES = st.tuples(st.integers(0, 5), st.integers(0, 12)).filter(any)  # sinks and window


def kept(n_sink: int, window: int, offset: int) -> list[int]:
    """The whole method: which positions stay when `offset` tokens were seen."""
    return [i for i in range(offset) if i < n_sink or i >= offset - window]


@given(seeds(), SIZES, cuts(20), st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 3, 32, 64]))
def test_sinks_and_window(
    seed: int, sizes: tuple[int, int], pattern: list[int], batch: int, heads: int, dim: int
) -> None:
    n_sink, window = sizes
    stream = make_stream(seed, sum(pattern), batch=batch, heads=heads, dim=dim, value_dim=dim + 1)
    calls = plain_calls(pattern, batch)
    told, _ = expect(lambda: StreamingLLMHead(n_sink, window), stream, calls)
    for want in told:
        assert all(head.held == kept(n_sink, window, head.offset) for head in want.values())
    compare(streaming_llm(n_sink=n_sink, window_size=window), told, stream, calls)


@given(seeds(), SIZES, st.data(), cuts(20))
def test_protected_spans_stay_beside_the_window(
    seed: int, sizes: tuple[int, int], data: st.DataObject, pattern: list[int]
) -> None:
    n_sink, window = sizes
    protect = data.draw(spans(8, first=n_sink))
    stream, calls = make_stream(seed, sum(pattern)), plain_calls(pattern, 1)
    told, _ = expect(lambda: StreamingLLMHead(n_sink, window, protect), stream, calls)
    compare(streaming_llm(n_sink=n_sink, window_size=window, protect=protect), told, stream, calls)


@pytest.mark.parametrize("protect", [[(6, 9)], [(0, 4)], [(0, 3), (7, 8)], [(5, 8), (6, 9)], [(5, 7), (5, 7)]], ids=str)
@pytest.mark.parametrize("pattern", [[40], [1] * 40, [13, 1, 26]], ids=["once", "decode", "chunks"])
def test_window_is_as_long_as_asked_for_once_the_spans_have_passed(
    protect: list[tuple[int, int]], pattern: list[int]
) -> None:
    transform = streaming_llm(n_sink=2, window_size=6, protect=protect)
    state = feed(transform, make_stream(0, 40), pattern)
    spared = {i for start, end in protect for i in range(start, end)}
    assert held_positions(transform, state)[0][0] == sorted(spared | set(kept(2, 6, 40)))


@given(seeds(), SIZES, cuts(20))
def test_any_cut_gives_the_same_rows_bit_for_bit(seed: int, sizes: tuple[int, int], pattern: list[int]) -> None:
    n_sink, window = sizes
    transform = streaming_llm(n_sink=n_sink, window_size=window)
    stream = make_stream(seed, sum(pattern), batch=2, dtype=mx.bfloat16)
    held = [held_rows(transform, feed(transform, stream, how)) for how in (pattern, [sum(pattern)], [1] * sum(pattern))]
    assert equal(held[0], held[1]) and equal(held[0], held[2])


@given(seeds(), cuts(9), st.integers(0, 4))
def test_long_window_is_a_plain_cache(seed: int, pattern: list[int], n_sink: int) -> None:
    total = sum(pattern)
    stream, calls = make_stream(seed, total, batch=2), plain_calls(pattern, 2)
    transform, plain = streaming_llm(n_sink=n_sink, window_size=max(total - n_sink, 1)), rows()
    told, _ = expect(lambda: StreamingLLMHead(n_sink, max(total - n_sink, 1)), stream, calls)
    assert all(head.shown == list(range(head.offset)) for want in told for head in want.values())
    compare(transform, told, stream, calls)
    _, *held = held_rows(transform, feed(transform, stream, pattern))
    assert equal(held, plain.read(feed(plain, stream, pattern, capacity=total)))


@given(cuts(20), st.integers(1, 9))
def test_no_sinks_is_a_sliding_window(pattern: list[int], window: int) -> None:
    transform, total = streaming_llm(n_sink=0, window_size=window), sum(pattern)
    state = feed(transform, make_stream(1, total), pattern)
    assert held_positions(transform, state) == [[list(range(max(total - window, 0), total))] * 2]


@given(cuts(20), st.integers(1, 5))
def test_no_window_keeps_only_sinks(pattern: list[int], n_sink: int) -> None:
    transform = streaming_llm(n_sink=n_sink, window_size=0)
    state = feed(transform, make_stream(2, sum(pattern)), pattern)
    assert held_positions(transform, state) == [[list(range(min(n_sink, sum(pattern))))] * 2]


def test_queries_change_nothing() -> None:
    transform, stream = streaming_llm(n_sink=2, window_size=5), make_stream(3, 30, group=2)
    silent = make_stream(3, 30)
    assert mx.array_equal(mx.array(stream.keys), mx.array(silent.keys))
    pattern = [11, 1, 1, 17]
    assert same(feed(transform, stream, pattern), feed(transform, silent, pattern))


def test_call_longer_than_the_window_returns_all_its_rows() -> None:
    transform, stream = streaming_llm(n_sink=1, window_size=3), make_stream(4, 50)
    keys, values = mx.array(stream.keys), mx.array(stream.values)
    columns = transform.positions_after(transform.init_state(stream.spec()), 50)
    state, *shown = transform.update(transform.init_state(stream.spec()), keys, values)
    for x, whole in zip(shown, (keys, values)):
        assert mx.array_equal(x[:, :, columns.shape[2] - 50 :], whole)
    assert held_positions(transform, state) == [[[0, 47, 48, 49]] * 2]


def test_offset_goes_on_when_the_window_is_full() -> None:
    transform = streaming_llm(n_sink=4, window_size=28)
    state = feed(transform, make_stream(5, 264), [64] + [1] * 200)
    assert state.offset.tolist() == [264]
    assert held_positions(transform, state) == [[kept(4, 28, 264)] * 2]


def test_trim_is_refused_and_an_old_state_is_the_way_back() -> None:
    transform, stream = streaming_llm(n_sink=4, window_size=28), make_stream(6, 103)
    assert not transform.trimmable
    state = feed(transform, stream, [60] + [1] * 40)
    with pytest.raises(QuantizerConfigError, match=r"^streaming_llm: `trim` .*got 3$"):
        transform.trim(state, 3)
    rejected = resume(transform, state, make_stream(7, 103), [3], start=100)
    assert held_positions(transform, rejected) == [[kept(4, 28, 103)] * 2]
    accepted = resume(transform, state, stream, [3], start=100)
    assert same(accepted, feed(transform, stream, [60] + [1] * 40 + [3]))


@pytest.mark.parametrize("pattern", [[128], [1] * 128, [50, 1, 77]], ids=["once", "decode", "chunks"])
def test_defaults_hold_sinks_and_the_newest_row(pattern: list[int]) -> None:
    transform = streaming_llm(window_size=28)
    state = feed(transform, make_stream(8, 128), pattern)
    assert held_positions(transform, state) == [[kept(4, 28, 128)] * 2]


@given(SIZES, right_padded(2))
def test_right_padding_is_never_held(sizes: tuple[int, int], calls: list[Call]) -> None:
    n_sink, window = sizes
    stream = make_stream(9, 60, batch=2)
    told, _ = expect(lambda: StreamingLLMHead(n_sink, window), stream, calls)
    compare(streaming_llm(n_sink=n_sink, window_size=window), told, stream, calls)


@given(SIZES, st.tuples(st.integers(0, 6), st.integers(0, 6)), cuts())
def test_left_padding_is_never_held(sizes: tuple[int, int], padding: tuple[int, int], pattern: list[int]) -> None:
    n_sink, window = sizes
    calls = left_padded_calls([*pattern, 7], padding)
    stream = make_stream(10, sum(pattern) + 7, batch=2)
    told, _ = expect(lambda: StreamingLLMHead(n_sink, window), stream, calls)
    compare(streaming_llm(n_sink=n_sink, window_size=window), told, stream, calls)


def test_padding_takes_no_sink_and_no_budget() -> None:
    stream = make_stream(11, 25, batch=2)
    calls = left_padded_calls([13] + [1] * 12, (0, 5))
    told, _ = expect(lambda: StreamingLLMHead(2, 6), stream, calls)
    assert [told[-1][row, 0].held for row in (0, 1)] == [kept(2, 6, 25), kept(2, 6, 20)]
    compare(streaming_llm(n_sink=2, window_size=6), told, stream, calls)


@pytest.mark.parametrize("build", [streaming_llm, streaming_llm_policy])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n_sink": -1}, "n_sink"),
        ({"n_sink": 1.5}, "n_sink"),
        ({"n_sink": True}, "n_sink"),
        ({"n_sink": None}, "n_sink"),
        ({"window_size": -1}, "window_size"),
        ({"window_size": 2.0}, "window_size"),
        ({"window_size": "8"}, "window_size"),
        ({"n_sink": 0, "window_size": 0}, "window_size"),
        ({"protect": [(3, 1)]}, "protect"),
        ({"protect": [(2, 2)]}, "protect"),
        ({"protect": [(-1, 2)]}, "protect"),
        ({"protect": [(1,)]}, "protect"),
        ({"protect": [(0.5, 2)]}, "protect"),
        ({"protect": [5]}, "protect"),
        ({"protect": 5}, "protect"),
    ],
    ids=str,
)
def test_refuses_invalid_options(build: Callable[..., Any], options: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"^streaming_llm: .*`{field}`.*; got "):
        build(**options)
