"""The learning rate of an optimizer is read and set between steps, and in them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close


def test_learning_rate_changes_between_steps(case: Case) -> None:
    w = case.variable([1.0, 2.0])
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd, learning_rate=0.5, reduce_op="MEAN")
        optimizer.learning_rate = 0.25

    def replica_fn() -> Any:
        optimizer.apply_gradients([(jnp.ones(2), w)])
        return optimizer.learning_rate.value()

    run = case.step(lambda: case.strategy.run(replica_fn))
    close(case.strategy.reduce("MEAN", run(), axis=None), 0.25)
    close(w, [0.75, 1.75])
    rate = optimizer.learning_rate
    optimizer.learning_rate = 1.0
    assert optimizer.learning_rate is rate
    close(case.strategy.reduce("MEAN", run(), axis=None), 1.0)
    close(w, [-0.25, 0.75])
    assert optimizer.get_config() == {
        "transformation": "sgd",
        "name": "Optimizer",
        "reduce_op": "MEAN",
        "hyperparameters": {"learning_rate": 1.0},
    }


def test_learning_rate_is_set_in_a_replica(mirrored: Case) -> None:
    w = mirrored.variable(0.0)
    with mirrored.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd, learning_rate=1.0, reduce_op="MEAN")
        optimizer.build([w])

    def replica_fn() -> None:
        optimizer.learning_rate = 0.5 * optimizer.learning_rate
        optimizer.apply_gradients([(jnp.ones(()), w)])

    run = mirrored.step(lambda: mirrored.strategy.run(replica_fn))
    for _ in range(2):
        run()
    close(w, -0.75)
    close(optimizer.learning_rate, 0.25)


def test_schedule_shows_its_latest_value(mirrored: Case) -> None:
    w = mirrored.variable(0.0)
    with mirrored.strategy.scope():
        schedule = optax.exponential_decay(1.0, 1, 0.5)
        optimizer = dx.Optimizer(optax.sgd, learning_rate=schedule, reduce_op="MEAN")
    close(optimizer.learning_rate, 1.0)
    run = mirrored.step(
        lambda: mirrored.strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(()), w)]))
    )
    for expected in (1.0, 0.5):
        run()
        close(optimizer.learning_rate, expected)
    close(w, -1.5)
    with pytest.raises(ValueError, match="a schedule computes it"):
        optimizer.learning_rate = 0.1


def test_gradients_are_applied_across_replicas(mirrored: Case) -> None:
    w, step = mirrored.variable(1.0), mirrored.variable(0)
    with mirrored.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd, learning_rate=1.0)

    def merge(strategy: dx.Strategy, grad: Any) -> None:
        optimizer._distributed_apply(strategy, [(grad, w)], global_step=step)

    def replica_fn() -> None:
        context = dx.get_replica_context()
        assert context is not None
        context.merge_call(merge, args=(jnp.ones(()) * 2,))

    mirrored.run(replica_fn)
    close(w, 1.0 - 2.0 * mirrored.strategy.num_replicas_in_sync)
    close(step, 1)
