"""Hearing from the hub that the other workers are still there, and telling it that this one is.

Every worker gives a sign of life now and then, and so does the hub, which runs beside the first
worker: if the hub is gone or silent, the first worker's machine is. Workers that have lost only
each other are found by `PairWatch`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from distribax import jax_private
from distribax.cluster.peers.hub_messages import (
    CallProgress,
    LossReason,
    LostWorker,
    WatchMessage,
    WorkerMessage,
)
from distribax.cluster.peers.meeting import Meeting
from distribax.cluster.peers.pair_watch import PairWatch
from distribax.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

_logger = logging.getLogger(__name__)

_LONGEST_BEAT_SECONDS: Final = 2.0
_BEATS_PER_TIMEOUT: Final = 5
_LONGEST_REASON: Final = 500
_LONGEST_NAME: Final = 200
_MOST_CALLS: Final = 20
_CLOSE_SECONDS: Final = 5.0
_LONGEST_LINE: Final = 1 << 20
_MALFORMED: Final = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Loss:
    """Which worker is lost, with its address, what is known of it, and since when (as a time)."""

    peer: str
    reason: str
    since: float

    def make_error(self) -> PeerLostError:
        """Returns a new exception that says so."""
        return PeerLostError(self.peer, self.reason, self.since)


class Watch:
    """The connection of one worker with the hub, served by a thread of its own.

    Args:
        meeting: How the workers have met; its connection belongs to the watch from now on.
        on_loss: Called in the watch's thread, once, when a worker is lost.
        on_stuck: Called in the watch's thread, once, when the workers have made different calls or
            wait for each other in different places.
    """

    def __init__(
        self,
        meeting: Meeting,
        on_loss: Callable[[Loss], None],
        on_stuck: Callable[[CollectiveMismatchError | CollectiveTimeoutError], None],
    ) -> None:
        self._meeting = meeting
        self._connection = meeting.connection
        self._seconds = meeting.peer_timeout
        self._interval = min(_LONGEST_BEAT_SECONDS, self._seconds / _BEATS_PER_TIMEOUT)
        self._on_loss = on_loss
        self._on_stuck = on_stuck
        # Guards what follows, and wakes those who wait for it to change.
        self._changed = threading.Condition()
        self._loss: Loss | None = None
        self._done: set[int] = set()
        self._places: list[str] | None = None
        self._unread = b""
        self._pairs = PairWatch(meeting.own, meeting.host, meeting.peer_timeout, self._send)
        self._wake, self._woken = socket.socketpair()
        self._connection.setblocking(False)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    def ended(self) -> str | None:
        """A worker, with its address, that has said goodbye; None if all are here."""
        with self._changed:
            others = sorted(self._done - {self._meeting.own})
            return self._meeting.members[others[0]] if others else None

    def say_failed(self, reason: str) -> None:
        """Tells all that this worker leaves because of an error."""
        self._send({"failed": " ".join(reason.split())[:_LONGEST_REASON]})

    def say_done(self) -> None:
        """Tells all that this worker's program has ended as it should."""
        self._send({"done": True})

    def wait_for_loss(self, seconds: float) -> Loss | None:
        """Waits until a worker is lost; returns None if none is in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, seconds)
        return self._loss

    def ask_places(self, seconds: float) -> list[str]:
        """Returns where all workers are; nothing if the hub does not answer in time."""
        with self._changed:
            self._places = None
            self._send({"at": _find_progress(), "ask": True})
            self._changed.wait_for(lambda: self._places is not None, seconds)
            return self._places or []

    def wait_for_ends(self, seconds: float) -> None:
        """Waits until all workers' programs have ended, or one is lost."""
        everybody = len(self._meeting.members)
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss is not None or len(self._done) == everybody, seconds
            )

    def close(self) -> None:
        """Ends the watch; the hub sees the connection close. May be called twice."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            for each in (self._wake, self._woken, self._connection):
                each.close()

    def drop(self) -> None:
        """Closes what a forked process has inherited: its life must not stand for this one's."""
        self._pairs.drop()
        for each in (self._connection, self._wake, self._woken):
            with contextlib.suppress(OSError):
                os.close(each.detach())

    # The thread.

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        self._send({"reach": self._pairs.address})
        last = heard = next_beat = time.monotonic()
        while self._loss is None:
            ready = [key.fileobj for key, _ in selector.select(self._interval / 2)]
            if self._woken in ready:
                break
            now = time.monotonic()
            if ready or now - last > self._seconds / 2:
                # In the second case it is this process that was away.
                heard = now
            last = now
            if ready and not self._read():
                self._lose(0, _DIED)
            elif now - heard > self._seconds:
                self._lose(0, _describe_silence(self._seconds), now - heard)
            if now >= next_beat:
                next_beat = now + self._interval
                self._send({"at": _find_progress()} if jax_private.joint_calls.limit else {})
        self._pairs.close()
        selector.close()
        # After a loss the connection stays, and with it the hub and JAX's service, whose end would
        # end this process before it has said whom it has lost.

    def _read(self) -> bool:
        """Hears what the hub has said; returns whether it can say more."""
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                self._hear(json.loads(line))
        except _MALFORMED:  # No hub says that.
            return False
        return bool(data) and len(self._unread) <= _LONGEST_LINE

    def _hear(self, message: WatchMessage) -> None:
        if "lost" in message:
            # This worker knows what it has said about itself.
            if (message["how"], message["lost"]) != (LossReason.FAILED, self._meeting.own):
                reason = self._describe_loss(message)
                self._lose(int(message["lost"]), reason, float(message["seconds"]))
            return
        if "done" in message:
            with self._changed:
                self._done.update(message["done"])
                self._changed.notify_all()
        if "peers" in message:
            self._pairs.start(message["peers"], message["key"])
        if "apart" in message:
            places = [*message["places"], _summarize_calls(int(message["apart"]))]
            self._on_stuck(CollectiveMismatchError(tuple(places)))
        elif "stuck" in message:
            self._on_stuck(CollectiveTimeoutError(message["stuck"], tuple(message["places"])))
        elif "late" in message:
            _logger.warning(
                "Workers have waited for others for %.0f s:\n  %s",
                message["late"],
                "\n  ".join(message["places"]),
            )
        elif "places" in message:
            with self._changed:
                self._places = message["places"]
                self._changed.notify_all()

    def _describe_loss(self, loss: LostWorker) -> str:
        if loss["how"] == LossReason.PAIR and loss["with"] is not None:
            return _describe_pair(self._meeting.members[loss["with"]], loss["seconds"])
        if loss["how"] == LossReason.FAILED:
            return f"left with an error: {loss['text']}"
        if loss["lost"] == self._meeting.own:
            return _GIVEN_UP
        return _DIED if loss["how"] == LossReason.DIED else _describe_silence(self._seconds)

    def _lose(self, number: int, reason: str, seconds: float = 0.0) -> None:
        with self._changed:
            if self._loss is not None:
                return
            self._loss = Loss(self._meeting.members[number], reason, time.time() - seconds)
            self._changed.notify_all()
        self._on_loss(self._loss)

    def _send(self, message: WorkerMessage) -> None:
        # If the hub cannot be reached, its silence says so. The few bytes always fit.
        with contextlib.suppress(OSError, ValueError):
            self._connection.send(json.dumps(message).encode() + b"\n")


