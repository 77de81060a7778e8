"""The training step with distribax: MirroredStrategy, dx.function and dx.Variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import mlp_problem
import optax
from placing import place
from serve import serve

import distribax as dx


def make_step(
    strategy: dx.Strategy, problem: mlp_problem.Problem, batch_size: int, eager: bool = False
) -> tuple[Callable[[Any, Any], Any], list[dx.Variable]]:
    """The step from a batch to its loss, compiled unless `eager`, and what it trains."""
    with strategy.scope():
        layers = [(dx.Variable(kernel), dx.Variable(bias)) for kernel, bias in problem.weights]
        optimizer = dx.Optimizer(optax.adam(mlp_problem.RATE))
        variables = [variable for layer in layers for variable in layer]
        # As the hand-written step has its state before the first call.
        optimizer.build(variables)

    def loss_of(images: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = images
        for kernel, bias in layers[:-1]:
            hidden = jax.nn.relu(hidden @ kernel + bias)
        kernel, bias = layers[-1]
        logits = hidden @ kernel + bias
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return dx.compute_average_loss(losses, global_batch_size=batch_size)

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = dx.value_and_grad(loss_of, variables)(images, labels)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def train_step(images: Any, labels: Any) -> Any:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(dx.ReduceOp.SUM, losses, axis=None)

    return train_step if eager else dx.function(train_step), variables


def main() -> None:
    options = mlp_problem.parser().parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size, options.layers)
    train_step, variables = make_step(strategy, problem, options.batch_size, options.eager)
    images, labels = place(strategy, problem.images), place(strategy, problem.labels)

    def run(steps: int) -> dict[str, float]:
        loss = None
        for _ in range(steps):
            loss = train_step(images, labels)
        jax.block_until_ready([variable.value() for variable in variables])
        return {} if loss is None else {"loss": float(loss)}

    serve(run)


if __name__ == "__main__":
    main()
