"""Trains Keras models under strategies and without, for the tests that compare the two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

import distribax as dx

TOLERANCE = 1e-5
NUM_EXAMPLES = 43
BATCH_SIZE = 12
"""Leaves 7 examples for the last batch of an epoch, which neither 2 nor 3 replicas divide."""

_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(NUM_EXAMPLES, 5)).astype(np.float32)
LABELS = _random.integers(0, 3, size=NUM_EXAMPLES)
TARGETS = _random.normal(size=(NUM_EXAMPLES, 2)).astype(np.float32)

Make = Callable[[], keras.Model]

STRATEGIES: dict[str, Callable[[], dx.Strategy]] = {
    "one_device": lambda: dx.OneDeviceStrategy("CPU:0"),
    "mirrored2": lambda: dx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored3": lambda: dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    "central2": lambda: dx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


def make_pair() -> dx.Strategy:
    """Returns a strategy with two replicas."""
    return STRATEGIES["mirrored2"]()


@dataclass
class Trained:
    """A model after training, and what its methods have returned."""

    model: keras.Model
    history: dict[str, list[float]]

    @property
    def numbers(self) -> list[np.ndarray]:
        """All weights, the optimizer's too, and the history."""
        state = [*self.model.get_weights(), *(v.numpy() for v in self.model.optimizer.variables)]
        return [*state, *(np.asarray(self.history[name]) for name in sorted(self.history))]


def make(strategy: dx.Strategy | None, make_model: Make) -> keras.Model:
    """Returns a new model with the same weights at each call."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        return make_model()


def train(
    strategy: dx.Strategy | None,
    make_model: Make,
    x: Any = INPUTS,
    y: Any = LABELS,
    **fit: Any,
) -> Trained:
    """Returns a new model after three epochs."""
    model = make(strategy, make_model)
    settings = {"epochs": 3, "verbose": 0}
    if isinstance(x, np.ndarray | list | dict):
        settings["batch_size"] = BATCH_SIZE
    history = model.fit(x, y, **(settings | fit))
    return Trained(model, history.history)


class Learned(Protocol):
    """What a model has learned, in numbers."""

    @property
    def history(self) -> dict[str, list[float]]: ...

    @property
    def numbers(self) -> list[np.ndarray]: ...


def check_same(one: Learned, other: Learned, tolerance: float = TOLERANCE) -> None:
    """Checks that two models have learned the same."""
    assert one.history.keys() == other.history.keys()
    for a, b in zip(one.numbers, other.numbers, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def make_classifier() -> keras.Model:
    """Returns a small compiled model for `INPUTS` and `LABELS`."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3),
        ]
    )
    compile_classifier(model)
    return model


def compile_classifier(model: keras.Model, **settings: Any) -> None:
    """Compiles a model for `LABELS`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    defaults = {"optimizer": keras.optimizers.Adam(0.01), "loss": loss, "metrics": ["accuracy"]}
    model.compile(**(defaults | settings))
