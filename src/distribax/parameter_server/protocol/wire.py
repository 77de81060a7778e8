"""Messages on a socket: a header and arrays, sent from and received into their own memory.

A frame is a fixed prefix (magic, length of the header, length of the payload, number), the header
in MessagePack, and the bytes of the arrays one after the other. The header's "arrays" says the type
and shape of each, so that a receiver allocates them, aligned for JAX, and the kernel copies each
byte once.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from distribax.errors import DistribaxError
from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import dtype_name, plain_dtype
from distribax.topology.host_memory import make_aligned

_PREFIX: Final = struct.Struct("<4sIQQ")
_MAGIC: Final = b"dxp3"
_MAX_HEADER: Final = 64 << 20
_MAX_PAYLOAD: Final = 1 << 40
_INT_SIZE: Final = array("i").itemsize
_RIGHTS_SIZE: Final = socket.CMSG_SPACE(253 * _INT_SIZE)
_ARRAYS: Final = "arrays"
_TEXT_ERRORS: Final = "surrogatepass"
"""Names of files, as Python has them, may not be valid UTF-8."""
_CUT: Final = "the connection was closed in the middle of a frame"
_FIRST_READ: Final = 4096
"""How many bytes are requested before it is known how many there are."""
_RECEIVE_FLAGS: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MAX_PARTS: Final = 512
"""Of one sendmsg or recvmsg; Linux takes 1024."""


class FrameError(DistribaxError, ConnectionError):
    """A frame is invalid: the peer is not a parameter server or client, or is broken."""


class Message(NamedTuple):
    """A header of plain values, the arrays that go with it, and open files (unix sockets only).

    Files are not closed by sending them; those received are the receiver's to close. Headers are
    not changed once they are sent or received. The number is the sender's.
    """

    header: dict[str, Any]
    arrays: Sequence[Array] = ()
    descriptors: Sequence[int] = ()
    number: int = 0


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message out of the memory of its arrays."""
    if not message.arrays and not message.descriptors:
        connection.sendall(_make_head(message.header, 0, message.number))
        return
    arrays = [np.asarray(value, order="C") for value in message.arrays]
    described = [[dtype_name(value.dtype), value.shape] for value in arrays]
    payload = sum(value.nbytes for value in arrays)
    head = _make_head({**message.header, _ARRAYS: described}, payload, message.number)
    _send_parts(connection, [memoryview(head), *map(view_bytes, arrays)], message.descriptors)


def _make_head(header: dict[str, Any], payload: int, number: int) -> bytes:
    text: bytes = msgpack.packb(header, unicode_errors=_TEXT_ERRORS)
    return _PREFIX.pack(_MAGIC, len(text), payload, number) + text


def receive(connection: socket.socket) -> Message:
    """Receives a message; EOFError if the peer has closed the connection between two of them.

    Each side waits for the other's answer before it sends again, so whatever can be read belongs
    to this message. Most messages are complete after the first system call.
    """
    buffer = memoryview(bytearray(_FIRST_READ))
    descriptors: list[int] = []
    try:
        count = _receive_first(connection, buffer, descriptors)
        magic, header_size, payload, number = _PREFIX.unpack_from(buffer)
        if magic != _MAGIC:
            raise FrameError(f"a frame begins with {magic!r} instead of {_MAGIC!r}")
        if header_size > _MAX_HEADER or payload > _MAX_PAYLOAD:
            raise FrameError(
                f"a frame claims a header of {header_size} bytes and a payload of {payload}; at "
                f"most {_MAX_HEADER} and {_MAX_PAYLOAD} are taken"
            )
        begun = buffer[_PREFIX.size : count]
        text = begun[:header_size]
        if len(text) < header_size:
            text = memoryview(bytearray(header_size))
            _receive_parts(connection, _fill([text], begun))
        begun = begun[header_size:]
        header, forms = _parse(text, payload)
        if len(begun) > payload:
            raise FrameError(f"{len(begun) - payload} bytes follow a frame without an answer")
        if not forms:
            return Message(header, (), descriptors, number)
        arrays = _allocate(forms)
        parts = [part for array in arrays if (part := view_bytes(array)).nbytes]
        _receive_parts(connection, _fill(parts, begun))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return Message(header, arrays, descriptors, number)


def _parse(
    text: memoryview, payload: int
) -> tuple[dict[str, Any], list[tuple[Any, tuple[int, ...]]]]:
    try:
        header = msgpack.unpackb(text, unicode_errors=_TEXT_ERRORS)
        described = header.get(_ARRAYS, ())
        if not described and not payload:
            return header, []
        forms = [(plain_dtype(dtype), tuple(map(int, shape))) for dtype, shape in described]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise FrameError(f"a frame's header cannot be read: {reason}") from error
    header = {key: value for key, value in header.items() if key != _ARRAYS}
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in forms]
    if sum(sizes) != payload or any(size < 0 for size in sizes):
        raise FrameError(f"a frame announces {payload} bytes and arrays of {sum(sizes)}")
    return header, forms


def _allocate(forms: list[tuple[Any, tuple[int, ...]]]) -> list[Array]:
    try:
        return [make_aligned(shape, dtype) for dtype, shape in forms]
    except (ValueError, OverflowError, MemoryError) as error:
        raise FrameError(f"a frame's arrays cannot be allocated: {error}") from error


def view_bytes(value: Array) -> memoryview:
    """Returns the memory of an array."""
    # Through uint8, as bfloat16 and the like have no buffer of their own.
    return value.reshape(-1).view(np.uint8).data


def _send_parts(
    connection: socket.socket, parts: list[memoryview], descriptors: Sequence[int]
) -> None:
    parts = [part for part in parts if part.nbytes]
    if descriptors:  # They go with the first bytes.
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        parts = _skip_bytes(parts, connection.sendmsg(parts[:1], [rights]))
    while parts:
        parts = _skip_bytes(parts, connection.sendmsg(parts[:_MAX_PARTS]))


def _receive_first(connection: socket.socket, buffer: memoryview, descriptors: list[int]) -> int:
    """Receives at least a prefix, and the open files that come with it; returns how many bytes."""
    total = 0
    while total < _PREFIX.size:
        count, rights, _, _ = connection.recvmsg_into(
            [buffer[total:]], _RIGHTS_SIZE, _RECEIVE_FLAGS
        )
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.extend(array("i", data[: len(data) - len(data) % _INT_SIZE]))
        if not count and not total:
            raise EOFError("the connection was closed")
        if not count:
            raise FrameError(_CUT)
        total += count
    return total


def _receive_parts(connection: socket.socket, parts: list[memoryview]) -> None:
    """Fills the parts, none of which is empty."""
    while parts:
        count = connection.recvmsg_into(parts[:_MAX_PARTS])[0]
        if not count:
            raise FrameError(_CUT)
        parts = _skip_bytes(parts, count)


def _fill(parts: list[memoryview], begun: memoryview) -> list[memoryview]:
    """Copies bytes into the first parts, and returns what is left to fill."""
    while begun:
        size = min(len(begun), parts[0].nbytes)
        parts[0][:size] = begun[:size]
        parts, begun = _skip_bytes(parts, size), begun[size:]
    return parts


def _skip_bytes(parts: list[memoryview], count: int) -> list[memoryview]:
    """Returns what is left of the parts after so many bytes."""
    done = 0
    for part in parts:
        if count < part.nbytes:
            break
        count -= part.nbytes
        done += 1
    rest = parts[done:]
    if rest and count:
        rest[0] = rest[0][count:]
    return rest
