"""Law: evaluating what a call returns is enough; no part of the state stays behind as an ever longer graph."""

import io

import mlx.core as mx
import pytest

from laws.common import SPEC, Subject, keys_and_values, over, tokens
from vq_adapters import TransformKVCache
from vq_functional.core.tree import flatten


def pending(cache: TransformKVCache) -> int:
    """Size of the graph that the state still has to compute."""
    text = io.StringIO()
    mx.export_to_dot(text, *flatten(cache._state)[0])
    return text.getvalue().count("->")


@over()
@pytest.mark.parametrize("attends", [False, True], ids=["fetched", "attended"])
def test_pending_work_does_not_grow(subject: Subject, attends: bool) -> None:
    cache, sizes = TransformKVCache(subject.transform), []
    keys, values = keys_and_values(SPEC, 70)
    for start, n in [(0, 40), *((i, 1) for i in range(40, 63))]:
        out = cache.update_and_fetch(keys[:, :, start : start + n], values[:, :, start : start + n])
        if attends:
            queries = tokens(n, start, heads=4)
            mx.eval(cache.attend(queries, *out, 0.125, None if n == 1 else "causal"))
        else:
            mx.eval(out[0])
        sizes.append(pending(cache))
    assert max(sizes[12:]) <= max(sizes[2:12])
