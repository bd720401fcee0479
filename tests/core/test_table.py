"""Tables: arrays that are options."""

import json

import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from vq_functional.core.describe import describe, restore
from vq_functional.core.table import Table, check_table, to_table


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 4), (0,)])
def test_an_array_comes_back(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for array in (numbers, mx.array(numbers)):
        table = Table.of(array)
        assert table.shape == shape and table.nbytes == numbers.nbytes
        assert table.array.dtype == mx.float32 and np.array_equal(np.array(table.array), numbers)


def test_tables_are_equal_by_content() -> None:
    one, two, other = (Table.of(mx.array(x)) for x in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]))
    assert one == two and hash(one) == hash(two) and one != other
    assert Table.of(mx.array([[1.0, 2.0]])) != one


def test_a_table_survives_json() -> None:
    table = Table.of(mx.random.normal((4, 5)))
    assert restore(json.loads(json.dumps(describe(table)))) == table


def test_options_take_arrays_tables_and_nothing() -> None:
    table = Table.of([1.0, 2.0])
    assert to_table(None) is None and to_table(table) is table and to_table(mx.array([1.0, 2.0])) == table


def test_wrong_shapes_and_numbers_are_refused() -> None:
    check_table("m", "f", Table.of(mx.ones((2, 3))), (None, 3), (3,))
    with pytest.raises(vq.QuantizerConfigError, match=r"m: `f` must be an array of shape \(2,\).*got \(3,\)"):
        check_table("m", "f", Table.of(mx.ones((3,))), (2,))
    with pytest.raises(vq.QuantizerConfigError, match="must be finite"):
        check_table("m", "f", Table.of(mx.array([1.0, mx.nan])), (2,))


@pytest.mark.parametrize("value", ["x", [[1.0, 2.0], [3.0]], object()])
def test_what_is_no_array_of_numbers_is_refused(value: object) -> None:
    with pytest.raises(vq.QuantizerConfigError, match="table: `array` must hold numbers"):
        to_table(value)  # type: ignore[arg-type]
