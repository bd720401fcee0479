"""KVQuant: one small table of levels for a layer's normalised keys, one for its values (arXiv 2401.18079).

Keys are normalised channel by channel, values token by token; of each row the
numbers that fit worst are exact, and so are the first rows.

Differs from the paper: without calibration the first rows tell the keys'
ranges, and levels are those for normal numbers; keys are held as they come
unless `rope` is given; exact numbers have a fixed number of slots a row.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.codec import bind
from vq_functional.core.errors import check, check_between, check_choice, check_int
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.core.transform import Transform
from vq_functional.ops.ranges import mended
from vq_functional.ops.rope import Rope, to_rope
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.normalised_keys import NormalisedKeys, NormalisedKeysCodec
from vq_functional.quantize.normalised_values import NormalisedValues, NormalisedValuesCodec, token_range
from vq_functional.quantize.positioned import PositionedBlocks
from vq_functional.quantize.signpost_rows import SignpostCoder, Signposts
from vq_functional.quantize.signposts import KINDS, weighted_signposts
from vq_functional.quantize.sinks import sink_rule


def _to_range(value: Any) -> Table | None:
    """`k_range` from a pair (center, reach) or from one array."""
    return to_table(mx.stack([mx.array(end) for end in value]) if isinstance(value, tuple) else value)


@attrs.frozen(kw_only=True)
class KVQuantOptions:
    """`bits` a number; `outlier_fraction` of a row's numbers (one at least, unless 0) and `n_sink` rows stay exact.

    The first `n_fit` rows without the sinks tell the channels' ranges, which
    are widened by `margin` standard errors (None: 1, or 0 with uniform levels);
    with a `refit_interval` every so many rows have ranges of their own.
    `levels` "gaussian", "uniform", or "fitted" to the first rows in
    `lloyd_iters` sweeps. What `kvquant_calibrate` finds: `k_levels` and
    `v_levels` [2**bits], `k_range` (center, reach) [H, D] each. `rope`: the
    model's rotation, to hold keys as they were before it (False: none). `residual_length`
    newest rows stay exact. `bits_k` and `bits_v` override `bits`. `group_size`
    is not used.
    """

    bits: int = 3
    outlier_fraction: float = 0.01
    group_size: int = 32
    lloyd_iters: int = 8
    refit_interval: int = 0
    n_sink: int = 1
    bits_k: int | None = None
    bits_v: int | None = None
    levels: str = "gaussian"
    n_fit: int = 128
    margin: float | None = None
    residual_length: int = 96
    rope: Rope | None = attrs.field(default=None, converter=to_rope)
    k_levels: Table | None = attrs.field(default=None, converter=to_table)
    v_levels: Table | None = attrs.field(default=None, converter=to_table)
    k_range: Table | None = attrs.field(default=None, converter=_to_range)

    def __attrs_post_init__(self) -> None:
        check_int("kvquant", "bits", self.bits, 1, 8)
        for field, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            check_int("kvquant", field, bits, 1, 8, optional=True)
        check_between("kvquant", "outlier_fraction", self.outlier_fraction, 0, 0.5)
        for field, low in (("group_size", 1), ("lloyd_iters", 1), ("n_sink", 0), ("n_fit", 1), ("residual_length", 0)):
            check_int("kvquant", field, getattr(self, field), low)
        check_int("kvquant", "refit_interval", self.refit_interval, 0)
        check(self.refit_interval != 1, "kvquant", "refit_interval", "must be 0 or at least 2", self.refit_interval)
        if self.margin is not None:
            check_between("kvquant", "margin", self.margin, 0)
        check_choice("kvquant", "levels", self.levels, KINDS)
        rope = self.rope is None or isinstance(self.rope, Rope)
        check(rope, "kvquant", "rope", "must be a Rope", self.rope)
        self._check_tables()

    def _check_tables(self) -> None:
        sides = (("k_levels", self.k_levels, self.bits_k), ("v_levels", self.v_levels, self.bits_v))
        for field, table, bits in sides:
            if table is not None:
                check_table("kvquant", field, table, (2 ** (bits or self.bits),))
                rising = mx.all(table.array[1:] > table.array[:-1]).item()
                check(bool(rising), "kvquant", field, "must be rising", table.array.tolist())
        if self.k_range is not None:
            check_table("kvquant", "k_range", self.k_range, (2, None, None))
            least = self.k_range.array[1].min().item()
            check(least >= 0, "kvquant", "k_range", "must have no reach below 0", least)  # type: ignore[operator]
            check(self.refit_interval == 0, "kvquant", "k_range", "can't be given with `refit_interval`", "both")

    def signposts(self, bits: int | None, levels: Table | None) -> Signposts:
        """What one side's codec holds to."""
        table = self.levels if levels is None else levels
        return Signposts(
            bits or self.bits, float(self.outlier_fraction), table, self.lloyd_iters, self.n_fit, self.n_sink
        )

    @property
    def keys(self) -> NormalisedKeysCodec:
        """Codec of the keys."""
        signposts = self.signposts(self.bits_k, self.k_levels)
        margin = float(signposts.levels != "uniform") if self.margin is None else float(self.margin)
        return NormalisedKeysCodec(signposts, margin, self.refit_interval, self.rope, self.k_range)

    @property
    def values(self) -> NormalisedValuesCodec:
        """Codec of the values."""
        return NormalisedValuesCodec(self.signposts(self.bits_v, self.v_levels))


