"""Memory: what a cache holds is what it says, steps work in place, and nothing piles up."""

import contextlib
import copy
import gc
import io
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from models import COMPOSED, TRANSFORMS, build, cache_list, tokens

import vq_functional as vq
from vq_adapters import TransformKVCache, attention_hook
from vq_adapters.hook import hooked
from vq_functional.core.transform import Transform
from vq_functional.crosslayer.stack import Stack
from vq_functional.methods import METHODS
from vq_functional.ops import tables

HEADS, QUERY_HEADS, DIM = 2, 4, 64
ROOM = 96 * 1024  # bytes: allocator rounding and what one call needs beside the buffers
PROMPT = 1024

# Budgets of a size at which a copy of the whole state would be seen.
LARGE: dict[str, Transform] = {
    "streaming_llm": vq.streaming_llm(n_sink=4, window_size=1000),
    "h2o": vq.h2o(budget=1000),
    "snapkv": vq.snapkv(budget=1000),
    "tova": vq.tova(budget=1000),
    "chunkkv": vq.chunkkv(budget=1000),
    "cam": vq.cam(budget=1000),
    "knorm": vq.knorm(budget=1000),
    "morphkv": vq.morphkv(budget=1000),
    "nestedkv": vq.nestedkv(budget=1000),
    "rocketkv": vq.rocketkv(compression_ratio=2.0),
    "kivi": vq.kivi(bits=2, group_size=32, residual_length=32),
    "turboquant_mse": vq.turboquant_mse(bits=4),
    "turboquant_rvq": vq.turboquant_rvq(bits=2, value_bits=8),
    "qjl": vq.qjl(),
    COMPOSED: vq.chain(vq.h2o_policy(budget=1000), vq.rows(key=vq.turboquant_mse_codec(bits=4), value=vq.int8_codec())),
    "sliding_window": vq.sliding_window(window_size=1000),
    "rows": vq.rows(),
}
# Methods that score all their rows for each token need room for the scores beside their buffers.
UNSCORED = [name for name in LARGE if name not in ("h2o", "tova", "chunkkv", "cam", "morphkv", COMPOSED)]
GROWING = [name for name in UNSCORED if name not in ("streaming_llm", "knorm", "sliding_window")]
attention = hooked(mx.fast.scaled_dot_product_attention)


@pytest.fixture(autouse=True)
def clean() -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


def active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def random(seed: int, heads: int, n: int) -> mx.array:
    return mx.random.normal((1, heads, n, DIM), key=mx.random.key(seed))


def update(cache: TransformKVCache, seed: int, n: int = 1) -> None:
    """One call without attention; all that the cache holds is evaluated."""
    cache.update_and_fetch(random(seed, HEADS, n), random(seed + 1, HEADS, n))
    mx.eval(cache.state)


def step(cache: TransformKVCache, seed: int, n: int = 1) -> mx.array:
    """One call with attention through the hook; only its result is evaluated, as in generation."""
    mask = cache.make_mask(n)
    keys, values = cache.update_and_fetch(random(seed, HEADS, n), random(seed + 1, HEADS, n))
    out = attention(random(seed + 2, QUERY_HEADS, n), keys, values, cache=cache, scale=DIM**-0.5, mask=mask)
    mx.eval(out)
    return out


def reachable(node: Any, seen: dict[int, Any]) -> dict[int, mx.array]:
    """All arrays that can be reached from an object, each once."""
    if id(node) in seen or isinstance(node, (str, bytes, int, float, type, type(None))):
        return {}
    seen[id(node)] = node
    if isinstance(node, mx.array):
        return {id(node): node}
    if isinstance(node, dict):
        children = [*node.keys(), *node.values()]
    elif isinstance(node, (list, tuple, set, frozenset)):
        children = list(node)
    elif attrs.has(type(node)):
        children = [getattr(node, field.name) for field in attrs.fields(type(node))]
    else:
        children = list(vars(node).values()) if hasattr(node, "__dict__") else []
    found: dict[int, mx.array] = {}
    for child in children:
        found |= reachable(child, seen)
    return found


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nbytes_is_all_that_can_be_reached(name: str) -> None:
    cache = TransformKVCache(TRANSFORMS[name])
    for seed, n in enumerate((40, 1, 1, 7, *[1] * 70)):
        step(cache, seed, n)
        if seed % 10 == 0:
            claimed = cache.nbytes
            assert claimed == sum(array.nbytes for array in reachable(cache, {}).values())
            assert claimed == sum(array.nbytes for array in cache.state[1:])


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_short_calls_leave_no_room_behind(name: str) -> None:
    """A share of the prompt, in many calls, holds what it holds in one."""
    short, long = (TransformKVCache(vq.METHODS[name].build(budget=0.1, n_sink=1)) for _ in range(2))
    for seed in range(60):
        update(short, seed, 2)
    update(long, 0, 120)
    assert short.size() == long.size() and short.nbytes <= long.nbytes


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nbytes_evaluates_nothing(name: str) -> None:
    cache = TransformKVCache(TRANSFORMS[name])
    cache.update_and_fetch(random(0, HEADS, 20), random(1, HEADS, 20))
    before = mx.get_active_memory()
    assert isinstance(cache.nbytes, int) and cache.nbytes > 0
    assert mx.get_active_memory() - before < 4096, "no rows, only numbers that a lazy graph begins with"


