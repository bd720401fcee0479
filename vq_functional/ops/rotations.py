"""Random rotations: y = P x with P orthogonal, from a seed alone."""

import functools

import attrs
import mlx.core as mx


def hadamard_size(dim: int) -> bool:
    """Whether ``mx.hadamard_transform`` is right and its own inverse: 2^k and 12 * 2^k.

    MLX corrupts memory at some other sizes, and at 20 * 2^k and 28 * 2^k the
    transform is not symmetric.
    """
    return any(dim % odd == 0 and (dim // odd).bit_count() == 1 and dim > 1 for odd in (1, 12))


class Rotation:
    """An orthogonal map of the last axis; `apply` and `undo` take and give float32."""

    def apply(self, x: mx.array) -> mx.array:
        raise TypeError(f"{type(self).__name__} does not rotate")

    def undo(self, y: mx.array) -> mx.array:
        raise TypeError(f"{type(self).__name__} does not rotate")


@attrs.frozen(eq=False)
class HadamardRotation(Rotation):
    """Rounds of H diag(signs): fast, D numbers a round to keep.

    One round turns a vector of few large entries into one of few distinct
    values; a second one makes it look like any other.
    """

    signs: mx.array  # float32 [rounds, D]

    def apply(self, x: mx.array) -> mx.array:
        for signs in self.signs:
            x = mx.hadamard_transform(x * signs)
        return x

    def undo(self, y: mx.array) -> mx.array:
        for signs in self.signs[::-1]:
            y = mx.hadamard_transform(y) * signs
        return y


@attrs.frozen(eq=False)
class DenseRotation(Rotation):
    """A Haar orthogonal matrix, for sizes that the fast transform can't take."""

    matrix: mx.array  # float32 [D, D]

    def apply(self, x: mx.array) -> mx.array:
        return x @ self.matrix.T

    def undo(self, y: mx.array) -> mx.array:
        return y @ self.matrix


@functools.lru_cache(maxsize=1024)
def random_rotation(dim: int, seed: int, rounds: int = 1) -> Rotation:
    """The rotation of a size and seed: `rounds` of randomized Hadamard where that is possible, else dense."""
    if hadamard_size(dim):
        signs = mx.where(mx.random.bernoulli(shape=(rounds, dim), key=mx.random.key(seed)), 1.0, -1.0)
        mx.eval(signs)
        return HadamardRotation(signs)
    return DenseRotation(random_orthogonal(dim, seed))


@functools.lru_cache(maxsize=64)
def fixed_rotation(dim: int, seed: int = 0) -> Rotation:
    """The Hadamard transform itself; at sizes that it can't take, the dense rotation of a seed."""
    if not hadamard_size(dim):
        return random_rotation(dim, seed)
    signs = mx.ones((1, dim))
    mx.eval(signs)
    return HadamardRotation(signs)


def random_orthogonal(dim: int, seed: int) -> mx.array:
    """Haar orthogonal float32 [D, D]: QR of a Gaussian matrix with the signs of R's diagonal divided out."""
    gaussian = mx.random.normal((dim, dim), key=mx.random.key(seed))
    q, r = mx.linalg.qr(gaussian, stream=mx.cpu)
    matrix = q * mx.sign(mx.diag(r))
    mx.eval(matrix)
    return matrix
