"""What several policies compute from attention."""

from collections.abc import Callable
from typing import TypeAlias

import attrs
import mlx.core as mx

from vq_functional.core.codec import Part
from vq_functional.core.policy import Scene
from vq_functional.core.tree import map_leaves
from vq_functional.ops.rows import extend_last

BLOCK = 128  # queries scored at a time: bounds the probability matrix of a long prompt

# Probabilities float32 [B, H, G, S, T] in a scene: of queries [B, H*G, S, D] at [B, S] over visible [B, H, S, T].
Attention: TypeAlias = Callable[[Scene, mx.array, mx.array, mx.array], mx.array]


def attention_mass(scene: Scene, weights: mx.array, attention: Attention | None = None) -> mx.array:
    """Attention float32 [B, H, T] that each row receives from this call's queries.

    Queries are weighted by `weights` float32 [B, S]; the query heads of a KV
    head are averaged, so that each query gives mass 1 times its weight. A
    standing-in key does not attend to itself, and position 0, which nobody
    precedes, gives itself 1. `attention` takes the place of the plain softmax.
    """
    attention = attention or (lambda scene, queries, _, visible: scene.attention(queries, visible))
    n, total = scene.queries.shape[2], scene.position.shape[2]
    mass = mx.array(0.0)
    for start in range(0, n, BLOCK):
        block, end = slice(start, start + BLOCK), min(start + BLOCK, n)
        # A call of several tokens comes last and in order: nobody of the block sees what follows it.
        held, position = _first_columns(scene, total - n + end), scene.query_position[:, block]
        probabilities = attention(held, scene.queries[:, :, block], position, _sees(held, position))
        group, weight = probabilities.shape[2], weights[:, block]
        if end - start == 1:
            paid = probabilities.sum(axis=(2, 3)) * weight[..., None]
        else:
            paid = mx.einsum("bhgst,bs->bht", probabilities, weight)
        mass = mass + extend_last(paid * (1 / group), total)
    if not scene.proxy:
        return mass
    first = scene.query_position == 0
    start_mass = (weights * first).sum(axis=-1)[:, None, None]
    return mass + mx.where(scene.position == 0, start_mass, 0.0)


def _first_columns(scene: Scene, count: int) -> Scene:
    """The scene without what follows its first `count` columns."""
    if count == scene.position.shape[2]:
        return scene
    key_parts, value_parts = ((_first_rows(part, count),) for (part,) in (scene.key_parts, scene.value_parts))
    return attrs.evolve(scene, key_parts=key_parts, value_parts=value_parts, position=scene.position[..., :count])


def _first_rows(part: Part, count: int) -> Part:
    return Part(part.coder, map_leaves(lambda x: x[:, :, :count], part.rows), count)


def _sees(scene: Scene, position: mx.array) -> mx.array:
    """Bool [B, H, S, T]: nothing for padding, and for a standing-in key not itself."""
    columns, queries = scene.position[:, :, None], position[:, None, :, None]
    before = columns < queries if scene.proxy else columns <= queries
    return (columns >= 0) & before & (queries >= 0)
