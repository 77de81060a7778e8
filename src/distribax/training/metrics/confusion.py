"""Metrics of yes or no: how many of the predictions at each threshold are right."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.training.metrics.metric import Metric, apply_weights, divide
from distribax.training.metrics.regression import match_ranks


class _Confusion(Metric):
    """Counts true and false predictions, at each of some thresholds."""

    def __init__(
        self,
        thresholds: Sequence[float],
        name: str | None,
        dtype: jax.typing.DTypeLike,
        columns: tuple[int, ...] | None = (),
    ) -> None:
        super().__init__(name)
        if not thresholds:
            raise ValueError(f"{type(self).__name__}: thresholds is empty. Expected numbers.")
        self._thresholds = tuple(thresholds)
        self._dtype = dtype
        if columns is not None:
            self._build(columns)

    def _build(self, columns: tuple[int, ...]) -> None:
        """Creates the counts: one for each threshold, or for each threshold and column."""
        shape = (len(self._thresholds), *columns)
        names = ("true_positives", "false_positives", "true_negatives", "false_negatives")
        self._counts = [self.add_variable(each, self._dtype, shape) for each in names]

    @override
    def update_state(
        self,
        y_true: jax.typing.ArrayLike,
        y_pred: jax.typing.ArrayLike,
        sample_weight: jax.typing.ArrayLike | None = None,
    ) -> None:
        """Adds predictions with their labels.

        Args:
            y_true: The labels, 0 or 1.
            y_pred: The probabilities of 1.
            sample_weight: A weight for each label, for each example, or for all.

        Raises:
            ValueError: The shapes do not fit each other.
        """
        true, pred = match_ranks(jnp.asarray(y_true), jnp.asarray(y_pred), type(self).__name__)
        _, weights = apply_weights(true, sample_weight, type(self).__name__)
        true, pred, weights = self._select(true, pred, weights)
        # Dimensions: thresholds, examples and, if each is counted for itself, columns.
        examples = (1, -1, *self._counts[0].shape[1:])
        limits = jnp.asarray(self._thresholds).reshape(-1, *[1] * (len(examples) - 1))
        is_yes, said_yes = (true > 0).reshape(examples), pred.reshape(examples) > limits
        flat = weights.reshape(examples)
        for count, (said, right) in zip(
            self._counts, ((True, True), (True, False), (False, False), (False, True)), strict=True
        ):
            matches = (said_yes == said) & (is_yes == right)
            count.assign_add(jnp.sum(jnp.where(matches, flat, 0.0), axis=1))

    def _select(
        self, true: jax.Array, pred: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the labels, probabilities and weights that are counted."""
        return true, pred, weights


