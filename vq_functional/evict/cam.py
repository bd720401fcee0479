"""CaM: fold the value of an evicted row into rows that stay (cache merging, ICML 2024).

Rows are evicted by attention mass. `merge="window"` is the paper's rule: a row
that has more mass than those that follow it is likely to be added to them, a
share to each. The other rules blend its value into the one row with the most
similar key.

Differs from the paper: the first `n_sink` rows stay; a call of several tokens
evicts at its end, and merges into what is left then.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_choice, check_int, check_seed
from vq_functional.core.policy import Picked, Scene, Shares, Spans, check_policy, protect_field
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.core.warn import warn
from vq_functional.evict.chain import chain
from vq_functional.evict.folding import of
from vq_functional.evict.mass import MassPolicy
from vq_functional.ops.noise import hashed, hashed_heads, uniform
from vq_functional.ops.rows import pick, token_order, victim_row
from vq_functional.ops.tables import counting

MERGES = ("sim_weighted", "mean", "drop", "window")


@attrs.frozen(kw_only=True)
class CaMOptions:
    """`budget` counts every kept row, sinks and recent rows included.

    `merge` "sim_weighted" blends by the cosine of the keys, "mean" half and
    half, "window" adds to the `reach` next rows, "drop" folds nothing.
    `merge_gate` merges at random, rarely where the row has little mass; `seed`
    is of that noise. `merge_keys` blends keys too, for keys without rotation.
    `recent` None is half of the budget, or what sinks and `protect` leave of it.
    """

    budget: int = 512
    n_sink: int = 4
    merge: str = "sim_weighted"
    merge_keys: bool = False
    merge_gate: bool = True
    seed: int = 42
    recent: int | None = None
    reach: int = 16
    protect: Spans = protect_field("cam")

    def __attrs_post_init__(self) -> None:
        check_policy("cam", self.budget, self.n_sink, 0 if self.recent is None else self.recent, self.protect)
        check_choice("cam", "merge", self.merge, MERGES)
        check_choice("cam", "merge_keys", self.merge_keys, (True, False))
        check_choice("cam", "merge_gate", self.merge_gate, (True, False))
        check_seed("cam", self.seed)
        check_int("cam", "reach", self.reach, 1)
        summed = self.merge_keys and self.merge == "window"
        check(not summed, "cam", "merge_keys", 'must be False with `merge` "window", which adds', self.merge_keys)
        if self.merge_keys:
            warn("cam: `merge_keys` blends keys that rotation may have turned differently")


@attrs.frozen
class CaMPolicy(MassPolicy):
    """Priority is the attention mass; a row that goes is first folded into rows that stay."""

    merge: str = "sim_weighted"
    merge_keys: bool = False
    merge_gate: bool = True
    seed: int = 42
    reach: int = 16
    halves: bool = False  # the newest half of the budget stays
    shard: Shard = WHOLE
    name = "cam"

    @property
    def folds(self) -> int:  # type: ignore[override]
        return {"drop": 0, "window": self.reach}.get(self.merge, 1)

    def protected(self, scene: Scene) -> mx.array:
        safe, limit = super().protected(scene), scene.limit[:, None, None]
        newest = mx.minimum(limit // 2, limit - self.shielded - 1) if self.halves else 0
        return safe | (scene.position >= scene.offset[:, None, None] - newest)

    def fold(
        self, memory: mx.array, scene: Scene, kept: Picked, lost: Picked
    ) -> tuple[mx.array, Shares, Shares | None]:
        """The gate compares masses as they were before the first of the lost rows folds."""
        mass, gone = of(memory, kept), of(memory, lost)
        places, leaving = self._open(scene, kept), mx.where(lost.valid, of(scene.position, lost), -1)
        if self.merge == "window":
            into = following(places, leaving, self.reach)
            others = mx.where(into, mass[..., None], 0).sum(axis=2) / mx.maximum(into.sum(axis=2), 1)
            return mass, added(into & self._passes(others, gone, leaving)[:, :, None]), None
        target, weight = self._nearest(scene, places, kept, lost)
        taken = lost.valid & (pick(places, target) >= 0) & self._passes(pick(mass, target), gone, leaving)
        if gone.shape[2] == 1:
            into = (counting(mass.shape[2]) == target) & taken
            mass, shares = mx.where(into, mass + gone, mass), blended_one(target, taken, weight)
        else:
            into = (counting(mass.shape[2])[:, None] == target[:, :, None]) & taken[:, :, None]
            mass = mass + mx.where(into, gone[:, :, None], 0).sum(axis=-1)
            shares = blended(into, weight)
        return mass, shares, shares if self.merge_keys else None

    def _open(self, scene: Scene, kept: Picked) -> mx.array:
        """Positions int32 [B, H, K] of the kept rows that may take others in, -1 for the rest."""
        fixed = attrs.evolve(self, recent=0, halves=False).protected(scene)
        return mx.where(kept.valid, of(mx.where(fixed, -1, scene.position), kept), -1)

    def _nearest(self, scene: Scene, places: mx.array, kept: Picked, lost: Picked) -> tuple[mx.array, mx.array]:
        """The open row of most similar key, int [B, H, R] (of equal ones the oldest), and its weight [B, H, R]."""
        keys = scene.keys().astype(mx.float32)
        shrink = _shrink((keys * keys).sum(axis=-1))
        staying, leaving, shorter = of(keys, kept), of(keys, lost), of(shrink, kept)
        target = victim_row(-likeness(leaving, staying, shorter), places[:, :, None], latest=True)[..., 0]
        if self.merge == "mean":
            return target, mx.full(lost.index.shape, 0.5)
        # Anew for each pair: the last bits of a matrix product depend on its size, and so on padding.
        cosine = (leaving * pick(staying, target)).sum(axis=-1) * of(shrink, lost) * pick(shorter, target)
        return target, mx.where(cosine > 0, mx.minimum(cosine, 1), 0)

    def _passes(self, others: mx.array, gone: mx.array, position: mx.array) -> mx.array:
        """Bool [B, H, R], Bernoulli: the mass `gone` of a lost row over the one that `others` have, at most 1."""
        if not self.merge_gate:
            return position >= 0
        chance = mx.where(others > 0, gone / others, gone > 0)
        heads = hashed_heads(*(self.seed + (head << 32) for head in self.shard.heads(position.shape[1])))
        return uniform(hashed(heads, position)) < chance


def likeness(leaving: mx.array, staying: mx.array, shrink: mx.array) -> mx.array:
    """Float32 [B, H, R, K]: keys `leaving` [B, H, R, D] times `shrink` [B, H, K] of the keys `staying` [B, H, K, D]."""
    shrink = shrink[:, :, None]
    return mx.where(shrink > 0, (leaving @ staying.swapaxes(-1, -2)) * shrink, 0)


def _shrink(squares: mx.array) -> mx.array:
    """One over the length of rows whose numbers have the sum of `squares`; 0 for zeros, NaN and infinities."""
    return mx.where((squares > 0) & (squares < mx.inf), mx.rsqrt(squares), 0)


def following(places: mx.array, leaving: mx.array, reach: int) -> mx.array:
    """Bool [B, H, K, R]: of the rows at `places` [B, H, K] the `reach` next ones after each of `leaving` [B, H, R]."""
    rank = mx.argsort(token_order(places), axis=-1)[..., None]
    usable, gone = (places >= 0)[..., None], leaving[:, :, None]
    ahead = rank - (usable & (places[..., None] < gone)).sum(axis=2, keepdims=True)
    return usable & (gone >= 0) & (ahead >= 0) & (ahead < reach)


def added(into: mx.array) -> Shares:
    """Each lost row shared out evenly among the rows `into` bool [B, H, K, R] that take it in."""
    count = mx.maximum(into.sum(axis=2, keepdims=True), 1)
    return Shares(mx.ones(into.shape[:3]), into / count)


def blended(into: mx.array, weight: mx.array) -> Shares:
    """v <- (1 - w) v + w v_e for one lost row after the other, as one sum; `weight` float32 [B, H, R]."""
    weight = weight[:, :, None]
    stays = mx.where(into, 1 - weight, 1)
    later = mx.cumprod(stays, axis=-1, reverse=True, inclusive=False)
    return Shares(stays.prod(axis=-1), mx.where(into, weight * later, 0))


def blended_one(target: mx.array, taken: mx.array, weight: mx.array) -> Shares:
    """`blended` for a single lost row, in the row `target` int [B, H, 1] if it is `taken` bool [B, H, 1]."""
    weight = mx.where(taken, weight, 0)
    return Shares(1 - weight, weight[..., None], target)


def cam_policy(**options: Any) -> CaMPolicy:
    """Rows with the most attention mass stay and take others in; options as in CaMOptions."""
    o = CaMOptions(**options)
    more = (o.merge, o.merge_keys, o.merge_gate, o.seed, o.reach, o.recent is None)
    return CaMPolicy(o.budget, o.n_sink, o.recent or 0, o.protect, 1.0, *more)


def cam(**options: Any) -> Transform:
    """Evict by attention mass and merge; rows that take nothing in stay as they came."""
    return chain(cam_policy(**options), rows(), name="cam")
