"""`fit`, `evaluate`, `predict` and their siblings: Keras's own, in the scope of the strategy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import keras

from distribax import contracts
from distribax.integrations.keras.dataset_creator import check_steps
from distribax.integrations.keras.models import find_strategy
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
        given = signature.bind(model, *args, **kwargs).arguments
        arguments = check_steps(name, given | given.pop("kwargs", {}))
        served = _find_served(strategy)
        feed = (
            contextlib.nullcontext()
            if served is None
            else served.feed_from(strategy, name, arguments)
        )
        with strategy.scope(), feed:
            return method(**arguments)

    return call


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


def keep_state(get_state: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that takes the variables' values for a loop: not those of strategies."""

    @functools.wraps(get_state)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if find_strategy(model, "fit") is None:
            return get_state(model, *args, **kwargs)
        return ()

    return call
