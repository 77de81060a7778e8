"""How far the coordinator's work is, and how its workers are."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from distribax.parameter_server.protocol.server_status import WatchedServerStatus


class WorkerState(enum.StrEnum):
    """What a worker is doing; each is equal to its name, for example "ready"."""

    STARTING = "starting"
    """Its process is being started."""
    READY = "ready"
    """It runs functions."""
    LOST = "lost"
    """It has died, does not answer or failed to start, and is started again soon."""


@dataclass(frozen=True)
class WorkerStatus:
    """How one worker is.

    Attributes:
        index: The worker's index.
        state: What it is doing.
        seconds: For how many seconds it has been ready, or has not been.
        pid: The id of its process, the last one if it is lost; None before the first start.
        host: The name of its machine.
        running: How many functions it has been given and has not answered.
        finished: How many it has finished.
        restarts: How often its process was started again.
        problem: Why it was lost the last time.
    """

    index: int
    state: WorkerState
    seconds: float
    pid: int | None
    host: str | None
    running: int
    finished: int
    restarts: int
    problem: str | None


@dataclass(frozen=True)
class ClosureCounts:
    """How many functions were scheduled, how they ended, and how many have not."""

    scheduled: int
    finished: int
    failed: int
    cancelled: int
    retried: int
    queued: int
    running: int


@dataclass(frozen=True)
class CoordinatorStatus(ClosureCounts):
    """What was scheduled, and who works on it.

    Attributes:
        scheduled: How many functions were scheduled so far.
        finished: How many of them have returned.
        failed: How many have raised an exception.
        cancelled: How many were given up because another had failed.
        retried: How many were run again because their worker was lost.
        queued: How many wait.
        running: How many have been given to workers.
        rate: How many have finished per second in the last few seconds.
        workers: One entry for each worker.
        servers: What is known of each parameter server.
    """

    rate: float
    workers: tuple[WorkerStatus, ...]
    servers: tuple[WatchedServerStatus, ...] = ()

    @property
    def num_workers_up(self) -> int:
        """How many workers are ready."""
        return sum(worker.state is WorkerState.READY for worker in self.workers)

    @property
    def is_active(self) -> bool:
        """Whether functions wait or run."""
        return self.queued + self.running > 0

    @property
    def num_ended(self) -> int:
        """How many functions have ended in any way."""
        return self.finished + self.failed + self.cancelled

    def as_numbers(self) -> dict[str, float]:
        """Returns the status as numbers for a logger.

        Returns:
            The numbers, such as "coordinator/finished" and "coordinator/workers_up".
        """
        numbers: dict[str, float] = {
            field.name: getattr(self, field.name) for field in fields(ClosureCounts)
        }
        numbers |= {"rate": self.rate, "workers_up": self.num_workers_up}
        if self.servers:
            numbers["server_restarts"] = sum(each.get("restarts", 0) for each in self.servers)
        return {f"coordinator/{name}": float(value) for name, value in numbers.items()}

    def line(self) -> str:
        """Returns the status in one line.

        Returns:
            For example "90/100 functions, 12.5/s, 1 retried, workers 2/2".
        """
        parts = [f"{self.finished}/{self.scheduled} functions", f"{self.rate:.4g}/s"]
        for name in ("failed", "cancelled", "retried"):
            if count := getattr(self, name):
                parts += [f"{count} {name}"]
        parts += [f"workers {self.num_workers_up}/{len(self.workers)}"]
        if self.servers:
            restarts = sum(server.get("restarts", 0) for server in self.servers)
            parts += [f"servers {len(self.servers)}{f' ({restarts} restarts)' if restarts else ''}"]
        return ", ".join(parts)
