"""Meeting the other workers before JAX connects them, with a bounded wait and names.

JAX's own start ends the process when a worker is missing. So the workers meet first: the first one
starts the hub, which listens on its address, all of them call it, and whoever is missing at the end
is named to all. The connections stay open: over them the workers are watched.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from distribax import progress
from distribax.cluster.exact_read import receive_exactly
from distribax.cluster.missing_tasks import MissingTasks
from distribax.cluster.peers import hub_main
from distribax.cluster.peers.cluster_secret import (
    SECRET_VARIABLE,
    ClusterSecretError,
    find_secret,
    warn_without_secret,
)
from distribax.cluster.peers.gate import (
    GREETING_SIZE,
    PROOF_SECONDS,
    REPLY_SIZE,
    Introduction,
    is_own_socket,
)
from distribax.cluster.peers.hub_messages import MeetingMessage
from distribax.cluster.spec.address import Address
from distribax.cluster.spec.host_address import listen
from distribax.errors import DetailedError
from distribax.jax_private import coordination_service

JOIN_TIMEOUT_VARIABLE: Final = "DISTRIBAX_JOIN_TIMEOUT"
"""Tells how many seconds a worker waits for the others at the start."""

_PAUSE_SECONDS: Final = 0.2
# The hub knows who is missing; it is given a little longer to say so.
_ANSWER_SECONDS: Final = 5.0
_MAX_MESSAGE: Final = 1 << 20
_BACKLOG: Final = 1024


class ClusterTimeoutError(DetailedError, RuntimeError):
    """Workers did not join in time; `missing` and `joined` name them."""

    def __init__(self, missing: Sequence[str], joined: Sequence[str], seconds: float) -> None:
        self.missing = tuple(missing)
        self.joined = tuple(joined)
        self.seconds = seconds
        absent, present = ", ".join(missing), ", ".join(joined) or "nobody"
        super().__init__(
            f"{absent} did not join within {seconds:g} s; joined: {present}. "
            "Start the missing ones, check that their addresses can be reached from here, or wait "
            "longer: dx.MultiWorkerMirroredStrategy(join_timeout_seconds=...), or "
            f"{JOIN_TIMEOUT_VARIABLE} in the environment."
        )


@dataclass(frozen=True)
class Member:
    """One worker: its name in messages and its address; port 0 if that is not known."""

    name: str
    host: str
    port: int

    @property
    def address(self) -> Address:
        """Where it is."""
        return Address(self.host, self.port or None)

    @override
    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Meeting:
    """What the workers have agreed on, and the connection over which this one did.

    Attributes:
        address: Of JAX's coordination service.
        peer_timeout: After how many seconds of silence a worker counts as lost; the first worker
            decides.
        members: The names of all workers, with their addresses, in their order.
        own: Which of them this process is.
        connection: The connection to the hub.
        host: The address by which the others reach this worker.
    """

    address: str
    peer_timeout: float
    members: Sequence[str]
    own: int
    connection: socket.socket
    host: str


def meet(
    members: Sequence[Member],
    own: int,
    seconds: float,
    cluster: str,
    peer_timeout: float,
    own_host: str | None = None,
) -> Meeting:
    """Waits until all members are here.

    `cluster` is a description of the cluster, on which all must agree. `own_host` is the address by
    which the others reach this machine, if its name means another one here.
    """
    with progress.show("joining the cluster") as wait:
        deadline = time.monotonic() + seconds
        leader, secret = members[0], find_secret()
        hub_host = leader.host
        if own == 0:
            hub_host = own_host or leader.host
            if not secret:
                warn_without_secret(leader.host)
            _start_hub(members, secret, seconds, cluster, peer_timeout, hub_host)
        missing = MissingTasks(wait, deadline)
        while time.monotonic() < deadline:
            missing.tell(str(leader))
            try:
                connection = socket.create_connection(
                    (hub_host, leader.port), timeout=_PAUSE_SECONDS
                )
            except OSError:
                time.sleep(_PAUSE_SECONDS)
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                answer: MeetingMessage = {}
                if _prove(connection, own, cluster, secret):
                    answer = _receive_answer(connection, deadline + _ANSWER_SECONDS, missing.tell)
                if "address" in answer:
                    stack.pop_all()
                    timeout = float(answer["peer_timeout"])
                    # Nobody may have told it: then it is the one that the hub is reached from.
                    host = own_host or connection.getsockname()[0]
                    return Meeting(
                        answer["address"], timeout, answer["members"], own, connection, host
                    )
            if "error" in answer:
                raise ValueError(answer["error"])
            if "failed" in answer:
                raise RuntimeError(answer["failed"])
            if "missing" in answer:
                raise ClusterTimeoutError(answer["missing"], answer["joined"], seconds)
            time.sleep(_PAUSE_SECONDS)
    raise ClusterTimeoutError([str(leader)], [members[own].name], seconds)


def _start_hub(
    members: Sequence[Member],
    secret: str,
    seconds: float,
    cluster: str,
    peer_timeout: float,
    host: str,
) -> None:
    """Starts the hub in a process of its own; returns when it listens."""
    try:
        listener = listen(host, members[0].port, _BACKLOG)
    except OSError as error:
        raise RuntimeError(
            f"{members[0]} cannot listen on its address: {error}. Is another program using the "
            "port, or is the address another machine's? Free it, or give the cluster another port."
        ) from error
    settings = {
        "secret": secret,
        "listener": listener.fileno(),
        "members": [(member.name, str(member.address)) for member in members],
        "cluster": cluster,
        "seconds": seconds,
        "peer_timeout": peer_timeout,
        "host": str(Address(host)),
        "service": coordination_service.__file__,
        "path": sys.path,
    }
    with listener:
        subprocess.run(
            # Without what others have the interpreter do at its start, which may take long.
            [sys.executable, "-I", "-S", hub_main.__file__],
            input=json.dumps(settings).encode(),
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            # Whoever ends this worker with all that it has started must not end the others.
            start_new_session=True,
            check=True,
        )


def _prove(connection: socket.socket, own: int, cluster: str, secret: str) -> bool:
    """Proves to the hub that this worker has the secret, and has the hub prove the same.

    Returns:
        Whether it is a hub that answers; something else may listen there until the hub does.

    Raises:
        ClusterSecretError: They do not have the same secret.
    """
    deadline = time.monotonic() + PROOF_SECONDS
    try:
        if not secret and not is_own_socket(connection.getpeername()):
            return False  # Another user of this machine may pretend to be the first worker.
        greeting = receive_exactly(connection, GREETING_SIZE, deadline)
        introduction = Introduction(secret, greeting, own, cluster)
        if not introduction.is_hub:
            return False
        connection.sendall(introduction.hello)
        reply = receive_exactly(connection, REPLY_SIZE, deadline)
    except OSError:
        return False
    if not introduction.is_proved_by(reply):
        raise ClusterSecretError(
            "the first worker and this one do not have the same secret"
            f"{'' if secret else '; this one has none'}. Give all workers of a cluster the same "
            f"one, in {SECRET_VARIABLE} or in the file that {SECRET_VARIABLE}_FILE names."
        )
    return True


def _receive_answer(
    connection: socket.socket, deadline: float, tell: Callable[[str], None]
) -> MeetingMessage:
    """Returns the hub's answer; an empty one if it says nothing in time, or nonsense.

    Until then the hub says who is missing, and `tell` is given it.
    """
    try:
        while True:
            message: MeetingMessage = json.loads(_read_line(connection, deadline))
            if not isinstance(message, dict):
                return {}
            if "waiting" not in message:
                return message
            tell(", ".join(map(str, message["waiting"])))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_MESSAGE:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        # What follows the answer is for the watch.
        ahead = connection.recv(4096, socket.MSG_PEEK)
        if not ahead:
            break
        data += connection.recv(ahead.find(b"\n") + 1 or len(ahead))
    return data
