"""The programs of the demo: the same digits and model under each strategy."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from distribax.cli.demo.classifier import (
    LEARNING_RATE,
    SIZES,
    compute_logits,
    compute_losses,
    list_devices,
    make_layers,
    train,
)
from distribax.cli.demo.digits import BATCH_SIZE, Digits
from distribax.cli.demo.view import DemoResult, EpochFigures
from distribax.cli.launch import Launch
from distribax.cli.task_processes import OutputTarget, run_workers
from distribax.strategies import CentralStorageStrategy, MirroredStrategy
from distribax.topology import set_virtual_cpu_devices

Tell = Callable[[EpochFigures], None]

_WORKERS: Final = 2
_WORKER_MODULE: Final = "distribax.cli.demo.worker_program"
FIGURES_VARIABLE: Final = "DISTRIBAX_DEMO_FIGURES"
"""Names the file to which the first worker writes its figures."""


class DemoError(Exception):
    """The demo cannot run; the text says what to do."""


@dataclass(frozen=True)
class DemoProgram:
    """A way to train.

    Attributes:
        title: The name of the strategy.
        train: Trains on some devices for some epochs, and tells the figures of each.
        page: The page of the guide about it.
    """

    title: str
    train: Callable[[int, int, Tell], DemoResult]
    page: str


def _make_devices(count: int) -> list[str]:
    set_virtual_cpu_devices(count)
    return [f"CPU:{index}" for index in range(count)]


def _train_mirrored(devices: int, epochs: int, tell: Tell) -> DemoResult:
    return train(MirroredStrategy(_make_devices(devices)), Digits.load(), epochs, tell)


def _train_central(devices: int, epochs: int, tell: Tell) -> DemoResult:
    strategy = CentralStorageStrategy(_make_devices(devices), parameter_device="CPU:0")
    return train(strategy, Digits.load(), epochs, tell)


def _train_workers(devices: int, epochs: int, tell: Tell) -> DemoResult:
    """Trains in two processes; the first one writes its figures to a file, which is read here."""
    launch = Launch(
        _WORKER_MODULE,
        (str(epochs),),
        is_module=True,
        workers=_WORKERS,
        devices_per_worker=max(1, devices // _WORKERS),
    )
    with tempfile.TemporaryDirectory(prefix="distribax-demo-") as folder:
        path = Path(folder) / "figures"
        path.touch()
        environments = launch.make_environments(dict(os.environ), restart=0)
        given = {
            worker: {**environment, FIGURES_VARIABLE: str(path)}
            for worker, environment in environments.items()
        }
        ended = threading.Event()
        outcomes: list[DemoResult] = []
        reader = threading.Thread(target=_follow, args=(path, ended, tell, outcomes))
        reader.start()
        try:
            # What the workers print is not hidden; the live view is below it.
            failure = run_workers(launch.command, given, launch.grace_seconds, [], OutputTarget())
        finally:
            ended.set()
            reader.join()
    if failure is not None or not outcomes:
        raise DemoError(f"{failure or 'the workers have reported nothing'}; see their output above")
    return outcomes[0]


def _follow(path: Path, ended: threading.Event, tell: Tell, outcomes: list[DemoResult]) -> None:
    """Tells what is written to a file, line by line, until the workers have ended."""
    with path.open() as file:
        rest = ""
        while True:
            is_last = ended.is_set()
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                if line.startswith("accuracy "):
                    accuracy = float(line.partition(" ")[2])
                    facts = {"processes": f"{_WORKERS}, each with a part of every batch"}
                    outcomes.append(DemoResult(accuracy, facts))
                else:
                    tell(EpochFigures.from_line(line))
            if is_last:
                return
            ended.wait(0.1)


def _train_with_servers(devices: int, epochs: int, tell: Tell) -> DemoResult:
    if importlib.util.find_spec("ray") is None:
        raise DemoError("parameter servers need Ray: pip install 'distribax[ray]'")
    import optax

    from distribax.coordinator import ClusterCoordinator
    from distribax.data.dataset import Dataset
    from distribax.execution import function
    from distribax.parameter_server.strategy import ParameterServerStrategy
    from distribax.training.gradients import value_and_grad
    from distribax.training.optimizer import Optimizer

    digits = Digits.load()
    rows = len(digits.train[1])
    strategy = ParameterServerStrategy(num_workers=_WORKERS, num_ps=1)
    try:
        coordinator = ClusterCoordinator(strategy, view="none")
        with strategy.scope():
            layers = make_layers()
            optimizer = Optimizer(optax.adam(LEARNING_RATE))
        variables = [variable for layer in layers for variable in layer]

        def replica_step(images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
            def loss_fn() -> jax.Array:
                return compute_losses(compute_logits(layers, images), labels).mean()

            loss, gradients = value_and_grad(loss_fn, variables)()
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            hits = compute_logits(layers, images).argmax(axis=-1) == labels
            return loss, hits.mean()

        @function
        def step(iterator: Any) -> Any:
            return strategy.run(replica_step, args=next(iterator))

        def make_dataset() -> Dataset:
            data = Dataset.from_tensor_slices(digits.train).shuffle(rows).repeat()
            return data.batch(BATCH_SIZE)

        iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
        for epoch in range(epochs):
            started = time.perf_counter()
            steps = rows // BATCH_SIZE
            results = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
            coordinator.join()
            losses, accuracies = zip(*coordinator.fetch(results), strict=True)
            rate = steps * BATCH_SIZE / (time.perf_counter() - started)
            means = float(np.mean(losses)), float(np.mean(accuracies))
            tell(EpochFigures(epoch + 1, epochs, *means, rate))
        images, labels = digits.test
        found = np.asarray(compute_logits(layers, jax.numpy.asarray(images))).argmax(axis=-1)
        facts = {"processes": f"a coordinator, {_WORKERS} workers and 1 parameter server"}
        return DemoResult(float((found == labels).mean()), facts)
    finally:
        strategy.close()


def _train_keras(devices: int, epochs: int, tell: Tell) -> DemoResult:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if importlib.util.find_spec("keras") is None:
        raise DemoError("this demo needs Keras: pip install 'distribax[keras]'")
    import keras

    if keras.backend.backend() != "jax":
        raise DemoError(
            f"Keras uses {keras.backend.backend()}: set KERAS_BACKEND=jax, or drop the variable"
        )
    strategy = MirroredStrategy(_make_devices(devices))
    digits = Digits.load()
    rows = len(digits.train[1])

    class TellEpoch(keras.callbacks.Callback):
        """Tells the figures of each epoch."""

        def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
            rate = rows / (time.perf_counter() - self.started)
            logs = logs or {}
            figures = (float(logs["loss"]), float(logs["accuracy"]))
            tell(EpochFigures(epoch + 1, epochs, *figures, rate))

    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(SIZES[1], activation="relu"), keras.layers.Dense(SIZES[2])]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(LEARNING_RATE),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        *digits.train, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[TellEpoch()]
    )
    _, accuracy = model.evaluate(*digits.test, verbose=0)
    return DemoResult(
        float(accuracy),
        {"devices": list_devices(strategy), "keras": keras.__version__},
    )


PROGRAMS: Final[dict[str, DemoProgram]] = {
    "mirrored": DemoProgram("MirroredStrategy", _train_mirrored, "docs/guide/strategies.md"),
    "central": DemoProgram("CentralStorageStrategy", _train_central, "docs/guide/strategies.md"),
    "multi-worker": DemoProgram(
        "MultiWorkerMirroredStrategy", _train_workers, "docs/guide/multi_worker.md"
    ),
    "ps": DemoProgram(
        "ParameterServerStrategy", _train_with_servers, "docs/guide/parameter_server.md"
    ),
    "keras": DemoProgram(
        "MirroredStrategy, model.fit of Keras", _train_keras, "docs/guide/keras.md"
    ),
}
