"""A client's view of a server's memory on the same machine: it reads without asking."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from distribax.parameters.arena import (
    CONTROL_SEGMENT,
    LENT_WORD,
    OFFSET_WORD,
    SEGMENT_WORD,
    STALE_WORD,
    VERSION_WORD,
    block_at,
    map_file,
)
from distribax.parameters.leases import Lease, LeaseBook
from distribax.parameters.memory import aligned_empty
from distribax.parameters.operations import Array
from distribax.parameters.spec import ParameterSpec
from distribax.parameters.wire import Message

_PAUSE_SECONDS: Final = 0.0001
_PATIENCE_SECONDS: Final = 0.02
"""How long a reader waits for the server to finish writing before it asks it instead."""
_ATTEMPTS: Final = 4

_T = TypeVar("_T")


class _Place:
    """Where a parameter is: the header of its first block, and the blocks that it has been in."""

    def __init__(self, words: Array, shape: tuple[int, ...], dtype: str) -> None:
        self.words = words
        self._form = shape, dtype
        self._blocks: dict[tuple[int, int], Array] = {}

    def data(self, segments: Mapping[int, Array]) -> Array | None:
        """Returns the memory of the value; None if it is in a segment that is not known here."""
        segment, offset = at = (int(self.words[SEGMENT_WORD]), int(self.words[OFFSET_WORD]))
        data = self._blocks.get(at)
        if data is None and segment in segments:
            _, data = block_at(segments[segment], offset, *self._form)
            self._blocks[at] = data
        return data


class _Window:
    """Memory that NumPy takes as an array, and that stays as it is while the array is alive."""

    def __init__(self, data: Array, lease: Lease) -> None:
        self.__array_interface__ = data.__array_interface__
        self._data = data
        self._lease = lease


class SharedReader:
    """Reads values from mapped memory; it answers None whenever the server has to be asked."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._segments: dict[int, Array] = {}
        self._places: dict[str, _Place] = {}
        self._sequence: Array | None = None

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
            self._sequence = self._segments[CONTROL_SEGMENT].view(np.uint64)
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
        places = [self._place(spec) for spec in specs]

        def look(number: int) -> list[tuple[int, Array | None]] | None:
            result: list[tuple[int, Array | None]] = []
            lease: Lease | None = None
            for spec, place, old in zip(specs, places, have, strict=True):
                version = 0 if place is None else int(place.words[VERSION_WORD])
                if place is None or not version or place.words[STALE_WORD]:
                    return None
                if version == old:
                    result.append((version, None))
                    continue
                data = self._data(spec, place)
                if data is None:
                    return None
                if place.words[LENT_WORD]:
                    lease = lease or self._book.take(number)
                if lease is not None and place.words[LENT_WORD]:
                    value = np.asarray(_Window(data, lease)).view(data.dtype)
                else:
                    value = aligned_empty(data.shape, data.dtype)
                    np.copyto(value, data)
                result.append((version, value))
            return result

        return self._consistent(look)

    def rows(self, spec: ParameterSpec, indices: Array) -> Array | None:
        """Returns a copy of some rows."""
        place = self._place(spec)
        if place is None:
            return None
        rows = aligned_empty((*indices.shape, *spec.shape[1:]), spec.dtype)

        def copy(number: int) -> Array | None:
            if not place.words[VERSION_WORD] or place.words[STALE_WORD]:
                return None
            data = self._data(spec, place)
            return None if data is None else np.take(data, indices, 0, out=rows, mode="clip")

        return self._consistent(copy)

    def _place(self, spec: ParameterSpec) -> _Place | None:
        """Returns where a parameter is; None if it was deleted, and is perhaps elsewhere by now."""
        place = self._places.get(spec.uid)
        if place is not None and not place.words[VERSION_WORD]:
            del self._places[spec.uid]
            return None
        return place

    def _data(self, spec: ParameterSpec, place: _Place) -> Array | None:
        """Returns the memory of a value; None if the server has to be asked for its segment."""
        data = place.data(self._segments)
        if data is None:
            self._places.pop(spec.uid, None)
        return data

    def _consistent(self, look: Callable[[int], _T | None]) -> _T | None:
        """Returns what `look` has found while the server did not write; None if it keeps on."""
        assert self._sequence is not None
        patience: Any = None
        for _ in range(_ATTEMPTS):
            before = int(self._sequence[0])
            while before % 2:
                now = time.monotonic()
                patience = patience or now + _PATIENCE_SECONDS
                if now > patience:
                    return None
                time.sleep(_PAUSE_SECONDS)
                before = int(self._sequence[0])
            result = look(before)
            if result is None or int(self._sequence[0]) == before:
                return result
        return None
