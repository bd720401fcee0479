"""Options of a2ats, and what follows from them and a layer's sizes."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from vq_functional.core.errors import (
    QuantizerConfigError,
    check,
    check_between,
    check_choice,
    check_int,
    check_number,
    check_seed,
)
from vq_functional.core.spec import Layout
from vq_functional.core.table import Table, check_table, to_table
from vq_functional.hybrid.a2ats_codes import KeyCodes, key_codes
from vq_functional.hybrid.a2ats_reach import Reach
from vq_functional.ops.rope import Rope, scaled_rope
from vq_functional.ops.vector_codes import has_gaussian


def _to_pairs(scaling: Any) -> Any:
    return tuple(sorted(scaling.items())) if isinstance(scaling, Mapping) else scaling


@attrs.frozen(kw_only=True)
class A2ATSOptions:
    """An index of `codebook_bits` for every `sub_dim` numbers of a key.

    A token attends to the `window` newest rows, itself included, to the first
    `n_sink`, and to `retrieval_fraction` of all rows among the others, which
    are scored at distance `b`. `rope`, or `rope_*` without it, say how the model rotates keys.
    `codebook` and `query_h` are what `a2ats_calibrate` finds; `use_query_aware`
    weighs errors by `query_h`, or without one weighs differences in length less
    by `beta`. `far_rope` "constant" attends at distance `b` too. `proxy`
    "last_key" retrieves by the newest key where nobody hands queries over.
    `seed` of the rotation where there is no codebook.
    """

    codebook_bits: int = 8
    sub_dim: int = 8
    window: int = 128
    b: int = 2048
    use_query_aware: bool = True
    beta: float = 0.5
    retrieval_fraction: float = 0.2
    rope_base: float = 10000.0
    rope_scaling: Any = attrs.field(default=None, converter=_to_pairs)
    query_h: Table | None = attrs.field(default=None, converter=to_table)
    codebook: Table | None = attrs.field(default=None, converter=to_table)
    n_sink: int = 8
    rope_dims: int | None = None
    rope_traditional: bool = False
    rope: Rope | None = None
    far_rope: str = "exact"
    proxy: str | None = None
    seed: int = 42

    def __attrs_post_init__(self) -> None:
        check_int("a2ats", "codebook_bits", self.codebook_bits, 1, 12)
        check_int("a2ats", "sub_dim", self.sub_dim, 1)
        for field in ("window", "b", "n_sink"):
            check_int("a2ats", field, getattr(self, field), 0)
        check_seed("a2ats", self.seed)
        check_between("a2ats", "beta", self.beta, 0, 1)
        check_between("a2ats", "retrieval_fraction", self.retrieval_fraction, 0, 1)
        for field in ("use_query_aware", "rope_traditional"):
            check_choice("a2ats", field, getattr(self, field), (True, False))
        check_choice("a2ats", "far_rope", self.far_rope, ("exact", "constant"))
        check_choice("a2ats", "proxy", self.proxy, (None, "last_key"))
        self._check_rope()
        self._check_tables()

    def _check_rope(self) -> None:
        check(self.rope is None or isinstance(self.rope, Rope), "a2ats", "rope", "must be a Rope", self.rope)
        check_number("a2ats", "rope_base", self.rope_base, 0)
        if self.rope_dims is not None:
            check_int("a2ats", "rope_dims", self.rope_dims, 2)
            check(self.rope_dims % 2 == 0, "a2ats", "rope_dims", "must be even", self.rope_dims)
        known = self.rope_scaling is None or isinstance(self.rope_scaling, tuple)
        check(known, "a2ats", "rope_scaling", "must be None or a dict", self.rope_scaling)
        scaling = dict(self.rope_scaling or ())
        kind = scaling.get("type") or scaling.get("rope_type", "default")
        check_choice("a2ats", "rope_scaling", kind, ("default", "llama3"))
        check(kind == "default" or "factor" in scaling, "a2ats", "rope_scaling", "must have a `factor`", scaling)
        for name, number in scaling.items():
            if name not in ("type", "rope_type"):
                check_number("a2ats", f"rope_scaling[{name}]", number, 0)
        try:
            self.rotation(self.rope_dims or 2)
        except QuantizerConfigError as error:
            raise QuantizerConfigError(f"a2ats: `rope_scaling` must make a rotation; got {error}") from error

    def _check_tables(self) -> None:
        size, count = self.sub_dim, 2**self.codebook_bits
        if self.codebook is not None:
            check_table("a2ats", "codebook", self.codebook, *_shapes(count, size))
        known = self.codebook is not None or has_gaussian(size, self.codebook_bits)
        rule = f"must be at most 8 for sub-vectors of {size} numbers without a codebook"
        check(known, "a2ats", "codebook_bits", rule, self.codebook_bits)
        if self.query_h is not None:
            check_table("a2ats", "query_h", self.query_h, *_shapes(size, size))
            moment = np.array(self.query_h.array, np.float64)
            most = np.abs(moment).max()
            symmetric = np.abs(moment - moment.swapaxes(-1, -2)).max() <= 1e-4 * most
            sound = symmetric and np.linalg.eigvalsh(moment).min() >= -1e-5 * most
            check(sound, "a2ats", "query_h", "must be symmetric and positive semidefinite", "another")

    @property
    def reach(self) -> Reach:
        """Rows that a token attends to."""
        return Reach.of(self.window, self.n_sink, self.retrieval_fraction)

    def rotation(self, dim: int) -> Rope:
        """How the model rotates keys of `dim` numbers."""
        return _rope(self, dim)

    def codes(self, dim: int) -> KeyCodes:
        """How keys of `dim` numbers are coded."""
        moment = self.query_h if self.use_query_aware else None
        radial = 1 - self.beta if self.use_query_aware and moment is None else 1.0
        return key_codes(dim, self.sub_dim, self.codebook_bits, self.codebook, moment, radial, self.seed)

    def check_layout(self, layout: Layout) -> None:
        """Check that the options suit a layer."""
        dim, heads = layout.key_dim, layout.kv_heads
        check(dim % self.sub_dim == 0, "a2ats", "sub_dim", f"must divide the head size {dim}", self.sub_dim)
        check(dim % 2 == 0, "a2ats", "head_dim", "must be even", dim)
        dims, field = (self.rope_dims, "rope_dims") if self.rope is None else (self.rope.dims, "rope")
        check((dims or dim) <= dim, "a2ats", field, f"must rotate at most {dim} numbers", dims)
        places = dim // self.sub_dim
        for field in ("codebook", "query_h"):
            table = getattr(self, field)
            lead = (1, 1) if table is None else (1, 1, *table.shape)[-4:-2]
            rule = f"must have 1 or {heads} heads and 1 or {places} places"
            check(lead[0] in (1, heads) and lead[1] in (1, places), "a2ats", field, rule, table and table.shape)


@functools.lru_cache(maxsize=256)
def _rope(o: A2ATSOptions, dim: int) -> Rope:
    if o.rope is not None:
        return o.rope
    scaling = None if o.rope_scaling is None else dict(o.rope_scaling)
    return scaled_rope(o.rope_dims or dim, o.rope_base, traditional=o.rope_traditional, scaling=scaling)


def _shapes(*shape: int) -> tuple[tuple[int | None, ...], ...]:
    return shape, (None, *shape), (None, None, *shape)
