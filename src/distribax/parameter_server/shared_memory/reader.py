"""A client's view of a server's memory on the same machine: it reads without asking."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from distribax.parameter_server.protocol.buffers import aligned_copy, aligned_empty
from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import ParameterSpec
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory.arena import (
    CONTROL_SEGMENT,
    LENT_WORD,
    OFFSET_WORD,
    SEGMENT_WORD,
    STALE_WORD,
    VERSION_WORD,
    block_at,
    map_file,
)
from distribax.parameter_server.shared_memory.leases import Lease, LeaseBook

_PAUSE_SECONDS: Final = 0.0001
_PATIENCE_SECONDS: Final = 0.02
"""How long a reader waits for the server to finish writing before it asks it instead."""
_ATTEMPTS: Final = 4

_T = TypeVar("_T")


class _Memory:
    """The memory of one block, as this process sees it."""

    def __init__(self, data: Array) -> None:
        self.data = data
        self.interface = data.__array_interface__
        # NumPy's description of memory has no name for bfloat16 and the like.
        self.is_plain = np.dtype(self.interface["typestr"]) == data.dtype


class _Place:
    """Where a parameter is: the header of its first block, and the blocks that it has been in."""

    def __init__(self, words: Array, shape: tuple[int, ...], dtype: str) -> None:
        self.words = words
        self._form = shape, dtype
        self._blocks: dict[tuple[int, int], _Memory] = {}

    def memory(self, at: tuple[int, int], segments: Mapping[int, Array]) -> _Memory | None:
        """Returns the memory of a block; None if it is in a segment that is not known here."""
        memory = self._blocks.get(at)
        if memory is None:
            segment, offset = at
            if segment in segments:
                _, data = block_at(segments[segment], offset, *self._form)
                memory = self._blocks[at] = _Memory(data)
        return memory


class _Window:
    """Memory that NumPy takes as an array, and that stays as it is while the array is alive."""

    __slots__ = ("__array_interface__", "_lease", "_memory")

    def __init__(self, memory: _Memory, lease: Lease) -> None:
        self.__array_interface__ = memory.interface
        self._memory = memory
        self._lease = lease


def _window(memory: _Memory, lease: Lease) -> Array:
    array = np.asarray(_Window(memory, lease))
    return array if memory.is_plain else array.view(memory.data.dtype)


class SharedReader:
    """Reads values from mapped memory; it answers None whenever the server has to be asked."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._segments: dict[int, Array] = {}
        self._places: dict[str, _Place] = {}
        self._sequence: memoryview[int] | None = None

    def unknown(self, specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
        """Returns those whose place is not known."""
        return [spec for spec in specs if spec.uid not in self._places]

    def learn(self, specs: Sequence[ParameterSpec], answer: Message) -> bool:
        """Takes a server's answer to where the first of these are; False if it does not say."""
        places = answer.header["places"]
        if places is None:
            return False
        try:
            pairs = zip(answer.header["segments"], answer.descriptors, strict=True)
            for (number, size), descriptor in pairs:
                self._segments[number] = map_file(descriptor, size, writable=False)
        finally:
            for descriptor in answer.descriptors:
                os.close(descriptor)
        if self._sequence is None:
            self._sequence = self._segments[CONTROL_SEGMENT].view(np.uint64).data
        for spec, (segment, offset, shape, dtype) in zip(specs, places, strict=False):
            words, _ = block_at(self._segments[segment], offset, shape, dtype)
            self._places[spec.uid] = _Place(words, shape, dtype)
        return True

    def pull(
        self, specs: Sequence[ParameterSpec], have: Sequence[int]
    ) -> list[tuple[int, Array | None]] | None:
        """Returns for each its version, and the value if its version is not in `have`.

        A value is a copy, or the server's memory itself, which then stays as it is.
        """
        places = self._places_of(specs)
        if places is None:
            return None

        def look(number: int) -> list[tuple[int, Array | None]] | None:
            result: list[tuple[int, Array | None]] = []
            lease: Lease | None = None
            for spec, place, old in zip(specs, places, have, strict=True):
                words = self._words(spec, place)
                if words is None:
                    return None
                version = words[VERSION_WORD]
                if version == old:
                    result.append((version, None))
                    continue
                memory = self._memory(spec, place, words)
                if memory is None:
                    return None
                is_lent = words[LENT_WORD]
                if is_lent and lease is None:
                    lease = self._book.take(number)
                if is_lent and lease is not None:
                    value = _window(memory, lease)
                else:
                    value = aligned_copy(memory.data)
                result.append((version, value))
            return result

        return self._consistent(look)

    def rows(self, spec: ParameterSpec, indices: Array) -> Array | None:
        """Returns a copy of some rows."""
        place = self._places.get(spec.uid)
        if place is None:
            return None
        rows = aligned_empty((*indices.shape, *spec.shape[1:]), spec.dtype)

        def copy(number: int) -> Array | None:
            words = self._words(spec, place)
            memory = None if words is None else self._memory(spec, place, words)
            if memory is None:
                return None
            return np.take(memory.data, indices, 0, out=rows, mode="clip")

        return self._consistent(copy)

    def _places_of(self, specs: Sequence[ParameterSpec]) -> list[_Place] | None:
        places = [place for spec in specs if (place := self._places.get(spec.uid)) is not None]
        return places if len(places) == len(specs) else None

    def _words(self, spec: ParameterSpec, place: _Place) -> list[int] | None:
        """Returns the header of a value; None if the server has to be asked for it."""
        words: list[int] = place.words.tolist()
        if not words[VERSION_WORD]:  # It was deleted, and is perhaps elsewhere by now.
            self._places.pop(spec.uid, None)
            return None
        return None if words[STALE_WORD] else words

    def _memory(self, spec: ParameterSpec, place: _Place, words: list[int]) -> _Memory | None:
        """Returns the memory of a value; None if the server has to be asked for its segment."""
        memory = place.memory((words[SEGMENT_WORD], words[OFFSET_WORD]), self._segments)
        if memory is None:
            self._places.pop(spec.uid, None)
        return memory

    def _consistent(self, look: Callable[[int], _T | None]) -> _T | None:
        """Returns what `look` has found while the server did not write; None if it keeps on."""
        assert self._sequence is not None
        patience: Any = None
        for _ in range(_ATTEMPTS):
            before = self._sequence[0]
            while before % 2:
                now = time.monotonic()
                patience = patience or now + _PATIENCE_SECONDS
                if now > patience:
                    return None
                time.sleep(_PAUSE_SECONDS)
                before = self._sequence[0]
            result = look(before)
            if result is None or self._sequence[0] == before:
                return result
        return None
