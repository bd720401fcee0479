"""The rule that several methods share: the attention mass that a row has received decides."""

import attrs
import mlx.core as mx

from vq_functional.core.policy import Policy, Scene, Spans, spared
from vq_functional.evict.scoring import attention_mass
from vq_functional.ops.tables import counting, filled


@attrs.frozen
class MassPolicy(Policy):
    """Priority is the mass so far, float32 [B, H, slots]; `decay` multiplies it once a token."""

    decay: float = 1.0
    stride = 56

    def init(self, batch: int, heads: int, slots: int) -> mx.array:
        return mx.zeros((batch, heads, slots), mx.float32)

    def score(self, mass: mx.array, scene: Scene) -> tuple[mx.array, mx.array]:
        age = scene.lengths[:, None] - 1 - counting(scene.queries.shape[2])
        weights = mx.where(age >= 0, self._left_after(mx.maximum(age, 0)), 0.0)
        aged = self._left_after(scene.lengths)[:, None, None] * mass + attention_mass(scene, weights)
        return aged, self.rank(aged, scene)

    def _left_after(self, tokens: mx.array) -> mx.array:
        """What is left of a mass of 1 after so many tokens."""
        return filled(1.0, *tokens.shape) if self.decay == 1 else self.decay**tokens

    def rank(self, mass: mx.array, scene: Scene) -> mx.array:
        return mass


def newest(recent: int | None, budget: int | float, n_sink: int, protect: Spans) -> int:
    """Rows too new to be judged: `recent`, or 16 and at most half of what sinks and spans leave of the budget."""
    if recent is not None or isinstance(budget, float):
        return 16 if recent is None else recent
    return max(1, min(16, (budget - n_sink - spared(protect, n_sink)) // 2))
