"""The model of the demo, and a loop that trains it under any synchronous strategy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from distribax.cli.demo.digits import BATCH_SIZE, Digits
from distribax.cli.demo.view import DemoResult, EpochFigures
from distribax.data.dataset import Dataset
from distribax.execution import function
from distribax.strategies import Strategy
from distribax.training.gradients import value_and_grad
from distribax.training.losses import compute_average_loss
from distribax.training.metrics import Accuracy, Mean
from distribax.training.optimizer import Optimizer
from distribax.variables import Variable

SIZES: Final = (64, 128, 10)
LEARNING_RATE: Final = 3e-3


class Classifier:
    """A multilayer perceptron of `dx.Variable`s, and the steps that train and test it."""

    def __init__(self, strategy: Strategy) -> None:
        import optax

        self.strategy = strategy
        with strategy.scope():
            self.layers = make_layers()
            self.optimizer = Optimizer(optax.adam(LEARNING_RATE))
            self.loss, self.accuracy = Mean("loss"), Accuracy()
        self.train_step = function(self._train_step)
        self.test_step = function(self._test_step)

    @property
    def variables(self) -> list[Variable]:
        """The kernels and biases."""
        return [variable for layer in self.layers for variable in layer]

    def _train_step(self, batch: Sequence[object], size: int) -> None:
        def replica_step(images: jax.Array, labels: jax.Array) -> None:
            def loss_fn() -> jax.Array:
                logits = compute_logits(self.layers, images)
                losses = compute_losses(logits, labels)
                self.loss.update_state(losses)
                self.accuracy.update_state(labels, logits)
                return compute_average_loss(losses, global_batch_size=size)

            _, gradients = value_and_grad(loss_fn, self.variables)()
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

        self.strategy.run(replica_step, args=batch)

    def _test_step(self, batch: Sequence[object]) -> None:
        def replica_step(images: jax.Array, labels: jax.Array) -> None:
            self.accuracy.update_state(labels, compute_logits(self.layers, images))

        self.strategy.run(replica_step, args=batch)


def make_layers() -> list[tuple[Variable, Variable]]:
    """Returns a kernel and a bias for each layer, created in the scope of now."""
    random = np.random.default_rng(0)
    return [
        (
            Variable(_draw_glorot(random, rows, columns), name=f"kernel_{index}"),
            Variable(np.zeros(columns, np.float32), name=f"bias_{index}"),
        )
        for index, (rows, columns) in enumerate(itertools.pairwise(SIZES))
    ]


def _draw_glorot(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    scale = np.sqrt(2.0 / (rows + columns))
    return random.normal(scale=scale, size=(rows, columns)).astype(np.float32)


def compute_logits(layers: Sequence[tuple[Variable, Variable]], images: jax.Array) -> jax.Array:
    """Returns what the model makes of some images."""
    (first, first_bias), (second, second_bias) = layers
    return jax.nn.relu(images @ first + first_bias) @ second + second_bias


def compute_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross entropy of each example."""
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]


def train(
    strategy: Strategy, digits: Digits, epochs: int, tell: Callable[[EpochFigures], None]
) -> DemoResult:
    """Trains and tests the classifier under a strategy, and tells the figures of each epoch."""
    model = Classifier(strategy)
    rows = len(digits.train[1])
    dataset = Dataset.from_tensor_slices(digits.train).shuffle(rows, seed=0).batch(BATCH_SIZE)
    distributed = strategy.experimental_distribute_dataset(dataset)
    sizes = [min(BATCH_SIZE, rows - start) for start in range(0, rows, BATCH_SIZE)]
    for epoch in range(epochs):
        started = time.perf_counter()
        for metric in (model.loss, model.accuracy):
            metric.reset_state()
        for batch, size in zip(distributed, sizes, strict=True):
            model.train_step(batch, size)
        loss, accuracy = float(model.loss.result()), float(model.accuracy.result())
        rate = rows / (time.perf_counter() - started)
        tell(EpochFigures(epoch + 1, epochs, loss, accuracy, rate))
    model.accuracy.reset_state()
    test = Dataset.from_tensor_slices(digits.test).batch(BATCH_SIZE)
    for batch in strategy.experimental_distribute_dataset(test):
        model.test_step(batch)
    parameters = sum(variable.size for variable in model.variables)
    return DemoResult(
        float(model.accuracy.result()),
        {
            "devices": list_devices(strategy),
            "variables": f"{parameters:,} parameters and the optimizer's state, "
            + _describe_home(model.variables[0]),
            "compiled steps": f"{model.train_step.trace_count} for training",
        },
    )


def list_devices(strategy: Strategy) -> str:
    """Returns the names of the devices that run replicas here."""
    return ", ".join(name.rpartition("device:")[2] for name in strategy.extended.worker_devices)


def _describe_home(variable: Variable) -> str:
    copies, home = variable.placement.num_copies, variable.device.rpartition("device:")[2]
    return f"mirrored on {copies} devices" if copies > 1 else f"on {home}"
