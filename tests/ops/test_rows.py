"""Moving and choosing rows against loops in numpy; nothing is ever written outside an array."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.ops.rows import (
    chosen,
    drop_left_padding,
    extend_last,
    extend_rows,
    newest_rows,
    pick,
    put,
    read_rows,
    top_rows,
    victim_row,
    write_rows,
)

DTYPES = [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.int32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[-1])
batches = pytest.mark.parametrize("batch", [1, 2, 3])
STARTS = [-5, -1, 0, 1, 4, 7, 8, 9, 500]


def draw(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.randint(0, 200, shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def starts_of(batch: int, first: int) -> list[int]:
    return [STARTS[(first + i) % len(STARTS)] for i in range(batch)]


def clamped(start: int, count: int, room: int) -> int:
    return min(max(start, 0), room - count)


@dtypes
@batches
@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_write_rows_writes_there_and_nowhere_else(batch: int, axis: int, count: int, dtype: mx.Dtype) -> None:
    shape, part = [batch, 2, 10, 10], [batch, 2, 10, 10]
    part[axis] = count
    for first in range(len(STARTS)):
        buffer, rows = draw(*shape, dtype=dtype), draw(*part, seed=1, dtype=dtype)
        starts = starts_of(batch, first)
        want = numbers(buffer).copy()
        for i, start in enumerate(starts):
            at = clamped(start, count, 10)
            where = (i, slice(None), slice(at, at + count)) if axis == 2 else (i, ..., slice(at, at + count))
            want[where] = numbers(rows)[i]
        got = write_rows(buffer, rows, mx.array(starts, mx.int32), axis=axis)
        assert got.dtype == dtype and np.array_equal(numbers(got), want)


@batches
@pytest.mark.parametrize("axis", [2, 3])
def test_write_rows_leaves_neighbours_in_memory_alone(batch: int, axis: int) -> None:
    guard = mx.full((64, 1024), 7.0)
    buffers = [mx.zeros((batch, 2, 10, 10)) for _ in range(8)]
    mx.eval(guard, buffers)
    rows = mx.ones((batch, 2, *((3, 10) if axis == 2 else (10, 3))))
    for start in (-1000, 1000, 2**31 - 1, -(2**31)):
        written = [write_rows(buffer, rows, mx.full((batch,), start, mx.int32), axis=axis) for buffer in buffers]
        mx.eval(written)
        assert all(x.sum().item() == rows.size for x in written)
    assert (guard == 7.0).all() and all(buffer.sum().item() == 0 for buffer in buffers)


@dtypes
@batches
@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_read_rows_reads_from_the_clamped_start(batch: int, axis: int, count: int, dtype: mx.Dtype) -> None:
    buffer = draw(batch, 2, 10, 10, dtype=dtype)
    for first in range(len(STARTS)):
        starts = starts_of(batch, first)
        got = read_rows(buffer, mx.array(starts, mx.int32), count, axis=axis)
        assert got.dtype == dtype
        for i, start in enumerate(starts):
            at = clamped(start, count, 10)
            part = numbers(buffer)[i]
            want = part[:, at : at + count] if axis == 2 else part[..., at : at + count]
            assert np.array_equal(numbers(got)[i], want)


@given(data=st.data(), batch=st.integers(1, 2), room=st.integers(1, 12))
def test_what_was_written_is_read(data: st.DataObject, batch: int, room: int) -> None:
    count = data.draw(st.integers(1, room))
    start = mx.array([data.draw(st.integers(-3, room + 3)) for _ in range(batch)], mx.int32)
    buffer, rows = draw(batch, 1, room, 3), draw(batch, 1, count, 3, seed=2)
    assert mx.array_equal(read_rows(write_rows(buffer, rows, start), start, count), rows)


@dtypes
@pytest.mark.parametrize("width", [(), (3,), (2, 3)])
def test_pick_and_put_by_index(width: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = draw(2, 3, 9, *width, dtype=dtype)
    rows = draw(2, 3, 4, *width, seed=3, dtype=dtype)
    index = np.stack([np.random.default_rng(i).permutation(9)[:4] for i in range(6)]).reshape(2, 3, 4)
    picked, changed = pick(x, mx.array(index)), put(x, mx.array(index), rows)
    want = numbers(x).copy()
    for batch, head, place in itertools.product(range(2), range(3), range(4)):
        assert np.array_equal(numbers(picked)[batch, head, place], numbers(x)[batch, head, index[batch, head, place]])
        want[batch, head, index[batch, head, place]] = numbers(rows)[batch, head, place]
    assert changed.dtype == dtype and np.array_equal(numbers(changed), want)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", [(), (5,)], ids=["numbers", "rows"])
def test_pick_by_one_index_for_all_heads(width: tuple[int, ...], count: int) -> None:
    x, index = draw(2, 3, 6, *width), draw(2, 1, count, seed=1, dtype=mx.int32) % 6
    want = np.stack([numbers(x)[i][:, index[i, 0].tolist()] for i in range(2)])
    assert np.array_equal(numbers(pick(x, index)), want)


@pytest.mark.parametrize("index", [[-7, 1, 99], [6, 6, 0], [-1], [6]], ids=str)
@pytest.mark.parametrize("width", [(), (5,)], ids=["numbers", "rows"])
def test_pick_stays_within_a_head(width: tuple[int, ...], index: list[int]) -> None:
    x = draw(2, 3, 6, *width)
    want = numbers(x)[:, :, [min(max(i, 0), 5) for i in index]]
    assert np.array_equal(numbers(pick(x, mx.broadcast_to(mx.array(index), (2, 3, len(index))))), want)


def test_put_spreads_one_row_over_all_heads() -> None:
    x = mx.zeros((2, 3, 5), mx.int32)
    got = put(x, mx.full((2, 3, 1), 2), mx.full((2, 3, 1), 9, mx.int32))
    assert got.tolist() == [[[0, 0, 9, 0, 0]] * 3] * 2


@pytest.mark.parametrize("paddings", [[0, 0], [0, 2], [3, 1], [5, 4], [6, 9]])
def test_drop_left_padding_moves_real_rows_to_the_front(paddings: list[int]) -> None:
    x = draw(2, 2, 6, 3)
    got = drop_left_padding(x, mx.array(paddings))
    assert got.shape == x.shape
    for i, padding in enumerate(paddings):
        real = max(6 - padding, 0)
        assert np.array_equal(numbers(got)[i, :, :real], numbers(x)[i, :, 6 - real :])


@dtypes
def test_extend_adds_zeros_at_the_end(dtype: mx.Dtype) -> None:
    x = draw(2, 2, 4, 3, dtype=dtype)
    taller, wider = extend_rows(x, 7), extend_last(x, 8)
    assert taller.dtype == wider.dtype == dtype
    assert mx.array_equal(taller[:, :, :4], x) and mx.array_equal(taller[:, :, 4:], mx.zeros((2, 2, 3, 3), dtype))
    assert mx.array_equal(wider[..., :3], x) and mx.array_equal(wider[..., 3:], mx.zeros((2, 2, 4, 5), dtype))
    assert mx.array_equal(extend_rows(x, 4), x) and mx.array_equal(extend_rows(x, 2), x)
    assert mx.array_equal(extend_last(x, 3), x)


def kept_by_hand(priority: list[float], keep: int, latest: bool) -> list[int]:
    """Places of the `keep` highest priorities, ties to the later or the earlier place, in rising order."""
    order = sorted(range(len(priority)), key=lambda i: (-priority[i], -i if latest else i))
    live = [i for i in order if priority[i] > -np.inf]
    return sorted(live[:keep])


PRIORITIES = st.lists(
    st.sampled_from([-np.inf, -2.0, 0.0, 0.0, 1.0, 1.5, 1e30, float(np.finfo(np.float32).min), np.inf]),
    min_size=1,
    max_size=12,
)


@given(priority=PRIORITIES, latest=st.booleans(), data=st.data())
def test_top_rows_keeps_the_highest(priority: list[float], latest: bool, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(priority)))
    want = kept_by_hand(priority, keep, latest)
    size = data.draw(st.integers(len(want), len(priority)))
    got = top_rows(mx.array([[priority]]), mx.array([keep]), size, latest)[0, 0].tolist()
    assert len(got) == size == len(set(got)) and all(0 <= i < len(priority) for i in got)
    assert got[: len(want)] == want


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_newest_rows_come_in_token_order(count: int) -> None:
    position = mx.array([[[4, -1, 9, 0, 7, -1, 2]]])
    want = [-1, -1, 0, 2, 4, 7, 9][-count:]
    assert pick(position, newest_rows(position, count)).tolist() == [[want]]


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("wanted", [[], [4], [1, 2, 5]], ids=str)
def test_chosen_are_the_first_that_are_wanted(wanted: list[int], size: int) -> None:
    index, valid = chosen(mx.array([[[column in wanted for column in range(6)]]]), size)
    found = [column for column, real in zip(index[0, 0].tolist(), valid[0, 0].tolist()) if real]
    assert index.shape == valid.shape == (1, 1, size) and found == wanted[:size]


@pytest.mark.parametrize("latest", [True, False])
def test_top_rows_of_every_batch_row_and_head(latest: bool) -> None:
    priority = np.random.default_rng(4).integers(0, 4, (3, 2, 20)).astype(np.float32)
    keep = [5, 8, 1]
    got = top_rows(mx.array(priority), mx.array(keep), 8, latest).tolist()
    for batch, head in itertools.product(range(3), range(2)):
        want = kept_by_hand(priority[batch, head].tolist(), keep[batch], latest)
        assert got[batch][head][: len(want)] == want


@pytest.mark.parametrize("latest, want", [(True, list(range(12, 20))), (False, list(range(8)))])
def test_equal_priorities_keep_one_end(latest: bool, want: list[int]) -> None:
    got = top_rows(mx.zeros((1, 1, 20)), mx.array([8]), 8, latest)
    assert got[0, 0].tolist() == want


def test_fewer_rows_than_asked_for_are_all_kept_and_the_surplus_is_empty() -> None:
    priority = mx.array([[[-mx.inf, 3.0, -mx.inf, 1.0, -mx.inf]]])
    got = top_rows(priority, mx.array([4]), 4, True)[0, 0].tolist()
    assert got[:2] == [1, 3] and set(got[2:]) <= {0, 2, 4} and len(set(got)) == 4


@given(priority=PRIORITIES, latest=st.booleans(), data=st.data())
def test_victim_is_the_lowest_and_of_equal_ones_the_first_out(
    priority: list[float], latest: bool, data: st.DataObject
) -> None:
    position = data.draw(st.permutations(range(100, 100 + len(priority))))
    lowest = [i for i, x in enumerate(np.float32(priority)) if x == min(np.float32(priority))]
    want = min(lowest, key=lambda i: position[i] if latest else -position[i])
    got = victim_row(mx.array([[priority]]), mx.array([[position]]), latest)
    assert got.shape == (1, 1, 1) and got.item() == want


@pytest.mark.parametrize("latest", [True, False])
def test_victim_of_every_batch_row_and_head(latest: bool) -> None:
    priority = np.random.default_rng(5).integers(0, 3, (3, 2, 9)).astype(np.float32)
    position = np.stack([np.random.default_rng(i).permutation(9) for i in range(6)]).reshape(3, 2, 9)
    got = np.array(victim_row(mx.array(priority), mx.array(position), latest))[..., 0]
    for batch, head in itertools.product(range(3), range(2)):
        row, place = priority[batch, head], position[batch, head]
        lowest = np.flatnonzero(row == row.min())
        assert got[batch, head] == (lowest[place[lowest].argmin()] if latest else lowest[place[lowest].argmax()])


@batches
def test_traced_starts_give_the_same(batch: int) -> None:
    def step(buffer: mx.array, rows: mx.array, start: mx.array) -> tuple[mx.array, mx.array]:
        return write_rows(buffer, rows, start), read_rows(buffer, start, 3)

    buffer, rows = draw(batch, 2, 10, 4), draw(batch, 2, 3, 4, seed=6)
    compiled = mx.compile(step)
    for first in range(len(STARTS)):
        start = mx.array(starts_of(batch, first), mx.int32)
        for got, want in zip(compiled(buffer, rows, start), step(buffer, rows, start)):
            assert mx.array_equal(got, want)
