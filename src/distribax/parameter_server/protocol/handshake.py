"""How a client and a server prove to each other that they have the cluster's token.

Both send a random challenge and answer the other's with an HMAC of both; the token itself never
travels. All messages have a fixed size, nothing is parsed before the proof, and all of it has one
time limit. What follows is not encrypted: across machines use a network that you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Final

from distribax.cluster.exact_read import receive_exactly
from distribax.errors import DistribaxError

_GREETING: Final = b"distribax-parameters-2\n"
_NONCE: Final = 32
_ACCEPTED: Final = b"+"
_REFUSED: Final = b"-"
HANDSHAKE_SECONDS: Final = 10.0
"""How long meeting may take, however the other side spreads its bytes."""


class WrongTokenError(DistribaxError, PermissionError):
    """The other side does not have the same token."""


def welcome(connection: socket.socket, token: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
    """The server's side; leaves the connection without a time limit.

    Args:
        connection: The connection with a client.
        token: The cluster's secret.
        seconds: How long all of it may take.

    Raises:
        WrongTokenError: The client does not know the token.
        ConnectionError: The client has closed the connection.
        TimeoutError: The client has not answered in time.
    """
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    check_peer(connection)
    own = os.urandom(_NONCE)
    connection.sendall(_GREETING + own)
    answer = receive_exactly(connection, _NONCE + 32, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _make_proof(token, b"client", own, theirs)):
        connection.sendall(_REFUSED + bytes(32))
        raise WrongTokenError("a client without the cluster's token has called")
    connection.sendall(_ACCEPTED + _make_proof(token, b"server", own, theirs))
    connection.settimeout(None)


def introduce(connection: socket.socket, token: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
    """The client's side; leaves the connection with the time limit that it had.

    Args:
        connection: The connection with a server.
        token: The cluster's secret.
        seconds: How long all of it may take.

    Raises:
        WrongTokenError: The server does not have the same token.
        ConnectionError: It is no parameter server, or has closed the connection.
        TimeoutError: The server has not answered in time.
    """
    before, deadline = connection.gettimeout(), time.monotonic() + seconds
    check_peer(connection)
    greeting = receive_exactly(connection, len(_GREETING) + _NONCE, deadline)
    if not greeting.startswith(_GREETING):
        raise ConnectionError(f"not a parameter server: it says {greeting!r}")
    theirs, own = greeting[len(_GREETING) :], os.urandom(_NONCE)
    connection.sendall(own + _make_proof(token, b"client", theirs, own))
    answer = receive_exactly(connection, 1 + 32, deadline)
    if answer[:1] != _ACCEPTED:
        raise WrongTokenError("the server has another token")
    if not hmac.compare_digest(answer[1:], _make_proof(token, b"server", theirs, own)):
        raise WrongTokenError("what answers there does not have the token")
    connection.settimeout(before)


def check_peer(connection: socket.socket) -> None:
    """Raises a PermissionError if a unix socket's other end belongs to another user."""
    if connection.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"the other end belongs to user {user}, expected {os.getuid()}")


def _make_proof(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, side + server_nonce + client_nonce, hashlib.sha256)