@attrs.frozen(eq=False)
class KVQuantTables:
    """What `kvquant_calibrate` finds for one layer, under the names of the options."""

    k_levels: mx.array  # float32 [2**bits], rising
    v_levels: mx.array
    k_range: mx.array  # float32 [2, H, D]: center and reach of each channel

    def arrays(self) -> dict[str, mx.array]:
        """The arrays by name: options of `kvquant`, and what a file can hold."""
        return attrs.asdict(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "KVQuantTables":
        """Inverse of `arrays`."""
        return cls(**arrays)


def kvquant_calibrate(
    keys: mx.array,
    values: mx.array,
    *,
    key_weights: mx.array | None = None,
    value_weights: mx.array | None = None,
    positions: mx.array | None = None,
    **options: Any,
) -> KVQuantTables:
    """Ranges and levels of one layer from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv].

    `key_weights` and `value_weights`, of the same shapes, tell how much each
    number's error matters (the paper: its squared gradient). With `rope` the
    keys stand at `positions` int [N], 0 to N - 1 unless given. Options as in
    KVQuantOptions. Raises QuantizerConfigError for other shapes.
    """
    o = KVQuantOptions(**options)
    check(o.refit_interval == 0, "kvquant_calibrate", "refit_interval", "must be 0", o.refit_interval)
    for field, x, weights in (("keys", keys, key_weights), ("values", values, value_weights)):
        check(x.ndim == 3 and 0 not in x.shape, "kvquant_calibrate", field, "must be [N, H, D]", x.shape)
        fits = weights is None or weights.shape == x.shape
        check(fits, "kvquant_calibrate", f"{field[:-1]}_weights", f"must be {x.shape}", weights)
    key, value = (bind(codec, x.shape[2], mx.float32) for codec, x in ((o.keys, keys), (o.values, values)))
    assert isinstance(key, NormalisedKeys) and isinstance(value, NormalisedValues)
    position = mx.arange(keys.shape[0]) if positions is None else positions
    rows = key.before_rope(_one_sequence(keys), position[None])
    ranges = key.range_of(rows)
    k_levels = _calibrated(key, rows, ranges, key_weights, o.lloyd_iters)
    rows = _one_sequence(values)
    v_levels = _calibrated(value, rows, token_range(rows, value.slots), value_weights, o.lloyd_iters)
    k_range = mx.stack([end[0, :, 0] for end in ranges])
    mx.eval(k_range)
    return KVQuantTables(k_levels, v_levels, k_range)


def _calibrated(
    coder: SignpostCoder, x: mx.array, ranges: tuple[mx.array, mx.array], weights: mx.array | None, sweeps: int
) -> mx.array:
    y, counts = coder.counted(x, *ranges)
    if weights is not None:
        counts = counts * _one_sequence(weights)
    return weighted_signposts(y.flatten(), counts.flatten(), coder.first_levels, sweeps)


def _one_sequence(x: mx.array) -> mx.array:
    """Float32 [1, H, N, D] of `x` [N, H, D], finite."""
    return mended(x.astype(mx.float32).swapaxes(0, 1)[None])


def kvquant(**options: Any) -> Transform:
    """Normalised keys and values in few levels, outliers and the first rows exact; keeps every token."""
    o = KVQuantOptions(**options)
    key = o.keys
    kind = PositionedBlocks if key.positioned else Blocks
    sinks = sink_rule(o.n_sink)
    return kind("kvquant", key, o.values, residual=o.residual_length, sinks=sinks)
