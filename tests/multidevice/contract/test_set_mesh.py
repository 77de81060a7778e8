"""A mesh that the user has set with `jax.set_mesh` is not in the way of the replicas' own mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close


def _train(case: Case) -> list[Any]:
    """Returns what a training with all kinds of values and variables ends with."""
    strategy = case.strategy
    weights, seen = (
        case.variable(np.ones(2)),
        case.variable(0.0, synchronization="ON_READ", aggregation="SUM"),
    )
    optimizer = dx.Optimizer(optax.adam(0.1))
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(6)
    given = case.each(lambda index: jnp.asarray(index + 1.0))

    def replica_fn(x: Any) -> Any:
        loss, grad = dx.value_and_grad(lambda: (weights.value().sum() * x * given).sum(), weights)()
        seen.assign_add(x.sum())
        optimizer.apply_gradients([(grad, weights)])
        return dx.get_replica_context().all_reduce("SUM", loss)

    step = case.step(lambda x: strategy.run(replica_fn, args=(x,)))
    losses = [float(step(x)) for x in strategy.experimental_distribute_dataset(dataset)]
    own = strategy.run(lambda: jnp.ones(2))
    values = [strategy.reduce("SUM", own, axis=None), strategy.reduce("MEAN", given, axis=None)]
    case.step(lambda: weights.assign_add(jnp.ones(2)))()
    total = case.step(lambda: strategy.reduce("SUM", given, axis=None))()
    gathered = strategy.gather(own, axis=0)
    return [losses, *values, total, gathered, weights.numpy(), seen.numpy(), seen.read_value()]


@pytest.mark.parametrize("names", [("data",), ("replica", "model")], ids=str)
def test_a_mesh_is_set(compiled: bool, names: tuple[str, ...]) -> None:
    for case in (Case("mirrored", 2, compiled), Case("central", 2, compiled)):
        expected = _train(case)
        shape = (4,) if len(names) == 1 else (2, 2)
        with jax.set_mesh(jax.make_mesh(shape, names, devices=jax.devices()[:4])):
            close(_train(case), expected)


def test_the_mesh_is_the_functions_without_replicas() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    double = dx.function(lambda x: jax.reshard(x, PartitionSpec("data")) * 2)
    with jax.set_mesh(mesh):
        result = double(jnp.arange(4.0))
    assert result.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert result.sharding.spec == PartitionSpec("data")
