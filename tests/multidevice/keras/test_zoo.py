"""All of Keras's optimizers and metrics give in two replicas what they give on one device."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import keras
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import make_pair

OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "MeanIoU": {"num_classes": 3},
    "OneHotMeanIoU": {"num_classes": 3},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "AUC": {"num_thresholds": 11},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
METRICS = sorted(
    name
    for name, kind in vars(keras.metrics).items()
    if inspect.isclass(kind) and issubclass(kind, keras.Metric) and name != "Metric"
)
_random = np.random.default_rng(5)
SCORES = _random.uniform(0.1, 0.9, size=(8, 3)).astype(np.float32)
ONE_HOT = np.eye(3, dtype=np.float32)[_random.integers(0, 3, size=8)]
PARTS = _random.normal(size=(3, 8, 4)).astype(np.float32)


def apply_all(optimizers: dict[str, Any], grads: dict[str, Any]) -> None:
    for name, optimizer in optimizers.items():
        optimizer.apply(grads[name])


def make_optimizers() -> tuple[dict[str, Any], dict[str, Any]]:
    optimizers, variables = {}, {}
    for name in OPTIMIZERS:
        optimizers[name] = getattr(keras.optimizers, name)(0.05)
        variables[name] = keras.Variable(np.ones((2, 4), np.float32))
        optimizers[name].build([variables[name]])
    return optimizers, variables


def test_optimizers_update_as_on_one_device() -> None:
    strategy = make_pair()
    with strategy.scope():
        optimizers, variables = make_optimizers()
    plain_optimizers, plain = make_optimizers()

    @dx.function
    def step(rows: Any) -> None:
        def replica(rows: Any) -> None:
            grad = rows[:2] + rows[2:]
            apply_all(optimizers, {name: [grad] for name in OPTIMIZERS})

        strategy.run(replica, args=(rows,))

    for rows in strategy.experimental_distribute_dataset(iter(PARTS)):
        step(rows)
    for rows in PARTS:
        total = rows[:2] + rows[2:4] + rows[4:6] + rows[6:]
        apply_all(plain_optimizers, {name: [total] for name in OPTIMIZERS})

    for name in OPTIMIZERS:
        np.testing.assert_allclose(
            variables[name].numpy(), plain[name].numpy(), rtol=1e-5, atol=1e-5, err_msg=name
        )


def make_metrics() -> dict[str, keras.Metric]:
    return {name: getattr(keras.metrics, name)(**_ARGUMENTS.get(name, {})) for name in METRICS}


def update(metric: keras.Metric, name: str, y: Any, scores: Any) -> None:
    if "Sparse" in name:
        metric.update_state(keras.ops.argmax(y, axis=-1), scores)
    elif name in ("Mean", "Sum"):
        metric.update_state(scores)
    elif name in ("MeanIoU", "IoU"):
        metric.update_state(keras.ops.argmax(y, axis=-1), keras.ops.argmax(scores, axis=-1))
    else:
        metric.update_state(y, scores)


# Some of Keras's metrics ask JAX for 64 bits.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_metrics_measure_as_on_one_device() -> None:
    strategy = make_pair()
    with strategy.scope():
        metrics = make_metrics()
    plain = make_metrics()
    for name, metric in plain.items():
        update(metric, name, ONE_HOT, SCORES)
        update(metric, name, ONE_HOT[:5], SCORES[:5])
    for name, metric in metrics.items():
        # Some make their variables by the shapes of what they are given first.
        jax.eval_shape(lambda m=metric, n=name: update(m, n, ONE_HOT, SCORES))
        metric.reset_state()

    @dx.function
    def step(batch: Any) -> None:
        def replica(y: Any, scores: Any) -> None:
            for name, metric in metrics.items():
                update(metric, name, y, scores)

        strategy.run(replica, args=batch)

    batches = [(ONE_HOT, SCORES), (ONE_HOT[:5], SCORES[:5])]
    for batch in strategy.experimental_distribute_dataset(iter(batches)):
        step(batch)

    for name, metric in metrics.items():
        np.testing.assert_allclose(
            metric.result(), plain[name].result(), rtol=1e-5, atol=1e-6, err_msg=name
        )
