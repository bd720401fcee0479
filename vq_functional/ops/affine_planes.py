"""Products with affine groups for a CPU: codes become numbers plane by plane, and BLAS does the rest.

MLX's own kernel unpacks every code again for each row that it is multiplied
with. A plane is the codes that stand at one place of all bytes: one step of
the same kind for neighbours in memory, which compilers turn into vectors.
"""

import mlx.core as mx

BYTE = 8


def plane_matmul(x: mx.array, groups: tuple[mx.array, ...], bits: int, group: int, transpose: bool) -> mx.array:
    """Float32 `x` [..., M, K] times the numbers [..., K, N], or with `transpose` times their transpose.

    `groups` are codes, float32 scales and float32 zeros; `bits` and `group` as `has_planes` wants them.
    """
    codes, scales, zeros = groups
    planes = _planes(codes, scales, bits, group)
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


def _planes(codes: mx.array, scales: mx.array, bits: int, group: int) -> list[mx.array]:
    """Code * scale, float32 [..., N * bits / 8] each."""
    per_octet = BYTE // bits
    shape = (*scales.shape, group // per_octet)
    octets = codes.view(mx.uint8)[..., : shape[-2] * shape[-1]]  # the last word may not be full
    # Compiled into one kernel with its broadcast, the product would go number by number; alone it goes by groups.
    wide = mx.depends([mx.broadcast_to(scales[..., None], shape)], [codes])[0]
    planes = [((octets >> (bits * place)) & (2**bits - 1)).astype(mx.float32) for place in range(per_octet)]
    return [(plane.reshape(shape) * wide).flatten(-2) for plane in planes]
