"""The one error that options and inputs raise, in one form of words."""

from typing import Any

INFINITE = float("inf")


class QuantizerConfigError(ValueError):
    """An option or an input that a method can't take: method, field, rule, what came."""


def check(condition: bool, method: str, field: str, rule: str, got: Any) -> None:
    """Raise ``QuantizerConfigError`` unless `condition` holds."""
    if not condition:
        raise QuantizerConfigError(f"{method}: `{field}` {rule}; got {got!r}")


def check_int(method: str, field: str, value: Any, low: int, high: int | None = None) -> None:
    """Check that `value` is a plain integer in [low, high]; True and False are none."""
    rule = f"must be an integer >= {low}" if high is None else f"must be an integer in [{low}, {high}]"
    whole = isinstance(value, int) and not isinstance(value, bool)
    check(whole and value >= low and (high is None or value <= high), method, field, rule, value)


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
    known = any(value == choice and type(value) is type(choice) for choice in choices)
    check(known, method, field, f"must be one of {choices}", value)


def _is_number(value: Any) -> bool:
    """Whether `value` is a plain number that a float can hold."""
    held = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)
    return held and not isinstance(value, bool)
