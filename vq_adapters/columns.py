"""Tables as text."""

from collections.abc import Iterable
from typing import Any


def columns(lines: Iterable[Iterable[Any]]) -> str:
    """Cells in aligned columns, None as an empty one."""
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in padded)
