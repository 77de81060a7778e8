"""Compiled functions of data set iterators: each call is for what they give then."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx


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
    batches = iter(_rows(0, 10).batch(4).repeat(2))
    assert [float(function(batches)) for _ in range(6)] == [6, 22, 17, 6, 22, 17]
    assert function.trace_count == 2
    whole = iter(_rows(0, 10, "int32").batch(4))
    results = [function(whole) for _ in range(2)]
    assert [int(result) for result in results] == [6, 22]
    assert results[0].dtype == np.int32
    assert function.trace_count == 3
    nested = iter(_rows(0, 8).batch(4).map(lambda x: {"x": x}))
    with pytest.raises(TypeError):
        function(nested)


def test_no_element_is_lost_between_two_forms() -> None:
    function = dx.function(_sum.python_function)
    sizes = [3, 3, 2, 2, 3, 1, 3, 3]
    parts = [_rows(10 * place, size).batch(size) for place, size in enumerate(sizes)]
    dataset = parts[0]
    for part in parts[1:]:
        dataset = dataset.concatenate(part)
    iterator = iter(dataset)
    expected = [sum(range(10 * p, 10 * p + size)) for p, size in enumerate(sizes)]
    assert [float(function(iterator)) for _ in sizes] == expected
    with pytest.raises(StopIteration):
        function(iterator)


def test_iterators_in_another_order_and_twice() -> None:
    function = dx.function(_difference.python_function)
    one, ten = iter(_rows(1, 100)), iter(_rows(10, 100))
    assert [float(function(one, ten)) for _ in range(3)] == [-9, -9, -9]
    assert [float(function(ten, one)) for _ in range(2)] == [9, 9]
    assert float(function(one, one)) == -1
    assert float(function(one, right=ten)) == 8 - 15


def test_iterators_among_other_arguments() -> None:
    held = iter(_rows(100, 50))

    @dx.function
    def add(iterator: Any, number: Any = 0) -> Any:
        return next(iterator) + next(held) + number

    mine = iter(_rows(0, 50))
    assert [float(add(mine)) for _ in range(3)] == [100, 102, 104]
    assert float(add(mine, 1000)) == 1106
    assert float(add(mine)) == 108


def test_a_function_that_takes_no_element() -> None:
    @dx.function
    def nothing(iterator: Any) -> Any:
        return jnp.ones(())

    iterator = iter(_rows(0, 3))
    assert [float(nothing(iterator)) for _ in range(3)] == [1, 1, 1]
    assert float(next(iterator)) == 0


def test_each_strategy_has_its_own_program() -> None:
    function = dx.function(_sum.python_function)
    iterator = iter(_rows(0, 40).batch(4))
    assert [float(function(iterator)) for _ in range(2)] == [6, 22]
    with dx.OneDeviceStrategy("cpu:0").scope():
        assert [float(function(iterator)) for _ in range(2)] == [38, 54]
    assert float(function(iterator)) == 70


def test_a_loop_over_a_data_set_reads_it_at_each_call() -> None:
    total = dx.Variable(0.0)
    shuffled = _rows(0, 10).shuffle(10).batch(4)
    orders = []

    @dx.function
    def train(dataset: Any) -> Any:
        for batch in dataset:
            orders.append(np.asarray(batch).tolist())
            total.assign_add(jnp.sum(batch))
        return total.read_value()

    assert [float(train(shuffled)) for _ in range(3)] == [45, 90, 135]
    assert len(orders) == 9


@pytest.mark.parametrize("start", [iter, dx.data.Dataset.as_numpy_iterator])
def test_an_iterator_that_a_function_makes_begins_anew_at_each_call(start: Any) -> None:
    @dx.function
    def first_two(dataset: Any) -> Any:
        iterator = start(dataset)
        return next(iterator) + 10 * next(iterator)

    assert [float(first_two(_rows(number, 5))) for number in range(3)] == [10, 21, 32]
    dataset = _rows(1, 5)
    assert [float(first_two(dataset)) for _ in range(2)] == [21, 21]


def test_a_trace_does_not_keep_its_iterator() -> None:
    """Otherwise its thread goes on until Python happens to look for cycles."""
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = dx.data.Dataset.range(12).batch(4)

    @dx.function
    def step(iterator: Any) -> Any:
        def replica(x: Any) -> Any:
            return jax.grad(lambda y: dx.get_replica_context().all_reduce("SUM", y))(x.sum() * 1.0)

        return strategy.run(replica, args=(next(iterator),))

    gc.collect()
    gc.disable()
    try:
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        step(iterator)
        kept = weakref.ref(iterator)
        del iterator
        assert kept() is None
    finally:
        gc.enable()
