"""What only the first worker of a cluster does: it writes files and shows progress."""

from __future__ import annotations

from typing import Any

import keras

from distribax import contracts
from distribax.integrations.keras.models import get_home
from distribax.integrations.replacement import Function, replacement

_WRITING = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
# It reads, on all workers.
_READING = ("BackupAndRestore", "on_train_begin")


def is_chief(strategy: contracts.Strategy | None) -> bool:
    """Tells whether this process is the first worker of a strategy, or the only one."""
    return strategy is None or bool(strategy.extended.input_target().worker_id == 0)


@replacement
def write_once(method: Function, /, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a model that writes files, in the first worker alone."""
    return method(model, *args, **kwargs) if is_chief(get_home(model)) else None


def silence_callbacks() -> None:
    """Lets Keras's callbacks that write files do so in the first worker alone."""
    for name in _WRITING:
        callback = getattr(keras.callbacks, name)
        for hook in [each for each in vars(callback) if each.startswith("on_")]:
            if (name, hook) != _READING:
                setattr(callback, hook, _call_once(getattr(callback, hook)))


@replacement
def _call_once(
    hook: Function, /, callback: keras.callbacks.Callback, *args: Any, **kwargs: Any
) -> Any:
    return hook(callback, *args, **kwargs) if is_chief(get_home(callback.model)) else None
