"""The parameters that a server keeps, and the changes that are made to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.server.sparse import RowSet
from distribax.parameter_server.shared_memory.arena import (
    STALE_WORD,
    VERSION_WORD,
    Arena,
)


@dataclass(frozen=True)
class ParameterForm:
    """What a parameter looks like."""

    name: str
    shape: tuple[int, ...]
    dtype: str


Change: TypeAlias = "Array | jax.Array | RowSet"
"""An array (a whole new value), or a RowSet (new contents of some rows)."""


class StoredParameter:
    """A parameter: its value in memory that readers share, and perhaps in a JAX array.

    What only the optimizer reads (its slots) stays with JAX between updates, and comes to `host`
    when somebody asks for it. What the optimizer updates is in both: it overwrites its own copy,
    which is then copied to where readers look; should it fail, theirs is still there. Whoever calls
    holds the store's lock.
    """

    def __init__(self, form: ParameterForm, arena: Arena, value: ArrayLike, version: int) -> None:
        self.form = form
        self.block = arena.allocate(form.shape, form.dtype)
        self.host: Array = self.block.data
        """The memory of the value, or of an older one while a newer is in a JAX array."""
        self._arena = arena
        self._device: jax.Array | None = None
        self._stale = False
        np.copyto(self.host, np.asarray(value), casting="same_kind")
        self._mark(version)

    def read(self) -> Array | jax.Array:
        """Returns the value as it is kept, a NumPy or a JAX array."""
        return self.host if self._device is None else self._device

    def consume(self) -> Array | jax.Array:
        """Returns the value for a program that may overwrite it, if it is a JAX array."""
        if self._stale:  # Readers' copy is the one that must not be lost.
            self.read_host()
        value, self._device = self.read(), None
        return value

    def read_host(self) -> Array:
        """Returns the value as a NumPy array: the parameter's own memory."""
        if self._stale:
            assert self._device is not None
            with self._arena:
                self.write(self._device, self.version)
        return self.host

    def write(self, change: Change, version: int) -> None:
        """Sets the value, or some rows of it; inside of the arena's `with`, as `keep`."""
        if isinstance(change, RowSet):
            self.read_host()[change.indices] = change.rows
        else:
            np.copyto(self.host, np.asarray(change), casting="same_kind")
        self._device = change if isinstance(change, jax.Array) else None
        self._stale = False
        self._mark(version)

    def keep(self, value: jax.Array, version: int) -> None:
        """Sets the value to a JAX array, which nobody changes, without copying it."""
        self._device, self._stale = value, True
        self._mark(version)

    def _mark(self, version: int) -> None:
        self.version = version
        self.block.words[VERSION_WORD] = version
        self.block.words[STALE_WORD] = self._stale
