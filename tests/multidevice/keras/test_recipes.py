"""Recipes of Keras's gallery of examples (keras.io/examples), small, equal to one device.

The same kinds of model, calls and settings as the named examples have; the code is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.multidevice.keras.comparison import check_same, make_pair, train

_random = np.random.default_rng(3)
IMAGES = _random.random((20, 8, 8, 1)).astype(np.float32)
CLASSES = _random.integers(0, 3, size=20)
SERIES = _random.normal(size=(20, 6, 2)).astype(np.float32)
NUMBERS = _random.normal(size=(20, 1)).astype(np.float32)
WORDS = _random.integers(1, 20, size=(20, 6)).astype(np.int32)
IDS = _random.integers(0, 15, size=(20, 2)).astype(np.int32)

Recipe = tuple[Callable[[], keras.Model], Any, Any]


def _simple_convnet() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _autoencoder() -> keras.Model:
    images = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu", padding="same")(images)
    hidden = layers.MaxPooling2D(2, padding="same")(hidden)
    hidden = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(hidden)
    model = keras.Model(images, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(hidden))
    model.compile("adam", "binary_crossentropy")
    return model


def _timeseries_forecasting() -> keras.Model:
    series = keras.Input((6, 2))
    model = keras.Model(series, layers.Dense(1)(layers.LSTM(4)(series)))
    model.compile(keras.optimizers.RMSprop(0.01), "mse", metrics=["mae"])
    return model


class _TransformerBlock(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()

    def call(self, inputs: Any) -> Any:
        return self.norm(inputs + self.attention(inputs, inputs))


def _text_transformer() -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    hidden = _TransformerBlock()(layers.Embedding(20, 8)(words))
    outputs = layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(words, outputs)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


class _Recommender(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        settings = {"embeddings_initializer": "he_normal", "embeddings_regularizer": "l2"}
        self.users = layers.Embedding(15, 4, **settings)
        self.items = layers.Embedding(15, 4, **settings)

    def call(self, ids: Any) -> Any:
        match = keras.ops.sum(self.users(ids[:, 0]) * self.items(ids[:, 1]), axis=1, keepdims=True)
        return keras.ops.sigmoid(match)


def _collaborative_filtering() -> keras.Model:
    model = _Recommender()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy())
    return model


def _wide_and_deep() -> keras.Model:
    wide, deep = keras.Input((1,), name="wide"), keras.Input((6, 2), name="deep")
    hidden = layers.Dense(4, "relu")(layers.Flatten()(deep))
    joined = layers.Concatenate()([wide, layers.BatchNormalization(trainable=False)(hidden)])
    outputs = {"class": layers.Dense(3, name="class")(joined), "size": layers.Dense(1)(hidden)}
    model = keras.Model({"wide": wide, "deep": deep}, outputs)
    losses = {
        "class": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "size": "mse",
    }
    model.compile("sgd", losses, loss_weights={"class": 1.0, "size": 0.3})
    return model


class _Autoencoder(keras.Model):
    """A variational autoencoder without its noise: two losses, each with a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = layers.Dense(4), layers.Dense(64, "sigmoid")
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    def call(self, images: Any) -> Any:
        code = self.encode(keras.ops.reshape(images, (-1, 64)))
        distance = keras.ops.mean(keras.ops.sum(keras.ops.square(code), axis=1))
        self.add_loss(0.1 * distance)
        return keras.ops.reshape(self.decode(code), (-1, 8, 8, 1))


def _variational_autoencoder() -> keras.Model:
    model = _Autoencoder()
    model.compile("adam", "mse")
    return model


class _Distiller(keras.Model):
    """A student that learns from a frozen teacher as well as from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = self._build_network()
        self.teacher.trainable = False
        self.student = self._build_network()
        self.distillation_loss = keras.losses.KLDivergence()

    def _build_network(self) -> keras.Model:
        return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3)])

    def call(self, images: Any) -> Any:
        return self.student(images)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        softened = keras.ops.softmax(self.teacher(x) / 3), keras.ops.softmax(y_pred / 3)
        own = super().compute_loss(x, y, y_pred, sample_weight)
        return 0.3 * own + 0.7 * self.distillation_loss(*softened)


def _knowledge_distillation() -> keras.Model:
    model = _Distiller()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model


def _transfer_learning() -> keras.Model:
    base = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten()])
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(3)(base(inputs, training=False)))
    rate = keras.optimizers.schedules.CosineDecay(0.05, 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
    return model


RECIPES: dict[str, Recipe] = {
    "Simple MNIST convnet": (_simple_convnet, IMAGES, CLASSES),
    "Convolutional autoencoder for image denoising": (_autoencoder, IMAGES, IMAGES),
    "Timeseries forecasting": (_timeseries_forecasting, SERIES, NUMBERS),
    "Text classification with Transformer": (_text_transformer, WORDS, CLASSES),
    "Collaborative filtering": (_collaborative_filtering, IDS, (NUMBERS > 0).astype(np.float32)),
    "Structured data learning with wide and deep": (
        _wide_and_deep,
        {"wide": NUMBERS, "deep": SERIES},
        {"class": CLASSES, "size": NUMBERS},
    ),
    "Variational autoencoder": (_variational_autoencoder, IMAGES, IMAGES),
    "Knowledge distillation": (_knowledge_distillation, IMAGES, CLASSES),
    "Transfer learning and fine-tuning": (_transfer_learning, IMAGES, CLASSES),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train_as_on_one_device(name: str) -> None:
    make_model, x, y = RECIPES[name]
    fit = {"epochs": 2, "batch_size": 10}
    check_same(train(make_pair(), make_model, x, y, **fit), train(None, make_model, x, y, **fit))
