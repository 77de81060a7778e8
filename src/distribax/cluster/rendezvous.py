"""Meeting the other workers before JAX connects them, with a bounded wait and names.

JAX's own start ends the process when a worker is missing. So the workers meet first: the leader
listens on its address, the others call it, and whoever is missing at the end is named to all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_PAUSE_SECONDS: Final = 0.2
_MAX_MESSAGE: Final = 65536


class ClusterTimeoutError(RuntimeError):
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
    """One worker: its name in messages and its address."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} ({self.host}:{self.port})"


def meet(members: Sequence[Member], own: int, seconds: float, cluster: str) -> str:
    """Waits until all members are here; returns the address for JAX's coordination service.

    `cluster` is a text that all must agree on: what they believe the cluster to be.
    """
    deadline = time.monotonic() + seconds
    if own == 0:
        return _lead(members, deadline, seconds, cluster)
    return _follow(members, own, deadline, seconds, cluster)


def _lead(members: Sequence[Member], deadline: float, seconds: float, cluster: str) -> str:
    leader = members[0]
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(leader))
        while len(here) < len(members) - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, min(_PAUSE_SECONDS, deadline - time.monotonic())))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            stack.callback(connection.close)
            hello = _receive(connection, deadline)
            number = hello.get("worker")
            if not isinstance(number, int) or not 0 < number < len(members):
                continue  # Something else has called this port.
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
            _send(connection, {"address": address})
    return address


def _follow(
    members: Sequence[Member], own: int, deadline: float, seconds: float, cluster: str
) -> str:
    leader = members[0]
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(
                (leader.host, leader.port), timeout=_PAUSE_SECONDS
            )
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            continue
        with connection:
            _send(connection, {"worker": own, "cluster": cluster})
            # The leader knows who is missing; it is given a little longer to say so.
            answer = _receive(connection, deadline + 5.0)
        if "address" in answer:
            return str(answer["address"])
        if "error" in answer:
            raise ValueError(answer["error"])
        if "missing" in answer:
            raise ClusterTimeoutError(answer["missing"], answer["joined"], seconds)
        time.sleep(_PAUSE_SECONDS)
    raise ClusterTimeoutError([str(leader)], [members[own].name], seconds)


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
            part = connection.recv(4096)
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
