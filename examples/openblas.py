"""OpenBLAS in place of the reference BLAS of mlx's CPU wheel for Linux."""

import ctypes
import functools
import sys

HINT = "OpenBLAS makes float32 on a Linux CPU about 30 times faster; on Debian: apt-get install libopenblas0-pthread"


@functools.cache
def use_openblas() -> bool:
    """Load OpenBLAS for mlx to find; to be called before the first import of mlx.

    Returns whether mlx has a fast BLAS now: always on macOS, and on Linux where the library is present.
    """
    if sys.platform == "darwin":
        return True
    # A library that mlx has bound already stays bound.
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    try:
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
