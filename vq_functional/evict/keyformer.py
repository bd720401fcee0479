"""Keyformer: attention mass with Gumbel noise decides (arXiv 2403.09054).

With real queries the paper's rule: every logit gets its own noise before a
softmax of temperature `tau`, and rows sum what queries give them. Without them
the keys stand in as in h2o, and the choice adds `tau` times one noise for each
head and position. No noise is stored: it follows from seed and positions.

Differs from the paper: the first `n_sink` rows are kept, and without queries no
newest ones unless `recent` says so; the query heads of a KV head share their
noise; `tau` goes by position, prompt included; a call of several tokens selects
once.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check_between, check_int, check_number, check_seed
from vq_functional.core.policy import Scene, Spans, check_policy, protect_field
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.mass import MassPolicy
from vq_functional.evict.scoring import attention_mass
from vq_functional.ops.noise import halves, hashed, hashed_heads, uniform
from vq_functional.ops.softmax import softmax_of
from vq_functional.ops.tables import filled

HOTTEST, COLDEST = 1e30, 1e-20
PAPER_SHARE = 0.3  # of the budget: the newest rows of the paper's code


@attrs.frozen(kw_only=True)
class KeyformerOptions:
    """`budget` counts every kept row, sinks and recent rows included.

    The temperature goes from `tau_init` at token 0 to `tau_end` at token
    `anneal_steps`, or stays at `tau_init` where that is 0; `tau` holds it
    constant, and 0 is no noise. With real queries the newest `recent_share` of
    the budget stays; None is the paper's 0.3 where `recent` is 0. `rope_base` is
    accepted for configurations written elsewhere and has no effect: kept rows
    are never rotated again.
    """

    budget: int = 512
    n_sink: int = 4
    recent: int = 0
    tau: float | None = None
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    rope_base: float = 10000.0
    seed: int = 0
    recent_share: float | None = None
    protect: Spans = protect_field("keyformer")

    def __attrs_post_init__(self) -> None:
        check_policy("keyformer", self.budget, self.n_sink, self.recent, self.protect)
        for field in ("tau", "tau_init", "tau_end"):
            if field != "tau" or self.tau is not None:
                check_between("keyformer", field, getattr(self, field), 0, HOTTEST)
        if self.recent_share is not None:
            check_between("keyformer", "recent_share", self.recent_share, 0, below=1)
        check_int("keyformer", "anneal_steps", self.anneal_steps, 0)
        check_number("keyformer", "rope_base", self.rope_base, 0)
        check_seed("keyformer", self.seed)


@attrs.frozen
class KeyformerPolicy(MassPolicy):
    """Priority is the mass received so far: with noise in it by queries, with noise on top by keys."""

    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    seed: int = 0
    recent_share: float = 0.0
    shard: Shard = WHOLE
    name = "keyformer"

    def protected(self, scene: Scene) -> mx.array:
        safe = super().protected(scene)
        if scene.proxy or self.recent_share == 0:
            return safe
        newest = mx.minimum((scene.limit * self.recent_share).astype(mx.int32), scene.limit - self.shielded - 1)
        return safe | (scene.position >= (scene.offset - newest)[:, None, None])

    @property
    def noiseless(self) -> bool:
        return self.tau_init == 0 and (self.tau_end == 0 or self.anneal_steps == 0)

    def score(self, mass: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        if scene.proxy or self.noiseless:
            return super().score(mass, scene)
        weights = filled(1.0, *scene.query_position.shape)
        mass = mass + attention_mass(scene, weights, self._noisy_attention)
        return mass, self.rank(mass, scene)

    def rank(self, mass: mx.array, scene: Scene) -> mx.array:
        if self.noiseless or not scene.proxy:
            return mass
        return mass + self._tau(scene)[:, None, None] * row_noise(self._head_seeds(scene), scene.position)

    def _head_seeds(self, scene: Scene) -> tuple[int, ...]:
        return tuple(self.seed + head for head in self.shard.heads(scene.position.shape[1]))

    def _tau(self, scene: Scene) -> mx.array:
        """Temperature float32 [B] at the call's last token."""
        if self.anneal_steps == 0:
            return filled(float(self.tau_init), *scene.offset.shape)
        share = mx.clip((scene.offset - 1) / float(self.anneal_steps), 0.0, 1.0)
        return self.tau_init + (self.tau_end - self.tau_init) * share

    def _noisy_attention(self, scene: Scene, queries: mx.array, position: mx.array, visible: mx.array) -> mx.array:
        """softmax((x + g) / tau) float32 [B, H, G, S, T], without noise where tau is 0."""
        tau = self._tau(scene)[:, None, None, None, None]
        noise = score_noise(self._head_seeds(scene), position, scene.position)
        noise = mx.where(tau > 0, mx.expand_dims(noise, 2), 0.0)
        scores = (scene.logits(queries) + noise) / mx.where(tau > 0, mx.maximum(tau, COLDEST), 1.0)
        seen = mx.expand_dims(visible, 2) & mx.isfinite(scores)
        return softmax_of(scores, seen)


def row_noise(seeds: tuple[int, ...], position: mx.array) -> mx.array:
    """Gumbel noise float32 [B, H, T] of rows at `position` int [B, H, T], by the seed of each head.

    Uniform numbers are drawn with the random key of the integer
    seed * 1000003 + position, added in two halves with a carry.
    """
    upper, lower = halves([seed * 1000003 for seed in seeds])
    low = lower + position.astype(mx.uint32)
    keys = mx.stack([upper + (low < lower), low], axis=-1).reshape(-1, 2)
    draws = mx.vmap(lambda key: mx.random.uniform(1e-9, 1, (), key=key))(keys)
    return _gumbel(draws.reshape(position.shape))


def score_noise(seeds: tuple[int, ...], queries: mx.array, columns: mx.array) -> mx.array:
    """Gumbel noise float32 [B, H, S, T] between queries at positions int [B, S] and rows at int [B, H, T].

    Uniform numbers are a hash of the head's seed and both positions: a random key
    for each of so many would cost more than the attention.
    """
    return _gumbel(uniform(hashed(hashed_heads(*seeds)[..., None], queries[:, None, :, None], columns[:, :, None])))


def _gumbel(draws: mx.array) -> mx.array:
    return -mx.log(-mx.log(draws))


def keyformer_policy(**options: Any) -> KeyformerPolicy:
    """Rows with the most attention mass, noise included, stay; options as in KeyformerOptions."""
    o = KeyformerOptions(**options)
    start, end = (o.tau_init, o.tau_end) if o.tau is None else (o.tau, o.tau)
    share = o.recent_share if o.recent_share is not None else PAPER_SHARE if o.recent == 0 else 0.0
    return KeyformerPolicy(o.budget, o.n_sink, o.recent, o.protect, 1.0, start, end, o.anneal_steps, o.seed, share)


def keyformer(**options: Any) -> Transform:
    """Evict by attention mass with Gumbel noise; kept rows stay as they came."""
    return chain(keyformer_policy(**options), rows(), name="keyformer")
