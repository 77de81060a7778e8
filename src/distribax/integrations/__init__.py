"""Models of other libraries inside replicas, unchanged.

You need not call anything: the adapter of a library is loaded by the first `strategy.scope()` after
the program has imported the library, or by the first step.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from distribax.execution import adapters
from distribax.integrations import keras_import


def _make_adapter(module: str, library: str) -> adapters.Adapter:
    try:
        return importlib.import_module(f"distribax.integrations.{module}").adapt
    except (AttributeError, ImportError, KeyError) as error:
        # A program may use the library for something else, which must go on working.
        warnings.warn(
            f"distribax: the installed {library} lacks what modules need to be used inside "
            f"strategy.run() and dx.function ({error!r}); elsewhere they work as ever. Install the "
            f"version that distribax is tested with: pip install 'distribax[{library}]'."
        )
        return lambda fn: fn


adapters.register("flax.nnx", lambda: _make_adapter("nnx", "flax"))
adapters.register("keras", keras_import.load_adapter)
keras_import.watch_import()


def __getattr__(name: str) -> Any:
    if name != "keras":
        raise AttributeError(f"module 'distribax.integrations' has no attribute {name!r}")
    # Loaded on use: not every program has Keras.
    return importlib.import_module("distribax.integrations.keras")
