"""The functions that Keras's loops call for each step, run by a strategy.

Keras's own stateless `train_step`, `test_step` and `predict_step`, or a user's, run in every
replica of one compiled program. The loops are told that nothing has changed: the variables have
their new values already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from distribax import contracts
from distribax.execution import function
from distribax.integrations import replica_state
from distribax.integrations.keras import shares
from distribax.integrations.keras.feeding import BatchFeeder, join_outputs, take
from distribax.integrations.keras.shares import ReplicaShare
from distribax.integrations.keras.step_kinds import ResumableStep
from distribax.types import ReduceOp
from distribax.values import Global, Mirrored, is_wrapped

Logs: TypeAlias = dict[str, Any]
ModelValues: TypeAlias = tuple[list[Any], ...]
"""The values of the variables of a model, by their kinds."""


@dataclass(frozen=True)
class VariableWrite:
    """A variable, its new value, and whether that is the same in all replicas."""

    variable: keras.Variable
    value: Any
    is_same: bool


class MeasuringStep(ResumableStep):
    """A step of training or of evaluation: it changes variables and measures.

    Args:
        model: The model.
        strategy: The strategy that runs it.
        call: The model's stateless step.
        list_names: The names of the model's lists of variables that the step is given.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: contracts.Strategy,
        call: Callable[[ModelValues, Any], tuple[Logs, ModelValues]],
        list_names: Sequence[str],
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._call = call
        self._list_names = list_names
        self._feed = BatchFeeder(strategy)
        self._is_compiled = model.jit_compile and not model.run_eagerly
        self._run = function(self._step) if self._is_compiled else self._step
        self._run_several = function(self._step_several)
        # Found while the step is traced, or runs eagerly.
        self._log_names: tuple[str, ...] = ()
        self._measuring: list[keras.Metric] = []

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Logs, ModelValues]:
        """Runs the next steps; Keras's loop is told that its state is empty."""
        nothing: ModelValues = tuple([] for _ in self._list_names)
        count = self._model.steps_per_execution
        if self._num_to_skip > 0:
            self._num_to_skip -= len(take(iterator, count))
            return self._model.get_metrics_result(), nothing
        if count == 1:
            return self._run(self._feed(next(iterator))), nothing
        batches = take(iterator, count)
        stacked = self._feed.stack(batches) if self._is_compiled else None
        if stacked is not None:
            return self._run_several(stacked), nothing
        for batch in batches:
            logs = self._run(self._feed(batch))
        return logs, nothing

    def _step(self, batch: Any) -> Logs:
        return self._measure(self._strategy.run(self._run_replica, args=(batch,)))

    def _step_several(self, batches: Any) -> Logs:
        return self._measure(self._strategy.run(self._run_replica_several, args=(batches,)))

    def _measure(self, own: Logs) -> Logs:
        """Returns the logs: results of metrics after all replicas have updated them."""
        measured = _get_results(self._measuring)
        logs = {name: own[name] if name in own else measured[name] for name in self._log_names}
        return {name: _unwrap(value) for name, value in logs.items()}

    # In a replica.

    def _run_replica(self, batch: Any) -> Logs:
        with shares.enter(batch) as share:
            state = self._read()
            logs, new = self._call(state, batch)
            _assign(self._find_writes(state, new, share))
            return self._average(logs, share)

    def _run_replica_several(self, batches: Any) -> Logs:
        writes: list[VariableWrite] = []

        def step(state: ModelValues, batch: Any) -> tuple[ModelValues, Logs]:
            nonlocal writes
            logs, new = self._call(state, batch)
            writes = self._find_writes(state, new, share)
            return new, self._average(logs, share)

        # The pieces of all replicas have one size, and so each batch has the same shares.
        with shares.enter(batches) as share:
            new, logs = jax.lax.scan(step, self._read(), batches)
            values = {id(v): value for v, value in zip(self._variables, chain(*new), strict=True)}
            _assign([replace(write, value=values[id(write.variable)]) for write in writes])
            return {name: value[-1] for name, value in logs.items()}

    @property
    def _lists(self) -> list[list[keras.Variable]]:
        model = self._model
        return [
            model.optimizer.variables if name == "optimizer_variables" else getattr(model, name)
            for name in self._list_names
        ]

    @property
    def _variables(self) -> list[keras.Variable]:
        return list(chain(*self._lists))

    def _read(self) -> ModelValues:
        return tuple([variable.value for variable in variables] for variables in self._lists)

    def _find_writes(
        self, state: ModelValues, new: ModelValues, share: ReplicaShare
    ) -> list[VariableWrite]:
        """Returns what a step has changed, and notes which metrics it has updated."""
        values = zip(self._variables, chain(*state), chain(*new), strict=True)
        writes = [
            VariableWrite(variable, value, share.is_same(value))
            for variable, old, value in values
            if value is not old
        ]
        changed = {id(write.variable) for write in writes}
        self._measuring = [
            metric
            for metric in self._model.metrics
            if any(id(variable) in changed for variable in metric.variables)
        ]
        return writes

    def _average(self, logs: Logs, share: ReplicaShare) -> Logs:
        """Returns the logs that no metric computes, averaged over all examples."""
        self._log_names = tuple(logs)
        measured = _get_results(self._measuring)
        return {
            name: _average(value, share) for name, value in logs.items() if name not in measured
        }


