"""Objects that code which runs again finds again, instead of creating others.

A model function of an Estimator creates its variables, optimizers and metrics each time it is
traced. In a block of `reuse_from`, the second time it is given those of the first.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from distribax.context.scoped import set_within


class ReusedObjects(Protocol):
    """The objects that were created before."""

    def get_or_create(self, kind: type, name: str | None, create: Callable[[], Any]) -> Any:
        """Returns the object of a kind and name that this run has not been given yet."""


_objects: ContextVar[ReusedObjects | None] = ContextVar("distribax_reused_objects", default=None)


def reuse_from(objects: ReusedObjects | None) -> AbstractContextManager[None]:
    """Lets code inside find these objects again instead of creating others; None creates all."""
    return set_within(_objects, objects)


def get_reused_objects() -> ReusedObjects | None:
    """Returns the objects that can be found again here, or None."""
    return _objects.get()


class Reusable(abc.ABCMeta):
    """The type of classes whose objects can be found again."""

    if not TYPE_CHECKING:  # Type checkers read the signature of `__init__`.

        def __call__(cls, *args: object, **kwargs: object) -> Any:
            reused = _objects.get()
            if reused is None:
                return super().__call__(*args, **kwargs)
            create = super().__call__
            texts = (arg for arg in (kwargs.get("name"), *args) if isinstance(arg, str))
            return reused.get_or_create(cls, next(texts, None), lambda: create(*args, **kwargs))
