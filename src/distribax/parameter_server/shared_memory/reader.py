"""Reads a server's values from shared memory, without a request to the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import ParameterSpec
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory.arena import (
    CONTROL_SEGMENT,
    STALE_WORD,
    VERSION_WORD,
    Block,
    map_file,
    view_block,
    view_words,
)
from distribax.topology.host_memory import copy_aligned, make_aligned

_PAUSE_SECONDS: Final = 0.0001
_PATIENCE_SECONDS: Final = 0.02
"""How long a reader waits for the server to finish writing before it sends a request."""
_ATTEMPTS: Final = 4

_T = TypeVar("_T")


class SharedReader:
    """Reads values from mapped memory; returns None whenever the server has to be asked."""

    def __init__(self) -> None:
        self._segments: dict[int, Array] = {}
        self._blocks: dict[str, Block] = {}
        self._sequence: memoryview[int] | None = None

    def find_unknown(self, specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
        """Returns the parameters whose place is not known."""
        return [spec for spec in specs if spec.uid not in self._blocks]

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
        for spec, (segment, *place) in zip(specs, answer.header["places"], strict=False):
            self._blocks[spec.uid] = view_block(self._segments[segment], segment, *place)

    def pull(
        self, specs: Sequence[ParameterSpec], have: Sequence[int]
    ) -> list[tuple[int, Array | None]] | None:
        """Returns for each its version, and a copy of the value if its version is not in `have`."""

        def copy() -> list[tuple[int, Array | None]] | None:
            copies: list[tuple[int, Array | None]] = []
            for spec, old in zip(specs, have, strict=True):
                block = self._find_block(spec)
                if block is None:
                    return None
                version = block.words[VERSION_WORD]
                copies.append((version, None if version == old else copy_aligned(block.data)))
            return copies

        return self._copy_consistently(copy)

    def pull_rows(self, spec: ParameterSpec, indices: Array) -> Array | None:
        """Returns a copy of some rows."""
        rows = make_aligned((*indices.shape, *spec.shape[1:]), spec.dtype)

        def copy() -> Array | None:
            block = self._find_block(spec)
            if block is None:
                return None
            return np.take(block.data, indices, 0, out=rows, mode="clip")

        return self._copy_consistently(copy)

    def _find_block(self, spec: ParameterSpec) -> Block | None:
        """Returns the block of a value; None if the server has to be asked for it."""
        block = self._blocks[spec.uid]
        return None if block.words[STALE_WORD] else block

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
