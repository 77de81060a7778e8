"""The functions that Keras's loops call for each step, run by the workers of parameter servers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import keras

from distribax.coordinator import ClusterCoordinator
from distribax.data.distributed.input_options import InputContext
from distribax.integrations.keras.data import add_weights
from distribax.integrations.keras.dataset_creator import DatasetCreator
from distribax.integrations.keras.feeding import join_outputs, take
from distribax.integrations.keras.served.served_model import Logs, get_or_create
from distribax.integrations.keras.step_kinds import ResumableStep, StepKind
from distribax.parameter_server.strategy import ParameterServerStrategy

# Makes the workers' iterators when they are first needed; they go on where an epoch has ended.
_source: ContextVar[Callable[[], object] | None] = ContextVar(
    "distribax_keras_source", default=None
)
# Whether the method that runs returns the logs of its step, as `train_on_batch` does.
_returns_at_once: ContextVar[bool] = ContextVar("distribax_keras_at_once", default=False)


def _make_iterators(
    strategy: ParameterServerStrategy,
    creator: DatasetCreator,
    class_weight: dict[int, float] | None,
) -> object:
    """Returns the workers' iterators of the data that each of them makes for itself.

    Args:
        strategy: The strategy whose workers compute.
        creator: Makes the data.
        class_weight: The weights of classes, which are added to the data; None for none.
    """
    dataset_fn = creator.dataset_fn

    def make_weighted(context: InputContext) -> Any:
        assert class_weight is not None
        return add_weights(dataset_fn(context), class_weight, "fit")

    def make() -> Any:
        make_own = dataset_fn if class_weight is None else make_weighted
        return strategy.distribute_datasets_from_function(make_own)

    coordinator = ClusterCoordinator(strategy, view="none")
    return iter(coordinator.create_per_worker_dataset(make))


@contextlib.contextmanager
def feed_from(
    strategy: ParameterServerStrategy, method: str, arguments: Mapping[str, Any]
) -> Iterator[None]:
    """Notes where the data of a method of a model comes from, while it runs.

    Args:
        strategy: The strategy whose workers compute.
        method: The method's name.
        arguments: The method's arguments, by name.
    """
    creators = [each for each in arguments.values() if isinstance(each, DatasetCreator)]
    were_elsewhere = [creator.is_elsewhere for creator in creators]
    for creator in creators:
        creator.is_elsewhere = True
    x = arguments.get("x")
    source = None
    if isinstance(x, DatasetCreator):
        make = functools.partial(_make_iterators, strategy, x, arguments.get("class_weight"))
        source = functools.cache(make)
    token = _source.set(source)
    at_once = _returns_at_once.set(method.endswith("_on_batch"))
    try:
        yield
    finally:
        # Another strategy may use them next.
        for creator, was_elsewhere in zip(creators, were_elsewhere, strict=True):
            creator.is_elsewhere = was_elsewhere
        _source.reset(token)
        _returns_at_once.reset(at_once)


class ServedStep(ResumableStep):
    """A step that the workers of a strategy take.

    Args:
        model: The model.
        strategy: The strategy.
        kind: What it does.
    """

    def __init__(
        self, model: keras.Model, strategy: ParameterServerStrategy, kind: StepKind
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._kind = kind

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Schedules the next steps; Keras's loop is told that its state is empty."""
        batches = take(iterator, self._model.steps_per_execution)
        nothing: Any = ([], [], [], []) if self._kind is StepKind.TRAIN else ([], [], [])
        if self._num_to_skip > 0:
            self._num_to_skip -= len(batches)
            return self._model.get_metrics_result(), nothing
        source = _source.get()
        workers = None if source is None else source()
        served = get_or_create(self._model, self._strategy)
        if self._kind is StepKind.PREDICT:
            return join_outputs(served.predict(batches, workers)), ([], [])
        logs: Logs = served.measure(self._kind, batches, workers)
        if _returns_at_once.get():
            served.join()
        return logs, nothing
