"""`fit`, `evaluate` and `predict` under strategies do what they do on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import (
    INPUTS,
    LABELS,
    STRATEGIES,
    TOLERANCE,
    Trained,
    check_same,
    compile_classifier,
    make,
    make_classifier,
    train,
)


@pytest.fixture(
    params=[
        "one_device",
        "mirrored3",
        "central2",
        # Three replicas have more kinds of pieces; two train in the other files.
        pytest.param("mirrored2", marks=pytest.mark.thorough),
    ]
)
def strategy(request: pytest.FixtureRequest) -> dx.Strategy:
    return STRATEGIES[request.param]()


def test_model_learns_the_same_as_on_one_device(strategy: dx.Strategy) -> None:
    ours, evaluated, predicted = _use(strategy)

    plain, plain_evaluated, plain_predicted = _use_plainly()
    check_same(ours, plain)
    np.testing.assert_allclose(evaluated, plain_evaluated, rtol=TOLERANCE)
    np.testing.assert_allclose(predicted, plain_predicted, rtol=TOLERANCE, atol=TOLERANCE)


def _use(strategy: dx.Strategy | None) -> tuple[Trained, Any, Any]:
    trained = train(strategy, make_classifier, validation_split=0.25)
    evaluated = trained.model.evaluate(INPUTS, LABELS, batch_size=10, verbose=0)
    return trained, evaluated, trained.model.predict(INPUTS, batch_size=10, verbose=0)


@cache
def _use_plainly() -> tuple[Trained, Any, Any]:
    return _use(None)


def test_variables_are_placed_by_the_strategy_and_plain_outside() -> None:
    strategy = STRATEGIES["mirrored2"]()
    trained = train(strategy, make_classifier, epochs=1)
    kernel = trained.model.weights[0]

    assert len(kernel.value.devices()) == 1
    seen: list[Any] = []
    strategy.run(lambda: seen.append(next(iter(kernel.value.devices()))))
    assert [device.id for device in seen] == [0, 1]


def test_steps_do_not_look_at_all_variables() -> None:
    class Counting(keras.Sequential):
        num_looks = 0

        @property
        def variables(self) -> list[keras.Variable]:
            Counting.num_looks += 1
            return super().variables

    def make_model() -> keras.Model:
        model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
        compile_classifier(model)
        return model

    def count_looks(num_steps: int) -> int:
        # A callback that reads a weight lets Keras fetch the state again at the next step.
        sync = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: model.jax_state_sync()
        )
        before = Counting.num_looks
        model.fit(INPUTS[: 8 * num_steps], LABELS[: 8 * num_steps], 8, callbacks=[sync], verbose=0)
        return Counting.num_looks - before

    model = make(STRATEGIES["mirrored2"](), make_model)
    count_looks(1)

    assert count_looks(5) == count_looks(2)
