"""SqueezeAttention: budgets of the layers measured on the prompt (arXiv 2404.04793).

Layers whose keys point the same way need fewer rows. Each layer keeps the
whole first call; once all have told their concentration, budgets are set, and
each gives up what is too much.

Differs from the paper: the statistic is the mean cosine among a layer's keys
(the paper compares hidden states around the attention block, which a cache
never sees), and budgets follow it continuously instead of in three clusters.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_between, check_choice, check_int, check_number
from vq_functional.core.policy import Spans, check_policy, protect_field
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.budgets import fitted
from vq_functional.evict.chain import chain
from vq_functional.evict.mass import MassPolicy, newest
from vq_functional.ops.vectors import norm


@attrs.frozen(kw_only=True)
class SqueezeAttentionOptions:
    """`budget` is the mean over layers, and the budget where no layers agree on others.

    `strength` 0 keeps all budgets equal, 1 follows the measure fully;
    `resolved_budget` sets this layer's budget outright. `reduce` "mean" over
    heads or "head0". `decay` ages old mass; `recent` newest rows are kept (None:
    16, fewer under small budgets).
    """

    budget: int = 512
    n_sink: int = 4
    strength: float = 1.0
    resolved_budget: int | None = None
    reduce: str = "mean"
    decay: float = 0.98
    recent: int | None = None
    protect: Spans = protect_field("squeeze")

    def __attrs_post_init__(self) -> None:
        check_int("squeeze", "budget", self.budget, 1)
        if self.recent is not None:
            check_int("squeeze", "recent", self.recent, 1)
        check_between("squeeze", "strength", self.strength, 0, 1)
        check_choice("squeeze", "reduce", self.reduce, ("mean", "head0"))
        check_number("squeeze", "decay", self.decay, 0, 1)
        check_int("squeeze", "n_sink", self.n_sink, 0)
        if self.resolved_budget is not None:
            check_int("squeeze", "resolved_budget", self.resolved_budget, 1)
        # The newest row costs no place: it is an older one at the next token.
        for field in ("budget", "resolved_budget"):
            budget = getattr(self, field)
            if budget is not None:
                recent = newest(self.recent, budget, self.n_sink, self.protect)
                check_policy("squeeze", budget, self.n_sink, recent - 1, self.protect, budget_field=field)


@attrs.frozen
class SqueezeAttentionPolicy(MassPolicy):
    """Priority is the attention mass received so far; the budget may be agreed between layers."""

    strength: float = 1.0
    reduce: str = "mean"
    resolved: bool = False
    shard: Shard = WHOLE
    name = "squeeze"

    @property
    def agrees(self) -> bool:
        return not self.resolved

    def tell(self, keys: mx.array, valid: mx.array) -> mx.array:
        """Concentration float32 [B] of keys [B, H, S, D], of which bool [B, S] are tokens."""
        return concentration(keys, valid, self.reduce, self.shard)

    def agree(self, told: Sequence[float]) -> list[int]:
        """Budgets of the layers, from what each has told."""
        return squeeze_budgets(told, int(self.budget), self.strength, self.shielded)


def concentration(
    keys: mx.array, valid: mx.array | None = None, reduce: str = "mean", shard: Shard = WHOLE
) -> mx.array:
    """Mean cosine float32 [B] between two different keys of a head; 0 for fewer than two.

    keys [B, H, S, D] of a `shard` of the heads; valid bool [B, S]. A key that is not finite does not count.
    """
    unit = keys.astype(mx.float32)
    counts = mx.isfinite(unit).all(axis=-1)
    if valid is not None:
        counts = counts & valid[:, None]
    unit = mx.where(counts[..., None], unit / (norm(unit) + 1e-8), 0.0)
    count = counts.sum(axis=-1).astype(mx.float32)  # int32 can't hold the pairs of a long prompt
    pairs = mx.maximum(count * (count - 1), 1)
    total = unit.sum(axis=2)
    cosine = shard.gathered(((total * total).sum(axis=-1) - (unit * unit).sum(axis=(2, 3))) / pairs)
    return cosine[:, 0] if reduce == "head0" else cosine.mean(axis=-1)


def squeeze_budgets(told: Sequence[float], budget: int, strength: float = 1.0, least: int = 1) -> list[int]:
    """Budgets with mean `budget` that fall as the concentration `told` by a layer rises; none below `least`."""
    room = [1 - min(max(cosine, 0.0), 1.0) for cosine in told]
    total = sum(room)
    weights = [one * len(room) / total for one in room] if total > 0 else [1.0] * len(room)
    shares = [budget * ((1 - strength) + strength * weight) for weight in weights]
    return fitted(shares, least, budget * len(room))


def squeeze_policy(**options: Any) -> SqueezeAttentionPolicy:
    """Rows with the most attention stay, under budgets that layers agree on; options as in SqueezeAttentionOptions."""
    o = SqueezeAttentionOptions(**options)
    budget, resolved = o.resolved_budget or o.budget, o.resolved_budget is not None
    recent = newest(o.recent, budget, o.n_sink, o.protect)
    return SqueezeAttentionPolicy(budget, o.n_sink, recent, o.protect, o.decay, o.strength, o.reduce, resolved)


def squeeze(**options: Any) -> Transform:
    """Evict by attention mass; kept rows stay as they came."""
    return chain(squeeze_policy(**options), rows(), name="squeeze")
