"""Faults on purpose, by a seed, and the proof that nothing was lost by them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import distribax as dx

_CONTINUE_SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    """One fault: what was done ("kill" or "stop"), to which process, and when."""

    kind: str
    role: str
    index: int
    pid: int
    at: float


class FaultInjector:
    """Kills and stops workers and servers of a running cluster, in an order that a seed decides.

    Use it as a context manager around the work; `faults` then lists what was done. A process that
    was stopped is not continued: the cluster has to notice and to replace it.

    Args:
        coordinator: The coordinator of the cluster.
        seed: Decides on kinds, victims and pauses.
        kinds: What may happen: "kill" (a worker gets SIGKILL), "stop" (a worker gets SIGSTOP),
            "kill two" (two workers at once), "kill server".
        pause: The shortest and the longest time between two faults, in seconds.
        most: After so many faults there are no more.
    """

    def __init__(
        self,
        coordinator: Any,
        seed: int,
        *,
        kinds: Sequence[str] = ("kill",),
        pause: tuple[float, float] = (0.2, 1.0),
        most: int = 1_000_000,
    ) -> None:
        known = {"kill", "stop", "kill two", "kill server"}
        strange = [kind for kind in kinds if kind not in known]
        if strange or not kinds:
            raise ValueError(
                f"FaultInjector: kinds={tuple(kinds)!r}. Expected some of {sorted(known)}."
            )
        self._coordinator = coordinator
        self._random = random.Random(seed)
        self._kinds = list(kinds)
        self._pause = pause
        self._most = most
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="distribax-faults", daemon=True)
        self.faults: list[Fault] = []
        self.errors: list[BaseException] = []

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join(timeout=_CONTINUE_SECONDS)

    def _work(self) -> None:
        try:
            while len(self.faults) < self._most:
                if self._ended.wait(self._random.uniform(*self._pause)):
                    return
                self.strike(self._random.choice(self._kinds))
        except BaseException as error:
            self.errors.append(error)
            raise

    def strike(self, kind: str) -> None:
        """Does one fault now, if there is somebody to do it to."""
        status = self._coordinator.status()
        if kind == "kill server":
            servers = [server for server in status.servers if server.get("pid")]
            if servers:
                server = self._random.choice(servers)
                self._signal("kill", "server", server["index"], server["pid"])
            return
        ready = [worker for worker in status.workers if worker.state == "ready" and worker.pid]
        self._random.shuffle(ready)
        for worker in ready[: 2 if kind == "kill two" else 1]:
            what = "stop" if kind == "stop" else "kill"
            self._signal(what, "worker", worker.index, worker.pid)

    def _signal(self, kind: str, role: str, index: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            self.faults.append(Fault(kind, role, index, pid, time.monotonic()))


@dataclass
class History:
    """Who did what, proven by a ledger on the servers: every closure adds 1 to a line of its own.

    Schedule `history.entry(number)` inside the functions under test, or `history.schedule`. After
    `join`, `check` tells whether every function that has ended left its mark.
    """

    coordinator: Any
    size: int
    results: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with self.coordinator.strategy.scope():
            self.ledger = dx.Variable(np.zeros(self.size, np.int32), name="ledger")

    def schedule(self, number: int) -> None:
        """Schedules one function whose only work is its mark in the ledger."""
        ledger, size = self.ledger, self.size
        if not hasattr(self, "_mark"):

            def mark(number: int) -> int:
                line = np.zeros(size, np.int32)
                line[number] = 1
                ledger.assign_add(line)
                return number

            self._mark = mark
        self.results[number] = self.coordinator.schedule(self._mark, args=(number,))

    @property
    def counts(self) -> np.ndarray:
        """How often each function's update was applied."""
        return self.ledger.numpy()

    @property
    def duplicates(self) -> int:
        """How many updates were applied more than once, as functions ran again."""
        return int(np.maximum(self.counts - 1, 0).sum())

    def lost(self) -> list[int]:
        """Returns the functions that have ended, and so were acknowledged, without an update."""
        counts = self.counts
        return [
            number
            for number, value in self.results.items()
            if value.fetch() == number and counts[number] == 0
        ]

    def check(self) -> None:
        """Raises an AssertionError that names the functions whose update is not there."""
        lost = self.lost()
        if lost:
            raise AssertionError(f"acknowledged updates are lost: {lost[:20]} ({len(lost)} in all)")
