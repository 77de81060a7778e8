"""What to do when workers die or fall silent: decisions only; the dispatcher carries them out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_LOSSES = 10
"""So many workers may die while they run a closure, before the closure is held to be the cause."""
MAX_START_FAILURES = 3
"""So often each worker may fail to start, before the reason is told and not waited for."""
_START_PAUSE = 0.2
_LONGEST_START_PAUSE = 5.0


class Decision(enum.Enum):
    """What the dispatcher is to do."""

    WAIT = "wait"
    """Nothing yet."""
    RETRY = "retry"
    """Try the same again."""
    REPLACE = "replace"
    """End the worker's process, and let Ray start it again."""
    RAISE = "raise"
    """Tell the user."""


@dataclass(frozen=True)
class FailurePolicy:
    """Bounds in time, after which a worker or all of them count as lost.

    Attributes:
        worker_timeout: For how many seconds a worker may give no sign of life.
        all_workers_timeout: For how many seconds there may be work and no worker for it.
    """

    worker_timeout: float = 20.0
    all_workers_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("worker_timeout", "all_workers_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(
                    f"ClusterCoordinator: {name}={value!r} is not a positive number of seconds."
                )

    @property
    def ping_seconds(self) -> float:
        """How often a worker is asked for a sign of life."""
        return min(1.0, self.worker_timeout / 4)

    def on_silence(self, seconds: float, *, has_been_heard: bool) -> Decision:
        """Decides on a worker that has not answered for a time.

        A process that has never been heard may still wait for its place in the cluster.
        """
        bound = self.worker_timeout if has_been_heard else self.all_workers_timeout
        return Decision.REPLACE if seconds > max(bound, self.worker_timeout) else Decision.WAIT

    def on_start_failure(self, failures: int) -> Decision:
        """Decides on a worker that has failed to start so often in a row.

        The same process tries again first, which is quicker than another one.
        """
        return Decision.RETRY if failures % MAX_START_FAILURES else Decision.REPLACE

    def start_pause(self, failures: int) -> float:
        """Returns how many seconds to wait before a worker is started again."""
        return min(_START_PAUSE * 2**failures, _LONGEST_START_PAUSE)

    def on_loss(self, losses: int) -> Decision:
        """Decides on a closure that was running on so many workers that died."""
        return Decision.RAISE if losses >= MAX_LOSSES else Decision.RETRY

    def on_no_worker(self, seconds: float, start_failures: int) -> Decision:
        """Decides when there is work, but has been no worker for a time.

        `start_failures` is how often each worker at least has failed to start in a row.
        """
        lost = seconds > self.all_workers_timeout or start_failures >= MAX_START_FAILURES
        return Decision.RAISE if lost else Decision.WAIT
