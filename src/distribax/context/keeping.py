"""Objects that code which runs again finds again, instead of creating others.

A model function of an Estimator creates its variables, optimizers and metrics each time it is
traced. While a keeper is current, the second time it is given those of the first.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from distribax.context.scoped import set_within


class Keeper(Protocol):
    """Knows what was created before."""

    def get_or_create(self, kind: type, name: str | None, create: Callable[[], Any]) -> Any:
        """Returns the object of a kind and name that this run has not been given yet."""


_keeper: ContextVar[Keeper | None] = ContextVar("distribax_keeper", default=None)


def keep_in(keeper: Keeper | None) -> AbstractContextManager[None]:
    """Lets a keeper decide what is created inside and what is found again; None creates all."""
    return set_within(_keeper, keeper)


def current_keeper() -> Keeper | None:
    """Returns the keeper that decides now, or None."""
    return _keeper.get()


class Kept(abc.ABCMeta):
    """The type of classes whose objects a keeper keeps."""

    if not TYPE_CHECKING:  # Type checkers read the signature of `__init__`.

        def __call__(cls, *args: object, **kwargs: object) -> Any:
            keeper = _keeper.get()
            if keeper is None:
                return super().__call__(*args, **kwargs)
            create = super().__call__
            texts = (arg for arg in (kwargs.get("name"), *args) if isinstance(arg, str))
            return keeper.get_or_create(cls, next(texts, None), lambda: create(*args, **kwargs))
