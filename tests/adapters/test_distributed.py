"""Caches in several processes: tensor parallel and pipeline parallel generation equal that of one process.

As a script it is one of the processes: `mlx.launch -n 2 python test_distributed.py pipeline <folder>`.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openblas import use_openblas

use_openblas()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from models import TRANSFORMS, build, in_place, tokens, tolerance

import distributed
import vq_functional as vq
from vq_adapters import (
    CacheGenOptions,
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    MiniCacheOptions,
    PALUOptions,
    PyramidKVOptions,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    XQuantOptions,
    attention_hook,
)
from vq_adapters.group import LayerGroup
from vq_functional import QuantizerConfigError
from vq_functional.core.describe import describe, restore
from vq_functional.core.shard import Shard, sharded
from vq_functional.evict.pyramidkv import pyramid_budgets
from vq_functional.methods import METHODS

ROOT = Path(__file__).parents[2]
LAYERS, PROCESSES, BUDGET, SECONDS = 4, 2, 24, 120
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT, CHUNK, COUNT = 150, 64, 4  # three chunks, of which nobody asks for the logits

H2O = KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=BUDGET, h2o_n_sink=2, h2o_grace=4))
KIVI = KVCacheConfig(method="kivi", bit_width_inlier=4, residual_length=8)
PYRAMID = KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=BUDGET, pyramid_n_sink=2))
ROTATED = KVCacheConfig(method="turboquant_mse", bit_width_inlier=3)
SQUEEZE = KVCacheConfig(
    method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=BUDGET, squeeze_n_sink=2, squeeze_strength=1.0)
)
STREAMING = KVCacheConfig(
    method="streaming_llm", options=StreamingLLMOptions(stream_n_sink=2, stream_window_size=BUDGET - 2)
)
XQUANT = KVCacheConfig(method="xquant", options=XQuantOptions())

# Configuration and whether the attention hook is installed.
CASES: dict[str, tuple[KVCacheConfig | vq.Transform, bool]] = {
    "h2o": (H2O, True),
    "h2o by keys": (H2O, False),
    "kivi": (KIVI, True),
    "kivi decoded": (KIVI, False),
    "pyramidkv": (PYRAMID, True),
    "squeeze": (SQUEEZE, True),
    "streaming_llm": (STREAMING, True),
    "turboquant_mse": (ROTATED, True),
    "xquant": (XQUANT, True),
}

# What looks at all heads of a layer, and in a process at those of all.
ALL_HEADS: dict[str, tuple[KVCacheConfig | vq.Transform, bool]] = {
    "cam": (vq.cam(budget=BUDGET, n_sink=2, recent=4), True),
    "cam by keys": (vq.cam(budget=BUDGET, n_sink=2, recent=4), False),
    "keyformer": (vq.keyformer(budget=BUDGET, n_sink=2), True),
    "keyformer by keys": (vq.keyformer(budget=BUDGET, n_sink=2), False),
    "kivi_sink": (vq.kivi_sink(bits=4, residual_length=8, n_sink=3, sink_signal="large_keys"), True),
    "palu": (vq.palu(hi_bit=8, lo_bit=8), True),
    "squeeze": (SQUEEZE, True),
    "tova": (vq.tova(budget=BUDGET, n_sink=2), True),
    "tova by keys": (vq.tova(budget=BUDGET, n_sink=2, share_heads=True), False),
}

BY_HEADS = {**{name: CASES[name] for name in ("h2o", "kivi", "turboquant_mse", "xquant")}, **ALL_HEADS}

# Methods whose heads do not each go their own way, and why they would find something else in a part of the heads.
ACROSS_HEADS = {
    "tova": "one choice for all heads",
    "squeeze": "budgets follow the mean over heads",
    "cam": "draws random numbers by the head's number",
    "keyformer": "draws random numbers by the head's number",
    "kivi_sink": "a token is a sink for all heads",
    "adakv": "bits are divided among the heads",
    "palu": "axes of groups of heads",
    "xkv": "axes of all heads",
    "anchorkv": "anchors and residuals are chosen for all heads",
}
INDIVISIBLE = ("adakv", "xkv", "anchorkv")
BY_THEMSELVES = ("cam", "keyformer", "palu")  # a part that knows its place needs nothing of the others


# One process of several


def run(model: nn.Module, config: Any, hooked: bool) -> tuple[list[int], mx.array, list[Any]]:
    """The likeliest tokens after the prompt, their log probabilities [COUNT, vocabulary], and the caches."""
    caches, prompt = KVCacheBuilder.for_model(model, config), mx.array(tokens(PROMPT))
    with attention_hook(model) if hooked else contextlib.nullcontext():
        steps = list(generate_step(prompt, model, max_tokens=COUNT, prompt_cache=caches, prefill_step_size=CHUNK))
    return [int(token) for token, _ in steps], mx.stack([row for _, row in steps]), caches


def cases(parallel: str) -> dict[str, tuple[KVCacheConfig | vq.Transform, bool]]:
    """What is run: by heads a few that treat each by itself, and all that look at all heads."""
    return CASES if parallel == "pipeline" else BY_HEADS


def work(parallel: str, folder: Path) -> None:
    """Run all cases on this process's part of the model, and write what came out."""
    group, model = mx.distributed.init(), build("qwen2", **SIZES)
    distributed.split(model, parallel, group)
    rows, told = {}, {}
    for name, (config, hooked) in cases(parallel).items():
        chosen, rows[name], caches = run(model, config, hooked)
        told[name] = {
            "tokens": chosen,
            "bytes": [cache.nbytes for cache in caches],
            "sizes": [cache.size() for cache in caches],
        }
    mx.save_safetensors(str(folder / f"{group.rank()}.safetensors"), rows)
    (folder / f"{group.rank()}.json").write_text(json.dumps(told))
    distributed.wait_for_all(group)


