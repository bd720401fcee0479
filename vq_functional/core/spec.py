"""Shapes of one attention layer's cache."""

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_int

FLOATS = (mx.float16, mx.bfloat16, mx.float32)


@attrs.frozen(kw_only=True)
class Layout:
    """What never changes in the life of a state, whatever its batch and capacity."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype


@attrs.frozen(kw_only=True)
class KVSpec:
    """Plain numbers that fix every array shape of a state.

    `capacity` is the number of token rows that an append-only store can hold
    before `grow`; methods with a budget hold that budget and ignore it.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    batch: int = 1
    dtype: mx.Dtype = mx.float16
    capacity: int = 1024

    def __attrs_post_init__(self) -> None:
        for field in ("kv_heads", "key_dim", "value_dim", "capacity"):
            check_int("KVSpec", field, getattr(self, field), 1)
        check_int("KVSpec", "batch", self.batch, 0)
        check(self.dtype in FLOATS, "KVSpec", "dtype", "must be float16, bfloat16 or float32", self.dtype)

    @property
    def layout(self) -> Layout:
        """The spec without batch and capacity."""
        return Layout(kv_heads=self.kv_heads, key_dim=self.key_dim, value_dim=self.value_dim, dtype=self.dtype)
