"""Arrays of JAX's that are made once, and whose memory has the values of each step in turn.

To make an array of JAX's takes a few microseconds, and so does each array of NumPy's that a
compiled program is given. A worker reads the same parameters in each step: so it keeps an array for
each place that a value can be in. What is lent is read where the server has written it. Smaller
values are copied to memory of the client's own.

JAX takes arrays for constant. So these are for programs only, and only for such as have ended
before the values are read again; nobody else may see them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distribax import jax_private
from distribax.parameter_server.protocol.buffers import aligned_empty
from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import ParameterSpec, plain_dtype


def can_stand(specs: Sequence[ParameterSpec]) -> bool:
    """Tells whether JAX can use memory of these forms as it is, whatever its settings are."""
    return jax.default_backend() == "cpu" and all(
        plain_dtype(spec.dtype).itemsize <= 4 and math.prod(spec.shape) for spec in specs
    )


def in_place(array: Array, device: jax.Device | None = None) -> jax.Array | None:
    """Returns an array of JAX's that is the same memory, whatever is in it by then.

    None if JAX makes a copy: of types that it is not set to use, and of memory that is not aligned.
    """
    made = jax_private.outside_trace(lambda: jax.device_put(array, device, may_alias=True))
    is_same = made.unsafe_buffer_pointer() == array.ctypes.data
    return made if is_same and made.dtype == array.dtype else None


class Copy:
    """Memory of the client's own for one value, and the array of JAX's that it is."""

    def __init__(self, spec: ParameterSpec) -> None:
        self._data = aligned_empty(spec.shape, plain_dtype(spec.dtype))
        self.array = in_place(self._data)
        self.version = 0
        """Of the value that was copied last."""

    def take(self, data: Array, version: int) -> None:
        """Copies a value."""
        np.copyto(self._data, data)
        self.version = version


class Standing:
    """The copies of a program's parameters; one call of it at a time uses them."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}

    def copy_of(self, spec: ParameterSpec) -> Copy:
        """Returns the copy of a parameter."""
        copy = self._copies.get(spec.uid)
        if copy is None:
            copy = self._copies[spec.uid] = Copy(spec)
        return copy


class Held:
    """The values of one call: they stay as they are while this object is alive.

    Args:
        arrays: The values.
        leases: What the servers leave alone for the sake of it.
        standing: The copies that are in use.
        idle: Where these go afterwards.
    """

    __slots__ = ("_idle", "_leases", "_standing", "arrays")

    def __init__(
        self, arrays: list[Any], leases: list[Any], standing: Standing, idle: list[Standing]
    ) -> None:
        self.arrays = arrays
        self._leases = leases
        self._standing = standing
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self._standing)
