"""Compiled functions of trees: one trace a structure, the same bits as eager, with a C++ compiler or without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import pytest

import vq_functional as vq
from vq_functional.core.jit import jit
from vq_functional.core.tree import flatten, map_leaves, static_field

DIGESTS = """
import hashlib, numpy as np, mlx.core as mx
import vq_functional as vq
from vq_functional.core.tree import flatten

def draw(n, seed):
    return mx.random.normal((1, 2, n, 64), key=mx.random.key(seed)).astype(mx.float16)

spec = vq.KVSpec(kv_heads=2, key_dim=64, value_dim=64)
transform = vq.chain(vq.streaming_llm_policy(n_sink=2, window_size=14), vq.rows(key=vq.int8_codec()))
for way in (transform, vq.compile(transform)):
    state = way.init_state(spec)
    state, *_ = transform.update(state, draw(15, 0), draw(15, 1))
    digest = hashlib.sha256()
    for step in range(2):
        state, *rows = way.update(state, draw(1, 2 + step), draw(1, 8 + step))
        for array in (*flatten(state)[0], *rows):
            digest.update(np.array(array).tobytes())
    print(digest.hexdigest())
"""


class Pair(NamedTuple):
    first: mx.array
    second: mx.array | None


@attrs.frozen(eq=False)
class Counter:
    total: mx.array
    steps: Pair
    width: int = static_field()


def counter(width: int = 3) -> Counter:
    return Counter(mx.zeros(width), Pair(mx.array(0), None), width)


def add(state: Counter, x: mx.array, weight: mx.array | None = None) -> tuple[Counter, mx.array]:
    """A pure step with a state, an optional argument and a second result."""
    total = state.total + (x if weight is None else x * weight)
    return Counter(total, Pair(state.steps.first + 1, None), state.width), total.sum()


def counted(function: Any) -> tuple[Any, list[int]]:
    """The function, and a list that gets an item whenever its Python code runs."""
    runs: list[int] = []

    def traced(*arguments: Any) -> Any:
        runs.append(1)
        return function(*arguments)

    return traced, runs


def test_trees_in_and_out() -> None:
    step, state = jit(add), counter()
    for i in range(1, 4):
        state, total = step(state, mx.full((3,), 2.0))
        assert isinstance(state, Counter) and isinstance(state.steps, Pair)
        assert state.width == 3 and state.steps.second is None and state.steps.first.item() == i
        assert state.total.tolist() == [2.0 * i] * 3 and total.item() == 6.0 * i


def test_steps_of_one_kind_are_one_trace() -> None:
    function, runs = counted(add)
    step, state = jit(function), counter()
    for i in range(20):
        state, _ = step(state, mx.full((3,), float(i)))
    assert len(runs) == 1
    assert state.total.tolist() == [190.0] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda: (counter(), mx.ones(3), mx.ones(3)),
        lambda: (counter(), mx.ones(3, mx.float16)),
        lambda: (counter(), mx.ones((2, 3))),
        lambda: (Counter(mx.zeros(3), Pair(mx.array(0), None), 4), mx.ones(3)),
    ],
    ids=["optional argument", "dtype", "shape", "static number"],
)
def test_another_kind_of_argument_is_another_trace(change: Any) -> None:
    function, runs = counted(add)
    step = jit(function)
    usual = (counter(), mx.ones(3))
    for arguments in (usual, change(), usual, change()):
        got, want = step(*arguments), add(*arguments)
        assert flatten(got)[1] == flatten(want)[1]
        assert all(mx.array_equal(a, b) for a, b in zip(flatten(got)[0], flatten(want)[0], strict=True))
    assert len(runs) == 2


def test_the_structure_of_a_result_is_that_of_its_own_call() -> None:
    def widths(x: mx.array) -> Counter:
        return Counter(x + 1, Pair(x, None if x.shape[0] == 2 else x), x.shape[0])

    step = jit(widths)
    for width in (2, 3, 2, 3, 2):
        got = step(mx.zeros(width))
        assert got.width == width and (got.steps.second is None) == (width == 2)


def test_a_compiled_step_inside_another() -> None:
    inner = jit(add)
    outer = jit(lambda state, x: inner(inner(state, x)[0], x))
    state, total = outer(counter(), mx.ones(3))
    assert state.steps.first.item() == 2 and total.item() == 6


def test_the_old_state_is_untouched() -> None:
    state = counter()
    jit(add)(state, mx.ones(3))
    assert state.total.tolist() == [0.0] * 3 and state.steps.first.item() == 0


def test_nothing_is_read_back_inside() -> None:
    with pytest.raises(ValueError):
        jit(lambda x: x * x.sum().item())(mx.ones(3))


def test_an_error_leaves_the_function_usable() -> None:
    step = jit(add)
    with pytest.raises(ValueError):
        step(counter(), mx.ones(4))
    assert step(counter(), mx.ones(3))[1].item() == 3


def test_map_leaves_inside() -> None:
    step = jit(lambda state: map_leaves(lambda x: x + 1, state))
    assert step(counter()).steps.first.item() == 1


def test_compile_keeps_the_triple() -> None:
    transform = vq.turboquant_mse()
    compiled = vq.compile(transform)
    spec = vq.KVSpec(batch=2, kv_heads=2, key_dim=64, value_dim=64, capacity=16)
    padding = mx.array([0, 2])
    state = compiled.init_state(spec, padding)
    assert state.offset.tolist() == [0, -2]
    for n in (1, 4):
        assert mx.array_equal(compiled.make_mask(state, n), transform.make_mask(state, n))


def run_digests(path: str, scratch: Path) -> str:
    scratch.mkdir()
    environment = os.environ | {"PATH": path, "TMPDIR": str(scratch)}
    environment.pop("MLX_DISABLE_COMPILE", None)
    command = [sys.executable, "-c", DIGESTS]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_without_a_compiler_the_result_is_the_same(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    compiler = shutil.which("g++")
    usual = run_digests(os.path.dirname(compiler) if compiler else os.environ["PATH"], tmp_path / "with")
    bare = run_digests(str(empty), tmp_path / "without")
    assert usual == bare
    eager, compiled = bare.split()
    assert eager == compiled
    assert not list((tmp_path / "without").rglob("*.so"))
    assert compiler is None or mx.metal.is_available() or list((tmp_path / "with").rglob("*.so"))
