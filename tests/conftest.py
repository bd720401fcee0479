"""A fast BLAS where there is one, cheap collections of garbage, and Hypothesis runs that repeat."""

import gc
import os

from openblas import use_openblas

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each core has a worker
use_openblas()  # before anything imports mlx

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=8, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Leave the tests themselves out of every later collection."""
    gc.collect()
    gc.freeze()
