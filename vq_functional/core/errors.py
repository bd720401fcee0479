"""The one error that options and inputs raise, in one form of words."""

from typing import Any


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


def check_number(method: str, field: str, value: Any, above: float, high: float = float("inf")) -> None:
    """Check that `value` is a number in (above, high]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    rule = f"must be a number in ({above}, {high}]" if high < float("inf") else f"must be a number > {above}"
    check(number and above < value <= high, method, field, rule, value)


def check_choice(method: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that `value` is one of `choices`, of the same type: 1 is not True."""
    known = any(value == choice and type(value) is type(choice) for choice in choices)
    check(known, method, field, f"must be one of {choices}", value)
