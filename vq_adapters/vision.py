"""Where a prompt holds images: spans of positions that an evicting method is told to keep."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from vq_functional.core.errors import check

# What configurations call the token that stands for one row of an image or a video,
_ROWS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "media_placeholder_token_id",
    "img_context_token_id",
)
# and those around such rows.
_EDGES = (
    "vision_start_token_id",
    "vision_end_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "boi_token_id",
    "eoi_token_id",
    "boi_token_index",
    "eoi_token_index",
)


def image_spans(model: Any, input_ids: mx.array | Sequence[int]) -> list[tuple[int, int]]:
    """Positions [start, end) of a prompt's images and videos, for the `protect` of an evicting method.

    model: a vision-language model, or its configuration as an object or a dict.
    input_ids: one prompt, int [S] or [1, S], as the processor made it: one token
        for each row of an image, and no padding.
    The tokens that begin and end an image belong to its span, where the
    configuration names them; images without a token between them share one.
    Raises QuantizerConfigError where the configuration names no image token, for
    several prompts, and where one token below zero stands for a whole image.
    """
    config = _config(model)
    rows = _ids(config, _ROWS)
    check(bool(rows), "image_spans", "model", "must have a configuration that names its image token", type(model))
    tokens = _one_prompt(input_ids)
    rule = "must hold a token of the vocabulary for each row of an image"
    check(min(tokens, default=0) >= 0, "image_spans", "input_ids", rule, min(tokens, default=0))
    return _spans(tokens, rows, _ids(config, _EDGES))


def _spans(tokens: Sequence[int], rows: set[int], edges: set[int]) -> list[tuple[int, int]]:
    """Runs of rows and edges that have a row among them."""
    spans, end = [], 0
    for inside, run in itertools.groupby(tokens, lambda token: token in rows or token in edges):
        found = list(run)
        start, end = end, end + len(found)
        if inside and not rows.isdisjoint(found):
            spans.append((start, end))
    return spans


def _config(model: Any) -> Any:
    config = getattr(model, "config", model)
    return getattr(config, "thinker_config", config)


def _ids(config: Any, names: Iterable[str]) -> set[int]:
    found = (config.get(name) if isinstance(config, dict) else getattr(config, name, None) for name in names)
    return {token for token in found if isinstance(token, int)}


def _one_prompt(input_ids: mx.array | Sequence[int]) -> list[int]:
    ids = input_ids if isinstance(input_ids, mx.array) else mx.array(list(input_ids))
    one = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
    check(one, "image_spans", "input_ids", "must be one prompt, int [S] or [1, S]", ids.shape)
    return ids.reshape(-1).tolist()  # type: ignore[return-value]
