"""Policy: which rows stay. A score function and the rows that are never given up; blind to how rows are held."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_int
from vq_functional.core.spec import KVSpec
from vq_functional.ops.attention import Parts, decode, logits, probabilities
from vq_functional.ops.tables import filled

Spans = tuple[tuple[int, int], ...]
_WHOLE = 10**9


@attrs.frozen(eq=False)
class Picked:
    """Some columns of each head."""

    index: mx.array  # int [B, H, K]
    valid: mx.array  # bool [B, H, K]: the others stand for no row


@attrs.frozen(eq=False)
class Shares:
    """New rows as sums: `own` times a kept row, and `lost` times each lost one."""

    own: mx.array  # float32 [B, H, K]
    lost: mx.array  # float32 [B, H, K, R]
    target: mx.array | None = None  # int [B, H, K]: which of the kept rows these are, all different; None for all


@attrs.frozen(eq=False)
class Scene:
    """What a policy may look at when it scores: all rows of one call, stored ones and new ones.

    Sizes: T columns, S new tokens of this call, G queries a KV head.
    """

    key_parts: Parts
    value_parts: Parts
    position: mx.array  # int32 [B, H, T]: token position, below zero in an empty column
    queries: mx.array  # [B, H*G, S, D], as scores q . k * `scale` take them; with `proxy` the new keys
    query_position: mx.array  # int32 [B, S]: below zero for padding
    offset: mx.array  # int32 [B]: tokens seen, this call's included
    lengths: mx.array  # int32 [B]: this call's tokens without padding
    proxy: bool
    limit: mx.array  # int32 [B]: rows that may stay in each head
    carry: Any  # what the policy carries from call to call beside its memory

    @property
    def scale(self) -> float:
        return self.queries.shape[-1] ** -0.5

    @property
    def tokens(self) -> mx.array:
        """Tokens int32 [B] of this call, padding on either side left out."""
        return mx.minimum(self.lengths, self.offset)

    def keys(self) -> mx.array:
        """Keys [B, H, T, D] as the store gives them back."""
        return decode(self.key_parts)

    def sound(self) -> mx.array:
        """Bool [B, H, T]: columns whose keys are finite."""
        return mx.isfinite(self.keys()).all(axis=-1)

    def logits(self, queries: mx.array) -> mx.array:
        """Scaled scores float32 [B, H, G, M, T] of `queries` [B, H*G, M, D], straight from codes."""
        return logits(self.key_parts, queries, self.scale)

    def attention(self, queries: mx.array, visible: mx.array) -> mx.array:
        """Probabilities float32 [B, H, G, M, T] over `visible` [B, H, M, T]."""
        return probabilities(self.key_parts, queries, self.scale, visible)


def _own_spans(protect: Any) -> Spans:
    """`protect` of a policy, as `to_spans` takes it."""
    return to_spans("policy", protect)


@attrs.frozen
class Policy:
    """Base of all policies.

    `budget` rows of each head stay after a call that evicts; a float below 1 is
    the share of the prompt (all tokens that came in calls of several) that stays.
    Protected: the first `n_sink` positions, the newest `recent`, and the spans
    of `protect`.
    """

    budget: int | float
    n_sink: int = 0
    recent: int = 0
    protect: Spans = attrs.field(default=(), converter=_own_spans)

    name: ClassVar[str]
    prompt_only: ClassVar[bool] = False  # single tokens are only appended
    latest: ClassVar[bool] = True  # of equal priorities the later position stays
    stride: ClassVar[int | None] = None  # standing-in keys settle so many at a time
    learns_early: ClassVar[bool] = False  # `carry_on` changes nothing once rows have gone
    folds: ClassVar[int] = 0  # rows that an evicted row may be folded into

    @property
    def leads(self) -> bool:
        """Whether other layers take over what this one chooses."""
        return False

    @property
    def leader(self) -> int | None:
        """The layer that chooses for this one; None where it chooses itself."""
        return None

    @property
    def agrees(self) -> bool:
        """Whether the layers agree on their budgets after the first call, by `tell` and `agree`."""
        return False

    def tell(self, keys: mx.array, valid: mx.array) -> mx.array:
        """What a layer tells the others of its first call: float32 [B], from keys [B, H, S, D] and bool [B, S]."""
        raise TypeError(f"{self.name} tells nothing")

    def agree(self, told: Sequence[float]) -> list[int]:
        """Budgets of the layers, from what each has told."""
        raise TypeError(f"{self.name} does not agree on budgets")

    @property
    def most_dropped(self) -> int:
        """Rows of a head that a single token may drive out."""
        return 1

    def init(self, batch: int, heads: int, slots: int) -> Any:
        """Per-row memory: a tree of arrays [B, H, slots, ...] that follow their rows."""
        return ()

    def arrive(self, keys: mx.array, values: mx.array) -> Any:
        """Memory of new rows, from keys and values [B, H, S, D] as they came; None for zeros."""
        return None

    def init_carry(self, spec: KVSpec) -> Any:
        """What is carried beside the rows: a tree of arrays [B, ...]."""
        return ()

    def carry_on(self, scene: Scene) -> Any:
        """The carry after a call, before anything is scored."""
        return scene.carry

    def score(self, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        """Next memory and priority float32 [B, H, T]; the highest stay, and -inf never does."""
        raise TypeError(f"{self.name} does not score")

    def rank(self, memory: Any, scene: Scene) -> mx.array:
        """Priority float32 [B, H, T] by what earlier calls left in memory."""
        raise TypeError(f"{self.name} does not remember")

    def fold(self, memory: Any, scene: Scene, kept: Picked, lost: Picked) -> tuple[Any, Shares, Shares | None]:
        """Memory of the kept rows, and how values (and keys, or None) of the lost rows are folded into them."""
        raise TypeError(f"{self.name} does not fold")

    def protected(self, scene: Scene) -> mx.array:
        """Bool [B, H, T]: rows that are never given up."""
        position = scene.position
        safe = (position < self.n_sink) | (position >= scene.offset[:, None, None] - self.recent)
        for start, end in self.protect:
            safe = safe | ((position >= start) & (position < end))
        return safe

    @property
    def shielded(self) -> int:
        """Rows that are protected at any time, at most."""
        return self.recent + self.n_sink + spared(self.protect, self.n_sink)

    def limit(self, prompt: int) -> int:
        """Rows that may stay after a prompt of so many tokens."""
        if isinstance(self.budget, int):
            return self.budget
        return max((prompt * _parts(self.budget) + _WHOLE // 2) // _WHOLE, self.shielded + 1)

    def limits(self, prompt: mx.array) -> mx.array:
        """`limit` of int32 [B] prompts."""
        if isinstance(self.budget, int):
            return filled(self.budget, *prompt.shape)
        share = (prompt.astype(mx.int64) * _parts(self.budget) + _WHOLE // 2) // _WHOLE
        return mx.maximum(share, self.shielded + 1).astype(mx.int32)

    def most(self, stored: int, n: int) -> int:
        """Rows that may stay, at most, where `stored` could before a call of `n` tokens."""
        stored = max(stored, self.limit(0))
        return stored if isinstance(self.budget, int) else stored + math.ceil(self.budget * n) + 1

    def kept(self, tokens: int, rows: int, limit: int) -> int:
        """Of `rows` rows of a head, those that stay after `tokens` tokens."""
        return min(rows, limit)


def check_policy(
    name: str,
    budget: int | float,
    n_sink: int,
    recent: int,
    protect: Spans,
    recent_field: str = "recent",
    budget_field: str = "budget",
    free: int = 1,
) -> None:
    """The rules that all budgets obey: at least `free` rows beside the protected ones."""
    share = isinstance(budget, float) and 0 < budget < 1
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    rule = "must be an integer >= 1, or a share of the prompt between 0 and 1"
    check(share or whole, name, budget_field, rule, budget)
    check_int(name, "n_sink", n_sink, 0)
    check_int(name, recent_field, recent, 0)
    shielded = recent + n_sink + spared(protect, n_sink)
    rule = f"must {'exceed' if free else 'hold'} the {shielded} rows of `n_sink`, `{recent_field}` and `protect`"
    check(isinstance(budget, float) or shielded + free <= budget, name, budget_field, rule, budget)


def _parts(share: float) -> int:
    """A share in billionths: integers make host and device agree on every count."""
    return round(share * _WHOLE)


def spared(protect: Spans, n_sink: int) -> int:
    """Positions from `n_sink` on that the spans protect."""
    return sum(max(end, n_sink) - max(start, n_sink) for start, end in protect)


def protect_field(name: str) -> Any:
    """The option `protect` of a method, as `to_spans` takes it."""
    return attrs.field(default=(), converter=functools.partial(to_spans, name))


def to_spans(name: str, protect: Any) -> Spans:
    """`[(start, end), ...]`, half-open spans of positions, sorted and disjoint."""
    try:
        spans = sorted((start, end) for start, end in protect)
    except (TypeError, ValueError):
        spans = [(0, 0)]
    for start, end in spans:
        whole = all(isinstance(edge, int) and not isinstance(edge, bool) for edge in (start, end))
        check(whole and 0 <= start < end, name, "protect", "must be pairs of integers 0 <= start < end", protect)
    return _disjoint(spans)


def _disjoint(spans: list[tuple[int, int]]) -> Spans:
    """Sorted spans with overlapping ones joined."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)
