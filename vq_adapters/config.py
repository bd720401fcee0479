"""KVCacheConfig: the documented flat configuration, derived from the functional options, made into transforms."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import mlx.core as mx

from vq_adapters.budgets import BUDGETS, rows_within, to_bytes
from vq_adapters.documented import DEFAULTS, options_of
from vq_adapters.names import SHARED, name_of
from vq_adapters.options import (
    OPTIONS,
    OWNERS,
    annotation,
    equal_fields,
    foreign_fields,
    further_fields,
    options_fields,
    same,
)
from vq_adapters.rules import RULES, check_field
from vq_functional.core.codec import PlainCodec
from vq_functional.core.errors import SEEDS, QuantizerConfigError, alike, check, refusing
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import RowStore
from vq_functional.core.transform import Transform
from vq_functional.core.warn import warn
from vq_functional.evict.engine import Evicting
from vq_functional.evict.sliding_window import windowed
from vq_functional.methods import find
from vq_functional.ops.rope import Rope

Kind = TypeVar("Kind")

# Options that may be lists of one entry a layer.
PER_LAYER = ("bits", *BUDGETS)

# Accepted with any value: they choose between ways of computing the same result, and here the fastest is always taken.
SPEED_FIELDS = (
    "enable_vectorized_attend",
    "enable_fused_query_dot",
    "snap_backend",
    "snap_batched_scoring",
    "tova_backend",
    "pyramid_backend",
    "use_metal_kernels",
    "fused_sdpa",
    "fused_sdpa_max_ctx",
    "fused_sdpa_memory_bound",
)

# Refused when set for a method that has no use for them: their owner would believe in something that doesn't happen.
NO_EFFECT = {
    "bit_width_outlier": "it holds no outlier channels apart",
    "n_outlier_channels": "it holds no outlier channels apart",
    "enable_outlier_two_stream": "it holds no outlier channels apart",
    "n_calib_tokens": "it needs no calibration",
    "store": "its tables are made from the seed",
    "n_sink_tokens": "it has no sinks of that name",
    "smooth_factors": "it doesn't smooth",
    "key_codebook": "it learns no codebook",
    "value_codebook": "it learns no codebook",
}

# Methods that a store may hold calibrations of, and the option that takes what is found for a layer, or for all that it
# is packed together with; None where its arrays are options by name.
CALIBRATED = {
    "spectral": "basis",
    "svdq": "basis",
    "palu": "basis",
    "kvtc": "basis",
    "amc": "basis",
    "xkv": "basis",
    "vecinfer": None,
    "kvquant": None,
    "skvq": None,
    "a2ats": None,
}

# Warned of when set: by habit, for a method without such a field, and for any, where nothing follows from it.
HABITS = ("bit_width_inlier", "jl_dim", "residual_length")
IDLE = (
    "h2o_rope_base",
    "keyformer_rope_base",
    "curdkv_rope_base",
    "kvquant_group_size",
    "nestedkv_safeguard_alpha",
)


@attrs.frozen
class Layer:
    """Which layer a configuration is for."""

    index: int = 0  # among the attention layers that are replaced in this process
    count: int | None = None  # of these, in all processes of a pipeline; None where nobody knows
    number: int = 0  # among all layers of the model
    spec: KVSpec | None = None  # shapes of its keys and values, where the model tells
    found: Any = None  # by calibration, from the configuration's store
    rope: Rope | None = None  # how it rotates keys, where the model tells
    stack: int = 1  # layers whose rows are packed together with this one's, itself included
    member: int = 0  # among these
    before: int = 0  # layers that are replaced in earlier processes


def _with_documented_fields(kind: type[Kind]) -> type[Kind]:
    kind.__annotations__ = {field: annotation(default) for field, default in DEFAULTS.items()}
    for field, default in DEFAULTS.items():
        setattr(kind, field, dataclasses.field(default_factory=list) if field == "observers" else default)
    return refusing(dataclasses.dataclass(kind), "KVCacheConfig", _instead)


def _instead(name: str, known: Any, /, method: Any = DEFAULTS["method"], *args: Any, **values: Any) -> str:
    """What to write for a name that is no field: of a functional option, or of the method's options class."""
    method = str(method)
    if method in OPTIONS and name in further_fields(method).values():
        return f"; write options={OPTIONS[method].__name__}({name}=...)"
    return alike(name_of(method, name), known)


