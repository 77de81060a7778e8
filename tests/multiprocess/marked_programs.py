"""Programs of a test, marked so that whatever they leave behind is found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.environment import inherited
from tests.forked import ForkedProcess, start_forked

_MARK = "DISTRIBAX_TEST_MARK"
_RAY_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS")
_WAIT_SECONDS = 300.0


class Program:
    """A running Python program that tells things as lines of JSON on its standard output."""

    def __init__(self, process: subprocess.Popen[str] | ForkedProcess) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> Any:
        """Waits for the next thing that the program tells; the test's timeout is the bound."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended: {self.process.communicate()[1]}"
        return json.loads(line)

    def say(self, text: str = "") -> None:
        """Writes a line to the program's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, str, str]:
        """Waits for the end of the program; returns its exit code and what it has written."""
        out, err = self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out, err


class MarkedPrograms:
    """Starts programs with a mark in their environment, which all that they start inherits."""

    def __init__(self) -> None:
        # Short, because Ray makes sockets in it.
        self.folder = Path(tempfile.mkdtemp(prefix="dx-", dir="/tmp"))
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._programs: list[Program] = []

    def start(self, program: str, *arguments: str, **environment: str) -> Program:
        """Starts a program's text with some arguments and environment variables."""
        return self.start_command(["-c", textwrap.dedent(program), *arguments], **environment)

    def fork(self, program: str, *arguments: str, **environment: str) -> Program:
        """Starts a program's text in a process that has imported JAX and distribax.

        It has no mark itself, and distribax has read its time limits; but what it starts is marked.
        """
        variables = self._make_environment() | environment
        process = start_forked(textwrap.dedent(program), variables, arguments=arguments)
        self._programs.append(Program(process))
        return self._programs[-1]

    def start_command(self, command: Sequence[str], **environment: str) -> Program:
        """Starts Python with some arguments and environment variables."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env=self._make_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._programs.append(Program(process))
        return self._programs[-1]

    def _make_environment(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        own = {name: value, "TMPDIR": str(self.folder), "HOME": str(self.folder)}
        return inherited(*_RAY_VARIABLES) | own

    def processes(self) -> dict[int, str]:
        """Returns the command lines of the live processes with the mark, by process id."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._is_marked(folder):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")[:200]
        return found

    def _is_marked(self, folder: Path) -> bool:
        """Tells whether a process of /proc has the mark, or a file in the folder.

        Ray's processes change their title, which can overwrite the environment.
        """
        if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
            return True
        return any(os.readlink(file).startswith(str(self.folder)) for file in folder.glob("fd/*"))

    def left(self) -> list[str]:
        """Returns the processes and files that are left, once none is or some seconds are over."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while left := [*map(str, self.folder.iterdir()), *self.processes().values()]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return left

    def close(self) -> None:
        """Kills what is left."""
        for program in self._programs:
            if program.process.poll() is None:
                program.process.kill()
            program.process.communicate()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def marked_programs() -> Iterator[MarkedPrograms]:
    """Yields a starter of programs, and ends them."""
    programs = MarkedPrograms()
    try:
        yield programs
    finally:
        programs.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, for a bounded time."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
