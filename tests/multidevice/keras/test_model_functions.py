"""Keras's models, optimizers and metrics in the model function of an Estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import INPUTS, LABELS, STRATEGIES


def _make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])


def _run(features: Any, labels: Any, mode: str, params: Any) -> Any:
    model = dx.estimator.get_or_create("model", _make_model)
    optimizer = dx.estimator.get_or_create("optimizer", params["optimizer"])
    accuracy = dx.estimator.get_or_create("accuracy", keras.metrics.SparseCategoricalAccuracy)

    def compute_loss() -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(features), labels)
        return dx.compute_average_loss(losses)

    loss, grads = dx.value_and_grad(compute_loss, model.trainable_variables)()
    if mode == dx.estimator.ModeKeys.TRAIN:
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    else:
        accuracy.update_state(labels, model(features))
    return dx.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda: keras.optimizers.Adam(0.1), lambda: dx.Optimizer(optax.adam(0.1))],
    ids=["keras", "optax"],
)
def test_replicas_train_as_one_device(make_optimizer: Any, tmp_path: Path) -> None:
    def make_input(size: int) -> Any:
        data = dx.data.Dataset.from_tensor_slices((INPUTS[:40], LABELS[:40]))
        return lambda: data.batch(size)

    found = []
    for name, size in (("one_device", 8), ("mirrored2", 4)):
        strategy = STRATEGIES[name]()
        config = dx.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
        estimator = dx.estimator.Estimator(
            _run, tmp_path / name, config, {"optimizer": make_optimizer}
        )
        metrics = estimator.train(make_input(size)).evaluate(make_input(size))
        names = estimator.get_variable_names()
        assert all(each.startswith(("global_step", "model.", "optimizer.")) for each in names)
        values = {each: estimator.get_variable_value(each) for each in names}
        found.append((metrics["accuracy"], values))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    for each, value in found[0][1].items():
        np.testing.assert_allclose(value, found[1][1][each], rtol=1e-4, atol=1e-5)
