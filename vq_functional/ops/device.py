"""Which kernels are fast depends on where they run."""

import sys

import mlx.core as mx


def on_gpu() -> bool:
    """Whether the default device is a GPU, which multiplies by packed codes as fast as it reads them."""
    return mx.default_device().type == mx.DeviceType.gpu


def has_vector_exp() -> bool:
    """Whether MLX takes `exp` of several numbers at once: on a GPU, and by Apple's library on its CPUs."""
    return on_gpu() or sys.platform == "darwin"
