"""Python processes that start in milliseconds: forks of a process that has imported JAX."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from tests import process_forks

_LONGEST_ANSWER = 1 << 12

_started: set[ForkedProcess] = set()
"""Processes whose end nobody has seen."""


class ForkedProcess:
    """A fork of a server, with the most needed methods of `subprocess.Popen`.

    Args:
        pid: Its process id.
        pidfd: A descriptor of the process.
        server: What its exit code comes through; the server kills the process when it is closed.
        stdin: What it reads from its standard input.
        stdout: What it writes to its standard output, if that is not a file.
        stderr: What it writes to its standard error, if that is not a file.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        server: socket.socket,
        stdin: TextIO,
        stdout: TextIO | None,
        stderr: TextIO | None,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._pidfd = pidfd
        self._server = server
        _started.add(self)

    def poll(self) -> int | None:
        """Returns the exit code, or None if the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code when the process has ended, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It still runs after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            code = self._server.recv(16)
            assert code, "the server of forks has died"
            self.returncode = int(code)
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
            self._server.close()
            os.close(self._pidfd)
            _started.remove(self)
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Closes its input and waits for its end; returns what it has written and nobody read."""
        assert self.stdout is not None and self.stderr is not None
        if self.stdout.closed:
            return "", ""
        self.stdin.close()
        # Both at the same time: a process whose output nobody reads waits.
        with ThreadPoolExecutor(1) as reader, self.stdout, self.stderr:
            err = reader.submit(self.stderr.read)
            out = self.stdout.read()
            self.wait()
            return out, err.result()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        if self.poll() is None:
            # It may have ended since, before its exit code has come here.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Asks the process to end, if it has not."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process, if it has not ended."""
        self.send_signal(signal.SIGKILL)


def start_forked(
    source: str,
    environment: Mapping[str, str],
    *,
    out: Path | None = None,
    err: Path | None = None,
    name: str = "<string>",
    arguments: Sequence[str] = (),
    number: int = 0,
) -> ForkedProcess:
    """Starts a process that runs a program.

    If it needs variables that are read by imports, start a fresh Python instead.

    Args:
        source: The program.
        environment: All of its environment variables.
        out: The file for its standard output, by default a pipe.
        err: The file for its standard error, by default a pipe.
        name: The name of the program's file, for tracebacks.
        arguments: What the program finds in `sys.argv` after its name.
        number: Which of several processes of a cluster this is.

    Returns:
        The process, which is running.
    """
    request = {
        "source": source,
        "arguments": [name, *arguments],
        "environment": dict(environment),
        "folder": os.getcwd(),
        "descriptors": [0, 1, 2],
    }
    for_in, stdin = os.pipe()
    stdout, for_out = _open(out)
    stderr, for_err = _open(err)
    given = [for_in, for_out, for_err]
    server = process_forks.connect(number)
    socket.send_fds(server, [json.dumps(request).encode()], given)
    for descriptor in given:
        os.close(descriptor)
    answer, descriptors, _, _ = socket.recv_fds(server, _LONGEST_ANSWER, 1)
    assert answer.isdigit(), answer.decode() or "the server of forks has died"
    return ForkedProcess(int(answer), descriptors[0], server, open(stdin, "w"), stdout, stderr)


def _open(path: Path | None) -> tuple[TextIO | None, int]:
    """Returns what to read from, and a descriptor for the process to write to."""
    if path is not None:
        return None, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    ours, theirs = os.pipe()
    return open(ours), theirs


def list_running() -> list[int]:
    """Returns the process ids of the processes that this one has started and that still run."""
    return [process.pid for process in [*_started] if process.poll() is None]
