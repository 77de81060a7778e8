"""What to do when workers die or do not answer: decisions that the dispatcher carries out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from distribax.parameter_server.settings import SERVER_LOST_SECONDS

MAX_LOSSES = 10
"""When so many workers have died while they ran a closure, the closure is taken for the cause."""
MAX_START_FAILURES: Final = 3
"""When each worker has failed to start so often, the user is told why instead of waiting."""
_START_PAUSE_SECONDS: Final = 0.2
_LONGEST_START_PAUSE_SECONDS: Final = 5.0


class FailureDecision(enum.Enum):
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
    """After how many seconds a worker, or all of them, count as lost.

    Attributes:
        worker_timeout: How many seconds a worker may leave a ping unanswered.
        all_workers_timeout: How many seconds work may wait while there is no worker at all.
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
        """How many seconds pass between two pings of a worker."""
        return min(1.0, self.worker_timeout / 4)

    def on_silence(self, seconds: float, *, has_been_heard: bool) -> FailureDecision:
        """Decides on a worker that has not answered for so many seconds.

        A process that has never answered may still wait for its place in the cluster.
        """
        bound = self.worker_timeout if has_been_heard else self.all_workers_timeout
        return (
            FailureDecision.REPLACE
            if seconds > max(bound, self.worker_timeout)
            else FailureDecision.WAIT
        )

    def on_start_failure(self, failures: int) -> FailureDecision:
        """Decides on a worker that has failed to start so often in a row.

        The same process tries again first, which is quicker than another one.
        """
        return FailureDecision.RETRY if failures % MAX_START_FAILURES else FailureDecision.REPLACE

    def choose_start_pause(self, failures: int) -> float:
        """Returns how many seconds to wait before a worker is started again."""
        return min(_START_PAUSE_SECONDS * 2**failures, _LONGEST_START_PAUSE_SECONDS)

    def on_loss(self, losses: int) -> FailureDecision:
        """Decides on a closure that was running on so many workers when they were lost."""
        return FailureDecision.RAISE if losses >= MAX_LOSSES else FailureDecision.RETRY

    def on_no_worker(
        self, seconds: float, start_failures: int, *, is_server_lost: bool = False
    ) -> FailureDecision:
        """Decides when work has waited for so many seconds, and there is no worker.

        Args:
            seconds: How long there has been no worker.
            start_failures: How often in a row each worker has failed to start, at least.
            is_server_lost: Whether workers are there, but cannot reach a parameter server.
        """
        bound = self.all_workers_timeout
        if is_server_lost:
            bound = max(bound, SERVER_LOST_SECONDS)
        lost = seconds > bound or start_failures >= MAX_START_FAILURES
        return FailureDecision.RAISE if lost else FailureDecision.WAIT
