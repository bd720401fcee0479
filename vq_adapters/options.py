"""The options classes: fields of KVCacheConfig that are a method's own, and every other functional option of it.

A functional option that no documented field holds goes by a keyword of the same
form, the method's prefix and the option's name, and has the functional default.
"""

import dataclasses
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_adapters.documented import DEFAULTS, fields_of, options_of
from vq_adapters.names import ORDER, OWN, SHARED, name_of
from vq_functional.core.errors import alike, refusing
from vq_functional.methods import METHODS

# Methods whose options class holds a shared field that is not among their own.
_EXTRA = {"vecinfer": ("residual_length",)}

# The options class of each method.
OPTIONS: dict[str, Any] = {}


def annotation(default: Any) -> Any:
    """The type of a field with this default; Any where the default doesn't tell."""
    return Any if default is None else type(default)


def further_fields(method: str) -> dict[str, str]:
    """Functional options that no documented field holds, and their fields in the method's options class."""
    named = {option: name_of(method, option) for option in options_of(method)}
    return {option: field for option, field in named.items() if field not in ORDER}


def same(value: Any, other: Any) -> bool:
    """Whether two values of a field are equal; arrays are if all their numbers are."""
    if any(isinstance(x, mx.array | np.ndarray) for x in (value, other)):
        return type(value) is type(other) and bool(mx.array_equal(mx.array(value), mx.array(other)))
    return bool(value == other)


def equal_fields(one: Any, other: Any) -> bool:
    """`==` of dataclasses whose fields may be arrays."""
    if type(one) is not type(other):
        return NotImplemented
    return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))


def _options(name: str, *methods: str) -> Any:
    """A dataclass of the methods' documented fields and, by keyword, of their other options; defaults are theirs."""
    named = {field for method in methods for field in (*fields_of(method), *_EXTRA.get(method, ()))} - OWN
    fields: dict[str, Any] = {
        field: (annotation(DEFAULTS[field]), DEFAULTS[field]) for field in ORDER if field in named
    }
    for method in methods:
        options = attrs.fields_dict(METHODS[method].options)
        for option, field in further_fields(method).items():
            own = options[option]
            fields[field] = own.type, dataclasses.field(default=own.default, kw_only=True)
    text = f"Options of {' and '.join(methods)}, as KVCacheConfig's flat fields, and by keyword those without one."
    listed = [(field, *rest) for field, rest in fields.items()]
    namespace = {"__doc__": text, "__module__": __name__, "__eq__": equal_fields}
    kind = dataclasses.make_dataclass(name, listed, namespace=namespace)
    refusing(kind, name, lambda option, known, /, *args, **values: alike(name_of(methods[0], option), known))
    OPTIONS.update(dict.fromkeys(methods, kind))
    return kind


VecInferOptions = _options("VecInferOptions", "vecinfer")
KIVIOptions = _options("KIVIOptions", "kivi", "kivi_sink")
SVDqOptions = _options("SVDqOptions", "svdq")
KittyOptions = _options("KittyOptions", "kitty")
AdaKVOptions = _options("AdaKVOptions", "adakv")
XQuantOptions = _options("XQuantOptions", "xquant")
KVQuantOptions = _options("KVQuantOptions", "kvquant")
PALUOptions = _options("PALUOptions", "palu")
CacheGenOptions = _options("CacheGenOptions", "cachegen")
MiniCacheOptions = _options("MiniCacheOptions", "minicache")
GEAROptions = _options("GEAROptions", "gear")
ZipCacheOptions = _options("ZipCacheOptions", "zipcache")
SnapKVOptions = _options("SnapKVOptions", "snapkv")
StreamingLLMOptions = _options("StreamingLLMOptions", "streaming_llm")
H2OOptions = _options("H2OOptions", "h2o")
TOVAOptions = _options("TOVAOptions", "tova")
PyramidKVOptions = _options("PyramidKVOptions", "pyramidkv")
SqueezeAttentionOptions = _options("SqueezeAttentionOptions", "squeeze")
ChunkKVOptions = _options("ChunkKVOptions", "chunkkv")
CaMOptions = _options("CaMOptions", "cam")
XKVOptions = _options("XKVOptions", "xkv")
NSNQuantOptions = _options("NSNQuantOptions", "nsnquant")
L2NormOptions = _options("L2NormOptions", "knorm")
SKVQOptions = _options("SKVQOptions", "skvq")
QFiltersOptions = _options("QFiltersOptions", "qfilters")
KeyformerOptions = _options("KeyformerOptions", "keyformer")
MorphKVOptions = _options("MorphKVOptions", "morphkv")
KVzipOptions = _options("KVzipOptions", "kvzip")
KVTCOptions = _options("KVTCOptions", "kvtc")
CurDKVOptions = _options("CurDKVOptions", "curdkv")
NestedKVOptions = _options("NestedKVOptions", "nestedkv")
AMCOptions = _options("AMCOptions", "amc")
A2ATSOptions = _options("A2ATSOptions", "a2ats")
AnchorKVOptions = _options("AnchorKVOptions", "anchorkv")
RocketKVOptions = _options("RocketKVOptions", "rocketkv")
AgeTieredKVOptions = _options("AgeTieredKVOptions", "age_tiered")
SpectralQuantOptions = _options("SpectralQuantOptions", "spectral")

# Classes of methods whose documented fields are all of the configuration itself.
TurboQuantProdOptions = _options("TurboQuantProdOptions", "turboquant_prod")
TurboQuantMSEOptions = _options("TurboQuantMSEOptions", "turboquant_mse")
TurboQuantRVQOptions = _options("TurboQuantRVQOptions", "turboquant_rvq")
PolarQuantOptions = _options("PolarQuantOptions", "polar")
QJLOptions = _options("QJLOptions", "qjl")

# Classes of methods that are not documented go by the names of the functional ones.
_ADDED = {METHODS[method].options.__name__: method for method in METHODS if method not in OPTIONS}
globals().update({name: _options(name, method) for name, method in _ADDED.items()})


def options_fields(method: str) -> tuple[str, ...]:
    """Documented fields of the method's options class."""
    return tuple(field.name for field in dataclasses.fields(OPTIONS[method]) if field.name in ORDER)


def foreign_fields(method: str) -> dict[str, Any]:
    """Fields of the method's options class that only other methods have, and their defaults."""
    own = {*options_fields(method), *further_fields(method).values()}
    return {field.name: field.default for field in dataclasses.fields(OPTIONS[method]) if field.name not in own}


# The options class through which a field should be set, for fields that only one class holds.
OWNERS: dict[str, Any] = {
    field: kind for method, kind in OPTIONS.items() for field in options_fields(method) if field not in SHARED
}
