"""Warnings that point to the line of whoever calls the packages, however deep inside they are raised."""

import functools
import sys
import warnings

_OWN = ("vq_functional", "vq_adapters")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of `text` in the innermost frame that is of none of our modules, nor of what attrs has made for them."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _own(frame.f_globals.get("__name__"), frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


@functools.cache
def warn_uncalibrated(method: str, lack: str) -> None:
    """Warn, once a process, of what stands in for tables that nobody gave."""
    warn(f"{method}: {lack}; `{method}_calibrate` finds them, for the layers of a model `vq_adapters.calibrate`")


def _own(module: str | None, file: str) -> bool:
    return file.startswith("<attrs generated") or (module or "").partition(".")[0] in _OWN
