"""Random faults that a seed decides, and the proof that they lose no updates."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np

import distribax as dx

if TYPE_CHECKING:
    from distribax.coordinator import ClusterCoordinator, RemoteValue

_STOP_SECONDS: Final = 60.0
"""How long the injector's thread may take to end."""


class FaultKind(enum.StrEnum):
    """What can be done to a cluster; each is equal to its name, for example "kill"."""

    KILL = "kill"
    """A worker gets SIGKILL."""
    STOP = "stop"
    """A worker gets SIGSTOP."""
    KILL_TWO = "kill two"
    """Two workers get SIGKILL at the same time."""
    KILL_SERVER = "kill server"
    """A parameter server gets SIGKILL."""


@dataclass(frozen=True)
class Fault:
    """A fault that was injected.

    Args:
        kind: What was done: FaultKind.KILL or FaultKind.STOP.
        role: To whom: "worker" or "server".
        index: The index of the worker or server.
        pid: The id of its process.
        at: When, by `time.monotonic`.
    """

    kind: FaultKind
    role: str
    index: int
    pid: int
    at: float


class FaultInjector:
    """Kills and stops workers and servers of a running cluster, in an order that a seed decides.

    Use it as a context manager around the work; `faults` then lists what was done. A process that
    was stopped is not continued: the cluster must notice that and replace it.

    Args:
        coordinator: The coordinator of the cluster.
        seed: Decides on kinds, victims and pauses.
        kinds: What may happen, each a FaultKind or its name: "kill" (a worker gets SIGKILL), "stop"
            (a worker gets SIGSTOP), "kill two" (two workers at once), "kill server".
        pause: The shortest and the longest time between two faults, in seconds.
        most: How many faults to inject at most.

    Raises:
        ValueError: `kinds` is empty or has an unknown kind.
    """

    def __init__(
        self,
        coordinator: ClusterCoordinator,
        seed: int,
        *,
        kinds: Sequence[FaultKind | str] = (FaultKind.KILL,),
        pause: tuple[float, float] = (0.2, 1.0),
        most: int = 1_000_000,
    ) -> None:
        known = sorted(map(str, FaultKind))
        if not kinds or any(kind not in known for kind in kinds):
            raise ValueError(f"FaultInjector: kinds={tuple(kinds)!r}. Expected some of {known}.")
        self._coordinator = coordinator
        self._random = random.Random(seed)
        self._kinds = [FaultKind(kind) for kind in kinds]
        self._pause = pause
        self._most = most
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._inject, name="distribax-faults", daemon=True)
        self.faults: list[Fault] = []
        self.errors: list[BaseException] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=_STOP_SECONDS)

    def _inject(self) -> None:
        try:
            while len(self.faults) < self._most:
                if self._ended.wait(self._random.uniform(*self._pause)):
                    return
                self.strike(self._random.choice(self._kinds))
        except BaseException as error:
            self.errors.append(error)
            raise

    def strike(self, kind: FaultKind | str) -> None:
        """Injects one fault now, if a process can be found for it.

        Args:
            kind: What to do, a FaultKind or its name.
        """
        status = self._coordinator.status()
        if kind == FaultKind.KILL_SERVER:
            servers = [server for server in status.servers if server.get("pid")]
            if servers:
                server = self._random.choice(servers)
                self._signal(FaultKind.KILL, "server", server["index"], server["pid"])
            return
        ready = [
            (worker.index, worker.pid)
            for worker in status.workers
            if worker.state == "ready" and worker.pid
        ]
        self._random.shuffle(ready)
        for index, pid in ready[: 2 if kind == FaultKind.KILL_TWO else 1]:
            done = FaultKind.STOP if kind == FaultKind.STOP else FaultKind.KILL
            self._signal(done, "worker", index, pid)

    def _signal(self, kind: FaultKind, role: str, index: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if kind is FaultKind.STOP else signal.SIGKILL)
            self.faults.append(Fault(kind, role, index, pid, time.monotonic()))


@dataclass
class History:
    """A ledger on the servers to which every function adds 1, each at an index of its own.

    Schedule functions with `history.schedule`. After the coordinator's `join`, `history.check`
    tells whether the update of every function that has returned was applied.

    Args:
        coordinator: The coordinator of the cluster.
        size: How many functions will be scheduled.
        results: The results of the scheduled functions by number; it is filled by `schedule`.
    """

    coordinator: ClusterCoordinator
    size: int
    results: dict[int, RemoteValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, strategy = self.size, self.coordinator.strategy
        assert isinstance(strategy, dx.Strategy)
        with strategy.scope():
            ledger = dx.Variable(np.zeros(size, np.int32), name="ledger")

        def mark(number: int) -> int:
            line = np.zeros(size, np.int32)
            line[number] = 1
            ledger.assign_add(line)
            return number

        self.ledger = ledger
        self._mark = mark

    def schedule(self, number: int) -> None:
        """Schedules a function that only adds 1 to its entry of the ledger.

        Args:
            number: The index of the entry.
        """
        self.results[number] = self.coordinator.schedule(self._mark, args=(number,))

    @property
    def counts(self) -> np.ndarray:
        """How often each function's update was applied."""
        return self.ledger.numpy()

    @property
    def duplicates(self) -> int:
        """How many updates were applied more than once, because functions ran again."""
        return int(np.maximum(self.counts - 1, 0).sum())

    def lost(self) -> list[int]:
        """Returns the functions that have returned although their update was not applied.

        Returns:
            Their numbers.
        """
        counts = self.counts
        return [
            number
            for number, value in self.results.items()
            if value.fetch() == number and counts[number] == 0
        ]

    def check(self) -> None:
        """Checks that no update is lost.

        Raises:
            AssertionError: Updates are lost; the message names their functions.
        """
        lost = self.lost()
        if lost:
            raise AssertionError(f"acknowledged updates are lost: {lost[:20]} ({len(lost)} in all)")
