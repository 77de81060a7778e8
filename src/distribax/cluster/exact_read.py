"""Reads messages of a fixed size, in which the two ends of a connection prove what they are."""

from __future__ import annotations

import socket
import time


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Returns the next bytes of a connection.

    Args:
        connection: The connection; its own time limit is changed.
        size: How many bytes.
        deadline: Until when they have to be there, in seconds of `time.monotonic()`.

    Raises:
        TimeoutError: They were not.
        ConnectionError: The other side has closed the connection before.
    """
    data = b""
    while len(data) < size:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other side has taken too long to prove what it is")
        connection.settimeout(left)
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the other side has closed the connection while meeting")
        data += part
    return data
