"""Forms that TensorFlow's tutorials use: the coordinator in functions, tables as arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
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
