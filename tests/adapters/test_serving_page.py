"""The table of docs/serving.md says what the code does."""

import re
import warnings
from pathlib import Path

import pytest
from models import shared

from vq_adapters import KVCacheBuilder, KVCacheConfig
from vq_functional.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
ROW = re.compile(r"^\| \[(\w+)\]\(methods/\w+\.md\) \|.*$", re.M)


def row(name: str) -> str:
    """The method's line of the table, from its caches for a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = KVCacheConfig(method=name, spectral_val_d_eff=16)
        caches = KVCacheBuilder.for_model(shared("llama"), config)
    cut = all(cache.is_trimmable() for cache in caches)
    uneven = any(cache._group is not None and cache._group.uneven for cache in caches)
    cells = (
        f"[{name}](methods/{name}.md)",
        "any" if cut else "stored ones",
        "target and draft" if cut else "draft only",
        "with the hook" if uneven else "yes",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_the_table(name: str) -> None:
    lines = [line[0] for line in ROW.finditer(PAGE.read_text(encoding="utf-8")) if line[1] == name]
    assert lines == [row(name)]
