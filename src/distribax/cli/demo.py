"""`distribax demo`: trains a classifier of handwritten digits on several virtual CPU devices."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from distribax.cli.help_format import add_command
from distribax.data.dataset import Dataset
from distribax.execution import function
from distribax.strategies import MirroredStrategy
from distribax.topology import set_virtual_cpu_devices
from distribax.training.gradients import value_and_grad
from distribax.training.losses import compute_average_loss
from distribax.training.metrics import Accuracy, Mean
from distribax.training.optimizer import Optimizer
from distribax.variables import Variable

_BATCH: Final = 128


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "demo",
        summary="train a digit classifier over several virtual CPU devices",
        description="Trains a classifier of handwritten digits.",
        examples="distribax demo --devices 2 --epochs 5",
    )
    parser.add_argument("--devices", type=_parse_positive, default=4, help="virtual CPU devices")
    parser.add_argument("--epochs", type=_parse_positive, default=20, help="passes over the data")
    parser.set_defaults(run=run)


def _parse_positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


@dataclass
class _Digits:
    """Images of handwritten digits, as rows of 64 numbers from 0 to 1, with their labels."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def load() -> _Digits:
        """Returns the digits in `digits.npz`, a fifth of them for testing.

        They are the test set of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten
        Digits" (1998), UCI Machine Learning Repository, under the license CC BY 4.0.
        """
        with (files("distribax.cli") / "digits.npz").open("rb") as file, np.load(file) as digits:
            order = np.random.default_rng(0).permutation(len(digits["labels"]))
            images = (digits["images"][order] / 16.0).astype(np.float32)
            labels = digits["labels"][order].astype(np.int32)
        testing = len(order) // 5
        return _Digits((images[testing:], labels[testing:]), (images[:testing], labels[:testing]))


class _Classifier:
    """A multilayer perceptron of `dx.Variable`s, and the steps that train and test it."""

    def __init__(self, strategy: MirroredStrategy) -> None:
        import optax

        self.strategy = strategy
        random = np.random.default_rng(0)
        sizes = (64, 128, 10)
        with strategy.scope():
            self.layers = [
                (
                    Variable(_draw_glorot(random, rows, columns), name=f"kernel_{index}"),
                    Variable(np.zeros(columns, np.float32), name=f"bias_{index}"),
                )
                for index, (rows, columns) in enumerate(itertools.pairwise(sizes))
            ]
            self.optimizer = Optimizer(optax.adam(3e-3))
            self.loss, self.accuracy = Mean("loss"), Accuracy()
        self.train_step = function(self._train_step)
        self.test_step = function(self._test_step)

    @property
    def variables(self) -> list[Variable]:
        return [variable for layer in self.layers for variable in layer]

    def compute_logits(self, images: jax.Array) -> jax.Array:
        (first, first_bias), (second, second_bias) = self.layers
        return jax.nn.relu(images @ first + first_bias) @ second + second_bias

    def _train_step(self, batch: Sequence[object], size: int) -> None:
        def replica_step(images: jax.Array, labels: jax.Array) -> None:
            def loss_fn() -> jax.Array:
                chosen = jax.nn.log_softmax(self.compute_logits(images))[
                    jnp.arange(len(labels)), labels
                ]
                self.loss.update_state(-chosen)
                return compute_average_loss(-chosen, global_batch_size=size)

            _, gradients = value_and_grad(loss_fn, self.variables)()
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

        self.strategy.run(replica_step, args=batch)

    def _test_step(self, batch: Sequence[object]) -> None:
        def replica_step(images: jax.Array, labels: jax.Array) -> None:
            self.accuracy.update_state(labels, self.compute_logits(images))

        self.strategy.run(replica_step, args=batch)


def _draw_glorot(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    scale = np.sqrt(2.0 / (rows + columns))
    return random.normal(scale=scale, size=(rows, columns)).astype(np.float32)


def run(options: argparse.Namespace) -> int:
    """Trains and tests, with a progress bar and a table at the end; returns the exit code."""
    digits = _Digits.load()
    set_virtual_cpu_devices(options.devices)
    strategy = MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    model = _Classifier(strategy)
    seconds, examples = _train(model, digits, options.epochs)
    for batch in strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(digits.test).batch(_BATCH)
    ):
        model.test_step(batch)
    _report(model, examples / seconds)
    return 0


def _train(model: _Classifier, digits: _Digits, epochs: int) -> tuple[float, int]:
    """Trains; returns the seconds and examples of all epochs but the first, which compiles."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    rows = len(digits.train[1])
    dataset = Dataset.from_tensor_slices(digits.train).shuffle(rows, seed=0).batch(_BATCH)
    distributed = model.strategy.experimental_distribute_dataset(dataset)
    sizes = [min(_BATCH, rows - start) for start in range(0, rows, _BATCH)]
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]:.4f}"),
    )
    started = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=epochs, loss=float("nan"))
        for epoch in range(epochs):
            if epoch == 1:
                started = time.perf_counter()
            model.loss.reset_state()
            for batch, size in zip(distributed, sizes, strict=True):
                model.train_step(batch, size)
            progress.update(task, advance=1, loss=float(model.loss.result()))
    return time.perf_counter() - started, rows * max(epochs - 1, 1)


def _report(model: _Classifier, rate: float) -> None:
    from rich.console import Console
    from rich.table import Table

    mirrored = [v for v in (*model.variables, *model.optimizer.variables) if len(v.devices) > 1]
    parameters = sum(variable.size for variable in model.variables)
    table = Table(title="distribax: handwritten digits, MirroredStrategy", show_header=False)
    table.add_row("accuracy on unseen digits", f"{float(model.accuracy.result()):.1%}")
    table.add_row("examples per second", f"{rate:,.0f}")
    table.add_row("devices", ", ".join(model.strategy.extended.worker_devices))
    table.add_row(
        "mirrored on each of them",
        f"{len(mirrored)} variables: {parameters:,} parameters and the optimizer's state",
    )
    table.add_row("compiled steps", f"{model.train_step.trace_count} for training")
    Console().print(table)
