"""What is documented and can't come from functional options: the order of the method names, and shared fields.

Methods of the table that are not documented come after those that are.
"""

from typing import Any

import attrs

from vq_adapters.names import ORDER, field_of
from vq_functional.methods import METHODS

_NAMES = """
turboquant_prod turboquant_mse turboquant_rvq polar qjl vecinfer spectral kivi kivi_sink svdq kitty adakv xquant
kvquant palu cachegen minicache gear zipcache snapkv streaming_llm h2o tova pyramidkv squeeze chunkkv cam xkv
nsnquant knorm skvq qfilters keyformer morphkv kvzip kvtc curdkv nestedkv amc a2ats anchorkv rocketkv age_tiered
"""
METHOD_NAMES: tuple[str, ...] = tuple(dict.fromkeys((*_NAMES.split(), *METHODS)))

# Fields of no method's options; `observers` is a new list each time.
CONFIG_FIELDS: dict[str, Any] = {
    "method": "turboquant_rvq",
    "head_dim": 128,
    "bit_width_outlier": None,
    "n_outlier_channels": None,
    "n_calib_tokens": None,
    "enable_vectorized_attend": True,
    "enable_outlier_two_stream": False,
    "enable_fused_query_dot": False,
    "dtype": None,
    "capacity": None,
    "sliding_window": None,
    "store": None,
    "observers": [],
    "options": None,
    "smooth_factors": None,
    "key_codebook": None,
    "value_codebook": None,
    "use_metal_kernels": None,
    "fused_sdpa": False,
    "fused_sdpa_max_ctx": None,
    "fused_sdpa_memory_bound": False,
}


def options_of(method: str) -> dict[str, Any]:
    """Functional options of a method and their defaults."""
    return {option.name: option.default for option in attrs.fields(METHODS[method].options)}


def fields_of(method: str) -> dict[str, Any]:
    """Documented fields of a method's options and their defaults, in documented order."""
    named = {field_of(method, option): default for option, default in options_of(method).items()}
    return {field: named[field] for field in ORDER if field in named}


def defaults() -> dict[str, Any]:
    """All documented parameters and their defaults, in documented order."""
    found = dict(CONFIG_FIELDS)
    for method in METHOD_NAMES:
        found |= {field: default for field, default in fields_of(method).items() if field not in found}
    return {field: found[field] for field in ORDER}


DEFAULTS: dict[str, Any] = defaults()
