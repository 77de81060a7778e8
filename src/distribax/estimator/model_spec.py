"""What a model function is told and what it returns."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from distribax.training.metrics import Metric


class ModeKeys(enum.StrEnum):
    """What a model function is called for.

    Attributes:
        TRAIN: One step of training.
        EVAL: One batch of an evaluation.
        PREDICT: One batch of predictions.
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns.

    Attributes:
        mode: The mode that the function was called with.
        predictions: An array or a dict of arrays, of which the first dimension counts examples;
            needed to predict.
        loss: The loss of this replica, a number; needed to train and to evaluate.
        train_op: What the optimizer's call returned, `optimizer.minimize(...)` or
            `optimizer.apply_gradients(...)`: it has been called, so the value does not matter.
        eval_metric_ops: Metrics by name, whose `update_state` the function has called.
    """

    mode: str
    predictions: Mapping[str, Any] | jax.Array | None = None
    loss: jax.typing.ArrayLike | None = None
    train_op: object = None
    eval_metric_ops: Mapping[str, Metric] | None = None

    def __post_init__(self) -> None:
        if self.mode not in list(ModeKeys):
            raise ValueError(
                f"EstimatorSpec: mode={str(self.mode)!r} is not a mode. Pass on the `mode` that "
                "the model function was given, one of dx.estimator.ModeKeys."
            )
        needed = "predictions" if self.mode == ModeKeys.PREDICT else "loss"
        if getattr(self, needed) is None:
            raise ValueError(
                f"EstimatorSpec: mode={str(self.mode)!r} needs {needed}, which is None."
            )
        for name, metric in (self.eval_metric_ops or {}).items():
            if not hasattr(metric, "result") or not hasattr(metric, "reset_state"):
                raise TypeError(
                    f"EstimatorSpec: eval_metric_ops[{name!r}]={metric!r} is not a metric. Create "
                    "one, update it and pass it: accuracy = dx.metrics.Accuracy(); "
                    "accuracy.update_state(labels, logits)."
                )
