"""Products with affine groups for a CPU: codes become numbers plane by plane, and BLAS does the rest.

MLX's own kernel unpacks every code again for each row that it is multiplied
with. A plane is the codes that stand at one place of all bytes: one step of
the same kind for neighbours in memory, which compilers turn into vectors.
"""

import mlx.core as mx

BYTE = 8
FEW = 4  # so many more rows of a product cost less than to scale all codes


def plane_matmul(x: mx.array, groups: tuple[mx.array, ...], bits: int, group: int, transpose: bool) -> mx.array:
    """Float32 `x` [..., M, K] times the numbers [..., K, N], or with `transpose` times their transpose.

    `groups` are codes, float32 scales and float32 zeros; `bits` and `group` as `has_planes` wants them.
    """
    codes, scales, zeros = groups
    if not transpose and x.shape[-2] * (scales.shape[-1] - 1) <= FEW:
        return _by_scaled_rows(x, groups, bits, group)
    planes = [_scaled(plane, codes, scales, group) for plane in _planes(codes, scales, bits, group)]
    if transpose:
        sums = x.reshape(*x.shape[:-1], x.shape[-1] // group, group).sum(axis=-1)
        out = sums @ zeros.swapaxes(-1, -2)
        for place, plane in enumerate(planes):
            out = out + x[..., place :: len(planes)] @ plane.swapaxes(-1, -2)
        return out
    steps = mx.stack([x @ plane for plane in planes], axis=-1).flatten(-2)
    return (steps.reshape(*steps.shape[:-1], scales.shape[-1], group) + (x @ zeros)[..., None]).flatten(-2)


def has_planes(bits: int, group: int) -> bool:
    """Whether no code crosses a byte, and each plane has whole groups."""
    return bits > 1 and BYTE % bits == 0 and group % (BYTE // bits) == 0


def _by_scaled_rows(x: mx.array, groups: tuple[mx.array, ...], bits: int, group: int) -> mx.array:
    """`x` times the numbers: `x` times the scales of each group, and that times the codes as they are."""
    codes, scales, zeros = groups
    rows = (x[..., None, :, :] * scales.swapaxes(-1, -2)[..., None, :]).flatten(-3, -2)
    steps = mx.stack([rows @ plane for plane in _planes(codes, scales, bits, group)], axis=-1)
    count = scales.shape[-1]
    steps = steps.reshape(*steps.shape[:-3], count, x.shape[-2], count, group)
    own = mx.diagonal(steps, axis1=-4, axis2=-2).swapaxes(-1, -2)  # a group's columns by its own scales
    return (own + (x @ zeros)[..., None]).flatten(-2)


def _planes(codes: mx.array, scales: mx.array, bits: int, group: int) -> list[mx.array]:
    """The codes as float32 [..., N * bits / 8] each."""
    per_octet = BYTE // bits
    count = scales.shape[-1] * (group // per_octet)
    octets = codes.view(mx.uint8)[..., :count]  # the last word may not be full
    return [((octets >> (bits * place)) & (2**bits - 1)).astype(mx.float32) for place in range(per_octet)]


def _scaled(plane: mx.array, codes: mx.array, scales: mx.array, group: int) -> mx.array:
    """A plane's codes * scale."""
    wide = (*scales.shape, plane.shape[-1] // scales.shape[-1])
    # Compiled into one kernel with its broadcast, the product would go number by number; alone it goes by groups.
    factors = mx.depends([mx.broadcast_to(scales[..., None], wide)], [codes])[0]
    return (plane.reshape(wide) * factors).flatten(-2)
