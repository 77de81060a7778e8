"""`dx.logging.log_status`: writes how far a coordinator's work is, as long as a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from distribax.coordinator.status import CoordinatorStatus
from distribax.training.logs import MetricLogger


class HasStatus(Protocol):
    """A coordinator, as far as the log is concerned."""

    def status(self) -> CoordinatorStatus:
        """Returns how far the work is."""


@contextlib.contextmanager
def log_status(
    coordinator: HasStatus, logger: MetricLogger, *, every_seconds: float = 10.0
) -> Iterator[None]:
    """Logs the status of a coordinator now and then while the block runs, and at its end.

    The numbers are those of `coordinator.status()`: `coordinator/finished`, `coordinator/rate`,
    `coordinator/workers_up` and so on. Their step is the number of functions that have ended.

    Args:
        coordinator: The `dx.coordinator.ClusterCoordinator`.
        logger: Where the numbers go.
        every_seconds: The time between two entries.

    Yields:
        Nothing; the log is written meanwhile.

    Raises:
        ValueError: The time is not positive.
    """
    if not every_seconds > 0:
        raise ValueError(f"log_status: every_seconds={every_seconds} must be more than 0.")
    ended = threading.Event()

    def write() -> None:
        status = coordinator.status()
        logger.log(status.as_numbers(), step=status.num_ended)

    def follow() -> None:
        while not ended.wait(every_seconds):
            write()

    thread = threading.Thread(target=follow, name="distribax-status-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()
