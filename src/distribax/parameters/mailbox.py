"""Memory through which one client on the same machine hands the arrays of a push to a server.

The client writes the arrays into its memory file and sends only where they are; the file itself is
sent along with the first push that uses it. The server reads them there before it answers, and the
client does not write again before it has the answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from distribax.parameters.arena import create_file, map_file
from distribax.parameters.memory import ALIGNMENT
from distribax.parameters.operations import Array
from distribax.parameters.spec import dtype_name, plain_dtype
from distribax.parameters.wire import Message

_SMALLEST: Final = 64 << 10
"""Fewer bytes than this go through the socket: that is as fast."""
_KEY: Final = "mailbox"


class Mailbox:
    """The client's side."""

    def __init__(self) -> None:
        self._memory: Array | None = None
        self._descriptor: int | None = None
        self._sent = False

    def wrap(self, message: Message) -> Message:
        """Returns the message with its arrays put into the mailbox, if they are large."""
        sizes = [_rounded(array.nbytes) for array in message.arrays]
        total = sum(sizes)
        if total < _SMALLEST:
            return message
        memory = self._room_for(total)
        placed: list[list[Any]] = []
        offset = 0
        for array, size in zip(message.arrays, sizes, strict=True):
            target = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(target, array)
            placed.append([dtype_name(array.dtype), array.shape, offset])
            offset += size
        header = {**message.header, _KEY: {"placed": placed, "size": len(memory)}}
        descriptors = () if self._sent or self._descriptor is None else (self._descriptor,)
        self._sent = True
        return Message(header, (), descriptors)

    def forget(self) -> None:
        """Sends the file again with the next push: there is a new connection."""
        self._sent = False

    def close(self) -> None:
        """Gives the memory back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._memory, self._descriptor, self._sent = None, None, False

    def _room_for(self, size: int) -> Array:
        if self._memory is None or len(self._memory) < size:
            self.close()
            self._descriptor = create_file("distribax-mailbox", size)
            self._memory = map_file(self._descriptor, size, writable=True)
        return self._memory


class MailboxReader:
    """The server's side, one for each connection."""

    def __init__(self) -> None:
        self._memory: Array | None = None

    def unwrap(self, message: Message) -> Message:
        """Returns the message with its arrays, wherever they are."""
        box = message.header.get(_KEY)
        if box is None:
            return message
        if message.descriptors:
            self._memory = map_file(message.descriptors[0], box["size"], writable=False)
        if self._memory is None:
            raise ValueError("a push refers to a mailbox that was not sent")
        return Message(message.header, [self._array(*place) for place in box["placed"]])

    def _array(self, dtype: str, shape: Sequence[int], offset: int) -> Array:
        assert self._memory is not None
        form = plain_dtype(dtype)
        nbytes = math.prod(shape) * form.itemsize
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > len(self._memory):
            raise ValueError(f"a push refers to bytes outside of its mailbox: {offset}, {nbytes}")
        return self._memory[offset : offset + nbytes].view(form).reshape(tuple(shape))


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
