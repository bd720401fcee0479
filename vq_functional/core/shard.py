"""Tensor parallel: the part of the heads of every layer that a process holds, and what it asks of the others."""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.describe import Described
from vq_functional.core.errors import check

_GROUPS: dict["Shard", Any] = {}  # that models were split by; in place of any other there is the global group


@attrs.frozen
class Shard(Described):
    """The place `rank` of this process among the `size` that share the heads of each layer evenly and in order."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> "Shard":
        """The place of this process in an `mx.distributed` group."""
        shard = cls(group.rank(), group.size())
        _GROUPS[shard] = group
        return shard

    def heads(self, count: int) -> range:
        """The numbers, among all heads of a layer, of the `count` heads here."""
        return range(self.rank * count, (self.rank + 1) * count)

    def gathered(self, x: mx.array, axis: int = 1) -> mx.array:
        """`x` of all processes, one behind the other along `axis`. Each must ask for it, in the same order.

        Raises QuantizerConfigError where there are not as many processes as the model was split for.
        """
        if self.size == 1:
            return x
        group = _GROUPS.get(self) or mx.distributed.init()
        rule = f"must have the {self.size} processes that share the heads of a layer"
        check(group.size() == self.size, "shard", "group", rule, group.size())
        return mx.distributed.all_gather(x.swapaxes(0, axis), group=group).swapaxes(0, axis)


WHOLE = Shard()


def sharded(transform: Any, shard: Shard) -> Any:
    """The method for a part of the heads: what looks at all heads of a layer looks at those of all processes.

    Raises QuantizerConfigError where a method can't, with the reason (`indivisible`).
    """
    return _placed(transform, shard, transform.name)


def _placed(part: Any, shard: Shard, name: str) -> Any:
    if isinstance(part, Shard):
        return shard
    if not attrs.has(type(part)):
        return part
    reason = getattr(part, "indivisible", None)
    check(reason is None, name, "model", f"can't be split by heads: {reason}", shard.size)
    old = {field.name: getattr(part, field.name) for field in attrs.fields(type(part)) if field.init}
    new = {field: _placed(value, shard, name) for field, value in old.items()}
    changed = {field: value for field, value in new.items() if value is not old[field]}
    return attrs.evolve(part, **changed) if changed else part
