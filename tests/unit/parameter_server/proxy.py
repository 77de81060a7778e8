"""A stretch of network between a client and a server that can be cut at the worst moment."""

from __future__ import annotations

import contextlib
import socket
import threading

from distribax.parameter_server import Endpoint


class Proxy:
    """Passes bytes on; after `cut_answers` it ends a connection instead of passing an answer on."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cut = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.num_calls = 0
        self._spawn(self._accept)

    @property
    def endpoint(self) -> Endpoint:
        port = self._listener.getsockname()[1]
        return Endpoint("127.0.0.1", port, "", self._target.boot)

    def cut_answers(self) -> None:
        """The next answer does not arrive; connections made after that work again."""
        self._cut.set()

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            _end(each)
        for thread in self._threads:
            thread.join()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_calls += 1
            server = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [client, server]
            self._spawn(self._pump, client, server, False)
            self._spawn(self._pump, server, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and self._cut.is_set():
                    self._cut.clear()
                    break
                target.sendall(data)
        _end(source)
        _end(target)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
