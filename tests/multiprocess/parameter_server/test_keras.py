"""Keras models on parameter servers: what users of `fit` see, with real processes."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import distribax as dx
from distribax.integrations.keras import BackupAndRestore, DatasetCreator
from tests.multiprocess.parameter_server.keras_models import (
    BATCH_SIZE,
    IDS,
    INPUTS,
    LABELS,
    build_plain,
    check_same,
    make,
    make_dataset,
)


def _train_by_batches(model: keras.Model, x: np.ndarray, count: int = 6) -> list[dict[str, float]]:
    """Trains with one batch after the other, so that the order of updates is known."""
    logs = []
    for step in range(count):
        rows = slice(step * BATCH_SIZE % 48, step * BATCH_SIZE % 48 + BATCH_SIZE)
        logs.append(model.train_on_batch(x[rows], LABELS[rows], return_dict=True))
    return logs


def test_steps_one_after_the_other_train_as_plain_keras(strategy: Any) -> None:
    served, plain = make(build_plain, strategy), make(build_plain)
    logs, expected = _train_by_batches(served, INPUTS), _train_by_batches(plain, INPUTS)
    for own, other in zip(logs, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-5)
    check_same(served, plain)
    assert served.test_on_batch(INPUTS, LABELS) == pytest.approx(
        plain.test_on_batch(INPUTS, LABELS), abs=1e-5
    )
    np.testing.assert_allclose(
        served.predict(INPUTS, batch_size=20, verbose=0),
        plain.predict(INPUTS, batch_size=20, verbose=0),
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["Adafactor", pytest.param("Nadam", marks=pytest.mark.thorough)])
def test_state_that_has_no_name_of_its_own_goes_on(strategy: Any, name: str) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(getattr(keras.optimizers, name)(0.05), loss)
        return model

    served, plain = make(build, strategy), make(build)
    _train_by_batches(plain, INPUTS, 2)
    served.set_weights(plain.get_weights())
    served.optimizer.build(served.trainable_variables)
    for own, other in zip(served.optimizer.variables, plain.optimizer.variables, strict=True):
        own.assign(other.value)
    for model in (served, plain):
        _train_by_batches(model, INPUTS, 2)
    check_same(served, plain)


class _OwnStep(keras.Model):
    """Doubles the gradients, as a training step of a user's might."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer_variables, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        compute = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = compute(
            trainable,
            others,
            metrics,
            x,
            y,
            None,
            training=True,
            optimizer_variables=optimizer_variables,
        )
        grads = [2 * grad for grad in grads]
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        loss, _, others, metrics = aux
        return {"own": 2 * loss}, (trainable, others, optimizer_variables, metrics)


def _build_own_step() -> keras.Model:
    model = _OwnStep()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def test_a_model_of_the_user_with_its_own_training_step(strategy: Any) -> None:
    served, plain = make(_build_own_step, strategy), make(_build_own_step)
    logs, expected = _train_by_batches(served, INPUTS, 3), _train_by_batches(plain, INPUTS, 3)
    for own, other in zip(logs, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-5)
    check_same(served, plain)


def _build_embedding() -> keras.Model:
    inputs = keras.Input((3,), dtype="int32")
    vectors = keras.layers.Embedding(40, 4, name="table")(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(vectors))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss)
    return model


def test_of_a_divided_embedding_only_rows_travel(strategy: Any) -> None:
    strategy.variable_partitioner = dx.partitioners.FixedShardsPartitioner(2)
    try:
        served = make(_build_embedding, strategy)
        _train_by_batches(served, IDS, 2)
    finally:
        strategy.variable_partitioner = None
    plain = make(_build_embedding)
    _train_by_batches(plain, IDS, 2)
    check_same(served, plain)
    from distribax.integrations.keras.served.served_variables import find_target

    table = find_target(served.get_layer("table").embeddings)
    assert isinstance(table, dx.ShardedVariable)
    # The step's traffic: rows are asked for, the table itself is not.
    np.testing.assert_allclose(
        served.predict(IDS, batch_size=16, verbose=0), plain.predict(IDS, verbose=0), atol=1e-5
    )


