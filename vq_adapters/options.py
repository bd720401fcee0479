"""The options classes: fields of KVCacheConfig that are a method's own, and every other functional option of it.

A functional option that no documented field holds goes by a keyword of the same
form, the method's prefix and the option's name, and has the functional default.
"""

import dataclasses
from typing import Any

import attrs

from vq_adapters.documented import DEFAULTS, fields_of, options_of
from vq_adapters.names import ORDER, OWN, SHARED, name_of
from vq_functional.methods import METHODS

# Methods whose options class holds a shared field that is not among their own.
_EXTRA = {"vecinfer": ("residual_length",)}


def annotation(default: Any) -> Any:
    """The type of a field with this default; Any where the default doesn't tell."""
    return Any if default is None else type(default)


def further_fields(method: str) -> dict[str, str]:
    """Functional options that no documented field holds, and their fields in the method's options class."""
    named = {option: name_of(method, option) for option in options_of(method)}
    return {option: field for option, field in named.items() if field not in ORDER}


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
    return dataclasses.make_dataclass(name, listed, namespace={"__doc__": text, "__module__": __name__})


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

OPTIONS: dict[str, Any] = {
    "vecinfer": VecInferOptions,
    "kivi": KIVIOptions,
    "kivi_sink": KIVIOptions,
    "svdq": SVDqOptions,
    "kitty": KittyOptions,
    "adakv": AdaKVOptions,
    "xquant": XQuantOptions,
    "kvquant": KVQuantOptions,
    "palu": PALUOptions,
    "cachegen": CacheGenOptions,
    "minicache": MiniCacheOptions,
    "gear": GEAROptions,
    "zipcache": ZipCacheOptions,
    "snapkv": SnapKVOptions,
    "streaming_llm": StreamingLLMOptions,
    "h2o": H2OOptions,
    "tova": TOVAOptions,
    "pyramidkv": PyramidKVOptions,
    "squeeze": SqueezeAttentionOptions,
    "chunkkv": ChunkKVOptions,
    "cam": CaMOptions,
    "xkv": XKVOptions,
    "nsnquant": NSNQuantOptions,
    "knorm": L2NormOptions,
    "skvq": SKVQOptions,
    "qfilters": QFiltersOptions,
    "keyformer": KeyformerOptions,
    "morphkv": MorphKVOptions,
    "kvzip": KVzipOptions,
    "kvtc": KVTCOptions,
    "curdkv": CurDKVOptions,
    "nestedkv": NestedKVOptions,
    "amc": AMCOptions,
    "a2ats": A2ATSOptions,
    "anchorkv": AnchorKVOptions,
    "rocketkv": RocketKVOptions,
    "age_tiered": AgeTieredKVOptions,
    "spectral": SpectralQuantOptions,
    "turboquant_prod": TurboQuantProdOptions,
    "turboquant_mse": TurboQuantMSEOptions,
    "turboquant_rvq": TurboQuantRVQOptions,
    "polar": PolarQuantOptions,
    "qjl": QJLOptions,
}


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
