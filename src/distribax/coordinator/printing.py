"""What functions print on workers, on its way to the terminal of the coordinator's program."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, TextIO

MOST_CHARACTERS: Final = 100_000
"""How much a worker keeps until it is taken; the rest is in its log only."""


class PrintCapture:
    """Takes the place of a worker's `sys.stdout`: keeps what is written, and writes it to the log.

    Threads of data sets may write at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[str] = []
        self._room = MOST_CHARACTERS
        self._num_left_out = 0
        self._log: TextIO = sys.stdout

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Lets everything that is printed inside come here."""
        self._log = sys.stdout
        with contextlib.redirect_stdout(self):
            yield

    def write(self, text: str) -> int:
        """Keeps some text, as long as there is room."""
        with self._lock:
            kept = text[: self._room]
            if kept:
                self._kept.append(kept)
            self._room -= len(kept)
            self._num_left_out += len(text) - len(kept)
        return self._log.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Keeps several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # `encoding`, `fileno`, `buffer`, ...: what goes there is in the log only.
        return getattr(self._log, name)

    def take(self, *, whole_lines: bool = False) -> str:
        """Returns what was written since the last time: all, or the lines that have ended."""
        with self._lock:
            text, num_left_out = "".join(self._kept), self._num_left_out
            end = text.rfind("\n") + 1 if whole_lines and not num_left_out else len(text)
            self._kept = [text[end:]] if end < len(text) else []
            self._room = MOST_CHARACTERS - (len(text) - end)
            self._num_left_out = 0
        if not num_left_out:
            return text[:end]
        return f"{text}\n... and {num_left_out} more characters, which are in the worker's log\n"


def show_printed(worker_index: int, text: str) -> None:
    """Prints what a worker has printed, with its name before each line."""
    lines = "".join(f"worker {worker_index}: {line}\n" for line in text.splitlines())
    # The program's output may have been closed: that is no reason to end its functions.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.write(lines)
        sys.stdout.flush()
