"""Codes of un-rotated keys for retrieval: entries are chosen by the error in scores that queries would see.

With H the second moment of queries, (k - e) H (k - e)^T is the mean square of
that error. H = L L^T, so the entry nearest to k in the space of k L is the one.
"""

import functools
from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import Rows
from vq_functional.core.table import Table
from vq_functional.ops.kmeans import Floats, kmeans
from vq_functional.ops.rotations import Rotation, hadamard_size, random_rotation
from vq_functional.ops.vector_codes import Codebook, gaussian_codebook, table_scores
from vq_functional.ops.vectors import TINY, norm

DAMPING = 1e-6  # of a moment, by its mean diagonal


@attrs.frozen(eq=False)
class KeyCodes:
    """One index of a codebook for every s numbers of a key, and what a query scores with them.

    A codebook for normal numbers holds keys that are rotated at random, block by
    block, and divided by their root mean square.
    """

    codebook: Codebook  # entries e L
    weight: mx.array | None  # float32 [H or 1, 1, M or 1, s, s]: L
    inverse: mx.array | None  # float32 [H or 1, M or 1, s, s]: L^-T
    rotation: Rotation | None
    block: int  # numbers that are rotated together
    radial: float

    def encode(self, keys: mx.array) -> Rows:
        """Codes uint8 or uint16 [B, H, S, M] of float32 `keys` [B, H, S, D], and root mean squares [B, H, S] if any."""
        x = self._split(keys)
        x = x if self.weight is None else _times(x, self.weight)
        if self.rotation is None:
            return (self._nearest(x),)
        y = self._rotated(x.reshape(keys.shape))
        gain = norm(y) * keys.shape[-1] ** -0.5
        return self._nearest(self._split(y / mx.maximum(gain, TINY))), gain[..., 0].astype(mx.bfloat16)

    def scores(self, queries: mx.array, rows: Rows) -> mx.array:
        """Float32 [B, H, n, S]: products of float32 `queries` [B, H, n, D] with the keys that the codes stand for."""
        x = self._split(queries)
        if self.inverse is not None:
            x = (x.swapaxes(2, 3) @ self.inverse).swapaxes(2, 3)
        if self.rotation is None:
            return table_scores(self.codebook.table(x), rows[0])
        x = self._split(self._rotated(x.reshape(queries.shape)))
        return table_scores(self.codebook.table(x), rows[0]) * rows[1].astype(mx.float32)[:, :, None]

    def empty(self, batch: int, heads: int, dim: int, count: int) -> Rows:
        """Zeroed room for the codes of `count` keys."""
        one = self.encode(mx.zeros((1, heads, 1, dim)))
        return tuple(mx.zeros((batch, heads, count, *row.shape[3:]), row.dtype) for row in one)

    def _nearest(self, x: mx.array) -> mx.array:
        return self.codebook.nearest(x, self.radial).astype(mx.uint8 if self.codebook.count <= 256 else mx.uint16)

    def _rotated(self, x: mx.array) -> mx.array:
        assert self.rotation is not None
        return self.rotation.apply(x.reshape(*x.shape[:-1], -1, self.block)).reshape(x.shape)

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], -1, self.codebook.size)


@functools.lru_cache(maxsize=256)
def key_codes(
    dim: int, size: int, bits: int, codebook: Table | None, moment: Table | None, radial: float, seed: int
) -> KeyCodes:
    """The codes of keys of `dim` numbers, `size` to an index of `bits`."""
    lower, inverse = (None, None) if moment is None else _whitening(moment, size)
    weight = None if lower is None else lower[:, None]
    if codebook is None:
        block = dim if hadamard_size(dim) else dim & -dim
        return KeyCodes(gaussian_codebook(size, bits), weight, inverse, random_rotation(block, seed), block, radial)
    entries = _four_axes(codebook.array)
    return KeyCodes(Codebook(entries if lower is None else entries @ lower), weight, inverse, None, dim, radial)


def query_moment(queries: Floats, size: int) -> Floats:
    """Second moments [H, M, size, size] of the finite rows of `queries` [H, N, D], cut into M places."""
    queries = np.where(np.isfinite(queries).all(axis=-1, keepdims=True), queries, 0)
    cut = queries.reshape(*queries.shape[:2], -1, size).astype(np.float64)
    return _damped(np.einsum("hnmi,hnmj->hmij", cut, cut)).astype(np.float32)


def fitted_codebook(keys: Floats, moment: Floats | None, size: int, count: int, rounds: int, seed: int) -> Floats:
    """Entries [H, M, count, size] of k-means on `keys` [H, N, D]; `moment` [H, M, size, size] says what is near."""
    heads, n, dim = keys.shape
    cut = keys.reshape(heads, n, -1, size)
    eye = np.broadcast_to(np.eye(size), (heads, dim // size, size, size))
    lower = eye if moment is None else np.linalg.cholesky(moment.astype(np.float64))
    entries = np.empty((heads, dim // size, count, size), np.float32)
    for h, m in np.ndindex(entries.shape[:2]):
        samples = (cut[h, :, m] @ lower[h, m]).astype(np.float32)
        entries[h, m] = kmeans(samples, count, rounds=rounds, seed=seed) @ np.linalg.inv(lower[h, m])
    return entries


def _damped(moment: np.ndarray) -> np.ndarray:
    """A moment float64 [..., s, s] by its mean diagonal, without rounding errors below zero, and a little more."""
    scale = np.trace(moment, axis1=-2, axis2=-1)[..., None, None] / moment.shape[-1]
    values, vectors = np.linalg.eigh(moment / np.where(scale > 0, scale, 1))
    return (vectors * (np.maximum(values, 0) + DAMPING)[..., None, :]) @ vectors.swapaxes(-1, -2)


def _whitening(moment: Table, size: int) -> tuple[mx.array, mx.array]:
    """L and L^-T, float32 [H or 1, M or 1, s, s]."""
    lower = np.linalg.cholesky(_damped(np.array(_four_axes(moment.array), np.float64)))
    pair = mx.array(lower.astype(np.float32)), mx.array(np.linalg.inv(lower).swapaxes(-1, -2).astype(np.float32))
    mx.eval(pair)
    return pair


def _four_axes(x: mx.array) -> mx.array:
    return x.reshape((1, 1, *x.shape)[-4:])


def _times(x: mx.array, weight: mx.array) -> mx.array:
    """`x` [B, H, S, M, s] times `weight` [H or 1, 1, M or 1, s, s]: bit for bit the same for a row in any call."""
    return _product(x.shape[-1])(x, weight)


@functools.lru_cache(maxsize=16)
def _product(size: int) -> Callable[[mx.array, mx.array], mx.array]:
    def product(x: mx.array, weight: mx.array) -> mx.array:
        return functools.reduce(mx.add, [x[..., j : j + 1] * weight[..., j, :] for j in range(size)])

    return mx.compile(product)
