"""Elements kept from the first complete pass."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.plan.stores import CacheStore, CacheWriter
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import IteratorState, Progress


class CacheIterator(PipelineIterator):
    """Reads from the store if it is complete, else from the input while filling it.

    A position is the number of elements given out, and the pass that filled the cache: shuffles
    below it had the order of that pass. To resume in a process where the cache is not filled, or
    was filled by another pass, the input is read again from the start of that pass.
    """

    _input: PipelineIterator | None = None
    _writer: CacheWriter | None = None
    _kept: Generator[Element, None, None] | None = None

    def __init__(
        self,
        store: CacheStore,
        open_input: Callable[[dict[str, Any]], PipelineIterator],
        own_pass: dict[str, Any],
        progress: Progress,
    ) -> None:
        super().__init__()
        self._store = store
        self._open = open_input
        self._own_pass = own_pass
        self._progress = progress
        # The pass that the elements come from, once that is settled.
        self._origin: dict[str, Any] | None = None
        self._given = 0
        self._ended = False

    @override
    def __next__(self) -> Element:
        if self._ended:
            raise StopIteration
        if self._input is None and self._kept is None:
            self._start()
        if self._kept is not None:
            element = next(self._kept)
            self._progress.num_given += 1
        else:
            element = self._read()
        self._given += 1
        return element

    def _start(self) -> None:
        kept = self._store.origin
        if self._store.is_complete and (self._origin is None or kept in (None, self._origin)):
            self._origin = kept
            self._kept = self._store.read(self._given)
            return
        self._origin = self._origin or self._own_pass
        self._input = self._open(self._origin)
        self._writer = self._store.write(self._origin)
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
        return self._writer.add(element)

    @override
    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        if self._input is not None:
            self._input.close()
        if self._kept is not None:
            self._kept.close()
        self._writer = self._input = self._kept = None

    @override
    def get_state(self) -> IteratorState:
        origin = self._origin
        if origin is None and not self._given:
            origin = self._store.origin if self._store.is_complete else self._own_pass
        return IteratorState(given=self._given, origin=origin)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._given = state["given"]
        self._origin = state.get("origin")
        self._ended = False
