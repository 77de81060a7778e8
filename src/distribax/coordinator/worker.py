"""A worker's process: runs batches of closures, and answers while it does."""

from __future__ import annotations

import os
import pickle
import platform
import secrets
import time
from typing import Any, Final

from distribax.coordinator.interfaces import WorkerSetup
from distribax.coordinator.messages import Batch, Greeting, Pulse, Raised, Reply, Start
from distribax.coordinator.outcomes import pack, pack_error
from distribax.coordinator.worker_index import set_worker_index
from distribax.coordinator.worker_objects import Stock

LONGEST_SECONDS: Final = 0.4
"""A batch that takes longer than this ends after the closure that it is at."""


class Worker:
    """The actor of a worker.

    `start` and `run` are called one after the other in one thread, `ping` and `recall` in another
    one at the same time.
    """

    def __init__(self) -> None:
        self._boot = secrets.token_hex(8)
        self._setup: WorkerSetup | None = None
        self._stock: Stock | None = None
        # The batch that runs, and how many of its closures have been started. The thread that runs
        # them writes this before it looks at `_recalled`, and `recall` reads it after it has
        # written `_recalled`: what `recall` does not count as started is never started.
        self._at = (0, 0)
        self._recalled = 0

    # One at a time.

    def start(self, data: bytes) -> Greeting | Raised:
        """Makes this process a worker, unless it is one already."""
        if self._setup is None:
            message: Start = pickle.loads(data)
            set_worker_index(message.worker_index)
            try:
                setup: WorkerSetup = pickle.loads(message.setup)
                setup.start(message.worker_index)
            except Exception as error:
                return pack_error(error)
            self._stock = Stock(setup)
            self._setup = setup
        return Greeting(self._boot, os.getpid(), platform.node())

    def run(self, data: bytes) -> bytes:
        """Runs a batch and returns the reply, both pickled."""
        batch: Batch = pickle.loads(data)
        if batch.boot != self._boot or self._setup is None or self._stock is None:
            return pickle.dumps(Reply([], {}, refused=True), 5)
        self._stock.add(batch.shipments)
        self._stock.remove(batch.forgotten)
        outcomes, seconds = self._run(batch, self._setup, self._stock)
        try:
            self._setup.flush()
        except Exception as error:
            # The functions have ended well, but what they wrote has not arrived.
            outcomes = [pack_error(error)] * len(outcomes)
        return pickle.dumps(Reply(outcomes, seconds), 5)

    def _run(
        self, batch: Batch, setup: WorkerSetup, stock: Stock
    ) -> tuple[list[Any], dict[int, tuple[int, float]]]:
        number = batch.number
        outcomes: list[Any] = []
        seconds: dict[int, tuple[int, float]] = {}
        before = time.perf_counter()
        deadline = before + LONGEST_SECONDS
        for index, (function, arguments) in enumerate(batch.calls):
            self._at = (number, index + 1)
            if self._recalled >= number or (before > deadline and outcomes):
                break
            try:
                fn = stock.get(function)
                args, kwargs = stock.arguments(arguments)
                outcomes.append(_packed(setup.run(fn, args, kwargs)))
            except BaseException as error:
                outcomes.append(pack_error(error))
                break
            after = time.perf_counter()
            count, total = seconds.get(function, (0, 0.0))
            seconds[function] = (count + 1, total + after - before)
            before = after
        return outcomes, seconds

    # At any time.

    def ping(self) -> Pulse:
        """Answers, which shows that the process is alive."""
        return Pulse(self._boot, self._at)

    def recall(self, number: int) -> Pulse:
        """Starts no more closures of batches up to that number; tells which have been started."""
        self._recalled = max(self._recalled, number)
        return Pulse(self._boot, self._at)


def _packed(value: Any) -> Any:
    try:
        return pack(value)
    except Exception as error:
        error.add_note(
            f"The function has returned {type(value).__name__} {value!r:.200}, which cannot be "
            "pickled. Return arrays, numbers and nests of them."
        )
        raise
