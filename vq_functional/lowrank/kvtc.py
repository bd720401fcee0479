"""KVTC: principal components of each head, with more bits for those that vary more (arXiv 2511.01815).

Differs from the paper: a head has axes of its own, fitted to the first rows
or beforehand to samples; components have a width each, from a model of the
error instead of measured ones; what is held has fixed width a token, and
`kvtc_encode` codes it without loss for storage and transfer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_functional.core.codec import bind
from vq_functional.core.describe import Described
from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.core.transform import Transform
from vq_functional.lowrank.head_groups import HeadGroups, sampled_basis
from vq_functional.lowrank.variable_codes import RANGES, Components, VariableCodes, VariableCodesCodec, most_bits
from vq_functional.ops.spectrum import Floats, check_axes, to_numpy, to_samples
from vq_functional.quantize.blocks import Blocks
from vq_functional.quantize.sinks import sink_rule

MOST = 8  # bits of a component
TABLES = ("basis", "mean", "width", "scale", "shift")


def _table() -> Any:
    return attrs.field(converter=to_table)


@attrs.frozen
class KVTCBasis(Described):
    """What `kvtc_calibrate` finds for one layer of H heads: axes [H, D, r], mean [H, D]; width, scale, shift [H, r]."""

    key_basis: Table = _table()
    key_mean: Table = _table()
    key_width: Table = _table()
    key_scale: Table = _table()
    key_shift: Table = _table()
    value_basis: Table = _table()
    value_mean: Table = _table()
    value_width: Table = _table()
    value_scale: Table = _table()
    value_shift: Table = _table()

    def __attrs_post_init__(self) -> None:
        for side in ("key", "value"):
            self._check_side(side)
        heads, of_values = self.key_basis.shape[0], self.value_basis.shape[0]
        check(heads == of_values, "kvtc", "value_basis", f"must be of {heads} heads, as the keys' is", of_values)

    def _check_side(self, side: str) -> None:
        basis, *others = (getattr(self, f"{side}_{name}") for name in TABLES)
        check_table("kvtc", f"{side}_basis", basis, (None, None, None))
        heads, dim, rank = basis.shape
        for name, table in zip(TABLES[1:], others, strict=True):
            check_table("kvtc", f"{side}_{name}", table, (heads, dim if name == "mean" else rank))
        check_axes("kvtc", f"{side}_basis", to_numpy(basis.array))
        width = to_numpy(others[1].array)
        whole = np.isin(width, range(MOST + 1)).all()
        check(bool(whole), "kvtc", f"{side}_width", f"must be whole numbers from 0 to {MOST}", width.tolist())

    def components(self, side: str) -> Components:
        """Those of "key" or "value"."""
        return Components(*(getattr(self, f"{side}_{name}") for name in TABLES))

    def arrays(self) -> dict[str, mx.array]:
        """The fields by name: what a file can hold."""
        return {field.name: getattr(self, field.name).array for field in attrs.fields(type(self))}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array]) -> "KVTCBasis":
        """Inverse of `arrays`."""
        found: dict[str, Any] = {field.name: arrays[field.name] for field in attrs.fields(cls)}
        return cls(**found)


def _to_choices(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) else value


@attrs.frozen(kw_only=True)
class KVTCOptions:
    """`bit_budget` bits a token and head, for keys and for values, `bit_budget_k` and `bit_budget_v` where they differ.

    A component has one of `bit_choices` bits, such that the sum of v * `beta`**-b
    is least (b bits, variance v; v itself at none). `rank` leading components
    (None: all) are held. The axes are fitted to the first `n_fit` rows without
    the sinks. As later rows vary more, `shrinkage` times the mean variance is
    added to that of each component (None: what axes fitted to one half of the
    rows say of the other half). Levels go by `ranges`: "spread", by the variance,
    or "observed", the range of the first rows; what is observed is widened by the
    share `margin`. `basis` from `kvtc_calibrate` takes the
    place of all this, and `bit_budget` is then what its widths may sum to.
    `n_sink` first and `window` newest rows are exact; `chunk` rows are packed at a time.
    """

    bit_budget: int = 512
    bit_choices: tuple[int, ...] = attrs.field(default=(0, 1, 2, 3, 4, 6, 8), converter=_to_choices)
    beta: float = 3.5
    bit_budget_k: int | None = None
    bit_budget_v: int | None = None
    n_sink: int = 4
    window: int = 128
    chunk: int = 16
    n_fit: int = 128
    rank: int | None = None
    shrinkage: float | None = None
    ranges: str = "spread"
    margin: float = 0.1
    basis: KVTCBasis | None = None

    def __attrs_post_init__(self) -> None:
        for field, low in (("bit_budget", 0), ("n_sink", 0), ("window", 0), ("chunk", 1), ("n_fit", 1)):
            check_int("kvtc", field, getattr(self, field), low)
        for field, low in (("bit_budget_k", 0), ("bit_budget_v", 0), ("rank", 1)):
            if getattr(self, field) is not None:
                check_int("kvtc", field, getattr(self, field), low)
        check(self.n_fit > self.n_sink, "kvtc", "n_fit", f"must be above `n_sink` = {self.n_sink}", self.n_fit)
        self._check_choices()
        check_number("kvtc", "beta", self.beta, 1)
        if self.shrinkage is not None:
            check_between("kvtc", "shrinkage", self.shrinkage, 0)
        check_choice("kvtc", "ranges", self.ranges, RANGES)
        check_between("kvtc", "margin", self.margin, 0)
        self._check_basis()

    def _check_choices(self) -> None:
        choices = self.bit_choices
        check(isinstance(choices, tuple), "kvtc", "bit_choices", "must be a tuple of integers", choices)
        for bits in choices:
            check_int("kvtc", "bit_choices", bits, 0, MOST)
        check(0 in choices, "kvtc", "bit_choices", "must contain 0", choices)

    def _check_basis(self) -> None:
        if self.basis is None:
            return
        check(isinstance(self.basis, KVTCBasis), "kvtc", "basis", "must come from kvtc_calibrate", self.basis)
        for side, budget in zip(("key", "value"), self.budgets, strict=True):
            most = most_bits(getattr(self.basis, f"{side}_width").array)
            check(most <= budget, "kvtc", "basis", f"must have {side}s of at most {budget} bits", most)

    @property
    def budgets(self) -> tuple[int, int]:
        """Bits of a key and of a value."""
        key, value = (self.bit_budget if own is None else own for own in (self.bit_budget_k, self.bit_budget_v))
        return key, value

    @property
    def codecs(self) -> tuple[VariableCodesCodec, VariableCodesCodec]:
        """Key and value codec."""
        names = ("beta", "rank", "shrinkage", "ranges", "margin", "n_fit", "n_sink", "chunk")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        given = [self.basis.components(side) if self.basis else None for side in ("key", "value")]
        key, value = (
            VariableCodesCodec(budget=budget, choices=self.bit_choices, given=components, **common)
            for budget, components in zip(self.budgets, given, strict=True)
        )
        return key, value


def kvtc_calibrate(keys: Any, values: Any, **options: Any) -> KVTCBasis:
    """Components of one layer from sampled rows `keys` [N, H, Dk] and `values` [N, H, Dv], of MLX or numpy.

    Options as in KVTCOptions. Components that get no bits in any head are left
    out, as are rows with NaN or infinities. Raises QuantizerConfigError for
    other shapes and where no row is left.
    """
    o = KVTCOptions(**options)
    check(o.basis is None, "kvtc_calibrate", "basis", "must be None", o.basis)
    found: list[Any] = []
    for field, x, codec in zip(("keys", "values"), (keys, values), o.codecs, strict=True):
        rows = to_samples("kvtc_calibrate", field, x)
        coder = bind(codec, rows.shape[2], mx.float32)
        assert isinstance(coder, VariableCodes)
        found += _components(rows, coder)
    return KVTCBasis(*found)


def _components(samples: Floats, coder: VariableCodes) -> list[mx.array]:
    """Tables [H, ...] of `samples` [N, H, D]."""
    rows = samples[np.isfinite(samples).all(axis=(1, 2))]
    heads = samples.shape[1]
    axes, center = sampled_basis(rows, HeadGroups.of(heads, heads), coder.rank, 1.0, 1)
    x, basis, mean = (mx.array(array.astype(np.float32))[None] for array in (rows.swapaxes(0, 1), axes, center))
    basis, mean, width, scale, shift = (table[0] for table in coder.fitted(x, basis, mean))
    used = max(most_bits(width > 0), 1)
    return [basis[..., :used], mean, *(table[..., :used] for table in (width, scale, shift))]


def kvtc(**options: Any) -> Transform:
    """Principal components in codes of fitting widths, the first and the newest rows exact; keeps every token."""
    o = KVTCOptions(**options)
    key, value = o.codecs
    return Blocks("kvtc", key, value, o.window, sink_rule(o.n_sink))
