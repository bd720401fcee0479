"""CaM: fold the value of an evicted row into rows that stay (cache merging, ICML 2024).

Rows are evicted by attention mass. `merge="window"` is the paper's rule: a row
that has more mass than those that follow it is likely to be added to them, a
share to each. The other rules blend its value into the one row with the most
similar key.

Differs from the paper: the first `n_sink` rows stay; a call of several tokens
evicts at its end, and merges into what is left then.
"""

import functools
import warnings
from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_choice, check_int
from vq_functional.core.policy import Picked, Scene, Shares, Spans, check_policy, protect_field
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.folding import of
from vq_functional.evict.mass import MassPolicy
from vq_functional.ops.rows import pick, token_order, victim_row

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
        check_int("cam", "seed", self.seed, 0, 2**64 - 1)
        check_int("cam", "reach", self.reach, 1)
        summed = self.merge_keys and self.merge == "window"
        check(not summed, "cam", "merge_keys", 'must be False with `merge` "window", which adds', self.merge_keys)
        if self.merge_keys:
            warnings.warn("cam: `merge_keys` blends keys that rotation may have turned differently", stacklevel=3)


@attrs.frozen
class CaMPolicy(MassPolicy):
    """Priority is the attention mass; a row that goes is first folded into rows that stay."""

    merge: str = "sim_weighted"
    merge_keys: bool = False
    merge_gate: bool = True
    seed: int = 42
    reach: int = 16
    halves: bool = False  # the newest half of the budget stays
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
            into, weight = following(places, leaving, self.reach), None
        else:
            into, weight = self._nearest(scene, places, kept, lost)
        into = into & self._passes(into, mass, gone, leaving)[:, :, None]
        if weight is None:
            return mass, added(into), None
        shares = blended(into, weight)
        mass = mass + mx.where(into, gone[:, :, None], 0).sum(axis=-1)
        return mass, shares, shares if self.merge_keys else None

    def _open(self, scene: Scene, kept: Picked) -> mx.array:
        """Positions int32 [B, H, K] of the kept rows that may take others in, -1 for the rest."""
        fixed = attrs.evolve(self, recent=0, halves=False).protected(scene)
        return mx.where(kept.valid, of(mx.where(fixed, -1, scene.position), kept), -1)

    def _nearest(self, scene: Scene, places: mx.array, kept: Picked, lost: Picked) -> tuple[mx.array, mx.array]:
        """The open row of most similar key, bool [B, H, K, R] (of equal ones the oldest), and its weight [B, H, R]."""
        keys = scene.keys()
        staying, leaving = of(keys, kept).astype(mx.float32), of(keys, lost).astype(mx.float32)
        target = victim_row(-likeness(leaving, staying), places[:, :, None], latest=True)
        columns = mx.arange(places.shape[2])[:, None]
        into = (columns == target[:, :, None]) & (places >= 0)[..., None] & lost.valid[:, :, None]
        if self.merge == "mean":
            return into, mx.full(lost.index.shape, 0.5)
        # Anew for each pair: the last bits of a matrix product depend on its size, and so on padding.
        return into, mx.clip(cosine(leaving, pick(staying, target)), 0, 1)

    def _passes(self, into: mx.array, mass: mx.array, gone: mx.array, position: mx.array) -> mx.array:
        """Bool [B, H, R], Bernoulli: a lost row's mass over the mean of its targets', at most 1."""
        if not self.merge_gate:
            return position >= 0
        count = mx.maximum(into.sum(axis=2), 1)
        others = mx.where(into, mass[..., None], 0).sum(axis=2) / count
        chance = mx.where(others > 0, gone / others, gone > 0)
        return self._noise(position) < chance

    def _noise(self, position: mx.array) -> mx.array:
        """Uniform float32 [B, H, R] in [0, 1) that follows from seed, head and position alone."""
        heads = _head_keys(self.seed, position.shape[1])
        keys = heads[:, None] + position.astype(mx.uint32)[..., None] * mx.array([0, 1], mx.uint32)
        draw = mx.vmap(lambda key: mx.random.uniform(key=key))
        return draw(keys.reshape(-1, 2)).reshape(position.shape)


@functools.lru_cache(maxsize=64)
def _head_keys(seed: int, heads: int) -> mx.array:
    """A random key uint32 [H, 2] a head."""
    keys = mx.random.split(mx.random.key(seed), heads)
    mx.eval(keys)  # a table, so that a trace holds it and not how it is made
    return keys


def likeness(leaving: mx.array, staying: mx.array) -> mx.array:
    """Float32 [B, H, R, K]: keys `leaving` [B, H, R, D] times the directions of the keys `staying` [B, H, K, D]."""
    shrink = _shrink((staying * staying).sum(axis=-1))[:, :, None]
    return mx.where(shrink > 0, (leaving @ staying.swapaxes(-1, -2)) * shrink, 0)


def cosine(x: mx.array, y: mx.array) -> mx.array:
    """Float32 [...] of the rows of `x` and `y` [..., D]; 0 for a row without direction."""
    pair = mx.stack([x, y])
    shrink = _shrink((pair * pair).sum(axis=-1))
    return mx.where(shrink[0] * shrink[1] > 0, (x * y).sum(axis=-1) * shrink[0] * shrink[1], 0)


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
    if into.shape[3] == 1:
        return Shares(stays[..., 0], mx.where(into, weight, 0))
    later = mx.cumprod(stays, axis=-1, reverse=True, inclusive=False)
    return Shares(stays.prod(axis=-1), mx.where(into, weight * later, 0))


def cam_policy(**options: Any) -> CaMPolicy:
    """Rows with the most attention mass stay and take others in; options as in CaMOptions."""
    o = CaMOptions(**options)
    more = (o.merge, o.merge_keys, o.merge_gate, o.seed, o.reach, o.recent is None)
    return CaMPolicy(o.budget, o.n_sink, o.recent or 0, o.protect, 1.0, *more)


def cam(**options: Any) -> Transform:
    """Evict by attention mass and merge; rows that take nothing in stay as they came."""
    return chain(cam_policy(**options), rows(), name="cam")
