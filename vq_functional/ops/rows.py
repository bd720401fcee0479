"""Rows [B, H, C, ...]: writing, picking, choosing which ones stay.

MLX does not check dynamic slices and scatters against the bounds of an array,
so every start is clamped here.
"""

import mlx.core as mx

from vq_functional.ops.tables import counting, filled, first_rows

BIG = 2**31 - 1


def write_rows(buffer: mx.array, rows: mx.array, start: mx.array, axis: int = 2) -> mx.array:
    """`buffer` with `rows` written at `start` int [B] along `axis`; in place when nobody else holds it."""
    count = rows.shape[axis]
    start = mx.clip(start, 0, buffer.shape[axis] - count)
    if buffer.shape[0] == 1:
        return mx.slice_update(buffer, rows, start, axes=(axis,))
    index = _along(start[:, None] + counting(count), axis, buffer.ndim)
    return mx.put_along_axis(buffer, mx.broadcast_to(index, rows.shape), rows, axis=axis)


def read_rows(buffer: mx.array, start: mx.array, count: int, axis: int = 2) -> mx.array:
    """`count` rows from `start` int [B] along `axis`."""
    start = mx.clip(start, 0, buffer.shape[axis] - count)
    if buffer.shape[0] == 1:
        shape = list(buffer.shape)
        shape[axis] = count
        return mx.slice(buffer, start, axes=(axis,), slice_size=tuple(shape))
    if axis == 2:
        index = (start[:, None] + counting(count))[:, None]
        return pick(buffer, mx.broadcast_to(index, (*buffer.shape[:2], count)))
    return mx.take_along_axis(buffer, _along(start[:, None] + counting(count), axis, buffer.ndim), axis=axis)


def pick(x: mx.array, index: mx.array) -> mx.array:
    """Rows `index` int [B, H, K] of `x` [B, H, C, ...], clamped; an axis may be 1 where that of `x` is more."""
    batch, heads, count, *width = x.shape
    index = mx.clip(index, 0, filled(count - 1, batch, heads, 1))
    if not width or index.shape[2] == 1:
        return mx.take_along_axis(x, index.reshape(*index.shape, *(1 for _ in width)), axis=2)
    # Whole rows of a flat array: several times faster than numbers along an axis.
    flat = x.reshape(batch * heads * count, *width)
    return mx.take(flat, index + first_rows(batch, heads, count), axis=0)


def put(x: mx.array, index: mx.array, rows: mx.array) -> mx.array:
    """`x` [B, H, C, ...] with `rows` [B, H, K, ...] at `index` int [B, H, K]; in place when nobody else holds it."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 3))
    return mx.put_along_axis(x, mx.broadcast_to(index, rows.shape), rows, axis=2)


def drop_left_padding(x: mx.array, padding: mx.array) -> mx.array:
    """`x` [B, H, S, ...] with the first `padding` int [B] rows moved out; what follows the rest is no row."""
    n = x.shape[2]
    if n == 1:
        return x
    index = mx.minimum(counting(n) + padding[:, None], n - 1)[:, None]
    return pick(x, index)


def extend_rows(x: mx.array, count: int, filler: float = 0) -> mx.array:
    """`x` [B, H, C, ...] with rows of `filler` at the end, `count` in all."""
    missing = count - x.shape[2]
    if missing <= 0:
        return x
    room = mx.full((*x.shape[:2], missing, *x.shape[3:]), filler, x.dtype)
    return mx.concatenate([x, room], axis=2)


def token_order(position: mx.array) -> mx.array:
    """Index int [B, H, C] of the columns in rising token order, empty ones last."""
    return mx.argsort(mx.where(position < 0, BIG, position), axis=-1)


def newest_rows(position: mx.array, count: int) -> mx.array:
    """Index int [B, H, count] of the newest rows in token order; where there are fewer, empty columns come first."""
    return mx.argsort(position, axis=-1)[..., position.shape[-1] - count :]


def extend_last(x: mx.array, size: int) -> mx.array:
    """`x` with zeros at the end of the last axis, `size` in all."""
    missing = size - x.shape[-1]
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing > 0 else x


def top_rows(priority: mx.array, keep: mx.array, size: int, latest: bool) -> mx.array:
    """Index int [B, H, size] of the `keep` int [B] rows of highest priority, in rising order.

    -inf marks a row that is empty: it is never kept. Surplus indices point at
    rows that are not, empty or not. Ties go to the later row
    (`latest`) or to the earlier one.
    """
    return chosen(top_mask(priority, keep, latest), size)[0]


def top_mask(priority: mx.array, keep: mx.array, latest: bool) -> mx.array:
    """Bool [B, H, C]: the `keep` int [B] rows of highest priority, by the rules of `top_rows`."""
    total = filled(priority.shape[-1], 1)
    ranked = mx.sort(priority, axis=-1)
    place = mx.clip(total - keep, 0, total - 1)[:, None, None]
    threshold = mx.take_along_axis(ranked, mx.broadcast_to(place, (*priority.shape[:2], 1)), axis=-1)
    above, tied = priority > threshold, priority == threshold
    wanted = keep[:, None, None] - above.sum(axis=-1, keepdims=True)
    order = mx.cumsum(tied.astype(mx.int32), axis=-1, reverse=latest)
    return (above | (tied & (order <= wanted))) & (priority > -mx.inf)


def chosen(wanted: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Index int [..., size] of the columns that are `wanted` [..., C], rising; and which of the indices are."""
    total = wanted.shape[-1]
    if size == 0:
        return mx.zeros((*wanted.shape[:-1], 0), mx.int32), mx.zeros((*wanted.shape[:-1], 0), mx.bool_)
    if size == 1:
        first = mx.argmax(wanted, axis=-1, keepdims=True).astype(mx.int32)
        return first, wanted.any(axis=-1, keepdims=True)
    columns, behind = counting(total), filled(total, 1)
    index = mx.sort(mx.where(wanted, columns, columns + behind), axis=-1)[..., :size]
    real = index < behind
    return mx.where(real, index, index - behind), real


def gap_fillers(stays: mx.array, most: int) -> tuple[mx.array, mx.array]:
    """Columns int [B, H, most] to move, and where, so that what `stays` comes first; at most `most` gaps.

    Where there are fewer gaps, the rest moves columns onto themselves.
    """
    first = counting(stays.shape[-1]) < stays.sum(axis=-1, keepdims=True)
    (target, source), (gap, _) = chosen(mx.stack([first & ~stays, stays & ~first]), most)
    return mx.where(gap, source, target), target


def victim_row(priority: mx.array, position: mx.array, latest: bool) -> mx.array:
    """Index int [B, H, 1] of the row of lowest priority; of equal ones the oldest goes when `latest` stay.

    A column with a position below zero holds no row.
    """
    priority = mx.where(position < 0, mx.inf, priority)
    tied = (priority == priority.min(axis=-1, keepdims=True)) & (position >= 0)
    if latest:
        return mx.argmin(mx.where(tied, position, BIG), axis=-1, keepdims=True)
    return mx.argmax(mx.where(tied, position, -1), axis=-1, keepdims=True)


def _along(index: mx.array, axis: int, ndim: int) -> mx.array:
    """`index` [B, K] shaped to run along `axis` of an array of `ndim` axes."""
    shape = [1] * ndim
    shape[0], shape[axis] = index.shape
    return index.reshape(shape)
