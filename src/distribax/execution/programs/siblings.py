"""Programs that are called with other variables than they were traced for.

Code that is given a variable mostly does not ask which one it is: then its program does the same
for another one of the same form. What it reads, writes and sends is exchanged, and the compiled
computation stays. Where the code may tell variables apart, it is traced for each:

- it can reach one by another way than its arguments, such as an optimizer with its slots;
- it has asked for a name, a device or a reference, or may ask for an `id`;
- it uses other variables than the arguments and those that have a name in the code: which one it
  has picked from a table, or found as an attribute, may depend on the argument;
- somebody has set attributes on the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from distribax.execution.calls.call import Call, Origin
from distribax.execution.programs.guarded_programs import GuardedPrograms
from distribax.execution.programs.program import Program
from distribax.execution.state import reachable_variables
from distribax.execution.state.role_arguments import RoleArgument, list_objects, make_exchange


@dataclass(frozen=True)
class _TracedPrograms:
    """Programs, the arguments that they were traced for, and what the code can reach beside."""

    programs: GuardedPrograms
    arguments: Sequence[RoleArgument]
    reachable: frozenset[int]


class Siblings:
    """The programs of one function for calls that differ only in the variables they are given."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, _TracedPrograms] = {}
        self._origins: dict[Hashable, list[Origin]] = {}

    def find_origins(self, call: Call) -> list[Origin] | None:
        """Returns where the elements come from that a call like this one has fetched."""
        return self._origins.get(call.role_key) if call.role_arguments else None

    def find(self, call: Call) -> GuardedPrograms | None:
        """Returns programs of other variables, for those of this call."""
        arguments = call.role_arguments
        traced = self._traced.get(call.read_role_key()) if arguments else None
        if traced is None or _is_any(arguments, traced.reachable) or _have_attributes(arguments):
            return None
        return traced.programs.exchange(make_exchange(traced.arguments, arguments))

    def add(
        self, call: Call, program: Program, programs: GuardedPrograms, fn: Callable[..., Any]
    ) -> None:
        """Keeps a program for calls with other variables, if it can be."""
        arguments = call.role_arguments
        if not arguments or _is_any(arguments, program.identified) or not program.is_exchangeable:
            return
        given = frozenset(map(id, list_objects(arguments)))
        others = frozenset(map(id, program.states)) - given
        named = reachable_variables.list_named(fn) if others else []
        if _have_attributes(arguments) or not others <= frozenset(map(id, named)):
            return
        reachable = reachable_variables.find_variables([fn, *call.static_objects])
        if reachable is None or _is_any(arguments, reachable):
            return
        self._traced[call.read_role_key()] = _TracedPrograms(
            programs, arguments, reachable | others
        )
        self._origins[call.role_key] = call.find_origins()


def _have_attributes(arguments: Sequence[RoleArgument]) -> bool:
    """Tells whether a user has set attributes, which code may read; ours are private."""
    return any(not name.startswith("_") for each in list_objects(arguments) for name in vars(each))


def _is_any(arguments: Sequence[RoleArgument], ids: frozenset[int]) -> bool:
    return any(id(each) in ids for each in list_objects(arguments))
