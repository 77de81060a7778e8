"""Shows long work: a progress bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TextIO

from typing_extensions import override

from distribax.coordinator.status import CoordinatorStatus
from distribax.progress import ProgressMode, get_progress

if TYPE_CHECKING:
    from rich.progress import Progress

LIVE_AFTER_SECONDS: Final = 1.0
"""Shorter work is not shown."""
LINE_SECONDS: Final = 10.0

_EARLIER_WORDS: Final = {"lines": ProgressMode.LOG, "none": ProgressMode.OFF}
"""Words that `view` had before it had those of `dx.set_progress`."""


class WorkDisplay:
    """Shows how far the work is; this one shows nothing."""

    def update(self, status: CoordinatorStatus) -> None:
        """Shows a new status."""

    def stop(self) -> None:
        """Removes the display until there is long work again."""


def make_display(
    view: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> WorkDisplay:
    """Returns the display that was chosen; "auto" is "live" in a terminal and "log" elsewhere.

    Raises:
        ValueError: If there is no such mode.
    """
    try:
        mode = _EARLIER_WORDS.get(view) or ProgressMode(view)
    except ValueError:
        names = ", ".join(repr(str(each)) for each in ProgressMode)
        raise ValueError(
            f"ClusterCoordinator: view={view!r} is not known. Expected {names}."
        ) from None
    stream = sys.stderr if stream is None else stream
    if mode is ProgressMode.AUTO:
        is_off = get_progress() == ProgressMode.OFF
        shown = ProgressMode.LIVE if stream.isatty() else ProgressMode.LOG
        mode = ProgressMode.OFF if is_off else shown
    if mode is ProgressMode.OFF:
        return WorkDisplay()
    is_live = mode is ProgressMode.LIVE
    return LiveDisplay(stream, clock) if is_live else LineDisplay(stream, clock)


class LineDisplay(WorkDisplay):
    """Writes a line every ten seconds while there is work."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._last: float | None = None

    @override
    def update(self, status: CoordinatorStatus) -> None:
        now = self._clock()
        if not status.is_active:
            self._last = None
        elif self._last is None:
            self._last = now
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            self._stream.write(f"distribax: {status.line()}\n")
            self._stream.flush()

    @override
    def stop(self) -> None:
        self._last = None


class LiveDisplay(WorkDisplay):
    """Shows a progress bar while there is work."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._ended_before = 0
        self._bar: Progress | None = None

    @override
    def update(self, status: CoordinatorStatus) -> None:
        with self._lock:
            if not status.is_active:
                self._stop()
                return
            if self._since is None:
                self._since = self._clock()
                self._ended_before = status.num_ended
            if self._bar is None:
                if self._clock() - self._since < LIVE_AFTER_SECONDS:
                    return
                self._bar = _make_bar(self._stream)
                self._bar.start()
                self._bar.add_task("")
            self._bar.update(
                self._bar.task_ids[0],
                completed=status.num_ended - self._ended_before,
                total=status.scheduled - self._ended_before,
                description=status.line(),
            )
            self._bar.refresh()

    @override
    def stop(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._since = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
        # The dispatcher draws it; a thread of its own would have to be ended.
        auto_refresh=False,
    )