@_with_documented_fields
class KVCacheConfig:
    """Which method, with which options; one flat field for everything that is documented.

    `options`, one of the options classes, fills the fields of its method. Such
    a field set directly works too, with a DeprecationWarning. What is not
    documented, such as other bits for values, is in `options` alone. For
    `KVCacheBuilder.for_model`, `bit_width_inlier` and the fields that are a
    budget may be lists of one entry a layer, and a budget may be the bytes of
    all layers together ("48MB"). A budget below 1 is a share of the prompt.
    A UserWarning tells of fields that have no effect on the method, such as
    those of other methods. Raises QuantizerConfigError for unknown fields, for
    values that the method can't take, and where a table or an outlier channel
    is asked for that the method doesn't have.
    """

    if TYPE_CHECKING:
        method: str
        head_dim: int
        bit_width_inlier: Any
        capacity: int | None
        sliding_window: int | None
        dtype: mx.Dtype | None
        seed: int
        store: Any
        _place: Layer

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for field in RULES:
            check_field(self.method, field, getattr(self, field))
        given = self._given()
        _warn(self._loose(given))
        for field, value in given.items():
            if field not in SHARED or same(getattr(self, field), DEFAULTS[field]):
                setattr(self, field, value)
        _warn(self._idle())
        metal = self.use_metal_kernels is not True or mx.metal.is_available()
        if not metal:
            raise RuntimeError(f"{self.method}: `use_metal_kernels` must not be True: there is no Metal device")
        self._check_effects()
        count = max((len(entries) for entries in self._lists().values()), default=1)
        for index in range(count):
            with warnings.catch_warnings():
                if self.store is not None:
                    warnings.simplefilter("ignore")  # what a trial lacks the store may have
                self._checkable().for_layer(Layer(index=index % count)).transform()

    def __repr__(self) -> str:
        changed = {name: getattr(self, name) for name, default in DEFAULTS.items()}
        changed = {name: x for name, x in changed.items() if name == "method" or not same(x, DEFAULTS[name])}
        return f"KVCacheConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    __eq__ = equal_fields

    @property
    def max_tokens(self) -> int | None:
        """Tokens that a cache takes at most: `capacity`, or fewer where the method has a bound of its own."""
        own = self._uses().get("max_ctx")
        bounds = (self.capacity, None if own is None else getattr(self, own))
        return min((bound for bound in bounds if bound is not None), default=None)

    def transform(self) -> Transform:
        """The configured transform of one layer.

        Raises QuantizerConfigError for a list, a budget in bytes and a store.
        """
        options = self._options()
        told = self.store is None or self._place.count is not None
        check(told, self.method, "store", "is for `for_model`, which knows the layer", self.store)
        for option, field in self._uses().items():
            value = options[option]
            one = option not in PER_LAYER or not isinstance(value, (list, tuple))
            check(one, self.method, field, "must be one value for one cache; `for_model` takes a list", value)
            known = option not in BUDGETS or not isinstance(value, str)
            check(known, self.method, field, "in bytes is for `for_model`, one value for all layers", value)
        row, place, options = find(self.method), self._place, {**options, **self._placed(options)}
        if "stacks" in row.traits:
            options["layers"] = place.stack
        transform: Any = row.build(**options)
        if place.stack > 1:
            transform = transform.member(place.member)
        if self.dtype is not None:
            transform = held_in(transform, self.dtype)
        return transform if self.sliding_window is None else in_window(transform, self.sliding_window)

    def stacks(self, layers: int) -> list[int]:
        """Sizes of the stacks of consecutive layers that are packed together; 1 for a layer that stands alone."""
        row = find(self.method)
        if "stacks" not in row.traits:
            return [1] * layers
        options: Any = row.options(**self._options())
        return options.stacks(layers)

    def for_layer(self, layer: Layer) -> KVCacheConfig:
        """The configuration of one layer: its entry of each list, its own seed, its head size where known."""
        one = copy.copy(self)
        one._place = layer
        if self._uses().get("seed") == "seed":
            one.seed = (self.seed + layer.number) % SEEDS
        one.head_dim = self.head_dim if layer.spec is None else layer.spec.key_dim
        names = ((self._uses().get(option), self._uses().get(f"resolved_{option}")) for option in PER_LAYER)
        resolved = {field: outright for field, outright in names if outright is not None}
        for field, entries in self._lists().items():
            rule = f"must have one entry for each of the {layer.count} layers that are replaced"
            check(layer.count is None or len(entries) == layer.count, self.method, field, rule, entries)
            setattr(one, field, entries[(layer.before + layer.index) % len(entries)])
            if field in resolved:
                setattr(one, resolved[field], getattr(one, field))
        for option in BUDGETS:
            one._fit(option)
        return one

    def _fit(self, option: str) -> None:
        """Make a budget in bytes one in rows, where the shapes are known."""
        field, place = self._uses().get(option), self._place
        value = None if field is None else getattr(self, field)
        if not isinstance(value, str) or field is None or place.count is None:
            return
        if place.spec is None:
            rule = "in bytes needs a model whose attention modules tell their heads and sizes"
            raise QuantizerConfigError(f"{self.method}: `{field}` {rule}; got {value!r}")
        size, known = to_bytes(self.method, field, value) // place.count, self._checkable()
        transform: Any = known.transform()
        # A window is what is left beside sinks.
        beside = transform.policy.budget - getattr(known, field) if option == "window_size" else 0
        setattr(self, field, rows_within(transform, place.spec, size) - beside)

    def _checkable(self) -> KVCacheConfig:
        """The same with default budgets in place of bytes, and without a store."""
        one = copy.copy(self)
        one.store = None
        for option in BUDGETS:
            field = self._uses().get(option)
            if field is not None and isinstance(getattr(self, field), str):
                to_bytes(self.method, field, getattr(self, field))
                setattr(one, field, options_of(self.method)[option])
        return one

    def _lists(self) -> dict[str, Sequence[Any]]:
        """Fields that have one entry a layer."""
        fields = [self._uses().get(option) for option in PER_LAYER]
        values = {field: getattr(self, field) for field in fields if field is not None}
        return {field: value for field, value in values.items() if isinstance(value, (list, tuple)) and value}

    def _options(self) -> dict[str, Any]:
        """All functional options of the method and their values."""
        return {option: getattr(self, field) for option, field in self._uses().items()}

    def changed_options(self) -> dict[str, Any]:
        """Functional options of the method that are not at their defaults, and their values."""
        defaults = options_of(self.method)
        return {option: x for option, x in self._options().items() if not same(x, defaults[option])}

    def _placed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options that say which layer of how many this is, and what was found for it, unless they are `given`."""
        known = options_of(self.method) if self._place.count is not None else {}
        free = set(known) - set(self.changed_options())
        found = self._found()
        for option in found:
            field = name_of(self.method, option)
            check(option in free, self.method, field, "must not be given beside a `store` that holds it", given[option])
        # A schedule runs over all layers; one that follows another has it in its own process.
        before = self._place.before if "layers" in known else 0
        told = {"layer": before + self._place.index, "layers": self._place.count, **found}
        rope = {option for option in known if option.startswith("rope")}
        if rope and rope <= free:
            told["rope"] = self._place.rope
        return {option: value for option, value in told.items() if option in free and value is not None}

    def _found(self) -> dict[str, Any]:
        """Options that calibration found."""
        if self._place.found is None:
            return {}
        option = CALIBRATED[self.method]
        return self._place.found.arrays() if option is None else {option: self._place.found}

    def _uses(self) -> dict[str, str]:
        """Functional options of the method and the attributes that hold them, also those that `options` alone fill."""
        return _uses(self.method)

    def _given(self) -> dict[str, Any]:
        """Fields and values of `options`; of its further fields the defaults where there are none."""
        further = further_fields(self.method)
        if self.options is None:
            return {field: options_of(self.method)[option] for option, field in further.items()}
        kind = OPTIONS[self.method]
        check(type(self.options) is kind, self.method, "options", f"must be {kind.__name__}", self.options)
        for field, default in foreign_fields(self.method).items():
            value = getattr(self.options, field)
            check(same(value, default), self.method, field, "has no effect: it is another method's", value)
        return {field: getattr(self.options, field) for field in (*options_fields(self.method), *further.values())}

    def _loose(self, given: dict[str, Any]) -> list[tuple[type[Warning], str]]:
        """What to warn of: fields of the method's options class that are set beside it."""
        found: list[tuple[type[Warning], str]] = []
        known, kind = DEFAULTS | given, OPTIONS[self.method].__name__
        for field in options_fields(self.method):
            value = getattr(self, field)
            if field in (*SHARED, *IDLE) or same(value, DEFAULTS[field]) or same(value, known[field]):
                continue
            if field in given:
                found.append((UserWarning, f"KVCacheConfig: options give `{field}`={given[field]!r}; not {value!r}"))
            else:
                found.append((DeprecationWarning, f"KVCacheConfig: set `{field}` by options={kind}({field}={value!r})"))
        return found

    def _idle(self) -> list[tuple[type[Warning], str]]:
        """What to warn of: fields that are set and have no effect on the method."""
        used = {*self._uses().values()} - {*IDLE}
        fields = [field for field in (*OWNERS, *HABITS) if field not in used]
        fields = [field for field in fields if not same(getattr(self, field), DEFAULTS[field])]
        return [(UserWarning, f"KVCacheConfig: `{field}` has no effect on {self.method}") for field in fields]

    def _check_effects(self) -> None:
        for field, reason in NO_EFFECT.items():
            known = field in self._uses().values() or same(getattr(self, field), DEFAULTS[field])
            known = known or (field == "store" and self.method in CALIBRATED)
            check(known, self.method, field, f"has no effect: {reason}", getattr(self, field))


