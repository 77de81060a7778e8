"""What new variables are created beside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_beside: ContextVar[object] = ContextVar("distribax_colocated", default=None)


def get_colocated() -> object:
    """Returns what variables are created beside now, or None."""
    return _beside.get()


@contextlib.contextmanager
def colocate(beside: object) -> Iterator[None]:
    """Creates variables beside a variable, or on a device."""
    token = _beside.set(beside)
    try:
        yield
    finally:
        _beside.reset(token)
