"""A fast BLAS where there is one, and Hypothesis runs that repeat."""

from openblas import use_openblas

use_openblas()  # before anything imports mlx

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=15, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
