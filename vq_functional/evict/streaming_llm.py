"""StreamingLLM: keep the first tokens (attention sinks) and a window of the newest (arXiv 2309.17453).

Differs from the paper: keys keep the rotation of their true position; the
paper numbers them anew inside the cache. A call of several tokens attends to
all of them before the window closes.
"""

from typing import Any

import attrs
import mlx.core as mx

from vq_functional.core.errors import check, check_int
from vq_functional.core.policy import Policy, Scene, Spans, protect_field, spared
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.evict.chain import chain


@attrs.frozen(kw_only=True)
class StreamingLLMOptions:
    """`n_sink` first positions and `window_size` newest rows are kept."""

    n_sink: int = 4
    window_size: int = 512
    protect: Spans = protect_field("streaming_llm")

    def __attrs_post_init__(self) -> None:
        check_int("streaming_llm", "n_sink", self.n_sink, 0)
        check_int("streaming_llm", "window_size", self.window_size, 0)
        rule = "and `n_sink` must not both be 0"
        check(self.n_sink + self.window_size > 0, "streaming_llm", "window_size", rule, self.window_size)


@attrs.frozen
class StreamingLLMPolicy(Policy):
    """The newest position has the highest priority."""

    name = "streaming_llm"

    def score(self, memory: Any, scene: Scene) -> tuple[Any, mx.array]:
        return memory, (scene.position - scene.offset[:, None, None]).astype(mx.float32)


def streaming_llm_policy(**options: Any) -> StreamingLLMPolicy:
    """Sinks and the newest rows stay; options as in StreamingLLMOptions."""
    o = StreamingLLMOptions(**options)
    return StreamingLLMPolicy(o.n_sink + o.window_size + spared(o.protect, o.n_sink), o.n_sink, 0, o.protect)


def streaming_llm(**options: Any) -> Transform:
    """Evict all but sinks and the newest rows; kept rows stay as they came."""
    return chain(streaming_llm_policy(**options), rows(), name="streaming_llm")