class PredictingStep:
    """A step of prediction.

    Args:
        model: The model.
        strategy: The strategy that runs it.
    """

    def __init__(self, model: keras.Model, strategy: contracts.Strategy) -> None:
        self._model = model
        self._strategy = strategy
        self._feed = BatchFeeder(strategy)
        is_compiled = model.jit_compile and not model.run_eagerly
        self._run = function(self._step) if is_compiled else self._step

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, ModelValues]:
        """Returns the outputs of the next steps, joined."""
        batches = take(iterator, self._model.steps_per_execution)
        parts = [self._collect(self._run(self._feed(batch))) for batch in batches]
        return join_outputs(parts), ([], [])

    def _step(self, batch: Any) -> Any:
        return self._strategy.run(self._run_replica, args=(batch,))

    def _run_replica(self, batch: Any) -> Any:
        with shares.enter(batch):
            model = self._model
            others = model.non_trainable_variables
            state = ([v.value for v in model.trainable_variables], [v.value for v in others])
            outputs, new = model.predict_step(state, batch)
            values = zip(others, state[1], new, strict=True)
            _assign(
                [VariableWrite(v, value, False) for v, old, value in values if value is not old]
            )
            return outputs

    def _collect(self, outputs: Any) -> Any:
        """Returns the outputs of all replicas, in the order of the examples."""
        return jax.tree.map(self._join, outputs, is_leaf=is_wrapped)

    def _join(self, leaf: Any) -> Any:
        if not is_wrapped(leaf):
            return leaf
        layout = leaf.layout
        if isinstance(layout, Global) and not layout.mesh.is_multi_process and not layout.stacked:
            return layout.array
        gathered = self._strategy.extended.gather_to(leaf, None, axis=0)
        return _unwrap(gathered)


def _get_results(metrics: Sequence[keras.Metric]) -> Logs:
    """Returns the results of metrics, by the names that Keras's logs have."""
    results: Logs = {}
    for metric in metrics:
        result = metric.result()
        results.update(result if isinstance(result, dict) else {metric.name: result})
    return results


def _average(value: Any, share: ReplicaShare) -> Any:
    state = replica_state.current()
    if state is None or state.replica.num_replicas_in_sync == 1:
        return value
    return state.replica.all_reduce(ReduceOp.SUM, jnp.asarray(value) * share.weight)


def _assign(writes: list[VariableWrite]) -> None:
    """Gives variables new values; those that all replicas have alike are not combined again."""
    state = replica_state.current()
    with contextlib.nullcontext() if state is None else state.together():
        for write in writes:
            if write.is_same:
                write.variable.assign(write.value)
    for write in writes:
        if not write.is_same:
            write.variable.assign(write.value)


def _unwrap(value: Any) -> Any:
    return value.get() if isinstance(value, Mirrored) else value
