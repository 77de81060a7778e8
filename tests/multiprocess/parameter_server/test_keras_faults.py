"""Keras models on parameter servers, whose processes are killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distribax.integrations.keras import DatasetCreator
from tests.multiprocess.parameter_server.keras_models import (
    INPUTS,
    LABELS,
    build_plain,
    check_same,
    make,
    make_dataset,
)


def test_fit_goes_on_when_a_worker_is_killed(
    strategy: Any, coordinator: Any, tmp_path: Path
) -> None:
    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                os.kill(coordinator.schedule(os.getpid).fetch(), signal.SIGKILL)

    rates: list[float] = []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1))
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate.value))
    )
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss")
    model = make(build_plain, strategy)
    history = model.fit(
        DatasetCreator(make_dataset),
        steps_per_epoch=12,
        epochs=3,
        validation_data=(INPUTS, LABELS),
        callbacks=[schedule, Kill(), note, best],
        verbose=0,
    ).history
    assert history.keys() == {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert history["loss"][-1] < history["loss"][0]
    assert rates == pytest.approx([0.05, 0.025, 0.05 / 3])
    # At least once: a step that a dead worker had sent may have run again.
    assert 36 <= int(model.optimizer.iterations.value) <= 40
    loaded = keras.models.load_model(tmp_path / "best.keras")
    check_same(model, loaded)
    assert loaded.evaluate(INPUTS, LABELS, verbose=0) == pytest.approx(
        model.evaluate(INPUTS, LABELS, verbose=0), abs=1e-5
    )


def test_fit_goes_on_when_a_server_is_killed(strategy: Any) -> None:
    steps: list[int] = []

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch
            steps.append(int(model.optimizer.iterations.value))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and self._epoch in (1, 2):
                # What came after a snapshot may be lost.
                assert int(model.optimizer.iterations.value) >= 12 * self._epoch + 4
                strategy.snapshot()
            # The first one has changed nothing since; the second one is at work.
            if (self._epoch, batch) in ((1, 3), (2, 5)):
                os.kill(_find_server(strategy, self._epoch - 1), signal.SIGKILL)

    before = [server.restarts for server in strategy.servers]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1))
    model = make(build_plain, strategy)
    history = model.fit(
        DatasetCreator(make_dataset),
        steps_per_epoch=12,
        epochs=4,
        validation_data=(INPUTS, LABELS),
        callbacks=[schedule, Kill()],
        verbose=0,
    ).history
    assert steps[:2] == [0, 12]
    assert 24 <= steps[2] <= 28
    assert 33 <= steps[3] <= 44
    _wait_until(
        lambda: all(s.restarts > old for s, old in zip(strategy.servers, before, strict=True))
    )
    assert history["loss"][-1] < history["loss"][0]
    assert float(model.optimizer.learning_rate.value) == pytest.approx(0.05 / 4)
    # What the servers have is a whole model.
    plain = make(build_plain)
    plain.set_weights(model.get_weights())
    expected = plain.evaluate(INPUTS, LABELS, verbose=0)
    assert [history["val_loss"][-1], history["val_accuracy"][-1]] == pytest.approx(
        expected, abs=1e-5
    )


def _find_server(strategy: Any, index: int) -> int:
    """Returns the process of a server, once it has said which it is."""
    find = lambda: next(each for each in strategy.server_status() if each["index"] == index)  # noqa: E731
    _wait_until(lambda: "pid" in find())
    return int(find()["pid"])


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "method", [pytest.param("evaluate", marks=pytest.mark.thorough), "predict"]
)
def test_a_worker_killed_in_the_middle_is_made_up_for(
    strategy: Any, coordinator: Any, method: str
) -> None:
    class Kill(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                os.kill(coordinator.schedule(os.getpid).fetch(), signal.SIGKILL)

        on_predict_batch_end = on_test_batch_end

    served, plain = make(build_plain, strategy), make(build_plain)
    own = getattr(served, method)
    arguments = (INPUTS, LABELS) if method == "evaluate" else (INPUTS,)
    found = own(*arguments, batch_size=6, callbacks=[Kill()], verbose=0)
    expected = getattr(plain, method)(*arguments, batch_size=6, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
