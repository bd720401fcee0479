"""Axes of groups of heads against numpy: few rows and many, even groups and uneven ones."""

import mlx.core as mx
import numpy as np
import pytest

from vq_functional.lowrank.head_groups import HeadGroups, principal_basis


@pytest.mark.parametrize("heads, count", [(4, 4), (4, 1), (5, 2), (5, 3)])
@pytest.mark.parametrize("rows", [9, 20, 30, 200])
@pytest.mark.parametrize("rank", [5, 8, 16])
def test_axes_are_those_along_which_joined_rows_spread_most(heads: int, count: int, rows: int, rank: int) -> None:
    dim, groups = 8, HeadGroups(heads, count)
    mixing = np.random.RandomState(1).standard_normal((dim, dim))
    x = (np.random.RandomState(0).standard_normal((2, heads, rows, dim)) @ mixing + 3).astype(np.float32)
    basis, mean = principal_basis(mx.array(x), groups, rank)
    np.testing.assert_allclose(np.array(mean), x.mean(axis=2), rtol=1e-5, atol=1e-5)
    for row in range(2):
        for span in groups.spans:
            joined = np.concatenate(list(x[row, span] - x[row, span].mean(axis=1, keepdims=True)), axis=1)
            axes = np.array(basis[row, span]).reshape(-1, rank)
            there = min(rank, axes.shape[0])
            assert not axes[:, there:].any()
            wanted = min(there, rows - 1)  # behind these nothing is left that has a direction
            product = axes[:, :wanted].T @ axes[:, :wanted]
            np.testing.assert_allclose(product, np.eye(wanted), atol=1e-4)
            along, energy = np.square(joined @ axes[:, :wanted]).sum(axis=0), np.linalg.svd(joined)[1][:wanted] ** 2
            np.testing.assert_allclose(along, energy, rtol=1e-3, atol=1e-3 * energy[0])
