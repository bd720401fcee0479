"""Budgets as users give them: rows, a share of the prompt, bytes of a whole list, or a list of rows or shares."""

import re
from typing import Any

import attrs

from vq_functional.core.errors import QuantizerConfigError, check
from vq_functional.core.spec import KVSpec
from vq_functional.core.transform import Transform
from vq_functional.core.tree import nbytes
from vq_functional.evict.engine import Evicting

# Options that may be bytes, and may differ between layers.
BUDGETS = ("budget", "window_size")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B\s*", re.IGNORECASE)


def to_bytes(method: str, field: str, text: str) -> int:
    """Bytes that "48MB", "1.5GiB" and the like name; raises QuantizerConfigError for other text."""
    found = _SIZE.fullmatch(text)
    if found is None:
        rule = "must be rows, a share of the prompt, or bytes such as '48MB'"
        raise QuantizerConfigError(f"{method}: `{field}` {rule}; got {text!r}")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def rows_within(transform: Transform, spec: KVSpec, size: int) -> int:
    """The largest budget with which the state of one layer takes at most `size` bytes.

    Raises QuantizerConfigError where not even one row fits.
    """
    check(isinstance(transform, Evicting), transform.name, "budget", "in bytes is for methods with a budget", size)
    one, two = (_state_bytes(transform, spec, budget) for budget in (1, 2))
    fits = one <= size
    check(fits, transform.name, "budget", f"in bytes must be at least {one} a layer, the size of one row", size)
    return 1 + (size - one) // (two - one)


def _state_bytes(transform: Any, spec: KVSpec, budget: int) -> int:
    policy = attrs.evolve(transform.policy, budget=budget)
    return nbytes(attrs.evolve(transform, policy=policy).init_state(attrs.evolve(spec, capacity=1)))
