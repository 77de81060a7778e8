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
from typing import TYPE_CHECKING, Any


def _load(name: str) -> dict[str, Any]:
    """Returns what a file of this folder defines."""
    return runpy.run_path(os.path.join(os.path.dirname(__file__), name))


if TYPE_CHECKING or __package__:
    from distribax.cluster.peers import hub_messages as messages
    from distribax.cluster.peers.gate import Gate
    from distribax.cluster.peers.hub_messages import LossReason, WorkerProgress
else:  # It was started by its path.
    _loaded = _load("hub_messages.py")
    LossReason, WorkerProgress = _loaded["LossReason"], _loaded["WorkerProgress"]

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


class _Peer:
    """A worker that has called; its number is known when it has proved who it is."""

    def __init__(self, connection: socket.socket, caller: str, greeting: bytes) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.caller = caller
        self.greeting = greeting
        self.number = -1
        self.unread = b""
        self.heard = time.monotonic()
        self.at: WorkerProgress | None = None
        # Where other workers call this one, and whom it does not hear.
        self.reach: tuple[str, int] | None = None
        self.unreachable: dict[int, float] = {}

    def send(self, message: messages.HubMessage) -> None:
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
        gate: Gate,
        seconds: float,
        peer_timeout: float,
    ) -> None:
        self._listener = listener
        self._members = members
        self._gate = gate
        self._seconds = seconds
        self._peer_timeout = peer_timeout
        self._peers: list[_Peer] = []
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
        trouble: messages.Missing | messages.Mistake | None = None
        while len(here := self._find_present()) < len(self._members):
            left = deadline - time.monotonic()
            if left <= 0:
                trouble = trouble or self._find_missing(here)
            if trouble is not None:
                for peer in here.values():
                    peer.send(trouble)
                # The first worker must hear it: it has started the hub.
                if left <= 0 or 0 in here:
                    return False
            self._tell_who_is_missing(here)
            self._drop_strangers(self._gate.proof_seconds)
            wait = min(max(left, 0.0), _TELL_SECONDS, self._gate.proof_seconds)
            for peer, message in self._receive(wait):
                if message is None or "agrees" not in message or peer.number >= 0:
                    self._drop(peer)  # Something else has called this port, or a worker has left.
                    if peer.number == 0:
                        return False  # It starts a hub of its own when it is started again.
                elif not message["agrees"]:
                    trouble = {"error": self._describe_disagreement(message["worker"])}
                    peer.send(trouble)
                elif message["worker"] in self._find_present():
                    peer.send({"error": self._describe_duplicate(message["worker"], peer)})
                    self._drop(peer)
                else:
                    peer.number, peer.heard = message["worker"], time.monotonic()
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
        for peer in self._peers:
            peer.heard = time.monotonic()
        return True

    def watch(self) -> None:
        """Tells all workers when one is lost or has ended; returns when they have left."""
        interval = min(_LONGEST_BEAT_SECONDS, self._peer_timeout / _BEATS_PER_TIMEOUT)
        last = next_beat = time.monotonic()
        while self._peers and last < self._leave_at:
            for peer, message in self._receive(interval / 2):
                try:
                    self._hear(peer, message)
                except _MALFORMED:  # No worker says that.
                    self._hear(peer, None)
            now = time.monotonic()
            if now - last > self._peer_timeout / 2:
                # It is this process that was away: the others may have had no chance to be heard.
                for peer in self._peers:
                    peer.heard = now
            last = now
            if now >= next_beat:
                next_beat = now + interval
                self._tell_all({})
                self._compare()
                self._look_at_pairs(now)
            for peer in self._peers:
                if now - peer.heard > self._peer_timeout and peer.number not in self._done:
                    self._lose(peer.number, LossReason.SILENT, seconds=now - peer.heard)

    def close(self) -> None:
        """Closes all connections."""
        for peer in list(self._peers):
            self._drop(peer)
        self._listener.close()
        self._selector.close()

    def _hear(self, peer: _Peer, message: messages.WorkerMessage | None) -> None:
        if message is None:
            self._drop(peer)
            if peer.number not in self._done:
                self._lose(peer.number, LossReason.DIED)
        elif "failed" in message:
            self._lose(peer.number, LossReason.FAILED, text=str(message["failed"]))
        elif "done" in message:
            self._done.add(peer.number)
            self._tell_all({"done": sorted(self._done)})
        elif "reach" in message:
            host, port = message["reach"]
            peer.reach = host, port
            self._introduce()
        elif "unreachable" in message:
            peer.unreachable[int(message["unreachable"])] = float(message["seconds"])
        elif "reachable" in message:
            peer.unreachable.pop(int(message["reachable"]), None)
        elif "at" in message:
            peer.at = WorkerProgress(message["at"])
            if message.get("ask"):
                peer.send({"places": self._list_places(sorted(self._find_present()))})

    def _introduce(self) -> None:
        """Tells all workers where the others can be called, once that is known of all."""
        here = self._find_present()
        places = [place for number in sorted(here) if (place := here[number].reach) is not None]
        if len(places) == len(self._members):
            self._tell_all({"peers": places, "key": secrets.token_hex(16)})

    def _look_at_pairs(self, now: float) -> None:
        """Tells all workers if two of them do not hear each other, although the hub hears both."""
        here = self._find_present()
        for number, peer in here.items():
            for other, seconds in peer.unreachable.items():
                pair = sorted((number, other))
                heard = [now - here[each].heard for each in pair if each in here]
                is_heard = len(heard) == 2 and max(heard) < self._peer_timeout / 2
                if is_heard and not self._done.intersection(pair):
                    self._lose(pair[0], LossReason.PAIR, seconds=seconds, other=pair[1])

    def _compare(self) -> None:
        """Tells all workers if they do not make the same calls, or wait for one that is late."""
        known = {n: peer.at for n, peer in self._find_present().items() if peer.at is not None}
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

    def _find_apart(self, known: dict[int, WorkerProgress]) -> list[int]:
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
        present = self._find_present()
        places = [
            f"{self._name(number)} {at.describe()}"
            for number in numbers[:_MOST_NAMED]
            if (at := present[number].at) is not None
        ]
        left_out = len(numbers) - _MOST_NAMED
        return places + ([f"and {left_out} others"] if left_out > 0 else [])

    def _lose(
        self,
        number: int,
        how: LossReason,
        text: str = "",
        seconds: float = 0.0,
        other: int | None = None,
    ) -> None:
        # What follows the first loss is its consequence.
        if self._leave_at == math.inf:
            self._leave_at = time.monotonic() + _LEAVE_SECONDS
            lost: messages.LostWorker
            lost = {"lost": number, "how": how, "text": text, "seconds": seconds, "with": other}
            self._tell_all(lost)

    def _tell_all(self, message: messages.HubMessage) -> None:
        for peer in self._peers:
            peer.send(message)

    def _receive(self, seconds: float) -> Iterator[tuple[_Peer, messages.WorkerMessage | None]]:
        """Yields the messages that come in that time, and None for the end of a connection."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):
                    connection, (caller, *_) = self._listener.accept()
                    peer = _Peer(connection, caller, self._gate.greet(connection))
                    peer.send_bytes(peer.greeting)
                    self._peers.append(peer)
                    self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            elif key.data in self._peers:
                yield from self._read(key.data)

    def _read(self, peer: _Peer) -> Iterator[tuple[_Peer, messages.WorkerMessage | None]]:
        try:
            data = peer.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if peer.number < 0:
            peer.unread += data
            if not data or len(peer.unread) >= self._gate.hello_size:
                yield peer, self._check_hello(peer)
            return
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        try:
            for line in lines:
                message: messages.WorkerMessage = json.loads(line)
                yield peer, message if isinstance(message, dict) else None
        except (ValueError, RecursionError):
            data = b""
        if not data or len(peer.unread) > _LONGEST_LINE:
            yield peer, None

    def _check_hello(self, peer: _Peer) -> messages.Hello | None:
        """Returns what a caller has proved; None for strangers."""
        hello, peer.unread = peer.unread, b""
        reply, number, agrees = self._gate.check(peer.greeting, hello)
        peer.send_bytes(reply)
        return None if number is None else {"worker": number, "agrees": agrees}

    def _drop_strangers(self, seconds: float) -> None:
        """Ends connections without a proof: those that are old, and the oldest if there are many.

        So strangers cannot keep a worker out: neither by silence nor by their number.
        """
        since = time.monotonic() - seconds
        strangers = [peer for peer in self._peers if peer.number < 0]
        for place, peer in enumerate(strangers):
            if peer.heard < since or place < len(strangers) - _MOST_STRANGERS:
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    # Names.

    def _find_present(self) -> dict[int, _Peer]:
        """Returns the workers that have said hello, by their number."""
        return {peer.number: peer for peer in self._peers if peer.number >= 0}

    def _name(self, number: int) -> str:
        """Returns a worker's name with its address; if that is unknown, where it called from."""
        name, address = self._members[number]
        peer = self._find_present().get(number)
        is_unknown = address.partition(":")[0].endswith(_UNKNOWN_HOST)
        return f"{name} ({peer.caller if peer is not None and is_unknown else address})"

    def _find_missing(self, here: dict[int, _Peer]) -> messages.Missing:
        names = range(len(self._members))
        return {
            "missing": [self._name(number) for number in names if number not in here],
            "joined": [self._members[number][0] for number in names if number in here],
        }

    def _tell_who_is_missing(self, here: dict[int, _Peer]) -> None:
        """Tells those who are here for whom they wait; a program in a terminal shows it."""
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_SECONDS
            missing = self._find_missing(here)["missing"]
            more = [f"{len(missing) - _MOST_NAMED} more"] if len(missing) > _MOST_NAMED else []
            for peer in here.values():
                peer.send({"waiting": missing[:_MOST_NAMED] + more})

    def _describe_disagreement(self, number: int) -> str:
        return (
            f"{self._name(number)} and {self._name(0)} have different cluster specs. Give every "
            "task the same `cluster` (in TF_CONFIG), and only its own `task`."
        )

    def _describe_duplicate(self, number: int, peer: _Peer) -> str:
        return (
            f"{self._name(number)} has joined already: two processes have called as this worker, "
            f"from {self._find_present()[number].caller} and now from {peer.caller}. Give every "
            "process a task of its own: another index in TF_CONFIG, or another RANK."
        )


def main() -> None:
    """Takes its settings as JSON from its standard input; goes on in the background."""
    # Not from the command line, which everybody can read: the secret is among them.
    settings = json.load(sys.stdin)
    service_file = settings.pop("service")
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
    gate: Gate = _load("gate.py")["Gate"](secret, cluster, len(settings["members"]))
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
