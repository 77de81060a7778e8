"""Progress: what takes long is shown in a terminal, logged elsewhere, and can be switched off."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import distribax as dx
from distribax import progress
from distribax.cluster import missing_tasks
from distribax.cluster.peers.meeting import ClusterTimeoutError, Member, meet
from distribax.coordinator.work_display import WorkDisplay, make_display
from distribax.progress import modes, waits
from distribax.testing.local_cluster import free_ports


class Terminal(io.StringIO):
    """A terminal that keeps what was drawn."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SHOW_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(waits, "_REDRAW_SECONDS", 0.01)
    monkeypatch.setattr(modes, "_chosen", None)
    monkeypatch.delenv(modes.PROGRESS_VARIABLE, raising=False)


def wait_for(drawn: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in drawn.getvalue():
        assert time.monotonic() < deadline, drawn.getvalue()
        time.sleep(0.005)


def test_terminal_shows_the_work_and_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.show("joining the cluster") as wait:
        wait.detail = "waiting for worker 1"
        wait_for(terminal, "joining the cluster: waiting for worker 1, 0 s")
        with progress.show("compiling step"):
            wait_for(terminal, "compiling step, 0 s")
    assert terminal.getvalue().endswith("\r\x1b[2K"), "nothing is left on the terminal"


def test_elsewhere_it_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "distribax.progress"), progress.show("saving x"):
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
    assert [record.getMessage() for record in caplog.records] == ["saving x ..."]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv(modes.PROGRESS_VARIABLE, "off")
    assert dx.get_progress() == "off"
    with progress.show("saving x"):
        time.sleep(0.05)
    dx.set_progress("live")
    with progress.show("saving y"):
        wait_for(terminal, "saving y")
    dx.set_progress("off")
    assert "saving x" not in terminal.getvalue()
    assert type(make_display("auto", terminal)) is WorkDisplay, "nor is a coordinator's work shown"
    with pytest.raises(ValueError, match=r"set_progress\(mode\)='loud' is not known"):
        dx.set_progress("loud")
    monkeypatch.setattr(modes, "_chosen", None)
    monkeypatch.setenv(modes.PROGRESS_VARIABLE, "loud")
    with pytest.raises(ValueError, match="DISTRIBAX_PROGRESS='loud' is not known"):
        dx.get_progress()
    monkeypatch.delenv(modes.PROGRESS_VARIABLE)
    monkeypatch.setattr(sys, "stderr", None)
    assert modes.decide() is progress.ProgressMode.LOG


def test_compiling_saving_and_restoring_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    v = dx.Variable(1.0)

    @dx.function
    def train_step() -> jax.Array:
        wait_for(terminal, "train_step, 0 s")
        return v + 1.0

    train_step()
    shown = terminal.getvalue()
    assert "compiling test_compiling" in shown
    train_step()
    assert terminal.getvalue() == shown, "only the first call compiles"
    checkpoint = dx.Checkpoint(v=v)

    class Slow:
        """Has a position that takes its time."""

        def get_state(self) -> dict[str, int]:
            wait_for(terminal, "saving /")
            return {}

        def set_state(self, state: object) -> None:
            wait_for(terminal, "restoring /")

    checkpoint.notes["slow"] = Slow()
    path = checkpoint.save(os.fspath(tmp_path / "ckpt"))
    checkpoint.restore(path)
    for doing in ("saving", "restoring"):
        # What is longer than a line is cut.
        assert f"{doing} {path}"[:60] in terminal.getvalue()


def test_joining_shows_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing_tasks, "REMIND_SECONDS", 1.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    first, second = free_ports(2)
    members = [Member("worker 0", "127.0.0.1", first), Member("worker 1", "127.0.0.1", second)]
    with pytest.raises(ClusterTimeoutError, match="worker 1"):
        meet(members, 0, 4.0, "cluster", 20.0)
    shown = f"joining the cluster: waiting for worker 1 (127.0.0.1:{second}), "
    assert shown in terminal.getvalue()
    # Where there is no terminal, the log has it now and then.
    assert f"waiting for worker 1 (127.0.0.1:{second}) to join, for at most" in caplog.text


def test_a_stopped_terminal_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S keeps a terminal from taking output; the work neither begins nor ends later."""
    is_writing, may_go_on = threading.Event(), threading.Event()

    class Stopped(Terminal):
        def write(self, text: str) -> int:
            is_writing.set()
            assert may_go_on.wait(60)
            return super().write(text)

    terminal = Stopped()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(waits, "_ERASE_SECONDS", 0.01)
    with progress.show("saving x"):
        assert is_writing.wait(60)
        (thread,) = [each for each in threading.enumerate() if "progress" in each.name]
        with progress.show("saving y"):
            pass
    assert terminal.getvalue() == "", "all work has ended before the terminal takes anything"
    may_go_on.set()
    thread.join()
    assert terminal.getvalue().endswith("\r\x1b[2K")
