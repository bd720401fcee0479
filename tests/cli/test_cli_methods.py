"""`vq methods`: complete, and true to the transforms."""

import json

import pytest

from vq_adapters.calibration import CALIBRATORS
from vq_adapters.cli import main
from vq_adapters.cli.methods import HEAD
from vq_adapters.config import CALIBRATED
from vq_adapters.documented import METHOD_NAMES, fields_of
from vq_functional.evict.h2o import H2OOptions
from vq_functional.methods import METHODS, TABLE


def test_a_line_for_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(TABLE) + 1]] == [HEAD[0], *(row.name for row in TABLE)]


def test_the_table_says_what_the_transforms_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(METHOD_NAMES) == set(METHODS)
    assert {name for name, row in rows.items() if row["tokens"] == "some"} == {
        name for name, method in METHODS.items() if "evicts" in method.traits
    }
    assert all((row["prefix"] == "any") == (row["tokens"] == "all") for row in rows.values())
    assert {name for name, row in rows.items() if row["calibration"]} == set(CALIBRATED) == set(CALIBRATORS)
    packed = {name for name, method in METHODS.items() if "stacks" in method.traits}
    assert {name for name, row in rows.items() if row["layers"] == "packed together"} == packed
    assert rows["squeeze"]["layers"] == "agree"
    assert rows["h2o"]["queries"] and not rows["h2o"]["codes"]
    assert rows["kivi"]["codes"] and not rows["kivi"]["queries"]
    assert all(row["summary"] and row["paper"] for row in rows.values())


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_page_lists_every_documented_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--method", name]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{name}: ")
    listed = {line.split()[0] for line in page.splitlines() if line}
    assert set(fields_of(name)) <= listed
    assert main(["methods", "--method", name, "--json"]) == 0
    assert set(fields_of(name)) <= set(json.loads(capsys.readouterr().out)["options"])


def test_defaults_are_those_of_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--method", "h2o", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert (options["h2o_budget"], options["h2o_decay"]) == (H2OOptions().budget, H2OOptions().decay)


def test_an_unknown_method_names_its_likes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--method", "kivy"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "vq: no method 'kivy'; did you mean kivi or kitty?; `vq methods` lists them all\n"
