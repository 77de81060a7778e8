"""Variables as arguments: what a program needs to know of them, whichever they are."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from distribax import contracts

Exchange: TypeAlias = Callable[[Any], Any]
"""Returns what takes the place of an object: itself, unless it is a variable that is exchanged."""


class RoleArgument:
    """A variable, or several that are one, which a compiled function can be given."""

    @property
    @abc.abstractmethod
    def form(self) -> Hashable:
        """What code can know of it, but for its value and which one it is."""

    @property
    @abc.abstractmethod
    def states(self) -> Sequence[contracts.State]:
        """The variables that it consists of."""


def list_objects(arguments: Iterable[RoleArgument]) -> list[object]:
    """Returns the arguments and the variables that they consist of."""
    return [each for argument in arguments for each in (argument, *argument.states)]


def describe(arguments: Sequence[RoleArgument]) -> Hashable:
    """Returns what variables in the same roles have in common: forms, and which are the same."""
    ids = [id(each) for each in list_objects(arguments)]
    return tuple(each.form for each in arguments), tuple(map(ids.index, ids))


def make_exchange(old: Sequence[RoleArgument], new: Sequence[RoleArgument]) -> Exchange:
    """Returns what puts new arguments into the roles of old ones."""
    pairs = zip(list_objects(old), list_objects(new), strict=True)
    # The old ones are kept, so that their ids stay their own.
    exchanged = {id(each): (each, other) for each, other in pairs}
    return lambda thing: exchanged.get(id(thing), (None, thing))[1]