# Starting several


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on, below those that systems hand out by themselves."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


def launch(*command: str, processes: int = PROCESSES) -> str:
    """What the processes print; raises AssertionError, with that, where one of them fails."""
    tool = Path(sys.executable).with_name("mlx.launch")
    line = [str(tool), "--backend", "ring", "-n", str(processes), "-p", str(free_ports(processes))]
    folders = [str(ROOT / "examples"), str(ROOT / "tests" / "adapters"), str(ROOT)]
    # The launcher spins where its input has ended, so it has one that stays open.
    source, sink = os.pipe()
    started = subprocess.Popen(
        [*line, sys.executable, *command],
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore"},
        start_new_session=True,
    )
    try:
        said = started.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise AssertionError(f"not done in {SECONDS} s: {started.communicate()[0]}") from None
    finally:
        os.close(source)
        os.close(sink)
    assert started.returncode == 0 and "exited with code" not in said, said
    return said


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[int], mx.array, list[Any]]]:
    """All cases in one process."""
    model = build("qwen2", **SIZES)
    return {name: run(model, *case) for name, case in {**CASES, **BY_HEADS}.items()}


def together(parallel: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, mx.array]]]:
    """What each process counted, and the log probabilities that it found, by case."""
    said = launch(__file__, parallel, str(folder))
    for rank in range(PROCESSES):
        assert (folder / f"{rank}.json").exists(), said
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return told, [mx.load(str(folder / f"{rank}.safetensors")) for rank in range(PROCESSES)]


def same(got: mx.array, want: mx.array, atol: float = 0.0) -> bool:
    return bool(mx.allclose(got, want, rtol=0, atol=atol).item())


