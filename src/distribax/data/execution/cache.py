"""Elements kept from the first complete pass."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from distribax.data.elements import Element
from distribax.data.execution.context import State
from distribax.data.execution.stage import PipelineIterator
from distribax.data.plan.stores import CacheStore, CacheWriter


class CacheIterator(PipelineIterator):
    """Reads from the store if it is complete, else from the input while filling it.

    A position is the number of elements given out. To resume in a process where the cache is
    not filled, the input is read again from its start.
    """

    def __init__(self, store: CacheStore, open_input: Callable[[], PipelineIterator]) -> None:
        super().__init__()
        self._store = store
        self._open = open_input
        self._input: PipelineIterator | None = None
        self._writer: CacheWriter | None = None
        self._kept: Generator[Element, None, None] | None = None
        self._given = 0
        self._ended = False

    def __next__(self) -> Element:
        if self._ended:
            raise StopIteration
        if self._input is None and self._kept is None:
            self._start()
        if self._kept is not None:
            element = next(self._kept)
        else:
            element = self._read()
        self._given += 1
        return element

    def _start(self) -> None:
        if self._store.is_complete:
            self._kept = self._store.read(self._given)
            return
        self._input = self._open()
        self._writer = self._store.write()
        for _ in range(self._given):
            self._writer.add(next(self._input))

    def _read(self) -> Element:
        assert self._input is not None
        assert self._writer is not None
        try:
            element = next(self._input)
        except StopIteration:
            self._writer.finish()
            self._writer = None
            self._ended = True
            self._stop()
            raise
        self._writer.add(element)
        return element

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        if self._input is not None:
            self._input.close()
        if self._kept is not None:
            self._kept.close()
        self._writer = self._input = self._kept = None

    def get_state(self) -> State:
        return State(given=self._given)

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._given = state["given"]
        self._ended = False

    def close(self) -> None:
        """Drops an unfinished cache and closes the input."""
        if hasattr(self, "_ended"):
            self._stop()
        super().close()
