"""Settings that hold inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable a value that it has inside the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