def test_layers_in_two_processes(alone: dict[str, Any], tmp_path: Path) -> None:
    """Exactly the tokens, numbers and bytes of one process."""
    told, rows = together("pipeline", tmp_path)
    assert all(told[0][name]["tokens"] == told[1][name]["tokens"] for name in CASES)
    assert all(same(rows[0][name], rows[1][name]) for name in CASES)
    own = [sum(counted["squeeze"]["sizes"]) for counted in told]
    assert own[0] < LAYERS // 2 * BUDGET < own[1], "layers agree with those of the other process"
    wrong = [
        name for name in CASES if told[0][name]["tokens"] != alone[name][0] or not same(rows[0][name], alone[name][1])
    ]
    assert wrong == []
    for name in CASES:  # the last process has the first layers
        held = [size for counted in reversed(told) for size in counted[name]["bytes"]]
        assert held == [cache.nbytes for cache in alone[name][2]], name
    assert not any(same(rows[0][name], alone[other][1]) for name, other in itertools.pairwise(CASES))


def test_heads_in_two_processes(alone: dict[str, Any], tmp_path: Path) -> None:
    """The tokens of one process, and its numbers but for the order of sums."""
    told, rows = together("tensor", tmp_path)
    for name in cases("tensor"):
        assert told[0][name]["tokens"] == told[1][name]["tokens"]
        assert len(told[0][name]["sizes"]) == LAYERS
        chosen, want, caches = alone[name]
        assert told[0][name]["tokens"] == chosen, name
        assert same(rows[0][name], want, tolerance(caches[0].transform, want)), name
        held = sum(sum(counted[name]["bytes"]) for counted in told)
        assert held == pytest.approx(sum(cache.nbytes for cache in caches), rel=0.05), name
    model = build("qwen2", **SIZES)
    other = KVCacheConfig(method="turboquant_mse", bit_width_inlier=3, seed=7)
    name, transform = "turboquant_mse", alone["turboquant_mse"][2][0].transform
    assert not same(rows[0][name], run(model, other, True)[1], tolerance(transform, rows[0][name]))


# Heads, each for itself or not

HEADS, DIM = 8, 32
EDGE = 0.05  # less than that is a number on the edge between two codes


def call(layer: int, number: int, n: int) -> list[mx.array]:
    """Keys, values and queries of one call, by head longer and longer."""
    draw = mx.random.split(mx.random.key(100 * number + layer), 3)
    longer = mx.arange(1, HEADS + 1)[:, None, None] / 2
    keys = mx.random.normal((1, HEADS, n, DIM), key=draw[0]) * longer
    values = mx.random.normal((1, HEADS, n, DIM), key=draw[1]) * longer
    return [keys, values, mx.random.normal((1, 2 * HEADS, n, DIM), key=draw[2])]


