"""Q-Filters: keep the keys that point where the queries of their head point (arXiv 2503.02812).

The filter of a KV head is one direction: the leading one of its queries, given
by `with_direction` or found from the first real queries of a sequence. Without
queries minus the mean key stands in, or the axis along which the keys vary
most. It is found while everything is still held, and never changes afterwards.

Differs from the paper: filters may be found in the sequence itself; the first
`n_sink` rows are kept.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_choice, check_int, check_number
from vq_functional.core.policy import Policy, Scene, Spans, check_policy, protect_field
from vq_functional.core.spec import KVSpec
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain
from vq_functional.evict.slots import SlotState
from vq_functional.ops.attention import logits
from vq_functional.ops.rows import read_rows
from vq_functional.ops.softmax import LOWEST
from vq_functional.ops.vectors import TINY, unit

SQUARINGS = 12  # the second direction fades by the ratio of the two eigenvalues to the power of 2**12
ITERATIONS = 2  # of the power method, at a single token


@attrs.frozen(kw_only=True)
class QFiltersOptions:
    """`budget` counts every kept row, sinks and recent rows included.

    A filter that is not given is found once `calib_tokens` tokens have come, or
    as many as the budget holds. Where queries are unknown, `stand_in` takes
    their place: "mean" is minus the mean key, "axis" the leading axis of the
    keys' covariance. `sign` -1 keeps what points the other way.
    `min_retention` and `on_low_retention` are for caches that warn: below this
    share of kept tokens "warn", "raise" or "ignore"; they change no row.
    """

    budget: int = 512
    n_sink: int = 4
    recent: int = 0
    calib_tokens: int = 128
    stand_in: str = "mean"
    sign: int = 1
    min_retention: float | None = 0.9
    on_low_retention: str = "warn"
    protect: Spans = protect_field("qfilters")

    def __attrs_post_init__(self) -> None:
        check_policy("qfilters", self.budget, self.n_sink, self.recent, self.protect)
        check_int("qfilters", "calib_tokens", self.calib_tokens, 2)
        check_choice("qfilters", "stand_in", self.stand_in, ("mean", "axis"))
        check_choice("qfilters", "sign", self.sign, (1, -1))
        if self.min_retention is not None:
            check_number("qfilters", "min_retention", self.min_retention, 0, 1)
        check_choice("qfilters", "on_low_retention", self.on_low_retention, ("warn", "raise", "ignore"))


@attrs.frozen
class Filters:
    """One direction a head; zeros rank nothing, so that the latest rows stay."""

    direction: mx.array  # float32 [B, H, D]: a unit vector once found; before, what the calls so far say
    frozen: mx.array  # bool [B]: it never changes again


@attrs.frozen
class QFiltersPolicy(Policy):
    """Priority is the projection of a key on its head's direction; nothing is remembered of a row.

    `min_retention` and `on_low_retention` are read by caches and change no row.
    """

    calib_tokens: int = 128
    sign: int = 1
    min_retention: float | None = None
    on_low_retention: str = "ignore"
    stand_in: str = "mean"
    name = "qfilters"
    learns_early = True

    def init_carry(self, spec: KVSpec) -> Filters:
        direction = mx.zeros((spec.batch, spec.kv_heads, spec.key_dim), mx.float32)
        return Filters(direction, mx.zeros((spec.batch,), mx.bool_))

    def carry_on(self, scene: Scene) -> Filters:
        old = scene.carry.direction
        told = _told_by_keys(scene, self.stand_in) if scene.proxy else _told_by_queries(scene)
        learns = ~scene.carry.frozen & (scene.tokens > 0)
        sound = mx.isfinite(told).all(axis=-1, keepdims=True)
        direction = mx.where(learns[:, None, None] & sound, told, old)
        due = scene.offset >= mx.maximum(mx.minimum(self.calib_tokens, scene.limit), 2)
        freezes = learns & due
        direction = mx.where(freezes[:, None, None], unit(direction), direction)
        return Filters(direction, scene.carry.frozen | freezes)

    def score(self, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        return memory, self.rank(memory, scene)

    def rank(self, memory: Any, scene: Scene) -> mx.array:
        projection = logits(scene.key_parts, scene.carry.direction[:, :, None], 1.0)[:, :, 0, 0]
        return mx.where(mx.isfinite(projection), self.sign * projection, LOWEST)


def _told_by_queries(scene: Scene) -> mx.array:
    """The directions of all calls' queries, added up by their numbers of tokens."""
    found = qfilters_direction(_sound_queries(scene), scene.position.shape[1])
    return scene.carry.direction + scene.tokens[:, None, None] * found


def _sound_queries(scene: Scene) -> mx.array:
    """This call's queries in float32; zeros for padding and where a number is not finite."""
    known = (scene.query_position >= 0)[:, None, :, None]
    queries = scene.queries.astype(mx.float32)
    return mx.where(known & mx.isfinite(queries).all(axis=-1, keepdims=True), queries, 0.0)


def _told_by_keys(scene: Scene, stand_in: str) -> mx.array:
    """What stands in for the direction of unknown queries."""
    return _minus_mean(scene) if stand_in == "mean" else _axis(scene)


