"""The hub of the workers that train together: a process of its own beside the first worker.

Here the workers meet, here each of them is watched, and here JAX's coordination service runs. XLA
ends a process 0.1 s after that service is gone, whatever the process is doing, and no option can
prevent it. So the service must not end with a worker: the death of the first worker is then noticed
and dealt with like the death of any other.

Whoever calls proves first that it has the cluster's secret, and so does the hub (gate.py). Until
then nothing is parsed, and a connection has a time limit. Later, a message is a line of JSON. A
connection that closes without a goodbye means that a process has died; one that stays silent, that
a process is stopped or its machine is gone. The hub tells all workers what it sees, and ends when
they have left.

It is started by its path and imports nothing of distribax: it must be there quickly.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

_LONGEST_BEAT_SECONDS = 2.0
_BEATS_PER_TIMEOUT = 5
_LONGEST_LINE = 65536
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
# The host names of workers whose addresses are not known end with this.
_UNKNOWN_HOST = ".invalid"
# How long survivors may take to end, with the callbacks that they run, after a worker is lost.
_LEAVE_SECONDS = 60.0
# After how long a worker that is late is named to those that wait for it; then after twice as long.
_LATE_SECONDS = 30.0
# How often those who are here are told who is missing.
_TELL_SECONDS = 1.0
# How long JAX's coordination service may take at least: less than workers wait for an answer.
_SERVICE_SECONDS = 3.0
# Longer lists help nobody, and may not fit into the buffers of a connection.
_MOST_NAMED = 8
# How many connections may be without a proof; of more, the oldest is ended.
_MOST_STRANGERS = 128


class _Position:
    """How far a worker is in the calls that all workers make together, as it has said.

    Attributes:
        number: The number of its newest call.
        name: What that is.
        line: The line of the user's program that makes it.
        seconds: How long it has been waiting there; None if it is over.
        limit: How long it may wait there for one that is late.
        marks: Digests of all calls up to some numbers.
        here: The line where the program is now.
    """

    def __init__(self, said: dict[str, Any]) -> None:
        self.number = int(said["number"])
        self.name = str(said.get("name"))
        self.line = str(said.get("line"))
        seconds = said.get("seconds")
        self.seconds = None if seconds is None else float(seconds)
        self.limit = float(said.get("limit") or math.inf)
        self.marks = {int(number): int(mark) for number, mark in said["marks"]}
        self.here = str(said["here"])

    def contradicts(self, other: _Position) -> bool:
        """Tells whether both wait, in calls that never meet."""
        waits = self.seconds is not None and other.seconds is not None
        return waits and self.number == other.number and self.name != other.name

    def describe(self) -> str:
        """Returns this in words."""
        if not self.number:
            return f"is at {self.here}, and has made no common call yet"
        call = f"{self.name} (common call {self.number}) at {self.line}"
        if self.seconds is None:
            return f"is at {self.here}; its last common call was {call}"
        return f"has waited for {self.seconds:.0f} s in {call}"


class _Link:
    """A connection to a worker; its number is known when it has proved who it is."""

    def __init__(self, connection: socket.socket, caller: str, greeting: bytes) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.caller = caller
        self.greeting = greeting
        self.number = -1
        self.unread = b""
        self.heard = time.monotonic()
        self.at: _Position | None = None
        # Where other workers call this one, and whom it does not hear.
        self.reach: list[Any] | None = None
        self.unreachable: dict[int, float] = {}

    def send(self, message: dict[str, Any]) -> None:
        self.send_bytes(json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        # Whoever cannot be reached is found out by its silence. The few bytes always fit.
        with contextlib.suppress(OSError):
            self.connection.send(data)


class Hub:
    """The connections with all workers.

    Args:
        listener: The socket that the workers call.
        members: The name and the address of each worker.
        gate: Tells who calls: a `Gate`.
        seconds: How long to wait until all workers are here.
        peer_timeout: After how many seconds of silence a worker counts as lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        members: list[tuple[str, str]],
        gate: Any,
        seconds: float,
        peer_timeout: float,
    ) -> None:
        self._listener = listener
        self._members = members
        self._gate = gate
        self._seconds = seconds
        self._peer_timeout = peer_timeout
        self._links: list[_Link] = []
        self._done: set[int] = set()
        self._leave_at = math.inf
        self._tell_at = 0.0
        self._told_seconds = 0.0
        # How many calls all workers have made in the same order.
        self._agreed = 0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def meet(self, address: str, service: Future[object]) -> bool:
        """Waits until all workers are here, and tells them where the coordination service is.

        Args:
            address: The service's address.
            service: Done when the service runs, or could not be started.

        Returns:
            Whether all is well; if not, the workers have been told.
        """
        deadline = time.monotonic() + self._seconds
        trouble: dict[str, Any] | None = None
        while len(here := self._here()) < len(self._members):
            left = deadline - time.monotonic()
            if left <= 0:
                trouble = trouble or self._missing(here)
            if trouble is not None:
                for link in here.values():
                    link.send(trouble)
                # The first worker must hear it: it has started the hub.
                if left <= 0 or 0 in here:
                    return False
            self._tell_who_is_missing(here)
            self._drop_strangers(self._gate.proof_seconds)
            wait = min(max(left, 0.0), _TELL_SECONDS, self._gate.proof_seconds)
            for link, message in self._receive(wait):
                number = message.get("worker") if message and link.number < 0 else None
                if message is None or number is None:
                    self._drop(link)  # Something else has called this port, or a worker has left.
                    if link.number == 0:
                        return False  # It starts a hub of its own when it is started again.
                elif not message["agrees"]:
                    trouble = {"error": self._disagreement(number)}
                    link.send(trouble)
                elif number in self._here():
                    link.send({"error": self._describe_duplicate(number, link)})
                    self._drop(link)
                else:
                    link.number, link.heard = number, time.monotonic()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._drop_strangers(-math.inf)
        left = max(_SERVICE_SECONDS, deadline - time.monotonic())
        late = TimeoutError(f"it took more than {left:.0f} s. Is the machine overloaded?")
        error = service.exception() if wait_for([service], left).done else late
        if error is not None:
            text = f"JAX's coordination service did not start on {address}: {error}"
            self._tell_all({"failed": text})
            return False
        names = [self._name(number) for number in range(len(self._members))]
        self._tell_all({"address": address, "peer_timeout": self._peer_timeout, "members": names})
        for link in self._links:
            link.heard = time.monotonic()
        return True

    def watch(self) -> None:
        """Tells all workers when one is lost or has ended; returns when they have left."""
        interval = min(_LONGEST_BEAT_SECONDS, self._peer_timeout / _BEATS_PER_TIMEOUT)
        last = next_beat = time.monotonic()
        while self._links and last < self._leave_at:
            for link, message in self._receive(interval / 2):
                try:
                    self._hear(link, message)
                except _MALFORMED:  # No worker says that.
                    self._hear(link, None)
            now = time.monotonic()
            if now - last > self._peer_timeout / 2:
                # It is this process that was away: the others may have had no chance to be heard.
                for link in self._links:
                    link.heard = now
            last = now
            if now >= next_beat:
                next_beat = now + interval
                self._tell_all({})
                self._compare()
                self._look_at_pairs(now)
            for link in self._links:
                if now - link.heard > self._peer_timeout and link.number not in self._done:
                    self._lose(link.number, "silent", seconds=now - link.heard)

    def close(self) -> None:
        """Closes all connections."""
        for link in list(self._links):
            self._drop(link)
        self._listener.close()
        self._selector.close()

    def _hear(self, link: _Link, message: dict[str, Any] | None) -> None:
        if message is None:
            self._drop(link)
            if link.number not in self._done:
                self._lose(link.number, "died")
        elif "failed" in message:
            self._lose(link.number, "failed", text=str(message["failed"]))
        elif "done" in message:
            self._done.add(link.number)
            self._tell_all({"done": sorted(self._done)})
        elif "reach" in message:
            link.reach = list(message["reach"])
            self._introduce()
        elif "unreachable" in message:
            link.unreachable[int(message["unreachable"])] = float(message["seconds"])
        elif "reachable" in message:
            link.unreachable.pop(int(message["reachable"]), None)
        elif "at" in message:
            link.at = _Position(message["at"])
            if message.get("ask"):
                link.send({"places": self._list_places(sorted(self._here()))})

    def _introduce(self) -> None:
        """Tells all workers where the others can be called, once that is known of all."""
        here = self._here()
        peers = [here[number].reach for number in sorted(here)]
        if len(peers) == len(self._members) and None not in peers:
            self._tell_all({"peers": peers, "key": secrets.token_hex(16)})

    def _look_at_pairs(self, now: float) -> None:
        """Tells all workers if two of them do not hear each other, although the hub hears both."""
        here = self._here()
        for number, link in here.items():
            for other, seconds in link.unreachable.items():
                pair = sorted((number, other))
                heard = [now - here[each].heard for each in pair if each in here]
                is_heard = len(heard) == 2 and max(heard) < self._peer_timeout / 2
                if is_heard and not self._done.intersection(pair):
                    self._lose(pair[0], "pair", seconds=seconds, other=pair[1])

    def _compare(self) -> None:
        """Tells all workers if they do not make the same calls, or wait for one that is late."""
        known = {number: link.at for number, link in self._here().items() if link.at is not None}
        if self._leave_at < math.inf or not known:
            return
        if apart := self._find_apart(known):
            self._leave_at = time.monotonic() + _LEAVE_SECONDS
            self._tell_all({"apart": self._agreed, "places": self._list_places(apart)})
            return
        seconds, is_over, named = 0.0, False, set[int]()
        for number, at in known.items():
            if at.seconds is None:
                continue
            late = [
                other
                for other, its in known.items()
                if its.seconds is None and its.number < at.number and other not in self._done
            ]
            elsewhere = [other for other, its in known.items() if at.contradicts(its)]
            if late or elsewhere:
                seconds = max(seconds, at.seconds)
                # Nobody who waits somewhere else will come.
                limit = min(at.limit, _LATE_SECONDS) if elsewhere else at.limit
                is_over = is_over or at.seconds >= limit
                named |= {number, *late, *elsewhere}
        if not named:
            self._told_seconds = 0.0
        elif is_over:
            self._leave_at = time.monotonic() + _LEAVE_SECONDS
            self._tell_all({"stuck": seconds, "places": self._list_places(sorted(named))})
        elif seconds >= max(_LATE_SECONDS, 2 * self._told_seconds):
            self._told_seconds = seconds
            self._tell_all({"late": seconds, "places": self._list_places(sorted(named))})

    def _find_apart(self, known: dict[int, _Position]) -> list[int]:
        """Returns two workers that have made different calls; none if all agree."""
        first = min(known)
        marks, agreed = known[first].marks, []
        others = {number: at for number, at in known.items() if number != first}
        for number, at in others.items():
            common = marks.keys() & at.marks.keys()
            agreed.append(max((n for n in common if marks[n] == at.marks[n]), default=0))
            if common and marks[last := max(common)] != at.marks[last]:
                self._agreed = max(self._agreed, agreed[-1])
                return [first, number]
        if len(known) == len(self._members) and agreed:
            self._agreed = max(self._agreed, min(agreed))
        return []

    def _list_places(self, numbers: list[int]) -> list[str]:
        links = self._here()
        places = [
            f"{self._name(number)} {at.describe()}"
            for number in numbers[:_MOST_NAMED]
            if (at := links[number].at) is not None
        ]
        left_out = len(numbers) - _MOST_NAMED
        return places + ([f"and {left_out} others"] if left_out > 0 else [])

    def _lose(
        self,
        number: int,
        how: str,
        text: str = "",
        seconds: float = 0.0,
        other: int | None = None,
    ) -> None:
        # What follows the first loss is its consequence.
        if self._leave_at == math.inf:
            self._leave_at = time.monotonic() + _LEAVE_SECONDS
            lost = {"lost": number, "how": how, "text": text, "seconds": seconds, "with": other}
            self._tell_all(lost)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for link in self._links:
            link.send(message)

    def _receive(self, seconds: float) -> Iterator[tuple[_Link, dict[str, Any] | None]]:
        """Yields the messages that come in that time, and None for the end of a connection."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):
                    connection, (caller, *_) = self._listener.accept()
                    link = _Link(connection, caller, self._gate.greet(connection))
                    link.send_bytes(link.greeting)
                    self._links.append(link)
                    self._selector.register(link.connection, selectors.EVENT_READ, link)
            elif key.data in self._links:
                yield from self._read(key.data)

    def _read(self, link: _Link) -> Iterator[tuple[_Link, dict[str, Any] | None]]:
        try:
            data = link.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if link.number < 0:
            link.unread += data
            if not data or len(link.unread) >= self._gate.hello_size:
                yield link, self._check_hello(link)
            return
        link.heard = time.monotonic()
        *lines, link.unread = (link.unread + data).split(b"\n")
        try:
            for message in map(json.loads, lines):
                yield link, message if isinstance(message, dict) else None
        except (ValueError, RecursionError):
            data = b""
        if not data or len(link.unread) > _LONGEST_LINE:
            yield link, None

    def _check_hello(self, link: _Link) -> dict[str, Any] | None:
        """Returns which worker calls, and whether it agrees on the cluster; None for strangers."""
        hello, link.unread = link.unread, b""
        reply, number, agrees = self._gate.check(link.greeting, hello)
        link.send_bytes(reply)
        return None if number is None else {"worker": number, "agrees": agrees}

    def _drop_strangers(self, seconds: float) -> None:
        """Ends connections without a proof: those that are old, and the oldest if there are many.

        So strangers cannot keep a worker out: neither by silence nor by their number.
        """
        since = time.monotonic() - seconds
        strangers = [link for link in self._links if link.number < 0]
        for place, link in enumerate(strangers):
            if link.heard < since or place < len(strangers) - _MOST_STRANGERS:
                self._drop(link)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.connection)
            link.connection.close()

    # Names.

    def _here(self) -> dict[int, _Link]:
        """Returns the links of the workers that have said hello, by their number."""
        return {link.number: link for link in self._links if link.number >= 0}

    def _name(self, number: int) -> str:
        """Returns a worker's name with its address; if that is unknown, where it called from."""
        name, address = self._members[number]
        link = self._here().get(number)
        is_unknown = address.partition(":")[0].endswith(_UNKNOWN_HOST)
        return f"{name} ({link.caller if link is not None and is_unknown else address})"

    def _missing(self, here: dict[int, _Link]) -> dict[str, Any]:
        names = range(len(self._members))
        return {
            "missing": [self._name(number) for number in names if number not in here],
            "joined": [self._members[number][0] for number in names if number in here],
        }

    def _tell_who_is_missing(self, here: dict[int, _Link]) -> None:
        """Tells those who are here for whom they wait; a program in a terminal shows it."""
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_SECONDS
            missing = self._missing(here)["missing"]
            more = [f"{len(missing) - _MOST_NAMED} more"] if len(missing) > _MOST_NAMED else []
            for link in here.values():
                link.send({"waiting": missing[:_MOST_NAMED] + more})

    def _disagreement(self, number: int) -> str:
        return (
            f"{self._name(number)} and {self._name(0)} have different cluster specs. Give every "
            "task the same `cluster` (in TF_CONFIG), and only its own `task`."
        )

    def _describe_duplicate(self, number: int, link: _Link) -> str:
        return (
            f"{self._name(number)} has joined already: two processes have called as this worker, "
            f"from {self._here()[number].caller} and now from {link.caller}. Give every process "
            "a task of its own: another index in TF_CONFIG, or another RANK."
        )


