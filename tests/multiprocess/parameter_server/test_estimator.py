"""An Estimator whose variables live on parameter servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import distribax as dx
from tests.multidevice.estimator_models import (
    NUM_STEPS,
    X,
    Y,
    eval_input_fn,
    input_fn,
    make_estimator,
    train_by_hand,
)

pytestmark = pytest.mark.multiprocess


def test_trains_on_workers_and_resumes(
    strategy: dx.ParameterServerStrategy, tmp_path: Path
) -> None:
    settings = {"save_checkpoints_steps": 20, "eval_distribute": None}
    estimator = make_estimator(tmp_path, strategy, **settings).train(input_fn, steps=30)
    assert estimator.evaluate(eval_input_fn)["global_step"] == 30
    names = {path.name for path in tmp_path.glob("model*")}
    assert names == {"model.ckpt-20", "model.ckpt-30"}
    # The training ends with the input of the first worker that has none left.
    again = make_estimator(tmp_path, strategy, **settings).train(eval_input_fn)
    assert again.get_variable_value("global_step") > 30
    again.train(input_fn, max_steps=120)
    found = again.evaluate(eval_input_fn)
    assert found["global_step"] >= 120 and found["loss"] < 0.05
    kernel, bias = again.get_variable_value("dense/kernel"), again.get_variable_value("bias")
    assert found["error"] == pytest.approx(np.abs(X @ kernel + bias - Y).mean(), rel=1e-4)
    with pytest.raises(ValueError, match="eval_distribute is a ParameterServerStrategy"):
        make_estimator(tmp_path, strategy).evaluate(eval_input_fn)


def test_one_step_after_the_other_is_the_custom_loop(
    strategy: dx.ParameterServerStrategy, tmp_path: Path
) -> None:
    # A hook at each step: nothing runs at the same time, so that the order is the same.
    features, labels = X[:4], Y[:4]
    estimator = make_estimator(tmp_path, strategy, log_step_count_steps=1)
    estimator.train(lambda: (features, labels), steps=NUM_STEPS)
    kernel, bias = train_by_hand(
        dx.OneDeviceStrategy("CPU:0"),
        make_input=lambda: dx.data.Dataset.from_tensors((features, labels)).repeat(),
    )
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), kernel, atol=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("bias"), bias, atol=1e-6)
