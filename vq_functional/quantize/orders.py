"""Orders of a head's channels in which those of a group have a small common range, told by a few rows."""

import mlx.core as mx

from vq_functional.ops.affine import filled_up
from vq_functional.ops.ranges import finite_range
from vq_functional.ops.vectors import TINY

ORDERS = ("best", "center", "range", "kmeans")
SWEEPS = 8  # of k-means


def channel_order(x: mx.array, kind: str, group: int) -> mx.array:
    """Channels int32 [B, H, D] in the order in which `group` neighbours share numbers, by rows `x` [B, H, S, D].

    By the middle of a channel's range ("center"), by its width ("range"), by
    clusters of lowest and highest number ("kmeans"); "best" takes for each head
    what gives groups the smallest ranges: either of the first two, or no change.
    """
    x = x.astype(mx.float32)
    low, high = (end[:, :, 0] for end in finite_range(x, axis=2))
    if kind == "kmeans":
        return _clustered(low, high, group)
    center, width = sorted_by(low * 0.5 + high * 0.5), sorted_by(high * 0.5 - low * 0.5)
    return {"center": center, "range": width}[kind] if kind != "best" else _best(x, [center, width], group)


def sorted_by(key: mx.array) -> mx.array:
    """Index int32 [..., D] that sorts `key` [..., D], the earlier of equal ones first."""
    place = mx.arange(key.shape[-1])
    other, own = key[..., None, :], key[..., None]
    ahead = (other < own) | ((other == own) & (place < place[:, None]))
    rank = ahead.sum(axis=-1)
    return mx.put_along_axis(mx.zeros_like(rank), rank, mx.broadcast_to(place, rank.shape), axis=-1).astype(mx.int32)


def in_place(x: mx.array, order: mx.array) -> mx.array:
    """`x` [B, H, M, D] with its channels back where the `order` int [B, H, 1, D] took them from."""
    place = mx.broadcast_to(mx.arange(x.shape[-1]), order.shape)
    return mx.take_along_axis(x, mx.put_along_axis(mx.zeros_like(order), order, place, axis=-1), axis=-1)


def in_groups(x: mx.array, group: int) -> mx.array:
    """`x` [..., D] as [..., groups, group]; the last group is filled up with the last number."""
    x = filled_up(x, group)
    return x.reshape(*x.shape[:-1], -1, group)


def _best(x: mx.array, orders: list[mx.array], group: int) -> mx.array:
    same = mx.broadcast_to(mx.arange(x.shape[-1]), orders[0].shape)
    candidates = mx.stack([same, *orders])
    low, high = finite_range(x.reshape(*x.shape[:2], -1), axis=-1)
    size = mx.maximum(mx.maximum(mx.abs(low), mx.abs(high)), TINY)
    x = x / size[..., None]  # scaled first so that squares can't overflow
    chosen = mx.argmin(mx.stack([_spread(x, order, group) for order in candidates]), axis=0)
    return mx.take_along_axis(candidates, chosen[None, ..., None], axis=0)[0]


def _spread(x: mx.array, order: mx.array, group: int) -> mx.array:
    """Sum [B, H] of the groups' squared ranges."""
    low, high = finite_range(in_groups(mx.take_along_axis(x, order[:, :, None], axis=-1), group), axis=-1)
    return mx.square(high - low).sum(axis=(2, 3, 4))


def _clustered(low: mx.array, high: mx.array, group: int) -> mx.array:
    """Channels cluster by cluster, in a cluster and among clusters by the middle of the range."""
    points = mx.stack([low, high], axis=-1)
    size = mx.maximum(mx.abs(points).max(axis=(-2, -1), keepdims=True), TINY)
    points, count = points / size, -(-low.shape[-1] // group)
    first = sorted_by(points.sum(axis=-1))
    places = mx.array([(2 * i + 1) * low.shape[-1] // (2 * count) for i in range(count)])
    centers = mx.take_along_axis(points, first[..., places, None], axis=2)
    for _ in range(SWEEPS):
        members = (_nearest(points, centers)[..., None] == mx.arange(count)).astype(mx.float32).swapaxes(-1, -2)
        sizes = members.sum(axis=-1, keepdims=True)
        centers = mx.where(sizes > 0, members @ points / mx.maximum(sizes, 1), centers)
    middle = mx.take_along_axis(centers.sum(axis=-1), _nearest(points, centers), axis=-1)
    by_cluster = sorted_by(mx.take_along_axis(middle, first, axis=-1))
    return mx.take_along_axis(first, by_cluster, axis=-1)


def _nearest(points: mx.array, centers: mx.array) -> mx.array:
    """Index [B, H, D] of the nearest center [B, H, K, 2] of each point [B, H, D, 2]."""
    return mx.argmin(mx.square(points[:, :, :, None] - centers[:, :, None]).sum(axis=-1), axis=-1)
