"""Methods with tables that fit the model beside the same methods without: every one that `calibrate` knows.

    python examples/benchmarks/calibrated.py --scores --prompt 1920 --store calibrations
    python examples/benchmarks/calibrated.py --scores --prompt 1920 --methods "palu.*calibrated"

Calibrates on prose behind the slice that is measured, in texts as long as most
contexts here, since keys are rotated by their positions. Tables go to the folder
`--store` and are found there again. Takes the options of decode.py and prints
its table.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import decode
from decode import Entry

from measuring import load_model
from prose import token_slice
from vq_adapters import (
    AMCOptions,
    FileArtifactStore,
    KVCacheConfig,
    PALUOptions,
    SKVQOptions,
    SVDqOptions,
    calibrate,
)
from vq_adapters.calibration import CALIBRATORS

FIRST = 4000  # token of the prose that calibration begins with
TEXTS, LENGTH = 4, 2048

SCHEDULE = (8, 6, 4, 4, 3, 3, 2, 2)
ALL_CHANNELS = AMCOptions(amc_k_high=0.0, amc_k_mid=0.4, amc_rank_mid=64, amc_rank_low=64, amc_residual_length=32)

# Values of KVCacheConfig on which the tables don't depend, and what their row is called.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "spectral": ("4 bits", {"bit_width_inlier": 4}),
    "skvq": ("4 bits", {"options": SKVQOptions(skvq_bits_key=4, skvq_bits_value=4)}),
    "svdq": (f"bit_schedule={SCHEDULE}", {"options": SVDqOptions(svdq_bit_schedule=SCHEDULE)}),
    "palu": ("4 bits", {"options": PALUOptions(palu_bits_k=4, palu_bits_v=4)}),
    "amc": ("all channels", {"options": ALL_CHANNELS}),
}


@dataclass(frozen=True)
class Calibrated(Entry):
    """A row whose tables are found, or taken from the store, when its caches are first asked for."""

    tables: Callable[[Any], Any] = field(kw_only=True)

    def caches(self, model: Any) -> list[Any]:
        """One fresh cache a layer; keys and values come in as 16 bits."""
        self.tables(model)
        return super().caches(model)


def rows(store: FileArtifactStore, texts: Sequence[Sequence[int]]) -> list[Entry]:
    """Every method without tables and with them, and some with other values."""
    found: list[Entry] = []
    for method in CALIBRATORS:
        tables = functools.partial(calibrate, tokenizer=None, texts=texts, method=method, store=store)
        changed = [CHANGES[method]] if method in CHANGES else []
        for named, values in [("", {}), *changed]:
            name = f"{method} {named}".strip()
            found.append(Entry(name, KVCacheConfig(method=method, **values), True))
            config = KVCacheConfig(method=method, store=store, **values)
            found.append(Calibrated(f"{name}, calibrated", config, True, tables=tables))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print them as they come."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--store", metavar="DIR", help="folder of the tables (default: one that is deleted at the end)")
    own, rest = parser.parse_known_args(argv)
    args = decode.parse(rest)
    steps = decode.PEAK_STEPS if args.peak else args.steps
    if decode.START + args.prompt + steps > FIRST:
        most = FIRST - decode.START
        raise SystemExit(f"--prompt and the steps must come to {most} tokens at most: what follows calibrates")
    tokenizer = load_model(args.model)[1]
    texts = [token_slice(tokenizer, FIRST + i * LENGTH, LENGTH) for i in range(TEXTS)]
    with tempfile.TemporaryDirectory() as folder:
        decode.main(rest, functools.partial(rows, FileArtifactStore(own.store or folder), texts))


if __name__ == "__main__":
    main()
