"""Adapters: state that other libraries keep, such as the variables of a module.

An adapter lets the engine see such state: it wraps the function that replicas run. The engine does
not know the libraries and does not import them: an adapter is loaded after its library has been
imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

Adapter: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function so that the state of a library is seen while it runs."""

_waiting: dict[str, Callable[[], Adapter]] = {}
_adapters: list[Adapter] = []
_lock = threading.RLock()


def register(module: str, load: Callable[[], Adapter]) -> None:
    """Calls `load` for an adapter before the next step, once `module` has been imported."""
    _waiting[module] = load


def load_adapters() -> None:
    """Loads the adapters of the libraries that the program has imported by now."""
    for module in tuple(_waiting):
        if module in sys.modules:
            # A step in another thread waits: it must not run without the adapter.
            with _lock:
                load = _waiting.get(module)
                if load is not None:
                    _adapters.append(load())
                    del _waiting[module]


def adapt(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as replicas run it, with the state of other libraries in view."""
    load_adapters()
    for adapter in _adapters:
        fn = adapter(fn)
    return fn
