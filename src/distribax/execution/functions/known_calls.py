"""What a function knows of calls of one signature: the elements they fetch, and their programs."""

from __future__ import annotations

from collections.abc import Hashable

from distribax.execution.calls.call import Call, Origin
from distribax.execution.programs.guarded_programs import GuardedPrograms
from distribax.execution.traces.iterators import Pulled


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
