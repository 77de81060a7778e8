"""`fit`, `evaluate` and `predict` under strategies do what they do on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import (
    INPUTS,
    LABELS,
    STRATEGIES,
    TOLERANCE,
    check_same,
    make_classifier,
    train,
)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> dx.Strategy:
    return STRATEGIES[request.param]()


def test_model_learns_the_same_as_on_one_device(strategy: dx.Strategy) -> None:
    ours = train(strategy, make_classifier, validation_split=0.25)
    plain = train(None, make_classifier, validation_split=0.25)

    check_same(ours, plain)
    ours_evaluated, plain_evaluated = (
        each.model.evaluate(INPUTS, LABELS, batch_size=10, verbose=0) for each in (ours, plain)
    )
    np.testing.assert_allclose(ours_evaluated, plain_evaluated, rtol=TOLERANCE)
    ours_predicted, plain_predicted = (
        each.model.predict(INPUTS, batch_size=10, verbose=0) for each in (ours, plain)
    )
    np.testing.assert_allclose(ours_predicted, plain_predicted, rtol=TOLERANCE, atol=TOLERANCE)


def test_variables_are_placed_by_the_strategy_and_plain_outside() -> None:
    strategy = STRATEGIES["mirrored2"]()
    trained = train(strategy, make_classifier, epochs=1)
    kernel = trained.model.weights[0]

    assert len(kernel.value.devices()) == 1
    seen: list[Any] = []
    strategy.run(lambda: seen.append(next(iter(kernel.value.devices()))))
    assert [device.id for device in seen] == [0, 1]
