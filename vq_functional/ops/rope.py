"""Rotary position embedding at any positions, and its inverse (arXiv 2104.09864).

The rotation is MLX's own kernel, so that `undo` meets the angles a model's
``mx.fast.rope`` used, whatever the device.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import Described
from vq_functional.core.errors import check, check_choice, check_int


def _to_floats(freqs: Iterable[float] | mx.array | None) -> tuple[float, ...] | None:
    return None if freqs is None else tuple(float(f) for f in freqs)


@attrs.frozen
class Rope(Described):
    """Rotation of the first `dims` numbers of a row by position * scale / freqs.

    `freqs` holds dims / 2 inverse frequencies, of which None means
    base**(2 i / dims). `traditional` pairs neighbours, otherwise the two halves
    are paired. Hashable, without arrays.
    """

    dims: int
    base: float = 10000.0
    scale: float = 1.0
    traditional: bool = False
    freqs: tuple[float, ...] | None = attrs.field(default=None, converter=_to_floats)

    def __attrs_post_init__(self) -> None:
        check_int("rope", "dims", self.dims, 2)
        check(self.dims % 2 == 0, "rope", "dims", "must be even", self.dims)
        check(self.base > 0, "rope", "base", "must be positive", self.base)
        if self.freqs is not None:
            rule = f"must hold dims / 2 = {self.dims // 2} numbers"
            check(len(self.freqs) == self.dims // 2, "rope", "freqs", rule, len(self.freqs))

    def apply(self, x: mx.array, positions: mx.array) -> mx.array:
        """`x` [B, H, S, D] rotated to `positions` int [S], [B, S] or [B, H, S]; in the dtype of `x`.

        Below zero is for padding: what comes out is finite, and else up to the device.
        """
        return self._rotate(x, positions, self.scale)

    def turn(self, x: mx.array, steps: mx.array) -> mx.array:
        """`apply` for `steps` of either sign."""
        mirror = self._mirror(steps < 0, x.shape).astype(x.dtype)
        return self.apply(x * mirror, mx.abs(steps)) * mirror

    def undo(self, x: mx.array, positions: mx.array) -> mx.array:
        """Inverse of `apply`: the rotation by the negative angle."""
        return self._rotate(x, positions, -self.scale)

    def runs(self, first: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines float32 [B, dims / 2, U * count] of `count` positions from each of `first` int [B, U] on.

        By the sum of two angles: a run costs one cosine, not `count`.
        """
        far = (mx.array(self._steps)[:, None] * first.astype(mx.float32)[:, None])[..., None]
        cos, sin, (near_cos, near_sin) = mx.cos(far), mx.sin(far), _near(self, count)
        return (cos * near_cos - sin * near_sin).flatten(2), (sin * near_cos + cos * near_sin).flatten(2)

    @property
    def pairs(self) -> tuple[slice, slice]:
        """The numbers of a row that are turned: the first and the second ones of all pairs."""
        if self.traditional:
            return slice(0, self.dims, 2), slice(1, self.dims, 2)
        return slice(0, self.dims // 2), slice(self.dims // 2, self.dims)

    @property
    def _steps(self) -> list[float]:
        """The angle of each pair from one position to the next."""
        freqs = self.freqs or [self.base ** (2 * i / self.dims) for i in range(self.dims // 2)]
        return [self.scale / freq for freq in freqs]

    def _mirror(self, back: mx.array, shape: tuple[int, ...]) -> mx.array:
        """1, but -1 at the second number of each pair of rows that turn `back`: mirrored they turn the other way."""
        second = np.ones(shape[3], np.float32)
        second[self.pairs[1]] = -1
        rows = back.reshape(1, 1, *back.shape) if back.ndim == 1 else back[:, None] if back.ndim == 2 else back
        return mx.where(rows[..., None], mx.array(second), 1.0)

    def _rotate(self, x: mx.array, positions: mx.array, scale: float) -> mx.array:
        check(x.ndim == 4 and x.shape[3] >= self.dims, "rope", "x", f"must be [B, H, S, D >= {self.dims}]", x.shape)
        if x.size == 0:
            return x
        rows = x.swapaxes(1, 2)
        heads = 1 if positions.ndim == 3 else x.shape[1]
        turned = mx.fast.rope(
            rows.astype(mx.float32).reshape(-1, heads, 1, x.shape[3]),
            self.dims,
            traditional=self.traditional,
            base=self.base if self.freqs is None else None,
            scale=scale,
            offset=self._offsets(positions, x.shape),
            freqs=None if self.freqs is None else mx.array(self.freqs, mx.float32),
        )
        return turned.reshape(rows.shape).swapaxes(1, 2).astype(x.dtype)

    def _offsets(self, positions: mx.array, shape: tuple[int, ...]) -> mx.array:
        """One position for each item that the kernel is given, int32 [B*S] or [B*S*H]."""
        batch, heads, n, _ = shape
        wanted = {1: (n,), 2: (batch, n), 3: (batch, heads, n)}.get(positions.ndim)
        rule = f"must be [{n}], [{batch}, {n}] or [{batch}, {heads}, {n}]"
        check(positions.shape == wanted, "rope", "positions", rule, positions.shape)
        if positions.ndim == 3:
            positions = positions.swapaxes(1, 2)
        elif positions.ndim == 1:
            positions = mx.broadcast_to(positions, (batch, n))
        return positions.reshape(-1).astype(mx.int32)


@functools.lru_cache(maxsize=64)
def _near(rope: Rope, count: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines float32 [dims / 2, 1, count] of the positions from 0 on."""
    angles = mx.array(rope._steps)[:, None, None] * mx.arange(count)
    table = mx.cos(angles), mx.sin(angles)
    mx.eval(table)  # so that a trace holds them and not how they are made
    return table


def to_rope(value: Any) -> Any:
    """Converter of an option: False is no rotation, even where a model's own is known."""
    return None if value is False else value


def llama3_freqs(
    dims: int, base: float = 10000.0, *, factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192
) -> tuple[float, ...]:
    """Inverse frequencies of Llama 3's longer context.

    A pair that turns less than `low` times within `original` tokens is slowed
    down by `factor`, one that turns more than `high` times is left alone, and
    between the two the frequency is a mean weighted by the number of turns.
    """
    check_int("llama3_freqs", "dims", dims, 2)
    check(dims % 2 == 0, "llama3_freqs", "dims", "must be even", dims)
    check(factor > 0, "llama3_freqs", "factor", "must be positive", factor)
    check(low < high, "llama3_freqs", "low", f"must be below `high` = {high}", low)
    check_int("llama3_freqs", "original", original, 1)
    plain = base ** (mx.arange(0, dims, 2) / dims)
    turns = original / (2 * mx.pi * plain)
    kept = mx.clip((turns - low) / (high - low), 0, 1)
    return tuple(float(f) for f in plain / ((1 - kept) / factor + kept))


def scaled_rope(
    dims: int, base: float = 10000.0, *, traditional: bool = False, scaling: Mapping[str, Any] | None = None
) -> Rope:
    """The rotation that a model's `rope_scaling` entry asks for: none, "default", "linear" or "llama3"."""
    if scaling is None:
        return Rope(dims, base, traditional=traditional)
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    check_choice("scaled_rope", "scaling", kind, ("default", "linear", "llama3"))
    if kind == "default":
        return Rope(dims, base, traditional=traditional)
    check("factor" in scaling, "scaled_rope", "scaling", f"must have a `factor` for {kind!r}", dict(scaling))
    if kind == "linear":
        return Rope(dims, base, scale=1 / scaling["factor"], traditional=traditional)
    freqs = llama3_freqs(
        dims,
        base,
        factor=scaling["factor"],
        low=scaling.get("low_freq_factor", 1.0),
        high=scaling.get("high_freq_factor", 4.0),
        original=scaling.get("original_max_position_embeddings", 8192),
    )
    return Rope(dims, base, traditional=traditional, freqs=freqs)
