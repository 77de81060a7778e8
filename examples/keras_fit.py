"""Trains a small convolutional network with Keras's `fit` on several virtual CPU devices.

    python examples/keras_fit.py --devices 2 --epochs 5

The images are drawn here: bright bars that lie or stand. It needs Keras: pip install
'distribax[keras]'.
"""

from __future__ import annotations

import argparse

import numpy as np

import distribax as dx

# isort: split
import keras  # After distribax, which has chosen JAX as its backend.

SIZE = 12


def draw_bars(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy images of a bar each, and whether it stands."""
    random = np.random.default_rng(seed)
    images = random.normal(scale=0.5, size=(count, SIZE, SIZE, 1)).astype(np.float32)
    stands = random.integers(0, 2, size=count)
    for image, is_standing in zip(images, stands, strict=True):
        place = random.integers(0, SIZE)
        if is_standing:
            image[:, place] += 1.5
        else:
            image[place] += 1.5
    return images, stands


def make_model() -> keras.Model:
    """Returns a compiled classifier."""
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            keras.layers.Conv2D(8, 5),
            dx.integrations.keras.SyncBatchNormalization(momentum=0.8),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    with strategy.scope():
        model = make_model()
    images, stands = draw_bars(1000, seed=0)
    # The last batch of an epoch has 40 images; it is divided as exactly as the others.
    history = model.fit(images, stands, batch_size=64, epochs=options.epochs, verbose=0)
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch} loss {loss:.3f}")
    _, accuracy = model.evaluate(*draw_bars(200, seed=1), verbose=0)
    print(f"accuracy {accuracy:.3f} on {strategy.num_replicas_in_sync} devices")


if __name__ == "__main__":
    main()
