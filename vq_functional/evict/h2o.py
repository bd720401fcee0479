"""H2O: keep the rows that attention has used most (arXiv 2306.14048, algorithm 1).

Differs from the paper: `decay` ages old mass, `grace` shields the newest rows
and `n_sink` the first ones; a call of several tokens selects once, at its end.
Without real queries the keys stand in, 56 at a time: each attends to the rows before it.
"""

from typing import Any

import attrs

from vq_functional.core.errors import check_number
from vq_functional.core.policy import Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.mass import MassPolicy


@attrs.frozen(kw_only=True)
class H2OOptions:
    """`budget` counts every kept row, sinks and grace rows included.

    `decay` in (0, 1] multiplies old mass once a token. `rope_base` is accepted
    for configurations written elsewhere and has no effect: kept rows are never
    rotated again.
    """

    budget: int = 512
    n_sink: int = 4
    grace: int = 16
    decay: float = 0.98
    rope_base: float = 10000.0
    protect: Spans = protect_field("h2o")

    def __attrs_post_init__(self) -> None:
        check_policy("h2o", self.budget, self.n_sink, self.grace, self.protect, "grace")
        check_number("h2o", "decay", self.decay, 0, 1)
        check_number("h2o", "rope_base", self.rope_base, 0)


@attrs.frozen
class H2OPolicy(MassPolicy):
    """Priority is the attention mass received so far."""

    name = "h2o"


def h2o_policy(**options: Any) -> H2OPolicy:
    """Rows with the most attention mass stay; options as in H2OOptions."""
    o = H2OOptions(**options)
    return H2OPolicy(o.budget, o.n_sink, o.grace, o.protect, o.decay)


def h2o(**options: Any) -> Transform:
    """Evict by attention mass; kept rows stay as they came."""
    return chain(h2o_policy(**options), rows(), name="h2o")
