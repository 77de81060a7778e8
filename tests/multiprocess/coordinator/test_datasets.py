"""Per-worker data sets and iterators on real workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from tests.multiprocess.coordinator.conftest import wait_until

pytestmark = pytest.mark.multiprocess


def pull(iterator: Any) -> tuple[int, Any]:
    time.sleep(0.002)
    return experimental_get_current_worker_index(), next(iterator)


def by_worker(results: list[tuple[int, Any]]) -> dict[int, list[Any]]:
    """Returns what each worker got, in order."""
    return {index: [x for i, x in results if i == index] for index in (0, 1)}


def test_each_worker_has_its_own_data_set(all_up: ClusterCoordinator) -> None:
    def make() -> Any:
        first = 1000 * experimental_get_current_worker_index()
        return dx.data.Dataset.range(first, first + 1000)

    iterator = iter(all_up.create_per_worker_dataset(make))
    results = all_up.fetch([all_up.schedule(pull, args=(iterator,)) for _ in range(100)])
    for index, elements in by_worker(results).items():
        assert elements
        assert sorted(elements) == list(range(1000 * index, 1000 * index + len(elements)))


def test_the_iterator_is_lifted_by_compiled_functions(coordinator: ClusterCoordinator) -> None:
    @dx.function
    def step(iterator: Any) -> Any:
        return next(iterator) * 2

    dataset = coordinator.create_per_worker_dataset(
        lambda: dx.data.Dataset.from_tensor_slices(np.full(50, 3.0, np.float32)).batch(2)
    )
    values = [coordinator.schedule(step, args=(iter(dataset),)) for _ in range(3)]
    for value in coordinator.fetch(values):
        np.testing.assert_array_equal(value, [6.0, 6.0])


def pull_too_often(coordinator: ClusterCoordinator, iterator: Any) -> None:
    """Pulls seven times, when two workers have three elements each at most."""
    for _ in range(7):
        coordinator.schedule(pull, args=(iterator,))
    coordinator.join()


def test_the_end_of_the_data_and_a_new_iterator(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: dx.data.Dataset.range(3))
    for _ in range(2):
        iterator = iter(dataset)
        with pytest.raises(dx.OutOfRangeError):
            pull_too_often(coordinator, iterator)
        assert coordinator.done()


@pytest.mark.parametrize(
    "make",
    [
        lambda: dx.data.Dataset.range(8).map(lambda x: x + 1),
        lambda: np.arange(1, 9),
        lambda: [np.array([1, 2]), np.array([3, 4])],
        lambda: range(1, 9),
    ],
    ids=["dataset", "array", "batches", "iterable"],
)
def test_data_sets_of_any_kind(coordinator: ClusterCoordinator, make: Any) -> None:
    expected = [1, 2] if isinstance(make(), list) else 1
    for given in (make(), make):
        iterator = iter(coordinator.create_per_worker_dataset(given))
        _, element = coordinator.schedule(pull, args=(iterator,)).fetch()
        assert np.asarray(element).tolist() == expected


def test_a_generator_function_gives_elements(coordinator: ClusterCoordinator) -> None:
    def generate() -> Iterator[int]:
        yield from (5, 6)

    iterator = iter(coordinator.create_per_worker_dataset(generate))
    assert coordinator.schedule(pull, args=(iterator,)).fetch()[1] == 5


class Numbers:
    """Something iterable, whose class is a function that makes it."""

    def __iter__(self) -> Iterator[int]:
        return iter((7, 8))


def test_a_class_makes_the_data_set(coordinator: ClusterCoordinator) -> None:
    for given in (Numbers, Numbers()):
        iterator = iter(coordinator.create_per_worker_dataset(given))
        assert coordinator.schedule(pull, args=(iterator,)).fetch()[1] == 7


def test_an_element_if_there_is_one(coordinator: ClusterCoordinator) -> None:
    def total(iterator: Any) -> int:
        found = 0
        while (optional := iterator.get_next_as_optional()).has_value():
            found += int(optional.get_value())
        return found

    iterator = iter(coordinator.create_per_worker_dataset(dx.data.Dataset.range(5)))
    assert coordinator.schedule(total, args=(iterator,)).fetch() == 10


def test_a_distributed_data_set(coordinator: ClusterCoordinator) -> None:
    def make() -> Any:
        strategy = dx.OneDeviceStrategy("CPU:0")
        return strategy.distribute_datasets_from_function(
            lambda context: dx.data.Dataset.from_tensor_slices([3] * 3)
        )

    dataset = coordinator.create_per_worker_dataset(make)
    assert coordinator.schedule(pull, args=(iter(dataset),)).fetch()[1] == 3
    assert dataset.element_spec.shape == ()


def test_the_element_spec_is_asked_of_a_worker(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(
        lambda: dx.data.Dataset.from_tensor_slices(np.zeros((6, 2), np.float32)).batch(3, True)
    )
    assert dataset.element_spec == dx.data.TensorSpec((3, 2), np.float32)
    assert iter(dataset).element_spec == dataset.element_spec


def test_a_data_set_is_an_argument_itself(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(dx.data.Dataset.range(5))
    total = coordinator.schedule(lambda own: sum(int(x) for x in own), args=(dataset,))
    assert total.fetch() == 10


def test_workers_shuffle_a_copy_in_an_order_of_their_own(all_up: ClusterCoordinator) -> None:
    def order(own: Any) -> tuple[int, list[int]]:
        time.sleep(0.1)
        return experimental_get_current_worker_index(), [int(x) for x in own]

    dataset = all_up.create_per_worker_dataset(dx.data.Dataset.range(500).shuffle(500))
    orders = by_worker(all_up.fetch([all_up.schedule(order, args=(dataset,)) for _ in range(6)]))
    assert orders[0][0] != orders[1][0]
    assert sorted(orders[0][0]) == sorted(orders[1][0]) == list(range(500))


def test_iterators_together_with_other_arguments(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: dx.data.Dataset.range(100))
    nest = {"it": iter(dataset), "own": PerWorkerValues([10, 20])}

    def step(nest: Any, scale: Any, by: int) -> Any:
        return next(nest["it"]) * 0 + nest["own"] * scale + by

    scale = coordinator.schedule(lambda: 2)
    value = coordinator.schedule(step, args=(nest, scale), kwargs={"by": 1})
    assert value.fetch() in (21, 41)


def test_a_restarted_worker_makes_its_data_set_again(all_up: ClusterCoordinator) -> None:
    def make() -> Any:
        return dx.data.Dataset.range(10_000)

    iterator = iter(all_up.create_per_worker_dataset(make))
    for _ in range(60):
        all_up.schedule(pull, args=(iterator,))
    all_up.join()
    before = all_up.status().workers[0]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: all_up.status().workers[0].restarts > before.restarts)
    results = all_up.fetch([all_up.schedule(pull, args=(iterator,)) for _ in range(60)])
    elements = by_worker(results)
    # Worker 0 begins at the start again, worker 1 goes on.
    assert min(elements[0]) == 0 and sorted(elements[0]) == list(range(len(elements[0])))
    assert not elements[1] or min(elements[1]) > 0


def test_what_is_no_data_set(coordinator: ClusterCoordinator) -> None:
    for make, message in ((lambda: None, "returned None"), (lambda: 3, "cannot be made of 3")):
        iterator = iter(coordinator.create_per_worker_dataset(make))
        coordinator.schedule(pull, args=(iterator,))
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            coordinator.join()
        assert "while the worker made" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        coordinator.create_per_worker_dataset(x for x in [1])
    with pytest.raises(TypeError, match="neither a data set nor a function"):
        coordinator.create_per_worker_dataset(3)
    with pytest.raises(TypeError, match=r"dataset_fn='train\.csv' is neither a data set nor"):
        coordinator.create_per_worker_dataset("train.csv")


def test_the_iterator_gives_nothing_here(coordinator: ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dx.data.Dataset.range(3)))
    assert iter(iterator) is iterator
    for use in (lambda: next(iterator), iterator.get_next):
        with pytest.raises(TypeError, match="has its elements on the workers"):
            use()
