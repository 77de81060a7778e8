"""The decision of `distribax run` to start all workers again after one has failed."""

from __future__ import annotations

import enum
from typing import Final

from distribax.cluster.environment_variables import read_seconds
from distribax.types import RESTARTABLE_EXIT_CODE

SHORT_LIFE_SECONDS: Final = read_seconds("DISTRIBAX_RUN_SHORT_LIFE_SECONDS", 30.0)
"""An interruption within this time counts as one soon after the start."""
MAX_SHORT_LIVES: Final = 3
"""A program that is interrupted more often in a row, each time soon after its start, has failed."""


class RestartDecision(enum.Enum):
    """What to do when a worker has ended with an exit code other than 0."""

    RESUME = enum.auto()  # Start again: the program was told to stop, and has saved.
    RETRY = enum.auto()  # Start again: it has failed, and this uses up one of the restarts.
    END = enum.auto()  # End with its exit code.


class ShortLives:
    """Counts how often in a row a process was interrupted soon after its start."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, seconds: float) -> bool:
        """Notes an interruption some seconds after a start; returns whether it is one too many."""
        self._count = self._count + 1 if seconds < SHORT_LIFE_SECONDS else 0
        return self._count > MAX_SHORT_LIVES


class RestartPolicy:
    """Allows a number of restarts after failures, and any number after interruptions.

    A program that only asks for a restart would be started forever. Therefore an interruption
    counts as a failure when it is one of more than `MAX_SHORT_LIVES` in a row, each less than
    `SHORT_LIFE_SECONDS` after the start.

    Args:
        max_restarts: How many failures are followed by another start.

    Example:
        >>> policy = RestartPolicy(max_restarts=1)
        >>> policy.decide(42, seconds=3600), policy.decide(1, seconds=3600)
        (<RestartDecision.RESUME: 1>, <RestartDecision.RETRY: 2>)
        >>> policy.decide(1, seconds=3600)
        <RestartDecision.END: 3>
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.retries = 0
        self._short_lives = ShortLives()

    def decide(self, exit_code: int, seconds: float) -> RestartDecision:
        """Returns what to do next.

        Args:
            exit_code: The exit code of the worker that has failed.
            seconds: How long ago the workers were started.
        """
        if exit_code == RESTARTABLE_EXIT_CODE and not self._short_lives.add(seconds):
            return RestartDecision.RESUME
        if self.retries == self.max_restarts:
            return RestartDecision.END
        self.retries += 1
        return RestartDecision.RETRY
