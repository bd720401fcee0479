"""Directions that the rows of several layers share, and which rows are too unlike the others' to share one."""

import math

import mlx.core as mx

from vq_functional.ops.vectors import TINY, norm

FLAT = 1e-6  # sine of an angle that spans no arc
GAMMA = 0.05  # share of the range of distances whose rows stay apart (arXiv 2405.14366, section 4.3)
RETENTIONS = ("cosine", "range")


def slerp(a: mx.array, b: mx.array, t: float) -> mx.array:
    """Unit vectors float32 [..., D] at the share `t` of the arc from `a` to `b`, unit vectors or zero.

    A zero vector leaves the other one; of opposite ones, between which every arc is as good, `a` stays.
    """
    angle = mx.arccos(mx.clip((a * b).sum(axis=-1, keepdims=True), -1, 1))
    flat = mx.sin(angle) < FLAT
    first = mx.where(flat, 1 - t, mx.sin((1 - t) * angle))
    second = mx.where(flat, t, mx.sin(t * angle))
    between = first * a + second * b
    length = norm(between)
    either = mx.where(mx.abs(a).max(axis=-1, keepdims=True) > 0, a, b)
    return mx.where(length > FLAT, between / mx.maximum(length, TINY), either)


def shared_direction(x: mx.array, t: float) -> tuple[mx.array, mx.array]:
    """Direction float32 [B, H, T, D] of the finite float32 rows `x` [B, M, H, T, D], and how alike they are.

    The j-th layer's share of the arc is min(1, 2 t / j). Alike [B, H, T]: the
    cosine of two layers' rows, or of more the least one with the direction. A
    zero row has no direction and is like any other.
    """
    layers, lengths = x.shape[1], norm(x)
    unit = x / mx.maximum(lengths, TINY)
    shared = unit[:, 0]
    for j in range(2, layers + 1):
        shared = slerp(shared, unit[:, j - 1], min(1.0, 2 * t / j))
    other = unit[:, ::-1] if layers == 2 else shared[:, None]
    real = (lengths > 0).all(axis=1, keepdims=True) if layers == 2 else lengths > 0
    alike = mx.where(real[..., 0], (unit * other).sum(axis=-1), 1).min(axis=1)
    return shared, mx.clip(alike, -1, 1)


def too_unlike(alike: mx.array, retention: str, threshold: float) -> mx.array:
    """Which rows, bool [..., R], should not be merged: by `threshold`, or by the range of their R distances."""
    if retention == "cosine":
        return alike < threshold
    distance = mx.arccos(alike) / math.pi
    low, high = distance.min(axis=-1, keepdims=True), distance.max(axis=-1, keepdims=True)
    return distance > high - (high - low) * GAMMA
