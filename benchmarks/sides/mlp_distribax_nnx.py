"""The training step with distribax and a Flax NNX model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mlp_problem
import optax
from flax import nnx
from placing import place
from serve import serve

import distribax as dx


class Mlp(nnx.Module):
    """The model of the problem, with its weights."""

    def __init__(self, weights: list[Any]) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(*kernel.shape, rngs=rngs) for kernel, _ in weights])
        for layer, (kernel, bias) in zip(self.layers, weights, strict=True):
            layer.kernel[...] = jnp.asarray(kernel)
            layer.bias[...] = jnp.asarray(bias)

    def __call__(self, images: jax.Array) -> jax.Array:
        hidden = images
        for layer in self.layers[:-1]:
            hidden = jax.nn.relu(layer(hidden))
        return self.layers[-1](hidden)


def make_step(
    strategy: dx.Strategy, problem: mlp_problem.Problem, batch_size: int, eager: bool
) -> tuple[Callable[[Any, Any], Any], Mlp]:
    """The step from a batch to its loss, compiled unless `eager`, and the model."""
    with strategy.scope():
        model = Mlp(problem.weights)
        optimizer = nnx.Optimizer(model, optax.adam(mlp_problem.RATE), wrt=nnx.Param)

    def loss_of(model: Mlp, images: jax.Array, labels: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return dx.compute_average_loss(losses, global_batch_size=batch_size)

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(model, gradients)
        return loss

    def train_step(images: Any, labels: Any) -> Any:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(dx.ReduceOp.SUM, losses, axis=None)

    return train_step if eager else dx.function(train_step), model


def main() -> None:
    options = mlp_problem.parser().parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size, options.layers)
    train_step, model = make_step(strategy, problem, options.batch_size, options.eager)
    images, labels = place(strategy, problem.images), place(strategy, problem.labels)

    def run(steps: int) -> dict[str, float]:
        loss = None
        for _ in range(steps):
            loss = train_step(images, labels)
        jax.block_until_ready(nnx.state(model))
        return {} if loss is None else {"loss": float(loss)}

    serve(run)


if __name__ == "__main__":
    main()
