"""The worker processes of one machine: started, listened to, and ended together."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final

from distribax.types import PEER_LOST_EXIT_CODE, RESTARTABLE_EXIT_CODE

_WORKER_MAIN: Final = Path(__file__).with_name("worker_main.py")
_POLL_SECONDS: Final = 0.05
_TAIL_LINES: Final = 200
_SHORT_TAIL_LINES: Final = 20
_LONGEST_LINE: Final = 65536
# A carriage return ends a line too, as progress bars use it; at the end, a "\n" may follow.
_LINE_END: Final = re.compile(rb"\r?\n|\r(?=[^\n])")
_TRACEBACK: Final = "Traceback (most recent call last):"
_CAUSE_SECONDS: Final = 2.0


class _Kind(enum.IntEnum):
    """What a failure is, the likeliest cause of others first.

    When a process dies, its connections close, and within milliseconds the other workers raise an
    exception, or JAX aborts them.
    """

    DIED = 0
    SAID_SO = 1  # An exception or sys.exit, of which the worker has told the launcher.
    ABORTED = 2
    LOST_ANOTHER = 3  # It cannot go on without another worker, whose end is the cause.


@dataclass(frozen=True)
class Failure:
    """How a process failed: its exit code, and the end of what it wrote to stderr."""

    name: str
    exit_code: int
    how: str
    tail: tuple[str, ...]
    order: tuple[int, int]
    at_the_same_time: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} failed ({self.how})"


@dataclass
class _Stream:
    """One output of a worker, handed on line by line with the worker's name before it."""

    source: IO[bytes]
    sink: IO[str]
    prefix: str
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    rest: bytes = b""

    def pump(self) -> bool:
        """Hands on what is there, without waiting; returns whether more can come."""
        while True:
            try:
                data = os.read(self.source.fileno(), 65536)
            except BlockingIOError:
                return True
            self._take(data)
            if not data:
                return False

    def _take(self, data: bytes) -> None:
        *lines, self.rest = _LINE_END.split(self.rest + data)
        if self.rest and (not data or len(self.rest) > _LONGEST_LINE):
            lines.append(self.rest.rstrip(b"\r"))
            self.rest = b""
        for line in lines:
            text = line.decode(errors="replace")
            self.tail.append(text)
            self.sink.write(f"{self.prefix}{text}\n")
        if lines:
            self.sink.flush()


class TaskProcess:
    """One process, in a group of processes of its own; its name, such as "worker 0", is for users.

    Args:
        name: What its lines of output begin with.
        command: The script and its arguments.
        environment: All its environment variables.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        own, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-u", str(_WORKER_MAIN), str(theirs.fileno()), *command],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C reaches the launcher alone, and the worker's own children end with it.
                    start_new_session=True,
                )
            except BaseException:
                own.close()
                raise
        own.setblocking(False)
        self.connection = own
        assert self.process.stdout is not None and self.process.stderr is not None
        prefix = f"[{name}] "
        self.out = _Stream(self.process.stdout, sys.stdout, prefix)
        self.err = _Stream(self.process.stderr, sys.stderr, prefix)
        for stream in (self.out, self.err):
            os.set_blocking(stream.source.fileno(), False)
        self._reported = b""
        self._is_cut_off = False

    def is_ending(self) -> bool:
        """Tells whether the process is about to be gone: its connection is, without a word."""
        return self._is_cut_off and not self._reported and not self.has_ended()

    def has_ended(self) -> bool:
        """Returns whether the process is gone; what it has started goes with it."""
        if self.process.returncode is None and self.process.poll() is not None:
            self.signal(signal.SIGKILL)
        return self.process.returncode is not None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def failure(self) -> Failure | None:
        """Returns how the worker has failed, if it has said so or has ended."""
        with contextlib.suppress(OSError):
            received = self.connection.recv(64)
            self._reported += received
            self._is_cut_off = not received
        if self._reported.endswith(b"\n"):
            code, nanoseconds = map(int, self._reported.split())
            return self._failure(code, f"exit code {code}", (_Kind.SAID_SO, nanoseconds))
        if not self.has_ended() or self.process.returncode == 0:
            return None
        code = self.process.returncode
        if code > 0:
            return self._failure(code, f"exit code {code}", (_Kind.DIED, 0))
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        kind = _Kind.ABORTED if -code == signal.SIGABRT else _Kind.DIED
        return self._failure(128 - code, name, (kind, 0))

    def _failure(self, code: int, how: str, order: tuple[int, int]) -> Failure:
        self.err.pump()
        if code == PEER_LOST_EXIT_CODE:
            order, how = (_Kind.LOST_ANOTHER, order[1]), f"{how}: it has lost another worker"
        return Failure(self.name, code, how, _last_words(self.err.tail), order)

    def close(self) -> None:
        """Waits for the worker, which has ended or was killed, and hands on its last words."""
        self.process.wait()
        for stream in (self.out, self.err):
            with contextlib.suppress(OSError, ValueError):
                stream.pump()
            stream.source.close()
        self.connection.close()


def _last_words(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the traceback among the lines and what follows it, or the last few lines."""
    kept = tuple(lines)
    first = next((i for i, line in enumerate(kept) if line.strip() == _TRACEBACK), None)
    return kept[-_SHORT_TAIL_LINES:] if first is None else kept[first:]


