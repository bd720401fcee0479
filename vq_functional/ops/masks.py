"""Masks from positions: bool [B, 1, n, C], True where a query may look."""

import mlx.core as mx

from vq_functional.core.errors import check_int
from vq_functional.ops.tables import counting


def query_positions(offset: mx.array, n: int) -> mx.array:
    """Positions int [B, n] of the `n` tokens that begin at `offset` int [B]; padding is negative."""
    return offset[:, None] + counting(n)


def causal(columns: mx.array, queries: mx.array, window: int | None = None) -> mx.array:
    """Bool [B, H, n, C]: column positions int [B, H, C] against query positions int [B, n].

    A column below zero holds nothing. With `window` a query sees itself and the
    window - 1 positions before it. A query below zero is padding; it sees
    everything, so that its unused result stays finite.
    """
    check_int("make_mask", "window", window, 1, optional=True)
    columns, queries = columns[:, :, None], queries[:, None, :, None]
    seen = (columns >= 0) & (columns <= queries)
    if window is not None:
        seen = seen & (queries - columns < window)
    return seen | (queries < 0)
