"""Synchronous updates as the coordinator sees them: who has nothing to do, and who is late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from distribax.coordinator.status import CoordinatorStatus, WorkerState, WorkerStatus
from distribax.parameter_server.protocol.server_status import IncompleteRound

_logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_LATE_SECONDS: Final = 10.0
"""After how long an update that waits for workers is told to the user; then after twice as long."""


class RoundWatch:
    """Looks after synchronous updates while the program waits for functions.

    Args:
        watch: Tells the servers which workers have nothing to do, and returns the updates that are
            incomplete, as `ParameterServerStrategy.watch_rounds` does.
    """

    def __init__(self, watch: Callable[[Sequence[int]], Sequence[IncompleteRound]]) -> None:
        self._watch = watch
        # Several threads may wait.
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._told_seconds = 0.0

    def look(self, status: CoordinatorStatus, num_ready: int) -> None:
        """Has others do the shares of idle workers, and tells who is late; a few times per second.

        Args:
            status: What the workers do.
            num_ready: How many functions could be given to an idle worker.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._looked_at = now
                idle = (
                    [] if num_ready else [each.index for each in status.workers if _is_idle(each)]
                )
                self._tell_late(self._watch(idle), status.workers)
        finally:
            self._lock.release()

    def _tell_late(
        self, rounds: Sequence[IncompleteRound], workers: Sequence[WorkerStatus]
    ) -> None:
        # Without a function that runs, nobody is late: an update waits for the next functions.
        awaited = [
            each
            for each in rounds
            if each["waiting"] or any(workers[index].running for index in each["missing"])
        ]
        oldest = max(awaited, key=lambda each: each["seconds"], default=None)
        if oldest is None or oldest["seconds"] < _LATE_SECONDS:
            self._told_seconds = 0.0
        elif oldest["seconds"] >= 2 * self._told_seconds:
            self._told_seconds = oldest["seconds"]
            late = ", ".join(_describe(workers[index]) for index in sorted(set(oldest["missing"])))
            others = ", ".join(f"worker {index}" for index in oldest["waiting"])
            _logger.warning(
                "A synchronous update has waited %.0f s for %s%s.",
                oldest["seconds"],
                late,
                f"; {others} can do nothing else meanwhile" if others else "",
            )


def _is_idle(worker: WorkerStatus) -> bool:
    return worker.state is WorkerState.READY and not worker.running


def _describe(worker: WorkerStatus) -> str:
    state = "running" if worker.running else worker.state.value
    return f"worker {worker.index} ({state}, pid {worker.pid}, on {worker.host})"
