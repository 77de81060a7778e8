"""Metrics of predicted numbers, and means of arrays."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.training.metrics.metric import Mean, Metric, apply_weights, divide


class PairMean(Mean, abc.ABC):
    """The weighted mean of something that is computed from targets and predictions.

    Args:
        name: The name of the metric.
        dtype: The data type of the sums.
    """

    @abc.abstractmethod
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Returns a value for each example.

        Args:
            y_true: The targets.
            y_pred: The predictions.

        Returns:
            The values that are averaged.

        Raises:
            ValueError: The shapes do not fit each other.
        """

    @override
    def update_state(  # type: ignore[override]
        self,
        y_true: jax.typing.ArrayLike,
        y_pred: jax.typing.ArrayLike,
        sample_weight: jax.typing.ArrayLike | None = None,
    ) -> None:
        """Adds predictions with their targets.

        Args:
            y_true: The targets.
            y_pred: The predictions.
            sample_weight: A weight for each example, or for all.

        Raises:
            ValueError: The shapes do not fit each other.
        """
        super().update_state(self.score(jnp.asarray(y_true), jnp.asarray(y_pred)), sample_weight)


def match_ranks(y_true: jax.Array, y_pred: jax.Array, what: str) -> tuple[jax.Array, jax.Array]:
    """Returns targets and predictions of one shape, as floats.

    One of them may have a last dimension of size 1 that the other does not have.

    Raises:
        ValueError: The shapes do not fit.
    """
    true, pred = y_true, y_pred
    if true.ndim == pred.ndim + 1 and true.shape[-1] == 1:
        true = jnp.squeeze(true, -1)
    if pred.ndim == true.ndim + 1 and pred.shape[-1] == 1:
        pred = jnp.squeeze(pred, -1)
    if true.shape != pred.shape:
        raise ValueError(
            f"{what}: y_pred of shape {y_pred.shape} does not fit y_true of shape {y_true.shape}. "
            "Expected the same shape."
        )
    return true.astype(jnp.float32), pred.astype(jnp.float32)


def average_outputs(values: jax.Array) -> jax.Array:
    """Returns the mean over the last dimension; with one dimension, each is an example."""
    return values if values.ndim < 2 else jnp.mean(values, axis=-1)


class MeanSquaredError(PairMean):
    """The mean of the squared errors.

    Args:
        name: The name of the metric; None for "mean_squared_error".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.MeanSquaredError()([1.0, 2.0], [1.0, 4.0]))
        2.0
    """

    _default_name = "mean_squared_error"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        true, pred = match_ranks(y_true, y_pred, type(self).__name__)
        return average_outputs(jnp.square(pred - true))


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared errors.

    Args:
        name: The name of the metric; None for "root_mean_squared_error".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.RootMeanSquaredError()([1.0, 2.0], [3.0, 4.0]))
        2.0
    """

    _default_name = "root_mean_squared_error"

    @override
    def result(self) -> jax.Array:
        """Returns the root over all replicas; 0 before the first value."""
        return jnp.sqrt(super().result())


class MeanAbsoluteError(PairMean):
    """The mean of the errors' sizes.

    Args:
        name: The name of the metric; None for "mean_absolute_error".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.MeanAbsoluteError()([1.0, 2.0], [1.0, 4.0]))
        1.0
    """

    _default_name = "mean_absolute_error"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        true, pred = match_ranks(y_true, y_pred, type(self).__name__)
        return average_outputs(jnp.abs(pred - true))


class MeanTensor(Metric):
    """The weighted mean of arrays of one shape, element by element.

    Args:
        shape: The shape of the arrays.
        name: The name of the metric.
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> mean = dx.metrics.MeanTensor((2,))
        >>> mean.update_state([0.0, 1.0])
        >>> mean.update_state([2.0, 3.0])
        >>> mean.result().tolist()
        [1.0, 2.0]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        name: str = "mean_tensor",
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        super().__init__(name)
        self._shape = tuple(shape)
        self._total = self.add_variable("total", dtype, self._shape)
        self._count = self.add_variable("count", dtype, self._shape)

    @override
    def update_state(
        self, values: jax.typing.ArrayLike, sample_weight: jax.typing.ArrayLike | None = None
    ) -> None:
        """Adds one array.

        Args:
            values: The array.
            sample_weight: A weight for each element, for the first dimensions, or for all.

        Raises:
            ValueError: The array has another shape, or the weights do not fit it.
        """
        if np.shape(values) != self._shape:
            raise ValueError(
                f"MeanTensor: values of shape {np.shape(values)} do not fit the shape "
                f"{self._shape} of the metric. Make it with the shape of the values."
            )
        weighted, weights = apply_weights(values, sample_weight, "MeanTensor")
        self._total.assign_add(weighted)
        self._count.assign_add(weights)

    @override
    def result(self) -> jax.Array:
        """Returns the mean over all replicas; 0 where nothing has been added."""
        total, count = self._read_totals()
        return divide(total, count)
