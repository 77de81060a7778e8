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
from distribax.integrations.keras.chief import is_chief
from distribax.integrations.keras.data import adapt_input
from distribax.integrations.keras.dataset_creator import check_steps
from distribax.integrations.keras.models import find_strategy, recall_strategy
from distribax.integrations.keras.steps import MeasuringStep, PredictingStep

_MODEL = ("trainable_variables", "non_trainable_variables")


def run_in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `keras.Model` that runs in the scope of the model's strategy."""
    name = method.__name__
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = find_strategy(model, name)
        if strategy is None:
            return method(model, *args, **kwargs)
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        # Those that are declared, and those that the method takes without naming them.
        rest = bound.arguments.pop("kwargs", {})
        arguments = check_steps(name, bound.arguments)
        with strategy.scope(), _let_data_end(), _feed_from(strategy, name, arguments):
            given = adapt_input(strategy, arguments, model, name)
            if "verbose" in given and not is_chief(strategy):
                given["verbose"] = 0
            _shuffle_alike(strategy)
            given.pop("self")
            return method(model, **given, **rest)

    return call


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
    return importlib.import_module("distribax.integrations.keras.served.steps")


def make_train_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `keras.Model.make_train_function` for models of strategies."""

    @functools.wraps(make)
    def call(model: keras.Model, force: bool = False) -> Any:
        strategy = find_strategy(model, "make_train_function")
        if strategy is None:
            return make(model, force)
        if model.train_function is None or force:
            kinds = (*_MODEL, "optimizer_variables", "metrics_variables")
            served = _find_served(strategy)
            model.train_function = (
                MeasuringStep(model, strategy, model.train_step, kinds)
                if served is None
                else served.ServedStep(model, strategy, "train")
            )
        return model.train_function

    return call


def make_test_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `keras.Model.make_test_function` for models of strategies."""

    @functools.wraps(make)
    def call(model: keras.Model, force: bool = False) -> Any:
        strategy = find_strategy(model, "make_test_function")
        if strategy is None:
            return make(model, force)
        if model.test_function is None or force:
            kinds = (*_MODEL, "metrics_variables")
            served = _find_served(strategy)
            model.test_function = (
                MeasuringStep(model, strategy, model.test_step, kinds)
                if served is None
                else served.ServedStep(model, strategy, "test")
            )
        return model.test_function

    return call


def make_predict_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `keras.Model.make_predict_function` for models of strategies."""

    @functools.wraps(make)
    def call(model: keras.Model, force: bool = False) -> Any:
        strategy = find_strategy(model, "make_predict_function")
        if strategy is None:
            return make(model, force)
        if model.predict_function is None or force:
            served = _find_served(strategy)
            model.predict_function = (
                PredictingStep(model, strategy)
                if served is None
                else served.ServedStep(model, strategy, "predict")
            )
        return model.predict_function

    return call


def take_from_host(get_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that gives a loop its batches: as they are, in a strategy's scope.

    Keras puts whole batches on the first device before a step needs them. Here each device is given
    its own part, and while one step runs the loop is at the next batch already.
    """

    @functools.wraps(get_iterator)
    def call(epochs: Any) -> Any:
        if context.has_strategy():
            return epochs.data_adapter.get_jax_iterator()
        return get_iterator(epochs)

    return call


def keep_state(get_state: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that takes the variables' values for a loop: not those of strategies."""

    @functools.wraps(get_state)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if recall_strategy(model, "fit") is None:
            return get_state(model, *args, **kwargs)
        return ()

    return call
