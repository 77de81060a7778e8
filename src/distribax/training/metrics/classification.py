"""Metrics of predicted classes: the share of predictions that are right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax.training.metrics.regression import PairMean, average_outputs, match_ranks


class Accuracy(PairMean):
    """The share of predictions that are right.

    Predictions are labels; scores of the classes, with one more dimension than the labels; or a
    single column, which holds labels or probabilities of class 1. Labels may have a last dimension
    of size 1. One-hot labels are compared number by number, as in Keras: pass
    `jnp.argmax(y_true, -1)` instead.

    Args:
        name: The name of the metric; None for "accuracy".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx, jax.numpy as jnp
        >>> accuracy = dx.metrics.Accuracy()
        >>> float(accuracy(jnp.array([1, 0]), jnp.array([[0.1, 0.9], [0.2, 0.8]])))
        0.5
    """

    _default_name = "accuracy"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        labels, predictions = y_true, y_pred
        if predictions.ndim > 1 and predictions.shape[-1] == 1:
            predictions = _decide_column(predictions[..., 0])
            if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
                labels = labels[..., 0]
        elif labels.ndim > 1 and labels.shape[-1] == 1 and predictions.ndim <= labels.ndim:
            labels = labels[..., 0]
        if predictions.ndim == labels.ndim + 1:
            predictions = jnp.argmax(predictions, axis=-1)
        if predictions.shape != labels.shape:
            raise ValueError(
                f"Accuracy: y_pred of shape {y_pred.shape} does not fit y_true of shape "
                f"{y_true.shape}. Expected labels of the same shape, or scores with one more "
                "dimension, the classes, at the end."
            )
        return (labels == predictions).astype(jnp.float32)


def _decide_column(scores: jax.Array) -> jax.Array:
    """Returns the labels that one column of scores means."""
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        return scores
    # A number that is not strictly between 0 and 1 is a label, not a probability.
    return jnp.where((scores > 0) & (scores < 1), scores > 0.5, scores)


class BinaryAccuracy(PairMean):
    """The share of probabilities that are on the right side of a threshold.

    Args:
        name: The name of the metric; None for "binary_accuracy".
        dtype: The data type of the sums.
        threshold: A probability above it means 1.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.BinaryAccuracy()([1, 0, 1, 1], [0.9, 0.2, 0.4, 0.6]))
        0.75
    """

    _default_name = "binary_accuracy"

    def __init__(
        self,
        name: str | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(name, dtype)
        self._threshold = threshold

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        true, pred = match_ranks(y_true, y_pred, "BinaryAccuracy")
        return average_outputs(((pred > self._threshold) == true).astype(jnp.float32))


class CategoricalAccuracy(PairMean):
    """The share of scores whose largest is that of the right class, given as one-hot vectors.

    Args:
        name: The name of the metric; None for "categorical_accuracy".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.CategoricalAccuracy()([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    _default_name = "categorical_accuracy"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        true, pred = match_ranks(y_true, y_pred, "CategoricalAccuracy")
        return (jnp.argmax(true, axis=-1) == jnp.argmax(pred, axis=-1)).astype(jnp.float32)


class SparseCategoricalAccuracy(PairMean):
    """The share of scores whose largest is that of the right class, given as a number.

    Args:
        name: The name of the metric; None for "sparse_categorical_accuracy".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.SparseCategoricalAccuracy()([1, 0], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    _default_name = "sparse_categorical_accuracy"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        labels = fit_labels(y_true, y_pred, "SparseCategoricalAccuracy")
        return (labels == jnp.argmax(y_pred, axis=-1)).astype(jnp.float32)


class SparseTopKCategoricalAccuracy(PairMean):
    """The share of scores whose `k` largest include that of the right class, given as a number.

    Args:
        k: How many classes count as predicted.
        name: The name of the metric; None for "sparse_top_k_categorical_accuracy".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> top2 = dx.metrics.SparseTopKCategoricalAccuracy(k=2)
        >>> float(top2([2, 1], [[0.1, 0.9, 0.8], [0.5, 0.1, 0.4]]))
        0.5
    """

    _default_name = "sparse_top_k_categorical_accuracy"

    def __init__(
        self, k: int = 5, name: str | None = None, dtype: jax.typing.DTypeLike = jnp.float32
    ) -> None:
        super().__init__(name, dtype)
        self._k = k

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        labels = fit_labels(y_true, y_pred, type(self).__name__)
        own = jnp.take_along_axis(y_pred, labels[..., None].astype(jnp.int32), axis=-1)
        return (jnp.sum(y_pred > own, axis=-1) < self._k).astype(jnp.float32)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The share of scores whose `k` largest include that of the right class, one-hot.

    Args:
        k: How many classes count as predicted.
        name: The name of the metric; None for "top_k_categorical_accuracy".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> top1 = dx.metrics.TopKCategoricalAccuracy(k=1)
        >>> float(top1([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    _default_name = "top_k_categorical_accuracy"

    @override
    def score(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        true, _ = match_ranks(y_true, y_pred, "TopKCategoricalAccuracy")
        return super().score(jnp.argmax(true, axis=-1), y_pred)


def fit_labels(y_true: jax.Array, y_pred: jax.Array, what: str) -> jax.Array:
    """Returns labels without a last dimension of size 1.

    Raises:
        ValueError: The labels do not fit the scores.
    """
    labels = y_true
    if labels.ndim == y_pred.ndim and labels.shape[-1] == 1:
        labels = jnp.squeeze(labels, -1)
    if labels.shape != y_pred.shape[:-1]:
        raise ValueError(
            f"{what}: y_true of shape {y_true.shape} does not fit y_pred of shape {y_pred.shape}. "
            "Expected one label for each vector of scores."
        )
    return labels
