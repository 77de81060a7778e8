"""Leases: how a client reads values where they are, and what a server may overwrite meanwhile.

A client that wants to read without a copy notes the arena's sequence number in a slot of a memory
file of its own, which the server can read. The server does not write to memory that was current at
a noted number. It needs no message from the client, neither at the beginning nor at the end, and
does not wait for it: what is read is left alone, and the next value goes elsewhere.

Who comes first? The client notes the number, and then looks whether it is still the arena's. The
server changes the arena's number, and then looks at the notes. So at least one of them sees the
other, provided that neither look overtakes the store before it: x86 keeps that order across an
instruction with a lock prefix, and acquiring a Python lock is one.

The client holds a file lock on its memory file, which ends with the last array that is read in
place, or with the process, however that ends. A server that finds the lock gone forgets the notes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from typing import Final

import numpy as np

from distribax.parameter_server.shared_memory.arena import create_file, map_file

NUM_SLOTS: Final = 8
"""How many leases a client can have of one server; without one, it copies. Each may cost the server
one more block for each parameter."""

_SIZE: Final = mmap.PAGESIZE


class Lease:
    """The memory that was current at one moment stays as it is while this object is alive."""

    __slots__ = ("_book", "_slot")

    def __init__(self, book: LeaseBook, slot: int) -> None:
        self._book = book
        self._slot = slot

    def __del__(self) -> None:
        self._book.end(self._slot)


class LeaseBook:
    """A client's notes for one server."""

    def __init__(self) -> None:
        import fcntl

        self.descriptor = create_file("distribax-leases", _SIZE)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._words = map_file(self.descriptor, _SIZE, writable=True).view(np.uint64)
        self._free = list(range(NUM_SLOTS))
        self._barrier = threading.Lock()
        # Held here, as leases may end when the interpreter has taken its modules apart.
        self._getpid = os.getpid
        self._process = os.getpid()

    def take(self, number: int) -> Lease | None:
        """Notes a number; it counts if the arena still has it afterwards. None without a slot."""
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        self._words[slot] = number
        with self._barrier:
            return Lease(self, slot)

    def end(self, slot: int) -> None:
        """Takes back what was noted in a slot."""
        # A child that was forked has the same memory, but not these arrays' owner.
        if self._getpid() == self._process:
            self._words[slot] = 0
            self._free.append(slot)


class Tenants:
    """A server's view of its clients' notes; the caller sees to one thread at a time."""

    def __init__(self) -> None:
        self._words: dict[int, memoryview[int]] = {}

    def add(self, descriptor: int) -> None:
        """Takes a client's memory file, which stays the caller's to close."""
        # Opened anew: what was opened by the client, and is mapped here, would keep its lock.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            words = map_file(own, _SIZE, writable=False).view(np.uint64)
            self._words[own] = words[:NUM_SLOTS].data
        except BaseException:
            os.close(own)
            raise

    def numbers(self) -> list[int]:
        """Returns the numbers that are noted now."""
        return [number for words in self._words.values() for number in words.tolist() if number]

    def sweep(self) -> None:
        """Forgets the clients that are gone."""
        import fcntl

        for descriptor in list(self._words):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._forget(descriptor)

    def close(self) -> None:
        """Forgets all clients."""
        for descriptor in list(self._words):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        del self._words[descriptor]
        os.close(descriptor)
