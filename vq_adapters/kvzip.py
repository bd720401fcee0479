"""KVzip's second pass: the model repeats the context, and what that needs stays (arXiv 2505.23416, section 3)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from vq_adapters.architecture import language_model
from vq_adapters.cache import TransformKVCache
from vq_adapters.entries import changed, ours
from vq_adapters.hook import attention_hook, can_hook
from vq_adapters.tagged import TaggedArray, tag
from vq_functional.core.errors import check, check_int
from vq_functional.core.tree import leaves_of
from vq_functional.evict.kvzip import KVzipPolicy, score_pass
from vq_functional.ops.attention import Mask


def kvzip_prefill(
    model: nn.Module,
    caches: Sequence[Any],
    tokens: mx.array,
    *,
    chunk: int = 2048,
    instruction: Sequence[int] = (),
) -> mx.array:
    """Read a prompt, have the model repeat it, and keep what the repetition attends to.

    model: of a vision-language model, its language model reads.
    tokens: int [S] or [1, S], one prompt.
    chunk: tokens read, and repeated, at a time.
    instruction: tokens before each repetition, such as those of "repeat the previous text".
    Returns the logits [1, V] that follow the prompt. The repetition leaves no
    row behind. Costs about two more prompts. Raises QuantizerConfigError where
    no cache is an empty one of kvzip with probe "context", for models whose
    attention can't be hooked, and for tokens of no prompt or of several.
    """
    check_int("kvzip_prefill", "chunk", chunk, 1)
    zipped = [cache for cache in ours(caches) if _takes_part(cache)]
    fresh = bool(zipped) and all(cache.empty() for cache in zipped)
    check(fresh, "kvzip_prefill", "caches", "must hold empty caches of kvzip with probe 'context'", len(caches))
    model = language_model(model)
    check(can_hook(model), "kvzip_prefill", "model", "must be one that the attention hook reaches", type(model))
    one = tokens.size > 0 and tokens.shape in ((tokens.size,), (1, tokens.size))
    check(one, "kvzip_prefill", "tokens", "must be one prompt [S] or [1, S]", tokens.shape)
    tokens = tokens.reshape(1, -1)
    spans = [(start, min(start + chunk, tokens.shape[1])) for start in range(0, tokens.shape[1], chunk)]
    for cache in zipped:
        cache.hold()
    for start, end in spans:
        out = model(tokens[:, start:end], cache=list(caches))
        mx.eval([cache.state for cache in caches])
    logits = getattr(out, "logits", out)[:, -1]  # mlx_vlm's models return more than logits
    mx.eval(logits)
    for span in spans:
        _repeat(model, caches, tokens[:, span[0] : span[1]], span, instruction)
    for cache in zipped:
        cache.compact()
    mx.eval([cache.state for cache in zipped])
    return logits


def _repeat(
    model: nn.Module, caches: Sequence[Any], tokens: mx.array, span: tuple[int, int], instruction: Sequence[int]
) -> None:
    """One pass over instruction and span behind the whole context."""
    asked = mx.concatenate([mx.array([list(instruction)], tokens.dtype), tokens], axis=1) if instruction else tokens

    def stand_in(cache: Any) -> Any:
        return _Listener(cache, span) if _takes_part(cache) else copy.deepcopy(cache)

    listening = [changed(entry, stand_in) for entry in caches]
    with attention_hook(model):
        model(asked, cache=listening)
    mx.eval([leaves_of(cache._state) for cache in ours(caches) if _takes_part(cache)])


def _takes_part(cache: Any) -> bool:
    return isinstance(cache, TransformKVCache) and isinstance(getattr(cache.transform, "policy", None), KVzipPolicy)


class _Listener:
    """Stands in for a cache while the model repeats: shows its rows, tells it who asked, and holds nothing."""

    def __init__(self, cache: TransformKVCache, span: tuple[int, int]) -> None:
        self._cache, self._span = cache, span
        self._new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int:
        return cast(int, self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Held rows, then the repeated ones."""
        held_keys, held_values = self._cache.keys_and_values()
        self._new = keys, values
        both = (mx.concatenate([held_keys, keys], axis=2), mx.concatenate([held_values, values], axis=2))
        return tag(both[0], self, "k", self), tag(both[1], self, "v", self)

    def attend(
        self,
        queries: mx.array,
        keys: TaggedArray,
        values: TaggedArray,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention as it would be; the queries of repeated tokens ask the cache's rows."""
        cache, (new_keys, new_values) = self._cache, cast(tuple[mx.array, mx.array], self._new)
        held = cache._settled_state()
        cache._state, out = score_pass(cache._evicting, held, queries, new_keys, new_values, self._span, scale)
        if sinks is None and not isinstance(mask, mx.array):
            return out
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any) -> Mask:
        """As of a cache that goes on."""
        return self._cache.make_mask(N, return_array, window_size)
