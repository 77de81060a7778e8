"""Steps of a model function, each one compiled program: taken here, or by workers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from distribax import data
from distribax.context import get_strategy
from distribax.coordinator import ClusterCoordinator
from distribax.data.distributed import InputContext
from distribax.estimator.model_spec import EstimatorSpec, ModeKeys
from distribax.estimator.model_state import ModelState
from distribax.estimator.run_config import RunConfig
from distribax.execution import Function
from distribax.strategies import Strategy
from distribax.types import ReduceOp
from distribax.values import Mirrored

if TYPE_CHECKING:
    from distribax.parameter_server.strategy import ParameterServerStrategy


@dataclasses.dataclass(frozen=True)
class Model:
    """A model function with the arguments that are the same in each call."""

    model_fn: Callable[..., Any]
    params: Mapping[str, Any]
    config: RunConfig

    def __call__(self, features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        given = {"labels": labels, "mode": mode, "params": self.params, "config": self.config}
        spec = self.model_fn(features, **_choose_arguments(self.model_fn, given))
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(
                f"Estimator: model_fn returned {spec!r}, which is a {type(spec).__name__}. "
                "Expected a dx.estimator.EstimatorSpec."
            )
        return spec


def _choose_arguments(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments that a function takes."""
    taken = inspect.signature(fn).parameters
    return {name: value for name, value in given.items() if name in taken}


def make_step(model: Model, state: ModelState, strategy: Strategy, mode: ModeKeys) -> Function:
    """Returns the function that takes one step with the next batch of an iterator."""
    reduce_op = ReduceOp.parse(model.config.loss_reduction, "loss_reduction")
    if strategy.extended.source is not None:
        # Other strategies cannot be sent to workers.
        config = dataclasses.replace(model.config, train_distribute=None, eval_distribute=None)
        model = dataclasses.replace(model, config=config)

    def replica(element: Any) -> Any:
        is_pair = isinstance(element, tuple) and len(element) == 2
        features, labels = element if is_pair else (element, None)
        if mode is ModeKeys.PREDICT:
            labels = None
        with state.one_run():
            spec = model(features, labels, mode)
        if mode is ModeKeys.EVAL:
            # Kept: an evaluation that is compiled already does not come here again.
            state.metrics = dict(spec.eval_metric_ops or {})
        return spec.predictions if mode is ModeKeys.PREDICT else spec.loss

    def step(iterator: Iterator[Any]) -> Any:
        result = strategy.run(replica, args=(next(iterator),))
        if mode is ModeKeys.PREDICT:
            return result
        if mode is ModeKeys.TRAIN:
            state.global_step.assign_add(1)
        # What all replicas share has been combined by the model function.
        op = ReduceOp.MEAN if isinstance(result, Mirrored) else reduce_op
        return strategy.reduce(op, result, axis=None)

    return Function(step)


def open_input(
    input_fn: Callable[..., Any], strategy: Strategy, mode: ModeKeys, model: Model
) -> Iterable[Any]:
    """Returns the input of all replicas; each batch of the input function goes to one."""

    def make(context: InputContext) -> data.Dataset:
        given = {"input_context": context, "mode": mode}
        given |= {"params": model.params, "config": model.config}
        made = input_fn(**_choose_arguments(input_fn, given))
        leaves = jax.tree.leaves(made)
        if all(
            isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float)) for leaf in leaves
        ):
            return data.Dataset.from_tensors(made).repeat()  # The same batch for each step.
        return data.as_dataset(made)

    return strategy.distribute_datasets_from_function(make)


class OwnSteps:
    """Steps of the replicas of this process, and of the workers that run the same program."""

    def __init__(self, step: Function, state: ModelState, make_input: Callable[[], Any]) -> None:
        self._step, self._number = step, int(state.global_step)
        self._iterator = iter(make_input())

    def advance(self, limit: int) -> tuple[int, Any]:
        """Takes one step; returns its number and its loss.

        Raises:
            StopIteration: The input has ended.
        """
        loss = self._step(self._iterator)
        self._number += 1
        return self._number, loss

    def close(self) -> None:
        """Ends the input."""
        self._iterator.close()


class ScheduledSteps:
    """Steps that workers take with variables on parameter servers."""

    def __init__(self, step: Function, state: ModelState, make_input: Callable[[], Any]) -> None:
        self._step, self._state = step, state
        # Variables are created here: workers find them.
        example = iter(make_input())
        step.get_concrete_function(example)
        example.close()
        strategy = cast("ParameterServerStrategy", get_strategy())
        self._coordinator = ClusterCoordinator(strategy)
        self._iterator = iter(self._coordinator.create_per_worker_dataset(make_input))

    def advance(self, limit: int) -> tuple[int, Any]:
        """Lets workers take `limit` steps, and waits for all of them."""
        losses = [
            self._coordinator.schedule(self._step, args=(self._iterator,)) for _ in range(limit)
        ]
        self._coordinator.join()
        return int(self._state.global_step), losses[-1].fetch()

    def close(self) -> None:
        """Does nothing: the input ends with the workers."""
