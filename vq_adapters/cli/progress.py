"""How far a prompt has been read, on a terminal."""

import sys
from collections.abc import Callable


def progress() -> Callable[[int, int], None] | None:
    """A callback for mlx_lm; None where stderr is no terminal."""
    return _show if sys.stderr.isatty() else None


def _show(done: int, total: int) -> None:
    line = f"prompt {done}/{total} tokens" if done < total else ""
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
