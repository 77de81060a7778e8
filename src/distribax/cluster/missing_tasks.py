"""Telling for whom a task waits that has started before the others."""

from __future__ import annotations

import logging
import time
from typing import Final

from distribax import progress
from distribax.cluster.environment_variables import read_seconds

REMIND_SECONDS: Final = read_seconds("DISTRIBAX_SERVER_REMIND_SECONDS", 30.0)
"""How often a task that waits for others logs a warning."""
_logger = logging.getLogger(__name__)


class MissingTasks:
    """Tells who is missing: in a terminal all the time, in the log now and then.

    Args:
        wait: What a terminal shows.
        deadline: When the task gives up, by the monotonic clock.
    """

    def __init__(self, wait: progress.Wait, deadline: float) -> None:
        self._wait = wait
        self._deadline = deadline
        self._remind_at = time.monotonic() + REMIND_SECONDS

    def tell(self, missing: str) -> None:
        """Tells it.

        Args:
            missing: Who is missing.
        """
        self._wait.detail = f"waiting for {missing}"
        now = time.monotonic()
        if now >= self._remind_at:
            self._remind_at = now + REMIND_SECONDS
            left = max(0.0, self._deadline - now)
            _logger.warning("still waiting for %s to join, for at most %.0f s more", missing, left)
