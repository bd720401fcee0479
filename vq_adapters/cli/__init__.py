"""The command `vq`: text, a server, a report and the table of methods, with compressed caches in models of mlx_lm."""

from vq_adapters.cli.commands import main

__all__ = ["main"]
