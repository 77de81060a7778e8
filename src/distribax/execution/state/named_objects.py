"""Named objects: what a function refers to arrives as the same object in another process.

A function that is sent to a worker refers to variables, strategies, optimizers and compiled
functions. Each of them travels as a name. The first time a process receives a name, the object is
created there; every later mention in that process is the same object, with its compiled programs.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from distribax import contracts
from distribax.context.scoped import set_within

_T = TypeVar("_T")
_destination: ContextVar[contracts.Strategy | None] = ContextVar(
    "distribax_destination", default=None
)
_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def pickle_for(strategy: contracts.Strategy) -> AbstractContextManager[None]:
    """Marks that what is pickled inside goes to the workers of `strategy`, not into a copy."""
    return set_within(_destination, strategy)


def get_destination() -> contracts.Strategy | None:
    """Returns the strategy whose workers receive what is pickled now, or None."""
    return _destination.get()


def make_uid() -> str:
    """Returns a name that no other object has, in any process."""
    return uuid.uuid4().hex


def register(uid: str, thing: object) -> None:
    """Remembers the object of this process that has the name `uid`."""
    _known[uid] = thing


def find(uid: str) -> Any | None:
    """Returns the object of this process that has the name `uid`, or None."""
    return _known.get(uid)


def get_or_create(uid: str, make: Callable[[], _T]) -> _T:
    """Returns the object of this process that has the name `uid`; creates it the first time."""
    thing: _T | None = _known.get(uid)
    if thing is None:
        thing = make()
        _known[uid] = thing
    return thing
