"""Keras models on several workers learn what they learn on one device; the first one writes."""

from __future__ import annotations

import json
import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import distribax as dx
from distribax.testing import WorkerResult
from tests.multidevice.keras.features import (
    check_features,
    train_alone,
    train_random,
)
from tests.multiprocess.launchers import finish, launchers
from tests.multiprocess.workers import run_workers
from tests.process_forks import WITH_WORKERS

pytestmark = pytest.mark.multiprocess

# Run by workers, and here without a strategy. Each worker draws other numbers of its own.
PROGRAM = """
import json, os
from pathlib import Path
import keras, numpy as np

random = np.random.default_rng(0)
inputs = random.normal(size=(43, 5)).astype(np.float32)
labels = random.integers(0, 3, size=43)

def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((5,)), keras.layers.Dense(6, "tanh", kernel_regularizer="l2"),
        layer(), keras.layers.Dense(3),
    ])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model

def train(model, folder, **settings):
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "model.keras"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ]
    fitted = model.fit(
        inputs, labels, batch_size=12, epochs=3, callbacks=callbacks, validation_split=0.2,
        **settings,
    )
    evaluated = model.evaluate(inputs, labels, batch_size=10, verbose=0)
    predicted = model.predict(inputs, batch_size=10, verbose=0)
    return fitted.history, evaluated, predicted.tolist(), [w.tolist() for w in model.get_weights()]
"""

WORKER = """
import distribax as dx
import sys

dx.set_virtual_cpu_devices(2)
strategy = dx.MultiWorkerMirroredStrategy(join_timeout_seconds=300)
worker = strategy.cluster_resolver.task_id
layer = dx.integrations.keras.SyncBatchNormalization
with strategy.scope():
    model = make()
if worker:
    # As in a program that does not seed, workers have other numbers.
    model.layers[0].kernel.assign(np.ones((5, 6)))
    np.random.seed(7)
folder = Path("{folder}") / str(worker)
result = train(model, folder, verbose=2)
dataset = dx.data.Dataset.from_tensor_slices((inputs, labels)).batch(12)
again = model.evaluate(dataset, verbose=0)
model.save_weights(folder / "end.weights.h5")

import pickle
from tests.multidevice.keras.features import train_features

(folder / "features").write_bytes(pickle.dumps(train_features(strategy)))
print(json.dumps([result, again]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[WorkerResult]]:
    """Gives a folder with one for each worker, and how two workers have ended."""
    folder = tmp_path_factory.mktemp("trained")
    for worker in ("0", "1"):
        (folder / worker).mkdir()
    results = run_workers(PROGRAM + WORKER.format(folder=folder), 2)
    for result in results:
        assert result.returncode == 0, f"worker {result.worker_id}:\n{result.stderr[-3000:]}"
    return folder, results


def test_workers_learn_the_same_as_one_device(
    trained: tuple[Path, list[WorkerResult]], tmp_path: Path
) -> None:
    folder, results = trained
    names: dict[str, Any] = {"layer": keras.layers.BatchNormalization}
    exec(textwrap.dedent(PROGRAM), names)
    plain = names["train"](names["make"](), tmp_path, verbose=0)
    for result in results:
        (history, *others), again = json.loads(result.stdout.strip().splitlines()[-1])
        assert history.keys() == plain[0].keys()
        for name, values in history.items():
            np.testing.assert_allclose(values, plain[0][name], rtol=1e-5, atol=1e-5)
        for ours, expected in zip(others, plain[1:], strict=True):
            _check_close(ours, expected)
        np.testing.assert_allclose(again, plain[1], rtol=1e-5)
    # Only the first worker shows progress and writes files.
    assert ["Epoch" in result.stdout for result in results] == [True, False]
    assert [path.name for path in (folder / "1").iterdir()] == ["features"]
    written = {path.name for path in (folder / "0").rglob("*")}
    assert {"model.keras", "log.csv", "latest.weights.h5", "end.weights.h5"} <= written
    own = {"SyncBatchNormalization": dx.integrations.keras.SyncBatchNormalization}
    loaded = keras.models.load_model(folder / "0" / "model.keras", custom_objects=own)
    _check_close([weight.tolist() for weight in loaded.get_weights()], plain[3])


def _check_close(ours: Any, expected: Any) -> None:
    if isinstance(ours[0], list) and not np.isscalar(ours[0][0]) and len(ours) < 10:
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        return
    np.testing.assert_allclose(np.array(ours), np.array(expected), rtol=1e-5, atol=1e-5)


# In the first attempt a worker dies, or is told to stop, in the middle of the second epoch.
RESTARTED = """
import os, signal, sys, time
import distribax as dx
import keras, numpy as np

folder, end = sys.argv[1:]
first = os.environ["DISTRIBAX_RESTART_COUNT"] == "0"
dx.set_virtual_cpu_devices(1)
strategy = dx.MultiWorkerMirroredStrategy(join_timeout_seconds=300)
worker = strategy.cluster_resolver.task_id
random = np.random.default_rng(0)
inputs = random.normal(size=(43, 5)).astype(np.float32)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")

class Ending(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen != 6 or not first:
            return
        if end == "die":
            os._exit(3 if worker == 1 else 5)
        if end == "stop" and worker == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_begin(self, batch, logs=None):
        if end == "stop" and self.seen >= 6 and first:
            # Time for the other worker to hear of it, before there is nothing left to do.
            time.sleep(1.0)

backup = dx.integrations.keras.BackupAndRestore(
    folder,
    save_freq=2 if end == "die" else "epoch",
    delete_checkpoint=False,
    save_before_preemption=end == "stop",
)
model.fit(inputs, inputs[:, :1], batch_size=12, epochs=6, callbacks=[backup, Ending()], verbose=0)
print("weights", np.round(model.get_weights()[0].ravel(), 6).tolist())
"""


def test_launched_workers_go_on_after_a_restart(tmp_path: Path) -> None:
    options = ("--workers", "2", "--max-restarts", "1", "--grace-seconds", "60")
    inputs = np.random.default_rng(0).normal(size=(43, 5)).astype(np.float32)
    keras.utils.set_random_seed(1)
    with dx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        layers = [keras.Input((5,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(inputs, inputs[:, :1], batch_size=12, epochs=6, verbose=0)

    with launchers(tmp_path) as start:
        for end in ("stop", "die"):
            code, out, err = finish(
                start(RESTARTED, *options, arguments=(str(tmp_path / end), end), **WITH_WORKERS)
            )
            assert code == 0, err
            assert "starting all workers again" in err
            found = [json.loads(each) for each in re.findall(r"weights (.*)", out)]
            assert len(found) == 2
            for weights in found:
                # As if nothing had happened.
                np.testing.assert_allclose(weights, model.get_weights()[0].ravel(), atol=1e-5)
            if end == "stop":
                # Both have left after one and the same batch, which need not end an epoch.
                assert len(set(re.findall(r"saved after (\d+) steps", err))) == 1


def test_workers_train_all_layers_and_optimizers(
    trained: tuple[Path, list[WorkerResult]],
) -> None:
    folder, results = trained
    alone = train_alone()
    alike = train_random(dx.MirroredStrategy([f"CPU:{i}" for i in range(4)]))

    for result in results:
        found = pickle.loads((folder / str(result.worker_id) / "features").read_bytes())
        check_features(found, alone, alike)
