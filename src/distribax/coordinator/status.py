"""How far the coordinator's work is, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerStatus:
    """One worker.

    Attributes:
        index: The worker's index.
        state: "starting", "ready" or "lost" (it is started again soon).
        seconds: For how long it has been ready, or not been.
        pid: The id of its process, the last one if it is lost; None before the first start.
        host: The name of its machine.
        running: How many closures it has been given and has not answered.
        finished: How many it has finished.
        restarts: How often its process was started again.
        problem: What it was lost by, the last time.
    """

    index: int
    state: str
    seconds: float
    pid: int | None
    host: str | None
    running: int
    finished: int
    restarts: int
    problem: str | None


@dataclass(frozen=True)
class CoordinatorStatus:
    """All that was scheduled, and who works on it.

    Attributes:
        scheduled: How many closures were scheduled so far.
        finished: How many of them have returned.
        failed: How many have raised an exception.
        cancelled: How many were given up because another had failed.
        retried: How many had to be run again, as their worker was lost.
        queued: How many wait.
        running: How many have been given to workers.
        rate: How many have finished per second of late.
        workers: One entry for each worker.
        servers: What is known of each parameter server.
    """

    scheduled: int
    finished: int
    failed: int
    cancelled: int
    retried: int
    queued: int
    running: int
    rate: float
    workers: tuple[WorkerStatus, ...]
    servers: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_workers_up(self) -> int:
        """How many workers are ready."""
        return sum(worker.state == "ready" for worker in self.workers)

    @property
    def is_active(self) -> bool:
        """Whether closures wait or run."""
        return self.queued + self.running > 0

    @property
    def num_ended(self) -> int:
        """How many closures have ended in any way."""
        return self.finished + self.failed + self.cancelled

    def line(self) -> str:
        """Returns the status in one line."""
        parts = [f"{self.finished}/{self.scheduled} functions"]
        parts += [f"{self.rate:.4g}/s"]
        parts += [f"{count} {name}" for name, count in self._troubles() if count]
        parts += [f"workers {self.num_workers_up}/{len(self.workers)}"]
        if self.servers:
            restarts = sum(server.get("restarts", 0) for server in self.servers)
            parts += [f"servers {len(self.servers)}{f' ({restarts} restarts)' if restarts else ''}"]
        return ", ".join(parts)

    def _troubles(self) -> tuple[tuple[str, int], ...]:
        return (
            ("failed", self.failed),
            ("cancelled", self.cancelled),
            ("retried", self.retried),
        )
