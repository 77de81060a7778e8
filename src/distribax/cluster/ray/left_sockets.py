"""Connections that Ray never closes: a program that uses many clusters would run out of them.

A driver is called by its actors and its node. When Ray is shut down, it closes the socket on which
it was called, but not all connections that it has accepted there. They are closed here, once Ray
had the whole life of another cluster to do so, and has not: a descriptor that Ray was about to
close may stand for something else a moment later, and Ray waits for minutes if one of its own is
closed. Ray's other sockets are not touched. It closes those when it is connected again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from distribax.cluster.ray.cluster_token import import_ray

_CLOSED: Final = 7
"""The kernel's number of the state of a TCP socket of no use: it cannot listen or send any more."""
_FOLDER: Final = Path("/proc/self/fd")

_port = 0
"""The port on which Ray is called in this process; 0 if it is not connected."""
_left: dict[int, str] = {}
"""The connections that were accepted for earlier clusters: their names by descriptor."""


def note_port() -> None:
    """Notes on which port Ray is called; called when it is connected."""
    from ray.core.generated import common_pb2

    global _port
    ray = import_ray()
    address = common_pb2.Address()
    # Only the owner of an object is told its address.
    owned = ray.put(None)
    address.ParseFromString(ray._private.worker.global_worker.core_worker.get_owner_address(owned))
    _port = address.port


def close_left() -> None:
    """Closes what an earlier cluster has left, and notes what this one may; before Ray's end."""
    global _port
    sockets = _list_sockets()
    for fd, name in list(_left.items()):
        if sockets.get(fd) != name:
            del _left[fd]
        elif _is_closed(fd):
            os.close(fd)
            del _left[fd]
    port, _port = _port, 0
    if port:
        _left.update({fd: name for fd, name in sockets.items() if _get_port(fd) == port})


def _get_port(fd: int) -> int:
    """Returns the port that a socket is bound to; 0 if there is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        if probe.family in (socket.AF_INET, socket.AF_INET6):
            return int(probe.getsockname()[1])
    return 0


def _is_closed(fd: int) -> bool:
    """Returns whether a socket has been connected, and is not any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        state: bytes = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _CLOSED
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
