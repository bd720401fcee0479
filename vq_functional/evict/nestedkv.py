"""NestedKV: keep the keys of a prompt that are least like their surroundings (arXiv 2605.26678).

A key is compared with the mean of all keys, of its block and of a sliding
window. The three measures are blended by how well each separates the keys of
a head; where they disagree, the largest one counts. Single tokens are appended
and never evicted, so `budget` caps the prompt and not the whole.

Differs from the paper: heads keep equally many rows instead of competing for
them; a later call of several tokens measures all rows that are left as if
they were neighbours.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_between, check_int
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.ops.rows import pick, put, token_order
from vq_functional.ops.tables import counting
from vq_functional.ops.vectors import norm

PRIOR = (0.4, 0.4, 0.2)  # weights of global, block and sliding mean before a head's own gaps
FLAT = 1e-6  # a span that float32 rounding alone can make
SHORTEST = 1e-12  # a key that is divided by its own length


@attrs.frozen(kw_only=True)
class NestedKVOptions:
    """`budget` rows of a prompt stay, sinks included; `window` is the sliding mean's.

    `beta` sharpens the blend of a head towards the measure with the widest gap.
    Above the surprise `tau` the largest measure takes over, with slope `kappa`.
    `safeguard_alpha` is accepted and has no effect: it is a head's guaranteed
    share of rows when heads compete, and here all heads keep equally many.
    """

    budget: int = 512
    n_sink: int = 4
    window: int = 64
    beta: float = 3.0
    tau: float = 0.6
    kappa: float = 10.0
    safeguard_alpha: float = 0.2
    protect: Spans = protect_field("nestedkv")

    def __attrs_post_init__(self) -> None:
        check_policy("nestedkv", self.budget, self.n_sink, 0, self.protect)
        check_int("nestedkv", "window", self.window, 1)
        check_between("nestedkv", "beta", self.beta, 0)
        check_between("nestedkv", "tau", self.tau)
        check_between("nestedkv", "kappa", self.kappa, 0)
        check_between("nestedkv", "safeguard_alpha", self.safeguard_alpha, 0, 1)


@attrs.frozen
class NestedKVPolicy(Policy):
    """Priority is the anomaly score of a key, in [0, 1]; nothing is remembered."""

    window: int = 64
    beta: float = 3.0
    tau: float = 0.6
    kappa: float = 10.0
    name = "nestedkv"
    prompt_only = True

    def score(self, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        keys = scene.keys().astype(mx.float32)
        size = norm(keys)
        sound = (scene.position >= 0) & mx.isfinite(size[..., 0])
        order = token_order(mx.where(sound, scene.position, -1))
        unit = mx.where(sound[..., None], keys / mx.maximum(size, SHORTEST), 0.0)
        ranked = self._ranked(pick(unit, order), sound.sum(axis=-1, keepdims=True))
        score = put(mx.zeros(ranked.shape, mx.float32), order, ranked)
        return memory, mx.where(sound, score, -1.0)

    def _ranked(self, unit: mx.array, n: mx.array) -> mx.array:
        """Scores float32 [B, H, T] of unit keys in token order, of which the first `n` int [B, H, 1] count."""
        measures = _anomalies(unit, n, self.window)
        real = counting(unit.shape[2]) < n
        weights = mx.softmax(mx.log(mx.array(PRIOR)) + self.beta * _gaps(measures, n), axis=-1)
        blend = (weights[..., None] * measures).sum(axis=2)
        middle = measures.mean(axis=2, keepdims=True)
        surprise = _unit_span(mx.sqrt(mx.square(measures - middle).mean(axis=2)), real)
        surprise = surprise - surprise.sum(axis=-1, keepdims=True) / mx.maximum(n, 1)
        gate = mx.sigmoid(self.kappa * (surprise - self.tau))
        return (1 - gate) * blend + gate * measures.max(axis=2)


def _anomalies(unit: mx.array, n: mx.array, window: int) -> mx.array:
    """Minus the likeness to the global, the block and the sliding mean, each in [0, 1]: float32 [B, H, 3, T]."""
    rank = mx.broadcast_to(counting(unit.shape[2]), unit.shape[:3])
    real = rank < n
    block = mx.minimum(mx.clip(n // 32, 128, 256), mx.maximum(n, 1))
    start, last = rank // block * block, mx.maximum(n, 1)
    overall = unit.sum(axis=2, keepdims=True) / mx.maximum(n, 1)[..., None]
    # Sums without the mean stay small, so that a long prompt costs them no digits.
    sums = mx.cumsum(mx.where(real[..., None], unit - overall, 0.0), axis=2)
    sums = mx.pad(sums, [(0, 0), (0, 0), (1, 0), (0, 0)])

    def likeness(start: mx.array, end: mx.array) -> mx.array:
        mean = (pick(sums, end) - pick(sums, start)) / mx.maximum(end - start, 1)[..., None]
        return (unit * (mean + overall)).sum(axis=-1)

    whole = (unit * overall).sum(axis=-1)
    near = likeness(mx.minimum(start, last), mx.minimum(start + block, last))
    close = likeness(mx.maximum(rank + 1 - window, 0), rank + 1)
    return mx.stack([_unit_span(-x, real) for x in (whole, near, close)], axis=2)


def _gaps(measures: mx.array, n: mx.array) -> mx.array:
    """Mean of the highest tenth minus mean of the lowest: float32 [B, H, 3]."""
    n, rank = n[:, :, None], counting(measures.shape[-1])
    ranked = mx.sort(mx.where(rank < n, measures, mx.inf), axis=-1)
    tenth, rest = n // 10, n % 10
    count = tenth + ((rest > 5) | ((rest == 5) & (tenth % 2 == 1)))  # n / 10, halves to even
    count = mx.maximum(count, 1)
    low, high = rank < count, (rank >= n - count) & (rank < n)
    sums = [mx.where(tail, ranked, 0.0).sum(axis=-1) for tail in (high, low)]
    return (sums[0] - sums[1]) / count[..., 0]


def _unit_span(x: mx.array, real: mx.array) -> mx.array:
    """`x` [B, H, T] mapped to [0, 1] over the `real` columns; 0 where they are all alike, and elsewhere."""
    low = mx.where(real, x, mx.inf).min(axis=-1, keepdims=True)
    high = mx.where(real, x, -mx.inf).max(axis=-1, keepdims=True)
    span = high - low
    return mx.where(real & (span > FLAT), (x - low) / mx.maximum(span, FLAT), 0.0)


def nestedkv_policy(**options: Any) -> NestedKVPolicy:
    """Prompt rows with the least usual keys stay; options as in NestedKVOptions."""
    o = NestedKVOptions(**options)
    return NestedKVPolicy(o.budget, o.n_sink, 0, o.protect, o.window, o.beta, o.tau, o.kappa)


def nestedkv(**options: Any) -> Transform:
    """Compress prompts by how unusual keys are; kept rows stay as they came."""
    return chain(nestedkv_policy(**options), rows(), name="nestedkv")
