"""Forms that TensorFlow's tutorials use: the coordinator in functions, tables as arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx

pytestmark = pytest.mark.multiprocess


def test_data_set_functions_refer_to_the_coordinators_strategy(coordinator: Any) -> None:
    def per_worker_dataset_fn() -> Any:
        def dataset_fn(input_context: dx.InputContext) -> Any:
            size = input_context.get_per_replica_batch_size(2)
            return dx.data.Dataset.range(8).repeat().batch(size)

        return coordinator.strategy.distribute_datasets_from_function(dataset_fn)

    class Trainer:
        """An object that holds its coordinator, as programs do."""

        def __init__(self) -> None:
            self.coordinator = coordinator

        def make(self) -> Any:
            rows = dx.data.Dataset.range(8).repeat().batch(2)
            return self.coordinator.strategy.experimental_distribute_dataset(rows)

    @dx.function
    def step(iterator: Any) -> Any:
        return coordinator.strategy.run(lambda x: jnp.sum(x), args=(next(iterator),))

    for make in (per_worker_dataset_fn, Trainer().make):
        iterator = iter(coordinator.create_per_worker_dataset(make))
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(2)]
        assert set(map(int, coordinator.fetch(values))) <= {1, 5}
    here = coordinator.schedule(lambda: dx.get_strategy() is coordinator.strategy)
    assert here.fetch()


def test_functions_are_not_traced_again_for_tables_of_the_same_form(
    strategy: dx.ParameterServerStrategy, coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioner = dx.partitioners.FixedShardsPartitioner(2)
    monkeypatch.setattr(strategy, "variable_partitioner", partitioner)
    values = [np.arange(12, dtype=np.float32).reshape(6, 2) + 100 * i for i in range(3)]
    with strategy.scope():
        tables = [dx.Variable(value, name=f"table_{i}") for i, value in enumerate(values)]
        monkeypatch.setattr(strategy, "variable_partitioner", None)
        counts = [dx.Variable(0, name=f"count_{i}") for i in range(3)]

    @dx.function
    def step(table: Any, count: Any, ids: Any) -> Any:
        assert dx.get_strategy() is coordinator.strategy
        rows = dx.embedding_lookup(table, ids)
        table.scatter_add(dx.IndexedSlices(jnp.ones_like(rows), ids))
        count.assign_add(1)
        # The second lookup depends on the rows of the first.
        first = dx.embedding_lookup(table, (rows[:, 0] % 2).astype(jnp.int32))
        return rows, first, jnp.sum(table.read_value()), count.read_value()

    def work(table: Any, count: Any, ids: Any) -> Any:
        return (*step(table, count, ids), step.trace_count)

    ids = np.array([1, 4])
    for _ in range(2):
        for table, count, value in zip(tables, counts, values, strict=True):
            before = value.copy()
            value[ids] += 1
            scheduled = coordinator.schedule(work, args=(table, count, ids))
            rows, _, total, _, traces = scheduled.fetch()
            np.testing.assert_array_equal(rows, before[ids])
            assert total == value.sum() and traces == 1
    for table, count, value in zip(tables, counts, values, strict=True):
        np.testing.assert_array_equal(table.numpy(), value)
        assert int(count.numpy()) == 2


def test_optimizers_keep_tables_apart(
    strategy: dx.ParameterServerStrategy, coordinator: Any
) -> None:
    with strategy.scope():
        tables = [dx.Variable(np.zeros((3, 2), np.float32)) for _ in range(2)]
        optimizer = dx.Optimizer(optax.sgd(1.0, momentum=0.5))
        optimizer.build(tables)

    @dx.function
    def step(table: Any) -> None:
        optimizer.apply_gradients([(jnp.ones((3, 2)), table)])

    for expected in (-1.0, -2.5):
        for table in tables:
            coordinator.schedule(step, args=(table,)).fetch()
            np.testing.assert_array_equal(table.numpy(), np.full((3, 2), expected))
