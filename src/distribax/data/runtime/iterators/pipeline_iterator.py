"""The bases of all iterators of a running pipeline."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import grain
from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.runtime.pass_context import IteratorState


class PipelineIterator(grain.DatasetIterator[Any]):
    """A Grain iterator: elements, a position that can be saved, and an end.

    Grain's own iterators (its batching and prefetching) take these as parents and the reverse.
    Grain closes an iterator even if its constructor has failed, so what `_stop` reads has a default
    in the class.
    """

    @abc.abstractmethod
    @override
    def __next__(self) -> Element: ...

    @abc.abstractmethod
    @override
    def get_state(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    @override
    def set_state(self, state: dict[str, Any]) -> None: ...

    @override
    def close(self) -> None:
        """Ends the iterator and those it reads from; further calls do nothing."""
        self._stop()
        super().close()

    def _stop(self) -> None:
        """Ends what the iterator has opened by itself: files, threads, further iterators."""


class Stage(PipelineIterator):
    """An iterator on one parent whose position is its parent's."""

    def __init__(self, parent: PipelineIterator) -> None:
        super().__init__(parent)
        self._input = parent
        self._next = parent.__next__

    @override
    def get_state(self) -> dict[str, Any]:
        return self._input.get_state()

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._input.set_state(state)


class StatefulStage(Stage):
    """An iterator on one parent whose position also has one attribute of its own."""

    saved: ClassVar[str]
    """The name of the attribute, in the saved position too."""

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(
            {"parent": self._input.get_state(), self.saved: getattr(self, self.saved)}
        )

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._input.set_state(state["parent"])
        setattr(self, self.saved, state[self.saved])


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
    def get_state(self) -> IteratorState:
        if self._origin is None:
            return IteratorState(origin=self._input.get_state(), given=0)
        return IteratorState(origin=self._origin, given=self._given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._restart()
        self._origin = None
        self._input.set_state(state["origin"])
        for _ in range(state["given"]):
            next(self)
