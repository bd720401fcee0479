"""What serves each layer of a model, and why the other layers are left as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from vq_adapters.cache import TransformKVCache
from vq_adapters.columns import columns
from vq_adapters.entries import members

# Why an entry of a model's own list is left as it is, by its class.
_REASONS = {
    "KVCache": "plain: latent attention, or not made by for_model",
    "BatchKVCache": "plain: latent attention, or not made by for_model",
    "RotatingKVCache": "bounded by the model's own window",
    "BatchRotatingKVCache": "bounded by the model's own window",
    "ChunkedKVCache": "bounded by the model's own chunks",
    "ArraysCache": "recurrent state, no keys and values",
    "CacheList": "keys and values twice in one layer, some read by row number",
    "ConcatenateKVCache": "read by row number",
    "QuantizedKVCache": "quantized by mlx_lm",
}


@attrs.frozen
class LayerReport:
    """What serves one layer, or is one of the caches that do."""

    layer: int
    used: str  # the method, or the class that the model made
    reason: str  # why it is no compressed cache; empty where it is one
    nbytes: int | None  # resident; None where the cache doesn't tell
    tokens: int | None  # seen, the longest batch row; None where the cache doesn't count


class Report(list[LayerReport]):
    """One row a cache, several for a layer that has several; prints as a table."""

    def __str__(self) -> str:
        head = ("layer", "used", "tokens", "bytes", "left as it is because")
        body = [(row.layer, row.used, row.tokens, row.nbytes, row.reason) for row in self]
        return columns([head, *body])


def report(caches: Iterable[Any]) -> Report:
    """What serves each layer, why the others were left alone, and what all of them hold."""
    return Report(_layer_report(layer, cache) for layer, entry in enumerate(caches) for cache in members(entry))


def _layer_report(layer: int, cache: Any) -> LayerReport:
    if isinstance(cache, TransformKVCache):
        return LayerReport(layer, cache.transform.name, "", cache.nbytes, max(fill.tokens for fill in cache._fills))
    name, offset = type(cache).__name__, getattr(cache, "offset", None)
    tokens = offset if isinstance(offset, int) else None
    try:
        held = cache.nbytes
    except (AttributeError, NotImplementedError):
        held = None
    return LayerReport(layer, name, _REASONS.get(name, "a class of its own"), held, tokens)
