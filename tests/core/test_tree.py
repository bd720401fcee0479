"""Trees: what is flattened comes back, and what can't be a state is refused."""

from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_functional.core.tree import flatten, map_leaves, nbytes, rebuild, static_field


class Pair(NamedTuple):
    first: Any
    second: Any


@attrs.frozen(eq=False)
class Node:
    child: Any
    number: int = static_field()
    other: Any = None


def leaves_of(tree: Any) -> list[mx.array]:
    """The arrays of a tree from left to right."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, tuple):
        return [leaf for child in tree for leaf in leaves_of(child)]
    if isinstance(tree, Node):
        return leaves_of(tree.child) + leaves_of(tree.other)
    return []


def same_shape(one: Any, two: Any) -> bool:
    """Whether two trees have the same classes and static numbers, whatever their arrays."""
    if type(one) is not type(two):
        return False
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same_shape, one, two))
    if isinstance(one, Node):
        return one.number == two.number and same_shape(one.child, two.child) and same_shape(one.other, two.other)
    return True


arrays = st.builds(
    lambda n, dtype: mx.arange(n).astype(dtype), st.integers(0, 5), st.sampled_from([mx.int32, mx.float16])
)
trees = st.recursive(
    arrays | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Node, inner, st.integers(0, 3), inner)
    ),
    max_leaves=8,
)


@given(trees)
def test_a_tree_comes_back(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in leaves_of(tree)]
    back = rebuild(structure, leaves)
    assert same_shape(tree, back)
    assert [id(leaf) for leaf in leaves_of(back)] == [id(leaf) for leaf in leaves]


@given(trees, trees)
def test_structures_are_equal_only_for_trees_of_one_shape(one: Any, two: Any) -> None:
    structures = flatten(one)[1], flatten(two)[1]
    assert (structures[0] == structures[1]) == same_shape(one, two)
    if same_shape(one, two):
        assert hash(structures[0]) == hash(structures[1])


@given(trees)
def test_leaves_are_mapped_in_place(tree: Any) -> None:
    doubled = map_leaves(lambda x, y: x + y, tree, tree)
    assert same_shape(tree, doubled)
    for before, after in zip(leaves_of(tree), leaves_of(doubled), strict=True):
        assert mx.array_equal(after, before * 2)


@given(trees)
def test_bytes_are_those_of_the_leaves(tree: Any) -> None:
    assert nbytes(tree) == sum(leaf.size * leaf.dtype.size for leaf in leaves_of(tree))


def test_bytes_of_known_arrays() -> None:
    tree = (mx.zeros((2, 3), mx.float16), Node(mx.zeros((4,), mx.uint8), 7), None, mx.zeros((), mx.int32))
    assert nbytes(tree) == 12 + 4 + 4
    assert nbytes(None) == nbytes(()) == 0


def test_trees_of_two_shapes_are_not_mapped_together() -> None:
    with pytest.raises(ValueError):
        map_leaves(mx.add, (mx.zeros(1), mx.zeros(1)), (mx.zeros(1),))


@pytest.mark.parametrize(
    "tree", [3, 2.5, "word", [mx.zeros(1)], {"a": mx.zeros(1)}, (mx.zeros(1), 3), Node(5, 1)], ids=repr
)
def test_what_is_no_state_is_refused(tree: Any) -> None:
    with pytest.raises(TypeError, match="a state holds"):
        flatten(tree)


def test_flat_leaves_reach_mlx() -> None:
    tree = Node(Pair(mx.zeros(2) + 1, None), 4, (mx.ones(3) * 2,))
    leaves, structure = flatten(tree)
    mx.eval(leaves)
    stepped = mx.compile(lambda *flat: flatten(map_leaves(lambda x: x + 1, rebuild(structure, flat)))[0])(*leaves)
    back = rebuild(structure, stepped)
    assert back.number == 4 and back.child.second is None
    assert back.child.first.tolist() == [2, 2] and back.other[0].tolist() == [3, 3, 3]
