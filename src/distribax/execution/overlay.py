"""Overlays: values that stand in for variables while a function of them is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from distribax import context

_overlays: ContextVar[tuple[tuple[context.Entry, dict[Any, Any]], ...]] = ContextVar(
    "distribax_overlays", default=()
)


@contextlib.contextmanager
def overlaid(values: Mapping[Any, Any]) -> Iterator[None]:
    """Makes reads of the given variables return the given values, in this context only."""
    token = _overlays.set((*_overlays.get(), (context.current(), dict(values))))
    try:
        yield
    finally:
        _overlays.reset(token)


def holding(variable: Any) -> dict[Any, Any] | None:
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
