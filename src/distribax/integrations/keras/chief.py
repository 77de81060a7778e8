"""What only the first worker of a cluster does: it writes files and shows progress."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from distribax import contracts
from distribax.integrations.keras.models import get_home

_WRITING = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
# It reads, on all workers.
_READING = ("BackupAndRestore", "on_train_begin")


def is_chief(strategy: contracts.Strategy | None) -> bool:
    """Tells whether this process is the first worker of a strategy, or the only one."""
    return strategy is None or bool(strategy.extended.input_target().worker_id == 0)


def write_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `keras.Model` that writes files, which the first worker does alone."""

    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return method(model, *args, **kwargs) if is_chief(get_home(model)) else None

    return call


def silence_callbacks() -> None:
    """Lets Keras's callbacks that write files do so in the first worker alone."""
    for name in _WRITING:
        callback = getattr(keras.callbacks, name)
        for hook in [each for each in vars(callback) if each.startswith("on_")]:
            if (name, hook) != _READING:
                setattr(callback, hook, _call_once(getattr(callback, hook)))


def _call_once(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(callback: keras.callbacks.Callback, *args: Any, **kwargs: Any) -> Any:
        return hook(callback, *args, **kwargs) if is_chief(get_home(callback.model)) else None

    return call