KVCacheConfig._place = Layer()


@functools.lru_cache(maxsize=64)
def _uses(method: str) -> dict[str, str]:
    return {option: name_of(method, option) for option in options_of(method)}


def _warn(found: list[tuple[type[Warning], str]]) -> None:
    for category, text in found:
        warn(text, category)


def held_in(transform: Transform, dtype: mx.Dtype) -> Transform:
    """The same transform with all that it holds uncompressed in `dtype`."""
    if isinstance(transform, Evicting):
        return attrs.evolve(transform, store=_rows_in(transform.store, dtype))
    if isinstance(transform, RowStore):
        return _rows_in(transform, dtype)
    rule = "can't be changed: exact rows keep the dtype that they come in"
    raise QuantizerConfigError(f"{transform.name}: `dtype` {rule}; got {dtype!r}")


def _rows_in(store: RowStore, dtype: mx.Dtype) -> RowStore:
    storage, codecs = str(dtype).removeprefix("mlx.core."), (store.key, store.value)
    plain = [codec for codec in codecs if isinstance(codec, PlainCodec)]
    check(bool(plain), store.name, "dtype", "has no effect: nothing is held uncompressed", dtype)
    for codec in plain:
        rule = f"must agree with the storage dtype of the method's own options, {codec.storage}"
        check(codec.storage in (None, storage), store.name, "dtype", rule, dtype)
    key, value = (PlainCodec(storage) if isinstance(codec, PlainCodec) else codec for codec in codecs)
    return attrs.evolve(store, key=key, value=value)


def in_window(transform: Transform, size: int) -> Transform:
    """The same rows, held for the newest `size` tokens only."""
    rule = f"is only for methods that keep every token and whose rows stand alone, which {transform.name} is not"
    check(isinstance(transform, RowStore), transform.name, "sliding_window", rule, size)
    return windowed(cast(RowStore, transform), size)
