"""The programs of one signature: one for each state of what is no array and no argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from distribax.errors import HostMode
from distribax.execution.calls.call import Call, Origin
from distribax.execution.programs.program import Program
from distribax.execution.state import adapters
from distribax.execution.state.role_arguments import Exchange
from distribax.execution.traces.iterators import Pulled


class GuardedPrograms:
    """The programs for calls that differ only in what objects of other libraries were set to.

    A model in training and the same model in evaluation are two of them.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Program | HostMode, Sequence[adapters.Guard]]] = []
        self._current: Program | HostMode | None = None
        # When it was last known which of them is the current one.
        self._num_changes = -1

    def find(self) -> Program | HostMode | None:
        """Returns the program for the current state of things, or None if there is none yet."""
        num_changes = adapters.count_changes()
        if num_changes != self._num_changes:
            fitting = (known for known, guards in self._known if all(g.holds() for g in guards))
            self._current, self._num_changes = next(fitting, None), num_changes
        return self._current

    def add(
        self, program: Program | HostMode, guards: Sequence[adapters.Guard], num_changes: int
    ) -> None:
        """Adds a program, given how many changes there had been when it was traced."""
        self._known.append((program, guards))
        self._current, self._num_changes = program, num_changes

    def exchange(self, exchange: Exchange) -> GuardedPrograms:
        """Returns the same programs with other variables."""
        made = GuardedPrograms()
        for known, guards in self._known:
            if isinstance(known, Program) and known.is_exchangeable:
                made._known.append((known.exchange(exchange), guards))
        return made

    def remove(self, program: Program) -> None:
        """Forgets a program that does not fit any more."""
        self._known = [(known, guards) for known, guards in self._known if known is not program]
        self._current, self._num_changes = None, -1


class KnownCalls:
    """The calls of one signature, as far as a function has learnt about them.

    Attributes:
        origins: Where the elements come from that such a call fetches; None if that is not known.
        fetched: Elements that were fetched for a call which has not been made yet.
        programs: The programs, by the signatures of the elements.
    """

    def __init__(self) -> None:
        self.origins: list[Origin] | None = None
        self.fetched: list[Pulled] | None = None
        self.programs: dict[Hashable, GuardedPrograms] = {}

    def fetch(self, call: Call) -> None:
        """Fetches the elements that a call needs.

        Raises:
            StopIteration: There are no more; `call.pulled` has those before.
        """
        if self.fetched is not None:
            call.pulled, self.fetched = self.fetched, None
        elif self.origins:
            call.fetch_all(self.origins)
