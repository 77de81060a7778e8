"""Metrics have the values that Keras 3 gave for the same data, recorded here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close

_random = np.random.default_rng(7)
_SIZE = 12
REAL = (_random.normal(size=(_SIZE, 2)).round(2), _random.normal(size=(_SIZE, 2)).round(2))
ONE_HOT = np.eye(4)[_random.integers(0, 4, _SIZE)]
SCORES = _random.normal(size=(_SIZE, 4)).round(2).astype(np.float32)
LABELS = ONE_HOT.argmax(1)
YES = (_random.random(_SIZE) > 0.5).astype(float)
PROBABILITIES = _random.random(_SIZE).round(2)
WEIGHTS = _random.random(_SIZE).round(2)

m = dx.metrics
LABEL_WEIGHTS = [1.0, 2.0, 0.0, 3.0]
CLASSES, SPARSE, BINARY = (ONE_HOT, SCORES), (LABELS[:, None], SCORES), (YES, PROBABILITIES)
# How to make it, its data, and what Keras said without and with weights.
RECORDED: list[Any] = [
    (m.MeanSquaredError, REAL, 1.670821, 1.672020),
    (m.RootMeanSquaredError, REAL, 1.292602, 1.293066),
    (m.MeanAbsoluteError, REAL, 1.028750, 1.062286),
    (m.CategoricalAccuracy, CLASSES, 0.25, 0.363919),
    (m.SparseCategoricalAccuracy, SPARSE, 0.25, 0.363919),
    (lambda: m.TopKCategoricalAccuracy(k=2), CLASSES, 0.416667, 0.558320),
    (lambda: m.SparseTopKCategoricalAccuracy(k=2), SPARSE, 0.416667, 0.558320),
    (lambda: m.BinaryAccuracy(threshold=0.4), BINARY, 0.833333, 0.766718),
    (m.Precision, BINARY, 0.857143, 0.738667),
    (m.Recall, BINARY, 0.75, 0.653302),
    (lambda: m.Precision([0.2, 0.7]), BINARY, [0.888889, 0.8], [0.812260, 0.677632]),
    (lambda: m.Recall(np.array([0.2, 0.7])), BINARY, [1.0, 0.5], [1.0, 0.485849]),
    (lambda: m.Precision(top_k=2), CLASSES, 0.208333, 0.279160),
    (lambda: m.Precision([0.0, 0.5], 3, 1), CLASSES, [0.333333] * 2, [0.564328] * 2),
    (lambda: m.Recall(top_k=2, class_id=2), CLASSES, 0.166667, 0.170543),
    (lambda: m.Recall(top_k=3), CLASSES, 0.833333, 0.838258),
    (m.AUC, BINARY, 0.875, 0.769923),
    (lambda: m.AUC(multi_label=True, from_logits=True), CLASSES, 0.403367, 0.515905),
    (
        lambda: m.AUC(
            curve="PR",
            multi_label=True,
            num_labels=4,
            label_weights=LABEL_WEIGHTS,
            from_logits=True,
        ),
        CLASSES,
        0.144595,
        0.219394,
    ),
    (
        lambda: m.AUC(label_weights=LABEL_WEIGHTS, from_logits=True),
        CLASSES,
        0.480626,
        0.642028,
    ),
    (lambda: m.AUC(thresholds=np.array([0.6, 0.2, 0.4])), BINARY, 0.828125, 0.675465),
    (lambda: m.AUC(from_logits=True), CLASSES, 0.444444, 0.558649),
    (lambda: m.AUC(curve="PR"), BINARY, 0.926527, 0.875041),
    (lambda: m.AUC(20, "PR", "minoring"), BINARY, 0.545684, 0.463678),
    (lambda: m.AUC(20, "ROC", "majoring"), BINARY, 0.875, 0.769923),
]


def test_values_are_those_of_keras(case: Case) -> None:
    with case.strategy.scope():
        plain, weighted = ([make() for make, *_ in RECORDED] for _ in range(2))

    def replica_fn(data: Any, weights: Any) -> None:
        for metric, other, (true, pred) in zip(plain, weighted, data, strict=True):
            metric.update_state(true, pred)
            other.update_state(true, pred, sample_weight=weights)

    data = [tuple(np.float32(each) for each in pair) for _, pair, *_ in RECORDED]
    case.run(replica_fn, *case.split((data, np.float32(WEIGHTS))))
    results = case.across(lambda: [metric.result() for metric in (*plain, *weighted)])
    expected = [row[2] for row in RECORDED] + [row[3] for row in RECORDED]
    for result, value in zip(results, expected, strict=True):
        close(result, np.float32(value), 2e-5)
    plain[0].reset_state()
    close(plain[0].result(), 0.0)


def test_no_labels_have_no_area() -> None:
    assert float(m.AUC(multi_label=True).result()) == 0.0


def test_mean_of_arrays(case: Case) -> None:
    with case.strategy.scope():
        mean = m.MeanTensor((3,))
    case.run(lambda x: mean.update_state(x.sum() * np.ones(3), [1.0, 2.0, 0.0]), case.split(YES))
    total = YES.sum() / case.num_replicas
    close(mean.result(), [total, total, 0.0])


def test_counts_of_other_metrics_are_added(case: Case) -> None:
    with case.strategy.scope():
        one, other = m.Precision([0.2, 0.7]), m.Precision([0.2, 0.7])
    half = len(YES) // 2
    for metric, part in ((one, slice(half)), (other, slice(half, None))):
        data = case.split((np.float32(YES[part]), np.float32(PROBABILITIES[part])))
        case.run(metric.update_state, *data)
    one.merge_state([other])
    close(one.result(), np.float32([0.888889, 0.8]), 2e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: m.MeanSquaredError()(np.ones(3), np.ones(4)), "does not fit y_true of shape"),
        (lambda: m.SparseCategoricalAccuracy()(np.ones(3), np.ones((4, 2))), "one label for each"),
        (lambda: m.MeanTensor((3,)).update_state(np.ones(2)), "do not fit the shape"),
        (lambda: m.Precision([]), "thresholds is empty"),
        (lambda: m.Precision(top_k=0), "top_k=0 is less than 1"),
        (lambda: m.Recall(class_id=2)([[0, 1]], [[0.1, 0.9]]), "Expected at most 1"),
        (lambda: m.Mean().merge_state([m.Precision()]), "does not have the variables of 'mean'"),
        (lambda: m.AUC(1), "less than 2"),
        (lambda: m.AUC(thresholds=[0.5, 2.0]), "numbers from 0 to 1"),
        (lambda: m.AUC(curve="AB"), "curve='AB' is unknown"),
        (lambda: m.AUC(multi_label=True)([0, 1], [0.1, 0.9]), r"Expected \(examples, labels\)"),
        (lambda: m.AUC(num_labels=2), "without multi_label=True"),
        (lambda: m.AUC(multi_label=True, num_labels=3)([[0, 1]], [[0.1, 0.9]]), r"Expected \(3,\)"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
