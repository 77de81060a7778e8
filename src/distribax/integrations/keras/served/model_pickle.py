"""Keras models as bytes: the objects as they are, but for the values of their variables.

Keras itself pickles a model as its configuration, which users' models often do not have.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import jax
import keras
from typing_extensions import override

from distribax import jax_private
from distribax.coordinator.pickling import ship_module_of

_LOOPS = (
    "train_function",
    "test_function",
    "predict_function",
    "history",
    "_jax_state",
    "_eval_epoch_iterator",
)
"""What Keras's loops keep in a model."""
# The base of layers, losses, metrics and optimizers, which pickles them as their configuration.
_SAVEABLE = next(base for base in keras.Layer.__mro__ if "__reduce__" in vars(base))
# What preprocessing layers compute with; while it is unpickled it looks for its own attributes.
_CHOICE = "DynamicBackend"
_STACK_BYTES = 512 << 20
_DEPTH = 100_000


def dump_model(model: keras.Model) -> bytes:
    """Returns a model, as it is compiled and built, without the values of its variables.

    Raises:
        TypeError: Something that the model holds cannot be pickled.
    """
    for code in list_code(model):
        ship_module_of(code)
    buffer = io.BytesIO()
    try:
        _run_with_large_stack(lambda: _ModelPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(model))
    except Exception as error:
        raise TypeError(
            f"{model.name}: the model cannot be sent to workers: {error} Do not keep what cannot "
            "be pickled (locks, open files, generators) in a model or a layer."
        ) from error
    return buffer.getvalue()


def load_model(data: bytes) -> keras.Model:
    """Returns the model of `dump_model`, which can be used with values that it is given."""
    # The step that needs it first is traced; arrays that layers hold are not part of the trace.
    return jax_private.run_outside_trace(lambda: pickle.loads(data))


def list_code(model: keras.Model) -> Iterator[Any]:
    """Yields the classes and functions that a model is made of."""
    yield from (type(model), *map(type, model._flatten_layers()))
    if model.optimizer is not None:
        yield from list_code_of_optimizer(model.optimizer)
    compiled = model._compile_config
    if compiled is not None:
        names = ("loss", "metrics", "weighted_metrics")
        for each in jax.tree.leaves([compiled.config.get(name) for name in names]):
            yield each if hasattr(each, "__qualname__") else type(each)


def list_code_of_optimizer(optimizer: keras.Optimizer) -> Iterator[Any]:
    """Yields the classes and functions that an optimizer is made of."""
    rate = optimizer._learning_rate
    yield from (type(optimizer), rate if hasattr(rate, "__qualname__") else type(rate))


class _ModelPickler(cloudpickle.Pickler):
    """Pickles objects of Keras by their attributes."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Variable):
            return _make_empty, (type(obj),), {**_get_state(obj), "_value": None}
        if isinstance(obj, _SAVEABLE):
            state = _get_state(obj)
            return _make_empty, (type(obj),), state | {n: None for n in _LOOPS if n in state}
        if type(obj).__module__ == "keras.src.utils.tracking" and isinstance(
            obj, (list, dict, set)
        ):
            items = list(obj.items()) if isinstance(obj, dict) else list(obj)
            return _make_empty, (type(obj),), (vars(obj), items), None, None, _fill
        if type(obj).__qualname__ == _CHOICE and type(obj).__module__.startswith("keras."):
            return type(obj), (obj._backend,)
        return super().reducer_override(obj)


def _make_empty(cls: Any) -> Any:
    return cls.__new__(cls)


def _get_state(obj: Any) -> dict[str, Any]:
    state: dict[str, Any] = dict(vars(obj))
    # The strategy that a variable was made in belongs to this process.
    state.pop("_distribax_strategy", None)
    return state


def _fill(container: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    """Restores a container that tells its owner about each change, without telling."""
    attributes, items = state
    container.__dict__.update(attributes)
    if isinstance(container, list):
        list.extend(container, items)
    elif isinstance(container, dict):
        dict.update(container, items)
    else:
        set.update(container, items)


def _run_with_large_stack(fn: Callable[[], None]) -> None:
    """Runs `fn`, which calls itself once for each layer and more."""

    def run() -> None:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(_DEPTH)
        try:
            fn()
        finally:
            sys.setrecursionlimit(limit)

    with ThreadPoolExecutor(1, "distribax-pickle-model") as executor:
        before = threading.stack_size(_STACK_BYTES)
        try:
            future = executor.submit(run)
        finally:
            threading.stack_size(before)
        future.result()
