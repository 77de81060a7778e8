"""Which workers a server can expect contributions from."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

ABSENCE_SECONDS: Final = 5.0
"""How long a worker may have no connection before another one does its share of a round."""


class Presence:
    """The workers among a server's clients: connected, idle, or waiting for a round.

    Attributes:
        idle: The workers that have nothing to do, as the coordinator says.
        waiting: Those that wait until they may begin a share of a round.
    """

    def __init__(self) -> None:
        self.idle: set[int] = set()
        self.waiting: set[int] = set()
        self._workers: dict[str, int] = {}
        self._num_connections: Counter[int] = Counter()
        self._left_at: dict[int, float] = {}

    def get_worker(self, client: str) -> int | None:
        """Returns the index of the worker that a client is, or None for other clients."""
        return self._workers.get(client)

    def arrive(self, client: str, worker: int) -> list[str]:
        """Notes a connection of a worker; returns the clients that it was before."""
        earlier = [name for name, own in self._workers.items() if own == worker and name != client]
        for name in earlier:
            del self._workers[name]
        self._workers[client] = worker
        self._num_connections[worker] += 1
        return earlier

    def leave(self, worker: int) -> None:
        """Notes that a connection of a worker has ended."""
        self._num_connections[worker] -= 1
        if not self._num_connections[worker]:
            self._left_at[worker] = time.monotonic()
            self.waiting.discard(worker)

    def is_absent(self, worker: int | None, since: float) -> bool:
        """Tells whether a worker has had no connection for long.

        Args:
            worker: The worker's index, or None for another client.
            since: When the wait began for a worker that has never been there.
        """
        if worker is None or self._num_connections[worker]:
            return False
        return time.monotonic() - self._left_at.get(worker, since) >= ABSENCE_SECONDS

    def is_inactive(self, worker: int, since: float) -> bool:
        """Tells whether a worker that has begun no share will not begin one by itself."""
        return worker in self.idle | self.waiting or self.is_absent(worker, since)
