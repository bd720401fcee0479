"""Warnings point to the line of whoever calls the packages."""

import warnings
from typing import Any

import pytest

import vq_functional as vq
from vq_adapters import H2OOptions, KVCacheConfig
from vq_functional.core.warn import warn_uncalibrated


def _config() -> Any:
    return KVCacheConfig(method="cam", cam_merge_keys=True, cam_merge="mean")


CALLS = {
    "in an options class": lambda: vq.cam(merge_keys=True, merge="mean"),
    "in a constructor": lambda: vq.adakv(target_avg_bits=4.0),
    "in a configuration": _config,
    "of a field": lambda: KVCacheConfig(method="kivi", h2o_budget=64),
    "of options": lambda: KVCacheConfig(method="h2o", options=H2OOptions(h2o_rope_base=1.0)),
    "when rows come": lambda: vq.spectral().init_state(vq.KVSpec(kv_heads=1, key_dim=96, value_dim=96)),
}


def test_the_line_of_code_that_is_in_no_file() -> None:
    """Of an interpreter or a notebook."""
    code = compile("\n\nvq.cam(merge_keys=True, merge='mean')", "<cell>", "exec")
    with pytest.warns(UserWarning, match="merge_keys") as caught:
        exec(code, {"vq": vq})
    assert (caught[0].filename, caught[0].lineno) == ("<cell>", 3)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_line_of_the_caller(call: Any) -> None:
    warn_uncalibrated.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    lines = {(warning.filename, warning.lineno) for warning in caught}
    first = call.__code__.co_firstlineno
    assert lines == {(__file__, first + (call is _config))}
