"""PyramidKV: attention-mass eviction with budgets that shrink from layer to layer (arXiv 2406.02069).

Differs from the paper: it evicts while decoding too, by the mass received so
far; `scorer="snapkv"` is the paper's selection. The steepness `beta` has two
meanings, see `pyramid_budgets`.
"""

from typing import Any

import attrs

from vq_functional.core.errors import check_between, check_choice, check_int, check_number
from vq_functional.core.policy import Policy, Spans, check_policy, protect_field, spared
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.budgets import fitted
from vq_functional.evict.chain import chain
from vq_functional.evict.mass import MassPolicy, newest
from vq_functional.evict.snapkv import SnapKVPolicy


@attrs.frozen(kw_only=True)
class PyramidKVOptions:
    """`budget` is the mean over layers; a layer's own follows from `layer` and `layers`, its place and their number.

    `resolved_budget` sets this layer's budget outright. `rule` "linear" or
    "paper" and `beta` shape the schedule. `scorer` "mass" or "snapkv"; `decay`
    and `recent` (None: 16, fewer under small budgets) are for "mass", `obs_window`
    for "snapkv". `backend` is accepted and changes nothing.
    """

    budget: int = 512
    backend: str = "reference"
    n_sink: int = 4
    beta: float = 2.0
    resolved_budget: int | None = None
    layer: int | None = None
    layers: int | None = None
    rule: str = "linear"
    scorer: str = "mass"
    decay: float = 0.98
    recent: int | None = None
    obs_window: int = 32
    protect: Spans = protect_field("pyramidkv")

    def __attrs_post_init__(self) -> None:
        check_choice("pyramidkv", "backend", self.backend, ("reference", "mlx", "metal", "auto"))
        check_choice("pyramidkv", "rule", self.rule, ("linear", "paper"))
        check_choice("pyramidkv", "scorer", self.scorer, ("mass", "snapkv"))
        check_int("pyramidkv", "budget", self.budget, 1)
        check_int("pyramidkv", "obs_window", self.obs_window, 1)
        check_number("pyramidkv", "decay", self.decay, 0, 1)
        check_between("pyramidkv", "beta", self.beta, 1)
        if self.recent is not None:
            check_int("pyramidkv", "recent", self.recent, 1)
        if self.resolved_budget is not None:
            check_int("pyramidkv", "resolved_budget", self.resolved_budget, 1)
        check_policy("pyramidkv", self.budget, self.n_sink, 0, self.protect)
        field = "budget" if self.resolved_budget is None else "resolved_budget"
        check_policy("pyramidkv", self.layer_budget, self.n_sink, self.newest - 1, self.protect, budget_field=field)

    @property
    def layer_budget(self) -> int:
        """Rows that stay in each head of this layer."""
        if self.resolved_budget is not None or self.layer is None or self.layers is None:
            return self.resolved_budget or self.budget
        check_int("pyramidkv", "layers", self.layers, 1)
        check_int("pyramidkv", "layer", self.layer, 0, self.layers - 1)
        least = self.n_sink + spared(self.protect, self.n_sink) + max(self.recent or 1, 1)
        return pyramid_budgets(self.layers, self.budget, self.beta, self.rule, least)[self.layer]

    @property
    def newest(self) -> int:
        """Rows too new to be judged; the newest of all costs no place, since the next token makes it an older one."""
        return newest(self.recent, self.layer_budget, self.n_sink, self.protect)


@attrs.frozen
class PyramidKVPolicy(MassPolicy):
    """Priority is the attention mass received so far."""

    name = "pyramidkv"


@attrs.frozen
class PyramidSnapKVPolicy(SnapKVPolicy):
    """Priority is the share of votes of a prompt's last queries."""

    name = "pyramidkv"


def pyramid_budgets(layers: int, budget: int, beta: float, rule: str = "linear", least: int = 1) -> list[int]:
    """Budgets of `layers` layers with mean `budget`, falling in equal steps, none below `least`.

    `rule` "linear": the steps span (budget - least) * (beta - 1) on both sides
    of the mean. "paper": from 2 * budget - budget / beta down to budget / beta.
    """
    if rule == "paper":
        span = budget - budget / beta
    else:
        span = (budget - least) * (beta - 1)
    steps = max(layers - 1, 1)
    shares = [budget + (span - 2 * span * layer / steps if layers > 1 else 0.0) for layer in range(layers)]
    return fitted(shares, least, budget * layers)


def pyramidkv_policy(**options: Any) -> Policy:
    """Rows with the most attention stay, fewer in later layers; options as in PyramidKVOptions."""
    o = PyramidKVOptions(**options)
    if o.scorer == "snapkv":
        return PyramidSnapKVPolicy(o.layer_budget, o.n_sink, 0, o.protect, o.obs_window)
    return PyramidKVPolicy(o.layer_budget, o.n_sink, o.newest, o.protect, o.decay)


def pyramidkv(**options: Any) -> Transform:
    """Evict by attention mass under this layer's budget; kept rows stay as they came."""
    return chain(pyramidkv_policy(**options), rows(), name="pyramidkv")
