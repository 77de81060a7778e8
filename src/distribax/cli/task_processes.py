"""The processes of one machine: their output, their failures, and their end."""

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
from typing import IO, Final, Self

from typing_extensions import override

from distribax.cluster.environment_variables import read_seconds
from distribax.types import PEER_LOST_EXIT_CODE, RESTARTABLE_EXIT_CODE

_CAUSE_SECONDS: Final = read_seconds("DISTRIBAX_RUN_CAUSE_SECONDS", 2.0)
"""How long to wait for the failure that has caused another one."""
_WORKER_MAIN: Final = Path(__file__).with_name("worker_main.py")
_POLL_SECONDS: Final = 0.05
_TAIL_LINES: Final = 200
_SHORT_TAIL_LINES: Final = 20
_LONGEST_LINE: Final = 65536
# A carriage return ends a line, too: progress bars use it. At the end, a "\n" may follow.
_LINE_END: Final = re.compile(rb"\r?\n|\r(?=[^\n])")
_TRACEBACK: Final = "Traceback (most recent call last):"
# What libraries below JAX write although all is well, and that no setting turns off.
_NOISE: Final = re.compile(
    # Threads of Gloo write piece by piece at the same time, so that their lines may be mixed.
    r"(?=.*(\[Gloo\] Rank|peer ranks))(\[Gloo\] Rank|is connected to|peer ranks\.|"
    r"Expected number of connected peer ranks is :|[ \d])+$|"
    r"[IWE]\d{4} \S+ +\d+ preemption_(notifier|sync_manager)\.cc:\d+\] "
)


class FailureKind(enum.IntEnum):
    """What has happened to a process; the likeliest cause of other failures has the lowest value.

    When a process dies, its connections close, and within milliseconds the other workers raise an
    exception, or JAX aborts them.
    """

    DIED = 0  # It has ended without a report.
    REPORTED = 1  # It has reported an exception or sys.exit to the launcher.
    ABORTED = 2  # SIGABRT: JAX ends a process in this way if another one is lost.
    LOST_PEER = 3  # It cannot continue without another worker, whose end is the cause.


@dataclass(frozen=True)
class TaskFailure:
    """How a process has failed.

    Attributes:
        name: The name of the process.
        exit_code: Its exit code.
        reason: The exit code or signal, for users.
        tail: The last lines that it has written to its standard error.
        kind: What has happened.
        nanoseconds: When it has reported the failure, by the clock of the machine; 0 if it has not.
        others: Other failures that were noticed at the same time.
    """

    name: str
    exit_code: int
    reason: str
    tail: tuple[str, ...]
    kind: FailureKind
    nanoseconds: int = 0
    others: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        return f"{self.name} failed ({self.reason})"


@dataclass
class _Stream:
    """An output of a process, which is passed on line by line.

    Attributes:
        source: Where the process writes.
        targets: Where its lines go, and what is written before each.
        tail: The last lines.
        rest: What was read of a line that has not ended.
    """

    source: IO[bytes]
    targets: list[tuple[IO[str], str]]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    rest: bytes = b""

    def pump(self) -> bool:
        """Passes on what can be read without waiting; returns whether more can follow."""
        while True:
            try:
                data = os.read(self.source.fileno(), 65536)
            except BlockingIOError:
                return True
            self._pass_on(data)
            if not data:
                return False

    def _pass_on(self, data: bytes) -> None:
        *lines, self.rest = _LINE_END.split(self.rest + data)
        if self.rest and (not data or len(self.rest) > _LONGEST_LINE):
            lines.append(self.rest.rstrip(b"\r"))
            self.rest = b""
        for line in lines:
            text = line.decode(errors="replace")
            if _NOISE.match(text):
                continue
            self.tail.append(text)
            for file, prefix in self.targets:
                file.write(f"{prefix}{text}\n")
        for file, _ in self.targets if lines else ():
            file.flush()


@dataclass(frozen=True)
class OutputTarget:
    """Where the output of processes goes.

    Attributes:
        folder: The folder with one log file per process, if they are to have one.
        is_shown: Whether the output is shown in the terminal.
    """

    folder: Path | None = None
    is_shown: bool = True

    def open_log(self, name: str) -> IO[str] | None:
        """Opens the log file of the process with that name; it is continued if it exists."""
        if self.folder is None:
            return None
        return (self.folder / f"{name.replace(' ', '_')}.log").open("a", errors="replace")


