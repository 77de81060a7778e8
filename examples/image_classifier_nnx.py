"""Classifies images of digits with a convolutional network in Flax NNX.

    python examples/image_classifier_nnx.py --devices 4 --steps 200

The model and the recipe are those of Flax's MNIST tutorial: two convolutions with average pooling,
two dense layers, Adam. The images are scikit-learn's digits, which need no download.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import distribax as dx

GLOBAL_BATCH = 64


class Network(nnx.Module):
    """Two convolutions and two dense layers, for images of 8 x 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.dense = nnx.Linear(2 * 2 * 32, 64, rngs=rngs)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.conv1(images)), window_shape=(2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        return self.logits(nnx.relu(self.dense(x.reshape(x.shape[0], -1))))


def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns 1797 images, with one channel, and their labels."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    return images, digits.target.astype(np.int32)


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Trains a network and returns the loss of each step."""
    images, labels = load()
    dataset = dx.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
    dataset = dataset.repeat().batch(GLOBAL_BATCH, drop_remainder=True)
    with strategy.scope():
        model = Network(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy())

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_fn(model: Network) -> tuple[jax.Array, jax.Array]:
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return dx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH), logits

        (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        metrics.update(logits=logits, labels=labels)
        return loss

    @dx.function
    def train_step(batch: Any) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    losses = [float(train_step(next(batches))) for _ in range(steps)]
    print(f"accuracy while training: {float(metrics.compute()['accuracy']):.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    # On a machine with GPUs: strategy = dx.MirroredStrategy()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    losses = train(strategy, options.steps)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
