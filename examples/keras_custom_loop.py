"""Trains a Keras model in a loop of its own, on several virtual CPU devices.

    python examples/keras_custom_loop.py --devices 2 --epochs 4

The steps are those of TensorFlow's tutorial on custom training with `tf.distribute.Strategy`: a
model, a loss, an optimizer and metrics of Keras that are made in the scope, a step for each
replica, evaluation after each epoch, and a checkpoint. The data are handwritten digits of
scikit-learn. It needs Keras: pip install 'distribax[keras,examples]'.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits

import distribax as dx

# isort: split
import keras  # After distribax, which has chosen JAX as its backend.

BATCH_SIZE = 128
NUM_TRAINING = 1500


def load_data() -> tuple[dx.data.Dataset, dx.data.Dataset]:
    """Returns the digits for training and for testing, in global batches."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    rows = (images, labels.astype(np.int32))
    train = dx.data.Dataset.from_tensor_slices(tuple(row[:NUM_TRAINING] for row in rows))
    test = dx.data.Dataset.from_tensor_slices(tuple(row[NUM_TRAINING:] for row in rows))
    return train.shuffle(NUM_TRAINING, seed=0).batch(BATCH_SIZE), test.batch(BATCH_SIZE)


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def train(strategy: dx.Strategy, epochs: int) -> list[float]:
    """Returns the loss of each epoch."""
    keras.utils.set_random_seed(0)
    train_data, test_data = map(strategy.experimental_distribute_dataset, load_data())
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(0.01)
        # One loss for each example: the last batch is smaller, and may be divided unevenly.
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
    checkpoint = dx.Checkpoint(model=model, optimizer=optimizer)

    def train_replica(images: jax.Array, labels: jax.Array) -> None:
        def compute_loss() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logits = model(images, training=True)
            losses = loss_object(labels, logits)
            # The mean over the examples of all replicas.
            return dx.compute_average_loss(losses), (losses, logits)

        variables = model.trainable_variables
        (_, (losses, logits)), grads = dx.value_and_grad(compute_loss, variables, has_aux=True)()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        mean_loss.update_state(losses)
        accuracy.update_state(labels, logits)

    def test_replica(images: jax.Array, labels: jax.Array) -> None:
        test_accuracy.update_state(labels, model(images, training=False))

    @dx.function
    def train_step(images: Any, labels: Any) -> None:
        strategy.run(train_replica, args=(images, labels))

    @dx.function
    def test_step(images: Any, labels: Any) -> None:
        strategy.run(test_replica, args=(images, labels))

    history = []
    for epoch in range(epochs):
        for batch in train_data:
            train_step(*batch)
        for batch in test_data:
            test_step(*batch)
        history.append(float(mean_loss.result()))
        print(
            f"epoch {epoch} loss {history[-1]:.3f} accuracy {float(accuracy.result()):.3f} "
            f"on unseen digits {float(test_accuracy.result()):.3f}"
        )
        for metric in (mean_loss, accuracy, test_accuracy):
            metric.reset_state()
    with tempfile.TemporaryDirectory() as folder:
        before = model.get_weights()[0]
        path = checkpoint.save(f"{folder}/digits")
        model.layers[0].kernel.assign(np.zeros_like(before))
        checkpoint.restore(path)
        print("restored:", np.array_equal(model.get_weights()[0], before))
    return history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    train(dx.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)]), options.epochs)


if __name__ == "__main__":
    main()
