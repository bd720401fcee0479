"""Budgets of a model's layers: shares that add up."""

from collections.abc import Sequence


def fitted(shares: Sequence[float], floor: int, total: float) -> list[int]:
    """Whole budgets near `shares`, none below `floor`, in all at most `total` where the floors leave room.

    Shares below the floor are lifted; the others give back in proportion to what they have above it.
    """
    values = [float(share) for share in shares]
    for _ in values:
        values = [max(value, float(floor)) for value in values]
        excess, spare = sum(values) - total, sum(value - floor for value in values)
        if excess <= 1e-9 or spare <= 0:
            break
        values = [value - excess * (value - floor) / spare for value in values]
    whole = [max(round(value), floor) for value in values]
    return _within(whole, values, floor, total)


def _within(whole: list[int], values: list[float], floor: int, total: float) -> list[int]:
    """`whole` with the budgets that were rounded up the most taken down by one, until they fit `total`."""
    order = sorted(range(len(whole)), key=lambda layer: (values[layer] - whole[layer], -layer))
    for layer in order:
        if sum(whole) <= total:
            break
        if whole[layer] > floor:
            whole[layer] -= 1
    return whole
