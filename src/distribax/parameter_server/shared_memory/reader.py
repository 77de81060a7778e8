"""Reads a server's values from shared memory, without a request to the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import ParameterSpec
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory.arena import (
    CONTROL_SEGMENT,
    STALE_WORD,
    VERSION_WORD,
    map_file,
    view_block,
    view_words,
)
from distribax.topology.host_memory import aligned_copy, aligned_empty

_PAUSE_SECONDS: Final = 0.0001
_PATIENCE_SECONDS: Final = 0.02
"""How long a reader waits for the server to finish writing before it sends a request."""
_ATTEMPTS: Final = 4

_T = TypeVar("_T")


class _Place(NamedTuple):
    """The block of a parameter, as this process sees it."""

    words: memoryview[int]
    data: Array


class SharedReader:
    """Reads values from mapped memory; returns None whenever the server has to be asked."""

    def __init__(self) -> None:
        self._segments: dict[int, Array] = {}
        self._places: dict[str, _Place] = {}
        self._sequence: memoryview[int] | None = None

    def find_unknown(self, specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
        """Returns the parameters whose place is not known."""
        return [spec for spec in specs if spec.uid not in self._places]

    def learn(self, specs: Sequence[ParameterSpec], answer: Message) -> None:
        """Learns from a server's answer where the first of these lie."""
        try:
            files = zip(answer.header["segments"], answer.descriptors, strict=True)
            for (number, size), descriptor in files:
                self._segments[number] = map_file(descriptor, size, writable=False)
        finally:
            for descriptor in answer.descriptors:
                os.close(descriptor)
        if self._sequence is None:
            self._sequence = view_words(self._segments[CONTROL_SEGMENT])
        pairs = zip(specs, answer.header["places"], strict=False)
        for spec, (segment, offset, shape, dtype) in pairs:
            block = view_block(self._segments[segment], offset, shape, dtype)
            self._places[spec.uid] = _Place(*block)

    def pull(
        self, specs: Sequence[ParameterSpec], have: Sequence[int]
    ) -> list[tuple[int, Array | None]] | None:
        """Returns for each its version, and a copy of the value if its version is not in `have`."""

        def copy() -> list[tuple[int, Array | None]] | None:
            copies: list[tuple[int, Array | None]] = []
            for spec, old in zip(specs, have, strict=True):
                place = self._find_place(spec)
                if place is None:
                    return None
                version = place.words[VERSION_WORD]
                copies.append((version, None if version == old else aligned_copy(place.data)))
            return copies

        return self._copy_consistently(copy)

    def pull_rows(self, spec: ParameterSpec, indices: Array) -> Array | None:
        """Returns a copy of some rows."""
        rows = aligned_empty((*indices.shape, *spec.shape[1:]), spec.dtype)

        def copy() -> Array | None:
            place = self._find_place(spec)
            return place and np.take(place.data, indices, 0, out=rows, mode="clip")

        return self._copy_consistently(copy)

    def _find_place(self, spec: ParameterSpec) -> _Place | None:
        """Returns the place of a value; None if the server has to be asked for it."""
        place = self._places[spec.uid]
        return None if place.words[STALE_WORD] else place

    def _copy_consistently(self, copy: Callable[[], _T | None]) -> _T | None:
        """Returns what `copy` returns while the server does not write; None if it keeps writing."""
        assert self._sequence is not None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for _ in range(_ATTEMPTS):
            while (before := self._sequence[0]) % 2:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_PAUSE_SECONDS)
            result = copy()
            if result is None or self._sequence[0] == before:
                return result
        return None
