"""Metrics on all shapes of labels, predictions and weights; values as Keras 3 has them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx

LABELS = np.array([1, 0, 1, 1])
PREDICTED = np.array([1, 0, 0, 1])
PROBABILITIES = np.array([0.9, 0.2, 0.3, 0.8], np.float32)
SCORES = np.eye(3, dtype=np.float32)[[1, 0, 0, 2]]


def _column(values: np.ndarray) -> np.ndarray:
    return values[..., None]


@pytest.mark.parametrize("labels", [LABELS, _column(LABELS), LABELS.astype(np.float32)])
@pytest.mark.parametrize(
    "predictions",
    [
        PREDICTED,
        _column(PREDICTED),
        PREDICTED.astype(np.float32),
        _column(PREDICTED.astype(np.float32)),
        _column(PROBABILITIES),
        np.stack([1 - PROBABILITIES, PROBABILITIES], axis=-1),
    ],
)
@pytest.mark.parametrize("weights", [None, np.ones(4), np.ones((4, 1)), 2.0])
def test_accuracy_of_two_classes(labels: Any, predictions: Any, weights: Any) -> None:
    assert float(dx.metrics.Accuracy()(labels, predictions, weights)) == 0.75


def test_accuracy_of_more_classes_and_dimensions() -> None:
    accuracy = dx.metrics.Accuracy
    assert float(accuracy()(LABELS, SCORES)) == 0.5
    assert float(accuracy()(_column(LABELS), SCORES)) == 0.5
    # Labels that are not 0 or 1, in a column of floats.
    assert float(accuracy()(np.array([2, 3]), np.array([[2.0], [2.0]]))) == 0.5
    sequences = LABELS.reshape(2, 2)
    assert float(accuracy()(sequences, PREDICTED.reshape(2, 2))) == 0.75
    assert float(accuracy()(sequences, PROBABILITIES.reshape(2, 2, 1))) == 0.75
    assert float(accuracy()(sequences, SCORES.reshape(2, 2, 3))) == 0.5
    assert float(accuracy()(sequences[:, :1], SCORES.reshape(2, 2, 3)[:, :1])) == 0.5
    assert float(accuracy()(sequences, PREDICTED.reshape(2, 2), np.array([1.0, 3.0]))) == 0.625
    assert float(accuracy()(1, 1)) == 1.0
    assert float(accuracy()(LABELS[:0], PROBABILITIES[:0, None])) == 0.0


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        ((4,), (3,)),
        ((4,), (4, 3, 2)),
        ((4, 3), (4,)),
        ((4,), (3, 1)),
        ((4, 1), (3, 2)),
        ((1,), (4,)),
    ],
)
def test_accuracy_of_shapes_that_do_not_fit(labels: Any, predictions: Any) -> None:
    text = rf"y_pred of shape \({predictions[0]},.*y_true of shape \({labels[0]},"
    with pytest.raises(ValueError, match=text):
        dx.metrics.Accuracy().update_state(jnp.zeros(labels), jnp.zeros(predictions))


@pytest.mark.parametrize(
    ("weights", "mean", "total"),
    [
        (2.0, 2.5, 30.0),
        ([1.0, 3.0], 3.25, 39.0),
        ([[1.0], [3.0]], 3.25, 39.0),
        ([[[1.0]], [[3.0]]], 3.25, 39.0),
        ([[1.0, 2.0, 3.0]], 17 / 6, 34.0),
        (np.ones((2, 3)), 2.5, 15.0),
        (np.ones((2, 3, 1)), 2.5, 15.0),
        ([1.0], 2.5, 15.0),
        ([0.0, 0.0], 0.0, 0.0),
    ],
)
def test_weights_are_spread_over_the_values(weights: Any, mean: float, total: float) -> None:
    values = np.arange(6.0).reshape(2, 3)
    assert float(dx.metrics.Mean()(values, weights)) == pytest.approx(mean)
    assert float(dx.metrics.Sum()(values, weights)) == pytest.approx(total)


def test_weights_that_do_not_fit() -> None:
    values = np.arange(6.0).reshape(2, 3)
    assert float(dx.metrics.Mean()(values[:, 0], [[1.0], [3.0]])) == 2.25
    for metric in (dx.metrics.Mean(), dx.metrics.Sum()):
        for shape in ((3,), (3, 2), (2, 3, 2), (2, 2, 1)):
            with pytest.raises(ValueError, match=r"sample_weight of shape .* does not fit values"):
                metric.update_state(values, np.ones(shape))
        with pytest.raises(ValueError, match="sample_weight"):
            metric.update_state(3.0, np.ones(2))
