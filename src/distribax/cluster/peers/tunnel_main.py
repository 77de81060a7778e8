"""Forwards connections from a local socket to an address, in a process of its own.

A thread would do, were it not for calls of JAX that keep Python's lock while they wait for an
answer through this very tunnel. When the far end of a connection breaks, the near end stays open
and silent. The process ends when its standard input does, that is, with the one that started it.

It is started by its path and imports nothing of distribax: it must be there quickly.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys

_CHUNK = 1 << 16
_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 60.0
_LOOK_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 30


class _Forwarder:
    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener = listener
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        # The other end of each connection, and the near ends whose far ends have broken.
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._near: set[socket.socket] = set()

    def run(self) -> None:
        starter = os.getppid()
        while os.getppid() == starter:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._pairs:
                    self._forward(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=_CONNECT_SECONDS)
        except OSError:
            # Nothing depends on this connection yet: the caller tries again.
            near.close()
            return
        # Nothing may be said for hours, and firewalls forget connections that rest.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
        self._near.add(near)
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(_SEND_SECONDS)
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        target, data = self._pairs[source], b""
        with contextlib.suppress(OSError):
            data = source.recv(_CHUNK)
            target.sendall(data)
        if data:
            return
        for end in (source, target):
            self._selector.unregister(end)
            del self._pairs[end]
            # A near end that has not ended itself stays open.
            if end is source or end not in self._near:
                self._near.discard(end)
                end.close()


def main() -> None:
    """Takes the descriptor of the listening socket, the host and the port as arguments."""
    # These are for the process that has started this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, host, port = sys.argv[1:]
    _Forwarder(socket.socket(fileno=int(descriptor)), (host, int(port))).run()


if __name__ == "__main__":
    main()
