"""knorm: keep the keys of smallest L2 norm (arXiv 2406.11430).

A key's norm is known when it arrives and never changes, so no attention is
needed, and with an integer `budget` the rows that stay do not depend on how
the tokens were cut into calls.

Differs from the paper: a fixed number of rows instead of a share; the first
`n_sink` and the newest `recent` rows are kept; no layer is left out.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_choice
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.vectors import norm


@attrs.frozen(kw_only=True)
class L2NormOptions:
    """`budget` counts every kept row, sinks and recent rows included.

    `keep` "low" is the paper's rule; "high" keeps the largest keys instead, as
    a control.
    """

    budget: int = 512
    n_sink: int = 4
    recent: int = 0
    keep: str = "low"
    protect: Spans = protect_field("knorm")

    def __attrs_post_init__(self) -> None:
        check_policy("knorm", self.budget, self.n_sink, self.recent, self.protect)
        check_choice("knorm", "keep", self.keep, ("low", "high"))


@attrs.frozen
class L2NormPolicy(Policy):
    """Memory is the norm of each key as it came; the smallest, or largest, have priority."""

    keep: str = "low"
    name = "knorm"

    def init(self, batch: int, heads: int, slots: int) -> mx.array:
        return mx.zeros((batch, heads, slots), mx.float32)

    def arrive(self, keys: mx.array, values: mx.array) -> mx.array:
        return norm(keys)[..., 0]

    def score(self, norms: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        return norms, self.rank(norms, scene)

    def rank(self, norms: mx.array, scene: Scene) -> mx.array:
        return mx.where(mx.isfinite(norms), -norms if self.keep == "low" else norms, LOWEST)


def knorm_policy(**options: Any) -> L2NormPolicy:
    """Rows with the smallest keys stay; options as in L2NormOptions."""
    o = L2NormOptions(**options)
    return L2NormPolicy(o.budget, o.n_sink, o.recent, o.protect, o.keep)


def knorm(**options: Any) -> Transform:
    """Evict by key norm; kept rows stay as they came."""
    return chain(knorm_policy(**options), rows(), name="knorm")