@pytest.mark.parametrize("name", LARGE)
def test_resident_bytes_are_the_claimed_ones(name: str) -> None:
    """No shadow copy of what was compressed, neither after a prompt nor after single tokens."""
    for table in (tables.filled, tables.first_rows, tables._counting):
        table.cache_clear()  # so that none has to go while bytes are counted
    step(TransformKVCache(LARGE[name]), 0, 64)  # makes the tables
    before = active()
    cache = TransformKVCache(LARGE[name])
    for seed, n in enumerate((PROMPT // 2, PROMPT // 2, 1, 1, 1)):
        step(cache, seed, n)
        claimed = cache.nbytes
        mx.eval(cache.state)
        assert claimed <= active() - before <= claimed + ROOM
    if name in METHODS and "packs" in METHODS[name].traits:
        assert claimed < 0.7 * cache.offset * HEADS * 2 * DIM * mx.float16.size


@pytest.mark.parametrize("name", UNSCORED)
def test_single_tokens_are_written_in_place(name: str) -> None:
    """The peak of a call stays far below the state, save where a growing store moves into larger arrays."""
    cache = TransformKVCache(LARGE[name])
    update(cache, 0, 4 * PROMPT)
    for seed in range(3):
        update(cache, seed)
    peaks, size = [], cache.nbytes
    for seed in range(100):
        mx.reset_peak_memory()
        start = mx.get_active_memory()
        update(cache, seed)
        if size == cache.nbytes:
            peaks.append(mx.get_peak_memory() - start)
        size = cache.nbytes
    assert len(peaks) >= 95
    assert max(peaks) < size / 2


@pytest.mark.parametrize("name", GROWING)
def test_growing_takes_no_more_than_both_sizes(name: str) -> None:
    cache = TransformKVCache(LARGE[name])
    update(cache, 0, PROMPT)
    start, size = active() - cache.nbytes, cache.nbytes
    mx.reset_peak_memory()
    for seed in range(130):
        update(cache, seed)
    assert cache.nbytes > size
    assert mx.get_peak_memory() - start < 2 * cache.nbytes + ROOM


@pytest.mark.parametrize("name", LARGE)
def test_the_peak_of_decoding_is_flat(name: str) -> None:
    cache, halves = TransformKVCache(LARGE[name]), []
    step(cache, 0, PROMPT)
    for _ in range(2):
        peaks = []
        for seed in range(50):
            start = mx.get_active_memory()
            mx.reset_peak_memory()
            step(cache, seed)
            peaks.append(mx.get_peak_memory() - start)
        # How many temporaries live at once depends on how far MLX's threads are apart, so the least are compared.
        halves.append(min(peaks))
    # What attention needs follows the rows, of which there may be 50 more.
    assert halves[1] < halves[0] * 1.1 + ROOM


def pending(arrays: Any) -> int:
    """Operations that are still to be done before the arrays are known."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


@pytest.mark.parametrize("with_hook", [False, True], ids=["arrays", "hooked"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_piles_up_while_only_logits_are_evaluated(name: str, with_hook: bool) -> None:
    transform = TRANSFORMS[name]
    model = build("llama", num_hidden_layers=transform.layers if isinstance(transform, Stack) else 1)
    caches, marks = cache_list(model, transform), []
    with attention_hook(model) if with_hook else contextlib.nullcontext():
        model(mx.array([tokens(40)]), cache=caches)
        for i in range(150):
            mx.eval(model(mx.array([[i % 90]]), cache=caches))
            if i in (49, 149):
                nodes = pending([array for cache in caches for array in cache.state[1:]])
                marks.append((active() - sum(cache.nbytes for cache in caches), nodes))
    (bytes_then, nodes_then), (bytes_now, nodes_now) = marks
    assert bytes_now - bytes_then < 24 * 1024
    assert nodes_now == nodes_then


@pytest.mark.parametrize("name", TRANSFORMS)
def test_dropped_caches_leave_nothing(name: str) -> None:
    model, prompt = build("llama", num_hidden_layers=1), mx.array(tokens(40))

    def answer() -> None:
        caches = cache_list(model, TRANSFORMS[name])
        steps = generate_step(prompt, model, max_tokens=2, prompt_cache=caches, prefill_step_size=20)
        assert len(list(steps)) == 2

    answer()
    before = active()
    for _ in range(20):
        answer()
    assert active() - before < 6 * 1024


@pytest.mark.parametrize("name", LARGE)
def test_copies_share_what_does_not_change(name: str) -> None:
    cache = TransformKVCache(LARGE[name])
    step(cache, 0, PROMPT)
    mx.eval(cache.state)
    before = active()
    copies = [copy.deepcopy(cache) for _ in range(5)]
    assert active() - before < 1024
    step(copies[0], 7)
    mx.eval(copies[0].state)
    assert active() - before < copies[0].nbytes + ROOM
