"""Elements written to a directory by the first complete pass, and read from it by later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from distribax.data.element_spec import Spec
from distribax.data.elements import Element
from distribax.data.formats.saved import SavedWriter, has_catalogue
from distribax.data.plan.transforms import Snapshot
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import IteratorState


class SnapshotIterator(PipelineIterator):
    """Reads what was saved, or else the input while saving it.

    A position is one of the pass that reads, or of the pass that writes: that one reads its input
    again from the start, and writes it again unless somebody else has finished.
    """

    _source: PipelineIterator | None = None
    _writer: SavedWriter | None = None

    def __init__(
        self,
        node: Snapshot,
        open_input: Callable[[], PipelineIterator],
        open_saved: Callable[[], PipelineIterator],
        describe: Callable[[], tuple[Spec, bool | None]],
    ) -> None:
        super().__init__()
        self._node = node
        self._open_input = open_input
        self._open_saved = open_saved
        self._describe = describe
        self._reads: bool | None = None
        self._given = 0
        self._ended = False

    @override
    def __next__(self) -> Element:
        if self._ended:
            raise StopIteration
        source = self._start()
        try:
            element = next(source)
        except StopIteration:
            self._ended = True
            if self._writer is not None:
                self._writer.finish(*self._describe())
            raise
        if self._writer is not None:
            self._writer.add(element)
        self._given += 1
        return element

    def _start(self) -> PipelineIterator:
        if self._source is not None:
            return self._source
        is_complete = has_catalogue(self._node.path)
        self._reads = is_complete if self._reads is None else self._reads
        if self._reads:
            self._source = self._open_saved()
            return self._source
        self._source = self._open_input()
        if not is_complete:
            node = self._node
            self._writer = SavedWriter(node.path, node.compression, node.shard_func)
        for _ in range(self._given):
            element = next(self._source)
            if self._writer is not None:
                self._writer.add(element)
        return self._source

    @override
    def _stop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()

    @override
    def get_state(self) -> IteratorState:
        saved = self._start().get_state() if self._reads else None
        return IteratorState(reads=self._reads, given=self._given, saved=saved)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._reads, self._given, self._ended = state["reads"], state["given"], False
        if self._reads:
            self._start().set_state(state["saved"])
