"""Shows long work: a progress bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TextIO, TypeAlias, get_args

from typing_extensions import override

from distribax import progress
from distribax.coordinator.status import CoordinatorStatus

if TYPE_CHECKING:
    from rich.progress import Progress

LIVE_AFTER_SECONDS: Final = 1.0
"""Shorter work is not shown."""
LINE_SECONDS: Final = 10.0

ViewChoice: TypeAlias = Literal["auto", "live", "lines", "none"]


class View:
    """Shows how far the work is; this one shows nothing."""

    def update(self, status: CoordinatorStatus) -> None:
        """Shows a new status."""

    def stop(self) -> None:
        """Removes the view until there is long work again."""


def make_view(
    choice: ViewChoice, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> View:
    """Returns the view that was chosen; "auto" is "live" in a terminal and "lines" elsewhere.

    Raises:
        ValueError: If there is no such view.
    """
    if choice not in get_args(ViewChoice):
        names = ", ".join(map(repr, get_args(ViewChoice)))
        raise ValueError(f"ClusterCoordinator: view={choice!r} is not known. Expected {names}.")
    stream = sys.stderr if stream is None else stream
    if choice == "auto":
        is_off = progress.get_progress() == "off"
        choice = "none" if is_off else "live" if stream.isatty() else "lines"
    if choice == "none":
        return View()
    return Live(stream, clock) if choice == "live" else Lines(stream, clock)


class Lines(View):
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


class Live(View):
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
