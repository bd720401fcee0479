"""How a model's attention layer rotates its keys."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vq_functional.ops.rope import Rope


def rope_of(attention: nn.Module | None) -> Rope | None:
    """The rotation of an attention module; None where it has none, or one that isn't known."""
    module = getattr(attention, "rope", None)
    dims = getattr(module, "dims", getattr(module, "dim", None))
    if not isinstance(module, nn.Module) or not isinstance(dims, int):
        return None
    traditional, freqs = bool(getattr(module, "traditional", False)), getattr(module, "_freqs", None)
    if isinstance(freqs, mx.array):
        listed: list[float] = freqs.astype(mx.float32).tolist()  # type: ignore[assignment]
        return Rope(dims, traditional=traditional, freqs=listed)
    base, scale = getattr(module, "base", None), getattr(module, "scale", 1.0)
    known = isinstance(base, (int, float)) and isinstance(scale, (int, float))
    return Rope(dims, base=float(base), scale=float(scale), traditional=traditional) if known else None  # type: ignore
