"""Which strategy trains a Keras model."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from distribax import context, contracts
from distribax.context import name_strategy
from distribax.integrations.keras import variables
from distribax.integrations.replacement import Function, replacement

_made_in: weakref.WeakKeyDictionary[keras.Model, contracts.Strategy] = weakref.WeakKeyDictionary()
# What `find_strategy` has found last.
_found: weakref.WeakKeyDictionary[keras.Model, contracts.Strategy | None] = (
    weakref.WeakKeyDictionary()
)


@replacement
def note_scope(initialize: Function, /, model: keras.Model, *args: Any, **kwargs: Any) -> None:
    """Constructs a trainer, and notes the scope that the model is made in."""
    initialize(model, *args, **kwargs)
    if context.has_strategy():
        _made_in[model] = context.get_strategy()


def get_home(model: keras.Model | None) -> contracts.Strategy | None:
    """Returns the strategy in whose scope a model, or its first variable, was made, or None."""
    if model is None:
        # A callback that a custom training loop calls.
        return None
    home = _made_in.get(model)
    if home is None and model.variables:
        home = variables.get_strategy(model.variables[0])
    return home


def recall_strategy(model: keras.Model, what: str) -> contracts.Strategy | None:
    """Returns what `find_strategy` has found when a loop began, without looking at all variables.

    Args:
        model: The model.
        what: The method that is called, for messages.

    Raises:
        ValueError: As `find_strategy`, if that was not called before.
    """
    return _found[model] if model in _found else find_strategy(model, what)


def find_strategy(model: keras.Model, what: str) -> contracts.Strategy | None:
    """Returns the strategy in whose scope a model was made; None if it was made in none.

    Args:
        model: The model.
        what: The method that is called, for messages.

    Raises:
        ValueError: The model, or a variable of it, belongs to another strategy or to none; or
            it has layers that strategies cannot divide.
    """
    here = context.get_strategy() if context.has_strategy() else None
    weights = model.variables
    found = {variables.get_strategy(variable): variable for variable in weights}
    own = _made_in.get(model)
    strategies = [each for each in (*found, own) if each is not None]
    if not strategies and here is None:
        _found[model] = None
        return None
    if not strategies or None in found:
        outside = found.get(None)
        named = f"its variable {outside.path!r} was" if outside is not None else "it was"
        raise ValueError(
            f"{model.name}.{what}: the model is used with a "
            f"{name_strategy(here or strategies[0])}, but {named} made outside `with "
            "strategy.scope():`, so that it would not be distributed. Create the "
            "model, or load it, inside the scope, and call there what makes variables later: the "
            "first call of a model without an Input, enable_lora() or quantize()."
        )
    first = strategies[0]
    others = [each for each in (*strategies, here) if each not in (None, first)]
    if others:
        raise ValueError(
            f"{model.name}.{what}: the model belongs to two strategies, a {name_strategy(first)} "
            f"and a {name_strategy(others[0])} ({id(first):#x} and {id(others[0]):#x}). Create the "
            "model and call its methods in the scope of one strategy; to go on with another one, "
            "save the model and load it in the new scope."
        )
    _check_layers(model, first, what)
    _found[model] = first
    return first


def _check_layers(model: keras.Model, strategy: contracts.Strategy, what: str) -> None:
    """Refuses layers that keep something for each example of a batch, if batches are divided."""
    if strategy.extended.source is None and strategy.num_replicas_in_sync == 1:
        return
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"{model.name}.{what}: the layer {layer.name!r} has stateful=True and keeps a "
                f"state for each example of a batch, but a {name_strategy(strategy)} gives the "
                "examples to several replicas or workers. Leave out stateful=True, or use "
                "dx.OneDeviceStrategy."
            )
