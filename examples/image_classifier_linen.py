"""Classifies images of digits with a convolutional network in Flax Linen.

    python examples/image_classifier_linen.py --devices 4 --steps 200

The model and the recipe are those of Flax's Linen MNIST example: two convolutions with average
pooling, two dense layers, SGD with momentum. Linen parameters are a pytree: they are passed to the
step and returned from it, and the step combines the gradients.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import distribax as dx

GLOBAL_BATCH = 64


class Network(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.avg_pool(nn.relu(nn.Conv(16, (3, 3))(images)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape((x.shape[0], -1))))
        return nn.Dense(10)(x)


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Trains a network and returns the loss of each step."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = dx.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
    dataset = dataset.repeat().batch(GLOBAL_BATCH, drop_remainder=True)

    network = Network()
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = network.init(jax.random.key(0), images[:1])
    state = optimizer.init(params)

    def replica_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = network.apply(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        # All replicas have the same number of examples: the mean of their means is the mean.
        loss, gradients = dx.get_replica_context().all_reduce("MEAN", (loss, gradients))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    @dx.function(donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        return strategy.run(replica_step, args=(params, state, *batch))

    losses = []
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(steps):
        params, state, loss = train_step(params, state, next(batches))
        losses.append(float(loss))

    # One copy of the parameters, as a plain pytree: to save, or to use without a strategy.
    final = strategy.experimental_local_results(params)[0]
    guesses = np.argmax(network.apply(final, images), axis=-1)
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