class _Waits(keras.layers.Layer):
    """Doubles its input; the second call, and those after, return when a third has begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def call(self, x: Any) -> Any:
        if not self.folder.exists():
            return 2.0 * x
        (self.folder / uuid.uuid4().hex).touch()
        deadline = time.monotonic() + 120
        while len(list(self.folder.iterdir())) == 2:
            assert time.monotonic() < deadline, "no other batch is predicted at the same time"
            time.sleep(0.02)
        return 2.0 * x


def test_workers_predict_at_the_same_time(strategy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "calls"

    def build() -> keras.Model:
        inputs = keras.Input((4,))
        hidden = _Waits(folder)(inputs)
        model = keras.Model(inputs, {"double": hidden, "sum": keras.ops.sum(hidden, axis=1)})
        model.compile(run_eagerly=True)
        return model

    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback(
        on_predict_batch_end=lambda batch, logs: seen.append(logs["double"])
    )
    model = make(build, strategy)
    folder.mkdir()
    found = model.predict(INPUTS, batch_size=5, callbacks=[note], verbose=0)
    np.testing.assert_allclose(found["double"], 2 * INPUTS, rtol=1e-6)
    np.testing.assert_allclose(found["sum"], 2 * INPUTS.sum(axis=1), rtol=1e-4, atol=1e-5)
    # To callbacks they are arrays.
    last, before = seen[-1], seen[-2]
    assert (last.shape, len(before), before.dtype) == ((3, 4), 5, np.float32)
    np.testing.assert_allclose(before[1], 2 * INPUTS[41], rtol=1e-6)
    np.testing.assert_allclose(before - 1.0, 2 * INPUTS[40:45] - 1.0, rtol=1e-5)
    np.testing.assert_allclose(list(last), 2 * INPUTS[45:], rtol=1e-6)
    assert not hasattr(last, "__cuda_array_interface__")


def test_dropout_goes_on_when_a_model_is_compiled_again(strategy: Any) -> None:
    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    def train(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = build()
        model.set_weights([np.ones((4, 2)), np.zeros(2)])
        batch = INPUTS, np.zeros((48, 2))
        losses = [model.train_on_batch(*batch) for _ in range(2)]
        model.compile(keras.optimizers.SGD(0.0), "mse")
        losses.append(model.train_on_batch(*batch))
        # As a checkpoint that was saved after the first step.
        (state,) = (v for v in model.non_trainable_variables if "seed" in v.name)
        assert int(state.numpy()[1]) == 3
        state.assign([state.numpy()[0], 1])
        return [float(loss) for loss in (*losses, model.train_on_batch(*batch))]

    losses = train(3)
    assert len(set(losses)) == 3
    assert losses[3] == losses[1]
    assert train(3) == losses
    assert set(train(4)).isdisjoint(losses)


def test_creators_data_is_weighted_by_class(strategy: Any) -> None:
    def make_first_batch(context: dx.InputContext) -> Any:
        rows = dx.data.Dataset.from_tensor_slices((INPUTS, LABELS)).take(BATCH_SIZE)
        return rows.batch(BATCH_SIZE).repeat()

    weights = {0: 0.0, 1: 3.0}
    served, plain = make(build_plain, strategy), make(build_plain)
    creator = DatasetCreator(make_first_batch)
    served.fit(creator, steps_per_epoch=1, class_weight=weights, verbose=0)
    plain.fit(INPUTS[:BATCH_SIZE], LABELS[:BATCH_SIZE], class_weight=weights, verbose=0)
    check_same(served, plain)
    # It is used elsewhere no longer: here it makes its data itself.
    assert not creator.is_elsewhere


def test_weights_wait_for_the_steps_of_all_models_that_have_them(strategy: Any) -> None:
    def build_two() -> tuple[keras.Model, keras.Model]:
        inputs = keras.Input((4,))
        shared = keras.layers.Dense(3)(inputs)
        models = tuple(keras.Model(inputs, keras.layers.Dense(2)(shared)) for _ in range(2))
        for model in models:
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return models

    seen: list[np.ndarray] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(first.layers[1].kernel.numpy())

    first, second = make(build_two, strategy)
    labels = np.ones((48, 2), np.float32)
    first.fit(INPUTS, labels, batch_size=24, verbose=0)
    for model in (second, first):
        # Its steps are new ones, but not its weights.
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(INPUTS, labels, batch_size=6, callbacks=[Note()], verbose=0)
    assert len({kernel.tobytes() for kernel in seen}) == len(seen) == 16


def test_training_goes_on_in_the_middle_of_an_epoch(strategy: Any, tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
        return model

    def train(*callbacks: keras.callbacks.Callback) -> tuple[keras.Model, dict[str, Any]]:
        model = make(build, strategy)
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
        settings = {"batch_size": 12, "shuffle": False, "verbose": 0}
        history = model.fit(INPUTS, LABELS, callbacks=[backup, *callbacks], **settings).history
        return model, history

    def stop(batch: int, logs: Any) -> None:
        if batch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(keras.callbacks.LambdaCallback(on_train_batch_end=stop))
    model, history = train()
    assert int(model.optimizer.iterations.value) == 4
    # The rate is zero, so that the order does not matter.
    expected = make(build).evaluate(INPUTS, LABELS, verbose=0)
    assert [history["loss"][0], history["accuracy"][0]] == pytest.approx(expected, abs=1e-5)


class _LogsOneMetric(keras.Model):
    """Logs less than it measures, so that Keras takes the logs of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {"accuracy": logs["accuracy"]}, state


