"""Classifies made-up sentences with a small Transformer, in Keras, on several virtual CPU devices.

    python examples/keras_transformer.py --devices 2 --epochs 4

A sentence is about the topic whose words it has more of. The model and the recipe are those of
Keras's example "Text classification with Transformer": token and position embeddings, one block of
self-attention and a feed-forward network with dropout and layer normalization, pooling, Adam. It
needs Keras: pip install 'distribax[keras]'.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import distribax as dx

# isort: split
import keras  # After distribax, which has chosen JAX as its backend.

NUM_WORDS, LENGTH, WIDTH = 200, 16, 16


def make_sentences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns sentences as numbers of words, and their topics."""
    rng = np.random.default_rng(0)
    words = rng.integers(1, NUM_WORDS, size=(count, LENGTH)).astype(np.int32)
    topics = (words < NUM_WORDS // 2).sum(axis=1) > LENGTH // 2
    return words, topics.astype(np.int32)


class TransformerBlock(keras.layers.Layer):
    """Self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, num_heads: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.attention = keras.layers.MultiHeadAttention(num_heads, width)
        self.feed_forward = keras.Sequential(
            [keras.layers.Dense(2 * width, "relu"), keras.layers.Dense(width)]
        )
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(0.1) for _ in range(2)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        attended = self.dropouts[0](self.attention(inputs, inputs), training=training)
        hidden = self.norms[0](inputs + attended)
        outputs = self.dropouts[1](self.feed_forward(hidden), training=training)
        return self.norms[1](hidden + outputs)


def build_model() -> keras.Model:
    words = keras.Input((LENGTH,), dtype="int32")
    positions = keras.ops.arange(LENGTH)
    tokens = keras.layers.Embedding(NUM_WORDS, WIDTH)(words)
    places = keras.layers.Embedding(LENGTH, WIDTH)(positions)
    hidden = TransformerBlock(WIDTH, 2)(tokens + places)
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(words, keras.layers.Dense(2, "softmax")(hidden))


def train(strategy: dx.Strategy, epochs: int) -> list[float]:
    """Returns the validation loss after each epoch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        model.compile(
            keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    words, topics = make_sentences(1200)
    history = model.fit(
        words, topics, batch_size=96, epochs=epochs, validation_split=0.2, verbose=0
    ).history
    for epoch, loss in enumerate(history["val_loss"]):
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {history['val_accuracy'][epoch]:.3f}")
    return [float(loss) for loss in history["val_loss"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    train(dx.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)]), options.epochs)


if __name__ == "__main__":
    main()
