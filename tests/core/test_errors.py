"""Checks of options: what they take, and the words of what they refuse."""

import dataclasses
import inspect
import math
import re
from typing import Any

import numpy as np
import pytest

from vq_functional.core.errors import (
    LONGEST,
    QuantizerConfigError,
    check,
    check_between,
    check_choice,
    check_int,
    check_number,
    check_seed,
    refusing,
)

NO_NUMBERS = ["1", None, True, False, [1], 1j]


def refused(rule: str, got: Any) -> Any:
    """The error in its one form: method, field, rule, what came."""
    text = repr(got)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return pytest.raises(QuantizerConfigError, match="^" + re.escape(f"kivi: `share` {rule}; got {text}") + "$")


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
    check_int("kivi", "share", None, 1, optional=True)
    with refused("must be an integer >= 1", 0):
        check_int("kivi", "share", 0, 1, optional=True)


def test_seed():
    for value in (0, 42, 2**32 - 1):
        check_seed("kivi", value)
    for value in (-1, 2**32, 2**64, 1.5, *NO_NUMBERS):
        with pytest.raises(QuantizerConfigError, match=r"^kivi: `seed` must be an integer in \[0, 4294967295\]; got "):
            check_seed("kivi", value)


def test_choice():
    for value in (1, "mean", None):
        check_choice("kivi", "share", value, (1, "mean", None))
    for value in (True, 1.0, "sum", 2, ["mean"], np.array([1, 2])):
        with refused("must be one of (1, 'mean', None)", value):
            check_choice("kivi", "share", value, (1, "mean", None))


def test_a_choice_that_is_like_others_names_them():
    with refused("must be one of ('mean', 'meant', 1, 'sum'); did you mean mean or meant?", "Mean"):
        check_choice("kivi", "share", "Mean", ("mean", "meant", 1, "sum"))


def test_unknown_names_are_refused_and_like_ones_told():
    @dataclasses.dataclass
    class Options:
        """Of a method."""

        share: int = 1

    def hint(name: str, known: Any, /, *args: Any, **values: Any) -> str:
        return f"; write {known[0]}" if name == "part" else ""

    before = str(inspect.signature(Options))
    assert refusing(Options, "kivi", hint) is Options
    assert Options(share=2) == Options(2) and str(inspect.signature(Options)) == before
    for name, like in (("shares", "; did you mean share?"), ("part", "; write share"), ("xyz", "")):
        rule = re.escape(f"kivi: `{name}` must be a known option{like}; got 2")
        with pytest.raises(QuantizerConfigError, match=f"^{rule}$"):
            Options(**{name: 2})


def test_what_came_is_shown_in_short():
    with pytest.raises(QuantizerConfigError) as caught:
        check(False, "kivi", "model", "must be a model", list(range(1000)))
    text = str(caught.value)
    assert text.startswith("kivi: `model` must be a model; got [0, 1, 2") and text.endswith("...")
    assert len(text) < LONGEST + 50
