"""Connections that Ray never closes: a program that uses many clusters would run out of them.

A driver calls Ray's processes, and is called by its actors and its node. When Ray is shut down, it
leaves some of these connections open: it closes a part of them when it is connected again, and
others never. Ray has no function that closes them, and does not tell their descriptors, so they are
found among those of the process. That has nothing to do with finding lost workers.

These bounds keep it from closing what is not Ray's, or what Ray still uses:

- It happens only while Ray is shut down.
- A socket counts only if one of its ends has a port of Ray that was noted while it was connected.
- It is closed when two more clusters have ended since then, in which Ray had the time to do so. Ray
  waits for minutes if a descriptor is closed that it is about to close itself.
- It must still be the same socket by the kernel's name, and one that cannot send any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distribax.cluster.ray.cluster_token import import_ray

_CLOSED: Final = 7
"""The kernel's number of the state of a TCP socket of no use: it cannot listen or send any more."""
_FOLDER: Final = Path("/proc/self/fd")

_NUM_LIVES: Final = 2
"""How many more clusters have to end before a connection counts as left for ever."""

_ports: frozenset[int] = frozenset()
"""The ports of Ray's own connections: this process's, the head's, the node's; none without Ray."""
_left: dict[int, _LeftSocket] = {}
"""The connections of earlier clusters, by descriptor."""


@dataclass
class _LeftSocket:
    """A connection that a cluster may have left.

    Attributes:
        name: The kernel's name of the socket.
        num_lives: How many clusters have ended since then.
    """

    name: str
    num_lives: int = 0


def note_ports() -> None:
    """Notes the ports by which Ray's connections are known; called when it is connected."""
    from ray.core.generated import common_pb2

    global _ports
    ray = import_ray()
    address = common_pb2.Address()
    # Only the owner of an object is told its address.
    owned = ray.put(None)
    address.ParseFromString(ray._private.worker.global_worker.core_worker.get_owner_address(owned))
    head = ray.get_runtime_context().gcs_address
    _ports = frozenset((address.port, int(head.rpartition(":")[2]), _find_node_port()))


def _find_node_port() -> int:
    """Returns the port of the node that this process uses; 0 if it has none."""
    ray = import_ray()
    own = ray.get_runtime_context().get_node_id()
    return next((int(n["NodeManagerPort"]) for n in ray.nodes() if n["NodeID"] == own), 0)


def close_left() -> None:
    """Closes what earlier clusters have left, and notes what this one may; before Ray's end."""
    global _ports
    sockets = _list_sockets()
    for fd, connection in list(_left.items()):
        connection.num_lives += 1
        if sockets.get(fd) != connection.name:
            del _left[fd]
        elif connection.num_lives >= _NUM_LIVES and _is_closed(fd):
            os.close(fd)
            del _left[fd]
    ports, _ports = _ports, frozenset()
    for fd, name in sockets.items():
        if fd not in _left and not ports.isdisjoint(_list_ports(fd)):
            _left[fd] = _LeftSocket(name)


def _list_ports(fd: int) -> list[int]:
    """Returns the ports of both ends of a socket, as far as it has them."""
    ports: list[int] = []
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as probe:
        if probe.family in (socket.AF_INET, socket.AF_INET6):
            ports.append(probe.getsockname()[1])
            ports.append(probe.getpeername()[1])
    return ports


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
