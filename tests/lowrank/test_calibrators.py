"""What all calibrators that take sampled rows of a layer have in common."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq

CALIBRATORS: dict[str, tuple[Callable[..., Any], int]] = {
    "svdq_calibrate": (vq.svdq_calibrate, 1),
    "palu_calibrate": (vq.palu_calibrate, 2),
    "kvtc_calibrate": (vq.kvtc_calibrate, 2),
    "xkv_calibrate": (vq.xkv_calibrate, 2),
    "amc_calibrate": (vq.amc_calibrate, 2),
    "a2ats_calibrate": (vq.a2ats_calibrate, 2),
}
every = pytest.mark.parametrize("name", CALIBRATORS)
ROWS = np.random.RandomState(0).standard_normal((40, 2, 16)).astype(np.float32)


def calibrated(name: str, x: Any) -> dict[str, mx.array]:
    calibrate, count = CALIBRATORS[name]
    arrays: dict[str, mx.array] = calibrate(*[x] * count).arrays()
    return arrays


@every
def test_rows_of_numpy_and_of_mlx_are_the_same(name: str) -> None:
    ours, theirs = calibrated(name, mx.array(ROWS)), calibrated(name, ROWS)
    assert all(mx.array_equal(ours[field], theirs[field]).item() for field in ours)


@every
@pytest.mark.filterwarnings("error")
def test_without_a_finite_row_nothing_is_found(name: str) -> None:
    spoilt = ROWS.copy()
    spoilt[:, 1, 3] = np.nan
    with pytest.raises(vq.QuantizerConfigError, match=f"^{name}: `keys` must have rows of finite numbers; got 0$"):
        calibrated(name, spoilt)


@every
@pytest.mark.parametrize("x", [ROWS[0], ROWS[:0], [1.0]], ids=["flat", "empty", "list"])
def test_what_is_no_sample_is_refused(name: str, x: Any) -> None:
    with pytest.raises(vq.QuantizerConfigError, match=rf"^{name}: `keys` must be \[N, .*\]; got \("):
        calibrated(name, x)
