"""Shuffled data has another order at each iteration, the same one on all workers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.data.distributed import distribute_dataset
from tests.multidevice.input.replicas import flat, mirrored, pieces, target

pytestmark = pytest.mark.multidevice

Dataset = dx.data.Dataset
ROWS = list(range(24))


def _shuffled(seed: int | None = 7, **options: Any) -> Dataset:
    return Dataset.range(24).shuffle(24, seed=seed, **options)


def _epochs(strategy: Any, dataset: Any, count: int = 3) -> list[list[Any]]:
    """Returns the rows of each epoch, with the data set distributed again for each."""
    return [flat(strategy, strategy.experimental_distribute_dataset(dataset)) for _ in range(count)]


def _differ(orders: list[list[Any]]) -> bool:
    return len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("seed", [7, None])
def test_distributed_again_it_has_another_order(strategy: Any, seed: int | None) -> None:
    orders = _epochs(strategy, _shuffled(seed).batch(4))
    assert all(sorted(order) == ROWS for order in orders)
    assert _differ(orders)
    again = _epochs(strategy, _shuffled(seed).batch(4))
    assert (again == orders) == (seed is not None)


def test_every_step_after_the_shuffle_may_be_written_again() -> None:
    strategy, shuffled = mirrored(2), _shuffled()
    tails = [
        lambda data: data.batch(4),
        lambda data: data.map(lambda x: x).batch(4).prefetch(1),
        lambda data: Dataset.zip(data, Dataset.range(24)).map(lambda x, _: x).batch(4),
        lambda data: data.take(24).batch(4),
    ]
    orders = [flat(strategy, strategy.experimental_distribute_dataset(f(shuffled))) for f in tails]
    orders += [list(map(int, shuffled)), list(map(int, shuffled.skip(0)))]
    assert all(sorted(order) == ROWS for order in orders)
    assert _differ(orders)


def test_at_the_same_time_two_distributions_have_two_orders() -> None:
    strategy, dataset = mirrored(2), _shuffled().batch(4)
    first, second = (strategy.experimental_distribute_dataset(dataset) for _ in range(2))
    pairs = list(zip(first, second, strict=True))
    orders = [flat(strategy, [pair[side] for pair in pairs]) for side in range(2)]
    orders += [flat(strategy, first), flat(strategy, second)]
    assert all(sorted(order) == ROWS for order in orders)
    assert _differ(orders)


@pytest.mark.parametrize("seed", [7, None])
def test_without_reshuffling_the_order_stays(seed: int | None) -> None:
    dataset = _shuffled(seed, reshuffle_each_iteration=False).batch(4)
    orders = _epochs(mirrored(2), dataset)
    orders.append([int(x) for batch in dataset for x in batch])
    assert orders == [orders[0]] * 4


def test_a_function_that_returns_the_same_data_set_again() -> None:
    strategy, dataset = mirrored(2), _shuffled().batch(2)
    distributed = [strategy.distribute_datasets_from_function(lambda _: dataset) for _ in range(2)]
    orders = [flat(strategy, each) for each in distributed for _ in range(2)]
    assert all(sorted(order) == ROWS for order in orders)
    assert _differ(orders)


def test_shuffles_that_an_interleave_makes_differ_too() -> None:
    inner = Dataset.range(4).flat_map(
        lambda i: Dataset.range(6).shuffle(6, seed=1).map(lambda j: 6 * i + j)
    )
    orders = _epochs(mirrored(2), inner.batch(4))
    assert all(sorted(order) == ROWS for order in orders)
    assert _differ(orders)


def test_two_shuffles_of_one_seed_stay_in_step() -> None:
    images, labels = _shuffled(3), _shuffled(3)
    next(iter(images))
    for _ in range(2):
        assert all(a == b for a, b in Dataset.zip(images, labels))


@pytest.mark.parametrize("seed", [7, None])
def test_positions_of_later_epochs_are_restored_and_counted_on(seed: int | None) -> None:
    strategy, dataset = mirrored(2), _shuffled(seed).batch(4)
    for _ in range(2):
        flat(strategy, strategy.experimental_distribute_dataset(dataset))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    head = flat(strategy, [next(iterator) for _ in range(2)])
    state = json.loads(json.dumps(iterator.get_state()))
    rest = flat(strategy, iterator)
    assert sorted(head + rest) == ROWS
    following = _epochs(strategy, dataset, 1)
    restarted = _shuffled(seed).batch(4)
    resumed = iter(strategy.experimental_distribute_dataset(restarted))
    resumed.set_state(state)
    assert flat(strategy, resumed) == rest
    assert (_epochs(strategy, restarted, 1) == following) == (seed is not None)


# Several workers.


def _workers_epoch(datasets: list[Dataset], local: int = 1) -> list[list[Any]]:
    """Returns the global batches of one epoch that each worker distributes anew."""
    streams = [
        list(distribute_dataset(dataset, target(local, len(datasets), worker)))
        for worker, dataset in enumerate(datasets)
    ]
    steps = zip(*streams, strict=True)
    return [[x for part in step for piece in pieces(part) for x in piece] for step in steps]


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("policy", ["DATA", "HINT"])
def test_workers_agree_on_each_order(seed: int | None, policy: str) -> None:
    options = dx.data.Options()
    options.experimental_distribute.auto_shard_policy = policy

    def make() -> Dataset:
        data = _shuffled(seed)
        if policy == "HINT":
            hint = dx.data.experimental.SHARD_HINT
            data = data.shard(hint, hint)
        return data.batch(6).with_options(options)

    datasets = [make() for _ in range(3)]
    orders = []
    for epoch in range(3):
        batches = _workers_epoch(datasets)
        orders.append([x for batch in batches for x in batch])
        assert sorted(orders[-1]) == ROWS
        # A worker may look at the data by itself.
        next(iter(datasets[epoch])) if policy == "DATA" else None
    assert _differ(orders)
    # Data sets that are made again for each epoch.
    rebuilt = [[x for b in _workers_epoch([make() for _ in range(3)]) for x in b] for _ in range(3)]
    assert all(sorted(order) == ROWS for order in rebuilt)
    assert _differ(rebuilt) == (seed is None)


def test_one_worker_and_several_have_the_same_batches() -> None:
    alone, together = _shuffled().batch(6), [_shuffled().batch(6) for _ in range(2)]
    for _ in range(2):
        batches = [batch.tolist() for batch in alone]
        assert _workers_epoch(together, local=1) == batches
    assert np.concatenate(batches).tolist() != ROWS
