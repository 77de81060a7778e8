"""The connections of the collectives' transport, which XLA opens and tells nobody about.

A collective that waits for a worker which does not answer waits for ever. It fails at once when its
connection is shut down, from this end too. Only Gloo's connections, the transport of CPU devices,
can be found: they lead to or come from the ports that it listens on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator

Endpoint = tuple[str, int]


def listening() -> frozenset[Endpoint]:
    """Returns where this process accepts TCP connections now."""
    return frozenset(
        _endpoint(each.getsockname()) for each in _tcp_sockets() if _is_listening(each)
    )


def cut(endpoints: Iterable[Endpoint]) -> int:
    """Shuts down the connections of this process from and to the endpoints; returns how many."""
    known = frozenset(endpoints)
    count = 0
    for each in _tcp_sockets():
        with contextlib.suppress(OSError):
            ends = {_endpoint(each.getsockname()), _endpoint(each.getpeername())}
            if ends & known:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields a second handle on each TCP socket of this process, whoever has opened it."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        # The descriptor may be closed meanwhile, or be no socket.
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with handle:
            if handle.family in (socket.AF_INET, socket.AF_INET6) and _is_stream(handle):
                yield handle


def _is_stream(handle: socket.socket) -> bool:
    return handle.type == socket.SOCK_STREAM


def _is_listening(handle: socket.socket) -> bool:
    return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _endpoint(name: tuple[str, int]) -> Endpoint:
    # An IPv4 address may be written as an IPv6 one.
    return name[0].removeprefix("::ffff:"), name[1]
