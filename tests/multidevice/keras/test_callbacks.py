"""Keras's callbacks and files, and our checkpoints, with models of strategies."""

from __future__ import annotations

import copy
import pickle
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import (
    INPUTS,
    LABELS,
    STRATEGIES,
    Trained,
    check_same,
    compile_classifier,
    make_classifier,
    make_pair,
    train,
)


class Evaluating(keras.callbacks.Callback):
    """Evaluates in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seen.append(self.model.evaluate(INPUTS, LABELS, batch_size=10, verbose=0))


def train_with_callbacks(strategy: dx.Strategy | None, folder: Path) -> tuple[Any, list[Any]]:
    evaluating = Evaluating()
    callbacks = [
        evaluating,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=10.0),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ]
    trained = train(
        strategy, make_classifier, epochs=9, callbacks=callbacks, validation_data=(INPUTS, LABELS)
    )
    return trained, evaluating.seen


def test_callbacks_do_what_they_do_on_one_device(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "plain").mkdir()

    ours, seen = train_with_callbacks(make_pair(), tmp_path / "ours")

    plain, plain_seen = train_with_callbacks(None, tmp_path / "plain")
    check_same(ours, plain)
    assert len(ours.history["loss"]) == 3
    np.testing.assert_allclose(seen, plain_seen, rtol=1e-5)
    written, expected = (
        {path.name for path in (tmp_path / kind).rglob("*")} for kind in ("ours", "plain")
    )
    assert written == expected
    loaded = keras.models.load_model(tmp_path / "ours" / "best.keras")
    np.testing.assert_allclose(
        loaded.evaluate(INPUTS, LABELS, verbose=0)[1], seen[-1][1], rtol=1e-5
    )


def test_training_goes_on_after_a_backup(tmp_path: Path) -> None:
    backup = lambda: keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)  # noqa: E731
    train(make_pair(), make_classifier, epochs=1, shuffle=False, callbacks=[backup()])

    resumed = train(
        STRATEGIES["mirrored3"](), make_classifier, epochs=3, shuffle=False, callbacks=[backup()]
    )

    whole = train(None, make_classifier, shuffle=False)
    assert len(resumed.history["loss"]) == 2
    for a, b in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class Interruption(Exception):
    """Stands for a process that ends."""


class Interrupting(keras.callbacks.Callback):
    """Ends the training after some batches of the second epoch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.epoch = batch, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if (self.epoch, batch) == (1, self.batch):
            raise Interruption