def _minus_mean(scene: Scene) -> mx.array:
    """Minus the mean of all keys so far, as they came."""
    seen = mx.maximum(scene.offset, 1)[:, None, None]
    before = (1 - scene.tokens[:, None, None] / seen) * scene.carry.direction
    return before - (_sound_queries(scene) / seen[..., None]).sum(axis=2)


def _axis(scene: Scene) -> mx.array:
    """The axis along which the keys that are held vary most."""
    stepped = _step(scene)
    if scene.queries.shape[2] == 1:
        return stepped
    keys = scene.keys().astype(mx.float32)
    sound = (scene.position >= 0)[..., None] & mx.isfinite(keys).all(axis=-1, keepdims=True)
    count = mx.maximum(sound.sum(axis=2, keepdims=True), 1)
    keys = mx.where(sound, keys, 0.0)
    centred = mx.where(sound, keys - keys.sum(axis=2, keepdims=True) / count, 0.0)
    return mx.where((scene.tokens > 1)[:, None, None], _upright(_leading(centred)), stepped)


def _step(scene: Scene) -> mx.array:
    """The old axis after power iterations with the centred keys, straight from codes."""
    old = scene.carry.direction
    newest = read_rows(scene.queries, scene.lengths - 1, 1)[:, :, 0].astype(mx.float32)
    axis = unit(mx.where((old != 0).any(axis=-1, keepdims=True), old, newest))
    live = (scene.position >= 0)[:, :, None]
    count = mx.maximum(live.sum(axis=-1, keepdims=True), 1)
    for _ in range(ITERATIONS):
        along = mx.where(live, logits(scene.key_parts, axis[:, :, None], 1.0)[:, :, 0], 0.0)
        # Weights that add up to zero centre the keys that they multiply.
        weights = mx.where(live, along - along.sum(axis=-1, keepdims=True) / count, 0.0)
        axis = unit(scene.key_parts[0].mix(weights)[:, :, 0])
    return _upright(axis)


def _leading(x: mx.array) -> mx.array:
    """Leading right singular vector [..., D] of float32 `x` [..., S, D], on either side; zeros for zeros."""
    x = x / mx.maximum(mx.abs(x).max(axis=(-2, -1), keepdims=True), TINY)
    moment = x.swapaxes(-1, -2) @ x
    for _ in range(SQUARINGS):
        moment = moment / mx.maximum(mx.abs(moment).max(axis=(-2, -1), keepdims=True), TINY)
        moment = moment @ moment
    column = mx.argmax(mx.diagonal(moment, axis1=-2, axis2=-1), axis=-1)
    return unit(mx.take_along_axis(moment, column[..., None, None], axis=-1)[..., 0])


def _upright(axis: mx.array) -> mx.array:
    """The axis with its largest component positive."""
    largest = mx.take_along_axis(axis, mx.argmax(mx.abs(axis), axis=-1, keepdims=True), axis=-1)
    return mx.where(largest < 0, -axis, axis)


def qfilters_direction(queries: mx.array, kv_heads: int) -> mx.array:
    """The filters float32 [H, D] of `queries` [Hq, S, D], or [B, H, D] of [B, Hq, S, D]; rotated as keys are.

    The leading direction of each head's queries, on the side of their mean,
    averaged over the heads of a KV head. Join the queries of several texts
    along S. Raises QuantizerConfigError where the heads don't fit.
    """
    check_int("qfilters", "kv_heads", kv_heads, 1)
    fits = queries.ndim in (3, 4) and queries.shape[-3] % kv_heads == 0
    check(fits, "qfilters", "queries", f"must be [B, multiple of {kv_heads}, S, D]", queries.shape)
    queries = queries.astype(mx.float32)
    mean = queries.sum(axis=-2)
    axis = unit(mean) if queries.shape[-2] == 1 else _leading(queries)
    axis = mx.where((axis * mean).sum(axis=-1, keepdims=True) < 0, -axis, axis)
    grouped = axis.reshape(*axis.shape[:-2], kv_heads, -1, axis.shape[-1])
    return unit(grouped.sum(axis=-2))


def with_direction(state: SlotState, direction: mx.array, sign: int = 1) -> SlotState:
    """The state with `sign` times `direction`, [H, D] or [B, H, D], as its filters for good.

    `sign` is -1 for filters that were stored pointing away from the queries.
    Raises QuantizerConfigError for other shapes.
    """
    check(isinstance(state.carry, Filters), "qfilters", "state", "must be one of qfilters", type(state.carry).__name__)
    check_choice("qfilters", "sign", sign, (1, -1))
    shape = state.carry.direction.shape
    check(direction.shape in (shape, shape[1:]), "qfilters", "direction", f"must be {shape[1:]}", direction.shape)
    full = mx.broadcast_to(sign * direction.astype(mx.float32), shape)
    return attrs.evolve(state, carry=Filters(full, mx.ones(shape[:1], mx.bool_)))


def qfilters_policy(**options: Any) -> QFiltersPolicy:
    """Rows stay whose keys point along their head's filter; options as in QFiltersOptions."""
    o = QFiltersOptions(**options)
    retention = (o.min_retention, o.on_low_retention)
    return QFiltersPolicy(o.budget, o.n_sink, o.recent, o.protect, o.calib_tokens, o.sign, *retention, o.stand_in)


def qfilters(**options: Any) -> Transform:
    """Evict by projection on a filter; kept rows stay as they came."""
    return chain(qfilters_policy(**options), rows(), name="qfilters")
