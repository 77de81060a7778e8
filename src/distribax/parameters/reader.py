"""A client's view of a server's memory on the same machine: it reads without asking."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from distribax.parameters.arena import (
    CONTROL_SEGMENT,
    STALE_WORD,
    VERSION_WORD,
    block_at,
    map_file,
)
from distribax.parameters.memory import aligned_empty
from distribax.parameters.operations import Array
from distribax.parameters.spec import ParameterSpec
from distribax.parameters.wire import Message

_PAUSE_SECONDS: Final = 0.0001
_PATIENCE_SECONDS: Final = 0.02
"""How long a reader waits for the server to finish writing before it asks it instead."""
_ATTEMPTS: Final = 4

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Place:
    words: Array
    data: Array


class SharedReader:
    """Reads values from mapped memory; it answers None whenever the server has to be asked."""

    def __init__(self) -> None:
        self._segments: dict[int, Array] = {}
        self._places: dict[str, _Place] = {}
        self._sequence: Array | None = None

    def unknown(self, specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
        """Returns those whose place is not known."""
        return [spec for spec in specs if spec.uid not in self._places]

    def learn(self, specs: Sequence[ParameterSpec], answer: Message) -> bool:
        """Takes a server's answer to where these parameters are; False if it does not say."""
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
        for spec, (segment, *place) in zip(specs, places, strict=True):
            self._places[spec.uid] = _Place(*block_at(self._segments[segment], *place))
        return True

    def pull(
        self, specs: Sequence[ParameterSpec], have: Sequence[int]
    ) -> list[tuple[int, Array | None]] | None:
        """Returns for each its version, and a copy of the value if its version is not in `have`."""
        places = [self._place(spec) for spec in specs]
        copies: dict[int, Array] = {}

        def copy() -> list[tuple[int, Array | None]] | None:
            result: list[tuple[int, Array | None]] = []
            for number, (place, old) in enumerate(zip(places, have, strict=True)):
                version = 0 if place is None else int(place.words[VERSION_WORD])
                if place is None or not version or place.words[STALE_WORD]:
                    return None
                if version == old:
                    result.append((version, None))
                    continue
                if number not in copies:
                    copies[number] = aligned_empty(place.data.shape, place.data.dtype)
                np.copyto(copies[number], place.data)
                result.append((version, copies[number]))
            return result

        return self._consistent(copy)

    def rows(self, spec: ParameterSpec, indices: Array) -> Array | None:
        """Returns a copy of some rows."""
        place = self._place(spec)
        if place is None:
            return None
        rows = aligned_empty((*indices.shape, *place.data.shape[1:]), place.data.dtype)

        def copy() -> Array | None:
            if not place.words[VERSION_WORD] or place.words[STALE_WORD]:
                return None
            return np.take(place.data, indices, axis=0, out=rows, mode="clip")

        return self._consistent(copy)

    def _place(self, spec: ParameterSpec) -> _Place | None:
        """Returns where a parameter is; None if it was deleted, and is perhaps elsewhere by now."""
        place = self._places.get(spec.uid)
        if place is not None and not place.words[VERSION_WORD]:
            del self._places[spec.uid]
            return None
        return place

    def _consistent(self, copy: Callable[[], _T | None]) -> _T | None:
        """Returns what `copy` has copied while the server did not write; None if it keeps on."""
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
            result = copy()
            if result is None or int(self._sequence[0]) == before:
                return result
        return None
