"""The training step with distribax and Flax NNX: a module and an optimizer as they are."""

from __future__ import annotations

from typing import Any

import jax
import mlp_problem
import optax
from flax import nnx
from placing import place
from serve import serve

import distribax as dx


class MLP(nnx.Module):
    """The layers of the problem, with its weights."""

    def __init__(self, problem: mlp_problem.Problem) -> None:
        self.layers = nnx.List(
            nnx.Linear(*kernel.shape, rngs=nnx.Rngs(0)) for kernel, _ in problem.weights
        )
        for layer, (kernel, bias) in zip(self.layers, problem.weights, strict=True):
            layer.kernel[...], layer.bias[...] = kernel, bias

    def __call__(self, images: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            images = jax.nn.relu(layer(images))
        return self.layers[-1](images)


def main() -> None:
    options = mlp_problem.parser().parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size)
    with strategy.scope():
        model = MLP(problem)
        optimizer = nnx.Optimizer(model, optax.adam(mlp_problem.RATE), wrt=nnx.Param)
    images, labels = place(strategy, problem.images), place(strategy, problem.labels)

    def loss_of(model: MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return dx.compute_average_loss(losses, global_batch_size=options.batch_size)

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(model, gradients)
        return loss

    @dx.function
    def train_step(images: Any, labels: Any) -> Any:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(dx.ReduceOp.SUM, losses, axis=None)

    def run(steps: int) -> dict[str, float]:
        loss = None
        for _ in range(steps):
            loss = train_step(images, labels)
        jax.block_until_ready(model.layers[0].kernel[...])
        return {} if loss is None else {"loss": float(loss)}

    serve(run)


if __name__ == "__main__":
    main()
