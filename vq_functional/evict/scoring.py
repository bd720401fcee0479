"""What several policies compute from attention."""

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from vq_functional.core.policy import Scene

BLOCK = 256  # queries scored at a time: bounds the probability matrix of a long prompt

# Probabilities float32 [B, H, G, S, T] of queries [B, H*G, S, D] at positions [B, S] over visible [B, H, S, T].
Attention: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]


def attention_mass(scene: Scene, weights: mx.array, attention: Attention | None = None) -> mx.array:
    """Attention float32 [B, H, T] that each row receives from this call's queries.

    Queries are weighted by `weights` float32 [B, S]; the query heads of a KV
    head are averaged, so that each query gives mass 1 times its weight. A
    standing-in key does not attend to itself, and position 0, which nobody
    precedes, gives itself 1. `attention` takes the place of the plain softmax.
    """
    attention = attention or (lambda queries, _, visible: scene.attention(queries, visible))
    n = scene.queries.shape[2]
    mass = mx.zeros(scene.position.shape, mx.float32)
    for start in range(0, n, BLOCK):
        block = slice(start, start + BLOCK)
        position = scene.query_position[:, block]
        probabilities = attention(scene.queries[:, :, block], position, _sees(scene, position))
        group = probabilities.shape[2]
        mass = mass + mx.einsum("bhgst,bs->bht", probabilities, weights[:, block]) * (1 / group)
    if not scene.proxy:
        return mass
    first = scene.query_position == 0
    start_mass = (weights * first).sum(axis=-1)[:, None, None]
    return mass + mx.where(scene.position == 0, start_mass, 0.0)


def _sees(scene: Scene, position: mx.array) -> mx.array:
    """Bool [B, H, S, T]: nothing for padding, and for a standing-in key not itself."""
    columns, queries = scene.position[:, :, None], position[:, None, :, None]
    before = columns < queries if scene.proxy else columns <= queries
    return (columns >= 0) & before & (queries >= 0)
