"""`vq methods`: the table of methods, and one of them with its options."""

import argparse
import inspect
import json
from typing import Any

from vq_adapters.calibration import CALIBRATORS
from vq_adapters.cli.models import sample
from vq_adapters.cli.settings import method_name
from vq_adapters.columns import columns
from vq_adapters.documented import options_of
from vq_adapters.names import name_of
from vq_functional.methods import METHODS, TABLE, Method

HEAD = ("method", "tokens", "prefix", "queries", "codes", "calibration", "layers", "what it does")
LEGEND = """
tokens       kept: all of them, or some are evicted
prefix       any, or stored ones: of prompts that a later one begins with
queries      whether real queries matter, which the attention hook brings
codes        whether attention reads codes, which it does with the hook
calibration  whether tables that fit a model can be given, by --store; none needs them
layers       alone, packed together, or agreeing on budgets

plain is mlx_lm's own cache. `vq methods --method NAME` lists options.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--method", metavar="NAME", help="only this one, with its options")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the table or one method; returns the exit status."""
    one = None if args.method is None else METHODS[method_name(args.method)]
    if args.json:
        found = [facts(row) for row in TABLE] if one is None else facts(one)
        print(json.dumps(found, indent=2, default=str))
    else:
        print(_table() if one is None else _page(one))
    return 0


def facts(row: Method) -> dict[str, Any]:
    """What a method can and can't do, from its row, its transform and its documentation."""
    transform = sample(row)
    packed = "packed together" if "stacks" in row.traits else "alone"
    return {
        "name": row.name,
        "summary": (inspect.getdoc(inspect.getmodule(row.build)) or "").partition("\n")[0],
        "paper": row.paper,
        "tokens": "some" if transform.evicts else "all",
        "prefix": "any" if transform.trimmable else "stored",
        "queries": "uses_queries" in row.traits,
        "codes": "attends_codes" in row.traits,
        "calibration": row.name in CALIBRATORS,
        "layers": "agree" if transform.agrees else packed,
        "traits": sorted(row.traits),
        "options": {name_of(row.name, option): default for option, default in options_of(row.name).items()},
    }


def _table() -> str:
    return columns([HEAD, *(_line(facts(row)) for row in TABLE)]) + "\n" + LEGEND.rstrip()


def _line(found: dict[str, Any]) -> list[str]:
    names = ("name", "tokens", "prefix", "queries", "codes", "calibration", "layers", "summary")
    return [_word(found[name]) for name in names]


def _page(row: Method) -> str:
    found = facts(row)
    known = {name: _word(x) for name, x in found.items() if name not in ("name", "summary", "options", "traits")}
    options = [(name, "" if default is None else default) for name, default in found["options"].items()]
    return "\n".join(
        [
            f"{row.name}: {found['summary']}",
            "",
            columns(known.items()),
            "",
            columns([("option", "default"), *options]),
            "",
            inspect.getdoc(row.options) or "",
        ]
    )


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
