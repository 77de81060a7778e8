"""How a worker and the hub prove to each other that they have the cluster's secret.

The hub greets with a random challenge. The worker answers with its number, a challenge of its own,
a digest of what it believes the cluster to be, and an HMAC of all that; the hub with an HMAC of
both challenges. All messages have a fixed size, and nothing is parsed before the proof. Without a
secret the same is said, and proves nothing.

The hub loads this file by its path: it imports nothing of distribax.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Final, NamedTuple

PROOF_SECONDS: Final = 10.0
"""How long a proof may take, however its bytes come."""

_GREETING: Final = b"distribax-hub-1\n"
_SIZE: Final = 32
_CLAIM: Final = struct.Struct("<I32s32s")
_ACCEPTED: Final = b"+"
_REFUSED: Final = b"-" + bytes(_SIZE)

GREETING_SIZE: Final = len(_GREETING) + _SIZE
HELLO_SIZE: Final = _CLAIM.size + _SIZE
REPLY_SIZE: Final = 1 + _SIZE


class Caller(NamedTuple):
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
        cluster: What all workers must believe the cluster to be.
        num_workers: How many there are.

    Attributes:
        hello_size: How many bytes a worker answers.
        proof_seconds: How long its proof may take, however its bytes come.
    """

    def __init__(self, secret: str, cluster: str, num_workers: int) -> None:
        self._secret = secret
        self._digest = _make_digest(cluster)
        self._num_workers = num_workers
        self.hello_size = HELLO_SIZE
        self.proof_seconds = PROOF_SECONDS

    def greet(self) -> bytes:
        """Returns what to say first; it has another challenge for each caller."""
        return _GREETING + os.urandom(_SIZE)

    def check(self, greeting: bytes, hello: bytes) -> Caller:
        """Returns who has answered a greeting like this."""
        if len(hello) != HELLO_SIZE:
            return Caller(_REFUSED)
        claim, proof = hello[:-_SIZE], hello[-_SIZE:]
        number, _, digest = _CLAIM.unpack(claim)
        expected = _make_proof(self._secret, b"worker", greeting + claim)
        if not hmac.compare_digest(proof, expected) or number >= self._num_workers:
            return Caller(_REFUSED)
        reply = _ACCEPTED + _make_proof(self._secret, b"hub", greeting + claim)
        return Caller(reply, number, digest == self._digest)


class Introduction:
    """A worker's side.

    Args:
        secret: The secret, or an empty text.
        greeting: What the hub has said.
        number: The worker's number.
        cluster: What it believes the cluster to be.
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


def _make_digest(cluster: str) -> bytes:
    return hashlib.sha256(cluster.encode()).digest()


def _make_proof(secret: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + said, hashlib.sha256)
