"""Steps whose position is a place in the input, and how much came of it since."""

from __future__ import annotations

import abc
from typing import Any

from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.execution.context import State
from distribax.data.execution.iterators.pipeline_iterator import PipelineIterator, Stage


class ReplayStage(Stage):
    """Holds elements or a state between calls, which a saved position does not contain.

    The position is that of the input when nothing was held, and how many elements were given out
    since; to resume, they are made again.
    """

    def __init__(self, parent: PipelineIterator) -> None:
        super().__init__(parent)
        self._origin: dict[str, Any] | None = None
        self._given = 0
        self._restart()

    @abc.abstractmethod
    def _restart(self) -> None:
        """Forgets what is held."""

    @abc.abstractmethod
    def _make(self) -> Element:
        """Returns the next element."""

    def _is_empty(self) -> bool:
        """Tells whether nothing is held, so that the input's place is the whole position."""
        return False

    @override
    def __next__(self) -> Element:
        if self._origin is None or self._is_empty():
            self._origin = self._input.get_state()
            self._given = 0
        element = self._make()
        self._given += 1
        return element

    @override
    def get_state(self) -> State:
        if self._origin is None:
            return State(origin=self._input.get_state(), given=0)
        return State(origin=self._origin, given=self._given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._restart()
        self._origin = None
        self._input.set_state(state["origin"])
        for _ in range(state["given"]):
            next(self)
