"""Meeting the other workers before JAX connects them, with a bounded wait and names.

JAX's own start ends the process when a worker is missing. So the workers meet first: the leader
listens on its address, the others call it, and whoever is missing at the end is named to all. The
connections stay open: over them the workers see that the others are still there.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from distribax.errors import DistribaxError

_PAUSE_SECONDS: Final = 0.2
_MAX_MESSAGE: Final = 65536
# What stands for the host of a worker whose address nobody has told.
_UNKNOWN_HOST: Final = ".invalid"


class ClusterTimeoutError(DistribaxError, RuntimeError):
    """Workers did not join in time; `missing` and `joined` name them."""

    def __init__(self, missing: Sequence[str], joined: Sequence[str], seconds: float) -> None:
        self.missing = tuple(missing)
        self.joined = tuple(joined)
        self.seconds = seconds
        did = ", ".join(missing)
        super().__init__(
            f"{did} did not join within {seconds:g} s; joined: {', '.join(joined) or 'nobody'}. "
            "Start the missing ones, check that their addresses can be reached from here, or wait "
            "longer: dx.MultiWorkerMirroredStrategy(join_timeout_seconds=...)."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.missing, self.joined, self.seconds)


@dataclass(frozen=True)
class Member:
    """One worker: its name in messages and its address; port 0 if that is not known."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}" if self.port else self.host
        return f"{self.name} ({where})"


@dataclass(frozen=True)
class Meeting:
    """What the members have agreed on, and the connections over which they did.

    Attributes:
        address: Of JAX's coordination service, in the leader's process.
        peer_timeout: After how many seconds of silence a member counts as lost; the leader's word.
        members: All of them, in their order.
        own: Which of them this process is.
        links: The open connections, by the number of the member at the other end: the leader's to
            all others, and theirs to the leader.
    """

    address: str
    peer_timeout: float
    members: Sequence[Member]
    own: int
    links: Mapping[int, socket.socket]


def meet(
    members: Sequence[Member], own: int, seconds: float, cluster: str, peer_timeout: float
) -> Meeting:
    """Waits until all members are here.

    `cluster` is a text that all must agree on: what they believe the cluster to be.
    """
    deadline = time.monotonic() + seconds
    if own == 0:
        return _lead(members, deadline, seconds, cluster, peer_timeout)
    return _follow(members, own, deadline, seconds, cluster)


def _lead(
    members: Sequence[Member], deadline: float, seconds: float, cluster: str, peer_timeout: float
) -> Meeting:
    leader = members[0]
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(leader))
        connections = stack.enter_context(contextlib.ExitStack())
        while len(here) < len(members) - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, min(_PAUSE_SECONDS, deadline - time.monotonic())))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connections.callback(connection.close)
            hello = _receive(connection, deadline)
            number = hello.get("worker")
            if not isinstance(number, int) or not 0 < number < len(members):
                connection.close()  # Something else has called this port.
                continue
            if hello.get("cluster") != cluster:
                _send(connection, {"error": _disagreement(members[number], leader)})
                raise ValueError(_disagreement(members[number], leader))
            here[number] = connection
        missing = [str(m) for i, m in enumerate(members) if i and i not in here]
        if missing:
            joined = [
                m.name
                for i, m in enumerate(members)
                if i not in range(1, len(members)) or i in here
            ]
            for connection in here.values():
                _send(connection, {"missing": missing, "joined": joined})
            raise ClusterTimeoutError(missing, joined, seconds)
        address = f"{leader.host}:{_free_port(leader.host)}"
        for connection in here.values():
            _send(connection, {"address": address, "peer_timeout": peer_timeout})
        connections.pop_all()
    seen = [_seen(member, here.get(i)) for i, member in enumerate(members)]
    return Meeting(address, peer_timeout, seen, 0, here)


def _follow(
    members: Sequence[Member], own: int, deadline: float, seconds: float, cluster: str
) -> Meeting:
    leader = members[0]
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(
                (leader.host, leader.port), timeout=_PAUSE_SECONDS
            )
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            _send(connection, {"worker": own, "cluster": cluster})
            # The leader knows who is missing; it is given a little longer to say so.
            answer = _receive(connection, deadline + 5.0)
            if "address" in answer:
                stack.pop_all()
                timeout = float(answer["peer_timeout"])
                return Meeting(answer["address"], timeout, members, own, {0: connection})
        if "error" in answer:
            raise ValueError(answer["error"])
        if "missing" in answer:
            raise ClusterTimeoutError(answer["missing"], answer["joined"], seconds)
        time.sleep(_PAUSE_SECONDS)
    raise ClusterTimeoutError([str(leader)], [members[own].name], seconds)


def _seen(member: Member, connection: socket.socket | None) -> Member:
    """Returns the member with the host that it has called from, if nobody has told its address."""
    if connection is None or not member.host.endswith(_UNKNOWN_HOST):
        return member
    with contextlib.suppress(OSError):
        return replace(member, host=connection.getpeername()[0], port=0)
    return member


def _listener(leader: Member) -> socket.socket:
    try:
        return socket.create_server((leader.host, leader.port))
    except OSError as error:
        raise RuntimeError(
            f"{leader} cannot listen on its address: {error}. Is another program using the port, "
            "or is the address another machine's? Free it, or give the cluster another port."
        ) from error


def _disagreement(member: Member, leader: Member) -> str:
    return (
        f"{member} and {leader} have different cluster specs. Give every task the same `cluster` "
        "(in TF_CONFIG), and only its own `task`."
    )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # A peer that has gone finds out by itself, or is named as missing.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Returns one message; an empty one if the peer says nothing in time or nonsense."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_MESSAGE:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            # What follows the message belongs to somebody else.
            ahead = connection.recv(4096, socket.MSG_PEEK)
            part = connection.recv(ahead.find(b"\n") + 1 or len(ahead)) if ahead else b""
        except OSError:
            return {}
        if not part:
            break
        data += part
    try:
        message = json.loads(data)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
