"""Seeing that the other workers are still there, and telling everybody when one is not.

The workers stay connected as they have met: each with the leader. Every worker gives a sign of life
now and then. A connection that closes without a goodbye means that a process has died; one that
stays silent, that a process is stopped or its machine is gone. The leader tells all what it sees;
of the leader itself, everybody sees the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from distribax.cluster.peers.meeting import Meeting
from distribax.cluster.peers.transport import Endpoint
from distribax.errors import PeerLostError

_LONGEST_BEAT_SECONDS: Final = 2.0
_BEATS_PER_TIMEOUT: Final = 5
_LONGEST_REASON: Final = 500
_CLOSE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Loss:
    """Which worker is lost, with its address, and what is known of it."""

    peer: str
    reason: str

    def error(self) -> PeerLostError:
        """Returns a new exception that says so."""
        return PeerLostError(self.peer, self.reason)


@dataclass
class _Link:
    """A connection to another worker."""

    number: int
    connection: socket.socket
    heard: float
    unread: bytes = b""


class Watch:
    """The connections of one worker with the others, served by a thread of its own.

    Args:
        meeting: How the workers have met; its connections belong to the watch from now on.
        on_loss: Called in the watch's thread, once, when a worker is lost.
    """

    def __init__(self, meeting: Meeting, on_loss: Callable[[Loss], None]) -> None:
        self._meeting = meeting
        self._seconds = meeting.peer_timeout
        self._interval = min(_LONGEST_BEAT_SECONDS, self._seconds / _BEATS_PER_TIMEOUT)
        self._on_loss = on_loss
        # Guards what follows, and wakes those who wait for it to change.
        self._changed = threading.Condition()
        self._loss: Loss | None = None
        self._done: set[int] = set()
        self._endpoints: set[Endpoint] = set()
        self._wake, self._woken = socket.socketpair()
        now = time.monotonic()
        self._links: dict[int, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for number, connection in meeting.links.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links[number] = link = _Link(number, connection, now)
            self._selector.register(connection, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._run, name="distribax-watch", daemon=True)
        self._thread.start()

    @property
    def loss(self) -> Loss | None:
        """The first worker that was lost."""
        return self._loss

    @property
    def longest_silence(self) -> float:
        """After how many seconds a loss is known to all workers at the latest."""
        return self._seconds + 2 * self._interval

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Where the workers' collectives listen, as far as they have said so."""
        with self._changed:
            return frozenset(self._endpoints)

    @property
    def ended(self) -> str | None:
        """A worker, with its address, that has said goodbye; None if all are here."""
        with self._changed:
            others = sorted(self._done - {self._meeting.own})
            return str(self._meeting.members[others[0]]) if others else None

    # What this worker says.

    def say_where(self, endpoints: Iterable[Endpoint]) -> None:
        """Tells all where this worker's collectives listen."""
        with self._changed:
            self._endpoints.update(endpoints)
            self._send_all({"endpoints": sorted(self._endpoints)})

    def say_failed(self, reason: str) -> None:
        """Tells all that this worker leaves because of an error."""
        reason = " ".join(reason.split())[:_LONGEST_REASON]
        with self._changed:
            own = self._meeting.own
            if own == 0:
                peer = str(self._meeting.members[own])
                self._send_all({"lost": [own, peer, _failed(reason)]})
            else:
                self._send_all({"failed": reason})

    def say_done(self) -> None:
        """Tells all that this worker's program has ended as it should."""
        with self._changed:
            self._done.add(self._meeting.own)
            self._send_all({"done": sorted(self._done)})

    # What it waits for.

    def wait_for_loss(self, seconds: float) -> Loss | None:
        """Waits until a worker is lost; returns None if none is in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, seconds)
        return self._loss

    def wait_for_ends(self, seconds: float | None) -> None:
        """Waits until all workers' programs have ended, or one is lost."""
        everybody = len(self._meeting.members)
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss is not None or len(self._done) == everybody, seconds
            )

    def close(self) -> None:
        """Ends the watch; the other workers see the connections close. May be called twice."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_CLOSE_SECONDS)

    def drop(self) -> None:
        """Closes what a forked process has inherited: its life must not stand for this one's."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                os.close(link.connection.detach())

    # The thread.

    def _run(self) -> None:
        last = next_beat = time.monotonic()
        while True:
            for key, _ in self._selector.select(self._interval / 2):
                if key.data is None:
                    self._close_all()
                    return
                self._read(key.data)
            now = time.monotonic()
            if now - last > self._seconds / 2:
                # It is this process that was away: the others may have had no chance to be heard.
                for link in self._links.values():
                    link.heard = now
            last = now
            if now >= next_beat:
                next_beat = now + self._interval
                with self._changed:
                    self._send_all({})
            for link in self._links.values():
                if now - link.heard > self._seconds and link.number not in self._done:
                    self._lose(link.number, _silent(self._seconds))

    def _close_all(self) -> None:
        for each in (self._wake, self._woken, *(link.connection for link in self._links.values())):
            each.close()
        self._selector.close()

    def _read(self, link: _Link) -> None:
        try:
            data = link.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        link.heard = time.monotonic()
        *lines, link.unread = (link.unread + data).split(b"\n")
        for line in lines:
            self._hear(link, json.loads(line))
        if not data:
            self._selector.unregister(link.connection)
            link.connection.close()
            with self._changed:
                del self._links[link.number]
                said_goodbye = link.number in self._done
            if not said_goodbye:
                self._lose(link.number, _DIED)

    def _hear(self, link: _Link, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._lose(link.number, _failed(message["failed"]))
        if "lost" in message:
            number, peer, reason = message["lost"]
            self._note(Loss(peer, _GIVEN_UP if number == self._meeting.own else reason))
        with self._changed:
            news = False
            if "done" in message:
                news = not self._done.issuperset(message["done"])
                self._done.update(message["done"])
            if "endpoints" in message:
                told = {(str(host), int(port)) for host, port in message["endpoints"]}
                news = news or not self._endpoints >= told
                self._endpoints |= told
            if news and self._meeting.own == 0:
                endpoints = sorted(self._endpoints)
                self._send_all({"done": sorted(self._done), "endpoints": endpoints})
            self._changed.notify_all()

    def _lose(self, number: int, reason: str) -> None:
        """Tells the others that the worker at the end of a link is lost."""
        peer = str(self._meeting.members[number])
        with self._changed:
            if self._loss is None:
                self._send_all({"lost": [number, peer, reason]})
        self._note(Loss(peer, reason))

    def _note(self, loss: Loss) -> None:
        with self._changed:
            if self._loss is not None:
                return
            self._loss = loss
            self._changed.notify_all()
        self._on_loss(loss)

    def _send_all(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for link in self._links.values():
            # Whoever cannot be reached is found out by its silence. The few bytes always fit.
            with contextlib.suppress(OSError):
                link.connection.send(data)


_DIED: Final = (
    "died: its connection closed without a goodbye. Its own output, or the log of its machine (was "
    "it out of memory?), may say why"
)

_GIVEN_UP: Final = (
    "is this worker itself: it did not answer for too long (was it stopped?), and the others have "
    "given it up"
)


def _silent(seconds: float) -> str:
    return (
        f"stopped answering: no sign of life for {seconds:g} s. Is it stopped, or its machine out "
        "of reach? To wait longer: dx.MultiWorkerMirroredStrategy(peer_timeout_seconds=...)"
    )


def _failed(reason: str) -> str:
    return f"left with an error: {reason}"
