"""Starting `distribax run` as a process, and looking at what it and its workers have done."""

from __future__ import annotations

import contextlib
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.forked import ForkedProcess, start_forked

Start = Callable[..., ForkedProcess]


@contextlib.contextmanager
def launchers(folder: Path) -> Iterator[Start]:
    """Gives a function that starts the launcher with a script; what is left is killed."""
    started: list[ForkedProcess] = []

    def start(
        script: str, *options: str, arguments: tuple[str, ...] = (), **environment: str
    ) -> ForkedProcess:
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        command = ["run", *options, str(path), *arguments]
        program = f"import sys\nfrom distribax.cli import main\nsys.exit(main({command!r}))"
        launcher = start_forked(program, os.environ | environment)
        started.append(launcher)
        return launcher

    try:
        yield start
    finally:
        for launcher in started:
            if launcher.poll() is None:
                launcher.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(10)
                launcher.kill()
            launcher.communicate()


def finish(launcher: ForkedProcess) -> tuple[int, str, str]:
    """Waits for the launcher; returns its exit code and what it has written."""
    out, err = launcher.communicate()
    return launcher.returncode, out, err


def is_gone(pid: int) -> bool:
    """Returns whether the process has ended, waiting for it a while; a zombie has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            # Its parent is told when the last thread is gone; the first one may be gone before.
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except OSError:
            return True
        if state == "Z" and threads == 1:
            return True
        time.sleep(0.02)
    return False


def lines_of(out: str, worker: int) -> list[str]:
    """Returns the lines that a worker has written."""
    prefix = f"[worker {worker}] "
    return [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
