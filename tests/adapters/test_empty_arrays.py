"""Compiled steps do no arithmetic on empty arrays: MLX's CUDA kernels can't be launched on nothing."""

from typing import Any

import mlx.core as mx
import pytest
from models import ALONE, TRANSFORMS

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_adapters.steps import steps
from vq_functional.core import jit

# Primitives that move no number, or that MLX leaves out where there is none.
VIEWS = {"Arange", "Broadcast", "Concatenate", "ExpandDims", "Flatten", "Full", "Reshape", "Slice", "Split", "Squeeze"}

LONG = {"anchorkv without residuals": vq.anchorkv()}  # 512 tokens have none by default


def rows(heads: int, n: int) -> mx.array:
    return mx.random.normal((1, heads, n, 64)).astype(mx.float16)


@pytest.mark.parametrize("hooked", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", [*TRANSFORMS, *LONG])
def test_no_step_computes_on_nothing(name: str, hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def look(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and node["name"] not in VIEWS and any(0 in out[1] for out in node["outputs"]):
            found.add(node["name"])

    def watched(self: Any) -> None:
        compiled = mx.compile(self._flat)

        def step(*leaves: mx.array) -> Any:
            mx.export_function(look, self._flat, *leaves)
            return compiled(*leaves)

        self.step = step

    monkeypatch.setattr(jit._Trace, "__attrs_post_init__", watched)
    steps.cache_clear()
    transform = {**TRANSFORMS, **LONG}[name]
    for prompt in (512,) if name in LONG else (3, 40):
        cache = TransformKVCache(ALONE.get(transform, transform))
        for n in (prompt, 1, 1, 1):
            keys, values = cache.update_and_fetch(rows(4, n), rows(4, n))
            if hooked:
                mx.eval(cache.attend(rows(8, n), keys, values, 0.125, mask="causal" if n > 1 else None))
            mx.eval(cache.state)
    steps.cache_clear()
    assert not found
