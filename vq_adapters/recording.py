"""Rows of keys, values and queries as the layers of a real model see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from vq_adapters.architecture import attentions
from vq_adapters.builder import KVCacheBuilder
from vq_adapters.cache import TransformKVCache
from vq_adapters.entries import changed
from vq_adapters.hook import attention_hook
from vq_adapters.rotation import rope_of
from vq_adapters.tagged import TaggedArray
from vq_functional.core.errors import check, check_int
from vq_functional.core.store import rows
from vq_functional.ops.attention import Mask
from vq_functional.ops.rope import Rope

CHUNK = 512  # tokens of a text that the model reads at a time


@attrs.frozen(eq=False)
class Captured:
    """Rows of one layer, those of the same token at the same place."""

    keys: mx.array  # [N, H, Dk], rotated as the cache gets them
    values: mx.array  # [N, H, Dv]
    queries: mx.array | None  # [N, Hq, Dk], rotated; None where the attention hook can't reach the layer
    positions: mx.array  # int32 [N], in the token's own text
    rope: Rope | None  # how the model rotates keys; None where that isn't known


class RecordingKVCache(TransformKVCache):
    """Holds every row as it comes and notes those of chosen tokens."""

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__(rows())
        self.chosen = chosen  # positions, rising
        self.noted: dict[str, list[mx.array]] = {"keys": [], "values": [], "queries": [], "positions": []}
        self._picked: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = int(self.offset)
        here = [position - start for position in self.chosen if start <= position < start + keys.shape[2]]
        self._picked = mx.array(here, mx.int32) if here else None
        self._note(keys=keys, values=values)
        if here:
            self.noted["positions"].append(start + mx.array(here, mx.int32))
        return super().update_and_fetch(keys, values)

    def attend(
        self,
        queries: mx.array,
        keys: TaggedArray,
        values: TaggedArray,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if keys.call is self._call:
            self._note(queries=queries)
        return super().attend(queries, keys, values, scale, mask, sinks)

    def _note(self, **arrays: mx.array) -> None:
        if self._picked is not None:
            for field, x in arrays.items():
                self.noted[field].append(mx.take(x[0], self._picked, axis=1).swapaxes(0, 1))


def capture(model: nn.Module, tokenizer: Any, texts: Sequence[Any], max_tokens: int = 4096) -> list[Captured]:
    """Rows of every attention layer that `KVCacheBuilder.for_model` would compress, in its order.

    `texts`: strings, which `tokenizer` encodes, or lists of token ids. All are
    read, each from an empty cache; rows are kept of at most `max_tokens` tokens,
    spread evenly over all. Raises QuantizerConfigError where there is no text or
    no such layer.
    """
    check_int("capture", "max_tokens", max_tokens, 1)
    prompts = [ids for ids in (_token_ids(tokenizer, text) for text in texts) if ids]
    total = sum(map(len, prompts))
    check(total > 0, "capture", "texts", "must hold a token", texts)
    count = min(max_tokens, total)
    chosen = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    read, start = [], 0
    with attention_hook(model):
        for ids in prompts:
            here = [place - start for place in chosen if start <= place < start + len(ids)]
            read.append(_read(model, ids, here))
            start += len(ids)
    ropes = [rope_of(attention) for attention in attentions(model)]
    return [_joined(recorders, rope) for recorders, rope in zip(zip(*read, strict=True), ropes, strict=True)]


def _read(model: nn.Module, ids: list[int], chosen: list[int]) -> list[RecordingKVCache]:
    """One recorder for each compressed layer, after a text of which positions are chosen."""
    own = KVCacheBuilder.for_model(model, rows())
    recorders: list[RecordingKVCache] = []

    def recorded(cache: Any) -> Any:
        if not isinstance(cache, TransformKVCache):
            return cache
        recorders.append(RecordingKVCache(chosen))
        return recorders[-1]

    caches = [changed(entry, recorded) for entry in own]
    for start in range(0, len(ids), CHUNK):
        # Logits are never looked at, so the last layers of the model are not computed.
        model(mx.array([ids[start : start + CHUNK]]), cache=caches)
        mx.eval([recorder.noted for recorder in recorders], [cache.state for cache in caches])
    return recorders


def _joined(recorders: Sequence[RecordingKVCache], rope: Rope | None) -> Captured:
    """What the recorders of one layer noted, text after text."""
    noted = {field: [x for recorder in recorders for x in recorder.noted[field]] for field in recorders[0].noted}
    found = {field: mx.concatenate(arrays) if arrays else None for field, arrays in noted.items()}
    mx.eval([x for x in found.values() if x is not None])
    seen = found["queries"] is not None and found["queries"].shape[0] == found["keys"].shape[0]  # type: ignore[union-attr]
    return Captured(**{**found, "queries": found["queries"] if seen else None, "rope": rope})  # type: ignore[arg-type]


def _token_ids(tokenizer: Any, text: Any) -> list[int]:
    encoded = tokenizer.encode(text) if isinstance(text, str) else text
    return [int(token) for token in getattr(encoded, "ids", encoded)]
