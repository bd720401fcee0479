"""By which frequencies the codes of each channel go: those of the codes, of their differences, or of what follows what.

Arrays are [N, C]: N tokens, and the channels of all heads, one head after the other.
"""

from itertools import chain, combinations

import attrs
import numpy as np

from vq_functional.ops.bit_streams import Ints
from vq_functional.ops.rans import PRECISION, TOTAL, frequencies

RUN = 10  # tokens, of which the first is what the others differ from
ENTRY_BITS = 5  # about what one frequency takes
CONTEXT_BITS = 4  # of the code before, the upper ones, by which a code may go

# At fixed width; by frequencies of the channel, or of the head: of codes, of differences, of codes after like ones.
FIXED, PLAIN, DELTA, HEAD_PLAIN, HEAD_DELTA, HEAD_NEXT = range(6)
OWN, DELTAS = (PLAIN, DELTA), (DELTA, HEAD_DELTA)
OCTAVE = np.array([16384, 19484, 23170, 27554], np.int64)  # 2**14 * 2**(i / 4)


@attrs.frozen(eq=False)
class Model:
    """A way for each channel, and the tables that these ways need."""

    bits: int
    heads: int
    way: Ints  # [C]
    levels: Ints  # uint8 [K - 1, A]: all tables but the first, which is that of fixed width

    def frequency(self) -> Ints:
        """Frequencies uint32 [K, A]."""
        place = np.maximum(self.levels.astype(np.int64) - 1, 0)
        place = np.maximum(place - place.max(axis=1, keepdims=True, initial=0) + 4 * 16, 0)
        weights = np.where(self.levels > 0, OCTAVE[place % 4] << place // 4, 0)
        fixed = np.zeros((1, 2 ** (self.bits + 1) - 1), np.uint32)
        fixed[0, : 2**self.bits] = TOTAL >> self.bits
        return np.concatenate([fixed, frequencies(weights)])

    def symbols(self, codes: Ints) -> Ints:
        """What goes in place of `codes`."""
        return np.where(self._differs(len(codes)), deltas(codes, self.bits), codes)

    def codes(self, symbols: Ints) -> Ints:
        """Inverse of `symbols`."""
        symbols = symbols.astype(np.int16)
        restored = symbols - (2**self.bits - 1) + symbols[_anchors(len(symbols))]
        return np.where(self._differs(len(symbols)), restored, symbols).astype(np.uint8)

    def tables(self, count: int) -> tuple[Ints, Ints]:
        """Table [N, C] of each symbol, where its context is 0; and the channels, bool [C], that go by contexts."""
        first, _ = layout(self.bits, self.heads, self.way)
        anchor = np.isin(self.way, DELTAS) & ~self._differs(count)
        return np.where(anchor, 0, first), self.way == HEAD_NEXT

    def _differs(self, count: int) -> Ints:
        """Bool [N, C]: what goes as differences."""
        return np.isin(self.way, DELTAS) & (np.arange(count) % RUN > 0)[:, None]


def layout(bits: int, heads: int, way: Ints) -> tuple[Ints, int]:
    """The first table [C] of each channel, and how many tables there are."""
    channel = np.arange(len(way))
    owner = np.where(np.isin(way, OWN), channel, _head(len(way), heads))
    key = np.where(way == FIXED, 0, way * len(way) + owner)
    unique, index = np.unique(np.concatenate([[0], key]), return_inverse=True)
    sizes = np.where(unique // max(len(way), 1) == HEAD_NEXT, 2 ** min(bits, CONTEXT_BITS), 1)
    return (sizes.cumsum() - sizes)[index[1:]], int(sizes.sum())


def choose(codes: Ints, bits: int, heads: int, use_delta: bool, per_channel: bool) -> Model:
    """The model with which `codes` take least, tables included."""
    levels = {way: _levels(found) for way, found in _counts(codes, bits, heads, use_delta, per_channel).items()}
    cost = _costs(codes, bits, heads, {way: _sent_lengths(found, bits) for way, found in levels.items()})
    price = {way: ENTRY_BITS * (found > 0).sum(axis=(1, 2)) for way, found in levels.items()}
    for own in levels.keys() & set(OWN):
        cost[own] = cost[own] + price.pop(own)
    best = _best(cost, price, heads)
    return Model(bits, heads, best, _used(levels, best, bits, heads))


def _best(cost: dict[int, Ints], price: dict[int, Ints], heads: int) -> Ints:
    """The way [C] of each channel; a head pays the `price` [heads] of the shared tables that its channels may use."""
    alone = [way for way in cost if way not in price]
    least, best = np.full(heads, np.inf), np.zeros(len(cost[FIXED]), int)
    for shared in chain.from_iterable(combinations(price, n) for n in range(len(price) + 1)):
        ways = [*alone, *shared]
        costs = np.array([cost[way] for way in ways])
        total = costs.min(axis=0).reshape(heads, -1).sum(axis=1) + sum(price[way] for way in shared)
        better = np.repeat(total < least, len(best) // heads)
        best = np.where(better, np.array(ways)[costs.argmin(axis=0)], best)
        least = np.minimum(least, total)
    return best


def _used(levels: dict[int, Ints], way: Ints, bits: int, heads: int) -> Ints:
    """Levels of the tables that channels use, in the order of `layout`."""
    first, total = layout(bits, heads, way)
    used = np.zeros((total - 1, 2 ** (bits + 1) - 1), np.uint8)
    for kind, found in levels.items():
        for channel in np.flatnonzero(way == kind):
            own = found[channel * len(found) // len(way)]
            used[first[channel] - 1 : first[channel] - 1 + len(own)] = own
    return used


def ideal_bits(codes: Ints, bits: int, heads: int, use_delta: bool, per_channel: bool) -> float:
    """Shannon's entropy of `codes`, each channel in the best of the allowed ways; no tables."""
    counts = _counts(codes, bits, heads, use_delta, per_channel)
    cost = _costs(codes, bits, heads, {way: _ideal_lengths(found) for way, found in counts.items()})
    return float(np.min(list(cost.values()), axis=0).sum())


def deltas(codes: Ints, bits: int) -> Ints:
    """Differences from the first code of the run, raised so that none is below zero."""
    return codes.astype(np.int16) - codes[_anchors(len(codes))] + (2**bits - 1)


def context(codes: Ints, bits: int) -> Ints:
    """The upper bits of the code before in the channel, 0 for the first."""
    return np.concatenate([np.zeros_like(codes[:1]), codes[:-1]]) >> context_shift(bits)


def context_shift(bits: int) -> int:
    """Lower bits of a code that are no context of the next one."""
    return max(bits - CONTEXT_BITS, 0)


def _counts(codes: Ints, bits: int, heads: int, use_delta: bool, per_channel: bool) -> dict[int, Ints]:
    """For each way how often each symbol comes, [channels or heads, tables, A]."""
    channels, size = codes.shape[1], 2 ** (bits + 1) - 1
    inside = np.arange(len(codes)) % RUN > 0
    kinds = [(PLAIN, HEAD_PLAIN, codes), (DELTA, HEAD_DELTA, deltas(codes, bits)[inside])]
    found = {}
    for own, shared, symbols in kinds if use_delta else kinds[:1]:
        counts = _histograms(np.arange(channels), symbols, channels, size)
        found[shared] = counts.reshape(heads, -1, size).sum(axis=1)[:, None]
        if per_channel:
            found[own] = counts[:, None]
    if use_delta:
        contexts = 2 ** min(bits, CONTEXT_BITS)
        owner = _head(channels, heads) * contexts + context(codes, bits)
        found[HEAD_NEXT] = _histograms(owner, codes, heads * contexts, size).reshape(heads, -1, size)
    return found


def _costs(codes: Ints, bits: int, heads: int, lengths: dict[int, Ints]) -> dict[int, Ints]:
    """Bits [C] of each channel in each way; `lengths` of the symbols as in `_counts`."""
    count, channels = codes.shape
    cost = {FIXED: np.full(channels, float(count * bits))}
    inside = np.arange(count) % RUN > 0
    for way, length in lengths.items():
        owner = np.arange(channels) if way in OWN else _head(channels, heads)
        if way in DELTAS:
            anchors = bits * int((~inside).sum())
            cost[way] = length[owner, 0, deltas(codes, bits)[inside]].sum(axis=0) + anchors
        else:
            cost[way] = length[owner, context(codes, bits) if way == HEAD_NEXT else 0, codes].sum(axis=0)
    return cost


def _sent_lengths(levels: Ints, bits: int) -> Ints:
    """Bits of each symbol by the frequencies that `levels` stand for."""
    model = Model(bits, 0, np.zeros(0), levels.reshape(-1, levels.shape[-1]))
    return PRECISION - np.log2(np.maximum(model.frequency()[1:], 1)).reshape(levels.shape)


def _ideal_lengths(counts: Ints) -> Ints:
    share = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return -np.log2(np.where(share > 0, share, 1))


def _levels(counts: Ints) -> Ints:
    """Counts as uint8 on a scale of quarter octaves; 0 for none."""
    return np.where(counts > 0, 1 + np.round(4 * np.log2(np.maximum(counts, 1))), 0).astype(np.uint8)


def _histograms(owner: Ints, symbols: Ints, owners: int, size: int) -> Ints:
    """How often each symbol comes, [owners, size]; `owner` as `symbols` or one for each channel."""
    return np.bincount((owner * size + symbols).reshape(-1), minlength=owners * size).reshape(owners, size)


def _head(channels: int, heads: int) -> Ints:
    return np.arange(channels) * heads // max(channels, 1)


def _anchors(count: int) -> Ints:
    """Index [N] of the first token of each token's run."""
    return np.arange(count) // RUN * RUN
