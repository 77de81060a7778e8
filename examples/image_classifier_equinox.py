"""Classifies images of digits with a convolutional network in Equinox.

    python examples/image_classifier_equinox.py --devices 4 --steps 200

The model and the recipe follow Equinox's "CNN on MNIST" example: a convolution, max pooling, three
dense layers, AdamW. An Equinox module is a pytree that also holds functions: `eqx.partition`
divides it into arrays, which are passed to the step and returned, and the rest, which the step
closes over.
"""

from __future__ import annotations

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import distribax as dx

GLOBAL_BATCH = 64


class Network(eqx.Module):
    """A convolution and three dense layers, for one image of 1 x 8 x 8."""

    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 8, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(8 * 5 * 5, 64, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(64, 64, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(64, 10, key=keys[3]),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Trains a network and returns the loss of each step."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = dx.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
    dataset = dataset.repeat().batch(GLOBAL_BATCH, drop_remainder=True)

    params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_array)
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(params)

    def replica_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = jax.vmap(eqx.combine(params, static))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        loss, gradients = dx.get_replica_context().all_reduce("MEAN", (loss, gradients))
        updates, state = optimizer.update(gradients, state, params)
        return eqx.apply_updates(params, updates), state, loss

    @dx.function(donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        return strategy.run(replica_step, args=(params, state, *batch))

    losses = []
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(steps):
        params, state, loss = train_step(params, state, next(batches))
        losses.append(float(loss))

    network = eqx.combine(strategy.experimental_local_results(params)[0], static)
    guesses = np.argmax(jax.vmap(network)(images), axis=-1)
    print(f"accuracy {np.mean(guesses == labels):.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    losses = train(strategy, options.steps)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
