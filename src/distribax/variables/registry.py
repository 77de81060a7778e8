"""The variables that exist and who owns them; nothing is kept alive by it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from distribax import contracts

OPTIMIZER_STATE: Final = "optimizer state"
METRIC: Final = "metric"


class Owner(Protocol):
    """An object with variables of its own, such as an optimizer."""

    @property
    def owned_variables(self) -> Iterable[contracts.Table]:
        """The variables that this process knows of."""


# By identity: variables are not compared as a whole. The order is that of their creation.
_variables: weakref.WeakValueDictionary[int, contracts.Variable] = weakref.WeakValueDictionary()
_owners: dict[str, weakref.WeakValueDictionary[int, Owner]] = {
    role: weakref.WeakValueDictionary() for role in (OPTIMIZER_STATE, METRIC)
}


def note(variable: contracts.Variable) -> None:
    """Remembers a variable as long as it exists."""
    _variables[id(variable)] = variable


def note_owner(owner: Owner, role: str) -> None:
    """Remembers, as long as it exists, that the variables of an object have a role."""
    _owners[role][id(owner)] = owner


def list_variables() -> list[contracts.Variable]:
    """Returns all variables that exist, the oldest first."""
    return list(_variables.values())


def list_owned() -> Iterator[tuple[contracts.Table, str]]:
    """Yields the variables that have an owner, with their roles."""
    for role, owners in _owners.items():
        for owner in list(owners.values()):
            for variable in owner.owned_variables:
                yield variable, role
