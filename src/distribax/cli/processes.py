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

_WORKER_MAIN: Final = Path(__file__).with_name("worker_main.py")
_POLL_SECONDS: Final = 0.05
_TAIL_LINES: Final = 200
_SHORT_TAIL_LINES: Final = 20
_LONGEST_LINE: Final = 65536
# A carriage return ends a line too, as progress bars use it; at the end, a "\n" may follow.
_LINE_END: Final = re.compile(rb"\r?\n|\r(?=[^\n])")
_TRACEBACK: Final = "Traceback (most recent call last):"


class _Kind(enum.IntEnum):
    """What a failure is, the likeliest cause of others first.

    When a process dies, its connections close, and within milliseconds the other workers raise an
    exception, or JAX aborts them.
    """

    DIED = 0
    SAID_SO = 1  # An exception or sys.exit, of which the worker has told the launcher.
    ABORTED = 2


@dataclass(frozen=True)
class Failure:
    """How a worker failed: its exit code, and the end of what it wrote to stderr."""

    worker_id: int
    exit_code: int
    how: str
    tail: tuple[str, ...]
    order: tuple[int, int]
    at_the_same_time: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"worker {self.worker_id} failed ({self.how})"


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


class _Worker:
    """One process, in a group of processes of its own."""

    def __init__(self, worker_id: int, command: Sequence[str], environment: Mapping[str, str]):
        self.worker_id = worker_id
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
        prefix = f"[worker {worker_id}] "
        self.out = _Stream(self.process.stdout, sys.stdout, prefix)
        self.err = _Stream(self.process.stderr, sys.stderr, prefix)
        for stream in (self.out, self.err):
            os.set_blocking(stream.source.fileno(), False)
        self._reported = b""

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
            self._reported += self.connection.recv(64)
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
        return Failure(self.worker_id, code, how, _last_words(self.err.tail), order)

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
    `grace_seconds`: JAX takes SIGTERM for the notice of a preemption and runs on.

    Args:
        command: The script and its arguments.
        environments: The environment of each worker, by its number.
        grace_seconds: How long a worker may take to end.
        stops: Signal handlers add to this. Its first entry ends the workers, its second kills them.
    """
    workers: list[_Worker] = []
    failure: Failure | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for worker_id, environment in environments.items():
                workers.append(_Worker(worker_id, command, environment))
                _register(selector, workers[-1])
            while failure is None and not stops and not _all_ended(workers):
                _pump(selector)
                failure = _first_failure(workers)
            if failure is None and not stops:
                # All may have ended between two looks.
                failure = _first_failure(workers)
            _end(workers, selector, grace_seconds, stops)
    finally:
        # All before the first is waited for: else the others report its end as a new failure.
        for worker in workers:
            if not worker.has_ended():
                worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.close()
    return failure


def _all_ended(workers: Sequence[_Worker]) -> bool:
    return all(worker.has_ended() for worker in workers)


def _register(selector: selectors.BaseSelector, worker: _Worker) -> None:
    for stream in (worker.out, worker.err):
        selector.register(stream.source, selectors.EVENT_READ, stream)


def _pump(selector: selectors.BaseSelector) -> None:
    """Hands on what the workers have written; waits for it a moment."""
    if not selector.get_map():
        time.sleep(_POLL_SECONDS)
        return
    for key, _ in selector.select(_POLL_SECONDS):
        if not key.data.pump():
            selector.unregister(key.fileobj)


def _first_failure(workers: Sequence[_Worker]) -> Failure | None:
    """Returns the failure, or the likeliest cause if several came since the last look."""
    failures = [failure for worker in workers if (failure := worker.failure()) is not None]
    if not failures:
        return None
    first, *others = sorted(failures, key=lambda failure: failure.order)
    return replace(first, at_the_same_time=tuple(map(str, others)))


def _end(
    workers: Sequence[_Worker],
    selector: selectors.BaseSelector,
    grace_seconds: float,
    stops: Sequence[int],
) -> None:
    for worker in workers:
        if not worker.has_ended():
            worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while not _all_ended(workers) and time.monotonic() < deadline and len(stops) < 2:
        _pump(selector)