class _ClassConfusion(_Confusion):
    """Counts predictions of the most probable classes, or of one class."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | np.ndarray | jax.Array | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        for what, value, least in (("top_k", top_k, 1), ("class_id", class_id, 0)):
            if value is not None and value < least:
                raise ValueError(
                    f"{type(self).__name__}: {what}={value} is less than {least}. "
                    f"Expected a whole number, or None."
                )
        if thresholds is None:
            # Whatever its probability, a class among the most probable ones counts.
            thresholds = 0.5 if top_k is None else float("-inf")
        super().__init__(np.atleast_1d(thresholds).tolist(), name, dtype)
        self._top_k = top_k
        self._class_id = class_id

    @override
    def _select(
        self, true: jax.Array, pred: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        for what, value, extra in (("top_k", self._top_k, 0), ("class_id", self._class_id, 1)):
            classes = pred.shape[-1] if pred.ndim else 0
            if value is not None and value + extra > classes:
                raise ValueError(
                    f"{type(self).__name__}: {what}={value}, but y_pred of shape {pred.shape} has "
                    f"{classes} classes in its last dimension. Expected at most {classes - extra}."
                )
        if self._top_k is not None:
            places = jnp.argsort(jnp.argsort(pred, axis=-1, descending=True), axis=-1)
            pred = jnp.where(places < self._top_k, pred, -jnp.inf)
        if self._class_id is not None:
            one = (..., self._class_id)
            true, pred, weights = true[one], pred[one], weights[one]
        return true, pred, weights

    def _shape(self, values: jax.Array) -> jax.Array:
        return values[0] if len(self._thresholds) == 1 else values


class Precision(_ClassConfusion):
    """The share of right ones among the predictions of 1.

    Args:
        thresholds: A probability above it is a prediction of 1; with several, the result has one
            number for each. By default 0.5, or none with `top_k`.
        top_k: Only this many classes of an example, the most probable ones, are predictions of 1.
        class_id: The only class that counts, as an index of the last dimension.
        name: The name of the metric; None for "precision".
        dtype: The data type of the counts.

    Raises:
        ValueError: `thresholds` is empty, or `top_k` or `class_id` is too small.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.Precision()([0, 1, 1, 1], [0.6, 0.2, 0.9, 0.4]))
        0.5
    """

    _default_name = "precision"

    @override
    def result(self) -> jax.Array:
        """Returns the precision over all replicas; 0 if nothing was predicted as 1."""
        true_positives, false_positives, _, _ = self._read_totals()
        return self._shape(divide(true_positives, true_positives + false_positives))


class Recall(_ClassConfusion):
    """The share of labels of 1 that are predicted as such.

    Args:
        thresholds: A probability above it is a prediction of 1; with several, the result has one
            number for each. By default 0.5, or none with `top_k`.
        top_k: Only this many classes of an example, the most probable ones, are predictions of 1.
        class_id: The only class that counts, as an index of the last dimension.
        name: The name of the metric; None for "recall".
        dtype: The data type of the counts.

    Raises:
        ValueError: `thresholds` is empty, or `top_k` or `class_id` is too small.

    Example:
        >>> import distribax as dx
        >>> float(dx.metrics.Recall()([0, 1, 1, 0], [0.6, 0.2, 0.9, 0.4]))
        0.5
    """

    _default_name = "recall"

    @override
    def result(self) -> jax.Array:
        """Returns the recall over all replicas; 0 if there was no label of 1."""
        true_positives, _, _, false_negatives = self._read_totals()
        return self._shape(divide(true_positives, true_positives + false_negatives))


class AUC(_Confusion):
    """The area under the ROC or the precision-recall curve, from evenly spaced thresholds.

    Args:
        num_thresholds: How many thresholds there are.
        curve: "ROC" or "PR".
        summation_method: "interpolation", "minoring" or "majoring".
        name: The name of the metric; None for "auc".
        dtype: The data type of the counts.
        thresholds: The thresholds between 0 and 1, instead of `num_thresholds`.
        multi_label: Whether each label, an index of the last dimension, has an area of its own; the
            result is their mean. Otherwise all labels are counted together.
        num_labels: How many labels there are, with `multi_label`; by default as many as the first
            predictions have.
        label_weights: A weight for each label: of its area with `multi_label`, or else of its
            predictions.
        from_logits: Whether predictions are logits, and not probabilities.

    Raises:
        ValueError: There are fewer than 2 thresholds, one is not between 0 and 1, a word is
            unknown, or `num_labels` is given without `multi_label`.

    Example:
        >>> import distribax as dx
        >>> round(float(dx.metrics.AUC()([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])), 3)
        0.75
    """

    _default_name = "auc"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        thresholds: Sequence[float] | np.ndarray | jax.Array | None = None,
        *,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | np.ndarray | jax.Array | None = None,
        from_logits: bool = False,
    ) -> None:
        if thresholds is None and num_thresholds < 2:
            raise ValueError(f"AUC: num_thresholds={num_thresholds} is less than 2.")
        for what, value, known in (
            ("curve", curve, ("ROC", "PR")),
            ("summation_method", summation_method, ("interpolation", "minoring", "majoring")),
        ):
            if value not in known:
                raise ValueError(f"AUC: {what}={value!r} is unknown. Expected one of {known}.")
        if num_labels is not None and not multi_label:
            raise ValueError(f"AUC: num_labels={num_labels} is given without multi_label=True.")
        # The ends are beyond 0 and 1, so that all and none are predicted as 1 there.
        if thresholds is None:
            inner = [(index + 1) / (num_thresholds - 1) for index in range(num_thresholds - 2)]
        else:
            inner = sorted(np.asarray(thresholds).tolist())
            if any(not 0 <= each <= 1 for each in inner):
                raise ValueError(f"AUC: thresholds={thresholds}. Expected numbers from 0 to 1.")
        self._curve = curve
        self._method = summation_method
        self._multi_label = multi_label
        self._label_weights = None if label_weights is None else np.asarray(label_weights)
        self._from_logits = from_logits
        labels = () if num_labels is None else (num_labels,)
        is_known = num_labels is not None or not multi_label
        ends = (-1e-7, *inner, 1 + 1e-7)
        super().__init__(ends, name, dtype, labels if is_known else None)

    @override
    def _select(
        self, true: jax.Array, pred: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        last = pred.shape[-1:]
        if self._multi_label and pred.ndim < 2:
            raise ValueError(
                f"AUC: multi_label=True, but y_pred of shape {pred.shape} has no dimension of "
                "labels. Expected (examples, labels)."
            )
        if not self._variables:
            self._build(last)
        of_labels = None if self._label_weights is None else self._label_weights.shape
        for expected in (self._counts[0].shape[1:] or None, of_labels):
            if expected not in (None, last):
                raise ValueError(
                    f"AUC: y_pred of shape {pred.shape} has {last} labels in its last dimension. "
                    f"Expected {expected}, as num_labels, label_weights or earlier predictions say."
                )
        if self._label_weights is not None and not self._multi_label:
            weights = weights * self._label_weights
        return true, jax.nn.sigmoid(pred) if self._from_logits else pred, weights

    @override
    def result(self) -> jax.Array:
        """Returns the area over all replicas."""
        if not self._variables:
            return jnp.zeros(())
        areas = self._compute_areas()
        if not self._multi_label:
            return areas
        return jnp.average(areas, weights=self._label_weights)

    def _compute_areas(self) -> jax.Array:
        yes, wrong_yes, no, wrong_no = self._read_totals()
        if self._curve == "PR" and self._method == "interpolation":
            return _interpolate_precision(yes, wrong_yes, wrong_no)
        recall = divide(yes, yes + wrong_no)
        if self._curve == "ROC":
            x, y = divide(wrong_yes, wrong_yes + no), recall
        else:
            x, y = recall, divide(yes, yes + wrong_yes)
        if self._method == "interpolation":
            heights = (y[:-1] + y[1:]) / 2
        else:
            heights = (jnp.minimum if self._method == "minoring" else jnp.maximum)(y[:-1], y[1:])
        return jnp.sum((x[:-1] - x[1:]) * heights, axis=0)


def _interpolate_precision(yes: jax.Array, wrong_yes: jax.Array, wrong_no: jax.Array) -> jax.Array:
    """Returns the area under each precision-recall curve.

    Between two thresholds the true positives are linear in the positives, which makes the curve
    of the precision a hyperbola: see Davis and Goadrich, 2006.
    """
    said = yes + wrong_yes
    slope = divide(yes[:-1] - yes[1:], jnp.maximum(said[:-1] - said[1:], 0))
    offset = yes[1:] - slope * said[1:]
    both = (said[:-1] > 0) & (said[1:] > 0)
    ratio = jnp.where(both, said[:-1] / jnp.where(said[1:] > 0, said[1:], 1.0), 1.0)
    parts = slope * ((yes[:-1] - yes[1:]) + offset * jnp.log(ratio))
    return jnp.sum(divide(parts, jnp.maximum(yes[1:] + wrong_no[1:], 0)), axis=0)