class TaskProcess:
    """One process, with a process group of its own.

    Args:
        name: Its name for users, such as "worker 0"; its lines of output begin with it.
        command: The script and its arguments, or "-m", a module and its arguments.
        environment: All its environment variables.
        target: Where its output goes.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        target: OutputTarget,
    ) -> None:
        self.name = name
        self._log = target.open_log(name)
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
                    # Ctrl-C only reaches the launcher, and the children of the process end with it.
                    start_new_session=True,
                )
            except BaseException:
                own.close()
                if self._log is not None:
                    self._log.close()
                raise
        own.setblocking(False)
        self.connection = own
        assert self.process.stdout is not None and self.process.stderr is not None
        logs: list[tuple[IO[str], str]] = [] if self._log is None else [(self._log, "")]
        self.out = _Stream(self.process.stdout, logs.copy())
        self.err = _Stream(self.process.stderr, logs.copy())
        if target.is_shown:
            self.out.targets.append((sys.stdout, f"[{name}] "))
            self.err.targets.append((sys.stderr, f"[{name}] "))
        for stream in (self.out, self.err):
            os.set_blocking(stream.source.fileno(), False)
        self._reported = b""
        self._is_disconnected = False

    def is_ending(self) -> bool:
        """Returns whether the process is about to end: it has disconnected without a report."""
        return self._is_disconnected and not self._reported and not self.has_ended()

    def has_ended(self) -> bool:
        """Returns whether the process has ended; if so, kills the processes it has started."""
        if self.process.returncode is None and self.process.poll() is not None:
            self.send_signal(signal.SIGKILL)
        return self.process.returncode is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and to the processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def find_failure(self) -> TaskFailure | None:
        """Returns how the process has failed, if it has reported a failure or has ended."""
        with contextlib.suppress(OSError):
            received = self.connection.recv(64)
            self._reported += received
            self._is_disconnected = not received
        if self._reported.endswith(b"\n"):
            code, nanoseconds = map(int, self._reported.split())
            return self._make_failure(code, FailureKind.REPORTED, nanoseconds=nanoseconds)
        if not self.has_ended() or self.process.returncode == 0:
            return None
        code = self.process.returncode
        if code > 0:
            return self._make_failure(code, FailureKind.DIED)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        kind = FailureKind.ABORTED if -code == signal.SIGABRT else FailureKind.DIED
        return self._make_failure(128 - code, kind, name)

    def _make_failure(
        self, code: int, kind: FailureKind, reason: str = "", nanoseconds: int = 0
    ) -> TaskFailure:
        self.err.pump()
        reason = reason or f"exit code {code}"
        if code == PEER_LOST_EXIT_CODE:
            kind, reason = FailureKind.LOST_PEER, f"{reason}: it has lost another worker"
        tail = _select_last_lines(self.err.tail)
        return TaskFailure(self.name, code, reason, tail, kind, nanoseconds)

    def close(self) -> None:
        """Waits for the process, which has ended or was killed, and passes on its last output."""
        self.process.wait()
        for stream in (self.out, self.err):
            with contextlib.suppress(OSError, ValueError):
                stream.pump()
            stream.source.close()
        self.connection.close()
        if self._log is not None:
            self._log.close()


def _select_last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the traceback among the lines and everything after it, or the last few lines."""
    kept = tuple(lines)
    first = next((i for i, line in enumerate(kept) if line.strip() == _TRACEBACK), None)
    return kept[-_SHORT_TAIL_LINES:] if first is None else kept[first:]


