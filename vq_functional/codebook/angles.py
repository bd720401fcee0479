"""Recursive polar coordinates: packed codes of the angles, and the way back from a radius to its coordinates.

Level 1 takes neighbouring coordinates as pairs, each level above the radii
that the one below it leaves.
"""

import functools

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.ops.codebooks import GRID, Edges, Floats, lloyd_max, nearest
from vq_functional.ops.packing import pack, unpack, words

TABLE_BITS = 13  # of the largest table that levels are looked up in together: it stays in a core's cache


@functools.lru_cache(maxsize=64)
def angle_codebook(number: int, bits: int) -> Floats:
    """Angles float64 [2**bits] of least mean squared error at level `number` of a normal vector.

    Level 1 is uniform on a full turn; level l has density sin(2 psi)^(2^(l-1) - 1)
    on a quarter (arXiv 2502.02617).
    """
    if number == 1:
        return (np.arange(2**bits) + 0.5) * (2 * np.pi / 2**bits)
    grid = np.linspace(-np.pi / 4, np.pi / 4, GRID)
    return np.pi / 4 + lloyd_max(grid, np.cos(2 * grid) ** (2 ** (number - 1) - 1), 2**bits)


@attrs.frozen(eq=False)
class AngleLevel:
    """One level: `count` angles a row, their codes in words of their own from word `start`."""

    angles: Floats  # [2**bits]
    bits: int
    count: int
    start: int
    edges: Edges = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        middle = ((self.angles[1:] + self.angles[:-1]) / 2).astype(np.float32)
        object.__setattr__(self, "edges", tuple(middle.tolist()))

    @property
    def words(self) -> slice:
        """Where the codes are in a packed row."""
        return slice(self.start, self.start + words(self.count, self.bits))

    def encode(self, even: mx.array, odd: mx.array) -> mx.array:
        """Packed codes of the angles of float32 pairs [..., count]."""
        angle = mx.arctan2(odd, even)
        angle = mx.where(angle < 0, angle + 2 * np.pi, angle)
        return pack(nearest(angle, self.edges), self.bits)


@attrs.frozen(eq=False)
class Lookup:
    """Levels that are looked up at once, the highest first: a radius becomes 2**len(levels) numbers."""

    levels: tuple[AngleLevel, ...]
    table: mx.array = attrs.field(init=False)  # float32 [2**joint_bits(levels), 2**len(levels)]

    def __attrs_post_init__(self) -> None:
        index = np.arange(2 ** joint_bits(self.levels))
        numbers, shift = np.ones((len(index), 1)), 0
        for depth, level in enumerate(self.levels):
            codes = index[:, None] >> (shift + level.bits * np.arange(2**depth)) & (2**level.bits - 1)
            pairs = np.stack([np.cos(level.angles[codes]), np.sin(level.angles[codes])], axis=-1)
            numbers = (numbers[..., None] * pairs).reshape(len(index), -1)
            shift += level.bits << depth
        object.__setattr__(self, "table", _table(numbers))

    def split(self, radii: mx.array, packed: mx.array) -> mx.array:
        """What the radii, float32 [..., N], are made of: [..., N * 2**len(levels)]."""
        index, shift = mx.array(0, mx.uint32), 0
        for depth, level in enumerate(self.levels):
            # The codes below one radius are neighbours in the stream, and so one wider code.
            width = level.bits << depth
            index = index | (unpack(packed[..., level.words], width, radii.shape[-1]) << shift)
            shift += width
        return (radii[..., None] * self.table[index]).flatten(-2)


def joint_bits(levels: tuple[AngleLevel, ...]) -> int:
    """Bits of all angles below one radius; `levels` from the highest down."""
    return sum(level.bits << depth for depth, level in enumerate(levels))


def angle_levels(dim: int, level_bits: tuple[int, ...]) -> tuple[AngleLevel, ...]:
    """The levels of a row of `dim` coordinates from the first up."""
    found, start = list[AngleLevel](), 0
    for number, bits in enumerate(level_bits, start=1):
        found.append(AngleLevel(angle_codebook(number, bits), bits, dim >> number, start))
        start = found[-1].words.stop
    return tuple(found)


def lookups(levels: tuple[AngleLevel, ...]) -> tuple[Lookup, ...]:
    """The levels from the highest down, as many at once as the size of a table allows."""
    found, group = list[Lookup](), tuple[AngleLevel, ...]()
    for level in reversed(levels):
        if group and joint_bits((*group, level)) > TABLE_BITS:
            found, group = [*found, Lookup(group)], ()
        group = (*group, level)
    return (*found, Lookup(group))


def _table(numbers: Floats) -> mx.array:
    table = mx.array(numbers.astype(np.float32))
    mx.eval(table)
    return table
