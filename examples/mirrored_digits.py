"""Trains a classifier of handwritten digits on several virtual CPU devices.

    python examples/mirrored_digits.py --devices 4 --epochs 10

It needs scikit-learn for the data: pip install 'distribax[examples]'.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import distribax as dx

GLOBAL_BATCH = 64


class Classifier:
    """A perceptron with one hidden layer; its variables belong to the strategy in scope."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def weights(rows: int, columns: int, name: str) -> dx.Variable:
            value = random.normal(scale=rows**-0.5, size=(rows, columns))
            return dx.Variable(value.astype(np.float32), name=name)

        self.hidden, self.hidden_bias = weights(64, 64, "hidden"), dx.Variable(jnp.zeros(64))
        self.output, self.output_bias = weights(64, 10, "output"), dx.Variable(jnp.zeros(10))

    @property
    def variables(self) -> list[dx.Variable]:
        return [self.hidden, self.hidden_bias, self.output, self.output_bias]

    def __call__(self, images: jax.Array) -> jax.Array:
        return jax.nn.relu(images @ self.hidden + self.hidden_bias) @ self.output + self.output_bias


def load() -> tuple[Any, Any]:
    """Returns (images, labels) for training, and others for testing."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)
    return (x, y), (x_test, y_test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    # On a machine with GPUs: strategy = dx.MirroredStrategy()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    train, test = load()
    # Without the smaller last batch, all steps have the same shapes and share one program.
    dataset = dx.data.Dataset.from_tensor_slices(train).shuffle(len(train[1]), seed=0)
    train_data = strategy.experimental_distribute_dataset(
        dataset.batch(GLOBAL_BATCH, drop_remainder=True)
    )
    test_data = strategy.experimental_distribute_dataset(
        dx.data.Dataset.from_tensor_slices(test).batch(GLOBAL_BATCH)
    )

    with strategy.scope():
        model = Classifier()
        optimizer = dx.Optimizer(optax.adam(3e-3))
        mean_loss, accuracy = dx.metrics.Mean(), dx.metrics.Accuracy()

    def replica_train(images: jax.Array, labels: jax.Array) -> None:
        def loss_fn() -> tuple[jax.Array, jax.Array]:
            logits = model(images)
            per_example = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            loss = dx.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
            return loss, per_example

        loss_and_gradients = dx.value_and_grad(loss_fn, model.variables, has_aux=True)
        (_, per_example), gradients = loss_and_gradients()
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        mean_loss.update_state(per_example)

    def replica_test(images: jax.Array, labels: jax.Array) -> None:
        accuracy.update_state(labels, model(images))

    @dx.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_train, args=batch)

    @dx.function
    def test_step(batch: Any) -> None:
        strategy.run(replica_test, args=batch)

    for epoch in range(options.epochs):
        mean_loss.reset_state()
        for batch in train_data:
            train_step(batch)
        print(f"epoch {epoch}: loss {float(mean_loss.result()):.4f}")
    for batch in test_data:
        test_step(batch)
    print(f"accuracy {float(accuracy.result()):.3f} on {options.devices} devices")


if __name__ == "__main__":
    main()
