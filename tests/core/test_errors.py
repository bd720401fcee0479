"""Checks of options: what they take, and the words of what they refuse."""

import math
import re
from typing import Any

import pytest

from vq_functional.core.errors import QuantizerConfigError, check_between, check_choice, check_int, check_number

NO_NUMBERS = ["1", None, True, False, [1], 1j]


def refused(rule: str, got: Any) -> Any:
    """The error in its one form: method, field, rule, what came."""
    return pytest.raises(QuantizerConfigError, match="^" + re.escape(f"kivi: `share` {rule}; got {got!r}") + "$")


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ({}, [-1e308, 0, 10**300, 1.5]),
        ({"low": 1}, [1, 1.0, 10**300]),
        ({"low": 0, "high": 1}, [0, 0.0, 0.5, 1, 1.0]),
        ({"low": -2, "high": -1.5}, [-2, -1.5]),
        ({"low": 0, "below": 1}, [0, 0.5, math.nextafter(1, 0)]),
        ({"high": 3}, [-1e308, 3]),
    ],
)
def test_between_takes(limits, values):
    for value in values:
        check_between("kivi", "share", value, **limits)


@pytest.mark.parametrize(
    ("limits", "rule", "values"),
    [
        ({}, "must be a finite number", []),
        ({"low": 1}, "must be a finite number >= 1", [0, math.nextafter(1, 0), -(10**400)]),
        ({"low": 0, "high": 1}, "must be a finite number in [0, 1]", [-1, -1e-300, 1.1, 10**400]),
        ({"low": 0, "below": 1}, "must be a finite number in [0, 1)", [-1, 1, 1.0, 2]),
    ],
)
def test_between_refuses(limits, rule, values):
    for value in [*values, *NO_NUMBERS, math.nan, math.inf, -math.inf]:
        with refused(rule, value):
            check_between("kivi", "share", value, **limits)


def test_number():
    for value in (1e-300, 0.5, 1, 1.0):
        check_number("kivi", "share", value, 0, 1)
    check_number("kivi", "share", 1e308, 0)
    for value in (0, -1, 1.1, math.nan, *NO_NUMBERS):
        with refused("must be a number in (0, 1]", value):
            check_number("kivi", "share", value, 0, 1)
    for value in (0, -1, math.nan, *NO_NUMBERS):
        with refused("must be a number > 0", value):
            check_number("kivi", "share", value, 0)


def test_int():
    for value in (1, 2, 8):
        check_int("kivi", "share", value, 1, 8)
    for value in (0, 9, 2.0, math.nan, *NO_NUMBERS):
        with refused("must be an integer in [1, 8]", value):
            check_int("kivi", "share", value, 1, 8)
    for value in (0, 1.5, *NO_NUMBERS):
        with refused("must be an integer >= 1", value):
            check_int("kivi", "share", value, 1)


def test_choice():
    for value in (1, "mean", None):
        check_choice("kivi", "share", value, (1, "mean", None))
    for value in (True, 1.0, "Mean", 2):
        with refused("must be one of (1, 'mean', None)", value):
            check_choice("kivi", "share", value, (1, "mean", None))
