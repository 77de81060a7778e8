"""Memory for values that clients on the same machine can read without asking.

The values lie in a few memory files (memfd), which a client maps read-only; they have no name, and
are gone when the last process that maps them ends. A sequence lock guards them: the server makes a
number odd before it writes and even after. A reader copies, and what it has copied belongs
together if the number was even before and is the same after. So a reader never holds up the
server, not even one that is stopped or dies while it reads.

This relies on the order in which x86 processors make stores visible. On others, values travel by
socket. Large values may be written past the caches (`topology/host_memory.py`), and such stores are
in no order with others, so that there is a fence after the first change of the number and before
the second.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import sys
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import plain_dtype
from distribax.topology.host_memory import ALIGNMENT, make_aligned, view_array

CONTROL_SEGMENT: Final = 0
"""The segment whose first word is the sequence number."""
VERSION_WORD: Final = 0
"""Of a block's header: the value's version."""
STALE_WORD: Final = 1
"""Of a block's header: not 0 while a newer value is elsewhere, and the server must be asked."""

_CHUNK: Final = 64 << 20
"""Small values share a file of this size; its pages take no memory until they are used."""
_HEADER: Final = ALIGNMENT


def can_share() -> bool:
    """Tells whether processes of this machine can share memory as described above."""
    ordered = platform.machine().lower() in ("x86_64", "amd64")
    return sys.platform == "linux" and ordered and hasattr(os, "memfd_create")


@dataclass
class Segment:
    """A piece of memory: a file that others can map, or memory of this process alone."""

    number: int
    memory: Array
    descriptor: int | None = None
    """Of the file, for reading only, to be given to clients."""
    used: int = 0


@dataclass(frozen=True)
class Block:
    """The place of one value: a header of words, and the value itself."""

    segment: int
    offset: int
    words: memoryview[int]
    data: Array


class Arena:
    """Allocates blocks of memory; they are written to inside a `with arena:` block.

    One thread at a time may use it.

    Attributes:
        segments: The memory that it has, by number.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.segments: list[Segment] = []
        self._open: Segment | None = None
        self._depth = 0
        self._fence = threading.Lock()
        control = self._add_segment(mmap.PAGESIZE).memory
        control[:] = 0
        self._sequence = view_words(control)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Block:
        """Returns memory for a value."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = _HEADER + -(-nbytes // ALIGNMENT) * ALIGNMENT
        segment = self._open
        if size > _CHUNK // 4:
            segment = self._add_segment(size)
        elif segment is None or segment.used + size > len(segment.memory):
            segment = self._open = self._add_segment(_CHUNK)
        offset = segment.used
        segment.used += size
        return view_block(segment.memory, segment.number, offset, shape, dtype)

    def __enter__(self) -> None:
        """Tells readers that what they copy until the end of the block is not valid."""
        if not self._depth:
            self._sequence[0] += 1
            self._order_stores()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._order_stores()
            self._sequence[0] += 1

    def _order_stores(self) -> None:
        """Makes all stores so far visible before those that follow."""
        # To take a lock is an atomic instruction, which is a fence on these processors.
        with self._fence:
            pass

    def close(self) -> None:
        """Closes all files; the memory goes when nobody uses it any more."""
        for segment in self.segments:
            if segment.descriptor is not None:
                os.close(segment.descriptor)
                segment.descriptor = None

    def _add_segment(self, size: int) -> Segment:
        number = len(self.segments)
        if self.shared:
            segment = Segment(number, *_create_shared_memory(f"distribax-{number}", size))
        else:
            segment = Segment(number, make_aligned((size,), np.uint8))
        self.segments.append(segment)
        return segment


def view_words(memory: Array) -> memoryview[int]:
    """Returns memory as words, which is far faster than NumPy for a single one."""
    words: memoryview[int] = memory.view(np.uint64).data
    return words


def view_block(
    memory: Array, segment: int, offset: int, shape: tuple[int, ...], dtype: str
) -> Block:
    """Returns the block that begins at an offset of a segment's memory."""
    start = offset + _HEADER
    words = view_words(memory[offset:start])
    data = view_array(memory, start, tuple(shape), plain_dtype(dtype))
    return Block(segment, offset, words, data)


def create_file(name: str, size: int) -> int:
    """Returns a new memory file that cannot be made smaller, so that mapping it is safe."""
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int, *, writable: bool) -> Array:
    """Maps a memory file of another process; a ValueError if it could shrink or is too small."""
    import fcntl

    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstat(descriptor).st_size < size:
        raise ValueError(f"not a sealed memory file of {size} bytes")
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
    return np.frombuffer(mapped, np.uint8)


def _create_shared_memory(name: str, size: int) -> tuple[Any, int]:
    descriptor = create_file(name, size)
    try:
        memory = map_file(descriptor, size, writable=True)
        # Opened again for reading only: a client cannot write into the server's parameters.
        return memory, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
