"""Heads in groups: rows of neighbouring heads as one longer row, and the axes along which these spread."""

import functools

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.errors import check
from vq_functional.core.shard import Shard
from vq_functional.ops.spectrum import Floats, least_rank, principal_axes
from vq_functional.ops.vectors import TINY


@attrs.frozen
class HeadGroups:
    """`heads` in `count` groups of neighbours, in order; where they don't go up evenly the first have one more.

    A group has `size` places; the last one of a smaller group is empty and reads as zeros.
    """

    heads: int
    count: int

    @classmethod
    def of(cls, heads: int, most: int) -> "HeadGroups":
        """`most` groups, or as many as there are heads."""
        return cls(heads, min(most, heads))

    def part(self, shard: Shard) -> "HeadGroups":
        """The groups of a part of the heads; raises QuantizerConfigError where one has heads in several parts."""
        whole = shard.size == 1 or (self.heads % self.count == 0 and self.count % shard.size == 0)
        rule = f"must be {shard.size} times a number that goes up in the {self.heads // shard.size} heads of a process"
        check(whole, "palu", "n_head_groups", rule, self.count)
        return HeadGroups(self.heads // shard.size, self.count // shard.size)

    @property
    def size(self) -> int:
        """Heads of the largest group."""
        return -(-self.heads // self.count)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Heads of each group."""
        least, more = divmod(self.heads, self.count)
        return tuple(least + (i < more) for i in range(self.count))

    @property
    def spans(self) -> tuple[slice, ...]:
        """The heads of each group."""
        ends = [sum(self.sizes[: i + 1]) for i in range(self.count)]
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    def joined(self, x: mx.array) -> mx.array:
        """`x` [B, H, S, D] as [B, G, S, size * D]."""
        if self.size == 1:
            return x
        batch, _, count, dim = x.shape
        placed = self._placed(x).reshape(batch, self.count, self.size, count, dim)
        return placed.swapaxes(2, 3).flatten(3)

    def parted(self, x: mx.array) -> mx.array:
        """Inverse of `joined`."""
        if self.size == 1:
            return x
        parts = x.reshape(*x.shape[:3], self.size, -1).swapaxes(2, 3)
        return self._taken(parts.flatten(1, 2))

    def stacked(self, x: mx.array) -> mx.array:
        """`x` [B, H, M, R] as [B, G, size * M, R]."""
        if self.size == 1:
            return x
        batch, _, count, width = x.shape
        return self._placed(x).reshape(batch, self.count, self.size * count, width)

    def unstacked(self, x: mx.array) -> mx.array:
        """Inverse of `stacked`."""
        if self.size == 1:
            return x
        batch, _, count, width = x.shape
        return self._taken(x.reshape(batch, self.count * self.size, count // self.size, width))

    @property
    def _even(self) -> bool:
        return self.heads % self.count == 0

    def _placed(self, x: mx.array) -> mx.array:
        """`x` [B, H, ...] with zeros in the empty places, [B, G * size, ...]."""
        if self._even:
            return x
        return mx.take(mx.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]), _places(self)[0], axis=1)

    def _taken(self, x: mx.array) -> mx.array:
        """Inverse of `_placed`."""
        return x if self._even else mx.take(x, _places(self)[1], axis=1)


@functools.lru_cache(maxsize=512)
def _places(groups: HeadGroups) -> tuple[mx.array, mx.array]:
    """The head in each place, H where it is empty, and the place of each head."""
    head_at = [
        span.start + i if i < span.stop - span.start else groups.heads
        for span in groups.spans
        for i in range(groups.size)
    ]
    place_of = [place for place, head in enumerate(head_at) if head < groups.heads]
    found = mx.array(head_at), mx.array(place_of)
    mx.eval(found)
    return found


def principal_basis(x: mx.array, groups: HeadGroups, rank: int) -> tuple[mx.array, mx.array]:
    """Axes float32 [B, H, D, rank] along which joined rows of `x` spread most, and their mean [B, H, D].

    `x` float32 [B, H, S, D], finite. Where there are fewer axes than `rank`, the last are zeros.
    """
    size = mx.maximum(mx.abs(x).max(axis=(1, 2, 3), keepdims=True), TINY)
    x = x / size  # so that sums can't overflow
    mean = x.sum(axis=2, keepdims=True) * (1 / x.shape[2])
    rows = groups.joined(x - mean)
    return groups.unstacked(_axes(rows, groups, rank)), (mean * size)[:, :, 0]


def _axes(rows: mx.array, groups: HeadGroups, rank: int) -> mx.array:
    """Right singular vectors [B, G, F, rank] of `rows` [B, G, S, F], none of them along an empty place."""
    full, dim = groups.sizes.count(groups.size), rows.shape[-1] // groups.size
    if full < groups.count:
        # Empty places get the largest singular values, so that no other axis has a part in them.
        ends = mx.eye(dim, rows.shape[-1], k=rows.shape[-1] - dim)
        energy = 1 + mx.abs(rows).sum(axis=(-1, -2), keepdims=True)
        rows = mx.concatenate([rows, mx.where(mx.arange(groups.count)[:, None, None] < full, 0, energy * ends)], axis=2)
    axes = mx.pad(_right_vectors(rows, rank + dim * (full < groups.count)), [(0, 0)] * 3 + [(0, dim + rank)])
    return mx.concatenate([axes[:, :full, :, :rank], axes[:, full:, :, dim : dim + rank]], axis=1)


def _right_vectors(rows: mx.array, count: int) -> mx.array:
    """Right singular vectors [..., F, N] of `rows` [..., S, F]: the first `count` at least, where there are so many."""
    # Not from the Gram matrix, whose rounding errors hide the smaller axes.
    if count > rows.shape[-2] or rows.shape[-2] >= rows.shape[-1]:
        return mx.linalg.svd(rows, stream=mx.cpu)[2].swapaxes(-1, -2)
    span, within = mx.linalg.qr(rows.swapaxes(-1, -2), stream=mx.cpu)
    return span @ mx.linalg.svd(within.swapaxes(-1, -2), stream=mx.cpu)[2].swapaxes(-1, -2)


def sampled_basis(
    samples: Floats, groups: HeadGroups, rank: int | None, share: float, multiple: int
) -> tuple[Floats, Floats]:
    """`principal_basis` of all `samples` [N, H, D] in float64: axes [H, D, R] and mean [H, D].

    R is `rank` a head, or for None as few as hold `share` of the sum of squares in every group; then the next
    multiple of `multiple`.
    """
    dim = samples.shape[2]
    joined = [samples[:, span].reshape(len(samples), -1) for span in groups.spans]
    axes, energy = zip(*(principal_axes(rows, centred=True) for rows in joined), strict=True)
    wanted = groups.size * rank if rank is not None else max(least_rank(one, share) for one in energy)
    width = -(-wanted // multiple) * multiple
    parts = [np.pad(one, ((0, 0), (0, max(width - len(one), 0))))[:, :width].reshape(-1, dim, width) for one in axes]
    means = [rows[np.isfinite(rows).all(axis=1)].mean(axis=0).reshape(-1, dim) for rows in joined]
    return np.concatenate(parts), np.concatenate(means)
