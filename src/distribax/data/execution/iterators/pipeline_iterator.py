"""The base of all iterators of a running pipeline."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import grain
from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.execution.context import State


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


class MarkedStage(Stage):
    """An iterator on one parent whose position is its parent's and one attribute of its own."""

    saved: ClassVar[str]
    """The name of the attribute."""

    @override
    def get_state(self) -> State:
        return State({"parent": self._input.get_state(), self.saved: getattr(self, self.saved)})

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._input.set_state(state["parent"])
        setattr(self, self.saved, state[self.saved])
