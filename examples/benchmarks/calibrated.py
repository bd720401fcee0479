"""Methods with tables that fit the model beside the same methods without: every one that `calibrate` knows.

    python examples/benchmarks/calibrated.py --scores --prompt 1920 --store calibrations
    python examples/benchmarks/calibrated.py --scores --prompt 1920 --methods "palu.*calibrated"

Calibrates on prose behind the slice that is measured, in texts as long as that
slice may be, since keys are rotated by their positions. Tables go to the folder
`--store` and are found there again. Takes the options of decode.py and prints
its table.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import decode
import mlx.nn as nn
from decode import START, Entry, parse

from measuring import load_model
from prose import token_slice
from vq_adapters import FileArtifactStore, KVCacheConfig, calibrate
from vq_adapters.calibration import CALIBRATORS

FIRST = 4000  # token of the prose that calibration begins with
TEXTS, LENGTH = 4, 2048

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Calibrated(Entry):
    """A row whose tables are found, or taken from the store, when its caches are first asked for."""

    prepare: Callable[[nn.Module], Any] = lambda model: None

    def caches(self, model: Any) -> list[Any]:
        """One fresh cache a layer; keys and values come in as 16 bits."""
        self.prepare(model)
        return super().caches(model)


def rows(store: FileArtifactStore, texts: Texts) -> list[Entry]:
    """Two rows a method, both with its defaults."""
    found: list[Entry] = []
    for method in CALIBRATORS:
        prepare = functools.partial(calibrate, tokenizer=None, texts=texts, method=method, store=store)
        found.append(Entry(method, KVCacheConfig(method=method), True))
        found.append(
            Calibrated(f"{method}, calibrated", KVCacheConfig(method=method, store=store), True, prepare=prepare)
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print them as they come."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--store", metavar="DIR", help="folder of the tables (default: one that is deleted at the end)")
    own, rest = parser.parse_known_args(argv)
    args = parse(rest)
    steps = decode.PEAK_STEPS if args.peak else args.steps
    if START + args.prompt + steps > FIRST:
        raise SystemExit(f"--prompt and --steps must come to {FIRST - START} tokens at most: what follows calibrates")
    tokenizer = load_model(args.model)[1]
    texts = [token_slice(tokenizer, FIRST + i * LENGTH, LENGTH) for i in range(TEXTS)]
    with tempfile.TemporaryDirectory() as folder:
        store = FileArtifactStore(own.store or folder)
        decode.main(rest, functools.partial(rows, store, texts))


if __name__ == "__main__":
    main()
