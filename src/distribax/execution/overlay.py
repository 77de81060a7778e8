"""Overlays: values that stand in for variables while a function of them is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from distribax import context

_overlays: ContextVar[tuple[tuple[context.Entry, dict[Any, Any]], ...]] = ContextVar(
    "distribax_overlays", default=()
)


class Unread:
    """Stands in for a variable until it is read; then `make` says what does."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


@contextlib.contextmanager
def lay_over(values: Mapping[Any, Any]) -> Iterator[None]:
    """Makes the given variables read as the given values: here, and in replicas run here."""
    token = _overlays.set((*_overlays.get(), (context.current(), dict(values))))
    try:
        yield
    finally:
        _overlays.reset(token)


def find_stand_in(variable: Any) -> Any | None:
    """Returns the value that stands in for `variable` where the code runs now, or None."""
    values = find_overlay(variable)
    if values is not None:
        return _made(values, variable)
    if context.get_replica_context() is None:
        return None
    # A replica that the differentiated function runs: its copy is one of the stand-in.
    for _, enclosing in reversed(_overlays.get()):
        if variable in enclosing:
            return _made(enclosing, variable)
    return None


def _made(values: dict[Any, Any], variable: Any) -> Any:
    value = values[variable]
    if isinstance(value, Unread):
        value = values[variable] = value.make()
    return value


def is_unread(variable: Any) -> bool:
    """Tells whether nothing stands in for `variable` that has been read or written already."""
    values = (values.get(variable) for _, values in _overlays.get())
    return all(value is None or isinstance(value, Unread) for value in values)


def find_overlay(variable: Any) -> dict[Any, Any] | None:
    """Returns the innermost overlay of this context that has a value for `variable`."""
    overlays = _overlays.get()
    if not overlays:
        return None
    here = context.current()
    for entry, values in reversed(overlays):
        # A merge function runs across replicas, where a replica's stand-in has no meaning.
        if entry is here and variable in values:
            return values
    return None
