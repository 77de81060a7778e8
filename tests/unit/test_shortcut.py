"""Compiled functions of a worker's iterators: each call is for what they give then."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.coordinator.iterators import WorkerIterator


def _rows(start: int, count: int, dtype: str = "float32") -> dx.data.Dataset:
    return dx.data.Dataset.from_tensor_slices(np.arange(start, start + count).astype(dtype))


@dx.function
def _sum(iterator: Any) -> Any:
    return jnp.sum(next(iterator))


@dx.function
def _difference(left: Any, right: Any) -> Any:
    return next(left) - next(right)


def test_elements_of_several_forms() -> None:
    function = dx.function(_sum.python_function)
    batches = WorkerIterator(_rows(0, 10).batch(4).repeat(2))
    assert [float(function(batches)) for _ in range(6)] == [6, 22, 17, 6, 22, 17]
    assert function.trace_count == 2
    whole = WorkerIterator(_rows(0, 10, "int32").batch(4))
    results = [function(whole) for _ in range(2)]
    assert [int(result) for result in results] == [6, 22]
    assert results[0].dtype == np.int32
    assert function.trace_count == 3
    nested = WorkerIterator(_rows(0, 8).batch(4).map(lambda x: {"x": x}))
    with pytest.raises(TypeError):
        function(nested)


def test_no_element_is_lost_between_two_forms() -> None:
    function = dx.function(_sum.python_function)
    sizes = [3, 3, 2, 2, 3, 1, 3, 3]
    parts = [_rows(10 * place, size).batch(size) for place, size in enumerate(sizes)]
    dataset = parts[0]
    for part in parts[1:]:
        dataset = dataset.concatenate(part)
    iterator = WorkerIterator(dataset)
    expected = [sum(range(10 * p, 10 * p + size)) for p, size in enumerate(sizes)]
    assert [float(function(iterator)) for _ in sizes] == expected
    with pytest.raises(StopIteration):
        function(iterator)


def test_iterators_in_another_order_and_twice() -> None:
    function = dx.function(_difference.python_function)
    one, ten = WorkerIterator(_rows(1, 100)), WorkerIterator(_rows(10, 100))
    assert [float(function(one, ten)) for _ in range(3)] == [-9, -9, -9]
    assert [float(function(ten, one)) for _ in range(2)] == [9, 9]
    assert float(function(one, one)) == -1
    assert float(function(one, right=ten)) == 8 - 15


def test_iterators_among_other_arguments() -> None:
    held = WorkerIterator(_rows(100, 50))

    @dx.function
    def add(iterator: Any, number: Any = 0) -> Any:
        return next(iterator) + next(held) + number

    mine = WorkerIterator(_rows(0, 50))
    assert [float(add(mine)) for _ in range(3)] == [100, 102, 104]
    assert float(add(mine, 1000)) == 1106
    assert float(add(mine)) == 108


def test_a_function_that_takes_no_element() -> None:
    @dx.function
    def nothing(iterator: Any) -> Any:
        return jnp.ones(())

    iterator = WorkerIterator(_rows(0, 3))
    assert [float(nothing(iterator)) for _ in range(3)] == [1, 1, 1]
    assert float(next(iterator)) == 0


def test_each_strategy_has_its_own_program() -> None:
    function = dx.function(_sum.python_function)
    iterator = WorkerIterator(_rows(0, 40).batch(4))
    assert [float(function(iterator)) for _ in range(2)] == [6, 22]
    with dx.OneDeviceStrategy("cpu:0").scope():
        assert [float(function(iterator)) for _ in range(2)] == [38, 54]
    assert float(function(iterator)) == 70
