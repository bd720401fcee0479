"""The documented options classes, one a method, with the fields of KVCacheConfig that are this method's."""

import dataclasses
from typing import Any

from vq_adapters.documented import DEFAULTS, fields_of
from vq_adapters.names import ORDER, OWN, SHARED

# Methods whose options class holds a shared field that is not among their own.
_EXTRA = {"vecinfer": ("residual_length",)}


def annotation(default: Any) -> Any:
    """The type of a field with this default; Any where the default doesn't tell."""
    return Any if default is None else type(default)


def _options(name: str, method: str) -> Any:
    """A dataclass of the method's documented fields and their defaults."""
    named = {*fields_of(method), *_EXTRA.get(method, ())} - OWN
    fields = [(field, annotation(DEFAULTS[field]), DEFAULTS[field]) for field in ORDER if field in named]
    text = f"Options of {method}, as KVCacheConfig's flat fields."
    return dataclasses.make_dataclass(name, fields, namespace={"__doc__": text, "__module__": __name__})


VecInferOptions = _options("VecInferOptions", "vecinfer")
KIVIOptions = _options("KIVIOptions", "kivi")
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
}


def options_fields(method: str) -> tuple[str, ...]:
    """Fields of the method's options class; none where it has no class."""
    return tuple(field.name for field in dataclasses.fields(OPTIONS[method])) if method in OPTIONS else ()


# The options class through which a field should be set, for fields that only one class holds.
OWNERS: dict[str, Any] = {
    field: kind for method, kind in OPTIONS.items() for field in options_fields(method) if field not in SHARED
}
