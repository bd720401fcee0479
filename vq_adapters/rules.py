"""What any method can take in the fields of KVCacheConfig that are not one method's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vq_adapters.documented import METHOD_NAMES
from vq_adapters.observers import check_observers
from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.spec import FLOATS

Rule = Callable[[str, str, Any], None]


def _whole(low: int, high: int | None = None, optional: bool = False) -> Rule:
    return lambda method, field, value: check_int(method, field, value, low, high, optional)


def _bits(method: str, field: str, value: Any) -> None:
    many = isinstance(value, (list, tuple))
    check(not many or len(value) > 0, method, field, "must have one entry for each attention layer", value)
    for bits in value if many else [value]:
        check_int(method, field, bits, 1, 8)


def _one_of(*choices: Any) -> Rule:
    def rule(method: str, field: str, value: Any) -> None:
        check(value is None or isinstance(value, bool), method, field, f"must be one of {choices}", value)
        check_choice(method, field, value, choices)

    return rule


def _dtype(method: str, field: str, value: Any) -> None:
    known = value is None or value in FLOATS
    check(known, method, field, "must be None, float16, bfloat16 or float32", value)


def _observers(method: str, field: str, value: Any) -> None:
    check(isinstance(value, list), method, field, "must be a list", value)
    check_observers(method, value)


RULES: dict[str, Rule] = {
    "method": lambda method, field, value: check_choice("KVCacheConfig", field, value, METHOD_NAMES),
    "head_dim": _whole(1),
    "bit_width_inlier": _bits,
    "bit_width_outlier": _whole(1, 8, optional=True),
    "jl_dim": _whole(1, optional=True),
    "n_outlier_channels": _whole(1, optional=True),
    "n_calib_tokens": _whole(1, optional=True),
    "enable_vectorized_attend": _one_of(True, False),
    "enable_outlier_two_stream": _one_of(True, False),
    "enable_fused_query_dot": _one_of(True, False),
    "seed": lambda method, field, value: check_seed(method, value),
    "dtype": _dtype,
    "capacity": _whole(1, optional=True),
    "sliding_window": _whole(1, optional=True),
    "observers": _observers,
    "residual_length": _whole(0),
    "n_sink_tokens": _whole(0),
    "use_metal_kernels": _one_of(None, True, False),
    "fused_sdpa": _one_of(None, True, False),
    "fused_sdpa_max_ctx": _whole(1, optional=True),
    "fused_sdpa_memory_bound": _one_of(True, False),
}


def check_field(method: str, field: str, value: Any) -> None:
    """Refuse a value that no method can take in this field."""
    if field in RULES:
        RULES[field](method, field, value)