def _find_progress() -> CallProgress:
    """Returns how far this worker is in the calls that all workers make together."""
    calls = jax_private.joint_calls
    newest = calls.newest
    stack = jax_private.list_main_stack()
    told: CallProgress = {
        # The number of the newest call.
        "number": calls.number + calls.is_in_call,
        "marks": list(calls.marks.items()),
        "here": jax_private.find_user_line(stack[-1][0] if stack else None),
    }
    if newest is not None:
        told |= {
            "name": newest.name[:_LONGEST_NAME],
            "line": newest.line,
            "seconds": newest.seconds if newest.is_pending else None,
            "limit": newest.limit or calls.limit,
        }
    return told


def _summarize_calls(since: int) -> str:
    """Returns the calls of this worker after a number of them, equal ones counted."""
    counts = jax_private.joint_calls.count_since(since)
    named = [f"\n    {count} x {call}" for call, count in counts.most_common(_MOST_CALLS)]
    return f"this worker's common calls after number {since}:{''.join(named)}"


_DIED: Final = (
    "died: its connection closed without a goodbye. Its own output, or the log of its machine (was "
    "it out of memory?), may say why"
)

_GIVEN_UP: Final = (
    "is this worker itself: it did not answer for too long (was it stopped?), and the others have "
    "given it up"
)


def _describe_pair(other: str, seconds: float) -> str:
    return (
        f"and {other} cannot reach each other: no sign of life between them for {seconds:.0f} s, "
        "although both answer others. Is there a firewall between them, or is a route broken?"
    )


def _describe_silence(seconds: float) -> str:
    return (
        f"stopped answering: no sign of life for {seconds:g} s. Is it stopped, or its machine out "
        "of reach? To wait longer: dx.MultiWorkerMirroredStrategy(peer_timeout_seconds=...)"
    )
