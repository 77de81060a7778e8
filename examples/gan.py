"""Trains a generator and a discriminator against each other, each with an optimizer of its own.

    python examples/gan.py --devices 2 --steps 1000

The recipe is that of TensorFlow's DCGAN tutorial: both networks are updated in the same step, from
binary cross entropy on logits, with Adam. The networks are perceptrons and the data points on a
circle, so that it trains in seconds.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

GLOBAL_BATCH, NOISE, WIDTH = 64, 8, 32


class Perceptron:
    """Two dense layers of variables."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = [(inputs, WIDTH), (WIDTH, outputs)]
        weights = [rng.normal(0, rows**-0.5, (rows, columns)) for rows, columns in shapes]
        self.kernels = [dx.Variable(kernel.astype(np.float32)) for kernel in weights]
        self.biases = [dx.Variable(jnp.zeros(columns)) for _, columns in shapes]

    @property
    def variables(self) -> list[Any]:
        return [*self.kernels, *self.biases]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.leaky_relu(x @ self.kernels[0] + self.biases[0])
        return x @ self.kernels[1] + self.biases[1]


def entropy(logits: jax.Array, real: bool) -> jax.Array:
    """Returns the loss of each example, if all of them are real, or none."""
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], jnp.full(logits.shape[0], float(real)))


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Trains both networks and returns the sum of their losses at each step."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, 4_096)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    # The noise is part of the data: it is split like everything else, and does not depend on
    # the number of replicas. dx.random.Generator draws it in the replicas instead.
    noise = rng.normal(size=(len(points), NOISE)).astype(np.float32)
    dataset = dx.data.Dataset.from_tensor_slices((points, noise)).repeat().batch(GLOBAL_BATCH)

    with strategy.scope():
        generator, discriminator = Perceptron(NOISE, 2, seed=1), Perceptron(2, 1, seed=2)
        generator_optimizer = dx.Optimizer(optax.adam(2e-3, b1=0.5))
        discriminator_optimizer = dx.Optimizer(optax.adam(2e-3, b1=0.5))

    def replica_step(real: jax.Array, noise: jax.Array) -> jax.Array:
        def generator_loss() -> jax.Array:
            losses = entropy(discriminator(generator(noise)), real=True)
            return dx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

        def discriminator_loss() -> jax.Array:
            losses = entropy(discriminator(real), True) + entropy(
                discriminator(generator(noise)), False
            )
            return dx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

        # Both gradients come from the same values; then both are applied.
        loss_g, grads_g = dx.value_and_grad(generator_loss, generator.variables)()
        loss_d, grads_d = dx.value_and_grad(discriminator_loss, discriminator.variables)()
        generator_optimizer.apply_gradients(zip(grads_g, generator.variables, strict=True))
        discriminator_optimizer.apply_gradients(zip(grads_d, discriminator.variables, strict=True))
        return loss_g + loss_d

    @dx.function
    def train_step(batch: Any) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    losses = [float(train_step(next(batches))) for _ in range(steps)]
    radius = np.linalg.norm(np.asarray(generator(noise[:256])), axis=1)
    print(f"distance of generated points from the center: {radius.mean():.2f} (1.00 is right)")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1_000)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    losses = train(strategy, options.steps)
    print(f"losses {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
