"""Adapters: state that other libraries keep, such as the variables of a module.

An adapter lets the engine see such state: it wraps the function that replicas run. It can also
watch what traced code reads of the library's objects that is no array, so that the code is traced
again when that has changed. The engine does not know the libraries and does not import them: an
adapter is loaded after its library has been imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

Adapter: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function so that the state of a library is seen while it runs."""


class Guard(Protocol):
    """What traced code has read of a library's objects that is no array."""

    def holds(self) -> bool:
        """Tells whether it is as it was."""


Watch: TypeAlias = Callable[[], AbstractContextManager[Guard]]
"""Watches the code inside; the guard says afterwards whether it would read the same."""

_watches: list[Watch] = []
_commits: list[Callable[[], None]] = []
_num_changes = 0
_waiting: dict[str, Callable[[], Adapter]] = {}
_adapters: list[Adapter] = []
_lock = threading.RLock()


def register(module: str, load: Callable[[], Adapter]) -> None:
    """Calls `load` for an adapter before the next step, once `module` has been imported."""
    _waiting[module] = load


def load_adapters() -> None:
    """Loads the adapters of the libraries that the program has imported by now."""
    if not any(map(sys.modules.__contains__, _waiting)):
        return
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


def add_watch(watch: Watch) -> None:
    """Lets an adapter watch code that is traced."""
    _watches.append(watch)


@contextlib.contextmanager
def watch() -> Iterator[list[Guard]]:
    """Watches the code inside, and gives what all adapters have noted of it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(each()) for each in _watches]


def note_change() -> None:
    """Notes that something has changed which a guard may stand for."""
    global _num_changes
    _num_changes += 1


def count_changes() -> int:
    """Returns a number that is the same as long as all guards that held still hold."""
    return _num_changes


def add_commit(commit: Callable[[], None]) -> None:
    """Lets an adapter hand over what a replica has written, in the middle of its run."""
    _commits.append(commit)


def commit() -> None:
    """Makes what the eager replica that runs now has written visible outside of it."""
    for each in _commits:
        each()
