"""What caches hold, beside what plain 16-bit keys and values of as many tokens would."""

from collections.abc import Iterable
from typing import Any

import attrs
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from vq_adapters.cache import TransformKVCache
from vq_adapters.columns import columns
from vq_adapters.entries import members
from vq_adapters.reports import LayerReport, report

WIDTH = 2  # bytes of a 16-bit number


@attrs.frozen
class Held:
    """One cache of a layer: what it is, and the bytes that 16 bits would take."""

    row: LayerReport
    plain: int | None  # None where the cache doesn't tell


def held(caches: Iterable[Any]) -> list[Held]:
    """One entry a row of the report."""
    entries = list(caches)
    flat = [cache for entry in entries for cache in members(entry)]
    return [Held(row, _plain_bytes(cache, row)) for row, cache in zip(report(entries), flat, strict=True)]


def totals(layers: Iterable[Held]) -> tuple[int, int]:
    """Bytes held, and bytes in 16 bits, of the layers that tell."""
    known = [one for one in layers if one.plain is not None]
    return sum(one.row.nbytes or 0 for one in known), sum(one.plain or 0 for one in known)


def summary(layers: Iterable[Held]) -> str:
    """Both totals and their ratio as text."""
    compressed, plain = totals(layers)
    times = f"{compressed / plain:.2f} times" if plain else "beside"
    return f"{size(compressed)} held, {times} the {size(plain)} of plain 16-bit keys and values"


def table(layers: Iterable[Held]) -> str:
    """One line a layer."""
    head = ["layer", "used", "tokens", "bytes", "16 bits", "left as it is because"]
    body = [[x.row.layer, x.row.used, x.row.tokens, x.row.nbytes, x.plain, x.row.reason] for x in layers]
    return columns([head, *body])


def size(count: float) -> str:
    """Bytes for people."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.{0 if units[0] == 'B' else 2}f} {units[0]}"


def _plain_bytes(cache: Any, row: LayerReport) -> int | None:
    """Bytes of all tokens in 16 bits; of layers without a row for each token, what they hold."""
    if isinstance(cache, (TransformKVCache, KVCache, QuantizedKVCache)):
        if not row.tokens:
            return 0
        return row.tokens * WIDTH * sum(_numbers(cache, x) for x in (cache.keys, cache.values))
    return row.nbytes


def _numbers(cache: Any, x: Any) -> int:
    """Numbers of one token in the keys or values [B, H, C, D] of a cache."""
    if isinstance(cache, QuantizedKVCache):
        codes, scales, _ = x
        return codes.shape[0] * codes.shape[1] * scales.shape[-1] * cache.group_size
    return x.shape[0] * x.shape[1] * x.shape[3]
