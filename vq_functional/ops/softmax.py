"""Softmax of scores, which costs more than the products beside it where MLX computes `exp` number by number."""

import mlx.core as mx

from vq_functional.ops.device import has_vector_exp

LOWEST = mx.finfo(mx.float32).min  # the score of what is not seen; a weight of zero beside any other

# log 2 in two parts: any whole number below 2^10 times the first is exact.
_LN2, _LN2_REST = 0.693359375, -2.1219444005469057e-4
_BIAS, _MANTISSA = 127, 23  # of the exponent of a float32, and the bits behind it
# e^r for -log 2 < r <= 0: interpolated at the Chebyshev points, to 3e-9 of it.
_EXP = (
    0.9999999986201364,
    0.999999804730863,
    0.4999954714602836,
    0.1666271003780021,
    0.04150088107176143,
    0.007971991433840553,
    0.0009857852327719518,
)


def softmax(scores: mx.array) -> mx.array:
    """Softmax of float32 `scores` over the last axis; NaN where one is NaN or +infinity."""
    return mx.softmax(scores, axis=-1) if has_vector_exp() else _softmax(scores)


def softmax_of(scores: mx.array, seen: mx.array) -> mx.array:
    """Softmax of float32 `scores` over what is `seen` along the last axis; zero elsewhere, also where nothing is."""
    return mx.where(seen, softmax(mx.where(seen, scores, LOWEST)), 0.0)


@mx.compile
def _softmax(scores: mx.array) -> mx.array:
    powers = _exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _exp(x: mx.array) -> mx.array:
    """e^x of float32 `x` <= 0 by steps that compilers turn into vector instructions; zero below the normal numbers."""
    x = mx.maximum(x, -(_BIAS + 0.1) * _LN2)  # of this the bits below are those of zero
    whole = (x * (1 / (_LN2 + _LN2_REST))).astype(mx.int32)
    power = whole.astype(mx.float32)
    rest, out = x - power * _LN2 - power * _LN2_REST, _EXP[-1]
    for coefficient in reversed(_EXP[:-1]):
        out = out * rest + coefficient
    return out * ((whole + _BIAS) << _MANTISSA).view(mx.float32)
