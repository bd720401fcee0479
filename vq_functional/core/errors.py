"""The one error that options and inputs raise, in one form of words."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

INFINITE = float("inf")
LONGEST = 300  # characters of what came that an error shows
SEEDS = 2**32  # what every random generator takes


class QuantizerConfigError(ValueError):
    """An option or an input that a method can't take: method, field, rule, what came."""


def check(condition: bool, method: str, field: str, rule: str, got: Any) -> None:
    """Raise ``QuantizerConfigError`` unless `condition` holds."""
    if not condition:
        text = repr(got)
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise QuantizerConfigError(f"{method}: `{field}` {rule}; got {shown}")


def check_int(method: str, field: str, value: Any, low: int, high: int | None = None, optional: bool = False) -> None:
    """Check that `value` is a plain integer in [low, high], or None where it is `optional`; True and False are none."""
    if optional and value is None:
        return
    rule = f"must be an integer >= {low}" if high is None else f"must be an integer in [{low}, {high}]"
    whole = isinstance(value, int) and not isinstance(value, bool)
    check(whole and value >= low and (high is None or value <= high), method, field, rule, value)


def check_seed(method: str, value: Any) -> None:
    """Check that `value` is a plain integer in [0, SEEDS)."""
    check_int(method, "seed", value, 0, SEEDS - 1)


def check_number(method: str, field: str, value: Any, above: float, high: float = INFINITE) -> None:
    """Check that `value` is a number in (above, high]."""
    rule = f"must be a number in ({above}, {high}]" if high < INFINITE else f"must be a number > {above}"
    check(_is_number(value) and above < value <= high, method, field, rule, value)


def check_between(
    method: str, field: str, value: Any, low: float = -INFINITE, high: float = INFINITE, below: float = INFINITE
) -> None:
    """Check that `value` is a finite number in [low, high], or in [low, below)."""
    inside = _is_number(value) and low <= value <= high and -INFINITE < value < below
    if high < INFINITE or below < INFINITE:
        rule = f" in [{low}, {high}]" if high < below else f" in [{low}, {below})"
    else:
        rule = f" >= {low}" if low > -INFINITE else ""
    check(inside, method, field, f"must be a finite number{rule}", value)


def check_choice(method: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that `value` is one of `choices`, of the same type: 1 is not True."""
    known = any(type(value) is type(choice) and value == choice for choice in choices)
    check(known, method, field, f"must be one of {choices}{alike(value, choices)}", value)


def alike(name: Any, known: Iterable[Any]) -> str:
    """Which of the `known` names may be meant, in words; nothing where none is like `name`."""
    names = dict.fromkeys(other for other in known if isinstance(other, str))
    found = difflib.get_close_matches(name, names) if isinstance(name, str) else []
    return f"; did you mean {' or '.join(found)}?" if found else ""


def refusing(kind: Any, label: str, hint: Callable[..., str] = lambda name, known, /, *args, **values: "") -> Any:
    """`kind`, whose constructor from now on refuses unknown names in the errors' words, and tells names like them.

    `hint(name, known, *args, **values)` may have words of its own for a name.
    """
    init, known = kind.__init__, tuple(inspect.signature(kind).parameters)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                words = hint(name, known, *args, **values) or alike(name, known)
                check(False, label, name, f"must be a known option{words}", values[name])
        init(self, *args, **values)

    kind.__init__ = checked
    return kind


def _is_number(value: Any) -> bool:
    """Whether `value` is a plain number that a float can hold."""
    held = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)
    return held and not isinstance(value, bool)
