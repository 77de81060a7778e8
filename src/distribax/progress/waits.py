"""Work that may take long, and the thread that shows it if it does."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from distribax.progress.modes import ProgressMode, decide

SHOW_AFTER_SECONDS: Final = 1.0
"""Shorter work is not shown."""
_REDRAW_SECONDS: Final = 0.25
_ERASE_SECONDS: Final = 2.0
"""How long the work waits until what is shown of it is gone: a terminal may be stopped."""
_CLEAR_LINE: Final = "\r\x1b[2K"
_WIDTH: Final = 100

_logger = logging.getLogger(__name__)


class Wait:
    """Work that goes on.

    Args:
        text: What it is, such as "compiling train_step".

    Attributes:
        detail: What it waits for at the moment; may be changed while it goes on.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.detail = ""
        self.started = time.monotonic()
        self.is_told = False

    def describe(self) -> str:
        """Returns the work in one line, without the time that it takes."""
        return f"{self.text}: {self.detail}" if self.detail else self.text


class _Board:
    """The work that goes on in all threads; a thread shows the newest as long as there is any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: list[Wait] = []
        self._thread: threading.Thread | None = None

    def add(self, wait: Wait) -> None:
        """Adds work, which is shown if it takes long."""
        with self._changed:
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._show, name="distribax-progress", daemon=True
                )
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        """Removes work that has ended, and what is shown of it."""
        with self._changed:
            self._waits.remove(wait)
            thread = self._thread if not self._waits else None
            if thread is not None:
                self._thread = None
                self._changed.notify_all()
        if thread is not None:
            thread.join(_ERASE_SECONDS)

    def _show(self) -> None:
        line = ""
        pause = SHOW_AFTER_SECONDS
        while (late := self._wait_for_late(pause)) is not None:
            pause = _REDRAW_SECONDS
            # Written without the lock: a terminal that is stopped does not stop the work.
            line = _redraw(late, line)
        if line:
            _draw(_CLEAR_LINE)

    def _wait_for_late(self, seconds: float) -> list[Wait] | None:
        """Returns, after a while, what has taken long; None if there is nothing more to show."""
        this = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is not this, seconds)
            if self._thread is not this:
                return None
            now = time.monotonic()
            return [each for each in self._waits if now - each.started >= SHOW_AFTER_SECONDS]


def _redraw(late: Sequence[Wait], line: str) -> str:
    """Shows the newest work that takes long; returns the line that is now in the terminal."""
    mode = decide()
    for wait in late if mode is ProgressMode.LOG else ():
        if not wait.is_told:
            wait.is_told = True
            _logger.info("%s ...", wait.describe())
    if late and mode is ProgressMode.LIVE:
        seconds = time.monotonic() - late[-1].started
        drawn = f"{late[-1].describe()[:_WIDTH]}, {seconds:.0f} s"
    else:
        drawn = ""
    if drawn != line:
        _draw(_CLEAR_LINE + drawn)
    return drawn


def _draw(text: str) -> None:
    # The terminal may be gone: that is no reason to end the work.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


_board = _Board()


@contextlib.contextmanager
def show(text: str) -> Iterator[Wait]:
    """Shows that work goes on in the block, if it takes longer than a second.

    If nobody would see it, this does nothing; otherwise it starts a thread, which is cheap for
    what takes milliseconds, but nothing for each step.

    Args:
        text: What the work is, such as "compiling train_step".

    Yields:
        The work, whose `detail` may be changed.
    """
    wait = Wait(text)
    mode = decide()
    is_seen = mode is ProgressMode.LIVE or (
        mode is ProgressMode.LOG and _logger.isEnabledFor(logging.INFO)
    )
    if not is_seen:
        yield wait
        return
    _board.add(wait)
    try:
        yield wait
    finally:
        _board.remove(wait)
