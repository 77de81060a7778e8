"""A parameter server and workers as processes, some of which are killed or stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.parameter_server import (
    AssignAdd,
    ParameterClient,
    ParameterServerUnreachableError,
    ParametersLostError,
)
from tests.forked import ForkedProcess, start_forked
from tests.multiprocess.parameter_processes import BOTH, LEFT, client, locate

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(__file__).with_name("parameter_processes.py")
ONES = np.ones(LEFT.shape, np.float32)
SECONDS = 300.0


class Processes:
    """The processes of one test, and clients here; all are gone when it ends."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def start(self, role: str, *args: str) -> ForkedProcess:
        """Starts a process."""
        process = start_forked(
            PROGRAM.read_text(),
            os.environ,
            err=self.folder / "err",
            name=str(PROGRAM),
            arguments=[role, str(self.folder), *args],
        )
        self._stack.callback(_end, process)
        return process

    def server(self, interval: str = "") -> tuple[ForkedProcess, dict[str, Any]]:
        """Starts a server; returns it and the status that it begins with."""
        process = self.start("server", interval)
        return process, json.loads(_line(process))

    def client(self, name: str = "test", **settings: float) -> ParameterClient:
        """Returns a client in the test's own process, which has created the values."""
        made = client(self.folder, name, **settings)
        self._stack.callback(made.close)
        for spec in BOTH:
            made.create(spec, 0 * ONES)
        return made


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with contextlib.ExitStack() as stack:
        yield Processes(tmp_path, stack)


def _line(process: ForkedProcess) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait(SECONDS)}"
    return line


def _go(*started: ForkedProcess) -> None:
    """Lets processes begin together: one that begins alone can be done before the next is ready."""
    for process in started:
        assert _line(process) == "ready\n"
    for process in started:
        _say(process, "go")


def _say(process: ForkedProcess, word: str) -> None:
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def _end(process: ForkedProcess) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _stop(process: ForkedProcess) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + SECONDS
    while "T (stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_updates_of_several_workers_are_each_applied_once(processes: Processes) -> None:
    server, _ = processes.server()
    mine = processes.client()
    adders = [processes.start("adder", "60") for _ in range(2)]
    _go(*adders)
    results = [json.loads(_line(adder)) for adder in adders]
    assert [result["torn"] for result in results] == [0, 0]
    for value in mine.pull(BOTH):
        assert np.all(value == 120)
    assert mine.status(0)["counts"] == {"assign_add": 2 * 120}
    # It ends when it is told to, and leaves no socket behind.
    name = locate(processes.folder).unix
    assert name in Path("/proc/net/unix").read_text()
    server.stdin.close()
    assert server.wait() == 0
    assert name not in Path("/proc/net/unix").read_text()


def test_what_readers_hold_does_not_change_while_others_write(processes: Processes) -> None:
    """Real processes at the same time: what is copied is protected by more than the GIL."""
    processes.server()
    processes.client()
    holders = [processes.start("holder", "3") for _ in range(2)]
    adders = [processes.start("adder", "100000") for _ in range(2)]
    _go(*adders, *holders)
    for holder in holders:
        result = json.loads(_line(holder))
        assert result["changed"] == 0
        assert result["pulls"] > 20


def test_a_killed_server_loses_only_what_came_after_its_snapshot(processes: Processes) -> None:
    server, _ = processes.server("0.02")
    mine = processes.client()
    # They add until the last kill is over: a client that has left is not told what was lost.
    adders = [processes.start("adder") for _ in range(2)]
    _go(*adders)
    for number in range(1, 4):
        _until_saved(mine, 40 * number)
        server.kill()
        server.wait()
        server, status = processes.server("0.02")
        # A kill in the middle of writing a snapshot leaves the one before.
        assert status["restored"] and not status["damaged"]
    for adder in adders:
        _say(adder, "enough")
    results = [json.loads(_line(adder)) for adder in adders]
    assert [result["torn"] for result in results] == [0, 0]
    added = [result["added"] for result in results]
    kept = sum(added) - sum(sum(result["lost"]) for result in results)
    for value in mine.pull(BOTH):
        assert np.all(value == kept)
    # What was applied was applied once, and what is not there was reported.
    assert mine.status(0)["counts"] == {"assign_add": 2 * kept}


def _until_saved(mine: ParameterClient, count: int) -> None:
    """Waits until so many updates have been applied, and there is a snapshot."""
    deadline = time.monotonic() + SECONDS
    while mine.pull([LEFT])[0][0, 0] < count or mine.status(0)["snapshot"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_killed_server_without_snapshots_is_an_error(processes: Processes) -> None:
    server, _ = processes.server()
    mine = processes.client()
    # Its memory is still mapped here, but not taken for its value.
    mine.pull(BOTH)
    server.kill()
    server.wait()
    (processes.folder / "endpoint").unlink()
    processes.server()
    with pytest.raises(ParametersLostError, match="no snapshot"):
        mine.pull(BOTH)
    for spec in BOTH:
        assert mine.create(spec, ONES)
    assert np.all(mine.pull(BOTH)[1] == 1)


def test_a_stopped_server_is_given_up_in_time_and_goes_on_later(processes: Processes) -> None:
    server, _ = processes.server()
    mine = processes.client(timeout=2.0)
    _stop(server)
    mine.push({0: [AssignAdd("l", ONES)]})
    with pytest.raises(ParameterServerUnreachableError, match="server 0"):
        mine.flush()
    server.send_signal(signal.SIGCONT)
    mine.flush()
    assert np.all(mine.pull([LEFT])[0] == 1)


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_reader_that_is_stopped_or_killed_holds_up_nobody(
    processes: Processes, sign: signal.Signals
) -> None:
    processes.server()
    mine = processes.client()
    for _ in range(2):
        reader = processes.start("reader")
        assert _line(reader) == "ready\n"
        reader.send_signal(sign)
        mine.push({0: [AssignAdd("l", ONES)]})
    assert np.all(mine.pull([LEFT])[0] == 2)