def run_workers(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    grace_seconds: float,
    stops: Sequence[int],
) -> Failure | None:
    """Runs the command in all workers until all have ended, one has failed, or it is stopped.

    Workers that still run then are told to end (SIGTERM), and killed if they have not after
    `grace_seconds`: JAX takes SIGTERM for the notice of a preemption and runs on. If a worker has
    left to be started again, the others get that time before they are told.

    Args:
        command: The script and its arguments.
        environments: The environment of each worker, by its number.
        grace_seconds: How long a worker may take to end.
        stops: Signal handlers add to this. Its first entry ends the workers, its second kills them.
    """
    workers: list[TaskProcess] = []
    failure: Failure | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for worker_id, environment in environments.items():
                workers.append(TaskProcess(f"worker {worker_id}", command, environment))
                register(selector, workers[-1])
            while failure is None and not stops and not all_ended(workers):
                pump(selector)
                failure = _first_failure(workers)
            if failure is None and not stops:
                # All may have ended between two looks.
                failure = _first_failure(workers)
            deadline = time.monotonic() + _CAUSE_SECONDS
            while _may_be_consequence(failure, workers) and not stops:
                # The connections of a process close before the system tells of its end.
                if time.monotonic() >= deadline:
                    break
                pump(selector)
                failure = _first_failure(workers)
            if failure is not None and failure.exit_code == RESTARTABLE_EXIT_CODE:
                # The others are about to leave in the same way.
                _wait(workers, selector, grace_seconds, stops, 1)
            end(workers, selector, grace_seconds, stops)
    finally:
        reap(workers)
    return failure


def reap(workers: Sequence[TaskProcess]) -> None:
    """Kills the processes that still run, and waits for all."""
    # All before the first is waited for: else the others report its end as a new failure.
    for worker in workers:
        if not worker.has_ended():
            worker.signal(signal.SIGKILL)
    for worker in workers:
        worker.close()


def all_ended(workers: Sequence[TaskProcess]) -> bool:
    """Returns whether all processes are gone."""
    return all(worker.has_ended() for worker in workers)


def register(selector: selectors.BaseSelector, worker: TaskProcess) -> None:
    """Has `pump` hand on what the process writes."""
    for stream in (worker.out, worker.err):
        selector.register(stream.source, selectors.EVENT_READ, stream)


def unregister(selector: selectors.BaseSelector, worker: TaskProcess) -> None:
    """Has `pump` forget the process, before it is closed and another one is registered."""
    for stream in (worker.out, worker.err):
        with contextlib.suppress(KeyError):  # It has been read to its end.
            selector.unregister(stream.source)


def pump(selector: selectors.BaseSelector) -> None:
    """Hands on what the workers have written; waits for it a moment."""
    if not selector.get_map():
        time.sleep(_POLL_SECONDS)
        return
    for key, _ in selector.select(_POLL_SECONDS):
        if not key.data.pump():
            selector.unregister(key.fileobj)


def _may_be_consequence(failure: Failure | None, workers: Sequence[TaskProcess]) -> bool:
    if failure is None or failure.order[0] == _Kind.DIED:
        return False
    return failure.order[0] == _Kind.LOST_ANOTHER or any(each.is_ending() for each in workers)


def _first_failure(workers: Sequence[TaskProcess]) -> Failure | None:
    """Returns the failure, or the likeliest cause if several came since the last look."""
    failures = [failure for worker in workers if (failure := worker.failure()) is not None]
    if not failures:
        return None
    first, *others = sorted(failures, key=lambda failure: failure.order)
    return replace(first, at_the_same_time=tuple(map(str, others)))


def end(
    workers: Sequence[TaskProcess],
    selector: selectors.BaseSelector,
    grace_seconds: float,
    stops: Sequence[int],
) -> None:
    """Tells the processes to end, and waits for it as long as it is given."""
    for worker in workers:
        if not worker.has_ended():
            worker.signal(signal.SIGTERM)
    _wait(workers, selector, grace_seconds, stops, 2)


def _wait(
    workers: Sequence[TaskProcess],
    selector: selectors.BaseSelector,
    seconds: float,
    stops: Sequence[int],
    enough: int,
) -> None:
    """Waits until all have ended, but not for long, and not after that many stops."""
    deadline = time.monotonic() + seconds
    while not all_ended(workers) and time.monotonic() < deadline and len(stops) < enough:
        pump(selector)
