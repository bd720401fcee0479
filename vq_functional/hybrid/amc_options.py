"""Options of AMC, and what calibration finds."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.describe import Described
from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.hybrid.amc_saliency import NORMALIZE, Saliency
from vq_functional.hybrid.amc_tiers import FILLS, TiersCodec

TABLES = ("key_order", "value_order", "key_mean", "value_mean")
SHARES = 1e-9  # of a row that a share of the window may miss by rounding


def _to_float32(value: Any) -> Any:
    """The number that a float32 array can hold, so that what is stored comes back as it was."""
    return float(np.float32(value)) if isinstance(value, float) else value


@attrs.frozen(kw_only=True)
class AMCBasis(Described):
    """What `amc_calibrate` finds for one layer: channels by falling variance [H, D], their means in this order.

    `calib_variance` is the mean variance of the saliency in a block.
    """

    key_order: Table = attrs.field(converter=to_table)
    value_order: Table = attrs.field(converter=to_table)
    key_mean: Table = attrs.field(converter=to_table)
    value_mean: Table = attrs.field(converter=to_table)
    calib_variance: float = attrs.field(converter=_to_float32)

    def __attrs_post_init__(self) -> None:
        check_number("amc", "calib_variance", self.calib_variance, 0)
        for order, mean in (("key_order", "key_mean"), ("value_order", "value_mean")):
            table = getattr(self, order)
            check_table("amc", order, table, (None, None))
            check_table("amc", mean, getattr(self, mean), table.shape)
            whole = mx.array_equal(
                mx.sort(table.array, axis=-1), mx.broadcast_to(mx.arange(table.shape[1]), table.shape)
            )
            check(bool(whole.item()), "amc", order, "must hold every channel of a head once", table.shape)

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        tables = {name: value.array for name, value in attrs.asdict(self, recurse=False).items() if name in TABLES}
        return {**tables, "calib_variance": mx.array(self.calib_variance)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "AMCBasis":
        """Inverse of `arrays`."""
        variance: Any = arrays["calib_variance"].item()
        return cls(**{name: Table.of(arrays[name]) for name in TABLES}, calib_variance=variance)


@attrs.frozen(kw_only=True)
class AMCOptions:
    """Of each `threshold_window` rows a share `k_high` is exact, `k_mid` has 8 bits, the others 4.

    A row of 8 bits keeps `rank_mid` channels (None: a third), one of 4 bits
    `rank_low` (None: a sixteenth), in groups of `group_size`; `fill` tells what
    dropped channels read. Saliency is magnitude, as `normalize` defines it, with
    `use_query_saliency` a share `query_alpha` of it and else the cosine to the
    queries. `adaptive_thresholds` move with the variance of the saliency over
    `calib_variance`, by `gamma`. `residual_length` newest rows are exact, and
    `n_sink` first ones. `basis`: what `amc_calibrate` found.
    """

    k_high: float = 0.2
    k_mid: float = 0.3
    use_query_saliency: bool = False
    query_alpha: float = 0.5
    adaptive_thresholds: bool = False
    threshold_window: int = 64
    gamma: float = 0.1
    calib_variance: float | None = None
    group_size: int = 32
    normalize: str = "deviation"
    fill: str = "block"
    rank_mid: int | None = None
    rank_low: int | None = None
    residual_length: int = 0
    n_sink: int = 4
    basis: AMCBasis | None = None

    def __attrs_post_init__(self) -> None:
        for field in ("k_high", "k_mid", "query_alpha"):
            check_between("amc", field, getattr(self, field), 0, 1)
        total = self.k_high + self.k_mid
        check(total <= 1 + SHARES, "amc", "k_mid", "must be at most 1 with `k_high`", total)
        for field in ("use_query_saliency", "adaptive_thresholds"):
            check_choice("amc", field, getattr(self, field), (True, False))
        check_int("amc", "threshold_window", self.threshold_window, 2, 2**16)
        check_between("amc", "gamma", self.gamma, 0)
        if self.calib_variance is not None:
            check_number("amc", "calib_variance", self.calib_variance, 0)
        check_choice("amc", "normalize", self.normalize, NORMALIZE)
        check_choice("amc", "fill", self.fill, FILLS)
        for field, low in (("group_size", 1), ("residual_length", 0), ("n_sink", 0)):
            check_int("amc", field, getattr(self, field), low)
        for field in ("rank_mid", "rank_low"):
            if getattr(self, field) is not None:
                check_int("amc", field, getattr(self, field), 1)
        fits = self.basis is None or isinstance(self.basis, AMCBasis)
        check(fits, "amc", "basis", "must be what `amc_calibrate` returns", self.basis)
        known = self.calib_variance or self.basis or not self.adaptive_thresholds
        check(bool(known), "amc", "calib_variance", "must be given with `adaptive_thresholds`", None)

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of a block that are exact, and rows of 8 bits."""
        high, mid = (math.ceil(share * self.threshold_window - SHARES) for share in (self.k_high, self.k_mid))
        return high, min(self.threshold_window - high, mid)

    @property
    def saliency(self) -> Saliency:
        """The rule that ranks rows."""
        variance = self.calib_variance or (self.basis.calib_variance if self.basis else None)
        alpha = float(self.query_alpha) if self.use_query_saliency else None
        adapts = self.adaptive_thresholds and variance is not None
        return Saliency(self.normalize, alpha, float(self.gamma), float(variance or 0) if adapts else None)

    def codec(self, keys: bool) -> TiersCodec:
        """Codec of one side."""
        side, mean = "key" if keys else "value", self.fill == "mean"
        order, means = (getattr(self.basis, f"{side}_{table}", None) for table in ("order", "mean"))
        ranks = self.rank_mid, self.rank_low, self.group_size
        rows = self.threshold_window, *self.counts, *ranks, self.fill
        return TiersCodec(*rows, keys, self.adaptive_thresholds, order, means if mean else None)