def main() -> None:
    """Takes its settings as JSON from its standard input; goes on in the background."""
    # Not from the command line, which everybody can read: the secret is among them.
    settings = json.load(sys.stdin)
    service_file, gate_file = settings.pop("service"), settings.pop("gate")
    sys.path[:] = settings.pop("path")
    listener = socket.socket(fileno=settings.pop("listener"))
    if os.fork():
        # Whoever has started this process need not wait for the hub, nor ever learn of its end.
        os._exit(0)
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    # These are for the workers. The hub ends when they have.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    secret, cluster = settings.pop("secret"), settings.pop("cluster")
    gate = runpy.run_path(gate_file)["Gate"](secret, cluster, len(settings["members"]))
    own = (listener.getsockname()[0], 0)
    with socket.create_server(own, family=listener.family) as probe:
        address = f"{settings.pop('host')}:{probe.getsockname()[1]}"
    hub = Hub(listener, gate=gate, **settings)

    def start_service() -> object:
        return runpy.run_path(service_file)["start_service"](address, len(settings["members"]))

    # In a thread, as the import takes a while. What this returns keeps the service running.
    service = ThreadPoolExecutor().submit(start_service)
    if hub.meet(address, service):
        hub.watch()
    hub.close()
    os._exit(0)


if __name__ == "__main__":
    main()
