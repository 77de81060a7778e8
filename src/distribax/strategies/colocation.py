"""What new variables are created beside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from distribax.context.scoped import set_within

_beside: ContextVar[object] = ContextVar("distribax_colocated", default=None)


def get_colocated() -> object:
    """Returns what variables are created beside now, or None."""
    return _beside.get()


def colocate(beside: object) -> AbstractContextManager[None]:
    """Creates variables beside a variable, or on a device."""
    return set_within(_beside, beside)
