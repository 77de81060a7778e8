"""A worker's process: runs batches of closures, and answers questions meanwhile."""

from __future__ import annotations

import os
import pickle
import platform
import secrets
import time
from typing import Any, Final

from distribax.coordinator.messages import ClosureBatch, Greeting, Pulse, Reply, Timing
from distribax.coordinator.outcomes import Raised, find_unreachable, pack_error, pack_result
from distribax.coordinator.printing import PrintCapture
from distribax.coordinator.references import set_lookup
from distribax.coordinator.worker_objects import WorkerObjects
from distribax.errors import ParameterServerUnreachableError
from distribax.parameter_server.worker_strategy import WorkerSetup, WorkerStrategy

LONGEST_SECONDS: Final = 0.4
"""A batch that takes longer than this ends after the closure that runs."""


class Worker:
    """The actor of a worker.

    `start` and `run` are called one after the other in one thread, `ping` and `recall` in another
    one at the same time.
    """

    def __init__(self) -> None:
        self._boot = secrets.token_hex(8)
        self._strategy: WorkerStrategy | None = None
        self._objects = WorkerObjects()
        self._printed = PrintCapture()
        # Whether a server could not be reached, and nothing is run until all can be.
        self._is_aside = False
        # The batch that runs, and how many of its closures have been started. The thread that runs
        # them writes this before it looks at `_recalled`, and `recall` reads it after it has
        # written `_recalled`: what `recall` does not count as started is never started.
        self._at = (0, 0)
        self._recalled = 0

    # One at a time.

    def start(self, worker_index: int, setup: bytes) -> Greeting | Raised:
        """Makes this process a worker, unless it is one already."""
        global _worker_index
        if self._strategy is None:
            _worker_index = worker_index
            try:
                made: WorkerSetup = pickle.loads(setup)
                self._strategy = made.start(worker_index)
            except Exception as error:
                return pack_error(error)
            set_lookup(self._objects.get)
        elif self._is_aside:
            try:
                self._strategy.check_servers()
            except Exception as error:
                return pack_error(error)
            self._is_aside = False
        return Greeting(self._boot, os.getpid(), platform.node())

    def run(self, data: bytes) -> bytes:
        """Runs a batch and returns the reply, both pickled."""
        batch: ClosureBatch = pickle.loads(data)
        strategy = self._strategy
        if batch.boot != self._boot or strategy is None or self._is_aside:
            return pickle.dumps(Reply([], {}, refused=True), 5)
        self._objects.add(batch.definitions)
        self._objects.remove(batch.forgotten)
        with self._printed.capture():
            try:
                with strategy.scope():
                    outcomes, timings = self._run_closures(batch)
                outcomes = self._flush(strategy, outcomes)
            except ParameterServerUnreachableError as error:
                self._is_aside = True
                reply = Reply([], {}, unreachable=str(error))
            else:
                reply = Reply(outcomes, timings)
        return pickle.dumps(reply._replace(printed=self._printed.take()), 5)

    def _flush(self, strategy: WorkerStrategy, outcomes: list[Any]) -> list[Any]:
        """Returns the outcomes, when what the functions have written has arrived."""
        try:
            strategy.flush()
        except ParameterServerUnreachableError:
            raise
        except Exception as error:
            # The functions have ended well, but what they wrote has not arrived.
            return [pack_error(error)] * len(outcomes)
        return outcomes

    def _run_closures(self, batch: ClosureBatch) -> tuple[list[Any], dict[int, Timing]]:
        objects, number = self._objects, batch.number
        outcomes: list[Any] = []
        timings: dict[int, Timing] = {}
        before = time.perf_counter()
        deadline = before + LONGEST_SECONDS
        closures = zip(batch.functions, batch.arguments, strict=True)
        for index, (function, arguments) in enumerate(closures):
            self._at = (number, index + 1)
            if self._recalled >= number or (before > deadline and outcomes):
                break
            try:
                fn = objects.get(function)
                args, kwargs = objects.load_arguments(arguments)
                outcomes.append(pack_result(fn(*args, **kwargs)))
            except BaseException as error:
                if (unreachable := find_unreachable(error)) is not None:
                    # That is no mistake of the function: another worker may run it.
                    raise unreachable from None
                outcomes.append(pack_error(error))
                break
            after = time.perf_counter()
            calls, seconds = timings.get(function, (0, 0.0))
            timings[function] = Timing(calls + 1, seconds + after - before)
            before = after
        return outcomes, timings

    # At any time.

    def ping(self) -> Pulse:
        """Answers, which shows that the process is alive, with what long functions print."""
        return Pulse(*self._at, self._boot, self._printed.take(whole_lines=True))

    def recall(self, number: int) -> Pulse:
        """Starts no more closures of batches up to that number; tells which have been started."""
        self._recalled = max(self._recalled, number)
        return Pulse(*self._at, self._boot)


_worker_index: int | None = None


def experimental_get_current_worker_index() -> int:
    """Returns the index of the worker that runs the calling function.

    Returns:
        A number from 0 to the number of workers less one.

    Raises:
        RuntimeError: If it is called outside of a function that `coordinator.schedule` or
            `create_per_worker_dataset` sends to a worker.
    """
    if _worker_index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index: this is not a worker. Call it inside a "
            "function that is given to coordinator.schedule() or create_per_worker_dataset()."
        )
    return _worker_index
