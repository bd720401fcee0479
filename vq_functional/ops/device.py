"""Which kernels are fast depends on where they run."""

import mlx.core as mx


def on_gpu() -> bool:
    """Whether the default device is a GPU, which multiplies by packed codes as fast as it reads them."""
    return mx.default_device().type == mx.DeviceType.gpu
