"""ChunkKV: keep or drop whole chunks of neighbouring tokens (arXiv 2502.00299).

Chunks are runs of `chunk_size` positions after the sinks. A chunk that is
complete competes by the mean score of its rows; the unfinished one stays.
Up to `budget` tokens nothing goes; the number of rows held follows from the
number of tokens alone.

Differs from the paper: it evicts while decoding too, each head chooses for
itself, and a row's score is the attention mass so far instead of that of the
last queries.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.policy import Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.mass import MassPolicy
from vq_functional.ops.rows import pick, put, token_order, top_mask
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.vectors import norm

WINDOW = 32  # tokens: the newest chunks that are pinned unless told otherwise


@attrs.frozen(kw_only=True)
class ChunkKVOptions:
    """`budget` caps the rows of a head: sinks, whole chunks, and up to `chunk_size - 1` rows of the unfinished chunk.

    `score` "attn_mass" or "key_norm" (large keys stay). `pin_chunks` newest
    complete chunks always stay; None pins those of the newest 32 tokens.
    `reuse_layers` layers form a block whose first layer chooses for all;
    `layer` is the place of this one among the attention layers.
    """

    budget: int = 512
    chunk_size: int = 8
    n_sink: int = 4
    score: str = "attn_mass"
    reuse_layers: int = 1
    pin_chunks: int | None = None
    layer: int = 0
    protect: Spans = protect_field("chunkkv")

    def __attrs_post_init__(self) -> None:
        check_int("chunkkv", "chunk_size", self.chunk_size, 1)
        check_policy("chunkkv", self.budget, self.n_sink, 0, self.protect)
        check_choice("chunkkv", "score", self.score, ("attn_mass", "key_norm"))
        check_int("chunkkv", "reuse_layers", self.reuse_layers, 1)
        check_int("chunkkv", "layer", self.layer, 0)
        spared_chunks = _spared_chunks(self.protect, self.n_sink, self.chunk_size)
        least = self.n_sink + (2 + spared_chunks) * self.chunk_size - 1
        fits = isinstance(self.budget, float) or self.budget >= least
        rule = f"must be at least {least}, for one free chunk and an unfinished one"
        check(fits, "chunkkv", "budget", rule, self.budget)
        if self.pin_chunks is not None:
            check_int("chunkkv", "pin_chunks", self.pin_chunks, 0)


@attrs.frozen
class ChunkKVPolicy(MassPolicy):
    """Priority of a row is the fate of its chunk; memory is its own score."""

    chunk_size: int = 8
    by_norm: bool = False
    pin_chunks: int | None = None
    reuse_layers: int = 1
    layer: int = 0
    name = "chunkkv"

    @property
    def leads(self) -> bool:
        return self.reuse_layers > 1 and self.layer % self.reuse_layers == 0

    @property
    def leader(self) -> int | None:
        place = self.layer % self.reuse_layers
        return self.layer - place if place > 0 else None

    @property
    def most_dropped(self) -> int:
        return self.chunk_size

    @property
    def shielded(self) -> int:
        return self.n_sink + (2 + _spared_chunks(self.protect, self.n_sink, self.chunk_size)) * self.chunk_size - 2

    def init(self, batch: int, heads: int, slots: int) -> Any:
        return () if self.leader is not None else super().init(batch, heads, slots)

    def arrive(self, keys: mx.array, values: mx.array) -> Any:
        return norm(keys)[..., 0] if self.by_norm and self.leader is None else None

    def score(self, memory: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        return (memory, self.rank(memory, scene)) if self.by_norm else super().score(memory, scene)

    def rank(self, scores: mx.array, scene: Scene) -> mx.array:
        size, (batch, heads, total) = self.chunk_size, scene.position.shape
        count = max(total - self.n_sink, 0) // size
        if count == 0:
            return mx.zeros(scores.shape, mx.float32)
        order = token_order(scene.position)

        def by_chunk(x: mx.array) -> mx.array:
            return pick(x, order)[..., self.n_sink : self.n_sink + count * size].reshape(batch, heads, count, size)

        stays = self._staying(by_chunk(scores).sum(axis=-1), by_chunk(scene.position)[..., 0], scene)
        body = mx.repeat(mx.where(stays, 0.0, -mx.inf), size, axis=-1)
        ranked = mx.pad(body, [(0, 0), (0, 0), (self.n_sink, total - self.n_sink - count * size)])
        return put(ranked, order, ranked)

    def kept(self, tokens: int, rows: int, limit: int) -> int:
        if tokens <= limit:
            return rows
        body, size = max(tokens - self.n_sink, 0), self.chunk_size
        chunks = min((limit - self.n_sink - size + 1) // size, body // size)
        return min(rows, min(tokens, self.n_sink) + chunks * size + body % size)

    def _staying(self, score: mx.array, start: mx.array, scene: Scene) -> mx.array:
        """Bool [B, H, chunks]: all but the complete chunks that lose; `start` is a chunk's first position."""
        size, body = self.chunk_size, mx.maximum(scene.offset - self.n_sink, 0)
        end = (self.n_sink + body // size * size)[:, None, None]
        complete = (start >= self.n_sink) & (start < end)
        most = (scene.limit - self.n_sink - size + 1) // size
        pins = mx.minimum(-(-WINDOW // size), most - 1) if self.pin_chunks is None else self.pin_chunks
        pinned = start >= end - mx.array(pins * size).reshape(-1, 1, 1)
        score = mx.where(mx.isnan(score), LOWEST, mx.clip(score, LOWEST, -LOWEST))
        score = mx.where(pinned, -LOWEST, score)
        for first, last in self.protect:
            score = mx.where((start < last) & (start + size > first), mx.inf, score)
        room = (scene.offset <= scene.limit)[:, None, None]
        return room | ~complete | top_mask(mx.where(complete, score, -mx.inf), most, self.latest)


def _spared_chunks(protect: Spans, n_sink: int, size: int) -> int:
    """Chunks that the spans, sorted and disjoint, touch."""
    count = behind = 0
    for start, end in protect:
        first, last = max(start - n_sink, 0) // size, -(-max(end - n_sink, 0) // size)
        count += max(last - max(first, behind), 0)
        behind = max(last, behind)
    return count


def chunkkv_policy(**options: Any) -> ChunkKVPolicy:
    """The chunks with the best mean score stay; options as in ChunkKVOptions."""
    o = ChunkKVOptions(**options)
    return ChunkKVPolicy(
        o.budget,
        o.n_sink,
        protect=o.protect,
        chunk_size=o.chunk_size,
        by_norm=o.score == "key_norm",
        pin_chunks=o.pin_chunks,
        reuse_layers=o.reuse_layers,
        layer=o.layer,
    )


def chunkkv(**options: Any) -> Transform:
    """Evict by chunks; kept rows stay as they came."""
    return chain(chunkkv_policy(**options), rows(), name="chunkkv")
