"""Range coding by asymmetric numeral systems (rANS, arXiv 1311.2540), on the host.

The symbols go round a number of lanes, each a coder of its own, so that one
step codes as many symbols as there are lanes. The lanes share one run of words,
from which a reader can tell whose turn it is.
"""

import numpy as np

from vq_functional.ops.bit_streams import Ints

PRECISION = 12
TOTAL = 1 << PRECISION  # what the frequencies of a table sum to
LOW = 1 << 16  # states are in LOW .. 2**32 - 1, words have 16 bits


def frequencies(weights: Ints) -> Ints:
    """Frequencies uint32 [K, A] that sum to TOTAL in every row, about in proportion to `weights`, integers.

    Where a weight is not 0, neither is the frequency; the first of the largest takes what rounding leaves.
    """
    weights = weights.astype(np.int64)
    present = weights > 0
    room = TOTAL - present.sum(axis=1, keepdims=True)
    found = present + weights * room // np.maximum(weights.sum(axis=1, keepdims=True), 1)
    found[np.arange(len(found)), weights.argmax(axis=1)] += TOTAL - found.sum(axis=1)
    return found.astype(np.uint32)


def encode(symbols: Ints, table: Ints, frequency: Ints, lanes: int) -> tuple[Ints, Ints]:
    """States uint32 [lanes] and words uint16 of `symbols` [N], each by row `table` [N] of `frequency` [K, A]."""
    below = frequency.cumsum(axis=1, dtype=np.uint32) - frequency
    share, first = frequency[table, symbols], below[table, symbols]
    most = (share << (32 - PRECISION)) - np.uint32(1)  # a state above it would leave the range
    state = np.full(lanes, LOW, np.uint32)
    words: list[Ints] = []
    for start in reversed(range(0, len(symbols), lanes)):
        lot = slice(start, start + lanes)
        f = share[lot]
        x = state[: len(f)]
        full = x > most[lot]
        words.append(x[full].astype(np.uint16))
        whole, rest = np.divmod(np.where(full, x >> 16, x), f)
        state[: len(f)] = (whole << PRECISION) + rest + first[lot]
    return state, np.concatenate([np.zeros(0, np.uint16), *reversed(words)])


def decode(states: Ints, words: Ints, table: Ints, frequency: Ints, follows: Ints, back: int, shift: int = 0) -> Ints:
    """Symbols uint16 [N] of `encode`, by the same `frequency`.

    A symbol was coded by row `table` [N]; where it `follows`, bool [N], plus the symbol `back` before it shifted right
    by `shift`; `back` is at least the number of lanes. Raises ValueError where the states and words are not those of N
    symbols.
    """
    size, lanes, states, taken = frequency.shape[1], len(states), states.copy(), 0
    share, below = (x.reshape(-1) for x in (frequency, frequency.cumsum(axis=1, dtype=np.uint32) - frequency))
    symbol_at = np.repeat(np.tile(np.arange(size, dtype=np.uint16), len(frequency)), share)
    symbols = np.zeros(back + len(table), np.uint16)
    for start in range(0, len(table), lanes):
        rows = table[start : start + lanes]
        rows = rows + follows[start : start + lanes] * (symbols[start : start + len(rows)] >> shift)
        x = states[: len(rows)]
        slot = x & np.uint32(TOTAL - 1)
        symbol = symbol_at[rows * TOTAL + slot]
        symbols[back + start : back + start + len(rows)] = symbol
        entry = rows * size + symbol
        x = share[entry] * (x >> PRECISION) + slot - below[entry]
        short = np.flatnonzero(x < LOW)
        came = words[taken : taken + len(short)]
        if len(came) < len(short):
            raise ValueError("too few words")
        x[short] = (x[short] << 16) | came
        states[: len(rows)] = x
        taken += len(short)
    if taken != len(words) or (states != LOW).any():
        raise ValueError("words that belong to no symbols")
    return symbols[back:]
