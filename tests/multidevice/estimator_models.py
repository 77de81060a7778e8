"""A small model as a model function of an Estimator, and the same model in a custom loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

NUM_STEPS = 6
PER_REPLICA = 4
_rng = np.random.default_rng(0)
X = _rng.normal(size=(48, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32) + 3.0)[:, None]


def input_fn() -> dx.data.Dataset:
    """Returns batches of one replica's size, again and again."""
    return dx.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(PER_REPLICA)


def eval_input_fn() -> dx.data.Dataset:
    """Returns all examples once."""
    return dx.data.Dataset.from_tensor_slices((X, Y)).batch(PER_REPLICA)


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """A linear model with variables of both kinds, an optimizer with slots, and a metric."""
    kernel = dx.get_variable("dense/kernel", (3, 1), initializer=jnp.ones)
    bias = dx.Variable(jnp.zeros(1), name="bias")
    optimizer = dx.Optimizer(optax.adam(params["rate"]))

    def guess() -> Any:
        return features @ kernel.value() + bias.value()

    if mode == dx.estimator.ModeKeys.PREDICT:
        return dx.estimator.EstimatorSpec(mode, predictions={"y": guess(), "x": features})

    def loss_fn() -> Any:
        return dx.compute_average_loss(jnp.sum((guess() - labels) ** 2, -1))

    if mode == dx.estimator.ModeKeys.EVAL:
        error = dx.metrics.Mean("error")
        error.update_state(jnp.abs(guess() - labels))
        return dx.estimator.EstimatorSpec(mode, loss=loss_fn(), eval_metric_ops={"error": error})
    loss = optimizer.minimize(loss_fn, dx.estimator.trainable_variables())
    return dx.estimator.EstimatorSpec(mode, loss=loss, train_op=loss)


def make_estimator(directory: Any, strategy: Any = None, **config: Any) -> Any:
    """Returns an Estimator of the model that trains and evaluates with a strategy."""
    settings = {"train_distribute": strategy, "eval_distribute": strategy} | config
    return dx.estimator.Estimator(
        model_fn, directory, dx.estimator.RunConfig(**settings), {"rate": 0.1}
    )


def train_by_hand(
    strategy: Any, make_input: Callable[[], dx.data.Dataset] = input_fn
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kernel and the bias after a custom loop with the same model."""
    with strategy.scope():
        kernel = dx.Variable(jnp.ones((3, 1)))
        bias = dx.Variable(jnp.zeros(1))
        optimizer = dx.Optimizer(optax.adam(0.1))
        iterator = iter(strategy.distribute_datasets_from_function(lambda context: make_input()))

    @dx.function
    def step(iterator: Iterator[Any]) -> None:
        def replica(x: Any, y: Any) -> None:
            def loss_fn() -> Any:
                guess = x @ kernel.value() + bias.value()
                return dx.compute_average_loss(jnp.sum((guess - y) ** 2, -1))

            optimizer.minimize(loss_fn, [kernel, bias])

        strategy.run(replica, args=next(iterator))

    for _ in range(NUM_STEPS):
        step(iterator)
    iterator.close()
    return kernel.numpy(), bias.numpy()
