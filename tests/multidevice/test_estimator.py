"""An Estimator trains as a custom loop does, under every strategy; and it resumes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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

PAIR = ["CPU:0", "CPU:1"]
STRATEGIES = {
    "one_device": lambda: dx.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: dx.MirroredStrategy(PAIR),
    "central": lambda: dx.CentralStorageStrategy(PAIR, parameter_device="CPU:5"),
}
Spec = dx.estimator.EstimatorSpec


@pytest.mark.parametrize("kind", STRATEGIES)
def test_trains_as_a_custom_loop(kind: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[kind]()
    kernel, bias = train_by_hand(strategy)
    # Two calls, so that the second one resumes; a new Estimator finds what the first has saved.
    make_estimator(tmp_path, strategy).train(input_fn, steps=NUM_STEPS // 2)
    seen: list[int] = []

    def skip(input_context: dx.InputContext) -> dx.data.Dataset:
        assert input_context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return input_fn().skip(NUM_STEPS // 2 * input_context.num_replicas_in_sync)

    estimator = make_estimator(tmp_path, strategy)
    estimator.train(skip, [lambda step, loss: seen.append(step)], max_steps=NUM_STEPS)
    assert seen == [4, 5, 6]
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), kernel, atol=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("bias"), bias, atol=1e-6)
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-6")
    assert estimator.get_variable_value("global_step") == 6

    found = estimator.evaluate(eval_input_fn)
    error = X @ kernel + bias - Y
    assert found["global_step"] == 6
    assert found["error"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
    assert found["loss"] == pytest.approx(np.square(error).mean(), rel=1e-4)
    assert estimator.evaluate(eval_input_fn) == found  # The metrics begin again.

    predicted = list(estimator.predict(eval_input_fn))
    assert len(predicted) == len(X) and not dx.has_strategy()
    np.testing.assert_allclose([each["y"] for each in predicted], X @ kernel + bias, atol=1e-5)
    batches = estimator.predict(eval_input_fn, ["y"], yield_single_examples=False)
    first = next(batches)
    assert first.keys() == {"y"} and first["y"].shape == (4, 1)
    batches.close()


def test_evaluates_another_checkpoint_without_a_change_of_the_training(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, save_checkpoints_steps=2)
    before = estimator.evaluate(eval_input_fn, steps=3)
    assert before["global_step"] == 0
    estimator.train(input_fn, steps=5)
    early = estimator.evaluate(eval_input_fn, checkpoint_path=str(tmp_path / "model.ckpt-2"))
    assert early["global_step"] == 2
    estimator.train(input_fn, steps=1)
    assert estimator.evaluate(eval_input_fn)["global_step"] == 6
    # A damaged checkpoint falls back to the one before.
    shutil.rmtree(tmp_path / "model.ckpt-6" / "variables")
    assert make_estimator(tmp_path).evaluate(eval_input_fn)["global_step"] == 5
    estimator.train(input_fn, steps=1)
    names = estimator.get_variable_names()
    assert {"dense/kernel", "bias", "global_step", "Optimizer.0"} <= {*names}
    assert not any("error" in name for name in names)
    # Without its directory it begins again.
    shutil.rmtree(tmp_path)
    assert estimator.evaluate(eval_input_fn, steps=3) == before


def test_evaluates_again_after_a_prediction(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path).train(input_fn, steps=1)
    first = estimator.evaluate(eval_input_fn)
    next(estimator.predict(eval_input_fn))
    assert estimator.evaluate(eval_input_fn) == first


def test_an_evaluation_leaves_a_prediction_under_way_as_it_is(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, save_checkpoints_steps=2).train(input_fn, steps=4)
    first = str(tmp_path / "model.ckpt-2")
    expected = [each["y"] for each in estimator.predict(eval_input_fn, checkpoint_path=first)]
    predicted = estimator.predict(eval_input_fn, checkpoint_path=first)
    begun = next(predicted)
    estimator.evaluate(eval_input_fn)
    found = [each["y"] for each in (begun, *predicted)]
    np.testing.assert_array_equal(found, expected)


def test_ends_with_the_input_and_by_hooks(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, dx.MirroredStrategy(PAIR), keep_checkpoint_max=1)
    estimator.train(eval_input_fn)
    assert estimator.get_variable_value("global_step") == 6
    # What a hook returns is an answer only if it is one.
    others = [lambda step, loss: np.ones(2, bool), lambda *_: jnp.ones(()), lambda *_: 1]
    estimator.train(input_fn, [*others, lambda step, loss: np.bool_(step == 8)])
    assert estimator.get_variable_value("global_step") == 8
    assert [path.name for path in tmp_path.glob("model*")] == ["model.ckpt-8"]
    estimator.train(input_fn, max_steps=8)  # Nothing to do.
    # A comparison with the loss is an array.
    estimator.train(input_fn, [lambda step, loss: loss < 1e6], steps=3)
    assert estimator.get_variable_value("global_step") == 9


def test_evaluation_inside_of_a_training_leaves_it_as_it_is(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(PAIR)
    estimator = make_estimator(tmp_path, strategy)
    estimator.train(input_fn, steps=1)

    def evaluate(step: int, loss: Any) -> None:
        assert estimator.evaluate(eval_input_fn, steps=1)["global_step"] == 1

    estimator.train(lambda: input_fn().skip(2), [evaluate], max_steps=NUM_STEPS)
    kernel, _ = train_by_hand(strategy)
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), kernel, atol=1e-6)


def test_seconds_between_checkpoints(tmp_path: Path) -> None:
    saved: list[str] = []
    estimator = make_estimator(tmp_path, save_checkpoints_secs=1e-9)
    estimator.train(input_fn, steps=2, saving_listeners=[saved.append])
    assert saved == [str(tmp_path / f"model.ckpt-{step}") for step in (1, 2)]


def test_arrays_as_input_and_arguments_of_functions(tmp_path: Path) -> None:
    told: dict[str, Any] = {}

    def constant(features: Any, labels: Any, mode: str, params: Any, config: Any) -> Any:
        told.update(params=params, config=config, step=dx.estimator.get_global_step())
        noise = jax.random.normal(dx.random.replica_key(config.tf_random_seed, told["step"]))
        w = dx.get_variable("w", initializer=0.0)
        dx.Optimizer(optax.sgd(0.5)).minimize(lambda: (w - labels.mean()) ** 2, [w])
        return Spec(mode, loss=noise)

    def arrays(mode: str, params: Any, config: Any) -> Any:
        assert (mode, params, config.tf_random_seed) == ("train", {"a": 1}, 7)
        return {"x": np.ones((2, 1))}, np.full((2, 1), 3.0, np.float32)

    config = dx.estimator.RunConfig(model_dir=tmp_path, tf_random_seed=7)
    estimator = dx.estimator.Estimator(constant, config=config, params={"a": 1})
    losses: list[float] = []
    estimator.train(arrays, [lambda step, loss: losses.append(float(loss))], steps=3)
    assert estimator.get_variable_value("w") == 3.0 and len({*losses}) == 3
    assert told["params"] == estimator.params == {"a": 1}
    assert told["config"] == estimator.config and estimator.model_dir == str(tmp_path)


def test_two_estimators_of_one_strategy_do_not_share(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(PAIR)
    first = make_estimator(tmp_path / "1", strategy).train(input_fn, steps=3)
    second = make_estimator(tmp_path / "2", strategy).train(input_fn, steps=1)
    assert second.get_variable_value("global_step") == 1
    assert first.train(input_fn, steps=1).get_variable_value("global_step") == 4


def test_means_of_replicas() -> None:
    def mean_fn(features: Any, labels: Any, mode: str) -> Any:
        w = dx.Variable(0.0, name="w")
        loss_fn = lambda: jnp.mean((w.value() * features - labels) ** 2)  # noqa: E731
        if mode == "eval":
            parts = dx.metrics.MeanTensor((2,))
            parts.update_state(features.mean() * jnp.arange(2.0))
            loss = dx.get_replica_context().all_reduce("MEAN", loss_fn())
            return Spec(mode, loss=loss, eval_metric_ops={"parts": parts})
        optimizer = dx.Optimizer(optax.sgd(0.1), reduce_op="MEAN")
        return Spec(mode, loss=optimizer.minimize(loss_fn, [w]))

    strategy = dx.MirroredStrategy(PAIR)
    config = dx.estimator.RunConfig(
        train_distribute=strategy, eval_distribute=strategy, loss_reduction="MEAN"
    )
    estimator = dx.estimator.Estimator(mean_fn, config=config)
    losses: list[float] = []
    data = (np.ones(2, np.float32), np.ones(2, np.float32))
    estimator.train(lambda: data, [lambda step, loss: losses.append(float(loss))], steps=1)
    assert losses == [1.0] and float(estimator.get_variable_value("w")) == pytest.approx(0.2)
    metrics = estimator.evaluate(lambda: data, steps=2)
    assert metrics["loss"] == pytest.approx(0.64)
    assert metrics["parts"].tolist() == [0.0, 1.0]
    shutil.rmtree(estimator.model_dir)


def test_nnx_model(tmp_path: Path) -> None:
    def nnx_fn(features: Any, labels: Any, mode: str) -> Any:
        model = dx.estimator.get_or_create("model", lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        optimizer = dx.estimator.get_or_create(
            "optimizer", lambda: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        )

        def loss_fn(model: nnx.Linear) -> Any:
            return dx.compute_average_loss(jnp.sum((model(features) - labels) ** 2, -1))

        if mode == "eval":
            return Spec(mode, loss=loss_fn(model))
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return Spec(mode, loss=loss)

    strategy = dx.MirroredStrategy(PAIR)
    config = dx.estimator.RunConfig(train_distribute=strategy)
    estimator = dx.estimator.Estimator(nnx_fn, tmp_path, config)
    before = estimator.evaluate(eval_input_fn)["loss"]
    estimator.train(input_fn, steps=20)
    assert "model.kernel" in estimator.get_variable_names()
    assert estimator.evaluate(eval_input_fn)["loss"] < 0.3 * before


def test_train_and_evaluate_in_turn(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"save_checkpoints_steps": 2, "save_summary_steps": 2, "eval_distribute": None}
    estimator = make_estimator(tmp_path, dx.MirroredStrategy(PAIR), **settings)
    train = dx.estimator.TrainSpec(input_fn, max_steps=5)
    evaluation = dx.estimator.EvalSpec(eval_input_fn, name="all", throttle_secs=0)
    found = dx.estimator.train_and_evaluate(estimator, train, evaluation)
    assert found is not None and found["global_step"] == 5
    steps: dict[str, list[int]] = {}
    for folder, tag in ((tmp_path, "loss"), (tmp_path / "eval_all", "error")):
        steps[tag] = []
        for file in sorted(folder.glob("events*")):
            accumulator = EventAccumulator(str(file))
            accumulator.Reload()
            steps[tag] += [event.step for event in accumulator.Scalars(tag)]
    assert steps == {"loss": [1, 2, 4], "error": [2, 4, 5]}
    rare = dataclasses.replace(evaluation, throttle_secs=1e6)
    more = dx.estimator.TrainSpec(input_fn, max_steps=8)
    found = dx.estimator.train_and_evaluate(estimator, more, rare)
    assert found is not None and found["global_step"] == 8


def test_strategy_is_made_when_it_is_needed(tmp_path: Path) -> None:
    made: list[dx.Strategy] = []

    def make() -> dx.Strategy:
        made.append(dx.OneDeviceStrategy("CPU:1"))
        return made[-1]

    estimator = make_estimator(tmp_path, eval_distribute=None, train_distribute=make)
    estimator.evaluate(eval_input_fn, steps=1)
    assert not made
    estimator.train(input_fn, steps=1).train(input_fn, steps=1)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, ValueError, "both given"),
        ({"log_step_count_steps": 0}, ValueError, "log_step_count_steps=0 is not positive"),
        ({"train_distribute": "mirrored"}, TypeError, "neither a strategy nor a function"),
        ({"loss_reduction": "MAX"}, ValueError, "loss_reduction"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        dx.estimator.RunConfig(**settings)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Spec("trains", loss=1.0), ValueError, "mode='trains' is not a mode"),
        (lambda: Spec("train"), ValueError, "needs loss"),
        (lambda: Spec("infer", loss=1.0), ValueError, "needs predictions"),
        (lambda: Spec("eval", loss=1.0, eval_metric_ops={"a": 1}), TypeError, "is not a metric"),
        (lambda: dx.estimator.Estimator(1), TypeError, "model_fn=1 is not a function"),
        (dx.estimator.get_global_step, RuntimeError, "outside of a model function"),
    ],
)
def test_wrong_arguments(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_wrong_calls(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path)
    with pytest.raises(ValueError, match="at most one of them"):
        estimator.train(input_fn, steps=1, max_steps=1)
    with pytest.raises(ValueError, match="input_fn gave no batch"):
        estimator.evaluate(lambda: eval_input_fn().take(0))
    returns_nothing = dx.estimator.Estimator(lambda features: None, tmp_path)
    with pytest.raises(TypeError, match="model_fn returned None"):
        returns_nothing.train(input_fn, steps=1)
    keeps_nothing = dx.estimator.Estimator(
        lambda features, mode: Spec(mode, loss=nnx.Linear(3, 1, rngs=nnx.Rngs(0))(X).sum()),
        tmp_path,
    )
    with pytest.raises(ValueError, match="model_fn keeps no variables"):
        keeps_nothing.train(input_fn, steps=1)
