"""What the queries of a call see: masks that fit what the cache of one layer returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from vq_functional.core.errors import check
from vq_functional.ops.attention import Mask, lower_right

if TYPE_CHECKING:
    from vq_adapters.cache import TransformKVCache


def coming_mask(cache: TransformKVCache, n: int, return_array: bool, window: int | None) -> Mask:
    """Mask of the coming call of `n` tokens, as wide as what that call will return.

    Raises QuantizerConfigError where it has to be an array and may not fit the layers that share it.
    """
    mask = _drawn(cache, n, return_array, window)
    if isinstance(mask, mx.array) and uneven(cache):
        rule = "is drawn for one layer and used by all, which hold different numbers of rows: "
        fits = cache._hooked is not False and window is None
        check(fits, cache.transform.name, "mask", rule + "it needs the attention hook, and no window", window)
    return mask


def own_mask(cache: TransformKVCache, n: int) -> mx.array:
    """This layer's mask of the last call of `n` tokens, as wide as what that call returned."""
    lengths = None if cache._unsettled is None else cache._unsettled.lengths
    mask = cache.transform.visible(cache._whole_state(), n, lengths)
    if not cache._uniform():
        return mask
    width, new = cache._fills[0].rows, n if n > 1 else 0
    return mx.concatenate([mask[..., : width - new], mask[..., mask.shape[-1] - new :]], axis=-1)


def uneven(cache: TransformKVCache) -> bool:
    """Whether the mask of one layer may not fit another."""
    return cache._group is not None and cache._group.uneven and any(fill.tokens for fill in cache._fills)


def _drawn(cache: TransformKVCache, n: int, return_array: bool, window: int | None) -> Mask:
    transform, fill = cache.transform, cache._fills[0]
    if not cache._uniform():
        return _by_query_head(cache, transform.make_mask(cache._state_for(n), n, None, window))
    window = _window(cache, n, window)
    if window is None and not return_array:
        return None if n == 1 else "causal"
    if window is None or fill.tokens + n <= window:
        return lower_right(n, transform.written(fill, n).rows)
    return _by_query_head(cache, transform.make_mask(cache._state_for(n), n, fill, window))


def _window(cache: TransformKVCache, n: int, asked: int | None) -> int | None:
    """The window that a mask for `n` tokens must draw; None where all that is returned lies within it."""
    own = cache.transform.window
    if own is None or (asked is not None and asked < own):
        return asked
    return None if n == 1 or cache._fills[0].tokens + n <= own else own


def _by_query_head(cache: TransformKVCache, mask: mx.array) -> mx.array:
    heads = mask.shape[1]
    return mask if heads == 1 or cache.query_heads is None else mx.repeat(mask, cache.query_heads // heads, axis=1)
