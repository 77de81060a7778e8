"""Settings of JAX that hold inside a `with`: in our threads they are those of the caller."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case


def test_replicas_have_the_settings_of_the_caller(mirrored: Case) -> None:
    def third() -> Any:
        return jnp.asarray(1.0) / 3

    with jax.enable_x64(True):
        assert {part.dtype.name for part in mirrored.parts(mirrored.run(third))} == {"float64"}
    assert {part.dtype.name for part in mirrored.parts(mirrored.run(third))} == {"float32"}


def test_replicas_convert_types_as_the_caller_does(mirrored: Case) -> None:
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion"):
        mirrored.run(lambda: jnp.ones(2, jnp.int32) + jnp.ones(2, jnp.float32))


def test_variables_of_long_types(several: Case) -> None:
    with jax.enable_x64(True):
        own = several.variable(np.zeros(2), synchronization="ON_READ", aggregation="MEAN")
        shared = several.variable(np.zeros(2), aggregation="MEAN")

        def step() -> None:
            own.assign_add(np.full(2, 1 / 3))
            shared.assign_add(jnp.full(2, 1 / 3))

        several.run(step)
        for variable in (own, shared):
            assert variable.numpy().tolist() == [1 / 3, 1 / 3]


def test_functions_of_data_sets_have_them_too() -> None:
    numbers = dx.data.Dataset.from_tensor_slices(np.arange(4.0)).batch(2)

    def divide(x: Any) -> Any:
        return np.asarray(jnp.asarray(x) / 3)

    ways = [
        numbers.map(divide).prefetch(2),
        numbers.map(divide, num_parallel_calls=2),
        numbers.interleave(
            lambda x: dx.data.Dataset.from_tensors(x).map(divide), num_parallel_calls=2
        ),
    ]
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with jax.enable_x64(True):
        for dataset in ways:
            assert [x.dtype.name for x in dataset] == ["float64"] * 2
        for batch in strategy.experimental_distribute_dataset(ways[0]):
            parts = strategy.experimental_local_results(batch)
            assert [part.dtype.name for part in parts] == ["float64"] * 2
    assert [x.dtype.name for x in ways[0]] == ["float32"] * 2
