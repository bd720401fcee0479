"""Prompts that one process has read and another goes on from: all documented classes in half precision.

In float32, test_prompt_cache.py has that of all transforms.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import save_prompt_cache
from models import forced, shared, tokens

from vq_adapters import KVCacheBuilder, KVCacheConfig, save
from vq_functional.methods import METHODS

DTYPES = {"float16": (mx.float16, save), "bfloat16": (mx.bfloat16, save_prompt_cache)}  # and who writes the files
CALLS = [tokens(80, 1), [3]]
NEXT = [tokens(5, 2), [6], tokens(20, 3), [7]]
FILE_HEADER, LAYER_HEADER = 512, 4096  # bytes: names, shapes, class and options

# For each file, the logits that follow.
CHILD = """
import sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
from models import forced, shared
from test_across_processes import DTYPES, NEXT
from vq_adapters import load, save
folder, name = Path(sys.argv[1]), sys.argv[2]
dtype, writer = DTYPES[name]
read = load if writer is save else load_prompt_cache
for file in sorted(folder.glob("*.safetensors")):
    logits = forced(shared("llama", dtype), read(str(file)), NEXT)
    mx.save_safetensors(str(folder / "answers" / file.name), {"logits": logits})
"""


def filled(method: str, dtype: mx.Dtype) -> list[Any]:
    """The documented class of a method, with so few rows that the prompt evicts or packs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = KVCacheConfig(method=method, residual_length=8, h2o_budget=24, snap_budget=40, spectral_val_d_eff=16)
        caches = KVCacheBuilder.for_model(shared("llama", dtype), config)
        forced(shared("llama", dtype), caches, CALLS)
    return caches


@pytest.mark.parametrize("name", DTYPES)
def test_another_process_goes_on(name: str, tmp_path: Path) -> None:
    (dtype, write), expected = DTYPES[name], {}
    for method in METHODS:
        caches, file = filled(method, dtype), tmp_path / f"{method}.safetensors"
        write(str(file), caches)
        held = sum(cache.nbytes for cache in caches)
        assert held < file.stat().st_size <= held + FILE_HEADER + LAYER_HEADER * len(caches), method
        expected[method] = forced(shared("llama", dtype), caches, NEXT)
    (tmp_path / "answers").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path), name]
    subprocess.run(command, cwd=Path(__file__).parent, check=True)
    for method, logits in expected.items():
        found: Any = mx.load(str(tmp_path / "answers" / f"{method}.safetensors"))
        assert mx.abs(found["logits"] - logits).mean() <= 0.01 * mx.std(logits), method
