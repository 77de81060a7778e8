"""Where a cached pipeline keeps its elements: in memory, or in a file that outlives the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any, TypeAlias

from distribax.data.elements import Element
from distribax.data.formats import element_codec
from distribax.data.formats.tfrecord import TFRecordFormat, TFRecordWriter
from distribax.data.write_protection import make_read_only


class MemoryStore:
    """Keeps elements in a list, shared by all iterators of one data set."""

    def __init__(self) -> None:
        self.elements: list[Element] | None = None
        # The pass that the elements come from.
        self.origin: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the elements of a complete iteration are there."""
        return self.elements is not None

    def read(self, start: int) -> Generator[Element, None, None]:
        """Returns the kept elements from number `start` on."""
        assert self.elements is not None
        for number in range(start, len(self.elements)):
            yield self.elements[number]

    def write(self, origin: dict[str, Any]) -> MemoryWriter:
        """Returns what collects the elements of one iteration."""
        return MemoryWriter(self, origin)


class MemoryWriter:
    """Collects the elements of one iteration in a list."""

    def __init__(self, store: MemoryStore, origin: dict[str, Any]) -> None:
        self._store = store
        self._origin = origin
        self._elements: list[Element] = []

    def add(self, element: Element) -> Element:
        """Adds an element and returns it for use; what is kept must not be changed by that."""
        element = make_read_only(element)
        self._elements.append(element)
        return element

    def finish(self) -> None:
        """Makes what was added the content of the store."""
        # Of two iterators that fill the cache at the same time, the first to finish counts.
        if self._store.elements is None:
            self._store.origin = self._origin
            self._store.elements = self._elements

    def discard(self) -> None:
        """Forgets what was added."""
        self._elements = []


class FileStore:
    """Keeps elements in a file, with checksums."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        # The pass that the elements come from; of a file that another process wrote, not known.
        self.origin: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the elements of a complete iteration are there."""
        return os.path.exists(self.filename)

    def read(self, start: int) -> Generator[Element, None, None]:
        """Returns the kept elements from number `start` on."""
        reader = TFRecordFormat().open(self.filename)
        with contextlib.closing(reader):
            for number, record in enumerate(reader):
                if number >= start:
                    yield self._decode(record, number)

    def _decode(self, record: bytes, number: int) -> Element:
        try:
            return element_codec.decode(record)
        except ValueError as error:
            raise ValueError(
                f"filename={self.filename!r}: record {number} of the cache is not an element: "
                f"{error}. Delete the file; the next iteration writes it again."
            ) from error

    def write(self, origin: dict[str, Any]) -> FileWriter:
        """Returns what writes the elements of one iteration."""
        return FileWriter(self, origin)


class FileWriter:
    """Writes the elements of one iteration to a file of its own."""

    def __init__(self, store: FileStore, origin: dict[str, Any]) -> None:
        self._store = store
        self._origin = origin
        # Each process writes apart and renames at the end, so a reader never sees half a cache.
        self._partial = f"{store.filename}.partial-{os.getpid()}-{id(self)}"
        self._writer = TFRecordWriter(self._partial)

    def add(self, element: Element) -> Element:
        """Adds an element and returns it for use."""
        self._writer.write(element_codec.encode(element))
        return element

    def finish(self) -> None:
        """Makes what was added the content of the store."""
        self._writer.close()
        os.replace(self._partial, self._store.filename)
        self._store.origin = self._origin

    def discard(self) -> None:
        """Forgets what was added."""
        self._writer.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._partial)


CacheStore: TypeAlias = MemoryStore | FileStore
"""Keeps the elements of one complete iteration."""

CacheWriter: TypeAlias = MemoryWriter | FileWriter
"""Collects the elements of one iteration."""
