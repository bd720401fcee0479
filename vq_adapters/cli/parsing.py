"""Parsers that report in one line, and the arguments that commands share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PLAIN = ("plain", "none")  # names for mlx_lm's own caches


class UsageError(Exception):
    """What was asked for can't be done as it was written."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError and takes no abbreviations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class LongHelp(argparse.Action):
    """Prints the help of a command, and then of the command of mlx_lm that takes the remaining options."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Callable[[], None], **options: Any) -> None:
        options["help"] = "show this help, and that of mlx_lm"
        super().__init__(option_strings, dest, nargs=0, const=const, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        print("\nand every option of mlx_lm:\n")
        self.const()
        parser.exit()


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which caches a model gets."""
    group = parser.add_argument_group("caches")
    add = group.add_argument
    add("--method", required=True, help="one of `vq methods`, or plain: mlx_lm's own caches")
    add("--bits", metavar="N", help="bits a number; 4,4,3,2 for one entry a layer")
    add(
        "--budget", metavar="ROWS", help="what stays: rows (256), a share of the prompt (0.25), bytes (48MB), or a list"
    )
    add("--seed", type=int, metavar="N", help="of rotations, sketches and noise, and of sampling")
    add("--dtype", help="of what is held uncompressed: float16, bfloat16 or float32")
    add("--store", metavar="DIR", help="folder with calibrations of this model")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of `vq methods --method NAME`")
    add("--no-hook", action="store_true", help="leave the model's attention as it is: no queries, no codes attended")


def say(text: str) -> None:
    """One line on stderr."""
    print(f"vq: {' '.join(text.split())}", file=sys.stderr, flush=True)


def model_name(text: str) -> str:
    """A model's repository or folder, as an argument's type; what is written as a path must be there."""
    if not text.startswith(("/", ".", "~")):
        return text
    path = Path(text).expanduser()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text!r}")
    return str(path)


def whole(text: str) -> int:
    """An integer of at least 1, as an argument's type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number
