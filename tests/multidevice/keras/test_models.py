"""Models of every kind learn under a strategy what they learn on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

from tests.multidevice.keras.comparison import (
    INPUTS,
    LABELS,
    STRATEGIES,
    TARGETS,
    check_same,
    compile_classifier,
    train,
)

WEIGHTS = np.random.default_rng(3).uniform(0.1, 2.0, size=len(INPUTS)).astype(np.float32)
WORDS = np.random.default_rng(4).integers(1, 9, size=(len(INPUTS), 6))
MASKED = WORDS * (np.arange(6) < np.arange(len(INPUTS))[:, None] // 4)
"""Words, and zeros in the place of those that are missing: some of the pieces have none."""


class Lazy(keras.Model):
    """A model whose layers are built by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, "tanh")
        self.head = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return self.head(hidden)


class OwnStep(keras.Model):
    """A model with a step of its own, as Keras's guide for JAX writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(2)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any) -> Any:
        return self.head(x)

    def compute(self, trainable: Any, others: Any, x: Any, y: Any) -> Any:
        y_pred, others = self.stateless_call(trainable, others, x)
        return keras.ops.mean(keras.ops.square(y_pred - y)), (y_pred, others)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self.compute, has_aux=True)
        (loss, (y_pred, others)), grads = gradient(trainable, others, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, new = {}, []
        for metric in self.metrics:
            own = metrics[len(new) : len(new) + len(metric.variables)]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss, sample_weight=x.shape[0])
            else:
                own = metric.stateless_update_state(own, y, y_pred)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        logs["largest"] = 2.0 * loss
        return logs, (trainable, others, optimizer, new)

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker, self.error]


def make_lazy() -> keras.Model:
    model = Lazy()
    compile_classifier(model)
    return model


def make_own_step() -> keras.Model:
    model = OwnStep()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    return model


def make_branches() -> keras.Model:
    first, second = keras.Input((5,), name="first"), keras.Input((5,), name="second")
    joined = keras.layers.Dense(4, "tanh")(keras.layers.Add()([first, second]))
    kind = keras.layers.Dense(3, name="kind")(joined)
    place = keras.layers.Dense(2, name="place")(joined)
    model = keras.Model([first, second], {"kind": kind, "place": place})
    kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer="rmsprop",
        loss={"kind": kinds, "place": "mse"},
        loss_weights={"kind": 1.0, "place": 0.3},
        metrics={"kind": ["accuracy"], "place": ["mae"]},
        weighted_metrics={"place": ["mse"]},
    )
    return model


def make_words() -> keras.Model:
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    recurrent = keras.layers.LSTM(3, return_sequences=True)
    model = keras.Sequential([embedding, recurrent, keras.layers.Dense(9)])
    compile_classifier(model, optimizer=keras.optimizers.SGD(0.1))
    return model


def make_settings(**settings: Any) -> Callable[[], keras.Model]:
    """Returns how to make a classifier that is compiled with some settings."""

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        compiled = {name: value() if callable(value) else value for name, value in settings.items()}
        compile_classifier(model, **compiled)
        return model

    return make


def sum_loss() -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def weighted_mean_loss() -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def scheduled() -> keras.Optimizer:
    """Returns an optimizer with a schedule, clipped gradients and averages of the weights."""
    return keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5),
        nesterov=True,
        momentum=0.5,
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    )


EVEN = {"x": INPUTS[:36], "y": LABELS[:36]}
"""Batches of one size: a program less to trace and compile, here and without a strategy."""

CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "lazy": (make_lazy, {}),
    "own_step": (make_own_step, {"y": TARGETS}),
    "branches": (
        make_branches,
        {
            "x": {"first": INPUTS, "second": INPUTS[::-1]},
            "y": {"kind": LABELS, "place": TARGETS},
            "sample_weight": {"kind": WEIGHTS, "place": WEIGHTS[::-1].copy()},
        },
    ),
    "masked": (make_words, {"x": MASKED, "y": WORDS, "shuffle": False}),
    "class_weight": (
        make_settings(loss=weighted_mean_loss),
        {"class_weight": {0: 1.0, 1: 0.5, 2: 3.0}},
    ),
    "sum": (make_settings(loss=sum_loss, optimizer=lambda: keras.optimizers.SGD(0.01)), {}),
    "scheduled": (make_settings(optimizer=scheduled), EVEN | {"initial_epoch": 1, "epochs": 3}),
    "accumulation": (
        make_settings(optimizer=lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)),
        EVEN | {"batch_size": 9, "steps_per_epoch": 2, "epochs": 2},
    ),
    "loss_scale": (
        make_settings(
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.05), dynamic_growth_steps=3
            )
        ),
        EVEN,
    ),
    "executions": (make_settings(steps_per_execution=3), {}),
    "eager": (
        make_settings(run_eagerly=True),
        {"x": INPUTS[:7], "y": LABELS[:7], "epochs": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_model_learns_the_same(name: str) -> None:
    make_model, fit = CASES[name]

    ours = train(STRATEGIES["mirrored3"](), make_model, **fit)

    check_same(ours, train(None, make_model, **fit))
