"""Sockets that Ray leaves open in a process: one for each time that it is connected.

A driver listens for its actors and its node. When Ray is shut down, it stops to listen, but never
closes the socket, nor those of connections that came later: a program that uses many clusters one
after the other would run out of descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CLOSED: Final = 7
"""The kernel's number of the state of a TCP socket of no use: it cannot listen or send any more."""
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


def note_callers() -> None:
    """Notes the connections that Ray has accepted; called before it is shut down."""
    sockets = _list_sockets()
    ports = {_get_port(fd) for fd, name in _opened.items() if sockets.get(fd) == name} - {0}
    _opened.update({fd: name for fd, name in sockets.items() if _get_port(fd) in ports})


def _get_port(fd: int) -> int:
    """Returns the port that a socket is bound to; 0 if there is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        if probe.family in (socket.AF_INET, socket.AF_INET6):
            return int(probe.getsockname()[1])
    return 0


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
    """Returns whether a socket has been listening or connected, and is not any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        state: bytes = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return _get_port(fd) > 0 and state[0] == _CLOSED
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