def attended(transform: vq.Transform, first: int, last: int) -> mx.array:
    """Attention of the query heads of some KV heads in two layers, over all calls."""
    group, out = LayerGroup(), []
    caches = in_place([KVCache(), KVCache()], transform)
    for layer, cache in enumerate(caches):
        if transform.agrees:
            cache.join(group, layer)
    for number, n in enumerate([32, 24, *[1] * 12]):
        for layer, cache in enumerate(caches):
            keys, values, queries = call(layer, number, n)
            if transform.agrees and layer:
                keys = keys + mx.arange(HEADS)[:, None, None] * 2
            mask = cache.make_mask(n)
            seen = cache.update_and_fetch(keys[:, first:last], values[:, first:last])
            out.append(cache.attend(queries[:, 2 * first : 2 * last], *seen, DIM**-0.5, mask))
        mx.eval(out, [cache.state for cache in caches])
    return mx.concatenate(out, axis=2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_look_at_all_heads_of_a_layer(method: str) -> None:
    """The others find the same for a head, whichever heads are beside it."""
    assert (apart(TRANSFORMS[method], [TRANSFORMS[method]] * 2) > EDGE) == (method in ACROSS_HEADS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", BY_THEMSELVES)
def test_a_part_that_knows_its_place(method: str) -> None:
    transform = TRANSFORMS[method]
    assert apart(transform, [sharded(transform, Shard(rank, 2)) for rank in range(2)]) < EDGE


def apart(transform: vq.Transform, parts: list[vq.Transform]) -> float:
    """How far the first and the second half of the heads, each by itself, stray from what all find together."""
    whole = attended(transform, 0, HEADS)
    halves = mx.concatenate([attended(parts[0], 0, HEADS // 2), attended(parts[1], HEADS // 2, HEADS)], axis=1)
    return float(mx.abs(whole - halves).max() / mx.std(whole))


def split_by_heads() -> nn.Module:
    """The second half of a model of two processes."""
    model = build("qwen2", **SIZES)
    distributed.split(model, "tensor", Place(1))
    return model


@pytest.mark.parametrize("method", INDIVISIBLE)
def test_what_can_not_be_split_by_heads_is_refused(method: str) -> None:
    with pytest.raises(QuantizerConfigError, match=rf"{method}: `model` can't be split by heads: .*; got 2$"):
        KVCacheBuilder.for_model(split_by_heads(), KVCacheConfig(method=method))


def test_groups_of_heads_that_span_processes_are_refused() -> None:
    config = KVCacheConfig(method="palu", options=PALUOptions(palu_n_head_groups=1))
    with pytest.raises(QuantizerConfigError, match=r"palu: `n_head_groups` must be 2 times a number .* got 1"):
        KVCacheBuilder.for_model(split_by_heads(), config)


def test_caches_know_their_part_of_the_heads() -> None:
    for cache in KVCacheBuilder.for_model(split_by_heads(), KVCacheConfig(method="tova")):
        assert cache.transform.policy.shard == Shard(1, 2)
        assert restore(json.loads(json.dumps(describe(cache.transform)))) == cache.transform


def test_nobody_is_asked_who_is_not_there() -> None:
    with pytest.raises(QuantizerConfigError, match=r"shard: `group` must have the 5 processes .* got 1"):
        Shard(0, 5).gathered(mx.zeros((1, 2)))


def test_the_page_lists_the_methods_that_look_at_all_heads() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = page.split("## Tensor parallel")[1].split("\n## ")[0]
    listed = {line.split("](methods/")[1].split(".md")[0] for line in section.splitlines() if line.startswith("| [")}
    assert listed == set(ACROSS_HEADS)


# Layers of a process


class Place:
    """What mlx_lm's `pipeline` asks of a group."""

    def __init__(self, rank: int, size: int = PROCESSES) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def parts(config: Any, layers: int = LAYERS, **sizes: Any) -> Iterator[list[Any]]:
    """The caches of each process, the first layers first."""
    for rank in reversed(range(PROCESSES)):
        part = build("qwen2", **{**SIZES, **sizes, "num_hidden_layers": layers})
        part.model.pipeline(Place(rank))
        yield KVCacheBuilder.for_model(part, config)


def test_a_schedule_runs_over_the_layers_of_all_processes() -> None:
    budgets = [cache.transform.policy.budget for part in parts(PYRAMID) for cache in part]
    assert budgets == pyramid_budgets(LAYERS, BUDGET, 2.0, least=3)
    bands = KVCacheConfig(method="cachegen", options=CacheGenOptions())
    whole = KVCacheBuilder.for_model(build("qwen2", **SIZES), bands)
    assert [cache.transform for part in parts(bands) for cache in part] == [cache.transform for cache in whole]


def test_seeds_follow_the_number_in_the_model() -> None:
    whole = KVCacheBuilder.for_model(build("qwen2", **SIZES), ROTATED)
    assert [cache.transform for part in parts(ROTATED) for cache in part] == [cache.transform for cache in whole]
    assert len({cache.transform for cache in whole}) == LAYERS


def test_lists_have_one_entry_for_every_layer_of_the_model() -> None:
    listed = KVCacheConfig(method="kivi", bit_width_inlier=[2, 4, 8, 4], residual_length=8)
    whole = KVCacheBuilder.for_model(build("qwen2", **SIZES), listed)
    assert [cache.transform for part in parts(listed) for cache in part] == [cache.transform for cache in whole]
    short = KVCacheConfig(method="kivi", bit_width_inlier=[2, 4], residual_length=8)
    with pytest.raises(QuantizerConfigError, match="4 layers"):
        next(parts(short))


@pytest.mark.parametrize("config", [XQUANT, KVCacheConfig(method="minicache", options=MiniCacheOptions())])
@pytest.mark.parametrize("layers", [4, 6, 8, 10])
def test_a_stack_is_cut_where_a_process_ends(config: KVCacheConfig, layers: int) -> None:
    """Places in stacks are those of one process; what is left of a stack at an end is a smaller one."""
    model = build("qwen2", **{**SIZES, "num_hidden_layers": layers})
    whole = [cache.transform.place for cache in KVCacheBuilder.for_model(model, config)]
    found = [[cache.transform.place for cache in part] for part in parts(config, layers)]
    half = layers // 2
    for places, want in zip(found, (whole[:half], whole[half:])):
        cut = [None if alone_at(want, i) else place for i, place in enumerate(want)]
        assert places == cut


def alone_at(places: list[int | None], i: int) -> bool:
    """Whether the other layer of a stack of two is not in the list."""
    return (places[i] == 0 and i + 1 == len(places)) or (places[i] == 1 and i == 0)


def test_the_number_of_layers_of_a_mixed_model() -> None:
    """Windowed layers are not replaced, and don't count."""
    kinds = ["full_attention", "sliding_attention", "full_attention"] * 2
    sizes = {
        "model_type": "ministral3",
        "layer_types": kinds,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": 4096,
        },
    }
    found = [
        [getattr(getattr(cache, "transform", None), "policy", None) for cache in part]
        for part in parts(PYRAMID, len(kinds), **sizes)
    ]
    budgets = [policy and policy.budget for part in found for policy in part]
    full = iter(pyramid_budgets(4, BUDGET, 2.0, least=3))
    assert budgets == [next(full) if kind == "full_attention" else None for kind in kinds]


def test_layers_that_agree_need_all_processes() -> None:
    with pytest.raises(QuantizerConfigError, match=r"^squeeze: `model` must be split over all processes.*; got 2$"):
        next(parts(SQUEEZE))


def test_the_blank_model_draws_no_random_numbers() -> None:
    part = build("qwen2", **SIZES)
    part.model.pipeline(Place(0))
    mx.random.seed(3)
    want = np.array(mx.random.uniform(shape=(4,)))
    mx.random.seed(3)
    KVCacheBuilder.for_model(part, PYRAMID)
    assert np.array_equal(np.array(mx.random.uniform(shape=(4,))), want)


# The example


def test_heads_that_no_process_can_have_alone_are_refused() -> None:
    llama = build("llama", hidden_size=96, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"^9 heads \(n_heads\) can't be shared by 2 processes"):
        distributed.split(llama, "tensor", Place(0))
    with pytest.raises(ValueError, match=r"by layers; try --parallel tensor$"):
        distributed.split(llama, "pipeline", Place(0))


def test_a_llama_as_a_model_that_has_a_pipeline() -> None:
    llama, ids = build("llama"), mx.array([tokens(40)])
    assert mx.allclose(distributed.as_ministral3(llama)(ids), llama(ids), atol=1e-4)


@pytest.mark.slow
def test_the_example_says_the_same_in_two_processes() -> None:
    script = str(ROOT / "examples" / "distributed.py")
    few = ["--method", "turboquant_mse", "--max-tokens", "12"]
    one = subprocess.run([sys.executable, script, *few], capture_output=True, text=True, timeout=SECONDS, check=True)
    both = launch(script, *few, "--parallel", "pipeline")
    assert one.stdout.splitlines()[0] in both.splitlines()
    assert "process 0: 15 layers" in both and "process 1: 15 layers" in both


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
