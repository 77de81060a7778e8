"""Whether this worker and each other one can reach each other, and not only the hub.

Workers exchange values with each other directly. Two that lose each other, while both reach the
hub, would wait for ever. So there is one connection for each pair of workers, over which both give
signs of life; the hub is told who has not been heard for too long.

Whoever calls shows a key that the hub has made for this cluster; others are not listened to.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from distribax.cluster.peers.hub_messages import Reachable, Unreachable
from distribax.cluster.spec.host_address import listen

_BEAT: Final = b"."
_PATIENCE: Final = 1.25
"""A worker that the hub has lost as well is given up by the hub first."""
_BEATS_PER_TIMEOUT: Final = 8
_LONGEST_BEAT_SECONDS: Final = 2.0
_LONGEST_HELLO: Final = 512
_HELLO_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 5.0


class _Caller:
    """A connection whose number is not known before it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self.said = b""


class PairWatch:
    """The connections of this worker with the other ones, served by a thread of its own.

    Args:
        own: This worker's number.
        host: The address by which the others reach this machine.
        seconds: After how many seconds of silence another worker counts as out of reach.
        tell: Called in the thread with a message for the hub.
    """

    def __init__(
        self, own: int, host: str, seconds: float, tell: Callable[[Unreachable | Reachable], None]
    ) -> None:
        self._own = own
        self._limit = _PATIENCE * seconds
        self._interval = min(_LONGEST_BEAT_SECONDS, seconds / _BEATS_PER_TIMEOUT)
        self._tell = tell
        self._key = ""
        self._peers: dict[int, tuple[str, int]] = {}
        self._heard: dict[int, float] = {}
        self._unreachable: set[int] = set()
        self._connections: dict[int, socket.socket] = {}
        self._callers: list[_Caller] = []
        self._calling: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listener = listen(host, 0)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="distribax-pairs", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where the others call."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def start(self, peers: Sequence[tuple[str, int]], key: str) -> None:
        """Begins to watch.

        Args:
            peers: The address of each worker.
            key: What callers have to show.
        """
        now = time.monotonic()
        self._key = key
        others = [number for number in range(len(peers)) if number != self._own]
        self._peers = {number: (str(peers[number][0]), int(peers[number][1])) for number in others}
        self._heard = dict.fromkeys(others, now)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; may be called twice."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        self._close_all()

    def drop(self) -> None:
        """Closes what a forked process has inherited, where none of the threads is."""
        self._lock = threading.Lock()
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            connections, self._connections = dict(self._connections), {}
            callers, self._callers = self._callers, []
        calls = [one.connection for one in callers]
        for each in (self._listener, self._wake, self._woken, *connections.values(), *calls):
            each.close()

    # The thread.

    def _run(self) -> None:
        last = time.monotonic()
        next_beat = last
        while not self._ended.is_set():
            self._receive(self._interval / 2)
            now = time.monotonic()
            if now - last > self._limit / 2:
                # It is this process that was away.
                self._heard = dict.fromkeys(self._heard, now)
            last = now
            if now >= next_beat:
                next_beat = now + self._interval
                self._beat()
            self._judge(now)

    def _receive(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                for number, connection in list(self._connections.items()):
                    selector.register(connection, selectors.EVENT_READ, number)
                for caller in self._callers:
                    selector.register(caller.connection, selectors.EVENT_READ, caller)
                ready = selector.select(seconds)
            except (OSError, ValueError):  # Closed meanwhile.
                return
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                return
            elif isinstance(key.data, _Caller):
                self._hear_hello(key.data)
            else:
                self._hear(key.data)
        for caller in list(self._callers):
            if time.monotonic() - caller.since > _HELLO_SECONDS:
                self._dismiss(caller)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._callers) > len(self._peers):
                # Somebody else calls: each worker says hello at once.
                self._dismiss(self._callers[0])
            self._callers.append(_Caller(connection))

    def _hear_hello(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # It had to make room for another one just now.
        try:
            caller.said += caller.connection.recv(_LONGEST_HELLO)
        except BlockingIOError:
            return
        except OSError:
            caller.said = b"\n"
        line, end, _ = caller.said.partition(b"\n")
        if not end and 0 < len(caller.said) < _LONGEST_HELLO:
            return
        number = self._parse_hello(line)
        if number is None:
            self._dismiss(caller)
        else:
            self._forget(caller)
            self._keep(number, caller.connection)

    def _parse_hello(self, line: bytes) -> int | None:
        """Returns which worker has called; None if it is none of this cluster."""
        try:
            number, key = json.loads(line)
            # A text of JSON need not be one that can be encoded.
            is_known = hmac.compare_digest(key.encode(), self._key.encode())
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        if not is_known:
            return None
        return number if isinstance(number, int) and number in self._peers else None

    def _forget(self, caller: _Caller) -> None:
        with contextlib.suppress(ValueError):  # Another thread may have closed all.
            self._callers.remove(caller)

    def _dismiss(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _keep(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            before = self._connections.pop(number, None)
            if self._ended.is_set():
                connection.close()
            else:
                self._connections[number] = connection
        if before is not None:
            before.close()
        self._heard[number] = time.monotonic()

    def _hear(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._heard[number] = time.monotonic()
        else:
            self._lose(number)

    def _lose(self, number: int) -> None:
        with self._lock:
            connection = self._connections.pop(number, None)
        if connection is not None:
            connection.close()

    def _beat(self) -> None:
        for number, connection in list(self._connections.items()):
            try:
                connection.send(_BEAT)
            except BlockingIOError:
                pass
            except OSError:
                self._lose(number)
        # One of each pair calls.
        for number in self._peers:
            if (
                number < self._own
                and number not in self._connections
                and number not in self._calling
            ):
                self._calling.add(number)
                threading.Thread(
                    target=self._call, args=(number,), name="distribax-pairs-call", daemon=True
                ).start()

    def _call(self, number: int) -> None:
        """Connects with another worker; in a thread, as that may take a while."""
        try:
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                # If that fails, it is called again with the next beat.
                connection = socket.create_connection(self._peers[number], timeout=_CALL_SECONDS)
                stack.callback(connection.close)
                connection.sendall(json.dumps([self._own, self._key]).encode() + b"\n")
                self._keep(number, connection)
                stack.pop_all()
        finally:
            self._calling.discard(number)

    def _judge(self, now: float) -> None:
        for number, heard in list(self._heard.items()):
            silence = now - heard
            if silence > self._limit:
                # The connection is of no use: another one is made when the other is in reach.
                self._lose(number)
                if number not in self._unreachable:
                    self._unreachable.add(number)
                    self._tell({"unreachable": number, "seconds": silence})
            elif number in self._unreachable:
                self._unreachable.discard(number)
                self._tell({"reachable": number})
