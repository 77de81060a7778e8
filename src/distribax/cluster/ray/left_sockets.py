"""Sockets that Ray leaves open in a process: one for each time that it is connected.

A driver listens for its actors. When Ray is shut down, it stops to listen, but never closes the
socket: a program that uses many clusters one after the other would run out of descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CLOSED: Final = 7
"""The kernel's number of the state of a TCP socket that has ceased to listen."""
_FOLDER: Final = Path("/proc/self/fd")

_opened: dict[int, str] = {}
"""The sockets that Ray has opened when it was connected: their names by descriptor."""


@contextlib.contextmanager
def note_listeners() -> Iterator[None]:
    """Closes what earlier connections have left, and notes what this one opens."""
    _close_left()
    before = _list_sockets()
    yield
    after = _list_sockets()
    _opened.update({fd: name for fd, name in after.items() if before.get(fd) != name})


def _close_left() -> None:
    sockets = _list_sockets()
    for fd, name in list(_opened.items()):
        # Not at once when Ray is shut down: its threads may still be about to use them.
        if sockets.get(fd) == name and _is_closed(fd):
            os.close(fd)
            del _opened[fd]
        elif sockets.get(fd) != name:
            del _opened[fd]


def _is_closed(fd: int) -> bool:
    """Returns whether a socket has been listening, and does not any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        is_bound = probe.family in (socket.AF_INET, socket.AF_INET6) and probe.getsockname()[1] > 0
        state: bytes = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return is_bound and state[0] == _CLOSED
    return False


def _list_sockets() -> dict[int, str]:
    """Returns the kernel's names of this process's sockets; nothing where they are not listed."""
    found: dict[int, str] = {}
    for path in _FOLDER.glob("*"):
        with contextlib.suppress(OSError):
            name = os.readlink(path)
            if name.startswith("socket:"):
                found[int(path.name)] = name
    return found
