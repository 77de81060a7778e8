"""The view of long work, in a terminal and elsewhere."""

from __future__ import annotations

import dataclasses
import io

import pytest

from distribax.coordinator import CoordinatorStatus, WorkerState, WorkerStatus
from distribax.coordinator.work_display import LineDisplay, LiveDisplay, WorkDisplay, make_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(finished: int, running: int = 1, failed: int = 0) -> CoordinatorStatus:
    worker = WorkerStatus(0, WorkerState.READY, 1.0, 1, "host", running, finished, 0, None)
    return CoordinatorStatus(
        scheduled=finished + failed + running,
        finished=finished,
        failed=failed,
        cancelled=0,
        retried=0,
        queued=0,
        running=running,
        rate=12.5,
        workers=(worker,),
    )


def test_the_display_that_fits() -> None:
    assert isinstance(make_display("auto", io.StringIO()), LineDisplay)
    assert isinstance(make_display("auto", Terminal()), LiveDisplay)
    for word in ("log", "lines"):
        assert isinstance(make_display(word, Terminal()), LineDisplay)
    assert isinstance(make_display("live", io.StringIO()), LiveDisplay)
    for word in ("off", "none"):
        assert type(make_display(word)) is WorkDisplay
    with pytest.raises(ValueError, match="view='loud' is not known"):
        make_display("loud")


def test_nothing_is_shown_of_short_work() -> None:
    for choice in ("live", "log", "off"):
        clock, stream = Clock(), Terminal()
        display = make_display(choice, stream, clock)
        for _ in range(5):
            clock.now += 0.2
            display.update(status(3))
            display.update(status(4, running=0))
        display.stop()
        assert stream.getvalue() == ""


def test_the_line_tells_of_servers() -> None:
    calm = dataclasses.replace(status(1), servers=({"restarts": 0}, {}))
    assert calm.line().endswith("workers 1/1, servers 2")
    restarted = dataclasses.replace(status(1), servers=({"restarts": 2},))
    assert restarted.line().endswith("servers 1 (2 restarts)")


def test_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    display = make_display("log", stream, clock)
    for second in range(25):
        clock.now = 100.0 + second
        display.update(status(second, failed=second // 20))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "distribax: 10/11 functions, 12.5/s, workers 1/1",
        "distribax: 20/22 functions, 12.5/s, 1 failed, workers 1/1",
    ]
    display.stop()
    display.update(status(30))
    assert len(stream.getvalue().splitlines()) == 2


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock, stream = Clock(), Terminal()
    display = make_display("live", stream, clock)
    display.update(status(10, running=10))
    clock.now += 2
    display.update(status(15, running=5))
    shown = stream.getvalue()
    assert "15/20 functions, 12.5/s" in shown and "workers 1/1" in shown
    # Half of what there was to do when it began.
    assert "50%" in shown
    display.stop()
    length = len(stream.getvalue())
    display.stop()
    display.update(status(20, running=0))
    assert len(stream.getvalue()) == length
