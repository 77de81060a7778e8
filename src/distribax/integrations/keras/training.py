"""`fit`, `evaluate`, `predict` and their siblings: Keras's own, in the scope of the strategy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from distribax import context, contracts, jax_private
from distribax.data.dataset import Dataset
from distribax.integrations.keras.chief import is_chief
from distribax.integrations.keras.data import adapt_input
from distribax.integrations.keras.dataset_creator import check_steps
from distribax.integrations.keras.models import find_strategy, recall_strategy
from distribax.integrations.keras.step_kinds import StepKind
from distribax.integrations.keras.steps import MeasuringStep, PredictingStep
from distribax.integrations.replacement import Function, replacement

_MODEL = ("trainable_variables", "non_trainable_variables")
_VARIABLES = {
    StepKind.TRAIN: (*_MODEL, "optimizer_variables", "metrics_variables"),
    StepKind.TEST: (*_MODEL, "metrics_variables"),
}
"""The variables that a step of each kind may change."""


_get_signature = functools.cache(inspect.signature)


@replacement
def run_in_scope(method: Function, /, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of `keras.Model` in the scope of the model's strategy."""
    name = method.__name__
    strategy = find_strategy(model, name)
    if strategy is None:
        if not any(isinstance(each, Dataset) for each in (*args, *kwargs.values())):
            return method(model, *args, **kwargs)
        # A model of no strategy takes our data sets, too.
        strategy = context.get_strategy()
    bound = _get_signature(method).bind(model, *args, **kwargs)
    bound.apply_defaults()
    # The arguments that are declared, and those that the method takes as **kwargs.
    rest = bound.arguments.pop("kwargs", {})
    arguments = check_steps(name, bound.arguments)
    with strategy.scope(), _let_data_end(), _feed_from(strategy, name, arguments):
        given = adapt_input(strategy, arguments, model, name)
        if "verbose" in given and not is_chief(strategy):
            given["verbose"] = 0
        _shuffle_alike(strategy)
        given.pop("self")
        return method(model, **given, **rest)


@contextlib.contextmanager
def _let_data_end() -> Iterator[None]:
    """Takes the end of a data set of unknown size for the end of an epoch, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        yield


def _shuffle_alike(strategy: contracts.Strategy) -> None:
    """Lets all workers draw the first one's random numbers, by which Keras shuffles its input."""
    target = strategy.extended.input_target()
    if target.num_workers == 1:
        return
    is_first = target.worker_id == 0
    generator: Any = np.random.get_state()
    kind, keys, *rest = generator
    own = json.dumps([random.getstate(), [kind, keys.tolist(), *rest]]) if is_first else ""
    text = jax_private.gather_texts(own)[0]
    if not is_first:
        (version, internal, gauss), numpy = json.loads(text)
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(numpy))


def _feed_from(
    strategy: contracts.Strategy, method: str, arguments: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    served = _find_served(strategy)
    if served is None:
        return contextlib.nullcontext()
    feed: contextlib.AbstractContextManager[None] = served.feed_from(strategy, method, arguments)
    return feed


def _find_served(strategy: contracts.Strategy) -> Any | None:
    """Returns the module for strategies whose variables live on servers; None for others."""
    if strategy.extended.source is None:
        return None
    # It needs Ray, which only programs with parameter servers have.
    return importlib.import_module("distribax.integrations.keras.served.served_step")


def make_function(kind: StepKind) -> Callable[[Function], Function]:
    """Returns what replaces a model's method that makes the function of its steps.

    Args:
        kind: The kind of steps.
    """
    attribute = f"{kind.value}_function"

    @replacement
    def call(make: Function, model: keras.Model, force: bool = False) -> Any:
        strategy = find_strategy(model, f"make_{attribute}")
        if strategy is None:
            return make(model, force)
        if getattr(model, attribute) is None or force:
            setattr(model, attribute, _make_step(model, strategy, kind))
        return getattr(model, attribute)

    return call


def _make_step(model: keras.Model, strategy: contracts.Strategy, kind: StepKind) -> Any:
    served = _find_served(strategy)
    if served is not None:
        return served.ServedStep(model, strategy, kind)
    if kind is StepKind.PREDICT:
        return PredictingStep(model, strategy)
    call = getattr(model, f"{kind.value}_step")
    return MeasuringStep(model, strategy, call, _VARIABLES[kind])


@replacement
def take_from_host(get_iterator: Function, epochs: Any) -> Any:
    """Gives a loop its batches: in a strategy's scope, as they are.

    Keras puts whole batches on the first device before a step needs them. Here each device is given
    its own part, and while one step runs the loop is at the next batch already.
    """
    if context.has_strategy():
        return epochs.data_adapter.get_jax_iterator()
    return get_iterator(epochs)


@replacement
def keep_state(get_state: Function, /, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Takes the variables' values for a loop, but not those of a strategy."""
    if recall_strategy(model, "fit") is None:
        return get_state(model, *args, **kwargs)
    return ()
