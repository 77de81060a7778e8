"""`train_and_evaluate`: trains and evaluates, on one machine or as one task of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distribax.cluster import Server
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver
from distribax.estimator.estimator import Estimator, Hook
from distribax.training.sidecar_evaluator import SidecarEvaluator


@dataclass(frozen=True)
class TrainSpec:
    """How to train.

    Attributes:
        input_fn: As for `Estimator.train`.
        max_steps: The step at which training ends; None trains until the input ends.
        hooks: As for `Estimator.train`.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Hook] = ()


@dataclass(frozen=True)
class EvalSpec:
    """How to evaluate.

    Attributes:
        input_fn: As for `Estimator.evaluate`.
        steps: How many batches to use; None uses all.
        name: Tells several evaluations apart.
        start_delay_secs: How long an evaluator task waits before it begins.
        throttle_secs: How much time there is at least between two evaluations.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    start_delay_secs: float = 120.0
    throttle_secs: float = 600.0


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, Any] | None:
    """Trains and evaluates, on one machine or as the task of a cluster that TF_CONFIG names.

    - On one machine: trains, and evaluates new checkpoints at most every `throttle_secs`, and the
      last one.
    - A chief or worker trains. Workers and servers of a cluster with parameter servers serve the
      chief until it ends.
    - An evaluator evaluates each new checkpoint in the directory, until that of the last step.

    Args:
        estimator: What to train.
        train_spec: How to train; an evaluator needs its `max_steps` to know the end.
        eval_spec: How to evaluate.

    Returns:
        The last evaluation; None in tasks that do not evaluate.
    """
    resolver = TFConfigClusterResolver()
    cluster, task = resolver.cluster_spec(), resolver.task_type
    if task == "evaluator":
        return _evaluate_beside(estimator, train_spec.max_steps, eval_spec)
    if "ps" in cluster.jobs and task in ("ps", "worker"):
        Server(cluster, task, resolver.task_id).join()
        return None
    if sum(cluster.num_tasks(job) for job in cluster.jobs) > 1:
        estimator.train(train_spec.input_fn, train_spec.hooks, max_steps=train_spec.max_steps)
        return None
    return _take_turns(estimator, train_spec, eval_spec)


def _evaluate(estimator: Estimator, spec: EvalSpec, path: str) -> dict[str, Any]:
    return estimator.evaluate(spec.input_fn, spec.steps, path, spec.name)


class _LastEvaluation:
    """The last evaluation of an Estimator while it is trained: of which checkpoint, and when."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._path: str | None = None
        self._ended = float("-inf")
        self.result: dict[str, Any] | None = None

    def evaluate(self, path: str) -> None:
        """Evaluates a checkpoint, unless it was the last one."""
        if path != self._path:
            self.result = _evaluate(self._estimator, self._spec, path)
            self._path, self._ended = path, time.monotonic()

    def evaluate_if_due(self, path: str) -> None:
        """Evaluates a checkpoint if the last evaluation is long enough ago."""
        if time.monotonic() - self._ended >= self._spec.throttle_secs:
            self.evaluate(path)


def _take_turns(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, Any] | None:
    last = _LastEvaluation(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[last.evaluate_if_due],
    )
    newest = estimator.latest_checkpoint()
    if newest is not None:
        last.evaluate(newest)
    return last.result


def _evaluate_beside(
    estimator: Estimator, max_steps: int | None, spec: EvalSpec
) -> dict[str, Any] | None:
    time.sleep(spec.start_delay_secs)
    result: dict[str, Any] | None = SidecarEvaluator(
        lambda path: _evaluate(estimator, spec, path),
        estimator.model_dir,
        until=lambda path, found: max_steps is not None and found["global_step"] >= max_steps,
        min_interval_secs=spec.throttle_secs,
    ).start()
    return result