class ProcessSet:
    """Processes whose output is passed on, and that end together.

    It is a context manager: at the end, processes that still run are killed.

    Args:
        stops: Signal handlers append signals to this list. The first one ends the processes, the
            second one kills them.
    """

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = stops
        self._processes: list[TaskProcess] = []
        self._selector = selectors.DefaultSelector()

    def add(self, process: TaskProcess) -> None:
        """Adds a process, whose output `pump` passes on."""
        self._processes.append(process)
        for stream in (process.out, process.err):
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def remove(self, process: TaskProcess) -> None:
        """Removes a process that has ended."""
        for stream in (process.out, process.err):
            with contextlib.suppress(KeyError):  # It has been read to its end.
                self._selector.unregister(stream.source)
        self._processes.remove(process)
        process.close()

    def have_all_ended(self) -> bool:
        """Returns whether no process is running."""
        return all(process.has_ended() for process in self._processes)

    def pump(self) -> None:
        """Passes on what the processes have written; waits for it for a moment."""
        if not self._selector.get_map():
            time.sleep(_POLL_SECONDS)
            return
        for key, _ in self._selector.select(_POLL_SECONDS):
            if not key.data.pump():
                self._selector.unregister(key.fileobj)

    def find_first_failure(self) -> TaskFailure | None:
        """Returns the failure; the likeliest cause if there are several."""
        failures = [failure for each in self._processes if (failure := each.find_failure())]
        if not failures:
            return None
        first, *others = sorted(failures, key=lambda each: (each.kind, each.nanoseconds))
        return replace(first, others=tuple(map(str, others)))

    def find_cause(self, failure: TaskFailure) -> TaskFailure:
        """Waits a moment for the failure that has caused this one; returns the likeliest cause."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while self._may_be_consequence(failure) and not self._stops:
            # The connections of a process close before the system reports its end.
            if time.monotonic() >= deadline:
                break
            self.pump()
            failure = self.find_first_failure() or failure
        return failure

    def _may_be_consequence(self, failure: TaskFailure) -> bool:
        if failure.kind is FailureKind.DIED:
            return False
        is_lost = failure.kind is FailureKind.LOST_PEER
        return is_lost or any(process.is_ending() for process in self._processes)

    def wait(self, seconds: float, max_stops: int) -> None:
        """Waits until all processes have ended, the time is over, or so many signals have come."""
        deadline = time.monotonic() + seconds
        while not self.have_all_ended() and time.monotonic() < deadline:
            if len(self._stops) >= max_stops:
                return
            self.pump()

    def end(self, grace_seconds: float) -> None:
        """Tells the processes to end, and waits until they have, or for `grace_seconds`."""
        for process in self._processes:
            if not process.has_ended():
                process.send_signal(signal.SIGTERM)
        self.wait(grace_seconds, max_stops=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # All are killed before the first is waited for; else they report its end as a failure.
        for process in self._processes:
            if not process.has_ended():
                process.send_signal(signal.SIGKILL)
        self._selector.close()
        for process in self._processes:
            process.close()


def run_workers(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    grace_seconds: float,
    stops: Sequence[int],
    target: OutputTarget,
) -> TaskFailure | None:
    """Runs the command in all workers until all have ended, one has failed, or a signal comes.

    Workers that are still running then are told to end (SIGTERM), and killed if they have not ended
    after `grace_seconds`: JAX takes SIGTERM for the notice of a preemption and runs on. If a worker
    has ended in order to be started again, the others get that time before they are told.

    Args:
        command: The script and its arguments, or "-m", a module and its arguments.
        environments: The environment variables of each worker, by its number.
        grace_seconds: How long a worker may take to end.
        stops: Signal handlers append signals to this list. The first one ends the workers, the
            second one kills them.
        target: Where the output of the workers goes.

    Returns:
        The failure that has ended the workers, if any.
    """
    with ProcessSet(stops) as workers:
        for worker_id, environment in environments.items():
            workers.add(TaskProcess(f"worker {worker_id}", command, environment, target))
        failure: TaskFailure | None = None
        while failure is None and not stops and not workers.have_all_ended():
            workers.pump()
            failure = workers.find_first_failure()
        if failure is None and not stops:
            # The last ones may have ended since the last check.
            failure = workers.find_first_failure()
        if failure is not None:
            failure = workers.find_cause(failure)
            if failure.exit_code == RESTARTABLE_EXIT_CODE:
                # The others are about to end in the same way.
                workers.wait(grace_seconds, max_stops=1)
        workers.end(grace_seconds)
    return failure
