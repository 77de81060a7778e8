"""The parameters that a server keeps, and the changes that are made to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.server.sparse import RowSet
from distribax.parameter_server.shared_memory.arena import (
    LENT_WORD,
    OFFSET_WORD,
    SEGMENT_WORD,
    STALE_WORD,
    VERSION_WORD,
    Arena,
    Block,
)
from distribax.parameter_server.shared_memory.leases import Tenants

_SMALLEST_LENT: Final = 64 << 10
"""Of fewer bytes, clients make a copy: that is as fast, and nothing has to be left alone."""


@dataclass(frozen=True)
class Form:
    """What a parameter looks like."""

    name: str
    shape: tuple[int, ...]
    dtype: str


Change = Any
"""An array (a whole new value), or a RowSet (new contents of some rows)."""


@dataclass(eq=False)
class Room:
    """A block, and when it was the one with the value: between these two sequence numbers."""

    block: Block
    since: int = 0
    until: int = 0


class Entry:
    """A parameter: its value in memory that readers share, and perhaps in an array of JAX's.

    What only the optimizer reads (its slots) stays with JAX between updates, and comes to `host`
    when somebody asks for it. What the optimizer updates is in both: it overwrites its own copy,
    which is then copied to where readers look; should it fail, theirs is still there. Large values
    that are replaced as a whole are lent to clients, who read them where they are; then the next
    value is written to another block. Whoever calls holds the store's lock.
    """

    def __init__(
        self, form: Form, arena: Arena, tenants: Tenants, value: Any, version: int
    ) -> None:
        self.form = form
        self.home: Block = arena.allocate(form.shape, form.dtype)
        """The first block, whose header tells readers where the value is."""
        self._arena = arena
        self._tenants = tenants
        self._current = Room(self.home)
        self._others: list[Room] = []
        # What NumPy would take far longer to write to.
        self._header: memoryview[int] = self.home.words.data
        self._device: Any = None
        self._stale = False
        self._can_be_lent = arena.shared and self.host.nbytes >= _SMALLEST_LENT
        # Not yet: a table that is only written by rows must never be copied for a reader's sake.
        self._is_lent = False
        np.copyto(self.host, np.asarray(value), casting="same_kind")
        self._mark(version)

    @property
    def host(self) -> Array:
        """The memory of the value, or of an older one while a newer is in an array of JAX's."""
        return self._current.block.data

    @property
    def segments(self) -> set[int]:
        """The segments that the value may be in."""
        return {room.block.segment for room in (self._current, *self._others)}

    def read(self) -> Any:
        """Returns the value as it is kept, a NumPy or a JAX array."""
        return self.host if self._device is None else self._device

    def consume(self) -> Any:
        """Returns the value for a program that may overwrite it, if it is an array of JAX's."""
        if self._stale:  # Readers' copy is the one that must not be lost.
            self.read_host()
        value = self.host if self._device is None else self._device
        self._device = None
        return value

    def read_host(self) -> Array:
        """Returns the value as a NumPy array: the entry's own memory."""
        if self._stale:
            with self._arena:
                self.write(self._device, self.version)
        return self.host

    def prepare(self, change: Change, noted: Sequence[int]) -> Room | None:
        """Puts what is about to be written where nobody reads, so that no reader has to wait.

        `noted` are the numbers of the leases. Returns where it is; None if `write` has to do all of
        it.
        """
        if not self._is_lent or isinstance(change, RowSet):
            return None
        # Once somebody has read it in place, it always goes elsewhere: the next one would have to
        # wait while it is written.
        room = self._spare(noted) or (self._new_room() if self._others else None)
        if room is None:
            return None
        np.copyto(room.block.data, np.asarray(change), casting="same_kind")
        return room

    def write(self, change: Change, version: int, prepared: Room | None = None) -> None:
        """Sets the value, or some rows of it; `prepared` is where `prepare` has put it.

        Inside of the arena's `with`, as `keep`.
        """
        if prepared is not None:
            self._move(prepared)
        elif isinstance(change, RowSet):
            self._write_rows(change)
        else:
            if self._is_pinned():
                self._move(self._new_room())
            np.copyto(self.host, np.asarray(change), casting="same_kind")
            self._is_lent = self._can_be_lent
        self._device = change if isinstance(change, jax.Array) else None
        self._stale = False
        self._mark(version)

    def keep(self, value: Any, version: int) -> None:
        """Sets the value to an array of JAX's, which nobody changes, without copying it."""
        self._device, self._stale = value, True
        self._mark(version)

    def free(self) -> None:
        """Gives the memory back."""
        with self._arena:
            for room in (self._current, *self._others):
                self._arena.free(room.block)

    def _write_rows(self, change: RowSet) -> None:
        value = self.read_host()
        if self._is_pinned():
            self._move(self._new_room())
            np.copyto(self.host, value)
        # To leave the whole alone for the sake of some rows would cost more than readers gain.
        self._can_be_lent = self._is_lent = False
        self.host[change.indices] = change.rows

    def _is_pinned(self) -> bool:
        """Tells whether a client reads the value where it is; for a caller who writes."""
        room = self._current
        return self._is_lent and any(number > room.since for number in self._tenants.numbers())

    def _spare(self, noted: Sequence[int]) -> Room | None:
        """Returns memory that nobody reads, the one used last if there are several."""
        for room in reversed(self._others):
            if not any(room.since < number < room.until for number in noted):
                return room
        return None

    def _new_room(self) -> Room:
        self._tenants.sweep()
        room = self._spare(self._tenants.numbers())
        if room is None:
            room = Room(self._arena.allocate(self.form.shape, self.form.dtype))
            self._others.append(room)
        return room

    def _move(self, room: Room) -> None:
        """Makes a room the current one; inside of the arena's `with`, whose number is odd."""
        self._others.remove(room)
        self._others.append(self._current)
        self._current.until = room.since = self._arena.number
        self._current = room

    def _mark(self, version: int) -> None:
        self.version = version
        words, block = self._header, self._current.block
        words[VERSION_WORD] = version
        words[STALE_WORD] = self._stale
        words[SEGMENT_WORD] = block.segment
        words[OFFSET_WORD] = block.offset
        words[LENT_WORD] = self._is_lent
