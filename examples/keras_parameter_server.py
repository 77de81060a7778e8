"""A Keras recommender on parameter servers: `compile` and `fit`, with tables that are divided.

Run it with `python examples/keras_parameter_server.py`: the cluster is on this machine and ends
with the program. Keras itself has no parameter servers on any backend; here `fit` schedules the
steps on workers, and of an `Embedding` only the rows that a batch mentions are sent.

The model is that of matrix factorization with biases, as Keras's collaborative-filtering example
has it, on ratings that are made up.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import distribax as dx

# isort: split
import keras  # After distribax, which has chosen JAX as its backend.

from distribax.integrations.keras import DatasetCreator

NUM_USERS, NUM_ITEMS, NUM_TASTES = 2_000, 1_000, 4
BATCH_SIZE = 512


def make_ratings(seed: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns pairs of a user and an item, and whether the user liked it."""
    hidden = np.random.default_rng(0)
    users = hidden.normal(size=(NUM_USERS, NUM_TASTES))
    items = hidden.normal(size=(NUM_ITEMS, NUM_TASTES))
    rng = np.random.default_rng(seed)
    user = rng.integers(0, NUM_USERS, count).astype(np.int32)
    item = rng.integers(0, NUM_ITEMS, count).astype(np.int32)
    liked = np.sum(users[user] * items[item], axis=1) > 0
    return {"user": user, "item": item}, liked.astype(np.float32)[:, None]


def build_model(dimension: int = 8) -> keras.Model:
    """Returns a model with a vector and a bias for each user and each item."""
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))

    def look_up(ids: Any, rows: int, columns: int, name: str) -> Any:
        return keras.layers.Embedding(rows, columns, name=name)(ids)

    match = keras.layers.Dot(axes=1)(
        [
            look_up(user, NUM_USERS, dimension, "users"),
            look_up(item, NUM_ITEMS, dimension, "items"),
        ]
    )
    biases = [
        look_up(user, NUM_USERS, 1, "user_bias"),
        look_up(item, NUM_ITEMS, 1, "item_bias"),
    ]
    outputs = keras.layers.Activation("sigmoid")(keras.layers.Add()([match, *biases]))
    return keras.Model({"user": user, "item": item}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="steps of an epoch")
    options = parser.parse_args()

    partitioner = dx.partitioners.MinSizePartitioner(16 << 10, max_shards=options.ps)
    strategy = dx.ParameterServerStrategy(
        None, partitioner, num_workers=options.workers, num_ps=options.ps
    )
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])

    def dataset_fn(context: dx.InputContext) -> Any:
        # Called on each worker, which draws from all of the data in an order of its own.
        rows = dx.data.Dataset.from_tensor_slices(make_ratings(seed=2, count=200_000))
        return rows.shuffle(200_000).repeat().batch(BATCH_SIZE)

    history = model.fit(
        DatasetCreator(dataset_fn),
        epochs=options.epochs,
        steps_per_epoch=options.steps,
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 / (epoch + 1))],
        verbose=0,
    ).history
    for epoch, loss in enumerate(history["loss"]):
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {history['accuracy'][epoch]:.3f}")
    loss, accuracy = model.evaluate(
        *make_ratings(seed=3, count=20_000), batch_size=2_000, verbose=0
    )
    print(f"right on unseen pairs: {accuracy:.1%}")
    strategy.close()


if __name__ == "__main__":
    main()
