"""The commands, and how they end."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from vq_adapters.cli import generate, methods, report, serve
from vq_adapters.cli.parsing import Parser, UsageError, say
from vq_functional.core.errors import QuantizerConfigError

COMMANDS = {
    "methods": (methods, "list the methods, or the options of one"),
    "generate": (generate, "answer a prompt"),
    "serve": (serve, "serve a model over HTTP"),
    "report": (report, "tell what each layer of a model holds"),
}
# Commands whose further arguments are mlx_lm's.
OPEN = ("generate", "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for an error, 2 for a wrong use, 130 for an interrupt."""
    with warnings.catch_warnings():
        warnings.showwarning = _say_warning  # type: ignore[assignment]
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    debug = False
    try:
        args, rest = _parser().parse_known_args(argv)
        debug = args.debug
        if rest and args.command not in OPEN:
            raise UsageError(f"unrecognized arguments: {' '.join(rest)}")
        status = COMMANDS[args.command][0].run(args, rest)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(_text(error))
        return 2 if isinstance(error, UsageError) else 1


def _say_warning(message: Any, *_: Any) -> None:
    say(f"warning: {message}")


def _parser() -> Parser:
    parser = Parser("vq", description="KV-cache compression for mlx_lm.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", add_help=name not in OPEN)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def _text(error: Exception) -> str:
    """An error's own words; its class, too, where it is none that is meant to be read."""
    known = isinstance(error, (UsageError, QuantizerConfigError, ValueError, OSError, RuntimeError))
    return str(error) if known and str(error) else f"{type(error).__name__}: {error}"
