"""How a worker and the hub prove to each other that they have the cluster's secret.

The hub greets with a random challenge. The worker answers with its number, a challenge of its own,
a digest of what it believes the cluster to be, and an HMAC of all that; the hub with an HMAC of
both challenges. All messages have a fixed size, and nothing is parsed before the proof. Without a
secret the same messages are exchanged, but they prove nothing. On a loopback address, Linux then
tells who owns the other end of a connection, and other users are refused.

The hub loads this file by its path: it imports nothing of distribax.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import sys
from typing import Any, Final, NamedTuple

PROOF_SECONDS: Final = 10.0
"""How long a proof may take, however its bytes come."""

_GREETING: Final = b"distribax-hub-1\n"
_SIZE: Final = 32
_CLAIM: Final = struct.Struct("<I32s32s")
_ACCEPTED: Final = b"+"
_REFUSED: Final = b"-" + bytes(_SIZE)
_ESTABLISHED: Final = "01"
_LISTENING: Final = "0A"

GREETING_SIZE: Final = len(_GREETING) + _SIZE
HELLO_SIZE: Final = _CLAIM.size + _SIZE
REPLY_SIZE: Final = 1 + _SIZE


class Admission(NamedTuple):
    """Who has called the hub.

    Attributes:
        reply: What to answer.
        number: The worker's number; None for somebody without the secret.
        agrees: Whether it believes the same of the cluster as the hub.
    """

    reply: bytes
    number: int | None = None
    agrees: bool = False


class Gate:
    """The hub's side.

    Args:
        secret: What workers have to know; empty if everybody may join.
        cluster: A description of the cluster, on which all workers must agree.
        num_workers: How many there are.

    Attributes:
        hello_size: The size of a worker's answer, in bytes.
        proof_seconds: How long its proof may take, however its bytes come.
    """

    def __init__(self, secret: str, cluster: str, num_workers: int) -> None:
        self._secret = secret
        self._digest = _make_digest(cluster)
        self._num_workers = num_workers
        self.hello_size = HELLO_SIZE
        self.proof_seconds = PROOF_SECONDS

    def greet(self, connection: socket.socket | None = None) -> bytes:
        """Returns what to say first; it has another challenge for each caller.

        Args:
            connection: The connection with the caller, to refuse other users.

        Raises:
            PermissionError: There is no secret, and it is another user of this machine.
        """
        if connection is not None and not self._secret:
            _refuse_other_user(connection)
        return _GREETING + os.urandom(_SIZE)

    def check(self, greeting: bytes, hello: bytes) -> Admission:
        """Returns who has answered a greeting like this."""
        if len(hello) != HELLO_SIZE:
            return Admission(_REFUSED)
        claim, proof = hello[:-_SIZE], hello[-_SIZE:]
        number, _, digest = _CLAIM.unpack(claim)
        expected = _make_proof(self._secret, b"worker", greeting + claim)
        if not hmac.compare_digest(proof, expected) or number >= self._num_workers:
            return Admission(_REFUSED)
        reply = _ACCEPTED + _make_proof(self._secret, b"hub", greeting + claim)
        return Admission(reply, number, digest == self._digest)


class Introduction:
    """A worker's side.

    Args:
        secret: The secret, or an empty text.
        greeting: What the hub has said.
        number: The worker's number.
        cluster: Its description of the cluster.
    """

    def __init__(self, secret: str, greeting: bytes, number: int, cluster: str) -> None:
        self.is_hub = greeting.startswith(_GREETING)
        """Whether it is a hub that has greeted."""
        claim = _CLAIM.pack(number, os.urandom(_SIZE), _make_digest(cluster))
        self.hello = claim + _make_proof(secret, b"worker", greeting + claim)
        """What to answer."""
        self._expected = _ACCEPTED + _make_proof(secret, b"hub", greeting + claim)

    def is_proved_by(self, reply: bytes) -> bool:
        """Tells whether the hub has the same secret."""
        return hmac.compare_digest(reply, self._expected)


def _refuse_other_user(connection: socket.socket) -> None:
    if not is_own_socket(connection.getpeername(), connection.getsockname()):
        connection.close()
        raise PermissionError("another user of this machine calls")


def is_own_socket(address: Any, peer: Any = None) -> bool:
    """Tells whether a socket at a loopback address is this user's, or root's.

    Args:
        address: Its address, as the socket module has it.
        peer: The address of the other end; None for a socket that listens.

    Returns:
        Whether it is; also if it is not a loopback address, or the system does not tell.
    """
    host = str(address[0])
    if not host.startswith("127.") and host != "::1":
        return True
    try:
        with open("/proc/net/tcp6" if ":" in host else "/proc/net/tcp") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        rows = []
    if not rows:  # Some sandboxes hide them.
        return True
    places = {_write_address(address)}
    if peer is None:
        places.add(_write_address(("::" if ":" in host else "0.0.0.0", address[1])))
    # Not one that was closed: nobody owns it, and root's number is shown.
    wanted = _LISTENING if peer is None else f"{_write_address(peer)} {_ESTABLISHED}"
    found = [
        int(row[7]) for row in rows if row[1] in places and wanted in (row[3], f"{row[2]} {row[3]}")
    ]
    return bool(found) and {0, os.geteuid()}.issuperset(found)


def _write_address(address: Any) -> str:
    """Returns an address as Linux writes it in its tables."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    packed = socket.inet_pton(family, address[0])
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{address[1]:04X}"


def _make_digest(cluster: str) -> bytes:
    return hashlib.sha256(cluster.encode()).digest()


def _make_proof(secret: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + said, hashlib.sha256)
