"""Options of anchorkv."""

import attrs

from vq_functional.core.errors import check, check_between, check_choice, check_int, check_number, check_seed
from vq_functional.hybrid.anchor_codes import AnchoredCodec
from vq_functional.hybrid.anchor_state import Sizes
from vq_functional.hybrid.anchors import Rule

SHORT = 4  # prompts of fewer windows than this stay exact


@attrs.frozen(kw_only=True)
class AnchorKVOptions:
    """`theta` is the share of the exact prompt's bytes that its compressed form may take.

    A share `anchor_frac` of the tokens are anchors, among them the first `n_sink`
    and the last `window`; of the others a share `rho` is chosen by attention, averaged
    over `pool_kernel` neighbours (odd; 1 = off), and the rest at random by `seed`.
    `residual_bits` a number of a coded residual.
    """

    theta: float = 0.05
    window: int = 32
    rho: float = 0.7
    anchor_frac: float = 1 / 128
    residual_bits: int = 2
    seed: int = 42
    n_sink: int = 4
    pool_kernel: int = 5

    def __attrs_post_init__(self) -> None:
        check_number("anchorkv", "theta", self.theta, 0, 1)
        check_int("anchorkv", "window", self.window, 1)
        check_between("anchorkv", "rho", self.rho, 0, 1)
        check_number("anchorkv", "anchor_frac", self.anchor_frac, 0, 1)
        check_choice("anchorkv", "residual_bits", self.residual_bits, (1, 2, 3, 4))
        check_seed("anchorkv", self.seed)
        check_int("anchorkv", "n_sink", self.n_sink, 0)
        check_int("anchorkv", "pool_kernel", self.pool_kernel, 1)
        check(self.pool_kernel % 2 == 1, "anchorkv", "pool_kernel", "must be odd", self.pool_kernel)

    @property
    def rule(self) -> Rule:
        """What is chosen of a prompt."""
        sizes = Sizes(self.theta, self.anchor_frac, self.window + self.n_sink, self.residual_bits)
        codec = AnchoredCodec(self.residual_bits, self.seed)
        return Rule(sizes, self.window, self.n_sink, self.rho, self.pool_kernel, codec)

    @property
    def least(self) -> int:
        """Tokens of the shortest prompt that is anchored."""
        return max(SHORT * self.window, self.window + self.n_sink)
