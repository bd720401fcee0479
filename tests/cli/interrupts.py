"""Interrupts for the processes that tests start."""

import signal


def heeded() -> None:
    """As `preexec_fn`: a process of a background job would ignore SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
