"""`Estimator`: trains, evaluates and predicts with a model function."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from distribax.estimator.model_spec import ModeKeys
from distribax.estimator.model_state import ModelState
from distribax.estimator.model_steps import Model, OwnSteps, ScheduledSteps, make_step, open_input
from distribax.estimator.run_config import RunConfig, StrategyOrMaker
from distribax.execution import Function
from distribax.strategies import OneDeviceStrategy, Strategy, get_strategy
from distribax.training.checkpoints import directory
from distribax.training.checkpoints.checkpoint import Checkpoint
from distribax.training.checkpoints.checkpoint_manager import CheckpointManager, restore_newest
from distribax.training.logs.tensorboard import TensorBoard

_logger = logging.getLogger(__name__)

_NAME = "model.ckpt"
_SAVE_SECONDS = 600.0

Hook = Callable[[int, Any], object]
"""Called after steps with the number of the last one and its loss; True ends the training."""


@dataclasses.dataclass(eq=False)
class _OpenedModel:
    """A model under one strategy, in one mode: its state, its checkpoint and its step."""

    state: ModelState
    checkpoint: Checkpoint
    step: Function


class _Training:
    """One call of `train`: takes the steps, and saves and reports in between."""

    def __init__(
        self,
        config: RunConfig,
        opened: _OpenedModel,
        driver: OwnSteps | ScheduledSteps,
        hooks: Sequence[Hook],
        listeners: Sequence[Callable[[str], object]],
    ) -> None:
        assert config.model_dir is not None
        self._config, self._opened, self._driver = config, opened, driver
        self._hooks, self._listeners = hooks, listeners
        self._manager = CheckpointManager(
            opened.checkpoint, config.model_dir, config.keep_checkpoint_max, checkpoint_name=_NAME
        )
        self._workers = opened.checkpoint.workers()
        self._events = TensorBoard(config.model_dir)
        self._strategy = get_strategy()
        self._saved_at = time.monotonic()
        self._first = int(opened.state.global_step)
        self._reported = (self._first, self._saved_at)

    def run(self, last: int | None, after_first_step: Callable[[], object]) -> None:
        """Takes steps up to `last`, or as long as there is input."""
        number = saved = self._first
        ended = False
        # Hooks and listeners are called outside the scope: they may evaluate with another strategy.
        while not ended and (last is None or number < last):
            before, loss = number, None
            try:
                with self._strategy.scope():
                    number, loss = self._driver.advance(self._count_steps(number, last))
            except StopIteration:
                number, ended = int(self._opened.state.global_step), True
            else:
                if before == self._first:
                    self._check_state()
                    after_first_step()
                self._report(before, number, loss)
                answers = [hook(number, loss) for hook in self._hooks]
                ended = any(map(_is_true, answers))
            is_last = ended or (last is not None and number >= last)
            if number > saved and (is_last or self._is_due(before, number)):
                saved = number
                with self._strategy.scope():
                    path = self._manager.save(number)
                self._saved_at = time.monotonic()
                for listener in self._listeners:
                    listener(str(path))

    def close(self) -> None:
        """Ends the input and the summaries."""
        self._driver.close()
        self._events.close()

    def _count_steps(self, number: int, last: int | None) -> int:
        """Returns how many steps there are until something is to be done."""
        config = self._config
        periods = [config.log_step_count_steps, config.save_summary_steps]
        periods += [config.save_checkpoints_steps or periods[0]]
        waits = [period - number % period for period in periods]
        return min(waits if last is None else [*waits, last - number])

    def _is_due(self, before: int, number: int) -> bool:
        config = self._config
        if config.save_checkpoints_steps is not None:
            return _passes(before, number, config.save_checkpoints_steps)
        is_alone = self._workers.num_workers == 1
        if not is_alone and not _passes(before, number, config.log_step_count_steps):
            return False  # The clocks of several workers are compared now and then only.
        seconds = config.save_checkpoints_secs or _SAVE_SECONDS
        is_due = time.monotonic() - self._saved_at >= seconds
        return bool(self._workers.exchange("time to save", is_due)[0])

    def _check_state(self) -> None:
        if len(self._opened.state) == 1:
            raise ValueError(
                "Estimator.train: model_fn keeps no variables, so nothing is trained. Create them "
                "with dx.Variable or dx.get_variable, and models of other libraries with "
                'model = dx.estimator.get_or_create("model", lambda: ...).'
            )

    def _report(self, before: int, number: int, loss: Any) -> None:
        if _passes(before, number, self._config.log_step_count_steps):
            then, self._reported = self._reported, (number, time.monotonic())
            speed = (number - then[0]) / (self._reported[1] - then[1])
            _logger.info("Step %d: loss %.6g, %.4g steps/s", number, float(loss), speed)
        is_due = _passes(before, number, self._config.save_summary_steps)
        if self._workers.is_first and (is_due or before == self._first):
            self._events.log_metrics({"loss": float(loss)}, number)


def _is_true(answer: object) -> bool:
    """Tells whether a hook says yes; other values are what it happens to return."""
    if isinstance(answer, (np.ndarray, np.generic, jax.Array)):
        return answer.shape == () and answer.dtype == np.bool_ and bool(answer)
    return answer is True


def _passes(before: int, number: int, period: int) -> bool:
    """Tells whether a multiple of a period has been reached since the step before."""
    return before // period < number // period


class Estimator:
    """Trains a model function, saves checkpoints, evaluates and predicts from them.

    `model_fn(features, labels, mode, params, config)` (the last three are optional) runs in each
    replica, as part of one compiled step, and returns an `EstimatorSpec`. Variables, optimizers
    and metrics that it creates are created on its first run and found again, by name, on others.

    Args:
        model_fn: The model function.
        model_dir: Where checkpoints and summaries go; training resumes from the newest checkpoint
            there. By default that of `config`, or else a new temporary directory.
        config: How to run.
        params: Hyperparameters that the model function is given.

    Raises:
        TypeError: `model_fn` is not callable.

    Example:
        >>> import distribax as dx, jax.numpy as jnp, optax
        >>> def model_fn(features, labels, mode):
        ...     w = dx.Variable(0.0, name="w")
        ...     loss_fn = lambda: jnp.mean((w * features - labels) ** 2)
        ...     optimizer = dx.Optimizer(optax.sgd(0.1))
        ...     loss = optimizer.minimize(loss_fn, [w]) if mode == "train" else loss_fn()
        ...     return dx.estimator.EstimatorSpec(mode, loss=loss)
        >>> estimator = dx.estimator.Estimator(model_fn)
        >>> _ = estimator.train(lambda: (jnp.ones(4), jnp.full(4, 3.0)), steps=50)
        >>> round(float(estimator.get_variable_value("w")), 2)
        3.0
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(model_fn):
            raise TypeError(f"Estimator: model_fn={model_fn!r} is not a function.")
        config = config or RunConfig()
        folder = os.path.abspath(model_dir or config.model_dir or tempfile.mkdtemp())
        self._config = dataclasses.replace(config, model_dir=folder)
        self._model = Model(model_fn, dict(params or {}), self._config)
        self._made: dict[StrategyOrMaker | None, Strategy] = {}
        self._opened: dict[tuple[Strategy, ModeKeys], _OpenedModel] = {}

    @property
    def config(self) -> RunConfig:
        """How the Estimator runs."""
        return self._config

    @property
    def model_dir(self) -> str:
        """Where checkpoints and summaries are."""
        return str(self._config.model_dir)

    @property
    def params(self) -> dict[str, Any]:
        """The hyperparameters of the model function."""
        return dict(self._model.params)

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint, or None."""
        return directory.latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Returns the names of all values in the newest checkpoint."""
        return [
            name for name, _ in directory.list_variables(self.model_dir) if name != "save_counter"
        ]

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns a value of the newest checkpoint.

        Args:
            name: One of `get_variable_names()`.

        Returns:
            The value.
        """
        return directory.load_variable(self.model_dir, name)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Hook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Callable[[str], object]] = (),
    ) -> Self:
        """Trains until the input or the number of steps ends, and saves a checkpoint.

        Args:
            input_fn: Returns a data set of `(features, labels)`, or one such pair of arrays. It is
                called for each worker, and each batch goes to one replica. It may take
                `input_context` (a `dx.InputContext`), `mode`, `params` and `config`.
            hooks: Functions of the step's number and its loss, called after steps (after several
                with parameter servers). One that returns True ends the training.
            steps: How many steps to take.
            max_steps: The number of steps, of this and of earlier calls, at which training ends.
            saving_listeners: Functions that are called with the path of each new checkpoint.

        Returns:
            The Estimator itself.

        Raises:
            ValueError: Both numbers are given or one is not positive, or the model function keeps
                no variables.
        """
        given = [number for number in (steps, max_steps) if number is not None]
        if len(given) > 1 or any(number <= 0 for number in given):
            raise ValueError(
                f"Estimator.train: steps={steps}, max_steps={max_steps}. Expected at most one of "
                "them, and a positive number."
            )
        strategy = self._get_strategy(self._config.train_distribute)
        with strategy.scope():
            opened, forget = self._open(strategy, ModeKeys.TRAIN, None)
            first = int(opened.state.global_step)
            last = first + steps if steps is not None else max_steps
            if last is not None and first >= last:
                _logger.info("Estimator.train: step %d of %d is reached already.", first, last)
                return self
            kind = OwnSteps if strategy.extended.source is None else ScheduledSteps
            make_input = partial(open_input, input_fn, strategy, ModeKeys.TRAIN, self._model)
            driver = kind(opened.step, opened.state, make_input)
            training = _Training(self._config, opened, driver, hooks or (), saving_listeners)
        try:
            training.run(last, forget)
        finally:
            training.close()
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint.

        Args:
            input_fn: As for `train`.
            steps: How many batches to use; all by default.
            checkpoint_path: The checkpoint, by default the newest. Without one the model is
                evaluated as it is initialized.
            name: Tells several evaluations apart: the summaries go to `eval_<name>`.

        Returns:
            The metrics by name, as numbers or arrays, `loss` (the mean over the batches) and
            `global_step`.

        Raises:
            ValueError: `eval_distribute` has parameter servers, or there was no input.
        """
        strategy = self._get_strategy(self._config.eval_distribute)
        if strategy.extended.source is not None:
            raise ValueError(
                "Estimator.evaluate: eval_distribute is a ParameterServerStrategy, whose workers "
                "would each see all of the input. Use None (one device) or dx.MirroredStrategy()."
            )
        with strategy.scope():
            opened, forget = self._open(strategy, ModeKeys.EVAL, checkpoint_path)
            for metric in opened.state.metrics.values():
                metric.reset_state()
            iterator: Any = iter(open_input(input_fn, strategy, ModeKeys.EVAL, self._model))
            losses: list[Any] = []
            with closing(iterator), suppress(StopIteration):
                while steps is None or len(losses) < steps:
                    losses.append(opened.step(iterator))
                    forget()
            if not losses:
                raise ValueError("Estimator.evaluate: input_fn gave no batch.")
            number = int(opened.state.global_step)
            metrics = opened.state.metrics
            results = {name: np.asarray(each.result()) for name, each in metrics.items()}
            numbers = {name: float(each) for name, each in results.items() if not each.ndim}
            numbers["loss"] = float(np.mean([float(loss) for loss in losses]))
            found = results | numbers
            if opened.checkpoint.workers().is_first:
                with TensorBoard(Path(self.model_dir, f"eval_{name}" if name else "eval")) as board:
                    board.log_metrics(numbers, number)
        _logger.info("Evaluation of step %d: %s", number, found)
        return found | {"global_step": number}

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions from a checkpoint, computed on one device.

        Args:
            input_fn: Returns a data set of features; labels are ignored.
            predict_keys: Which predictions to yield; all by default.
            checkpoint_path: The checkpoint, by default the newest.
            yield_single_examples: Whether to yield the predictions of one example at a time, or
                those of a batch.

        Yields:
            NumPy arrays, or dicts of them.
        """
        strategy = self._get_strategy(None)
        with strategy.scope():
            opened, forget = self._open(strategy, ModeKeys.PREDICT, checkpoint_path)
            iterator: Any = iter(open_input(input_fn, strategy, ModeKeys.PREDICT, self._model))
        try:
            while True:
                # Left before each yield: the caller's code is not in this scope.
                with strategy.scope():
                    try:
                        found = jax.tree.map(np.asarray, opened.step(iterator))
                    except StopIteration:
                        return
                forget()
                if predict_keys is not None:
                    found = {key: found[key] for key in predict_keys}
                if not yield_single_examples:
                    yield found
                    continue
                for row in range(len(jax.tree.leaves(found)[0])):
                    yield jax.tree.map(lambda leaf, row=row: leaf[row], found)
        finally:
            iterator.close()

    def _get_strategy(self, given: StrategyOrMaker | None) -> Strategy:
        if isinstance(given, Strategy):
            return given
        if given not in self._made:
            self._made[given] = (
                OneDeviceStrategy(jax.local_devices()[0]) if given is None else given()
            )
        return self._made[given]

    def _open(
        self, strategy: Strategy, mode: ModeKeys, path: str | None
    ) -> tuple[_OpenedModel, Callable[[], object]]:
        """Returns the model with a checkpoint's values, and what ends the wait for variables."""
        found = directory.find_checkpoints(Path(self.model_dir), _NAME) if path is None else [path]
        # Each is apart: a model may be evaluated while it is trained, or while it predicts.
        key = (strategy, mode)
        if not found or key not in self._opened:
            state = ModelState()
            step = make_step(self._model, state, strategy, mode)
            self._opened[key] = _OpenedModel(state, Checkpoint(state), step)
        opened = self._opened[key]
        paths = opened.checkpoint.workers().exchange("checkpoints", [str(each) for each in found])
        if not paths[0]:
            return opened, lambda: None
        return opened, restore_newest(opened.checkpoint, paths[0])[1].expect_partial
