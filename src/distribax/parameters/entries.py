"""The parameters that a server keeps, and the changes that are made to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distribax.parameters.arena import STALE_WORD, VERSION_WORD, Arena, Block
from distribax.parameters.operations import Array
from distribax.parameters.sparse import RowSet


@dataclass(frozen=True)
class Form:
    """What a parameter looks like."""

    name: str
    shape: tuple[int, ...]
    dtype: str


Change = Any
"""An array (a whole new value), or a RowSet (new contents of some rows)."""


class Entry:
    """A parameter: its value in memory that readers share, or newer in an array of JAX's.

    What only the optimizer reads (its slots) stays with JAX between updates, and comes to `host`
    when somebody asks for it. Whoever calls holds the store's lock.
    """

    def __init__(self, form: Form, arena: Arena, value: Any, version: int) -> None:
        self.form = form
        self.block: Block = arena.allocate(form.shape, form.dtype)
        self.host = self.block.data
        self._arena = arena
        self._device: Any = None
        self._stale = False
        np.copyto(self.host, np.asarray(value), casting="same_kind")
        self._mark(version)

    def read(self) -> Any:
        """Returns the value as it is kept, a NumPy or a JAX array."""
        return self.host if self._device is None else self._device

    def read_host(self) -> Array:
        """Returns the value as a NumPy array: the entry's own memory."""
        if self._stale:
            with self._arena:
                np.copyto(self.host, np.asarray(self._device))
                self._stale = False
                self._mark(self.version)
        return self.host

    def write(self, change: Change, version: int) -> None:
        """Sets the value, or some rows of it."""
        with self._arena:
            if isinstance(change, RowSet):
                self.read_host()[change.indices] = change.rows
            else:
                np.copyto(self.host, np.asarray(change), casting="same_kind")
            self._device, self._stale = None, False
            self._mark(version)

    def keep(self, value: Any, version: int) -> None:
        """Sets the value to an array of JAX's, which nobody changes, without copying it."""
        with self._arena:
            self._device, self._stale = value, True
            self._mark(version)

    def free(self) -> None:
        """Gives the memory back."""
        with self._arena:
            self._arena.free(self.block)

    def _mark(self, version: int) -> None:
        self.version = version
        self.block.words[VERSION_WORD] = version
        self.block.words[STALE_WORD] = self._stale
