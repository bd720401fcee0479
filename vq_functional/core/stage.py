"""Pipeline parallel: the layers of a model that a process holds, and what these ask of the others."""

from collections.abc import Sequence
from typing import TypeVar

import attrs
import mlx.core as mx

from vq_functional.core.describe import Described
from vq_functional.core.errors import check

T = TypeVar("T")


@attrs.frozen
class Stage(Described):
    """The `own` layers of a process, behind `before` others, of `count` in all `size` processes."""

    before: int = 0
    own: int = 0
    count: int = 0
    size: int = 1

    def check_processes(self, name: str) -> None:
        """Refuse, for the method `name`, a model that was split over other processes than there are."""
        known = self.size in (1, mx.distributed.init().size())
        check(known, name, "model", "must be split over all processes, since its layers agree on something", self.size)

    def gathered(self, told: mx.array, held: Sequence[mx.array]) -> mx.array:
        """What all layers tell, float32 [B, layers], of what those here tell. Each process must ask for it.

        `held` is computed first: what a process sends to the next one is tied to it.
        """
        if self.size == 1:
            return told
        sides = (self.before, self.count - self.before - self.own)
        return mx.distributed.all_sum(mx.pad(mx.depends([told], list(held))[0], [(0, 0), sides]))

    def part(self, found: Sequence[T]) -> Sequence[T]:
        """Of what is found for all layers that of those here."""
        return found if self.size == 1 else found[self.before : self.before + self.own]


ALONE = Stage()
