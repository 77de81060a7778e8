"""What layers and optimizers of Keras can do, in few models: each strategy trains them all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import distribax as dx
from tests.multidevice.keras.comparison import (
    INPUTS,
    Make,
    check_same,
    compile_classifier,
    train,
)

WORDS = np.random.default_rng(4).integers(0, 9, size=(len(INPUTS), 4)).astype(np.int32)


class _Activity(keras.layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def _make_words(normalization: Callable[..., keras.Layer]) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 4, embeddings_regularizer="l2"),
            keras.layers.GRU(3),
            normalization(momentum=0.8),
            _Activity(),
            keras.layers.Dense(3, kernel_regularizer="l2"),
        ]
    )
    optimizer = keras.optimizers.Adam(
        0.01,
        global_clipnorm=0.3,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    )
    compile_classifier(model, optimizer=optimizer)
    return model


def _make_halves() -> keras.Model:
    hidden = keras.layers.Dense(8, "relu", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(3)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    compile_classifier(model, optimizer=optimizer)
    return model


def _make_random() -> keras.Model:
    layers = [
        keras.Input((5,)),
        keras.layers.BatchNormalization(momentum=0.8),
        keras.layers.Dropout(0.3),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    compile_classifier(model)
    return model


@dataclass
class Outcome:
    """What a model has learned; it can be sent from one process to another."""

    history: dict[str, list[float]]
    numbers: list[np.ndarray]


@functools.cache
def train_alone() -> dict[str, Outcome]:
    """Returns models after training without a strategy; all who compare share them."""
    return train_features(None)


def train_features(strategy: dx.Strategy | None) -> dict[str, Outcome]:
    """Returns models after training: two that are those of one device, and one of replicas."""
    synchronized = dx.integrations.keras.SyncBatchNormalization
    normalization = keras.layers.BatchNormalization if strategy is None else synchronized
    return {
        "words": _train(strategy, lambda: _make_words(normalization), x=WORDS),
        "halves": _train(strategy, _make_halves),
        "random": train_random(strategy),
    }


def train_random(strategy: dx.Strategy | None) -> Outcome:
    """Returns a model, after training, that depends on the number of replicas."""
    return _train(strategy, _make_random)


def _train(strategy: dx.Strategy | None, make_model: Make, **fit: Any) -> Outcome:
    trained = train(strategy, make_model, **fit)
    return Outcome(trained.history, trained.numbers)


def check_features(found: dict[str, Outcome], alone: dict[str, Outcome], alike: Outcome) -> None:
    """Checks models against those of one device, and `random` against one of as many replicas."""
    check_same(found["words"], alone["words"])
    # Half precision: the order of additions shows.
    check_same(found["halves"], alone["halves"], tolerance=5e-3)
    check_same(found["random"], alike)
