"""Values that wait for variables which are not created yet.

A checkpoint may be restored before an optimizer or a model has created its variables. A new
variable does not know yet whose it is, so it asks when it is first used: whoever waits looks for
it, and gives it its value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from distribax.execution import frames


class Giver(Protocol):
    """Somebody who has values for variables that are created later."""

    def give_late_values(self) -> None:
        """Gives the variables that exist by now their values."""


_givers: dict[Hashable, Giver] = {}


def wait_for_variables(giver: Giver, key: Hashable) -> None:
    """Calls `giver` when new variables are first used, and no longer who has waited by that key."""
    _givers[key] = giver


def stop_waiting(giver: Giver) -> None:
    """Undoes `wait_for_variables`."""
    for key in [key for key, each in _givers.items() if each is giver]:
        del _givers[key]


def is_somebody_waiting() -> bool:
    """Tells whether a variable that is created now may be given another value."""
    return bool(_givers)


def ask_givers() -> None:
    """Lets those who wait give new variables their values."""
    for giver in tuple(_givers.values()):
        frames.run_outside(giver.give_late_values)
