"""Memory through which one client on the same machine hands the arrays of a push to a server.

The client writes the arrays into its memory file and sends only where they are; the file itself is
sent along with the first push that uses it. The server reads them there before it answers, and the
client does not write again before it has the answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from distribax.parameter_server.protocol.operations import Array, Op, decode
from distribax.parameter_server.protocol.parameter_spec import parse_dtype
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory.arena import create_file, map_file
from distribax.topology.host_memory import ALIGNMENT, view_array

_SMALLEST: Final = 64 << 10
"""Fewer bytes are sent through the socket, which is as fast."""
_KEY: Final = "mailbox"

_Place: TypeAlias = tuple[str, tuple[int, ...], int]
"""The type, shape and offset of an array in the mailbox."""


class Mailbox:
    """The client's side."""

    def __init__(self) -> None:
        self._memory: Array | None = None
        self._descriptor: int | None = None
        self._sent = False

    def wrap(self, message: Message) -> Message:
        """Returns the message with its arrays put into the mailbox, if they are large."""
        arrays, header = message.arrays, message.header
        if sum(array.nbytes for array in arrays) < _SMALLEST:
            return message
        placed, size = _plan_places(arrays)
        memory = self._get_room(size)
        for (_, shape, offset), array in zip(placed, arrays, strict=True):
            np.copyto(view_array(memory, offset, shape, array.dtype), array)
        descriptors = () if self._sent or self._descriptor is None else (self._descriptor,)
        self._sent = True
        box = {"placed": placed, "size": len(memory)}
        return Message({**header, _KEY: box}, (), descriptors, message.number)

    def forget(self) -> None:
        """Has the next push send the memory file again, as there is a new connection."""
        self._sent = False

    def close(self) -> None:
        """Frees the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._memory, self._descriptor, self._sent = None, None, False

    def _get_room(self, size: int) -> Array:
        if self._memory is None or len(self._memory) < size:
            self.close()
            self._descriptor = create_file("distribax-mailbox", size)
            self._memory = map_file(self._descriptor, size, writable=True)
        return self._memory


class MailboxReader:
    """The server's side, one for each connection."""

    def __init__(self) -> None:
        self._memory: Array | None = None

    def read_operations(self, message: Message) -> list[Op]:
        """Returns the operations of a push, its arrays from the mailbox or from the message."""
        box = message.header.get(_KEY)
        if box is None:
            return decode(message.header["operations"], message.arrays)
        if message.descriptors:
            self._memory = map_file(message.descriptors[0], box["size"], writable=False)
        arrays = [self._view_array(*place) for place in box["placed"]]
        return decode(message.header["operations"], arrays)

    def _view_array(self, dtype: str, shape: Sequence[int], offset: int) -> Array:
        if self._memory is None:
            raise ValueError("a push refers to a mailbox that was not sent")
        form = parse_dtype(dtype)
        nbytes = math.prod(shape) * form.itemsize
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > len(self._memory):
            raise ValueError(f"a push refers to bytes outside of its mailbox: {offset}, {nbytes}")
        return view_array(self._memory, offset, tuple(shape), form)


def _plan_places(arrays: Sequence[Array]) -> tuple[list[_Place], int]:
    """Returns the type, shape and offset of each array, one after the other, and the size."""
    placed: list[_Place] = []
    offset = 0
    for array in arrays:
        placed.append((array.dtype.name, array.shape, offset))
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return placed, offset
