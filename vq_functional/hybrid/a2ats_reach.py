"""Which rows a token attends to by their place, and how many others it may."""

from fractions import Fraction
from typing import Any

import attrs
import mlx.core as mx

DENOMINATOR = 4096  # of the retrieved share


@attrs.frozen
class Reach:
    """The newest `window` rows, the first `n_sink`, and a share of all rows among the others."""

    window: int
    n_sink: int
    share: Fraction

    @classmethod
    def of(cls, window: int, n_sink: int, share: float) -> "Reach":
        """A token always attends to itself."""
        return cls(max(window, 1), n_sink, Fraction(share).limit_denominator(DENOMINATOR))

    def retrieved(self, tokens: Any) -> Any:
        """ceil(share * tokens), of a number or an int array; in whole numbers, so that both are the same."""
        up, down = self.share.numerator, self.share.denominator
        return tokens // down * up + (tokens % down * up + down - 1) // down

    def count(self, tokens: Any) -> Any:
        """Rows that a token attends to where `tokens` are held, itself among them."""
        most = self.window + self.n_sink + self.retrieved(tokens)
        return min(tokens, most) if isinstance(tokens, int) else mx.minimum(tokens, most)

    def always(self, column: mx.array, last: mx.array) -> mx.array:
        """Bool: rows that the token at `last` attends to wherever it looks."""
        return (column > last - self.window) | (column < self.n_sink)

    def positions(self, tokens: mx.array, columns: int) -> mx.array:
        """Positions int [B, columns] of the rows in token order, -1 behind them; of retrieved rows the least possible.

        So a mask that draws a narrower window hides what was retrieved.
        """
        tokens, column = tokens[:, None], mx.arange(columns)
        count = self.count(tokens)
        newest = tokens - count + column
        position = mx.where(column >= count - self.window, newest, mx.minimum(column, self.n_sink))
        return mx.where(column < count, position, -1)
