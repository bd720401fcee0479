"""Table: an array as an option, such as a codebook that was fitted beforehand."""

import base64
import functools
from collections.abc import Iterable

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import Described
from vq_functional.core.errors import check


@attrs.frozen
class Table(Described):
    """Float32 numbers as plain data: hashable, equal by content, part of a description."""

    shape: tuple[int, ...]
    data: str = attrs.field(repr=False)  # little-endian float32, base64

    @classmethod
    def of(cls, array: mx.array | np.ndarray | Iterable[float]) -> "Table":
        """The table of an array of numbers."""
        try:
            numbers = np.asarray(array.astype(mx.float32) if isinstance(array, mx.array) else array, np.float32)
        except (TypeError, ValueError):
            check(False, "table", "array", "must hold numbers", array)
        return cls(numbers.shape, base64.b64encode(numbers.astype("<f4").tobytes()).decode())

    @property
    def array(self) -> mx.array:
        """Float32, made once."""
        return _array(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 array."""
        return 4 * int(np.prod(self.shape))


def to_table(value: "Table | mx.array | np.ndarray | None") -> Table | None:
    """Converter of an option that may hold an array."""
    return value if value is None or isinstance(value, Table) else Table.of(value)


def check_table(method: str, field: str, table: Table, *shapes: tuple[int | None, ...]) -> None:
    """Check that the table is finite and has one of `shapes`, in which None stands for any size."""
    fits = any(
        len(shape) == len(table.shape)
        and all(want in (None, got) for want, got in zip(shape, table.shape, strict=True))
        for shape in shapes
    )
    check(fits, method, field, f"must be an array of shape {' or '.join(map(str, shapes))}", table.shape)
    check(bool(mx.isfinite(table.array).all().item()), method, field, "must be finite", "NaN or infinity")


@functools.lru_cache(maxsize=1024)
def _array(table: Table) -> mx.array:
    array = mx.array(np.frombuffer(base64.b64decode(table.data), "<f4").reshape(table.shape))
    mx.eval(array)
    return array
