"""Keras models and data for parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import distribax as dx

_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(48, 4)).astype(np.float32)
LABELS = (INPUTS.sum(axis=1) > 0).astype(np.int32)
IDS = _random.integers(0, 40, size=(48, 3)).astype(np.int32)
BATCH_SIZE = 8


def make(build: Callable[[], keras.Model], strategy: Any = None) -> keras.Model:
    """Returns a new model with the same weights at each call."""
    keras.utils.set_random_seed(3)
    if strategy is None:
        return build()
    with strategy.scope():
        return build()


def build_plain() -> keras.Model:
    """Returns a small compiled model for `INPUTS` and `LABELS`."""
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Normalization(mean=0.1, variance=2.0),
            keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def check_same(served: keras.Model, plain: keras.Model) -> None:
    """Checks that two models, and their optimizers, have the same values."""
    for variables in ("variables", "optimizer.variables"):
        owner, name = (
            (served, variables) if "." not in variables else (served.optimizer, "variables")
        )
        other = plain if "." not in variables else plain.optimizer
        for a, b in zip(getattr(owner, name), getattr(other, name), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5, err_msg=a.path)


def make_dataset(context: dx.InputContext) -> Any:
    """Returns the data of a worker."""
    rows = dx.data.Dataset.from_tensor_slices((INPUTS, LABELS))
    return rows.shuffle(48).repeat().batch(BATCH_SIZE)
