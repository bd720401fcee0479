"""SKVQ: clipped groups of alike channels behind a window of exact rows (arXiv 2405.06219).

Each token's codes stand alone; only the order of the channels is told by
other rows, the first ones of a sequence, or given.

Differs from the paper: each head has its own order; ranges are clipped by
search, token by token and group by group, about their middle; the numbers that
a group shares take 16 bits unless `fp8`; there are no codes of 1.5 bits.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_choice, check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.core.transform import Transform
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.clipped import CENTERS, ClippedGroupsCodec
from vq_functional.quantize.orders import ORDERS, channel_order
from vq_functional.quantize.sinks import sink_rule

CLIPS = (1.0, 0.97, 0.94, 0.90, 0.85)
COARSE_CLIPS = {1: (1.0, 0.8, 0.65, 0.5, 0.35), 2: (1.0, 0.92, 0.84, 0.76, 0.68)}  # few levels: best well inside


@attrs.frozen(kw_only=True)
class SKVQOptions:
    """`bits_key` and `bits_value` a number; `group_size` channels share scale and zero.

    `window` newest and `n_sink` first rows stay exact. `reorder` puts alike
    channels side by side, by `order`, told by the first `n_fit` rows without
    the sinks (16 at least), or as `key_order` and `value_order` [H, D] say. Each
    group's range shrinks about `clip_center` to the best share of `clip_grid`
    (None: one that suits the bits), without `clip_search` to `clip_alpha`. `fp8`
    halves what scales and zeros take. `max_ctx` tokens at most. `bits_k` and
    `bits_v`, the names of other methods, override the bits.
    """

    bits_key: int = 2
    bits_value: int = 2
    group_size: int = 32
    window: int = 128
    n_sink: int = 5
    reorder: bool = True
    clip_search: bool = True
    clip_alpha: float = 1.0
    max_ctx: int | None = None
    order: str = "best"
    n_fit: int = 32
    clip_grid: tuple[float, ...] | None = None
    clip_center: str = "midpoint"
    fp8: bool = False
    bits_k: int | None = None
    bits_v: int | None = None
    key_order: Table | None = attrs.field(default=None, converter=to_table)
    value_order: Table | None = attrs.field(default=None, converter=to_table)

    def __attrs_post_init__(self) -> None:
        for field in ("bits_key", "bits_value", "bits_k", "bits_v"):
            check_int("skvq", field, getattr(self, field), 1, 8, optional=field in ("bits_k", "bits_v"))
        check_int("skvq", "group_size", self.group_size, 1)
        check_int("skvq", "window", self.window, 2)
        check_int("skvq", "n_sink", self.n_sink, 0, self.window - 1)
        check_int("skvq", "max_ctx", self.max_ctx, 1, optional=True)
        for field in ("reorder", "clip_search", "fp8"):
            check_choice("skvq", field, getattr(self, field), (True, False))
        self._check_clips()
        self._check_orders()

    def _check_clips(self) -> None:
        check_number("skvq", "clip_alpha", self.clip_alpha, 0, 1)
        used = not self.clip_search or self.clip_alpha == 1
        check(used, "skvq", "clip_alpha", "can't be set with `clip_search`", self.clip_alpha)
        check_choice("skvq", "clip_center", self.clip_center, CENTERS)
        if self.clip_grid is not None:
            check(self.clip_search, "skvq", "clip_grid", "can't be set without `clip_search`", self.clip_grid)
            many = isinstance(self.clip_grid, tuple) and len(self.clip_grid) > 0
            check(many, "skvq", "clip_grid", "must be a tuple of numbers", self.clip_grid)
            for clip in self.clip_grid:
                check_number("skvq", "clip_grid", clip, 0, 1)

    def _check_orders(self) -> None:
        check_choice("skvq", "order", self.order, ORDERS)
        check_int("skvq", "n_fit", self.n_fit, 1)
        for field, table in (("key_order", self.key_order), ("value_order", self.value_order)):
            if table is not None:
                check(self.reorder, "skvq", field, "can't be given without `reorder`", self.reorder)
                check_table("skvq", field, table, (None, None))
                whole = mx.array_equal(mx.sort(table.array, axis=-1) - mx.arange(table.shape[1]), mx.zeros(table.shape))
                check(bool(whole.item()), "skvq", field, "must hold every channel of a head once", table.shape)

    def clips(self, bits: int) -> tuple[float, ...]:
        """Shares of the range that are tried at `bits`."""
        if not self.clip_search:
            return (self.clip_alpha,)
        return COARSE_CLIPS.get(bits, CLIPS) if self.clip_grid is None else self.clip_grid

    def codec(self, side: str) -> ClippedGroupsCodec:
        """Codec of the "key" or the "value" side."""
        bits = getattr(self, f"bits_{side[0]}") or getattr(self, f"bits_{side}")
        return ClippedGroupsCodec(
            side,
            bits,
            self.group_size,
            self.order if self.reorder else None,
            self.clips(bits),
            self.clip_center,
            self.fp8,
            self.n_fit,
            self.n_sink,
            given=getattr(self, f"{side}_order"),
        )


@attrs.frozen(eq=False)
class SKVQTables:
    """What `skvq_calibrate` finds for one layer, under the names of the options."""

    key_order: mx.array  # int32 [H, D]
    value_order: mx.array

    def arrays(self) -> dict[str, mx.array]:
        """The arrays by name: options of `skvq`, and what a file can hold."""
        return attrs.asdict(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "SKVQTables":
        """Inverse of `arrays`."""
        return cls(**arrays)


def skvq_calibrate(keys: mx.array, values: mx.array, **options: Any) -> SKVQTables:
    """Orders of one layer's channels from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv].

    Options as in SKVQOptions. Raises QuantizerConfigError for other shapes.
    """
    o = SKVQOptions(**options)
    for field, x in (("keys", keys), ("values", values)):
        check(x.ndim == 3 and 0 not in x.shape, "skvq_calibrate", field, "must be [N, H, D]", x.shape)
    orders = [channel_order(x.swapaxes(0, 1)[None], o.order, o.group_size)[0] for x in (keys, values)]
    mx.eval(orders)
    return SKVQTables(*orders)


def skvq(**options: Any) -> Transform:
    """Clipped groups of alike channels, the first and the newest rows exact; keeps every token."""
    o = SKVQOptions(**options)
    return Blocks(
        "skvq",
        key=o.codec("key"),
        value=o.codec("value"),
        residual=o.window,
        sinks=sink_rule(o.n_sink),
        max_ctx=o.max_ctx,
    )