@pytest.mark.parametrize("save_freq", [1, "epoch"])
def test_training_goes_on_in_the_middle_of_an_epoch(save_freq: Any, tmp_path: Path) -> None:
    def make_model() -> keras.Model:
        layers = [keras.Input((5,)), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        compile_classifier(model)
        return model

    def back_up() -> keras.callbacks.Callback:
        return dx.integrations.keras.BackupAndRestore(tmp_path / "backup", save_freq)

    with pytest.raises(Interruption):
        train(make_pair(), make_model, callbacks=[back_up(), Interrupting(2)])
    resumed = train(make_pair(), make_model, callbacks=[back_up()])

    whole = train(make_pair(), make_model)
    for name, values in resumed.history.items():
        np.testing.assert_allclose(values, whole.history[name][1:], rtol=1e-6)
    for a, b in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not (tmp_path / "backup").exists()
    again = resumed.model.fit(INPUTS, LABELS, epochs=1, verbose=0)
    assert again.epoch == [0]


def test_middle_of_an_epoch_needs_a_strategy(tmp_path: Path) -> None:
    for given in ({"save_freq": 1}, {"save_before_preemption": True}):
        backup = dx.integrations.keras.BackupAndRestore(tmp_path, **given)
        (name,) = given
        with pytest.raises(ValueError, match=rf"{name}=.* has no strategy"):
            train(None, make_classifier, callbacks=[backup])


def test_training_goes_on_after_it_was_told_to_stop(tmp_path: Path) -> None:
    def train_with(*callbacks: keras.callbacks.Callback) -> Trained:
        backup = dx.integrations.keras.BackupAndRestore(tmp_path, save_before_preemption=True)
        return train(make_pair(), make_classifier, callbacks=[backup, *callbacks])

    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: signal.raise_signal(signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="42"):
        train_with(stop)
    resumed = train_with()

    whole = train(make_pair(), make_classifier)
    assert signal.getsignal(signal.SIGTERM) is before
    # What is left of the first epoch counts for the whole.
    check_same(resumed, whole)


def test_callback_without_a_model_is_keras_alone(tmp_path: Path) -> None:
    with make_pair().scope():
        callbacks = keras.callbacks.CallbackList([keras.callbacks.CSVLogger(tmp_path / "log")])
        callbacks.on_train_begin()
        callbacks.on_train_end()
    assert (tmp_path / "log").exists()


def test_number_of_batches_between_backups_is_checked() -> None:
    with pytest.raises(ValueError, match="save_freq=0"):
        dx.integrations.keras.BackupAndRestore("folder", save_freq=0)


def test_model_is_saved_and_goes_on_elsewhere(tmp_path: Path) -> None:
    trained = train(make_pair(), make_classifier, epochs=1, shuffle=False).model
    with STRATEGIES["central2"]().scope():
        ways = ("file", "weights", "checkpoint", "early", "manager", "pickle")
        restored = [_carry_over(way, trained, tmp_path) for way in ways]
    plain = keras.models.load_model(_save(trained, tmp_path / "plain.keras"))

    for model in (trained, plain):
        model.fit(INPUTS, LABELS, batch_size=12, epochs=1, shuffle=False, verbose=0)
    for model in restored:
        model.fit(INPUTS, LABELS, batch_size=12, epochs=1, shuffle=False, verbose=0)
        for numbers in zip(*(m.get_weights() for m in (model, plain, trained)), strict=True):
            np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(numbers[0], numbers[2], rtol=1e-5, atol=1e-5)


def _save(model: keras.Model, path: Path) -> Path:
    model.save(path)
    return path


def _carry_over(way: str, trained: keras.Model, folder: Path) -> keras.Model:
    if way == "file":
        return keras.models.load_model(_save(trained, folder / "model.keras"))
    if way == "pickle":
        return pickle.loads(pickle.dumps(trained))
    new = make_classifier()
    if way == "early":
        path = dx.Checkpoint(model=trained, optimizer=trained.optimizer).save(folder / way)
        dx.Checkpoint(model=new, optimizer=new.optimizer).restore(path)
        return new
    new.optimizer.build(new.trainable_variables)
    if way == "weights":
        trained.save_weights(folder / "model.weights.h5")
        new.load_weights(folder / "model.weights.h5")
        return new
    if way == "checkpoint":
        saved = dx.Checkpoint(trained, optimizer=trained.optimizer)
        restored = dx.Checkpoint(new, optimizer=new.optimizer)
    else:
        saved = dx.Checkpoint(model=trained, optimizer=trained.optimizer)
        restored = dx.Checkpoint(model=new, optimizer=new.optimizer)
    if way == "manager":
        dx.CheckpointManager(saved, folder / "kept", max_to_keep=1).save()
        restored.restore(dx.CheckpointManager(restored, folder / "kept", 1).latest_checkpoint)
    else:
        restored.restore(saved.save(folder / "checkpoint"))
    return new


def test_variables_are_copied_without_their_strategy() -> None:
    strategy = make_pair()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    strategy.run(lambda: variable.assign(variable + 1.0))

    for copied in (copy.deepcopy(variable), pickle.loads(pickle.dumps(variable))):
        variable.assign([7.0, 8.0])
        np.testing.assert_array_equal(copied.numpy(), [2.0, 3.0])
        variable.assign([2.0, 3.0])
