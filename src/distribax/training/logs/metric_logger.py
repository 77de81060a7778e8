"""`dx.logging.MetricLogger`: reads metrics and gives their values to any number of loggers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import jax
import numpy as np

from distribax import jax_private
from distribax.training.metrics import Metric


class LogTarget(Protocol):
    """Takes numbers by their names: `mlflow.log_metrics`, `wandb.log` and the like do."""

    def __call__(self, values: dict[str, float], /, *, step: int) -> object:
        """Stores the numbers.

        Args:
            values: The numbers by their names.
            step: The step they belong to.
        """


class MetricLogger:
    """Gives the values of metrics to loggers.

    With several workers all call `log`, as reading a metric combines what all of them counted; only
    the first worker calls the loggers.

    Args:
        *targets: Functions that take a dict of numbers and `step=`, such as
            `dx.logging.TensorBoard(folder).log_metrics`, `mlflow.log_metrics`, `wandb.log`, or one
            of your own.

    Raises:
        TypeError: A target cannot be called.

    Example:
        >>> import distribax as dx
        >>> loss = dx.metrics.Mean("loss")
        >>> loss.update_state([1.0, 3.0])
        >>> logger = dx.logging.MetricLogger(lambda values, step: print(step, values))
        >>> _ = logger.log([loss], step=10, rate=5)
        10 {'loss': 2.0, 'rate': 5.0}
    """

    def __init__(self, *targets: LogTarget) -> None:
        for target in targets:
            if not callable(target):
                raise TypeError(
                    f"MetricLogger: {target!r} cannot be called. Expected a function that takes a "
                    "dict of numbers and step=, such as TensorBoard(folder).log_metrics."
                )
        self._targets = targets

    def log(
        self,
        metrics: Iterable[Metric] | Mapping[str, Metric | jax.typing.ArrayLike] = (),
        *,
        step: int,
        reset: bool = False,
        **values: jax.typing.ArrayLike,
    ) -> dict[str, float]:
        """Reads metrics and gives their values to all loggers.

        Args:
            metrics: Metrics, which have names of their own; or metrics and numbers by name.
            step: The step they belong to.
            reset: Whether the metrics start again from nothing.
            **values: More numbers.

        Returns:
            The values, by name.

        Raises:
            ValueError: A value is not one number.
        """
        named: dict[str, Metric | jax.typing.ArrayLike] = (
            dict(metrics)
            if isinstance(metrics, Mapping)
            else {metric.name: metric for metric in metrics}
        )
        named.update(values)
        read = {name: _read(name, value) for name, value in named.items()}
        if reset:
            for value in named.values():
                if isinstance(value, Metric):
                    value.reset_state()
        if jax_private.get_process_id() == 0:
            for target in self._targets:
                target(dict(read), step=step)
        return read


def _read(name: str, value: Metric | jax.typing.ArrayLike) -> float:
    number = np.asarray(value.result() if isinstance(value, Metric) else value)
    if number.size != 1:
        raise ValueError(
            f"MetricLogger.log: {name!r} has the shape {number.shape}. Expected one number; for "
            "arrays there is TensorBoard.log_histogram."
        )
    return float(number.reshape(()))
