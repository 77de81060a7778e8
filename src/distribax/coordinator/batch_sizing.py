"""How long functions take, and so how many of them a worker is given at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from distribax.coordinator.closure_queue import Closure

BATCH_SECONDS: Final = 0.2
"""A Ray call costs some milliseconds over all processes, which this much work makes up for. On the
other hand, results come when the batch ends, and if the worker dies before, all of it is rerun."""
MAX_BATCH: Final = 2048
MAX_BATCH_BYTES: Final = 8 << 20
_ALONE_AFTER: Final = 3
"""A closure that was lost so often is sent alone, so that it is known what a worker died of."""
_WEIGHT: Final = 0.3


class BatchSizer:
    """Estimates the seconds of a call, by the function's name, and sizes batches by it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def learn(self, name: str, count: int, seconds: float) -> None:
        """Takes in that `count` calls took `seconds`."""
        new = seconds / count
        old = self._seconds.get(name)
        # The first call of a function may compile it: a faster one is believed at once.
        self._seconds[name] = new if old is None or new < old else old + _WEIGHT * (new - old)

    def estimate_seconds(self, closures: Iterable[Closure]) -> float:
        """Returns how long closures may take; infinity if a function is unknown."""
        known = self._seconds
        return sum(known.get(closure.function.name, math.inf) for closure in closures)

    def choose_count(self, first: Closure, num_waiting: int, rests: Sequence[float]) -> int:
        """Returns how many of the waiting closures a worker takes, so that all end together.

        Args:
            first: The first closure that waits; the others are taken to be like it.
            num_waiting: How many wait.
            rests: The seconds that each worker still has to do, beginning with this one's.
        """
        each = self._seconds.get(first.function.name)
        rest, total = rests[0], sum(rests)
        if not each or not math.isfinite(total):
            return -(-num_waiting // len(rests))
        level = (total + num_waiting * each) / len(rests)
        return max(0 if rest else 1, round((level - rest) / each))

    def choose_batch(self, waiting: Iterator[Closure], most: int) -> int:
        """Returns how many of the waiting closures make a batch: at most `most`."""
        if not most:
            return 0
        known = self._seconds
        count, total, size = 0, 0.0, 0
        for closure in waiting:
            expected = known.get(closure.function.name)
            if expected is None or closure.losses >= _ALONE_AFTER:
                return max(count, 1)
            total += expected
            if closure.arguments is not None:
                size += len(closure.arguments)
            if count and (total > BATCH_SECONDS or size > MAX_BATCH_BYTES):
                return count
            count += 1
            if count >= most or count >= MAX_BATCH:
                return count
        return count