def test_logs_of_some_metrics_tell_of_the_whole_epoch(strategy: Any) -> None:
    def build() -> keras.Model:
        model = _LogsOneMetric()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
        return model

    served, plain = (
        model.fit(INPUTS, LABELS, batch_size=7, verbose=0).history
        for model in (make(build, strategy), make(build))
    )
    assert served == {"accuracy": pytest.approx(plain["accuracy"])}


def test_data_that_ends_is_named(strategy: Any) -> None:
    model = make(build_plain, strategy)

    def make_short(context: dx.InputContext) -> Any:
        return dx.data.Dataset.from_tensor_slices((INPUTS, LABELS)).take(8).batch(BATCH_SIZE)

    # Without one that hears of each batch, Keras calls callbacks in threads, and an error leaves
    # those behind.
    hears = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    with pytest.raises(ValueError, match=r"data set has ended.*dataset\.repeat\(\)"):
        model.fit(DatasetCreator(make_short), steps_per_epoch=20, verbose=0, callbacks=[hears])
    # Nothing of that is left for the next training.
    other = make(build_plain, strategy)
    other.fit(INPUTS, LABELS, batch_size=BATCH_SIZE, verbose=0)
    assert int(other.optimizer.iterations.value) == 6
    model.fit(INPUTS, LABELS, batch_size=BATCH_SIZE, verbose=0)


def test_a_creator_needs_a_number_of_steps(strategy: Any) -> None:
    model = make(build_plain, strategy)
    creator = DatasetCreator(make_dataset)
    with pytest.raises(ValueError, match="fit: steps_per_epoch is missing"):
        model.fit(creator)
    with pytest.raises(ValueError, match="fit: validation_steps is missing"):
        model.fit(INPUTS, LABELS, validation_data=creator)
    with pytest.raises(ValueError, match="evaluate: steps is missing"):
        model.evaluate(creator)
    with pytest.raises(TypeError, match=r"dataset_fn=5 is not callable"):
        DatasetCreator(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("constraint", r"'.*kernel' has a constraint"),
        ("loss_scale", "LossScaleOptimizer looks at the gradients of all variables"),
        ("weight_decay", "'adam_w' chooses by name what it does to '.*bias'"),
        ("muon", "'muon' chooses by name what it does to '.*kernel'"),
        ("multi", "'multi.*' chooses by name what it does to '.*kernel'"),
    ],
)
def test_what_servers_cannot_do_is_refused(strategy: Any, change: str, message: str) -> None:
    def build() -> keras.Model:
        constraint = "non_neg" if change == "constraint" else None
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(2, kernel_constraint=constraint)]
        )
        optimizer = keras.optimizers.SGD(0.1)
        if change == "loss_scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        if change == "weight_decay":
            optimizer = keras.optimizers.AdamW(0.1)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        if change == "muon":
            optimizer = keras.optimizers.Muon(0.1, exclude_layers=["dense"])
        if change == "multi":
            optimizer = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD())
        model.compile(optimizer, "mse")
        return model

    model = make(build, strategy)
    with pytest.raises(ValueError, match=message):
        model.fit(INPUTS, np.zeros((48, 2)), verbose=0)
